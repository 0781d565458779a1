"""Attention whose weights are no softmax: cases, the reference, and what a call does around the kernels.

Kernels of a backward take the cotangent of rows before their division, and in the place of a cotangent of lse one of
the sum of each row's weights; `Weighted.cotangents` computes both from results, as calls do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from frisket.dsl import ir
from frisket.dsl.evaluate import evaluate, unrolled
from frisket.dsl.ir import COUNT, TOTAL, Expr, lookup, param
from frisket.dsl.sugar import function, h, k, maximum, minimum, q, score, where
from frisket.dsl.types import FLOAT
from frisket.lowering import dense
from frisket.lowering.derive import derivatives
from frisket.lowering.plan import RATE, SEED, LoopPlan, ProgramFacts, make_plan, survives
from frisket.lowering.simplify import ProgramExprs
from support import attention_cases as cases
from support.attention_cases import EMPTY_ROWS, Case, causal

DROPPED = {SEED: 11, RATE: 0.3}
count = ir.to_float(COUNT)
window = causal & (q - k < 40)


@dataclass(frozen=True)
class Weighted(Case):
    """A case with a weight; with `drops`, some of them are dropped."""

    weight: Expr | None = None
    divide: Expr | None = None
    drops: bool = False
    seed: int = 5  # of cotangents

    @property
    def exprs(self) -> ProgramExprs:
        return ProgramExprs(self.mask, self.score, self.weight, self.divide)

    @property
    def plan(self) -> LoopPlan:
        names = (*ir.COORDINATES, *ir.SIZES, *self.slots, *self.tables)
        facts = ProgramFacts(limits=dict.fromkeys(names, 2.0**14), table_facts=cases.facts(self))
        return make_plan(self.exprs, "the text", facts, keep_mask=survives() if self.drops else None)

    @property
    def call(self) -> dense.DenseCall:
        more = {"keep_mask": survives(), "rate": DROPPED[RATE]} if self.drops else {}
        params = {**self.slots, **DROPPED}
        return dense.DenseCall(
            self.exprs, scale=self.dim**-0.5, params=params, tables=self.tables, problem=self.problem, **more
        )

    def rounded(self, x):
        """To the dtype of the case, as float32."""
        if self.dtype == "bfloat16":
            import torch

            return torch.from_numpy(np.array(x)).bfloat16().float().numpy()
        return np.asarray(x).astype(self.dtype).astype(np.float32)

    @property
    def roughly(self) -> dense.DenseCall:
        """The call of dense attention in the dtype of the case."""
        return replace(self.call, rounded=self.rounded)

    @property
    def arrays(self):
        """q, k, v and dout [batch, heads, length, dim], and a cotangent of the sums of weights, in float64."""
        draw = np.random.default_rng(self.seed)
        shape = (self.batch, self.heads, self.q_len, self.v_dim)
        q, k, v = (np.asarray(x).transpose(0, 2, 1, 3) for x in cases.arrays(self))
        given = *(np.asarray(x, np.float64) for x in (q, k, v)), self.rounded(draw.standard_normal(shape))
        return *(np.asarray(x, np.float64) for x in given), draw.standard_normal(shape[:3]) / 8

    def seen(self) -> np.ndarray:
        """The number of keys that each query sees, [batch, heads, q_len]."""
        q, k, *_ = self.arrays
        repeated = np.repeat(k, self.heads // self.kv_heads, 1)
        with np.errstate(all="ignore"):
            return dense._weighted_rows(q, repeated, self.call).env["count"][..., 0]

    def cotangents(self, out, total, seen, dout, dtotal):
        """The cotangents of rows before their division, and of the sums of weights."""
        env = {n: x for n, x in dense.coordinates(self.problem).items() if n != "k"}
        env |= {**self.slots, "total": total[..., None], "count": seen[..., None]}
        with np.errstate(all="ignore"):
            divisor = 1.0 if self.divide is None else evaluate(self.divide, env, self.tables)
            none = (np.broadcast_to(divisor, env["total"].shape) == 0) | (env["count"] == 0)
            g = np.where(none, 0.0, dout / np.where(none, 1.0, divisor))
            derived = None if self.divide is None else derivatives(unrolled(self.divide, env, self.tables), TOTAL)
            slope = None if derived is None else derived.slope
            of_total = (g * out).sum(-1, keepdims=True) * (0.0 if derived is None else 1.0)
            of_total = np.where(none, 0.0, of_total if slope is None else of_total * evaluate(slope, env, self.tables))
        return g, dtotal - of_total[..., 0]

    def wanted(self, rough: bool = False):
        """(out, total, gradients by the names of the plan) of the reference, or of dense attention in the dtype."""
        *qkv, dout, dtotal = self.arrays
        call, dtype = (self.roughly, np.float32) if rough else (self.call, np.float64)
        qkv, dout = [x.astype(dtype) for x in qkv], dout.astype(dtype)
        out, total = dense.attention(*qkv, call)
        found = dense.gradients(*qkv, call, dout, dtotal)
        plan = self.plan
        grads = {n: found[f"d{n}"] for n in "qkv"}
        grads |= {t.name: found["dtables"][t.source] for t in plan.tables if t.source in found["dtables"]}
        grads |= {s.name: found["dscalars"][s.source] for s in plan.slots if s.source in found["dscalars"]}
        return out, total, grads

    def check(self, out, total, seen, grads=None, within: float | None = None) -> None:
        """Compare what kernels gave: errors are at most twice those of dense attention in the dtype and 1e-6, or
        `within`, of the largest number."""
        want, want_total, want_grads = self.wanted()
        if self.plan.counts:
            np.testing.assert_array_equal(seen, self.seen())
        np.testing.assert_allclose(total, want_total, rtol=0, atol=3e-6 * max(1.0, largest(want_total)))
        allowed = {}
        for seed in (self.seed, *range(3 * (self.dtype != "float32"))) if within is None else ():
            draw = replace(self, seed=seed)  # where few entries are large, one draw may be right by luck
            exact, near = ({"out": x[0], **x[2]} for x in (draw.wanted(), draw.wanted(rough=True)))
            allowed = {n: max(allowed.get(n, 0.0), largest(x - exact[n])) for n, x in near.items()}
        for name, got in {"out": out, **(grads or {})}.items():
            right = want if name == "out" else want_grads[name]
            size = max(1.0, largest(right))
            most = 2 * allowed[name] + 1e-6 * size if within is None else within * size
            assert largest(np.asarray(got, np.float64) - right) <= most, name  # and so no NaN


def largest(x) -> float:
    return float(np.abs(x).max(initial=0))


def weighted(mask=causal, weight=score, divide=None, **more) -> Weighted:
    return Weighted(mask, **{"weight": weight, "divide": divide, "q_len": 90, "kv_len": 90, **more})


relu2 = maximum(score, 0.0) ** 2.0
gamma = {"gamma": np.array([0.9, 0.97, 0.8, 0.99], np.float32)}
retention = score * lookup("gamma", (h,), FLOAT) ** ir.to_float(q - k)
DRAW = np.random.default_rng(3)
WEIGHTS = {
    "sigmoid": weighted(weight=function("sigmoid", score + param("bias", FLOAT)), slots={"bias": -1.5}),
    "squared relu": weighted(weight=relu2, divide=count),
    "retention": weighted(weight=retention, divide=maximum(abs(TOTAL), 1.0), tables=gamma),
    "softmax1": weighted(weight=function("exp", minimum(score, 8.0)), divide=TOTAL + 1.0),
    "linear": weighted(),
}  # fmt: skip
CASES = {
    **WEIGHTS,
    "window": WEIGHTS["softmax1"].but(mask=window, q_len=110, kv_len=110),
    "ragged": WEIGHTS["sigmoid"].but(q_len=131, kv_len=77, block=(32, 16)),
    "empty rows": WEIGHTS["squared relu"].but(mask=EMPTY_ROWS, q_len=110),
    "empty rows, divided by their sum": weighted(EMPTY_ROWS, function("exp", score), TOTAL, q_len=110),
    "negative divisors": weighted(None, score, TOTAL - 3.0),
    "all hidden": weighted(ir.FALSE, function("sigmoid", score), count),
    "gqa": WEIGHTS["squared relu"].but(heads=6, kv_heads=2),
    "by head and query": weighted(
        window, function("sigmoid", score), count * (1.0 + lookup("d", (h, q), FLOAT)), heads=4, kv_heads=2,
        tables={"d": DRAW.random((4, 150)).astype(np.float32)},
    ),
    "dropout": WEIGHTS["softmax1"].but(drops=True),
    "dropout of sigmoids": WEIGHTS["sigmoid"].but(drops=True, heads=4),
    "score mod": weighted(
        window, function("sigmoid", score), count, score=score * 2.0 + lookup("t", (h, q - k), FLOAT),
        tables={"t": DRAW.standard_normal((2, 40)).astype(np.float32)},
    ),
    "hidden by the score mod": weighted(
        causal, function("exp", minimum(score, 4.0)), count, score=where(score > 0.5, -ir.INF, score)
    ),
    "hidden by a table": weighted(
        causal, score + 1.0, count + TOTAL * TOTAL, score=score + lookup("t", (k,), FLOAT),
        tables={"t": np.where(np.arange(150) % 3 == 1, -np.inf, 0.5).astype(np.float32)},
    ),
    "nothing at hidden pairs": weighted(causal, function("log", ir.to_float(q - k + 1)) * score, count),
    "slope where the weight is 0": weighted(causal, (score + lookup("t", (h, k), FLOAT)) * 0.0 + relu2 - 1.0,
                                            tables={"t": DRAW.standard_normal((2, 150)).astype(np.float32)}),
    "of positions alone": weighted(causal, 1.0 / ir.to_float(q - k + 1), TOTAL),
    "of a head alone": weighted(
        None, function("sqrt", abs(score) + 2.0), count, score=function("cos", lookup("gamma", (h,), FLOAT)),
        tables=gamma,
    ),
    "a condition of the head": weighted(
        None, relu2, count + TOTAL, score=where(lookup("gamma", (h,), FLOAT) < 0.95, -ir.INF, score), tables=gamma
    ),
    "learned slot": weighted(causal, function("tanh", score * param("c", FLOAT)), count, slots={"c": 0.7}),
    "by column": weighted(
        causal, function("sigmoid", score + lookup("t", (k,), FLOAT)), maximum(TOTAL, 0.5),
        tables={"t": DRAW.standard_normal(150).astype(np.float32)},
    ),
    "scattered": weighted(
        causal, function("sigmoid", score) * lookup("t", (q * k % 7,), FLOAT),
        tables={"t": DRAW.standard_normal(7).astype(np.float32)},
    ),
    "crop": WEIGHTS["softmax1"].but(mask=window, divide=TOTAL + count, origin=(1, 1, 37, 11), sizes=(4, 4, 500, 500)),
    "origin by batch": WEIGHTS["retention"].but(
        batch=2, kv_len=200, sizes=(2, 2, 200, 205), origin=(0, 0, np.array([50, 13]), np.array([0, 5]))
    ),
    "decode": WEIGHTS["retention"].but(q_len=1, kv_len=300, origin=(0, 0, 299, 0), sizes=(1, 4, 300, 300), heads=4,
                                       kv_heads=1),
    "v wider": WEIGHTS["softmax1"].but(dim=16, v_dim=48),
    "dim 96": WEIGHTS["sigmoid"].but(dim=96, v_dim=96),
}  # fmt: skip


def last(case: Weighted, queries: int) -> Weighted:
    """The case for its last queries alone."""
    most = min(case.q_len, case.kv_len)
    sizes = case.batch, case.heads, most, case.kv_len
    return case.but(q_len=queries, origin=(0, 0, most - queries, 0), sizes=sizes, block=(16, 32))
