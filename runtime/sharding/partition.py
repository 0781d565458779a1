"""Words for the axes of arrays and the ways a model runs; on a mesh, they become a `jax.sharding.PartitionSpec`.

Semantic axes, runtime modes and names of types for model code are known before any mesh is. Then: the current mesh,
axes of a mesh that can split a dimension, and the spec of semantic axes, a runtime mode and a shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax._src.mesh import thread_resources  # JAX has no public word for the mesh of `with mesh:`
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from frisket.dsl.errors import ParameterError, ShapeError

# Runtime modes: what a model is doing. The last two make tokens one after another.
MODE_TRAIN = "__train__"
MODE_PREFILL = "__prefill__"
MODE_DECODE = "__autoregressive__"
MODE_INSERT = "__insert__"
MODES = (MODE_TRAIN, MODE_PREFILL, MODE_DECODE, MODE_INSERT)
GENERATION_MODES = {MODE_DECODE, MODE_INSERT}

# Semantic axes: what a dimension of an array is.
BATCH = "__BATCH__"
LENGTH = "__LENGTH__"
QUERY_LENGTH = "__QUERY_LENGTH__"
KV_LENGTH = "__KV_LENGTH__"
HEAD = "__HEAD__"
KV_HEAD = "__KV_HEAD__"
HEAD_DIM = "__HEAD_DIM__"
KV_HEAD_DIM = "__KV_HEAD_DIM__"
EMBED = "__EMBED__"
MLP_INTERMEDIATE = "__MLP_INTERMEDIATE__"
VOCAB = "__VOCAB__"
EXPERT = "__EXPERT__"
EXPERT_GATE = "__EXPERT_GATE__"
BIAS_HEAD_SEQ = "__BIAS_HEAD_SEQ__"
BIAS_KV_SEQ = "__BIAS_KV_SEQ__"

# Parallel axes: what a mesh is split for, whatever its axes are called.
DATA_PARALLEL = DP = "__DATA_PARALLEL__"
FULLY_SHARDED_DATA_PARALLEL = FSDP = "__FULLY_SHARDED_DATA_PARALLEL__"
TENSOR_PARALLEL = TP = "__TENSOR_PARALLEL__"
SEQUENCE_PARALLEL = SP = "__SEQUENCE_PARALLEL__"
EXPERT_PARALLEL = EP = "__EXPERT_PARALLEL__"

EMPTY = "_"  # a dimension that is on every device

# A large finite number for masked scores of models that add biases: -0.7 of the largest float32.
DEFAULT_MASK_VALUE = -0.7 * float.fromhex("0x1.fffffep+127")


class _NotGiven:
    """ "Not given", where None is a value; `isinstance(x, EMPTY_VAL)` asks whether `x` is it."""

    def __instancecheck__(self, x: object) -> bool:
        return x is self

    def __repr__(self) -> str:
        return "EMPTY_VAL"

    def __reduce__(self) -> str:
        return "EMPTY_VAL"  # pickled by name, so that there is one object


EMPTY_VAL: Any = _NotGiven()
NOT_GIVEN = EMPTY_VAL

Axis = str | list[str] | None  # of one dimension; a list: over several axes of a mesh


class _Said(NamedTuple):
    axes: list[Axis]
    mode: str | int


class _Forms(type):
    """A named form is a class that says its axes and its mode by itself, as an instance of it does."""

    form: tuple[list[Axis], str | int]
    axes = property(lambda cls: cls.form[0])
    mode = property(lambda cls: cls.form[1])

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], form: Any = None) -> Any:
        if form is not None:
            body["form"] = form
        if {"axes", "mode"} & {*body}:  # as they are written in eformer
            before: Any = next((b.form for b in bases if hasattr(b, "form")), ([], MODE_TRAIN))
            body["form"] = body.pop("axes", before[0]), body.pop("mode", before[1])
        return super().__new__(cls, name, bases, body)

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls.form)

    def __getitem__(cls, i: Any) -> Any:
        return cls.form[i]

    def __len__(cls) -> int:
        return 2

    def __eq__(cls, other: object) -> bool:
        return cls is other or (isinstance(other, tuple) and getattr(cls, "form", None) == other)

    __hash__ = type.__hash__

    def __instancecheck__(cls, x: Any) -> bool:
        return type.__instancecheck__(cls, x) or (type(x) is _Forms and hasattr(x, "form") and issubclass(x, cls))


class DynamicShardingAxes(_Said, metaclass=_Forms):
    """`DynamicShardingAxes([BATCH, QUERY_LENGTH, EMBED], 1)`: an axis for every dimension, and the mode.

    `mode` is a runtime mode, or the number of the dimension that decides it: decode where that has length 1, train
    otherwise. A class below it is a form with a name, which stands for itself, as do its instances:

    >>> class Logits(DynamicShardingAxes):
    ...     axes = [BATCH, LENGTH, VOCAB]
    ...     mode = MODE_TRAIN
    >>> Logits.mode, Logits(mode=MODE_DECODE).mode, Logits().axes == Logits.axes
    ('__train__', '__autoregressive__', True)
    """

    def __init_subclass__(cls) -> None:
        if cls.__doc__ is None and (form := getattr(cls, "form", None)):
            text = f"{cls.__name__}.axes, {cls.__name__}.mode"
            cls.__doc__ = f"A named form of `DynamicShardingAxes`.\n\n>>> {text}\n{form!r}\n"

    def __new__(cls, axes: list[Axis] | None = None, mode: str | int | None = None) -> Self:
        form: Any = getattr(cls, "form", (None, None))
        axes, mode = form[0] if axes is None else axes, form[1] if mode is None else mode
        if axes is None or mode is None:
            raise ParameterError("give axes and mode: DynamicShardingAxes([BATCH, EMBED], MODE_TRAIN)")
        return super().__new__(cls, axes, mode)


class HiddenStateSharding(DynamicShardingAxes, form=([BATCH, QUERY_LENGTH, EMBED], 1)): ...


class AttnQSharding(DynamicShardingAxes, form=([BATCH, QUERY_LENGTH, HEAD, HEAD_DIM], 1)): ...


class AttnKVSharding(DynamicShardingAxes, form=([BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM], 1)): ...


class RowWise(DynamicShardingAxes, form=([TP, [FSDP, SP]], MODE_TRAIN)): ...


class ColumnWise(DynamicShardingAxes, form=([[FSDP, SP], TP], MODE_TRAIN)): ...


class SRowWise(DynamicShardingAxes, form=([TP], MODE_TRAIN)): ...


class SColumnWise(DynamicShardingAxes, form=([[FSDP, SP]], MODE_TRAIN)): ...


class Replicated(DynamicShardingAxes, form=([EMPTY], MODE_TRAIN)): ...


# Weights of experts: [experts, in, out], columns being the first product of a layer and rows the second.
class ExpertColumnWise(DynamicShardingAxes, form=([EP, FSDP, TP], MODE_TRAIN)): ...


class ExpertRowWise(DynamicShardingAxes, form=([EP, TP, FSDP], MODE_TRAIN)): ...


class ExpertColumnWiseAlt(DynamicShardingAxes, form=([EP, [FSDP, SP], TP], MODE_TRAIN)): ...


class ExpertRowWiseAlt(DynamicShardingAxes, form=([EP, TP, [FSDP, SP]], MODE_TRAIN)): ...


class UnifiedExpertColumnWise(DynamicShardingAxes, form=([[FSDP, SP, EP], EMPTY, TP], MODE_TRAIN)): ...


class UnifiedExpertRowWise(DynamicShardingAxes, form=([[FSDP, SP, EP], TP, EMPTY], MODE_TRAIN)): ...


class ExpertTensorParallel(DynamicShardingAxes, form=([TP, EMPTY, EMPTY], MODE_TRAIN)): ...


# Activations of experts: [batch, length, experts, size], and [batch, length, size] of those that were chosen.
class ExpertActivations(DynamicShardingAxes, form=([DP, SP, EP, TP], MODE_TRAIN)): ...


class ExpertActivationsAlt(DynamicShardingAxes, form=([DP, SP, [TP, FSDP]], MODE_TRAIN)): ...


# Names of types that eformer's `common_types` has, for annotations of model code.
Array = jax.Array
PRNGKey = jax.Array
DType = jnp.dtype
Shape = Sequence[int]
AxisIdxes = tuple[int, ...]
AxisNames = tuple[str, ...]
AxisType = tuple[str, ...] | str | Any | None  # the mesh axes of one dimension
RUNTIME_MODE_TYPES = Literal["__autoregressive__", "__prefill__", "__train__", "__insert__"]


spec_of: Any = PartitionSpec  # JAX leaves some of its functions untyped
_reshard: Any = jax.sharding.reshard
_constrain: Any = jax.lax.with_sharding_constraint


def current_mesh(own: Any = None) -> Any:
    """The mesh `own`, or that of `jax.set_mesh(mesh)` or `with mesh:`, inside of `jax.jit` too; None without one.
    Within `jax.shard_map` it is the mesh there, which knows the axes that are split already.

    >>> mesh = jax.make_mesh((1, 1), ("dp", "tp"))
    >>> with jax.set_mesh(mesh):
    ...     current_mesh() == mesh
    True
    """
    abstract = jax.sharding.get_abstract_mesh()
    if own is not None and not abstract.manual_axes:
        return own
    if not abstract.empty:
        try:
            return jax.sharding.get_mesh()
        except ValueError:  # JAX traces: a mesh without devices is all there is
            return abstract
    legacy = thread_resources.env.physical_mesh
    return None if legacy.empty else legacy


def split_as(x: Any, mesh: Any, spec: Any, explicit: bool = False) -> Any:
    """`x` split over the axes of a mesh. Explicit ones are set and, unless these alone are meant, automatic ones asked
    for, each kind by a function of JAX that takes no other."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit_kind, automatic = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto
    for kind, put in ((explicit_kind, _reshard), (automatic, _constrain))[: 1 if explicit else 2]:
        if kind in kinds.values():
            entries = (tuple(n for n in names_of(axes) if kinds[n] == kind) or None for axes in spec)
            x = put(x, NamedSharding(mesh, spec_of(*entries)))
    return x


def names_of(axes: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a partition spec, in order."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def fitting(mesh: Mapping[str, int], axes: Any, size: int | None, used: set[str] | None = None) -> Any:
    """The axes of one entry of a spec that split `size` evenly, those of `used` and those no mesh has left out.

    >>> fitting({"dp": 2, "fsdp": 4}, ("fsdp", "dp"), 4)
    'fsdp'

    One by one, in order: what does not divide what the axes before it leave is on every device. `mesh` is sizes by
    name, `size` None where the dimension is not known. None, a name, or a tuple of names, as in a partition spec.
    """
    fits: list[str] = []
    for name in names_of(axes):
        if name not in mesh or name in fits or (used and name in used) or (size is not None and size % mesh[name]):
            continue
        fits.append(name)
        size = None if size is None else size // mesh[name]
    return None if not fits else fits[0] if len(fits) == 1 else tuple(fits)


Axes = Sequence[Axis] | DynamicShardingAxes
MeshAxes = str | tuple[str, ...] | None

# semantic axis -> field of a PartitionAxis
FIELDS = {BATCH: "batch_axis", LENGTH: "sequence_axis", QUERY_LENGTH: "query_sequence_axis"}
FIELDS |= {KV_LENGTH: "key_sequence_axis", HEAD: "head_axis", KV_HEAD: "kv_head_axis"}
FIELDS |= {HEAD_DIM: "attention_dim_axis", KV_HEAD_DIM: "attention_kv_dim_axis", EMBED: "hidden_state_axis"}
FIELDS |= {MLP_INTERMEDIATE: "mlp_intermediate_axis", VOCAB: "vocab_axis", EXPERT: "expert_axis"}
FIELDS |= {EXPERT_GATE: "expert_gate_axis", BIAS_HEAD_SEQ: "bias_head_sequence_axis"}
FIELDS |= {BIAS_KV_SEQ: "bias_key_sequence_axis", DATA_PARALLEL: "data_parallel_axis"}
FIELDS |= {FULLY_SHARDED_DATA_PARALLEL: "fully_sharded_data_parallel_axis", TENSOR_PARALLEL: "tensor_parallel_axis"}
FIELDS |= {SEQUENCE_PARALLEL: "sequence_parallel_axis", EXPERT_PARALLEL: "expert_parallel_axis"}
# field -> the fields it is read from by default
DEFAULTS: dict[str, tuple[str, ...]] = {"batch_axis": ("fully_sharded_data_parallel_axis", "data_parallel_axis")}
_OF_TENSORS = "head_axis", "kv_head_axis", "hidden_state_axis", "mlp_intermediate_axis", "vocab_axis"
DEFAULTS |= dict.fromkeys(("sequence_axis", "query_sequence_axis", "key_sequence_axis"), ("sequence_parallel_axis",))
DEFAULTS |= dict.fromkeys(_OF_TENSORS, ("tensor_parallel_axis",)) | {"expert_axis": ("expert_parallel_axis",)}
DEFAULTS |= {f"decode_{n}": (n,) for n in ("batch_axis", "head_axis", "kv_head_axis", "key_sequence_axis")}


@dataclass(frozen=True)
class PartitionAxis:
    """Axes of a mesh that split each semantic axis: `PartitionAxis(head_axis=("tp", "sp"))`.

    >>> from frisket.sharding import BATCH, HEAD, MODE_DECODE, MODE_TRAIN, QUERY_LENGTH
    >>> PartitionAxis().resolve_spec([BATCH, QUERY_LENGTH, HEAD], MODE_TRAIN)
    P(('fsdp', 'dp'), 'sp', 'tp')
    >>> PartitionAxis(decode_head_axis=("tp", "sp")).resolve_spec([BATCH, HEAD], MODE_DECODE)
    P(('fsdp', 'dp'), ('tp', 'sp'))
    >>> PartitionAxis().resolve_axis([BATCH, HEAD], MODE_TRAIN)
    [('fsdp', 'dp'), 'tp']

    Each field is a name, a tuple of names, or None: on every device. The first five say what a mesh calls its axes.
    Those after them follow from them where they are not given. Batches go over the data-parallel axes, lengths over
    the sequence axis, heads and the sizes of layers over the tensor axis, experts over theirs. Head sizes, biases'
    axes and gates are whole. In `GENERATION_MODES` the fields `decode_...` stand for those without; one that is None
    leaves the field without, as in eformer. The length of a step, 1, is split by no axis of several devices.
    """

    data_parallel_axis: MeshAxes = "dp"
    fully_sharded_data_parallel_axis: MeshAxes = "fsdp"
    tensor_parallel_axis: MeshAxes = "tp"
    sequence_parallel_axis: MeshAxes = "sp"
    expert_parallel_axis: MeshAxes = "ep"
    batch_axis: MeshAxes = EMPTY_VAL
    sequence_axis: MeshAxes = EMPTY_VAL
    query_sequence_axis: MeshAxes = EMPTY_VAL
    head_axis: MeshAxes = EMPTY_VAL
    kv_head_axis: MeshAxes = EMPTY_VAL
    key_sequence_axis: MeshAxes = EMPTY_VAL
    hidden_state_axis: MeshAxes = EMPTY_VAL
    mlp_intermediate_axis: MeshAxes = EMPTY_VAL
    vocab_axis: MeshAxes = EMPTY_VAL
    expert_axis: MeshAxes = EMPTY_VAL
    expert_gate_axis: MeshAxes = None
    attention_dim_axis: MeshAxes = None
    attention_kv_dim_axis: MeshAxes = None
    bias_head_sequence_axis: MeshAxes = None
    bias_key_sequence_axis: MeshAxes = None
    decode_batch_axis: MeshAxes = EMPTY_VAL
    decode_query_sequence_axis: MeshAxes = None
    decode_head_axis: MeshAxes = EMPTY_VAL
    decode_kv_head_axis: MeshAxes = EMPTY_VAL
    decode_key_sequence_axis: MeshAxes = EMPTY_VAL
    decode_attention_dim_axis: MeshAxes = None
    decode_attention_kv_dim_axis: MeshAxes = None

    def __post_init__(self) -> None:
        # in this order: what other fields follow from comes first
        for f in fields(self):
            value = getattr(self, f.name)
            if value is EMPTY_VAL:
                names = tuple(name for source in DEFAULTS[f.name] for name in names_of(getattr(self, source)))
                value = names[0] if len(names) == 1 else names or None
            value = tuple(value) if isinstance(value, list) else value  # a tuple: a partition axis has a hash
            names = names_of(value) if value is None or isinstance(value, str | tuple) else (value,)
            if not all(isinstance(name, str) for name in names):
                raise ParameterError(f"{f.name} is {value!r}; it is the name of a mesh axis, a tuple of names, or None")
            object.__setattr__(self, f.name, value)

    def resolve_axis(self, axes: Sequence[Axis], mode: str) -> list[MeshAxes]:
        """The mesh axes of every semantic axis in a mode. A list stands for all of its axes in turn."""
        if mode not in MODES:
            raise ParameterError(f"there is no runtime mode {mode!r}; modes are {', '.join(map(repr, MODES))}")
        return [self._one(axis, mode) for axis in axes]

    def resolve_spec(self, axes: Sequence[Axis], mode: str) -> PartitionSpec:
        """The PartitionSpec of semantic axes, for any mesh; `PartitionManager.resolve` fits it to one."""
        return spec_of(*self.resolve_axis(axes, mode))  # type: ignore[no-any-return]

    def _one(self, axis: Axis, mode: str) -> MeshAxes:
        if axis is None or axis == EMPTY:
            return None
        if isinstance(axis, list | tuple):
            return tuple(name for one in axis for name in names_of(self._one(one, mode))) or None
        if axis not in FIELDS:
            raise ParameterError(f"there is no semantic axis {axis!r}; there are {', '.join(FIELDS)}, and {EMPTY!r}")
        name = FIELDS[axis]
        decode = getattr(self, f"decode_{name}", None) if mode in GENERATION_MODES else None
        return getattr(self, name) if decode is None else decode  # type: ignore[no-any-return]


def as_partition_axis(x: Any) -> PartitionAxis:
    """`x`, a PartitionAxis or any object with its fields, such as eformer's."""
    if isinstance(x, PartitionAxis):
        return x
    if missing := [f.name for f in fields(PartitionAxis) if not hasattr(x, f.name)]:
        raise ParameterError(f"paxis is {x!r}; it is a PartitionAxis, or has its fields: it has no {missing[0]!r}")
    return PartitionAxis(**{f.name: getattr(x, f.name) for f in fields(PartitionAxis)})


@dataclass(frozen=True)
class PartitionManager:
    """Fits semantic axes to a mesh and to shapes, and splits arrays: `PartitionManager(PartitionAxis(), mesh)`.

    >>> import jax
    >>> from frisket.sharding import AttnQSharding
    >>> mesh = jax.make_mesh((1, 1), ("dp", "tp"), axis_types=2 * (jax.sharding.AxisType.Auto,))
    >>> manager, q = PartitionManager(PartitionAxis(), mesh), jax.numpy.ones((4, 64, 8, 32))
    >>> manager.resolve(AttnQSharding, shape=q.shape)
    P('dp', None, 'tp', None)
    >>> manager.shard(q, AttnQSharding).sharding.spec, manager.place(q, spec_of("dp", "sp")).sharding.spec
    (P('dp', None, 'tp', None), P('dp', None))
    >>> manager.fit(spec_of("dp", "sp"), q.shape, mesh)  # the mesh has no axis "sp"
    P('dp', None)

    Without `mesh` it takes the current one: `jax.set_mesh(mesh)`, or `with mesh:`. `with manager:` makes it that of
    `current_partition_manager()`.
    """

    paxis: PartitionAxis = field(default_factory=PartitionAxis)
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "paxis", as_partition_axis(self.paxis))

    def resolve(
        self,
        axes: Axes = EMPTY_VAL,
        mode: str | int = EMPTY_VAL,
        dynamic_axes: DynamicShardingAxes = EMPTY_VAL,
        shape: Sequence[int] | None = None,
    ) -> PartitionSpec:
        """The spec of an array: an entry for every one of `axes`, in `mode`.

        `dynamic_axes`, or `axes` of that kind, says both. Where `mode` is the number of a dimension, `shape` has it.
        On a mesh, names that it lacks are left out. With a `shape` an axis that does not divide its dimension is left
        out too: that dimension is on every device of the axis. Raises `ParameterError` where an axis would then split
        two dimensions.
        """
        form: Any = axes if dynamic_axes is EMPTY_VAL and hasattr(axes, "axes") else dynamic_axes
        if form is not EMPTY_VAL:
            axes, mode = form.axes, form.mode if mode is EMPTY_VAL else mode
        if axes is EMPTY_VAL or mode is EMPTY_VAL:
            raise ParameterError("give axes and mode, or dynamic_axes: resolve([BATCH, EMBED], MODE_TRAIN)")
        if shape is not None and len(shape) != len(axes):
            raise ShapeError(f"{len(axes)} axes, {list(axes)}, for an array of {len(shape)} dimensions, {list(shape)}")
        resolved = self.paxis.resolve_axis([*axes], _told(mode, shape) if isinstance(mode, int) else mode)
        mesh = current_mesh(self.mesh)
        return self.fit(resolved, shape, mesh) if mesh is not None else spec_of(*resolved)

    @staticmethod
    def fit(spec: Iterable[MeshAxes], shape: Sequence[int] | None, mesh: Any) -> PartitionSpec:
        """A spec as `mesh` and `shape` can have it: see `resolve`. A shorter spec leaves the last dimensions whole."""
        sizes = {n: size for n, size in mesh.shape.items() if n not in mesh.manual_axes}  # shard_map has split these
        entries: list[MeshAxes] = []
        for i, axes in enumerate(spec):
            if shape is not None and i >= len(shape):
                raise ShapeError(f"a spec of more axes than the array has, {list(shape)}: {spec}")
            # an axis of one device splits nothing: where it is named again it is left out
            used = {name for known in entries for name in names_of(known) if sizes[name] == 1}
            entries.append(fitting(sizes, axes, None if shape is None else shape[i], used))
        names = [name for axes in entries for name in names_of(axes)]
        # without a shape both stay: the axis may not divide one of the two
        if shape is not None and (twice := [name for name in names if names.count(name) > 1]):
            text = f"mesh axis {twice[0]!r} would split two dimensions of {list(shape)}: {spec_of(*entries)}\n"
            raise ParameterError(f"{text}  give one of them other axes in the PartitionAxis, or None")
        return spec_of(*entries)  # type: ignore[no-any-return]

    def shard(
        self, x: Any, axes: Axes = EMPTY_VAL, mode: str | int = EMPTY_VAL, dynamic_axes: DynamicShardingAxes = EMPTY_VAL
    ) -> Any:
        """`x` split as `resolve` says: a constraint while JAX traces, and a copy to devices outside.

        Where no axis splits it, `x` stays as it is, on whichever devices: as in eformer, that asks for nothing.
        """
        return self.place(x, self.resolve(axes, mode, dynamic_axes, x.shape))

    def place(self, x: Any, spec: PartitionSpec) -> Any:
        """`x` split by a spec, fitted to its shape; `x` itself where that splits nothing."""
        mesh = current_mesh(self.mesh)
        if mesh is None:
            text = "there is no mesh to split over\n  give one, PartitionManager(paxis, mesh), or call under "
            raise ParameterError(f"{text}`with jax.set_mesh(mesh):`")
        spec = self.fit(spec, x.shape, mesh)
        if not any(map(names_of, spec)):
            return x
        if isinstance(x, jax.core.Tracer):
            return split_as(x, mesh, spec)
        return jax.device_put(x, NamedSharding(mesh, spec))

    def __enter__(self) -> PartitionManager:
        _tokens.set((*_tokens.get(), _current.set(self)))  # a stack, as one manager may be entered more than once
        return self

    def __exit__(self, *error: object) -> None:
        *before, token = _tokens.get()
        _current.reset(token)
        _tokens.set(tuple(before))


_current: ContextVar[PartitionManager | None] = ContextVar("partition manager", default=None)
_tokens: ContextVar[tuple[Token[PartitionManager | None], ...]] = ContextVar("tokens", default=())


def current_partition_manager() -> PartitionManager | None:
    """The manager of the innermost `with manager:`.

    >>> with PartitionManager() as manager:
    ...     current_partition_manager() is manager
    True
    """
    return _current.get()


def _told(dimension: int, shape: Sequence[int] | None) -> str:
    """The mode that a dimension tells: decode where it has length 1."""
    if shape is None:
        raise ParameterError(f"mode {dimension} depends on that dimension of a shape: resolve(..., shape=x.shape)")
    if not -len(shape) <= dimension < len(shape):
        raise ShapeError(f"mode {dimension} is no dimension of shape {list(shape)}")
    return MODE_DECODE if shape[dimension] == 1 else MODE_TRAIN


__all__ = ["PartitionAxis", "PartitionManager", "current_mesh", "current_partition_manager"]
__all__ += ["BATCH", "BIAS_HEAD_SEQ", "BIAS_KV_SEQ", "DATA_PARALLEL", "DEFAULT_MASK_VALUE", "DP", "EMBED", "EMPTY"]
__all__ += ["EMPTY_VAL", "EP", "EXPERT", "EXPERT_GATE", "EXPERT_PARALLEL", "FSDP", "FULLY_SHARDED_DATA_PARALLEL"]
__all__ += ["GENERATION_MODES", "HEAD", "HEAD_DIM", "KV_HEAD", "KV_HEAD_DIM", "KV_LENGTH", "LENGTH", "MLP_INTERMEDIATE"]
__all__ += ["MODES", "MODE_DECODE", "MODE_INSERT", "MODE_PREFILL", "MODE_TRAIN", "NOT_GIVEN", "QUERY_LENGTH"]
__all__ += ["RUNTIME_MODE_TYPES", "SEQUENCE_PARALLEL", "SP", "TENSOR_PARALLEL", "TP", "VOCAB", "Array"]
__all__ += ["AttnKVSharding", "AttnQSharding", "AxisIdxes", "AxisNames", "AxisType", "ColumnWise", "DType"]
__all__ += ["DynamicShardingAxes", "ExpertActivations", "ExpertActivationsAlt", "ExpertColumnWise"]
__all__ += ["ExpertColumnWiseAlt", "ExpertRowWise", "ExpertRowWiseAlt", "ExpertTensorParallel", "HiddenStateSharding"]
__all__ += ["Mesh", "PRNGKey", "Replicated", "RowWise", "SColumnWise", "SRowWise", "Shape", "UnifiedExpertColumnWise"]
__all__ += ["UnifiedExpertRowWise"]
