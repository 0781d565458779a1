"""A layout as one page that works offline, and as a still picture for notebooks.

    layout.to_html("mask.html")      # zoom, pan, and ask any position why

The page carries the tile ranges, the mask as a program for the evaluator in mask.js, and its tables. Nothing is
loaded, and single tokens are computed in the browser when they appear.

The mask and its tiles are JSON, for a page that has no Python: what runtime/draw/mask.js reads. Nodes are `[operator,
arguments, payload, type]`, arguments before their users; parameters, sizes and extents are written in as literals.
Arrays are deflated, in base64.
"""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from frisket.dsl.errors import BudgetError, ParameterError
from frisket.dsl.explain import Wording
from frisket.dsl.ir import COORDINATES, SIZES, Expr, walk
from frisket.dsl.show import places
from frisket.dsl.types import FLOAT
from frisket.dsl.work import modular
from frisket.grammar.memo import memo
from frisket.lowering.analysis.tiling import Array, Tiling

from .pixels import DARK, LIGHT, Palette, of_tiles, png, save
from .terminal import start_of

Tables = Mapping[str, Array]
Pack = Callable[[Array], dict[str, str]]
TABLES = 8 << 20  # bytes of packed tables in one page
SAFE = 2**53 - 1  # the Ints a JavaScript number holds


def mask(layout: Tiling, pack: Pack | None = None) -> dict[str, Any]:
    """`text` with the `spans` of its clauses, and the `program` of the mask; `why` where a page cannot carry one.
    `pack` writes a table, `packed` where it is not given."""
    tables = {name: table.array for name, table in layout.tables.items()}
    scalars = {**layout.params, **dict(zip(SIZES, layout.sizes, strict=True))}
    try:
        text, sites = places(layout.shown, {**layout.params, **tables})
        # not simplified: a page explains the clauses that were written
        page_program = program(layout.written, scalars, tables, pack, layout.shown)
        size = sum(sum(map(len, table["array"].values())) for table in page_program["tables"].values())
        if size > TABLES:
            message = f"its tables take {size / (1 << 20):.1f} MiB, more than the {TABLES >> 20} a page carries"
            raise BudgetError(message)
    except BudgetError as error:
        return {"text": " ".join(repr(layout.shown).split()), "spans": {}, "program": None, "why": str(error)}
    index = {node: i for i, node in enumerate(walk(layout.written))}
    spans: dict[int, list[list[int]]] = {}
    for span, node in sites:
        if index.get(node) in page_program["clauses"]:  # an argument of a call need not be part of the mask
            spans.setdefault(index[node], []).append([span.start, span.stop])
    return {"text": text, "spans": spans, "program": page_program, "why": ""}


def program(
    root: Expr, scalars: Mapping[str, Any], tables: Tables, pack: Pack | None = None, shown: Expr | None = None
) -> dict[str, Any]:
    """`nodes`; the `tables` they read; and in `clauses` how each part that can decide a mask is worded."""
    index = {node: i for i, node in enumerate(walk(root))}
    read = sorted({n.name for n in index if n.op in ("lookup", "segment")})
    nodes = [_node(n, index, scalars, tables) for n in index]
    # where int64 may overflow, the page has to wrap as numpy does
    for n in modular(root):
        nodes[index[n]][0] = f"wrapping_{n.op}"
    wording = Wording(root if shown is None else shown)
    worded = {index[e]: wording(e) for e in _deciding(root)}
    return {
        "nodes": nodes,
        "tables": {name: {"shape": list(tables[name].shape), "array": (pack or packed)(tables[name])} for name in read},
        "clauses": {i: [text, [[name, index[x]] for name, x in parts]] for i, (text, parts) in worded.items()},
    }


def _node(e: Expr, index: Mapping[Expr, int], scalars: Mapping[str, Any], tables: Mapping[str, Array]) -> list[Any]:
    args, payload, op = [index[a] for a in e.args], e.name, e.op
    if op == "var" and e.name in COORDINATES:
        payload = COORDINATES.index(e.name)
    elif op in ("var", "param", "lit"):
        payload, op = _literal(e.name if op == "lit" else scalars[e.name], e.type is FLOAT), "lit"
    elif op == "extent":
        payload, op = tables[e.name[0]].shape[e.name[1]], "lit"
    elif op == "reduce":
        payload = list(e.name)
    return [op, args, payload, str(e.type)[0]]


def _literal(value: Any, floating: bool) -> Any:
    """A number as JSON has it, or its text where JSON or JavaScript has none."""
    if floating:
        x = float(value)
        return x if math.isfinite(x) else "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
    # a number of JavaScript would round it
    return str(value) if not isinstance(value, bool) and abs(value) > SAFE else value


def _deciding(root: Expr) -> list[Expr]:
    """The parts of a mask that can decide: below `and or not where`."""
    joins = ("and", "or", "not", "where")
    return [e for e in walk(root, below=lambda e: e.args if e.op in joins else ()) if e.op not in joins]


def runs(layout: Tiling, pack: Pack | None = None) -> dict[str, Any]:
    """The runs of every distinct slice: CSR, starts and stops in turn, and the slice of every (b, h)."""
    r = layout.runs
    ends = np.stack([r.start, r.stop], axis=1).reshape(-1)
    arrays: dict[str, Array] = {"rowPtr": r.row_ptr, "ends": ends, "kind": r.kind, "sliceOf": r.slice_of.reshape(-1)}
    return {name: (pack or packed)(array) for name, array in arrays.items()}


def packed(array: Array) -> dict[str, str]:
    """`{type, data}`: the smallest of the page's element types; Ints of 32 bits as differences, small where sorted."""
    kind, a = elements(array)
    if kind == "i4":
        a = np.diff(a, prepend=np.int32(0))
    return {"type": kind, "data": base64.b64encode(zlib.compress(a.tobytes(), 6)).decode("ascii")}


def plain(array: Array) -> dict[str, str]:
    """`{type, plain}`: the same as it is, for a page on this machine: nothing to undo but base64."""
    kind, a = elements(array)
    return {"type": kind, "plain": base64.b64encode(a.tobytes()).decode("ascii")}


def elements(array: Array) -> tuple[str, Array]:
    a = np.ascontiguousarray(array).reshape(-1)
    if a.dtype == np.bool_ or a.dtype == np.uint8:
        kind = "u1"
    elif a.dtype.kind == "f":
        kind = "f8" if a.dtype.itemsize > 4 else "f4"
    else:
        kind = "i4" if np.abs(a.astype(np.float64)).max(initial=0.0) < 2**31 else "i8"
    return kind, a.astype("<" + kind)  # little-endian, as typed arrays of browsers are


ROOM = str(__package__)
STILL = 128  # cells along each axis of the picture in a notebook
PACKED = 64 << 20  # bytes of packed runs in one page
POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:\">\n"
)
START = """
wire();
opened(JSON.parse($("data").textContent)).then(show).then(() => { document.documentElement.dataset.ready = "yes"; });
"""


def to_html(layout: Tiling, path: str | Path | None = None) -> str:
    """The page as text, written to `path` (`.html`) if there is one.

    Tables of more than 8 MiB (packed) stay out, and the page says so: it explains tiles then, not tokens. Raises
    `ParameterError` for another suffix or a place that cannot be written, `BudgetError` for a layout of more runs
    than a page can carry.
    """
    where = None if path is None else Path(path)
    if where is not None and where.suffix.lower() not in (".html", ".htm"):
        raise ParameterError(f"cannot write {where.name!r}: name it .html; for .png and .svg there is `plot`")
    page_data = data(layout)
    parts = {"policy": POLICY, "title": escape(page_data["mask"]["text"]), "data": script(page_data), "start": START}
    page = filled(**parts, still=notebook(layout), **captions(layout))
    if where is not None:
        save(where, page.encode())
    return page


def filled(**parts: str) -> str:
    """page.html with its places filled; what is not given stays empty."""
    known = {"light": _variables(LIGHT), "dark": _variables(DARK), **parts}

    def part(match: re.Match[str]) -> str:
        name = match[1]
        return file(ROOM, name) if name.endswith(".js") else known.get(name, "")

    return re.sub(r"\{\{([\w.]+)\}\}", part, file(ROOM, "page.html"))


def data(layout: Tiling, pack: Pack = packed, table: Pack | None = None) -> dict[str, Any]:
    """The data that the scripts of the page draw and ask; `pack` writes runs, `table` tables, if they differ."""
    packed_runs = runs(layout, pack)
    size = sum(len(text) for array in packed_runs.values() for text in array.values())
    if size > PACKED:
        message = f"the runs of this layout take {size >> 20} MiB, a page carries {PACKED >> 20}; take larger tiles, "
        raise BudgetError(f"{message}or lay out a part with `origin` and `sizes`")
    b, h, q, k = layout.origin
    data: dict[str, Any] = {"qLen": layout.q_len, "kvLen": layout.kv_len, "batch": layout.batch, "heads": layout.heads}
    data |= {"block": layout.block, "rows": layout.rows, "columns": layout.columns}
    data["origin"] = {"b": int(b), "h": int(h), "q": _starts(q), "k": _starts(k)}
    data |= {"palettes": {"light": asdict(LIGHT), "dark": asdict(DARK)}, "runs": packed_runs}
    return data | {"mask": mask(layout, table or pack)}


def captions(layout: Tiling) -> dict[str, str]:
    """The words of the page, as HTML."""
    block = "{:,} × {:,}".format(*layout.block)
    return {"shape": escape(_shape(layout)), "block": block, "tiles": _tiles(layout), "facts": _facts(layout)}


def script(value: Any) -> str:
    """JSON inside a page: `<` ends a script wherever it stands, so in text and names it is written otherwise."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def notebook(layout: Tiling) -> str:
    """A small picture with counts: no script, nothing loaded, whatever the page around it looks like."""
    panel = of_tiles(layout, LIGHT, cells=STILL)
    longest = max(layout.q_len, layout.kv_len)
    width, height = (max(24, round(220 * n / longest)) for n in (layout.kv_len, layout.q_len))
    source = "data:image/png;base64," + base64.b64encode(png(panel.colours)).decode("ascii")
    text = " ".join(repr(layout.shown).split())
    dot = "one dot shows {} × {} tiles, deeper where more are read".format(*panel.tiles)
    note = "" if panel.tiles == (1, 1) else dot
    if len(layout.spans.count) > 1:
        note = "; ".join(filter(None, [f"batch 0, head 0 of {layout.batch * layout.heads:,}", note]))
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:16px;align-items:flex-start;font-size:13px;line-height:1.5">'
        f'<img src="{source}" width="{width}" height="{height}" alt="{escape(_shape(layout))}" '
        'style="image-rendering:pixelated;border:1px solid #8886;margin:0">'
        f'<div style="max-width:34em"><code style="overflow-wrap:anywhere">{escape(text)}</code>'
        f"<div>{escape(_shape(layout))}</div>"
        f'<table style="margin:6px 0;border-collapse:collapse">{_tiles(layout)}</table>'
        f'<div style="opacity:.7">{escape(note)}</div></div></div>'
    )


def _starts(origin: Any) -> list[int]:
    """The first positions of the batch entries; one number where all begin alike."""
    return [start_of(origin, b) for b in range(len(np.atleast_1d(origin)))]


def _variables(palette: Palette) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in asdict(palette).items())


def _shape(layout: Tiling) -> str:
    (bq, bk), named = layout.block, layout.batch * layout.heads > 1
    text = f"{layout.q_len:,} × {layout.kv_len:,} tokens in tiles of {bq:,} × {bk:,}"
    return text + (f", batch {layout.batch:,}, heads {layout.heads:,}" if named else "")


def _tiles(layout: Tiling) -> str:
    """Rows of a table: the legend with counts. Styled in place, as notebooks keep no style sheets."""
    c = layout.counts
    total = c.full + c.partial + c.empty
    rows = []
    for name in ("full", "partial", "empty"):
        count, colour = getattr(c, name), getattr(LIGHT, name)
        square = (
            f'<span class="swatch {name}" style="display:inline-block;width:.85em;height:.85em;margin-right:.5em;'
            f'border:1px solid #8888;background:var(--{name},{colour})"></span>'
        )
        texts = (f"{count:,}", percent(count, total))
        cells = (f'<td style="text-align:right;padding-left:1em">{text}</td>' for text in texts)
        rows.append(f"<tr><td>{square}{name}</td>{''.join(cells)}</tr>")
    return "".join(rows)


def percent(count: int, total: int) -> str:
    text = f"{100 * count / total:.3g} %"
    return "> 99.9 %" if text == "100 %" and count < total else text  # 100 % is for all of them


def _facts(layout: Tiling) -> str:
    pairs = [*str(layout.facts).split("\n"), *([] if layout.exact else ["exact     no: the budget ran out"])]
    rows = [(line[:9].strip(), line[9:].strip()) for line in pairs]  # a name takes 9 columns
    rows += [("with", f"{name} = {value}") for name, value in layout.params.items()]
    rows += [("", f"{n}: {t.array.dtype}[{', '.join(map(str, t.array.shape))}]") for n, t in layout.tables.items()]
    return table(rows)


def table(rows: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)


@memo(group="once")
def file(package: str, name: str) -> str:
    """The text of a part of the page."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
