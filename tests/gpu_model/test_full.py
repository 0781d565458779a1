"""The full model: counts of tiles, waves over SMs, power, and the published figures that it is held to."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gpu_sim import full
from gpu_sim.machine import H100
from gpu_sim.ours import Ours, Tile, chosen, planned
from gpu_sim.published import BANDS, ROWS, band, case, name
from gpu_sim.report import FIGURES, MODEL
from gpu_sim.sass import parse
from support.sass import listing

from frisket.lowering.plan import Geometry
from frisket.runtime.backends.triton.tiles import pays

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu-model.json"
TILE = Tile(128, 64, 8, 3)


@pytest.mark.parametrize("version", ["3.6", "3.9"])
def test_full_model_is_within_bands_of_published_figures(version):
    rows = json.loads(RESULTS.read_text())["parts"][f"validation, Triton {version}"]["rows"]
    assert set(rows) == {name(*row[:4]) for row in ROWS}
    for direction, mask, dim, length, published, _ in ROWS:
        row = rows[name(direction, mask, dim, length)]
        assert row["figures"]["TFLOP/s"]["published"] == published
        low, high = band(direction, mask, length)
        assert low <= row["ratios"]["model / published"][0] <= high, name(direction, mask, dim, length)
    forward = [rows[name(*row[:4])]["ratios"]["model / published"][0] for row in ROWS if row[0] == "forward"]
    assert max(forward) / min(forward) < 1.2  # the same error for all: ratios can be trusted
    assert set(BANDS) == {"forward", "backward", "short causal backward"}


def test_jax_takes_the_forward_that_the_model_finds_faster():
    """Or an H100, where it has run both."""
    ran = json.loads(RESULTS.with_name("gpu.json").read_text())["parts"]["jax-forward"]["rows"]
    parts = json.loads(RESULTS.read_text())["parts"]
    mosaic, triton = (parts[f"{n}, Triton 3.9"]["rows"] for n in ("mosaic", "jax"))
    asked = [row for row in FIGURES if row[0] == "forward"]
    assert len(triton) == len(asked)
    taken = set()
    for direction, mask, dim, length in asked:
        row = name(direction, mask, dim, length)
        rates = [rows[row]["figures"][MODEL][who] for rows, who in ((triton, "triton"), (mosaic, "frisket"))]
        plan, _ = planned(Ours("forward", mask, dim, group=2))
        g = Geometry(1, 16, 8, length, length, dim, dim, 1.0)
        faster = rates[0] > 1.1 * rates[1]
        if known := ran.get(f"{mask}, D {dim}", {"rows": {}})["rows"].get(str(length)):
            faster = known["figures"]["tflops"]["triton"] > known["figures"]["tflops"]["pallas-mosaic-gpu"]
        assert pays(plan, g, "bfloat16", narrow=False) == faster, row
        taken |= {(mask, dim)} if faster else set()
    assert taken >= {("window 128", 64), ("documents", 64), ("causal", 64)}


@pytest.mark.exhaustive
def test_stored_validation_equals_the_full_model():
    import triton

    if not triton.__version__.startswith("3.9"):
        pytest.skip("the figures are those of Triton 3.9 and 3.6, with the torch beside each")
    rows = json.loads(RESULTS.read_text())["parts"]["validation, Triton 3.9"]["rows"]
    direction, mask, dim, length, _, source = ROWS[2]
    found = full.rate("flex", direction, case(mask, dim, length, source))
    assert found == pytest.approx(rows[name(direction, mask, dim, length)]["figures"]["TFLOP/s"]["model"], rel=0.01)


def test_tiles_of_a_causal_mask():
    """Of 64 rows of 128 queries row i has 2 i full tiles of 64 keys and two at the diagonal; rows of keys alike."""
    work = full.ours_work("forward", "causal", 8192, TILE)
    assert (work.border == 2).all()
    assert list(work.full) == list(range(126, -1, -2))  # the longest first
    own = full.ours_work("dkv", "causal", 8192, Tile(64, 128, 8, 3))
    assert sorted(own.full) == list(range(0, 127, 2))
    theirs = full.flex_work("forward", "causal", 8192, TILE)
    assert list(theirs.full) == list(range(0, 127, 2))  # in the order of rows
    assert (theirs.border == 2).all()


def test_tiles_of_a_window_and_of_documents():
    window = full.ours_work("forward", "window 128", 4096, Tile(64, 64, 4, 3))
    assert (window.full[:-2] == 1).all()
    assert (window.border[:-2] == 2).all()
    documents = full.ours_work("forward", "documents", 4096, Tile(64, 64, 4, 3))
    assert documents.full.sum() == 8 * sum(range(8))
    assert documents.border.sum() == 64


def test_groups_of_heads():
    work = full.ours_work("dkv", "causal", 1024, Tile(64, 128, 8, 3))
    one, all_ = work.grouped(4, walked=True), work.grouped(4, walked=False)
    assert (one.full == 4 * work.full).all()
    assert len(all_.full) == 4 * len(work.full)


def test_makespan_counts_waves_over_multiprocessors():
    assert full.makespan([2.0] * 132, 132) == (2, 0)
    assert full.makespan([2.0] * 133, 132) == (4, 1 - 133 / 264)
    assert full.makespan([1.0, 1.0, 4.0], 2)[0] == 5  # the longest last
    assert full.makespan([4.0, 1.0, 1.0], 2)[0] == 4  # and first


def test_gpu_clock_falls_with_the_power_drawn():
    shares = np.linspace(0, 1, 11)
    clocks = [H100.clock_under(x) for x in shares]
    assert clocks[0] == H100.clock
    assert clocks == sorted(clocks, reverse=True)
    assert 0.7 < clocks[-1] / H100.clock < 0.8


CODE = """
stall=2 MOV R1, R2
@!P0 BRA `(.L_x_1)
write=0 LDG.E.128 R4, [R2]
.L_x_0:
WARPGROUP.ARRIVE
HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
WARPGROUP.DEPBAR.LE gsb0, 0x0
FSEL R1, R1, R2, P1
@P0 BRA `(.L_x_0)
.L_x_1:
@!P2 BRA `(.L_x_3)
.L_x_2:
WARPGROUP.ARRIVE
HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
WARPGROUP.DEPBAR.LE gsb0, 0x0
@P0 BRA `(.L_x_2)
.L_x_3:
wait=1 STG.E.128 [R2], R4
EXIT
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("FRISKET_GPU_MODEL_CACHE", str(tmp_path))
    text = listing(CODE)
    made = full.Compiled("kernel", "sm_90", "", 4, 128, 0, 65536, 0.0, text)
    border, rest = full.loop_numbers(made, made.sass.products)
    assert (border, rest) == (0, 1)
    return full.Kernel(made, border, rest, 64 * 64, 256)


def test_path_through_a_kernel_reaches_its_products(kernel):
    (code,) = parse(kernel.compiled.text)
    first, second = code.products
    assert full.path(code, 0, [first.start]) == [0, 1, 2, 3]
    assert full.path(code, first.stop, [second.start])[-1] == second.start
    with pytest.raises(ValueError, match="no way"):
        full.path(code, second.stop, [first.start])


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_program_copies_as_many_tiles_as_its_loops_have_turns(tmp_path, monkeypatch, stages, described):
    """Tiles ahead of a loop are copied for turns that copy nothing, so a block takes no longer beside its tiles where
    copies are slow: it waits for one of them."""
    monkeypatch.setenv("FRISKET_GPU_MODEL_CACHE", str(tmp_path))
    tile = 4 * 4 * 512
    copy = "LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4]\n" * 4 + "write=0 LDGDEPBAR\n"
    await_ = f"DEPBAR.LE SB0, {hex(stages - 2)}"
    if described:
        copy = "@P2 SYNCS.ARRIVE.TRANS64 RZ, [UR4], R8\n@UP2 UTMALDG.4D [UR8], [UR26]\n"
        await_ = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3"
    loop = f"""
        .L_x_{{0}}:
        {await_}
        WARPGROUP.ARRIVE
        HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
        WARPGROUP.DEPBAR.LE gsb0, 0x0
        {{1}}
        {copy}
        @P0 BRA `(.L_x_{{0}})
    """
    parts = [copy * (stages - 1) + loop.format(n, "FADD R1, R1, R2" * (1 - n)) for n in (0, 1)]
    bytes, text = described * tile, listing("".join(parts) + "EXIT")
    made = full.Compiled("kernel", "sm_90", "", 4, 128, 0, 65536, bytes, text, stages)
    one = full.Kernel(made, *full.loop_numbers(made, made.sass.products), 64 * 64, 256)
    slow = replace(H100, l2_rate=1, l2_port=1, l2_burst=0)
    assert tile <= full.figures(made, slow, 1)[one.full].cycles < 1.1 * tile
    assert full.overhead(one, slow) - full.overhead(one, H100) < 0.2 * tile
    for turns in (1, 5):
        taken = full.whole(one, slow, {one.border: 0, one.full: turns})
        assert taken == pytest.approx(turns * tile + slow.copy_latency, rel=0.1)


def test_more_tiles_and_slower_parts_take_longer(kernel):
    def seconds(border, rest, gpu=H100, blocks=132):
        work = full.Work(np.full(blocks, border), np.full(blocks, rest))
        return full.kernel_time([(kernel, work)], 1, gpu, 0).seconds

    assert seconds(2, 10) < seconds(2, 20) < seconds(12, 20) < seconds(12, 20, blocks=3 * 132 + 1)
    assert seconds(2, 10) < seconds(2, 10, replace(H100, matrix_latency=64))
    assert seconds(2, 10) < seconds(2, 10, replace(H100, launch=5000))
    assert seconds(2, 10, replace(H100, clock=2e9)) < seconds(2, 10)
    masked, plain = (seconds(*x) - seconds(0, 0) for x in ((40, 0), (0, 40)))
    assert masked > plain  # a border tile has the mask's instructions, too


def test_copies_of_a_warp_that_is_not_played_bound_a_tile(kernel):
    def cycles(copied):
        work = full.Work(np.full(132, 1), np.full(132, 99))
        return full.kernel_time([(replace(kernel, copied=copied), work)], 1, H100, 0).cycles

    assert cycles(0) == cycles(1)
    some, more = (cycles(n << 20) for n in (1, 2))
    assert more - some == pytest.approx(100 * (1 << 20) / H100.l2_rate)


def test_memory_bounds_a_kernel(kernel):
    work = full.Work(np.ones(132, int), np.ones(132, int))
    slow = full.kernel_time([(kernel, work)], 1, H100, 1e10)
    assert slow.seconds == pytest.approx(1e10 / H100.hbm + full.SECONDS_A_LAUNCH)


def test_dk_and_dv_are_kernels_where_calls_have_one_for_each():
    both, dk, dv = (Ours(n, dim=256) for n in ("dkv", "dk", "dv"))
    assert [planned(x)[1].dv is None for x in (both, dk, dv)] == [True, False, False]
    assert (both.flops, dk.flops, dv.flops) == (8 * 256, 6 * 256, 4 * 256)  # the scores are computed in each
    target = planned(dk)[1]
    tiles = [(t.block_q, t.block_k) for t in (target.dkv, target.dv)]
    assert [(t.block_q, t.block_k) for t in map(chosen, (dk, dv))] == tiles
    with pytest.raises(ValueError, match="have one kernel of dk and dv on sm_90: ask for dkv"):
        planned(Ours("dv", dim=128))
