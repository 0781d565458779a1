"""A KV cache beside lists of tokens: append, truncate, draft a tree and keep a path of it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from outside.programs import LIBRARY
from support.cache_model import KINDS, OfJax, OfTorch, run
from support.torch.dense import dense

import frisket as fk
from frisket.runtime.torch import decode

from .attention import DIM, close

ROWS, HEADS, KV_HEADS, CAPACITY, TOKENS = 2, 4, 2, 64, 50
MOST = 9  # tokens of a row and step
MASKS = {
    "causal": LIBRARY["causal"],
    "causal & window(5)": lambda q, k: (q >= k) & (q - k < 5),
    "causal & chunked(4)": lambda q, k: (q >= k) & (q // 4 == k // 4),
    "causal & (window(3) | sinks(2))": lambda q, k: (q >= k) & ((q - k < 3) | (k < 2)),
    "causal & k % 3 != 1": lambda q, k: (q >= k) & (k % 3 != 1),
}
DRAW = torch.Generator().manual_seed(5)
Q, K, V = (torch.randn(TOKENS, n, DIM, generator=DRAW) for n in (HEADS, KV_HEADS, KV_HEADS))


def make_steps(seed: int) -> str:
    """A mask and steps: `append:3,0` tokens of each row, `truncate:2,1` tokens off the ends, `tree:-1,0,0:2` parents of
    drafts and the last one that is kept.
    """
    draw = random.Random(seed)
    steps = []
    for _ in range(draw.randint(2, 14)):
        kind = draw.choice(["append", "append", "truncate", "tree"])
        if kind == "tree":
            parents = [draw.randint(-1, i - 1) for i in range(draw.randint(1, 5))]
            steps.append(f"tree:{','.join(map(str, parents))}:{draw.randint(-1, len(parents) - 1)}")
        else:
            steps.append(f"{kind}:{','.join(str(draw.randint(0, MOST)) for _ in range(ROWS))}")
    return "; ".join([draw.choice([*MASKS]), *steps])


def caches(text: str) -> str:
    """What every step attends to, beside dense attention over the tokens of the lists."""
    from frisket.caches.torch import KVCache

    mask, *steps = text.split("; ")
    cache = KVCache.create(ROWS, CAPACITY, KV_HEADS, DIM, DIM, "float32")
    att = fk.compile(mask, backend="aten")
    held: list[list[int]] = [[] for _ in range(ROWS)]
    used = 0

    def fresh(n: int) -> list[int]:
        nonlocal used
        used += n
        return [(used - n + i) % TOKENS for i in range(n)]

    def attended(new: list[list[int]], tree: list[int] | None = None) -> Any:
        length = max(1, *map(len, new))
        q, k, v = (torch.full((ROWS, length, *x.shape[1:]), 1e4) for x in (Q, K, V))  # padding must not matter
        for row, tokens in enumerate(new):
            for padded, x in ((q, Q), (k, K), (v, V)):
                padded[row, : len(tokens)] = x[tokens]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return cache.attention(att, q, k, v, [*map(len, new)], tree=tree)

    for step in steps:
        kind, numbers, *last = step.split(":")
        given = [int(x) for x in numbers.split(",")]
        if kind == "truncate":
            held = [tokens[: max(0, len(tokens) - n)] for tokens, n in zip(held, given, strict=True)]
            cache.truncate([*map(len, held)])
        elif kind == "append":
            new = [fresh(min(n, CAPACITY - len(tokens))) for n, tokens in zip(given, held, strict=True)]
            out = attended(new)
            held = [a + b for a, b in zip(held, new, strict=True)]
            for row, tokens in enumerate(new):
                compared(step, mask, out[row, :, : len(tokens)], held[row], len(tokens))
        elif max(map(len, held)) + len(given) <= CAPACITY:
            new = [fresh(len(given)) for _ in range(ROWS)]
            out = attended(new, given)
            for row in range(ROWS):
                for i in range(len(given)):
                    compared(step, mask, out[row, :, i : i + 1], held[row] + [new[row][j] for j in path(given, i)], 1)
            kept = path(given, int(last[0]))
            paths = np.zeros((ROWS, len(given)), int)
            paths[:, : len(kept)] = kept
            cache.keep(paths, np.full(ROWS, len(given)), np.full(ROWS, len(kept)))
            held = [a + [b[j] for j in kept] for a, b in zip(held, new, strict=True)]
    return text


def make_operations(seed: int) -> str:
    """A framework, a kind of cache, its dtype, the seed of operations and how many there are."""
    draw = random.Random(seed)
    kind, dtype = draw.choice(KINDS)
    return f"{draw.choice(['torch', 'jax'])} {kind} {dtype} {seed} {draw.choice([5, 20, 20, 40])}"


def stores(text: str) -> str:
    """Plain, paged and ring caches of torch and JAX, float32 and int8, under the operations that the model draws."""
    framework, kind, dtype, seed, steps = text.split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "MAX_STEP_QUERIES", 0)  # no planner is compiled for the steps
        run({"torch": OfTorch, "jax": OfJax}[framework], kind, dtype, int(seed), int(steps))
    return text


def path(parents: list[int], node: int) -> list[int]:
    """Nodes from a root to `node`, which may be -1: none."""
    return [] if node < 0 else [*path(parents, parents[node]), node]


def compared(step: str, mask: str, out: Any, tokens: list[int], new: int) -> None:
    if not new:
        return
    n = len(tokens)
    seen = torch.from_numpy(MASKS[mask](np.arange(n)[n - new :, None], np.arange(n)[None, :]))
    q, k, v = (x[tokens].double().transpose(0, 1)[None] for x in (Q, K, V))
    wanted = dense(q[:, :, n - new :], k, v, seen)[0][0]
    close(step.partition(":")[0], out.numpy(), wanted, 1e-5)
