"""Parts of a BlockMask: torch's lists of them, and the mask of them, which torch drops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from support.flex_masks import PACKED, torchs

import frisket as fk
import frisket.flex as ours
from frisket.runtime.flex.tensor_mask import LISTS

B, H, S = 2, 4, 24
G = torch.Generator().manual_seed(0)
DOC = torch.sort(torch.randint(0, 4, (B, S), generator=G))[0]
DENSE = torch.rand(B, H, S, S, generator=G) < 0.5
DENSE[:, 1:3, 8:16, :8] = True
EVERY = slice(None)
MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "documents": lambda b, h, q, k: DOC[b, q] == DOC[b, k],
    "dense": lambda b, h, q, k: DENSE[b, h, q, k],
    "by batch and head": lambda b, h, q, k: (q - k < 3 * h + b + 2) & (q >= k),
}
PARTS = [
    0,
    (1, 2),
    (-1, -1, -1),
    (EVERY, slice(1, 3)),
    (EVERY, EVERY, slice(0, 2)),
    (0, EVERY, slice(1, None)),
    (EVERY, slice(None, None, 2)),
    (EVERY, EVERY, slice(None, None, 2)),
    (EVERY, EVERY, torch.tensor([0, 2])),
    (EVERY, EVERY, torch.tensor([2, 0], dtype=torch.int32)),
    (torch.tensor([1, 0]),),
    (EVERY, torch.tensor([3, 3, 0])),
    (EVERY, torch.tensor([True, False, True, False])),
]


def lists(mask):
    return [getattr(mask, n) for n in LISTS]


def rows_of(dense, index, block):
    """The dense mask [B, H, S, S] of what an index picks, rows of tiles padded."""
    index = index if isinstance(index, tuple) else (index,)
    b, h, rows = (*index, *[EVERY] * (3 - len(index)))
    tiles = -(-S // block)
    dense = torch.nn.functional.pad(dense, (0, 0, 0, tiles * block - S)).view(B, H, tiles, block, S)
    for axis, (at, n) in enumerate(((b, B), (h, H), (rows, tiles))):
        dense = dense.movedim(axis, 0)[[at % n] if isinstance(at, int) else at].movedim(0, axis)
    return dense.flatten(2, 3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("block", [8, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ((5, 8), 7))])
def test_parts_have_torchs_lists_and_keep_the_mask(name, block):
    mine, other = (m.create_block_mask(MASKS[name], B, H, S, S, "cpu", block) for m in (ours, theirs))
    dense = theirs.create_mask(MASKS[name], B, H, S, S, "cpu")
    rows = mine.BLOCK_SIZE[0]
    for index in PARTS:
        part = mine[index]
        assert all(map(torch.equal, lists(part), lists(other[index]))), index
        wanted = rows_of(dense, index, rows)[:, :, : part.seq_lengths[0]]
        assert part.shape == wanted.shape
        assert torch.equal(torch.from_numpy(part.mask.dense(*part.shape[2:], *part.shape[:2])), wanted), index
        assert torch.equal(theirs.create_mask(part.mask_mod, *part.shape, "cpu"), wanted), index


@pytest.mark.parametrize("apart", [True, False])
def test_parts_of_lists(apart):
    full = torchs(MASKS["by batch and head"], B, H, S, S, "cpu", 8, separate_full_blocks=apart)
    given = (full.kv_num_blocks, full.kv_indices, full.full_kv_num_blocks, full.full_kv_indices)
    mine, other = (m.BlockMask.from_kv_blocks(*given, 8, MASKS["by batch and head"]) for m in (ours, theirs))
    dense = theirs.create_mask(MASKS["by batch and head"], B, H, S, S, "cpu")
    for index in PARTS:
        part, wanted = mine[index], rows_of(dense, index, 8)
        for x, y in zip(lists(part), lists(other[index]), strict=True):
            assert (x is None) == (y is None)
            assert x is None or torch.equal(x, y)
        assert torch.equal(torch.from_numpy(part.mask.dense(*part.shape[2:], *part.shape[:2])), wanted), index
        assert torch.equal(ours.create_mask(part.mask_mod, *part.shape, "cpu"), wanted), index


def test_parts_of_parts():
    mine = ours.create_block_mask(MASKS["dense"], B, H, S, S, "cpu", 4)
    part = mine[1:, torch.tensor([3, 1, 2])][:, 1:, 1:][..., torch.tensor([4, 0])][:, -1]
    assert part.shape == (1, 1, 8, S)
    rows = torch.cat([torch.arange(20, 24), torch.arange(4, 8)])
    assert torch.equal(torch.from_numpy(part.mask.dense(8, S)), DENSE[1:, 2:3, rows])


def test_slice_of_the_last_tile_row_keeps_its_length():
    mine = ours.create_block_mask("causal & k < Q_LEN - 2", 1, 1, 20, S, "cpu", 8)
    assert mine[:, :, 1:].seq_lengths == (12, S)
    assert mine[:, :, [0, 2]].seq_lengths == mine[:, :, torch.tensor([0, 2])].seq_lengths == (16 if PACKED else 12, S)
    assert mine[:, :, ::2].seq_lengths == (12, S)
    assert mine[:, :, -1].seq_lengths == (4, S)
    turned = mine[:, :, torch.tensor([2, 0])]  # what would lie beyond the end is hidden
    assert turned.seq_lengths == (16, S)
    whole = torch.from_numpy(mine.mask.dense(20, S))
    now = torch.from_numpy(turned.mask.dense(16, S))
    assert torch.equal(now[:, :, :4], whole[:, :, 16:])
    assert torch.equal(now[:, :, 8:], whole[:, :, :8])
    assert not now[:, :, 4:8].any()


@pytest.mark.skipif(not PACKED, reason="up to 2.13 torch leaves the lengths of the whole mask")
@pytest.mark.parametrize("listed", [False, True])
def test_parts_are_as_long_as_torch_packs_them(listed):
    """A slice ends with the mask, and a tensor picks whole rows of tiles."""
    mine, other = (m.create_block_mask(MASKS["documents"], B, H, 20, 20, "cpu", 8) for m in (ours, theirs))
    if listed:
        given = (other.kv_num_blocks, other.kv_indices, other.full_kv_num_blocks, other.full_kv_indices)
        mine = ours.BlockMask.from_kv_blocks(*given, 8, MASKS["documents"], (20, 20))
    for index in (*PARTS, (EVERY, EVERY, -1), (EVERY, EVERY, torch.tensor([False, False, True])), (0, 0, slice(1, 9))):
        part, wanted = mine[index], other[index]
        assert part.shape == wanted.shape, index
        assert all(map(torch.equal, lists(part), lists(wanted))), index
        assert part.sparsity() == pytest.approx(wanted.sparsity())
    with pytest.raises(IndexError):
        other[0, 0, 0, 0]


@pytest.mark.parametrize("length", [S - 1, S + 1])
def test_wrong_lengths_raise_the_class_of_torch(length):
    q = torch.randn(1, 1, length, 8)
    mine, other = (m.create_block_mask(MASKS["causal"], None, None, S, S, "cpu", 8) for m in (ours, theirs))
    with pytest.raises(RuntimeError if PACKED else ValueError) as wanted:
        theirs.flex_attention(q, q, q, block_mask=other)
    with pytest.raises(type(wanted.value)) as found:
        ours.flex_attention(q, q, q, block_mask=mine)
    assert isinstance(found.value, fk.ShapeError)


def test_lists_without_columns_stay_so():
    made = ours.create_block_mask("causal", 1, 2, S, S, "cpu", 8)
    bare = ours.BlockMask.from_kv_blocks(made.kv_num_blocks, made.kv_indices, BLOCK_SIZE=8, compute_q_blocks=False)
    assert bare[:, 0].q_indices is None
    assert bare[:, 0].kv_indices.shape == (1, 1, 3, 3)
    assert bare._adjust(16, 8).q_indices is None
    assert bare._adjust(16, 8).full_kv_indices is None


def test_a_step_of_decoding_as_people_write_it():
    """torch's way: slice, shift the whole mask_mod, say how long it is."""

    def run(module):
        whole = module.create_block_mask(MASKS["causal"], None, None, S, S, "cpu", 8)
        out = []
        for position in (0, 9, 23):
            step = whole[:, :, position // 8]
            step.mask_mod = lambda b, h, q, k, at=position: whole.mask_mod(b, h, q + at, k)
            step.seq_lengths = (1, S)
            out.append((lists(step), theirs.create_mask(step.mask_mod, 1, 1, 1, S, "cpu"), step))
        return out

    for (mine, seen, step), (other, expected, _) in zip(run(ours), run(theirs), strict=True):
        assert all(map(torch.equal, mine, other))
        assert torch.equal(seen, expected)
        assert torch.equal(torch.from_numpy(step.mask.dense(1, S)), expected)
        assert step.shape == (1, 1, 1, S)


def test_adjust_is_the_mask_of_the_new_lengths():
    for name in ("causal", "by batch and head"):
        mine = ours.create_block_mask(MASKS[name], B, H, S, S, "cpu", 8)
        for lengths in ((16, 8), (13, 22), (40, 50)):
            made = mine._adjust(*lengths)
            wanted = theirs.create_block_mask(MASKS[name], B, H, *lengths, "cpu", 8)
            assert all(map(torch.equal, lists(made), lists(wanted)))
            assert made.mask_mod is MASKS[name]
    listed = ours.BlockMask.from_kv_blocks(mine.kv_num_blocks, mine.kv_indices, BLOCK_SIZE=8, mask_mod=MASKS["causal"])
    cut = listed._adjust(13, 16)
    assert torch.equal(
        torch.from_numpy(cut.mask.dense(13, 16, B, H)), torch.from_numpy(listed.mask.dense(S, S, B, H))[:, :, :13, :16]
    )
    with pytest.raises(RuntimeError, match="seq_lengths has 40 queries, the lists have 3 tiles of 8"):
        listed._adjust(40, 16)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (7, r"batch entry 7\n  there are 2: -2..1"),
        ((0, -5), r"head -5\n  there are 4: -4..3"),
        ((EVERY, EVERY, torch.tensor([3])), r"row of tiles \[3\]\n  there are 3: -3..2"),
        ((EVERY, slice(2, 2)), "head 2:2 picks nothing of 4"),
        ((EVERY, torch.tensor([True])), r"heads by 1 bools\n  there are 4"),
        ((EVERY, torch.zeros(4, dtype=torch.bool)), r"head \[\] picks nothing of 4"),
        ((0, 0, 0, 0), r"with 4 indices\n  there are 3: \[batch entry, head, row of tiles\]"),
        ((torch.tensor([0]), torch.tensor([1])), "with two tensors\n  torch would pair them up"),
        (0.5, r"batch entry 0.5\n  an index is an int, a slice, or a tensor of one axis of ints or bools"),
        (torch.zeros(1, 1, dtype=torch.long), r"batch entry a tensor of torch.int64 \[1, 1\]"),
    ],
)
def test_indices_that_pick_nothing(index, text):
    made = ours.create_block_mask("causal", B, H, S, S, "cpu", 8)
    with pytest.raises(IndexError, match=text) as e:
        made[index]
    assert isinstance(e.value, fk.FrisketError)
