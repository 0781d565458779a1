"""Answers of the explorer: a text, values and lengths to a picture, facts, cost and lines to run it elsewhere.

>>> found = answer({"text": "causal & window(w)", "q_len": 4096, "kv_len": 4096, "values": {"w": 256}}, {})
>>> found["scalars"][0]["high"], found["data"]["rows"]
(512, 32)
>>> answer({"text": "causal & windw(w)"}, {})["problems"][0]["caret"]
'         ^^^^^^^^'
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl import errors
from frisket.dsl.errors import EvaluationError, FrisketError, MaskSyntaxError, ParameterError, Problem, ShapeError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.functions import BUILT_IN, CONSTANTS
from frisket.dsl.ir import TRUE, Expr, conj, uses, walk
from frisket.dsl.library import definitions
from frisket.dsl.program import Parsed, read
from frisket.dsl.show import show
from frisket.dsl.types import BOOL
from frisket.runtime.draw import html, portable
from frisket.runtime.machine.parameters import names_of
from frisket.runtime.masks.layout import Layout, make_layout
from frisket.runtime.masks.mask import Mask, Program, ScoreMod, program

from .values import MadeUp, Number, ProblemSize, Slider, all_sliders

Array = NDArray[Any]
LONGEST = 1 << 22  # tokens
TILES = 1 << 16  # along each axis
ROWS = 1 << 19  # of tiles, of all batch entries and heads
CHARACTERS = 20_000
BUDGET = 1 << 30  # steps of an analysis, under half a second; tiles beyond that are drawn as partial
NAMED = (  # numbers as the page calls them
    "the number of queries", "the number of keys", "batch", "heads", "documents", "the tile's height",
    "the tile's width",
)  # fmt: skip
HEAT = 48  # samples along each axis of what becomes of a score
CURVE = 129
HEAD_DIM = 64


@dataclass(frozen=True)
class Question:
    """A question of the page. `have` are the tables it has already, by their digests."""

    text: str
    q_len: int = 2048
    kv_len: int = 2048
    batch: int = 1
    heads: int = 1
    block: tuple[int, int] = (128, 128)
    documents: int = 8
    values: Mapping[str, Number] = field(default_factory=dict)
    have: frozenset[str] = frozenset()

    @property
    def problem(self) -> ProblemSize:
        return ProblemSize(self.q_len, self.kv_len, self.batch, self.heads, self.documents)


def answer(asked: Mapping[str, Any], tables: Mapping[str, Array]) -> dict[str, Any]:
    """`asked` is a request as JSON has it, `tables` those that were given with `--table`. Never raises for what a
    person can type: an error comes back as `error`, with `problems` and their places where it has some."""
    try:
        return _answered(checked(asked), tables)
    except MaskSyntaxError as error:
        problems = [
            {"message": p.message, "start": p.span.start, "stop": p.span.stop, "remedy": p.remedy}
            | dict(zip(("where", "line", "caret"), _pictured(error, p.span), strict=True))
            for p in error.problems
        ]
        return {"error": "MaskSyntaxError", "message": str(error), "problems": problems}
    except FrisketError as error:
        return {"error": type(error).__name__, "message": str(error), "problems": []}
    except MemoryError:
        message = "not enough memory\n  ask for smaller lengths, or larger tiles"
        return {"error": "MemoryError", "message": message, "problems": []}


def _pictured(error: MaskSyntaxError, span: Any) -> list[str]:
    where, picture = errors.caret(error.source, span, error.name)
    return [where, *picture.split("\n")]


def checked(asked: Mapping[str, Any]) -> Question:
    """A request that can be worked on; ShapeError and ParameterError where it cannot."""
    if not isinstance(asked, Mapping) or not isinstance(asked.get("text"), str):
        raise ParameterError("a request is a JSON object with `text`")
    if len(asked["text"]) > CHARACTERS:
        raise ParameterError(f"the text has {len(asked['text']):,} characters; {CHARACTERS:,} are the most")
    numbers = {n: asked.get(n, getattr(Question, n)) for n in ("q_len", "kv_len", "batch", "heads", "documents")}
    block = asked.get("block", Question.block)
    if not isinstance(block, list | tuple) or len(block) != 2:
        raise ShapeError("block is two lengths in tokens: (queries, keys)")
    for name, n in zip(NAMED, (*numbers.values(), *block), strict=True):
        if type(n) is not int or not 1 <= n <= LONGEST:
            raise ShapeError(f"{name} is {n!r}\n  write a whole number from 1 to {LONGEST:,}")
    for length, tile in zip((numbers["q_len"], numbers["kv_len"]), block, strict=True):
        if length > tile * TILES:
            raise ShapeError(
                f"{length:,} tokens in tiles of {tile:,} are more than {TILES:,} tiles\n  take larger tiles"
            )
    if numbers["batch"] * numbers["heads"] * -(-numbers["q_len"] // block[0]) > ROWS:
        raise ShapeError(
            f"batch, heads and rows of tiles are more than {ROWS:,} together\n  take fewer, or larger tiles"
        )
    values, have = asked.get("values", {}), asked.get("have", [])
    if not isinstance(values, Mapping) or not all(isinstance(x, bool | int | float) for x in values.values()):
        raise ParameterError("values are numbers, true or false, by the names of parameters")
    if not isinstance(have, list | tuple) or not all(isinstance(x, str) for x in have):
        raise ParameterError("`have` lists the digests of tables")
    return Question(asked["text"], **numbers, block=(block[0], block[1]), values=values, have=frozenset(have))


def _answered(request: Question, files: Mapping[str, Array]) -> dict[str, Any]:
    start = time.perf_counter()
    what, scalars, made = bound(request, files)
    layout = laid_out(what, request)
    said = html.captions(layout)
    spent = time.perf_counter() - start
    parts = [part for part in (what.mask, what.score) if part is not None]
    said["facts"] += html.table(("note", n) for n in dict.fromkeys(n for part in parts for n in part.origin.notes))
    read_ = [n for n in files if any(n in part.tables for part in parts)]
    return {
        "data": html.data(layout, portable.plain, partial(keyed, have=request.have)), **said,
        "title": html.short(" ".join(request.text.split()), 80), "cost": cost(layout, spent),
        "score": None if what.score is None else becomes(what.score, what.mask, request),
        "scalars": [asdict(s) for s in scalars], "made": {n: t.note for n, t in made.items()},
        "command": command(request, scalars, [*read_, *made]), "python": python(request, what, scalars, made, read_),
    }  # fmt: skip


# -- from the text to a layout ------------------------------------------------------------------------------------


def bound(request: Question, files: Mapping[str, Array]) -> tuple[Program, list[Slider], dict[str, MadeUp]]:
    """The program with every name bound: to what the page says, to a file's table, else to a guess."""
    found = parsed(request)
    roots = [e for e in (found.mask, found.score, found.expr) if e is not None]
    # a mask and a score mod as one expression, of which only the names matter
    whole = roots[0] if len(roots) == 1 else conj(*(e if e.type is BOOL else e > 0 for e in roots))
    names = names_of(whole)
    unfinished(found, roots, {*request.values, *files})
    values = {n: x for n, x in {**found.defaults, **request.values}.items() if n in names and names[n][0] == 0}
    tables = {n: x for n, x in files.items() if n in names}
    scalars, made = all_sliders(values, tables, whole, request.problem)
    every = {**{s.name: s.value for s in scalars}, **tables, **{n: t.array for n, t in made.items()}}
    return program(request.text, "mask", **every), scalars, made


def parsed(request: Question) -> Parsed:
    """The program. A name that hides one of the library, or nearly is one, is a parameter where it has a value."""
    try:
        return read(request.text, params={})
    except MaskSyntaxError as error:
        said = {n: x for n, x in request.values.items() if re.search(rf"\b{re.escape(n)}\b", request.text)}
        if not said:
            raise
        try:
            return read(request.text, params=said)
        except MaskSyntaxError as other:
            raise min(error, other, key=lambda e: len(e.problems)) from None
        except FrisketError:  # a value that does not fit, or that only a comment names
            raise error from None


def unfinished(found: Parsed, roots: list[Expr], bound: set[str]) -> None:
    """MaskSyntaxError for a Bool, or a text that is only a name, that nearly is, or begins, a name of the language:
    somebody is still typing it. A name without such a neighbour is a parameter."""
    names = [*definitions(), *BUILT_IN, *CONSTANTS, "score", *re.findall(r"\bdef\s+(\w+)", found.source)]
    problems = {}
    for span, e in found.sites:
        if e.op != "param" or e.name in {*bound, *found.declared} or not (e.type is BOOL or e in roots):
            continue
        begun = sorted(
            (n for n in names if n.startswith(e.name)), key=lambda n: (n in BUILT_IN or n in CONSTANTS, len(n))
        )
        if near := begun[:1] or get_close_matches(e.name, names, 1, 0.7):
            declare = f" A parameter of that name is declared: `param {e.name}: bool`" if e.type is BOOL else ""
            remedy = f"did you mean `{near[0]}`?{declare}"
            problems[e.name] = Problem(f"unknown name `{e.name}`", span, remedy)
    if problems:
        raise MaskSyntaxError(found.source, list(problems.values()), found.name)


def laid_out(program: Program, request: Question) -> Layout:
    """The layout of the mask, and of what the score mod hides; everything, where nothing is hidden."""
    mask = Mask(TRUE) if program.visible is None else program.visible
    mask.check_tables(request.q_len, request.kv_len, request.batch, request.heads)
    return make_layout(mask, request.q_len, request.kv_len, request.batch, request.heads, request.block, budget=BUDGET)


def keyed(array: Array, have: frozenset[str]) -> dict[str, str]:
    """A table for the page under its digest; without contents where the page has them."""
    key = digest(array)
    return {"key": key} if key in have else {"key": key, **portable.plain(array)}


def digest(array: Array) -> str:
    return hashlib.blake2b(
        np.ascontiguousarray(array).tobytes() + str((array.dtype, array.shape)).encode(), digest_size=16
    ).hexdigest()


# -- what it costs ------------------------------------------------------------------------------------------


def cost(layout: Layout, spent: float) -> str:
    """Rows of a table: work and memory beside dense attention, and how long the analysis took. FLOPs are those of
    the tiles that are read, dense those of all tiles, at a head dim of 64."""
    spans, facts, c = layout.spans, layout.facts, layout.counts
    total = layout.batch * layout.heads * layout.q_len * layout.kv_len
    read, tiles = c.partial + c.full, c.partial + c.full + c.empty
    tile = layout.block[0] * layout.block[1]  # computed whole, also where the lengths end inside it
    held = spans.bounds.nbytes + spans.count.nbytes + spans.slice_of.nbytes
    rows = []
    if (pairs := facts.visible_pairs) is not None:
        rows.append(("visible", f"{html.percent(pairs, total)}, {pairs:,} pairs"))
    rows += [
        ("tiles read", f"{html.percent(read, tiles)}, {read:,} of {tiles:,}"),
        ("forward", f"{flops(read * tile)}, dense {flops(tiles * tile)}"),
        ("layout", f"{amount(held, 1024, 'B')}, a dense mask {amount(total, 1024, 'B')}"),
        ("analysis", f"{1e3 * spent:.1f} ms, {facts.method}"),
    ]
    return html.table(rows)


def flops(pairs: int) -> str:
    """The floating-point operations of the two products for so many pairs, with HEAD_DIM channels each."""
    return amount(4 * HEAD_DIM * pairs, 1000, "FLOP")


def amount(n: float, base: int, unit: str) -> str:
    """`amount(58_800_000, 1000, "FLOP") == "58.8 MFLOP"`."""
    prefixes = ("", "k", "M", "G", "T", "P", "E") if base == 1000 else ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
    power = 0
    while n >= 999.5 and power + 1 < len(prefixes):
        n, power = n / base, power + 1
    return f"{n:.3g} {prefixes[power]}{unit}"


# -- the score mod --------------------------------------------------------------------------------------------


def becomes(mod: ScoreMod, mask: Mask | None, request: Question) -> dict[str, Any]:
    """A score mod's text, and what becomes of a score: of 1 over queries and keys, where the mod knows positions, as
    `change` from -1 to 1 in units of `reach` (None: hidden); else as `curves` from -span to span, of up to 4 heads."""
    named = uses(mod.expr)
    env: dict[str, Any] = {**request.problem.sizes, **mod.scalars, "b": 0, "h": 0}
    out: dict[str, Any] = {"text": show(mod.expr, mod.params)}
    with np.errstate(all="ignore"):
        if named & {"q", "k"}:
            q, k = (np.linspace(0, n - 1, min(n, HEAT)).astype(int) for n in (request.q_len, request.kv_len))
            env |= {"q": q[:, None], "k": k[None], "score": 1.0}
            try:
                value = evaluate(mod.expr, env, mod.tables)
                shows = True if mask is None else evaluate(mask.expr, {**env, **mask.scalars}, mask.tables)
            except EvaluationError as error:
                return out | {"why": str(error)}
            change = np.broadcast_to(value, (len(q), len(k))) - 1.0
            seen = np.isfinite(change) & shows
            reach = float(np.abs(change[seen]).max(initial=0.0)) or 1.0
            scaled = np.where(seen, np.round(change / reach, 3), 0.0)
            shown = [[x if s else None for x, s in zip(xs, ss)] for xs, ss in zip(scaled.tolist(), seen.tolist())]
            return out | {"change": shown, "reach": reach}
        numbers = [*mod.scalars.values(), *(n.name for n in walk(mod.expr) if n.op == "lit")]
        span = max([4.0, *(3 * abs(x) for x in map(float, numbers) if abs(x) < 1000)])
        x = np.linspace(-span, span, CURVE)
        curves = []
        for h in range(min(4, request.heads) if "h" in named else 1):
            y = np.broadcast_to(evaluate(mod.expr, {**env, "h": h, "score": x}, mod.tables), x.shape)
            curves.append([round(v, 5) if np.isfinite(v) else None for v in y.tolist()])
    return out | {"span": span, "curves": curves}


# -- elsewhere --------------------------------------------------------------------------------------------------


def command(request: Question, scalars: list[Slider], tables: list[str]) -> str:
    """A shell command that computes the answer."""
    words = ["frisket", "show", " " * request.text.startswith("-") + request.text, "--q-len", str(request.q_len)]
    if request.kv_len != request.q_len:
        words += ["--kv-len", str(request.kv_len)]
    for name in ("batch", "heads"):
        if (n := getattr(request, name)) > 1:
            words += [f"--{name}", str(n)]
    bq, bk = request.block
    if request.block != Question.block:
        words += ["--block", str(bq) if bq == bk else f"{bq}x{bk}"]
    for s in scalars:
        words += ["--set", f"{s.name}={str(s.value).lower() if s.type == 'Bool' else s.value}"]
    return shlex.join([*words, *(word for name in tables for word in ("--table", f"{name}={name}.npy"))])


def python(
    request: Question, program: Program, scalars: list[Slider], made: Mapping[str, MadeUp], read_: list[str]
) -> str:
    """Lines of Python that compute the answer, with the tables that were made up; they run, but for files."""
    lines = [*(["import numpy as np", ""] if read_ or made else []), "import frisket as fk", ""]
    lines += dict.fromkeys(f"\n{t.needs}\n\n" for t in made.values() if t.needs)
    lines += [f'{n} = np.load("{n}.npy")' for n in read_] + [t.code for t in made.values()]
    text = request.text.strip()
    text = f'"""\n{text}\n"""' if "\n" in text and not {"\\", '"'} & {*text} else json.dumps(text, ensure_ascii=False)
    values = {**{s.name: str(s.value) for s in scalars}, **{n: n for n in (*read_, *made)}}

    def of(part: Any) -> str:
        return "".join(f", {n}={x}" for n, x in values.items() if n in names_of(part.expr))

    sizes = "".join(f", {n}={getattr(request, n)}" for n in ("batch", "heads") if getattr(request, n) > 1)
    sizes += "" if request.block == Question.block else f", block={request.block}"
    calls = []
    if program.mask is not None and program.score is not None:
        lines, text = [*lines, f"text = {text}"], "text"
    if program.mask is not None:
        lines.append(f"mask = fk.mask({text}{of(program.mask)})")
        lines.append(f"print(mask.layout({request.q_len}, {request.kv_len}{sizes}))")
        calls.append("mask=mask")
    if program.score is not None:
        lines.append(f"score = fk.score({text}{of(program.score)})")
        calls.append("score=score")
    lines.append(f"attend = fk.compile({', '.join(calls)})  # attend(q, k, v)")
    return "\n".join(lines)
