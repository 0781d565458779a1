"""The model of an SM on loops whose answers are known."""

from dataclasses import replace

import pytest
from gpu_sim.compiled import Compiled
from gpu_sim.loops import played
from gpu_sim.machine import GPUS, H100, resident
from gpu_sim.sass import parse
from gpu_sim.simulate import DeadlockError, Role, simulate
from gpu_sim.steps import steps, wired
from support.sass import listing

PRODUCT = "HGMMA.64x{}x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"


def body(text, gpu=H100, tma_bytes=0):
    (kernel,) = parse(listing(text))
    return steps(kernel.instructions, gpu, tma_bytes)


def period(text, warps=4, gpu=H100, blocks=1, turns=40):
    return simulate(gpu, [Role(warps, ((body(text, gpu), turns),))], blocks).period(10)


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("warps", [4, 8])
def test_products_alone_run_at_the_peak_of_the_matrix_unit(columns, warps):
    """64 x n x 16 FMAs of a warp group at 2,048 a cycle."""
    text = "WARPGROUP.ARRIVE\n" + 4 * f"{PRODUCT.format(columns)}\n" + "WARPGROUP.DEPBAR.LE gsb0, 0x3"
    assert period(text, warps) == pytest.approx(4 * columns / 2 * warps / 4, rel=0.02)


def test_a_product_waited_for_takes_its_latency_too():
    text = f"WARPGROUP.ARRIVE\n{PRODUCT.format(128)}\nWARPGROUP.DEPBAR.LE gsb0, 0x0"
    at_once = 64 + H100.matrix_latency
    assert at_once <= period(text) <= at_once + H100.warpgroup + 6


def test_narrow_products_wait_for_shared_memory():
    """64 x 8 x 16 reads 72 rows of 32 bytes: 18 cycles of the port, 4 of the matrix unit."""
    text = "WARPGROUP.ARRIVE\n" + 8 * f"{PRODUCT.format(8)}\n" + "WARPGROUP.DEPBAR.LE gsb0, 0x7"
    assert period(text) == pytest.approx(8 * 72 * 32 / 128, rel=0.02)


@pytest.mark.parametrize(("text", "cycles"), [
    ("MUFU.EX2 R0, R1", 8), ("FFMA R0, R1, R2, R3", 1), ("FMNMX R0, R1, R2, !PT", 2), ("IMAD R0, R1, R2, R3", 2),
    ("SHFL.BFLY PT, R0, R1, 0x1, 0x1f", 4), ("LDS.128 R0, [R4]", 16), ("STS [R4], R0", 4),
])  # fmt: skip
def test_throughput_of_pipes(text, cycles):
    """Cycles an instruction of each of four warps on four schedulers; shared memory and shuffles are of the SM."""
    assert period(16 * f"{text}\n", 4) == pytest.approx(16 * cycles, rel=0.05)
    assert period(16 * f"{text}\n", 8) == pytest.approx(32 * cycles, rel=0.05)  # two warps a scheduler


def test_products_hide_what_other_warp_groups_compute():
    products = "WARPGROUP.ARRIVE\n" + 4 * f"{PRODUCT.format(128)}\n" + "WARPGROUP.DEPBAR.LE gsb0, 0x0\n"
    text = products + 16 * "MUFU.EX2 R0, R1\n" + "wait=1 FADD R1, R2, R3"
    alone, two = period(text, 4), period(text, 8)
    assert alone > 256 + 16 * 8
    assert 512 <= two < 1.2 * 512 < 2 * alone


def test_a_scoreboard_is_waited_for():
    text = "write=0 LDS R0, [R1]\nwait=1 FADD R1, R0, R0\n"
    assert period(text) >= H100.lds_latency
    assert period("write=0 LDS R0, [R1]\nwait=2 FADD R1, R0, R0\n") < 10


def test_stalls_of_the_compiler():
    assert period(10 * "stall=7 FADD R1, R1, R2\n") == pytest.approx(70)


COPY = 2 * "LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]\n" + "write=0 LDGDEPBAR\n"


def pipelined(stages, work=60):
    return f"DEPBAR.LE SB0, {stages - 2:#x}\nBAR.SYNC.DEFER_BLOCKING 0x0\n" + work * "stall=4 FADD R1, R1, R2\n" + COPY


def test_copies_are_hidden_with_four_stages_and_not_with_two():
    assert period(pipelined(2)) > H100.copy_latency
    assert 240 <= period(pipelined(4)) < 340 < H100.copy_latency


def test_copies_run_at_the_rate_of_l2():
    bytes_a_turn = 4 * 2 * 512
    found = period(pipelined(6, work=1), turns=200)
    assert found == pytest.approx(bytes_a_turn / H100.l2_rate, rel=0.1)


@pytest.mark.parametrize("name", ["copy_latency", "lds_latency", "mufu_latency", "matrix_latency", "barrier", "membar"])
def test_longer_latency_never_makes_a_loop_faster(name):
    text = pipelined(2, 8) if name in ("copy_latency", "barrier") else ""
    text += "write=1 MUFU.EX2 R0, R1\nwait=2 FADD R1, R0, R0\nwrite=1 LDS R0, [R1]\nwait=2 WARPGROUP.ARRIVE\n"
    text += f"{PRODUCT.format(64)}\nWARPGROUP.DEPBAR.LE gsb0, 0x0\nread=2 MEMBAR.ALL.CTA\n"
    text += "wait=4,write=3 FENCE.VIEW.ASYNC.S\nwait=8 FADD R1, R2, R3"
    times = [period(text, gpu=replace(H100, **{name: f * getattr(H100, name)})) for f in (0.5, 1, 2, 4)]
    assert times == sorted(times)
    assert times[-1] > times[0]


@pytest.mark.parametrize("name", ["l2_rate", "shared_rate"])
def test_more_bandwidth_never_makes_a_loop_slower(name):
    text = pipelined(4, 4) + "LDS.128 R0, [R4]\n" * 12
    times = [period(text, gpu=replace(H100, **{name: f * getattr(H100, name)}), turns=100) for f in (0.25, 0.5, 1, 2)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_two_blocks_fill_what_one_leaves():
    assert period(pipelined(2), blocks=2) < 2 * period(pipelined(2)) * 0.75


def test_a_loader_and_two_consumers():
    """A warp that copies by TMA as stages come free, and two warp groups that consume: the loader's wait is for the
    stage that both have freed, the consumers' for the bytes."""
    loads = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3\nSYNCS.ARRIVE.TRANS64 RZ, [UR4], R3\nUTMALDG.2D [UR8], [UR6]"
    loader = wired(body(loads, tma_bytes=8192), [("empty", 2)], [("full", 0)], [("full", 0)])
    text = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3\nWARPGROUP.ARRIVE\n" + 4 * f"{PRODUCT.format(128)}\n"
    consumer = wired(
        body(text + "WARPGROUP.DEPBAR.LE gsb0, 0x0\nSYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ"),
        [("full", 0)], [("empty", 0)], [],
    )  # fmt: skip

    def took(stages, turns=40):
        for x in loader:
            if x.kind == "await":
                x.keys = (("empty", stages),)
        return simulate(H100, [Role(1, ((loader, turns),)), Role(8, ((consumer, turns),))]).period(10)

    assert took(1) > H100.copy_latency  # nothing is copied while its only stage is read
    assert took(4) == pytest.approx(2 * 4 * 64, rel=0.1)
    with pytest.raises(DeadlockError):
        took(0)


def test_blocks_that_share_an_sm():
    assert resident(H100, 8, 255, 131072) == 1
    assert resident(H100, 4, 128, 57344) == 4
    assert resident(H100, 4, 255, 65536) == 2
    assert resident(H100, 4, 255, 400_000) == 0
    assert set(GPUS) == {"sm_80", "sm_86", "sm_89", "sm_90"}


def test_tma_copies_two_repetitions_ahead_are_hidden():
    text = """
.L_x_0:
      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3
      HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
      WARPGROUP.DEPBAR.LE gsb0, 0x0
      @P2 SYNCS.ARRIVE.TRANS64 RZ, [UR4], R8
      @UP2 UTMALDG.4D [UR8], [UR26]
      @P1 BRA `(.L_x_0)
      EXIT
"""
    (kernel,) = parse(listing(text))
    one, two = (played(kernel, kernel.loops[0], H100, 4, 1, 1024.0, ahead).cycles for ahead in (1, 2))
    assert one > H100.copy_latency > two > H100.copy_latency / 3
    made = Compiled("kernel", "sm_90", "", 4, 128, 0, 65536, 1024.0, "", stages=3)
    assert (made.ahead, replace(made, tma_bytes=0.0).ahead) == (2, 1)
