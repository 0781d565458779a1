"""Words for the axes of arrays, and the partition specs they become on a mesh of JAX.

>>> from frisket.sharding import AttnKVSharding, PartitionAxis, PartitionManager
>>> PartitionManager(PartitionAxis()).resolve(AttnKVSharding, shape=(8, 4096, 4, 128))
P(('fsdp', 'dp'), 'sp', 'tp', None)
"""

from frisket.runtime.machine.extras import extras

with extras():
    from frisket.runtime.sharding.partition import current_mesh

from frisket.runtime.sharding import names
from frisket.runtime.sharding.names import *  # noqa: F403
from frisket.runtime.sharding.partition import PartitionAxis, PartitionManager, current_partition_manager

__all__ = ["PartitionAxis", "PartitionManager", "current_mesh", "current_partition_manager"]
__all__ += names.__all__
