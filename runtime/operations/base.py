"""Operations with an implementation for every platform, and operations by name; the base of attention operators.

First the metadata that an attention operator is made with: dtypes, mesh, partition, scale, dropout, tiles; as JSON too.
"""

from __future__ import annotations

import base64
import difflib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.runtime.backends.registry import platform_of
from frisket.runtime.calls.arrays import scale_of
from frisket.runtime.calls.options import rate_of
from frisket.runtime.machine.caller import warn_once
from frisket.runtime.modeling.layers import create_mesh, repeat_kv_bsnh
from frisket.runtime.sharding import partition
from frisket.runtime.sharding.partition import EMPTY_VAL, PartitionAxis, PartitionManager, spec_of

Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # to what JSON has, and back


def array_to_json(x: Any) -> dict[str, Any]:
    array = np.asarray(x)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "base64": base64.b64encode(array.tobytes()).decode()}


def array_from_json(x: Mapping[str, Any]) -> Any:
    flat = np.frombuffer(base64.b64decode(x["base64"]), jnp.dtype(x["dtype"]))  # numpy alone knows no bfloat16
    return jnp.asarray(flat.reshape(x["shape"]))


ARRAY: Codec = array_to_json, array_from_json


class Record:
    """A dataclass to and from dicts and JSON; `codecs` says how the fields that JSON has no word for are written."""

    codecs: ClassVar[dict[str, Codec]] = {}

    def replace(self, **changes: Any) -> Self:
        """A copy with other values."""
        self._check(changes)
        return replace(self, **changes)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        """The values of all fields, as they are."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """A record from the result of `to_dict`, or some of it: fields that are missing have their defaults."""
        cls._check(data)
        return cls(**data)

    def to_json(self, **kwargs: Any) -> str:
        """A text that `from_json` reads, in another process too; `kwargs` as for `json.dumps`: `indent=2`."""
        return json.dumps({n: self._coded(n, x, 0) for n, x in self.to_dict().items()}, **kwargs)

    @classmethod
    def from_json(cls, json_str: str) -> Self:
        """The record in a text of `to_json`."""
        try:
            values = json.loads(json_str)
        except json.JSONDecodeError:
            values = None
        if not isinstance(values, dict):
            raise ParameterError(f"this is no {cls.__name__}: {json_str[:80]!r}")
        cls._check(values)
        return cls(**{n: cls._coded(n, x, 1) for n, x in values.items()})

    @classmethod
    def _coded(cls, name: str, value: Any, way: int) -> Any:
        return cls.codecs[name][way](value) if value is not None and name in cls.codecs else value

    @classmethod
    def _check(cls, values: Mapping[str, Any]) -> None:
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        if unknown := [n for n in values if n not in known]:
            raise ParameterError(f"{cls.__name__} has no field {unknown[0]!r}; it has {', '.join(known)}")


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

    codecs: ClassVar[dict[str, Codec]] = dict.fromkeys(("attention_weights", "attention_outputs"), ARRAY)


class Backend(StrEnum):
    """The device that an operation runs on.

    >>> Backend("cuda") is Backend.CUDA, Backend.CPU == "cpu"
    (True, True)
    """

    TPU = "tpu"
    GPU = "gpu"
    CUDA = "cuda"
    ROCM = "rocm"
    CPU = "cpu"
    TT = "tt"


class Platform(StrEnum):
    """The language that kernels are written in: XLA's own operations, Triton, Pallas.

    >>> Platform("triton") is Platform.TRITON, Platform.PALLAS == "pallas"
    (True, True)
    """

    JAX = "jax"
    TRITON = "triton"
    PALLAS = "pallas"


# of fields that are not None by default
DEFAULTS: dict[str, Any] = {"sequence_axis_name": "sp", "scan_ring_attention": True, "dropout_prob": 0.0}
DEFAULTS |= {"blocksize_b": 1}
IN_CONFIG = {"runtime_dtype": "attn_dtype", "runtime_softmax_dtype": "attn_softmax_dtype"}  # other names of fields


@dataclass(eq=False)
class AttentionMetadata(Record):
    """`AttentionMetadata(softmax_scale=0.1, mesh=mesh)`: settings that all calls of an operator share.

    >>> AttentionMetadata(runtime_dtype="bfloat16").runtime_dtype
    dtype(bfloat16)
    >>> made = AttentionMetadata(softmax_scale=0.1)
    >>> again = AttentionMetadata.from_json(made.to_json())  # in another process too
    >>> again.softmax_scale, AttentionMetadata.from_dict(made.to_dict()).softmax_scale
    (0.1, 0.1)
    >>> made.replace(dropout_prob=0.5).dropout_prob, made.dropout_prob
    (0.5, 0.0)
    >>> from types import SimpleNamespace
    >>> AttentionMetadata.from_config(SimpleNamespace(attn_dtype="bfloat16"), softmax_scale=0.1).runtime_dtype
    dtype(bfloat16)
    >>> query, key, _, bias, _, out = made.get_shardings(partition.MODE_TRAIN)
    >>> query, key == out
    (P(('fsdp', 'dp'), 'sp', 'tp', None), True)

    A field that is not given, or `...`, is taken from `base_config`, an object with attributes of these names. Those
    of the dtypes are `attn_dtype` and `attn_softmax_dtype`. Without one the field is:

    - `runtime_dtype` None: the dtype that q, k and v are cast to, and of the result; None keeps their dtype.
    - `runtime_softmax_dtype` None: float32, no kernel of frisket has a softmax of fewer bits; float64 for float64.
    - `mesh` that of `partition_manager`, or the current one, or None: arrays are not split. `partition_axis`, or the
      axis of `partition_manager`, says how arrays are split over a mesh; those of eformer are taken too.
      `sequence_axis_name` "sp" is the axis of ring attention, which passes keys round the ring, or gathers them where
      `scan_ring_attention` is False.
    - `backend` None: the platform of the arrays. `platform` None: the first kernels that can run the call.
    - `softmax_scale` None: 1 / sqrt(head_dim). `dropout_prob` 0.
    - `blocksize_q`, `blocksize_k` None: tiles of queries and keys, in tokens, by the mask; both or none.
      `blocksize_b` 1: every tile is of one batch entry.
    """

    runtime_dtype: Any = EMPTY_VAL
    runtime_softmax_dtype: Any = EMPTY_VAL
    sequence_axis_name: str = EMPTY_VAL
    mesh: Mesh | None = EMPTY_VAL
    platform: Platform | None = EMPTY_VAL
    backend: Backend | None = EMPTY_VAL
    partition_axis: PartitionAxis = EMPTY_VAL
    partition_manager: PartitionManager = EMPTY_VAL
    base_config: Any = field(default=None, repr=False)
    scan_ring_attention: bool = EMPTY_VAL
    softmax_scale: float | None = EMPTY_VAL
    dropout_prob: float = EMPTY_VAL
    blocksize_q: int | None = EMPTY_VAL
    blocksize_k: int | None = EMPTY_VAL
    blocksize_b: int = EMPTY_VAL

    codecs: ClassVar[dict[str, Codec]] = {
        **dict.fromkeys(("runtime_dtype", "runtime_softmax_dtype"), (lambda x: jnp.dtype(x).name, jnp.dtype)),
        "mesh": (  # over the devices of the process that reads it
            lambda x: {"axis_dims": list(x.shape.values()), "axis_names": list(x.axis_names)},
            lambda x: create_mesh(**x),
        ),
        "platform": (str, Platform),
        "backend": (str, Backend),
        "partition_axis": (asdict, lambda x: PartitionAxis(**x)),
        "partition_manager": (lambda x: asdict(x.paxis), lambda x: PartitionManager(PartitionAxis(**x))),
        "base_config": (lambda x: None, lambda x: None),  # all that is taken from it is in the fields
        **dict.fromkeys(("softmax_scale", "dropout_prob"), (float, float)),  # numbers of numpy or JAX too
        **dict.fromkeys(("blocksize_q", "blocksize_k", "blocksize_b"), (int, int)),
    }

    def __post_init__(self) -> None:
        for f in fields(self):
            if getattr(self, f.name) is ...:
                setattr(self, f.name, f.default)
        if isinstance(self.base_config, dict):
            raise ParameterError("base_config is a dict; it is an object whose attributes are read")
        if self.partition_axis not in (EMPTY_VAL, None) and self.partition_manager is EMPTY_VAL:
            # what is given goes before the manager of a config
            self.partition_manager = None  # type: ignore[assignment]
        both = self.partition_manager not in (EMPTY_VAL, None) and self.partition_axis not in (EMPTY_VAL, None)
        for f in fields(self):
            self.set_attrs_carefully(f.name, DEFAULTS.get(f.name), IN_CONFIG.get(f.name))
        if self.partition_axis is None or isinstance(self.partition_axis, dict):
            self.partition_axis = PartitionAxis(**(self.partition_axis or {}))
        manager: Any = self.partition_manager or PartitionManager(self.partition_axis)
        if not isinstance(manager, PartitionManager):  # another library's, as eformer's, which has no mesh
            manager = PartitionManager(getattr(manager, "paxis", manager), getattr(manager, "mesh", None))
        if both and manager.paxis != partition.as_partition_axis(self.partition_axis):
            raise ParameterError("partition_axis is not that of partition_manager; give one of them")
        if self.mesh is None:
            self.mesh = partition.current_mesh() if manager.mesh is None else manager.mesh
        # the manager splits over the mesh of these settings
        self.partition_axis, self.partition_manager = manager.paxis, replace(manager, mesh=self.mesh)
        for name in ("runtime_dtype", "runtime_softmax_dtype"):
            setattr(self, name, _dtype(name, getattr(self, name)))
        self.platform = _member(Platform, "platform", self.platform)
        self.backend = _member(Backend, "backend", self.backend)
        rate_of(self.dropout_prob)  # checks it; kernels round it to float32
        self.dropout_prob = float(self.dropout_prob)
        self.softmax_scale = scale_of(self.softmax_scale, "softmax_scale", known=True)
        if (self.blocksize_q is None) != (self.blocksize_k is None):
            raise ParameterError("give both of blocksize_q and blocksize_k, or neither")

    def __eq__(self, other: object) -> bool:
        """Whether both have the same values; of `base_config` all that is taken is among them."""
        return type(other) is type(self) and {**vars(self), "base_config": 0} == {**vars(other), "base_config": 0}

    def __hash__(self) -> int:
        return hash((type(self), self.mesh, self.platform, self.backend, self.sequence_axis_name))

    def set_attrs_carefully(
        self,
        attr_name: str = EMPTY_VAL,
        default: Any = EMPTY_VAL,
        pickup_name: str | None = None,
        use_base_config: bool = True,
        *,
        attr: str = EMPTY_VAL,
    ) -> None:
        """Give `attr_name`, also called `attr`, a value where it has none: that of `base_config` under `pickup_name`
        (or `attr_name`), if it is used and has one, else `default`.

        >>> from types import SimpleNamespace
        >>> metadata = AttentionMetadata(base_config=SimpleNamespace(window=64))
        >>> metadata.set_attrs_carefully("window", 128)
        >>> metadata.set_attrs_carefully("sinks", 4)
        >>> metadata.window, metadata.sinks
        (64, 4)
        """
        name = attr if attr_name is EMPTY_VAL else attr_name
        if name is EMPTY_VAL or default is EMPTY_VAL:
            raise ParameterError('give a name and a default: set_attrs_carefully("softmax_scale", 1.0)')
        if not _unset(getattr(self, name, ...)):
            return
        config = self.base_config if use_base_config else None
        value = getattr(config, pickup_name or name, default)
        setattr(self, name, default if _unset(value) else value)

    def replace(self, **changes: Any) -> Self:
        """A copy with other values; another `partition_axis` or `mesh` is that of the partition manager too."""
        manager = changes.get("partition_manager")
        if manager not in (None, ...):
            changes = {"partition_axis": None, "mesh": manager.mesh or self.mesh} | changes
        elif "partition_axis" in changes:
            changes["partition_manager"] = None
        return super().replace(**changes)

    @classmethod
    def from_config(cls, config: Any, softmax_scale: float | None, dropout_prob: float = 0.0) -> Self:
        """Metadata from a model's config, with the scale and dropout of one layer."""
        return cls(base_config=config, softmax_scale=softmax_scale, dropout_prob=dropout_prob)

    @property
    def tile(self) -> tuple[int, int] | None:
        """(queries, keys), in tokens."""
        return None if self.blocksize_q is None or self.blocksize_k is None else (self.blocksize_q, self.blocksize_k)

    def get_shardings(
        self, mode: str, BTHD: bool = True, qkv_mni_sharding: bool = False
    ) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec, PartitionSpec, PartitionSpec, PartitionSpec]:
        """Specs of (query, key, value, bias, mask, output) in a runtime mode.

        [batch, length, heads, head_dim], or with `BTHD=False` [batch, heads, length, head_dim]; bias and mask are
        [batch, heads, q_len, kv_len]. `qkv_mni_sharding` splits keys and values as queries: for repeated key heads.
        """
        of_queries = partition.HEAD, partition.HEAD_DIM
        heads, dims = of_queries if qkv_mni_sharding else (partition.KV_HEAD, partition.KV_HEAD_DIM)

        def spec(length: str, heads: str, dims: str) -> PartitionSpec:
            axes = [partition.BATCH, length, heads, dims] if BTHD else [partition.BATCH, heads, length, dims]
            return self.partition_manager.resolve(axes, mode)

        query = spec(partition.QUERY_LENGTH, *of_queries)
        key = spec(partition.KV_LENGTH, heads, dims)
        bias, mask = (
            self.partition_manager.resolve([partition.BATCH, h, partition.QUERY_LENGTH, partition.BIAS_KV_SEQ], mode)
            for h in (partition.BIAS_HEAD_SEQ, None)
        )
        return query, key, key, bias, mask, query


def _unset(x: Any) -> bool:
    """Whether it says that no value is given, here or in EasyDeL."""
    return x is EMPTY_VAL or x is ...


def _dtype(name: str, x: Any) -> Any:
    if x is None:
        return None
    with suppress(TypeError):
        if jnp.issubdtype(dtype := jnp.dtype(x), jnp.floating):
            return dtype
    raise ParameterError(f"{name} is {x!r}; it is a floating dtype, as 'bfloat16'")


def _member(kind: Any, name: str, x: Any) -> Any:
    try:
        return None if x is None else kind(str(x).lower())
    except ValueError:
        raise ParameterError(f"{name} is {x!r}; it is one of {', '.join(map(repr, map(str, kind)))}") from None


OperationMetadata = AttentionMetadata  # EasyDeL's later name of it


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


OperationClass = TypeVar("OperationClass", bound=type[BaseOperation])


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
    def register(cls, impl_cls: OperationClass) -> OperationClass:
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
    def register(cls, impl_cls: OperationClass) -> OperationClass:
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
    >>> op.create_stable_sharding(spec_of("dp", "sp", "tp"), [0, 2])
    P('dp', None, 'tp')
    >>> op.placed(q, spec_of("dp")) is q  # without a mesh
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
        return partition.MODE_DECODE if q.shape[1 if BTHD else 2] == 1 else partition.MODE_TRAIN

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
            state_ps = spec_of(*(source[i] if i in keep.values() else None for i in range(rank)))
        if tensor is None or self.metadata.mesh is None:
            return state_ps
        return self.metadata.partition_manager.fit(state_ps, tensor.shape, self.metadata.mesh)

    def placed(self, x: Any, spec: PartitionSpec) -> Any:
        """`x` split over the mesh as far as its shape goes; `x` itself without a mesh of several devices."""
        mesh = self.metadata.mesh
        if x is None or mesh is None or mesh.size == 1 or not any(map(partition.names_of, spec)):
            return x
        return self.metadata.partition_manager.place(jax.numpy.asarray(x), spec)


__all__ = ["AttentionImpl", "AttentionMetadata", "AttentionOutput", "AttentionRegistry", "Backend", "BaseOperation"]
__all__ += ["OperationMetadata", "OperationRegistry", "Platform"]
