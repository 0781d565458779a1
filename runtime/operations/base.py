"""Operations with an implementation for every platform, and operations by name; the base of attention operators."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import jax
from jax.sharding import PartitionSpec

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.runtime.backends.registry import platform_of
from frisket.runtime.machine.once import warn_once
from frisket.runtime.modeling.layers import repeat_kv_bsnh
from frisket.runtime.sharding.names import MODE_DECODE, MODE_TRAIN
from frisket.runtime.sharding.partition import names_of

from .metadata import AttentionMetadata, Backend


class BaseOperation(ABC):
    """One operation; calling it runs the implementation for the platform of the arrays.

    >>> class Double(BaseOperation):
    ...     def forward_native(self, x):
    ...         return x + x
    >>> op = Double()
    >>> op(21), op.forward_native(21), op.forward_cpu(21), op.forward_tpu(21), op.forward_tt(21)
    (42, 42, 42, 42, 42)
    >>> op.forward_gpu(21), op.forward_cuda(21), op.forward_rocm(21)
    (42, 42, 42)
    >>> op.get_impl_name(), op.get_impl_metadata(), op.current_backend() == jax.default_backend()
    ('Double', None, True)

    A subclass must write `forward_native` only. Each `forward_...` that it does not write calls `forward_native`;
    `forward_cuda` and `forward_rocm` call `forward_gpu`. The platform is `metadata.backend`, or JAX's default device.
    """

    metadata: AttentionMetadata | None = None

    def __init__(self, metadata: AttentionMetadata | None = None) -> None:
        self.metadata = metadata

    @property
    def EasyDeLBackends(self) -> type[Backend]:  # noqa: N802 (EasyDeL's name)
        """`Backend`, for comparisons with `metadata.backend`."""
        return Backend

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        """The name under which the class is registered, or several; by default the name of the class."""
        return cls.__name__

    def get_impl_metadata(self) -> AttentionMetadata | None:
        """The metadata that the operation was made with."""
        return self.metadata

    def current_backend(self) -> str:
        """ "tpu", "gpu" or "cpu": JAX's default device."""
        return jax.default_backend()

    @abstractmethod
    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """The operation, wherever it runs."""

    def forward_tpu(self, *args: Any, **kwargs: Any) -> Any:
        """The operation on TPUs; `forward_native` unless written."""
        return self.forward_native(*args, **kwargs)

    def forward_gpu(self, *args: Any, **kwargs: Any) -> Any:
        """The operation on GPUs; `forward_native` unless written."""
        return self.forward_native(*args, **kwargs)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """The operation on NVIDIA's GPUs; `forward_gpu` unless written."""
        return self.forward_gpu(*args, **kwargs)

    def forward_rocm(self, *args: Any, **kwargs: Any) -> Any:
        """The operation on AMD's GPUs; `forward_gpu` unless written."""
        return self.forward_gpu(*args, **kwargs)

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        """The operation on CPUs; `forward_native` unless written."""
        return self.forward_native(*args, **kwargs)

    def forward_tt(self, *args: Any, **kwargs: Any) -> Any:
        """The operation on Tenstorrent's processors; `forward_native` unless written."""
        return self.forward_native(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the `forward_...` of the platform."""
        return getattr(self, f"forward_{self._platform()}")(*args, **kwargs)

    def _platform(self) -> str:
        """The name in `forward_...` that is called: "cuda" or "rocm" where JAX says "gpu"."""
        if self.metadata is not None and self.metadata.backend is not None:
            return str(self.metadata.backend)
        backend = self.current_backend()
        # JAX calls NVIDIA's and AMD's devices alike: an array says which
        name = platform_of(jax.numpy.zeros(())) if backend == "gpu" else backend
        return name if name in {*Backend} else "native"  # JAX may run on others


Made = TypeVar("Made", bound=type[BaseOperation])


class OperationRegistry:
    """Operations by name; `AttentionRegistry` holds those that are attention.

    >>> @OperationRegistry.register
    ... class Triple(BaseOperation):
    ...     @classmethod
    ...     def get_impl_name(cls):
    ...         return "triple", "thrice"
    ...
    ...     def forward_native(self, x):
    ...         return 3 * x
    >>> OperationRegistry.create("thrice")(14)
    42
    >>> OperationRegistry.get("triple") is Triple, OperationRegistry.list_implementations()[-2:]
    (True, ['triple', 'thrice'])
    """

    _known: ClassVar[dict[str, type[BaseOperation]]] = {}

    @classmethod
    def register(cls, impl_cls: Made) -> Made:
        """A class decorator: the class under all of its names. A name of another class gives a warning, then changes.

        >>> OperationRegistry.register(int)
        Traceback (most recent call last):
        frisket.dsl.errors.ParameterError: <class 'int'> is no subclass of BaseOperation
        """
        if not (isinstance(impl_cls, type) and issubclass(impl_cls, BaseOperation)):
            raise ParameterError(f"{impl_cls!r} is no subclass of BaseOperation")
        names = impl_cls.get_impl_name()
        for name in (names,) if isinstance(names, str) else names:
            if (before := cls._known.get(name, impl_cls)) is not impl_cls:
                text = f"operation {name!r} was {before.__qualname__}; it is now {impl_cls.__qualname__}"
                warn_once(text, (name, impl_cls))  # both registries have the names of attention
            cls._known[name] = impl_cls
        return impl_cls

    @classmethod
    def get(cls, impl_name: str) -> type[BaseOperation]:
        """The class of a name. Raises `ParameterError`, a `ValueError`, that lists the names there are."""
        if impl_name not in cls._known:
            near = difflib.get_close_matches(str(impl_name), cls._known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            names = ", ".join(cls._known) or "none"
            raise ParameterError(f"there is no operation {impl_name!r}{hint}\n  there are {names}")
        return cls._known[impl_name]

    @classmethod
    def create(cls, impl_name: str, metadata: AttentionMetadata | None = None) -> Any:
        """An operation by name, made with `metadata`; attention without one takes `AttentionMetadata()`."""
        return cls.get(impl_name)(metadata)

    @classmethod
    def list_implementations(cls) -> list[str]:
        """List the registered names, aliases too, in the order in which they were registered."""
        return list(cls._known)


class AttentionRegistry(OperationRegistry):
    """Attention by name.

    >>> AttentionRegistry.create("frisket")
    FrisketAttention()
    >>> AttentionRegistry.get("frisket") in {AttentionRegistry.get(n) for n in AttentionRegistry.list_implementations()}
    True
    """

    _known: ClassVar[dict[str, type[BaseOperation]]] = {}  # a separate table: the base class holds all operations

    @classmethod
    def register(cls, impl_cls: Made) -> Made:
        """A class decorator: the class under all of its names, among all operations too.

        >>> @AttentionRegistry.register
        ... class Ours(AttentionRegistry.get("frisket")):
        ...     @classmethod
        ...     def get_impl_name(cls):
        ...         return "ours"
        >>> AttentionRegistry.create("ours"), OperationRegistry.get("ours") is Ours
        (Ours(), True)
        """
        return super().register(OperationRegistry.register(impl_cls))


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

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), self.metadata))

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
        self,
        state_ps: PartitionSpec | None = None,
        preserved_indices: Sequence[int] | None = None,
        clone_ps: PartitionSpec | None = None,
        dep: Any = True,
        tensor: Any = None,
    ) -> PartitionSpec | None:
        """`state_ps` with the axes of `preserved_indices` alone split, all others on every device.

        The axes are split as in `clone_ps`, where there is one. Without indices all are kept. With a `tensor` axes
        that do not divide its dimensions are left out. None where `state_ps` or `dep`, what the spec is for, is None.
        """
        if state_ps is None or dep is None:
            return None
        if preserved_indices is not None:
            source = (*(state_ps if clone_ps is None else clone_ps),)
            rank = len(state_ps)
            keep = {i: i + rank if i < 0 else i for i in preserved_indices}  # as in a list, -1 is the last axis
            wrong = [i for i, axis in keep.items() if not 0 <= axis < min(rank, len(source))]
            if wrong:
                raise ShapeError(f"index {wrong[0]} is no axis of {state_ps}{f' and {clone_ps}' if clone_ps else ''}")
            state_ps = _spec(*(source[i] if i in keep.values() else None for i in range(rank)))
        if tensor is None or self.metadata.mesh is None:
            return state_ps
        return self.metadata.partition_manager.fit(state_ps, tensor.shape, self.metadata.mesh)

    def placed(self, x: Any, spec: PartitionSpec) -> Any:
        """`x` split over the mesh as far as its shape goes; `x` itself without a mesh of several devices."""
        if x is None or (mesh := self.metadata.mesh) is None or mesh.size == 1 or not any(map(names_of, spec)):
            return x
        return self.metadata.partition_manager.place(jax.numpy.asarray(x), spec)
