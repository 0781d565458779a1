"""Values for what nobody has bound yet: numbers by what their names mean in the library, and tables made up.

>>> from frisket.dsl.program import parse_expression
>>> all_sliders({}, {}, parse_expression("causal & window(w)"), ProblemSize(4096, 4096))[0]
[Slider(name='w', type='Int', value=128, low=0, high=512, step=2)]
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import FrisketError, ParameterError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import COORDINATES, SIZES, Expr, uses, walk
from frisket.dsl.types import BOOL, FLOAT, Type
from frisket.runtime.machine.parameters import names_of

Array = NDArray[Any]
Number = bool | int | float
MOST = 1 << 22  # entries of a table that is made up
SLIDES = 256  # steps of a slider, about
LARGEST = 1e300  # what a slider reaches beyond it is no longer a float

# what names mean in the library: a share of the queries (as n // so many), or a number of its own
SHARES = (("w|window|left|right|radius", 32), ("p|prefix|offset|shift|q0|far_back", 8), ("k0|c", 4), ("s", 2))
NUMBERS: tuple[tuple[str, float], ...] = (
    ("g|stride.*|dilation.*|frames|t5", 4), ("kernel_frames", 3), ("kernel.*", 9), ("tile_frames", 2),
    ("tile.*|.*_tile_.*", 8), ("buckets", 32), ("seed", 0), ("c|cap", 50.0), ("far", 128.0), ("p|rate|x", 0.5),
)  # fmt: skip


@dataclass(frozen=True)
class ProblemSize:
    """Lengths in tokens, and about how many documents tables that are made up cut them into."""

    q_len: int
    kv_len: int
    batch: int = 1
    heads: int = 1
    documents: int = 8

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(SIZES, (self.batch, self.heads, self.q_len, self.kv_len), strict=True))


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
    """A table nobody gave, and the lines of Python that make it."""

    array: Array
    code: str
    note: str
    needs: str = ""  # a function those call


def all_sliders(
    values: Mapping[str, Number], tables: Mapping[str, Array], e: Expr, problem: ProblemSize
) -> tuple[list[Slider], dict[str, MadeUp]]:
    """Every scalar of `e` with its slider, and the tables that are not among `tables`."""
    names = names_of(e)
    scalars = [
        slider(n, t, values[n] if n in values else guess(n, t, problem), guess(n, t, problem))
        for n, (rank, t) in names.items()
        if rank == 0
    ]
    numbers = {s.name: s.value for s in scalars}
    missing = {n: t for n, (rank, t) in names.items() if rank != 0 and n not in tables}
    return scalars, {n: made_up(n, t, e, numbers, problem) for n, t in missing.items()}


# -- numbers ----------------------------------------------------------------------------------------


def guess(name: str, type: Type, problem: ProblemSize) -> Number:
    """A value to begin with: `guess("w", INT, ProblemSize(4096, 4096)) == 128`."""
    if type is BOOL:
        return True
    if type is FLOAT:
        return next((float(x) for names, x in NUMBERS if isinstance(x, float) and re.fullmatch(names, name)), 1.0)
    side = math.isqrt(problem.q_len)
    exact = {"rows": side, "cols": side, "size": problem.q_len, "q1": problem.q_len * 5 // 8}
    exact |= {"k1": problem.kv_len * 7 // 8}
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
    if not abs(value) <= LARGEST:
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
    draw, heads = np.random.default_rng(0), problem.heads
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
    n = min(problem.documents, length)
    off, cut, note = offsets(length, n), f"offsets({length}, {n})", f"{n} documents of random lengths"
    if shape == (n + 1,):
        return MadeUp(off, f"{name} = {cut}", note, OFFSETS)
    if name.startswith("len") and shape == (n,):
        return MadeUp(np.diff(off) // 2, f"{name} = np.diff({cut}) // 2", "half of every document", OFFSETS)
    if name.startswith(("len", "stop")):
        code = f"{name} = {rng}.integers({length // 2}, {length}, {shape}, np.int32)"
        return MadeUp(draw.integers(length // 2, length, shape, np.int32), code, f"from {length // 2:,} to {length:,}")
    if shape[-1] == length:
        ids = np.broadcast_to(np.repeat(np.arange(n, dtype=np.int32), np.diff(off)), shape)
        code = f"np.repeat(np.arange({n}, dtype=np.int32), np.diff({cut}))"
        return MadeUp(
            ids, f"{name} = " + (code if ids.ndim == 1 else f"np.broadcast_to({code}, {shape})"), note, OFFSETS
        )
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
    found: dict[int, int] = {}
    for node in walk(e):
        if node.op == "segment" and node.name == name:
            found[0] = min(problem.documents, problem.q_len) + 1
        elif node.op == "lookup" and node.name == name:
            for axis, index in enumerate(node.args):
                found[axis] = max(found.get(axis, 1), _reach(index, numbers, problem))
    if set(found) != set(range(len(found))) or not found:
        raise ParameterError(f"table `{name}` has no value, and nothing says how large it is; give it: --table")
    return tuple(found[axis] for axis in range(len(found)))


def _reach(index: Expr, numbers: Mapping[str, Number], problem: ProblemSize) -> int:
    """One more than the largest index, over the corners of the problem."""
    if any(n.op in ("lookup", "segment", "bound", "extent", "reduce") for n in walk(index)):
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
