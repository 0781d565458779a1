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
tiles_of = gl.shared_memory_descriptor
tiles_as = tiles_of.reinterpret if hasattr(tiles_of, "reinterpret") else tiles_of._reinterpret

$constants

$part signature
$include triton.shared.lse_arrays
scale, $numbers,
$include triton.shared.parameters
STAGES: gl.constexpr,  # tiles of keys, and of values, that are in shared memory at once  $if not ring
STAGES: gl.constexpr,  # tiles of keys and of values that are in shared memory at once  $if ring

$part begin
$# The row of a program, its shared memory and its barriers.
$include triton.shared.row
start = row * BLOCK_Q
kv_head = head // GROUP
$include triton.shared.scalars
$include triton.shared.closed_form
$include triton.shared.all_tiles
$for head:
    queries$mark = gl.allocate_shared_memory(Q$mark.dtype, [$groups] + Q$mark.block_type.shape, Q$mark.layout)
$for values:
    outs$mark = $of_queries  # the queries have been read by then  $if not apart
    outs$mark = gl.allocate_shared_memory(Out$mark.dtype, [$groups] + Out$mark.block_type.shape, Out$mark.layout)  $if apart
$for head:
    keys$mark = gl.allocate_shared_memory(K$mark.dtype, [STAGES] + K$mark.block_type.shape, K$mark.layout)  $if not ring and not divided
    keys$mark = gl.allocate_shared_memory(K$mark.dtype, [STAGES, 1, 1, BLOCK_K, $width], K$mark.layout)  $if divided
$for values:
    values$mark = gl.allocate_shared_memory(V$mark.dtype, [STAGES] + V$mark.block_type.shape, V$mark.layout)  $if not ring and not divided
    values$mark = gl.allocate_shared_memory(V$mark.dtype, [STAGES, 1, 1, BLOCK_K, $width], V$mark.layout)  $if divided
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
    $copied, q_full, k_full, k_free, v_full, v_free, batch, head, kv_head, start,
    $walk,
    $paging,  $if paged
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Loads the queries of every warp group, then every tile of keys and of values into the rings, by TMA."""
    paged = $pages + batch.to(gl.int64) * $pages_step  $if paged
    for half in gl.static_range($groups):
        mbarrier.expect(q_full.index(half), $bytes_of_q)
        $for head:
            load_tile(Q$mark, [batch, head, start + half * (BLOCK_Q // $groups), $first], q_full.index(half), queries$mark.index(half))
    n = 0  # tiles so far
    for i in range(gl.load(Count + entry)):  $if tabled
        $include tile_range
        for j in range(hi - lo):
            $include tile_of_step
            slot = n % STAGES
            phase = n // STAGES & 1 ^ 1
            mbarrier.wait(k_free.index(slot), phase)
            mbarrier.expect(k_full.index(slot), $bytes_of_k)
            $for head:
                load_tile(K$mark, [batch, kv_head, tile * BLOCK_K, $first], k_full.index(slot), keys$mark.index(slot))  $if not paged
            $if paged:
                for piece in gl.static_range($page_pieces):
                    $include piece_of_page
                    $for head:
                        load_tile(K$mark, [page, kv_head, token, $first], k_full.index(slot), keys$mark.index(slot)$rows_of_piece)
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_full.index(slot), $bytes_of_v)
            $for values:
                load_tile(V$mark, [batch, kv_head, $place_of_values], v_full.index(slot), values$mark.index(slot))  $if not paged
            $if paged:
                for piece in gl.static_range($page_pieces):
                    $include piece_of_page
                    $for values:
                        load_tile(V$mark, [page, kv_head, token, $first], v_full.index(slot), values$mark.index(slot)$rows_of_piece)
            n += 1

$part piece_of_page
$# The page of some keys of a tile, and their place in it. A page number is the user's: a number outside of the pool is
$# read as one inside.
at = tile * BLOCK_K + piece * $tokens
page = clamp(gl.load(paged + clamp(at // $page, $pages_size) * $pages_stride), pool)
token = at % $page

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
    $copied, q_full, k_full, k_free, v_full, v_free, batch, head, kv_head, start,
    $walk,
    $paging,  $if paged
    BLOCK_Q, BLOCK_K, STAGES,
)),
