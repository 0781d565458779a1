"""Run by test_triton_rows.py with TRITON_INTERPRET=1: long rows of tiles in parts, against the reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import attention_cases as cases
from support.attention_cases import CASES, Case, causal
from support.torch import gradients as torch_gradients
from support.torch.gradients import MODS
from support.triton.call import check, run, with_everything

from frisket.dsl.sugar import b, h, k, q
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.runtime.backends.triton import grids as triton_grids
from frisket.runtime.backends.triton import torch as triton_torch

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")
GLOBAL = Case(
    (abs(q - k) <= 20) | (k < 5) | (q < 20), heads=4, kv_heads=2, q_len=120, kv_len=250, dim=16, v_dim=16,
    block=(16, 16),
)  # fmt: skip
BIGBIRD = GLOBAL.but(mask=GLOBAL.mask | ((q // 16 * 7 + k // 16 * 5) % 11 < 1))
BY_HEAD = GLOBAL.but(mask=(abs(q - k) <= 20) | (q // 16 < h - 1))  # heads without long rows, and with several
BY_BATCH = GLOBAL.but(mask=causal & ((q - k <= 20) | (q >= 110 - 30 * b)), batch=2, heads=2)


@pytest.fixture(autouse=True)
def divided(monkeypatch):
    """The tables of programs. No call is divided as one of few queries."""
    made = []
    real = triton_grids.row_parts
    monkeypatch.setattr(triton_grids, "row_parts", lambda *a: made.append(real(*a)) or made[-1])
    monkeypatch.setattr(triton_grids, "shares", lambda *a: None)
    monkeypatch.setattr(triton_grids, "INTERPRETED", 16)
    monkeypatch.setattr(triton_grids, "LEAST", 2)
    return made


@pytest.fixture
def everywhere(monkeypatch):
    """Every row of more than two tiles is long."""
    monkeypatch.setattr(triton_grids, "LONG", 0)
    monkeypatch.setattr(triton_grids, "INTERPRETED", 1 << 10)


EVERYWHERE = [
    "documents-by-batch", "prefix", "heads-and-batches", "gqa", "v-wider", "empty-rows", "nothing", "holes", "decode",
    "short-keys", "crop", "origin-by-batch", "relative-bias", "bias-plane", "bool-by-head", "random",
]  # fmt: skip


@pytest.mark.parametrize("name", EVERYWHERE)
def test_split_rows_equal_the_reference(name, everywhere, divided):
    case = CASES[name].but(block=(32, 16))
    check(case, *run(case))
    assert len(divided) == 1
    bounds = cases.spans(case).bounds
    assert (divided[0] is not None) == ((bounds[..., 3] - bounds[..., 0]).sum(-1).max() > 2)


@pytest.mark.parametrize("order", ["longest-first", "longest-of-all-first"])
@pytest.mark.parametrize("name", ["GLOBAL", "BIGBIRD", "BY_HEAD", "BY_BATCH"])
def test_long_rows_in_parts_equal_the_reference_and_repeat(name, order, divided):
    case = globals()[name]
    first = run(case, order=order)
    check(case, *first)
    (table,) = divided
    assert table.rows[..., 2].max() > 1
    assert (
        (table.programs[..., 0] >= 0) & (table.programs[..., 1] < 0)
    ).any() or order == "longest-first"  # and rows as they are
    again = run(case, order=order)
    assert all(torch.equal(x, y) for x, y in zip(again[:2], first[:2], strict=True))


def test_rows_of_some_heads_alone(divided):
    check(BY_HEAD, *run(BY_HEAD, order="longest-of-all-first"))
    (table,) = divided
    assert sorted({*table.rows[..., 2].sum(1).tolist()})[0] == 0
    assert len(np.unique(table.at)) > 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("descriptors", [False, True])
def test_long_rows_in_half_precision(dtype, descriptors, divided):
    case = GLOBAL.but(dtype=dtype)
    check(case, *run(case, by=16, descriptors=descriptors))
    assert divided[0] is not None


@pytest.mark.parametrize("name", ["gqa", "empty-rows", "nothing", "softcap", "visible-minus-inf", "scaled", "crop"])
def test_split_rows_with_sinks_and_dropout(name, everywhere):
    with_everything(CASES[name].but(block=(32, 16)))


def test_long_rows_with_everything(divided):
    with_everything(GLOBAL)
    assert divided[0] is not None


@pytest.mark.parametrize(("dim", "v_dim"), [(40, 72), (96, 80), (128, 64)])
def test_any_head_size(dim, v_dim, divided):
    case = GLOBAL.but(dim=dim, v_dim=v_dim, q_len=100)
    check(case, *run(case, layout="bshd"))
    assert divided[0] is not None


def test_short_rows_run_in_one_unsplit_launch(monkeypatch, divided):
    """Masks without long rows, rows that have to stay whole, and formulas: one launch, by the kernel as it was."""
    made = []
    monkeypatch.setattr(triton_grids, "divided", lambda *a: made.append(a))
    for case, more in ((CASES["window"], {}), (GLOBAL, {"splits": 1}), (GLOBAL, {"order": "forward"})):
        check(case, *run(case, **more))
    assert not made
    assert divided == [None]


class Both(torch_gradients.Both):
    """A case run by the kernels and by the reference."""

    forward, backward = staticmethod(triton_torch.forward), staticmethod(triton_torch.backward)
    stored = ("out",)

    def __init__(self, case, *, order="longest-of-all-first", **options):
        super().__init__(case, **options)
        self.spans = cases.Source(case)
        self.sinks = None if self.sinks is None else self.sinks.float()
        self.target = Target("triton", *case.block, order=order)


BACKWARD = [
    "documents-by-batch", "heads-and-batches", "gqa", "v-wider", "empty-rows", "nothing", "holes", "short-keys", "crop",
]  # fmt: skip


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_of_every_case(name, everywhere, divided):
    case = CASES[name].but(block=(32, 16))
    case = case if case.sizes else case.but(q_len=min(case.q_len, 110), kv_len=min(case.kv_len, 120))
    Both(case, sinks=name == "gqa", dropout=0.3 * (name == "holes")).check()
    assert len(divided) == 3


@pytest.mark.parametrize("order", ["longest-first", "longest-of-all-first"])
@pytest.mark.parametrize("name", ["GLOBAL", "BY_HEAD", "BY_BATCH"])
def test_gradients_of_long_rows(name, order, divided):
    both = Both(globals()[name], order=order)
    first = both.check()
    dq, dkv = divided[1:]
    assert dq.rows[..., 2].max() > 1
    assert name != "GLOBAL" or dkv.rows[..., 2].max() > 1
    assert all(torch.equal(x, first[n]) for n, x in both.again().items())


def test_split_rows_with_dv_in_a_separate_kernel(everywhere, divided):
    both = Both(GLOBAL.but(v_dim=40), sinks=True)
    both.target = replace(both.target, dv=Target("triton", 16, 32, order=both.target.order))
    both.check()
    assert [x is not None for x in divided] == [True] * 4


CAPTURED = ["gain per head", "by row", "by row, clamped", "by column", "by column, gqa", "slot", "two sites"]


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_gradients_of_long_rows(name, divided):
    mod = MODS[name]
    case = GLOBAL.but(score=mod.score, tables=mod.tables, slots=mod.slots, q_len=100, kv_len=110)
    case = case.but(kv_len=200) if name == "by column, gqa" else case.but(heads=2, kv_heads=2)
    Both(case, dropout=0.3 if name == "by row" else 0.0).check()
    assert divided[1] is not None
    assert divided[2] is not None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_long_rows_in_half_precision(dtype, divided):
    Both(GLOBAL.but(dtype=dtype, v_dim=40), sinks=True).check_half()
    assert None not in divided


@pytest.mark.parametrize("wanted", [{"q"}, {"k"}, {"v"}, {"t0"}])
def test_split_rows_compute_requested_gradients_alone(wanted, divided):
    mod = MODS["by column, gqa"]
    case = GLOBAL.but(score=mod.score, tables=mod.tables, q_len=60, kv_len=110)
    Both(case, wanted=frozenset(wanted)).check()
