"""Helpers for models around attention: rotary positions, heads of keys, meshes, dtypes, products of few bits.

>>> import jax.numpy as jnp
>>> from frisket.modeling import apply_rotary_pos_emb, rotary_tables
>>> q = jnp.ones((1, 16, 8, 64))  # [batch, length, heads, head_dim]
>>> apply_rotary_pos_emb(q, *rotary_tables(jnp.arange(16), 64), layout="bshd").shape
(1, 16, 8, 64)
"""

from importlib import import_module
from typing import Any

from frisket.runtime.machine.extras import extras

with extras():
    from frisket.runtime.modeling.layers import (
        EasyMethod,
        apply_rotary_pos_emb,
        concatenate_to_cache,
        get_dot_general_by_bits,
        init_cache,
        repeat_kv_bnsh,
        repeat_kv_bsnh,
        rotary_tables,
        rotate_half,
    )

from frisket.runtime.modeling.meshes import (
    add_start_docstrings,
    canonicalize_dtype,
    create_mesh,
    get_gradient_checkpoint_policy,
    get_names_from_partition_spec,
    get_ranks_and_size,
    names_in_mesh,
)

__all__ = ["EasyMethod", "add_start_docstrings", "apply_rotary_pos_emb", "canonicalize_dtype", "concatenate_to_cache"]
__all__ += ["create_mesh", "get_dot_general_by_bits", "get_gradient_checkpoint_policy", "get_names_from_partition_spec"]
__all__ += ["get_ranks_and_size", "init_cache", "names_in_mesh", "repeat_kv_bnsh", "repeat_kv_bsnh", "rotary_tables"]
__all__ += ["rotate_half"]


def __getattr__(name: str) -> Any:
    if name == "BaseJAXAttentionModule":  # a module of flax, which the others do not need
        with extras():
            return import_module("frisket.runtime.modeling.linen_cache").BaseJAXAttentionModule
    raise AttributeError(f"module 'frisket.modeling' has no attribute {name!r}")
