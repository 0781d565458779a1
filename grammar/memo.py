"""Remembered answers: `@memo(64)` keeps those of a function, `Memo` those under keys that a caller makes.

Every table of answers in frisket is one of these, so each is bounded by entries and by bytes, counted, listed by
`frisket doctor --caches`, and cleared by `clear()`. Errors are not remembered. Two threads that ask at once may both
compute; no lock is held meanwhile, so remembered functions may call each other and themselves.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cached_property, lru_cache, partial, update_wrapper
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

MIB = 1 << 20
BYTES = 64 * MIB  # of a table
BUDGET = 256 * MIB  # of all tables of a process
PARTS = 128  # objects that are looked at to weigh an entry
Weigh = Callable[..., int] | int  # of the key's parts and the answer; a number where all entries weigh about the same

# functions that share a table, so that what belongs together is bounded together: entries, and bytes of each or None
GROUPS: dict[str, tuple[int, int | None]] = {
    "expressions": (65536, 400),  # what simplification and analysis know of expressions; an average of seven masks
    "programs": (1024, None),  # expressions as functions of a framework
    "sources": (1024, None),  # generated texts
    "plans": (1024, None),  # masks simplified and bound to values
    "kernels": (1024, None),  # generated texts, loaded
    "once": (256, None),  # what a process loads or looks up once
}

_lock = threading.RLock()  # reentrant: what an eviction frees may ask a table
_tables: weakref.WeakSet[Memo] = weakref.WeakSet()
_total = 0  # bytes in all tables


class Info(NamedTuple):
    """A table in figures; `bytes` is an estimate."""

    name: str
    entries: int
    bound: int
    bytes: int
    hits: int
    misses: int


class Memo:
    """A table under keys that the caller makes: past a bound, the least recently used entries go.

    >>> squares = Memo("squares", 2)
    >>> for n in (1, 2, 1, 3):
    ...     _ = squares.get(n) or squares.put(n, n * n)
    >>> squares.get(1), squares.get(2), squares.info().entries
    (1, None, 2)
    """

    def __init__(self, name: str, entries: int, bytes: int = BYTES, weigh: Weigh | None = None) -> None:
        self.name, self.bound, self.bytes_bound = name, entries, bytes
        self.weigh = weigh if weigh is not None else weight
        self.bytes = self.hits = self.misses = 0
        self._entries: OrderedDict[Hashable, tuple[Any, int, Any]] = OrderedDict()  # answer, bytes, what it holds
        with _lock:
            _tables.add(self)

    def get(self, key: Hashable) -> Any:
        """The answer under the key, or None."""
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        try:  # noqa: SIM105 (contextlib.suppress takes two calls)
            self._entries.move_to_end(key)
        except KeyError:  # another thread let it go
            pass
        return entry[0]

    def put(self, key: Hashable, answer: R, objects: Any = None) -> R:
        """Keep an answer and the objects that its key tells by `id()`; return it."""
        size = self.weigh if isinstance(self.weigh, int) else self.weigh(key, answer, objects)
        with _lock:
            if key in self._entries:
                self.drop(key)
            self._entries[key] = answer, size, objects
            self._grow(size)
            while len(self._entries) > self.bound or (self.bytes > self.bytes_bound and len(self._entries) > 1):
                self.drop(next(iter(self._entries)))
        return answer

    def drop(self, key: Hashable) -> None:
        with _lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._grow(-entry[1])

    def clear(self) -> None:
        """Forget all answers and set the counts to 0."""
        with _lock:
            self.empty()
            self.hits = self.misses = 0

    def empty(self) -> None:
        with _lock:
            self._grow(-self.bytes)
            gone, self._entries = self._entries, OrderedDict()
        del gone  # frees what it held, outside of the lock

    def info(self) -> Info:
        return Info(self.name, len(self._entries), self.bound, self.bytes, self.hits, self.misses)

    def _grow(self, size: int) -> None:
        """Count bytes; past the budget of the process, the heaviest table is cleared."""
        global _total
        self.bytes += size
        _total += size
        if size > 0 and _total > BUDGET:
            max(_tables, key=lambda table: table.bytes).empty()


class _Answers(Memo):
    """The table of a function by value: `functools.lru_cache`, because a hit in it enters no function of Python.

    It does not tell what it lets go, so `bytes` counts all entries since the table was last empty, and past the bound
    the table is cleared. Where all entries weigh the same, the number of entries bounds the bytes as well.
    """

    def __init__(self, name: str, function: Callable[..., Any], entries: int, bytes: int, weigh: Weigh | None) -> None:
        super().__init__(name, entries, bytes, weigh)
        if isinstance(weigh, int):
            self.bound = min(entries, max(1, bytes // weigh))
        self.function = function
        self.front: Any = lru_cache(maxsize=self.bound)(function if isinstance(weigh, int) else self._miss)

    def _miss(self, *args: Any, **named: Any) -> Any:
        answer = self.function(*args, **named)
        size = self.weigh(args, named, answer)  # type: ignore[operator]
        with _lock:
            if self.bytes + size > self.bytes_bound:
                self.empty()
            self._grow(size)
        return answer

    def empty(self) -> None:
        with _lock:
            self.hits, self.misses = self.info()[4:]
            self._grow(-self.bytes)
            self.front.cache_clear()

    def info(self) -> Info:
        now = self.front.cache_info()
        average = self.weigh if isinstance(self.weigh, int) else self.bytes / max(now.misses, now.currsize, 1)
        size = int(average * now.currsize)
        return Info(self.name, now.currsize, self.bound, size, self.hits + now.hits, self.misses + now.misses)


@lru_cache
def _shared(group: str) -> _Answers:
    entries, weigh = GROUPS[group]
    return _Answers(group, _call, entries, BYTES, weigh)


def _call(function: Callable[..., R], *args: Any, **named: Any) -> R:
    return function(*args, **named)


class Remembered(Protocol[P, R_co]):
    """A function with its table."""

    memo: Memo

    def __call__(self, *args: P.args, **named: P.kwargs) -> R_co: ...


def memo(
    entries: int = 0, group: str = "", bytes: int = BYTES, weigh: Weigh | None = None
) -> Callable[[Callable[P, R]], Remembered[P, R]]:
    """A function that remembers `entries` answers in at most `bytes`, or in the table of a group.

    Equal arguments have one answer. Past the bound the least recently used answers go.

    >>> @memo(64)
    ... def square(n: int) -> int:
    ...     return n * n
    >>> square(3) + square(3)
    18
    >>> square.memo.info()[1:3]
    (1, 64)
    """

    def remembered(function: Callable[P, R]) -> Remembered[P, R]:
        table = _shared(group) if group else _Answers(name_of(function), function, entries, bytes, weigh)
        wrapper: Any = partial(table.front, function) if group else table.front
        update_wrapper(wrapper, function)
        wrapper.memo = table
        return wrapper  # type: ignore[no-any-return]

    return remembered


_on_objects = Memo("beside objects", 4096, weigh=1000)  # their owners answer for their size


def cached_on(owner: Any, key: Hashable, make: Callable[[], R]) -> R:
    """The answer of `make`, remembered under the key while `owner` lives, to which it must not refer.

    >>> class Table(list): pass
    >>> table = Table([3, 4])
    >>> [cached_on(table, "sum", lambda: sum(table)) for _ in range(2)]
    [7, 7]
    """
    place, table = (id(owner), key), _on_objects  # as it ends, Python takes a module's names before the last owners
    entry = table._entries.get(place)
    if entry is None:
        table.misses += 1
        return table.put(place, make(), weakref.ref(owner, lambda _: table.drop(place)))
    table.hits += 1  # the first one made goes first: no time is lost on which one was used last
    answer: R = entry[0]
    return answer


def own_state(x: Any) -> dict[str, Any]:
    """The attributes of an object without what its cached properties remember: what copies and pickles have."""
    return {n: y for n, y in vars(x).items() if not isinstance(getattr(type(x), n, None), cached_property)}


def remember(answers: dict[Any, Any], key: Any, answer: Any, most: int) -> None:
    """Put an answer into an object's dict of at most `most` entries, from which the oldest entries go."""
    answers[key] = answer
    while len(answers) > most:
        answers.pop(next(iter(answers)), None)  # another thread may have taken it


def weight(*things: Any) -> int:
    """Bytes of some objects and what they hold, about: arrays and texts, containers, and fields of plain objects.

    >>> weight(bytes(1000)), weight({"a": (bytes(1000), bytes(1000))}) > 2000
    (1033, True)
    """
    total, rest = 0, list(things)
    seen: set[int] = set()
    for x in rest:  # which grows: what is near the top comes first
        if x is None or id(x) in seen or isinstance(x, type | ModuleType | FunctionType):
            continue
        seen.add(id(x))
        if len(seen) > PARTS:
            break
        try:
            # of the type: objects may answer for any name
            size = x.nbytes if hasattr(type(x), "nbytes") else None
        except RuntimeError:  # torch counts no bytes of sparse tensors, and of zeros that have no memory
            size = None
        total += size if type(size) is int else sys.getsizeof(x, 64)
        if isinstance(x, dict):
            rest += (*x, *x.values())
        elif isinstance(x, tuple | list | set | frozenset):
            rest += x
        elif type(size) is not int:
            rest += getattr(x, "__dict__", {}).values()
    return total


def name_of(function: Any) -> str:
    function = getattr(function, "func", function)  # of a partial
    return f"{function.__module__.removeprefix('frisket.')}.{function.__qualname__}"


def tables() -> list[Info]:
    """The figures of all tables, by name."""
    with _lock:
        return sorted(table.info() for table in _tables)


def clear() -> None:
    """Forget every remembered answer."""
    with _lock:
        known = list(_tables)
    for table in known:
        table.clear()


def _after_fork() -> None:
    """A thread that the child does not have may have held the lock."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
