"""Tables and sinks as lists: jax.jit takes them apart into traced numbers, and entries in torch may learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import frisket as fk
from frisket.caches.jax import KVCache
from frisket.operations import AttentionRegistry

rng = np.random.default_rng(4)
ARRAYS = tuple(rng.standard_normal((1, 6, 2, 8)).astype(np.float32) for _ in range(3))
Q, K, V = map(jnp.asarray, ARRAYS)
DOC, WINDOWS, SINKS = [0, 0, 0, 1, 1, 1], [2, 6], [0.5, -1.0]
SAME, NEAR = fk.compile("causal & same(doc)"), fk.compile("causal & q - k < w[h]")
OP = AttentionRegistry.create("frisket")


def with_cache(doc):
    cache = KVCache.create(1, 6, 2, 8)
    return cache.attention(SAME, Q, K, V, doc=doc)[0]


# calls with a list, and the reference's mask and values
CASES = {
    "table": (lambda x: SAME(Q, K, V, doc=x), DOC, {"doc": DOC}),
    "tuple": (lambda x: SAME(Q, K, V, doc=x), tuple(DOC), {"doc": DOC}),
    "rows": (lambda x: fk.attention(Q, K, V, "causal & same_by_batch(doc)", doc=x), [DOC], {"doc": DOC}),
    "config": (lambda x: NEAR(Q, K, V, w=x["w"]), {"w": WINDOWS}, {"w": WINDOWS}),
    "one call": (lambda x: fk.attention(Q, K, V, "causal & q - k < w[h]", w=x), WINDOWS, {"w": WINDOWS}),
    "sinks": (lambda x: SAME(Q, K, V, doc=DOC, sinks=x), SINKS, {"doc": DOC, "sinks": SINKS}),
    "plan": (lambda x: SAME(Q, K, V, plan=SAME.plan(6, 6, 1, 2, doc=x)), DOC, {"doc": DOC}),
    "cache": (with_cache, DOC, {"doc": DOC}),
    "operator": (lambda x: OP(Q, K, V, "causal & q - k < w[h]", w=x).attention_outputs, WINDOWS, {"w": WINDOWS}),
    "sinks of operators": (
        lambda x: OP(Q, K, V, SAME.mask, doc=DOC, softmax_aux=x).attention_outputs, SINKS,
        {"doc": DOC, "sinks": SINKS},
    ),
    "segments": (
        lambda x: OP(Q, K, V, causal=True, segment_ids=x).attention_outputs, [DOC], {"doc": DOC},
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", ["jit", "eager", "jax scalars"])
@pytest.mark.parametrize("case", CASES)
def test_lists_are_tables_under_jit_too(case, how):
    call, x, values = CASES[case]
    mask = "causal & same(doc)" if "doc" in values else "causal & q - k < w[h]"
    want = fk.reference(Q, K, V, mask, layout="bshd", **values)
    if how == "jax scalars":
        x = jax.tree.map(jnp.asarray, x)
    np.testing.assert_allclose((jax.jit(call) if how == "jit" else call)(x), want, atol=2e-6)


def test_lists_under_jit_in_flax():
    attention_fn = pytest.importorskip("frisket.integrations.flax").attention_fn("causal & same(doc)")
    want = fk.reference(Q, K, V, "causal & same(doc)", layout="bshd", doc=DOC, sinks=SINKS)
    call = jax.jit(lambda x: attention_fn(Q, K, V, mask=x))
    np.testing.assert_allclose(call({"doc": DOC, "sinks": SINKS}), want, atol=2e-6)


def test_traced_lists_of_a_compiled_mask_are_refused():
    with pytest.raises(fk.ParameterError, match=r"`doc` is traced by jax.jit"):
        jax.jit(lambda x: fk.compile("same(doc)", doc=x)(Q, K, V))(DOC)


def test_ragged_lists_under_jit_are_refused():
    with pytest.raises(fk.ParameterError, match="`doc` is not an array"):
        jax.jit(lambda x: SAME(Q, K, V, doc=x))([0, [1, 2]])


def test_lists_of_traced_numbers_have_gradients():
    att = fk.compile("causal", "score + slope[h] * (k - q)")

    def loss(slope):
        return jnp.sin(att(Q, K, V, slope=slope)).sum()

    got = jax.jit(jax.grad(loss))(SINKS)
    np.testing.assert_allclose(got, jax.grad(loss)(jnp.array(SINKS)), rtol=1e-5)


@pytest.mark.parametrize("how", ["eager", "torch.compile"])
def test_lists_of_learned_tensors_have_gradients(how):
    q, k, v = (torch.tensor(x).transpose(1, 2) for x in ARRAYS)
    att = fk.compile("causal", "score + slope[h] * (k - q)")
    slopes, whole = [torch.tensor(x, requires_grad=True) for x in SINKS], torch.tensor(SINKS, requires_grad=True)

    def loss(slope):
        return att(q, k, v, slope=slope, sinks=[0.1, 0.2]).sin().sum()

    step = loss if how == "eager" else torch.compile(loss, backend="aot_eager")
    got = torch.autograd.grad(step(slopes), slopes)
    torch.testing.assert_close(torch.stack(got), torch.autograd.grad(loss(whole), whole)[0])
