"""Attention operators by name, with EasyDeL's calls.

>>> import jax.numpy as jnp
>>> from frisket.operations import AttentionMetadata, AttentionRegistry
>>> op = AttentionRegistry.create("frisket", AttentionMetadata(softmax_scale=0.125))
>>> q = jnp.ones((1, 256, 8, 64))  # [batch, length, heads, head_dim]
>>> op(q, q, q, "causal & window(w)", w=64).attention_outputs.shape
(1, 256, 8, 64)
"""

from frisket.runtime.machine.modules import extras

with extras():
    from frisket.runtime.operations import base
    from frisket.runtime.operations import operators as operators  # registered by being imported

from frisket.runtime.operations.base import *  # noqa: F403

__all__ = base.__all__
