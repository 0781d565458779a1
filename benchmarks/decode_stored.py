"""A step of decoding on stored keys and values, by the native kernels: `python benchmarks/decode_stored.py`.

One query over a cache, 8 query heads, 2 key heads, in memory as caches allocate it: huge pages, where the system has
them. "pages": a pool whose pages lie in any order, against one array of the same entries, at most 1.15 times its time.
"entries": 8 bits with a scale for every token and head, bfloat16 and float32, each against float32. "rate": by
sequences, and by query queries a key head, on all threads, beside torch adding up as many bytes of float32; at least
0.85 of its rate. "cascade": sequences that share a prefix, in one call and with the prefix read once. The calls of a
row run turn about; in "pages", "entries" and "cascade" on one thread, whose own time is taken. A figure is the median
over rounds of the ratio, with the 95 % interval of that median, and "gb_s" is what is read of keys and values in a
second.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from store import run_parts

import frisket as fk
from frisket.caches import PagePool
from frisket.caches.torch import PagedKVCache
from frisket.runtime.bench.race import median_ratio, processor_seconds, rounds_of
from frisket.runtime.caches.torch_plain import zeros

GROUP, KV_HEADS = 4, 2
CACHES = [(1, 4096), (1, 32768), (8, 4096)]  # sequences, tokens of each
DTYPES = {
    "float32": (torch.float32, torch.float32), "bfloat16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.float32, torch.int8), "float8_e4m3fn": (torch.float32, torch.float8_e4m3fn),
    "float8_e5m2": (torch.float32, torch.float8_e5m2), "int8 beside bfloat16": (torch.bfloat16, torch.int8),
}  # fmt: skip
ATTENTION = fk.compile("causal", backend="cpp")
THREADS = torch.get_num_threads()
Call = Callable[[], Any]
Rows = Iterator[tuple[str, dict[str, Any]]]


def step(batch: int, length: int, dim: int, dtype: str, page: int = 0, group: int = GROUP) -> tuple[Call, int]:
    """A call, and how many bytes of keys and values it reads."""
    of_query, stored = DTYPES[dtype]
    q = torch.randn(batch, KV_HEADS * group, 1, dim).to(of_query)
    shape = (batch * length // page, KV_HEADS, page, dim) if page else (batch, KV_HEADS, length, dim)
    more = {}
    if stored != of_query:
        more = {name: torch.rand(shape[:3]) / 100 for name in ("k_scale", "v_scale")}
    if page:
        more["pages"] = torch.randperm(shape[0]).reshape(batch, -1).int()
    k, v = (zeros(*shape, dtype=stored, device="cpu") for _ in "kv")
    for x in (k, v):
        x.copy_(torch.randint(-127, 128, shape) if stored == torch.int8 else torch.randn(shape))
    call = partial(ATTENTION, q, k, v, origin=(0, 0, length - 1, 0), **more)
    return call, 2 * k.numel() * k.element_size()


def compared(
    steps: dict[str, tuple[Call, int]], against: str, rounds: int, goals: Collection[str], most: float
) -> dict[str, Any]:
    """`most` is what the ratio of those in `goals` may be."""
    with torch.no_grad():
        times = rounds_of({name: call for name, (call, _) in steps.items()}, rounds, clock=processor_seconds)
    return {
        "figures": {
            "ms": {n: 1e3 * statistics.median(x) for n, x in times.items()},
            "gb_s": {n: steps[n][1] / statistics.median(x) / 1e9 for n, x in times.items()},
        },
        "ratios": {f"{n} / {against}": median_ratio(x, times[against]) for n, x in times.items() if n != against},
        "goals": {"at most": {"ratios": {f"{n} / {against}": most for n in times if n in goals}}},
    }


def pages(rounds: int) -> Rows:
    for batch, length in CACHES[1:]:
        for dtype in ("float32", "bfloat16", "int8"):
            steps = {"contiguous": step(batch, length, 128, dtype)}
            steps |= {f"pages of {page}": step(batch, length, 128, dtype, page) for page in (16, 64, 128)}
            yield f"{batch} x {length}, 128, {dtype}", compared(steps, "contiguous", rounds, [*steps][1:], 1.15)


def entries(rounds: int) -> Rows:
    for batch, length in CACHES:
        for dim in (64, 128):
            steps = {dtype: step(batch, length, dim, dtype) for dtype in DTYPES}
            of_8_bits = [n for n, (_, stored) in DTYPES.items() if stored.itemsize == 1]
            yield f"{batch} x {length}, {dim}", compared(steps, "float32", rounds, of_8_bits, 1.0)


def cascade(rounds: int) -> Rows:
    for group in (1, 4):
        for dtype in ("float32", "bfloat16", "int8"):
            goals = ["cascade"] if dtype != "int8" else []  # dequantising costs more than reading
            row = compared(prefixes(dtype, group), "one call", rounds, goals, 1.0)
            yield f"8 x (8192 shared + 1024), GQA {group}, {dtype}", row


def prefixes(dtype: str, group: int, batch: int = 8, shared: int = 8192, own: int = 1024, page: int = 64) -> Any:
    """A step of sequences that share a prefix, in one call and with the prefix read once."""
    of_query, stored = DTYPES[dtype]
    pages = shared // page + batch * (own // page)
    pool = PagePool(pages, page)
    cache = PagedKVCache.create(pages, page, batch, (shared + own) // page, KV_HEADS, 128, dtype=stored)
    pool.allocate("prefix", shared)
    for b in range(batch):
        pool.fork("prefix", b)
    pool.free("prefix")
    copies = pool.append(dict.fromkeys(range(batch), own))
    cache.seat(pool, range(batch), 0, copies)  # every token counts as stored
    for x in (cache.k, cache.v):
        x.copy_(torch.randint(-127, 128, x.shape) if stored == torch.int8 else torch.randn(x.shape))
    for x in (cache.k_scale, cache.v_scale):
        if x is not None:
            x.uniform_(0, 0.01)
    q = torch.randn(batch, KV_HEADS * group, 1, 128).to(of_query)
    of_token = 2 * KV_HEADS * 128 * stored.itemsize
    one = partial(cache.attend, ATTENTION, q)
    return {
        "one call": (one, batch * (shared + own) * of_token),
        "cascade": (partial(one, cascade=True), (shared + batch * own) * of_token),
    }


def alone(part: Callable[[int], Rows]) -> Callable[[int], Rows]:
    """A part on one thread."""

    def run(rounds: int) -> Rows:
        torch.set_num_threads(1)
        yield from part(rounds)
        torch.set_num_threads(THREADS)

    return run


def rate(rounds: int) -> Rows:
    for batch, length in ((1, 8192), (1, 32768), (8, 8192), (32, 8192)):
        for group in (1, 4, 8):
            for dtype in ("float32", "bfloat16", "int8"):
                call, size = step(batch, length, 128, dtype, group=group)
                added = zeros(size // 4, dtype=torch.float32, device="cpu").normal_()
                with torch.no_grad():
                    times = rounds_of({"native": call, "sum": added.sum}, rounds)
                yield (
                    f"{batch} x {length}, GQA {group}, {dtype}",
                    {
                        "figures": {
                            "ms": {n: 1e3 * statistics.median(x) for n, x in times.items()},
                            "gb_s": {n: size / statistics.median(x) / 1e9 for n, x in times.items()},
                        },
                        "ratios": {"sum / native": median_ratio(times["sum"], times["native"])},
                        "goals": {"at least": {"ratios": {"sum / native": 0.85}}},
                    },
                )


def settings(part: str) -> dict[str, Any]:
    if part == "rate":
        return {"kv_heads": KV_HEADS, "threads": THREADS}
    return {"heads": GROUP * KV_HEADS, "kv_heads": KV_HEADS, "threads": 1}


if __name__ == "__main__":
    parts = {"pages": alone(pages), "entries": alone(entries), "rate": rate, "cascade": alone(cascade)}
    run_parts(__doc__, parts, "decode-stored", settings)
