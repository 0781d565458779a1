"""Block masks of frisket.flex beside torch's."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.attention.flex_attention as theirs

import frisket.flex as ours
from frisket.runtime.flex.tile_tensors import TENSORS

S = 24
DOC = torch.tensor([0] * 7 + [1] * 5 + [2] * 12)


def causal(b, h, q, k):
    return q >= k


def same(mine, other, names=TENSORS):
    for name in names:
        x, y = getattr(mine, name), getattr(other, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert (x.dtype, x.shape, x.device) == (y.dtype, y.shape, y.device), name
            assert x.is_contiguous()
            assert torch.equal(x, y), name


def plain(fn):
    """torch counts the arguments of a module as 2."""
    return (lambda b, h, q, k: fn(b, h, q, k)) if isinstance(fn, torch.nn.Module) else fn


def both(fn, *args, **options):
    return ours.create_block_mask(fn, *args, **options), theirs.create_block_mask(plain(fn), *args, **options)


def dense(mask):
    return torch.from_numpy(np.array(mask.mask.dense(*mask.shape[2:], *mask.shape[:2])))
