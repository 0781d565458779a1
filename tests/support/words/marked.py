"""Rectangles, marked tokens, trees, diffusion, tiles chosen by data."""

from __future__ import annotations

import itertools

import numpy as np

from support.words.registry import each, words

# -- rectangles ---------------------------------------------------------------------------------------


@words
def rectangle(c, q0, q1, k0, k1):
    return each(lambda q: range(k0, k1) if q in range(q0, q1) else [])


@words
def rectangle_causal(c, q0, q1, k0, k1):
    return each(lambda q: range(k0, k1 - (q1 - 1 - q)) if q in range(q0, q1) else [])


@words
def rectangle_inverse(c, q0, q1, k0, k1):
    return each(lambda q: range(k0 + (q - q0), k1) if q in range(q0, q1) else [])


@words
def rectangle_bi_causal(c, q0, q1, k0, k1):
    return each(lambda q: range(k0 + (q - q0), k1 - (q1 - 1 - q)) if q in range(q0, q1) else [])


# -- marked tokens, trees, diffusion ------------------------------------------------------------------


@words
def global_tokens(c, t):
    return each(lambda q: range(c.kv_len) if t[q] else np.flatnonzero(t))


@words
def global_window(c, t, w):
    return each(lambda q: [*global_tokens(c, t)(0, 0, q), *range(q - w, q + w + 1)])


@words
def padding(c, lengths):
    return lambda b, h, q: range(lengths[b]) if q in range(lengths[b]) else []


@words
def qk_sparse(c, kept_q, kept_k):
    return each(lambda q: [k for k in np.flatnonzero(kept_k) if k <= q] if kept_q[q] else [])


@words
def tree(c, anc, p):
    return each(lambda q: [*range(p), *(p + np.flatnonzero(anc[q]))])


@words
def draft_blocks(c, p, n):
    blocks = [[p + start + j for j in range(n)] for start in range(0, c.q_len, n)]
    return each(lambda q: [*range(p), *blocks[q // n][: q % n + 1]])


@words
def block_diffusion(c, s, n):
    noised = [range(start, min(start + n, s)) for start in range(0, s, n)]
    clean = [range(s + block.start, s + block.stop) for block in noised]

    def keys(q):
        u = (q if q < s else q - s) // n
        seen = [noised[u], *clean[:u]] if q < s else clean[: u + 1]
        return itertools.chain(*seen)

    return each(keys)


# -- tiles chosen by data -----------------------------------------------------------------------------


def real(tiles, t, size=None):
    return [i * t + j for i in tiles for j in range(t if size is None else size[i])]


@words
def topk_tiles(c, chosen, t, size=None):
    return lambda b, h, q: real(np.flatnonzero(chosen[b, h, q // t]), t, size)


@words
def topk_indices(c, index, t, size=None):
    return lambda b, h, q: real({int(i) for i in index[b, h, q // t]}, t, size)
