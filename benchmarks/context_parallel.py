"""How evenly a sequence of 1M tokens is dealt to 64 ranks, and what travels: `python benchmarks/context_parallel.py`.

By the cost model: visible (query, key) pairs of every rank, largest over mean, and the bytes that ranks send one
another in one forward, as a share of a ring that passes all keys and values round. Beside `fk.parallel.deal`:

- contiguous: rank r has the r-th part of the sequence (ring attention, H. Liu et al., arXiv 2310.01889)
- zig-zag: chunks r and 2 R - 1 - r of 2 R (Megatron Core's context parallelism; torch's `_HeadTailLoadBalancer`)
- per document: zig-zag within every document (torch's `_PerDocumentHeadTailLoadBalancer`, rank by rank as fixed in
  pytorch/pytorch#189902; per-document sharding of WLB-LLM, Z. Wang et al., OSDI 2025)
- sorted round robin: tiles by work, dealt to and fro (torch's `_PTRRLoadBalancer`, pytorch/pytorch#163617)
- heap: chunks by work, each to the rank with least of those that have room (MagiAttention's dispatch solver, as its
  documents describe it; 16 chunks a rank)

All under the same rule of what travels: from every rank the range of places that holds what is seen, where anything
is. "seen" is without that rule: tiles that a rank's queries see on other ranks, each sent once.
"""

from __future__ import annotations

import heapq
import time
from typing import Any

import numpy as np
from store import keep

import frisket as fk
from frisket.runtime.parallel import deal as dealing
from frisket.runtime.parallel.deal import TileCosts

LENGTH, RANKS, TILE = 1 << 20, 64, 128
KV_HEADS, DIM, ITEM = 8, 128, 2  # of the figures in bytes: 8 key heads of 128 in bfloat16
CHUNKS = 16
REPORTED = {
    "training at 128K": "1.44 x slower by imbalance over GPUs, said of Llama 3 (hao-ai-lab.github.io/blogs/distca)",
    "per-document sharding and packing": "1.23 x faster training on average, 1.30 x at longer contexts (WLB-LLM)",
    "per document, torch before its fix": "26 and 62 pairs on 2 ranks: 1.41 (pytorch/pytorch#189902); 44 and 44 after",
    "dynamic blocks by hypergraph partitioning": "attention 1.19-2.45 x faster under causal masks, 2.15-3.77 x under "
    "sparse ones, than static context parallelism (DCP, C. Jiang et al., arXiv 2510.10620)",
}


def masks() -> dict[str, fk.Mask]:
    draw, lengths = np.random.default_rng(0), []
    while sum(lengths) < LENGTH:  # log-normal, cut at 256k: a few long documents among many short ones
        lengths.append(int(np.clip(draw.lognormal(8.5, 1.5), 64, 1 << 18)))
    doc = np.repeat(np.arange(len(lengths)), lengths)[:LENGTH].astype(np.int32)
    return {
        "causal": fk.mask("causal"),
        "packed documents": fk.mask("causal & same(doc)", doc=doc),
        "sliding window": fk.mask("causal & window(4096)"),
        "prefix": fk.mask("prefix(200000) | causal"),
        "block diffusion": fk.mask(f"block_diffusion({LENGTH // 2}, 4096)"),
    }


def per_document(work: TileCosts, doc: np.ndarray) -> np.ndarray:
    """To the tile; what of a document is no multiple of 2 R tiles is dealt to and fro."""
    ends = np.flatnonzero(np.diff(doc[::TILE])) + 1
    rest, parts = [], []
    for tiles in np.split(np.arange(len(work.cost)), ends):
        whole = len(tiles) // (2 * RANKS) * 2 * RANKS
        front, back = tiles[:whole].reshape(2, RANKS, -1)
        parts.append(np.concatenate([front, back[::-1]], axis=1))
        rest.append(tiles[whole:])
    last = np.concatenate(rest).reshape(-1, RANKS)
    last[1::2] = last[1::2, ::-1]
    return np.sort(np.concatenate([*parts, last.T], axis=1), axis=1)


def sorted_round_robin(work: TileCosts) -> np.ndarray:
    rounds = np.argsort(-work.cost, kind="stable").reshape(-1, RANKS)
    rounds[1::2] = rounds[1::2, ::-1]
    return np.sort(rounds.T, axis=1)


def by_heap(work: TileCosts) -> np.ndarray:
    size = len(work.cost) // (RANKS * CHUNKS)
    cost = work.cost.reshape(-1, size).sum(axis=1)
    heap: list[tuple[int, int]] = [(0, r) for r in range(RANKS)]
    held: list[list[int]] = [[] for _ in range(RANKS)]
    for chunk in np.argsort(-cost, kind="stable").tolist():
        load, r = heapq.heappop(heap)
        held[r].append(chunk)
        if len(held[r]) < CHUNKS:
            heapq.heappush(heap, (load + int(cost[chunk]), r))
    chunks = np.sort(np.array(held), axis=1)
    return (chunks[..., None] * size + np.arange(size)).reshape(RANKS, -1)


def main() -> None:
    found: dict[str, Any] = {}
    for name, mask in masks().items():
        start = time.perf_counter()
        d = fk.parallel.deal(mask, LENGTH, RANKS, tile=TILE)
        seconds = time.perf_counter() - start
        work = d._work
        deals = {
            "frisket": d.tiles, "contiguous": dealing.contiguous(work), "zig-zag": dealing.zigzag(work),
            "sorted round robin": sorted_round_robin(work), "heap": by_heap(work),
        }  # fmt: skip
        if "doc" in mask.params:
            deals["per document"] = per_document(work, mask.params["doc"])
        ring = (RANKS - 1) * len(work.cost)
        reads = {n: work.reads(x) for n, x in deals.items()}
        figures = {
            "imbalance": {n: work.imbalance(x) for n, x in deals.items()},
            "sent, of a full ring": {n: work.sent(x) / ring for n, x in deals.items()},
            "seen, of a full ring": {n: (x.sum() - np.trace(x.sum(axis=2))) / ring for n, x in reads.items()},
        }
        sent = int(d.bytes(KV_HEADS, DIM, DIM, ITEM).sum())
        full = RANKS * (RANKS - 1) * d.shard * KV_HEADS * 2 * DIM * ITEM
        figures |= {
            "s": {"to deal": round(seconds, 3)}, "pairs": {"visible": int(d.cost.sum())},
            "bytes": {"sent": sent, "of a full ring": full}, "pieces": {"of a rank": sum(map(len, d.owned)) / RANKS},
        }  # fmt: skip
        found[name] = {"figures": figures}
        print(f"{name}: {seconds:.2f} s, {sent / 2**30:.2f} GiB of {full / 2**30:.0f} GiB", flush=True)
        for n in deals:
            imbalance, sent_, seen = (figures[x][n] for x in [*figures][:3])
            print(f"  {n:20} imbalance {imbalance:7.4f}   sent {sent_:8.4%} of a full ring, seen {seen:8.4%}")
        if figures["imbalance"]["frisket"] >= dealing.BALANCED:
            raise SystemExit(f"{name}: no balanced deal")
    what = {"tokens": LENGTH, "ranks": RANKS, "tile": TILE, "kv_heads": KV_HEADS, "head_dim": DIM, "itemsize": ITEM}
    notes = {f"reported elsewhere: {n}": text for n, text in REPORTED.items()}
    keep("context-parallel", "deals", found, {**what, "rounds": 1}, notes=notes)


if __name__ == "__main__":
    main()
