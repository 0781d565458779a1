"""frisket.flex.BlockMask beside torch's: the same lists, bit for bit, and what ours says besides."""

from __future__ import annotations

import doctest
import functools
import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from support import torch_masks
from torch.utils import _pytree as pytree

import frisket as fk
import frisket.flex as ours
from frisket.runtime.flex.live_mask import LiveMask
from frisket.runtime.flex.tile_tensors import LISTS, TENSORS

S = 24
DOC = torch.tensor([0] * 7 + [1] * 5 + [2] * 12)


def causal(b, h, q, k):
    return q >= k


def by_batch_and_head(b, h, q, k):
    return (q >= k) & (q - k < 3 * h + b + 2)


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


# -- the lists ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", torch_masks.masks(), ids=lambda c: c.name)
def test_lists_of_the_masks_people_write(case):
    batch, heads, q_len, kv_len = case.shape
    same(*both(case.fn, None, None, q_len, kv_len, "cpu", (8, 12)))
    mine, other = both(case.fn, batch, heads, q_len, kv_len, "cpu", 5, separate_full_blocks=len(case.name) % 2 == 0)
    same(mine, other)
    assert mine.as_tuple()[:-1][:2] == other.as_tuple()[:2]
    assert mine.shape == other.shape
    assert torch.equal(mine.to_dense(), other.to_dense())


@pytest.mark.parametrize("fn", [causal, lambda b, h, q, k: (k < 30) | ((q - k).abs() < 40)])
@pytest.mark.parametrize(
    ("lengths", "block"), [((256, 256), 128), ((200, 300), (64, 32)), ((1, 300), 128), ((130, 7), (16, 128))]
)
def test_lists_of_ragged_lengths(fn, lengths, block):
    for heads in ((None, None), (3, 1), (1, 2)):  # a mask that tells none apart has lists for all
        same(*both(fn, *heads, *lengths, "cpu", block))


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("descending", [True, False])
def test_the_order_of_sums_of_dq(apart, descending):
    made = both(
        by_batch_and_head, 2, 3, 100, 90, "cpu", (16, 32), separate_full_blocks=apart, compute_dq_write_order=True,
        dq_kv_order=descending,
    )  # fmt: skip
    same(*made)
    assert [m.dq_kv_order_spt for m in made] == [descending] * 2
    same(made[0][:, 1], made[1][:, 1])
    assert [m.dq_kv_order_spt for m in both(causal, 1, 1, 16, 16, "cpu", 8)] == [None, None]


def test_a_long_sequence_takes_no_square_of_it():
    made = ours.create_block_mask("causal & window(1024)", None, None, 1 << 18, 1 << 18, "cpu")
    assert made.kv_indices.shape == (1, 1, 2048, 2048)
    assert made.full_kv_num_blocks[0, 0, -1] == 7
    assert made.sparsity() == 100 * (1 - (9 * 2048 - 36) / 2048**2)


def test_lists_are_made_when_they_are_read(monkeypatch):
    from frisket.runtime.flex import block_mask

    monkeypatch.setattr(block_mask, "exact_lists", None)
    made = ours.create_block_mask(causal, None, None, 64, 64, "cpu", 16)
    assert str(made[:, :, :2].mask) == "q >= k"
    assert made.sparsity() == 37.5
    with pytest.raises(TypeError):
        _ = made.kv_indices


# -- what it says -----------------------------------------------------------------------------------


def test_nothing_is_copied_to_make_one(monkeypatch):
    table = torch.rand(S, S) < 0.5
    monkeypatch.setattr(LiveMask, "mask", None)
    made = ours.create_block_mask(lambda b, h, q, k: table[q, k] & (DOC[k] > 0), None, None, S, S, "cpu", 8)
    assert made[:, :, 1:].tensors["table"] is table
    with pytest.raises(TypeError):
        _ = made.kv_indices


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_it_is_torchs():
    assert fk.flex is ours
    made, other = both(causal, 2, 1, np.int64(64), 64, "cpu", 16)
    assert isinstance(made, theirs.BlockMask)
    assert (made.seq_lengths, made.BLOCK_SIZE, made.numel()) == (other.seq_lengths, other.BLOCK_SIZE, other.numel())
    assert made.mask_mod is causal
    assert len(made.as_tuple()) == len(other.as_tuple())
    assert made.as_tuple(flatten=False)[0] == (64, 64)
    q = torch.randn(2, 1, 64, 16)
    torch.testing.assert_close(
        theirs.flex_attention(q, q, q, block_mask=made), theirs.flex_attention(q, q, q, block_mask=other)
    )


def test_sparsity_is_a_share_of_tiles():
    made, other = both(causal, None, None, 100, 100, "cpu")
    assert other.sparsity() == pytest.approx(-63.84)  # torch counts positions beyond the end
    assert made.sparsity() == 0
    assert both(causal, None, None, 512, 512, "cpu")[0].sparsity() == 37.5
    listed = ours.BlockMask.from_kv_blocks(made.kv_num_blocks, made.kv_indices, seq_lengths=(100, 100))
    assert listed.sparsity() == 0


def test_a_picture_tells_full_from_partial():
    made = ours.create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 40 * (h + 1)), 1, 2, 64, 80, "cpu", 16)
    assert str(made) == (
        "BlockMask(shape=(1, 2, 64, 80), sparsity=50.00%,\n"
        "(0, 0)\n▒▒        \n██▒▒      \n▒▒██▒▒    \n▒▒▒▒██▒▒  \n\n"
        "(0, 1)\n▒▒        \n██▒▒      \n████▒▒    \n██████▒▒\n"
        "█ full, ▒ partial (█ or ▒: every tile of the cell is computed), ░ some of the cell, blank none\n)"
    )
    assert made.to_string(limit=1).splitlines()[5:] == [
        "",
        "...",
        "To print out more, set BlockMask.to_string(limit=N)",
        "You can also index (BlockMask[batch, head]) to choose a specific batch or head",
    ]
    assert made.to_string(grid_size=(2, 3), limit=2).splitlines()[1:3] == ["░░    ", "▒▒░░  "]
    assert made.to_string(grid_size=2).splitlines()[1:3] == ["░░  ", "▒▒░░"]
    assert made.to_string(-1) == made.to_string()
    joined = ours.create_block_mask(causal, None, None, 32, 32, "cpu", 16, separate_full_blocks=False)
    assert joined.to_string() == "(0, 0)\n▒▒  \n▒▒▒▒\n"
    assert repr(made) == (
        "BlockMask(shape=(1, 2, 64, 80), BLOCK_SIZE=(16, 16), sparsity=50.00%, mask='q >= k & q - k < 40 * (h + 1)')"
    )


def test_masks_of_any_kind():
    window = fk.mask("causal & window(w)", w=40)
    made = ours.create_block_mask(window, None, None, 64, 64, "cpu", 16)
    assert made.mask == window
    same(made, theirs.create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 40), None, None, 64, 64, "cpu", 16))
    text = ours.create_block_mask("k < KV_LEN - Q_LEN + q + 1", None, None, 48, 64, "cpu", 16)
    assert torch.equal(theirs.create_mask(text.mask_mod, 1, 1, 48, 64, "cpu"), dense(text))
    longer = ours.create_block_mask(made.mask, None, None, 4096, 8192, "cpu")
    assert (longer.shape, longer.mask) == ((1, 1, 4096, 8192), window)
    assert made.mask.layout(4096, 8192).counts == longer.layout.counts


def test_a_mask_mod_is_written_where_there_is_none():
    made = ours.create_block_mask(fk.mask("causal & same(doc)", doc=DOC.numpy()), None, None, S, S, "cpu", 8)
    assert "(q_idx >= kv_idx) & (doc[q_idx] == doc[kv_idx])" in made.mask_mod.source
    again = ours.create_block_mask(made.mask_mod, None, None, S, S, "cpu", 8)
    same(made, again)
    shifted = made[:, :, 1:]
    assert torch.equal(theirs.create_mask(shifted.mask_mod, 1, 1, 16, S, "cpu"), dense(made)[:, :, 8:])


# -- tensors that stay the user's -------------------------------------------------------------------


def test_a_captured_tensor_may_change():
    doc, reach = DOC.clone(), torch.tensor(3)

    def mask_mod(b, h, q, k):
        return (doc[q] == doc[k]) & (q - k < reach)

    made = ours.create_block_mask(mask_mod, None, None, S, S, "cpu", 4)
    assert made.tensors["doc"] is doc
    assert made.tensors["reach"] is reach
    assert str(made.formula) == "doc[q] == doc[k] & q - k < reach"
    assert set(made.formula.unbound) == {"doc", "reach"}
    part = made[:, :, 2:]
    for change in (lambda: None, lambda: doc.zero_(), lambda: reach.fill_(9)):
        change()
        now = theirs.create_block_mask(mask_mod, None, None, S, S, "cpu", 4)
        same(made, now)
        same(part, now[:, :, 2:], LISTS)
        whole = theirs.create_mask(mask_mod, 1, 1, S, S, "cpu")
        assert torch.equal(dense(made), whole)
        assert torch.equal(ours.create_mask(part.mask_mod, 1, 1, 16, S, "cpu"), whole[:, :, 8:])
    read = part.mask_mod  # even one that was taken before
    doc[:12] = 5
    reach.fill_(2)
    assert torch.equal(
        theirs.create_mask(read, 1, 1, 16, S, "cpu"), theirs.create_mask(mask_mod, 1, 1, S, S, "cpu")[:, :, 8:]
    )


def test_values_that_went_into_the_expression_may_not():
    offsets = torch.tensor([0, 7, 12, 24])
    made = ours.create_block_mask(
        lambda b, h, q, k: torch.searchsorted(offsets, q, right=True) == torch.searchsorted(offsets, k, right=True),
        None, None, S, S, "cpu", 4,
    )  # fmt: skip
    assert made.kv_num_blocks.sum() > 0
    offsets[1] = 9
    with pytest.raises(fk.ParameterError, match=r"a tensor of torch.int64 \[4\] has changed since the mask was traced"):
        _ = made.kv_num_blocks


def test_to_moves_the_mask_too():
    made = ours.create_block_mask(lambda b, h, q, k: DOC[q] == DOC[k], None, None, S, S, "cpu", 8)
    there = made.to("meta")
    assert there.tensors["DOC"].device.type == "meta"
    assert there.device.type == "meta"
    assert made.device.type == "cpu"
    assert made.to("cpu") == made
    assert made.to("cpu").mask_mod is made.mask_mod
    assert made.lay_out().to("meta").kv_indices.device.type == "meta"


# -- values -----------------------------------------------------------------------------------------


def test_equality_hash_pickle():
    table = torch.rand(S, S) < 0.5
    kinds = [
        ours.create_block_mask(lambda b, h, q, k: (q >= k) & table[q, k], 2, None, S, S, "cpu", 8),
        ours.create_block_mask("causal & k < 9", None, None, S, S, "cpu", 8),
        ours.create_block_mask(causal, None, None, S, 12, "cpu", (8, 4), separate_full_blocks=False),
        ours.create_block_mask(causal, 1, 1, S, S, "cpu", 8)[:, :, 1:],
    ]
    listed = ours.BlockMask.from_kv_blocks(kinds[0].kv_num_blocks, kinds[0].kv_indices, BLOCK_SIZE=8, mask_mod=causal)
    for one in (*kinds, listed):
        back = pickle.loads(pickle.dumps(one))
        assert back == one
        assert hash(back) == hash(one)
        same(back, one)
        assert torch.equal(dense(back), dense(one))
        assert torch.equal(
            ours.create_mask(back.mask_mod, *one.shape, "cpu"), ours.create_mask(one.mask_mod, *one.shape, "cpu")
        )
    assert len({*kinds, listed, *kinds}) == 5
    assert kinds[0] != ours.create_block_mask(lambda b, h, q, k: (q >= k) & table[q, k], None, None, S, S, "cpu", 8)
    assert kinds[0] != "a text"
    alike = ours.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, S, 12, "cpu", (8, 4), separate_full_blocks=False
    )
    assert kinds[2] == alike


def test_algebra():
    left = ours.create_block_mask(causal, None, None, S, S, "cpu", 8)
    doc = DOC.flip(0).contiguous()

    def document(DOC):
        return lambda b, h, q, k: DOC[q] == DOC[k]

    first, second = (ours.create_block_mask(document(d), 2, None, S, S, "cpu", 8) for d in (DOC, doc))
    x, y, z = map(dense, (left, first, second))
    for made, wanted in (
        (left & first, x & y), (first | second, y | z), (~left, ~x), (~(first & second) | left, ~(y & z) | x),
        (left & "k < 5", x & (torch.arange(S) < 5)), (left | fk.mask("k < 5"), x | (torch.arange(S) < 5)),
    ):  # fmt: skip
        assert torch.equal(dense(made)[:1], wanted[:1])
        assert made.shape[0] == max(wanted.shape[0], 1)
        same(made, theirs.create_block_mask(lambda b, h, q, k, w=wanted: w[b, h, q, k], *made.shape, "cpu", 8))
        assert torch.equal(theirs.create_mask(made.mask_mod, *made.shape, "cpu"), wanted.expand(made.shape))
    one, two = (ours.create_block_mask(t, n, None, 4, 4, "cpu", 2) for t, n in (("b < B", None), ("k < 2", 2)))
    for made in (one & two, two & one):  # each keeps the sizes it was made for
        assert torch.equal(dense(made), (torch.arange(2) < 1)[:, None, None, None] & (torch.arange(4) < 2).expand(4, 4))
    with pytest.raises(fk.ShapeError, match=r"masks of \(24, 24\) in tiles of \(8, 8\) and of \(24, 24\) in tiles of"):
        left & ours.create_block_mask(causal, None, None, S, S, "cpu", 4)


def test_a_pytree_of_its_lists_and_tensors():
    made = ours.create_block_mask(lambda b, h, q, k: DOC[q] == DOC[k], None, None, S, S, "cpu", 8)
    leaves, spec = pytree.tree_flatten(made)
    assert len(leaves) == 9
    assert leaves[-1] is DOC
    back = pytree.tree_unflatten(leaves, spec)
    assert back == made
    same(back, made)
    again = ours.create_block_mask(lambda b, h, q, k: DOC[q] == DOC[k], None, None, S, S, "cpu", 8)
    assert pytree.tree_flatten(again)[1] == spec
    paths = [pytree.keystr(p) for p, _ in pytree.tree_flatten_with_path(made)[0]]
    assert (paths[0], paths[-1]) == (".kv_num_blocks", ".DOC")
    moved = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), made)
    assert (moved.device.type, moved.tensors["DOC"].device.type) == ("meta", "meta")
    number = ours.create_block_mask(fk.mask("q - k < w", w=5), None, None, S, S, "cpu", 8)
    assert pytree.tree_map(lambda x: x, number) == number
    assert pytree.tree_flatten(number)[1] != pytree.tree_flatten(made)[1]
    listed = ours.BlockMask.from_kv_blocks(made.kv_num_blocks, made.kv_indices, BLOCK_SIZE=8, mask_mod=causal)
    assert pytree.tree_map(lambda x: x, listed) == listed


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("make", [causal, "causal & k < 100"])
def test_torchs_own_compiled_attention_reads_it(make):
    torch._dynamo.reset()
    made = ours.create_block_mask(make, None, None, 256, 256, "cpu")
    q = torch.randn(1, 1, 256, 16)
    run = torch.compile(lambda q, m: theirs.flex_attention(q, q, q, block_mask=m), backend="eager", fullgraph=True)
    torch.testing.assert_close(run(q, made), theirs.flex_attention(q, q, q, block_mask=made))


def test_the_whole_graph_cannot_make_one():
    def step(x):
        return x * ours.create_block_mask(causal, None, None, 64, 64, device="cpu").kv_num_blocks.sum()

    with pytest.raises(torch._dynamo.exc.Unsupported, match="make masks outside of the compiled function, or leave"):
        torch.compile(step, backend="eager", fullgraph=True)(torch.ones(1))


def test_making_one_inside_a_compiled_function():
    torch._dynamo.reset()
    made = torch.compile(ours.create_block_mask, backend="eager")(causal, None, None, 256, 256, "cpu")
    assert made == ours.create_block_mask(causal, None, None, 256, 256, "cpu")


# -- other functions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", torch_masks.tested()[::4], ids=lambda c: c.name)
def test_create_mask(case):
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
def test_what_is_no_mask(mask_mod, kind, text):
    with pytest.raises(kind, match=text) as e:
        ours.create_block_mask(mask_mod, None, None, S, S, "cpu", 8)
    assert isinstance(e.value, fk.FrisketError)


def test_the_same_lookups_hidden_or_clamped_are_fine():
    same(*both(lambda b, h, q, k: (q >= 1) & (LIMIT[(q - 1).clamp(min=0)] >= k), None, None, S, S, "cpu", 8))
    mine = ours.create_block_mask(lambda b, h, q, k: (q >= 1) & (LIMIT[q - 1] >= k), None, None, S, S, "cpu", 8)
    assert dense(mine).sum() == sum(range(24))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"B": 0}, r"B is 0\n  it is how many there are, or None where all are alike"),
        ({"H": 2.5}, "H is 2.5"),
        ({"H": True}, "H is True"),
        ({"Q_LEN": 0}, r"\(Q_LEN, KV_LEN\) is \(0, 24\)"),
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


def test_the_page_prints_what_it_shows():
    page = Path(__file__).resolve().parents[2] / "docs" / "flex.md"
    parser, runner, names = doctest.DocTestParser(), doctest.DocTestRunner(), {}
    for block in re.findall(r"```python\n(>>> .*?)```", page.read_text(encoding="utf-8"), re.S):
        session = parser.get_doctest(block, names, "flex.md", str(page), 0)
        runner.run(session, clear_globs=False)
        names = session.globs  # the next block goes on
    assert runner.summarize(verbose=False) == (0, runner.tries)
    assert runner.tries > 5


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_takes_one(strict):
    class Net(torch.nn.Module):
        def forward(self, q, mask):
            return ours.flex_attention(q, q, q, block_mask=mask)

    def mask(doc):
        return ours.create_block_mask(lambda b, h, q, k: (q >= k) & (doc[q] == doc[k]), None, None, S, S, "cpu", 8)

    q, doc = torch.randn(1, 2, S, 16), DOC.flip(0).contiguous()
    program = torch.export.export(Net(), (q, mask(DOC)), strict=strict).module()
    for one in (mask(DOC), mask(doc)):  # captured tensors are inputs of the program
        torch.testing.assert_close(program(q, one), Net()(q, one))
