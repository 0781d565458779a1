"""Metadata that an attention operator is made with: dtypes, mesh, partition, scale, dropout, tiles; as JSON too."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from dataclasses import replace as _replace
from enum import StrEnum
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from frisket.dsl.errors import ParameterError
from frisket.runtime.calls.arrays import scale_of
from frisket.runtime.calls.options import rate_of
from frisket.runtime.modeling.meshes import create_mesh
from frisket.runtime.sharding import names as n
from frisket.runtime.sharding.names import EMPTY_VAL
from frisket.runtime.sharding.partition import PartitionAxis, PartitionManager, as_partition_axis, current_mesh

Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # to what JSON has, and back


def array_to_json(x: Any) -> dict[str, Any]:
    array = np.asarray(x)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "base64": base64.b64encode(array.tobytes()).decode()}


def array_from_json(x: Mapping[str, Any]) -> Any:
    flat = np.frombuffer(base64.b64decode(x["base64"]), jnp.dtype(x["dtype"]))  # numpy alone knows no bfloat16
    return jnp.asarray(flat.reshape(x["shape"]))


class Record:
    """A dataclass to and from dicts and JSON; `codecs` says how the fields that JSON has no word for are written."""

    codecs: ClassVar[dict[str, Codec]] = {}

    def replace(self, **changes: Any) -> Self:
        """A copy with other values."""
        self._check(changes)
        return _replace(self, **changes)  # type: ignore[type-var]

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

    codecs: ClassVar[dict[str, Codec]] = dict.fromkeys(
        ("attention_weights", "attention_outputs"), (array_to_json, array_from_json)
    )


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


# of fields that are not None where nobody gives a value
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
    >>> query, key, _, bias, _, out = made.get_shardings(n.MODE_TRAIN)
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
        if both and manager.paxis != as_partition_axis(self.partition_axis):
            raise ParameterError("partition_axis is not that of partition_manager; give one of them")
        if self.mesh is None:
            self.mesh = current_mesh() if manager.mesh is None else manager.mesh
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
        heads, dims = (n.HEAD, n.HEAD_DIM) if qkv_mni_sharding else (n.KV_HEAD, n.KV_HEAD_DIM)

        def spec(length: str, heads: str, dims: str) -> PartitionSpec:
            axes = [n.BATCH, length, heads, dims] if BTHD else [n.BATCH, heads, length, dims]
            return self.partition_manager.resolve(axes, mode)

        query = spec(n.QUERY_LENGTH, n.HEAD, n.HEAD_DIM)
        key = spec(n.KV_LENGTH, heads, dims)
        bias, mask = (
            self.partition_manager.resolve([n.BATCH, h, n.QUERY_LENGTH, n.BIAS_KV_SEQ], mode)
            for h in (n.BIAS_HEAD_SEQ, None)
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
