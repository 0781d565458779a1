"""Kernels whose warp groups have programs of their own, in the form that Gluon's compiler gives them."""

from dataclasses import replace

import pytest
from gpu_sim.machine import H100
from gpu_sim.sass import parse
from gpu_sim.simulate import simulate
from gpu_sim.specialised import cycles, programs, roles
from support.sass import listing

AWAIT = "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6+0x{}], R{}"
POST = "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+0x{}], RZ"
PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR40], R24, gsb0"


def tile(bar, work=8):
    """Keys at 0x100, freed at 0x120, two stages of each."""
    lines = [AWAIT.format("100", 2), "WARPGROUP.ARRIVE", *4 * [PRODUCT], "WARPGROUP.DEPBAR.LE gsb0, 0x0"]
    return [*lines, *work * ["MUFU.EX2 R0, R1"], f"BAR.SYNC.DEFER_BLOCKING {bar}, 0x80", POST.format("120")]


def consumer(name, bar):
    """A first tile before the loops, border tiles with more work than full ones."""
    border = [f".L_x_{name}0:", *tile(bar, 40), f"@P2 BRA `(.L_x_{name}0)"]
    full = [f".L_x_{name}1:", *tile(bar), f"@P2 BRA `(.L_x_{name}1)"]
    return ["BAR.SYNC.DEFER_BLOCKING 0x1", *tile(bar), *border, *full, "STG.E.128 [R2], R4"]


CODE = [
    "@P0 BRA `(.L_x_9)", *consumer("1", "0x0"), "EXIT",
    ".L_x_9:", "BRX R2 -0x100 (*\"BRANCH_TARGETS .L_x_2,.L_x_3\"*)",
    ".L_x_2:", *consumer("2", "0x2"), "BRA `(.L_x_9)",
    ".L_x_3:", "BAR.SYNC.DEFER_BLOCKING 0x1",
    ".L_x_30:", AWAIT.format("120", 2), "@!P1 SYNCS.ARRIVE.TRANS64 RZ, [UR6+0x100], R3", "UTMALDG.4D [UR16], [UR28]",
    "UTMALDG.4D [UR8], [UR32]", "@P0 BRA `(.L_x_30)", "BRA `(.L_x_9)",
]  # fmt: skip


@pytest.fixture
def kernel():
    (found,) = parse(listing("\n".join(CODE)))
    return found


def test_warp_specialised_kernel_splits_into_programs(kernel):
    one, two, loader = programs(kernel)
    assert (len(one.loops), len(two.loops), len(loader.loops)) == (2, 2, 1)
    assert (one.copies, two.copies, loader.copies) == (False, False, True)
    assert [x.warps for x in roles(kernel, H100, (1, 2), 2, 8192)] == [4, 4, 1]


def test_products_of_both_warp_groups_fill_the_matrix_unit(kernel):
    found = cycles(kernel, replace(H100, copy_latency=100, l2_rate=100, l2_port=100), 2, 8192)
    assert found.full == pytest.approx(2 * 4 * 64, rel=0.2)
    assert found.border > found.full
    assert found.fixed > 0


def test_barrier_address_comes_from_the_other_loop(kernel):
    """A compiler may count the address of a loop's barrier from a register that moves with its slots."""
    full = CODE.index(".L_x_21:")
    at = CODE.index(AWAIT.format("100", 2), full)
    moved = [*CODE[:at], CODE[at].replace("[UR6+0x100]", "[UR43+-0x20]"), *CODE[at + 1 :]]
    (other,) = parse(listing("\n".join(moved)))
    assert cycles(other, H100, 2, 8192) == cycles(kernel, H100, 2, 8192)


def test_copies_bound_a_kernel_that_waits_for_them(kernel):
    slow = replace(H100, l2_rate=8, l2_port=8)
    assert cycles(kernel, slow, 2, 8192).full == pytest.approx(2 * 8192 / 8, rel=0.05)
    one, two = (cycles(kernel, replace(H100, copy_latency=1500), depth, 8192).full for depth in (1, 2))
    assert one > 1500 > two  # one stage waits for each copy


def test_copied_bytes_of_a_specialised_kernel_are_used(kernel):
    run = simulate(H100, roles(kernel, H100, (3, 5), 2, 8192))
    assert run.bytes >= 9 * 2 * 8192
    assert all(run.finished)
