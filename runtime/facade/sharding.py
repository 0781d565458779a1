"""Words for the axes of arrays, and the partition specs they become on a mesh of JAX.

>>> from frisket.sharding import AttnKVSharding, PartitionAxis, PartitionManager
>>> PartitionManager(PartitionAxis()).resolve(AttnKVSharding, shape=(8, 4096, 4, 128))
P(('fsdp', 'dp'), 'sp', 'tp', None)
"""

from frisket.runtime.machine.modules import extras

with extras():
    from frisket.runtime.sharding import partition

from frisket.runtime.sharding.partition import *  # noqa: F403

__all__ = partition.__all__
