"""Checks of caches before anything is stored, with equal words for every framework.

Rows of a paged cache and its pool must count the same tokens: `keep` changes the cache alone. Every row of a cache has
five numbers beside its length, and a pool has a `SequenceTable`; `seated` compares the two before anything is written.
`keep` cannot change the pool: `jax.jit` has no host to call, and a pool serves all layers.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import CapacityError, ParameterError, ShapeError
from frisket.runtime.attention.attention import Attention
from frisket.runtime.calls.arrays import BYTES, FLOATS, framework_of
from frisket.runtime.calls.program import check_used
from frisket.runtime.machine.parameters import traced

if TYPE_CHECKING:
    from .pool import PagePool


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
    if clashes := sorted(n for n in att.program.names if n.startswith("cache_")):
        raise ParameterError(f"`{clashes[0]}` is a name of the caches' own; rename it, for example `my_{clashes[0]}`")
    if reserved := [n for n in OF_CACHE if n in params and n not in att.program.names]:
        raise ParameterError(
            f"`{reserved[0]}` is given, and a cache knows it itself: where its tokens are, and how they are stored\n"
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
        have, cache_dtype = (str(x.dtype).removeprefix("torch.") for x in (q, like))
        if have not in FLOATS or cache_dtype not in BYTES:
            raise ShapeError(
                f"q is {have}, and this cache holds {cache_dtype}; convert q, or make a cache of its dtype"
            )
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
        drafts, have = np.broadcast_to(drafted, lengths.shape).tolist(), lengths.tolist()
        raise ShapeError(f"drafted are {drafts}, the last of {have} tokens; there are not as many")
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


NUMBER, CUTS, OWN, LOW, PEAK = range(5)  # the numbers of a row, int32 [5, batch]:
# NUMBER: `SequenceEntry.number` of its sequence, 0 for none. CUTS: `SequenceEntry.cuts` when the sequence was seated.
# OWN: the first token on pages that no other sequence shares. LOW: the first token that was dropped or moved since.
# PEAK: the longest length before a `truncate`; `keep` lowers it to the length after it.
NEVER = (1 << 31) - 1  # LOW of a row that has dropped and moved no token
_NUMBERS = count(secrets.randbits(31))  # from anywhere on: a process may load pools and rows of another

Rows = NDArray[np.int32]


@dataclass
class SequenceEntry:
    """The record that a pool keeps of one sequence beside its pages and its length."""

    number: int  # no other sequence has it
    cuts: int = 0  # how often the pool has truncated it
    stored: int | None = None  # tokens written at most; None while it sits in a row, and before it ever did
    waits: tuple[int, int, int] | None = None
    # of a fork, until its parent's row is read: the parent's number, and its tokens and cuts at the fork

    def at_most(self, tokens: int) -> None:
        self.stored = tokens if self.stored is None else min(tokens, self.stored)


class SequenceTable:
    """The sequences of a pool as rows of caches name them."""

    def __init__(self) -> None:
        self.entries: dict[Hashable, SequenceEntry] = {}  # by the name of a sequence
        self.names: dict[int, Hashable] = {}  # the name by `SequenceEntry.number`
        self.children: dict[int, dict[int, SequenceEntry]] = {}  # forks that wait for a row, by their parent's number

    def new(self, sequence: Hashable) -> SequenceEntry:
        entry = self.entries[sequence] = SequenceEntry(1 + next(_NUMBERS) % (NEVER - 1))
        self.names[entry.number] = sequence
        return entry

    def fork(self, sequence: Hashable, child: Hashable, tokens: int) -> None:
        parent, entry = self.entries[sequence], self.new(child)
        entry.stored = parent.stored
        entry.waits = parent.waits
        if parent.waits is None and parent.stored is None:  # the parent sits in a row, or will: it counts the tokens
            entry.waits = parent.number, tokens, parent.cuts
        if entry.waits is not None:
            self.children.setdefault(entry.waits[0], {})[entry.number] = entry

    def cut(self, sequence: Hashable, tokens: int) -> None:
        known = self.entries[sequence]
        known.cuts += 1
        if known.waits is not None or known.stored is not None:  # no row says how many tokens it has
            known.at_most(tokens)

    def free(self, sequence: Hashable) -> None:
        self.waits_no_more(sequence)
        del self.names[self.entries.pop(sequence).number]

    def read(self, row: Sequence[int], tokens: int) -> Hashable | None:
        """The name of the sequence in a row of `tokens` tokens; None where the pool has freed it.

        Forks of the sequence learn from the row how many of their tokens are stored."""
        number, cuts, _, low, peak = row
        for child in self.children.pop(number, {}).values():
            assert child.waits is not None
            _, tokens_then, cuts_then = child.waits
            # tokens from LOW on changed after the fork, on pages of both, unless the pool had cut the row before it
            stored = low if cuts_then == cuts and low < tokens else max(tokens, peak)
            child.at_most(min(stored, tokens_then))
            child.waits = None
        return self.names.get(number)

    def seated(self, sequence: Hashable) -> None:
        """Note that a sequence sits in a row: from here on the row says how many of its tokens are stored."""
        self.waits_no_more(sequence)
        self.entries[sequence].stored = None

    def waits_no_more(self, sequence: Hashable) -> None:
        known = self.entries[sequence]
        if known.waits is not None:
            of = self.children[known.waits[0]]
            del of[known.number]
            if not of:
                del self.children[known.waits[0]]
            known.waits = None


def empty_rows(batch: int) -> Rows:
    """The five numbers of `batch` rows in which no sequence sits."""
    return np.repeat(np.array([[0], [0], [0], [NEVER], [0]], np.int32), batch, 1)


def seated(
    pool: PagePool, sequences: Sequence[Any], new: Any, pages: int, page: int, batch: int, width: int,
    rows: Any = None, stored: Any = None,
) -> tuple[Rows, Rows, Rows, Rows]:  # fmt: skip
    """(pages int32 [batch, width], room and lengths int32 [batch], rows int32 [5, batch]) of sequences in a cache.

    `sequences` are names in the pool, one a row, None for an empty row. The cache has `pages` pages of `page` tokens,
    and `batch` rows of `width` pages. `room` is how many tokens the pages of a row can hold, `lengths` how many are
    stored without the `new` ones, `rows` the five numbers of every row.

    Raises `ShapeError` where the pool disagrees with the `rows` before, which hold `stored` tokens each."""
    if (pool.pages, pool.page) != (pages, page) or len(sequences) != batch:
        raise ShapeError(
            f"{len(sequences)} sequences of a pool of {pool.pages} pages of {pool.page} tokens; this cache has "
            f"{batch} rows and {pages} pages of {page}"
        )
    counts = np.asarray(new)
    if counts.shape not in ((), (batch,)) or counts.dtype.kind not in "iu":
        raise ShapeError(f"new tokens are {new!r}; they are an integer, or one for each of {batch} rows")
    sat = {} if rows is None else _read(pool, np.asarray(rows).T.tolist(), np.asarray(stored).tolist())
    table, (room, lengths), numbers = (
        np.zeros((batch, width), np.int32),
        np.zeros((2, batch), np.int32),
        empty_rows(batch),
    )
    written: dict[int, Any] = {}
    for b, (s, more) in enumerate(zip(sequences, np.broadcast_to(counts, batch).tolist(), strict=True)):
        if s is None:
            continue
        its, tokens = pool.pages_of(s), pool.length(s)
        if len(its) > width:
            raise CapacityError(
                f"the sequence {s!r} has {len(its)} pages, a row of this cache {width}; make one of a larger width"
            )
        if not 0 <= more <= tokens:
            raise ShapeError(
                f"{more} new tokens of the sequence {s!r}, which has {tokens}; append them to the pool first"
            )
        _agree(pool, s, tokens - more, more, sat)
        for i in its[(tokens - more) // page :] if more else ():
            if i in written:
                raise ShapeError(
                    f"rows of {written[i]!r} and {s!r} would write new tokens into one page; append them to the pool "
                    f"after the fork, or let it copy the page: copies = pool.own({{{s!r}: {tokens - more}}})"
                )
            written[i] = s
        known = pool.sequence_table.entries[s]
        table[b, : len(its)], room[b], lengths[b] = its, len(its) * page, tokens - more
        numbers[:OWN, b], numbers[OWN, b] = (known.number, known.cuts), pool.owned(s)
    for s, (_, tokens, _) in sat.items():  # of sequences that leave; `seated` resets it for those that stay
        pool.sequence_table.entries[s].stored = tokens
    for s in sequences:
        if s is not None:
            pool.sequence_table.seated(s)
    return table, room, lengths, numbers


def _read(pool: PagePool, rows: list[list[int]], stored: list[int]) -> dict[Any, tuple[int, int, int]]:
    """(row, tokens, cuts when seated) of every sequence that sits in a row, by its name in the pool."""
    sat = {}
    for b, (row, tokens) in enumerate(zip(rows, stored, strict=True)):
        if row[NUMBER] and (name := pool.sequence_table.read(row, tokens)) is not None:
            sat[name] = b, tokens, row[CUTS]
            if tokens > pool.length(name) and row[CUTS] == pool.sequence_table.entries[name].cuts:
                raise _ahead(name, b, tokens, pool.length(name), 0)
    return sat


def _agree(pool: PagePool, s: Any, expected: int, more: int, sat: dict[Any, tuple[int, int, int]]) -> None:
    """Raise where `expected` tokens of a sequence are not what is stored of it."""
    known = pool.sequence_table.entries[s]
    if s in sat:
        b, tokens, cuts = sat[s]
        if tokens > expected and cuts == known.cuts:
            raise _ahead(s, b, tokens, expected, more)
        where = f"row {b} holds {tokens} tokens of the sequence {s!r}"
    elif known.stored is not None:
        tokens, where = known.stored, f"{known.stored} tokens of the sequence {s!r} are stored"
    else:
        return  # in no row of this cache yet: new, of `PagePool.of`, or in another cache; the pool's count is taken
    if tokens < expected:
        raise ShapeError(
            f"{where}, and the pool counts {expected + more}, {more} of them new\n"
            f"  where drafts were not kept: pool.truncate({s!r}, {tokens}) after `keep`, before `fork` and `append`; "
            "where tokens are still to be written: say how many by `new`"
        )


def _ahead(s: Any, b: int, tokens: int, expected: int, more: int) -> ShapeError:
    return ShapeError(
        f"row {b} holds {tokens} tokens of the sequence {s!r}, and the pool counts {expected + more}, {more} of them "
        f"new\n  append them to the pool before the cache, and say by `new` how many are still to be written; to drop "
        f"tokens: pool.truncate({s!r}, {expected})"
    )


def refuse_shared(starts: Any, counts: Any, first_owned: Any) -> None:
    """Refuse to keep drafts from `starts` on that are on pages of several sequences, where these are known."""
    for b, (start, n, first) in enumerate(zip(starts, counts, first_owned, strict=True)):
        if n and start < first:
            raise ShapeError(
                f"the drafts of sequence {b} are on pages that another one shares, and keeping some moves them\n"
                f"  copies = pool.own({{<its name>: {int(start)}}}), `seat` with these copies, then `keep`; nothing "
                "has changed"
            )
