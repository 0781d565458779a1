"""Pages of a pool, handed out to sequences: the host's bookkeeping of paged caches, without their arrays.

Rows of a paged cache and its pool must count the same tokens: `keep` changes the cache alone. Every row of a cache has
five numbers besides its length, and a pool has a `SequenceTable`; `seated` compares the two before anything is written.
`keep` cannot change the pool: `jax.jit` has no host to call, and a pool serves all layers.
"""

from __future__ import annotations

import operator
import secrets
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import CapacityError, ParameterError, ShapeError

Copy = tuple[int, int]  # (page to read, page to write)


class PagePool:
    """A pool of pages: it records the pages that hold the tokens of each sequence.

    >>> pool = PagePool(8, 16)  # pages, tokens of a page
    >>> pool.allocate("prompt", 40)  # two pages and a half
    []
    >>> pool.fork("prompt", "answer")  # the same tokens: the three pages are shared
    >>> pool.append({"answer": 1, "prompt": 1})  # who writes first into a shared page gets a copy of it
    [(2, 3)]
    >>> pool.table(["prompt", "answer"])
    array([[0, 1, 2],
           [0, 1, 3]], dtype=int32)
    >>> pool.length("answer"), pool.pages_of("answer"), pool.owned("answer")  # tokens from 32 on are its alone
    (41, [0, 1, 3], 32)
    >>> pool.own({"answer": 16})  # tokens from 16 on will be written again: page 1 is shared, so it is copied
    [(1, 4)]
    >>> pool.truncate("answer", 16)  # one page is left
    >>> pool.free("prompt"), pool.available
    (None, 7)
    >>> PagePool.of(8, 16, {"answer": ([0], 16)}).available  # a pool from stored pages and lengths
    7

    Token t of a sequence is token `t % page` of its page `t // page`. Sequences have names, any hashable value; lengths
    are in tokens. A call that asks for more pages than are free raises `CapacityError` and changes nothing. The time of
    a call depends on the pages and sequences that it changes, not on the size of the pool.
    """

    def __init__(self, pages: int, page: int) -> None:
        self.pages, self.page = _whole("pages of a pool", pages), _whole("tokens of a page", page)
        if self.pages < 1 or self.page < 1:
            raise ShapeError(f"a pool of {pages} pages of {page} tokens; both are at least 1")
        self._free = list(range(self.pages - 1, -1, -1))  # a stack: what was freed last is handed out next
        self._users = [0] * self.pages
        self._pages: dict[Hashable, list[int]] = {}
        self._lengths: dict[Hashable, int] = {}
        self._extra = 0  # users of pages beyond the first
        self.sequence_table = SequenceTable()

    @classmethod
    def of(cls, pages: int, page: int, sequences: Mapping[Any, tuple[Sequence[int], int]]) -> PagePool:
        """A pool with these pages and this number of tokens of every sequence, which fit each other."""
        pool = cls(pages, page)
        for sequence, (its, tokens) in sequences.items():
            its, tokens = [_whole("pages", i) for i in its], _whole("tokens", tokens)
            needed = max(-(-tokens // pool.page), 0)
            if tokens < 0 or not len({*its}) == len(its) == needed or not {*its} <= {*range(pool.pages)}:
                text = f"{tokens} tokens of the sequence {sequence!r} on the pages {its}; they are on {needed} "
                raise ShapeError(f"{text}different pages of 0 to {pool.pages - 1}, of {pool.page} tokens each")
            pool._pages[sequence], pool._lengths[sequence] = its, tokens
            pool.sequence_table.new(sequence)
            for i in its:
                pool._users[i] += 1
        pool._extra = sum(n - 1 for n in pool._users if n)
        pool._free = [i for i in reversed(range(pages)) if not pool._users[i]]
        return pool

    @property
    def available(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[Any, ...]:
        """The names of the sequences that hold pages."""
        return tuple(self._pages)

    def length(self, sequence: Hashable) -> int:
        """Tokens of a sequence."""
        self._known(sequence)
        return self._lengths[sequence]

    def pages_of(self, sequence: Hashable, start: int = 0) -> list[int]:
        """The pages of a sequence in order, from its `start`-th on."""
        self._known(sequence)
        return self._pages[sequence][start:]

    def table(self, sequences: Iterable[Hashable], width: int | None = None) -> NDArray[np.int32]:
        """Pages int32 [sequences, width], what `att(q, k, v, pages=...)` takes; `width`, in pages, is that of the
        longest unless given. Entries past the end of a sequence are 0."""
        page_lists = [self.pages_of(s) for s in sequences]
        longest = max(map(len, page_lists), default=0)
        if width is not None and _whole("the width of a table", width) < longest:
            raise ShapeError(f"a table of {width} pages a sequence, and one has {longest}; make it wider")
        table = np.zeros((len(page_lists), longest if width is None else width), np.int32)
        for row, pages in zip(table, page_lists, strict=True):
            row[: len(pages)] = pages
        return table

    def allocate(self, sequence: Hashable, tokens: int = 0) -> list[Copy]:
        """A new sequence of so many tokens."""
        self._new(sequence, "append to it, or free it first")
        self._pages[sequence], self._lengths[sequence] = [], 0
        self.sequence_table.new(sequence)
        try:
            return self.append({sequence: tokens})
        except Exception:  # an error leaves no empty sequence behind
            del self._pages[sequence], self._lengths[sequence]
            self.sequence_table.free(sequence)
            raise

    def append(self, tokens: Mapping[Any, int]) -> list[Copy]:
        """Add tokens to each of the sequences, or to none where pages are short. Returns pages to copy before the new
        tokens are written, (from, to) in any order: the last page of a sequence, where others share it."""
        tokens, needed = _of_each("tokens", tokens), {}
        # all are checked before any is changed
        for s, n in tokens.items():
            self._there(s)
            if n < 0:
                raise ShapeError(f"{n} more tokens for the sequence {s!r}; `truncate` takes tokens off")
            needed[s] = -(-(self._lengths[s] + n) // self.page) - len(self._pages[s])
        # a full last page is not written to
        open_pages = ((s, len(self._pages[s]) - 1) for s, n in tokens.items() if n and self._lengths[s] % self.page)
        shared = self._shared(open_pages)
        self._require(sum(needed.values()) + len(shared))
        copies = self._copy_pages(shared)
        for s, n in tokens.items():
            self._pages[s] += [self._take() for _ in range(needed[s])]
            self._lengths[s] += n
        return copies

    def own(self, starts: Mapping[Any, int]) -> list[Copy]:
        """Make tokens of sequences writable from `starts` on: pages that others share are copied, as by `append`."""
        starts = _of_each("starts", starts)
        for sequence, n in starts.items():
            self._there(sequence)
            if n < 0:
                raise ShapeError(f"tokens of the sequence {sequence!r} from {n} on; the first one is 0")
        shared = self._shared((s, i) for s, n in starts.items() for i in range(n // self.page, len(self._pages[s])))
        self._require(len(shared))
        return self._copy_pages(shared)

    def fork(self, sequence: Hashable, child: Hashable) -> None:
        """A new sequence of the same tokens, on the same pages."""
        self._known(sequence)
        self._new(child, "free it first")
        self._pages[child], self._lengths[child] = self._pages[sequence].copy(), self._lengths[sequence]
        self.sequence_table.fork(sequence, child, self._lengths[child])
        self._extra += len(self._pages[child])
        for page in self._pages[child]:
            self._users[page] += 1

    def truncate(self, sequence: Hashable, tokens: int) -> None:
        """Keep the first `tokens` of a sequence, and release the pages of the others. `keep` and `truncate` of a cache
        do not change the pool; `seat` raises an error where the two disagree."""
        self._known(sequence)
        tokens = _whole("tokens", tokens)
        if not 0 <= tokens <= self._lengths[sequence]:
            raise ShapeError(f"{tokens} tokens of the sequence {sequence!r}; it has {self._lengths[sequence]}")
        pages = self._pages[sequence]
        self._let_go(pages[-(-tokens // self.page) :])
        del pages[-(-tokens // self.page) :]
        self._lengths[sequence] = tokens
        self.sequence_table.cut(sequence, tokens)

    def free(self, sequence: Hashable) -> None:
        """Remove a sequence; pages that no other sequence shares are free again."""
        self._known(sequence)
        self._let_go(self._pages.pop(sequence))
        del self._lengths[sequence]
        self.sequence_table.free(sequence)

    def owned(self, sequence: Hashable) -> int:
        """The first token from which on all pages belong to this sequence alone."""
        pages = self.pages_of(sequence)
        # without shared pages there is nothing to look for
        shared = self._extra and next((i + 1 for i in reversed(range(len(pages))) if self._users[pages[i]] > 1), 0)
        return shared * self.page

    def _new(self, sequence: Hashable, help: str) -> None:
        _named(sequence)
        if sequence in self._pages:
            raise ParameterError(f"the sequence {sequence!r} is there already; {help}")

    def _known(self, sequence: Hashable) -> None:
        _named(sequence)
        self._there(sequence)

    def _there(self, sequence: Hashable) -> None:
        if sequence not in self._pages:
            raise ParameterError(f"there is no sequence {sequence!r}; `allocate` makes one")

    def _require(self, pages: int) -> None:
        if pages > len(self._free):
            text = f"{pages} pages of {self.page} tokens are needed, {len(self._free)} of {self.pages} are free\n"
            raise CapacityError(f"{text}  free a sequence, or make the pool larger; nothing has changed")

    def _shared(self, written: Iterable[tuple[Any, int]]) -> list[tuple[Any, int]]:
        """The pages to copy among pages to be written, as (sequence, which of its pages): where all who share a page
        write to it, the last one keeps it."""
        users: dict[int, int] = {}
        shared = []
        for s, i in written:
            page = self._pages[s][i]
            left = users.get(page, self._users[page])
            if left > 1:
                users[page] = left - 1
                shared.append((s, i))
        return shared

    def _copy_pages(self, shared: list[tuple[Any, int]]) -> list[Copy]:
        copies = []
        for s, i in shared:
            page = self._pages[s][i]
            self._users[page] -= 1
            self._extra -= 1
            self._pages[s][i] = self._take()
            copies.append((page, self._pages[s][i]))
        return copies

    def _take(self) -> int:
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _let_go(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                self._extra -= 1
            else:
                self._free.append(page)


def _named(sequence: Any) -> None:
    try:
        hash(sequence)
    except TypeError:
        text = f"a sequence is called {sequence!r}, and names are hashable: a number, a text or a tuple of them"
        raise ParameterError(text) from None


def _whole(what: str, x: Any) -> int:
    try:
        return operator.index(x)
    except TypeError:
        raise ShapeError(f"{what} are {x!r}; they are a whole number") from None


def _of_each(what: str, numbers: Any) -> dict[Any, int]:
    try:
        return {s: operator.index(n) for s, n in numbers.items()}
    except (AttributeError, TypeError):
        raise ShapeError(f"{what} are {numbers!r}; they are a whole number for each sequence, by its name") from None


# -- sequences in rows of caches -----------------------------------------------------------------------

NUMBER, CUTS, OWN, LOW, PEAK = range(5)  # the numbers of a row, int32 [5, batch]:
# NUMBER: `SequenceEntry.number` of its sequence, 0 for none. CUTS: `SequenceEntry.cuts` when the sequence was seated.
# OWN: the first token on pages that no other sequence shares. LOW: the first token that was dropped or moved since.
# PEAK: the longest length before a `truncate`; `keep` lowers it to the length after it.
NEVER = (1 << 31) - 1  # LOW of a row that has dropped and moved no token
_NUMBERS = count(secrets.randbits(31))  # from anywhere on: a process may load pools and rows of another

Rows = NDArray[np.int32]


@dataclass
class SequenceEntry:
    """The record that a pool keeps of one sequence besides its pages and its length."""

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
        # int32, and not 0, the number of an empty row
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


class PagedRows(NamedTuple):
    """A paged cache as its pool sees it: `pages` pages of `page` tokens, `batch` rows of `width` pages, and the `rows`
    before, which hold `stored` tokens each."""

    pages: int
    page: int
    batch: int
    width: int
    rows: Any = None
    stored: Any = None


def seated(pool: PagePool, sequences: Sequence[Any], new: Any, cache: PagedRows) -> tuple[Rows, Rows, Rows, Rows]:
    """(pages int32 [batch, width], room and lengths int32 [batch], rows int32 [5, batch]) of sequences in a cache.

    `sequences` are names in the pool, one a row, None for an empty row. `room` is how many tokens the pages of a row
    can hold, `lengths` how many are stored without the `new` ones, `rows` the five numbers of every row.

    Raises `ShapeError` where the pool disagrees with the rows before."""
    pages, page, batch, width, rows, stored = cache
    if (pool.pages, pool.page) != (pages, page) or len(sequences) != batch:
        text = f"{len(sequences)} sequences of a pool of {pool.pages} pages of {pool.page} tokens; this cache has "
        raise ShapeError(f"{text}{batch} rows and {pages} pages of {page}")
    counts = np.asarray(new)
    if counts.shape not in ((), (batch,)) or counts.dtype.kind not in "iu":
        raise ShapeError(f"new tokens are {new!r}; they are an integer, or one for each of {batch} rows")
    # without rows nothing is stored that could be compared
    sat = {} if rows is None else _read(pool, np.asarray(rows).T.tolist(), np.asarray(stored).tolist())
    table, numbers = np.zeros((batch, width), np.int32), empty_rows(batch)
    room, lengths = np.zeros((2, batch), np.int32)
    written: dict[int, Any] = {}
    for b, (s, more) in enumerate(zip(sequences, np.broadcast_to(counts, batch).tolist(), strict=True)):
        if s is None:
            continue
        its, tokens = pool.pages_of(s), pool.length(s)
        if len(its) > width:
            text = f"the sequence {s!r} has {len(its)} pages, a row of this cache {width}; make one of a larger width"
            raise CapacityError(text)
        if not 0 <= more <= tokens:
            text = f"{more} new tokens of the sequence {s!r}, which has {tokens}; append them to the pool first"
            raise ShapeError(text)
        _agree(pool, s, tokens - more, more, sat)
        for i in its[(tokens - more) // page :] if more else ():
            if i in written:
                text = f"rows of {written[i]!r} and {s!r} would write new tokens into one page; append them to the "
                text += f"pool after the fork, or let it copy the page: copies = pool.own({{{s!r}: {tokens - more}}})"
                raise ShapeError(text)
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
        text = f"{where}, and the pool counts {expected + more}, {more} of them new\n"
        text += f"  where drafts were not kept: pool.truncate({s!r}, {tokens}) after `keep`, before `fork` and "
        raise ShapeError(f"{text}`append`; where tokens are still to be written: say how many by `new`")


def _ahead(s: Any, b: int, tokens: int, expected: int, more: int) -> ShapeError:
    text = f"row {b} holds {tokens} tokens of the sequence {s!r}, and the pool counts {expected + more}, {more} of "
    text += "them new\n  append them to the pool before the cache, and say by `new` how many are still to be written; "
    return ShapeError(f"{text}to drop tokens: pool.truncate({s!r}, {expected})")


def refuse_shared(starts: Any, counts: Any, first_owned: Any) -> None:
    """Refuse to keep drafts from `starts` on that are on pages of several sequences, where these are known."""
    for b, (start, n, first) in enumerate(zip(starts, counts, first_owned, strict=True)):
        if n and start < first:
            text = f"the drafts of sequence {b} are on pages that another one shares, and keeping some moves them\n"
            text += f"  copies = pool.own({{<its name>: {int(start)}}}), `seat` with these copies, then `keep`; "
            raise ShapeError(f"{text}nothing has changed")
