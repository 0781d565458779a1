"""Words for the axes of arrays and the ways a model runs, before any mesh is known; names of types for model code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from frisket.dsl.errors import ParameterError

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

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
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


class HiddenStateSharding(DynamicShardingAxes):
    form = [BATCH, QUERY_LENGTH, EMBED], 1


class AttnQSharding(DynamicShardingAxes):
    form = [BATCH, QUERY_LENGTH, HEAD, HEAD_DIM], 1


class AttnKVSharding(DynamicShardingAxes):
    form = [BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM], 1


class RowWise(DynamicShardingAxes):
    form = [TP, [FSDP, SP]], MODE_TRAIN


class ColumnWise(DynamicShardingAxes):
    form = [[FSDP, SP], TP], MODE_TRAIN


class SRowWise(DynamicShardingAxes):
    form = [TP], MODE_TRAIN


class SColumnWise(DynamicShardingAxes):
    form = [[FSDP, SP]], MODE_TRAIN


class Replicated(DynamicShardingAxes):
    form = [EMPTY], MODE_TRAIN


# Weights of experts: [experts, in, out], columns being the first product of a layer and rows the second.
class ExpertColumnWise(DynamicShardingAxes):
    form = [EP, FSDP, TP], MODE_TRAIN


class ExpertRowWise(DynamicShardingAxes):
    form = [EP, TP, FSDP], MODE_TRAIN


class ExpertColumnWiseAlt(DynamicShardingAxes):
    form = [EP, [FSDP, SP], TP], MODE_TRAIN


class ExpertRowWiseAlt(DynamicShardingAxes):
    form = [EP, TP, [FSDP, SP]], MODE_TRAIN


class UnifiedExpertColumnWise(DynamicShardingAxes):
    form = [[FSDP, SP, EP], EMPTY, TP], MODE_TRAIN


class UnifiedExpertRowWise(DynamicShardingAxes):
    form = [[FSDP, SP, EP], TP, EMPTY], MODE_TRAIN


class ExpertTensorParallel(DynamicShardingAxes):
    form = [TP, EMPTY, EMPTY], MODE_TRAIN


# Activations of experts: [batch, length, experts, size], and [batch, length, size] of those that were chosen.
class ExpertActivations(DynamicShardingAxes):
    form = [DP, SP, EP, TP], MODE_TRAIN


class ExpertActivationsAlt(DynamicShardingAxes):
    form = [DP, SP, [TP, FSDP]], MODE_TRAIN


# Names of types that eformer's `common_types` has, for annotations of model code.
Array = jax.Array
PRNGKey = jax.Array
DType = jnp.dtype
Shape = Sequence[int]
AxisIdxes = tuple[int, ...]
AxisNames = tuple[str, ...]
AxisType = tuple[str, ...] | str | Any | None  # the mesh axes of one dimension
RUNTIME_MODE_TYPES = Literal["__autoregressive__", "__prefill__", "__train__", "__insert__"]


__all__ = ["BATCH", "BIAS_HEAD_SEQ", "BIAS_KV_SEQ", "DATA_PARALLEL", "DEFAULT_MASK_VALUE", "DP", "EMBED", "EMPTY"]
__all__ += ["EMPTY_VAL", "EP", "EXPERT", "EXPERT_GATE", "EXPERT_PARALLEL", "FSDP", "FULLY_SHARDED_DATA_PARALLEL"]
__all__ += ["GENERATION_MODES", "HEAD", "HEAD_DIM", "KV_HEAD", "KV_HEAD_DIM", "KV_LENGTH", "LENGTH", "MLP_INTERMEDIATE"]
__all__ += ["MODES", "MODE_DECODE", "MODE_INSERT", "MODE_PREFILL", "MODE_TRAIN", "NOT_GIVEN", "QUERY_LENGTH"]
__all__ += ["RUNTIME_MODE_TYPES", "SEQUENCE_PARALLEL", "SP", "TENSOR_PARALLEL", "TP", "VOCAB", "Array"]
__all__ += ["AttnKVSharding", "AttnQSharding", "AxisIdxes", "AxisNames", "AxisType", "ColumnWise", "DType"]
__all__ += ["DynamicShardingAxes", "ExpertActivations", "ExpertActivationsAlt", "ExpertColumnWise"]
__all__ += ["ExpertColumnWiseAlt", "ExpertRowWise", "ExpertRowWiseAlt", "ExpertTensorParallel", "HiddenStateSharding"]
__all__ += ["Mesh", "PRNGKey", "Replicated", "RowWise", "SColumnWise", "SRowWise", "Shape", "UnifiedExpertColumnWise"]
__all__ += ["UnifiedExpertRowWise"]
