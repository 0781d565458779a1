"""Segments of what may be negative: kernels read them by index, from 0 on and from -1 back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import frisket as fk

OFFSETS = [[-20, -5, 0, 0, 7, 30], [0, 0, 4, 9], [3, 8, 20], [-9, -4], [5, 6, 7, 8]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("off", [*OFFSETS[:2], *(pytest.param(x, marks=pytest.mark.exhaustive) for x in OFFSETS[2:])])
@pytest.mark.parametrize("text", ["segment(off, q - k) == 1", "q >= k & segment(off, k - 9) != segment(off, q - 1)"])
def test_segments_of_negative_differences_equal_the_reference(off, text):
    mask = fk.mask(text, off=np.array(off))
    att = fk.compile(mask, "score + 0.1 * segment(off, k - q)", off=np.array(off))
    q, k, v = torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    assert att.check(q, k, v).good
    jax = pytest.importorskip("jax.numpy")
    assert att.check(*(jax.asarray(x.movedim(1, 2).numpy()) for x in (q, k, v))).good
    made = mask.layout(40, 40, block=16).to_block_mask()
    assert np.array_equal(create_mask(made.mask_mod, 1, 1, 40, 40, device="cpu").numpy(), mask.dense(40, 40))


def test_only_what_may_be_negative_reads_both():
    plan = fk.compile("segment(off, q) == segment(off, q - k)", off=np.array([0, 4, 64])).stages(q_len=64).plan
    assert [t.derived for t in plan.tables] == ["segment", "segment below"]
    plan = fk.compile("segment(off, q) == segment(off, q // 2)", off=np.array([0, 4, 64])).stages(q_len=64).plan
    assert [t.derived for t in plan.tables] == ["segment"]


def test_traced_offsets_are_asked_of_positions():
    jax = pytest.importorskip("jax")
    att = fk.compile("q >= k & segment(off, q - 5) == segment(off, k)")
    x = jax.numpy.ones((1, 64, 1, 16))
    with pytest.raises(fk.LoweringError, match="asks a traced table of offsets for something other than a position"):
        jax.jit(lambda off: att(x, x, x, off=off))(jax.numpy.array([0, 4, 64]))
