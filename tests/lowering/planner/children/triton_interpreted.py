"""Run by test_planner_triton.py under TRITON_INTERPRET=1: bit for bit the spans that the text in torch finds."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from support import masks
from support.lowering.device_tables import pose

import frisket as fk
from frisket.dsl.ir import FLOAT_FUNCTIONS, build, lookup, param, segment
from frisket.dsl.sugar import eq, k, q
from frisket.dsl.types import BOOL, FLOAT
from frisket.lowering.analysis.layout import bind, grid_of, swap
from frisket.lowering.plan import Problem
from frisket.lowering.planner import arrays
from frisket.lowering.planner import planner as flat
from frisket.lowering.simplify import simplify
from frisket.runtime.machine.modules import load_source
from frisket.runtime.plans import run as flat_triton
from frisket.runtime.plans.run import SpanRequest

DOC = frozenset({"doc"})
DEVICE = torch.get_default_device()
FEW = "documents segments by-head batch-documents tile-map nan-bias".split()


def agree(case, sorted_=frozenset(), room=64, records=0, turned=False):
    """Plans in torch and in Triton find the same."""
    mask = simplify(bind(case.mask, case.tables))
    grid, _ = grid_of(mask, case.problem, case.block)
    at = (grid.b, grid.h, grid.q, grid.k)
    place = SpanRequest(at, case.problem, case.block, DEVICE, room=room, records=records)
    if turned:
        mask, place = simplify(swap(mask)), place.transposed
    limits = {m: float(np.abs(t).max()) for m, t in case.tables.items() if t.dtype.kind == "i"}
    limits |= {m: abs(x) for m, x in case.params.items()} | dict.fromkeys("qk", 400)
    plan = flat.planner(mask, sorted_, limits)
    tables = {m: torch.from_numpy(np.array(t)) for m, t in case.tables.items()}
    bounds, count, more = load_source(arrays.emit(plan, arrays.TORCH, True))["plan_spans"](
        *(torch.from_numpy(x.astype(np.int64).reshape(-1, 1, 1)) for x in place.at), case.sizes, case.params, tables,
        q_len=place.problem.q_len, kv_len=place.problem.kv_len, block=place.block, room=room, records=place.most(plan),
    )  # fmt: skip
    found = flat_triton.kernel_spans(plan, place, {**case.params, **tables})
    np.testing.assert_array_equal(found[0], bounds)
    np.testing.assert_array_equal(found[1], count)
    assert found[2].any() == more
    work = (bounds[..., 3] - bounds[..., 0]).sum(-1)
    np.testing.assert_array_equal(found[3], work.argsort(dim=-1, descending=True, stable=True))
    return bool(more)


@pytest.mark.parametrize("name", [x if x in FEW else pytest.param(x, marks=pytest.mark.slow) for x in masks.written()])
def test_triton_planner_equals_torch_on_written_masks(name):
    rng = random.Random(name)
    case = masks.case(masks.written()[name], rng)
    agree(case)
    agree(case, DOC, turned=True)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(i, marks=pytest.mark.slow) for i in range(3, 200))])
def test_triton_planner_equals_torch_on_random_masks(seed):
    rng = random.Random(f"triton {seed}")
    case = masks.case(masks.random_mask(rng), rng)
    agree(case, rng.choice([frozenset(), DOC]), rng.choice([64, 8, 6]))


def striped(columns, block=(4, 4)):
    """Runs of many lengths in every row."""
    keep = np.repeat(np.random.default_rng(1).random(columns) < 0.5, 4)
    n = len(keep)
    return masks.Case(lookup("keep", (k,), masks.BOOL), 8, n, 1, 1, block, sizes=(1, 1, 8, n), tables={"keep": keep})


@pytest.mark.parametrize(("room", "records"), [(64, 200), (33, 2)])
def test_room_runs_out(room, records):
    assert agree(striped(200), room=room, records=records)


@pytest.mark.parametrize("n", [5000, pytest.param(4097, marks=pytest.mark.slow)])
def test_long_tables_are_searched_in_blocks(n):
    rng = np.random.default_rng(n)
    real = np.where(rng.random((n, 2)) < 0.01, np.nan, rng.standard_normal((n, 2)))
    cases = {
        eq(lookup("doc", (q,)), lookup("doc", (k,))): rng.integers(0, 40, n),
        lookup("doc", (k, masks.h), masks.FLOAT) < lookup("doc", (q, masks.h), masks.FLOAT): real,
    }
    for mask, table in cases.items():
        table = np.sort(table, 0) if table.ndim == 1 else table
        found = masks.Case(mask, n, n, 1, 2, (512, 64), sizes=(1, 2, n, n), tables={"doc": table})
        agree(found)
    rare = (rng.random(n) < 0.004).astype(np.int64)
    for table, block in ((rare, (2048, 24)), (1 - rare, (2048, 40))):  # one entry decides a tile
        agree(
            masks.Case(lookup("doc", (k,)) > 0, n, n, 1, 1, block, sizes=(1, 1, n, n), tables={"doc": table}), room=256
        )


@pytest.mark.parametrize("n", [90, 5000])
def test_ranges_of_rows(n):
    """Tables of several rows, of which one is ranged over: entry by entry, and in blocks."""
    rng = np.random.default_rng(n)
    table = rng.integers(-9, 99, (3, n)).cumsum(1)
    for mask, t in ((lookup("t", (masks.h, q)) >= lookup("t", (masks.h, k)), table),
                    (lookup("t", (k, masks.h)) > lookup("t", (q, masks.h)) + 5, -table.T)):  # fmt: skip
        agree(masks.Case(mask, n, n, 1, 3, (n // 9, n // 31), sizes=(1, 3, n, n), tables={"t": t}))


FLOAT_OPERATORS = "min max pow sqrt rsqrt tanh".split()  # those with rows of their own


def test_operators_of_floats():
    """Ends of ranges of them, where NaN and infinities are near."""
    rng = np.random.default_rng(2)
    n, some = 24, rng.standard_normal(48) + 1
    some[rng.integers(0, 2 * n, 9)] = np.nan, np.nan, np.nan, np.inf, np.inf, -np.inf, -np.inf, 0, 0
    tables = {"a": some, "b": 1 + rng.standard_normal(2 * n).repeat(4)[: 2 * n]}
    x, y = lookup("a", (k,), FLOAT), lookup("b", (q,), FLOAT)
    for op in FLOAT_OPERATORS:
        value = build(op, x) if op in FLOAT_FUNCTIONS else build(op, x, y)
        mask = (value < 0.75 * y) | (param("flag", BOOL) & (k < 3)) | eq(k, param("n"))
        agree(masks.Case(mask, n, 2 * n, 1, 1, (4, 2), sizes=(1, 1, n, 2 * n), tables=tables,
                         params={"flag": op < "l", "n": 40}))  # fmt: skip


def test_triton_planner_ranges_of_nearly_all_entries():
    for case in masks.rare_entries()[::4]:
        agree(case)


def test_triton_planner_reads_sorted_tables_that_end_early():
    """Tables that end before the queries and the keys do."""
    for case in masks.short_tables()[::3]:
        agree(case, DOC)


def test_positions_outside_of_all_pieces_belong_to_the_nearest():
    """Offsets that begin behind the first query and end before the last: a mask may look at the number of a piece."""
    off = np.array([20, 50, 90])
    for mask in (eq(segment("off", q), segment("off", k)), segment("off", k) < 1, segment("off", q) > 0):
        agree(masks.Case(mask, 150, 150, 1, 1, (16, 8), sizes=(1, 1, 150, 150), tables={"off": off}))


def test_triton_planner_boxes_of_tables_equal_torch():
    """More axes than two, along which levels are made five at a time."""
    table = np.random.default_rng(3).integers(-99, 99, (2, 3, 9, 40))
    at, n = (masks.b, masks.h), 190
    two = lookup("t", (*at, q // 21, k)) >= lookup("t", (*at, k // 21, q))
    three = lookup("t", (masks.b, q // 60, q // 21, k // 5)) >= 4
    line = np.arange(n) // 9 % 5
    for mask in (two, three, two & (lookup("line", (k,)) < lookup("line", (q,)))):
        agree(masks.Case(mask, n, n, 2, 3, (8, 4), sizes=(2, 3, n, n), tables={"t": table, "line": line}))


def test_triton_planner_takes_tables_of_any_integer_dtype():
    """Any integers, bytes, halves, strided ones; numbers as tensors of the device."""
    plan = flat.planner((q >= k) & eq(lookup("doc", (q,)), lookup("doc", (k,))) & (q - k < masks.w))
    zero = np.zeros(1, np.int64)
    doc = torch.arange(96) // 10
    found = [
        flat_triton.kernel_spans(
            plan, SpanRequest((zero, zero, zero, zero), Problem(96, 96), (16, 16), DEVICE), {"doc": d, "w": w}
        )[0]
        for d in (doc, doc.byte(), torch.stack([doc.short(), doc.short()], 1)[:, 0])
        for w in (13, torch.tensor(13, dtype=torch.int32))
    ]
    assert found[0].any()
    assert all((x == found[0]).all() for x in found)


@pytest.mark.parametrize(
    ("mask", "tables"),
    [
        ("causal & same(doc)", [np.arange(70) // 13, np.arange(70) // 40]),
        ("causal & doc[b, q] == doc[b, k]", [np.array([[0] * 50 + [1] * 20, [0] * 10 + [1] * 60])]),
    ],
)
def test_steps_from_tables_to_gradients(mask, tables, monkeypatch):
    """Every call plans from the table it is given, forward and transposed."""
    pose(monkeypatch)
    rng = np.random.default_rng(0)
    q, k, v, dout = (torch.from_numpy(rng.standard_normal((2, 1, 70, 16), np.float32)) for _ in range(4))
    att = fk.compile(mask, tile=(32, 32))
    for table in tables:
        table = table.astype(np.int32)
        found = []
        for doc in (torch.from_numpy(table), table):  # planned there, and on the host
            given = [x.clone().requires_grad_() for x in (q, k, v)]
            out = att(*given, doc=doc)
            found.append([out, *torch.autograd.grad(out, given, dout)])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


SORTED = "param doc: sorted int[Q_LEN]\nmask = "


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("mask", [
    SORTED + "causal & same(doc)", SORTED + "same(doc)", SORTED + "doc[q] >= doc[k]", "causal & same(doc)",
    "document(doc)", "causal & document(doc)",
])  # fmt: skip
def test_documents_that_change_in_place(mask, on_device, monkeypatch):
    """The ends of runs are those of the table as it is when it is called with, and the entries decide where a table has
    no runs any more."""
    if on_device:
        pose(monkeypatch)
    monkeypatch.setenv("FRISKET_BACKEND", "triton")
    rng = np.random.default_rng(0)
    q, k, v, dout = (torch.from_numpy(rng.standard_normal((2, 2, 70, 16), np.float32)) for _ in range(4))
    at = np.arange(70)
    tables = [at // 13, at // 40, np.zeros(70), at // 13 % 3 if mask == "causal & same(doc)" else at]
    if "document" in mask:
        tables = [np.array(x) for x in ([0, 9, 40, 70], [0, 33, 33, 70], [0, 0, 70, 70], [0, 69, 70, 75])]
    doc = torch.zeros(len(tables[0]), dtype=torch.int64)
    att = fk.compile(mask, tile=(32, 32))
    for table in tables:
        doc.copy_(torch.from_numpy(table))
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        out = att(*given, doc=doc)
        got = [out, *torch.autograd.grad(out, given, dout)]
        seen = torch.from_numpy(fk.mask(mask, doc=table.astype(np.int64)).dense(70, 70))
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*given, attn_mask=seen)
        want = [out, *torch.autograd.grad(out, given, dout)]
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="records what the interpreter runs")
def test_triton_planner_launches_replay_on_new_tables(monkeypatch):
    """As in a graph that was captured: kernels with the arguments they had, and no Python between them."""
    from triton.runtime.interpreter import InterpretedFunction

    pose(monkeypatch)
    rng = np.random.default_rng(1)
    q, k, v = (torch.from_numpy(rng.standard_normal((1, 1, 64, 16), np.float32)) for _ in range(3))
    doc, other = (torch.arange(64, dtype=torch.int32) // n for n in (9, 30))
    att, launches, real = fk.compile("causal & same(doc)", tile=(32, 32)), [], InterpretedFunction.run
    att(q, k, v, doc=doc)
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda *args, **more: launches.append((args, more)) or real(*args, **more)
    )
    plan = att.plan(64, 64, doc=doc)
    out = att(q, k, v, plan=plan)
    captured = launches.copy()
    want = att(q + 1, k, v, doc=other)
    q += 1
    doc.copy_(other)
    for args, more in captured:
        real(*args, **more)
    assert len(captured) == 6  # two launches for windows of more than five levels
    assert torch.equal(out, want)
    assert not plan.overflow
