"""Exported modules of symbolic batch and lengths, replayed at several sizes beside the dense interpreter."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from support.tiers import default_only

import frisket as fk
from frisket.dsl.errors import BackwardError

jax = pytest.importorskip("jax")
jnp = jax.numpy
RNG = np.random.default_rng(0)
FLOAT, INT = np.float32, np.int32
SIZES = (1, 1, 1), (2, 7, 5), (3, 300, 513)  # batch, queries, keys


def normal(*shape):
    return RNG.standard_normal(shape).astype(FLOAT)


@dataclass
class Case:
    """`tables` are shapes in the symbols, and values of the shapes they become; one length unless `apart`."""

    mask: str | None
    score: str | None = None
    apart: bool = False
    tables: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    layout: str = "bshd"


CASES = {
    "causal": Case("causal"),
    "everything, keys apart": Case(None, "softcap(5)", apart=True),
    "lengths": Case(
        "causal & k < lengths[b]",
        tables={"lengths": (lambda b, s, t: (b,), INT, lambda shape, t: RNG.integers(0, t + 1, shape))},
    ),
    "window": Case("causal & window(20)", layout="bhsd"),
    "intervals": Case("k < 40 | q == k & k < KV_LEN - 2", apart=True),
    "heads": Case(
        "q - k < 9 + 20 * h & k - q < 30 * h", "score + bias[h] * (k - q)",
        tables={"bias": (lambda b, s, t: (4,), FLOAT, lambda shape, t: normal(*shape))},
    ),
    "plane": Case(
        "causal", "score + bias[b, h, q, k]",
        tables={"bias": (lambda b, s, t: (b, 4, s, s), FLOAT, lambda shape, t: normal(*shape))},
    ),
    "sinks": Case("causal", options={"sinks": np.arange(4.0)}),
    "dropout": Case("causal", options={"dropout": 0.3, "seed": 5}),
    "nothing": Case("k < 0"),
}  # fmt: skip


def exported(case, symbols="b, s, t", **how):
    b, s, t = jax.export.symbolic_shape(symbols)
    t = t if case.apart else s
    shapes = (b, s, 4, 16), (b, t, 2, 16), (b, t, 2, 8)
    if case.layout == "bhsd":
        shapes = tuple((n[0], n[2], n[1], n[3]) for n in shapes)
    tables = {n: jax.ShapeDtypeStruct(shape(b, s, t), dtype) for n, (shape, dtype, _) in case.tables.items()}

    def call(q, k, v, tables):
        return fk.attention(
            q, k, v, case.mask, case.score, layout=case.layout, return_lse=True, **tables, **case.options, **how
        )

    made = jax.export.export(jax.jit(call))(*(jax.ShapeDtypeStruct(n, FLOAT) for n in shapes), tables)
    return jax.export.deserialize(made.serialize())


@pytest.mark.parametrize("name", default_only(CASES, "lengths"))
def test_symbolic_export_runs_at_several_sizes(name):
    case = CASES[name]
    module = exported(case)
    for batch, q_len, kv_len in SIZES:
        kv_len = kv_len if case.apart else q_len
        q, k, v = normal(batch, q_len, 4, 16), normal(batch, kv_len, 2, 16), normal(batch, kv_len, 2, 8)
        if case.layout == "bhsd":
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        tables = {
            n: make(shape(batch, q_len, kv_len), kv_len).astype(kind) for n, (shape, kind, make) in case.tables.items()
        }
        found = module.call(q, k, v, tables)
        want = fk.reference(
            q, k, v, case.mask, case.score, layout=case.layout, return_lse=True, **tables, **case.options
        )
        for x, y in zip(found, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def trace(shape, call, *more):
    return jax.export.export(jax.jit(call))(jax.ShapeDtypeStruct(shape, FLOAT), *more)


def test_symbolic_export_refuses_masks_of_known_lengths():
    b, s, h = jax.export.symbolic_shape("b, s, h")
    q = (b, s, 4, 16)
    doc = jax.ShapeDtypeStruct((s,), INT)
    with pytest.raises(
        fk.LoweringError, match=r"doc\[q\] == doc\[k\]` shows is found for known lengths(.|\n)*export one"
    ):
        trace(q, lambda x, doc: fk.attention(x, x, x, "causal & doc[q] == doc[k]", doc=doc), doc)
    with pytest.raises(fk.LoweringError, match="found for known lengths"):
        trace(q, lambda x: fk.attention(x, x, x, "q % 3 == k % 3"))
    with pytest.raises(
        fk.ParameterError, match="`bias` has 64 entries on axis 0 and is read at `k`, of which there are s"
    ):
        trace(q, lambda x: fk.attention(x, x, x, "causal", "score + bias[k]", bias=np.zeros(64)))
    with pytest.raises(fk.ShapeError, match=r"^q has the shape \(b, s, h, 16\); heads and their sizes are numbers"):
        trace((b, s, h, 16), lambda x: fk.attention(x, x, x, "causal"))
    with pytest.raises(fk.ShapeError, match="an origin are for known lengths"):
        trace(q, lambda x: fk.attention(x, x, x, "causal", origin=(0, 0, 8, 0)))
    with pytest.raises(fk.BackendError, match="backend 'pallas-tpu' is for known lengths"):
        trace(q, lambda x: fk.attention(x, x, x, "causal", backend="pallas-tpu"))
    with pytest.raises(BackwardError, match="a gradient of attention to symbolic lengths"):
        trace(q, jax.grad(lambda x: fk.attention(x, x, x, "causal").sum()))
