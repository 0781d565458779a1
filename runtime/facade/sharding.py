"""Words for the axes of arrays, and the partition specs they become on a mesh of JAX.

>>> from frisket.sharding import AttnKVSharding, PartitionAxis, PartitionManager
>>> PartitionManager(PartitionAxis()).resolve(AttnKVSharding, shape=(8, 4096, 4, 128))
P(('fsdp', 'dp'), 'sp', 'tp', None)
"""

from frisket.runtime.machine.extras import extras

with extras():
    from frisket.runtime.sharding.mesh import current_mesh as current_mesh

from frisket.runtime.sharding.names import BATCH as BATCH
from frisket.runtime.sharding.names import BIAS_HEAD_SEQ as BIAS_HEAD_SEQ
from frisket.runtime.sharding.names import BIAS_KV_SEQ as BIAS_KV_SEQ
from frisket.runtime.sharding.names import DATA_PARALLEL as DATA_PARALLEL
from frisket.runtime.sharding.names import DEFAULT_MASK_VALUE as DEFAULT_MASK_VALUE
from frisket.runtime.sharding.names import DP as DP
from frisket.runtime.sharding.names import EMBED as EMBED
from frisket.runtime.sharding.names import EMPTY as EMPTY
from frisket.runtime.sharding.names import EMPTY_VAL as EMPTY_VAL
from frisket.runtime.sharding.names import EP as EP
from frisket.runtime.sharding.names import EXPERT as EXPERT
from frisket.runtime.sharding.names import EXPERT_GATE as EXPERT_GATE
from frisket.runtime.sharding.names import EXPERT_PARALLEL as EXPERT_PARALLEL
from frisket.runtime.sharding.names import FSDP as FSDP
from frisket.runtime.sharding.names import FULLY_SHARDED_DATA_PARALLEL as FULLY_SHARDED_DATA_PARALLEL
from frisket.runtime.sharding.names import GENERATION_MODES as GENERATION_MODES
from frisket.runtime.sharding.names import HEAD as HEAD
from frisket.runtime.sharding.names import HEAD_DIM as HEAD_DIM
from frisket.runtime.sharding.names import KV_HEAD as KV_HEAD
from frisket.runtime.sharding.names import KV_HEAD_DIM as KV_HEAD_DIM
from frisket.runtime.sharding.names import KV_LENGTH as KV_LENGTH
from frisket.runtime.sharding.names import LENGTH as LENGTH
from frisket.runtime.sharding.names import MLP_INTERMEDIATE as MLP_INTERMEDIATE
from frisket.runtime.sharding.names import MODE_DECODE as MODE_DECODE
from frisket.runtime.sharding.names import MODE_INSERT as MODE_INSERT
from frisket.runtime.sharding.names import MODE_PREFILL as MODE_PREFILL
from frisket.runtime.sharding.names import MODE_TRAIN as MODE_TRAIN
from frisket.runtime.sharding.names import MODES as MODES
from frisket.runtime.sharding.names import NOT_GIVEN as NOT_GIVEN
from frisket.runtime.sharding.names import QUERY_LENGTH as QUERY_LENGTH
from frisket.runtime.sharding.names import SEQUENCE_PARALLEL as SEQUENCE_PARALLEL
from frisket.runtime.sharding.names import SP as SP
from frisket.runtime.sharding.names import TENSOR_PARALLEL as TENSOR_PARALLEL
from frisket.runtime.sharding.names import TP as TP
from frisket.runtime.sharding.names import VOCAB as VOCAB
from frisket.runtime.sharding.names import AttnKVSharding as AttnKVSharding
from frisket.runtime.sharding.names import AttnQSharding as AttnQSharding
from frisket.runtime.sharding.names import ColumnWise as ColumnWise
from frisket.runtime.sharding.names import DynamicShardingAxes as DynamicShardingAxes
from frisket.runtime.sharding.names import ExpertActivations as ExpertActivations
from frisket.runtime.sharding.names import ExpertActivationsAlt as ExpertActivationsAlt
from frisket.runtime.sharding.names import ExpertColumnWise as ExpertColumnWise
from frisket.runtime.sharding.names import ExpertColumnWiseAlt as ExpertColumnWiseAlt
from frisket.runtime.sharding.names import ExpertRowWise as ExpertRowWise
from frisket.runtime.sharding.names import ExpertRowWiseAlt as ExpertRowWiseAlt
from frisket.runtime.sharding.names import HiddenStateSharding as HiddenStateSharding
from frisket.runtime.sharding.names import Replicated as Replicated
from frisket.runtime.sharding.names import RowWise as RowWise
from frisket.runtime.sharding.names import SColumnWise as SColumnWise
from frisket.runtime.sharding.names import SRowWise as SRowWise
from frisket.runtime.sharding.names import UnifiedExpertColumnWise as UnifiedExpertColumnWise
from frisket.runtime.sharding.names import UnifiedExpertRowWise as UnifiedExpertRowWise
from frisket.runtime.sharding.partition import PartitionAxis as PartitionAxis
from frisket.runtime.sharding.partition import PartitionManager as PartitionManager
from frisket.runtime.sharding.partition import current_partition_manager as current_partition_manager
from frisket.runtime.sharding.types import RUNTIME_MODE_TYPES as RUNTIME_MODE_TYPES
from frisket.runtime.sharding.types import Array as Array
from frisket.runtime.sharding.types import AxisIdxes as AxisIdxes
from frisket.runtime.sharding.types import AxisNames as AxisNames
from frisket.runtime.sharding.types import AxisType as AxisType
from frisket.runtime.sharding.types import DType as DType
from frisket.runtime.sharding.types import Mesh as Mesh
from frisket.runtime.sharding.types import PRNGKey as PRNGKey
from frisket.runtime.sharding.types import Shape as Shape

__all__ = [
    "BATCH",
    "BIAS_HEAD_SEQ",
    "BIAS_KV_SEQ",
    "DATA_PARALLEL",
    "DEFAULT_MASK_VALUE",
    "DP",
    "EMBED",
    "EMPTY",
    "EMPTY_VAL",
    "EP",
    "EXPERT",
    "EXPERT_GATE",
    "EXPERT_PARALLEL",
    "FSDP",
    "FULLY_SHARDED_DATA_PARALLEL",
    "GENERATION_MODES",
    "HEAD",
    "HEAD_DIM",
    "KV_HEAD",
    "KV_HEAD_DIM",
    "KV_LENGTH",
    "LENGTH",
    "MLP_INTERMEDIATE",
    "MODES",
    "MODE_DECODE",
    "MODE_INSERT",
    "MODE_PREFILL",
    "MODE_TRAIN",
    "NOT_GIVEN",
    "QUERY_LENGTH",
    "RUNTIME_MODE_TYPES",
    "SEQUENCE_PARALLEL",
    "SP",
    "TENSOR_PARALLEL",
    "TP",
    "VOCAB",
    "Array",
    "AttnKVSharding",
    "AttnQSharding",
    "AxisIdxes",
    "AxisNames",
    "AxisType",
    "ColumnWise",
    "DType",
    "DynamicShardingAxes",
    "ExpertActivations",
    "ExpertActivationsAlt",
    "ExpertColumnWise",
    "ExpertColumnWiseAlt",
    "ExpertRowWise",
    "ExpertRowWiseAlt",
    "HiddenStateSharding",
    "Mesh",
    "PRNGKey",
    "PartitionAxis",
    "PartitionManager",
    "Replicated",
    "RowWise",
    "SColumnWise",
    "SRowWise",
    "Shape",
    "UnifiedExpertColumnWise",
    "UnifiedExpertRowWise",
    "current_mesh",
    "current_partition_manager",
]
