"""Attention operators by name, with EasyDeL's calls.

>>> import jax.numpy as jnp
>>> from frisket.operations import AttentionMetadata, AttentionRegistry
>>> op = AttentionRegistry.create("frisket", AttentionMetadata(softmax_scale=0.125))
>>> q = jnp.ones((1, 256, 8, 64))  # [batch, length, heads, head_dim]
>>> op(q, q, q, "causal & window(w)", w=64).attention_outputs.shape
(1, 256, 8, 64)
"""

from frisket.runtime.machine.extras import extras

with extras():
    from frisket.runtime.operations import operators as operators  # registered by being imported

from frisket.runtime.operations.base import AttentionImpl, AttentionRegistry, BaseOperation, OperationRegistry
from frisket.runtime.operations.metadata import AttentionMetadata, AttentionOutput, Backend, OperationMetadata, Platform

__all__ = ["AttentionImpl", "AttentionMetadata", "AttentionOutput", "AttentionRegistry", "Backend", "BaseOperation"]
__all__ += ["OperationMetadata", "OperationRegistry", "Platform"]
