"""Pages handed out to sequences, beside a model that holds every token of every sequence by itself."""

import pickle
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from frisket.dsl.errors import CapacityError, ParameterError, ShapeError
from frisket.runtime.caches.pool import PagedRows, PagePool, seated


class Stored:
    """A pool with an array of tokens behind it, and what the sequences should hold."""

    def __init__(self, pages, page):
        self.pool, self.tokens = PagePool(pages, page), np.full((pages, page), -1)
        self.model, self.written = {}, 0

    def write(self, copies, counts):
        for source, target in copies:
            self.tokens[target] = self.tokens[source]
        for s, n in counts.items():
            row = self.pool.table([s])[0]
            for t in range(len(self.model[s]), len(self.model[s]) + n):
                self.tokens[row[t // self.pool.page], t % self.pool.page] = self.written
                self.model[s].append(self.written)
                self.written += 1

    def allocate(self, s, n):
        copies = self.pool.allocate(s, n)
        self.model[s] = []
        self.write(copies, {s: n})

    def append(self, counts):
        self.write(self.pool.append(counts), counts)

    def fork(self, s, child):
        self.pool.fork(s, child)
        self.model[child] = self.model[s].copy()

    def rewrite(self, s, n):
        """Tokens from n on, anew, as when drafts are kept in another order."""
        copies, tokens = self.pool.own({s: n}), len(self.model[s])
        del self.model[s][n:]
        self.write(copies, {s: tokens - n})

    def truncate(self, s, n):
        self.pool.truncate(s, n)
        del self.model[s][n:]

    def free(self, s):
        self.pool.free(s)
        del self.model[s]

    def held(self, s):
        row, n = self.pool.table([s])[0], len(self.model[s])
        return self.tokens[row].reshape(-1)[:n].tolist()

    def check(self):
        pool = self.pool
        assert set(pool.sequences) == set(self.model)
        users = Counter(page for s in self.model for page in pool.pages_of(s))
        assert pool.available == pool.pages - len(users)  # no leak
        assert Counter({p: n for p, n in enumerate(pool._users) if n}) == users
        assert sorted(pool._free) == sorted(set(range(pool.pages)) - set(users))
        for s, tokens in self.model.items():
            assert pool.length(s) == len(tokens)
            assert len(pool.pages_of(s)) == -(-len(tokens) // pool.page)
            assert self.held(s) == tokens  # no overlap: every token is a number of its own


def state(pool):
    return pool._free.copy(), pool._users.copy(), {s: p.copy() for s, p in pool._pages.items()}, pool._lengths.copy()


def step(stored, draw, name):
    """One random operation; True where pages were short."""
    known = list(stored.model)
    what = draw.choice(("allocate", *["append"] * 3, "fork", "rewrite", "truncate", "free")) if known else "allocate"
    before = state(stored.pool)
    try:
        if what == "allocate":
            stored.allocate(name, draw.randrange(12))
        elif what == "append":
            some = draw.sample(known, draw.randint(1, min(4, len(known))))
            stored.append({s: draw.choice((0, 1, 1, 1, draw.randrange(14))) for s in some})
        elif what == "fork":
            stored.fork(draw.choice(known), name)
        elif what in ("rewrite", "truncate"):
            s = draw.choice(known)
            getattr(stored, what)(s, max(0, len(stored.model[s]) - draw.randrange(6)))
        else:
            stored.free(draw.choice(known))
    except CapacityError:
        assert state(stored.pool) == before
        return True
    return False


@pytest.mark.parametrize("pages", [16, pytest.param(40, marks=pytest.mark.exhaustive)])
def test_ten_thousand_operations(pages):
    stored, draw, short = Stored(pages, 4), random.Random(pages), 0
    for i in range(10_000):
        short += step(stored, draw, i)
        if i % 8 == 0:
            stored.check()
    assert 100 < short < 5_000  # it was full often enough, and not always
    for s in list(stored.model):
        stored.free(s)
    stored.check()
    assert stored.pool.available == pages


def test_a_pool_as_it_was():
    stored, draw = Stored(16, 4), random.Random(0)
    for i in range(300):
        step(stored, draw, i)
    pool = stored.pool
    stored.pool = PagePool.of(16, 4, {s: (pool.pages_of(s), pool.length(s)) for s in pool.sequences})
    stored.check()
    for i in range(300, 600):
        step(stored, draw, i)
        stored.check()


ELSEWHERE = """
import pickle, sys
from frisket.caches import PagePool
pool = PagePool(8, 16)
pool.allocate("a", 16)
sys.stdout.buffer.write(pickle.dumps(pool))
"""


def test_pools_of_two_processes_number_sequences_apart():
    """A pool that was pickled gave a new sequence the number of one in a row of its cache, which took it for that."""
    runs = [subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, check=True) for _ in range(2)]
    one, other = (pickle.loads(run.stdout).sequence_table.entries["a"].number for run in runs)
    assert one != other


UNFIT = [([0, 1], 4), ([0], 5), ([0, 0], 8), ([4], 4), ([-1], 4), ([], -3), ([0.5], 1)]


@pytest.mark.parametrize(("pages", "tokens"), UNFIT)
def test_a_pool_of_pages_and_lengths_that_do_not_fit_is_refused(pages, tokens):
    with pytest.raises(ShapeError):
        PagePool.of(4, 4, {"a": (pages, tokens)})


def test_a_shared_page_is_copied_by_who_writes_first():
    pool = PagePool(6, 4)
    pool.allocate("a", 6)
    pool.fork("a", "b")
    assert pool.available == 4
    assert pool.append({"b": 1}) == [(1, 2)]  # the full first page stays shared
    assert pool.append({"a": 1}) == []  # alone on its page by now
    assert pool.table(["a", "b"]).tolist() == [[0, 1], [0, 2]]


def test_last_writer_of_a_shared_page_keeps_it():
    pool = PagePool(4, 4)
    pool.allocate("a", 2)
    pool.fork("a", "b")
    pool.fork("a", "c")
    assert pool.append({"a": 1, "b": 1, "c": 1}) == [(0, 1), (0, 2)]
    assert pool.pages_of("c") == [0]


def test_a_fork_at_the_end_of_a_page_copies_nothing():
    pool = PagePool(4, 4)
    pool.allocate("a", 4)
    pool.fork("a", "b")
    assert pool.append({"a": 1, "b": 2}) == []
    assert pool.table(["a", "b"]).tolist() == [[0, 1], [0, 2]]


def test_exhaustion_says_what_is_missing_and_changes_nothing():
    pool = PagePool(3, 16)
    pool.allocate("a", 20)
    before = state(pool)
    with pytest.raises(CapacityError, match="2 pages of 16 tokens are needed, 1 of 3 are free"):
        pool.append({"a": 13 + 16})
    with pytest.raises(CapacityError, match="free a sequence"):
        pool.allocate("b", 33)
    assert state(pool) == before
    pool.fork("a", "b")
    with pytest.raises(CapacityError, match="2 pages"):  # a copy, and a page more
        pool.append({"b": 13})
    assert pool.append({"b": 12}) == [(1, 2)]


def test_page_pool_refuses_bad_calls():
    pool = PagePool(3, 4)
    pool.allocate("a", 4)
    for wrong in (lambda: pool.append({"b": 1}), lambda: pool.free("b"), lambda: pool.table(["b"])):
        with pytest.raises(ParameterError, match="there is no sequence 'b'; `allocate` makes one"):
            wrong()
    for wrong in (lambda: pool.allocate("a"), lambda: pool.fork("a", "a")):
        with pytest.raises(ParameterError, match="'a' is there already"):
            wrong()
    with pytest.raises(ShapeError, match="`truncate` takes tokens off"):
        pool.append({"a": -1})
    with pytest.raises(ShapeError, match="it has 4"):
        pool.truncate("a", 5)
    with pytest.raises(ShapeError, match="a table of 0 pages"):
        pool.table(["a"], 0)
    with pytest.raises(ShapeError, match="at least 1"):
        PagePool(0, 16)
    assert pool.table([], 2).shape == (0, 2)
    for wrong, what in (
        (lambda: PagePool(2.5, 16), "pages of a pool are 2.5; they are a whole number"),
        (lambda: pool.allocate("b", 3.5), r"tokens are {'b': 3.5}; they are a whole number for each"),
        (lambda: pool.truncate("a", 1.0), "tokens are 1.0"),
        (lambda: pool.append("a"), "tokens are 'a'; they are a whole number for each sequence"),
        (lambda: pool.own({"a": -1}), "from -1 on; the first one is 0"),
        (lambda: seated(pool, ["a"], [1, 2], PagedRows(3, 4, 1, 2)), r"new tokens are \[1, 2\]; they are an integer"),
    ):
        with pytest.raises(ShapeError, match=what):
            wrong()
    for wrong in (lambda: pool.allocate(["a"]), lambda: pool.length(["a"]), lambda: pool.fork("a", {})):
        with pytest.raises(ParameterError, match="names are hashable"):
            wrong()
    assert pool.sequences == ("a",)
    assert pool.length("a") == 4


def test_page_pool_append_does_not_depend_on_pool_size():
    from support.lowering.effort import at_most

    pool = PagePool(100_000, 16)
    pool.allocate("a", 1_000_000)
    with at_most(100):
        pool.append({"a": 1})
        pool.append({"a": 17})
