"""Gradients by an executor of JAX, and by the reference: cases, and the error they may have."""

from dataclasses import replace

import jax
import numpy as np
from support import attention_cases as cases
from support.attention_cases import Case, causal

from frisket.dsl import ir
from frisket.dsl.ir import lookup
from frisket.dsl.sugar import b, function, h, k, q, score, where
from frisket.dsl.types import FLOAT, INT
from frisket.lowering import dense
from frisket.lowering.derive import backward_of
from frisket.lowering.plan import RATE, SEED, Cotangents, ForwardResults
from frisket.lowering.simplify import ProgramExprs

draw = np.random.default_rng(11)


def normal(*shape):
    return draw.standard_normal(shape).astype(np.float32)


plane = lookup("x", (h, q, k), FLOAT)
LEARNED = {
    "one-scalar": Case(causal, score * ir.param("c", FLOAT), slots={"c": 0.7}),
    "scalar-twice": Case(causal, ir.param("c", FLOAT) * function("tanh", score / ir.param("c", FLOAT)),
                         slots={"c": 2.5}, heads=4, kv_heads=2),
    "by-row": Case(causal, score * lookup("x", (b, q), FLOAT), tables={"x": normal(2, 150)}, batch=2),
    "by-column": Case(causal, score + lookup("x", (h, k), FLOAT) * score, tables={"x": normal(4, 150)}, heads=4,
                      kv_heads=2),
    "by-diagonal": Case(causal & (q - k < 70), score + lookup("x", (h, q - k), FLOAT), q_len=130, kv_len=160,
                        origin=(0, 0, 30, 0), tables={"x": normal(2, 75)}),
    "diagonal-of-buckets": Case(causal, score + lookup("x", ((q - k) // 16, h), FLOAT), heads=6, kv_heads=2, batch=2,
                                tables={"x": normal(9, 6)}),
    "plane": Case(causal, score + plane, q_len=140, tables={"x": normal(2, 140, 150)}),
    "plane-by-head": Case(causal & (q - k < 20 * (h + 1)), score + plane, heads=4, kv_heads=2, q_len=140,
                          tables={"x": normal(4, 140, 150)}),
    "plane-shifted-and-turned": Case(
        causal, score + lookup("x", (k + 3, b, q), FLOAT), heads=4, kv_heads=2, batch=3, q_len=100,
        tables={"x": normal(160, 3, 100)},
    ),
    "nested": Case(causal, score + lookup("x", (lookup("doc", (q,), INT) % 3, lookup("doc", (k,), INT) % 3), FLOAT),
                   tables={"x": normal(3, 3), "doc": cases.DOC}),
    "clamped": Case(causal, score + lookup("x", (q - k,), FLOAT) + lookup("x", (k,), FLOAT), tables={"x": normal(20)}),
    "weight-infinite-behind-the-mask": Case(
        causal, score + function("log", lookup("x", (k,), FLOAT) + where(k > q, -9.0, 3.0)),
        tables={"x": draw.random(150).astype(np.float32)},
    ),
    "origin-by-batch": Case(
        causal, score + lookup("x", (k - q + 200,), FLOAT) + lookup("y", (q,), FLOAT), batch=2, kv_len=200,
        sizes=(2, 2, 200, 205), origin=(0, 0, np.array([50, 13]), np.array([0, 5])),
        tables={"x": normal(260), "y": normal(210)},
    ),
}  # fmt: skip


def run(backward, case, target, made=None, spans=None, sinks=None, with_lse=True, wanted=None, rate=None):
    """{name: gradient} of an executor, and of the interpreter."""
    made = made or cases.plan(case)
    drop = {} if rate is None else {SEED: 5, RATE: rate}
    fields = {"spans": spans or cases.Source(case), "slots": made.slot_values({**case.slots, **drop})}
    fields["sinks"] = None if sinks is None else jax.device_put(sinks)
    inputs, arrays = cases.kernel_inputs(case, target, made, **fields), cases.arrays(case)
    given = options(case, made, sinks, drop)
    out, lse = dense.attention(*map(turned, arrays), dense.DenseCall(ProgramExprs(case.mask, case.score), **given))
    random, real = np.random.default_rng(2), np.float64 if case.dtype == "float64" else np.float32
    dout = jax.device_put(random.standard_normal(out.shape).transpose(0, 2, 1, 3).astype(case.dtype))
    dlse = jax.device_put(random.standard_normal(lse.shape).astype(real)) if with_lse else None
    wanted = {"q", "k", "v", *(g.source for g in backward_of(made).gradients)} if wanted is None else wanted
    results = ForwardResults(
        jax.device_put(out.transpose(0, 2, 1, 3).astype(case.dtype)), jax.device_put(lse.astype(real))
    )
    got = backward(inputs, *arrays, results, Cotangents(dout, dlse), grad_names=frozenset(wanted))
    assert got.keys() == set(wanted)
    return got, reference(case, made, dout, dlse, given)


def jitted(backward):
    """An executor whose gradients come from one program of XLA, with what follows its kernels."""

    def call(inputs, q, k, v, results, cotangents, *, grad_names):
        def program(q, k, v, out, lse, dout, dlse, tables):
            given = replace(inputs, tables=tables)
            of = ForwardResults(out, lse), Cotangents(dout, dlse)
            return backward(given, q, k, v, *of, grad_names=grad_names)

        rows = results.out, results.lse, cotangents.dout, cotangents.dlse
        return jax.jit(program)(q, k, v, *rows, inputs.tables)

    return call


def turned(x):
    return np.asarray(x, np.float64).transpose(0, 2, 1, 3)


def options(case, made, sinks, drop):
    kept = made.keep_mask
    if kept is not None:  # in the user's names
        kept = ir.renamed(kept, {s.name: s.source for s in made.slots if s.source in (SEED, RATE)})
    return {
        "scale": case.dim**-0.5,
        "params": {**case.slots, **drop},
        "tables": case.tables,
        "problem": case.problem,
        "sinks": sinks,
        "keep_mask": kept,
        "rate": drop.get(RATE, 0.0),
    }


def reference(case, made, dout, dlse, given):
    found = dense.gradients(
        *map(turned, cases.arrays(case)),
        dense.DenseCall(ProgramExprs(case.mask, case.score), **given),
        turned(dout),
        dlse,
    )
    wanted = {n: found["d" + n].transpose(0, 2, 1, 3) for n in "qkv"}
    wanted |= {t.name: found["dtables"][t.source] for t in made.tables if t.source in found["dtables"]}
    return wanted | {s.name: found["dscalars"][s.source] for s in made.slots if s.source in found["dscalars"]}


def compare(got, want, tolerance=2e-5):
    for name, x in got.items():
        y = want[name]
        assert x.shape == y.shape, name
        size = max(1.0, float(np.abs(y).max()))
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=0, atol=tolerance * size, err_msg=name)
