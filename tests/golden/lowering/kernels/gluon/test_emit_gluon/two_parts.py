"""Attention forward in Gluon, written by frisket for

    causal & same_by_batch(doc)

Head size 192 (values 160), bfloat16, 4 query heads to a key head.
attention_forward: grid (q tiles, heads, batch), tiles of 128 queries by 64 keys in 3 stages, num_warps=4 and 5 warps more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton 3.6 calls them otherwise than later versions.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

GROUP = gl.constexpr(4)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.4028234663852886e38)
INFINITY = gl.constexpr(float("inf"))


@gluon.jit
def step(i, size, stride):
    return gl.minimum(gl.maximum(i, 0), size - 1).to(gl.int64) * stride


@gluon.jit
def clamp(i, size):
    return gl.minimum(gl.maximum(i, 0), size - 1)


@gluon.jit
def placed(end, origin, first, last):
    """The end of what a row sees, counted from the call's first position, as far as it is in first..last."""
    return (gl.minimum(gl.maximum(end, origin + first), origin + last) - origin).to(gl.int32)


@gluon.jit
def up_to(columns, most):
    """Whether columns of a tile are at most `most`. Bits 1 and 2 of a column tell the threads of a warp apart where
    products leave their results, and the others are constants of a thread's registers: apart, a comparison takes one
    instruction."""
    return (columns & ~6) <= most - (columns & 6)


@gluon.jit
def produce(
    Q0, Q1, K0, K1, V0, V1, queries0, queries1, keys0, keys1, values0, values1, q_full, k_full, k_free, v_full, v_free, batch, head, kv_head, start,
    Spans, Count, entry, records,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Loads the queries of every warp group, then every tile of keys and of values into the rings, by TMA."""
    for half in gl.static_range(2):
        mbarrier.expect(q_full.index(half), Q0.block_type.nbytes + Q1.block_type.nbytes)
        load_tile(Q0, [batch, head, start + half * (BLOCK_Q // 2), 0], q_full.index(half), queries0.index(half))
        load_tile(Q1, [batch, head, start + half * (BLOCK_Q // 2), 128], q_full.index(half), queries1.index(half))
    n = 0  # tiles so far
    for i in range(gl.load(Count + entry)):
        record = Spans + (entry.to(gl.int64) * records + i) * 4
        lo, full_lo = gl.load(record), gl.load(record + 1)
        full_hi, hi = gl.load(record + 2), gl.load(record + 3)
        left = full_lo - lo
        borders = left + hi - full_hi
        for j in range(hi - lo):
            tile = gl.where(j < left, lo + j, j - left + full_hi)
            tile = gl.where(j < borders, tile, j - borders + full_lo)
            slot = n % STAGES
            phase = n // STAGES & 1 ^ 1
            mbarrier.wait(k_free.index(slot), phase)
            mbarrier.expect(k_full.index(slot), K0.block_type.nbytes + K1.block_type.nbytes)
            load_tile(K0, [batch, kv_head, tile * BLOCK_K, 0], k_full.index(slot), keys0.index(slot))
            load_tile(K1, [batch, kv_head, tile * BLOCK_K, 128], k_full.index(slot), keys1.index(slot))
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_full.index(slot), V0.block_type.nbytes + V1.block_type.nbytes)
            load_tile(V0, [batch, kv_head, tile * BLOCK_K, 0], v_full.index(slot), values0.index(slot))
            load_tile(V1, [batch, kv_head, tile * BLOCK_K, 128], v_full.index(slot), values1.index(slot))
            n += 1


@gluon.jit
def consume(
    half: gl.constexpr, Out0, Out1, outs0, outs1, queries0, queries1, keys0, keys1, values0, values1, q_full, k_full, k_free, v_full, v_free, turns,
    Lse, Sinks, batch, head, place, start, scale, q_len, kv_len,
    Spans, Count, entry, records,
    b, q_origin, k_origin, doc, doc_size0, doc_size1, doc_stride0, doc_stride1,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Attention of one half of the queries: a warp group that computes while the other one's products run."""
    HALF: gl.constexpr = BLOCK_Q // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_K, 16])
    SUMS0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    SUMS1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    rows = half * HALF + gl.arange(0, HALF, ROWS)
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, SCORES))
    present = start + rows < q_len
    q = (q_origin + start + rows)[:, None]
    doc_b_q = gl.load(doc + step(b, doc_size0, doc_stride0) + clamp(q, doc_size1) * doc_stride1)
    # The last of the call's keys that a query may see.
    most = placed(q, k_origin, -1, kv_len - 1)
    unit = scale * LOG2E
    top = gl.full([HALF], LOWEST, gl.float32, ROWS)
    total = gl.full([HALF], 0.0, gl.float32, ROWS)
    zero = gl.full([HALF, BLOCK_K], 0.0, gl.float32, SCORES)
    acc0 = gl.full([HALF, 128], 0.0, gl.float32, SUMS0)
    acc1 = gl.full([HALF, 32], 0.0, gl.float32, SUMS1)
    query0 = queries0.index(half).reshape([HALF, 128])
    query1 = queries1.index(half).reshape([HALF, 64])
    mbarrier.wait(q_full.index(half), 0)
    n = 0  # tiles so far
    for i in range(gl.load(Count + entry)):
        record = Spans + (entry.to(gl.int64) * records + i) * 4
        lo, full_lo = gl.load(record), gl.load(record + 1)
        full_hi, hi = gl.load(record + 2), gl.load(record + 3)
        left = full_lo - lo
        borders = left + hi - full_hi
        if lo < hi:
            # The first tile, with the mask even where it shows all.
            tile = gl.where(left > 0, lo, gl.where(borders > 0, full_hi, full_lo))
            slot, phase = n % STAGES, n // STAGES & 1
            mbarrier.wait(k_full.index(slot), phase)
            mbarrier.wait(turns.index(half), n & 1)
            key0 = keys0.index(slot).reshape([BLOCK_K, 128]).permute((1, 0))
            score = hopper.warpgroup_mma(query0, key0, zero, use_acc=False, is_async=True)
            key1 = keys1.index(slot).reshape([BLOCK_K, 64]).permute((1, 0))
            score = hopper.warpgroup_mma(query1, key1, score, is_async=True)
            mbarrier.arrive(turns.index(1 - half), count=1)
            score = hopper.warpgroup_mma_wait(0, [score])
            mbarrier.arrive(k_free.index(slot), count=1)
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            doc_b_k = gl.load(doc + step(b, doc_size0, doc_stride0) + clamp(k, doc_size1) * doc_stride1)
            # q >= k & doc[b, q] == doc[b, k]
            visible = up_to(columns[None, :], most - tile * BLOCK_K)
            visible &= doc_b_q == doc_b_k
            score = gl.where(visible, score, -INFINITY)
            peak = gl.maximum(top, gl.max(score, 1) * unit)
            p = gl.exp2(score * unit - peak[:, None])
            rescale = gl.exp2(top - peak)
            total = total * rescale + gl.sum(p, 1)
            p = p.to(Out0.dtype)
            acc0 *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS0))[:, None]  # of earlier records
            weights0 = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS0, 2))
            acc1 *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS1))[:, None]  # of earlier records
            weights1 = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS1, 2))
            top = peak
            before, before_phase = slot, phase
            n += 1
            # Partial tiles, before and behind the full ones: the mask is a predicate.
            for j in range(1, borders):
                tile = gl.where(j < left, lo + j, j - left + full_hi)
                slot, phase = n % STAGES, n // STAGES & 1
                mbarrier.wait(k_full.index(slot), phase)
                mbarrier.wait(turns.index(half), n & 1)
                key0 = keys0.index(slot).reshape([BLOCK_K, 128]).permute((1, 0))
                score = hopper.warpgroup_mma(query0, key0, zero, use_acc=False, is_async=True)
                key1 = keys1.index(slot).reshape([BLOCK_K, 64]).permute((1, 0))
                score = hopper.warpgroup_mma(query1, key1, score, is_async=True)
                mbarrier.wait(v_full.index(before), before_phase)
                acc0 = hopper.warpgroup_mma(weights0, values0.index(before).reshape([BLOCK_K, 128]), acc0, is_async=True)
                acc1 = hopper.warpgroup_mma(weights1, values1.index(before).reshape([BLOCK_K, 32]), acc1, is_async=True)
                mbarrier.arrive(turns.index(1 - half), count=1)
                score = hopper.warpgroup_mma_wait(2, [score])
                mbarrier.arrive(k_free.index(slot), count=1)
                k = (k_origin + tile * BLOCK_K + columns)[None, :]
                doc_b_k = gl.load(doc + step(b, doc_size0, doc_stride0) + clamp(k, doc_size1) * doc_stride1)
                # q >= k & doc[b, q] == doc[b, k]
                visible = up_to(columns[None, :], most - tile * BLOCK_K)
                visible &= doc_b_q == doc_b_k
                score = gl.where(visible, score, -INFINITY)
                peak = gl.maximum(top, gl.max(score, 1) * unit)
                p = gl.exp2(score * unit - peak[:, None])
                rescale = gl.exp2(top - peak)
                total = total * rescale + gl.sum(p, 1)
                p = p.to(Out0.dtype)
                mbarrier.wait(v_full.index(before), before_phase)  # again: no compiler moves the softmax past its branch
                acc0, acc1 = hopper.warpgroup_mma_wait(0, [acc0, acc1])
                mbarrier.arrive(v_free.index(before), count=1)
                acc0 *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS0))[:, None]
                acc1 *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS1))[:, None]
                weights0 = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS0, 2))
                weights1 = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS1, 2))
                top = peak
                before, before_phase = slot, phase
                n += 1
            # Full tiles: every position is visible.
            for j in range(gl.maximum(borders, 1), hi - lo):
                slot, phase = n % STAGES, n // STAGES & 1
                mbarrier.wait(k_full.index(slot), phase)
                mbarrier.wait(turns.index(half), n & 1)
                key0 = keys0.index(slot).reshape([BLOCK_K, 128]).permute((1, 0))
                score = hopper.warpgroup_mma(query0, key0, zero, use_acc=False, is_async=True)
                key1 = keys1.index(slot).reshape([BLOCK_K, 64]).permute((1, 0))
                score = hopper.warpgroup_mma(query1, key1, score, is_async=True)
                mbarrier.wait(v_full.index(before), before_phase)
                acc0 = hopper.warpgroup_mma(weights0, values0.index(before).reshape([BLOCK_K, 128]), acc0, is_async=True)
                acc1 = hopper.warpgroup_mma(weights1, values1.index(before).reshape([BLOCK_K, 32]), acc1, is_async=True)
                mbarrier.arrive(turns.index(1 - half), count=1)
                score = hopper.warpgroup_mma_wait(2, [score])
                mbarrier.arrive(k_free.index(slot), count=1)
                peak = gl.maximum(top, gl.max(score, 1) * unit)
                p = gl.exp2(score * unit - peak[:, None])
                rescale = gl.exp2(top - peak)
                total = total * rescale + gl.sum(p, 1)
                p = p.to(Out0.dtype)
                mbarrier.wait(v_full.index(before), before_phase)  # again: no compiler moves the softmax past its branch
                acc0, acc1 = hopper.warpgroup_mma_wait(0, [acc0, acc1])
                mbarrier.arrive(v_free.index(before), count=1)
                acc0 *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS0))[:, None]
                acc1 *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS1))[:, None]
                weights0 = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS0, 2))
                weights1 = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS1, 2))
                top = peak
                before, before_phase = slot, phase
                n += 1
            mbarrier.wait(v_full.index(before), before_phase)
            acc0 = hopper.warpgroup_mma(weights0, values0.index(before).reshape([BLOCK_K, 128]), acc0, is_async=True)
            acc1 = hopper.warpgroup_mma(weights1, values1.index(before).reshape([BLOCK_K, 32]), acc1, is_async=True)
            acc0, acc1 = hopper.warpgroup_mma_wait(0, [acc0, acc1])
            mbarrier.arrive(v_free.index(before), count=1)

    # The sink is one more logit, without a value.
    sink = gl.load(Sinks + head) * LOG2E
    peak = gl.maximum(top, sink)
    rescale = gl.exp2(top - peak)
    total = total * rescale + gl.exp2(sink - peak)
    top = peak
    # A row without a visible key gives 0, and lse -inf.
    empty = total == 0.0
    total = gl.where(empty, 1.0, total)
    lse = gl.where(empty, -INFINITY, (top + gl.log2(total)) * LN2)
    weight0 = gl.convert_layout(rescale / total, gl.SliceLayout(1, SUMS0))
    out0 = outs0.index(half)
    weight1 = gl.convert_layout(rescale / total, gl.SliceLayout(1, SUMS1))
    out1 = outs1.index(half)
    group_barrier()
    out0.reshape([HALF, 128]).store((acc0 * weight0[:, None]).to(Out0.dtype))
    out1.reshape([HALF, 32]).store((acc1 * weight1[:, None]).to(Out1.dtype))
    hopper.fence_async_shared()
    store_tile(Out0, [batch, head, start + half * HALF, 0], out0)
    store_tile(Out1, [batch, head, start + half * HALF, 128], out1)
    row_at = place.to(gl.int64) * q_len + start + rows
    gl.store(Lse + row_at, lse, mask=present)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "heads", "q_len", "kv_len", "records", "b_origin", "q_origin", "k_origin", "doc_size0", "doc_size1",
        "doc_stride0",
    ]
)
def attention_forward(
    Q0, Q1, K0, K1, V0, V1, Out0, Out1,  # descriptors of [batch, heads, length, dim], in blocks of BLOCK_Q / 2 queries or BLOCK_K keys
    # 0 and 1: blocks of the first and of the second part of a head
    Lse,  # float32 [batch, heads, q_len], contiguous
    Sinks,  # float32 [heads]: one more logit in the denominator
    scale, heads, q_len, kv_len,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in key tiles
    Count, Order,  # int32 [slices, rows]: records in use; rows in order of work
    SliceOf,  # int32 [batch, heads]
    records,
    b_origin, q_origin, k_origin,  # of this call in the whole problem
    doc, doc_size0, doc_size1, doc_stride0, doc_stride1,
    ORIGIN_PER_BATCH: gl.constexpr,  # q_origin and k_origin are int32 [batch]
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,  # powers of two
    STAGES: gl.constexpr,  # tiles of keys, and of values, that are in shared memory at once
):
    head, batch = gl.program_id(1), gl.program_id(2)
    place = batch * heads + head
    distinct = gl.load(SliceOf + place) * gl.num_programs(0)
    row = gl.load(Order + distinct + gl.program_id(0))  # longest first
    entry = distinct + row
    start = row * BLOCK_Q
    kv_head = head // GROUP
    if ORIGIN_PER_BATCH:
        q_origin = gl.load(q_origin + batch)
        k_origin = gl.load(k_origin + batch)
    b = b_origin + batch
    queries0 = gl.allocate_shared_memory(Q0.dtype, [2] + Q0.block_type.shape, Q0.layout)
    queries1 = gl.allocate_shared_memory(Q1.dtype, [2] + Q1.block_type.shape, Q1.layout)
    outs0 = queries0  # the queries have been read by then
    outs1 = gl.allocate_shared_memory(Out1.dtype, [2] + Out1.block_type.shape, Out1.layout)
    keys0 = gl.allocate_shared_memory(K0.dtype, [STAGES] + K0.block_type.shape, K0.layout)
    keys1 = gl.allocate_shared_memory(K1.dtype, [STAGES] + K1.block_type.shape, K1.layout)
    values0 = gl.allocate_shared_memory(V0.dtype, [STAGES] + V0.block_type.shape, V0.layout)
    values1 = gl.allocate_shared_memory(V1.dtype, [STAGES] + V1.block_type.shape, V1.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(q_full.index(half), count=1)
        mbarrier.init(turns.index(half), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_free.index(slot), count=2)  # both halves have read it
        mbarrier.init(v_free.index(slot), count=2)
    mbarrier.arrive(turns.index(0), count=1)
    gl.warp_specialize(
        [
            (consume, (
                gl.constexpr(0), Out0, Out1, outs0, outs1, queries0, queries1, keys0, keys1, values0, values1, q_full, k_full, k_free, v_full, v_free, turns,
                Lse, Sinks, batch, head, place, start, scale, q_len, kv_len,
                Spans, Count, entry, records,
                b, q_origin, k_origin, doc, doc_size0, doc_size1, doc_stride0, doc_stride1,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
            (consume, (
                gl.constexpr(1), Out0, Out1, outs0, outs1, queries0, queries1, keys0, keys1, values0, values1, q_full, k_full, k_free, v_full, v_free, turns,
                Lse, Sinks, batch, head, place, start, scale, q_len, kv_len,
                Spans, Count, entry, records,
                b, q_origin, k_origin, doc, doc_size0, doc_size1, doc_stride0, doc_stride1,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
            (produce, (
                Q0, Q1, K0, K1, V0, V1, queries0, queries1, keys0, keys1, values0, values1, q_full, k_full, k_free, v_full, v_free, batch, head, kv_head, start,
                Spans, Count, entry, records,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )
