"""Gradients of torch's library calls against the reference's: masks, score mods, captured values, shapes, strides."""

import itertools
import math

import numpy as np
import pytest
import torch
from support.attention_cases import CASES, Case, causal, shared
from support.lowering import brute
from support.tiers import default_only
from support.torch import gradients as torch_gradients
from support.torch.gradients import HARD, MODS, learned, window

from frisket.dsl import ir
from frisket.dsl.ir import lookup
from frisket.dsl.sugar import k, q, score
from frisket.dsl.types import FLOAT
from frisket.lowering.aten import backward as aten_backward
from frisket.lowering.aten import forward as aten
from frisket.lowering.aten import tiles as aten_tiles
from frisket.lowering.plan import Cotangents, ForwardResults, KernelInputs, Target


def grids(case):
    mask = ir.TRUE if case.mask is None else case.mask
    return shared(
        brute.spans(
            mask, case.q_len, case.kv_len, batch=case.batch, heads=case.heads, block=case.block, origin=case.origin,
            sizes=case.sizes, params=case.slots, tables=case.tables,
        )
    )  # fmt: skip


class Both(torch_gradients.Both):
    """A case run by the executor and by the reference."""

    forward, backward = staticmethod(aten.forward), staticmethod(aten_backward.backward)

    @property
    def spans(self):
        return grids(self.case)

    @property
    def target(self):
        return Target("aten", *self.case.block)


@pytest.mark.parametrize("name", CASES)
def test_aten_gradients_equal_the_reference(name):
    Both(CASES[name]).check()


@pytest.mark.parametrize("name", HARD)
def test_rows_that_run_together(name):
    Both(HARD[name]).check()
    Both(HARD[name], dlse=False).check()


@pytest.mark.parametrize("name", MODS)
def test_captured_gradients_in_float64(name):
    Both(MODS[name].but(dtype="float64")).check()


@pytest.mark.parametrize("name", ["alibi", "by column, gqa", "by distance", "plane", "learned softcap"])
def test_captured_gradients_in_float32(name):
    Both(MODS[name]).check()


@pytest.mark.parametrize("name", ["causal", "window", "documents", "gqa", "softcap", "empty-rows", "nothing"])
@pytest.mark.parametrize(("sinks", "dropout"), [(True, 0.0), (False, 0.3), (True, 0.6)])
def test_aten_gradients_with_sinks_and_dropout(name, sinks, dropout):
    Both(CASES[name], sinks=sinks, dropout=dropout).check()


def test_captured_gradients_under_dropout():
    Both(MODS["by column, gqa"].but(dtype="float64"), sinks=True, dropout=0.4).check()


@pytest.mark.parametrize("name", ["gqa", "window", "alibi", "v-wider"])
def test_aten_gradients_in_float64_equal_the_reference(name):
    Both(CASES[name].but(dtype="float64")).check()


HALVES = [f"{n} {d}" for n in ("gqa", "alibi", "prefix and window", "by column, gqa") for d in ("float16", "bfloat16")]


@pytest.mark.parametrize("which", default_only(HALVES, "gqa float16", "by column, gqa bfloat16"))
def test_aten_gradients_in_half_precision_are_near(which, monkeypatch):
    name, _, dtype = which.rpartition(" ")
    case = {**CASES, **HARD, **MODS}[name].but(dtype=dtype)
    Both(case).check_half()
    Both(case, dlse=False, sinks=True, dropout=0.2).check_half()
    monkeypatch.setattr(aten_tiles, "_fast_bfloat16", lambda: dtype == "bfloat16")  # and as on another processor
    monkeypatch.setattr(aten, "BUDGET", 1 << 14)
    monkeypatch.setattr(aten_backward, "BUDGET", 1 << 14)
    Both(case).check_half()


@pytest.mark.parametrize(("dim", "v_dim"), [(8, 256), (256, 8), (24, 24)])
def test_aten_gradients_take_unequal_head_sizes(dim, v_dim):
    Both(Case(window, dim=dim, v_dim=v_dim, q_len=200, kv_len=200)).check()


@pytest.mark.parametrize("name", ["gqa", "window", "v-wider"])
def test_aten_gradients_take_arrays_of_any_strides(name):
    def twisted(x, y, z):
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
        y = y.transpose(2, 3).contiguous().transpose(2, 3)
        return x, y, torch.cat([z, z], -1)[..., : z.shape[-1]]

    Both(CASES[name], change=twisted).check()
    Both(CASES[name], change=lambda x, y, z: (x, y[:, :1].expand_as(y), z[:, :, :1].expand_as(z))).check()


def test_gradients_and_tables_of_any_strides():
    both = Both(MODS["by column, gqa"])
    both.tables = {n: t[:1].expand_as(t) for n, t in both.tables.items()}
    both.case = both.case.but(tables={n: np.repeat(t[:1], 4, 0) for n, t in both.case.tables.items()})
    both.dout = both.dout[:1, :1, :1, :1].expand_as(both.dout)
    both.check()


def test_row_without_keys_has_no_gradient_for_nan_cotangents():
    both = Both(CASES["empty-rows"])
    both.ours()
    empty = both.lse == -math.inf
    assert empty.any()
    both.dlse = torch.where(empty, math.nan, both.dlse)
    got = both.again()
    assert all(x.isfinite().all() for x in got.values())
    assert (got["q"][empty] == 0).all()


@pytest.mark.parametrize(
    "wanted",
    [{"q"}, {"k"}, set(), *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ({"v"}, {"t0"}, {"q", "t0"}))],
)
def test_only_what_is_wanted(wanted):
    Both(MODS["by column, gqa"], wanted=frozenset(wanted)).check()
    Both(HARD["triangle"], wanted=frozenset(wanted - {"t0"})).check()


def test_a_value_without_influence_has_gradient_zero():
    both = Both(
        Case(causal, score + ir.to_float(ir.build("int", lookup("t", (k,), FLOAT))), tables={"t": learned(150)})
    )
    both.wanted = frozenset({"t0"})
    assert both.ours()["t0"].tolist() == [0.0] * 150


def test_aten_hidden_keys_never_reach_gradients():
    for poison, name in ((math.nan, "triangle"), (math.inf, "causal"), (-math.inf, "gqa"), (math.nan, "gqa")):
        case = {**CASES, **HARD}[name].but(kv_len=900 if name == "triangle" else 170)
        clean = Both(case)
        dirty = Both(case)
        dirty.qkv[1][:, :, case.q_len :] = poison  # keys that no query sees
        for mine, right in zip(dirty.ours().values(), clean.ours().values(), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


def test_a_query_before_a_bad_key_keeps_its_gradient():
    clean, dirty = Both(HARD["triangle"], dlse=False), Both(HARD["triangle"], dlse=False)
    dirty.qkv[1][:, :, 650:] = math.nan
    for mine, right in zip((dirty.ours()["q"], dirty.out), (clean.ours()["q"], clean.out), strict=True):
        torch.testing.assert_close(mine[:, :, :650], right[:, :, :650], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["by row, clamped", "learned softcap", "by column, gqa"])
def test_aten_captured_gradients_pass_gradcheck(name):
    case = MODS[name].but(q_len=7, kv_len=9, dim=3, v_dim=2, block=(4, 4), dtype="float64")
    both = Both(case)
    names = sorted(both.everything)
    spans = grids(case)

    class Attention(torch.autograd.Function):
        @staticmethod
        def inputs(given):
            slots = {n: float(given.get(n, x)) if isinstance(x, float) else x for n, x in both.slots.items()}
            tables = {n: given.get(n, x) for n, x in both.tables.items()}
            return KernelInputs(both.plan, spans, both.g, Target("aten", 4, 4), slots, tables)

        @staticmethod
        def forward(ctx, *arrays):
            given = ctx.arrays = dict(zip(names, arrays, strict=True))
            qkv = [given[n] for n in "qkv"]
            ctx.results = aten.forward(Attention.inputs(given), *qkv)[:2]
            return ctx.results

        @staticmethod
        def backward(ctx, dout, dlse):
            qkv = [ctx.arrays[n] for n in "qkv"]
            given = Attention.inputs(ctx.arrays), *qkv, ForwardResults(*ctx.results), Cotangents(dout, dlse)
            got = aten_backward.backward(*given, grad_names=frozenset(names))
            return tuple(got[n] for n in names)

    arrays = {**dict(zip("qkv", both.qkv)), **{n: t.double() for n, t in both.tables.items()}}
    arrays |= {n: torch.tensor(x, dtype=torch.float64) for n, x in both.slots.items() if isinstance(x, float)}
    torch.autograd.gradcheck(Attention.apply, [arrays[n].requires_grad_() for n in names], fast_mode=True)


def test_rows_in_parts(monkeypatch):
    """Blocks too large for the budget are cut, along keys too; few heads give every thread rows of its own."""
    monkeypatch.setattr(aten, "BUDGET", 4096)
    monkeypatch.setattr(aten_backward, "BUDGET", 4096)
    for name in ("prefix and window", "tall", "image"):
        Both(HARD[name].but(batch=1, heads=2, kv_heads=1)).check()
    for name in ("by row", "by column, gqa", "by distance", "slot"):
        Both(MODS[name].but(heads=4, kv_heads=1)).check(5e-5)


def test_keys_in_parts(monkeypatch):
    """Decode: few blocks over many keys are split over keys, and joined in order."""
    monkeypatch.setattr(aten, "LEAST", 32)
    for mod, (sinks, dropout) in itertools.product(("causal", "softcap"), [(False, 0.0), (True, 0.2)]):
        case = CASES[mod].but(q_len=3, kv_len=700, heads=4, kv_heads=1, origin=(0, 0, 697, 0), sizes=(1, 4, 700, 700))
        Both(case, sinks=sinks, dropout=dropout).check()
        Both(case.but(mask=(k <= q) & (k % 200 < 30), block=(16, 16)), sinks=sinks).check()
    both = Both(CASES["full"].but(mask=k > 650, q_len=2, kv_len=700))
    both.check()  # parts in which nothing is seen


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["window", "gqa", "mqa", "triangle", "by column, gqa", "pairs", "plane"])
def test_aten_backward_repeats_bit_for_bit(name, two_threads, monkeypatch):
    monkeypatch.setattr(aten_backward, "BUDGET", 1 << 14)
    both = Both({**CASES, **HARD, **MODS}[name], dropout=0.2 if name == "gqa" else 0.0)
    first = both.check(5e-5)
    for _ in range(3):
        again = both.ours()
        assert all(torch.equal(again[n], x) for n, x in first.items())


def test_aten_backward_takes_the_flash_kernel_where_it_fits(monkeypatch):
    seen = []
    real = aten_backward.flash_backward
    monkeypatch.setattr(aten_backward, "flash_backward", lambda *a: (seen.append(a), real(*a)))
    Both(HARD["triangle"], dlse=False).check()
    assert seen
    seen.clear()
    Both(HARD["triangle"], dropout=0.1).check()
    Both(HARD["triangle"], dlse=True).check()
    assert not seen


def test_aten_backward_leaves_no_autograd_graph():
    both = Both(MODS["by row"], change=lambda *x: tuple(y.requires_grad_() for y in x))
    both.tables = {n: t.requires_grad_() for n, t in both.tables.items()}
    assert not any(x.requires_grad for x in both.ours().values())
    assert not both.out.requires_grad
