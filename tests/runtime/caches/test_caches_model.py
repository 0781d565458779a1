"""Every cache beside lists of tokens: drawn sequences of append, keep, truncate, fork and seat."""

import functools

import numpy as np
import pytest
from support.cache_model import KINDS, PAGE, PAGES, OfJax, OfTorch, Run, jitted, run
from support.tiers import thinned

import frisket as fk
from frisket.caches import PagePool


@pytest.fixture
def called(monkeypatch):
    """Every call of a cache of torch is one of its attention, without a planner compiled for its steps."""
    monkeypatch.setattr(pytest.importorskip("frisket.runtime.torch.decode"), "MAX_STEP_QUERIES", 0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "dtype"), thinned(KINDS))
def test_torch_caches_follow_the_model(kind, dtype, called):
    for seed in range(6 if kind == "paged" else 2):
        run(OfTorch, kind, dtype, seed)


@pytest.mark.exhaustive
def test_torch_where_the_pool_is_not_told(called):
    assert sum(run(OfTorch, "paged", "float32", seed, forgetful=True).refused for seed in range(8)) > 4


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [pytest.param(*x, marks=() if x == ("paged", "float32") else pytest.mark.exhaustive) for x in KINDS],
)
def test_jax_caches_follow_the_model(kind, dtype):
    for seed in range(2):
        run(OfJax, kind, dtype, seed)


@pytest.mark.exhaustive
def test_jax_where_the_pool_is_not_told():
    assert sum(run(OfJax, "paged", "float32", seed, forgetful=True).refused for seed in range(8)) > 4


@pytest.mark.slow
@pytest.mark.parametrize("of", [OfTorch, OfJax])
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_caches_follow_the_model_over_many_seeds(of, kind, dtype, called):
    for seed in range(100, 160):
        run(of, kind, dtype, seed, 60)
        if kind == "paged":
            run(of, kind, dtype, seed, 60, forgetful=True)


# -- what a page of the docs says, and what is refused where a pool was not told ----------------------------------


def rejected(of, told):
    """A prompt of 14, four drafts of which two are kept, and a step behind them: what the page of caches says to do."""
    cache, pool = of("paged", "float32"), PagePool(PAGES, PAGE)
    tokens = list(range(14))
    cache.seat(pool, ["a", None], [14, 0], pool.allocate("a", 14))
    for part in (tokens[:7], tokens[7:]):
        cache.attention([part, []])
    cache.seat(pool, ["a", None], [4, 0], pool.append({"a": 4}))
    cache.attention([[20, 21, 22, 23], []], [-1, 0, 0, 1])
    cache.keep(np.array([[0, 2], [0, 0]]), np.array([4, 0]), np.array([2, 0]))
    if told:
        pool.truncate("a", 16)
    cache.seat(pool, ["a", None], [1, 0], pool.append({"a": 1}))
    out = cache.attention([[30], []])
    assert cache.cache.lengths.tolist() == [17, 0]
    Run(cache, 0).compare(out[0, :1], [*tokens, 20, 22, 30], 1)


@pytest.mark.parametrize("of", [OfTorch, pytest.param(OfJax, marks=pytest.mark.exhaustive)])
def test_a_pool_that_was_not_told_of_drafts_is_refused(of, called):
    with pytest.raises(fk.ShapeError, match="row 0 holds 16 tokens of the sequence 'a', and the pool counts 19, 1"):
        rejected(of, told=False)
    rejected(of, told=True)


@pytest.mark.parametrize("of", [OfTorch, OfJax])
def test_seat_refuses_rows_that_disagree_with_the_pool(of, called):
    cache, pool = of("paged", "float32"), PagePool(PAGES, PAGE)
    pool.allocate("a", 5)
    cache.seat(pool, ["a", None], [5, 0], [])
    cache.attention([[1, 2, 3, 4, 5], []])
    pool.append({"a": 2})
    with pytest.raises(fk.ShapeError, match=r"row 0 holds 5 .* counts 7, 0 of them new\n.* say how many by `new`"):
        cache.seat(pool, ["a", None], 0, [])  # two tokens of the pool that nobody wrote
    cache.seat(pool, ["a", None], [2, 0], [])
    cache.attention([[6, 7, 8], []])  # the page has room for one more than the pool knows
    for rows in (["a", None], [None, None]):
        with pytest.raises(fk.ShapeError, match=r"row 0 holds 8 tokens .* counts 7, 0 of them new\n  append them"):
            cache.seat(pool, rows, 0, [])
    pool.append({"a": 1})
    cache.seat(pool, [None, "a"], 0, [])  # into another row
    assert cache.cache.lengths.tolist() == [0, 8]
    pool.truncate("a", 3)  # the pool alone may say that a sequence is shorter
    cache.seat(pool, [None, None], 0, [])
    cache.seat(pool, ["a", None], 0, [])
    assert cache.cache.lengths.tolist() == [3, 0]
    cache.truncate([1, 0])
    cache.seat(pool, [None, None], 0, [])
    with pytest.raises(fk.ShapeError, match="1 tokens of the sequence 'a' are stored, and the pool counts 3, 0"):
        cache.seat(pool, [None, "a"], 0, [])


def forked(of):
    """A sequence of 15 tokens with four drafts over the end of a page, and a fork of it, in two rows."""
    cache, pool = of("paged", "float32"), PagePool(PAGES, PAGE)
    pool.allocate("a", 15)
    cache.seat(pool, ["a", None], [15, 0], [])
    cache.attention([list(range(9)), []])
    cache.attention([list(range(9, 15)), []])
    cache.seat(pool, ["a", None], [4, 0], pool.append({"a": 4}))
    cache.attention([[20, 21, 22, 23], []], [-1, -1, 0, 1])
    pool.fork("a", "b")
    return cache, pool


@pytest.mark.parametrize("of", [OfTorch, functools.partial(OfJax, eager=True)])
def test_drafts_on_shared_pages_are_not_moved(of, called):
    cache, pool = forked(of)
    cache.seat(pool, ["a", "b"], 0, [])
    paths = np.array([[1, 3], [0, 2]]), np.array([4, 4]), np.array([2, 2])
    before = np.asarray(cache.cache.k).copy()
    with pytest.raises(fk.ShapeError, match=r"copies = pool.own\(\{<its name>: 15\}\), `seat` with these copies"):
        cache.keep(*paths)
    np.testing.assert_array_equal(before, cache.cache.k)
    cache.seat(pool, ["a", "b"], 0, pool.own({"a": 15, "b": 15}))
    cache.eager = False
    cache.keep(*paths)
    for s in "ab":
        pool.truncate(s, 17)
    cache.seat(pool, ["a", "b"], 1, pool.append({"a": 1, "b": 1}))
    out = cache.attention([[30], [31]])
    for b, kept in enumerate(([21, 23, 30], [20, 22, 31])):
        Run(cache, 0).compare(out[b, :1], [*range(15), *kept], 1)


@pytest.mark.parametrize("of", [OfTorch, OfJax])
def test_copies_of_several_calls_are_done_one_after_another(of, called):
    """A copy is copied on, a page is freed and written again, and all are given to one `seat`."""
    cache, pool = of("paged", "float32"), PagePool(PAGES, PAGE)
    pool.allocate("a", 9)
    cache.seat(pool, ["a", None], [9, 0], [])
    cache.attention([list(range(9)), []])
    copies = []
    for parent, child, left in (("a", "b", None), ("b", "c", "b"), ("c", "d", None)):
        pool.fork(parent, child)
        copies += pool.own({child: 0})
        if left:
            pool.free(left)
    assert copies == [(0, 1), (1, 2), (2, 1)]
    cache.seat(pool, ["c", "d"], 1, copies + pool.append({"c": 1, "d": 1}))
    out = cache.attention([[30], [31]])
    for b, last in enumerate((30, 31)):
        Run(cache, 0).compare(out[b, :1], [*range(9), last], 1)


@pytest.mark.parametrize("of", [OfTorch, OfJax])
def test_a_fork_from_before_a_keep_is_refused(of, called):
    """It was seated in no row, so its drafts were on the pages on which they were moved."""
    cache, pool = forked(of)
    cache.keep(np.array([[1, 3], [0, 0]]), np.array([4, 0]), np.array([2, 0]))
    pool.truncate("a", 17)
    with pytest.raises(fk.ShapeError, match="15 tokens of the sequence 'b' are stored, and the pool counts 19"):
        cache.seat(pool, ["a", "b"], 0, [])


@pytest.mark.parametrize("of", [OfTorch, OfJax])
def test_a_row_that_ends_on_shared_pages_takes_no_tokens(of, called):
    cache, pool = forked(of)
    cache.seat(pool, ["a", "b"], 0, [])
    cache.truncate([19, 4])
    if of is OfTorch:
        with pytest.raises(fk.CapacityError, match="sequence 1 has 4 tokens and 1 new ones, the cache has room for 4"):
            cache.attention([[], [30]])
    else:
        with pytest.raises(AssertionError):  # of `overflowed`
            cache.attention([[], [30]])
    pool.truncate("b", 4)
    pool.append({"a": 1})
    pool.fork("a", "c")
    with pytest.raises(fk.ShapeError, match=r"rows of 'a' and 'c' would write .* pool.own\(\{'c': 19\}\)"):
        cache.seat(pool, ["a", "c"], 1, [])


def test_overflowed_reports_bad_keeps_under_jit():
    cache, pool = forked(OfJax)
    cache.seat(pool, ["a", "b"], 0, [])
    before = np.asarray(cache.cache.k).copy()
    kept = jitted()[2](cache.cache, np.array([[1, 3], [0, 2]]), np.array([4, 4]), np.array([2, 0]))
    assert kept.overflowed.tolist() == [True, False]
    np.testing.assert_array_equal(before, kept.k)


@pytest.mark.parametrize("of", [OfTorch, functools.partial(OfJax, eager=True)])
def test_paths_that_are_in_no_tree(of, called):
    cache = of("plain", "float32")
    cache.attention([[1, 2, 3], [1, 2, 3]])
    for path, drafted, counts, what in (
        ([[0, 2], [0, 1]], 2, [2, 2], r"path\[0, 1\] is node 2, and the tree of sequence 0 has 2 nodes"),
        ([[0, 1], [0, -1]], [3, 3], [2, 2], r"path\[1, 1\] is node -1"),
        ([[0, 0], [0, 0]], [1, 1], [1, 2], r"path\[1, 1\] is node 0, and the tree of sequence 1 has 1 nodes"),
        ([[0], [0]], [4, 3], [1, 1], r"drafted are \[4, 3\], the last of \[3, 3\] tokens"),
    ):
        with pytest.raises(fk.ShapeError, match=what):
            cache.keep(np.array(path), np.array(drafted), np.array(counts))
    assert cache.cache.lengths.tolist() == [3, 3]
