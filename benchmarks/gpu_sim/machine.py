"""Constants of the machines that the model knows, each with its source. They were fixed before any kernel was tuned."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Gpu:
    """The constants of one GPU. Times are in cycles of a streaming multiprocessor (SM), rates a cycle of one SM, or of
    one of its four schedulers where it says so."""

    name: str
    arch: str
    processors: int
    clock: float  # Hz, before power takes from it
    # -- issue: cycles of a scheduler's pipe that one instruction of a warp takes
    half_fma: float  # one of two pipes for float32 adds and products, 16 lanes each; integer products have one of them
    alu: float  # integers, comparisons, minimum, selects, conversions: 16 lanes
    mufu: float  # exp2, rcp: 4 lanes
    uniform: float
    matrix: float  # FMAs of 16-bit products a cycle of one scheduler
    # -- latencies of what holds a scoreboard
    mufu_latency: float
    lds_latency: float
    ldsm_latency: float
    shfl_latency: float
    uniform_latency: float  # R2UR, S2R and the like
    constant_latency: float
    global_latency: float  # of a load that finds its line in L2
    copy_latency: float  # of a copy from L2 to shared memory: cp.async and TMA
    matrix_latency: float  # of a warp-group product, beside what it takes of the pipe
    barrier: float  # from the last warp at a barrier to the first instruction behind it
    membar: float
    fence: float
    branch: float
    warpgroup: float  # from the last warp of a warp group at WARPGROUP.ARRIVE to its first product
    mbarrier: float  # to ask a barrier in shared memory, or to arrive there
    # -- queues
    matrix_queue: int  # products of one warp that may wait for the matrix unit
    memory_queue: float  # cycles of work that may wait for the load/store unit before warps do
    # -- memory
    shared_rate: float  # bytes a cycle
    l2_rate: float  # bytes a cycle, where all SMs read
    l2_port: float  # bytes a cycle, where few do
    l2_burst: float  # bytes that one SM may read at the rate of its port before the others are felt
    hbm: float  # bytes a second of the whole GPU, as reached
    l2_bytes: int
    # -- limits of an SM
    registers: int
    shared_bytes: int  # of all blocks
    reserved: int  # bytes of shared memory that the system takes of each block
    warps: int
    # -- launch and power
    launch: float  # cycles from one block of an SM to the next
    power_base: float  # dynamic power without products at this clock, of what the board allows
    power_slope: float  # and with products at their peak, beside it

    def clock_under(self, share: float) -> float:
        """The clock where products take a share of the matrix unit's peak: dynamic power goes with its cube."""
        return self.clock * min(1.0, (self.power_base + self.power_slope * share) ** (-1 / 3))


# CUDA Programming Guide, "Throughput of Native Arithmetic Instructions", compute capability 9.0: results a cycle of an
# SM are 128 for float32, 64 for integers, comparisons and conversions, 16 for exp2 and rcp, 32 for shuffles. Matrix:
# 989.4 TFLOP/s dense = 132 SMs x 4,096 FLOP x 1.83 GHz, the data sheet. Latencies: Luo et al., "Benchmarking and
# Dissecting the Nvidia Hopper GPU Architecture" (arXiv 2402.13499 and 2501.12084): shared memory 29, L2 263, global
# 479 cycles. L2: 5.6 TB/s of 114 SMs at 1.755 GHz (chipsandcheese.com, "Nvidia's H100: Funny L2, and Tons of
# Bandwidth") are 28 bytes a cycle of an SM; its port takes 64 (NVIDIA's whitepapers of A100 and H100). HBM: 3.35 TB/s
# by the data sheet, 90 % of it reached. Power: fitted to the published figures of flex_attention's forward, and to
# dense products of 16-bit numbers, which run at some 700 TFLOP/s where the unit's share is 0.93. The others are
# estimates; the report says how much hangs on each.
#
# The H100 of benchmarks/results/gpu.json, of 700 W, differs from two of them. Power takes less of its clock: at D128
# long rows of our forward are 6 to 20 % faster than predicted, and gradients of a causal mask take four fifths of the
# time. Without that part the mean error of our causal kernels is at most 5 %, but flex_attention's causal forward is
# 15 % too fast. And 7.7 TB/s came from L2, 33 bytes a cycle of an SM, for tiles of 64 x 64 at D128: its rate here is
# too low by a sixth or more. The constants are not fitted to this one GPU.
H100 = Gpu(
    name="H100 SXM", arch="sm_90", processors=132, clock=1.755e9,
    half_fma=2, alu=2, mufu=8, uniform=2, matrix=512,
    mufu_latency=22, lds_latency=29, ldsm_latency=33, shfl_latency=24, uniform_latency=14, constant_latency=30,
    global_latency=290, copy_latency=600, matrix_latency=32, barrier=22, membar=20, fence=14, branch=6, warpgroup=6,
    mbarrier=20, matrix_queue=2, memory_queue=24,
    shared_rate=128, l2_rate=28, l2_port=64, l2_burst=1 << 16, hbm=0.9 * 3.35e12, l2_bytes=50 << 20,
    registers=65536, shared_bytes=233_472, reserved=1024, warps=64,
    launch=900, power_base=0.7, power_slope=1.6,
)  # fmt: skip
# A100: as above for compute capability 8.0; its matrix units take mma.sync, 312 TFLOP/s = 108 SMs x 2,048 x 1.41 GHz;
# shared memory 29, L2 262, global 466 cycles; L2 by the same measurement as above 4.5 TB/s.
A100 = Gpu(
    name="A100 SXM", arch="sm_80", processors=108, clock=1.41e9,
    half_fma=4, alu=2, mufu=8, uniform=2, matrix=256,
    mufu_latency=22, lds_latency=29, ldsm_latency=33, shfl_latency=24, uniform_latency=14, constant_latency=30,
    global_latency=290, copy_latency=550, matrix_latency=18, barrier=22, membar=20, fence=14, branch=6, warpgroup=6,
    mbarrier=20, matrix_queue=2, memory_queue=24,
    shared_rate=128, l2_rate=30, l2_port=64, l2_burst=1 << 16, hbm=0.9 * 2.04e12, l2_bytes=40 << 20,
    registers=65536, shared_bytes=167_936, reserved=1024, warps=64,
    launch=900, power_base=0.5, power_slope=0.6,
)  # fmt: skip
# RTX 3090: as above for compute capability 8.6: results a cycle of an SM are 128 for float32, 64 for integers and
# comparisons, 16 for exp2. SMs, clock and memory: NVIDIA Ampere GA102 whitepaper, appendix A: 82 SMs, 1.695 GHz,
# 936 GB/s, 6 MB of L2. Matrix: the same table has 71 TFLOP/s of 16-bit products that add in float32 = 82 SMs x 512
# FLOP x 1.695 GHz; GeForce adds them in float32 at half the rate of float16. Shared memory: the CUDA Programming Guide,
# table "Technical Specifications per Compute Capability": 100 KB and 48 warps of an SM. Latencies and L2 are an A100's:
# estimates. The board's power takes no clock here, as products fill half of what the unit could.
RTX_3090 = replace(
    A100, name="RTX 3090", arch="sm_86", processors=82, clock=1.695e9, half_fma=2, matrix=64,
    hbm=0.9 * 936e9, l2_bytes=6 << 20, shared_bytes=102_400, warps=48, power_base=0.5, power_slope=0.5,
)  # fmt: skip
# RTX 4090: as an RTX 3090 by the same tables for compute capability 8.9. NVIDIA Ada GPU Architecture whitepaper,
# appendix A: 128 SMs, 2.52 GHz, 1,008 GB/s, 72 MB of L2, and 165.2 TFLOP/s that add in float32 = 128 SMs x 512 FLOP x
# 2.52 GHz.
RTX_4090 = replace(
    RTX_3090, name="RTX 4090", arch="sm_89", processors=128, clock=2.52e9, hbm=0.9 * 1008e9, l2_bytes=72 << 20
)
# L40S: an Ada GPU that adds in float32 at the full rate. Its data sheet: 142 SMs (18,176 CUDA cores), 864 GB/s, and
# 362 TFLOP/s without sparsity = 142 SMs x 1,024 FLOP x 2.49 GHz; the Ada whitepaper: 96 MB of L2.
L40S = replace(
    RTX_4090, name="L40S", processors=142, clock=2.49e9, matrix=128, hbm=0.9 * 864e9, l2_bytes=96 << 20
)  # fmt: skip
GPUS = {gpu.arch: gpu for gpu in (A100, RTX_3090, RTX_4090, H100)}
OTHERS = (L40S,)  # GPUs of an architecture in GPUS, with other rates


def resident(gpu: Gpu, warps: int, registers: int, shared: int) -> int:
    """Blocks of so many warps, registers a thread and bytes of shared memory that one SM holds at a time."""
    by_registers = gpu.registers // (max(1, -(-registers // 8) * 8) * 32 * warps)
    by_shared = gpu.shared_bytes // (-(-shared // 128) * 128 + gpu.reserved)
    return max(0, min(32, gpu.warps // warps, by_registers, by_shared))
