"""The table of torch callables: every mask mod and score mod that people are known to write for flex_attention."""

from __future__ import annotations

from functools import cache

from .torch_case import Case
from .torch_masks import masks
from .torch_scores import scores

__all__ = ["MASKS", "SCORES", "Case", "mask_case", "score_case"]


@cache
def _masks() -> dict[str, Case]:
    return {c.name: c for c in masks()}


@cache
def _scores() -> dict[str, Case]:
    return {c.name: c for c in scores()}


MASKS, SCORES = list(_masks()), list(_scores())


def mask_case(name: str) -> Case:
    return _masks()[name]


def score_case(name: str) -> Case:
    return _scores()[name]
