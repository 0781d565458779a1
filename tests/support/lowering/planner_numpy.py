"""The flat planner printed for numpy: a third reading of the one text, under the interpreter's operators."""

from __future__ import annotations

from frisket.dsl.ir import OPERATORS
from frisket.lowering.kernels.language import Language
from frisket.lowering.planner.arrays import Words

HEADER = """
import math

import numpy as np
from frisket.dsl.evaluate import OPERATORS
from numpy import clip, maximum, minimum, where

np.seterr(all="ignore")
Int, Float, Bool = np.int64, np.float64, np.bool_


def op(name, *args):
    return OPERATORS[name](*(np.asarray(a) for a in args))


def arange(n, like):
    return np.arange(n)


def scalar(x, kind, like):
    return np.asarray(x).astype(kind)


def concat(parts):
    return np.concatenate(parts, -1)


def sort(x):
    return np.sort(x, -1)


def cumsum(x):
    return np.cumsum(x, -1, dtype=Int)


def take(x, i):
    return np.take_along_axis(x, i, -1)


def below(x, values):
    return (x[..., None, :] < values[..., :, None]).sum(-1)


def top(x):
    return x.max(-1, keepdims=True)


def repeated(step, widths, state):
    for width in widths:
        state = step(width, *state)
    return state


def typed(x):
    return x.astype({"b": Bool, "f": Float}.get(x.dtype.kind, Int))


def front(table, axes):
    return np.moveaxis(table, axes, range(-len(axes), 0))


def known(rows, place):
    return np.asarray(rows)[place]


def search(table, values, side):
    return np.searchsorted(table, values, side)
"""
NOT_CALLED = frozenset({"and", "or", "random"})  # of any number of operands, and what no layout reads
TABLE = {n: f'op("{n}", {", ".join(["{}"] * o.arity)})' for n, o in OPERATORS.items() if n not in NOT_CALLED}
TABLE |= {"and": "{} & {}", "or": "{} | {}"}
LANGUAGE = Language("numpy", TABLE, infinity="math.inf", nan="math.nan", bits=64)
NUMPY = Words((LANGUAGE, LANGUAGE), HEADER, (("", ""), ("", "")))
