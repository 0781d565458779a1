"""Attention forward in Gluon, written by frisket for

    causal & window(w)
    s0 = w

Head size 128, bfloat16, 8 query heads to a key head.
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

GROUP = gl.constexpr(8)
DIM = gl.constexpr(128)
DIM_V = gl.constexpr(128)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
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
def produce(
    Q, K, V, queries, keys, values, q_full, k_full, k_free, v_full, v_free, batch, head, kv_head, start,
    lo, full_lo, full_hi, hi,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Loads the queries of every warp group, then every tile of keys and of values into the rings, by TMA."""
    for half in gl.static_range(2):
        mbarrier.expect(q_full.index(half), Q.block_type.nbytes)
        load_tile(Q, [batch, head, start + half * (BLOCK_Q // 2), 0], q_full.index(half), queries.index(half))
    n = 0  # tiles so far
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
    Lse, batch, head, place, start, scale, q_len, kv_len,
    lo, full_lo, full_hi, hi,
    q_origin, k_origin, s0,
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
    row0 = q - s0 + 1
    # The first of the call's keys that a query may see, and the number of those up to the last.
    least = placed(row0, k_origin, 0, kv_len)
    many = gl.maximum(placed(q, k_origin, -1, kv_len - 1) + 1 - least, 0)
    unit = scale * LOG2E
    top = gl.full([HALF], LOWEST, gl.float32, ROWS)
    total = gl.full([HALF], 0.0, gl.float32, ROWS)
    zero = gl.full([HALF, BLOCK_K], 0.0, gl.float32, SCORES)
    acc = gl.full([HALF, DIM_V], 0.0, gl.float32, SUMS)
    query = queries.index(half).reshape([HALF, DIM])
    mbarrier.wait(q_full.index(half), 0)
    n = 0  # tiles so far
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
        # q >= k & q - k < s0
        visible = one_of(columns[None, :], least - tile * BLOCK_K, many)
        score = gl.where(visible, score, -INFINITY)
        peak = gl.maximum(top, gl.max(score, 1) * unit)
        p = gl.exp2(score * unit - peak[:, None])
        rescale = gl.exp2(top - peak)
        total = total * rescale + gl.sum(p, 1)
        p = p.to(Out.dtype)
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
            # q >= k & q - k < s0
            visible = one_of(columns[None, :], least - tile * BLOCK_K, many)
            score = gl.where(visible, score, -INFINITY)
            peak = gl.maximum(top, gl.max(score, 1) * unit)
            p = gl.exp2(score * unit - peak[:, None])
            rescale = gl.exp2(top - peak)
            total = total * rescale + gl.sum(p, 1)
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
            peak = gl.maximum(top, gl.max(score, 1) * unit)
            p = gl.exp2(score * unit - peak[:, None])
            rescale = gl.exp2(top - peak)
            total = total * rescale + gl.sum(p, 1)
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

    lse = (top + gl.log2(total)) * LN2
    weight = gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUMS))
    out = outs.index(half)
    group_barrier()
    out.reshape([HALF, DIM_V]).store((acc * weight[:, None]).to(Out.dtype))
    hopper.fence_async_shared()
    store_tile(Out, [batch, head, start + half * HALF, 0], out)
    row_at = place.to(gl.int64) * q_len + start + rows
    gl.store(Lse + row_at, lse, mask=present)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "q_len", "kv_len", "q_origin", "k_origin", "s0"])
def attention_forward(
    Q, K, V, Out,  # descriptors of [batch, heads, length, dim], in blocks of BLOCK_Q / 2 queries or BLOCK_K keys
    Lse,  # float32 [batch, heads, q_len], contiguous
    scale, heads, q_len, kv_len,
    q_origin, k_origin,  # of this call in the whole problem
    s0,
    ORIGIN_PER_BATCH: gl.constexpr,  # q_origin and k_origin are int32 [batch]
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,  # powers of two
    STAGES: gl.constexpr,  # tiles of keys, and of values, that are in shared memory at once
):
    head, batch = gl.program_id(1), gl.program_id(2)
    place = batch * heads + head
    row = gl.num_programs(0) - 1 - gl.program_id(0)  # longest first
    start = row * BLOCK_Q
    kv_head = head // GROUP
    if ORIGIN_PER_BATCH:
        q_origin = gl.load(q_origin + batch)
        k_origin = gl.load(k_origin + batch)

    q_first = q_origin + start
    q_last = q_origin + gl.minimum(start + BLOCK_Q, q_len) - 1
    k_first = k_origin
    k_last = k_origin + kv_len - 1
    # Some query of the tile sees keys first..last, every one sees full_first..full_last.
    first = gl.maximum(q_first - s0 + 1, k_first) - k_first
    full_first = gl.maximum(q_last - s0 + 1, k_first) - k_first
    full_last = gl.minimum(q_first, k_last) - k_first
    last = gl.minimum(q_last, k_last) - k_first
    hi = (gl.maximum(last, -1) + BLOCK_K) // BLOCK_K
    lo = gl.minimum(first // BLOCK_K, hi)
    full_lo = gl.minimum((gl.minimum(full_first, kv_len) + BLOCK_K - 1) // BLOCK_K, hi)
    full_lo = gl.maximum(full_lo, lo)
    full_hi = gl.minimum(gl.maximum(full_last + 1, 0) // BLOCK_K, hi)
    full_hi = gl.maximum(full_hi, full_lo)

    queries = gl.allocate_shared_memory(Q.dtype, [2] + Q.block_type.shape, Q.layout)
    outs = queries  # the queries have been read by then
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
                Lse, batch, head, place, start, scale, q_len, kv_len,
                lo, full_lo, full_hi, hi,
                q_origin, k_origin, s0,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
            (consume, (
                gl.constexpr(1), Out, outs, queries, keys, values, q_full, k_full, k_free, v_full, v_free, turns,
                Lse, batch, head, place, start, scale, q_len, kv_len,
                lo, full_lo, full_hi, hi,
                q_origin, k_origin, s0,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
            (produce, (
                Q, K, V, queries, keys, values, q_full, k_full, k_free, v_full, v_free, batch, head, kv_head, start,
                lo, full_lo, full_hi, hi,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )
