"""A program as text and what it shows: the case of every target but `hostile`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from outside.programs import Array, Case, dense, written


@dataclass(frozen=True)
class Problem:
    """A program as text, its values, the problem's sizes, and which pairs are visible: [batch, heads, q_len, kv_len].

    `synonym` is another text of the same program.
    """

    text: str
    bound: dict[str, Any]
    seen: Array
    block: tuple[int, int] = (2, 2)
    synonym: str = ""

    @property
    def lengths(self) -> tuple[int, int]:
        return self.seen.shape[2:]

    @property
    def where(self) -> dict[str, int]:
        return {"batch": self.seen.shape[0], "heads": self.seen.shape[1]}


def problem_of(case: Case) -> Problem:
    other = case.text.splitlines()
    words = random.Random(case.seed + 1)
    other[-1] = ("mask = " if other[-1].startswith("mask = ") else "") + written(case.mask, words)
    return Problem(case.text, case.bound, dense(case), case.block, "\n".join(other))


def rows(*lines: str, batch: int = 1, heads: int = 1) -> Array:
    """A dense mask, drawn: `rows("#.", "##")` is causal over two tokens."""
    return np.array([[c == "#" for c in line] for line in lines]).reshape(batch, heads, -1, len(lines[0]))
