"""Positions of stored keys and new queries: a user's attention, read at the positions that the places of a cache hold.
Also the checks before anything is stored, with equal words for every framework.

One mask serves prefill, chunked prefill and decode: it speaks of positions in the sequence, and arrays of a cache
hold some of them, in an order of their own. `placed` gives the same attention in places:

>>> import frisket as fk
>>> placed(fk.compile("causal & window(64)"), APPENDED)
Attention(mask = causal(q = q + cache_start[b]) & window(64, q = q + cache_start[b]) & k < cache_end[b])

Tables of a call with it, Int [batch]: `cache_start`, the position of the first query of every sequence, and
`cache_end`, how many tokens of it are stored. Other values do not recompile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from numbers import Real
from operator import and_
from typing import Any

import numpy as np

from frisket.dsl.errors import FrisketError, ParameterError, ShapeError
from frisket.dsl.ir import clauses, names_of, uses
from frisket.dsl.program import Declared
from frisket.dsl.types import INT
from frisket.lowering.dtypes import BYTES, FLOATS
from frisket.runtime.attention.attention import Attention
from frisket.runtime.calls.arrays import framework_of
from frisket.runtime.calls.program import CallProgram, check_used
from frisket.runtime.machine.parameters import traced
from frisket.runtime.masks.mask import Mask, mask

Params = Mapping[str, Any]  # keywords of a call of the attention
START, END, NEW = "cache_start", "cache_end", "cache_new"
DEPTH, ANCESTORS = "cache_depth", "cache_ancestors"
BATCH, HEAD, FIRST = "cache_batch", "cache_head", "cache_first"  # numbers: where the part of a device begins
# requests of a serving engine, one after another: keys [LOW, HIGH) of a query's request, and the query's position AT
LOW, HIGH, SHIFT, AT = "request_low", "request_high", "request_shift", "request_at"
POSITIONS = (START, END, DEPTH, FIRST, LOW, HIGH, SHIFT, AT)
LONGEST = 1 << 28  # tokens of a sequence: planners of 32 bits hold their differences
HORIZON = 1 << 20  # positions that are looked at to find how far back a mask sees
SINK_KEYS = 1024  # keys at the start of a sequence that a mask may show at any distance, as sinks


@dataclass(frozen=True)
class PositionMap:
    """Texts: the position at place q of the queries, the position at place k of the keys, and `seen`, a mask of the
    places that hold a token. `b` and `h` are the batch entry and the head, for a part of a batch and of heads."""

    q: str
    k: str
    seen: str
    b: str = "b"
    h: str = "h"


# new tokens are stored behind the earlier ones
APPENDED = PositionMap(f"q + {START}[b]", "k", f"k < {END}[b]")
# sequences get different numbers of new tokens: queries past the last are padding and see nothing
PADDED = PositionMap(APPENDED.q, "k", f"k < {END}[b] & q < {END}[b] - {START}[b]")
# new tokens among themselves
CHUNK = PositionMap(APPENDED.q, f"k + {START}[b]", f"k < {END}[b] - {START}[b] & q < {END}[b] - {START}[b]")
# the part of one device out of several: keys from position cache_first on
_PART = f"k + {FIRST}", f"k + {FIRST} < {END}[b]", f"b + {BATCH}", f"h + {HEAD}"
SHARD = PositionMap(APPENDED.q, *_PART)
SHARD_PADDED = replace(SHARD, seen=f"{SHARD.seen} & q < {END}[b] - {START}[b]")

# a tree of draft tokens behind the prefix: its depth gives a token its position; it sees the prefix and its ancestors
_DRAFT = f"{START}[b] + {DEPTH}"
TREE = PositionMap(
    f"{_DRAFT}[q]",
    f"k if k < {START}[b] else {_DRAFT}[k - {START}[b]]",
    f"k < {END}[b] & tree({ANCESTORS}, {START}[b])",
)
# every sequence has another tree
_HERE = f"k < {END}[b] & (k < {START}[b] | {ANCESTORS}[b, q, k - {START}[b]])"
TREES = PositionMap(f"{_DRAFT}[b, q]", f"k if k < {START}[b] else {_DRAFT}[b, k - {START}[b]]", _HERE)

# requests of any lengths in one row of queries and one of keys: query q is at position request_at[q] of its request,
# whose keys are at places request_low[q] to request_high[q], the one of position p at p + request_shift[q]
REQUESTS = PositionMap(f"{AT}[q]", f"k - {SHIFT}[q]", f"k >= {LOW}[q] & k < {HIGH}[q]")
# the same with one query of every request, which are the batch: no query's tile reaches over keys of two requests
STEPS = PositionMap(f"{AT}[b]", f"k - {SHIFT}[b]", f"k >= {LOW}[b] & k < {HIGH}[b]")


def ring(slots: int, padded: bool = False) -> PositionMap:
    """A ring of the last `slots` tokens: slot s holds the last position p < cache_end with p = s (mod slots).

    `padded`: queries past the last of a sequence see nothing."""
    seen = PADDED.seen if padded else APPENDED.seen
    return PositionMap(APPENDED.q, f"{END}[b] - 1 - ({END}[b] - 1 - k) % {slots}", seen)


def ring_before(slots: int) -> PositionMap:
    """A ring as it is before `cache_new` tokens of every sequence, those of the queries, are written."""
    return PositionMap(APPENDED.q, ring(slots).k, f"{APPENDED.seen} & q < {NEW}[b]")


def placed(att: Attention, places: PositionMap) -> Attention:
    """`att` at the positions that `places` hold; made once for each attention."""
    key = "placed", places
    if key not in att.calls:
        att.calls[key] = _placed(att, places)
    placed_att: Attention = att.calls[key]
    return placed_att.now() if placed_att.rereads else placed_att


def _placed(att: Attention, places: PositionMap) -> Attention:
    occupied = mask(places.seen)
    positions = {n: x for n in "bhqk" if (x := getattr(places, n)) != n}
    seen = occupied if att.mask is None else att.mask.at(**positions) & occupied
    ranks = {n: rank for n, (rank, _) in names_of(seen.expr).items() if n in POSITIONS and rank is not None}
    known = {n: Declared(rank, INT, most=LONGEST) for n, rank in ranks.items()}
    seen = Mask(seen.expr, seen.params, replace(seen.origin, declared={**seen.origin.declared, **known}))
    return Attention(CallProgram(seen, att.score and att.score.at(**positions), unwritten=True), att.options)


def require_room(att: Attention, slots: int, new: int, params: Params) -> None:
    """Raise `ShapeError` unless a ring of `slots` tokens, `new` just written, holds all `att` with `params` sees."""
    if why := no_room(att, slots, new, params):
        raise ShapeError(why)


def no_room(att: Attention, slots: int, new: int, params: Params) -> str:
    """A reason why new tokens do not fit, or an empty text.

    Parts of the mask that read tables are left out of the question, which makes the answer safe, not exact; positions
    are looked at up to 2**20."""
    return _reason(att, params, _no_room, slots, new)


def not_served(att: Attention, params: Params) -> str:
    """A reason why a serving engine cannot run `att` for requests that share a batch and are read in chunks, or an
    empty text: positions of a batch and lengths change at every step, and a chunk has no later tokens to see."""
    return _reason(att, params, _not_served)


def _reason(att: Attention, params: Params, ask: Callable[..., str], *sizes: int) -> str:
    """The answer about the program of `att` with the numbers in `params`; asked once for each of them."""
    numbers = [(n, x) for n, x in params.items() if isinstance(x, Real) and n in att.program.names] if params else ()
    key = ask.__name__, *sizes, *numbers
    if key not in att.calls:
        att.calls[key] = ask(att.program.bind(dict(numbers)), *sizes)
    return str(att.calls[key])


def _not_served(program: CallProgram) -> str:
    for part in program.parts:
        if names := sorted({"b", "B", "Q_LEN", "KV_LEN"} & uses(part.expr)):
            text = f"the {part.what} reads {names[0]}, which changes from step to step of a serving "
            return f"{text}engine\n  {part}\n  write it with positions q and k in a request, heads, and numbers"
    known = _of_numbers(program.mask)
    try:
        answer: Any = known is not None and known.implies("q >= k", HORIZON, HORIZON)
    except FrisketError as error:
        return f"whether the mask is causal is not known: {error}\n  add `causal & ` to it"
    if not answer:
        text = "a mask of a serving engine has to be causal: a prompt that is read in chunks has no later tokens to see"
        return f"{text}\n  {'everything is seen' if program.mask is None else program.mask}\n  add `causal & ` to it"
    return ""


def _no_room(program: CallProgram, slots: int, new: int) -> str:
    room = f"with {new} new ones keeps {max(slots - new, 0)} before them" if new else f"keeps {slots} before new ones"
    statement = f"a ring of {slots} tokens {room}"
    help = "make the ring larger, the chunk shorter, or add `& window(w)` to the mask"
    for part in program.parts:
        if sizes := sorted({"Q_LEN", "KV_LEN"} & uses(part.expr)):
            raise ParameterError(f"the {part.what} reads {sizes[0]}, and what a ring holds has no length\n  {part}")
    known = _of_numbers(program.mask)
    if known is None:
        return f"{statement}, and nothing but tables says how far back the mask sees\n  {help}"
    try:
        answer: Any = known.implies(f"q - k <= {slots - new}", HORIZON, HORIZON)
    except FrisketError as error:
        return f"{statement}; how far back the mask sees is not known: {error}\n  {help}"
    if answer:
        return ""
    if (known & f"k >= {SINK_KEYS}").implies(f"q - k <= {slots - new}", HORIZON, HORIZON):
        help = "the first keys stay visible, and a ring drops them: use a KVCache or a PagedKVCache"
    _, _, q, k = answer.witness
    return f"{statement}, and the mask lets query {q} see key {k}, {q - k} before it\n  {program.mask}\n  {help}"


def _of_numbers(seen: Mask | None) -> Mask | None:
    """The clauses of a mask that read numbers alone, all known: it shows what they show, or less."""
    if seen is None:
        return None
    parts = (Mask(e, {n: x for n, x in seen.params.items() if n in names_of(e)}) for e in clauses(seen.expr))
    known = [p for p in parts if not p.unbound and not p.tables]
    return reduce(and_, known) if known else None


OF_CACHE = "origin", "sizes", "plan", "layout", "k_scale", "v_scale", "pages"  # keywords that a cache sets itself
CALL_KEYWORDS = "return_lse", "return_max", "sinks"  # beside parameters
HEADS = {"bhsd": 1, "bshd": 2}  # where they are in a shape


def check_attention(att: Any, params: Collection[str]) -> None:
    """Raise unless `att` is an attention that reads caches, and `params` has no keyword that a cache sets itself."""
    if not isinstance(att, Attention):
        raise ParameterError(f"att is a {type(att).__name__}; give an attention: frisket.compile({att!r})")
    if att.options.dropout:
        text = "a cache is read with an attention without dropout: compile another one for inference, without dropout="
        raise ParameterError(text)
    if clashes := sorted(n for n in att.program.names if n.startswith("cache_")):
        raise ParameterError(f"`{clashes[0]}` is a name of the caches' own; rename it, for example `my_{clashes[0]}`")
    if reserved := [n for n in OF_CACHE if n in params and n not in att.program.names]:
        text = f"`{reserved[0]}` is given, and a cache knows it itself: where its tokens are, and how they are stored\n"
        raise ParameterError(f"{text}  leave it out, or call the attention on arrays")
    check_used([n for n in params if n not in CALL_KEYWORDS], att.program.names)
    captured = att.program.captured
    if missing := [n for p in att.program.parts for n in p.unbound if n not in params and n not in captured]:
        raise ParameterError(f"`{missing[0]}` has no value; give it: {missing[0]}=<number or array>")


def check_queries(att: Any, q: Any, like: Any, layout: str, batch: int, params: Params, tree: Any = None) -> None:
    """Raise for queries, and trees of them, that do not fit a cache with keys like `like`."""
    key = "asked of a cache", *params
    if not isinstance(att, Attention) or key not in att.calls:
        check_attention(att, params)
        att.calls[key] = True
    shape, heads, kv_heads = tuple(getattr(q, "shape", ())), HEADS[layout], like.shape[HEADS[layout]]
    dim = like.shape[3]
    if len(shape) != 4 or shape[0] != batch or shape[3] != dim or shape[heads] % kv_heads or 0 in shape:
        many = f"{kv_heads} n"
        axes, want = ("heads, new", f"{many}, new") if heads == 1 else ("new, heads", f"new, {many}")
        text = f"q {_described(q)}; queries of this cache are [batch, {axes}, head_dim] = [{batch}, {want}, {dim}]"
        raise ShapeError(text)
    if shape[heads] != kv_heads and not att.options.enable_gqa:
        raise ShapeError(f"{shape[heads]} query heads share {kv_heads} key heads and enable_gqa is False")
    if q.dtype != like.dtype:
        have, cache_dtype = (str(x.dtype).removeprefix("torch.") for x in (q, like))
        if have not in FLOATS or cache_dtype not in BYTES:
            text = f"q is {have}, and this cache holds {cache_dtype}; convert q, or make a cache of its dtype"
            raise ShapeError(text)
    if tree is not None:
        check_tree(tree, batch, shape[3 - heads])


def check_tree(parents: Any, batch: int, new: int) -> None:
    """Raise unless these are parents of `new` queries, int [new] or [batch, new], -1 for a root. Values that are
    traced, or on a device of torch, are not looked at."""
    away = traced(parents) or (framework_of(parents) == "torch" and parents.device.type != "cpu")
    known = parents if away else np.asarray(parents)
    kind = str(known.dtype).removeprefix("torch.")
    if tuple(known.shape) not in ((new,), (batch, new)) or "int" not in kind:
        text = f"a tree is parents, integers [new] or [batch, new], for {batch} x {new} queries; these are "
        raise ShapeError(f"{text}{kind}{list(known.shape)}")
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


def of_tree(parents: Any, places: Any, int32: Any) -> tuple[PositionMap, dict[str, Any]]:
    """The positions of a tree of drafts whose node i hangs below parents[..., i], -1 for a root, and its tables:
    whether node j is node i or above it, Bool [..., n, n], and depths int32 [..., n], 0 for a root.

    `places` are 0 to n - 1 and `int32` the dtype, of the framework of `parents`."""
    above = (parents[..., None] == places) | (places[:, None] == places)
    for _ in range(max(len(places) - 1, 1).bit_length()):  # paths of 1, 2, 4, ... edges
        reach = above * 1.0  # torch multiplies no matrices of Bools, nor of ints on GPUs
        above = (reach @ reach) > 0
    tables = {ANCESTORS: above, DEPTH: above.sum(-1, dtype=int32) - 1}
    return TREE if parents.ndim == 1 else TREES, tables


def check_path(path: Any, drafted: Any, counts: Any, lengths: Any) -> None:
    """Raise unless the first `counts` entries of paths int [batch, m] are nodes of the last `drafted` of `lengths`
    tokens. Each argument is an array of numpy, or None where its values are not known."""
    if drafted is None:
        return
    if lengths is not None and (drafted > lengths).any():
        drafts, have = np.broadcast_to(drafted, lengths.shape).tolist(), lengths.tolist()
        raise ShapeError(f"drafted are {drafts}, the last of {have} tokens; there are not as many")
    if path is None or counts is None:
        return
    most, place = np.broadcast_to(drafted, len(path))[:, None], np.arange(path.shape[1])
    wrong = ((path < 0) | (path >= most) | (place >= most)) & (place < counts[:, None])
    if wrong.any():
        b, i = np.argwhere(wrong)[0]
        text = f"path[{b}, {i}] is node {path[b, i]}, and the tree of sequence {b} has {most[b, 0]} nodes, from 0; say "
        raise ShapeError(f"{text}by `counts` how many entries of a path are meant")


def check_same_tokens(q: Any, k: Any, layout: str) -> None:
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
            text = f"{name} {_described(x)}; new tokens for this cache are [{axes}, dim] = "
            raise ShapeError(f"{text}[{', '.join(map(str, want))}]")
    return int(new)


def _described(x: Any) -> str:
    return f"has the shape {tuple(x.shape)}" if hasattr(x, "shape") else f"is a {type(x).__name__}"
