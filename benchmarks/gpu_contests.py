"""The parts of gpu.py that time kernels beside others: forward, backward, decode, and tiles beside one another."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_masks import DOCUMENTS, EQUAL, contests, flex, ours, peers, visible_pairs
from gpu_scale import Call, Measure, Scale, compared, drawn, on_device, same

from frisket.runtime.bench.machine import rounds_of

# -- forward and backward ---------------------------------------------------------------------------------

DIRECTIONS = ("forward", "backward")
FIRST = ("causal", "window 128", EQUAL)
LARGER = [(0, n, 256) for n in ("causal", "full", "window 1024", f"{DOCUMENTS} documents", "softcap, causal")]
LARGER += [(1, "causal", 256), (1, "full", 256), (0, "causal", 192)]  # direction, mask, head size
GOALS = {  # TFLOP/s of visible work: (must, should), forward and backward
    ("causal", 128, 8192): ((430, 480), (300, 380)),
    ("window 128", 64, 8192): ((140, 180), (115, 150)),
}


def speed_rows(scale: Scale) -> list[str]:
    """Masks with goals first, then steps of decoding, then the other masks, then larger heads."""
    names, dims = contests(scale.lengths[0], 2, "cpu"), sorted(scale.dims, reverse=True)
    first, rest = (
        [f"{way}: {n}, D {dim}" for n in some for dim in dims for way in DIRECTIONS]
        for some in (FIRST, [n for n in names if n not in FIRST])
    )
    larger = [f"{DIRECTIONS[way]}: {n}, D {dim}" for way, n, dim in LARGER if not scale.dry]
    return [*first, *(f"decode: {r}" for r in decode_rows(scale)), *rest, *larger]


def speed(row: str, scale: Scale) -> Measure:
    way, _, rest = row.partition(": ")
    return decode(rest, scale) if way == "decode" else contest(DIRECTIONS.index(way), rest, scale)


def contest(direction: int, row: str, scale: Scale) -> Measure:
    """`direction` 0: the forward; 1: the gradients of q, k and v alone."""
    name, _, dim = row.rpartition(", D ")
    made = {n: Contestants(name, n, int(dim), scale, direction) for n in scale.lengths}
    return lambda: {"rows": {str(n): c.measured() for n, c in made.items()}}


class Contestants:
    """The contestants of one mask, length and head size. Each runs once before it is timed, and agrees with the others;
    why one cannot is part of the result. The dense formula is the last to be built: it needs all of the memory."""

    def __init__(self, name: str, length: int, dim: int, scale: Scale, direction: int) -> None:
        self.batch, self.heads = max(1, scale.tokens // length), scale.width // dim
        self.length, self.dim, self.scale, self.direction = length, dim, scale, direction
        self.goals = GOALS.get((name, dim, length), (None, None))[direction]
        self.case = contests(length, self.heads, scale.device)[name]
        self.arrays = drawn(self.batch, self.heads, length, length, dim, scale)
        self.cotangent = torch.randn_like(self.arrays[0])
        if direction:
            self.arrays = [x.requires_grad_() for x in self.arrays]
        self.calls: dict[str, Call] = {"frisket": self.timed(partial(ours(self.case), *self.arrays))}
        self.want, self.failed = self.calls["frisket"](), dict[str, str]()
        self.peers = peers(self.case, self.arrays, scale.dry, direction)
        for peer in self.peers:
            if peer != "dense":
                self.enter(peer)
        if scale.device == "cuda":
            torch.cuda.empty_cache()  # other rows wait beside this one

    def timed(self, call: Call) -> Call:
        if not self.direction:
            return torch.no_grad()(call)
        out = call()
        return lambda: torch.autograd.grad(out, self.arrays, self.cotangent, retain_graph=True)

    def enter(self, peer: str) -> None:
        try:
            call = self.timed(self.peers[peer]())
            got = call()
        except Exception as error:  # of any library
            self.failed[peer] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
            return
        same(got, self.want)
        self.calls[peer] = call

    def measured(self) -> dict[str, Any]:
        if "dense" in self.peers:
            self.enter("dense")
        pairs = visible_pairs(self.case, self.length)
        work = (4, 10)[self.direction] * self.batch * self.heads * pairs * self.dim
        found = compared(self.calls, self.scale.rounds, work, self.goals)
        self.calls.clear()
        if self.scale.device == "cuda":
            torch.cuda.empty_cache()
        return found | ({"notes": self.failed} if self.failed else {})


# -- decode -----------------------------------------------------------------------------------------------

DECODE = {"causal": 0, "window 1024": 1024}  # keys that a query sees, 0: all


def decode_rows(scale: Scale) -> list[str]:
    return [f"{mask}, batch {batch}" for mask in DECODE for batch in scale.batches]


def decode(row: str, scale: Scale) -> Measure:
    """One query for each of 64 heads, 8 key heads of 128; of a window only the keys it sees count."""
    mask, _, batch = row.partition(", batch ")
    heads, kv_heads, dim = (4, 2, 16) if scale.dry else (64, 8, 128)
    n = scale.cache
    arrays = drawn(int(batch), heads, 1, n, dim, scale, kv_heads)
    case = contests(n, heads, scale.device)[mask]
    calls: dict[str, Call] = {"frisket": partial(ours(case), *arrays, origin=(0, 0, n - 1, 0))}
    moved = replace(case, peer_mask=lambda b, h, q, k: case.peer_mask(b, h, q + n - 1, k))
    calls["flex"] = flex(moved, arrays, not scale.dry)
    if mask == "causal":
        calls["SDPA"] = partial(torch.nn.functional.scaled_dot_product_attention, *arrays, enable_gqa=True)
    seen = min(DECODE[mask] or n, n)
    with torch.no_grad():
        want = calls["frisket"]()
        for call in calls.values():
            same(call(), want)
    space = torch.empty(2, 1 << (16 if scale.dry else 30), dtype=torch.uint8, device=scale.device)
    calls["copy"] = lambda: space[0].copy_(space[1])

    def measure() -> dict[str, Any]:
        with torch.no_grad():
            times = {n: statistics.median(t) for n, t in rounds_of(calls, scale.rounds, clock=on_device).items()}
        rate = space.numel() / times.pop("copy")  # read and written
        read = 2 * int(batch) * kv_heads * seen * dim * arrays[1].element_size()
        return {
            "figures": {
                "us": {n: 1e6 * t for n, t in times.items()}, "gb_s": {"copy": rate / 1e9},
                "share of bandwidth": {n: read / t / rate for n, t in times.items()},
            },
        }  # fmt: skip

    return measure


# -- tune -------------------------------------------------------------------------------------------------

TUNED = ("causal", "window 128", "window 1024", f"{DOCUMENTS} documents")
OWN, WALKED = (64, 128), (32, 64, 128)  # positions of a tile along the axis of its program, and along the other one
STAGES = (3, 4, 2)


def tune_rows(scale: Scale) -> list[str]:
    """Causal attention first: a mask, a kernel and a number of stages a row, so that a hang costs few figures."""
    kernels, dims, stages = ("forward", "dq", "dkv"), sorted(scale.dims, reverse=True), (2,) if scale.dry else STAGES
    return [
        f"{kernel}, {mask}, D {dim}, {n} stages" for mask in TUNED for dim in dims for kernel in kernels for n in stages
    ]


def tune(row: str, scale: Scale) -> Measure:
    """Every tile of one kernel, the others as chosen; of the backward all kernels are in the figure."""
    from frisket.runtime.calls.tuning import LaunchOptions, Tuning

    kernel, mask, size, stages = row.split(", ")
    dim, length = int(size.removeprefix("D ")), scale.lengths[len(scale.lengths) // 2]
    arrays = drawn(max(1, scale.tokens // length), scale.width // dim, length, length, dim, scale)
    learns = kernel != "forward"
    arrays = [x.requires_grad_(learns) for x in arrays]
    case = contests(length, arrays[0].shape[1], scale.device)[mask]
    count = int(stages.removesuffix(" stages"))
    tried = {"as chosen": LaunchOptions()}
    for own, walked in [(16, 16)] if scale.dry else itertools.product(OWN, WALKED):
        q, k = (walked, own) if kernel == "dkv" else (own, walked)
        warps = max(4, own // 16)  # four warps multiply 64 rows at a time
        tried[f"{q} x {k}, {warps} warps, {stages}"] = LaunchOptions(q, k, warps, count)
    calls, failed = {}, {}
    for name, launch in tried.items():
        att = ours(case, "triton")
        att = type(att)(att.program, replace(att.options, tuning=Tuning(**{kernel: launch})))
        try:
            out = att(*arrays)
            gradient = partial(torch.autograd.grad, retain_graph=True)
            call = partial(gradient, out, arrays, torch.ones_like(out)) if learns else partial(att, *arrays)
            call()
        except Exception as error:  # more shared memory than there is, for one
            failed[name] = str(error).split("\n")[0][:120]
            continue
        calls[name] = call

    def measure() -> dict[str, Any]:
        times = rounds_of(calls, scale.rounds, clock=on_device)
        ms = {n: 1e3 * statistics.median(t) for n, t in times.items()}
        best_first = dict(sorted(ms.items(), key=lambda x: x[1]))
        return {"figures": {"ms": best_first}} | ({"notes": failed} if failed else {})

    return measure
