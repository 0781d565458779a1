"""Attention forward in Gluon, written by frisket for

    causal

Head size 128, float8_e4m3fn, 4 query heads to a key head.
attention_forward: grid (q tiles, heads, batch), tiles of 128 queries by 128 keys in 3 stages, num_warps=4 and 5 warps more.
"""

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton 3.6 calls them otherwise than later versions.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

GROUP = gl.constexpr(4)
DIM = gl.constexpr(128)
DIM_V = gl.constexpr(128)
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
        load_tile(V, [batch, kv_head, 0, tile * BLOCK_K], v_full.index(slot), values.index(slot))
        n += 1


@gluon.jit
def consume(
    half: gl.constexpr, Out, outs, queries, keys, values, q_full, k_full, k_free, v_full, v_free,
    Lse, Top, batch, head, place, start, scale, q_len, kv_len,
    lo, full_lo, full_hi, hi,
    b, h, q_origin, k_origin, q_scale, q_scale_size0, q_scale_size1, q_scale_size2, q_scale_stride0,
    q_scale_stride1, q_scale_stride2, k_scale, k_scale_size0, k_scale_size1, k_scale_size2,
    k_scale_stride0, k_scale_stride1, k_scale_stride2, v_scale, v_scale_size0, v_scale_size1,
    v_scale_stride0, v_scale_stride1,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Attention of one half of the queries: a warp group that computes while the other one's products run."""
    HALF: gl.constexpr = BLOCK_Q // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_K, 32])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM_V, 32])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    rows = half * HALF + gl.arange(0, HALF, ROWS)
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, SCORES))
    present = start + rows < q_len
    q = (q_origin + start + rows)[:, None]
    q_row = q_origin + start + rows
    fixed0 = h >> 2
    v_scale_b_at = gl.load(
        v_scale + step(b, v_scale_size0, v_scale_stride0) + clamp(fixed0, v_scale_size1) * v_scale_stride1,
    ).to(gl.float32)
    q_scale_b_h_at = gl.load(
        q_scale
        + step(b, q_scale_size0, q_scale_stride0)
        + step(h, q_scale_size1, q_scale_stride1)
        + clamp(q_row >> 6, q_scale_size2) * q_scale_stride2,
    ).to(gl.float32)
    # The last of the call's keys that a query may see.
    most = placed(q, k_origin, -1, kv_len - 1)
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
        k_tile = k_origin + tile * BLOCK_K
        k_scale_b_at_at = gl.load(
            k_scale
            + step(b, k_scale_size0, k_scale_stride0)
            + step(fixed0, k_scale_size1, k_scale_stride1)
            + clamp(k_tile >> 7, k_scale_size2) * k_scale_stride2,
        ).to(gl.float32)
        factor = gl.maximum(unit * q_scale_b_h_at * k_scale_b_at_at, 1e-30, propagate_nan=tl.PropagateNan.ALL)
        mbarrier.wait(k_full.index(slot), phase)
        key = keys.index(slot).reshape([BLOCK_K, DIM]).permute((1, 0))
        score = hopper.warpgroup_mma(query, key, zero, use_acc=False, is_async=True)
        score = hopper.warpgroup_mma_wait(0, [score])
        mbarrier.arrive(k_free.index(slot), count=1)
        # q >= k
        visible = up_to(columns[None, :], most - tile * BLOCK_K)
        score = gl.where(visible, score, -INFINITY)
        peak = gl.maximum(top, gl.max(score, 1) * factor - 8.0)
        p = gl.exp2(score * factor[:, None] - peak[:, None])
        rescale = gl.exp2(top - peak)
        total = total * rescale + gl.sum(p, 1)
        p = p.reshape([HALF, BLOCK_K // 16, 2, 4, 2])  # in the order of the values' keys
        p = p.permute((0, 1, 3, 2, 4)).reshape([HALF, BLOCK_K])
        top = peak
        before, before_phase = slot, phase
        n += 1
        # Partial tiles, before and behind the full ones: the mask is a predicate.
        for j in range(1, borders):
            tile = gl.where(j < left, lo + j, j - left + full_hi)
            slot, phase = n % STAGES, n // STAGES & 1
            k_tile = k_origin + tile * BLOCK_K
            k_scale_b_at_at = gl.load(
                k_scale
                + step(b, k_scale_size0, k_scale_stride0)
                + step(fixed0, k_scale_size1, k_scale_stride1)
                + clamp(k_tile >> 7, k_scale_size2) * k_scale_stride2,
            ).to(gl.float32)
            factor = gl.maximum(unit * q_scale_b_h_at * k_scale_b_at_at, 1e-30, propagate_nan=tl.PropagateNan.ALL)
            # Not before: carried around the loop, numbers of 8 bits take a register each.
            weights = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 4)).to(values.dtype)
            mbarrier.wait(k_full.index(slot), phase)
            key = keys.index(slot).reshape([BLOCK_K, DIM]).permute((1, 0))
            score = hopper.warpgroup_mma(query, key, zero, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), before_phase)
            acc = hopper.warpgroup_mma(weights, values.index(before).reshape([DIM_V, BLOCK_K]).permute((1, 0)), acc, is_async=True)
            score = hopper.warpgroup_mma_wait(1, [score])
            mbarrier.arrive(k_free.index(slot), count=1)
            # q >= k
            visible = up_to(columns[None, :], most - tile * BLOCK_K)
            score = gl.where(visible, score, -INFINITY)
            peak = gl.maximum(top, gl.max(score, 1) * factor - 8.0)
            p = gl.exp2(score * factor[:, None] - peak[:, None])
            rescale = gl.exp2(top - peak)
            total = total * rescale + gl.sum(p, 1)
            p = p.reshape([HALF, BLOCK_K // 16, 2, 4, 2])  # in the order of the values' keys
            p = p.permute((0, 1, 3, 2, 4)).reshape([HALF, BLOCK_K])
            mbarrier.wait(v_full.index(before), before_phase)  # again: no compiler moves the softmax past its branch
            acc = hopper.warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(v_free.index(before), count=1)
            acc *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
            top = peak
            before, before_phase = slot, phase
            n += 1
        # Full tiles: every position is visible.
        for j in range(gl.maximum(borders, 1), hi - lo):
            tile = j - borders + full_lo
            slot, phase = n % STAGES, n // STAGES & 1
            k_tile = k_origin + tile * BLOCK_K
            k_scale_b_at_at = gl.load(
                k_scale
                + step(b, k_scale_size0, k_scale_stride0)
                + step(fixed0, k_scale_size1, k_scale_stride1)
                + clamp(k_tile >> 7, k_scale_size2) * k_scale_stride2,
            ).to(gl.float32)
            factor = gl.maximum(unit * q_scale_b_h_at * k_scale_b_at_at, 1e-30, propagate_nan=tl.PropagateNan.ALL)
            # Not before: carried around the loop, numbers of 8 bits take a register each.
            weights = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 4)).to(values.dtype)
            mbarrier.wait(k_full.index(slot), phase)
            key = keys.index(slot).reshape([BLOCK_K, DIM]).permute((1, 0))
            score = hopper.warpgroup_mma(query, key, zero, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), before_phase)
            acc = hopper.warpgroup_mma(weights, values.index(before).reshape([DIM_V, BLOCK_K]).permute((1, 0)), acc, is_async=True)
            score = hopper.warpgroup_mma_wait(1, [score])
            mbarrier.arrive(k_free.index(slot), count=1)
            peak = gl.maximum(top, gl.max(score, 1) * factor - 8.0)
            p = gl.exp2(score * factor[:, None] - peak[:, None])
            rescale = gl.exp2(top - peak)
            total = total * rescale + gl.sum(p, 1)
            p = p.reshape([HALF, BLOCK_K // 16, 2, 4, 2])  # in the order of the values' keys
            p = p.permute((0, 1, 3, 2, 4)).reshape([HALF, BLOCK_K])
            mbarrier.wait(v_full.index(before), before_phase)  # again: no compiler moves the softmax past its branch
            acc = hopper.warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(v_free.index(before), count=1)
            acc *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
            top = peak
            before, before_phase = slot, phase
            n += 1
        # Not before: carried around the loop, numbers of 8 bits take a register each.
        weights = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 4)).to(values.dtype)
        mbarrier.wait(v_full.index(before), before_phase)
        acc = hopper.warpgroup_mma(weights, values.index(before).reshape([DIM_V, BLOCK_K]).permute((1, 0)), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(v_free.index(before), count=1)

    largest = gl.where(total == 0.0, -INFINITY, top * LN2)
    # A row without a visible key gives 0, and lse -inf.
    empty = total == 0.0
    total = gl.where(empty, 1.0, total)
    lse = gl.where(empty, -INFINITY, (top + gl.log2(total)) * LN2)
    largest = largest + 8.0 * LN2  # weights are 2**8.0 times as large
    weight = gl.convert_layout(1.0 * v_scale_b_at / total, gl.SliceLayout(1, SUMS))
    out = outs.index(half)
    group_barrier()
    out.reshape([HALF, DIM_V]).store((acc * weight[:, None]).to(Out.dtype))
    hopper.fence_async_shared()
    store_tile(Out, [batch, head, start + half * HALF, 0], out)
    row_at = place.to(gl.int64) * q_len + start + rows
    gl.store(Lse + row_at, lse, mask=present)
    gl.store(Top + row_at, largest, mask=present)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "heads", "q_len", "kv_len", "b_origin", "h_origin", "q_origin", "k_origin", "q_scale_size0",
        "q_scale_size1", "q_scale_size2", "k_scale_size0", "k_scale_size1", "k_scale_size2",
        "v_scale_size0", "v_scale_size1", "q_scale_stride0", "q_scale_stride1", "k_scale_stride0",
        "k_scale_stride1", "v_scale_stride0",
    ]
)
def attention_forward(
    Q, K, V, Out,  # descriptors of [batch, heads, length, dim], in blocks of BLOCK_Q / 2 queries or BLOCK_K keys
    Lse,  # float32 [batch, heads, q_len], contiguous
    Top,  # the largest scores, as Lse
    scale, heads, q_len, kv_len,
    b_origin, h_origin, q_origin, k_origin,  # of this call in the whole problem
    q_scale, q_scale_size0, q_scale_size1, q_scale_size2, q_scale_stride0, q_scale_stride1, q_scale_stride2,
    k_scale, k_scale_size0, k_scale_size1, k_scale_size2, k_scale_stride0, k_scale_stride1, k_scale_stride2,
    v_scale, v_scale_size0, v_scale_size1, v_scale_stride0, v_scale_stride1,
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
    b = b_origin + batch
    h = h_origin + head

    q_first = q_origin + start
    q_last = q_origin + gl.minimum(start + BLOCK_Q, q_len) - 1
    k_first = k_origin
    k_last = k_origin + kv_len - 1
    # Some query of the tile sees keys first..last, every one sees full_first..full_last.
    first = 0
    full_first = 0
    full_last = gl.minimum(q_first, k_last) - k_first
    last = gl.minimum(q_last, k_last) - k_first
    hi = (gl.maximum(last, -1) + BLOCK_K) // BLOCK_K
    lo = gl.minimum(first // BLOCK_K, hi)
    full_lo = gl.minimum((gl.minimum(full_first, kv_len) + BLOCK_K - 1) // BLOCK_K, hi)
    full_lo = gl.maximum(full_lo, lo)
    full_hi = gl.minimum(gl.maximum(full_last + 1, 0) // BLOCK_K, hi)
    full_hi = gl.maximum(full_hi, full_lo)

    queries = gl.allocate_shared_memory(Q.dtype, [2] + Q.block_type.shape, Q.layout)
    outs = gl.allocate_shared_memory(Out.dtype, [2] + Out.block_type.shape, Out.layout)
    keys = gl.allocate_shared_memory(K.dtype, [STAGES] + K.block_type.shape, K.layout)
    values = gl.allocate_shared_memory(V.dtype, [STAGES] + V.block_type.shape, V.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(q_full.index(half), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_free.index(slot), count=2)  # both halves have read it
        mbarrier.init(v_free.index(slot), count=2)
    gl.warp_specialize(
        [
            (consume, (
                gl.constexpr(0), Out, outs, queries, keys, values, q_full, k_full, k_free, v_full, v_free,
                Lse, Top, batch, head, place, start, scale, q_len, kv_len,
                lo, full_lo, full_hi, hi,
                b, h, q_origin, k_origin, q_scale, q_scale_size0, q_scale_size1, q_scale_size2, q_scale_stride0,
                q_scale_stride1, q_scale_stride2, k_scale, k_scale_size0, k_scale_size1, k_scale_size2,
                k_scale_stride0, k_scale_stride1, k_scale_stride2, v_scale, v_scale_size0, v_scale_size1,
                v_scale_stride0, v_scale_stride1,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
            (consume, (
                gl.constexpr(1), Out, outs, queries, keys, values, q_full, k_full, k_free, v_full, v_free,
                Lse, Top, batch, head, place, start, scale, q_len, kv_len,
                lo, full_lo, full_hi, hi,
                b, h, q_origin, k_origin, q_scale, q_scale_size0, q_scale_size1, q_scale_size2, q_scale_stride0,
                q_scale_stride1, q_scale_stride2, k_scale, k_scale_size0, k_scale_size1, k_scale_size2,
                k_scale_stride0, k_scale_stride1, k_scale_stride2, v_scale, v_scale_size0, v_scale_size1,
                v_scale_stride0, v_scale_stride1,
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
