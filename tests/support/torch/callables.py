"""The table of torch callables: every mask mod and score mod that people are known to write for flex_attention."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from support.torch.case import Case
from support.torch.masks import masks
from support.torch.scores import scores

__all__ = ["MASKS", "SCORES", "Case", "in_torch", "mask_case", "score_case"]


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


def in_torch(case, score=None):
    """The callable as flex_attention calls it: on 0-d tensors, mapped over every position."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    lead = () if score is None else (0,)
    fn = case.fn
    if not case.maps:
        return fn(score, *(torch.from_numpy(x) for x in np.ogrid[tuple(map(slice, case.shape))]))
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        fn = torch.vmap(fn, in_dims=(*lead, *dims))
    places = [torch.arange(n) for n in case.shape]
    with TransformGetItemToIndex():
        return fn(*places) if score is None else fn(score, *places)
