"""Gradients of torch's library calls against the oracle's: masks, score mods, captured values, shapes, strides."""

import itertools
import math

import numpy as np
import pytest
import torch
from support import brute
from support.attention_cases import CASES, Case, shared

from frisket.dsl import ir
from frisket.dsl.ir import lookup, param
from frisket.dsl.sugar import eq, function, h, k, q, score, where
from frisket.dsl.types import FLOAT
from frisket.lowering import aten, aten_backward, aten_tiles, dense
from frisket.lowering.derive import backward_of
from frisket.lowering.plan import RATE, SEED, Geometry, Target, make_plan

causal = q >= k
rng = np.random.default_rng(5)


def learned(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


window = causal & (q - k < 40)
rows = Case(window, q_len=300, kv_len=300)
MODS = {
    "gain per head": rows.but(score=score * lookup("t", (h,), FLOAT), tables={"t": 1 + learned(2) / 4}),
    "alibi": rows.but(score=score + lookup("t", (h,), FLOAT) * ir.to_float(k - q), tables={"t": learned(2) / 16}),
    "by row": rows.but(score=score + lookup("t", (h, q), FLOAT), tables={"t": learned((2, 300))}),
    "by row, clamped": rows.but(score=score * lookup("t", (q - 30,), FLOAT), tables={"t": learned(50)}),
    "by column": rows.but(score=score + lookup("t", (k,), FLOAT) * score, tables={"t": learned(300)}),
    "by column, gqa": rows.but(
        score=score + lookup("t", (h, k), FLOAT), tables={"t": learned((4, 300))}, heads=4, kv_heads=2, batch=2
    ),
    "by distance": rows.but(score=score + lookup("t", (h, q - k), FLOAT), tables={"t": learned((2, 40))}),
    "by bucket": rows.but(
        score=score + lookup("t", (lookup("n", (q - k,)),), FLOAT),
        tables={"t": learned(5), "n": np.repeat(np.arange(5), 8)},
    ),
    "by distance, full": Case(
        score=score + lookup("t", (k - q + 100,), FLOAT), tables={"t": learned(180)}, q_len=130, kv_len=90
    ),
    "plane": Case(causal, score + lookup("t", (h, q, k), FLOAT), tables={"t": learned((2, 150, 150))}),
    "pairs": Case(causal, score + lookup("t", ((q * k) % 7,), FLOAT), tables={"t": learned(7)}, heads=4),
    "slot": rows.but(
        score=score * param("c", FLOAT) + param("d", FLOAT) * ir.to_float(k - q), slots={"c": 0.7, "d": 0.01}
    ),
    "learned softcap": rows.but(
        score=param("c", FLOAT) * function("tanh", score / param("c", FLOAT)), slots={"c": 3.0}
    ),
    "two sites": rows.but(
        score=score + lookup("t", (q % 9,), FLOAT) + lookup("t", (k % 9,), FLOAT), tables={"t": learned(9)}
    ),
    "log slope": rows.but(score=function("log", abs(score) + 0.1)),
    "infinite slope where hidden": Case(causal, where(k > q, function("sqrt", score * 0.0), score)),
    "constant": Case(causal, ir.to_float(k) * 0.01),
    "gate": Case(
        causal, score + function("log", function("sigmoid", lookup("t", (h, k), FLOAT))),
        tables={"t": learned((2, 150))},
    ),
}  # fmt: skip
HARD = {
    "prefix and window": Case((k < 37) | (abs(q - k) < 20), q_len=400, kv_len=400, block=(32, 16)),
    "dilated": Case(eq((q - k) % 32, 0) & causal, q_len=300, kv_len=300, block=(16, 16)),
    "image": Case((abs(q // 16 - k // 16) <= 2) & (abs(q % 16 - k % 16) <= 2), q_len=256, kv_len=256, block=(16, 16)),
    "backwards": Case(abs(q + k - 200) < 20, q_len=256, kv_len=256, block=(32, 32)),
    "one query": Case(k <= q, q_len=1, kv_len=300, origin=(0, 0, 299, 0), sizes=(1, 2, 300, 300)),
    "tall": Case(k < 500, q_len=1300, kv_len=600, heads=1, kv_heads=1),
    "triangle": Case(causal, q_len=700, kv_len=700, heads=4, kv_heads=2),
    "triangle below": Case(q + 64 >= k, q_len=600, kv_len=664),
}


def grids(case):
    mask = ir.TRUE if case.mask is None else case.mask
    return shared(
        brute.spans(
            mask, case.q_len, case.kv_len, batch=case.batch, heads=case.heads, block=case.block, origin=case.origin,
            sizes=case.sizes, params=case.slots, tables=case.tables,
        )
    )  # fmt: skip


class Both:
    """A case run by the executor and by the oracle."""

    def __init__(self, case, *, dlse=True, sinks=False, dropout=0.0, change=None, wanted=None):
        draw = np.random.default_rng(1)
        self.case, self.dtype = case, getattr(torch, case.dtype)
        self.g = Geometry(
            case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len, case.dim, case.v_dim, case.dim**-0.5,
            case.origin, case.sizes,
        )  # fmt: skip
        limits = dict.fromkeys((*ir.COORDINATES, *ir.SIZES, *case.slots, *case.tables), 2.0**14)
        self.plan = make_plan(case.mask, case.score, limits=limits, dropout=dropout > 0)
        heads, kv = (case.batch, case.heads), (case.batch, case.kv_heads)

        def one(*shape):
            return torch.from_numpy(draw.standard_normal(shape)).to(self.dtype)

        self.qkv = [
            one(*heads, case.q_len, case.dim),
            one(*kv, case.kv_len, case.dim),
            one(*kv, case.kv_len, case.v_dim),
        ]
        if change:
            self.qkv = change(*self.qkv)
        self.dout = one(*heads, case.q_len, case.v_dim)
        self.dlse = one(*heads, case.q_len).to(self.work) if dlse else None
        self.sinks = one(case.heads) if sinks else None
        self.params = {**case.slots, **({SEED: 11, RATE: dropout} if dropout else {})}
        self.tables = {n: torch.from_numpy(np.array(t)) for n, t in self.plan.table_values(case.tables).items()}
        self.slots = self.plan.slot_values(self.params)
        self.wanted = wanted

    @property
    def work(self):
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def everything(self):
        return frozenset({"q", "k", "v", *(g.source for g in backward_of(self.plan).gradients)})

    def ours(self):
        self.spans = grids(self.case)
        common = (self.slots, self.tables, Target("aten", *self.case.block))
        self.out, self.lse, self.top = aten.forward(self.plan, self.spans, self.g, *self.qkv, *common, sinks=self.sinks)
        self.dlse = None if self.dlse is None else torch.where(self.lse.isfinite(), self.dlse, 0.0)
        return aten_backward.backward(
            self.plan, self.spans, self.g, *self.qkv, self.out, self.lse, self.dout, self.dlse, *common,
            wanted=self.wanted or self.everything, sinks=self.sinks,
        )  # fmt: skip

    def theirs(self, rounded=dense.exactly):
        arrays = [x.double().numpy() for x in self.qkv]
        more = {"sinks": None if self.sinks is None else self.sinks.double().numpy()}
        if self.plan.kept is not None:
            more |= {"kept": ir.build("ge", ir.random(param(SEED), *(ir.var(n) for n in "bhqk")), param(RATE, FLOAT))}
            more |= {"rate": self.params[RATE]}
        same = {
            "scale": self.g.scale, "params": self.params, "tables": self.case.tables, "origin": self.g.origin,
            "sizes": self.g.sizes,
        }  # fmt: skip
        more["rounded"] = rounded
        forward = dense.attention(*arrays, self.case.mask, self.case.score, **same, **more)
        top = dense.top(*arrays[:2], self.case.mask, self.case.score, **same)
        dlse = None if self.dlse is None else self.dlse.double().numpy()
        found = dense.gradients(
            *arrays, self.case.mask, self.case.score, self.dout.double().numpy(), dlse, **same, **more
        )
        named = {t.name: found["dtables"][t.source] for t in self.plan.tables if t.source in found["dtables"]}
        named |= {s.name: found["dscalars"][s.source] for s in self.plan.slots if s.source in found["dscalars"]}
        return (*forward, top), {"q": found["dq"], "k": found["dk"], "v": found["dv"], **named}

    def check_half(self):
        """The rule of `runtime.report`: twice the error of dense attention that rounds every array to the dtype."""
        got = self.ours()
        ((out, lse, _), want), ((dense_out, _, _), rough) = self.theirs(), self.theirs(self.half)
        pairs = {"out": (self.out, out, dense_out), **{n: (x, want[n], rough[n]) for n, x in got.items()}}
        for name, (mine, exact, plain) in pairs.items():
            size = max(1.0, float(np.abs(exact).max(initial=0)))
            error, allowed = (float(np.abs(x - exact).max()) / size for x in (mine.double().numpy(), plain))
            assert error <= 2 * allowed + 1e-6, name
        np.testing.assert_allclose(self.lse.numpy(), lse, rtol=1e-5, atol=1e-5)  # float32, whatever the arrays are

    def half(self, x):
        return torch.from_numpy(np.array(x)).to(self.dtype).float().numpy()

    def check(self, tolerance=None):
        tolerance = tolerance or {"float64": 1e-11, "float32": 2e-5}[self.case.dtype]
        got = self.ours()
        (out, lse, top), want = self.theirs()
        assert got.keys() == (self.wanted or want.keys())
        for mine, right in ((self.out, out), (self.lse, lse), (self.top, top)):
            np.testing.assert_allclose(mine.double().numpy(), right, rtol=tolerance, atol=tolerance)
        for name, mine in got.items():
            right = np.asarray(want[name])
            assert mine.shape == right.shape, name
            assert mine.dtype == (self.dtype if name in "qkv" else self.work), name
            size = max(1.0, float(np.abs(right).max(initial=0)))
            np.testing.assert_allclose(mine.double().numpy(), right, rtol=0, atol=tolerance * size, err_msg=name)
        return got


@pytest.mark.parametrize("name", CASES)
def test_every_mask_and_mod(name):
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
def test_sinks_and_dropout(name, sinks, dropout):
    Both(CASES[name], sinks=sinks, dropout=dropout).check()


def test_captured_gradients_under_dropout():
    Both(MODS["by column, gqa"].but(dtype="float64"), sinks=True, dropout=0.4).check()


@pytest.mark.parametrize("name", ["gqa", "window", "alibi", "v-wider"])
def test_float64(name):
    Both(CASES[name].but(dtype="float64")).check()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["gqa", "alibi", "prefix and window", "by column, gqa"])
def test_half_precision(name, dtype, monkeypatch):
    case = {**CASES, **HARD, **MODS}[name].but(dtype=dtype)
    Both(case).check_half()
    Both(case, dlse=False, sinks=True, dropout=0.2).check_half()
    monkeypatch.setattr(aten_tiles, "_fast_bfloat16", lambda: dtype == "bfloat16")  # and as on another processor
    monkeypatch.setattr(aten, "BUDGET", 1 << 14)
    monkeypatch.setattr(aten_backward, "BUDGET", 1 << 14)
    Both(case).check_half()


@pytest.mark.parametrize(("dim", "v_dim"), [(8, 256), (256, 8), (24, 24)])
def test_head_sizes(dim, v_dim):
    Both(Case(window, dim=dim, v_dim=v_dim, q_len=200, kv_len=200)).check()


@pytest.mark.parametrize("name", ["gqa", "window", "v-wider"])
def test_any_strides(name):
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


def test_a_row_that_sees_nothing_has_no_gradient_whatever_comes_back():
    both = Both(CASES["empty-rows"])
    both.ours()
    empty = both.lse == -math.inf
    assert empty.any()
    both.dlse = torch.where(empty, math.nan, both.dlse)
    got = aten_backward.backward(
        both.plan, both.spans, both.g, *both.qkv, both.out, both.lse, both.dout, both.dlse, both.slots,
        both.tables, Target("aten", *both.case.block), wanted=both.everything,
    )  # fmt: skip
    assert all(x.isfinite().all() for x in got.values())
    assert (got["q"][empty] == 0).all()


@pytest.mark.parametrize("wanted", [{"q"}, {"k"}, {"v"}, {"t0"}, {"q", "t0"}, set()])
def test_only_what_is_wanted(wanted):
    Both(MODS["by column, gqa"], wanted=frozenset(wanted)).check()
    Both(HARD["triangle"], wanted=frozenset(wanted - {"t0"})).check()


def test_a_value_without_influence_has_gradient_zero():
    both = Both(
        Case(causal, score + ir.to_float(ir.build("int", lookup("t", (k,), FLOAT))), tables={"t": learned(150)})
    )
    both.wanted = frozenset({"t0"})
    assert both.ours()["t0"].tolist() == [0.0] * 150


def test_masked_positions_never_contribute():
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
def test_gradcheck(name):
    case = MODS[name].but(q_len=7, kv_len=9, dim=3, v_dim=2, block=(4, 4), dtype="float64")
    both = Both(case)
    names = sorted(both.everything)
    spans = grids(case)

    class Attention(torch.autograd.Function):
        @staticmethod
        def run(given):
            slots = {n: float(given.get(n, x)) if isinstance(x, float) else x for n, x in both.slots.items()}
            tables = {n: given.get(n, x) for n, x in both.tables.items()}
            return (slots, tables, Target("aten", 4, 4))

        @staticmethod
        def forward(ctx, *arrays):
            given = ctx.arrays = dict(zip(names, arrays, strict=True))
            qkv = [given[n] for n in "qkv"]
            ctx.results = aten.forward(both.plan, spans, both.g, *qkv, *Attention.run(given))[:2]
            return ctx.results

        @staticmethod
        def backward(ctx, dout, dlse):
            qkv = [ctx.arrays[n] for n in "qkv"]
            got = aten_backward.backward(
                both.plan, spans, both.g, *qkv, *ctx.results, dout, dlse, *Attention.run(ctx.arrays),
                wanted=frozenset(names),
            )  # fmt: skip
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


@pytest.mark.parametrize("name", ["window", "gqa", "mqa", "triangle", "by column, gqa", "pairs", "plane"])
def test_equal_calls_give_equal_bits(name, two_threads, monkeypatch):
    monkeypatch.setattr(aten_backward, "BUDGET", 1 << 14)
    both = Both({**CASES, **HARD, **MODS}[name], dropout=0.2 if name == "gqa" else 0.0)
    first = both.check(5e-5)
    for _ in range(3):
        again = both.ours()
        assert all(torch.equal(again[n], x) for n, x in first.items())


def test_the_flash_kernel_is_used_where_it_fits(monkeypatch):
    seen = []
    real = aten_backward.flash_backward
    monkeypatch.setattr(aten_backward, "flash_backward", lambda *a: (seen.append(a), real(*a)))
    Both(HARD["triangle"], dlse=False).check()
    assert seen
    seen.clear()
    Both(HARD["triangle"], dropout=0.1).check()
    Both(HARD["triangle"], dlse=True).check()
    assert not seen


def test_no_graph_is_left_behind():
    both = Both(MODS["by row"], change=lambda *x: tuple(y.requires_grad_() for y in x))
    both.tables = {n: t.requires_grad_() for n, t in both.tables.items()}
    assert not any(x.requires_grad for x in both.ours().values())
    assert not both.out.requires_grad
