"""The static figure of kernels for AMD's GPUs."""

import pytest
from gpu_sim import amd, search
from gpu_sim.compiled import Compiled
from gpu_sim.ours import Tile
from gpu_sim.search import Cell

LOOP = """
.LBB0_1:
	v_add_u32_e32 v0, v1, v2
	s_cbranch_scc1 .LBB0_1
.LBB0_2:
	s_nop 0
.LBB0_3:
	v_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
	v_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
	ds_read_b128 v[0:3], v4
	ds_read2st64_b64 v[0:3], v4 offset1:1
	ds_write_b64 v4, v[0:1]
	v_exp_f32_e32 v5, v5
	v_mul_f32_e32 v5, v5, v5
	s_cbranch_vccnz .LBB0_3
	s_cbranch_scc0 .LBB0_2
"""


def test_innermost_loops_with_products_are_counted():
    assert amd.loops(LOOP) == [amd.Loop(flop=4 * 32 * 32 * 8, vector=2, transcendental=1, lds=16 + 16 + 8)]
    assert [x.flop for x in amd.loops(LOOP.replace("mfma_f32_32x32x8_bf16_1k", "wmma_f32_16x16x16_bf16"))] == [16384]
    with pytest.raises(ValueError, match="no loop multiplies"):
        amd.cycles("gfx942", "s_endpgm", 1, 4, 1)


def test_registers_and_lds_say_how_many_programs_there_are():
    assert amd.resident("gfx942", 128, 16_384, 4, 65_536) == 4
    assert amd.resident("gfx942", 129, 16_384, 4, 65_536) == 3  # allotted in eights
    assert amd.resident("gfx942", 128, 40_000, 4, 65_536) == 1
    assert amd.resident("gfx942", 257, 0, 8, 65_536) == 0  # two wavefronts of a SIMD have 256 each
    assert amd.resident("gfx1100", 256, 16_384, 4, 65_536) == 2


def test_busiest_unit_bounds_a_loop():
    """Products of two times 32 cycles, vector instructions of 4 and 16, and 40 bytes a lane of LDS, which has 128."""
    few = amd.cycles("gfx942", LOOP, 1, 4, 1)
    assert few == 64 + 20 + 20 + amd.LATENCY  # one wavefront waits for each in turn
    assert amd.cycles("gfx942", LOOP, 1, 4, 2) < few
    assert amd.cycles("gfx942", LOOP, 8, 4, 1) == max(few / 8, 64 * 8 / 8, 40 * 64 / 128 * 4)
    assert amd.cycles("gfx950", LOOP, 1, 4, 1) < few


def test_tiles_of_amd_are_ordered_by_the_figure(monkeypatch):
    cell = Cell("gfx942", "forward", "long", 64)
    made = Compiled("attention_forward", "gfx942", "", 4, 120, 0, 16_384, 0.0, LOOP, 1)
    monkeypatch.setattr(search.ours, "compiled", lambda form, tile: made)
    found = search.evaluate(cell, Tile(128, 64, 4, 1))
    assert found["seconds"] == 1e-9 * amd.cycles("gfx942", LOOP, 4, 4, 1) / (128 * 64)
    other = search.staged(cell, Tile(128, 64, 4, 1))
    assert {(t.waves, t.mfma) for t in other} == {(1, 0), (2, 0), (3, 0), (4, 0), (0, 16), (0, 32)}
    assert all(not t.mfma for t in search.staged(Cell("gfx1201", "forward", "long", 64), Tile(64, 64, 4, 1)))
    assert {t.stages for t in search.candidates(Cell("gfx950", "forward", "long", 128))} == {1, 2}
