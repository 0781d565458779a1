"""The XLA executor's gradients against the interpreter's, over every mask and score mod."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import attention_cases as cases
from support.attention_cases import CASES, Case, causal

from frisket.dsl import ir
from frisket.dsl.ir import lookup
from frisket.dsl.sugar import b, function, h, k, q, score, where
from frisket.dsl.types import FLOAT, INT
from frisket.lowering import dense, xla, xla_backward
from frisket.lowering.derive import backward_of
from frisket.lowering.plan import RATE, SEED, Target

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
ALL = {**CASES, **LEARNED}


def run(case, made=None, sinks=None, with_lse=True, wanted=None, rate=None):
    """{name: gradient} of the executor, and of the interpreter."""
    made = made or cases.plan(case)
    drop = {} if rate is None else {SEED: 5, RATE: rate}
    slots, tables = made.slot_values({**case.slots, **drop}), cases.tables(case, made)
    args = made, cases.spans(case), cases.geometry(case), *cases.arrays(case)
    target, dtype = Target("xla", *case.block), args[3].dtype
    sinks_ = None if sinks is None else jnp.asarray(sinks)
    out, lse, _ = xla.forward(*args, slots, tables, target, sinks=sinks_)
    random = np.random.default_rng(2)
    dout = jnp.asarray(random.standard_normal(out.shape), dtype)
    dlse = jnp.asarray(random.standard_normal(lse.shape), lse.dtype) if with_lse else None
    wanted = {"q", "k", "v", *(g.source for g in backward_of(made).gradients)} if wanted is None else wanted
    got = xla_backward.backward(
        *args, out, lse, dout, dlse, slots, tables, target, wanted=frozenset(wanted), sinks=sinks_
    )
    assert got.keys() == set(wanted)
    return got, oracle(case, made, dout, dlse, sinks, drop)


def oracle(case, made, dout, dlse, sinks, drop):
    def turned(x):
        return np.asarray(x, np.float64).transpose(0, 2, 1, 3)

    found = dense.gradients(
        *map(turned, cases.arrays(case)), case.mask, case.score, turned(dout), dlse, scale=case.dim**-0.5,
        params={**case.slots, **drop}, tables=case.tables, origin=case.origin, sizes=case.sizes, sinks=sinks,
        kept=None if made.kept is None else users(made), rate=drop.get(RATE, 0.0),
    )  # fmt: skip
    wanted = {n: found["d" + n].transpose(0, 2, 1, 3) for n in "qkv"}
    wanted |= {t.name: found["dtables"][t.source] for t in made.tables if t.source in found["dtables"]}
    return wanted | {s.name: found["dscalars"][s.source] for s in made.slots if s.source in found["dscalars"]}


def users(made):
    """`plan.kept` in the user's names."""
    return ir.renamed(made.kept, {s.name: s.source for s in made.slots if s.source in (SEED, RATE)})


def compare(got, want, tolerance=2e-5):
    for name, x in got.items():
        y = want[name]
        assert x.shape == y.shape, name
        size = max(1.0, float(np.abs(y).max()))
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=0, atol=tolerance * size, err_msg=name)


@pytest.mark.parametrize("name", ALL)
def test_every_case(name):
    compare(*run(ALL[name]))
