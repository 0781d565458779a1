"""Cycles that a tile of the Gluon forward keeps each unit of a Blackwell SM busy: counted, not simulated.

The rates are those of one of the four schedulers. Instructions are those of a warp in its loop over tiles, without the
branch that rescales sums in tensor memory, which a group seldom takes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import frisket as fk
from frisket.lowering.kernels.gluon import forward
from frisket.lowering.kernels.triton.module import Dims
from frisket.runtime.backends.gluon.torch import compiled_for
from frisket.runtime.machine.modules import load_from_file

from .compiled import kept
from .ours import HEADS, LENGTH, MASKS
from .sass import Instruction, Loop, Sass

# CUDA Programming Guide, "Throughput of Native Arithmetic Instructions", compute capability 10.0: results a cycle of an
# SM are 128 for float32 sums and products, 64 for integers, comparisons, selects and conversions, 16 for exp2 and tanh.
# An instruction of two columns (FFMA2) is two of these results. 16-bit products: 2.25 PFLOP/s dense by the data sheet
# of the B200 are 148 SMs x 8,192 FLOP x 1.85 GHz.
CYCLES = {  # of a unit for an instruction of a warp, by what its operation begins with
    "MUFU": (("MUFU", 8),),
    "FMA": (("FFMA2|FADD2|FMUL2", 2), ("FFMA|FADD|FMUL|IMAD", 1)),
    "ALU": (
        ("FMNMX|FSEL|FSETP|F2FP|I2FP|ISETP|SEL|LOP3|PLOP3|IADD|LEA|SHF|PRMT|VIADD|VIMNMX|R2P|P2R", 2),
    ),
}  # fmt: skip
PRODUCTS = 8192  # FLOP a cycle of an SM
QUANTITY = "cycles of a scheduler"
NAMES = ("causal", "softcap", "alibi")
Row = dict[str, Any]


def tiles() -> Iterator[tuple[str, Row]]:
    """Border and full tiles of the forward, and full tiles whose exp2 is never a polynomial."""
    for dim in (64, 128, 256):
        for name in NAMES:
            border, full = busy(name, dim)
            with patch.object(forward, "by_polynomial", lambda *given: 0):
                _, plain = busy(name, dim)
            yield f"{name}, D{dim}, full tile", {"figures": {QUANTITY: full}}
            if plain != full:
                yield f"{name}, D{dim}, full tile, exp2 on MUFU alone", {"figures": {QUANTITY: plain}}
            yield f"{name}, D{dim}, partial tile", {"figures": {QUANTITY: border}}


def busy(name: str, dim: int) -> tuple[dict[str, float], dict[str, float]]:
    """The cycles of a partial tile and of a full one, for all warps of a scheduler."""
    mask = MASKS[name]
    made = fk.compile(mask.text, mask.score, backend="gluon", **mask.tables).stages(
        backend="gluon", arch="sm_100", q_len=LENGTH, kv_len=LENGTH, heads=HEADS, kv_heads=HEADS, head_dim=dim,
        dtype="bfloat16",
    )  # fmt: skip
    kernel, dims = vars(load_from_file(made.source))["attention_forward"], Dims(dim, dim, "bfloat16")
    found = kept(
        "attention_forward", "sm_100", 4, (made.source, made.target, dims),
        lambda: compiled_for(kernel, made.plan, made.target, dims),
    )  # fmt: skip
    groups, queries = forward.groups_of("sm_100", dim, dim)
    products = 4 * dim * queries * made.target.block_k / PRODUCTS
    border, full = (
        {n: groups * x for n, x in {"products": products, **counted(found.sass, loop)}.items()}
        for loop in with_exponentials(found.sass)[:2]
    )
    return border, full


def with_exponentials(kernel: Sass) -> list[Loop]:
    """The loops over tiles, partial tiles before full ones, of one group after the other."""
    return [x for x in kernel.loops if sum(i.op == "MUFU.EX2" for i in kernel.body(x)) >= 16]


def counted(kernel: Sass, loop: Loop) -> dict[str, float]:
    """The cycles of one warp in one repetition of a loop, by unit."""
    seldom: set[int] = set()
    for i in kernel.way(loop.start, loop.stop):
        x = kernel.instructions[i]
        if x.op == "BRA" and x.predicate and x.target is not None and i < x.target <= loop.stop:
            inside = range(i + 1, x.target)
            if any(kernel.instructions[j].op.startswith("STTM") for j in inside) and not any(
                kernel.instructions[j].kind == "MUFU" for j in inside
            ):
                seldom |= {*inside}
    body = [kernel.instructions[i] for i in kernel.way(loop.start, loop.stop) if i not in seldom]
    found = Counter({"issue": float(sum(not x.never for x in body))})
    for x in body:
        found.update(taken(x))
    return {n: found[n] for n in ("MUFU", "issue", "FMA", "ALU")}


def taken(x: Instruction) -> dict[str, float]:
    """The unit of an instruction and its cycles; {} where it is no unit of these."""
    for unit, rows in CYCLES.items():
        for starts, cycles in rows:
            if re.match(starts, x.op) and not x.never:
                return {unit: cycles}
    return {}
