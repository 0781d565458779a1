"""Which calls of few queries are packed and split on Triton, and the precision of products; nothing runs here."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from frisket.dsl import ir
from frisket.dsl.ir import lookup
from frisket.dsl.sugar import b, h, k, q, score
from frisket.dsl.types import FLOAT
from frisket.lowering.dtypes import Operand
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Bounds, Geometry, Pages, ProgramFacts, Spans, make_plan
from frisket.lowering.planner.planner import DeviceSpans
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.triton import tiles as triton_tiles
from frisket.runtime.backends.triton.grids import INTERPRETED, Shares, most_tiles, parts, processors, shares
from frisket.runtime.backends.triton.launch import near, shares_values
from frisket.runtime.backends.triton.tiles import ProgramTraits, default_target, target
from frisket.runtime.calls.options import LaunchOptions, Tuning

H200 = 132
CAUSAL = make_plan(ProgramExprs(q >= k))
BY_HEAD = make_plan(ProgramExprs(q - k < 20 * h))
TILE = Target("triton", 128, 64, 8, 2)


def chosen(plan=CAUSAL, *, batch=1, heads=8, kv_heads=8, q_len=1, kv_len=32768, dim=128, tile=TILE):
    g = Geometry(batch, heads, kv_heads, q_len, kv_len, dim, dim, 0.1)
    return shares(plan, None, g, tile, Dims(dim, dim, "bfloat16", heads // kv_heads), H200)


def test_decode_of_one_token_splits_keys_to_fill_the_gpu():
    assert chosen(heads=64) == Shares(Target("triton", 16, 64, 4, 3, splits=32), 2, 8, (128, 64))
    assert chosen(heads=8) == Shares(Target("triton", 16, 64, 4, 3, splits=32), 16, 1, (128, 64))


@pytest.mark.parametrize(("heads", "q_len", "rows", "queries"), [
    (8, 1, 16, 16), (24, 1, 16, 5), (64, 1, 16, 2), (64, 5, 64, 8), (64, 9, 128, 16), (64, 63, 128, 16),
    (320, 1, 64, 1), (800, 1, 128, 1),
])  # fmt: skip
def test_rows_of_a_tile_are_the_queries_of_a_group(heads, q_len, rows, queries):
    found = chosen(heads=heads, q_len=q_len)
    assert (found.target.block_q, found.queries) == (rows, queries)
    assert found.pack == heads // 8


def test_decode_tile_packs_a_divisor_of_the_heads_of_a_group():
    assert [chosen(heads=n, kv_heads=1).pack for n in (128, 136, 192)] == [128, 68, 96]
    assert chosen(heads=139, kv_heads=1).pack == 1
    assert [chosen(heads=128, kv_heads=1, dim=n).pack for n in (192, 576)] == [64, 16]


@pytest.mark.parametrize(("heads", "q_len", "arch", "kv", "tile", "pack"), [
    (16, 1, "sm_90", "", (16, 32, 4, 2), 16), (32, 1, "sm_90", "", (16, 32, 4, 2), 16),
    (48, 1, "sm_90", "", (64, 16, 8, 3), 48), (16, 4, "sm_90", "", (64, 16, 8, 3), 16),
    (128, 4, "sm_90", "", (64, 16, 8, 3), 64), (128, 1, "sm_90", "int8", (16, 32, 4, 2), 16),
    (128, 1, "sm_80", "", (16, 32, 4, 2), 16), (128, 1, "gfx942", "", (16, 16, 4, 1), 16),
])  # fmt: skip
def test_values_in_keys_have_tiles_of_their_own(heads, q_len, arch, kv, tile, pack):
    form = Operand(kv)
    g = Geometry(8, heads, 1, q_len, 32768, 576, 512, 0.1, k=form, v=form)
    dims = Dims(576, 512, "bfloat16", heads, kv, shared_values=True)
    traits = ProgramTraits(stored=bool(kv))
    found = shares(CAUSAL, None, g, default_target(g, "bfloat16", traits, arch=arch), dims, H200)
    few = found.target
    assert ((few.block_q, few.block_k, few.num_warps, few.num_stages), found.pack) == (tile, pack)
    assert few.splits > 1


def test_whole_rows_over_a_latent_are_in_two_parts_at_least():
    g = Geometry(32, 128, 1, 4, 8192, 576, 512, 0.1)
    dims = Dims(576, 512, "bfloat16", 128, shared_values=True)
    found = shares(CAUSAL, None, g, default_target(g, "bfloat16"), dims, H200)
    assert (found.target.block_q, found.target.splits, found.alone) == (64, 2, False)


@pytest.mark.parametrize(("dim", "v_dim", "inside"), [
    (576, 512, True), (192, 128, True), (128, 128, True), (96, 64, True), (96, 96, True), (64, 50, True),
    (128, 96, False), (576, 256, False),
])  # fmt: skip
def test_values_are_in_the_first_tiles_of_keys(dim, v_dim, inside):
    assert Dims(dim, v_dim, "bfloat16", shared_values=True).values_in_keys == inside
    assert not Dims(dim, v_dim, "bfloat16").values_in_keys


def test_values_share_keys_by_address_and_strides():
    k = torch.zeros(2, 1, 40, 96)
    shared = [k[..., :64], k, k.as_strided(k.shape, k.stride())]
    apart = [k[..., 32:], k[..., :64].clone(), k[:, :, ::2, :64], k.expand(2, 1, 40, 96).transpose(2, 3)]
    assert [shares_values(k, v) for v in (*shared, *apart)] == [True] * 3 + [False] * 4
    assert not shares_values(k[..., :64], k)


def test_heads_that_the_mask_tells_apart_are_not_packed():
    found = chosen(BY_HEAD, heads=64)
    assert (found.pack, found.queries, found.target.splits) == (1, 16, 4)


def test_full_machines_run_the_forward():
    assert chosen(q_len=4096, heads=32, kv_heads=8) is None
    assert chosen(q_len=1, heads=64, kv_heads=64, batch=8) is None
    packed = chosen(q_len=1, heads=64, kv_heads=8, batch=32)  # packing pays by itself
    assert (packed.pack, packed.target.splits) == (8, 1)
    assert chosen(q_len=17, heads=64, kv_heads=8, batch=32).pack == 8
    assert chosen(q_len=1, heads=64, kv_heads=8, batch=32, kv_len=256) is None


def test_full_grids_do_not_ask_how_many_tiles_are_visible():
    g = Geometry(4, 32, 8, 4096, 4096, 128, 128, 0.1)
    assert shares(CAUSAL, object(), g, TILE, Dims(128, 128, "bfloat16", 4), H200) is None


def test_small_grids_are_split_whatever_their_queries():
    found = chosen(heads=8, q_len=256, kv_len=131072)
    assert (found.pack, found.target.block_q, found.target.splits, found.block) == (1, 128, 8, (128, 64))
    assert chosen(heads=8, q_len=256, kv_len=256) is None


def test_splits_that_are_asked_for():
    assert chosen(heads=64, tile=Target("triton", 128, 64, splits=1)) is None
    assert chosen(heads=32, q_len=4096, tile=Target("triton", 128, 64, splits=3)).target.splits == 3


def test_parts_follow_the_tiles_that_are_visible():
    bounds = np.zeros((1, 2, 2, 4), np.int32)
    bounds[0, 0, :, 3] = 5, 3
    table = Spans(bounds, np.array([[2, 0]], np.int32), np.zeros((1, 8), np.int32))
    g = Geometry(1, 8, 8, 20, 32768, 64, 64, 0.1)

    class Source:
        def __init__(self, found):
            self.found = found

        def rows(self, block):
            assert block == (16, 64)
            return self.found

    device = DeviceSpans(torch.from_numpy(bounds), None, None, table.slice_of)
    assert [most_tiles(s, g, (16, 64)) for s in (Source(table), Source(device), None)] == [8, 512, 512]


def test_parts_are_few_and_full():
    tile, results = 32768, 16640  # bytes of 64 keys of 128 in bfloat16, and of the results of 16 queries
    assert parts(212, 264, 1000, tile, results) == 1  # enough programs
    assert parts(1, 264, 1000, tile, results) == 250  # of 264: four tiles each
    assert parts(8, 264, 128, tile, results) == 32  # and not 33, whose longest part is as long
    assert parts(8, 264, 128, tile // 2, 32 * results) < 32  # large results of small tiles
    assert all(parts(p, 264, n, tile, results) <= n for p in (1, 3, 50) for n in range(1, 40))


def test_products_of_packed_heads_count_where_keys_have_8_bits():
    """128 rows take longer to multiply with a key of 8 bits than the key takes to be read."""
    g = Geometry(6, 64, 8, 12, 6000, 128, 128, 0.1, k=Operand("int8"), v=Operand("int8"))
    found = shares(CAUSAL, None, g, TILE, Dims(128, 128, "bfloat16", 8, "int8"), H200)
    assert (found.target.block_q, found.target.splits) == (128, 5)


@pytest.mark.parametrize(("keys", "tiles", "split"), [(32, 8, False), (32, 9, True), (64, 4, False), (64, 5, True),
                                                      (128, 2, False), (128, 3, True)])  # fmt: skip
def test_few_keys_are_not_split_whatever_tiles_they_are_in(keys, tiles, split):
    g = Geometry(1, 8, 8, 1, keys * tiles, 128, 128, 0.1)
    found = shares(CAUSAL, None, g, replace(TILE, block_k=keys), Dims(128, 128, "bfloat16"), H200)
    assert (found is not None) == split


class Rows:
    """A SpanSource of the host, whose sequences see so many tiles."""

    def __init__(self, *tiles):
        bounds = np.zeros((len(tiles), 1, 1, 4), np.int32)
        bounds[:, 0, 0, 2:] = np.array(tiles)[:, None]
        slices = np.repeat(np.arange(len(tiles), dtype=np.int32)[:, None], 8, 1)
        self.found = Spans(bounds, np.ones((len(tiles), 1), np.int32), slices)

    def rows(self, block):
        return self.found


def test_decode_parts_are_balanced_for_uneven_sequences():
    def found(spans, plan=CAUSAL, batch=32, **more):
        g = Geometry(batch, 64, 8, 1, 131072, 128, 128, 0.1)
        return shares(plan, spans, g, TILE, Dims(128, 128, "bfloat16", 8), H200)

    unknown = found(None)  # on the device alone
    assert (unknown.balanced, unknown.target.splits, unknown.alone) == (True, 1, False)
    assert unknown.grid(Geometry(32, 64, 8, 1, 131072, 128, 128, 0.1)) == (8, 64, 1)
    assert found(Rows(2048, *[16] * 31)).balanced
    assert found(Rows(*[2048] * 32)).alone
    assert not found(None, batch=1).balanced  # nothing to weigh it against
    assert not found(None, batch=300).balanced
    q0, q1, k0 = (ir.var(n) for n in ("q0", "q1", "k0"))
    assert found(
        None, make_plan(ProgramExprs(q >= k), facts=ProgramFacts(bounds=Bounds(k0, k0, q0, q1)))
    ).alone  # all see alike
    g = Geometry(32, 64, 8, 1, 1024, 128, 128, 0.1)  # too short to be worth another kernel
    assert shares(CAUSAL, None, g, TILE, Dims(128, 128, "bfloat16", 8), H200).alone


def test_tensors_whose_tiles_span_more_than_32_bits_are_copied():
    whole = torch.empty(1, device="meta")
    far = whole.as_strided((1, 2, 8, 64), (0, 64, 1 << 25, 1))
    assert near(far, 32) is far
    assert near(far, 64).is_contiguous()
    assert near(whole.as_strided((1, 2, 8, 64), (0, 8, 1, 1 << 25)), 16).is_contiguous()


def test_products_of_float32_are_as_torch_has_them():
    g = Geometry(1, 8, 8, 1024, 1024, 64, 64, 0.1)
    before = torch.get_float32_matmul_precision()
    try:
        for said, want in (("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")):
            torch.set_float32_matmul_precision(said)
            found = target(None, g, "float32")
            assert {found.precision, found.dq.precision, found.dkv.precision} == {want}
            assert target(None, g, "bfloat16").precision == "ieee"
            assert target(None, g, "float32", tuning=Tuning(precision="tf32x3")).precision == "tf32x3"
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_window_that_is_a_formula_asks_no_device():
    w, q0, q1 = ir.param("w"), ir.var("q0"), ir.var("q1")
    plan = make_plan(
        ProgramExprs((q >= k) & (q - k < w)), facts=ProgramFacts(bounds=Bounds(q0 - w + 1, q1 - w + 1, q0, q1))
    )
    assert chosen(plan, heads=64).target.splits == 32


@pytest.mark.parametrize(("dim", "keys"), [(64, 64), (128, 64), (256, 32)])
def test_tiles_of_few_queries_leave_room_for_three_stages(dim, keys):
    """The forward's 128 keys at head size 128 would spill, and have two."""
    g = Geometry(1, 64, 8, 1, 32768, dim, dim, 0.1)
    tile = chosen(heads=64, dim=dim, tile=target(None, g, "bfloat16")).target
    assert (tile.block_k, tile.num_warps, tile.num_stages) == (keys, 4, 3)
    own = target(None, g, "bfloat16", tuning=Tuning(forward=LaunchOptions(block_k=128)))
    assert chosen(heads=64, dim=dim, tile=own).target.block_k == 128
    assert chosen(heads=64, dim=dim, tile=target(None, g, "bfloat16", (64, 128))).block[1] == 128


@pytest.mark.parametrize(("q_len", "paged", "keys"), [(1, False, 128), (1, True, 64), (4, True, 128), (5, False, 64)])
def test_few_keys_of_8_bits_have_wide_tiles(q_len, paged, keys):
    """Tiles of 8, 32 and 40 rows. In pages one query was not faster with them on an H100."""
    g = Geometry(8, 64, 8, q_len, 32768, 128, 128, 0.1, k=Operand("int8"), v=Operand("int8"))
    assert default_target(g, "bfloat16", ProgramTraits(stored=True, paged=paged)).decode.block_k == keys


@pytest.mark.parametrize(("q_len", "heads", "pack"), [(1, 8, 1), (100, 8, 1), (1, 64, 8)])
def test_heads_above_256_have_few_rows(q_len, heads, pack):
    """More of them would need more shared memory than a GPU has."""
    tile = target(None, Geometry(1, heads, 8, q_len, 32768, 512, 512, 0.1), "bfloat16", arch="sm_90")
    found = chosen(heads=heads, q_len=q_len, dim=512, tile=tile)
    assert (found.target.block_q, found.target.block_k, found.pack) == (16, 32, pack)


def test_three_stages_only_where_they_fit():
    g = Geometry(1, 8, 8, 1, 32768, 128, 128, 0.1)
    stages = {
        n: shares(CAUSAL, None, g, TILE, Dims(128, 128, n), H200).target.num_stages for n in ("float16", "float32")
    }
    assert stages == {"float16": 3, "float32": 2}  # 64 keys: 96 and 192 KiB
    assert chosen(tile=replace(TILE, block_k=128)).target.num_stages == 2
    assert chosen(tile=replace(TILE, num_stages=1)).target.num_stages == 1


def test_pages_take_two_more_stages():
    """Their numbers are loaded first: with three stages one tile of keys is on its way, with five two."""
    at = lookup("pages", (b, k // 16)), h // 8, k % 16
    paged = make_plan(ProgramExprs(q >= k, score * lookup("k_scale", at, FLOAT)), pages=Pages("pages", 16))
    assert chosen(paged, heads=64).target.num_stages == 5
    assert chosen(paged, heads=64, tile=replace(TILE, num_stages=1)).target.num_stages == 1  # as AMD's GPUs have it


def test_processors_are_those_of_the_device():
    assert processors(torch.device("cpu")) == INTERPRETED
    assert processors(SimpleNamespace(type="cuda", index=0)) == triton_tiles.processors()
