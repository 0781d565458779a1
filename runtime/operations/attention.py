"""The base of attention operators."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.runtime.modeling.rotary import repeat_kv_bsnh
from frisket.runtime.sharding.fit import names_of
from frisket.runtime.sharding.names import MODE_DECODE, MODE_TRAIN

from .base import BaseOperation
from .metadata import AttentionMetadata

_spec: Any = PartitionSpec


class AttentionImpl(BaseOperation, ABC):
    """Attention under a name: `AttentionRegistry.create(name, metadata)`; subclasses write `forward_native`.

    >>> from frisket.operations import AttentionMetadata, AttentionRegistry
    >>> op = AttentionRegistry.create("frisket", AttentionMetadata(softmax_scale=0.125))
    >>> q, k = jax.numpy.ones((1, 64, 4, 16)), jax.numpy.ones((1, 64, 2, 16))  # [batch, length, heads, head_dim]
    >>> op(q, k, k).attention_outputs.shape
    (1, 64, 4, 16)
    >>> op.get_mode(q), op.get_mode(q[:, :1])
    ('__train__', '__autoregressive__')
    >>> op.repeat_kv_heads(k, k, 2)[0].shape
    (1, 64, 4, 16)
    >>> op.get_impl_name(), op.get_impl_metadata().softmax_scale, op.current_backend() == jax.default_backend()
    (('frisket', 'blocksparse', 'sdpa', 'flash_attn2'), 0.125, True)
    >>> op.create_stable_sharding(_spec("dp", "sp", "tp"), [0, 2])
    P('dp', None, 'tp')
    >>> op.placed(q, _spec("dp")) is q  # without a mesh
    True
    """

    metadata: AttentionMetadata

    def __init__(self, metadata: AttentionMetadata | None = None) -> None:
        self.metadata = AttentionMetadata() if metadata is None else metadata
        if not isinstance(self.metadata, AttentionMetadata):
            raise ParameterError(f"metadata is {metadata!r}; it is an AttentionMetadata")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def get_impl_metadata(self) -> AttentionMetadata:
        """The metadata that the operation was made with."""
        return self.metadata

    def get_mode(self, q: Any, BTHD: bool = True) -> str:
        """`MODE_DECODE` where q, [batch, length, heads, head_dim] or with `BTHD=False` [batch, heads, length,
        head_dim], has one query, else `MODE_TRAIN`, which prefill is split like."""
        return MODE_DECODE if q.shape[1 if BTHD else 2] == 1 else MODE_TRAIN

    @staticmethod
    def repeat_kv_heads(k: Any, v: Any, num_reps: int) -> tuple[Any, Any]:
        """k and v [batch, length, kv_heads, dim] with every head `num_reps` times in a row."""
        return repeat_kv_bsnh(k, num_reps), repeat_kv_bsnh(v, num_reps)

    def create_stable_sharding(
        self, state_ps: PartitionSpec | None = None, preserved_indices: Sequence[int] | None = None,
        clone_ps: PartitionSpec | None = None, dep: Any = True, tensor: Any = None,
    ) -> PartitionSpec | None:  # fmt: skip
        """`state_ps` with the axes of `preserved_indices` alone split, all others on every device.

        The axes are split as in `clone_ps`, where there is one. Without indices all are kept. With a `tensor` axes
        that do not divide its dimensions are left out. None where `state_ps` or `dep`, what the spec is for, is None.
        """
        if state_ps is None or dep is None:
            return None
        if preserved_indices is not None:
            source = (*(state_ps if clone_ps is None else clone_ps),)
            wrong = [i for i in preserved_indices if not 0 <= i < min(len(state_ps), len(source))]
            if wrong:
                raise ShapeError(f"index {wrong[0]} is no axis of {state_ps}{f' and {clone_ps}' if clone_ps else ''}")
            state_ps = _spec(*(source[i] if i in preserved_indices else None for i in range(len(state_ps))))
        if tensor is None or self.metadata.mesh is None:
            return state_ps
        return self.metadata.partition_manager.fit(state_ps, tensor.shape, self.metadata.mesh)

    def placed(self, x: Any, spec: PartitionSpec) -> Any:
        """`x` split over the mesh as far as its shape goes; `x` itself without a mesh of several devices."""
        if x is None or (mesh := self.metadata.mesh) is None or mesh.size == 1 or not any(map(names_of, spec)):
            return x
        return self.metadata.partition_manager.place(jax.numpy.asarray(x), spec)
