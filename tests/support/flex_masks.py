"""Block masks of frisket.flex beside torch's."""

from __future__ import annotations

import inspect

import numpy as np
import torch
import torch.nn.attention.flex_attention as theirs
from packaging.version import Version

import frisket.flex as ours
from frisket.runtime.flex.tensor_mask import TENSORS

S = 24
DOC = torch.tensor([0] * 7 + [1] * 5 + [2] * 12)
TORCHS = {
    n for f in (theirs.create_block_mask, theirs.BlockMask, theirs.BlockMask.from_kv_blocks)
    for n in inspect.signature(f).parameters
}  # fmt: skip
# Arguments of torch 2.13. torch 2.11 lacks them, and frisket has them with it too.
LACKING = {
    "separate_full_blocks", "compute_dq_write_order", "dq_kv_order", "dq_kv_order_spt", "dq_write_order",
    "dq_write_order_full",
} - TORCHS  # fmt: skip


PACKED = Version(torch.__version__) >= Version("2.14")  # torch's tile lists end with seq_lengths from then on


def causal(b, h, q, k):
    return q >= k


def same(mine, other, names=TENSORS):
    """Equal lists, as far as a mask of torch has them."""
    for name in [n for n in names if n not in LACKING or isinstance(other, ours.BlockMask)]:
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
    return ours.create_block_mask(fn, *args, **options), torchs(fn, *args, **options)


def torchs(fn, *args, **options):
    """torch's block mask. A torch without `separate_full_blocks` keeps full tiles apart, and its joined lists are made
    of its dense mask."""
    if "separate_full_blocks" not in LACKING or options.pop("separate_full_blocks", True):
        return theirs.create_block_mask(plain(fn), *args, **options)
    apart = theirs.create_block_mask(plain(fn), *args, **options)
    rest = apart.BLOCK_SIZE, apart.mask_mod, apart.seq_lengths
    return theirs.BlockMask.from_kv_blocks(*theirs._dense_to_ordered(apart.to_dense()), None, None, *rest)


def dense(mask):
    return torch.from_numpy(np.array(mask.mask.dense(*mask.shape[2:], *mask.shape[:2])))
