"""Answers of the explorer: a text, values and lengths to a picture, facts, cost and lines to run it elsewhere.

>>> found = answer({"text": "causal & window(w)", "q_len": 4096, "kv_len": 4096, "values": {"w": 256}}, {})
>>> found["scalars"][0]["high"], found["data"]["rows"]
(512, 32)
>>> answer({"text": "causal & windw(w)"}, {})["problems"][0]["caret"]
'         ^^^^^^^^'

Values for unbound names are guessed: numbers by what their names mean in the library, and tables made up.

>>> from frisket.dsl.program import parse_expression
>>> all_sliders({}, {}, parse_expression("causal & window(w)"), ProblemSize(4096, 4096))[0]
[Slider(name='w', type='Int', value=128, low=0, high=512, step=2)]
"""

from __future__ import annotations

import hashlib
import json
import math
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
from frisket.dsl.errors import EvaluationError, FrisketError, MaskSyntaxError, ParameterError, ShapeError, TextProblem
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import COORDINATES, SIZES, TRUE, Expr, conj, find, names_of, uses, var
from frisket.dsl.library import definitions
from frisket.dsl.operators import BUILT_IN, CONSTANTS, SUMS
from frisket.dsl.program import ROOTS, Parsed, read
from frisket.dsl.types import BOOL, FLOAT, INT, Type
from frisket.lowering.plan import Problem
from frisket.runtime.draw import html
from frisket.runtime.masks.layout import Layout, make_layout
from frisket.runtime.masks.mask import Mask, Program, ScoreMod, Weight, program

Array = NDArray[Any]
LONGEST = 1 << 22  # tokens
TILES = 1 << 16  # along each axis
ROWS = 1 << 19  # of tiles, of all batch entries and heads
CHARACTERS = 20_000
BUDGET = 1 << 30  # steps of an analysis, under half a second; tiles beyond that are drawn as partial
# numbers as the page calls them
NAMED = "the number of queries,the number of keys,batch,heads,documents,the tile's height,the tile's width".split(",")
HEAT = 48  # samples along each axis of what becomes of a score
CURVE = 129
HEAD_DIM = 64


@dataclass(frozen=True)
class ProblemSize:
    """Lengths in tokens, and about how many documents tables that are made up cut them into."""

    q_len: int = 2048
    kv_len: int = 2048
    batch: int = 1
    heads: int = 1
    documents: int = 8

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(SIZES, (self.batch, self.heads, self.q_len, self.kv_len), strict=True))


@dataclass(frozen=True)
class Question(ProblemSize):
    """A question of the page. `have` are the tables it has already, by their digests."""

    text: str = field(kw_only=True)
    block: tuple[int, int] = (128, 128)
    values: Mapping[str, Number] = field(default_factory=dict)
    have: frozenset[str] = frozenset()


def answer(question: Mapping[str, Any], tables: Mapping[str, Array]) -> dict[str, Any]:
    """`question` is a request as JSON has it, `tables` those that were given with `--table`. Never raises for what a
    person can type: an error comes back as `error`, with `problems` and their places where it has some."""
    try:
        return _answered(checked(question), tables)
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


def checked(question: Mapping[str, Any]) -> Question:
    """A request that can be worked on; ShapeError and ParameterError where it cannot."""
    if not isinstance(question, Mapping) or not isinstance(question.get("text"), str):
        raise ParameterError("a request is a JSON object with `text`")
    if len(question["text"]) > CHARACTERS:
        raise ParameterError(f"the text has {len(question['text']):,} characters; {CHARACTERS:,} are the most")
    numbers = {n: question.get(n, getattr(Question, n)) for n in ("q_len", "kv_len", "batch", "heads", "documents")}
    block = question.get("block", Question.block)
    if not isinstance(block, list | tuple) or len(block) != 2:
        raise ShapeError("block is two lengths in tokens: (queries, keys)")
    for name, n in zip(NAMED, (*numbers.values(), *block), strict=True):
        if type(n) is not int or not 1 <= n <= LONGEST:  # True is an int, and no length
            raise ShapeError(f"{name} is {n!r}\n  write a whole number from 1 to {LONGEST:,}")
    for length, tile in zip((numbers["q_len"], numbers["kv_len"]), block, strict=True):
        if length > tile * TILES:
            text = f"{length:,} tokens in tiles of {tile:,} are more than {TILES:,} tiles\n  take larger tiles"
            raise ShapeError(text)
    if numbers["batch"] * numbers["heads"] * -(-numbers["q_len"] // block[0]) > ROWS:
        text = f"batch, heads and rows of tiles are more than {ROWS:,} together\n  take fewer, or larger tiles"
        raise ShapeError(text)
    values, have = question.get("values", {}), question.get("have", [])
    if not isinstance(values, Mapping) or not all(isinstance(x, bool | int | float) for x in values.values()):
        raise ParameterError("values are numbers, true or false, by the names of parameters")
    if not isinstance(have, list | tuple) or not all(isinstance(x, str) for x in have):
        raise ParameterError("`have` lists the digests of tables")
    return Question(text=question["text"], **numbers, block=(block[0], block[1]), values=values, have=frozenset(have))


def _answered(request: Question, files: Mapping[str, Array]) -> dict[str, Any]:
    start = time.perf_counter()
    what, scalars, guesses = bound(request, files)
    layout = laid_out(what, request)
    captions = html.captions(layout)
    spent = time.perf_counter() - start
    parts = list(what.by_name.values())
    captions["facts"] += html.table(("note", n) for n in dict.fromkeys(n for part in parts for n in part.origin.notes))
    read_ = [n for n in files if any(n in part.tables for part in parts)]
    data: dict[str, Any] = {"data": html.data(layout, html.plain, partial(keyed, have=request.have)), **captions}
    data |= {"title": " ".join(request.text.split()), "cost": cost(layout, spent)}
    drawn = what.weight if what.score is None else what.score
    data["score"] = None if drawn is None else becomes(drawn, what.mask, request)
    data |= {"scalars": [asdict(s) for s in scalars], "made": {n: t.note for n, t in guesses.items()}}
    data["command"] = command(request, scalars, [*read_, *guesses])
    return data | {"python": python(request, what, scalars, guesses, read_)}


# -- from the text to a layout ------------------------------------------------------------------------------------


def bound(request: Question, files: Mapping[str, Array]) -> tuple[Program, list[Slider], dict[str, MadeUp]]:
    """The program with every name bound: to what the page says, to a file's table, else to a guess."""
    syntax = parsed(request)
    roots = [e for e in (*(getattr(syntax, n) for n in ROOTS), syntax.expr) if e is not None]
    # a mask and a score mod as one expression, of which only the names matter
    whole = roots[0] if len(roots) == 1 else conj(*(e if e.type is BOOL else e > 0 for e in roots))
    names = names_of(whole)
    unfinished(syntax, roots, {*request.values, *files})
    # what the page says replaces the defaults of the program
    values = {n: x for n, x in {**syntax.defaults, **request.values}.items() if n in names and n not in files}
    tables = {n: x for n, x in files.items() if n in names}
    scalars, guesses = all_sliders(values, tables, whole, request)
    every = {**{s.name: s.value for s in scalars}, **tables, **{n: t.array for n, t in guesses.items()}}
    return program(request.text, "mask", **every), scalars, guesses


def parsed(request: Question) -> Parsed:
    """The program. A name that hides one of the library, or nearly is one, is a parameter where it has a value."""
    try:
        return read(request.text, params={})
    except MaskSyntaxError as error:
        values = {n: x for n, x in request.values.items() if re.search(rf"\b{re.escape(n)}\b", request.text)}
        if not values:
            raise
        try:
            return read(request.text, params=values)
        except MaskSyntaxError as other:
            raise min(error, other, key=lambda e: len(e.problems)) from None
        except FrisketError:  # a value that does not fit, or that only a comment names
            raise error from None


def unfinished(syntax: Parsed, roots: list[Expr], bound: set[str]) -> None:
    """MaskSyntaxError for a Bool, or a text that is only a name, that nearly is, or begins, a name of the language:
    somebody is still typing it. A name without such a neighbour is a parameter."""
    names = [*definitions(), *BUILT_IN, *CONSTANTS, "score", *SUMS, *re.findall(r"\bdef\s+(\w+)", syntax.source)]
    known, problems = {*BUILT_IN, *CONSTANTS}, {}
    for span, e in syntax.sites:
        if e.op != "param" or e.name in {*bound, *syntax.declared} or not (e.type is BOOL or e in roots):
            continue
        begun = sorted((n for n in names if n.startswith(e.name)), key=lambda n: (n in known, len(n)))
        if near := begun[:1] or get_close_matches(e.name, names, 1, 0.7):
            declare = f" A parameter of that name is declared: `param {e.name}: bool`" if e.type is BOOL else ""
            remedy = f"did you mean `{near[0]}`?{declare}"
            problems[e.name] = TextProblem(f"unknown name `{e.name}`", span, remedy)
    if problems:
        raise MaskSyntaxError(syntax.source, list(problems.values()), syntax.name)


def laid_out(program: Program, request: Question) -> Layout:
    """The layout of the mask, and of what the score mod hides; everything, where nothing is hidden."""
    mask = Mask(TRUE) if program.visible is None else program.visible
    lengths = request.q_len, request.kv_len, request.batch, request.heads
    mask.check_tables(*lengths)
    return make_layout(mask, Problem.of(*lengths), request.block, budget=BUDGET)


def keyed(array: Array, have: frozenset[str]) -> dict[str, str]:
    """A table for the page under its digest; without contents where the page has them."""
    key = digest(array)
    return {"key": key} if key in have else {"key": key, **html.plain(array)}


def digest(array: Array) -> str:
    # equal bytes may have another shape
    content = np.ascontiguousarray(array).tobytes() + str((array.dtype, array.shape)).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


# -- what it costs ------------------------------------------------------------------------------------------


def cost(layout: Layout, spent: float) -> str:
    """Rows of a table: work and memory compared with dense attention, and how long the analysis took. FLOPs are those
    of the tiles that are read, dense those of all tiles, at a head dim of 64."""
    spans, facts, c = layout.spans, layout.facts, layout.counts
    total = layout.batch * layout.heads * layout.q_len * layout.kv_len
    read, tiles = c.partial + c.full, c.partial + c.full + c.empty
    tile = layout.block[0] * layout.block[1]  # computed whole, also where the lengths end inside it
    nbytes = spans.bounds.nbytes + spans.count.nbytes + spans.slice_of.nbytes
    pairs = facts.visible_pairs
    rows = [
        ("visible", facts.counted if pairs is None else f"{html.percent(pairs, total)}, {facts.counted}"),
        ("tiles read", f"{html.percent(read, tiles)}, {read:,} of {tiles:,}"),
        ("forward", f"{flops(read * tile)}, dense {flops(tiles * tile)}"),
        ("layout", f"{amount(nbytes, 1024, 'B')}, a dense mask {amount(total, 1024, 'B')}"),
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
    while n >= 999.5 and power + 1 < len(prefixes):  # 999.5 would be written as 1e+03
        n, power = n / base, power + 1
    return f"{n:.3g} {prefixes[power]}{unit}"


# -- the score mod --------------------------------------------------------------------------------------------


def becomes(mod: ScoreMod | Weight, mask: Mask | None, request: Question) -> dict[str, Any]:
    """The text of a score mod or a weight, and what becomes of a score.

    Where positions matter: what becomes of 1 over queries and keys, as `change` from -1 to 1 in units of `reach` (None:
    hidden). Else `curves` from -span to span, of up to 4 heads."""
    named = uses(mod.expr)
    env: dict[str, Any] = {**request.sizes, **mod.scalars, "b": 0, "h": 0}
    out: dict[str, Any] = {"text": "weight = " * isinstance(mod, Weight) + mod.expanded}
    with np.errstate(all="ignore"):  # a score mod may divide by 0: that shows as hidden
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
            reach = float(np.abs(change[seen]).max(initial=0.0)) or 1.0  # no 0 / 0 where nothing changes
            scaled = np.where(seen, np.round(change / reach, 3), 0.0)
            shown = [[x if s else None for x, s in zip(xs, ss)] for xs, ss in zip(scaled.tolist(), seen.tolist())]
            return out | {"change": shown, "reach": reach}
        numbers = [*mod.scalars.values(), *(n.name for n in find(mod.expr, "lit"))]
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
    # a text that begins with - would be an option
    words = ["frisket", "show", " " * request.text.startswith("-") + request.text, "--q-len", str(request.q_len)]
    if request.kv_len != request.q_len:
        words += ["--kv-len", str(request.kv_len)]
    for name in ("batch", "heads"):
        if (n := getattr(request, name)) > 1:
            words += [f"--{name}", str(n)]
    bq, bk = request.block
    if request.block != Question.block:
        words += ["--block", str(bq) if bq == bk else f"{bq}x{bk}"]
    for s in (x for x in scalars if x.name not in tables):
        words += ["--set", f"{s.name}={str(s.value).lower() if s.type == 'Bool' else s.value}"]
    return shlex.join([*words, *(word for name in tables for word in ("--table", f"{name}={name}.npy"))])


def python(request: Question, program: Program, scalars: list[Slider], guesses: Guesses, read_: list[str]) -> str:
    """Lines of Python that compute the answer, with the tables that were made up; they run, but for files."""
    lines = [*(["import numpy as np", ""] if read_ or guesses else []), "import frisket as fk", ""]
    lines += dict.fromkeys(f"\n{t.needs}\n\n" for t in guesses.values() if t.needs)
    lines += [f'{n} = np.load("{n}.npy")' for n in read_] + [t.code for t in guesses.values()]
    text = request.text.strip()
    # in triple quotes nothing is escaped, and a text in lines stays readable
    text = f'"""\n{text}\n"""' if "\n" in text and not {"\\", '"'} & {*text} else json.dumps(text, ensure_ascii=False)
    values = {**{s.name: str(s.value) for s in scalars}, **{n: n for n in (*read_, *guesses)}}

    def of(part: Any) -> str:
        return "".join(f", {n}={x}" for n, x in values.items() if n in names_of(part.expr))

    sizes = "".join(f", {n}={getattr(request, n)}" for n in ("batch", "heads") if getattr(request, n) > 1)
    sizes += "" if request.block == Question.block else f", block={request.block}"
    calls = []
    if len(program.by_name) > 1:
        lines, text = [*lines, f"text = {text}"], "text"
    if program.mask is not None:
        lines.append(f"mask = fk.mask({text}{of(program.mask)})")
        lines.append(f"print(mask.layout({request.q_len}, {request.kv_len}{sizes}))")
        calls.append("mask=mask")
    if program.score is not None:
        lines.append(f"score = fk.score({text}{of(program.score)})")
        calls.append("score=score")
    if program.weight is not None:
        read_by = names_of(program.weight.expr) | (names_of(program.divide.expr) if program.divide else {})
        lines.append(f"weight = fk.weight({text}{''.join(f', {n}={x}' for n, x in values.items() if n in read_by)})")
        calls.append("weight=weight")
    lines.append(f"attend = fk.compile({', '.join(calls)})  # attend(q, k, v)")
    return "\n".join(lines)


Number = bool | int | float
MOST = 1 << 22  # entries of a table that is made up
SLIDES = 256  # steps of a slider, about
LARGEST = 1e300  # what a slider reaches beyond it is no longer a float

# what names mean in the library: a share of the queries (as n // so many), or another number
SHARES = (("w|window|left|right|radius", 32), ("p|prefix|offset|shift|q0|far_back", 8), ("k0|c", 4), ("s", 2))
NUMBERS: tuple[tuple[str, float], ...] = (("g|stride.*|dilation.*|frames|t5", 4), ("kernel_frames", 3), ("kernel.*", 9))
NUMBERS += (("tile_frames", 2), ("tile.*|.*_tile_.*", 8), ("buckets", 32), ("seed", 0), ("c|cap", 50.0))
NUMBERS += (("far", 128.0), ("p|rate|x", 0.5))


@dataclass(frozen=True)
class Slider:
    """A number and its slider: from `low` to `high`, both inclusive."""

    name: str
    type: str
    value: Number
    low: float
    high: float
    step: float


@dataclass(frozen=True)
class MadeUp:
    """A table without values, and the lines of Python that make it."""

    array: Array
    code: str
    note: str
    needs: str = ""  # a function those call


Guesses = dict[str, MadeUp]


def all_sliders(
    values: Mapping[str, Number], tables: Mapping[str, Array], e: Expr, problem: ProblemSize
) -> tuple[list[Slider], Guesses]:
    """Every scalar of `e` with its slider, and the tables that are not among `tables`. A table of one Int for each
    batch entry, `n[b]`, has a slider for all of them."""
    names = names_of(e)
    missing = {n: t for n, (rank, t) in names.items() if rank != 0 and n not in tables}
    reads = [n for n in find(e, "lookup", "segment") if n.name in missing]
    # lengths differ between entries, so that no slider stands for them all
    more = {n.name for n in reads if n.args != (var("b"),) or n.type is not INT or n.name.startswith(("len", "stop"))}
    alike = {n.name for n in reads} - more
    scalars = [
        slider(n, t, values[n] if n in values else guess(n, t, problem), guess(n, t, problem))
        for n, (rank, t) in names.items()
        if rank == 0 or n in alike
    ]
    numbers = {s.name: s.value for s in scalars}
    guesses = {n: made_up(n, t, e, numbers, problem) for n, t in missing.items() if n not in alike}
    for n in alike:
        size, value = (problem.batch,), numbers[n]
        guesses[n] = MadeUp(np.full(size, value), f"{n} = np.full({size}, {value})", "one number for all batch entries")
    return scalars, guesses


# -- numbers ----------------------------------------------------------------------------------------


def guess(name: str, type: Type, problem: ProblemSize) -> Number:
    """A value to begin with: `guess("w", INT, ProblemSize(4096, 4096)) == 128`."""
    if type is BOOL:
        return True
    if type is FLOAT:
        return next((float(x) for names, x in NUMBERS if isinstance(x, float) and re.fullmatch(names, name)), 1.0)
    side = math.isqrt(problem.q_len)
    exact = {"rows": side, "cols": side, "size": problem.q_len, "q1": problem.q_len * 5 // 8}
    exact["k1"] = problem.kv_len * 7 // 8
    if name in exact:
        return exact[name]
    for names, share in SHARES:
        if re.fullmatch(names, name):
            return max(1, problem.q_len // share)
    return next((int(x) for names, x in NUMBERS if isinstance(x, int) and re.fullmatch(names, name)), 64)


def slider(name: str, type: Type, value: Number, usual: Number) -> Slider:
    """A range around the usual value, wide enough for this one: it stays where it is while the value is moved."""
    if type is BOOL:
        return Slider(name, "Bool", bool(value), 0, 1, 1)
    if not abs(value) <= LARGEST:  # this way round NaN is refused too
        raise ParameterError(f"`{name}` is not a number from -{LARGEST:g} to {LARGEST:g}")
    if type is FLOAT:
        high = 4 * _power(max(abs(usual), abs(value) / 4))
        return Slider(name, "Float", float(value), -high if value < 0 else 0.0, high, high / SLIDES)
    high = int(_power(max(4 * abs(usual), abs(value), 16)))
    return Slider(name, "Int", int(value), -high if value < 0 else 0, high, max(1, high // SLIDES))


def _power(x: float) -> float:
    """The power of two from which x is not far down."""
    return 2.0 ** math.ceil(math.log2(x)) if x > 0 else 1.0


# -- tables -------------------------------------------------------------------------------------------


def made_up(name: str, type: Type, e: Expr, numbers: Mapping[str, Number], problem: ProblemSize) -> MadeUp:
    """Documents of random lengths for tables of Ints, a few marks for Bools, slopes or noise for Floats."""
    shape = shape_of(name, e, numbers, problem)
    if math.prod(shape) > MOST:
        size = " × ".join(f"{n:,}" for n in shape)
        raise ParameterError(f"table `{name}` has {size} entries, more than are made up here; give it: --table")
    draw, heads = np.random.default_rng(0), problem.heads  # of one seed: the lines of Python draw the same numbers
    rng = "np.random.default_rng(0)"
    if type is BOOL:
        return MadeUp(draw.random(shape) < 0.05, f"{name} = {rng}.random({shape}) < 0.05", "one in 20 is marked")
    if type is FLOAT and shape == (heads,):
        slopes = np.exp2(-8 * np.arange(1, heads + 1) / heads).astype(np.float32)
        code = f"{name} = np.exp2(-8 * np.arange(1, {heads + 1}) / {heads}).astype(np.float32)"
        return MadeUp(slopes, code, "slopes, a power of two for each head")
    if type is FLOAT:
        noise = draw.standard_normal(shape, np.float32)
        return MadeUp(noise, f"{name} = {rng}.standard_normal({shape}, np.float32)", "random numbers")
    length = problem.kv_len if name.startswith("k") or shape[-1] == problem.kv_len else problem.q_len
    firsts = name.startswith("start")  # where the document of a position begins
    length = max(problem.q_len, problem.kv_len) if firsts else length
    n = min(problem.documents, length)
    off, cut, note = offsets(length, n), f"offsets({length}, {n})", f"{n} documents of random lengths"
    if shape == (n + 1,):
        return MadeUp(off, f"{name} = {cut}", note, OFFSETS)
    if name.startswith("len") and shape == (n,):
        return MadeUp(np.diff(off) // 2, f"{name} = np.diff({cut}) // 2", "half of every document", OFFSETS)
    if name.startswith(("len", "stop")):
        code = f"{name} = {rng}.integers({length // 2}, {length}, {shape}, np.int32)"
        return MadeUp(draw.integers(length // 2, length, shape, np.int32), code, f"from {length // 2:,} to {length:,}")
    if shape[-1] == length or firsts:
        each = off[:-1] if firsts else np.arange(n, dtype=np.int32)
        ids = np.broadcast_to(np.repeat(each, np.diff(off))[: shape[-1]], shape)
        code = f"np.repeat({f'{cut}[:-1]' if firsts else f'np.arange({n}, dtype=np.int32)'}, np.diff({cut}))"
        code += f"[:{shape[-1]}]" if shape[-1] < length else ""
        code = code if ids.ndim == 1 else f"np.broadcast_to({code}, {shape})"
        return MadeUp(ids, f"{name} = {code}", note, OFFSETS)
    code = f"{name} = np.sort({rng}.integers(0, {n}, {shape}, np.int32), -1)"
    return MadeUp(np.sort(draw.integers(0, n, shape, np.int32), -1), code, f"random numbers below {n}")


OFFSETS = """\
def offsets(length, documents):
    cuts = np.random.default_rng(0).choice(np.arange(1, length), documents - 1, replace=False)
    return np.concatenate([[0], np.sort(cuts), [length]]).astype(np.int32)"""


def offsets(length: int, documents: int) -> Array:
    """int32 [documents + 1]: where documents of random lengths, none empty, begin and end; what OFFSETS says."""
    cuts = np.random.default_rng(0).choice(np.arange(1, length), documents - 1, replace=False)
    return np.concatenate([[0], np.sort(cuts), [length]]).astype(np.int32)


def shape_of(name: str, e: Expr, numbers: Mapping[str, Number], problem: ProblemSize) -> tuple[int, ...]:
    """The size of a table by what reads it: along an axis numbered by tables, one a document; for offsets one more."""
    offsets = [n for n in find(e, "segment") if n.name == name]
    lengths = {0: min(problem.documents, problem.q_len) + 1} if offsets else {}
    for node in find(e, "lookup"):
        for axis, index in enumerate(node.args if node.name == name else ()):
            lengths[axis] = max(lengths.get(axis, 1), _reach(index, numbers, problem))
    if set(lengths) != set(range(len(lengths))) or not lengths:
        raise ParameterError(f"table `{name}` has no value, and nothing says how large it is; give it: --table")
    return tuple(lengths[axis] for axis in range(len(lengths)))


def _reach(index: Expr, numbers: Mapping[str, Number], problem: ProblemSize) -> int:
    """One more than the largest index, over the corners of the problem."""
    if find(index, "lookup", "segment", "bound", "extent", "reduce"):
        documents = min(problem.documents, problem.q_len)
        return documents + 1 if index.op == "add" else documents
    corners = [np.array([0, n - 1]) for n in (problem.batch, problem.heads, problem.q_len, problem.kv_len)]
    at = dict(zip(COORDINATES, np.meshgrid(*corners, indexing="ij"), strict=True))
    named = uses(index)
    env = {n: x for n, x in {**at, **problem.sizes, **numbers}.items() if n in named or n in numbers}
    try:
        return max(1, int(np.max(evaluate(index, env))) + 1)
    except FrisketError:
        return 1
