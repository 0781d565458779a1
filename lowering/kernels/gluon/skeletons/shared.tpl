$# Parts of both Gluon kernels; those word for word Triton's are in Triton's shared.tpl.

$part module
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

$part signature
$include triton.shared.lse_arrays
scale, $numbers,
$include triton.shared.parameters
STAGES: gl.constexpr,  # tiles of keys, and of values, that are in shared memory at once

$part begin
$# The row of a program, its shared memory and its barriers.
$include triton.shared.row
start = row * BLOCK_Q
kv_head = head // GROUP
$include triton.shared.scalars
$include triton.shared.closed_form
$include triton.shared.all_tiles
queries = gl.allocate_shared_memory(Q.dtype, [$groups] + Q.block_type.shape, Q.layout)
outs = queries  # the queries have been read by then  $if same
outs = gl.allocate_shared_memory(Out.dtype, [$groups] + Out.block_type.shape, Out.layout)  $if not same
keys = gl.allocate_shared_memory(K.dtype, [STAGES] + K.block_type.shape, K.layout)
values = gl.allocate_shared_memory(V.dtype, [STAGES] + V.block_type.shape, V.layout)
$for barriers:
    $name = gl.allocate_shared_memory(gl.int64, [$count, 1], mbarrier.MBarrierLayout())

$part consumed
$# What `consume` takes behind memory and barriers.
Lse,$results batch, head, place, start, scale, q_len, kv_len,
$walk,
$passed

$part produce
@gluon.jit
def produce(
    Q, K, V, queries, keys, values, q_full, k_full, k_free, v_full, v_free, batch, head, kv_head, start,
    $walk,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Loads the queries of every warp group, then every tile of keys and of values into the rings, by TMA."""
    for half in gl.static_range($groups):
        mbarrier.expect(q_full.index(half), Q.block_type.nbytes)
        load_tile(Q, [batch, head, start + half * (BLOCK_Q // $groups), 0], q_full.index(half), queries.index(half))
    n = 0  # tiles so far
    for i in range(gl.load(Count + entry)):  $if tabled
        $include tile_range
        for j in range(hi - lo):
            $include tile_of_step
            slot = n % STAGES
            phase = n // STAGES & 1 ^ 1
            mbarrier.wait(k_free.index(slot), phase)
            mbarrier.expect(k_full.index(slot), K.block_type.nbytes)
            load_tile(K, [batch, kv_head, tile * BLOCK_K, 0], k_full.index(slot), keys.index(slot))
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_full.index(slot), V.block_type.nbytes)
            load_tile(V, [batch, kv_head, tile * BLOCK_K, 0], v_full.index(slot), values.index(slot))
            n += 1

$part tile_of_step
$# The tile of a step: first border tiles, before and behind the full ones, then the full ones.
tile = gl.where(j < left, lo + j, j - left + full_hi)
tile = gl.where(j < borders, tile, j - borders + full_lo)

$part tile_range
$# A range of tiles, and how many of them are border tiles: before the full ones, and in all.
$include triton.shared.record
left = full_lo - lo
borders = left + hi - full_hi

$part store_rows
row_at = place.to(gl.int64) * q_len + start + rows
$include triton.shared.store_lse
tma.store_wait(0)

$part producer
(produce, (
    Q, K, V, queries, keys, values, q_full, k_full, k_free, v_full, v_free, batch, head, kv_head, start,
    $walk,
    BLOCK_Q, BLOCK_K, STAGES,
)),
