"""Attention problems with an answer: what every JAX kernel is run on, and the error it may have.

Arrays are made by numpy and `jax.device_put`: `jnp.asarray` compiles a program for every shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import numpy as np

import frisket as fk
from frisket.dsl import ir
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import Expr, lookup, segment
from frisket.dsl.sugar import b, eq, function, h, k, q, score, where
from frisket.dsl.types import BOOL, FLOAT
from frisket.lowering import dense
from frisket.lowering.analysis.solve import Fact, facts_of
from frisket.lowering.analysis.table import Table
from frisket.lowering.pipeline import holds
from frisket.lowering.plan import (
    Bounds,
    Geometry,
    KernelInputs,
    LoopPlan,
    Problem,
    ProgramFacts,
    Spans,
    Target,
    make_plan,
)
from frisket.lowering.simplify import ProgramExprs
from support.lowering import brute

rng = np.random.default_rng(7)
causal = q >= k
DOC = np.repeat(np.arange(40), rng.integers(3, 30, 40))[:400]
# A closed form that leaves 32 bits from query 32 on.
STEEP = k <= q << 26
STEEP_BOUNDS = Bounds(*[ir.var("k0")] * 2, *[ir.var(n) << 26 for n in ("q0", "q1")])
EMPTY_ROWS = (k < 60) & (q % 64 >= 40) & (q < 128)


@dataclass(frozen=True)
class Case:
    mask: Expr | None = None
    score: Expr | None = None
    q_len: int = 150
    kv_len: int = 150
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    dim: int = 32
    v_dim: int = 32
    dtype: str = "float32"
    slots: dict = field(default_factory=dict)
    tables: dict = field(default_factory=dict)
    origin: tuple = (0, 0, 0, 0)
    sizes: tuple | None = None
    block: tuple = (64, 64)

    @property
    def problem(self) -> Problem:
        return Problem(self.q_len, self.kv_len, self.batch, self.heads, self.origin, self.sizes)

    def but(self, **changes) -> Case:
        return replace(self, **changes)


same_doc = eq(lookup("doc", (q,)), lookup("doc", (k,)))
CASES = {
    "full": Case(),
    "causal": Case(causal),
    "window": Case(causal & (q - k < ir.param("w")), slots={"w": 40}, q_len=300, kv_len=300),
    "documents": Case(causal & same_doc, tables={"doc": DOC}, q_len=333, kv_len=333),
    "documents-by-batch": Case(
        causal & eq(lookup("doc", (b, q)), lookup("doc", (b, k))), batch=2,
        tables={"doc": np.stack([DOC, DOC[::-1].copy()])}, q_len=200, kv_len=200,
    ),
    "prefix": Case(causal | (k < ir.param("n")), slots={"n": 37}, heads=4),
    "heads-and-batches": Case(causal & (q - k < 20 * (h + 1) + 7 * b), heads=4, batch=2, kv_heads=2),
    "gqa": Case(causal, heads=6, kv_heads=2, batch=2),
    "mqa": Case(causal & (q - k < 50), heads=4, kv_heads=1),
    "v-wider": Case(causal, dim=16, v_dim=48),
    "dim-128": Case(causal, dim=128, v_dim=64, q_len=256, kv_len=256),
    "empty-rows": Case(EMPTY_ROWS, q_len=200),
    "nothing": Case(ir.FALSE),
    "holes": Case(eq((q - k) % 96, 0) | eq(k // 64, 1), q_len=260, kv_len=400),
    # A later run of tiles scales down what the first has summed.
    "runs": Case((k < 70) | (k >= 330), score + 0.03 * ir.to_float(k), kv_len=420),
    "decode": Case(k <= q, q_len=1, kv_len=300, origin=(0, 0, 299, 0), sizes=(1, 2, 300, 300)),
    "short-keys": Case(q % 2 >= k % 2, q_len=70, kv_len=5),
    "crop": Case(
        causal & (q - k < 70) & ((k + ir.Q_LEN) % 3 > 0), origin=(1, 1, 37, 11), sizes=(4, 4, 500, 500)
    ),
    "origin-by-batch": Case(
        causal, batch=2, kv_len=200, sizes=(2, 2, 200, 205),
        origin=(0, 0, np.array([50, 13]), np.array([0, 5])),
    ),
    "softcap": Case(causal, 20.0 * function("tanh", score / 20.0)),
    "alibi": Case(causal, score + lookup("slope", (h,), FLOAT) * (k - q),
                  tables={"slope": np.array([0.5, 0.125], np.float32)}),
    "relative-bias": Case(causal, score + lookup("bias", (h, k - q + 40), FLOAT),
                          tables={"bias": rng.standard_normal((2, 41)).astype(np.float32)}),
    "bias-plane": Case(causal, score + lookup("bias", (h, q, k + 3), FLOAT), q_len=140,
                       tables={"bias": rng.standard_normal((2, 140, 160)).astype(np.float32)}),
    "keep-plane": Case(lookup("keep", (q, k), BOOL), tables={"keep": rng.random((150, 150)) < 0.5}),
    "relation": Case(lookup("sees", (lookup("doc", (q,)) % 5, lookup("doc", (k,)) % 5), BOOL),
                     tables={"doc": DOC, "sees": np.tri(5, dtype=bool)}),
    "nested": Case(lookup("rank", (lookup("doc", (q,)),)) >= lookup("rank", (lookup("doc", (k,)),)), q_len=200,
                   kv_len=200, tables={"doc": DOC, "rank": rng.permutation(40)}),
    "scaled": Case(causal, score * ir.param("c", FLOAT) + lookup("sink", (h, k), FLOAT), heads=4, slots={"c": 0.7},
                   tables={"sink": rng.standard_normal((4, 150)).astype(np.float32)}),
    "switch": Case(where(ir.param("on", BOOL), q >= k, q <= k), slots={"on": True}),
    "masked-nan": Case(causal, where(k > q, function("log", -1.0 * function("exp", score)), score)),
    "visible-minus-inf": Case(causal, where((q % 5 < 2), ir.NEG_INF, score)),
    "bool-table": Case(causal & lookup("keep", (k,), BOOL), tables={"keep": rng.random(150) < 0.7}),
    "bool-by-head": Case(
        causal & (lookup("wide", (h,), BOOL) | (k < 30)), score + lookup("bias", (h, q, k), FLOAT), q_len=70, kv_len=70,
        tables={"wide": np.array([True, False]), "bias": rng.standard_normal((2, 70, 70)).astype(np.float32)},
    ),
    "random": Case(causal & (ir.random(ir.param("seed"), h, q, k) < 0.5), slots={"seed": 3}),
}  # fmt: skip
# Masks whose rows are runs of a table, and tables that do not have what that takes.
OFFSETS = np.array([0, 30, 30, 71, 140, 150])
FEW = Case(same_doc, q_len=90, kv_len=70, tables={"doc": DOC}, block=(32, 16), dim=16, v_dim=16)
DOCUMENTS = {  # and whether the tables have what it takes
    "both sides": (FEW, 1),
    "causal": (FEW.but(mask=causal & same_doc, heads=4, kv_heads=2), 1),
    "window": (FEW.but(mask=same_doc & (q - k < 9) & (k - q <= 4)), 1),
    "in any order": (FEW.but(tables={"doc": np.random.default_rng(2).permutation(40)[DOC]}), 1),
    "by batch": (
        FEW.but(mask=causal & eq(lookup("doc", (b, q)), lookup("doc", (b, k))), batch=2,
                tables={"doc": np.stack([DOC, DOC[::-1]])}), 1,
    ),
    "padding": (FEW.but(mask=same_doc & (lookup("doc", (q,)) > 1)), 1),  # rows of the first documents are empty
    "halves": (FEW.but(mask=eq(lookup("doc", (q // 2,)), lookup("doc", (k // 2,)))), 1),
    "past the table": (FEW.but(tables={"doc": DOC[:50]}), 1),
    "crop": (FEW.but(mask=causal & same_doc, origin=(0, 0, 133, 121), sizes=(1, 2, 300, 300)), 1),
    "segments": (FEW.but(mask=eq(segment("off", q), segment("off", k)), tables={"off": OFFSETS}), 1),
    "segments, causal": (FEW.but(mask=causal & eq(segment("off", q), segment("off", k)), tables={"off": OFFSETS}), 1),
    "never after": (FEW.but(mask=lookup("doc", (q,)) >= lookup("doc", (k,))), 1),
    "scattered": (FEW.but(tables={"doc": np.random.default_rng(2).integers(0, 3, 100)}), 0),
    "scattered, causal": (FEW.but(mask=causal & same_doc, tables={"doc": np.arange(100) % 7}), 0),
    "scattered in one batch entry": (
        FEW.but(mask=eq(lookup("doc", (b, q)), lookup("doc", (b, k))), batch=2,
                tables={"doc": np.stack([DOC, np.arange(len(DOC)) % 5])}), 0,
    ),
    "never after, unsorted": (
        FEW.but(mask=lookup("doc", (q,)) >= lookup("doc", (k,)), tables={"doc": DOC[::-1].copy()}), 0,
    ),
    "numbers": (
        FEW.but(mask=eq(lookup("x", (q,), FLOAT), lookup("x", (k,), FLOAT)),
                tables={"x": np.where(DOC == 1, np.nan, DOC).astype(np.float32)}), 0,
    ),
}  # fmt: skip


def arrays(case: Case):
    """(q, k, v) in [batch, length, heads, dim]."""
    draw = np.random.default_rng(1)

    def one(length, heads, dim):
        return jax.device_put(draw.standard_normal((case.batch, length, heads, dim)).astype(case.dtype))

    return (
        one(case.q_len, case.heads, case.dim),
        one(case.kv_len, case.kv_heads, case.dim),
        one(case.kv_len, case.kv_heads, case.v_dim),
    )


def geometry(case: Case) -> Geometry:
    return Geometry(
        case.batch, case.heads, case.kv_heads, case.q_len, case.kv_len, case.dim, case.v_dim,
        case.dim**-0.5, case.origin, case.sizes,
    )  # fmt: skip


def plan_of_text(mask: str, mod: str, **more: object) -> LoopPlan:
    """A plan of a mask and a score mod in words, which are its text: of documents `doc` [batch, length] and of a
    `slope` [heads]."""
    doc, slope = np.zeros((2, 8), np.int32), np.ones(4, np.float32)
    exprs = ProgramExprs(fk.mask(mask, doc=doc).expr, fk.score(mod, slope=slope).expr)
    return make_plan(exprs, f"{mask}\n{mod}", **more)


def plan(case: Case):
    limits = dict.fromkeys((*ir.COORDINATES, *ir.SIZES, *case.slots, *case.tables), 2.0**14)
    return make_plan(
        ProgramExprs(case.mask, case.score),
        "the text of the mask",
        ProgramFacts(limits=limits, table_facts=facts(case)),
    )


def facts(case: Case) -> frozenset[Fact]:
    """The facts of the case's tables that hold, as the plans of calls have them."""
    tables = {n: Table(np.asarray(t)) for n, t in case.tables.items()}
    return frozenset(f for f in facts_of(ir.TRUE if case.mask is None else case.mask) if holds(tables, *f))


def slots(case: Case, made) -> dict:
    return made.slot_values(case.slots)


def tables(case: Case, made) -> dict:
    return {name: jax.device_put(table) for name, table in made.table_values(case.tables).items()}


def spans(case: Case, transposed: bool = False) -> Spans:
    mask = ir.TRUE if case.mask is None else case.mask
    return shared(
        brute.spans(
            mask, case.q_len, case.kv_len, batch=case.batch, heads=case.heads, block=case.block,
            origin=case.origin, sizes=case.sizes, params=case.slots, tables=case.tables, transposed=transposed,
        )
    )  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A `SpanSource`."""

    case: Case

    def rows(self, block) -> Spans:
        return spans(self.case.but(block=block))

    def columns(self, block) -> Spans:
        return spans(self.case.but(block=block), transposed=True)


def kernel_inputs(case: Case, target: Target, made=None, **fields) -> KernelInputs:
    """What an executor of JAX takes first; `fields` are other ones than the case's."""
    made = made or plan(case)
    fields = {"spans": Source(case), "geometry": geometry(case), **fields}
    fields["slots"] = fields["slots"] if "slots" in fields else slots(case, made)
    fields["tables"] = fields["tables"] if "tables" in fields else tables(case, made)
    return KernelInputs(made, target=target, **fields)


def shared(found: Spans) -> Spans:
    """Equal slices stored once."""
    whole = np.concatenate([found.bounds.reshape(len(found.count), -1), found.count], 1)
    _, first, inverse = np.unique(whole, axis=0, return_index=True, return_inverse=True)
    slice_of = inverse.reshape(-1)[found.slice_of].astype(np.int32)
    return Spans(found.bounds[first], found.count[first], slice_of)


def reference(case: Case):
    """(out [batch, length, heads, dim], lse), float64."""
    q, k, v = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in arrays(case))
    out, lse = dense.attention(
        q,
        k,
        v,
        dense.DenseCall(
            ProgramExprs(case.mask, case.score),
            scale=case.dim**-0.5,
            params=case.slots,
            tables=case.tables,
            problem=case.problem,
        ),
    )
    return out.transpose(0, 2, 1, 3), lse


def allowed(case: Case) -> float:
    """Twice the error of dense attention in the same dtype (rounded after each step), and 1e-6."""

    def rounded(x):
        return np.asarray(x, np.float32).astype(case.dtype).astype(np.float32)

    q, k, v = (np.asarray(x, np.float32).transpose(0, 2, 1, 3) for x in arrays(case))
    k, v = (np.repeat(x, case.heads // case.kv_heads, 1) for x in (k, v))
    problem = case.problem
    env = dense.coordinates(problem) | case.slots
    seen = dense.visible(ir.TRUE if case.mask is None else case.mask, env, case.tables, problem.lengths)
    with np.errstate(all="ignore"):
        s = rounded(rounded(q @ k.swapaxes(2, 3)) * np.float32(case.dim**-0.5))
        if case.score is not None:
            s = rounded(evaluate(case.score, {**env, "score": s}, case.tables))
        s = np.where(seen, s, -np.inf)
        p = rounded(np.exp(s - s.max(-1, keepdims=True)))
        p = rounded(p / p.sum(-1, keepdims=True))
        out = rounded(p @ v).transpose(0, 2, 1, 3)
    return 2 * float(np.nan_to_num(np.abs(out - reference(case)[0])).max()) + 1e-6


# every weight of a row is the same, and lse so large that float32 rounds it by 2e-4
LARGE = Case(causal, score * 0.0 + 3000.3 + 0.7 * ir.to_float(q), heads=2, kv_heads=1)


def check_residual(case: Case, lse, residual) -> None:
    """Of LARGE: lse and its rounding error are a float32, the largest score, and the log of the number of keys. Kernels
    multiply lse by log2(e) in float32 and add in base 2."""
    log2e = np.float32(1.4426950408889634)
    near = (np.asarray(lse, np.float32) * log2e).astype(np.float64)
    seen = np.arange(case.q_len) + case.origin[2] + 1
    top = near + np.asarray(residual, np.float64) * np.log2(np.e) - np.log2(seen)
    assert np.abs(top - top.astype(np.float32)).max() < 1e-5


def check(case: Case, out, lse) -> None:
    want, want_lse = reference(case)
    assert out.shape == want.shape
    assert lse.shape == want_lse.shape
    assert out.dtype == case.dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=0, atol=allowed(case))
    loose = {"float32": 2e-6, "float64": 1e-12}.get(case.dtype, 2e-2)
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=loose, atol=loose)
