"""Helpers for models around attention: rotary positions, heads of keys, meshes, dtypes, products of few bits.

>>> import jax.numpy as jnp
>>> from frisket.modeling import apply_rotary_pos_emb, rotary_tables
>>> q = jnp.ones((1, 16, 8, 64))  # [batch, length, heads, head_dim]
>>> apply_rotary_pos_emb(q, *rotary_tables(jnp.arange(16), 64), axes="bshd").shape
(1, 16, 8, 64)
"""

from importlib import import_module
from typing import Any

from frisket.runtime.machine.modules import extras

with extras():
    from frisket.runtime.modeling import layers

from frisket.runtime.modeling.layers import *  # noqa: F403

__all__ = layers.__all__


def __getattr__(name: str) -> Any:
    if name == "BaseJAXAttentionModule":  # a module of flax, which the others do not need
        with extras():
            return import_module("frisket.integrations.flax").BaseJAXAttentionModule
    raise AttributeError(f"module 'frisket.modeling' has no attribute {name!r}")
