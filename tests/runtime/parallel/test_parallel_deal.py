"""Deals: every token on one rank, evenly, and what ranks need of one another is what the mask shows."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import frisket as fk
from frisket.dsl.errors import BudgetError, ParameterError, ShapeError
from frisket.runtime.parallel import deal as dealing

LENGTH, TILE = 500, 16
DOC = np.repeat(np.arange(12), np.random.default_rng(3).integers(5, 90, 12))[:LENGTH].astype(np.int32)
DOC = np.pad(DOC, (0, LENGTH - len(DOC)), mode="edge")
MASKS = {
    "full": fk.mask("true"),
    "nothing": fk.mask("false"),
    "causal": fk.mask("causal"),
    "window": fk.mask("causal & window(40)"),
    "documents": fk.mask("causal & same(doc)", doc=DOC),
    "documents by batch": fk.mask("causal & doc[b, q] == doc[b, k]", doc=np.stack([DOC, DOC[::-1].copy()])),
    "by head": fk.mask("causal & q - k < 30 * (h + 1)"),
    "prefix": fk.mask("prefix_lm(90)"),
    "block diffusion": fk.mask("block_diffusion(250, 20)"),
    "dilated": fk.mask("causal & (q - k) % 70 < 3"),
    "far": fk.mask("q - k > 300"),
}


def dealt(name, ranks=4):
    return fk.parallel.deal(MASKS[name], LENGTH, ranks, tile=TILE, batch=2, heads=3)


@pytest.mark.parametrize("ranks", [1, 4, 7, 40])
@pytest.mark.parametrize("name", MASKS)
def test_deal_gives_each_token_to_one_rank(name, ranks):
    d = dealt(name, ranks)
    assert sorted(d.order) == list(range(ranks * d.shard))
    assert d.shard * ranks < LENGTH + ranks * TILE
    positions = d.positions()
    assert positions.dtype == np.int32
    assert (np.diff(positions, axis=1) > 0).all()
    held = [[p for a, b in ranges for p in range(a, b)] for ranges in d.owned]
    assert [row[row < LENGTH].tolist() for row in positions] == held
    assert d.held.tolist() == [len(x) for x in held]
    assert all(a[1] < b[0] for ranges in d.owned for a, b in pairwise(ranges))


@pytest.mark.parametrize("name", MASKS)
def test_deal_counts_pairs_and_needs_between_ranks(name):
    d = dealt(name)
    seen = MASKS[name].dense(LENGTH, LENGTH, 2, 3)
    at = [d.positions(r)[: d.held[r]] for r in range(4)]
    pairs = np.array([[seen[:, :, q][..., k].sum() for k in at] for q in at])
    assert (d.pairs == pairs).all()
    assert (d.cost == pairs.sum(axis=1)).all()
    assert d.imbalance == (pairs.sum(axis=1).max() / pairs.sum(axis=1).mean() if pairs.any() else 1)
    for r in range(4):
        for s in range(4):
            lo, hi = d.needs[r, s]
            places = np.flatnonzero(seen[:, :, at[r]][..., at[s]].any(axis=(0, 1, 2)))
            assert (lo, hi) == (0, 0) if not len(places) else lo <= places[0] < lo + TILE
            assert not len(places) or hi - TILE <= places[-1] < hi <= d.held[s]


def test_bytes_are_those_of_what_is_needed():
    d = dealt("window")
    token = 2 * 3 * (8 + 24) * 4  # of 2 batch entries
    size = (d.needs[..., 1] - d.needs[..., 0]).T * (1 - np.eye(4, dtype=int))  # [from, to]
    assert 0 < size.sum() < 4 * d.shard
    assert (d.bytes(3, 8, 24, 4) == size * token).all()
    assert (d.bytes(3, 8, 24, 4, backward=True) == (size + size.T) * token).all()
    assert (d.bytes(3, 8, 24, 4, "all-gather", padded=True) == d.shard * token * (1 - np.eye(4, dtype=int))).all()
    steps = d.bytes(3, 8, 24, 4, padded=True)
    for i in range(1, 4):
        row = [steps[r, (r + i) % 4] for r in range(4)]
        real = [size[r, (r + i) % 4] * token for r in range(4)]
        assert row == [max(real) if x else 0 for x in real]
    with pytest.raises(ParameterError, match='"ring" or "all-gather"'):
        d.bytes(1, 1, 1, 1, "gather")


def test_known_deals_fall_out():
    causal = fk.parallel.deal("causal", 4096, 4)
    assert causal.owned == tuple(
        ((512 * r, 512 * r + 512), (4096 - 512 * r - 512, 4096 - 512 * r)) if r < 3 else ((1536, 2560),)
        for r in range(4)
    )
    assert causal.imbalance < 1.001
    window = fk.parallel.deal("causal & window(128)", 4096, 4)
    assert window.owned == tuple(((1024 * r, 1024 * r + 1024),) for r in range(4))


LONG = 1 << 20


def long_masks():
    draw = np.random.default_rng(0)
    doc = np.repeat(np.arange(400), np.clip(draw.lognormal(8.5, 1.5, 400), 64, 1 << 18).astype(int))[:LONG]
    assert len(doc) == LONG
    return {
        "causal": (fk.mask("causal"), 0.7501),
        "packed documents": (fk.mask("causal & same(doc)", doc=doc.astype(np.int32)), 0.1),
        "sliding window": (fk.mask("causal & window(4096)"), 1 / 255),
        "prefix": (fk.mask("prefix_lm(200000)"), 0.78),
        "block diffusion": (fk.mask("block_diffusion(524288, 4096)"), 0.376),
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", list(long_masks()))
def test_a_million_tokens_on_64_ranks_are_balanced(name):
    """Less than 1.05 of the mean, no more bytes than the share of a full ring, and no work that grows with pairs."""
    mask, share = long_masks()[name]
    tracemalloc.start()
    d = fk.parallel.deal(mask, LONG, 64)
    sent, peak = d.bytes(1, 64, 64, 2).sum(), tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert d.imbalance < 1.05
    assert sent <= share * 64 * 63 * d.shard * 128 * 2
    assert peak < 400 << 20  # a bit for every pair of tiles and rank would be 64 times as much


@pytest.mark.parametrize("seed", range(8))
def test_any_cost_is_dealt_as_evenly_as_known_ways(seed):
    draw = np.random.default_rng(seed)
    ranks, tiles = int(draw.integers(2, 20)), int(draw.integers(1, 40))
    n = ranks * tiles
    row, length = np.arange(n), draw.integers(0, n, n)
    work = dealing.TileCosts(
        ranks, draw.lognormal(0, 2, n).astype(np.int64) + 1, row, row - np.minimum(row, length), row + 1
    )
    found = dealing.best(work)
    assert sorted(found.reshape(-1)) == list(range(n))
    assert (np.diff(found, axis=1) > 0).all()
    others = [dealing.contiguous(work), dealing.zigzag(work), dealing.folded(work)]
    assert work.imbalance(found) <= max(dealing.BALANCED, min(map(work.imbalance, others)))
    balanced = [work.sent(x) for x in others if work.imbalance(x) < dealing.BALANCED]
    assert not balanced or work.sent(found) <= 1.02 * min(balanced)


@pytest.mark.parametrize("as_array", [np.asarray, torch.as_tensor, jnp.asarray], ids=["numpy", "torch", "jax"])
def test_permute_and_back(as_array):
    d = dealt("causal", 7)
    x = np.arange(2 * LENGTH * 3, dtype=np.float32).reshape(2, LENGTH, 3)
    there = d.permute(as_array(x), 1)
    assert type(there) is type(as_array(x))
    assert tuple(there.shape) == (2, 7 * d.shard, 3)
    inside = d.order < LENGTH
    assert not inside.all()
    assert (np.asarray(there)[:, inside] == x[:, d.order[inside]]).all()
    assert (np.asarray(there)[:, ~inside] == 0).all()
    assert (np.asarray(d.unpermute(there, -2)) == x).all()
    tokens = np.arange(LENGTH)[None] % 50
    labels = np.asarray(d.labels(as_array(tokens), 1))
    assert labels.shape == (1, 7 * d.shard)
    for place, p in enumerate(d.order):
        assert labels[0, place] == (tokens[0, p + 1] if p + 1 < LENGTH else -100)


def test_gradients_flow_through_permute():
    d = dealt("window", 7)
    x = torch.randn(1, LENGTH, requires_grad=True)
    (grad,) = torch.autograd.grad((d.permute(x, 1) * torch.as_tensor(d.order)).sum(), x)
    assert (grad == torch.arange(LENGTH)).all()


def test_deal_under_another_mask_keeps_its_tokens():
    d = dealt("causal")
    other = d.under("causal & window(40)")
    assert (other.order == d.order).all()
    assert other.digest != d.digest
    assert other.cost.sum() == 6 * fk.mask("causal & window(40)").visible_pairs(LENGTH, LENGTH)
    assert (other.needs <= d.needs.max()).all()
    assert other.bytes(1, 8, 8, 4).sum() < d.bytes(1, 8, 8, 4).sum()
    again = fk.parallel.deal("causal", LENGTH, 4, tile=TILE, batch=2, heads=3)
    assert again.digest == d.digest


def test_deal_refuses_bad_arguments():
    for change in ({"ranks": 0}, {"tile": 1.5}, {"length": True}):
        with pytest.raises(ShapeError, match=next(iter(change))):
            fk.parallel.deal(**{"mask": "causal", "length": 64, "ranks": 2, **change})
    d = dealt("causal")
    with pytest.raises(ShapeError, match="axis 1 is to have 500 places"):
        d.permute(np.zeros((2, 499)), 1)
    with pytest.raises(ShapeError, match="unpermute takes what permute gives"):
        d.unpermute(np.zeros((2, 500)), 1)
    with pytest.raises(ParameterError, match="shift is 501"):
        d.labels(np.zeros((1, 500)), shift=501)
    with pytest.raises(ParameterError, match="`doc` has no value"):
        fk.parallel.deal("causal & same(doc)", 64, 2)
    with pytest.raises(BudgetError, match="partial tiles"):
        _ = fk.parallel.deal("causal & (q - k) % 16 == 0", 1 << 15, 4, tile=16).pairs
