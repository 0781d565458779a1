"""Predictions for the kernels that Mosaic GPU compiles, beside flex_attention.

Two warp groups compute and one copies by TMA. The loops of the computing groups are simulated in their steady state.
Copies run ahead of them, so a tile takes at least the time in which L2 delivers its bytes. That the two groups take
turns is not simulated. `tests/compiled/pallas_gpu.py --keep=FOLDER` compiles the kernels and keeps
their machine code; it needs JAX's CUDA plugin and no GPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import full
from .compiled import Compiled, disassembled, resources
from .full import ARRAYS, SECONDS_A_LAUNCH, Case, Kernel, Time
from .machine import GPUS
from .ours import FLOPS, Tile
from .published import name
from .report import FIGURES, PAIR, SOFTCAP, Row

COMPUTING = 8  # warps that compute
NAMES = {"window 128": "window"}  # masks that the folder of kernels calls otherwise
RESULTS = {"forward": "", "dq": ": dq", "dkv": ": dk dv"}  # how names of kernels in the folder end
GPU = GPUS["sm_90"]


@dataclass(frozen=True)
class Kept:
    """One kernel of the folder: its machine code, its tile (queries, keys, tiles ahead) and bytes of shared memory."""

    file: Path
    tile: tuple[int, int, int]
    shared: int

    def kernel(self, which: str, dim: int) -> Kernel:
        registers, stack = resources(self.file)
        q, k, ahead = self.tile
        text = disassembled(self.file)
        symbol = re.findall(r"^\s*\.text\.(\w+):", text, re.M)[0]
        made = Compiled(symbol, GPU.arch, "", COMPUTING, registers, stack, self.shared, 0, text, ahead)
        border, rest = full.loop_numbers(made, made.sass.products)
        copied = 2 * 2 * dim * (q if which == "dkv" else k)  # two arrays of 16-bit numbers
        return Kernel(made, border, rest, q * k, FLOPS[which] * dim, copied)


def kept(folder: Path) -> dict[tuple[str, int], Kept]:
    """The bfloat16 kernels in a folder by name and head size."""
    found = {}
    for line in (folder / "kernels.jsonl").read_text().splitlines():
        x = json.loads(line)
        if x["dtype"] == "bfloat16":
            tile = tuple(int(n) for n in x["tile"].split(" x "))
            shared = int(re.findall(r"(\d+) shared", x["said"])[0])
            found[x["name"], x["dim"]] = Kept(folder / x["file"], tile, shared)
    return found


def time(found: dict[tuple[str, int], Kept], which: str, case: Case) -> Time:
    """The time of one kernel. The kernel of dk and dv walks the queries of all heads of a group."""
    one = found[NAMES.get(case.mask, case.mask) + RESULTS[which], case.dim]
    work = full.ours_work(which, case.mask, case.length, Tile(*one.tile[:2], COMPUTING, one.tile[2]))
    parts = [(one.kernel(which, case.dim), work.grouped(case.group, which == "dkv"))]
    return full.kernel_time(parts, case.heads // case.group, GPU, ARRAYS[which] * case.array)


def rate(found: dict[tuple[str, int], Kept], direction: str, case: Case) -> float:
    """TFLOP/s of visible pairs."""
    if direction == "forward":
        seconds = time(found, "forward", case).seconds
    else:
        seconds = sum(time(found, which, case).seconds for which in ("dq", "dkv"))
        seconds += ARRAYS["delta"] * case.array / GPU.hbm + SECONDS_A_LAUNCH
    return (4 if direction == "forward" else 10) * case.dim * case.pairs / seconds / 1e12


def predicted(folder: Path) -> Iterator[tuple[str, Row]]:
    """Rows of predictions, in the form of `report.predicted`."""
    found = kept(folder)
    for (direction, mask, dim, length), goal in FIGURES.items():
        case = Case(mask, dim, length, group=2)
        ours, flex = rate(found, direction, case), full.rate("flex", direction, case)
        yield name(direction, mask, dim, length), {
            "figures": {"TFLOP/s, full model": {"frisket": round(ours, 1), "flex": round(flex, 1)}},
            "ratios": {PAIR: [round(ours / flex, 3)]}, "goals": {"at least": {"ratios": {PAIR: goal}}},
        }  # fmt: skip
    plain, capped = (rate(found, "forward", Case(mask, group=2)) for mask in ("causal", "softcap"))
    yield (
        "forward softcap, 8k, D128",
        {
            "figures": {"TFLOP/s, full model": {"softcap": round(capped, 1), "none": round(plain, 1)}},
            "ratios": {"softcap / none": [round(capped / plain, 3)]},
            "goals": {"at least": {"ratios": {"softcap / none": SOFTCAP}}},
        },
    )
