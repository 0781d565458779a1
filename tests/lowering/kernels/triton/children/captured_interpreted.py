"""Run by test_triton_captured.py with TRITON_INTERPRET=1: gradients of tables read by distance and by position."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.attention_cases import DOC, EMPTY_ROWS, STEEP, STEEP_BOUNDS, Case, Source, causal, rng
from support.torch import gradients as torch_gradients
from support.torch.gradients import learned
from support.triton import bf16 as triton_bf16
from torch.utils._pytree import tree_map_only
from triton.runtime.interpreter import interpreter_builder

import frisket as fk
from frisket.dsl.ir import lookup, param, var
from frisket.dsl.sugar import b, eq, function, h, k, maximum, minimum, q, score, where
from frisket.dsl.types import FLOAT, INT
from frisket.lowering.aten import forward as aten
from frisket.lowering.aten.captured import folded
from frisket.lowering.derive import backward_of
from frisket.lowering.kernels.triton.target import TritonTarget
from frisket.lowering.plan import Bounds, KernelInputs, ProgramFacts, Target, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.triton import grids as triton_grids
from frisket.runtime.backends.triton import torch as triton_torch
from frisket.runtime.backends.triton.torch import _CapturedRun, captured

triton_bf16.install()
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")


def t(*index):
    return lookup("t", index, FLOAT)


small = Case(causal, q_len=70, kv_len=70, heads=1, kv_heads=1, dim=16, v_dim=16, block=(32, 32))
window = causal & (q - k < param("w"))
near = small.but(mask=window, slots={"w": 37})
DIAGONAL = {
    "by distance": near.but(heads=2, kv_heads=2, score=score + t(h, q - k), tables={"t": learned((2, 40))}),
    "clamp and abs": small.but(
        mask=None, score=score + t(maximum(minimum(abs(q - k), 20), 3)), q_len=50, kv_len=75, heads=3, kv_heads=1,
        tables={"t": learned(21)},
    ),
    "out of reach": near.but(score=score + t(q - k - 30), tables={"t": learned(5)}),
    "two weights": small.but(
        score=score * t(k - q + 9) + lookup("u", (q - k,), FLOAT), tables={"t": learned(20), "u": learned(50)}
    ),
    "two sites": small.but(
        mask=causal & (q - k < 3 + 40 * h), score=score + t(q - k) + t(k - q + 10), heads=2, tables={"t": learned(30)}
    ),
    "chained": small.but(
        score=score + t(lookup("n", (q - k,), INT), b), batch=2, tables={"t": learned((5, 2)), "n": np.arange(70) // 15}
    ),
    "documents": small.but(
        mask=causal & eq(lookup("doc", (b, q)), lookup("doc", (b, k))), score=score + t(b, h, q - k), batch=2,
        heads=2, tables={"doc": np.stack([DOC, DOC[::-1].copy()]), "t": learned((2, 2, 60))},
    ),
    "holes": small.but(mask=eq((q - k) % 48, 0) | eq(k // 32, 1), score=score + t(q - k + 69), block=(16, 16),
                       tables={"t": learned(139)}),
    "crop": near.but(score=score + t(h, q - k), q_len=60, kv_len=77, origin=(1, 1, 137, 101), sizes=(4, 4, 300, 310),
                     tables={"t": learned((4, 40))}, v_dim=24),
    "origin by batch": near.but(
        score=score + t(b, q - k), batch=2, q_len=40, kv_len=90, sizes=(2, 2, 120, 100),
        origin=(0, 0, np.array([50, 13]), np.array([0, 5])), tables={"t": learned((2, 100))},
    ),
    "empty rows": small.but(mask=EMPTY_ROWS, score=score + t(abs(q - k)), q_len=75, tables={"t": learned(60)}),
    "minus infinity": small.but(score=score + where(q % 5 < 2, -math.inf, t(q - k)), tables={"t": learned(60)}),
    "wild weight": small.but(
        score=where(q > k, function("log", abs(score) * t(q - k)), score), tables={"t": 1 + abs(learned(100))}
    ),
}  # fmt: skip
PLANE = {
    "each its own": small.but(heads=2, score=score + t(b, h, q, k), batch=2, tables={"t": learned((2, 2, 70, 70))}),
    "of a batch": small.but(heads=2, score=score + t(h, q, k + 3), batch=2, tables={"t": learned((2, 70, 80))}),
    "of a head": small.but(
        mask=window, score=score * t(k, q, b), heads=2, batch=2, slots={"w": 37}, tables={"t": 1 + learned((70, 70, 2))}
    ),
    "of all": small.but(
        mask=causal & (q - k < 20 * (h + 1) + 7 * b), score=score + t(q, k), batch=2, heads=2,
        tables={"t": learned((70, 70))},
    ),
    "crop": small.but(
        score=score + t(h, q, k - 90), q_len=60, kv_len=77, origin=(1, 1, 137, 101), sizes=(4, 4, 300, 310),
        tables={"t": learned((4, 200, 90))},
    ),
    "origin by batch": near.but(
        score=score + t(b, q, k), batch=2, q_len=40, kv_len=90, sizes=(2, 2, 120, 100),
        origin=(0, 0, np.array([50, 13]), np.array([0, 5])), tables={"t": learned((2, 120, 100))},
    ),
    "of one head": small.but(score=score + t(h // 2, q, k), tables={"t": learned((1, 70, 70))}),
}  # fmt: skip
SCATTER = {
    "chained": small.but(
        score=score + t(lookup("n", (q, k), INT), h), heads=2,
        tables={"t": learned((7, 2)), "n": rng.integers(0, 7, (70, 70))},
    ),
    "sums": near.but(score=score + t(b, q + k), batch=2, heads=2, tables={"t": learned((2, 139))}),
    "plane too small": small.but(heads=2, score=score + t(h, q, k), tables={"t": learned((2, 70, 60))}),
    "group": small.but(score=score * t(h // 2, q, k), heads=3, tables={"t": 1 + learned((2, 70, 70))}),
    "two sites": near.but(score=score + t(q, k // 2) + t(k, q // 2), tables={"t": learned((70, 35))}),
    "crop": small.but(
        score=score + t((q * k) % 7), q_len=60, kv_len=77, origin=(1, 1, 137, 101), sizes=(4, 4, 300, 310),
        tables={"t": learned(7)}, v_dim=24,
    ),
    "origin by batch": near.but(
        score=score + t(q, k), batch=2, q_len=40, kv_len=90, sizes=(2, 2, 120, 100),
        origin=(0, 0, np.array([50, 13]), np.array([0, 5])), tables={"t": learned((120, 100))},
    ),
    "empty rows": small.but(mask=EMPTY_ROWS, score=score + t(q // 7 + k // 9), q_len=75, tables={"t": learned(40)}),
    "wild weight": small.but(
        score=where(q > k, function("log", abs(score) * t(q // 2 + k)), score), tables={"t": 1 + abs(learned(160))}
    ),
}  # fmt: skip
WAYS = {"diagonal": DIAGONAL, "plane": PLANE, "scatter": SCATTER}
ALL = {f"{way}, {name}": case for way, cases in WAYS.items() for name, case in cases.items()}


def on_the_cpu(inputs, *arrays, **results):
    """The library's forward, whose results return to the device where tensors are made by default: for tests on a
    GPU."""
    device = torch.get_default_device()
    with torch.device("cpu"):
        values, arrays = tree_map_only(torch.Tensor, torch.Tensor.cpu, (vars(inputs), arrays))
        return [x.to(device) for x in aten.forward(KernelInputs(**values), *arrays, **results)]


class Tables(torch_gradients.Both):
    """The gradients of the tables alone, from the library's forward."""

    forward, deterministic = staticmethod(on_the_cpu), True
    stored = ("out",)

    @property
    def source(self):
        return None if self.plan.bounds else Source(self.case)  # formulas need no table

    @property
    def spans(self):
        return Source(self.case).rows(self.case.block)

    @property
    def target(self):
        return Target("aten", *self.case.block)

    def again(self):
        seen = self.lse > -math.inf
        dlse = 0.0 if self.dlse is None else self.dlse
        delta = torch.where(seen, (self.out.float() * self.dout.float()).sum(-1) - dlse, 0.0)
        lse = torch.where(seen, self.lse * math.log2(math.e), 0.0)
        stats = torch.stack([lse, torch.ones_like(lse), delta, torch.full_like(lse, math.nan)], -1)
        gradients = [g for g in backward_of(self.plan).gradients if g.index]
        target = TritonTarget("triton", *self.case.block)
        inputs = replace(self.inputs, spans=self.source, target=target, deterministic=self.deterministic)
        buffers = captured(inputs, *self.qkv, self.dout, stats, gradients)
        return folded(gradients, buffers, self.g, self.slots, self.tables)

    def check(self, tolerance=2e-5):
        got, want = self.ours(), self.theirs()[1]
        for name, mine in got.items():
            right = want[name]
            assert mine.dtype == torch.float32
            assert mine.shape == right.shape
            assert np.abs(right).max() > 0
            size = max(1.0, float(np.abs(right).max()))
            np.testing.assert_allclose(mine.double().numpy(), right, rtol=0, atol=tolerance * size, err_msg=name)
        return got

    def check_half(self):
        got, want, rough = self.ours(), self.theirs()[1], self.theirs(self.half)[1]
        for name, mine in got.items():
            size = max(1.0, float(np.abs(want[name]).max()))
            error, allowed = (float(np.abs(x - want[name]).max()) / size for x in (mine.double().numpy(), rough[name]))
            assert error <= 2 * allowed + 1e-6, name


@pytest.mark.parametrize("name", ALL)
def test_captured_tables_equal_the_reference(name, monkeypatch):
    launched = []
    monkeypatch.setattr(_CapturedRun, "run", lambda *a, go=_CapturedRun.run: launched.append(a[1].step.name) or go(*a))
    Tables(ALL[name]).check()
    way = name.split(",")[0]
    assert set(launched) == {f"attention_{x}" for x in ([way, "total"] if way == "scatter" else [way])}


CLOSED = Bounds(var("q0") - param("w") + 1, var("q1") - param("w") + 1, var("q0"), var("q1"))


@pytest.mark.parametrize("name", ["diagonal, by distance", "plane, of a head", "scatter, sums"])
def test_closed_form_bounds(name):
    both = Tables(ALL[name].but(q_len=65, kv_len=65, slots={"w": 33}))  # edges of windows at those of tiles
    both.plan = make_plan(ProgramExprs(both.case.mask, both.case.score), facts=ProgramFacts(bounds=CLOSED))
    both.check()


@pytest.mark.parametrize("name", ["diagonal, by distance", "plane, of all"])
def test_closed_form_bounds_in_64_bits(name):
    both = Tables(ALL[name].but(mask=STEEP, batch=1, slots={}, block=(16, 16)))
    both.plan = make_plan(
        ProgramExprs(STEEP, both.case.score), facts=ProgramFacts(bounds=STEEP_BOUNDS, limits={"q": 2**12, "k": 2**12})
    )
    assert both.plan.int64
    both.check()


@pytest.mark.parametrize("room", [1 << 24, 1 << 11])  # 1 << 11: less than all the parts want
@pytest.mark.parametrize("name", ["two weights", "crop"])
def test_diagonals_in_parts(name, room, monkeypatch):
    monkeypatch.setattr(triton_grids, "DIAGONAL_ROWS", 1)
    monkeypatch.setattr(triton_grids, "ROOM", room)
    Tables(DIAGONAL[name]).check()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["diagonal, crop", "plane, of one head", "scatter, crop"])
def test_captured_gradients_in_half_precision_are_near(name, dtype):
    Tables(ALL[name].but(dtype=dtype), sinks=True, dropout=0.3).check_half()


@pytest.mark.parametrize("name", ["diagonal, two weights", "plane, of all", "scatter, group"])
def test_dropout_and_sinks(name):
    Tables(ALL[name], sinks=True, dropout=0.4, dlse=False).check()


@pytest.mark.parametrize("name", ["scatter, sums", "scatter, wild weight", "plane, of all"])
def test_with_atomics_in_float32(name):
    both = Tables(ALL[name])
    both.deterministic = False
    both.check()


@pytest.mark.parametrize("name", ["diagonal, by distance", "scatter, chained"])
def test_programs_may_run_in_any_order(name, monkeypatch):
    both = Tables(ALL[name])
    (first,) = both.ours().values()
    forward = interpreter_builder.set_grid_idx

    def backward(*at):
        forward(*(n - 1 - i for n, i in zip(interpreter_builder.grid_dim, at, strict=True)))

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", backward)
    assert torch.equal(*both.again().values(), first)
    if "scatter" in name:  # where that is not so, the test would show it
        both.deterministic = False
        (backwards,) = both.again().values()
        monkeypatch.undo()
        assert not torch.equal(*both.again().values(), backwards)


def test_fixed_point_keeps_what_is_added_to_a_unit(monkeypatch):
    both = Tables(ALL["plane, of one head"])  # one value for every place, so that nothing else is rounded
    (exact,) = both.ours().values()
    monkeypatch.setattr(_CapturedRun, "plane", lambda *_: None)
    (fixed,) = both.again().values()
    assert (fixed - exact).abs().max() <= 2.0**-60 * exact.double().abs().sum()
    assert not torch.equal(fixed, torch.zeros_like(fixed))


def test_arrays_of_any_strides():
    def twisted(x, y, z):
        return x.transpose(1, 2).contiguous().transpose(1, 2), y[:, :, :1].expand_as(y), z.mT.contiguous().mT

    both = Tables(ALL["diagonal, crop"], change=twisted)
    both.dout = both.dout[:, :, :1, :1].expand_as(both.dout)
    both.check()


def test_captured_gradients_ignore_hidden_nan():
    for name in ("diagonal, two weights", "plane, of one head", "scatter, crop"):
        clean, dirty = (Tables(ALL[name].but(mask=causal & (k < 60), slots={})) for _ in "12")
        dirty.qkv[1][:, :, 60:] = math.nan
        torch.testing.assert_close(dirty.ours()["t0"], clean.ours()["t0"])


def test_beside_all_other_gradients():
    class Both(torch_gradients.Both):
        forward, backward = staticmethod(triton_torch.forward), staticmethod(triton_torch.backward)
        target, spans = TritonTarget("triton", 32, 32), property(lambda self: Source(self.case))

    mod = score + t(q - k) + t(q + k) + lookup("u", (q, k), FLOAT) + lookup("u", (h, k), FLOAT)
    case = near.but(score=mod, heads=2, kv_heads=1, tables={"t": learned(99), "u": learned((70, 70))})
    Both(case, sinks=True, dropout=0.2).check()


@pytest.mark.parametrize(
    ("deterministic", "everywhere", "want"), [(True, False, True), (False, False, False), (False, True, True)]
)
def test_deterministic_is_handed_on(deterministic, everywhere, want, monkeypatch):
    asked = []
    monkeypatch.setattr(_CapturedRun, "scattered", lambda *a, go=_CapturedRun.scattered: asked.append(a[2]) or go(*a))
    draw = np.random.default_rng(0)
    arrays = [torch.from_numpy(draw.standard_normal((1, 1, 40, 16))).float() for _ in range(3)]
    grads = []
    torch.use_deterministic_algorithms(everywhere)
    try:
        for backend in ("triton", "aten"):
            device = torch.get_default_device() if backend == "triton" else "cpu"
            table, *qkv = (x.to(device) for x in (torch.from_numpy(learned(60)), *arrays))
            table.requires_grad_()
            said = {"mask": "causal", "score": "score + t[q // 2 + k]", "backend": backend}
            att = fk.compile(**said, deterministic=deterministic, t=table)
            att(*qkv).square().sum().backward()
            fk.attention(*qkv, **said, deterministic=deterministic, t=table).square().sum().backward()
            grads.append(table.grad.cpu())
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [want, want]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_opposite_shares_of_an_entry_have_a_sum_of_zero():
    """Fixed point rounds to the nearest integer: rounded down, each pair would leave a unit. Shares are small beside
    the others, for float32 has no halves of large numbers."""
    t = torch.zeros(6, requires_grad=True)
    att = fk.compile("k >= 0", "score + t[min(q // 2, 1) * 3 + k % 3]", backend="triton")
    draw = torch.Generator(torch.get_default_device()).manual_seed(2)
    x, key, value, cotangent = (torch.randn(1, 1, 20, 16, generator=draw) for _ in range(4))
    x[:, :, 1] = x[:, :, 0]
    cotangent[:, :, :2] = torch.tensor([1e-13, -1e-13])[:, None] * cotangent[:, :, :1]
    found = torch.autograd.grad(att(x, key, value, t=t), t, cotangent)[0]
    assert not found[:3].any()
    assert found[3:].all()
