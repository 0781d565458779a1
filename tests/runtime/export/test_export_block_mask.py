"""torch's BlockMask: the lists of `create_block_mask`, bit for bit, and a mask_mod that flex_attention runs."""

from __future__ import annotations

import inspect
import random
import warnings

import numpy as np
import pytest
import torch
from support import formats, masks
from support.flex_masks import torchs
from support.tiers import thinned
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import frisket as fk
from frisket.dsl.errors import ExportError
from frisket.runtime.export import tile_lists

DOC = np.repeat(np.arange(6), [40, 1, 99, 60, 30, 70]).astype(np.int32)


@pytest.mark.parametrize("part", thinned(range(3), 3))
def test_random_masks_give_the_lists_of_create_block_mask(part):
    rng = random.Random("block mask")
    named = [*masks.written().items(), *((f"random {i}", masks.random_mask(rng)) for i in range(15))]
    for name, case in [(name, masks.case(mask, rng)) for name, mask in named][part::3]:
        layout, dense = formats.laid_out(case)
        ours = layout.to_block_mask()
        nb, nh = ours.kv_num_blocks.shape[:2]
        assert (nb, nh) in {(x, y) for x in (1, case.batch) for y in (1, case.heads)}
        assert (dense == dense[:nb]).all(), name
        assert (dense == dense[:, :nh]).all(), name
        table = torch.from_numpy(dense)
        theirs = create_block_mask(
            lambda b, h, q, k, t=table: t[b, h, q, k], nb, nh, case.q_len, case.kv_len, "cpu", case.block
        )
        formats.same_lists(ours, theirs, name)
        lengths = (case.batch, case.heads, case.q_len, case.kv_len)
        np.testing.assert_array_equal(create_mask(ours.mask_mod, *lengths, "cpu").numpy(), dense, err_msg=name)


@pytest.mark.parametrize(
    ("text", "theirs"),
    [
        ("causal", lambda b, h, q, k: q >= k),
        ("causal & window(64)", lambda b, h, q, k: (q >= k) & (q - k < 64)),
        ("prefix(50) | causal", lambda b, h, q, k: (k < 50) | (q >= k)),
        (
            "causal & same(doc)",
            lambda b, h, q, k: (q >= k) & (torch.from_numpy(DOC)[q] == torch.from_numpy(DOC)[k]),
        ),
        ("causal & dilated(100, 3)", lambda b, h, q, k: (q >= k) & ((q - k).abs() <= 99) & ((q - k) % 3 == 0)),
        ("causal & q - k < 9 * (h + 1)", lambda b, h, q, k: (q >= k) & (q - k < 9 * (h + 1))),
        ("k % 2 == 0 & q + b >= k", lambda b, h, q, k: (k % 2 == 0) & (q + b >= k)),
        ("true", lambda b, h, q, k: q.new_ones((), dtype=torch.bool)),
        ("false", lambda b, h, q, k: q.new_zeros((), dtype=torch.bool)),
    ],
)
@pytest.mark.parametrize(("lengths", "block"), [((256, 256), 128), ((300, 300), 64), ((130, 300), (64, 32))])
def test_lists_of_masks_that_people_write(text, theirs, lengths, block):
    mask = fk.mask(text, **({"doc": DOC} if "doc" in text else {}))
    ours = mask.layout(*lengths, batch=2, heads=2, block=block).to_block_mask()
    batch, heads = 2 if "b >=" in text else None, 2 if "h +" in text else None
    formats.same_lists(ours, create_block_mask(theirs, batch, heads, *lengths, "cpu", block), text)
    joined = mask.layout(*lengths, batch=2, heads=2, block=block).to_block_mask(separate_full_blocks=False)
    formats.same_lists(joined, torchs(theirs, batch, heads, *lengths, "cpu", block, separate_full_blocks=False), text)


def test_flex_attention_computes_what_frisket_does():
    mask = fk.mask("causal & same(doc) & q - k < w * (h + 1)", doc=DOC, w=40)
    ours = mask.layout(200, 300, batch=2, heads=2, block=64).to_block_mask()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 16, generator=generator) for n in (200, 300, 300))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uncompiled
        theirs = flex_attention(q, k, v, block_mask=ours)
    torch.testing.assert_close(theirs, fk.attention(q, k, v, mask), atol=2e-6, rtol=1e-5)


@pytest.mark.slow  # torch compiles C++
def test_flex_attention_compiles_it():
    mask = fk.mask("causal & same(doc) & (q - k) // 3 % 2 == 0", doc=DOC)
    ours = mask.layout(256, 256, block=128).to_block_mask()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 256, 16, generator=generator) for _ in range(3))
    with torch.no_grad():
        theirs = torch.compile(flex_attention)(q, k, v, block_mask=ours)
    torch.testing.assert_close(theirs, fk.attention(q, k, v, mask), atol=2e-6, rtol=1e-5)


def test_a_crop_counts_from_its_first_position():
    mask = fk.mask("causal & same(doc)", doc=DOC)
    crop = mask.layout(64, 200, block=32, origin=(0, 0, 150, 30), sizes=(1, 1, 300, 300)).to_block_mask()
    dense = np.asarray(mask.dense(300, 300))[:, :, 150:214, 30:230]
    np.testing.assert_array_equal(create_mask(crop.mask_mod, 1, 1, 64, 200, "cpu").numpy(), dense)


def test_exported_mask_mod_has_readable_source():
    mask = fk.mask("causal & same(doc) & q - k < w", doc=DOC, w=64)
    made = mask.layout(300, 300, origin=(0, 0, 0, 0)).to_block_mask().mask_mod
    assert made.source == (
        "def make(doc):\n"
        "    def mask_mod(b, h, q_idx, kv_idx):\n"
        "        # q >= k & doc[q] == doc[k] & q - k < w\n"
        "        return (q_idx >= kv_idx) & (q_idx - kv_idx <= 63) & (doc[q_idx] == doc[kv_idx])\n"
        "    return mask_mod\n"
    )
    assert inspect.getsource(made).strip().startswith("def mask_mod(b, h, q_idx, kv_idx):")
    floor = fk.mask("q // max(h, 1) == k // 5").layout(300, 300, heads=2).to_block_mask().mask_mod
    assert "def floordiv(x, y):" in floor.source
    assert "return floordiv(q_idx, maximum(h, 1)) == kv_idx // 5" in floor.source
    short = fk.mask("causal & doc[min(q, 299)] == doc[max(k - 9, 0)]", doc=DOC).layout(300, 300).to_block_mask()
    assert ".clamp(0, 299)]" in short.mask_mod.source


def test_a_table_that_ends_early_is_clamped():
    mask = fk.mask("q < 100 & k < 100 & t[q] == t[k]", t=np.arange(100) // 7)
    made = mask.layout(130, 130, block=16).to_block_mask().mask_mod
    assert "t[q_idx.clamp(0, 99)] == t[kv_idx.clamp(0, 99)]" in made.source
    np.testing.assert_array_equal(create_mask(made, 1, 1, 130, 130, "cpu").numpy(), np.asarray(mask.dense(130, 130)))


def test_wide_integers_are_widened():
    mask = fk.mask("q * 1000003 * 70001 % 7 < k * 3 % 8")
    made = mask.layout(60, 60, block=16).to_block_mask().mask_mod
    assert "q_idx = q_idx.to(torch.int64)" in made.source
    q, k = torch.arange(60, dtype=torch.int32)[:, None], torch.arange(60, dtype=torch.int32)
    zero = torch.zeros((), dtype=torch.int32)
    np.testing.assert_array_equal(made(zero, zero, q, k).numpy(), np.asarray(mask.dense(60, 60))[0, 0])


def test_an_undecided_layout_is_refused():
    mask = fk.mask("random(3, q // 8, k // 8) < 0.3")  # whole tiles, which only a look shows
    with pytest.raises(ExportError) as e:
        mask.layout(64, 64, block=8, exact=False).to_block_mask()
    assert str(e.value).startswith(
        "tiles were left undecided when the budget was spent (exact is False), so the lists would not be those of "
        "create_block_mask: 64 tiles are partial or not known"
    )
    table = torch.from_numpy(np.array(mask.dense(64, 64))[0, 0])
    formats.same_lists(
        mask.layout(64, 64, block=8).to_block_mask(),
        create_block_mask(lambda b, h, q, k: table[q, k], None, None, 64, 64, "cpu", 8),
    )


def test_block_mask_export_needs_rows_and_columns(monkeypatch):
    layout = fk.mask("causal").layout(64, 64, block=8)
    other = fk.mask("causal & q - k < 9").layout(64, 64, block=8)
    layout.__dict__["transposed"] = other.transposed
    with pytest.raises(ExportError, match="needs the tiles by rows and by columns"):
        layout.to_block_mask()


def test_block_mask_export_of_long_sequences_stays_small():
    layout = fk.mask("causal & window(1024)").layout(2**18, 2**18)
    found = layout.to_block_mask()
    assert found.kv_indices.shape == (1, 1, 2048, 2048)
    assert found.kv_num_blocks[0, 0, -1] == 2
    assert found.kv_indices[0, 0, -1, :4].tolist() == [2039, 2047, 0, 1]
    assert tile_lists.MEMORY == 1 << 33
