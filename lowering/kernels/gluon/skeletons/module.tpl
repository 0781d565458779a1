"""$title in Gluon, written by frisket for

    $plan

$dims.
$launches
"""

import triton
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton 3.6 calls them otherwise than later versions.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
columns_of = blackwell.tensor_memory_descriptor
seen_as = columns_of.reinterpret if hasattr(columns_of, "reinterpret") else columns_of._reinterpret

$constants
