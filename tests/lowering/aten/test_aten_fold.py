"""Sums of captured gradients against numpy.add.at over every pair."""

import math

import numpy as np
import pytest
import torch

from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import KV_LEN, TRUE, lit, lookup, param
from frisket.dsl.sugar import b, h, k, minimum, q
from frisket.lowering.aten import captured as aten_sum
from frisket.lowering.aten.captured import fold, folded
from frisket.lowering.dense import coordinates
from frisket.lowering.derive import Gradient
from frisket.lowering.plan import Geometry, Problem

ONE = lit(1.0)
PLAIN = Geometry(2, 4, 2, 9, 13, 8, 8, 1.0)
PLACED = Geometry(2, 4, 2, 9, 13, 8, 8, 1.0, (1, 2, 5, 3), (5, 8, 40, 40))
BY_BATCH = Geometry(2, 4, 2, 9, 13, 8, 8, 1.0, (0, 0, np.array([7, 2]), np.array([0, 4])), (2, 4, 40, 40))
BUCKET = {"bucket": torch.tensor([3, 0, 1, 2, 2, 4, 0])}
CASES = {
    "head": ("head", (h, b), (6, 3)),
    "head, one entry": ("head", (lit(2),), (4,)),
    "row": ("row", (h, q), (5, 11)),
    "row, backwards": ("row", (KV_LEN - q, b), (20, 2)),
    "column": ("column", (k + param("s0"),), (20,)),
    "column, through a table": ("column", (b, lookup("bucket", (k,))), (2, 5)),
    "diagonal": ("diagonal", (h, q - k + 6), (5, 14)),
    "diagonal, clamped": ("diagonal", (minimum(k - q, 4) + 3,), (6,)),
}


def summed(cells, over, g):
    if over == "head":
        return cells.sum((2, 3))
    if over in ("row", "column"):
        return cells.sum(3 if over == "row" else 2)
    found = np.zeros((*cells.shape[:2], g.q_len + g.kv_len - 1))
    at = np.arange(g.q_len)[:, None] - np.arange(g.kv_len) + g.kv_len - 1
    np.add.at(found, (slice(None), slice(None), at), cells)
    return found


@pytest.mark.parametrize("g", [PLAIN, PLACED, BY_BATCH], ids=["plain", "placed", "by batch"])
@pytest.mark.parametrize("case", CASES)
def test_folded_gradients_equal_numpy_add_at(case, g):
    over, index, shape = CASES[case]
    cells = np.random.default_rng(0).standard_normal((g.batch, g.heads, g.q_len, g.kv_len))
    env = {**coordinates(Problem(*cells.shape[2:], *cells.shape[:2], g.origin, g.full)), "s0": 2}
    tables = {"bucket": BUCKET["bucket"].numpy()}
    places = [np.clip(evaluate(i, env, tables), 0, n - 1) for i, n in zip(index, shape)]
    want = np.zeros(shape)
    np.add.at(want, tuple(np.broadcast_to(x, cells.shape) for x in places), cells)
    buffer = torch.from_numpy(summed(cells, over, g))
    got = fold(Gradient("t0", index, ONE, over), buffer, shape, g, {"s0": 2}, BUCKET)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-12)
    assert fold(Gradient("t0", index, ONE, over), buffer.float(), shape, g, {"s0": 2}, BUCKET).dtype == torch.float32


def test_fold_of_a_slot_is_a_number_and_of_scatter_the_table():
    buffer = torch.arange(8.0).view(2, 4)
    assert fold(Gradient("s0", (), ONE, "head"), buffer, (), PLAIN, {}, {}).item() == 28
    assert fold(Gradient("t0", (q, k), ONE, "scatter"), buffer, (2, 4), PLAIN, {}, {}) is buffer


def test_sites_of_one_table_are_added():
    sites = [Gradient("t0", (h,), ONE, "head"), Gradient("t1", (h,), TRUE, "head"), Gradient("t0", (b,), ONE, "head")]
    buffers = [torch.full((2, 4), x) for x in (1.0, 10.0, 100.0)]
    got = folded(sites, buffers, PLAIN, {}, {"t0": torch.zeros(4), "t1": torch.zeros(2)})
    assert got["t0"].tolist() == [402.0, 402.0, 2.0, 2.0]
    assert got["t1"].tolist() == [20.0, 60.0]


# -- in fixed point, as on a device: here too, since it needs none ----------------------------------


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e30])
def test_fixed_point_agrees_with_exact_sums(size):
    draw = np.random.default_rng(1)
    values = torch.from_numpy(draw.standard_normal(20_000) * 10.0 ** draw.uniform(-6, 0, 20_000) * size)
    place = torch.from_numpy(draw.integers(0, 7, 20_000))
    found = aten_sum.fixed(place, values, 7)
    want = [math.fsum(values[place == i].tolist()) for i in range(7)]
    unit = 1 / aten_sum.units(values.abs().sum()).item()
    assert unit <= 2.0**-60 * values.abs().sum().item()
    np.testing.assert_allclose(found.numpy(), want, rtol=0, atol=20_000 * unit / 2)
    np.testing.assert_allclose(found.numpy(), aten_sum.summed(place, values, 7).numpy(), rtol=1e-12, atol=size * 1e-11)


def test_fixed_point_does_not_hang_on_the_order():
    draw = np.random.default_rng(2)
    values, place = torch.from_numpy(draw.standard_normal(5000)), torch.from_numpy(draw.integers(0, 3, 5000))
    first = aten_sum.fixed(place, values, 3)
    for _ in range(5):
        mixed = torch.from_numpy(draw.permutation(5000))
        assert torch.equal(aten_sum.fixed(place[mixed], values[mixed], 3), first)


def test_fixed_point_of_nothing_and_of_what_is_not_finite():
    place = torch.tensor([0, 2])
    assert aten_sum.fixed(place, torch.zeros(2, dtype=torch.float64), 3).tolist() == [0, 0, 0]
    for bad in (math.nan, math.inf):
        assert aten_sum.fixed(place, torch.tensor([1.0, bad], dtype=torch.float64), 3).isnan().all()
    # All in one place: still below 2**63.
    most = torch.full((1000,), 3e38, dtype=torch.float64)
    assert aten_sum.fixed(torch.zeros(1000, dtype=torch.int64), most, 1).item() == pytest.approx(3e41)
