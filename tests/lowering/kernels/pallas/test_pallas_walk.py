"""The walk of Pallas TPU kernels: every visible tile once, in arrays of numpy and of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from frisket.dsl.errors import LoweringError
from frisket.lowering.kernels.pallas_tpu import walk as pallas_walk
from frisket.lowering.kernels.pallas_tpu.walk import TpuSearch, TpuWalk, folded, locate, walk
from frisket.lowering.plan import Spans
from frisket.lowering.planner.planner import DeviceSpans

COLUMNS = 11


def random_spans(rng, slices, rows, columns, most, batch, heads, group, alike):
    """Records in order and apart, as many as `most` a row, none for some."""
    bounds = np.zeros((slices, rows, most, 4), np.int32)
    count = rng.integers(0, most + 1, (slices, rows), np.int32)
    for s, row in np.ndindex(slices, rows):
        cuts = np.sort(rng.choice(columns + 1, 2 * count[s, row], replace=False))
        for i, (lo, hi) in enumerate(cuts.reshape(-1, 2)):
            bounds[s, row, i] = lo, *np.sort(rng.integers(lo, hi + 1, 2)), hi
    slice_of = rng.integers(0, slices, (batch, heads), np.int32)
    return Spans(bounds, count, np.repeat(slice_of[:, ::group], group, 1) if alike else slice_of)


def expected(spans, b, group_heads, parts=1):
    """(row, head of the program, tile, visits, full, starts, ends) of every step of a key head, or of so many heads
    that share what is fetched."""
    steps = []
    for row in range(spans.bounds.shape[1]):
        found = [
            (row, i, tile, True, full_lo <= tile < full_hi)
            for i, s in enumerate(spans.slice_of[b, group_heads])
            for lo, full_lo, full_hi, hi in spans.bounds[s, row][: spans.count[s, row]]
            for tile in range(lo, hi)
        ]
        found = found or [(row, 0, 0, False, False)]
        each = len(found)
        found = [(row, part, *rest) for row, head, *rest in found for part in (range(parts) if parts > 1 else [head])]
        steps += [(*x, i < parts, i >= parts * (each - 1)) for i, x in enumerate(found)]
    return steps


def steps_of(made, spans, group=1, parts=1):
    """The steps that the text finds, for every program of every batch entry, as `expected` has them."""
    names = {"jnp": jnp, "lax": lax, "Int": jnp.int32}
    search, grouped = isinstance(made, TpuSearch), group > 1
    exec(locate(search, max(group, parts), grouped), names)
    programs, rows = spans.slice_of.shape[1] // max(group, parts), spans.bounds.shape[1]
    static = {"programs": programs}
    if search:
        static |= {"rows": rows}
        if grouped:
            fold = folded(spans.slice_of, group)
            static |= {"fold": fold, "parts": group // fold}
    else:
        static |= {"room": made.words.shape[1], "tile_bits": (COLUMNS - 1).bit_length()}
    tables = [jax.device_put(x.reshape(-1)) for x in made[1:]]
    each = int(made.steps) + (3 if search else 0)
    places = np.indices((len(spans.slice_of), programs, each)).reshape(3, -1)
    found = jax.jit(jax.vmap(lambda b, h, step: names["locate"](b, h, step, *tables, **static)))(*places)
    (row, *head, tile), flags = jax.tree.map(np.asarray, found)
    visits, full, starts, ends = flags
    head = (head[0] if head else np.zeros_like(row)) * (visits if group > 1 else 1)
    steps = list(zip(row, head, tile * visits, visits, full & visits, starts, ends, strict=True))
    return {(b, h): steps[(b * programs + h) * each :][:each] for b, h in np.ndindex(len(spans.slice_of), programs)}


def agree(made, spans, group=1, parts=1):
    """Whether the text finds every step in order, and nothing to do behind the last."""
    longest = 0
    for (b, h), got in steps_of(made, spans, group, parts).items():
        heads = slice(h * parts, h * parts + 1) if parts > 1 else slice(h * group, (h + 1) * group)
        want = expected(spans, b, heads, parts)
        longest = max(longest, len(want))
        assert got[: len(want)] == want
        assert not any(any(step[3:]) for step in got[len(want) :])
    assert made.steps == longest


GROUPS = {"heads": (1, False), "folded groups": (2, True), "groups of different heads": (2, False)}


@pytest.mark.parametrize("anchors", [None, pytest.param(pallas_walk.ANCHORS, marks=pytest.mark.exhaustive), 8], ids=str)
@pytest.mark.parametrize("heads", GROUPS)
def test_pallas_walk_visits_each_visible_tile_once_in_order(heads, anchors, monkeypatch):
    """A word for each step, and steps that are looked up."""
    group, alike = GROUPS[heads]
    if anchors:
        monkeypatch.setattr(pallas_walk, "ANCHORS", anchors)
        monkeypatch.setattr(pallas_walk, "FLAGS", 32)  # no word has room for them
    spans = random_spans(np.random.default_rng(5), 3, 9, COLUMNS, 3, 2, 4, group, alike)
    made = walk(spans, COLUMNS, group)
    assert isinstance(made, TpuSearch if anchors else TpuWalk)
    agree(made, spans, group)


def test_there_is_room_for_every_tile_of_every_head_of_a_group():
    bounds = np.tile(np.array([0, 1, 3, COLUMNS], np.int32), (2, 3, 1, 1))
    spans = Spans(bounds, np.ones((2, 3), np.int32), np.array([[0, 1, 1, 0]], np.int32))
    made = walk(spans, COLUMNS, 2)
    assert made.words.shape == (2, 3 * 2 * COLUMNS)
    agree(made, spans, 2)


@pytest.mark.parametrize("parts", [2, 4])
def test_heads_of_a_program_take_turns_at_a_tile(parts):
    spans = random_spans(np.random.default_rng(9), 3, 9, COLUMNS, 3, 2, 4, 4, True)
    made = walk(spans, COLUMNS, parts=parts)
    assert isinstance(made, TpuWalk)
    agree(made, spans, parts=parts)


def test_steps_beyond_scalar_memory_are_looked_up(monkeypatch):
    """On the host the steps that there are count, where tables are traced those that there may be; heads then have a
    program each."""
    spans = random_spans(np.random.default_rng(10), 1, 9, COLUMNS, 3, 1, 4, 4, True)
    steps = int(walk(spans, COLUMNS, parts=4).steps)
    monkeypatch.setattr(pallas_walk, "ANCHORS", 8)
    monkeypatch.setattr(pallas_walk, "SCALAR_BYTES", 4 * (1 + (1 << (steps - 1).bit_length())))
    made = walk(spans, COLUMNS, parts=4)
    assert isinstance(made, TpuWalk)
    assert made.words.size == 1 << (steps - 1).bit_length() < 9 * COLUMNS * 4
    agree(made, spans, parts=4)
    traced = jax.eval_shape(
        lambda *found: walk(DeviceSpans(*found, None, spans.slice_of), COLUMNS, parts=4), spans.bounds, spans.count
    )
    assert isinstance(traced, TpuSearch)
    monkeypatch.setattr(pallas_walk, "SCALAR_BYTES", 4 * (1 << (steps - 1).bit_length()))
    found = walk(spans, COLUMNS, parts=4)
    assert isinstance(found, TpuSearch)
    agree(found, spans)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize(("group", "alike"), [(1, False), (2, True), (2, False)])
def test_traced_spans_make_the_same_tables(group, alike, search, monkeypatch):
    if search:
        monkeypatch.setattr(pallas_walk, "FLAGS", 32)
    spans = random_spans(np.random.default_rng(6), 3, 9, 11, 3, 2, 4, group, alike)
    traced = jax.jit(lambda bounds, count: walk(DeviceSpans(bounds, count, None, spans.slice_of), 11, group))
    made = walk(spans, 11, group)
    for name, one, two in zip(made._fields, made, traced(spans.bounds, spans.count), strict=True):
        np.testing.assert_array_equal(one, two, name)
        assert one.dtype == two.dtype == np.int32, name


def test_pallas_walk_shapes_do_not_depend_on_values():
    rng = np.random.default_rng(7)
    shapes = {
        tuple(np.shape(x) for x in walk(random_spans(rng, 1, 20, 20, records, 1, 2, 1, True), 20))
        for records in (3, 4)
        for _ in range(5)
    }
    assert len(shapes) == 1


@pytest.mark.parametrize("rows", [2048, 8192])
def test_long_rows_find_their_place_at_once(rows):
    """A million tokens: as many steps as would fill scalar memory are reached through a few anchors."""
    tiles = np.arange(rows)
    bounds = np.stack([0 * tiles, 0 * tiles, tiles, tiles + 1], 1)[None, :, None].astype(np.int32)
    spans = Spans(bounds, np.ones((1, rows), np.int32), np.zeros((1, 1), np.int32))
    made = walk(spans, rows)
    assert made.steps == rows * (rows + 1) // 2
    assert len(made.anchor) == pallas_walk.ANCHORS
    per_anchor = 1 << int(made.shift[0])
    assert made.steps <= per_anchor * len(made.anchor) < 2 * made.steps
    rows_apart = np.diff(made.anchor[: int(made.steps) // per_anchor])
    assert np.mean(rows_apart) < 1  # `first` is seldom looked at twice


def test_many_batch_entries_take_no_scalar_memory(monkeypatch):
    heads = np.array([[0, 2, 1, 2]], np.int32)
    spans = random_spans(np.random.default_rng(8), 3, 9, 11, 3, 1, 4, 1, False)
    of_heads = Spans(spans.bounds, spans.count, np.tile(heads, (5, 1)))
    assert walk(of_heads, 11).slice_of.tolist() == [0, 2, 1, 2] * 5
    monkeypatch.setattr(pallas_walk, "LONG", 4)
    made = walk(of_heads, 11)
    assert made.slice_of.tolist() == [0, 2, 1, 2]
    agree(made, of_heads)
    assert walk(Spans(spans.bounds, spans.count, np.full((500_000, 4), 1, np.int32)), 11).slice_of.tolist() == [1]
    different = np.arange(500_000, dtype=np.int32).reshape(-1, 1) % 3
    with pytest.raises(LoweringError, match="of a TPU's scalar memory"):
        walk(Spans(spans.bounds, spans.count, different), 11)


def test_spans_too_long_for_scalar_memory():
    def raised(rows, records):
        bounds = np.tile(np.array([0, 0, 0, rows // records], np.int32), (1, rows, records, 1))
        spans = Spans(bounds, np.full((1, rows), records, np.int32), np.zeros((1, 1), int))
        with pytest.raises(LoweringError) as caught:
            walk(spans, rows)
        return str(caught.value)

    assert raised(4096, 8) == (
        'the spans of this mask take 593 KiB of a TPU\'s scalar memory, at most 512; use larger tiles, or backend="xla"'
    )
    assert raised(4096, 5) == raised(4096, 8)  # as many as a power of two
