"""`frisket explain EXPR`: the clause that decides a position or a tile; or the stages from text to kernel.

`frisket plot EXPR -o FILE`: a picture, or a page that answers. `frisket explore EXPR`: the mask in a browser, to edit.
"""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from frisket.dsl.errors import FrisketError, ParameterError, ShapeError, Span
from frisket.dsl.ir import Expr, walk
from frisket.dsl.types import FLOAT
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.draw import terminal
from frisket.runtime.draw.pixels import SUFFIXES
from frisket.runtime.explore.answer import slider
from frisket.runtime.explore.server import Analyst, Server, page
from frisket.runtime.machine.settings import STAGES
from frisket.runtime.masks.layout import Layout
from frisket.runtime.masks.mask import Mask, Program

from . import answer as answers
from . import show

PAGES = (".html", ".htm")
STYLE = {"visible": answers.GOOD, "full": answers.GOOD, "hidden": answers.BAD, "empty": answers.BAD}
STYLE["partial"] = answers.SOME


def add_explain(p: argparse.ArgumentParser) -> None:
    answers.add_subject(p)
    answers.add_sizes(p)
    group = p.add_argument_group("what is asked; nothing: the stages and the rules that fired")
    group.add_argument("--q", type=answers.natural, metavar="N", help="a query position, together with --k")
    group.add_argument("--k", type=answers.natural, metavar="N", help="a key position")
    group.add_argument("--tile", type=answers.tile, metavar="I,J", help="a tile: its row and column, from 0")
    answers.add_slice(group)
    group.add_argument("--backend", metavar="B", help="whose target and source to show; default: torch's library calls")
    answers.examples(
        p,
        "frisket explain 'causal & window(w)' --set w=256 --q 300 --k 17",
        "frisket explain 'same(doc)' --table doc=[0,0,1,1] --q 3 --k 1 --q-len 4",
        "frisket explain 'causal & window(256)' --tile 8,2",
        "frisket explain 'causal & window(256)' --backend triton",
    )


def explain(args: argparse.Namespace, console: Console) -> answers.CommandResult:
    """Explain a position or a tile, or else print the stages and the rules that fired."""
    if (args.q is None) != (args.k is None):
        raise ShapeError("--q and --k go together: a query and a key, for example --q 300 --k 17")
    if args.tile is not None and args.q is not None:
        raise ShapeError("--tile explains a tile, --q and --k a position: give one of them")
    if args.tile is not None:
        return explain_tile(args, console)
    return explain_stages(args, console) if args.q is None else explain_point(args, console)


def explain_point(args: argparse.Namespace, console: Console) -> answers.CommandResult:
    mask = show.visible_mask(show.read_program(args), "to explain")
    args.q_len = args.q_len or max(show.LENGTH, args.q + 1, args.k + 1)
    finding = show.laid_out(args, mask).explain(args.q, args.k, args.b, args.h)
    at = f"query {args.q:,}, key {args.k:,}{of_slice(args)}"
    answer = "visible" if finding.visible else "hidden"
    spans = places(mask, finding.clauses)
    position = {"b": args.b, "h": args.h, "q": args.q, "k": args.k}
    data = {**position, "visible": finding.visible, "because": finding.because, "clauses": quoted(mask, spans)}
    because = finding.because.replace("; ", "\n")
    text = answers.rows([("position", at), ("answer", Text(answer, STYLE[answer])), ("because", because)])
    text += answers.rows([("mask", marked(mask, spans, STYLE[answer], console))])
    return answers.CommandResult(data, text)


def explain_tile(args: argparse.Namespace, console: Console) -> answers.CommandResult:
    mask = show.visible_mask(show.read_program(args), "to explain")
    (i, j), (bq, bk) = args.tile, args.block
    args.q_len = args.q_len or max(show.LENGTH, (i + 1) * bq, (j + 1) * bk)
    layout = show.laid_out(args, mask)
    finding = layout.explain(tile=args.tile, b=args.b, h=args.h)
    witnesses = {"visible_at": finding.visible_at, "hidden_at": finding.hidden_at}
    at = {n: None if x is None else dict(zip("bhqk", x, strict=True)) for n, x in witnesses.items()}
    spans, style = places(mask, finding.clauses), STYLE[finding.kind]
    if finding.hidden_at is not None and finding.kind == "partial":  # no clause decides it whole: what hides some of it
        b, h, q, k = finding.hidden_at
        spans, style = places(mask, layout.explain(q, k, b, h).clauses), answers.BAD
    data = {"tile": [i, j], "b": args.b, "h": args.h, "kind": finding.kind, "because": finding.because, **at}
    data["clauses"] = quoted(mask, spans)
    where = f"queries {ends(i, bq, layout.q_len)}, keys {ends(j, bk, layout.kv_len)}{of_slice(args)}"
    kind = Text(finding.kind, STYLE[finding.kind])
    text = answers.rows([("tile", where), ("answer", kind), ("because", finding.because)])
    text += answers.rows([("mask", marked(mask, spans, style, console))])
    return answers.CommandResult(data, text)


def of_slice(args: argparse.Namespace) -> str:
    return f", batch {args.b}, head {args.h}" if args.batch * args.heads > 1 else ""


def ends(at: int, size: int, length: int) -> str:
    return f"{at * size:,}..{min((at + 1) * size, length) - 1:,}"


# -- where in the text ----------------------------------------------------------------------------------


def places(mask: Mask, clauses: Sequence[Expr]) -> list[Span]:
    """The spans of a mask's clauses in its text, in order: what became the clause, else the least that holds it."""
    spans = set()
    for clause in clauses:
        exact = [span for span, e in mask.sites if e is clause]
        matches = exact or [span for span, e in mask.sites if any(x is clause for x in walk(e))]
        if matches:
            spans.add(min(matches, key=lambda span: span.stop - span.start))
    return sorted(spans, key=lambda span: span.start)


def quoted(mask: Mask, spans: Sequence[Span]) -> list[dict[str, Any]]:
    return [{"start": s.start, "stop": s.stop, "text": mask.source[s.start : s.stop]} for s in spans]


def marked(mask: Mask, spans: Sequence[Span], style: str, console: Console) -> Text:
    """The lines of the text that hold these places: in colour where there is colour, else with carets below."""
    source, lines = mask.source, []
    start = 0
    for line in source.split("\n"):
        # a span may reach over several lines
        marks = [(max(s.start - start, 0), min(s.stop - start, len(line))) for s in spans]
        marks = [(a, z) for a, z in marks if a < z]
        if marks:
            text = Text(line.replace("\t", " "))  # one column, as the carets count
            for a, z in marks:
                text.stylize(f"{style} underline", a, z)
            lines.append(text)
            if not answers.coloured(console):
                under = "".join("^" if any(a <= n < z for a, z in marks) else " " for n in range(len(line)))
                lines.append(Text(under.rstrip()))
        start += len(line) + 1
    return Text("\n").join(lines)


# -- stages -----------------------------------------------------------------------------------------------


def explain_stages(args: argparse.Namespace, console: Console) -> answers.CommandResult:
    q_len = args.q_len or show.LENGTH
    sizes = {"q_len": q_len, "kv_len": args.kv_len or q_len, "batch": args.batch, "heads": args.heads}
    stages = show.compiled(show.read_program(args)).stages(**sizes, head_dim=64, dtype="float32", backend=args.backend)
    texts = {name: stages.text(name) for name in STAGES}
    text: list[answers.Piece] = []
    for name in STAGES:
        text += ["", Text(f"-- {name} {'-' * (76 - len(name))}", "bold"), shown(name, stages, console)]
    if stages.engines:
        text += ["", Text(f"-- engines {'-' * 69}", "bold"), Text(stages.engines)]
    rules = dict(stages.rules.most_common())
    # every stage begins with an empty line
    return answers.CommandResult({**texts, "engines": stages.engines, "rules": rules}, text[1:])


def shown(name: str, stages: Any, console: Console) -> Text:
    """One stage as it prints, in colours where there are some."""
    text: str = stages.text(name)
    if name == "source" and stages.source:
        return answers.code(text, RECORDS[stages.target.backend].highlight, console)
    if name == "layout" and isinstance(stages.layout, Layout):
        # the first line is a heading: a picture replaces the rest
        return Text.assemble(text.partition("\n")[0], "\n", terminal.layout_picture(stages.layout))
    return Text(text)


# -- pictures -------------------------------------------------------------------------------------------


def add_plot(p: argparse.ArgumentParser) -> None:
    answers.add_subject(p)
    answers.add_sizes(p)
    drawn = p.add_argument_group("the picture")
    drawn.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help=".png, .svg or .html")
    drawn.add_argument("--b", type=answers.natural, metavar="N", help="one batch entry; default: all that differ")
    drawn.add_argument("--h", type=answers.natural, metavar="N", help="one head; default: all that differ")
    drawn.add_argument("--dark", action="store_true", help="light on dark")
    drawn.add_argument("--title", metavar="TEXT", help="default: the mask as you write it")
    answers.examples(
        p,
        "frisket plot 'causal & (window(256) | sinks(4))' -o mask.png",
        "frisket plot 'causal & window(64 * (h + 1))' --heads 4 -o heads.svg --dark",
        "frisket plot 'causal & window(256)' --q-len 1048576 -o mask.html",
    )


def plot(args: argparse.Namespace, console: Console) -> answers.CommandResult:
    """Write the picture and say what is in it; with no --b and --h, every different batch entry and head."""
    path: Path = args.output
    if path.suffix.lower() not in (*PAGES, *SUFFIXES):
        raise ParameterError(f"cannot write {path.name!r}: name it .png, .svg or .html")
    program = show.read_program(args)
    layout = show.laid_out(args, show.visible_mask(program, "to draw"))
    if path.suffix.lower() not in PAGES:
        layout.plot(path, b=args.b, h=args.h, dark=args.dark, title=args.title or titled(program))
    elif (args.b, args.h, args.title) != (None, None, None) or args.dark:
        text = "--b, --h, --dark and --title are for .png and .svg: a page shows every slice, and follows the browser"
        raise ParameterError(text)
    else:
        layout.to_html(path)
    bytes_ = path.stat().st_size
    data = {"file": str(path), "bytes": bytes_, "counts": vars(layout.counts), "exact": layout.exact}
    if program.score is not None:
        data["score"] = {"text": str(program.score), "hides": program.hidden_by_score is not None}
    lines = answers.rows([("written", f"{path}, {show.size(bytes_)}"), ("tiles", show.tiles(layout))])
    return answers.CommandResult(data, [*lines, *answers.rows([("score", scored(program))])])


def titled(program: Program) -> str:
    """The text of the mask, and of a score mod that hides positions."""
    parts = [] if program.mask is None else [show.written(program.mask)]
    if program.score is not None and program.hidden_by_score is not None:
        parts.append(f"score = {show.written(program.score)}")
    return "; ".join(parts)


def scored(program: Program) -> str:
    """A line that says how much of the score mod the picture shows."""
    if program.score is None:
        return ""
    if (hidden := program.hidden_by_score) is None:
        return f"{show.written(program.score)} hides nothing, so it is not in the picture"
    return f"{show.written(program.score)} hides positions; the picture shows those where {hidden}"


def add_explore(p: argparse.ArgumentParser) -> None:
    answers.add_subject(p, expand=False)
    answers.add_sizes(p)
    served = p.add_argument_group("the server")
    port = "on 127.0.0.1; default: one that is free"
    served.add_argument("--port", type=answers.natural, default=0, metavar="N", help=port)
    served.add_argument("--no-browser", action="store_true", help="print the address, and open nothing")
    answers.examples(
        p,
        "frisket explore 'causal & window(w)' --set w=4096 --q-len 131072",
        "frisket explore 'causal & same(doc)' --no-browser",
        "frisket explore causal --score 'alibi then softcap(50)' --heads 8 --port 8765",
    )


def explore(args: argparse.Namespace, console: Console) -> answers.CommandResult:
    """Serve the page until Ctrl-C. A text with mistakes is served too: they are shown where they can be mended."""
    text, _ = show.source(args.expr, show.parts(args))
    tables, values = dict(map(show.table, args.table)), dict(map(show.scalar, args.set))
    for name, x in values.items():
        slider(name, FLOAT, x, x)  # an error where the page has none
    q_len = args.q_len or show.LENGTH
    state = {"text": text.strip(), "values": values, "q_len": q_len, "kv_len": args.kv_len or q_len}
    state |= {"batch": args.batch, "heads": args.heads, "block": list(args.block), "documents": 8}
    if args.port > 65535:
        raise ParameterError(f"--port {args.port}: ports end at 65535")
    with Analyst(tables) as analyst:
        try:
            server = Server(analyst, lambda nonce: page(state, tables, nonce), args.port)
        except OSError as error:
            raise FrisketError(f"cannot listen on port {args.port}: {error.strerror}; give another --port") from None
        with server:
            # with --json the object comes at the end, when the page is no longer served
            print(f"{server.url}\nCtrl-C ends it.", file=sys.stderr if args.json else sys.stdout, flush=True)
            if not args.no_browser:
                webbrowser.open(server.url)
            with suppress(KeyboardInterrupt):
                server.serve_forever()
            ended = answers.rows([("ended", f"{show.counted(analyst.answered, 'answer')} given")])
            return answers.CommandResult({"url": server.url, "answers": analyst.answered}, ended)
