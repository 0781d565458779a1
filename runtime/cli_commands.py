"""The commands. Each takes the arguments and a console to ask what it can show, and returns an `Answer`."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.console import Console

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.dsl.ir import Expr
from frisket.dsl.show import show as show_text
from frisket.lowering.simplify import prepare
from frisket.lowering.stages import NAMES

from .cli_answer import Answer, row, rows
from .cli_input import require_bound, scalars, subject, tables
from .draw import terminal
from .layout import Layout
from .mask import Program

LENGTH = 2048  # of queries, where nobody says


def show(args: argparse.Namespace, console: Console) -> Answer:
    """`frisket show EXPR`: the simplified text, the facts, the counts, the picture."""
    what = subject(args)
    data, lines = described(what)
    answer = Answer(data, rows(lines))
    if what.mask is None:
        return answer
    layout = laid_out(args, what)
    found, facts = laid(layout)
    answer.data |= found
    answer.text += rows(facts)
    if what.score is not None and what.score.tables:
        read = what.score.lookups(
            layout.q_len, layout.kv_len, mask=what.mask, batch=layout.batch, heads=layout.heads
        )  # fmt: skip
        answer.data["score_lookups"] = [one.as_dict() for one in read]
        answer.text.append(row("score", "\n".join(map(str, read))))
    if extra := terminal.which(layout, args.b, args.h):
        answer.text.append(row("picture", extra))
    answer.text += ["", picture(layout, args, console)]
    return answer


def described(what: Program) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The texts of a mask and a score mod, as written and simplified, with what is bound."""
    mask, score = (None if part is None else part.expr for part in (what.mask, what.score))
    counts: Counter[str] = Counter()
    simple_mask, simple_score = prepare(mask, score, counts=counts)
    bound = scalars(what)
    shapes = {n: f"{x.dtype}[{', '.join(map(str, x.shape))}]" for n, x in tables(what).items()}
    data = {
        "mask": text(mask), "score": text(score),
        "simplified": {"mask": text(simple_mask), "score": text(simple_score)},
        "rules": dict(counts.most_common()), "params": bound, "tables": shapes,
    }  # fmt: skip
    where = ", ".join(f"{n} = {x}" for n, x in {**bound, **shapes}.items())
    everything = "true: everything is visible" if mask is not None else ""
    lines = [("mask", text(simple_mask) or everything), ("score", text(simple_score) or ""), ("with", where)]
    return data, lines


def text(e: Expr | None) -> str | None:
    return None if e is None else show_text(e)


def compiled(what: Program, tile: tuple[int, int] | None = None) -> Any:
    from .entry import compile  # the frameworks behind it are none of `show`'s business

    require_bound(what)
    return compile(mask=what.mask, score=what.score, tile=tile)


def shapes(args: argparse.Namespace) -> dict[str, Any]:
    """The sizes of `frisket emit`, as `source` and `stages` take them."""
    q_len, kv_heads = args.q_len or LENGTH, args.kv_heads or args.heads
    if args.heads % kv_heads:
        raise ShapeError(f"--heads {args.heads} is no multiple of --kv-heads {kv_heads}; key heads are shared evenly")
    return {
        "q_len": q_len, "kv_len": args.kv_len or q_len, "batch": args.batch, "heads": args.heads, "kv_heads": kv_heads,
        "head_dim": args.head_dim, "v_dim": args.v_dim, "dtype": args.dtype,
    }  # fmt: skip


def laid_out(args: argparse.Namespace, what: Program) -> Layout:
    assert what.mask is not None
    require_bound(what)
    q_len = args.q_len or LENGTH
    kv_len = args.kv_len or q_len
    what.mask.check_tables(q_len, kv_len, args.batch, args.heads)
    layout = what.mask.layout(q_len, kv_len, batch=args.batch, heads=args.heads, block=args.block)
    for name, at, size in (("--b", args.b, args.batch), ("--h", args.h, args.heads)):
        if at >= size:
            raise ShapeError(f"{name} {at} is outside the {size} there are; give --batch or --heads")
    return layout


def laid(layout: Layout) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Counts and facts of a layout."""
    c, f, (bq, bk) = layout.counts, layout.facts, layout.block
    pairs_seen = f.visible_pairs
    total = layout.batch * layout.heads * layout.q_len * layout.kv_len
    data = {
        "q_len": layout.q_len, "kv_len": layout.kv_len, "batch": layout.batch, "heads": layout.heads,
        "block": list(layout.block), "counts": asdict(c), "exact": layout.exact, "density": layout.density,
        "facts": f.as_dict(), "visible_pairs": pairs_seen,
    }  # fmt: skip
    shape = f"{layout.q_len:,} × {layout.kv_len:,} tokens in tiles of {bq} × {bk}"
    if layout.batch * layout.heads > 1:
        shape += f", batch {layout.batch}, {layout.heads} heads"
    tiles = f"{c.full:,} full, {c.partial:,} partial, {c.empty:,} empty"
    pairs = "" if pairs_seen is None else f"{pairs_seen:,} of {total:,} pairs, {share(pairs_seen, total)}"
    facts = "\n".join(line for line in str(f).splitlines() if not line.startswith("visible"))
    if not layout.exact:
        tiles += " (the budget ran out: some of the partial ones may be full or empty)"
    return data, [("layout", shape), ("tiles", tiles), ("visible", pairs), ("facts", facts)]


def share(part: int, total: int) -> str:
    return f"{100 * part / total:.3g} %"


def picture(layout: Layout, args: argparse.Namespace, console: Console) -> Any:
    ink = terminal.ASCII if console.options.ascii_only else terminal.UNICODE
    return terminal.layout_picture(layout, args.b, args.h, ink=ink)


def explain(args: argparse.Namespace, console: Console) -> Answer:
    """`frisket explain EXPR`: the stages and the rules that fired; with --q and --k, the clause that decides."""
    what = subject(args)
    if (args.q is None) != (args.k is None):
        raise ShapeError("--q and --k go together: a query and a key, for example --q 300 --k 17")
    if args.tile is not None and args.q is not None:
        raise ShapeError("--tile explains a tile, --q and --k a position: give one of them")
    if args.tile is not None:
        return explain_tile(args, what)
    if args.q is not None:
        return explain_point(args, what)
    q_len = args.q_len or LENGTH
    stages = compiled(what).stages(
        q_len=q_len, kv_len=args.kv_len or q_len, batch=args.batch, heads=args.heads, head_dim=64, dtype="float32",
        backend=args.backend,
    )  # fmt: skip
    texts = {name: stages.text(name) for name in NAMES}
    return Answer({**texts, "rules": dict(stages.rules.most_common())}, [str(stages)])


def explain_point(args: argparse.Namespace, what: Program) -> Answer:
    if what.mask is None:
        raise ShapeError("a score mod hides nothing; --q and --k explain a mask")
    args.q_len = args.q_len or max(LENGTH, args.q + 1, args.k + 1)
    layout = laid_out(args, what)
    found = layout.explain(args.q, args.k, args.b, args.h)
    position = {"b": args.b, "h": args.h, "q": args.q, "k": args.k}
    data = {**position, "visible": found.visible, "because": found.because}
    at = f"query {args.q:,}, key {args.k:,}"
    if args.batch * args.heads > 1:
        at += f", batch {args.b}, head {args.h}"
    answer = "visible" if found.visible else "hidden"
    return Answer(data, [*rows([("position", at), ("answer", answer), ("because", found.because)])])


def explain_tile(args: argparse.Namespace, what: Program) -> Answer:
    if what.mask is None:
        raise ShapeError("a score mod hides nothing; --tile explains a mask")
    (i, j), (bq, bk) = args.tile, args.block
    args.q_len = args.q_len or max(LENGTH, (i + 1) * bq, (j + 1) * bk)
    layout = laid_out(args, what)
    found = layout.explain(tile=args.tile, b=args.b, h=args.h)
    at = {n: None if x is None else dict(zip("bhqk", x, strict=True)) for n, x in (
        ("visible_at", found.visible_at), ("hidden_at", found.hidden_at)
    )}  # fmt: skip
    data = {"tile": [i, j], "b": args.b, "h": args.h, "kind": found.kind, "because": found.because, **at}
    q1, k1 = min((i + 1) * bq, layout.q_len), min((j + 1) * bk, layout.kv_len)
    where = f"queries {i * bq:,}..{q1 - 1:,}, keys {j * bk:,}..{k1 - 1:,}"
    if args.batch * args.heads > 1:
        where += f", batch {args.b}, head {args.h}"
    return Answer(data, [*rows([("tile", where), ("answer", found.kind), ("because", found.because)])])


def emit(args: argparse.Namespace, console: Console) -> Answer:
    """`frisket emit EXPR --backend triton`: the source text of the kernel."""
    if args.arch and args.backend != "triton":
        raise ParameterError(f"--arch is about Triton kernels, not {args.backend!r}; write --backend triton")
    if args.arch and len(args.arch) > 1:
        raise ParameterError(f"one text is for one GPU: --arch {args.arch[0]}; several go with --report")
    arch = args.arch[0] if args.arch else None
    source = compiled(subject(args), args.block).source(args.backend, arch=arch, **shapes(args))
    return Answer({"backend": args.backend, "source": source}, [source.rstrip("\n")])
