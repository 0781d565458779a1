"""Positions of stored keys and new queries: a user's attention, read at the positions that the places of a cache hold.
Also the checks before anything is stored, with equal words for every framework.

One mask serves prefill, chunked prefill and decode: it speaks of positions in the sequence, and arrays of a cache
hold some of them, in another order. `placed` gives the same attention in places:

>>> import frisket as fk
>>> placed(fk.compile("causal & window(64)"), APPENDED)
Attention(mask = causal(q = q + cache_start[b]) & window(64, q = q + cache_start[b]) & k < cache_end[b])

Tables of a call with it, Int [batch]: `cache_start`, the position of the first query of every sequence, and
`cache_end`, how many tokens of it are stored. Other values do not recompile.
"""

from __future__ import annotations

from bisect import bisect_left
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
from frisket.runtime.attention.statistics import Statistics, Wanted
from frisket.runtime.calls.arrays import framework_of
from frisket.runtime.calls.program import CallProgram, check_used
from frisket.runtime.machine.parameters import traced
from frisket.runtime.masks.mask import Mask, mask

Params = Mapping[str, Any]  # keywords of a call of the attention
START, END, NEW = "cache_start", "cache_end", "cache_new"
DEPTH, ANCESTORS = "cache_depth", "cache_ancestors"
FROM, RING_PAGE = "cache_from", 16  # where an `invariant` ring begins to read keys, and the tokens that it calls a page
DROPPED = "cache_dropped"  # tokens of a ring between its sinks and the oldest that it holds
BATCH, HEAD, FIRST = "cache_batch", "cache_head", "cache_first"  # numbers: where the part of a device begins
# requests of a serving engine, one after another: keys [LOW, HIGH) of a query's request, and the query's position AT
LOW, HIGH, SHIFT, AT = "request_low", "request_high", "request_shift", "request_at"
# queries of several rows over a prefix that these rows share: the row of a query, its position, and how many tokens of
# the prefix it sees. The tokens behind the prefix begin at SKIP
ROW, PLACE, STOP, SKIP = "cache_row", "cache_place", "cache_stop", "cache_skip"
BLOCK = "cache_block"  # which block of its sequence is read at a place: some are left out
POSITIONS = (START, END, DEPTH, DROPPED, FROM, FIRST, LOW, HIGH, SHIFT, AT, ROW, PLACE, STOP, SKIP, BLOCK)
LONGEST = 1 << 28  # tokens of a sequence: planners of 32 bits hold their differences
HORIZON = 1 << 20  # positions that are looked at to find how far back a mask sees
SINK_KEYS = 1024  # keys at the start of a sequence that a mask may show at any distance, as sinks


@dataclass(frozen=True)
class PositionMap:
    """Texts: the position at place q of the queries, the position at place k of the keys, and `seen`, a mask of the
    places that hold a token. `b` and `h` are the batch entry and the head, for a part of a batch and of heads. Where
    the mask of the user shows every key, it need not be `masked` by more than `seen`."""

    q: str
    k: str
    seen: str
    b: str = "b"
    h: str = "h"
    masked: bool = True


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

# Requests of any lengths in one row of queries and one of keys. Query q is at position request_at[q] of its request.
# The keys of that are at places request_low[q] to request_high[q], the one of position p at p + request_shift[q].
REQUESTS = PositionMap(f"{AT}[q]", f"k - {SHIFT}[q]", f"k >= {LOW}[q] & k < {HIGH}[q]")
# the same with one query of every request, which are the batch: no query's tile reaches over keys of two requests
STEPS = PositionMap(f"{AT}[b]", f"k - {SHIFT}[b]", f"k >= {LOW}[b] & k < {HIGH}[b]")


PREFIX = PositionMap(f"{PLACE}[b, q]", "k", f"k < {STOP}[b, q]", f"{ROW}[b, q]")
# all queries are behind the whole prefix, and none is padding
WHOLE_PREFIX = replace(PREFIX, seen=f"k < {STOP}[b]")
# and the mask shows every earlier key: from step to step the same keys are seen
SEEN_PREFIX = replace(WHOLE_PREFIX, masked=False)


def behind_prefix(places: PositionMap) -> PositionMap:
    """Places without the first `cache_skip` tokens of each row."""
    return replace(places, seen=f"{places.seen} & k >= {SKIP}[b]")


def of_blocks(page: int, kv_heads: int, group: int) -> PositionMap:
    """Chosen blocks of `page` tokens: the batch are the key heads of a sequence, sequence by sequence, and the heads of
    the call a `group` of query heads.

    >>> of_blocks(16, kv_heads=1, group=2).k
    'cache_block[b, k // 16] * 16 + k % 16'
    """
    position = f"{BLOCK}[b, k // {page}] * {page} + k % {page}"
    return PositionMap(APPENDED.q, position, f"{position} < {END}[b]", h=f"b % {kv_heads} * {group} + h")


def tree_places(each: bool, token: str = "k") -> PositionMap:
    """A tree of drafts behind the prefix: a draft's position is that of the first one plus its depth, and it sees the
    prefix and its ancestors. `each`: every sequence has another tree. `token`: which one place k holds."""
    row, draft = "b, " if each else "", f"{START}[b] + {DEPTH}"
    node = f"{token} - {START}[b]"
    seen = f"{token} < {START}[b] | {ANCESTORS}[{row}q, {node}]"
    position = f"{token} if {token} < {START}[b] else {draft}[{row}{node}]"
    return PositionMap(f"{draft}[{row}q]", position, f"k < {END}[b] & ({seen})")


@dataclass(frozen=True)
class Ring:
    """The slots of a ring: the first `sinks` tokens stay, and the last `window` share the slots behind them.

    >>> ring = Ring(window=4, sinks=2)
    >>> [ring.slot(position) for position in range(10)]
    [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]

    Up to `drafts` of the last tokens may be taken back: what they overwrote counts as gone from the start. Without
    `absolute`, positions count the tokens that the ring holds, as in StreamingLLM."""

    window: int
    sinks: int = 0
    drafts: int = 0
    absolute: bool = True

    def __post_init__(self) -> None:
        """Refuse sizes that leave no ring."""
        for name, least in (("window", 1), ("sinks", 0), ("drafts", 0)):
            n = getattr(self, name)
            if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < least:
                raise ShapeError(f"{name}={n!r} of a ring; it is a number of tokens, {least} or more")
        if self.drafts >= self.window:
            text = f"drafts={self.drafts} leave nothing before them in a ring of window={self.window} tokens"
            raise ShapeError(f"{text}\n  make the window larger: what the mask sees, and the drafts")
        if not isinstance(self.absolute, bool):
            raise ParameterError(f"absolute={self.absolute!r}; give True or False")

    slots = property(lambda self: self.sinks + self.window, doc="Tokens that the ring holds of a sequence.")

    def slot(self, position: Any) -> Any:
        """The slot of a position, for a number or an array of any framework."""
        turn = self.sinks + (position - self.sinks) % self.window
        return turn if not self.sinks else position + (position >= self.sinks) * (turn - position)

    @property
    def token(self) -> str:
        """The token in slot k, the last one before `cache_end` that belongs there."""
        last = f"{END}[b] - 1 - ({END}[b] - 1 - k) % {self.window}"
        return f"(k if k < {self.sinks} else {last})" if self.sinks else f"({last})"

    def places(self, seen: str = APPENDED.seen) -> PositionMap:
        """The positions of queries and slots, of which those that are `seen` hold a token."""
        return self.inside(PositionMap(APPENDED.q, self.token, seen))

    def in_order(self, padded: bool) -> PositionMap:
        """The positions of keys that are read in their order, from position `cache_from` of each sequence on."""
        held, token = (PADDED if padded else APPENDED).seen.removeprefix("k "), f"k + {FROM}[b]"
        return PositionMap(APPENDED.q, token, f"{token} >= {END}[b] - {self.slots} & {token} {held}")

    def check_order(self, att: Attention, tree: Any, rotary: Any) -> None:
        """Refuse what keys in the order of their positions are not read for."""
        lacks = [("sinks", self.sinks), ("absolute=False", not self.absolute), ("a tree", tree is not None)]
        lacks += [
            ("rotary", rotary is not None),
            ("tile", att.options.tile is not None),
            (f"window={self.window}", self.window % RING_PAGE != 0),
        ]
        if why := next((name for name, there in lacks if there), ""):
            raise ParameterError(
                f"an attention with invariant=True reads no ring with {why}: keys have the order of positions\n"
                f"  make a ring of a multiple of {RING_PAGE} tokens without it, or take a KVCache or PagedKVCache"
            )

    def before(self) -> PositionMap:
        """The positions of slots before `cache_new` tokens of every sequence, those of the queries, are written."""
        return self.places(f"{APPENDED.seen} & q < {NEW}[b]")

    def inside(self, places: PositionMap, chunk: bool = False) -> PositionMap:
        """Positions as this ring counts them, of slots or of a `chunk`: it has sinks only where nothing is dropped."""
        if self.absolute:
            return places
        dropped = f"{DROPPED}[b]" if chunk or not self.sinks else f"({DROPPED}[b] if k >= {self.sinks} else 0)"
        return replace(places, q=f"{places.q} - {DROPPED}[b]", k=f"({places.k}) - {dropped}")

    def tables(self, start: Any, end: Any) -> dict[str, Any]:
        """Tables of places, int32 [batch]: the first query's position, and how many tokens are stored."""
        tables = {START: start, END: end}
        return tables if self.absolute else {**tables, DROPPED: (end - self.slots).clip(0)}

    def counted(self, tables: Params, nodes: Any, slots: Any, take: Callable[[Any, Any, int], Any]) -> tuple[Any, Any]:
        """The positions of queries [batch, nodes] and of slots [batch, slots] as numbers, for a rotation of what is
        read. `nodes` and `slots` are 0, 1, ... in the framework of the tables, whose `take` gathers along an axis."""
        start, end = tables[START][:, None], tables[END][:, None]
        late = slots >= self.sinks
        keys = slots + late * (end - 1 - (end - 1 - slots) % self.window - slots)
        queries = start + nodes
        if DEPTH in tables:
            depth = tables[DEPTH] + 0 * start  # [batch, nodes], also where all sequences have one tree
            queries, node = start + depth, (keys - start).clip(0, len(nodes) - 1)
            keys = keys + (keys >= start) * (start + take(depth, node, 1) - keys)
        dropped = tables[DROPPED][:, None] if DROPPED in tables else 0
        # slots without a token, which no query sees, have a position too
        return queries - dropped, (keys - late * dropped).clip(0)

    def no_room(self, att: Attention, new: int, params: Params) -> str:
        """A reason why new tokens do not fit, or an empty text."""
        return no_room(att, self.window, new, params, self.sinks, self.drafts)

    def require_room(self, att: Attention, new: int, params: Params) -> None:
        """Raise `ShapeError` unless the ring, `new` tokens just written, holds all that `att` with `params` sees."""
        if why := self.no_room(att, new, params):
            raise ShapeError(why)

    def check_tree(self, tree: Any, nodes: int = 1) -> None:
        """Refuse a tree of more nodes than can be taken back."""
        if tree is not None and nodes > self.drafts:
            text = f"drafts overwrite the oldest tokens of a ring, and this one has room for {self.drafts}"
            raise ParameterError(f"{text}\n  make it with drafts=<nodes of the largest tree>, or take a KVCache")

    def refuse_shorter(self) -> None:
        """The error of sequences that become shorter by more than `drafts`."""
        most = f"at most {self.drafts} of its last can be taken back" if self.drafts else "it can only be emptied"
        text = f"a ring has overwritten its oldest tokens: {most}"
        raise ParameterError(f"{text}\n  make it with drafts=<the most that are taken back>, or take a KVCache")


def turned(rotary: Callable[[Any, Any], Any], x: Any, at: Any) -> Any:
    """Queries or keys as the user's `rotary` turns them at their positions [batch, tokens]."""
    if not callable(rotary):
        raise ParameterError(f"rotary is a {type(rotary).__name__}; give a function of x and positions that turns x")
    result = rotary(x, at)
    if tuple(getattr(result, "shape", ())) != tuple(x.shape):
        text = f"rotary(x, positions) {_described(result)} for x of the shape {tuple(x.shape)}"
        raise ShapeError(f"{text}; it gives x turned by the positions {list(at.shape)} of its tokens, in x's shape")
    return result


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
    seen = att.mask.at(**positions) & occupied if places.masked and att.mask is not None else occupied
    ranks = {n: rank for n, (rank, _) in names_of(seen.expr).items() if n in POSITIONS and rank is not None}
    known = {n: Declared(rank, INT, most=LONGEST) for n, rank in ranks.items()}
    seen = Mask(seen.expr, seen.params, replace(seen.origin, declared={**seen.origin.declared, **known}))
    score, weight, divide = (p and p.at(**positions) for p in att.program.every_part[1:])
    return Attention(CallProgram(seen, score, unwritten=True, weight=weight, divide=divide), att.options)


def no_room(att: Attention, slots: int, new: int, params: Params, sinks: int = 0, drafts: int = 0) -> str:
    """A reason why new tokens do not fit a ring of the first `sinks` and the last `slots` tokens, or an empty text.

    Parts of the mask that read tables are left out of the question, which makes the answer safe, not exact; positions
    are looked at up to 2**20."""
    return _reason(att, params, _no_room, slots, new, sinks, drafts)


def not_served(att: Attention, params: Params) -> str:
    """A reason why a serving engine cannot run `att` for requests that share a batch and are read in chunks, or an
    empty text. Positions of a batch and lengths change at every step, and a chunk has no later tokens to see."""
    return _reason(att, params, _not_served)


def hides_earlier(att: Attention, params: Params, capacity: int) -> str:
    """A reason why a query of `att` with `params` may not see all earlier keys, at positions below `capacity`, or an
    empty text. A mask that reads tables or lengths counts as one that hides keys."""
    return _reason(att, params, _hides_earlier, capacity)


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


def _hides_earlier(program: CallProgram, capacity: int) -> str:
    seen = program.mask
    if seen is None:
        return ""
    if seen.unbound or seen.tables or {"b", "h", "B", "H", "Q_LEN", "KV_LEN"} & uses(seen.expr):
        return "the mask reads more than positions and numbers"
    try:
        answer: Any = mask("q > k").implies(seen, capacity, capacity)
    except FrisketError as error:
        return f"whether the mask shows all earlier keys is not known: {error}"
    return "" if answer else "the mask hides {3} from query {2}".format(*answer.witness)


def _no_room(program: CallProgram, slots: int, new: int, sinks: int, drafts: int) -> str:
    reach = slots - max(new, drafts)
    what = f"{new} new ones" if new >= drafts else f"{drafts} drafts"
    room = f"with {what} keeps {max(reach, 0)} before them" if new or drafts else f"keeps {slots} before new ones"
    statement = f"a ring of {slots} tokens{f' and the first {sinks}' if sinks else ''} {room}"
    help = "make the ring larger, the chunk shorter, or add `& window(w)` to the mask"
    for part in program.parts:
        if sizes := sorted({"Q_LEN", "KV_LEN"} & uses(part.expr)):
            raise ParameterError(f"the {part.what} reads {sizes[0]}, and what a ring holds has no length\n  {part}")
    known = _of_numbers(program.mask)
    if known is None:
        return f"{statement}, and nothing but tables says how far back the mask sees\n  {help}"

    def far(first: int) -> Any:
        """Whether keys from the position `first` on are seen from farther than the ring reaches."""
        behind = known & f"k >= {first}" if first else known
        answer: Any = behind.implies(f"q - k <= {reach}", HORIZON, HORIZON)
        return None if answer else answer

    try:
        answer = far(sinks)
    except FrisketError as error:
        return f"{statement}; how far back the mask sees is not known: {error}\n  {help}"
    if answer is None:
        return ""
    if far(SINK_KEYS) is None:
        first = bisect_left(range(SINK_KEYS), True, key=lambda n: far(n) is None)
        help = f"the first {first} keys stay visible: make the ring with sinks={first}, which keeps them"
    _, _, q, k = answer.witness
    return f"{statement}, and the mask lets query {q} see key {k}, {q - k} before it\n  {program.mask}\n  {help}"


def _of_numbers(seen: Mask | None) -> Mask | None:
    """The clauses of a mask that read numbers alone, all known: it shows what they show, or less."""
    if seen is None:
        return None
    parts = (Mask(e, {n: x for n, x in seen.params.items() if n in names_of(e)}) for e in clauses(seen.expr))
    known = [p for p in parts if not p.unbound and not p.tables]
    return reduce(and_, known) if known else None


OF_CACHE = "origin sizes plan layout axes k_scale v_scale pages".split()  # keywords that a cache sets itself
CALL_KEYWORDS = "return_lse", "return_max", "sinks", "return_sums"  # with parameters
ASKED = "columns", "entropy", "argmax", "top", "per", "lse"  # keywords of `statistics` that `attend` does not have
HEADS = {"bhsd": 1, "bshd": 2}  # where they are in a shape


def statistics_run(params: dict[str, Any]) -> tuple[Callable[..., Statistics], dict[str, Any]]:
    """The statistics that the keywords of a call of a cache ask for, as a function of an attention and the arguments of
    a call, and the other keywords."""
    chosen = {n: x for n, x in params.items() if n in ASKED}
    columns, entropy, argmax = (chosen.get(n, False) for n in ASKED[:3])
    Wanted.of(columns, entropy, argmax, chosen.get("top", 0), chosen.get("per", "key"))

    def run(att: Attention, q: Any, k: Any, v: Any, **keywords: Any) -> Statistics:
        return att.statistics(q, k, v, **keywords, **chosen)

    return run, {n: x for n, x in params.items() if n not in ASKED}


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


def of_tree(parents: Any, places: Any, int32: Any, token: str = "k") -> tuple[PositionMap, dict[str, Any]]:
    """The positions of a tree of drafts whose node i hangs below parents[..., i], -1 for a root, and its tables.
    These say whether node j is node i or above it, Bool [..., n, n], and depths int32 [..., n], 0 for a root. Place k
    holds `token`.

    `places` are 0 to n - 1 and `int32` the dtype, of the framework of `parents`."""
    above = (parents[..., None] == places) | (places[:, None] == places)
    for _ in range(max(len(places) - 1, 1).bit_length()):  # paths of 1, 2, 4, ... edges
        reach = above * 1.0  # torch multiplies no matrices of Bools, nor of ints on GPUs
        above = (reach @ reach) > 0
    tables = {ANCESTORS: above, DEPTH: above.sum(-1, dtype=int32) - 1}
    return tree_places(parents.ndim == 2, token), tables


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
            text += f"[{', '.join(map(str, want))}]"
            # values of another size than keys, as in latent attention, are asked for when the cache is made
            sized = name == "v" and shape[:-1] == want[:-1]
            raise ShapeError(
                text + (f"\n  for values of this size make the cache with v_dim={shape[-1]}" if sized else "")
            )
    return int(new)


def _described(x: Any) -> str:
    return f"has the shape {tuple(x.shape)}" if hasattr(x, "shape") else f"is a {type(x).__name__}"
