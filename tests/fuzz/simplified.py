"""The simplifier: a program's values before and after, at random values of all its variables and numbers.

Positions lie in and beyond the problem, and need not belong together: a row of a problem never has `b` above `B`. The
rules know that positions count from 0 and sizes from 1.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from outside.programs import Array, Case, value

import frisket as fk
from frisket.dsl.evaluate import evaluate
from frisket.lowering.simplify import canonical, simplify

from .problem import Problem, problem_of

MOST = 400  # points of a program
POSITIONS, SIZES, NUMBERS = "bhqk", ("B", "H", "Q_LEN", "KV_LEN"), ("w", "n", "p")
SCALES = np.array([8, 40, 110])  # as far as tables reach, so that no program leaves 64 bits


def points(case: Case) -> dict[str, Array]:
    """Values of all names, the first ones of more points of the same seed."""
    names = (*POSITIONS, *SIZES, *NUMBERS)
    n = min(case.q_len * case.kv_len, MOST)
    drawn = np.random.default_rng(case.seed).random((n, 2, len(names)))
    scale = SCALES[(drawn[:, 0] * len(SCALES)).astype(int)]
    signed = np.floor((2 * drawn[:, 1] - 1) * scale).astype(np.int64)
    found = {name: signed[:, i] for i, name in enumerate(names)}
    given = {*case.scalars, *case.defaults}
    return {
        name: x if name in NUMBERS else abs(x) + (name in SIZES)
        for name, x in found.items()
        if name not in NUMBERS or name in given
    }


def simplifier_of(case: Case) -> Problem:
    at = points(case)
    holds = np.broadcast_to(np.asarray(value(case.mask, {**at}, case), bool), at["q"].shape)
    return replace(problem_of(case), points={**at, "": holds})


def simplifier(p: Problem) -> str:
    """The mask as written, simplified, and in its canonical form, at every point."""
    m = fk.mask(p.text, **p.bound)
    at, tables = dict(p.points), {n: x for n, x in m.params.items() if np.ndim(x)}
    holds = at.pop("")
    same = canonical(m.expr)
    for name, e in [("written", m.expr), ("simplified", simplify(m.expr)), ("canonical", same.expr)]:
        names = same.names if name == "canonical" else {n: n for n in m.params}
        env = {**at, **{n: at[old] for n, old in names.items() if old in at}}
        found = np.broadcast_to(
            evaluate(e, env, {n: tables[old] for n, old in names.items() if old in tables}), holds.shape
        )
        wrong = np.flatnonzero(found != holds)
        assert not len(wrong), f"{name}: {e} at { {n: int(x[wrong[0]]) for n, x in at.items()} }"
    return str(m)
