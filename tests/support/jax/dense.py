"""Attention with every pair written out in jnp, in the dtype of its arrays, for JAX to differentiate."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from frisket.lowering.xla.promotion import usual_promotion


@usual_promotion()  # some tests run where promotion is an error
def dense(
    q: Array,
    k: Array,
    v: Array,
    visible: Array | None = None,
    score: Callable[[Array], Array] | None = None,
    sinks: Array | None = None,
) -> tuple[Array, Array]:
    """(out, lse) of arrays [batch, length, heads, dim]; key heads may be fewer. `visible` and what `score` returns are
    [batch, heads, q_len, kv_len], `sinks` are logits [heads]. Every query sees a key or a sink."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") * q.shape[-1] ** -0.5
    scores = scores if score is None else score(scores)
    logits = scores if visible is None else jnp.where(visible, scores, -jnp.inf)
    if sinks is not None:
        logits = jnp.concatenate([logits, jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:3], 1))], -1)
    weights = jax.nn.softmax(logits, -1)[..., : k.shape[1]]
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest"), jax.nn.logsumexp(logits, -1)
