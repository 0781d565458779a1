"""`frisket show EXPR`: what a mask shows, in words and as a picture."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from frisket.dsl.errors import Undecided
from frisket.dsl.ir import Expr
from frisket.dsl.show import show as show_text
from frisket.lowering.simplify import prepare
from frisket.runtime.draw import terminal
from frisket.runtime.machine.parameters import BoundExpr
from frisket.runtime.masks.layout import Layout
from frisket.runtime.masks.mask import Mask, Program

from .answer import GOOD, SOME, CommandResult, add_sizes, add_slice, add_subject, examples, row, rows
from .input import laid_out, read_program, require_bound, scalars, tables

FOUND = {
    "closed form": "by solving the mask: one formula for all rows of tiles",
    "bounds": "by solving the mask for each row of tiles",
    "query by query": "by solving the mask for each query",
    "coarse to fine": "by proving what rectangles show, large ones first",
}


def add_show(p: argparse.ArgumentParser) -> None:
    add_subject(p)
    add_sizes(p)
    add_slice(p)
    examples(
        p,
        "frisket show 'causal & window(256)' --q-len 1048576",
        "frisket show 'causal & same(doc)' --table doc=[0,0,1,1] --q-len 4 --block 2",
        "frisket show 'causal & window(64 * (h + 1))' --heads 4 --h 3 --q-len 1024",
        "echo 'causal & (window(w) | sinks(4))' | frisket show - --set w=512",
    )


def show(args: argparse.Namespace, console: Console) -> CommandResult:
    """The texts, the facts, the counts, the picture."""
    program = read_program(args)
    data, lines = described(program)
    answer = CommandResult(data, rows(lines))
    if program.mask is None and (program.score is None or program.score.unbound):
        return answer
    require_bound(program)
    if (mask := program.visible) is None:
        return answer
    layout = laid_out(args, mask)
    layout_data, facts = laid(layout, mask)
    answer.data |= layout_data
    answer.text += rows(facts)
    if program.score is not None and program.score.tables:
        read = program.score.lookups(layout.q_len, layout.kv_len, mask=program.mask, batch=args.batch, heads=args.heads)
        answer.data["score_lookups"] = [one.as_dict() for one in read]
        answer.text.append(row("score", "\n".join(map(str, read))))
    if extra := terminal.which(layout, args.b, args.h):
        answer.text.append(row("picture", extra))
    answer.text += ["", picture(layout, args, console)]
    return answer


def described(program: Program) -> tuple[dict[str, Any], list[tuple[str, str | Text]]]:
    """The texts of a mask and a score mod, as written and simplified, with what is bound."""
    mask, score = (None if part is None else part.expr for part in (program.mask, program.score))
    counts: Counter[str] = Counter()
    simple_mask, simple_score = prepare(mask, score, counts=counts)
    bound = scalars(program)
    shapes = {n: f"{x.dtype}[{', '.join(map(str, x.shape))}]" for n, x in tables(program).items()}
    data = {
        "mask": text(mask), "score": text(score),
        "simplified": {"mask": text(simple_mask), "score": text(simple_score)},
        "rules": dict(counts.most_common()), "params": bound, "tables": shapes,
    }  # fmt: skip
    where = ", ".join(f"{n} = {x}" for n, x in {**bound, **shapes}.items())
    lines: list[tuple[str, str | Text]] = []
    for part, simple, nothing in (
        (program.mask, simple_mask, "true: everything is visible"),
        (program.score, simple_score, "score: nothing changes"),
    ):
        if part is not None:
            known = {**bound, **shapes}  # which `with` tells the types of
            source, means = written(part), nothing if simple is None else show_text(simple, known)
            lines += [(part.what.split()[0], source), ("means", means if means != source else "")]
    return data, [*lines, ("with", where)]


def written(part: BoundExpr) -> str:
    """The text of a mask or score mod in its program, on one line; as it prints, where there is no such text."""
    for span, e in part.sites:
        source = " ".join(part.source[span.start : span.stop].split())
        if e is part.expr and "#" not in source:
            return source
    return str(part)


def text(e: Expr | None) -> str | None:
    return None if e is None else show_text(e)


def laid(layout: Layout, mask: Mask) -> tuple[dict[str, Any], list[tuple[str, str | Text]]]:
    """Counts and facts of a layout: as data, and for people who have never seen one."""
    c, f, (bq, bk) = layout.counts, layout.facts, layout.block
    data = {
        "q_len": layout.q_len, "kv_len": layout.kv_len, "batch": layout.batch, "heads": layout.heads,
        "block": list(layout.block), "counts": asdict(c), "exact": layout.exact, "density": layout.density,
        "facts": f.as_dict(), "visible_pairs": f.visible_pairs,
    }  # fmt: skip
    shape = f"{counted(layout.q_len, 'query', 'queries')} × {counted(layout.kv_len, 'key')}, in tiles of {bq} × {bk}"
    if layout.batch * layout.heads > 1:
        shape += f"; batch {layout.batch:,}, {counted(layout.heads, 'head')}"
    lines: list[tuple[str, str | Text]] = [
        ("sizes", shape), ("visible", visible(layout)), ("tiles", tiles(layout)), ("saved", saved(layout)),
        ("rows", empty_rows(layout, mask)), ("kernels", reached(layout)), ("found", exactness(layout)),
    ]  # fmt: skip
    if f.tables:
        lines.append(("tables", "\n".join(f"{name}: {facts}" for name, facts in f.tables.items())))
    if f.lookups:
        outside = [str(one) for one in f.lookups if not one.proved]
        lines.append(("lookups", "\n".join(outside) or "every one stays inside its table"))
    return data, lines


def visible(layout: Layout) -> str:
    pairs = layout.facts.visible_pairs
    if pairs is None:
        return "not counted: too many pairs to look at"
    queries = layout.batch * layout.heads * layout.q_len
    total = queries * layout.kv_len
    mean = pairs / queries
    each = "1 key" if mean == 1 else f"{mean:,.0f} keys" if mean >= 100 or mean == int(mean) else f"{mean:,.1f} keys"
    return f"{pairs:,} of {counted(total, 'pair')}, {share(pairs, total)}\na query sees {each} on average"


def counted(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def tiles(layout: Layout) -> Text:
    """How many there are of each kind, and what kernels do with them."""
    c, ink, styles = layout.counts, terminal.UNICODE, terminal.STYLES
    lines = [
        (ink.full, styles["full"], c.full, "full: every pair is visible, read without the mask"),
        (ink.half, styles["half"], c.partial, "partial: read with the mask"),
        (ink.empty.strip(), styles["empty"], c.empty, "empty: never read"),
    ]
    width = max(len(f"{n:,}") for _, _, n, _ in lines)
    return Text("\n").join(Text.assemble((mark, style), f" {n:>{width},} {note}") for mark, style, n, note in lines)


def saved(layout: Layout) -> Text:
    """Tiles that are read are computed whole, so that their share is that of the FLOPs."""
    d = layout.density
    if d in (0, 1):
        return Text("nothing: every tile is read" if d else "all of dense attention's FLOPs: nothing is visible")
    part = f"{100 * (1 - d):.3g}" if d > 0.005 else f"{100 * (1 - d):.5g}"
    times = f"{1 / d:,.0f}" if d < 0.1 else f"{1 / d:.1f}"
    return Text.assemble((f"{part} % of dense attention's FLOPs", GOOD), f": {times} times fewer tiles are read")


def empty_rows(layout: Layout, mask: Mask) -> str | Text:
    every = layout.facts.rows_nonempty
    if layout.facts.visible_pairs == 0:
        return Text("no query sees a key: the output is 0 everywhere", SOME)
    if every is None:
        return "not known whether every query sees a key: too many pairs to look at"
    if every:
        return "every query sees at least one key"
    try:
        witness = mask.empty_rows(layout.q_len, layout.kv_len, batch=layout.batch, heads=layout.heads).witness
    except Undecided:
        witness = None
    one = f"query {witness[2]:,}" if witness else "some query"
    if witness and layout.batch * layout.heads > 1:
        one += f" of batch {witness[0]}, head {witness[1]}"
    return Text(f"{one} sees no key; where that is so, the output is 0", SOME)


def reached(layout: Layout) -> str:
    """How kernels know which tiles to read."""
    f, spans = layout.facts, layout.spans
    if not f.max_runs_per_row:
        return "nothing to read"
    if f.closed_form:
        how = "work out which tiles to read from a formula, load no table"
    else:
        how = f"look up which tiles to read in a list of {size(spans.bounds.nbytes + spans.count.nbytes)}"
    where = "in every row they are neighbours" if f.contiguous else f"a row has up to {f.max_runs_per_row} runs of them"
    return f"{how}\n{where}"


def size(n: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= scale:
            return f"{n / scale:.3g} {unit}"
    return f"{n} bytes"


def exactness(layout: Layout) -> str | Text:
    f = layout.facts
    how = FOUND[f.method] + (f"\n{f.settled:,} tiles by looking at their pairs" if f.settled else "")
    if layout.exact:
        return f"exactly, {how}"
    return Text(f"{how}\nthe budget ran out: some of the partial tiles may be full or empty", SOME)


def share(part: int, total: int) -> str:
    return f"{100 * part / total:.3g} %"


def picture(layout: Layout, args: argparse.Namespace, console: Console) -> Text:
    ink = terminal.ASCII if console.options.ascii_only else terminal.UNICODE
    return terminal.layout_picture(layout, args.b, args.h, ink=ink, width=console.width)
