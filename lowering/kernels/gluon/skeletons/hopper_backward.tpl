$# The fused backward on Hopper: the warp that loads, the two warp groups that compute, the warp that adds tiles of dq,
$# the kernel that starts them, and the kernel that converts dq. Products and softmax have the tile of Triton's dkv:
$# tensors are [keys, queries].

$part module
"""$title in Gluon, written by frisket for

    $plan

$dims.
$launches
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core as gluon_core
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon_core.builtin
def reduce_tile(descriptor, place, tile, _semantic=None):
    """`tma.async_atomic_add`, which Triton 3.6 has no name for."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    kind = gluon_core.ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, place, tile.handle)


# Triton 3.6 calls them otherwise than later versions.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
add_tile = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else reduce_tile

$constants

$part heads
$# The query heads of the program's key head. `$body` is of one.
for member in range(GROUP):  $if grouped
    head = kv_head * GROUP + member  $if grouped
    $if grouped:
        $include entry
    $body

$part entry
$# The ranges of tiles of queries that the program's keys see, of one head.
$if tabled:
    entry = gl.load(SliceOf + batch * heads + head) * gl.cdiv(kv_len, BLOCK_K) + start // BLOCK_K
    first = Spans + (entry * records).to(gl.int64) * 4
    count = gl.load(Count + entry)

$part range
$# A range of tiles, and how many of them are border tiles: before the full ones, and in all. Of a ragged last tile of
$# keys all are: keys past the end, which are loaded as zeros, would have weights.
$if tabled:
    record = first + 4 * i
    lo, full_lo = gl.load(record), gl.load(record + 1)
    full_hi, hi = gl.load(record + 2), gl.load(record + 3)
$include triton.shared.all_tiles
full_lo = gl.where(start + BLOCK_K > kv_len, hi, full_lo)
full_hi = gl.where(start + BLOCK_K > kv_len, hi, full_hi)
left = full_lo - lo
borders = left + hi - full_hi

$part ranges
$# All tiles of queries that the program's keys see, in the same order for every warp. `$body` is of one.
$include heads:
    for i in range(count):  $if tabled
        $include range
        for j in range(hi - lo):
            $include shared.tile_of_step
            $body

$part kernel
@gluon.jit
def feed(
    Q, K, V, DOut, Stats, queries, douts, stats, keys, values, q_full, q_free, g_full, g_free, kv_full,
    batch, $kv_head, start, heads, q_len, kv_len,
    $walk
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Loads the keys and values of both warp groups, then every tile of queries and of the cotangents of outputs with
    the numbers of attention_delta into rings, by TMA."""
    for half in gl.static_range(2):
        mbarrier.expect(kv_full.index(half), K.block_type.nbytes + V.block_type.nbytes)
        load_tile(K, [batch, $kv_head, start + half * (BLOCK_K // 2), 0], kv_full.index(half), keys.index(half))
        load_tile(V, [batch, $kv_head, start + half * (BLOCK_K // 2), 0], kv_full.index(half), values.index(half))
    n = 0  # tiles so far
    $include ranges:
        slot = n % STAGES
        phase = n // STAGES & 1 ^ 1
        mbarrier.wait(q_free.index(slot), phase)
        mbarrier.expect(q_full.index(slot), Q.block_type.nbytes + 3 * Stats.block_type.nbytes)
        load_tile(Q, [batch, head, tile * BLOCK_Q, 0], q_full.index(slot), queries.index(slot))
        for number in gl.static_range(3):
            at = stats.index(slot * 3 + number)
            load_tile(Stats, [number, batch, head, tile * BLOCK_Q], q_full.index(slot), at)
        mbarrier.wait(g_free.index(slot), phase)
        mbarrier.expect(g_full.index(slot), DOut.block_type.nbytes)
        load_tile(DOut, [batch, head, tile * BLOCK_Q, 0], g_full.index(slot), douts.index(slot))
        n += 1


@gluon.jit
def add_dq(
    Acc, sums, dq_full, dq_free, batch, $kv_head, start, heads, q_len, kv_len,
    $walk
    $turns
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
):
    """Adds every tile of dq to global memory, the part of one warp group after that of the other."""
    n = 0  # tiles so far
    $include ranges:
        $if ordered_sums:
            tiles = gl.cdiv(q_len, BLOCK_Q)
            added = Added + (1 + (batch * heads + head) * tiles + tile)
            turn = $turn
            seen = -1  # programs that have added: those of smaller rows add first
            while seen != turn:
                seen = gl.atomic_add(added, 0, sem="acquire")
        for half in gl.static_range(2):
            mbarrier.wait(dq_full.index(half), n & 1)
            add_tile(Acc, [batch, head, tile * BLOCK_Q$row_of_part, $column_of_part], sums.index(half))
        tma.store_wait(0)
        for half in gl.static_range(2):
            mbarrier.arrive(dq_free.index(half), count=1)
        $if ordered_sums:
            # `store_wait` waits until shared memory has been read, this until global memory has been written.
            gl.inline_asm_elementwise($written, "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1)
            gl.atomic_add(added, 1, sem="release")
        n += 1


@gluon.jit
def differentiate(
    half: gl.constexpr, DK, DV, queries, douts, stats, keys, values, weights_in, sums,
    q_full, q_free, g_full, g_free, kv_full, ds_full, dq_full, dq_free,
    batch, $kv_head, start, scale, heads, q_len, kv_len,
    $walk
    $passed
    NEAR: gl.constexpr,  $if near
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """dk and dv of one half of the keys, and with the other half's weights one part of every tile of dq."""
    HALF: gl.constexpr = BLOCK_K // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_Q, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, $part_columns, 16])
    ROWS: gl.constexpr = gl.SliceLayout(0, SCORES)
    rows = gl.arange(0, BLOCK_Q, ROWS)
    columns = half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
    present = start + columns < kv_len
    $line_of_b
    $include triton.shared.gradient_factors
    zero = gl.full([HALF, BLOCK_Q], 0.0, gl.float32, SCORES)
    no_part = gl.full([64, $part_columns], 0.0, gl.float32, PART)
    dk = gl.full([HALF, DIM], 0.0, gl.float32, SUMS)
    dv = gl.full([HALF, DIM], 0.0, gl.float32, SUMS)
    mbarrier.wait(kv_full.index(half), 0)
    mbarrier.wait(kv_full.index(1 - half), 0)
    n = 0  # tiles so far
    $include heads:
        $line_of_h
        $own
        $hoisted
        for i in range(count):  $if tabled
            $include range
            $for tiles:
                # $which
                for j in range($range):
                    $include shared.tile_of_step
                    $include tile
    own = half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SUMS))
    d = gl.arange(0, DIM, gl.SliceLayout(0, SUMS))
    at = own[:, None] * HEAD_DIM + d[None, :]
    there = (start + own < kv_len)[:, None]$and_d
    gl.store(DK + at, (dk * scale).to(queries.dtype), mask=there)
    gl.store(DV + at, dv.to(queries.dtype), mask=there)


$jit
def attention_backward(
    Q, K, V, DOut,  # descriptors of [batch, heads, length, dim], in blocks of BLOCK_Q queries or BLOCK_K / 2 keys
    Stats,  # descriptor of float32 [3, batch, heads, length], in blocks of BLOCK_Q: numbers of attention_delta
    Acc,  # descriptor of float32 [batch, heads, q_len, dim], in blocks of a warp group's part: begins as 0
    DK, DV,  # [batch, key heads, kv_len, dim], contiguous
    $if ordered_sums:
        Added,  # int32 [1 + batch * heads * tiles of queries]: begins as 0. Programs so far; those that added to a tile
        Turns,  # int32 [slices, tiles of keys, tiles of queries]: programs that add to a tile before another  $if tabled
    scale, $numbers,
    $include triton.shared.parameters
    STAGES: gl.constexpr,  # tiles of queries, and of cotangents, that are in shared memory at once
):
    $if ordered_sums:
        # Numbers are given in the order in which programs begin: a program waits for others that run or have ended.
        number = gl.atomic_add(Added, 1)
        $kv_head = $ticket_head
        row = $ticket_row
        batch = number // (gl.num_programs(0) * gl.num_programs(1))
    $else:
        $kv_head, batch = gl.program_id($of_head), gl.program_id(2)
    $if not ordered_sums:
        $if by_order:
            place = gl.load(SliceOf + batch * heads + $first_head)
            row = gl.load(Order + place * gl.num_programs($of_row) + gl.program_id($of_row))  # longest first
        row = gl.program_id($of_row)  $if not by_order
    start = row * BLOCK_K
    $if not grouped:
        $include entry
    of_keys = ((batch * $key_heads + $kv_head).to(gl.int64) * kv_len + start) * HEAD_DIM
    DK += of_keys
    DV += of_keys
    $include triton.shared.values
    keys = gl.allocate_shared_memory(K.dtype, [2] + K.block_type.shape, K.layout)
    values = gl.allocate_shared_memory(V.dtype, [2] + V.block_type.shape, V.layout)
    queries = gl.allocate_shared_memory(Q.dtype, [STAGES] + Q.block_type.shape, Q.layout)
    douts = gl.allocate_shared_memory(DOut.dtype, [STAGES] + DOut.block_type.shape, DOut.layout)
    stats = gl.allocate_shared_memory(Stats.dtype, [STAGES * 3] + Stats.block_type.shape, Stats.layout)
    # ds of both halves of the keys, for two tiles: who writes one knows that both groups are done with the one before.
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K // 2, BLOCK_Q], K.dtype)
    weights_in = gl.allocate_shared_memory(K.dtype, [4, BLOCK_K // 2, BLOCK_Q], WEIGHTS)
    sums = gl.allocate_shared_memory(Acc.dtype, [2] + Acc.block_type.shape, Acc.layout)
    $for barriers:
        $name = gl.allocate_shared_memory(gl.int64, [$count, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(kv_full.index(half), count=1)
        mbarrier.init(ds_full.index(half), count=2)  # both groups have written
        mbarrier.init(dq_full.index(half), count=1)
        mbarrier.init(dq_free.index(half), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(g_full.index(slot), count=1)
        mbarrier.init(q_free.index(slot), count=2)  # both groups have read it
        mbarrier.init(g_free.index(slot), count=2)
    gl.warp_specialize(
        [
            $for halves:
                (differentiate, (
                    gl.constexpr($half), DK, DV, queries, douts, stats, keys, values, weights_in, sums,
                    q_full, q_free, g_full, g_free, kv_full, ds_full, dq_full, dq_free,
                    batch, $kv_head, start, scale, heads, q_len, kv_len,
                    $walk
                    $passed
                    NEAR,  $if near
                    BLOCK_Q, BLOCK_K, STAGES,
                )),
            (feed, (
                Q, K, V, DOut, Stats, queries, douts, stats, keys, values, q_full, q_free, g_full, g_free, kv_full,
                batch, $kv_head, start, heads, q_len, kv_len,
                $walk
                BLOCK_Q, BLOCK_K, STAGES,
            )),
            (add_dq, (
                Acc, sums, dq_full, dq_free, batch, $kv_head, start, heads, q_len, kv_len,
                $walk
                $turns
                BLOCK_Q, BLOCK_K,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )

$part tile
$# One tile of queries: its scores and weights, the products that they take part in, and the part of dq of this group.
slot, phase = n % STAGES, n // STAGES & 1
# `far` is 0, which the compiler does not know: so it computes addresses in shared memory here, and does not hold them in
# tens of registers during all loops.
far = gl.where(n < 0, 1, 0)
key = keys.index(half + far).reshape([HALF, DIM])
value = values.index(half + far).reshape([HALF, DIM])
mbarrier.wait(q_full.index(slot), phase)
query = queries.index(slot).reshape([BLOCK_Q, DIM])
# The product for dp begins at -delta, so that no thread holds both.
delta = stats.index(slot * 3 + 2).reshape([BLOCK_Q]).load(ROWS)
dp = zero - delta[None, :]
score = hopper.warpgroup_mma(key, query.permute((1, 0)), zero, use_acc=False, is_async=True)
mbarrier.wait(g_full.index(slot), phase)
dout = douts.index(slot).reshape([BLOCK_Q, DIM])
dp = hopper.warpgroup_mma(value, dout.permute((1, 0)), dp, is_async=True)
inside = tile * BLOCK_Q + rows < q_len  $if bounded
$column
score = hopper.warpgroup_mma_wait(1, [score])
$visible
visible &= present[:, None]  $if border
$score_mod
lse = stats.index(slot * 3).reshape([BLOCK_Q]).load(ROWS)
factor = stats.index(slot * 3 + 1).reshape([BLOCK_Q]).load(ROWS)
p = gl.exp2($exponent - lse[None, :]) * factor[None, :]
p = gl.where(visible, p, 0.0)  $if border
dp = hopper.warpgroup_mma_wait(0, [dp])
$dm = p * dp
$derivative
ds = $ds.to(queries.dtype)
pair = n & 1
weights_in.index(2 * pair + half).store(ds)
hopper.fence_async_shared()
mbarrier.arrive(ds_full.index(pair), count=1)
weights = gl.convert_layout(p.to(queries.dtype), gl.DotOperandLayout(0, SUMS, 2))
dv = hopper.warpgroup_mma(weights, dout, dv, is_async=True)
dk = hopper.warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, SUMS, 2)), query, dk, is_async=True)
mbarrier.wait(ds_full.index(pair), n // 2 & 1)
dq = hopper.warpgroup_mma($part_of_weights_0, $part_of_keys_0, no_part, use_acc=False, is_async=True)
dq = hopper.warpgroup_mma($part_of_weights_1, $part_of_keys_1, dq, is_async=True)
dv = hopper.warpgroup_mma_wait(3, [dv])
mbarrier.arrive(g_free.index(slot), count=1)
dk = hopper.warpgroup_mma_wait(2, [dk])
mbarrier.arrive(q_free.index(slot), count=1)
dq = hopper.warpgroup_mma_wait(0, [dq])
mbarrier.wait(dq_free.index(half), n & 1 ^ 1)
sums.index(half).reshape([64, $part_columns]).store(dq)
hopper.fence_async_shared()
mbarrier.arrive(dq_full.index(half), count=1)
n += 1

$part convert
@triton.jit(do_not_specialize=["heads", "q_len"])
def attention_convert(
    Acc,  # float32 [batch, heads, q_len, dim], contiguous
    DQ,  # as Acc
    scale, heads, q_len,
    BLOCK_Q: tl.constexpr,
):
    head, batch = tl.program_id(1), tl.program_id(2)
    start = tl.program_id(0) * BLOCK_Q
    rows, d = tl.arange(0, BLOCK_Q), tl.arange(0, DIM)
    at = ((batch * heads + head).to(tl.int64) * q_len + start) * HEAD_DIM
    at_row = rows[:, None] * HEAD_DIM + d[None, :]
    inside = (start + rows < q_len)[:, None]$and_d
    dq = tl.load(Acc + at + at_row, mask=inside)
    tl.store(DQ + at + at_row, (dq * scale).to(DQ.dtype.element_ty), mask=inside)
