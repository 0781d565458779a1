"""`frisket show EXPR`: what a mask shows, in words and as a picture; `frisket library`, `frisket completion`.

`library` prints the entries with a sentence each; with a name all that is known of it, with words a search.
`completion bash` prints a script that completes commands, options and the names of the library.
A mask and score mod are read from the arguments here, for the other commands too.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from frisket.dsl.errors import MaskSyntaxError, ParameterError, ShapeError, Undecided, misnamed, nearest
from frisket.dsl.ir import Expr, names_of
from frisket.dsl.library import Entry
from frisket.dsl.library import library as entries
from frisket.dsl.parse import parse
from frisket.dsl.program import ROOTS, Parsed, read
from frisket.dsl.show import show as show_text
from frisket.dsl.types import FLOAT
from frisket.lowering.kernels.units import overflow_fact
from frisket.lowering.simplify import prepare
from frisket.runtime.draw import terminal
from frisket.runtime.machine.parameters import BoundExpr
from frisket.runtime.masks.layout import Layout
from frisket.runtime.masks.mask import Mask, Program, mask, program, score

from .answer import GOOD, SOME, AnswerRow, CommandResult, Piece, add_sizes, add_slice, add_subject, examples, row, rows
from .main import COMMANDS, parser

Scalar = bool | int | float
LENGTH = 2048  # of queries, by default
ROWS = 1 << 24  # rows of tiles that are laid out: some gigabytes of bounds
FOUND = {
    "closed form": "by solving the mask: one formula for all rows of tiles",
    "bounds": "by solving the mask for each row of tiles",
    "query by query": "by solving the mask for each query",
    "coarse to fine": "by proving what rectangles show, large ones first",
}
HOW = {
    "bash": 'eval "$(frisket completion bash)"            # for this shell; or a line of ~/.bashrc',
    "zsh": 'frisket completion zsh > "${fpath[1]}/_frisket"  # then start a new shell',
    "fish": "frisket completion fish > ~/.config/fish/completions/frisket.fish",
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
    exprs = program.exprs
    counts: Counter[str] = Counter()
    simplified = prepare(exprs, counts=counts)
    bound = scalars(program)
    shapes = {n: f"{x.dtype}[{', '.join(map(str, x.shape))}]" for n, x in tables(program).items()}
    names = dict.fromkeys(("mask", "score", *program.by_name))
    data: dict[str, Any] = {n: text(getattr(exprs, n)) for n in names}
    data["simplified"] = {n: text(getattr(simplified, n)) for n in names}
    data |= {"rules": dict(counts.most_common()), "params": bound, "tables": shapes}
    where = ", ".join(f"{n} = {x}" for n, x in {**bound, **shapes}.items())
    lines: list[tuple[str, str | Text]] = []
    nothing = {"mask": "true: everything is visible", "score": "score: nothing changes"}
    for name, part in program.by_name.items():
        known, simple = {**bound, **shapes}, getattr(simplified, name)  # `with` tells the types of what is known
        source, means = written(part), nothing[name] if simple is None else show_text(simple, known)
        lines += [(name, source), ("means", means if means != source else "")]
    lines.append(("with", where))
    if overflow := overflow_fact(simplified, bound):
        data["overflow"] = overflow
        lines.append(("overflow", Text(overflow, SOME)))
    return data, lines


def written(part: BoundExpr) -> str:
    """The text of a mask or score mod in its program, on one line; as it prints, where there is no such text."""
    for span, e in part.sites:
        source = " ".join(part.source[span.start : span.stop].split())
        if e is part.expr and "#" not in source:  # in one line a comment would hide what follows
            return source
    return str(part)


def text(e: Expr | None) -> str | None:
    return None if e is None else show_text(e)


def laid(layout: Layout, mask: Mask) -> tuple[dict[str, Any], list[tuple[str, str | Text]]]:
    """Counts and facts of a layout: as data, and for people who have never seen one."""
    c, f, (bq, bk) = layout.counts, layout.facts, layout.block
    data: dict[str, Any] = {"q_len": layout.q_len, "kv_len": layout.kv_len}
    data |= {"batch": layout.batch, "heads": layout.heads}
    data |= {"block": list(layout.block), "counts": asdict(c), "exact": layout.exact, "density": layout.density}
    data |= {"facts": f.as_dict(), "visible_pairs": f.visible_pairs}
    shape = f"{counted(layout.q_len, 'query', 'queries')} × {counted(layout.kv_len, 'key')}, in tiles of {bq} × {bk}"
    if layout.batch * layout.heads > 1:
        shape += f"; batch {layout.batch:,}, {counted(layout.heads, 'head')}"
    lines: list[tuple[str, str | Text]] = [("sizes", shape), ("visible", visible(layout)), ("tiles", tiles(layout))]
    lines += [("saved", saved(layout)), ("rows", empty_rows(layout, mask)), ("kernels", reached(layout))]
    lines.append(("found", exactness(layout)))
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
    part = f"{100 * (1 - d):.3g}" if d > 0.005 else f"{100 * (1 - d):.5g}"  # near 100 % three digits say nothing
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
    where = (
        "the tiles of each row are contiguous" if f.contiguous else f"a row has up to {f.max_runs_per_row} runs of them"
    )
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


# -- the library ----------------------------------------------------------------------------------------


def add_library(p: argparse.ArgumentParser) -> None:
    p.add_argument("words", nargs="*", metavar="WORD", help="a name, or words to search for; default: everything")
    examples(p, "frisket library window", "frisket library sliding window", "frisket library")


def library(args: argparse.Namespace, console: Console) -> CommandResult:
    """Every entry by part, those called by a name in full, or those that hold every word."""
    known = entries()
    named = [e for e in known.values() if [e.name] == args.words or [e.signature] == args.words]
    chosen = named or [e for e in known.values() if holds(e, args.words)]
    if not chosen:
        near = nearest(" ".join(args.words), {e.name for e in known.values()})
        hint = f"; did you mean `{near}`?" if near else ""
        raise ParameterError(f"the library has no `{' '.join(args.words)}`{hint}\n  `frisket library` lists it")
    answer = CommandResult({e.signature: asdict(e) for e in chosen})
    for e in named:
        answer.text += [*([""] if answer.text else []), *in_full(e, console)]
    return answer if named else CommandResult(answer.data, listed(chosen, console))


def holds(e: Entry, words: Sequence[str]) -> bool:
    text = " ".join((e.signature, e.sentence, e.formula, e.source, e.section)).casefold()
    return all(word.casefold() in text for word in words)


def listed(chosen: Sequence[Entry], console: Console) -> list[Piece]:
    """A line for each entry: its signature and its sentence."""
    most = min(44, console.width * 2 // 5)  # the sentences get the larger part of a line
    width = min(most, max(len(short(e, most)) for e in chosen))
    text: list[Piece] = []
    for section, part in groupby(chosen, key=lambda e: e.section):
        text += [*([""] if text else []), Text(section, "bold")]
        for e in part:
            text.append(AnswerRow(Text.assemble("  ", (short(e, most), "cyan")), Text(e.sentence), width + 4))
    return text


def short(e: Entry, most: int) -> str:
    return e.signature if len(e.signature) <= most else f"{e.name}(…)"


def in_full(e: Entry, console: Console) -> list[Piece]:
    """A description of one library entry, with an example mask whose numbers suit it."""
    parts = (("formula", e.formula), ("source", e.source), ("text", e.text), ("example", e.example))
    text = rows([("entry", Text(e.signature, "bold cyan")), ("", e.sentence), *parts])
    mask = program(e.example).mask if e.example else None
    if mask is not None:
        text += ["", picture(mask.layout(LENGTH, LENGTH), argparse.Namespace(b=0, h=0), console)]
    return text


def add_completion(p: argparse.ArgumentParser) -> None:
    p.add_argument("shell", choices=list(HOW), metavar="SHELL", help=", ".join(HOW))
    p.description = "\n".join(
        ["A script that completes commands, options, files, and after EXPR the names of the library:", ""]
        + [f"  {line}" for line in HOW.values()]
    )
    examples(p, *(f"frisket completion {shell}" for shell in HOW))


def completion(args: argparse.Namespace, console: Console) -> CommandResult:
    import shtab  # no other command needs it

    top = parser(*COMMANDS)
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.help = "a command"  # which the top help lists in its own way, and shtab skips without this
            for p in action.choices.values():
                complete(p)
    script = shtab.complete(top, shell=args.shell)
    return CommandResult({"shell": args.shell, "script": script}, [script.rstrip("\n")])


def complete(p: argparse.ArgumentParser) -> None:
    """Names of the library where an EXPR stands, files where a file does."""
    names = " ".join(sorted({e.name for e in entries().values()}))
    bash = f'_frisket_library() {{ compgen -W "{names}" -- "$1"; compgen -f -X "!*.frisket" -- "$1"; }}'
    known = {"preamble": {"bash": bash}, "bash": "_frisket_library", "zsh": f"({names})", "fish": names}
    for action in p._actions:
        if action.metavar in ("EXPR", "WORD"):
            action.complete = known  # type: ignore[attr-defined]
        elif action.metavar == "FILE":
            action.complete = "file"  # type: ignore[attr-defined]


# -- what is asked about --------------------------------------------------------------------------------


def read_program(args: argparse.Namespace, **more: Any) -> Program:
    """The mask and score mod of EXPR, --score, --set and --table; `more` binds those names that occur."""
    text, name = source(args.expr, parts(args))
    bindings = {**dict(map(scalar, args.set)), **dict(map(table, args.table))}
    parsed = read(text, params=bindings, name=name)  # says which names there are
    values = {**bindings, **chosen(more, bindings, parsed)}
    lone = parsed.expr is not None and parsed.expr.type is not FLOAT
    whole = Program(mask(text, **values)) if lone else program(text, name, **values)
    if getattr(args, "expand", False):  # the same, read from its formulas
        whole_parts: dict[str, Any] = {n: type(p)(p.expr, p.params) for n, p in whole.by_name.items()}
        for n, read_again in (("mask", mask), ("score", score)):  # with places in the text
            if n in whole_parts:
                whole_parts[n] = read_again(whole_parts[n].expanded, **whole_parts[n].params)
        return Program(name=name, **whole_parts)
    return whole


def require_bound(program: Program) -> None:
    """Every parameter has a value, or an error that says how to give it here."""
    for part in program.by_name.values():
        for name in part.unbound:
            how = f"--table {name}=FILE" if names_of(part.expr)[name][0] != 0 else f"--set {name}=VALUE"
            hint = f" ({named})" if (named := misnamed(name)) else ""
            raise ParameterError(f"`{name}` has no value{hint}; give it: {how}")


def chosen(more: dict[str, Any], values: dict[str, Any], parsed: Parsed) -> dict[str, Any]:
    """The values among `more` that the program mentions and does not bind."""
    roots = [e for e in (*(getattr(parsed, n) for n in ROOTS), parsed.expr) if e is not None]
    names = {name for e in roots for name in names_of(e)}
    return {n: x for n, x in more.items() if n in names and n not in values}


def scalars(program: Program) -> dict[str, Scalar]:
    return {n: x for part in program.by_name.values() for n, x in part.scalars.items()}


def tables(program: Program) -> dict[str, NDArray[Any]]:
    return {n: x for part in program.by_name.values() for n, x in part.tables.items()}


def visible_mask(program: Program, why: str) -> Mask:
    """The mask with what the score mod hides; an error where there is no mask and the score mod hides nothing."""
    require_bound(program)
    if (visible := program.visible) is None:
        raise ParameterError(f"this score mod hides nothing, so there are no tiles {why}; give a mask")
    return visible


def compiled(program: Program, tile: tuple[int, int] | None = None, **options: Any) -> Any:
    """The attention of a mask and score mod whose parameters all have values."""
    from frisket.runtime.attention.entry import compile  # the frameworks behind it are none of `show`'s business

    require_bound(program)
    return compile(program, tile=tile, **options)


def shapes(args: argparse.Namespace) -> dict[str, Any]:
    """The sizes, as `source` and `stages` of an attention take them."""
    q_len, kv_heads = args.q_len or LENGTH, args.kv_heads or args.heads
    if args.heads % kv_heads:
        raise ShapeError(f"--heads {args.heads} is no multiple of --kv-heads {kv_heads}; key heads are shared evenly")
    data: dict[str, Any] = {"q_len": q_len, "kv_len": args.kv_len or q_len, "batch": args.batch, "heads": args.heads}
    return data | {"kv_heads": kv_heads, "head_dim": args.head_dim, "v_dim": args.v_dim, "dtype": args.dtype}


def laid_out(args: argparse.Namespace, mask: Mask) -> Layout:
    """The layout of the sizes and tile that are given."""
    q_len = args.q_len or LENGTH
    kv_len = args.kv_len or q_len
    if (rows := -(-q_len // args.block[0])) > ROWS:
        message = f"{q_len:,} queries are {rows:,} rows of tiles, more than {ROWS:,}\n"
        raise ParameterError(f"{message}  take larger tiles, for example --block {-(-q_len // ROWS)}")
    mask.check_tables(q_len, kv_len, args.batch, args.heads)
    for name, at, size in (("--b", args.b, args.batch), ("--h", args.h, args.heads)):
        if at is not None and at >= size:
            raise ShapeError(f"{name} {at} is outside the {size} there are; give --batch or --heads")
    return mask.layout(q_len, kv_len, batch=args.batch, heads=args.heads, block=args.block)


def source(expr: str, more: Mapping[str, str]) -> tuple[str, str]:
    """(program text, name for errors): EXPR is a file when it ends in .frisket, and standard input when it is -.
    `more` are further parts, by name."""
    path = Path(expr)
    is_program = expr == "-" or path.suffix == ".frisket"
    try:
        text = expr if not is_program else sys.stdin.read() if expr == "-" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ParameterError(f"{'standard input' if expr == '-' else expr} is not UTF-8 text") from None
    except ValueError:  # a null character
        raise ParameterError(f"{expr!r} is no name of a file") from None
    name = "standard input" if expr == "-" else path.name if is_program else "mask"
    text = text.removeprefix("\ufeff") if is_program else text  # some editors and shells begin with it
    if more:
        at = lone(text)
        text = text if at is None else f"{text[:at]}mask = {text[at:]}"
        text = "\n".join([text, *(f"{n} = {x}" for n, x in more.items())])
    return text, name


def parts(args: argparse.Namespace) -> dict[str, str]:
    """The parts of a program that options bring, by name."""
    return {n: x for n in ROOTS[1:] if (x := getattr(args, n, None)) is not None}


def refuse_weight(program: Program, command: str) -> None:
    if program.weight is not None:
        raise ParameterError(f"`{command}` races softmax attention, and this program has a weight; leave it out")


def lone(text: str) -> int | None:
    """The start of a text's lone expression, which is its mask; a text with mistakes is taken for one."""
    try:
        return next((one.start for one in parse(text).args if one.kind == "bare"), None)
    except MaskSyntaxError:
        return 0


def scalar(text: str) -> tuple[str, Scalar]:
    """`scalar("w=256") == ("w", 256)`."""
    name, _, value = text.partition("=")
    if value.strip() in ("true", "false"):
        return name.strip(), value.strip() == "true"
    for kind in (int, float):
        try:
            return name.strip(), kind(value)
        except ValueError:
            continue
    if value.strip().startswith("[") or "," in value:
        raise ParameterError(f"--set {text}: a list is a table: write --table {name}=[{value.strip(' []')}]")
    raise ParameterError(f"--set {text}: write NAME=VALUE with a number, true or false, for example --set w=256")


def table(text: str) -> tuple[str, NDArray[Any]]:
    """`table("doc=doc.npy")` or `table("doc=[0, 0, 1]")`: the name and the array."""
    name, _, value = (part.strip() for part in text.partition("="))
    if not value or not name:
        message = f"--table {text}: write NAME=FILE with a .npy file, for example --table doc=doc.npy, or the numbers, "
        raise ParameterError(f"{message}for example --table doc=[0,0,1,1]")
    if not value.startswith("[") and re.fullmatch(r"[-+\w.]+(\s*,\s*[-+\w.]*)+", value):
        raise ParameterError(f"--table {text}: the numbers stand in brackets: write --table {name}=[{value}]")
    return name, inline_array(text, value) if value.startswith("[") else array_of_file(text, value)


def inline_array(text: str, value: str) -> NDArray[Any]:
    try:
        array = np.asarray(json.loads(value))
    except (ValueError, RecursionError, OverflowError):
        array = np.empty(0, object)  # refused below
    if array.dtype.kind not in "biuf":
        message = f"--table {text}: the numbers stand in brackets, for example doc=[0,0,1,1], and rows of equal length "
        raise ParameterError(f"{message}in brackets of theirs, for example t=[[0,1],[2,3]]")
    return array


def array_of_file(text: str, file: str) -> NDArray[Any]:
    try:
        array = np.load(file, allow_pickle=False)  # a pickle may run anything
    except (ValueError, EOFError) as error:
        raise ParameterError(f"--table {text}: {file} is not a .npy file ({error}); write it with numpy.save") from None
    if not isinstance(array, np.ndarray):
        raise ParameterError(f"--table {text}: {file} holds several arrays; save one with numpy.save")
    return array
