"""create_block_mask, create_mask, and_masks and or_masks: what they take, and what they say of mistakes."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from support.flex_masks import S, both, causal, dense, plain, same
from support.torch import masks as torch_masks

import frisket as fk
import frisket.flex as ours


@pytest.mark.parametrize("case", torch_masks.tested()[::4], ids=lambda c: c.name)
def test_create_mask_equals_that_of_torch(case):
    found = ours.create_mask(case.fn, case.batch, case.heads, case.q_len, case.kv_len, "cpu")
    expected = theirs.create_mask(plain(case.fn), *case.shape, "cpu")
    assert (found.dtype, found.shape, found.is_contiguous()) == (torch.bool, case.shape, True)
    assert torch.equal(found, expected.expand(case.shape))


def test_create_mask_of_a_score_mod():
    def windowed(score, b, h, q, k):
        return torch.where((q >= k) & (q - k < 5), score * 2 - h, -math.inf)

    expected = theirs.create_mask(windowed, 2, 3, 12, 16, "cpu")
    assert torch.equal(ours.create_mask(windowed, 2, 3, 12, 16, "cpu"), expected)
    text = "where(causal & q - k < 5, score * 2.0 - h, -inf)"
    assert torch.equal(ours.create_mask(text, 2, 3, 12, 16, "cpu"), expected)
    assert torch.equal(ours.create_mask(fk.score(text), 2, 3, 12, 16, "cpu"), expected)
    text = "where(score > 0.5, score, -inf)"  # of a score of 0
    assert not ours.create_mask(text, 1, 1, 2, 2, "cpu").any()
    assert ours.create_mask("causal", None, None, 3, 3, "cpu").tolist() == [[np.tri(3, dtype=bool).tolist()] * 1]


def test_and_masks_and_or_masks():
    prefix = fk.mask("k < n", n=5)
    x, y = (ours.create_mask(m, None, None, S, S, "cpu") for m in (causal, prefix))
    for join, wanted in ((ours.and_masks, x & y), (ours.or_masks, x | y)):
        for parts in ((causal, lambda b, h, q, k: k < 5), (causal, prefix), ("causal", "k < 5", causal)):
            joined = join(*parts)
            assert torch.equal(ours.create_mask(joined, None, None, S, S, "cpu"), wanted)
            assert torch.equal(theirs.create_mask(joined, 1, 1, S, S, "cpu"), wanted)  # it is a mask_mod
            same(*both(joined, None, None, S, S, "cpu", 8))
    for join, value in ((ours.and_masks, True), (ours.or_masks, False)):
        assert torch.equal(ours.create_mask(join(), 1, 1, 2, 3, "cpu"), torch.full((1, 1, 2, 3), value))
    assert ours.noop_mask is theirs.noop_mask
    joined = ours.and_masks("k <= KV_LEN - 3", causal)
    assert ours.create_mask(joined, None, None, S, S, "cpu").sum() == x[..., : S - 2].sum()
    with pytest.raises(fk.TraceError, match="this mask reads `KV_LEN`, which a mask_mod is not told"):
        theirs.create_mask(joined, 1, 1, S, S, "cpu")


# -- mistakes -----------------------------------------------------------------------------------------

LIMIT = torch.arange(S)
MISTAKES = [
    (lambda b, h, q_idx: q_idx > 0, AssertionError, "this lambda takes b, h, q_idx; a mask_mod takes four by place"),
    (lambda h, q, k: q >= k, AssertionError, "this lambda takes h, q, k; a mask_mod takes four by place"),
    (lambda b, h, q, k, *, w: q >= k, AssertionError, "takes b, h, q, k, w; a mask_mod takes four by place"),
    (lambda s, b, h, q, k: s, AssertionError, "takes `score`, so it is a score mod"),
    (lambda b, h, q, k: q - k, AssertionError, "a mask returns a Bool, this lambda returns an Int"),
    (lambda b, h, q, k: q >= k and k > 3, RuntimeError, "a position has no truth value"),
    (3, AssertionError, r"mask_mod is int\n  it is a function `mask_mod\(b, h, q_idx, kv_idx\)`, a text"),
    ("causl", SyntaxError, "did you mean `causal`"),
    (
        lambda b, h, q, k: LIMIT[q - 1] >= k,
        IndexError,
        r"`LIMIT\[q - 1\]` reads `LIMIT` at -1 on axis 0, .* at query 0",
    ),
    (lambda b, h, q, k: LIMIT[q + k] >= k, IndexError, r"reads `LIMIT` at 24 on axis 0, .* at query 1, key 23"),
]


class Shifted(torch.nn.Module):
    def forward(self, b, h, q, k, by=2):
        return q + by >= k

    def of_others(self, score, q, k, by):  # names are theirs to choose
        return k + self.two >= by

    two = 2


FOUR = [
    Shifted(), Shifted().forward, Shifted().of_others, lambda *places: places[2] + 2 >= places[3],
    lambda b, h, k, q: k + 2 >= q, lambda b, h, q, *k: q + 2 >= k[0], lambda b, h, q, kv, k=2: q + k >= kv,
    functools.partial(lambda by, b, h, q, k: q + by >= k, 2),
    functools.partial(lambda b, h, q, k, by: q + by >= k, by=2),
]  # fmt: skip


@pytest.mark.parametrize("mask_mod", FOUR)
def test_four_arguments_by_place(mask_mod):
    shown = torch.arange(S)[:, None] + 2 >= torch.arange(S)
    assert torch.equal(ours.create_mask(mask_mod, None, None, S, S, "cpu")[0, 0], shown)
    assert ours.create_block_mask(mask_mod, None, None, S, S, "cpu").mask == fk.mask("q + 2 >= k")


@pytest.mark.parametrize(("mask_mod", "kind", "text"), MISTAKES)
def test_create_block_mask_refuses_bad_mask_mods(mask_mod, kind, text):
    with pytest.raises(kind, match=text) as e:
        ours.create_block_mask(mask_mod, None, None, S, S, "cpu", 8)
    assert isinstance(e.value, fk.FrisketError)


def test_hidden_or_clamped_lookups_outside_a_table_are_allowed():
    same(*both(lambda b, h, q, k: (q >= 1) & (LIMIT[(q - 1).clamp(min=0)] >= k), None, None, S, S, "cpu", 8))
    mine = ours.create_block_mask(lambda b, h, q, k: (q >= 1) & (LIMIT[q - 1] >= k), None, None, S, S, "cpu", 8)
    assert dense(mine).sum() == sum(range(24))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"B": 0}, r"B is 0\n  it is how many there are, or None where all are alike"),
        ({"H": 2.5}, "H is 2.5"),
        ({"H": True}, "H is True"),
        ({"Q_LEN": -1}, r"\(Q_LEN, KV_LEN\) is \(-1, 24\)"),
        ({"KV_LEN": -3}, r"\(Q_LEN, KV_LEN\) is \(24, -3\)"),
        ({"BLOCK_SIZE": 0}, r"BLOCK_SIZE is 0\n  it is positive ints, \(queries, keys\), in tokens"),
        ({"BLOCK_SIZE": (8, 8, 8)}, r"BLOCK_SIZE is \(8, 8, 8\)"),
        ({"dq_kv_order": torch.zeros(3)}, "dq_kv_order must be a bool when using create_block_mask, not Tensor"),
    ],
)
def test_numbers_that_make_no_sense(change, text):
    with pytest.raises(ValueError, match=text) as e:
        ours.create_block_mask(
            **{"mask_mod": causal, "B": 1, "H": 1, "Q_LEN": S, "KV_LEN": S, "device": "cpu", **change}
        )
    assert isinstance(e.value, fk.FrisketError)


def test_compile_is_not_needed():
    with pytest.warns(DeprecationWarning, match="_compile has no effect"):
        made = ours.create_block_mask(causal, None, None, S, S, "cpu", 8, _compile=True)
    same(made, theirs.create_block_mask(causal, None, None, S, S, "cpu", 8))


@pytest.mark.parametrize("join", [ours.and_masks, ours.or_masks])
def test_only_masks_are_joined(join):
    with pytest.raises(RuntimeError, match=r"_masks of int: 3\n  all inputs are mask_mods") as e:
        join(causal, 3)
    assert isinstance(e.value, fk.FrisketError)
