"""The flat planner: kinds of tiles that are never wrong, and the true ones where the mask's family says so."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest
import torch
from support import masks
from support.lowering import brute
from support.lowering.planner_numpy import NUMPY
from support.tiers import default_only, thinned
from torch.utils._python_dispatch import TorchDispatchMode

from frisket.dsl.errors import EvaluationError
from frisket.dsl.ir import lookup, make
from frisket.dsl.sugar import eq, k, q
from frisket.dsl.types import INT
from frisket.lowering.analysis.layout import bind, grid_of
from frisket.lowering.analysis.runs import from_records
from frisket.lowering.plan import Spans
from frisket.lowering.planner import arrays as text
from frisket.lowering.planner import planner as flat
from frisket.lowering.simplify import simplify
from frisket.runtime.machine.modules import load_source
from lowering.planner import golden_planners

DOC = frozenset({"doc"})
WORDS = {
    "numpy": (NUMPY, np.asarray),
    "torch": (text.TORCH, lambda x: torch.from_numpy(np.array(x))),
    "jnp": (text.JNP, jax.device_put),
}


class Found:
    """What a planner printed for one backend says of a case."""

    def __init__(self, case, backend="numpy", sorted_=frozenset(), room=64, wide=True, n=None):
        words, convert = WORDS[backend]
        mask = simplify(bind(case.mask, case.tables))
        limits = {m: float(np.abs(t).max()) for m, t in case.tables.items() if t.dtype.kind == "i"}
        limits |= {m: abs(x) for m, x in case.params.items()} | dict.fromkeys("qk", 400)
        self.plan = flat.planner(mask, sorted_, limits, wide)
        self.grid, slice_of = grid_of(mask, case.problem, case.block)
        ints = np.int64 if wide else np.int32
        at = [
            convert(np.asarray(x, ints).reshape(-1, 1, 1)) for x in (self.grid.b, self.grid.h, self.grid.q, self.grid.k)
        ]
        self.columns = -(-case.kv_len // case.block[1])
        run = load_source(text.emit(self.plan, words, wide))["plan_spans"]
        if backend == "jnp":
            run = jax.jit(run, static_argnames=("q_len", "kv_len", "block", "room", "records"))
        found = run(
            *at, case.sizes, case.params, {m: convert(t) for m, t in case.tables.items()}, q_len=case.q_len,
            kv_len=case.kv_len, block=case.block, room=room, records=n or self.plan.records(self.columns),
        )  # fmt: skip
        self.bounds, self.count, self.overflow = (np.asarray(x) for x in found)
        self.spans = Spans(self.bounds.astype(np.int32), self.count.astype(np.int32), slice_of)
        self.check_records()

    def check_records(self):
        """lo <= full_lo <= full_hi <= hi, disjoint and in order; unused records are zero."""
        used = np.arange(self.bounds.shape[2]) < self.count[..., None]
        assert (np.diff(self.bounds, axis=-1) >= 0).all()
        assert (self.bounds[~used] == 0).all()
        assert (self.bounds[used][:, 3] > self.bounds[used][:, 0]).all()
        assert (self.bounds[..., 1:, 0] >= self.bounds[..., :-1, 3])[used[..., 1:]].all()

    @property
    def kinds(self):
        runs = from_records(self.bounds, self.count)
        grid = np.zeros((*self.count.shape, self.columns), np.uint8)
        for s, row, start, stop, kind in zip(runs.slice, runs.row, runs.start, runs.stop, runs.kind, strict=True):
            grid[s, row, start:stop] = kind
        return grid[self.spans.slice_of]


def truth(case):
    return brute.kinds(case.mask, case.q_len, case.kv_len, **case.options)


def sound(got, want):
    """PARTIAL may stand for anything; FULL and EMPTY may not."""
    return bool(((got == want) | (got == 1)).all())


# Tiles of these are what looking at every element says, sorted tables declared or not.
EXACT = (
    "causal causal-window window prefix bottom-right documents documents-window segments chunked chunked-causal "
    "block-causal every-other padding by-head by-batch-and-head sinks-window global xor hole complement full nothing "
    "antidiagonal steep per-query-window where"
).split()


JNP = ("segments", "tile-map", "nan-bias")  # each has to be compiled: a second or two


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", thinned(masks.written()))
def test_flat_planner_is_sound_on_written_masks(name):
    rng = random.Random(name)
    for i in range(4):
        case = masks.case(masks.written()[name], rng)
        want = truth(case)
        for sorted_ in (frozenset(), DOC):
            found = Found(case, sorted_=sorted_)
            assert sound(found.kinds, want)
            if name in EXACT and not found.overflow:
                np.testing.assert_array_equal(found.kinds, want)
        for backend in ("torch", *(["jnp"] if name in JNP else [])) if i == 0 else ():
            with jax.enable_x64(True):
                other = Found(case, backend, DOC)
            np.testing.assert_array_equal(other.bounds, found.bounds)


def test_documents_are_intervals():
    """Sorted ones are found by search, whatever order the clauses are in; others by their least and greatest."""
    mask = masks.written()["documents"]
    assert flat.planner(mask, DOC).seen
    assert not flat.planner(mask).seen
    assert flat.planner(masks.written()["segments"]).seen


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", [n if n < 30 else pytest.param(n, marks=pytest.mark.exhaustive) for n in range(200)])
def test_flat_planner_is_sound_on_random_masks(seed):
    one_random_mask(random.Random(f"flat {seed}"), jnp_too=seed in (1, 30))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_flat_planner_is_sound_on_many_random_masks(seed):
    rng = random.Random(f"flat, slow {seed}")
    for _ in range(250):
        one_random_mask(rng)


def one_random_mask(rng, jnp_too=False):
    case = masks.case(masks.random_mask(rng), rng)
    sorted_, room = rng.choice([frozenset(), DOC]), rng.choice([64, 64, 8, 6])
    try:
        found = Found(case, "numpy", sorted_, room)
        want = truth(case)
    except EvaluationError as error:  # products of products: numpy's operators refuse, the others wrap
        if "leaves 64 bits" not in str(error):
            raise
        return
    assert sound(found.kinds, want)
    other = Found(case, "torch", sorted_, room)
    np.testing.assert_array_equal(other.bounds, found.bounds)
    assert other.overflow == found.overflow
    if jnp_too:
        with jax.enable_x64(True):
            np.testing.assert_array_equal(Found(case, "jnp", sorted_, room).bounds, found.bounds)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", default_only(["documents", "scattered"], "documents"))
def test_in_32_bits(name):
    made = {"scattered": eq(lookup("any", (q,)), lookup("any", (k,)))} | masks.written()
    case = masks.case(made[name], random.Random(name))
    case.tables = {n: t.astype(np.int32) if t.dtype.kind == "i" else t for n, t in case.tables.items()}
    found = Found(case, "jnp", wide=False)
    assert sound(found.kinds, truth(case))
    np.testing.assert_array_equal(found.bounds, Found(case).bounds)


def test_searches_in_32_bits():
    case = masks.short_tables()[1]
    case.tables = {"doc": case.tables["doc"].astype(np.int32)}
    np.testing.assert_array_equal(Found(case, "jnp", DOC, wide=False).kinds, truth(case))


def test_integers_that_may_not_fit_are_not_asked():
    product = q * lookup("doc", (k,)) >= 7
    limits = {"doc": 2.0**31 - 1, "q": 4096, "k": 4096}
    assert flat.planner(product, frozenset(), limits, wide=True).never is not flat.FALSE
    asked = flat.planner(product & (q >= k), frozenset(), limits, wide=False)
    assert (asked.always, asked.never) == (flat.FALSE, simplify(flat.never(q >= k)))


def test_integers_of_what_is_seen_and_of_what_is_hidden_fit():
    """Either may be one larger than the other: `k > w` is seen from w + 1 on, and hidden up to w."""
    w, most = masks.w, 2.0**31 - 1
    for mask in (k > w, k >= w, k < w, k <= w, k < -w, k > -w - 1, ~eq(k, w), eq(lookup("doc", (k,)), w)):
        made = flat.planner(simplify(mask), DOC, {"w": most, "doc": most, "q": 4096, "k": 4096}, wide=False)
        assert all(flat.fits(e, {"w": most, "doc": most, "q": 4096, "k": 4096}, False) for e in made.roots)
    limits = {"doc": 2.0**29, "q": 4096, "k": 4096}
    for op in sorted(flat.READS - {"extent"}):
        n = 2 if op.startswith("range") else 1
        assert flat.fits(make(op, (q,) * n, "doc", INT), limits, False)
        assert not flat.fits(make(op, (q,) * (n - 1) + (q * 2**20,), "doc", INT), limits, False), op
        if op != "segment":
            assert flat.fits(make(op, (q,) * n, "doc", INT) + 4096, limits, False)
            assert not flat.fits(make(op, (q,) * n, "doc", INT) * 4, limits, False), op


# -- room -------------------------------------------------------------------------------------------------


def stripes(seed, columns=400):
    """A table of runs of many lengths: rows of tiles with many runs."""
    rng = np.random.default_rng(seed)
    keep = np.repeat(rng.random(columns) < 0.5, 4)
    return masks.Case(lookup("keep", (k,), masks.BOOL), 8, 4 * columns, 1, 1, (4, 4), sizes=(1, 1, 8, 4 * columns),
                      tables={"keep": keep})  # fmt: skip


@pytest.mark.parametrize(("room", "n"), [(400, 200), (64, 200), (64, 4), (6, 1), (400, 1), (33, 2)])
def test_flat_planner_marks_tiles_without_room_partial(room, n):
    case = stripes(1)
    found, want = Found(case, room=room, n=n), truth(case)
    assert sound(found.kinds, want)
    assert found.overflow == (room < 400 or n < 200)
    assert (found.kinds == want).all() == (not found.overflow)


@pytest.mark.parametrize("seed", thinned(range(12)))
def test_room_runs_out_anywhere(seed):
    """Whatever piece is the last that finds room: full, empty or open."""
    rng = np.random.default_rng(seed)
    keep = np.repeat(rng.random(60) < 0.6, rng.choice([1, 2, 4, 30, 90], 60))
    case = masks.Case(lookup("keep", (k,), masks.BOOL), 4, len(keep), 1, 1, (4, 2), sizes=(1, 1, 4, len(keep)),
                      tables={"keep": keep})  # fmt: skip
    want = truth(case)
    for room in range(4, 20):
        assert sound(Found(case, room=room).kinds, want)


@pytest.mark.parametrize("seed", thinned(range(12)))
def test_documents_of_every_length(seed):
    """Documents that begin and end next to every edge of a tile, found by search and by ranges alike."""
    rng = np.random.default_rng(seed)
    doc = np.repeat(np.arange(40) * 3, rng.integers(1, 9, 40))
    n = len(doc) - seed % 4
    same = eq(lookup("doc", (q,)), lookup("doc", (k,)))
    for mask, block in ((same, (3, 2)), (same & (q >= k), (4, 4)), (~same, (2, 5))):
        case = masks.Case(mask, n, n, 1, 1, block, sizes=(1, 1, n, n), tables={"doc": doc})
        want = truth(case)
        found = [Found(case, sorted_=s, room=200, n=200) for s in (DOC, frozenset())]
        np.testing.assert_array_equal(found[0].kinds, want)
        np.testing.assert_array_equal(found[1].kinds, want)


def test_sorted_tables_shorter_than_the_keys():
    """Positions behind the end have the last entry, in what is found by search too."""
    for case in masks.short_tables():
        found = Found(case, sorted_=DOC)
        np.testing.assert_array_equal(found.kinds, truth(case), err_msg=str(case.mask))
        np.testing.assert_array_equal(Found(case, "torch", DOC).bounds, found.bounds)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_boxes_of_a_table(backend):
    """Never too narrow; exact where the box is made of aligned powers of two."""
    rng = np.random.default_rng(3)
    table, words = rng.integers(-99, 99, (2, 3, 9, 21)), WORDS[backend]
    at = masks.b, masks.h
    made = lookup("t", (*at, q, k)) >= lookup("t", (*at, k, q))
    names = load_source(text.emit(flat.planner(made), words[0], True))
    n = 300
    b, h = rng.integers(-1, 3, n), rng.integers(-1, 4, n)
    lo = np.stack([rng.integers(-2, 10, n), rng.integers(-2, 22, n)])
    hi = lo + np.stack([rng.integers(0, 9, n), rng.integers(0, 21, n)])
    row = names["leading"](table, words[1](b), words[1](h))
    for join, of, better in (("minimum", np.min, np.less_equal), ("maximum", np.max, np.greater_equal)):
        held = names["plane"](words[1](table), names[join], 2)
        found = np.asarray(names["within"](held, row, tuple(map(words[1], lo)), tuple(map(words[1], hi))))
        for i in range(n):
            first, last = (np.clip([b[i], h[i], *x[:, i]], 0, np.array(table.shape) - 1) for x in (lo, hi))
            part = table[first[0], first[1], first[2] : last[2] + 1, first[3] : last[3] + 1]
            assert better(found[i], of(part))
            if all(
                z - a + 1 in (1, 2, 4, 8) and a % (z - a + 1) == 0 for a, z in zip(first[2:], last[2:], strict=True)
            ):
                assert found[i] == of(part)


def test_pieces_are_split_where_it_matters():
    """One narrow hole in a long row: two of 64 pieces a row are enough to find it, at every level."""
    keep = np.ones(64 * 1024, bool)
    keep[40_000:40_030] = False
    case = masks.Case(lookup("keep", (k,), masks.BOOL), 4, len(keep), 1, 1, (4, 4), sizes=(1, 1, 4, len(keep)),
                      tables={"keep": keep})  # fmt: skip
    found = Found(case)
    assert not found.overflow
    np.testing.assert_array_equal(found.kinds, truth(case))


# -- tables -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "n"), [(b, n) for b in ("numpy", "torch") for n in (1, 2, 31, 4096, 4097, 5000)] + [("jnp", 4100)]
)
def test_ranges_of_a_table(backend, n):
    """Exact from one block on, and where a range begins or ends with a block; never too narrow."""
    rng = np.random.default_rng(n)
    table = rng.integers(-1000, 1000, (3, n))
    row, lo = rng.integers(0, 3, 400), rng.integers(-5, n + 5, 400)
    hi = lo + rng.integers(0, n, 400)
    mask = lookup("t", (masks.b, q)) >= lookup("t", (masks.b, k))
    words, convert = WORDS[backend]
    with jax.enable_x64(True):
        names = load_source(text.emit(flat.planner(mask), words, True))
        joins = names["minimum"], names["maximum"]

        def both(*args):
            t, *where = args
            return [names["over"](names["line"](t, *pair), *where) for pair in (joins, joins[::-1])]

        found = (jax.jit(both) if backend == "jnp" else both)(*(convert(x) for x in (table, row, lo, hi)))
        least, most = (np.asarray(x) for x in found)
    for i in range(400):
        a, z = (min(max(x[i], 0), n - 1) for x in (lo, hi))
        part = table[row[i], a : z + 1]
        if z - a >= 31 or n <= 4096 or a % 32 == 0:
            assert (least[i], most[i]) == (part.min(), part.max())
        assert least[i] <= part.min()
        assert most[i] >= part.max()


class NoCopy(TorchDispatchMode):
    """Refuses what looks at a value or moves a tensor to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if "_local_scalar_dense" in name or "nonzero" in name or "masked_select" in name:
            raise AssertionError(f"{name} waits for the device")
        if "_to_copy" in name and (kwargs or {}).get("device") is not None:
            raise AssertionError(f"{name} moves a tensor")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["documents", "segments", "per-query-window", "tree", "tile-map", "padding"])
@pytest.mark.parametrize("sorted_", [frozenset(), DOC])
def test_torch_looks_at_no_value(name, sorted_):
    case = masks.case(masks.written()[name], random.Random(name))
    with NoCopy():
        found = Found(case, "torch", sorted_)
    assert sound(found.kinds, truth(case))


@pytest.mark.parametrize("backend", ["jnp", "torch"])
@pytest.mark.parametrize("name", golden_planners.NAMES)
def test_golden_flat_planner_in_jnp_and_torch(name, backend, golden):
    golden_planners.check(golden, name, ".py", lambda made: text.emit(made, WORDS[backend][0]), f"{backend}_")


def test_meta_tensors_suffice():
    """Shapes alone make the text run: nothing in it depends on a value."""
    made = flat.planner(masks.written()["documents"])
    run = load_source(text.emit(made, text.TORCH))["plan_spans"]
    at = [torch.zeros(1, 1, 1, dtype=torch.int64, device="meta")] * 4
    doc = torch.zeros(100_000, dtype=torch.int32, device="meta")
    bounds, count, overflow = run(*at, (1, 1, 1, 1), {}, {"doc": doc}, q_len=100_000, kv_len=100_000, block=(128, 128),
                                  room=64, records=8)  # fmt: skip
    assert (tuple(bounds.shape), tuple(count.shape), overflow.device.type) == ((1, 782, 8, 4), (1, 782), "meta")
