"""A program as text and what it shows: the case of most targets."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from outside.programs import Array, Case, dense, written


@dataclass(frozen=True)
class Problem:
    """A program as text, its values, the problem's sizes, and which pairs are visible: [batch, heads, q_len, kv_len].

    `synonym` is another text of the same program; `others` are the program with other values and sizes; `functions` are
    the bodies of Python functions of it, by the front end that reads them; `points` are values of names, and under ""
    whether the mask holds there.
    """

    text: str
    bound: dict[str, Any]
    seen: Array
    block: tuple[int, int] = (2, 2)
    synonym: str = ""
    others: tuple[Problem, ...] = ()
    functions: dict[str, str] = field(default_factory=dict)
    points: dict[str, Array] = field(default_factory=dict)

    @property
    def lengths(self) -> tuple[int, int]:
        return self.seen.shape[2:]

    @property
    def where(self) -> dict[str, int]:
        return {"batch": self.seen.shape[0], "heads": self.seen.shape[1]}


def problem_of(case: Case, others: int = 0) -> Problem:
    other = case.text.splitlines()
    words = random.Random(case.seed + 1)
    other[-1] = ("mask = " if other[-1].startswith("mask = ") else "") + written(case.mask, words)
    more = tuple(problem_of(changed(case, i)) for i in range(others))
    return Problem(case.text, case.bound, dense(case), case.block, "\n".join(other), more)


def changed(case: Case, i: int) -> Case:
    """The same program with other lengths, batch, heads, numbers and tables."""
    draw, numbers = random.Random(f"{case.seed} {i}"), np.random.default_rng([case.seed, i])
    some = [1, 3, 16, 40, 64, 97, 130, 200]
    q_len, kv_len = draw.choice(some), draw.choice([*some, 330])  # room for runs of tiles with a gap
    batch, heads = draw.choice([(1, 1), (2, 1), (1, 2), (1, 3), (2, 2)])

    def table(name: str, old: Array) -> Array:
        n = max(q_len, kv_len, len(old))  # tables reach every position, and every index that the text clamps
        if name == "doc":
            return np.sort(numbers.integers(0, 6, n)).astype(old.dtype)
        return numbers.random(n) < 0.3 if name == "flag" else numbers.integers(-4, n, n).astype(old.dtype)

    scalars = {n: draw.choice([0, 1, 2, 5, 9, 40]) for n in case.scalars}
    tables = {n: table(n, x) for n, x in case.tables.items()}
    return replace(case, q_len=q_len, kv_len=kv_len, batch=batch, heads=heads, scalars=scalars, tables=tables)


def rows(*lines: str, batch: int = 1, heads: int = 1) -> Array:
    """A dense mask, drawn: `rows("#.", "##")` is causal over two tokens."""
    return np.array([[c == "#" for c in line] for line in lines]).reshape(batch, heads, -1, len(lines[0]))
