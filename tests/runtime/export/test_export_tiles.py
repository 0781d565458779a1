"""BSR, FlashAttention 4 and splash attention: tiles, and the elements of those the mask cuts."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as peer_mask
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as peer
from support import formats, masks
from support.lowering import brute

import frisket as fk
from frisket.dsl.errors import ExportError
from frisket.runtime.export import bsr as bsr_module
from frisket.runtime.export import tile_lists


def cases(seed: str, extra: int = 20):
    rng = random.Random(seed)
    for name, mask in [*masks.written().items(), *((f"random {i}", masks.random_mask(rng)) for i in range(extra))]:
        yield name, masks.case(mask, rng)


def test_bsr_exports_equal_the_mask():
    for name, case in cases("bsr"):
        layout, dense = formats.laid_out(case)
        found, tiles = layout.to_bsr(bits=True), layout.to_bsr()
        kinds = brute.kinds(case.mask, case.q_len, case.kv_len, **case.options)
        for b, h in np.ndindex(case.batch, case.heads):
            rows, plain = found.slices[found.slice_of[b, h]], tiles.slices[tiles.slice_of[b, h]]
            seen = formats.bsr(rows, found.shape)
            np.testing.assert_array_equal(seen[: case.q_len, : case.kv_len], dense[b, h], err_msg=name)
            assert seen.sum() == dense[b, h].sum(), "what lies outside the lengths is hidden"
            grid = np.zeros(kinds.shape[2:], np.uint8)
            grid[np.repeat(np.arange(layout.rows), np.diff(rows.indptr)), rows.indices] = rows.kind
            np.testing.assert_array_equal(grid, kinds[b, h], err_msg=name)
            for field in ("indptr", "indices", "kind"):
                np.testing.assert_array_equal(getattr(rows, field), getattr(plain, field))
            assert plain.bits is None
            assert (rows.indptr.dtype, rows.indices.dtype) == (np.int32, np.int32)
        assert len({(s.bits.tobytes(), s.indices.tobytes(), s.indptr.tobytes()) for s in found.slices}) == len(
            found.slices
        )


def test_bsr_is_what_torch_and_flashinfer_take():
    layout = fk.mask("causal & window(9)").layout(32, 32, block=(8, 4))
    rows = layout.to_bsr(bits=True).slices[0]
    crow, col = torch.from_numpy(rows.indptr), torch.from_numpy(rows.indices)
    theirs = torch.sparse_bsr_tensor(crow, col, torch.from_numpy(rows.data()).float(), size=(32, 32))
    dense = np.asarray(fk.mask("causal & window(9)").dense(32, 32))[0, 0]
    np.testing.assert_array_equal(theirs.to_dense().bool().numpy(), dense)
    np.testing.assert_array_equal(np.unpackbits(rows.packed_mask(), bitorder="little"), rows.data().reshape(-1))


def test_bits_settle_what_a_budget_left_open():
    mask = fk.mask("random(3, q // 8, k // 8) < 0.3")  # whole tiles, which only a look shows
    layout = mask.layout(64, 64, block=8, exact=False)
    assert not layout.exact
    rows = layout.to_bsr(bits=True).slices[0]
    assert set(rows.kind) == {2}
    dense = np.asarray(mask.dense(64, 64))[0, 0]
    np.testing.assert_array_equal(formats.bsr(rows, (64, 64)), dense)
    assert len(rows.indices) == dense[::8, ::8].sum() < 64


def test_bsr_has_limits(monkeypatch):
    layout = fk.mask("causal").layout(64, 64, block=8)
    with pytest.raises(ExportError, match="ask for to_bsr\\(bits=True\\)"):
        layout.to_bsr().slices[0].data()
    monkeypatch.setattr(bsr_module, "BUDGET", 400)
    with pytest.raises(ExportError) as e:
        layout.to_bsr(bits=True)
    assert str(e.value) == (
        "the cut tiles hold 512 elements, more than the 400 that an export looks at\n"
        "  ask for to_bsr() without bits, a smaller crop, or smaller tiles"
    )
    monkeypatch.setattr(bsr_module, "BUDGET", 30)
    with pytest.raises(ExportError) as e:
        layout.to_bsr()
    assert str(e.value) == "BSR lists more than 30 tiles here\n  use larger tiles, or to_slices()"


# -- FlashAttention 4 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [False, True])
def test_fa4_exports_equal_the_layout(compact):
    for name, case in [*cases("fa4")][compact::2]:
        layout, _ = formats.laid_out(case)
        kinds = brute.kinds(case.mask, case.q_len, case.kv_len, **case.options)
        found = layout.to_fa4(compact=compact)
        for tensors, want in ((found.forward, kinds), (found.backward, kinds.swapaxes(2, 3))):
            assert tensors.block_size == case.block
            for kind, count, index in ((1, *tensors[:2]), (2, *tensors[2:4])):
                assert count.dtype == index.dtype == torch.int32
                count, index = count.numpy(), index.numpy()
                assert count.shape[:2] == index.shape[:2]
                assert count.shape[2] == index.shape[2] == want.shape[2]
                longest = max(1, (want == kind).sum(axis=3).max())
                assert index.shape[3] == (longest if compact else want.shape[3])
                seen = formats.lists(count, index, want.shape[3])
                np.testing.assert_array_equal(np.broadcast_to(seen, want.shape), want == kind, err_msg=name)
                past = np.arange(index.shape[3]) >= count[..., None]
                assert not index[past].any()
                assert (np.diff(index, axis=3)[~past[..., 1:]] > 0).all(), "ascending"


def test_fa4_names_are_those_of_flash_attention():
    forward = fk.mask("causal").layout(512, 512, block=(256, 128)).to_fa4().forward
    assert forward._fields == ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx", "block_size")
    assert forward.mask_block_idx[0, 0].tolist() == [[0, 1, 0, 0], [2, 3, 0, 0]]
    assert forward.full_block_idx[0, 0].tolist() == [[0, 0, 0, 0], [0, 1, 0, 0]]


def test_lists_have_a_limit(monkeypatch):
    monkeypatch.setattr(tile_lists, "MEMORY", 1 << 30)
    layout = fk.mask("causal").layout(2**20, 2**20, block=64)
    for export, name in ((layout.to_fa4, "FA4"), (layout.to_block_mask, "BlockMask")):
        with pytest.raises(ExportError) as e:
            export()
        assert str(e.value) == (
            f"{name} stores a column index for every tile: 4.0 GiB for 1 x 1 masks of 16384 x 16384 tiles\n"
            "  the most is 1 GiB: use larger tiles, or to_bsr(), with only the tiles that are read"
        )


# -- splash -------------------------------------------------------------------------------------------


def test_splash_exports_equal_process_mask():
    held = 0
    for name, case in cases("splash", extra=60):
        bq, bk = case.block
        case.q_len, case.kv_len, case.sizes = -(-case.q_len // bq) * bq, -(-case.kv_len // bk) * bk, (9, 9, 400, 400)
        if (case.q_len // bq) * (case.kv_len // bk) > 200:
            continue  # process_mask takes a while
        layout, dense = formats.laid_out(case)
        try:
            found, fused = layout.to_splash(), layout.to_splash(fused=True)
        except ExportError:
            assert not dense.any(axis=3).all() or (dense != dense[:1]).any(), name
            continue
        held += 1
        theirs = peer_mask.MultiHeadMask([peer_mask.NumpyMask(m) for m in dense[0]])
        for ours, want in (
            (found.forward, peer.process_mask(theirs, case.block)),
            (fused.forward, peer.process_mask(theirs, case.block)),
            (found.dkv, peer.process_mask_dkv(theirs, case.block)),
            (fused.dkv, peer.process_mask_dkv(theirs, case.block, shrink_grid=False)),
        ):
            for field, a, b in zip(ours._fields, ours, want[0], strict=True):
                assert (a is None) == (b is None), (name, field)
                if a is not None:
                    assert a.dtype == b.dtype, (name, field)
                    np.testing.assert_array_equal(a, b, err_msg=f"{name} {field}")
        for info, dkv in ((found.forward, False), (fused.dkv, True)):
            np.testing.assert_array_equal(formats.splash(info, case.block, *dense.shape[1:], dkv=dkv), dense[0])
    assert held > 15


@pytest.mark.parametrize(
    ("text", "theirs"),
    [
        ("causal", peer_mask.CausalMask((64, 64))),
        ("q - k <= 10 & k - q <= 3", peer_mask.LocalMask((64, 64), (10, 3), 0)),
        ("causal & chunked(20)", peer_mask.ChunkedCausalMask((64, 64), 20)),
    ],
)
def test_splash_masks_of_jax_walk_the_same_tiles(text, theirs):
    """They compute these in the kernel and keep no blocks; the tiles are the same."""
    ours = fk.mask(text).layout(64, 64, block=16).to_splash().forward
    want, function = peer.process_mask(peer_mask.MultiHeadMask([theirs]), (16, 16))
    assert function is not None
    np.testing.assert_array_equal(ours.data_next, want.data_next)
    np.testing.assert_array_equal(ours.block_mask, want.block_mask)


def test_splash_attention_runs_on_it():
    """Their kernel, interpreted, with our MaskInfo, against the float64 interpreter."""
    mask = fk.mask("causal & q - k < 40 * (h + 1)")
    info = mask.layout(256, 256, heads=2).to_splash()
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 256, 128)).astype(np.float32) for _ in range(3))
    sizes = kernel.BlockSizes(block_q=128, block_kv=128, block_kv_compute=128)
    run = kernel.SplashAttentionKernel(
        info.forward, None, None, block_sizes=sizes, is_mqa=False, save_residuals=False,
        mask_value=kernel.DEFAULT_MASK_VALUE, attn_logits_soft_cap=None, residual_checkpoint_name=None,
        mask_function=None, interpret=True,
    )  # fmt: skip
    out = np.asarray(run(q, k, v))
    seen = np.asarray(mask.dense(256, 256, heads=2))[0]
    scores = np.where(seen, np.einsum("hqd,hkd->hqk", q, k, dtype=np.float64), -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    want = np.einsum("hqk,hkd->hqd", weights / weights.sum(axis=2, keepdims=True), v)
    np.testing.assert_allclose(out, want, atol=2e-5)


@pytest.mark.parametrize(("top", "dtype"), [(127, np.int8), (128, np.int16), (32767, np.int16), (32768, np.int32)])
def test_splash_exports_use_the_smallest_integers(top, dtype):
    ours, theirs = bsr_module._small(np.array([0, top])), peer._downcast_to_small_type(np.array([0, top], np.int32))
    assert ours.dtype == theirs.dtype == dtype


def test_splash_export_refuses_masks_it_cannot_hold(monkeypatch):
    def said(text, *lengths, **options):
        with pytest.raises(ExportError) as e:
            fk.mask(text).layout(*lengths, **options).to_splash()
        return str(e.value)

    assert said("causal", 100, 128) == (
        "splash attention wants q_len to be whole tiles, and 100 is not a multiple of 128\n"
        "  pad the sequence and hide the padding in the mask, or choose another tile size"
    )
    assert said("q - k > 2 | h == 0", 32, 32, heads=2, block=8) == (
        "query 0 of the layout sees no key, and splash attention would give it a mean over hidden ones\n"
        "  at b = 0, h = 1, q = 0, k = 0 the mask is hidden: q - k > 2 is false: q - k = 0; h == 0 is false: h = 1\n"
        "  let every query see a key, or use to_block_mask() or to_fa4()"
    )
    assert said("causal & (k < 3 | b == 0 | q - k < 2)", 32, 32, batch=2, block=8) == (
        "splash attention has one mask for all batch entries, and entry 1 of the layout differs from the first\n"
        "  lay the entries out one by one: batch=1 with origin=(b, 0, 0, 0)"
    )
    monkeypatch.setattr(bsr_module, "_MOST", 20)
    assert said("causal", 64, 64, block=8) == (
        "MaskInfo holds three integers for every tile, in scalar memory, and 64 are too many\n"
        "  use larger tiles: 20 entries are the most"
    )
