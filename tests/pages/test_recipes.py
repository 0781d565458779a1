"""Every recipe of docs/recipes.md, beside attention under a dense mask that is written out here."""

import re

import numpy as np
import pytest
from support.pages import DOCS, Block, blocks

PAGE = (DOCS / "recipes.md").read_text(encoding="utf-8")
HEAD, *RECIPES = blocks("recipes.md")
Q, K = np.ogrid[:256, :256]
DOC = np.repeat([0, 1, 2], [100, 90, 66])
KINDS = np.repeat([0, 1, 0, 2, 0], [20, 64, 30, 64, 78])
CAUSAL = K <= Q


def rows(*masks):
    """A mask for each row of the batch."""
    return np.stack(masks)[:, None]


def heads(*masks):
    return np.stack(masks)[None]


def first_of_each(doc):
    """A causal window of 64 keys and the first 4 keys, in each document."""
    return CAUSAL & (doc[:, None] == doc) & ((Q - K < 64) | (K - np.searchsorted(doc, doc) < 4))


def natten():
    """Pixel by pixel: 5 of every second row, 3 of every fourth column, moved inside the image."""
    found = np.zeros((256, 256), bool)

    def around(i, size, n, step):
        line = np.arange(i % step, size, step)  # the places of its dilation group
        place = int(np.where(line == i)[0][0])
        start = min(max(place - n // 2, 0), len(line) - n)
        return line[start : start + n]

    for i in range(256):
        for row in around(i // 16, 16, 5, 2):
            found[i, row * 16 + around(i % 16, 16, 3, 4)] = True
    return found


def classed():
    """A class token before 15 × 17 patches: all see it, it sees all, patches see 5 × 5, moved inside the image."""
    found = np.zeros((256, 256), bool)
    found[0] = found[:, 0] = True
    for row, col in np.ndindex(15, 17):
        top, left = min(max(row - 2, 0), 10), min(max(col - 2, 0), 12)
        patches = np.zeros((15, 17), bool)
        patches[top : top + 5, left : left + 5] = True
        found[1 + row * 17 + col, 1:] = patches.ravel()
    return found


def swin():
    window = [(row // 4, col // 4) for row, col in np.ndindex(16, 16)]
    return np.array([[a == b for b in window] for a in window])


def diffusion():
    noised_q, noised_k, block_q, block_k = Q < 128, K < 128, Q % 128 // 16, K % 128 // 16
    seen = noised_q & noised_k & (block_q == block_k)
    seen |= noised_q & ~noised_k & (block_q > block_k)
    return seen | ~noised_q & ~noised_k & (block_q >= block_k)


def tree():
    seen, parents = CAUSAL & (K < 250), [-1, 0, 0, 1, 1, 2]
    for draft in range(6):
        node = draft
        while node >= 0:
            seen[250 + draft, 250 + node] = True
            node = parents[node]
    return seen[250:]


# heading -> dense masks, one for each block below it; queries are the last ones where a mask has fewer
DENSE = {
    "Packed pre-training: sequence packing": [CAUSAL & (DOC[:, None] == DOC)],
    "Padding, right and left": [
        rows(CAUSAL, CAUSAL & (K < 180)),
        rows(CAUSAL, CAUSAL & (K >= 76)),
    ],
    "Grouped-query attention (GQA)": [CAUSAL],
    "Sliding window with sinks": [
        CAUSAL & ((Q - K < 64) | (K < 4)),
        first_of_each(DOC),
        rows(first_of_each(np.arange(256) // 100), first_of_each((np.arange(256) >= 64) * 1)),
        rows(*(first_of_each(np.arange(256) // n) for n in (100, 64))),
    ],
    "Prefix LM": [rows(CAUSAL | (K < 40), CAUSAL | (K < 100))],
    "Per-head windows": [heads(*(CAUSAL & (w > Q - K) for w in (16, 32, 64, 256)))],
    "Multimodal prefix": [CAUSAL | (KINDS[:, None] == KINDS) & (KINDS > 0)],
    "NATTEN with dilation": [natten()],
    "Image with class tokens": [classed(), swin()],
    "Block diffusion": [diffusion()],
    "Cross attention": [rows(*(np.broadcast_to(n > K, (64, 256)) for n in (256, 180)))],
    "Chunked prefill": [CAUSAL & (Q - K < 100)],
    "Speculative decoding: trees": [tree()],
    "KV cache on JAX": [CAUSAL & (Q - K < 64)],
}


def dense(mask, q, k, v):
    """Attention in float64; a query that sees nothing gives 0."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = np.where(mask, q @ k.swapaxes(2, 3) / q.shape[-1] ** 0.5, -np.inf)
    weights = np.exp(scores - np.where(np.isfinite(top := scores.max(-1, keepdims=True)), top, 0))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total, total, 1) @ v


def recipes():
    """(heading, number of the block below it, block)."""
    parts = re.split(r"^## (.*)$", PAGE, flags=re.M)[1:]
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        for i, block in enumerate(blocks("recipes.md", text)):
            yield pytest.param(heading, i, block, id=f"{heading}-{i}")


def ran(heading: str, block: Block):
    """(what a recipe gives, its dense queries, keys and values) in numpy, heads before lengths."""
    names: dict = {}
    HEAD.run(names)
    block.run(names)
    out, q, k, v = (np.asarray(names[name], dtype=float) for name in ("out", "q", "k", "v"))
    if "JAX" in heading:
        out = out.swapaxes(1, 2)
    if "GQA" in heading:
        k, v = k[:, :2], v[:, :2]
    return out, q, k, v


def test_recipes_each_have_a_dense_mask():
    assert re.findall(r"^## (.*)$", PAGE, re.M) == [*DENSE]
    assert len(RECIPES) == sum(map(len, DENSE.values()))


@pytest.mark.parametrize(("heading", "number", "block"), recipes())
def test_recipe_equals_attention_under_its_dense_mask(heading, number, block):
    out, q, k, v = ran(heading, block)
    mask = DENSE[heading][number]
    q = q[:, :, :64] if heading == "Cross attention" else q[:, :, -mask.shape[-2] :]
    np.testing.assert_allclose(out, dense(mask, q, k, v), atol=2e-5)
    other = mask.copy()
    at = tuple(np.argwhere(mask)[len(np.argwhere(mask)) // 2])
    other[at] = False  # one pair less is seen
    assert np.abs(out - dense(other, q, k, v)).max() > 1e-4
