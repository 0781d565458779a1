"""frisket.flex.BlockMask beside torch's: the same lists, bit for bit, and what ours says besides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from support.flex_masks import DOC, LACKING, PACKED, S, both, causal, dense, same
from support.tiers import thinned
from support.torch import masks as torch_masks

import frisket as fk
import frisket.flex as ours
from frisket.runtime.flex.score_mod import FlexPair
from frisket.runtime.flex.tensor_mask import LISTS, TensorMask


def by_batch_and_head(b, h, q, k):
    return (q >= k) & (q - k < 3 * h + b + 2)


# -- the lists ----------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", thinned(torch_masks.masks()), ids=lambda c: c.name)
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


def ordered(apart, descending):
    """The arguments of a mask with an order of sums, and the options that ask for it."""
    options = {"separate_full_blocks": apart, "compute_dq_write_order": True, "dq_kv_order": descending}
    return (by_batch_and_head, 2, 3, 100, 90, "cpu", (16, 32)), options


@pytest.mark.skipif("compute_dq_write_order" in LACKING, reason="torch's create_block_mask has no order of sums")
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("descending", [True, False])
def test_dq_write_order_equals_torch(apart, descending):
    args, options = ordered(apart, descending)
    made = both(*args, **options)
    same(*made)
    assert [m.dq_kv_order_spt for m in made] == [descending] * 2
    same(made[0][:, 1], made[1][:, 1])
    assert [m.dq_kv_order_spt for m in both(causal, 1, 1, 16, 16, "cpu", 8)] == [None, None]


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("descending", [True, False])
def test_dq_write_order_follows_its_definition(apart, descending):
    """Which of its row's tiles each tile of a column is, from the first column or from the last."""
    args, options = ordered(apart, descending)
    whole = ours.create_block_mask(*args, **options)
    for made in (whole, whole[:, 1]):
        read, found = made.to_dense(), 0
        for name in ("", "full_") if apart else ("",):
            order = getattr(made, "dq_write_order" + "_full" * bool(name))
            count, index = getattr(made, f"{name}q_num_blocks"), getattr(made, f"{name}q_indices")
            for *at, column in np.ndindex(*count.shape):
                for n, row in enumerate(index[*at, column][: count[*at, column]]):
                    columns = read[*at, row].nonzero().flatten().tolist()
                    assert order[*at, column, n] == columns[:: -1 if descending else 1].index(column)
                    found += 1
        assert found == read.sum()
        assert made.dq_kv_order_spt is descending


def test_block_mask_of_long_sequences_stays_small():
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


def test_block_mask_keeps_captured_tensors_uncopied(monkeypatch):
    table = torch.rand(S, S) < 0.5
    monkeypatch.setattr(TensorMask, "mask", None)
    made = ours.create_block_mask(lambda b, h, q, k: table[q, k] & (DOC[k] > 0), None, None, S, S, "cpu", 8)
    assert made[:, :, 1:].tensors["table"] is table
    with pytest.raises(TypeError):
        _ = made.kv_indices


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_block_mask_is_a_block_mask_of_torch():
    assert fk.flex is ours
    made = ours.create_block_mask(causal, 2, 1, np.int64(64), 64, "cpu", 16)
    other = theirs.create_block_mask(causal, 2, 1, 64, 64, "cpu", 16)
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
    assert other.sparsity() == pytest.approx(0 if PACKED else -63.84)  # torch counted positions beyond the end
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
    assert made.to_string(-1) == made.to_string(None) == made.to_string()
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


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_tensors_of_inference_mode_are_followed_by_their_values(monkeypatch):
    """They do not count what is written to them."""
    made, start = [], FlexPair.__init__
    monkeypatch.setattr(FlexPair, "__init__", lambda self, *given: made.append(self) or start(self, *given))
    with torch.inference_mode():
        table, offsets, q = torch.arange(S) < 9, torch.tensor([0, 7, S]), torch.randn(1, 1, S, 16)
        mask = ours.create_block_mask(lambda b, h, q, k: table[k], None, None, S, S, "cpu", 8)
        for changes in (1, 2):
            now = theirs.create_block_mask(lambda b, h, q, k: table[k], None, None, S, S, "cpu", 8)
            same(mask, now)
            for _ in range(2):
                out = ours.flex_attention(q, q, q, block_mask=mask)
                torch.testing.assert_close(out, theirs.flex_attention(q, q, q, block_mask=now))
            assert len(made) == changes
            table.fill_(True)
        read = ours.create_block_mask(lambda b, h, q, k: torch.searchsorted(offsets, k) < 2, None, None, S, S, "cpu", 8)
        offsets[1] = 9
        with pytest.raises(fk.ParameterError, match="has changed since the mask was traced"):
            ours.flex_attention(q, q, q, block_mask=read)


def test_to_moves_the_mask_too():
    made = ours.create_block_mask(lambda b, h, q, k: DOC[q] == DOC[k], None, None, S, S, "cpu", 8)
    there = made.to("meta")
    assert there.tensors["DOC"].device.type == "meta"
    assert there.device.type == "meta"
    assert made.device.type == "cpu"
    assert made.to("cpu") == made
    assert made.to("cpu").mask_mod is made.mask_mod
    assert made.lay_out().to("meta").kv_indices.device.type == "meta"
