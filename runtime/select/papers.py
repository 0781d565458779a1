"""Choices of published methods: MoBA, NSA, Quest, DSA, XAttention, MInference."""

from __future__ import annotations

import math
from typing import Any

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.runtime.calls.arrays import scale_of

from .blocks import (
    Array,
    arange,
    as_dtype,
    as_heads_first,
    blocks,
    check_tokens,
    choose,
    chosen_of,
    detached,
    log_weights,
    products_of,
    promoted,
)


def moba(q: Array, k: Array, block: int = 512, keep: int = 3, *, axes: str | None = None) -> Array:
    """Mixture of block attention: for each query, its own block and the best `keep` - 1 blocks before it.

    >>> import frisket as fk, torch
    >>> q, k, v = torch.randn(3, 1, 2, 256, 16)
    >>> map = moba(q, k, block=32, keep=3)
    >>> fk.attention(q, k, v, "causal & map[b, h, q, k // 32]", map=map).shape
    torch.Size([1, 2, 256, 16])

    The score of a block is the product of the query with the mean of its keys. Heads choose for themselves.

    Args:
        q, k, axes: As of `scores`.
        block: Keys of a block, in tokens.
        keep: Blocks of a query, its own counted.

    Returns:
        Bool [batch, heads, queries, key blocks].

    E. Lu et al., MoBA: Mixture of Block Attention for Long-Context LLMs, 2025, arXiv 2502.13189.
    """
    return blocks(q, k, (1, block), keep=keep, always="window(1)", share="head", axes=axes)


@promoted
def nsa(
    q: Array,
    k: Array,
    *,
    length: int = 32,
    stride: int = 16,
    block: int = 64,
    keep: int = 16,
    first: int = 1,
    last: int = 2,
    scale: float | None = None,
    axes: str | None = None,
) -> Array:
    """Native sparse attention: for each query, blocks chosen by its attention to compressed keys.

    >>> import torch
    >>> q, compressed = torch.randn(1, 4, 256, 16), torch.randn(1, 1, 15, 16)  # 15 spans of 32 keys, one every 16
    >>> nsa(q, compressed, block=32, keep=4).shape
    torch.Size([1, 4, 256, 8])

    A block's importance adds the weights of the compressed keys that overlap it, once for each common piece of `stride`
    keys, over the heads of a group. The first block and the last two are always taken.

    Args:
        q: Queries.
        k: Compressed keys: key i stands for keys `stride` i to `stride` i + `length` - 1. A query sees it when it has
            passed all of them.
        length, stride: Keys of a compressed key, and from one to the next, in tokens. `stride` divides `length` and
            `block`.
        block: Keys of a block, in tokens.
        keep: Blocks of a query, the `first` and `last` ones counted.
        first, last: Blocks at the beginning, and before and with the query, that are always taken.
        scale: As of `scores`.
        axes: As of `scores`.

    Returns:
        Bool [batch, heads, queries, key blocks], equal in the heads of a group.

    J. Yuan et al., Native Sparse Attention, 2025, arXiv 2502.11089, equations 8 to 12.
    """
    xp, (q, k), _ = as_heads_first(axes, q=q, k=k)
    for name, n in (("length", length), ("stride", stride), ("block", block)):
        check_tokens(name, n)
    if length % stride or block % stride:
        raise ParameterError(f"stride is {stride}; it divides length, {length}, and block, {block}")
    tokens, spans = q.shape[2], k.shape[2]
    if spans != max((tokens - length) // stride + 1, 0):
        text = f"k has {spans} compressed keys; {tokens} queries have {max((tokens - length) // stride + 1, 0)}"
        raise ShapeError(f"{text} spans of {length} keys, one every {stride}")
    products = products_of(xp, detached(q), detached(k), scale)
    ends, at = (arange(xp, n, q)[:, None] for n in (spans, tokens))
    passed = (stride * ends.swapaxes(0, 1) + (length - 1) <= at)[None, None]
    weights = xp.exp(log_weights(xp, xp.where(passed, products, -math.inf)))
    pieces, columns = block // stride, -(-tokens // block)
    zeros = xp.zeros_like(weights[..., :1])
    parts = []
    for i in range(length // stride):  # compressed key c covers the pieces c, c + 1, ...
        behind = columns * pieces - spans - i
        padded = [zeros] * i + [weights[..., : spans + min(behind, 0)]] + [zeros] * max(behind, 0)
        parts.append(xp.concatenate(padded, -1))
    importance = sum(parts[1:], parts[0]).reshape(*weights.shape[:-1], columns, pieces).sum(-1)
    batch, heads, groups = q.shape[0], q.shape[1], k.shape[1]
    importance = importance.reshape(batch, groups, heads // groups, tokens, columns).sum(2)
    logs = xp.log(xp.where(importance > 0, importance, 1.0))
    logs = xp.where(importance > 0, logs, -1e30)  # a block that no compressed key overlaps comes last
    always = f"k // {block} < {first} | k // {block} > q // {block} - {last}"
    map = choose(logs, (1, block), keep=keep, always=always, q_len=tokens, kv_len=tokens)
    whole = (batch, groups, heads // groups, tokens, columns)
    return xp.broadcast_to(map[:, :, None], whole).reshape(batch, heads, tokens, columns)


@promoted
def quest(
    q: Array,
    low: Array,
    high: Array,
    page: int = 16,
    *,
    scale: float | None = None,
    axes: str | None = None,
    **choice: Any,
) -> Array:
    """Pages of a KV cache for each query, by an upper bound of the scores of their keys.

    >>> import frisket as fk, torch
    >>> q, k, v = torch.randn(1, 4, 1, 32), *torch.randn(2, 1, 4, 300, 32)  # a step of decoding over 300 keys
    >>> from frisket.select import pooled
    >>> low, high = pooled(k, 16, "min"), pooled(k, 16, "max")  # kept per page
    >>> map = quest(q, low, high, page=16, keep=4, mask="full", kv_len=300)
    >>> fk.attention(q, k, v, "map[b, h, 0, k // 16]", map=map).shape
    torch.Size([1, 4, 1, 32])

    The bound is the sum over dimensions of max(q low, q high): no key of the page has a larger product.

    Args:
        q: Queries.
        low, high: The least and the largest key of every page, dimension by dimension.
        page: Tokens of a page.
        scale, axes: As of `scores`.
        **choice: As of `choose`: `keep`, `mask`, `always`, `share`, `kv_len`, ...

    Returns:
        Bool [batch, heads, queries, pages].

    J. Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, 2024, arXiv 2406.10774.
    """
    xp, (q, low, high), _ = as_heads_first(axes, q=q, low=low, high=high)
    if low.shape != high.shape:
        raise ShapeError(f"low is {list(low.shape)} and high {list(high.shape)}; they describe the same pages")
    q = detached(q)
    above, below = xp.where(q > 0, q, 0), xp.where(q < 0, q, 0)
    bounds = products_of(xp, above, detached(high), scale) + products_of(xp, below, detached(low), scale)
    choice = {"q_len": q.shape[2], "kv_heads": low.shape[1], **choice}
    return choose(bounds, (1, page), **choice)


@promoted
def lightning(q: Array, k: Array, weights: Array, keep: int = 2048, *, axes: str | None = None, **choice: Any) -> Array:
    """Tokens for each query, by the lightning indexer of DeepSeek sparse attention (DSA).

    >>> import frisket as fk, torch
    >>> iq, ik, w = torch.randn(1, 4, 128, 8), torch.randn(1, 1, 128, 8), torch.rand(1, 4, 128)
    >>> tokens = lightning(iq, ik, w, keep=32)
    >>> q, k, v = torch.randn(3, 1, 2, 128, 16)
    >>> fk.attention(q, k, v, "causal & tokens[b, 0, q, k]", tokens=tokens).shape
    torch.Size([1, 2, 128, 16])

    The score of a token is the sum over the indexer's heads of weight * relu(query . key). One table serves all heads
    of the attention. It has an entry for every query and key: 4 GiB for 65,536 of both.

    Args:
        q, k: Queries and keys of the indexer, whose keys have one head.
        weights: [batch, heads, queries] of the indexer, in torch and JAX.
        keep: Tokens of a query.
        axes: As of `scores`.
        **choice: As of `choose`: `mask`, `always`, ...

    Returns:
        Bool [batch, 1, queries, keys].

    DeepSeek-AI, DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency with DeepSeek Sparse Attention, 2025, equation 1.
    """
    xp, (q, k), _ = as_heads_first(axes, q=q, k=k)
    if tuple(weights.shape) != tuple(q.shape[:3]):
        raise ShapeError(f"weights is {list(weights.shape)}; it is [batch, heads, queries], {list(q.shape[:3])}")
    products = products_of(xp, detached(q), detached(k), 1.0)
    weights = as_dtype(detached(weights), products.dtype)[..., None]
    index = (xp.where(products > 0, products, 0.0) * weights).sum(1)[:, None]
    return choose(index, 1, keep=keep, **choice)


@promoted
def antidiagonal(
    q: Array,
    k: Array,
    block: int = 128,
    stride: int = 8,
    *,
    scale: float | None = None,
    axes: str | None = None,
    **choice: Any,
) -> Array:
    """XAttention: blocks by the weights of antidiagonals, of which one pair in `stride` is computed.

    >>> import torch
    >>> q, k = torch.randn(2, 1, 4, 512, 32)
    >>> antidiagonal(q, k, block=64, stride=8, mass=0.9).shape
    torch.Size([1, 4, 8, 8])

    In squares of `stride` x `stride` pairs the products on the antidiagonal are added and divided by `stride`. The
    softmax over the squares of a row gives weights, which a block adds up. Squares above the diagonal are left out.

    Args:
        q, k, scale, axes: As of `scores`; both have the same length, a multiple of `stride`.
        block: Tokens of a block, a multiple of `stride`.
        stride: Tokens of a side of a square.
        **choice: As of `choose`: `mass` (0.9 in the paper), `always`, `share`, ... The mask is causal.

    Returns:
        Bool [batch, heads, query blocks, key blocks], for `topk_tiles(map, block)`.

    R. Xu et al., XAttention: Block Sparse Attention with Antidiagonal Scoring, 2025, arXiv 2503.16428.
    """
    xp, (q, k), _ = as_heads_first(axes, q=q, k=k)
    check_tokens("block", block)
    check_tokens("stride", stride)
    tokens = q.shape[2]
    if block % stride or tokens % stride or k.shape[2] != tokens:
        text = f"stride is {stride}; it divides block, {block}, and the length of q and k, {tokens} and {k.shape[2]}"
        raise ShapeError(f"{text}, which are the same")
    dim, pieces, rows = q.shape[3], block // stride, -(-tokens // block)
    # a square is one product of `stride` queries, from the last to the first, with as many keys
    across = detached(q).reshape(*q.shape[:2], tokens // stride, stride, dim)
    across = xp.flip(across, (3,)).reshape(*q.shape[:2], tokens // stride, stride * dim)
    along = detached(k).reshape(*k.shape[:2], tokens // stride, stride * dim)
    squares = tokens // stride
    scale = (1.0 / math.sqrt(dim) if scale is None else scale_of(scale, known=True)) / stride
    products = products_of(xp, across, along, scale)
    at = arange(xp, squares, q)
    weights = xp.exp(log_weights(xp, xp.where((at[:, None] >= at[None])[None, None], products, -math.inf)))
    missing = rows * pieces - squares  # of the last block
    if missing:
        weights = xp.concatenate([weights, xp.zeros_like(weights[..., [0] * missing, :])], 2)
        weights = xp.concatenate([weights, xp.zeros_like(weights[..., [0] * missing])], 3)
    weights = weights.reshape(*weights.shape[:2], rows, pieces, rows, pieces).sum(5).sum(3)
    logs = xp.where(weights > 0, xp.log(xp.where(weights > 0, weights, 1.0)), -1e30)
    return choose(logs, block, kv_heads=k.shape[1], q_len=tokens, kv_len=tokens, **choice)


@promoted
def vertical_slash(
    q: Array,
    k: Array,
    vertical: int = 1000,
    slash: int = 6096,
    *,
    last: int = 64,
    sinks: int = 30,
    window: int = 100,
    scale: float | None = None,
    axes: str | None = None,
) -> tuple[Array, Array]:
    """MInference: the keys and the distances with the most weight in the rows of the last queries.

    >>> import frisket as fk, torch
    >>> q, k, v = torch.randn(3, 1, 2, 256, 16)
    >>> vertical, slash = vertical_slash(q, k, 40, 20, sinks=4, window=10)
    >>> seen = "causal & (vertical[b, h, k] | slash[b, h, q - k])"
    >>> fk.attention(q, k, v, seen, vertical=vertical, slash=slash).shape
    torch.Size([1, 2, 256, 16])

    Args:
        q, k, scale, axes: As of `scores`; both have the same length.
        vertical: Keys that every query sees, `sinks` counted.
        slash: Distances at which every query sees a key, `window` counted.
        last: Queries at the end whose causal attention decides.
        sinks: The first keys, always taken.
        window: The shortest distances, always taken.

    Returns:
        (vertical, slash): Bool [batch, heads, keys] and Bool [batch, heads, distances].

    H. Jiang et al., MInference 1.0, 2024, arXiv 2407.02490, algorithm 2.
    """
    xp, (q, k), _ = as_heads_first(axes, q=q, k=k)
    tokens = q.shape[2]
    if k.shape[2] != tokens:
        raise ShapeError(f"q has {tokens} tokens and k {k.shape[2]}; they have the same length")
    for name, n in (("vertical", vertical), ("slash", slash), ("last", last)):
        check_tokens(name, n)
    last = min(last, tokens)
    products = products_of(xp, detached(q)[:, :, tokens - last :], detached(k), scale)
    at, rows = arange(xp, tokens, q)[None], arange(xp, last, q)[:, None] + (tokens - last)
    weights = xp.exp(log_weights(xp, xp.where((rows >= at)[None, None], products, -math.inf)))
    # by distance: in rows that are one entry shorter, each row begins one place further on than the row above
    zeros = xp.zeros_like(weights[..., [0] * last])
    backwards = xp.concatenate([xp.flip(weights, (3,)), zeros], -1).reshape(*weights.shape[:2], -1)
    width = tokens + last - 1
    diagonals = backwards[..., : last * width].reshape(*weights.shape[:2], last, width).sum(2)[..., last - 1 :]
    tables = []
    for sums, n, first in ((weights.sum(2), vertical, sinks), (diagonals, slash, window)):
        forced = (at < first)[None]
        tables.append(chosen_of(xp, sums, None, forced, ("keep", n)))
    return tables[0], tables[1]
