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

from frisket.runtime.operations import ring as ring
from frisket.runtime.operations.attention import AttentionImpl as AttentionImpl
from frisket.runtime.operations.base import AttentionRegistry as AttentionRegistry
from frisket.runtime.operations.base import BaseOperation as BaseOperation
from frisket.runtime.operations.base import OperationRegistry as OperationRegistry
from frisket.runtime.operations.metadata import AttentionMetadata as AttentionMetadata
from frisket.runtime.operations.metadata import Backend as Backend
from frisket.runtime.operations.metadata import OperationMetadata as OperationMetadata
from frisket.runtime.operations.metadata import Platform as Platform
from frisket.runtime.operations.output import AttentionOutput as AttentionOutput

__all__ = [
    "AttentionImpl",
    "AttentionMetadata",
    "AttentionOutput",
    "AttentionRegistry",
    "Backend",
    "BaseOperation",
    "OperationMetadata",
    "OperationRegistry",
    "Platform",
]
