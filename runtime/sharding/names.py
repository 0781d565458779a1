"""Words for the axes of arrays and the ways a model runs, before any mesh is known."""

from __future__ import annotations

from typing import Any, NamedTuple

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
        return "EMPTY_VAL"


EMPTY_VAL: Any = _NotGiven()
NOT_GIVEN = EMPTY_VAL

Axis = str | list[str] | None  # of one dimension; a list: over several axes of a mesh


class DynamicShardingAxes(NamedTuple):
    """`DynamicShardingAxes([BATCH, QUERY_LENGTH, EMBED], 1)`: an axis for every dimension, and the mode.

    `mode` is a runtime mode, or the number of the dimension it is told by: decode where that has length 1, train
    otherwise.
    """

    axes: list[Axis]
    mode: str | int


HiddenStateSharding = DynamicShardingAxes([BATCH, QUERY_LENGTH, EMBED], 1)
AttnQSharding = DynamicShardingAxes([BATCH, QUERY_LENGTH, HEAD, HEAD_DIM], 1)
AttnKVSharding = DynamicShardingAxes([BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM], 1)
RowWise = DynamicShardingAxes([TP, [FSDP, SP]], MODE_TRAIN)
ColumnWise = DynamicShardingAxes([[FSDP, SP], TP], MODE_TRAIN)
SRowWise = DynamicShardingAxes([TP], MODE_TRAIN)
SColumnWise = DynamicShardingAxes([[FSDP, SP]], MODE_TRAIN)
Replicated = DynamicShardingAxes([EMPTY], MODE_TRAIN)
# Weights of experts: [experts, in, out], columns being the first product of a layer and rows the second.
ExpertColumnWise = DynamicShardingAxes([EP, FSDP, TP], MODE_TRAIN)
ExpertRowWise = DynamicShardingAxes([EP, TP, FSDP], MODE_TRAIN)
ExpertColumnWiseAlt = DynamicShardingAxes([EP, [FSDP, SP], TP], MODE_TRAIN)
ExpertRowWiseAlt = DynamicShardingAxes([EP, TP, [FSDP, SP]], MODE_TRAIN)
UnifiedExpertColumnWise = DynamicShardingAxes([[FSDP, SP, EP], EMPTY, TP], MODE_TRAIN)
UnifiedExpertRowWise = DynamicShardingAxes([[FSDP, SP, EP], TP, EMPTY], MODE_TRAIN)
# Activations of experts: [batch, length, experts, size], and [batch, length, size] of those that were chosen.
ExpertActivations = DynamicShardingAxes([DP, SP, EP, TP], MODE_TRAIN)
ExpertActivationsAlt = DynamicShardingAxes([DP, SP, [TP, FSDP]], MODE_TRAIN)
