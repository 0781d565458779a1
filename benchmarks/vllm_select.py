"""A decode step of one layer in vLLM, of all blocks and of chosen ones: `python benchmarks/vllm_select.py`.

One request, 32 query heads and 8 key heads of 128 as in Llama 3.1 8B, float32, one thread. Each step writes other
tokens. A line for each length and block size: milliseconds of processor time of the step, median of rounds that take
turns, of all blocks and of 1,024 chosen tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from frisket.integrations.vllm_pages import PagedBatch, ServedLayer, write
from frisket.runtime.bench.race import processor_seconds, rounds_of

HEADS, KV_HEADS, DIM, CHOSEN = 32, 8, 128, 1024


def steps(length: int, page: int) -> dict[str, Callable[[], Any]]:
    """The calls to be timed."""
    width = -(-length // page)
    pool, blocks = torch.randn(width, KV_HEADS, page, 2 * DIM), torch.randperm(width)[None]
    layers = {"all": ServedLayer(), "chosen": ServedLayer(select={"keep": CHOSEN // page})}
    slots = (blocks[0, :, None] * page + torch.arange(page)).reshape(-1)[:length]
    keys = pool[blocks[0], ..., :DIM].transpose(1, 2).reshape(-1, KV_HEADS, DIM)[:length]
    layers["chosen"].add_bounds(pool, keys, slots)

    def step(layer: ServedLayer) -> None:
        q, k, v = torch.randn(1, HEADS, DIM), *torch.randn(2, 1, KV_HEADS, DIM)
        starts, lengths = torch.tensor([0, 1]), torch.tensor([length])
        batch = PagedBatch.of(1, starts, lengths, blocks, slots[-1:], 1, page)
        write(pool, k, v, batch.slots)
        layer.add_bounds(pool, k, batch.slots)
        layer.attend(q, pool, batch)

    return {name: lambda layer=layer: step(layer) for name, layer in layers.items()}  # type: ignore[misc]


def main(lengths: tuple[int, ...] = (8192, 32768, 65536), rounds: int = 9) -> None:
    torch.set_num_threads(1)
    for length in lengths:
        for page in (16, 128):
            times = rounds_of(steps(length, page), rounds, clock=processor_seconds)
            each = {name: round(1e3 * statistics.median(found), 1) for name, found in times.items()}
            print(f"{length} tokens in blocks of {page}: {each}", flush=True)


if __name__ == "__main__":
    main()
