"""Both CPU tiers beside torch's own: `python benchmarks/cpu.py`, or a part of it: `python benchmarks/cpu.py decode`.

All contestants of a row run in this process on the same arrays, turn about, in an order that changes; a figure is
the median over rounds of peer / frisket (above 1: frisket is faster) with the 95 % interval of that median. The rate
of a matrix product is measured in the same rounds. Every part writes its own key of results/cpu-torch.json.
Compiled flex_attention takes 12-25 s to compile once per mask.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from store import keep, shown
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import frisket as fk
from frisket.runtime.bench.race import fresh, median_ratio, rounds_of, row

BATCH, HEADS, LENGTH, DIM = 1, 8, 4096, 64
DOCUMENTS, SIDE, KERNEL = 16, 64, 13
DOC = np.sort(np.random.default_rng(0).integers(0, DOCUMENTS, LENGTH))
SLOPES = (2.0 ** -np.arange(1, HEADS + 1)).astype(np.float32)
FLAT_DOC, FLAT_SLOPES = torch.from_numpy(DOC), torch.from_numpy(SLOPES)
TIERS = ("library", "native")
Call = Callable[[], Any]


# -- the masks, as frisket and as flex_attention take them -----------------------------------------------


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 256)


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (FLAT_DOC[q] == FLAT_DOC[k])


def prefixed(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 256) | (k < 512)


def dilated(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k <= 1024) & ((q - k) % 4 == 0)


def streaming(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & ((q - k < 256) | (k < 4))


def neighbourhood(b: Any, h: Any, q: Any, k: Any) -> Any:
    def near(q: Any, k: Any) -> Any:
        first = (q - KERNEL // 2).clamp(0, SIDE - KERNEL)
        return (k >= first) & (k < first + KERNEL)

    return near(q // SIDE, k // SIDE) & near(q % SIDE, k % SIDE)


def softcap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 50 * torch.tanh(score / 50)


def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + FLAT_SLOPES[h] * (k - q)


@dataclass(frozen=True)
class Contest:
    """One mask; `goals` by (peer, tier); `share` of the matrix product's rate that the native tier is to reach."""

    mask: str
    peer_mask: Any
    score: str | None = None
    peer_score: Any = None
    params: dict[str, Any] = field(default_factory=dict)
    goals: dict[tuple[str, str], float] = field(default_factory=dict)
    peers: tuple[str, ...] = ("flex",)
    share: float | None = None


def _flex(library: float | None, native: float) -> dict[tuple[str, str], float]:
    return {("flex", "native"): native} | ({} if library is None else {("flex", "library"): library})


FORWARD = {
    "causal": Contest(
        "causal", causal, goals={("is_causal", "library"): 1.0, ("is_causal", "native"): 1.2, ("flex", "native"): 1.75},
        peers=("is_causal", "flex", "dense mask"), share=0.85,
    ),
    "causal & window(256)": Contest(
        "causal & window(256)", window, goals={**_flex(1.3, 1.9), ("dense mask", "native"): 14.0},
        peers=("flex", "dense mask"),
    ),
    f"causal & same(doc), {DOCUMENTS} documents": Contest(
        "causal & same(doc)", documents, params={"doc": DOC}, goals=_flex(1.0, 1.8)),
    "softcap(50), causal": Contest("causal", causal, "softcap(50)", softcap, goals=_flex(0.9, 1.75)),
    "ALiBi, causal": Contest(
        "causal", causal, "score + slope[h] * (k - q)", alibi, {"slope": SLOPES}, goals=_flex(0.9, 1.75)),
    "prefix(512) | causal & window(256)": Contest(
        "prefix(512) | causal & window(256)", prefixed, goals=_flex(None, 1.7)),
    "causal & dilated(1024, 4)": Contest("causal & dilated(1024, 4)", dilated, goals=_flex(None, 1.7)),
    f"natten2d({SIDE}, {SIDE}, {KERNEL}, {KERNEL})": Contest(
        f"natten2d({SIDE}, {SIDE}, {KERNEL}, {KERNEL})", neighbourhood, goals=_flex(None, 1.7)),
    "causal & (window(256) | sinks(4))": Contest(
        "causal & (window(256) | sinks(4))", streaming, goals=_flex(None, 1.7)),
}  # fmt: skip
BACKWARD = {
    "causal": Contest(
        "causal", causal, goals={("is_causal", "library"): 0.8, ("is_causal", "native"): 1.2},
        peers=("is_causal", "dense mask"),
    ),
    "causal & window(256)": Contest(
        "causal & window(256)", window, goals={("dense mask", "library"): 6.0, ("dense mask", "native"): 12.0},
        peers=("dense mask",),
    ),
}  # fmt: skip


def peer(name: str, case: Contest, arrays: Any) -> Call:
    if name == "is_causal":
        return partial(sdpa, *arrays, is_causal=True)
    if name == "dense mask":
        at = torch.arange(LENGTH)
        return partial(sdpa, *arrays, attn_mask=case.peer_mask(0, 0, at[:, None], at[None, :]))
    torch._dynamo.reset()  # it gives up after eight masks otherwise
    compiled = torch.compile(flex_attention, dynamic=False)
    blocks = create_block_mask(case.peer_mask, None, None, LENGTH, LENGTH, device="cpu")
    return partial(compiled, *arrays, score_mod=case.peer_score, block_mask=blocks)


def ours(case: Contest, arrays: Any, tier: str) -> Call:
    return partial(fk.compile(case.mask, case.score, backend=tier, **case.params), *arrays)


def drawn(*shape: int, dtype: Any = torch.float32) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(*(shape or (BATCH, HEADS, LENGTH, DIM))).to(dtype) for _ in range(3))


def product() -> Call:
    """A square float32 matrix product of 2 * 1024**3 operations."""
    x, y = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return lambda: x @ y


# -- the parts ---------------------------------------------------------------------------------------------


def forward(rounds: int, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    arrays = drawn()
    with torch.no_grad():
        for name, case in FORWARD.items():
            if only in name:
                calls = {t: ours(case, arrays, t) for t in TIERS} | {p: peer(p, case, arrays) for p in case.peers}
                same(calls)
                yield name, compared({**calls, "product": product()}, case, rounds, products=2)


def backward(rounds: int, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Forward and backward together."""
    arrays = tuple(x.requires_grad_() for x in drawn())
    cotangent = drawn()[0]

    def both(call: Call) -> Call:
        return lambda: torch.autograd.grad(call(), arrays, cotangent)

    for name, case in BACKWARD.items():
        if only in name:
            calls = {t: both(ours(case, arrays, t)) for t in TIERS}
            calls |= {p: both(peer(p, case, arrays)) for p in case.peers}
            same(calls)
            yield name, compared({**calls, "product": product()}, case, rounds, products=7)


def bf16(rounds: int, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """bfloat16 against float32, the same work and tier; the peer is frisket itself."""
    arrays, halves = drawn(), drawn(dtype=torch.bfloat16)
    with torch.no_grad():
        for tier, goal in (("library", 1.0), ("native", 1.4)):
            case = Contest("causal", causal, goals={("float32", tier): goal})
            calls = {tier: ours(case, halves, tier), "float32": ours(case, arrays, tier)}
            calls["SDPA bfloat16"] = partial(sdpa, *halves, is_causal=True)
            yield tier, compared({**calls, "product": product()}, case, rounds, products=2)


def decode(rounds: int, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """One query over a cache of 32,768 keys: the share of the bandwidth at which torch reads as much memory."""
    length = 32768
    q, (k, v, _) = torch.randn(BATCH, HEADS, 1, DIM), drawn(BATCH, HEADS, length, DIM)
    flat = torch.stack([k.flatten(), v.flatten()])
    ones = torch.ones(flat.shape[1])
    with torch.no_grad():
        for tier, goal in (("library", None), ("native", 0.7)):
            attention = fk.compile("causal", backend=tier)
            call = partial(attention, q, k, v, origin=(0, 0, length - 1, 0))
            calls = {tier: call, "read": partial(torch.mv, flat, ones), "sum": flat.sum, "SDPA": partial(sdpa, q, k, v)}
            torch.testing.assert_close(call(), sdpa(q, k, v), rtol=1e-4, atol=1e-5)
            times = rounds_of(calls, rounds)
            best = "read" if statistics.median(times["read"]) < statistics.median(times["sum"]) else "sum"
            share = median_ratio(times[best], times[tier])
            read = 4 * flat.numel() / min(times["read"] + times["sum"]) / 1e9
            yield (
                tier,
                {
                    "figures": {"ms": medians(times), "gb_s": {"bandwidth": read}},
                    "ratios": {f"{best} / {tier}": share, f"SDPA / {tier}": median_ratio(times["SDPA"], times[tier])},
                    "goals": at_least({f"{best} / {tier}": goal}),
                },
            )


LONG = """
import torch
import frisket as fk
torch.set_num_threads({threads}); torch.manual_seed(0)
q, k, v = (torch.randn(1, 8, {length}, 64, requires_grad={learns}) for _ in range(3))
attention = fk.compile("causal & window(1024)", backend="{tier}")
small = [torch.randn(1, 8, 2048, 64, requires_grad={learns}) for _ in range(3)]
def run(*arrays):
    out = attention(*arrays)
    return torch.autograd.grad(out.sum(), arrays) if {learns} else out
def kilobytes(name):
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith(name))
run(*small)
open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here on
before = kilobytes("VmRSS")
out = run(q, k, v)
print((kilobytes("VmHWM") - before) / 1024)
"""


def long(rounds: int, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """causal & window(1024) at 65,536 tokens: time for each visited tile against 4,096, memory beyond results."""
    small, large = drawn(), drawn(BATCH, HEADS, 65536, DIM)
    with torch.no_grad():
        for tier in TIERS:
            attention = fk.compile("causal & window(1024)", backend=tier)
            pairs = {n: fk.mask("causal & window(1024)").layout(n, n).visible_pairs for n in (LENGTH, 65536)}
            times = rounds_of({"4k": partial(attention, *small), "64k": partial(attention, *large)}, rounds)
            each = [x * pairs[LENGTH] / pairs[65536] for x in times["64k"]]
            beyond = {}
            for learns, arrays in ((False, 1), (True, 4)):  # out; out and three gradients (the cotangent is expanded)
                text = LONG.format(threads=torch.get_num_threads(), length=65536, learns=learns, tier=tier)
                held = float(fresh(text)) - arrays * large[0].numel() * 4 / 2**20
                beyond["forward and backward" if learns else "forward"] = held
            pair = "64k / 4k, a visible pair"
            yield (
                tier,
                {
                    "figures": {"ms": medians(times), "MB beyond results": beyond},
                    "ratios": {pair: median_ratio(each, times["4k"])},
                    "goals": {"at most": {"ratios": {pair: 1.1}, "MB beyond results": dict.fromkeys(beyond, 200)}},
                },
            )


def overhead(rounds: int, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A call with next to nothing to compute: 16 tokens, one head of 16."""
    arrays = drawn(1, 1, 16, 16)
    learned = [x.clone().requires_grad_() for x in arrays]
    cotangent = torch.ones(1, 1, 16, 16)
    torch.set_num_threads(1)
    goals = {"native": {"forward": 30.0, "with gradients": 60.0}}
    for tier in TIERS:
        attention = fk.compile("causal", backend=tier)
        calls = {
            "forward": partial(attention, *arrays),
            "with gradients": partial(attention, *learned),
            "backward too": lambda: torch.autograd.grad(attention(*learned), learned, cotangent),  # noqa: B023
            "SDPA": partial(sdpa, *arrays, is_causal=True),
        }
        calls = {n: repeated(c, 50) for n, c in calls.items()}
        times = {n: [x / 50 for x in t] for n, t in rounds_of(calls, rounds).items()}
        us = {n: 1e3 * x for n, x in medians(times).items()}
        ratios = {f"SDPA / {tier}": median_ratio(times["SDPA"], times["forward"])}
        yield tier, {"figures": {"us": us}, "ratios": ratios, "goals": {"at most": {"us": goals.get(tier, {})}}}


def repeated(call: Call, n: int) -> Call:
    def run() -> None:
        for _ in range(n):
            call()

    return run


FIRST = """
import gc, os, tempfile, time, torch
os.environ["FRISKET_BACKEND"] = "{tier}"
q, k, v = (torch.randn(1, 8, 4096, 64) for _ in range(3))
torch.nn.functional.scaled_dot_product_attention(q[:, :, :64], k[:, :, :64], v[:, :, :64])
gc.collect()  # a full collection is due after importing torch, whoever allocates next
start = time.perf_counter()
import frisket as fk
fk.attention
imported = time.perf_counter()
fk.attention(q, k, v, "causal & window(w)", w=256)
first = time.perf_counter()
fk.attention(q, k, v, "causal & window(w)", w=256)
again = time.perf_counter()
print(1e3 * (imported - start), 1e3 * (first - imported), 1e3 * (again - first))
"""


def first(rounds: int, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The first call of a process that has torch already: cold, and with kernels on disk; less a second call."""
    import tempfile

    for tier, goal in (("library", 50), ("native", 1500)):
        cold = []
        for _ in range(3):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(milliseconds(tier, folder))
        with tempfile.TemporaryDirectory() as folder:
            warm = [milliseconds(tier, folder) for _ in range(6)][1:]
        ms = {
            "import": statistics.median(x[0] for x in warm), "cold": statistics.median(x[1] - x[2] for x in cold),
            "from disk": statistics.median(x[1] - x[2] for x in warm),
        }  # fmt: skip
        yield tier, {"figures": {"ms": ms}, "goals": {"at most": {"ms": {"cold": goal, "from disk": 50}}}}


def milliseconds(tier: str, folder: str) -> list[float]:
    return [float(x) for x in fresh(FIRST.format(tier=tier), FRISKET_CACHE_DIR=folder).split()]


# -- figures -----------------------------------------------------------------------------------------------


def same(calls: dict[str, Call]) -> None:
    """All contestants agree before anything is timed."""
    results = {n: c() for n, c in calls.items()}
    want = results[next(reversed(results))]
    for got in results.values():
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def compared(calls: dict[str, Call], case: Contest, rounds: int, products: int) -> dict[str, Any]:
    """Times, ratios and the share of the matrix product's rate; `products` are the matrix products of the work."""
    times = rounds_of(calls, rounds)
    product = times.pop("product")
    found = row(times, TIERS)
    pairs = fk.compile(case.mask, case.score, **case.params).mask.layout(LENGTH, LENGTH).visible_pairs
    work = 2 * products * DIM * BATCH * HEADS * pairs
    rate = 2 * 1024**3 / min(product)
    found["figures"] |= {
        "gflops": {"product": rate / 1e9},
        SHARE: {t: work / statistics.median(times[t]) / rate for t in TIERS if t in times},
    }
    found["figures"]["ms"]["product"] = 1e3 * statistics.median(product)
    share = {} if case.share is None else {SHARE: {"native": case.share}}
    return found | {"goals": at_least({f"{p} / {t}": goal for (p, t), goal in case.goals.items()}, share)}


SHARE = "share of the product's rate"


def at_least(ratios: dict[str, float | None], more: dict[str, Any] | None = None) -> dict[str, Any]:
    """The goals of a row."""
    return {"at least": {"ratios": {n: x for n, x in ratios.items() if x is not None}, **(more or {})}}


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {n: 1e3 * statistics.median(t) for n, t in times.items()}


PARTS = {f.__name__: f for f in (forward, backward, bf16, decode, long, overhead, first)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all of them unless named")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="only rows whose name contains this; nothing is written")
    args = parser.parse_args()
    for name in args.parts or PARTS:
        torch.set_num_threads(args.threads)
        print(f"== {name}", flush=True)
        rows = {}
        for of, found in PARTS[name](args.rounds, args.only):
            rows[of] = found
            print(shown(of, found), flush=True)
            if not args.only:
                settings = {"threads": args.threads, "shape": [BATCH, HEADS, LENGTH, DIM], "rounds": args.rounds}
                settings["dtype"] = "bfloat16" if name == "bf16" else "float32"
                keep("cpu-torch", name, rows, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
