"""Arrays of JAX with attributes of torch's names. JAX may add any of them, as JAX 0.11 added `layout`, with a meaning
of its own: only tensors of torch are asked for torch's attributes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import frisket as fk
from frisket.operations import AttentionMetadata, AttentionRegistry

Q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 32, 4, 16)).astype(np.float32))
SLOPE = jnp.asarray(np.array([0.5, 0.25, 0.125, 0.0], np.float32))
DOC = jnp.asarray(np.array([[0] * 12 + [1] * 20], np.int32))
ALIBI = "score + slope[h]*(k - q)"


def operator(*mask, **terms):
    return AttentionRegistry.create("frisket", AttentionMetadata(jnp.float32))(
        Q, Q, Q, *mask, **terms
    ).attention_outputs


# a function of one array, and the array
CALLS = {
    "queries": (lambda q: fk.attention(q, Q, Q, "causal"), Q),
    "sinks": (lambda sinks: fk.attention(Q, Q, Q, "causal", sinks=sinks), SLOPE),
    "mask": (lambda doc: fk.attention(Q, Q, Q, "causal & doc[b, q] == doc[b, k]", doc=doc), DOC),
    "score mod": (lambda slope: fk.attention(Q, Q, Q, "causal", ALIBI, slope=slope), SLOPE),
    "gradient": (jax.grad(lambda slope: fk.attention(Q, Q, Q, "causal", ALIBI, slope=slope).sum()), SLOPE),
    "number": (lambda w: fk.attention(Q, Q, Q, "causal & window(w)", w=w), jnp.asarray(np.int32(4))),
    "capture": (lambda doc: fk.attention(Q, Q, Q, lambda b, h, q, k: (q >= k) & (doc[0, q] == doc[0, k])), DOC),
    "segments of an operator": (lambda ids: operator(causal=True, segment_ids=ids), DOC),
    "bias of an operator": (lambda bias: operator(bias=bias), jnp.asarray(np.zeros((1, 4, 32, 32), np.float32))),
    "mask of an operator": (lambda mask: operator(mask), jnp.asarray(np.ones((1, 1, 32, 32), bool))),
}
TRACED = ("gradient", "number", "capture", "segments of an operator")  # in every run


def add_torch_names(monkeypatch):
    """Give JAX's arrays, and the abstract values that its tracers ask, all public names of torch's tensors."""
    tracers = []
    jax.jit(lambda x: tracers.append(x))(Q)
    abstract = type(tracers[0].aval)
    known = {*dir(Q), *dir(tracers[0]), *dir(tracers[0].aval)}
    for name in set(dir(torch.Tensor)) - known:
        if not name.startswith("_"):
            monkeypatch.setattr(abstract, name, lambda *_, **__: object(), raising=False)
            monkeypatch.setattr(type(Q), name, lambda *_, **__: object(), raising=False)
    assert hasattr(tracers[0], "requires_grad")


@pytest.mark.parametrize(("name", "traced"), [
    *(pytest.param(name, False, id=f"{name}-eager") for name in CALLS),
    *(pytest.param(name, True, id=f"{name}-traced", marks=() if name in TRACED else pytest.mark.exhaustive)
      for name in CALLS),
])  # fmt: skip
def test_jax_arrays_are_not_asked_for_attributes_of_torch(name, traced, monkeypatch):
    call, array = CALLS[name]
    with monkeypatch.context() as patched:
        add_torch_names(patched)
        got = (jax.jit(call) if traced else call)(array)
    np.testing.assert_allclose(got, call(array), rtol=1e-5, atol=1e-6)
