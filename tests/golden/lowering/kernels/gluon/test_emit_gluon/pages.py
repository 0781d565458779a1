"""Attention forward in Gluon, written by frisket for

    causal, in a cache of pages

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
    Spans, Count, entry, records,
    pages, pages_size1, pages_stride0, pages_stride1, pool,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Loads the queries of every warp group, then every tile of keys and of values into the rings, by TMA."""
    paged = pages + batch.to(gl.int64) * pages_stride0
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
            mbarrier.expect(k_full.index(slot), K.block_type.nbytes * 2)
            for piece in gl.static_range(2):
                at = tile * BLOCK_K + piece * 64
                page = clamp(gl.load(paged + clamp(at // 64, pages_size1) * pages_stride1), pool)
                token = at % 64
                load_tile(K, [page, kv_head, token, 0], k_full.index(slot), keys.index(slot).slice(piece * 64, 64, dim=2))
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_full.index(slot), V.block_type.nbytes * 2)
            for piece in gl.static_range(2):
                at = tile * BLOCK_K + piece * 64
                page = clamp(gl.load(paged + clamp(at // 64, pages_size1) * pages_stride1), pool)
                token = at % 64
                load_tile(V, [page, kv_head, token, 0], v_full.index(slot), values.index(slot).slice(piece * 64, 64, dim=2))
            n += 1


@gluon.jit
def either(a, b):
    return a | b


@gluon.jit
def clean(values, seen, half: gl.constexpr, BLOCK_K: gl.constexpr, WIDTH: gl.constexpr):
    """Sets values whose keys no query sees to 0, in this half of a slot. A key has a bit in the words of each half."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, LINES)
    HALF: gl.constexpr = BLOCK_K // 2
    COUNT: gl.constexpr = 32 if HALF >= 32 else HALF  # at once
    for i in gl.static_range(HALF // COUNT):
        word = seen.index(0).slice((half * HALF + i * COUNT) // 32, 1).load(ROWS)
        word |= seen.index(1).slice((half * HALF + i * COUNT) // 32, 1).load(ROWS)
        bit = word >> gl.arange(half * HALF % 32, half * HALF % 32 + COUNT, ROWS)
        lines = values.slice(half * HALF + i * COUNT, COUNT)
        lines.store(gl.where((bit & 1)[:, None] != 0, lines.load(LINES), 0.0))


@gluon.jit
def consume(
    half: gl.constexpr, Out, outs, queries, keys, values, seen, told, cleaned, q_full, k_full, k_free, v_full, v_free, turns,
    Lse, batch, head, place, start, scale, q_len, kv_len,
    Spans, Count, entry, records,
    b, q_origin, k_origin, start_, start__size, start__stride, end_, end__size, end__stride,
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
    start__b = gl.load(start_ + clamp(b, start__size) * start__stride)
    fixed0 = gl.load(end_ + clamp(b, end__size) * end__stride) - 1
    row0 = gl.minimum(q + start__b, fixed0)
    # The last of the call's keys that a query may see.
    most = placed(row0, k_origin, -1, kv_len - 1)
    unit = scale * LOG2E
    top = gl.full([HALF], LOWEST, gl.float32, ROWS)
    total = gl.full([HALF], 0.0, gl.float32, ROWS)
    zero = gl.full([HALF, BLOCK_K], 0.0, gl.float32, SCORES)
    borders_done = 0  # modulo 2
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
            # k <= q + start_[b] & k < end_[b]
            visible = up_to(columns[None, :], most - tile * BLOCK_K)
            score = gl.where(visible, score, -INFINITY)
            peak = gl.maximum(top, gl.max(score, 1) * unit)
            p = gl.exp2(score * unit - peak[:, None])
            rescale = gl.exp2(top - peak)
            total = total * rescale + gl.sum(p, 1)
            p = p.to(Out.dtype)
            acc *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]  # of earlier records
            weights = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 2))
            # Values that no query of the tile sees may never have been written, and 0 times NaN is NaN.
            bits = gl.where((p > 0) & present[:, None], 1 << (columns % 32)[None, :], 0)
            bits = gl.sum(bits.reshape([HALF, BLOCK_K // 32, 32]), 2)
            seen.index(half).store(gl.reduce(bits, 0, either))
            mbarrier.arrive(told.index(0), count=1)
            mbarrier.wait(told.index(0), borders_done)
            mbarrier.wait(v_full.index(slot), phase)
            clean(values.index(slot).reshape([BLOCK_K, DIM_V]), seen, half, BLOCK_K, DIM_V)
            hopper.fence_async_shared()
            mbarrier.arrive(cleaned.index(0), count=1)
            mbarrier.wait(cleaned.index(0), borders_done)
            borders_done ^= 1
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
                # k <= q + start_[b] & k < end_[b]
                visible = up_to(columns[None, :], most - tile * BLOCK_K)
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
                # Values that no query of the tile sees may never have been written, and 0 times NaN is NaN.
                bits = gl.where((p > 0) & present[:, None], 1 << (columns % 32)[None, :], 0)
                bits = gl.sum(bits.reshape([HALF, BLOCK_K // 32, 32]), 2)
                seen.index(half).store(gl.reduce(bits, 0, either))
                mbarrier.arrive(told.index(0), count=1)
                mbarrier.wait(told.index(0), borders_done)
                mbarrier.wait(v_full.index(slot), phase)
                clean(values.index(slot).reshape([BLOCK_K, DIM_V]), seen, half, BLOCK_K, DIM_V)
                hopper.fence_async_shared()
                mbarrier.arrive(cleaned.index(0), count=1)
                mbarrier.wait(cleaned.index(0), borders_done)
                borders_done ^= 1
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

    # A row without a visible key gives 0, and lse -inf.
    empty = total == 0.0
    total = gl.where(empty, 1.0, total)
    lse = gl.where(empty, -INFINITY, (top + gl.log2(total)) * LN2)
    weight = gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUMS))
    out = outs.index(half)
    group_barrier()
    out.reshape([HALF, DIM_V]).store((acc * weight[:, None]).to(Out.dtype))
    hopper.fence_async_shared()
    store_tile(Out, [batch, head, start + half * HALF, 0], out)
    row_at = place.to(gl.int64) * q_len + start + rows
    gl.store(Lse + row_at, lse, mask=present)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "heads", "q_len", "kv_len", "pool", "records", "b_origin", "q_origin", "k_origin", "start__size",
        "end__size", "pages_size0", "pages_size1", "pages_stride0",
    ]
)
def attention_forward(
    Q, K, V, Out,  # descriptors of [batch, heads, length, dim], in blocks of BLOCK_Q / 2 queries or BLOCK_K keys
    # K and V are pools, [pages, heads, tokens of a page, dim], in blocks of 64 tokens
    Lse,  # float32 [batch, heads, q_len], contiguous
    scale, heads, q_len, kv_len, pool,
    Spans,  # int32 [slices, rows, records, 4]: lo, full_lo, full_hi, hi in key tiles
    Count, Order,  # int32 [slices, rows]: records in use; rows in order of work
    SliceOf,  # int32 [batch, heads]
    records,
    b_origin, q_origin, k_origin,  # of this call in the whole problem
    start_, start__size, start__stride,
    end_, end__size, end__stride,
    pages, pages_size0, pages_size1, pages_stride0, pages_stride1,
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
    queries = gl.allocate_shared_memory(Q.dtype, [2] + Q.block_type.shape, Q.layout)
    outs = queries  # the queries have been read by then
    keys = gl.allocate_shared_memory(K.dtype, [STAGES, 1, 1, BLOCK_K, DIM], K.layout)
    values = gl.allocate_shared_memory(V.dtype, [STAGES, 1, 1, BLOCK_K, DIM_V], V.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    cleaned = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
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
    mbarrier.init(told.index(0), count=2)  # both halves have said which keys they see
    mbarrier.init(cleaned.index(0), count=2)
    seen = gl.allocate_shared_memory(gl.int32, [2, BLOCK_K // 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mbarrier.arrive(turns.index(0), count=1)
    gl.warp_specialize(
        [
            (consume, (
                gl.constexpr(0), Out, outs, queries, keys, values, seen, told, cleaned, q_full, k_full, k_free, v_full, v_free, turns,
                Lse, batch, head, place, start, scale, q_len, kv_len,
                Spans, Count, entry, records,
                b, q_origin, k_origin, start_, start__size, start__stride, end_, end__size, end__stride,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
            (consume, (
                gl.constexpr(1), Out, outs, queries, keys, values, seen, told, cleaned, q_full, k_full, k_free, v_full, v_free, turns,
                Lse, batch, head, place, start, scale, q_len, kv_len,
                Spans, Count, entry, records,
                b, q_origin, k_origin, start_, start__size, start__stride, end_, end__size, end__stride,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
            (produce, (
                Q, K, V, queries, keys, values, q_full, k_full, k_free, v_full, v_free, batch, head, kv_head, start,
                Spans, Count, entry, records,
                pages, pages_size1, pages_stride0, pages_stride1, pool,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )
