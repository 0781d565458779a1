"""A mask and its tiles as JSON, for a page that has no Python: what runtime/draw/mask.js reads.

Nodes are `[operator, arguments, payload, type]`, arguments before their users; parameters, sizes and extents are
written in as literals. Arrays are deflated, in base64.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import BudgetError
from frisket.dsl.explain import wording
from frisket.dsl.ir import COORDINATES, SIZES, Expr, walk
from frisket.dsl.show import places
from frisket.dsl.types import FLOAT
from frisket.runtime.layouts.tiling import Tiling

Array = NDArray[Any]
Pack = Callable[[Array], dict[str, str]]
TABLES = 8 << 20  # bytes of packed tables in one page
SAFE = 2**53 - 1  # the Ints a JavaScript number holds


def mask(layout: Tiling, pack: Pack | None = None) -> dict[str, Any]:
    """`text` with the `spans` of its clauses, and the `program` of the mask; `why` where a page cannot carry one.
    `pack` writes a table, `packed` where it is not given."""
    tables = {name: table.array for name, table in layout.tables.items()}
    scalars = {**layout.params, **dict(zip(SIZES, layout.sizes, strict=True))}
    try:
        text, found = places(layout.written, {**layout.params, **tables})
        made = program(layout.written, scalars, tables, pack)
        size = sum(sum(map(len, table["array"].values())) for table in made["tables"].values())
        if size > TABLES:
            raise BudgetError(
                f"its tables take {size / (1 << 20):.1f} MiB, more than the {TABLES >> 20} a page carries"
            )
    except BudgetError as error:
        return {"text": " ".join(repr(layout.written).split()), "spans": {}, "program": None, "why": str(error)}
    index = {node: i for i, node in enumerate(walk(layout.written))}
    spans: dict[int, list[list[int]]] = {}
    for span, node in found:
        if index[node] in made["clauses"]:
            spans.setdefault(index[node], []).append([span.start, span.stop])
    return {"text": text, "spans": spans, "program": made, "why": ""}


def program(
    root: Expr, scalars: Mapping[str, Any], tables: Mapping[str, Array], pack: Pack | None = None
) -> dict[str, Any]:
    """`nodes`; the `tables` they read; and in `clauses` how each part that can decide a mask is worded."""
    index = {node: i for i, node in enumerate(walk(root))}
    read = sorted({n.name for n in index if n.op in ("lookup", "segment")})
    return {
        "nodes": [_node(n, index, scalars, tables) for n in index],
        "tables": {name: {"shape": list(tables[name].shape), "array": (pack or packed)(tables[name])} for name in read},
        "clauses": {index[e]: _worded(e, index) for e in _deciding(root)},
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
    return str(value) if not isinstance(value, bool) and abs(value) > SAFE else value


def _deciding(root: Expr) -> list[Expr]:
    """The parts of a mask that can decide: below `and or not where`."""
    found: dict[Expr, None] = {}
    seen, stack = {root}, [root]
    while stack:
        e = stack.pop()
        if e.op not in ("and", "or", "not", "where"):
            found[e] = None
            continue
        below = [a for a in e.args if a not in seen]
        seen.update(below)
        stack += below
    return list(found)


def _worded(e: Expr, index: Mapping[Expr, int]) -> list[Any]:
    text, parts = wording(e)
    return [text, [[name, index[part]] for name, part in parts]]


def runs(layout: Tiling, pack: Pack | None = None) -> dict[str, Any]:
    """The runs of every distinct slice: CSR, starts and stops in turn, and the slice of every (b, h)."""
    r = layout.runs
    ends = np.stack([r.start, r.stop], axis=1).reshape(-1)
    found: dict[str, Array] = {"rowPtr": r.row_ptr, "ends": ends, "kind": r.kind, "sliceOf": r.slice_of.reshape(-1)}
    return {name: (pack or packed)(array) for name, array in found.items()}


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
    return kind, a.astype("<" + kind)
