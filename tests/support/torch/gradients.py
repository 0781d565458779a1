"""Gradients by an executor of torch, and by the reference: cases, and the error they may have."""

import numpy as np
import torch
from support.attention_cases import Case, facts

from frisket.dsl import ir
from frisket.dsl.ir import lookup, param
from frisket.dsl.sugar import eq, function, h, k, q, score, where
from frisket.dsl.types import FLOAT
from frisket.lowering import dense
from frisket.lowering.derive import backward_of
from frisket.lowering.plan import (
    RATE,
    SEED,
    Cotangents,
    ForwardResults,
    Geometry,
    KernelInputs,
    ProgramFacts,
    make_plan,
    survives,
)
from frisket.lowering.simplify import ProgramExprs

causal = q >= k


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
    "triangle": Case(causal, q_len=700, kv_len=700, heads=2, kv_heads=1),
    "triangle below": Case(q + 64 >= k, q_len=600, kv_len=664),
}


TOLERANCE = {"float64": 1e-11, "float32": 2e-5}


def largest(x):
    return float(np.abs(x).max(initial=0))


class Both:
    """A case run by an executor and by the reference. A subclass says which: `forward` and `backward`, `spans` and
    `target` for the case's tiles. `stored` is what dense attention in 16 bits rounds as its kernels do: "out", from
    which delta is taken."""

    stored = ()

    def __init__(self, case, *, dlse=True, sinks=False, dropout=0.0, change=None, wanted=None):
        draw = np.random.default_rng(1)
        self.case, self.dtype = case, getattr(torch, case.dtype)
        self.g = Geometry(
            case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len, case.dim, case.v_dim, case.dim**-0.5,
            case.origin, case.sizes,
        )  # fmt: skip
        limits = dict.fromkeys((*ir.COORDINATES, *ir.SIZES, *case.slots, *case.tables), 2.0**14)
        self.plan = make_plan(
            ProgramExprs(case.mask, case.score),
            facts=ProgramFacts(limits=limits, table_facts=facts(case)),
            keep_mask=survives() if dropout > 0 else None,
        )
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

    @property
    def inputs(self):
        return KernelInputs(self.plan, self.spans, self.g, self.target, self.slots, self.tables, self.sinks)

    def ours(self):
        self.out, self.lse, self.top = self.forward(self.inputs, *self.qkv, top=True)
        self.dlse = None if self.dlse is None else torch.where(self.lse.isfinite(), self.dlse, 0.0)
        return self.again()

    def again(self):
        """The gradients, of the results that are there."""
        wanted = self.everything if self.wanted is None else self.wanted
        results, cotangents = ForwardResults(self.out, self.lse), Cotangents(self.dout, self.dlse)
        return self.backward(self.inputs, *self.qkv, results, cotangents, grad_names=wanted)

    def theirs(self, rounded=dense.exactly):
        arrays = [x.double().numpy() for x in self.qkv]
        more = {"sinks": None if self.sinks is None else self.sinks.double().numpy()}
        if self.plan.keep_mask is not None:
            chance = ir.random(param(SEED), *(ir.var(n) for n in "bhqk"))
            more |= {"keep_mask": ir.build("ge", chance, param(RATE, FLOAT))}
            more |= {"rate": self.params[RATE]}
        same = {
            "scale": self.g.scale, "params": self.params, "tables": self.case.tables, "problem": self.case.problem,
        }  # fmt: skip
        more["rounded"] = rounded
        forward = dense.attention(
            *arrays, dense.DenseCall(ProgramExprs(self.case.mask, self.case.score), **same, **more)
        )
        top = dense.top(*arrays[:2], dense.DenseCall(ProgramExprs(self.case.mask, self.case.score), **same))
        dlse = None if self.dlse is None else self.dlse.double().numpy()
        found = dense.gradients(
            *arrays,
            dense.DenseCall(
                ProgramExprs(self.case.mask, self.case.score),
                **same,
                **more,
                stored=self.stored if rounded == self.half else (),
            ),
            self.dout.double().numpy(),
            dlse,
        )
        named = {t.name: found["dtables"][t.source] for t in self.plan.tables if t.source in found["dtables"]}
        named |= {s.name: found["dscalars"][s.source] for s in self.plan.slots if s.source in found["dscalars"]}
        return (*forward, top), {"q": found["dq"], "k": found["dk"], "v": found["dv"], **named}

    def check_half(self):
        """The rule of `attention.report`: twice the error of dense attention that rounds every array to the dtype, the
        largest for cotangents of a few signs: where few entries are large, it may be right by luck for those given."""
        got = self.ours()
        (out, lse, _), want = self.theirs()
        (dense_out, _, _), rough = self.theirs(self.half)
        size = {n: max(1.0, largest(x)) for n, x in {"out": out, **want}.items()}
        allowed = {"out": largest(dense_out - out) / size["out"]}
        allowed |= {n: largest(x - want[n]) / size[n] for n, x in rough.items()}
        for seed in range(3):
            signs = torch.randint(0, 2, self.dout.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
            self.dout = self.dout * signs.to(self.dout.dtype)
            exact, rough = self.theirs()[1], self.theirs(self.half)[1]
            allowed |= {n: max(allowed[n], largest(rough[n] - x) / max(1.0, largest(x))) for n, x in exact.items()}
        for name, x in {"out": self.out, **got}.items():
            exact = out if name == "out" else want[name]
            assert largest(x.double().numpy() - exact) / size[name] <= 2 * allowed[name] + 1e-6, name
        np.testing.assert_allclose(self.lse.numpy(), lse, rtol=1e-5, atol=1e-5)  # float32, whatever the arrays are

    def half(self, x):
        return torch.from_numpy(np.array(x)).to(self.dtype).float().numpy()

    def check(self, tolerance=None):
        tolerance = tolerance or TOLERANCE[self.case.dtype]
        got = self.ours()
        (out, lse, top), want = self.theirs()
        assert got.keys() == (want.keys() if self.wanted is None else self.wanted)
        for mine, right in ((self.out, out), (self.lse, lse), (self.top, top)):
            np.testing.assert_allclose(mine.double().numpy(), right, rtol=tolerance, atol=tolerance)
        for name, mine in got.items():
            right = np.asarray(want[name])
            assert mine.shape == right.shape, name
            assert mine.dtype == (self.dtype if name in "qkv" else self.work), name
            size = max(1.0, float(np.abs(right).max(initial=0)))
            np.testing.assert_allclose(mine.double().numpy(), right, rtol=0, atol=tolerance * size, err_msg=name)
        return got
