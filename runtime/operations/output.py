"""The output of attention operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from .records import Codec, Record, array_from_json, array_to_json


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class AttentionOutput(Record):
    """`op(q, k, v).attention_outputs`, [batch, length, heads, v_dim]; a pytree.

    `attention_weights` [batch, heads, q_len, kv_len] is None from operators that never make them, as all of frisket's.

    >>> import jax.numpy as jnp
    >>> made = AttentionOutput(attention_outputs=jnp.ones((1, 8, 2, 4)))
    >>> again = AttentionOutput.from_json(made.to_json())
    >>> again.attention_outputs.shape, AttentionOutput.from_dict(made.to_dict()).attention_weights
    ((1, 8, 2, 4), None)
    >>> made.replace(attention_weights=jnp.ones((1, 2, 8, 8))).attention_weights.shape
    (1, 2, 8, 8)
    """

    attention_weights: Any = None
    attention_outputs: Any = None

    codecs: ClassVar[dict[str, Codec]] = dict.fromkeys(
        ("attention_weights", "attention_outputs"), (array_to_json, array_from_json)
    )
