"""Positions of stored keys and new queries: a user's attention, read at the positions that the places of a cache hold.

One mask serves prefill, chunked prefill and decode: it speaks of positions in the sequence, and arrays of a cache
hold some of them, in an order of their own. `placed` gives the same attention in places:

>>> import frisket as fk
>>> placed(fk.compile("causal & window(64)"), APPENDED)
Attention(mask = causal(q = q + cache_start[b]) & window(64, q = q + cache_start[b]) & k < cache_end[b])

Tables of a call with it, Int [batch]: `cache_start`, the position of the first query of every sequence, and
`cache_end`, how many tokens of it are stored. Other values do not recompile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from numbers import Real
from operator import and_
from typing import Any

from frisket.dsl.errors import FrisketError, ParameterError, ShapeError
from frisket.dsl.ir import clauses, uses
from frisket.dsl.program import Declared
from frisket.dsl.types import INT
from frisket.runtime.attention.attention import Attention
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.machine.parameters import names_of
from frisket.runtime.masks.mask import Mask, mask

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


def ring(slots: int) -> PositionMap:
    """A ring of the last `slots` tokens: slot s holds the last position p < cache_end with p = s (mod slots)."""
    return PositionMap(APPENDED.q, f"{END}[b] - 1 - ({END}[b] - 1 - k) % {slots}", APPENDED.seen)


def ring_padded(slots: int) -> PositionMap:
    """PositionMap of a ring cache where queries past the last of a sequence see nothing."""
    return PositionMap(APPENDED.q, ring(slots).k, PADDED.seen)


def ring_before(slots: int) -> PositionMap:
    """A ring as it is before `cache_new` tokens of every sequence, those of the queries, are written."""
    return PositionMap(APPENDED.q, ring(slots).k, f"{APPENDED.seen} & q < {NEW}[b]")


def placed(att: Attention, places: PositionMap) -> Attention:
    """`att` at the positions that `places` hold; made once for each attention."""
    key = "placed", places
    if key not in att.ready:
        att.ready[key] = _placed(att, places)
    placed_att: Attention = att.ready[key]
    return placed_att.now() if placed_att.rereads else placed_att


def _placed(att: Attention, places: PositionMap) -> Attention:
    occupied = mask(places.seen)
    positions = {n: x for n in "bhqk" if (x := getattr(places, n)) != n}
    seen = occupied if att.mask is None else att.mask.at(**positions) & occupied
    ranks = {n: rank for n, (rank, _) in names_of(seen.expr).items() if n in POSITIONS and rank is not None}
    known = {n: Declared(rank, INT, most=LONGEST) for n, rank in ranks.items()}
    seen = Mask(seen.expr, seen.params, replace(seen.origin, declared={**seen.origin.declared, **known}))
    return Attention(CallProgram(seen, att.score and att.score.at(**positions), unwritten=True), att.options)


def require_room(att: Attention, slots: int, new: int, params: Mapping[str, Any]) -> None:
    """Raise `ShapeError` unless a ring of `slots` tokens, `new` just written, holds all `att` with `params` sees."""
    if why := no_room(att, slots, new, params):
        raise ShapeError(why)


def no_room(att: Attention, slots: int, new: int, params: Mapping[str, Any]) -> str:
    """A reason why new tokens do not fit, or an empty text.

    Parts of the mask that read tables are left out of the question, which makes the answer safe, not exact; positions
    are looked at up to 2**20."""
    numbers = [(n, x) for n, x in params.items() if isinstance(x, Real) and n in att.program.names] if params else ()
    key = "room", slots, new, *numbers
    if key not in att.ready:
        att.ready[key] = _no_room(att.program.bind(dict(numbers)), slots, new)
    return str(att.ready[key])


def not_served(att: Attention, params: Mapping[str, Any]) -> str:
    """A reason why a serving engine cannot run `att` for requests that share a batch and are read in chunks, or an
    empty text: positions of a batch and lengths change at every step, and a chunk has no later tokens to see."""
    numbers = [(n, x) for n, x in params.items() if isinstance(x, Real) and n in att.program.names]
    key = "served", *numbers
    if key not in att.ready:
        att.ready[key] = _not_served(att.program.bind(dict(numbers)))
    return str(att.ready[key])


def _not_served(program: CallProgram) -> str:
    for part in program.parts:
        if names := sorted({"b", "B", "Q_LEN", "KV_LEN"} & uses(part.expr)):
            return (
                f"the {part.what} reads {names[0]}, which changes from step to step of a serving engine\n  {part}\n  "
                "write it with positions q and k in a request, heads, and numbers"
            )
    known = _of_numbers(program.mask)
    try:
        answer: Any = known is not None and known.implies("q >= k", HORIZON, HORIZON)
    except FrisketError as error:
        return f"whether the mask is causal is not known: {error}\n  add `causal & ` to it"
    if not answer:
        return (
            "a mask of a serving engine has to be causal: a prompt that is read in chunks has no later tokens to see"
            f"\n  {'everything is seen' if program.mask is None else program.mask}\n  add `causal & ` to it"
        )
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
