"""Attention backward in Gluon, written by frisket for

    causal

Head size 128, bfloat16.
attention_backward: grid (key tiles, key heads, batch), tiles of 128 keys by 64 queries in 2 stages, num_warps=4 and 6 warps more.
attention_delta: grid (query tiles, heads, batch), tiles of 32 queries, num_warps=4.
attention_convert: grid (query tiles, heads, batch), tiles of 32 queries, num_warps=4.
"""

import triton
from triton import language as tl
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

HEAD_DIM = gl.constexpr(128)
DIM = gl.constexpr(128)
LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-3.4028234663852886e38)
INFINITY = gl.constexpr(float("inf"))


@gluon.jit
def placed(end, origin, first, last):
    """The end of what a row sees, counted from the call's first position, as far as it is in first..last."""
    return (gl.minimum(gl.maximum(end, origin + first), origin + last) - origin).to(gl.int32)


@gluon.jit
def one_of(columns, least, many):
    """Whether columns of a tile are among `many` from `least` on, in two instructions: bits 1 and 2 stand apart, as
    in `up_to`."""
    return ((columns & ~6) - (least - (columns & 6))).to(gl.uint32) < many.to(gl.uint32)


@gluon.jit
def feed(
    Q, K, V, DOut, Stats, queries, douts, stats, keys, values, q_full, q_free, g_full, g_free, kv_full,
    batch, head, start, heads, q_len, kv_len,
    first, count,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Loads the keys and values of both warp groups, then every tile of queries and of the cotangents of outputs with
    the numbers of attention_delta into rings, by TMA."""
    for half in gl.static_range(2):
        mbarrier.expect(kv_full.index(half), K.block_type.nbytes + V.block_type.nbytes)
        load_tile(K, [batch, head, start + half * (BLOCK_K // 2), 0], kv_full.index(half), keys.index(half))
        load_tile(V, [batch, head, start + half * (BLOCK_K // 2), 0], kv_full.index(half), values.index(half))
    n = 0  # tiles so far
    for i in range(count):
        record = first + 4 * i
        lo, full_lo = gl.load(record), gl.load(record + 1)
        full_hi, hi = gl.load(record + 2), gl.load(record + 3)
        full_lo = gl.where(start + BLOCK_K > kv_len, hi, full_lo)
        full_hi = gl.where(start + BLOCK_K > kv_len, hi, full_hi)
        left = full_lo - lo
        borders = left + hi - full_hi
        for j in range(hi - lo):
            tile = gl.where(j < left, lo + j, j - left + full_hi)
            tile = gl.where(j < borders, tile, j - borders + full_lo)
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
    Acc, sums, dq_full, dq_free, batch, head, start, heads, q_len, kv_len,
    first, count,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
):
    """Adds every tile of dq to global memory, the part of one warp group after that of the other."""
    n = 0  # tiles so far
    for i in range(count):
        record = first + 4 * i
        lo, full_lo = gl.load(record), gl.load(record + 1)
        full_hi, hi = gl.load(record + 2), gl.load(record + 3)
        full_lo = gl.where(start + BLOCK_K > kv_len, hi, full_lo)
        full_hi = gl.where(start + BLOCK_K > kv_len, hi, full_hi)
        left = full_lo - lo
        borders = left + hi - full_hi
        for j in range(hi - lo):
            tile = gl.where(j < left, lo + j, j - left + full_hi)
            tile = gl.where(j < borders, tile, j - borders + full_lo)
            for half in gl.static_range(2):
                mbarrier.wait(dq_full.index(half), n & 1)
                add_tile(Acc, [batch, head, tile * BLOCK_Q, half * 64], sums.index(half))
            tma.store_wait(0)
            for half in gl.static_range(2):
                mbarrier.arrive(dq_free.index(half), count=1)
            n += 1


@gluon.jit
def differentiate(
    half: gl.constexpr, DK, DV, queries, douts, stats, keys, values, weights_in, sums,
    q_full, q_free, g_full, g_free, kv_full, ds_full, dq_full, dq_free,
    batch, head, start, scale, heads, q_len, kv_len,
    first, count,
    q_origin, k_origin,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """dk and dv of one half of the keys, and with the other half's weights one part of every tile of dq."""
    HALF: gl.constexpr = BLOCK_K // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_Q, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    ROWS: gl.constexpr = gl.SliceLayout(0, SCORES)
    rows = gl.arange(0, BLOCK_Q, ROWS)
    columns = half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
    present = start + columns < kv_len
    unit = scale * LOG2E
    zero = gl.full([HALF, BLOCK_Q], 0.0, gl.float32, SCORES)
    no_part = gl.full([64, 64], 0.0, gl.float32, PART)
    dk = gl.full([HALF, DIM], 0.0, gl.float32, SUMS)
    dv = gl.full([HALF, DIM], 0.0, gl.float32, SUMS)
    mbarrier.wait(kv_full.index(half), 0)
    mbarrier.wait(kv_full.index(1 - half), 0)
    n = 0  # tiles so far
    k = (k_origin + start + columns)[:, None]
    # The first of the call's queries that a key may see, and the number of those up to the last.
    least = placed(k, q_origin, 0, q_len)
    many = gl.maximum(q_len - 1 + 1 - least, 0)
    for i in range(count):
        record = first + 4 * i
        lo, full_lo = gl.load(record), gl.load(record + 1)
        full_hi, hi = gl.load(record + 2), gl.load(record + 3)
        full_lo = gl.where(start + BLOCK_K > kv_len, hi, full_lo)
        full_hi = gl.where(start + BLOCK_K > kv_len, hi, full_hi)
        left = full_lo - lo
        borders = left + hi - full_hi
        # Partial tiles, before and behind the full ones: the mask is a predicate.
        for j in range(borders):
            tile = gl.where(j < left, lo + j, j - left + full_hi)
            tile = gl.where(j < borders, tile, j - borders + full_lo)
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
            score = hopper.warpgroup_mma_wait(1, [score])
            # q >= k
            visible = one_of(rows[None, :], least - tile * BLOCK_Q, many)
            visible &= present[:, None]
            lse = stats.index(slot * 3).reshape([BLOCK_Q]).load(ROWS)
            factor = stats.index(slot * 3 + 1).reshape([BLOCK_Q]).load(ROWS)
            p = gl.exp2(score * unit - lse[None, :]) * factor[None, :]
            p = gl.where(visible, p, 0.0)
            dp = hopper.warpgroup_mma_wait(0, [dp])
            ds = p * dp
            ds = ds.to(queries.dtype)
            pair = n & 1
            weights_in.index(2 * pair + half).store(ds)
            hopper.fence_async_shared()
            mbarrier.arrive(ds_full.index(pair), count=1)
            weights = gl.convert_layout(p.to(queries.dtype), gl.DotOperandLayout(0, SUMS, 2))
            dv = hopper.warpgroup_mma(weights, dout, dv, is_async=True)
            dk = hopper.warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, SUMS, 2)), query, dk, is_async=True)
            mbarrier.wait(ds_full.index(pair), n // 2 & 1)
            dq = hopper.warpgroup_mma(weights_in.index(2 * pair + 0).permute((1, 0)), keys.index(0 + far).reshape([HALF, DIM]).slice(half * 64, 64, dim=1), no_part, use_acc=False, is_async=True)
            dq = hopper.warpgroup_mma(weights_in.index(2 * pair + 1).permute((1, 0)), keys.index(1 + far).reshape([HALF, DIM]).slice(half * 64, 64, dim=1), dq, is_async=True)
            dv = hopper.warpgroup_mma_wait(3, [dv])
            mbarrier.arrive(g_free.index(slot), count=1)
            dk = hopper.warpgroup_mma_wait(2, [dk])
            mbarrier.arrive(q_free.index(slot), count=1)
            dq = hopper.warpgroup_mma_wait(0, [dq])
            mbarrier.wait(dq_free.index(half), n & 1 ^ 1)
            sums.index(half).reshape([64, 64]).store(dq)
            hopper.fence_async_shared()
            mbarrier.arrive(dq_full.index(half), count=1)
            n += 1
        # Full tiles: every position is visible.
        for j in range(borders, hi - lo):
            tile = gl.where(j < left, lo + j, j - left + full_hi)
            tile = gl.where(j < borders, tile, j - borders + full_lo)
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
            score = hopper.warpgroup_mma_wait(1, [score])
            lse = stats.index(slot * 3).reshape([BLOCK_Q]).load(ROWS)
            factor = stats.index(slot * 3 + 1).reshape([BLOCK_Q]).load(ROWS)
            p = gl.exp2(score * unit - lse[None, :]) * factor[None, :]
            dp = hopper.warpgroup_mma_wait(0, [dp])
            ds = p * dp
            ds = ds.to(queries.dtype)
            pair = n & 1
            weights_in.index(2 * pair + half).store(ds)
            hopper.fence_async_shared()
            mbarrier.arrive(ds_full.index(pair), count=1)
            weights = gl.convert_layout(p.to(queries.dtype), gl.DotOperandLayout(0, SUMS, 2))
            dv = hopper.warpgroup_mma(weights, dout, dv, is_async=True)
            dk = hopper.warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, SUMS, 2)), query, dk, is_async=True)
            mbarrier.wait(ds_full.index(pair), n // 2 & 1)
            dq = hopper.warpgroup_mma(weights_in.index(2 * pair + 0).permute((1, 0)), keys.index(0 + far).reshape([HALF, DIM]).slice(half * 64, 64, dim=1), no_part, use_acc=False, is_async=True)
            dq = hopper.warpgroup_mma(weights_in.index(2 * pair + 1).permute((1, 0)), keys.index(1 + far).reshape([HALF, DIM]).slice(half * 64, 64, dim=1), dq, is_async=True)
            dv = hopper.warpgroup_mma_wait(3, [dv])
            mbarrier.arrive(g_free.index(slot), count=1)
            dk = hopper.warpgroup_mma_wait(2, [dk])
            mbarrier.arrive(q_free.index(slot), count=1)
            dq = hopper.warpgroup_mma_wait(0, [dq])
            mbarrier.wait(dq_free.index(half), n & 1 ^ 1)
            sums.index(half).reshape([64, 64]).store(dq)
            hopper.fence_async_shared()
            mbarrier.arrive(dq_full.index(half), count=1)
            n += 1
    own = half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, SUMS))
    d = gl.arange(0, DIM, gl.SliceLayout(0, SUMS))
    at = own[:, None] * HEAD_DIM + d[None, :]
    there = (start + own < kv_len)[:, None]
    gl.store(DK + at, (dk * scale).to(queries.dtype), mask=there)
    gl.store(DV + at, dv.to(queries.dtype), mask=there)


@gluon.jit(do_not_specialize=["heads", "q_len", "kv_len", "records", "q_origin", "k_origin"])
def attention_backward(
    Q, K, V, DOut,  # descriptors of [batch, heads, length, dim], in blocks of BLOCK_Q queries or BLOCK_K / 2 keys
    Stats,  # descriptor of float32 [3, batch, heads, length], in blocks of BLOCK_Q: numbers of attention_delta
    Acc,  # descriptor of float32 [batch, heads, q_len, dim], in blocks of a warp group's part: begins as 0
    DK, DV,  # [batch, key heads, kv_len, dim], contiguous
    scale, heads, q_len, kv_len,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in query tiles
    Count, Order,  # int32 [slices, rows]: records in use; rows in order of work
    SliceOf,  # int32 [batch, heads]
    records,
    q_origin, k_origin,  # of this call in the whole problem
    ORIGIN_PER_BATCH: gl.constexpr,  # q_origin and k_origin are int32 [batch]
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,  # powers of two
    STAGES: gl.constexpr,  # tiles of queries, and of cotangents, that are in shared memory at once
):
    head, batch = gl.program_id(1), gl.program_id(2)
    place = gl.load(SliceOf + batch * heads + head)
    row = gl.load(Order + place * gl.num_programs(0) + gl.program_id(0))  # longest first
    start = row * BLOCK_K
    entry = gl.load(SliceOf + batch * heads + head) * gl.cdiv(kv_len, BLOCK_K) + start // BLOCK_K
    first = Spans + (entry * records).to(gl.int64) * 4
    count = gl.load(Count + entry)
    of_keys = ((batch * heads + head).to(gl.int64) * kv_len + start) * HEAD_DIM
    DK += of_keys
    DV += of_keys
    if ORIGIN_PER_BATCH:
        q_origin = gl.load(q_origin + batch)
        k_origin = gl.load(k_origin + batch)
    keys = gl.allocate_shared_memory(K.dtype, [2] + K.block_type.shape, K.layout)
    values = gl.allocate_shared_memory(V.dtype, [2] + V.block_type.shape, V.layout)
    queries = gl.allocate_shared_memory(Q.dtype, [STAGES] + Q.block_type.shape, Q.layout)
    douts = gl.allocate_shared_memory(DOut.dtype, [STAGES] + DOut.block_type.shape, DOut.layout)
    stats = gl.allocate_shared_memory(Stats.dtype, [STAGES * 3] + Stats.block_type.shape, Stats.layout)
    # ds of both halves of the keys, for two tiles: who writes one knows that both groups are done with the one before.
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K // 2, BLOCK_Q], K.dtype)
    weights_in = gl.allocate_shared_memory(K.dtype, [4, BLOCK_K // 2, BLOCK_Q], WEIGHTS)
    sums = gl.allocate_shared_memory(Acc.dtype, [2] + Acc.block_type.shape, Acc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dq_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    g_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    g_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
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
            (differentiate, (
                gl.constexpr(0), DK, DV, queries, douts, stats, keys, values, weights_in, sums,
                q_full, q_free, g_full, g_free, kv_full, ds_full, dq_full, dq_free,
                batch, head, start, scale, heads, q_len, kv_len,
                first, count,
                q_origin, k_origin,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
            (differentiate, (
                gl.constexpr(1), DK, DV, queries, douts, stats, keys, values, weights_in, sums,
                q_full, q_free, g_full, g_free, kv_full, ds_full, dq_full, dq_free,
                batch, head, start, scale, heads, q_len, kv_len,
                first, count,
                q_origin, k_origin,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
            (feed, (
                Q, K, V, DOut, Stats, queries, douts, stats, keys, values, q_full, q_free, g_full, g_free, kv_full,
                batch, head, start, heads, q_len, kv_len,
                first, count,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
            (add_dq, (
                Acc, sums, dq_full, dq_free, batch, head, start, heads, q_len, kv_len,
                first, count,
                BLOCK_Q, BLOCK_K,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


@triton.jit(do_not_specialize=["heads", "q_len", "length"])
def attention_delta(
    Out, DOut,  # [batch, heads, q_len, dim], any strides
    Lse, Low, DLse,  # float32 [batch, heads, q_len], contiguous
    Stats,  # float32 [3, batch, heads, length]: lse in log2, a factor, rowsum(dout * out) - dlse
    stride_ob, stride_oh, stride_os, stride_od,
    stride_gb, stride_gh, stride_gs, stride_gd,
    heads, q_len, length,
    BLOCK_Q: tl.constexpr,  # powers of two
):
    head, batch = tl.program_id(1), tl.program_id(2)
    start = tl.program_id(0) * BLOCK_Q
    rows = tl.arange(0, BLOCK_Q)
    d = tl.arange(0, DIM)
    present = start + rows < q_len
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + start.to(tl.int64) * stride_os
    out = tl.load(
        Out + rows[:, None] * stride_os + d[None, :] * stride_od,
        mask=present[:, None], other=0.0,
    ).to(tl.float32)
    DOut += batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh + start.to(tl.int64) * stride_gs
    dout = tl.load(
        DOut + rows[:, None] * stride_gs + d[None, :] * stride_gd,
        mask=present[:, None], other=0.0,
    ).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    at = (batch * heads + head).to(tl.int64) * q_len + start + rows
    delta -= tl.load(DLse + at, mask=present, other=0.0)
    lse = tl.load(Lse + at, mask=present, other=0.0)
    # A row that sees no key has no gradient, even where dout is NaN.
    empty = lse == -INFINITY
    delta, lse = tl.where(empty, 0.0, delta), tl.where(empty, 0.0, lse)
    low = tl.load(Low + at, mask=present, other=0.0)
    # A weight is exp2(score - lse) * factor: the factor makes up for the rounding of lse.
    near = tl.maximum(lse * LOG2E, LOWEST)  # the forward's product: a maximum is not joined to the sum
    lse = near + low * LOG2E
    factor = tl.exp2(lse - near - low * LOG2E)
    # Rows past the queries up to `length` are 0: their weights are, and no NaN is to be multiplied by them.
    at = (batch * heads + head).to(tl.int64) * length + start + rows
    plane = (tl.num_programs(2) * heads).to(tl.int64) * length
    tl.store(Stats + at, lse, mask=start + rows < length)
    tl.store(Stats + at + plane, factor, mask=start + rows < length)
    tl.store(Stats + at + 2 * plane, delta, mask=start + rows < length)


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
    inside = (start + rows < q_len)[:, None]
    dq = tl.load(Acc + at + at_row, mask=inside)
    tl.store(DQ + at + at_row, (dq * scale).to(DQ.dtype.element_ty), mask=inside)
