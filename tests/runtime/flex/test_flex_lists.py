"""BlockMasks from lists of tiles that people make."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from support.flex_masks import LACKING, same

import frisket as fk
import frisket.flex as ours

COUNT = torch.tensor([[[1, 2, 0]]], dtype=torch.int32)
INDEX = torch.tensor([[[[1, 7, 7, 7], [0, 3, 9, 9], [5, 5, 5, 5]]]], dtype=torch.int32)  # undefined past the count
FULL_COUNT = torch.tensor([[[0, 1, 2]]], dtype=torch.int32)
FULL_INDEX = torch.tensor([[[[0, 1, 2, 3], [2, 0, 1, 3], [3, 0, 1, 2]]]], dtype=torch.int32)


def even(b, h, q, k):
    return (q + k) % 2 == 0


def visible(kinds, fn, block, lengths, heads=(1, 1)):
    """Position by position: in a full tile, or in a partial one where the function says so."""
    rows, columns = (torch.arange(n) // size for n, size in zip(lengths, block, strict=True))
    tile = kinds[..., rows[:, None], columns]
    return (tile == 2) | ((tile == 1) & theirs.create_mask(fn, *heads, *lengths, "cpu"))


@pytest.mark.parametrize("lengths", [None, (10, 13)])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_lists_are_kept_and_mean_what_they_say(lengths, full, columns):
    given = (COUNT, INDEX, *((FULL_COUNT, FULL_INDEX) if full else ()))
    options = {"BLOCK_SIZE": (4, 5), "mask_mod": even, "seq_lengths": lengths, "compute_q_blocks": columns}
    mine, other = (m.BlockMask.from_kv_blocks(*given, **options) for m in (ours, theirs))
    same(mine, other)
    assert mine.kv_indices is INDEX
    assert mine.mask_mod is even
    assert (mine.shape, mine.BLOCK_SIZE, mine.seq_lengths) == (other.shape, (4, 5), other.seq_lengths)
    assert torch.equal(mine.to_dense(), other.to_dense())
    kinds = torch.tensor([[[[0, 1, 0, 0], [1, 0, 2 * full, 1], [2 * full, 0, 0, 2 * full]]]])
    wanted = visible(kinds, even, (4, 5), mine.seq_lengths)
    assert torch.equal(torch.from_numpy(mine.mask.dense(*mine.seq_lengths)), wanted)
    assert mine.layout.visible_pairs == wanted.sum()


def test_tile_lists_without_mask_mod_show_whole_tiles():
    mine = ours.BlockMask.from_kv_blocks(COUNT[0, 0], INDEX[0, 0], BLOCK_SIZE=2)
    assert mine.mask_mod is theirs.noop_mask
    assert (mine.shape, mine.sparsity()) == ((6, 8), 75.0)
    assert torch.from_numpy(mine.mask.dense(6, 8)).sum() == 3 * 4
    assert repr(mine) == "BlockMask(shape=(6, 8), BLOCK_SIZE=(2, 2), sparsity=75.00%, mask='true', in the tiles listed)"


@pytest.mark.parametrize("module", [ours, theirs])
@pytest.mark.parametrize("numpy", [False, True])
def test_lists_that_are_written_to_are_followed(module, numpy):
    """Lists of a mask_mod are followed too: once written to, they are the user's."""
    q = torch.randn(1, 2, 20, 8)
    made = module.create_block_mask(lambda b, h, q, k: q >= k, None, None, 20, 20, "cpu", 4)
    for _ in range(2):
        ours.flex_attention(q, q, q, block_mask=made)
    write = (lambda x: x.numpy()) if numpy else (lambda x: x)
    write(made.full_kv_num_blocks)[0, 0, 3:] = 1  # of 3 and 4
    write(made.kv_num_blocks)[0, 0, 2] = 0
    kinds = torch.zeros(1, 1, 5, 5, dtype=torch.int)
    for row in range(5):
        kinds[0, 0, row, : min(row, 1 if row > 2 else row)] = 2
        kinds[0, 0, row, row] = row != 2
    want = visible(kinds, lambda b, h, q, k: q >= k, (4, 4), (20, 20))
    out = ours.flex_attention(q, q, q, block_mask=made)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, q, want))
    write(made.kv_indices)[0, 0, 3, 0] = 77
    with pytest.raises(fk.FrisketError, match="kv_indices lists column 77"):
        ours.flex_attention(q, q, q, block_mask=made)


COPIES = {
    "part": lambda m: m[:, :, :], "cut": lambda m: m._adjust(20, 20), "elsewhere": lambda m: m.to("cpu"),
    "pickle": lambda m: pickle.loads(pickle.dumps(m)), "joined": lambda m: m & m, "deepcopy": copy.deepcopy,
}  # fmt: skip


@pytest.mark.parametrize("how", COPIES)
def test_masks_made_of_one_whose_lists_were_written_to(how):
    made = ours.create_block_mask(lambda b, h, q, k: q >= k, None, None, 20, 20, "cpu", 4)
    made.full_kv_num_blocks[0, 0, 3:] = 1
    made.kv_num_blocks[0, 0, 2] = 0
    copied = COPIES[how](made)
    assert made.kv_num_blocks.tolist() == [[[1, 1, 0, 1, 1]]]
    assert copied.mask.dense(20, 20).sum() == made.mask.dense(20, 20).sum() == 4 * 10 + (0 + 1 + 2 + 1 + 1) * 16


def test_lists_by_batch_and_head():
    count = torch.tensor([[[1, 2], [0, 1]], [[2, 2], [1, 1]]], dtype=torch.int32)
    index = torch.tensor([0, 1], dtype=torch.int32).expand(2, 2, 2, 2)
    mine = ours.BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=3, mask_mod=lambda b, h, q, k: q + h >= k - b)
    kinds = (torch.arange(2) < count[..., None]).int()
    wanted = visible(kinds, lambda b, h, q, k: q + h >= k - b, (3, 3), (6, 6), (2, 2))
    assert torch.equal(torch.from_numpy(mine.mask.dense(6, 6, 2, 2)), wanted)
    joined = mine & "k % 2 == 0"  # an expression from here on
    assert torch.equal(torch.from_numpy(joined.mask.dense(6, 6, 2, 2)), wanted & (torch.arange(6) % 2 == 0))


def test_lists_may_be_as_short_as_the_longest_row_needs():
    short = (COUNT, INDEX[..., :2], FULL_COUNT, FULL_INDEX[..., :2])
    options = {"BLOCK_SIZE": (4, 5), "mask_mod": even, "seq_lengths": (12, 18)}
    mine = ours.BlockMask.from_kv_blocks(*short, **options)
    wide = ours.BlockMask.from_kv_blocks(COUNT, INDEX, FULL_COUNT, FULL_INDEX, **options)
    assert mine.kv_indices.shape == (1, 1, 3, 2)
    assert mine == wide
    for name in ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):
        assert torch.equal(getattr(mine, name), getattr(wide, name))
    assert torch.equal(mine.to_dense(), wide.to_dense())
    assert torch.equal(mine[:, :, 1:].to_dense(), wide[:, :, 1:].to_dense())
    with pytest.raises(ValueError, match=r"kv_indices lists column 3\n  there are columns 0..2, of tiles"):
        ours.BlockMask.from_kv_blocks(*short, **{**options, "seq_lengths": (12, 11)})


def test_tile_lists_of_a_block_mask_may_be_replaced():
    made = ours.create_block_mask("causal", None, None, 24, 24, "cpu", 8)
    other = theirs.create_block_mask(lambda b, h, q, k: q >= k, None, None, 24, 24, "cpu", 8)
    for one in (made, other):
        one.mask_mod = even
    same(made, other)
    wanted = visible(torch.tensor([[1, 0, 0], [2, 1, 0], [2, 2, 1]]), even, (8, 8), (24, 24))
    assert torch.equal(torch.from_numpy(made.mask.dense(24, 24)), wanted)
    made.kv_num_blocks = torch.zeros(1, 1, 3, dtype=torch.int32)
    made.full_kv_num_blocks[:] = 0  # in place
    assert not made.mask.dense(24, 24).any()


ORDER = torch.tensor([2, 1, 0], dtype=torch.int32)


@pytest.fixture
def ordered():
    """A mask with an order of sums, its lists, and its orders as options."""
    made = ours.create_block_mask(
        "causal", None, None, 24, 24, "cpu", 8, compute_dq_write_order=True, dq_kv_order=False
    )
    given = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
    return made, given, {"dq_write_order": made.dq_write_order, "dq_write_order_full": made.dq_write_order_full}


@pytest.mark.skipif("dq_write_order" in LACKING, reason="torch's from_kv_blocks takes no order of sums")
@pytest.mark.parametrize("kv_order", [ORDER, True, None])
def test_order_of_dq_beside_torchs(ordered, kv_order):
    _, given, options = ordered
    mine, other = (
        m.BlockMask.from_kv_blocks(*given, BLOCK_SIZE=8, dq_kv_order=kv_order, **options) for m in (ours, theirs)
    )
    same(mine, other)
    assert mine.dq_kv_order_spt == other.dq_kv_order_spt


def test_order_of_dq_that_belongs_to_lists(ordered):
    made, given, options = ordered
    with_order = ours.BlockMask.from_kv_blocks(*given, BLOCK_SIZE=8, dq_kv_order=ORDER, **options)
    assert with_order.dq_kv_order is ORDER
    assert with_order.dq_write_order is made.dq_write_order
    assert with_order.dq_write_order_full is made.dq_write_order_full
    assert with_order.dq_kv_order_spt is None
    assert ours.BlockMask.from_kv_blocks(*given, BLOCK_SIZE=8, dq_kv_order=True, **options).dq_kv_order_spt is True
    with pytest.raises(NotImplementedError, match="a BlockMask with a tensor dq_kv_order is indexed"):
        with_order[0]
    with pytest.raises(NotImplementedError, match="a BlockMask with a tensor dq_kv_order is cut"):
        with_order._adjust(8, 8)
    with pytest.raises(ValueError, match="dq_write_order_full requires dq_write_order"):
        ours.BlockMask.from_kv_blocks(*given, dq_write_order_full=made.dq_write_order_full)
    with pytest.raises(ValueError, match="dq_kv_order must be a bool, Tensor, or None, not int"):
        ours.BlockMask.from_kv_blocks(*given, dq_kv_order=3)


def test_block_mask_constructor_takes_eight_lists():
    made = ours.create_block_mask("causal", None, None, 24, 24, "cpu", 8)
    lists = made.as_tuple(flatten=False)[1:9]
    mine = ours.BlockMask((24, 24), *lists, BLOCK_SIZE=(8, 8), mask_mod="causal")
    same(mine, made)
    assert (mine.mask.dense(24, 24) == made.mask.dense(24, 24)).all()
    with pytest.raises(AssertionError, match=r"kv_num_blocks is None\n  both lists are needed"):
        ours.BlockMask((24, 24), None, *lists[1:])


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ((COUNT[0, 0, 0], INDEX[0, 0, 0]), RuntimeError, "a BlockMask must have at least 2 dimensions"),
        ((COUNT, INDEX, FULL_COUNT), AssertionError, "full_kv_num_blocks and full_kv_indices must be both provided"),
        ((COUNT, INDEX, None, FULL_INDEX), AssertionError, "  full_kv_num_blocks is missing"),
        ((COUNT[..., :2], INDEX), ValueError, r"kv_num_blocks has shape \(1, 1, 2\), kv_indices \(1, 1, 3, 4\)"),
        ((COUNT + 4, INDEX), ValueError, r"kv_num_blocks has entries outside 0..4, the length of a list"),
        ((COUNT + 1, INDEX), ValueError, r"kv_indices lists column 7\n  there are columns 0..3, of tiles"),
        ((torch.full_like(COUNT, 2), FULL_INDEX * 0), ValueError, "kv_indices lists a column twice in one row"),
        (
            (COUNT, FULL_INDEX, COUNT, FULL_INDEX),
            ValueError,
            r"tile \(row 0, column 0\) is listed as partial and",
        ),
    ],
)
def test_lists_that_do_not_fit_together(given, kind, text):
    with pytest.raises(kind, match=text) as e:
        ours.BlockMask.from_kv_blocks(*given)
    assert isinstance(e.value, fk.FrisketError)


def test_lengths_beyond_the_lists():
    with pytest.raises(ValueError, match="seq_lengths has 13 queries, the lists have 3 tiles of 4"):
        ours.BlockMask.from_kv_blocks(COUNT, INDEX, BLOCK_SIZE=4, seq_lengths=(13, 16))
