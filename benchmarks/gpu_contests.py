"""The parts of gpu.py that time kernels beside others: forward, backward, decode, and tiles beside one another."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from gpu_masks import DENSE, DOCUMENTS, EQUAL, contests, flex, ours, peers, visible_pairs
from gpu_scale import (
    Call,
    Entrants,
    Measure,
    Row,
    Scale,
    Times,
    copying,
    drawn,
    one_after_another,
    rates,
    same,
    shares,
    watched,
)

# -- forward and backward ---------------------------------------------------------------------------------

DIRECTIONS = ("forward", "backward")
FIRST = ("causal", "window 128", EQUAL)
GROUPED = [("causal", dim, group) for group in (4, 8) for dim in (128, 64)] + [(f"{DOCUMENTS} documents", 128, 4)]
STRIDED = [("causal", 128), ("causal", 64), ("full", 128)]  # arrays [batch, length, heads, dim], transposed
LARGER = [(0, n, "256") for n in ("causal", "full", "window 1024", f"{DOCUMENTS} documents", "softcap, causal")]
LARGER += [(1, "causal", "256"), (1, "full", "256"), (0, "causal", "192"), (1, "causal", "192")]
LARGER += [(0, "full", "192"), (1, "full", "192")]
LARGER += [(way, "causal", dims) for dims in ("192/128", "96", "512") for way in (0, 1)]  # direction, mask, head sizes
LARGER += [(0, "causal", dims) for dims in ("160", "80", "112")]
EVERY_LENGTH = ("64", "128", "256")  # head sizes; others have the first two lengths
GOALS = {  # TFLOP/s of visible work: (must, should), forward and backward
    ("causal", "128", 8192): ((430, 480), (300, 380)),
    ("window 128", "64", 8192): ((140, 180), (115, 150)),
}


def speed_rows(scale: Scale) -> list[str]:
    """Masks with goals first, then steps of decoding, then the other masks, then larger heads, then grouped heads."""
    names, dims = contests(scale.lengths[0], 2, "cpu"), sorted(scale.dims, reverse=True)
    first, rest = (
        [f"{way}: {n}, D {dim}" for n in some for dim in dims for way in DIRECTIONS]
        for some in (FIRST, [n for n in names if n not in FIRST])
    )
    larger = [f"{DIRECTIONS[way]}: {n}, D {dims}" for way, n, dims in LARGER]
    grouped = [f"{way}: {n}, D {dim}, GQA {group}" for n, dim, group in GROUPED for way in DIRECTIONS]
    strided = [f"{way}: {n}, D {dim}, transposed" for n, dim in STRIDED for way in DIRECTIONS]
    return [*first, *(f"decode: {r}" for r in decode_rows(scale)), *rest, *larger, *grouped, *strided]


def speed(row: str, scale: Scale) -> Measure:
    way, _, rest = row.partition(": ")
    return decode(rest, scale) if way == "decode" else contest(DIRECTIONS.index(way), rest, scale)


def contest(direction: int, row: str, scale: Scale) -> Measure:
    """`direction` 0: the forward; 1: the gradients of q, k and v alone."""
    name, _, sizes = row.rpartition(", D ")
    lengths = scale.lengths if sizes in EVERY_LENGTH else scale.lengths[:2]
    measures = dict[str, Measure]()
    for n in scale.grouped_lengths if "GQA" in sizes else lengths:
        if measures and scale.deadline.passed(f"{n} tokens"):
            break
        measures[str(n)] = Contestants(name, sizes, n, scale, direction).measured
    return lambda: one_after_another(measures, scale)


class Contestants:
    """The contestants of one mask and length. `sizes` are the words of a row behind its mask: "128" is the head size of
    q, k and v, "192/128" that of q and k and that of v; with "128, GQA 4" four query heads share a key head; with "128,
    transposed" arrays are [batch, length, heads, dim] in memory. The dense formula is the last to be built: it needs
    all of the memory."""

    def __init__(self, name: str, sizes: str, length: int, scale: Scale, direction: int) -> None:
        sizes, strided = sizes.removesuffix(", transposed"), sizes.endswith(", transposed")
        dims, _, group = sizes.partition(", GQA ")
        dim, _, v_dim = dims.partition("/")
        self.dim, self.v_dim = int(dim), int(v_dim or dim)
        self.heads = scale.grouped_heads if group else max(1, scale.width // self.dim)
        self.batch = max(1, (scale.grouped_lengths[-1] if group else scale.tokens) // length)
        self.length, self.scale, self.direction = length, scale, direction
        self.goals = GOALS.get((name, sizes, length), (None, None))[direction]
        self.case = contests(length, self.heads, scale.device)[name]
        kv_heads = self.heads // int(group or 1)
        self.arrays = drawn(self.batch, self.heads, length, length, self.dim, scale, kv_heads, self.v_dim)
        if strided:
            self.arrays = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in self.arrays]
        self.cotangent = torch.randn(self.batch, self.heads, length, self.v_dim, device=scale.device).to(scale.dtype)
        if direction:
            self.arrays = [x.requires_grad_() for x in self.arrays]
        self.entrants = Entrants(scale)
        self.enter("frisket", lambda: partial(ours(self.case), *self.arrays))
        self.peers = peers(self.case, self.arrays, scale.dry, direction)
        for peer, build in self.peers.items():
            if not peer.startswith(DENSE):
                self.enter(peer, build)
        if scale.device == "cuda":
            torch.cuda.empty_cache()  # other rows wait beside this one

    def enter(self, name: str, build: Callable[[], Call]) -> None:
        self.entrants.enter(name, lambda: self.timed(build()))

    def timed(self, call: Call) -> Call:
        if not self.direction:
            return torch.no_grad()(call)
        out = call()
        return lambda: torch.autograd.grad(out, self.arrays, self.cotangent, retain_graph=True)

    def measured(self) -> Iterator[Row]:
        for peer, build in self.peers.items():
            if peer.startswith(DENSE):
                self.enter(peer, build)
        pairs = self.batch * self.heads * visible_pairs(self.case, self.length)
        # products: q with k and weights with v forward; scores again, dv, the gradient of weights, dq and dk backward
        work = 2 * pairs * (3 * self.dim + 2 * self.v_dim if self.direction else self.dim + self.v_dim)
        calls = self.entrants.calls
        yield from watched(calls, self.scale, partial(rates, work=work, goals=self.goals), self.entrants.notes)
        calls.clear()
        if self.scale.device == "cuda":
            torch.cuda.empty_cache()


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
    calls["copy"], copied = copying(scale)
    calls = {n: torch.no_grad()(call) for n, call in calls.items()}
    read = 2 * int(batch) * kv_heads * seen * dim * arrays[1].element_size()
    return lambda: watched(calls, scale, partial(shares, read=read, copied=copied))


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
    from frisket.runtime.calls.options import LaunchOptions, Tuning

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

    def best_first(times: Times) -> Row:
        ms = {n: 1e3 * statistics.median(t) for n, t in times.items()}
        return {"figures": {"ms": dict(sorted(ms.items(), key=lambda x: x[1]))}}

    return lambda: watched(calls, scale, best_first, failed)
