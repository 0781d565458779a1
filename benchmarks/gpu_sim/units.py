"""Cycles that a tile of the Gluon forward keeps each unit of a Blackwell SM busy: counted, not simulated.

The rates are those of one of the four schedulers. Instructions are those of a warp in its loop over tiles, without the
branch that rescales sums in tensor memory, which a group seldom takes.

`in_turns` adds what waits for what: a group's softmax for its scores, each product for its weights and for the products
before it. It is the time of a tile without any latency: none of a B200's have been measured.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from frisket.lowering.architectures import architecture_of
from frisket.lowering.kernels.gluon import forward

from .ours import compiled_gluon
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
IN_TURNS = "cycles of a tile in turns"
NAMES = ("causal", "softcap", "alibi")
AHEAD = 8  # tiles whose time is not that of the steady state
Row = dict[str, Any]


def tiles() -> Iterator[tuple[str, Row]]:
    """Border and full tiles of the forward, and full tiles whose exp2 is never a polynomial."""
    for dim in (64, 128, 256):
        for name in NAMES:
            border, full = busy(name, dim)
            with patch.object(forward, "by_polynomial", lambda *given: 0):
                _, plain = busy(name, dim)
            yield f"{name}, D{dim}, full tile", {"figures": full}
            if plain[QUANTITY] != full[QUANTITY]:
                yield f"{name}, D{dim}, full tile, exp2 on MUFU alone", {"figures": {QUANTITY: plain[QUANTITY]}}
            yield f"{name}, D{dim}, partial tile", {"figures": border}
    for name in NAMES[:2]:
        yield f"{name}, D64, full tile of a B300", {"figures": busy(name, 64, "sm_103")[1]}


def busy(name: str, dim: int, arch: str = "sm_100") -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of a partial tile and of a full one: cycles for all warps of a scheduler, and in turns."""
    found, target = compiled_gluon(name, arch, dim, dim)
    groups, queries = forward.groups_of(arch, dim, dim)
    product, exp2 = 2 * dim * queries * target.block_k / PRODUCTS, architecture_of(arch).exp2
    border, full = (
        figures(product, groups, pieces(found.sass, loop, exp2)) for loop in with_exponentials(found.sass)[:2]
    )
    return border, full


def figures(product: float, groups: int, parts: list[dict[str, float]]) -> dict[str, Any]:
    """The figures of a tile, one of whose products takes the tensor cores so many cycles for a group."""
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part)
    times = [max(part.values()) for part in parts]
    whole = [times[0] + sum(times[1:-1]), times[-1]]
    return {
        QUANTITY: {n: groups * x for n, x in {"products": 2 * product, **counts}.items()},
        IN_TURNS: {
            "weights in pieces": in_turns(product, groups, times, groups == 1),
            "weights at once": in_turns(product, groups, whole, groups == 1),
            "no scores ahead": in_turns(product, groups, times, False),
        },
    }


def in_turns(product: float, groups: int, times: list[float], ahead: bool) -> float:
    """The cycles of a tile in the steady state. `times` are those of a softmax until each piece of its weights is told
    of, and after the last; groups that compute at the same time share the scheduler. Products run in the order of the
    kernel's `multiply`; `ahead` says that the next scores are computed before this tile's weights are waited for."""
    pieces, now, free = len(times) - 1, 0.0, 0.0
    told: dict[tuple[int, int, int], float] = {}  # of weights, by group, tile and piece
    scores: dict[tuple[int, int], float] = {}
    doing = [(0, 0, times[0])] * groups  # tile, part and cycles left of a group
    order = [
        (g, n, what)
        for n in range(2 * AHEAD + 3)  # more than are looked at
        for g in range(groups)
        for what in (("keys", "values") if ahead else ("values", "keys"))
    ]
    ends: list[float] = []
    queue = iter(step for g, n, what in order for step in (
        [(g, n, -1)] if what == "keys" else [(g, n - 1, p) for p in range(pieces)] if n else []
    ))  # fmt: skip
    step = next(queue)
    while len(ends) < 2 * AHEAD:
        while True:  # products whose operands are there
            group, tile, piece = step
            if piece < 0:
                free = scores[group, tile] = max(free, now) + product
            elif (group, tile, piece) in told:
                free = max(free, told[group, tile, piece]) + product / pieces
            else:
                break
            step = next(queue)
        at_work = [g for g, (n, part, _) in enumerate(doing) if scores.get((g, n), now + 1) <= now]
        later = [scores[g, n] - now for g, (n, _, _) in enumerate(doing) if scores.get((g, n), now) > now]
        passed = min([doing[g][2] * len(at_work) for g in at_work] + later)
        now += passed
        for g in at_work:
            tile, part, left = doing[g]
            left -= passed / len(at_work)
            if left < 1e-9:
                told[g, tile, part] = now
                ends += [now] if part == pieces and g == 0 else []
                tile, part = (tile, part + 1) if part < pieces else (tile + 1, 0)
                left = times[part]
            doing[g] = tile, part, left
    return round((ends[-1] - ends[AHEAD - 1]) / AHEAD)


def with_exponentials(kernel: Sass) -> list[Loop]:
    """The loops over tiles, partial tiles before full ones, of one group after the other."""
    return [x for x in kernel.loops if sum(i.op == "MUFU.EX2" for i in kernel.body(x)) >= 16]


def pieces(kernel: Sass, loop: Loop, exp2: int = 8) -> list[dict[str, float]]:
    """The cycles of one warp in one repetition of a loop, by unit, in parts that end where it tells of weights."""
    parts: list[list[Instruction]] = [[]]
    stored = False
    for x in often(kernel, loop):
        parts[-1].append(x)
        stored |= x.op.startswith("STTM")
        if stored and x.op.startswith("SYNCS.ARRIVE"):
            parts.append([])
            stored = False
    return [counted(part, exp2) for part in parts]


def often(kernel: Sass, loop: Loop) -> list[Instruction]:
    """The instructions of one repetition of a loop, without those of the branch that rescales sums."""
    seldom: set[int] = set()
    for i in kernel.way(loop.start, loop.stop):
        x = kernel.instructions[i]
        if x.op == "BRA" and x.predicate and x.target is not None and i < x.target <= loop.stop:
            inside = range(i + 1, x.target)
            if any(kernel.instructions[j].op.startswith("STTM") for j in inside) and not any(
                kernel.instructions[j].kind == "MUFU" for j in inside
            ):
                seldom |= {*inside}
    return [kernel.instructions[i] for i in kernel.way(loop.start, loop.stop) if i not in seldom]


def counted(body: list[Instruction], exp2: int = 8) -> dict[str, float]:
    """The cycles that instructions of one warp take of each unit, of which an exp2 takes MUFU for so many."""
    found = Counter({"issue": float(sum(not x.never for x in body))})
    for x in body:
        found.update({"MUFU": exp2} if x.op == "MUFU.EX2" and not x.never else taken(x))
    return {n: found[n] for n in ("MUFU", "issue", "FMA", "ALU")}


def taken(x: Instruction) -> dict[str, float]:
    """The unit of an instruction and its cycles; {} where it is no unit of these."""
    for unit, rows in CYCLES.items():
        for starts, cycles in rows:
            if re.match(starts, x.op) and not x.never:
                return {unit: cycles}
    return {}
