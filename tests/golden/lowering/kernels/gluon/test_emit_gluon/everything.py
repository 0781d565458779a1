"""Attention forward in Gluon, written by frisket for

    causal & same_by_batch(doc)
    softcap(50) + slope[h] * (k - q)
    seed = seed of dropout
    rate = rate of dropout

Head size 80 (values 64), float16.
attention_forward: grid (q tiles, heads, batch), tiles of 128 queries by 128 keys in 3 stages, num_warps=4 and 5 warps more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton 3.6 calls them otherwise than later versions.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

GROUP = gl.constexpr(1)
DIM = gl.constexpr(128)
DIM_V = gl.constexpr(64)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.4028234663852886e38)
INFINITY = gl.constexpr(float("inf"))


@gluon.jit
def mix(x):
    # A. Appleby, MurmurHash3 finaliser.
    x = gl.mul(x ^ (x >> 16), 0x85EBCA6B, sanitize_overflow=False)
    x = gl.mul(x ^ (x >> 13), 0xC2B2AE35, sanitize_overflow=False)
    return x ^ (x >> 16)


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
def tanh(x):
    return 1.0 - 2.0 / (1.0 + gl.exp(2.0 * x))


@gluon.jit
def seeded(x):
    return mix(gl.add(gl.cast(x, gl.uint32), 0x9E3779B9, sanitize_overflow=False))


@gluon.jit
def stirred(x, counter):
    return mix(x ^ gl.mul(gl.cast(counter, gl.uint32), 0x9E3779B1, sanitize_overflow=False))


@gluon.jit
def uniform(x):
    """24 bits as a number in [0, 1); the same on every backend."""
    return (x >> 8).to(gl.int32).to(gl.float32) * 5.9604644775390625e-08


@gluon.jit
def produce(
    Q, K, V, queries, keys, values, q_full, k_full, k_free, v_full, v_free, batch, head, kv_head, start,
    Spans, Count, entry, records,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Loads the queries of every warp group, then every tile of keys and of values into the rings, by TMA."""
    for half in gl.static_range(2):
        mbarrier.expect(q_full.index(half), Q.block_type.nbytes)
        load_tile(Q, [batch, head, start + half * (BLOCK_Q // 2), 0], q_full.index(half), queries.index(half))
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
            mbarrier.expect(k_full.index(slot), K.block_type.nbytes)
            load_tile(K, [batch, kv_head, tile * BLOCK_K, 0], k_full.index(slot), keys.index(slot))
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_full.index(slot), V.block_type.nbytes)
            load_tile(V, [batch, kv_head, tile * BLOCK_K, 0], v_full.index(slot), values.index(slot))
            n += 1


@gluon.jit
def consume(
    half: gl.constexpr, Out, outs, queries, keys, values, q_full, k_full, k_free, v_full, v_free, turns,
    Lse, Top, Low, Sinks, batch, head, place, start, scale, q_len, kv_len,
    Spans, Count, entry, records,
    b, h, q_origin, k_origin, seed, rate, doc, doc_size0, doc_size1, doc_stride0, doc_stride1, slope,
    slope_size, slope_stride,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Attention of one half of the queries: a warp group that computes while the other one's products run."""
    HALF: gl.constexpr = BLOCK_Q // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_K, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM_V, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    rows = half * HALF + gl.arange(0, HALF, ROWS)
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, SCORES))
    present = start + rows < q_len
    q = (q_origin + start + rows)[:, None]
    fixed0 = scale * 0.02
    slope_h = gl.load(slope + clamp(h, slope_size) * slope_stride).to(gl.float32)
    doc_b_q = gl.load(doc + step(b, doc_size0, doc_stride0) + clamp(q, doc_size1) * doc_stride1)
    row0 = (q - (q_origin + start)).to(gl.float32)
    # The last of the call's keys that a query may see.
    most = placed(q, k_origin, -1, kv_len - 1)
    top = gl.full([HALF], LOWEST, gl.float32, ROWS)
    total = gl.full([HALF], 0.0, gl.float32, ROWS)
    zero = gl.full([HALF, BLOCK_K], 0.0, gl.float32, SCORES)
    acc = gl.full([HALF, DIM_V], 0.0, gl.float32, SUMS)
    query = queries.index(half).reshape([HALF, DIM])
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
            key = keys.index(slot).reshape([BLOCK_K, DIM]).permute((1, 0))
            score = hopper.warpgroup_mma(query, key, zero, use_acc=False, is_async=True)
            mbarrier.arrive(turns.index(1 - half), count=1)
            score = hopper.warpgroup_mma_wait(0, [score])
            mbarrier.arrive(k_free.index(slot), count=1)
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            doc_b_k = gl.load(doc + step(b, doc_size0, doc_stride0) + clamp(k, doc_size1) * doc_stride1)
            column0 = (k - (q_origin + start)).to(gl.float32)
            # q >= k & doc[b, q] == doc[b, k]
            visible = up_to(columns[None, :], most - tile * BLOCK_K)
            visible &= doc_b_q == doc_b_k
            # 50 * tanh(score / 50) + slope[h] * (k - q)
            score = tanh(score * fixed0) * 50.0 + (column0 - row0) * slope_h
            score = gl.where(visible, score, -INFINITY)
            peak = gl.maximum(top, gl.max(score, 1) * LOG2E)
            p = gl.exp2(score * LOG2E - peak[:, None])
            rescale = gl.exp2(top - peak)
            total = total * rescale + gl.sum(p, 1)
            # random(seed, b, h, q, k) >= rate
            p = gl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, p, 0.0)
            p = p.to(Out.dtype)
            acc *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]  # of earlier records
            weights = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 2))
            top = peak
            before, before_phase = slot, phase
            n += 1
            # Partial tiles, before and behind the full ones: the mask is a predicate.
            for j in range(1, borders):
                tile = gl.where(j < left, lo + j, j - left + full_hi)
                slot, phase = n % STAGES, n // STAGES & 1
                mbarrier.wait(k_full.index(slot), phase)
                mbarrier.wait(turns.index(half), n & 1)
                key = keys.index(slot).reshape([BLOCK_K, DIM]).permute((1, 0))
                score = hopper.warpgroup_mma(query, key, zero, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(before), before_phase)
                acc = hopper.warpgroup_mma(weights, values.index(before).reshape([BLOCK_K, DIM_V]), acc, is_async=True)
                mbarrier.arrive(turns.index(1 - half), count=1)
                score = hopper.warpgroup_mma_wait(1, [score])
                mbarrier.arrive(k_free.index(slot), count=1)
                k = (k_origin + tile * BLOCK_K + columns)[None, :]
                doc_b_k = gl.load(doc + step(b, doc_size0, doc_stride0) + clamp(k, doc_size1) * doc_stride1)
                column0 = (k - (q_origin + start)).to(gl.float32)
                # q >= k & doc[b, q] == doc[b, k]
                visible = up_to(columns[None, :], most - tile * BLOCK_K)
                visible &= doc_b_q == doc_b_k
                # 50 * tanh(score / 50) + slope[h] * (k - q)
                score = tanh(score * fixed0) * 50.0 + (column0 - row0) * slope_h
                score = gl.where(visible, score, -INFINITY)
                peak = gl.maximum(top, gl.max(score, 1) * LOG2E)
                p = gl.exp2(score * LOG2E - peak[:, None])
                rescale = gl.exp2(top - peak)
                total = total * rescale + gl.sum(p, 1)
                # random(seed, b, h, q, k) >= rate
                p = gl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, p, 0.0)
                p = p.to(Out.dtype)
                mbarrier.wait(v_full.index(before), before_phase)  # again: no compiler moves the softmax past its branch
                acc = hopper.warpgroup_mma_wait(0, [acc])
                mbarrier.arrive(v_free.index(before), count=1)
                acc *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
                weights = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 2))
                top = peak
                before, before_phase = slot, phase
                n += 1
            # Full tiles: every position is visible.
            for j in range(gl.maximum(borders, 1), hi - lo):
                tile = j - borders + full_lo
                slot, phase = n % STAGES, n // STAGES & 1
                mbarrier.wait(k_full.index(slot), phase)
                mbarrier.wait(turns.index(half), n & 1)
                key = keys.index(slot).reshape([BLOCK_K, DIM]).permute((1, 0))
                score = hopper.warpgroup_mma(query, key, zero, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(before), before_phase)
                acc = hopper.warpgroup_mma(weights, values.index(before).reshape([BLOCK_K, DIM_V]), acc, is_async=True)
                mbarrier.arrive(turns.index(1 - half), count=1)
                score = hopper.warpgroup_mma_wait(1, [score])
                mbarrier.arrive(k_free.index(slot), count=1)
                k = (k_origin + tile * BLOCK_K + columns)[None, :]
                column0 = (k - (q_origin + start)).to(gl.float32)
                # 50 * tanh(score / 50) + slope[h] * (k - q)
                score = tanh(score * fixed0) * 50.0 + (column0 - row0) * slope_h
                peak = gl.maximum(top, gl.max(score, 1) * LOG2E)
                p = gl.exp2(score * LOG2E - peak[:, None])
                rescale = gl.exp2(top - peak)
                total = total * rescale + gl.sum(p, 1)
                # random(seed, b, h, q, k) >= rate
                p = gl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, p, 0.0)
                p = p.to(Out.dtype)
                mbarrier.wait(v_full.index(before), before_phase)  # again: no compiler moves the softmax past its branch
                acc = hopper.warpgroup_mma_wait(0, [acc])
                mbarrier.arrive(v_free.index(before), count=1)
                acc *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
                weights = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 2))
                top = peak
                before, before_phase = slot, phase
                n += 1
            mbarrier.wait(v_full.index(before), before_phase)
            acc = hopper.warpgroup_mma(weights, values.index(before).reshape([BLOCK_K, DIM_V]), acc, is_async=True)
            acc = hopper.warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(v_free.index(before), count=1)

    largest = gl.where(total == 0.0, -INFINITY, top * LN2)
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
    # By the product that attention_delta stores: a maximum is not joined to the sum without rounding.
    near = gl.maximum(lse * LOG2E, LOWEST)
    low = (top - near + gl.log2(total)) * LN2
    low = gl.where(empty, 0.0, low)
    weight = gl.convert_layout(rescale / (total * (1.0 - rate)), gl.SliceLayout(1, SUMS))
    out = outs.index(half)
    group_barrier()
    out.reshape([HALF, DIM_V]).store((acc * weight[:, None]).to(Out.dtype))
    hopper.fence_async_shared()
    store_tile(Out, [batch, head, start + half * HALF, 0], out)
    row_at = place.to(gl.int64) * q_len + start + rows
    gl.store(Lse + row_at, lse, mask=present)
    gl.store(Top + row_at, largest, mask=present)
    gl.store(Low + row_at, low, mask=present)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "heads", "q_len", "kv_len", "records", "b_origin", "h_origin", "q_origin", "k_origin", "seed",
        "rate", "doc_size0", "doc_size1", "slope_size", "doc_stride0",
    ]
)
def attention_forward(
    Q, K, V, Out,  # descriptors of [batch, heads, length, dim], in blocks of BLOCK_Q / 2 queries or BLOCK_K keys
    Lse,  # float32 [batch, heads, q_len], contiguous
    Top,  # the largest scores, as Lse
    Low,  # the rounding error of Lse
    Sinks,  # float32 [heads]: one more logit in the denominator
    scale, heads, q_len, kv_len,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in key tiles
    Count, Order,  # int32 [slices, rows]: records in use; rows in order of work
    SliceOf,  # int32 [batch, heads]
    records,
    b_origin, h_origin, q_origin, k_origin,  # of this call in the whole problem
    seed, rate,
    doc, doc_size0, doc_size1, doc_stride0, doc_stride1,
    slope, slope_size, slope_stride,
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
    rate = gl.cast(rate, gl.float32)
    b = b_origin + batch
    h = h_origin + head
    queries = gl.allocate_shared_memory(Q.dtype, [2] + Q.block_type.shape, Q.layout)
    outs = gl.allocate_shared_memory(Out.dtype, [2] + Out.block_type.shape, Out.layout)
    keys = gl.allocate_shared_memory(K.dtype, [STAGES] + K.block_type.shape, K.layout)
    values = gl.allocate_shared_memory(V.dtype, [STAGES] + V.block_type.shape, V.layout)
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
                gl.constexpr(0), Out, outs, queries, keys, values, q_full, k_full, k_free, v_full, v_free, turns,
                Lse, Top, Low, Sinks, batch, head, place, start, scale, q_len, kv_len,
                Spans, Count, entry, records,
                b, h, q_origin, k_origin, seed, rate, doc, doc_size0, doc_size1, doc_stride0, doc_stride1, slope,
                slope_size, slope_stride,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
            (consume, (
                gl.constexpr(1), Out, outs, queries, keys, values, q_full, k_full, k_free, v_full, v_free, turns,
                Lse, Top, Low, Sinks, batch, head, place, start, scale, q_len, kv_len,
                Spans, Count, entry, records,
                b, h, q_origin, k_origin, seed, rate, doc, doc_size0, doc_size1, doc_stride0, doc_stride1, slope,
                slope_size, slope_stride,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
            (produce, (
                Q, K, V, queries, keys, values, q_full, k_full, k_free, v_full, v_free, batch, head, kv_head, start,
                Spans, Count, entry, records,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )
