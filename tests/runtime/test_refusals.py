"""What later versions bring is refused in words: gradients, traced parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import frisket as fk
from frisket.dsl.errors import BackendError, BackwardError, LoweringError, ParameterError, ShapeError

ONES = np.ones((1, 8, 2, 16), np.float32)


def test_masks_do_not_add():
    with pytest.raises(ParameterError) as caught:
        fk.mask("causal") + fk.mask("causal")
    assert str(caught.value) == (
        "masks are joined with `&`, `|`, `^` and `-`, and turned round with `~`; they do not add"
    )


def test_pallas_gradients():
    q = jnp.asarray(ONES)

    def loss(x):
        return fk.attention(x, x, x, "causal", backend="pallas-tpu").sum()

    with pytest.raises(BackwardError) as caught:
        jax.grad(loss)(q)
    assert str(caught.value) == (
        "backend 'pallas-tpu' has no gradients; take backend='xla', or 'cpp' on a CPU\n"
        "  for the forward alone wrap q, k and v in jax.lax.stop_gradient"
    )
    jax.grad(lambda x: (x * fk.attention(*[jax.lax.stop_gradient(x)] * 3, "causal", backend="pallas-tpu")).sum())(q)


def test_masks_are_made_of_values():
    with pytest.raises(ParameterError) as caught:
        jax.jit(lambda doc: fk.mask("same(doc)", doc=doc).layout(8, 8).counts)(np.zeros(8, int))
    assert str(caught.value) == (
        "`doc` is traced by jax.jit or another transform, and this takes values; compile the mask without it and give "
        "it to the call: att(q, k, v, doc=doc)"
    )


def test_pallas_takes_no_traced_tables():
    q = jnp.asarray(ONES)
    with pytest.raises(LoweringError) as caught:
        jax.jit(lambda x, doc: fk.attention(x, x, x, "same(doc)", backend="pallas-tpu", doc=doc))(q, np.zeros(8, int))
    assert str(caught.value) == (
        "the pallas-tpu kernel walks a grid as long as its runs of tiles, which traced tables do not tell; take "
        "backend='xla', or make the plan outside jax.jit from values"
    )


@pytest.mark.parametrize("backend", ["aten", "cpp"])
def test_keys_of_8_bits_on_the_cpu(backend):
    torch = pytest.importorskip("torch")
    q = torch.ones(1, 2, 8, 16, dtype=torch.bfloat16)
    k = q.to(torch.float8_e5m2)
    with pytest.raises(BackendError) as caught:
        fk.attention(q, k, k, backend=backend)
    assert str(caught.value) == (
        f"backend {backend!r} takes k and v in the dtype of q, not in float8_e5m2; Triton alone does\n"
        "  convert them: k.to(q.dtype), v.to(q.dtype)"
    )
    for queries, keys, values in ((q.float(), k, k), (q, k, q), (k, q, q)):
        with pytest.raises(ShapeError, match=r"^q, k and v have dtypes .*; convert them to one$"):
            fk.attention(queries, keys, values, backend=backend)
