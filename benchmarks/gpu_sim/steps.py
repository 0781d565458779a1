"""Instructions as the steps that the model plays: the pipe, its occupancy, the latency, and the kind of wait."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .machine import Gpu
from .sass import Instruction

Key = tuple[str, int]  # of a barrier in shared memory: its name, and how many phases are complete before the first
FMA = ("FFMA", "FADD", "FMUL", "HFMA2", "HADD2", "HMUL2")
HEAVY = ("IMAD", "IMUL", "IDP")
SLOW = ("MUFU", "I2F", "F2I", "FRND", "POPC", "FLO", "BREV", "F2F")
CONSTANT = ("LDC", "LDCU", "ULDC")
SPECIAL = ("S2R", "S2UR", "R2UR", "CS2UR")
SHARED_STORES = ("STS", "STSM")
GLOBAL_LOADS, GLOBAL_STORES = ("LDG", "LD"), ("STG", "ST", "RED", "ATOMG", "ATOM")


@dataclass(slots=True)
class Step:
    """One instruction as the model plays it: `kind` names the method that does, `pipe` is taken for `occupied` cycles,
    and the scoreboard is free after `latency`. `amount` is bytes: of memory, or of shared memory that a product reads;
    for a wait it is the number of groups that may be pending."""

    kind: str
    name: str
    stall: int
    write: int
    read: int
    wait: tuple[int, ...]
    pipe: str = ""
    occupied: float = 0
    latency: float = 0
    amount: float = 0
    warps: int = 0  # that a barrier counts, 0: all of the block
    first: bool = False  # of one warp only, as `elect` has it
    keys: tuple[Key, ...] = field(default=())


def steps(body: Iterable[Instruction], gpu: Gpu, tma_bytes: float = 0) -> list[Step]:
    """The steps of a body; `tma_bytes` are those of one TMA copy, which its instruction does not say."""
    return [_step(x, gpu, tma_bytes) for x in body if x.op not in ("NOP", "EXIT", "RET")]


def _step(x: Instruction, gpu: Gpu, tma_bytes: float) -> Step:
    op = x.op.split(".")[0]
    wait = tuple(i for i in range(6) if x.wait >> i & 1)
    made = Step("pipe", x.kind, max(1, x.stall), x.write, x.read, wait, "alu", gpu.alu)
    if x.never:
        made.pipe = ""
    elif re.match("[HQI]GMMA", op):
        _warp_group_product(made, x, gpu)
    elif re.match("[HI]MMA", op):
        m, n, k = _mma(x.op)
        made.pipe, made.occupied, made.latency = "matrix", m * n * k / gpu.matrix, gpu.matrix_latency
    elif op == "WARPGROUP":
        made.kind = "arrive" if "ARRIVE" in x.op else "products"
        made.amount = _last(x)
    elif op == "DEPBAR":
        made.kind, made.amount = "copies", _last(x)
        made.write = int(re.search(r"SB(\d)", x.text)[1])  # type: ignore[index]
    elif op == "LDGDEPBAR":
        made.kind = "commit"
    elif op == "BAR":
        made.kind = "signal" if ".ARV" in x.op else "barrier"
        made.name, *count = x.operands.replace(" ", "").split(",")
        made.warps = int(count[0], 16) // 32 if count and count[0].startswith("0x") else 0
    elif op in ("MEMBAR", "FENCE"):
        made.pipe, made.latency = "", gpu.membar if op == "MEMBAR" else gpu.fence
    elif op == "SYNCS":
        _mbarrier(made, x, gpu)
    elif op.startswith("UTMALDG"):
        made.kind, made.amount, made.latency, made.first = "tma", tma_bytes, gpu.copy_latency, True
    elif op.startswith("UTMA"):  # stores, and the fences of stores
        made.pipe, made.occupied = "uniform", gpu.uniform
    elif op in ("BRA", "BSSY", "BSYNC", "WARPSYNC", "BRX"):
        made.pipe, made.stall = "", max(made.stall, int(gpu.branch) if op == "BRA" else 1)
    else:
        _usual(made, x, op, gpu)
    return made


def _warp_group_product(made: Step, x: Instruction, gpu: Gpu) -> None:
    found = re.search(r"64x(\d+)x(\d+)", x.op)
    assert found is not None, x.text
    columns = int(found[1])
    from_registers = x.operands.split(",")[1].strip().startswith("R")
    made.kind, made.occupied = "product", columns / 2 * 512 / gpu.matrix
    made.latency = gpu.matrix_latency
    made.amount = (columns + (0 if from_registers else 64)) * 32 / 4  # bytes of shared memory, a quarter a warp
    made.first = "gsb0" in x.text  # ends a group


def _mma(op: str) -> tuple[int, int, int]:
    """(m, n, k) of a product of one warp, of an operation such as HMMA.16816.F32."""
    found = re.search(r"\.(16|8)(8|16|32)(4|8|16|32|64)?", op)
    digits = "".join(x or "" for x in found.groups()) if found else "16816"
    return {"1688": (16, 8, 8), "16816": (16, 8, 16), "16832": (16, 8, 32), "884": (8, 8, 4)}.get(digits, (16, 8, 16))


def _mbarrier(made: Step, x: Instruction, gpu: Gpu) -> None:
    made.pipe, made.latency = "", gpu.mbarrier
    if "TRYWAIT" in x.op or "PHASECHK" in x.op:
        made.kind = "await"
    elif "ARRIVE" in x.op:
        made.kind, made.first = "post", bool(x.predicate) or "A1T0" not in x.op  # of one warp, as a count of bytes is


def _usual(made: Step, x: Instruction, op: str, gpu: Gpu) -> None:
    if op in FMA:
        made.pipe, made.occupied = "fma", gpu.half_fma
    elif op in HEAVY:
        made.pipe, made.occupied = "heavy", gpu.half_fma * (2 if ".WIDE" in x.op or ".HI" in x.op else 1)
    elif op in SLOW:
        made.pipe, made.occupied, made.latency = "mufu", gpu.mufu, gpu.mufu_latency
    elif op in CONSTANT:
        made.pipe, made.latency = "", gpu.constant_latency
    elif op in SPECIAL or op[0] == "U":
        made.pipe, made.occupied, made.latency = "uniform", gpu.uniform, gpu.uniform_latency
    elif op in ("LDS", "LDSM", "LDL", "STL", *SHARED_STORES):  # spilled registers are found in L1
        made.kind, made.amount = "shared", _bytes(x.op, op)
        made.latency = gpu.ldsm_latency if op == "LDSM" else gpu.lds_latency
    elif op in ("SHFL", "REDUX"):
        made.kind, made.amount, made.latency = "shared", gpu.shared_rate, gpu.shfl_latency
    elif op == "LDGSTS":
        made.kind, made.amount = "copy", _bytes(x.op, op)
    elif op in GLOBAL_LOADS or op in GLOBAL_STORES:
        made.kind, made.amount, made.latency = "global", _bytes(x.op, op), gpu.global_latency


def _bytes(text: str, op: str) -> int:
    """The bytes that an instruction moves for a warp: 8 x 8 matrices of 16-bit numbers, or a word of each thread."""
    if op in ("LDSM", "STSM"):
        return 128 * int(re.search(r"\.(\d)$|\.M88\.(\d)|\.MT88\.(\d)|x(\d)", text + ".1")[0][-1])  # type: ignore[index]
    return 32 * next((n // 8 for n in (128, 64, 16, 8) if re.search(rf"\.[US]?{n}\b", text)), 4)


def _last(x: Instruction) -> int:
    """The last number in an instruction's text: how many groups a wait leaves pending."""
    found = re.findall(r"0x([0-9a-f]+)", x.text)
    return int(found[-1], 16) if found else 0


def wired(role: Sequence[Step], waits: Sequence[Key], posts: Sequence[Key], copies: Sequence[Key]) -> list[Step]:
    """A role's steps with the barriers that its waits, its posts and its TMA copies are about, in the order of the
    text; a list that is too short begins again."""
    counts = {"await": 0, "post": 0, "tma": 0}
    lists = {"await": waits, "post": posts, "tma": copies}
    for x in role:
        if keys := lists.get(x.kind):
            x.keys = (keys[counts[x.kind] % len(keys)],)
            counts[x.kind] += 1
    return list(role)
