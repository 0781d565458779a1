"""Checks of caches before anything is stored, with equal words for every framework."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.runtime.attention.attention import Attention
from frisket.runtime.calls.arrays import BYTES, FLOATS, framework_of
from frisket.runtime.calls.program import check_used
from frisket.runtime.machine.parameters import traced

OF_CACHE = "origin", "sizes", "plan", "layout", "k_scale", "v_scale", "pages"  # keywords that a cache sets itself
ASKED = "return_lse", "return_max", "sinks"  # beside parameters
HEADS = {"bhsd": 1, "bshd": 2}  # where they are in a shape


def check_attention(att: Any, params: Collection[str]) -> None:
    """Raise unless `att` is an attention that reads caches, and `params` has no keyword that a cache sets itself."""
    if not isinstance(att, Attention):
        raise ParameterError(f"att is a {type(att).__name__}; give an attention: frisket.compile({att!r})")
    if att.options.dropout:
        raise ParameterError(
            "a cache is read with an attention without dropout: compile another one for inference, without dropout="
        )
    if taken := sorted(n for n in att.program.names if n.startswith("cache_")):
        raise ParameterError(f"`{taken[0]}` is a name of the caches' own; rename it, for example `my_{taken[0]}`")
    if own := [n for n in OF_CACHE if n in params and n not in att.program.names]:
        raise ParameterError(
            f"`{own[0]}` is given, and a cache knows it itself: where its tokens are, and how they are stored\n"
            "  leave it out, or call the attention on arrays"
        )
    check_used([n for n in params if n not in ASKED], att.program.names)
    captured = att.program.captured
    if missing := [n for p in att.program.parts for n in p.unbound if n not in params and n not in captured]:
        raise ParameterError(f"`{missing[0]}` has no value; give it: {missing[0]}=<number or array>")


def check_queries(
    att: Any, q: Any, like: Any, layout: str, batch: int, params: Mapping[str, Any], tree: Any = None
) -> None:
    """Raise for queries, and trees of them, that do not fit a cache with keys like `like`."""
    key = "asked of a cache", *params
    if not isinstance(att, Attention) or key not in att.ready:
        check_attention(att, params)
        att.ready[key] = True
    shape, heads, kv_heads = tuple(getattr(q, "shape", ())), HEADS[layout], like.shape[HEADS[layout]]
    dim = like.shape[3]
    if len(shape) != 4 or shape[0] != batch or shape[3] != dim or shape[heads] % kv_heads or 0 in shape:
        many = f"{kv_heads} n"
        axes, want = ("heads, new", f"{many}, new") if heads == 1 else ("new, heads", f"new, {many}")
        raise ShapeError(
            f"q {_said(q)}; queries of this cache are [batch, {axes}, head_dim] = [{batch}, {want}, {dim}]"
        )
    if shape[heads] != kv_heads and not att.options.enable_gqa:
        raise ShapeError(f"{shape[heads]} query heads share {kv_heads} key heads and enable_gqa is False")
    if q.dtype != like.dtype:
        have, held = (str(x.dtype).removeprefix("torch.") for x in (q, like))
        if have not in FLOATS or held not in BYTES:
            raise ShapeError(f"q is {have}, and this cache holds {held}; convert q, or make a cache of its dtype")
    if tree is not None:
        check_tree(tree, batch, shape[3 - heads])


def check_tree(parents: Any, batch: int, new: int) -> None:
    """Raise unless these are parents of `new` queries, int [new] or [batch, new], -1 for a root. Values that are
    traced, or on a device of torch, are not looked at."""
    away = traced(parents) or (framework_of(parents) == "torch" and parents.device.type != "cpu")
    known = parents if away else np.asarray(parents)
    kind = str(known.dtype).removeprefix("torch.")
    if tuple(known.shape) not in ((new,), (batch, new)) or "int" not in kind:
        raise ShapeError(
            f"a tree is parents, integers [new] or [batch, new], for {batch} x {new} queries; these are "
            f"{kind}{list(known.shape)}"
        )
    if away:
        return
    if known.min() < -1 or known.max() >= new:
        raise ShapeError(f"parents of {new} nodes are from 0 to {new - 1}, and -1 for a root, not {known.tolist()}")
    above = known.astype(np.int64)
    for _ in range(new.bit_length()):  # 1, 2, 4, ... edges up
        above = np.where(above < 0, -1, np.take_along_axis(above, np.maximum(above, 0), -1))
    if (above >= 0).any():
        node = int(np.argwhere(above >= 0)[0, -1])
        raise ShapeError(f"node {node} of a tree leads back to itself, and no way up to a root: {known.tolist()}")


def check_path(path: Any, drafted: Any, counts: Any, lengths: Any) -> None:
    """Raise unless the first `counts` entries of paths int [batch, m] are nodes of the last `drafted` of `lengths`
    tokens. Each argument is an array of numpy, or None where its values are not known."""
    if drafted is None:
        return
    if lengths is not None and (drafted > lengths).any():
        told, have = np.broadcast_to(drafted, lengths.shape).tolist(), lengths.tolist()
        raise ShapeError(f"drafted are {told}, the last of {have} tokens; there are not as many")
    if path is None or counts is None:
        return
    most, place = np.broadcast_to(drafted, len(path))[:, None], np.arange(path.shape[1])
    wrong = ((path < 0) | (path >= most) | (place >= most)) & (place < counts[:, None])
    if wrong.any():
        b, i = np.argwhere(wrong)[0]
        raise ShapeError(
            f"path[{b}, {i}] is node {path[b, i]}, and the tree of sequence {b} has {most[b, 0]} nodes, from 0; say "
            "by `counts` how many entries of a path are meant"
        )


def check_beside(q: Any, k: Any, layout: str) -> None:
    """Refuse queries of other tokens than the new ones, where both are padded alike, or read before they are stored."""
    at = 3 - HEADS[layout]
    if len(k.shape) == 4 and q.shape[at] != k.shape[at]:
        raise ShapeError(f"q has {q.shape[at]} tokens, k and v {k.shape[at]}; here they have as many, a query for each")


def refuse_tree(tree: Any) -> None:
    """Refuse a tree of drafted tokens in a ring cache."""
    if tree is not None:
        raise ParameterError("drafts of a tree would overwrite the oldest tokens of a ring; take a KVCache")


def check_new(k: Any, v: Any, layout: str, batch: int, kv_heads: int, head_dim: int, v_dim: int) -> int:
    """How many new tokens a sequence, of k [batch, kv_heads, new, head_dim], or with heads behind tokens, and v."""
    new: Any = None
    for name, x, dim in (("k", k, head_dim), ("v", v, v_dim)):
        shape = tuple(getattr(x, "shape", ()))
        if new is None:
            new = shape[3 - HEADS[layout]] if len(shape) == 4 else "new"
        want = (batch, kv_heads, new, dim) if layout == "bhsd" else (batch, new, kv_heads, dim)
        if shape != want:
            axes = "batch, kv_heads, new" if layout == "bhsd" else "batch, new, kv_heads"
            raise ShapeError(
                f"{name} {_said(x)}; new tokens for this cache are [{axes}, dim] = [{', '.join(map(str, want))}]"
            )
    return int(new)


def _said(x: Any) -> str:
    return f"has the shape {tuple(x.shape)}" if hasattr(x, "shape") else f"is a {type(x).__name__}"
