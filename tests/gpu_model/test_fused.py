"""The fused backward, in the form that Gluon's compiler gives it: two programs that compute, one that copies, and one
that adds tiles of dq."""

from dataclasses import replace

import pytest
from gpu_sim import full, fused
from gpu_sim.machine import H100
from gpu_sim.sass import parse
from support.sass import listing

AWAIT = "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6+0x{}], R{}"
POST = "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+0x{}], RZ"
PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR40], R24, gsb0"
FAST = replace(H100, copy_latency=100, l2_rate=100, l2_port=100)
SIZES = fused.Bytes(copies=1, tile=8192, numbers=256, sums=4096)


def tile(bar, half):
    """Queries at 0x100, freed at 0x120, two stages of each; a part of dq at 0x150 or 0x158, freed at 0x160 or 0x168."""
    lines = [AWAIT.format("100", 2), "WARPGROUP.ARRIVE", *8 * [PRODUCT], "WARPGROUP.DEPBAR.LE gsb0, 0x0"]
    lines += [f"BAR.SYNC.DEFER_BLOCKING {bar}, 0x80", POST.format("120"), AWAIT.format(f"16{8 * half}", 3)]
    return [*lines, "STS.64 [R5], R6", f"BAR.SYNC.DEFER_BLOCKING {bar}, 0x80", POST.format(f"15{8 * half}")]


def consumer(half, bar):
    border, whole = (f".L_x_{half}{i}" for i in range(2))
    lines = ["BAR.SYNC.DEFER_BLOCKING 0x1", f"{border}:", *tile(bar, half), *40 * ["MUFU.EX2 R0, R1"]]
    return [*lines, f"@P2 BRA `({border})", f"{whole}:", *tile(bar, half), f"@P2 BRA `({whole})", "STG.E.128 [R2], R4"]


def added(half):
    return [AWAIT.format(f"15{8 * half}", 2), "UTMAREDG.4D.ADD [UR8], [UR6]", "UTMACMDFLUSH"]


CODE = [
    "@P0 BRA `(.L_x_9)", *consumer(0, "0x0"), "EXIT",
    ".L_x_9:", "BRX R2 -0x100 (*\"BRANCH_TARGETS .L_x_2,.L_x_3,.L_x_4\"*)",
    ".L_x_2:", *consumer(1, "0x2"), "BRA `(.L_x_9)",
    ".L_x_3:", "BAR.SYNC.DEFER_BLOCKING 0x1",
    ".L_x_30:", AWAIT.format("120", 2), "@!P1 SYNCS.ARRIVE.TRANS64 RZ, [UR6+0x100], R3", "UTMALDG.4D [UR16], [UR28]",
    "UTMALDG.4D [UR8], [UR32]", "@P0 BRA `(.L_x_30)", "BRA `(.L_x_9)",
    ".L_x_4:", "BAR.SYNC.DEFER_BLOCKING 0x1",
    ".L_x_40:", *added(0), *added(1), "DEPBAR.LE SB0, 0x0", POST.format("160"), POST.format("168"),
    "@P0 BRA `(.L_x_40)", "BRA `(.L_x_9)",
]  # fmt: skip


@pytest.fixture
def kernel():
    (found,) = parse(listing("\n".join(CODE)))
    return found


def test_programs_of_the_fused_backward_have_their_warps(kernel):
    assert [x.warps for x in fused.roles(kernel, H100, (1, 2), 2, SIZES)] == [4, 4, 1, 1]


def test_products_fill_the_matrix_unit_beside_additions(kernel):
    found = fused.cycles(kernel, FAST, 2, SIZES)
    assert found.full == pytest.approx(2 * 8 * 64, rel=0.25)
    assert found.border > found.full


def test_additions_bound_a_kernel_that_waits_for_them(kernel):
    slow = fused.cycles(kernel, FAST, 2, replace(SIZES, sums=1 << 18))
    assert slow.full > 2 * (1 << 18) / FAST.l2_rate * 0.9


@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", [64, 128])
def test_fused_backward_is_predicted_faster_than_the_pair(dim):
    assert fused.ratio(full.Case("causal", dim)) > 1.25
