"""Attention forward in Gluon, written by frisket for

    causal & same_by_batch(doc)
    softcap(50) + slope[h] * (k - q)
    seed = seed of dropout
    rate = rate of dropout

Head size 80 (values 64), float16.
attention_forward: grid (q tiles, heads, batch), tiles of 256 queries by 128 keys in 2 stages, num_warps=4 and 6 warps more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton 3.6 calls them otherwise than later versions.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
columns_of = blackwell.tensor_memory_descriptor
seen_as = columns_of.reinterpret if hasattr(columns_of, "reinterpret") else columns_of._reinterpret
tiles_of = gl.shared_memory_descriptor
tiles_as = tiles_of.reinterpret if hasattr(tiles_of, "reinterpret") else tiles_of._reinterpret

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
    Q, K, V, queries, keys, values, q_full, full, free, batch, head, kv_head, start,
    Spans, Count, entry, records,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Loads the queries of every warp group, then tiles of keys and of values in turn into one ring, by TMA."""
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
            mbarrier.wait(free.index(slot), n // STAGES & 1 ^ 1)
            mbarrier.expect(full.index(slot), K.block_type.nbytes)
            load_tile(K, [batch, kv_head, tile * BLOCK_K, 0], full.index(slot), keys.index(slot))
            n += 1
            slot = n % STAGES
            mbarrier.wait(free.index(slot), n // STAGES & 1 ^ 1)
            mbarrier.expect(full.index(slot), V.block_type.nbytes)
            load_tile(V, [batch, kv_head, tile * BLOCK_K, 0], full.index(slot), values.index(2 * slot))
            n += 1


@gluon.jit
def weights_in(score, dtype: gl.constexpr):
    """The weights of a tile, which lie where its scores were."""
    LAYOUT: gl.constexpr = blackwell.TensorMemoryLayout([score.shape[0], score.shape[1]], col_stride=1)
    return seen_as(score, dtype, [score.shape[0], 2 * score.shape[1]], LAYOUT).slice(0, score.shape[1])


@gluon.jit
def multiply(
    queries, keys, values, scores, sums, q_full, full, free, s_full, p_full, o_full,
    Spans, Count, entry, records,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Issues every product. They run in this order, during a softmax that does not wait for them; and a commit tells of
    all products before it."""
    PIECE: gl.constexpr = BLOCK_K // 1
    tiles = 0
    for i in range(gl.load(Count + entry)):
        record = Spans + (entry.to(gl.int64) * records + i) * 4
        lo, full_lo = gl.load(record), gl.load(record + 1)
        full_hi, hi = gl.load(record + 2), gl.load(record + 3)
        tiles += hi - lo
    for half in range(2):
        mbarrier.wait(q_full.index(half), 0)
    for i in range((tiles + 1) * 2):
        n, half = i // 2, i % 2
        if n > 0:
            turn = 2 * n - 1  # of the values of the tile before
            slot = turn % STAGES
            mbarrier.wait(full.index(slot), turn // STAGES & 1)
            value = values.index(2 * slot).reshape([BLOCK_K, DIM_V])
            for piece in gl.static_range(1):
                mbarrier.wait(p_full.index(half * 1 + piece), (n - 1) & 1)
                weights = weights_in(scores.index(half), values.dtype).slice(piece * PIECE, PIECE)
                blackwell.tcgen05_mma(weights, value.slice(piece * PIECE, PIECE), sums.index(half))
            if half == 1:
                blackwell.tcgen05_commit(free.index(slot))
        if n < tiles:
            turn = 2 * n
            slot = turn % STAGES
            mbarrier.wait(full.index(slot), turn // STAGES & 1)
            query = queries.index(half).reshape([128, DIM])
            key = keys.index(slot).reshape([BLOCK_K, DIM]).permute((1, 0))
            blackwell.tcgen05_mma(query, key, scores.index(half), use_acc=False)
            if half == 1:
                blackwell.tcgen05_commit(free.index(slot))
            blackwell.tcgen05_commit(s_full.index(half))
        else:
            blackwell.tcgen05_commit(o_full.index(half))


@gluon.jit
def consume(
    half: gl.constexpr, Out, outs, scores, sums, s_full, p_full, o_full,
    Lse, Top, Low, Sinks, batch, head, place, start, scale, q_len, kv_len,
    Spans, Count, entry, records,
    b, h, q_origin, k_origin, seed, rate, doc, doc_size0, doc_size1, doc_stride0, doc_stride1, slope,
    slope_size, slope_stride,
    BLOCK_K: gl.constexpr,
):
    """Attention of a warp group's queries, of which every thread has one: softmax between products of `multiply`."""
    SCORES: gl.constexpr = gl.BlockedLayout([1, BLOCK_K], [32, 1], [4, 1], [0, 1])
    PIECE: gl.constexpr = BLOCK_K // 1
    PIECES: gl.constexpr = gl.BlockedLayout([1, PIECE], [32, 1], [4, 1], [0, 1])
    SUMS: gl.constexpr = gl.BlockedLayout([1, 64], [32, 1], [4, 1], [0, 1])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    EACH: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])  # all rows in every warp
    rows = half * 128 + gl.arange(0, 128, ROWS)
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, SCORES))
    q = (q_origin + start + rows)[:, None]
    fixed0 = scale * 0.02
    slope_h = gl.load(slope + clamp(h, slope_size) * slope_stride).to(gl.float32)
    doc_b_q = gl.load(doc + step(b, doc_size0, doc_stride0) + clamp(q, doc_size1) * doc_stride1)
    row0 = (q - (q_origin + start)).to(gl.float32)
    # The last of the call's keys that a query may see.
    most = placed(q, k_origin, -1, kv_len - 1)
    top = gl.full([128], LOWEST, gl.float32, ROWS)
    total = gl.full([128], 0.0, gl.float32, ROWS)
    acc = sums.index(half)
    for part in gl.static_range(1):
        acc.slice(part * 64, 64).store(gl.full([128, 64], 0.0, gl.float32, SUMS))
    n = 0  # tiles so far
    for i in range(gl.load(Count + entry)):
        record = Spans + (entry.to(gl.int64) * records + i) * 4
        lo, full_lo = gl.load(record), gl.load(record + 1)
        full_hi, hi = gl.load(record + 2), gl.load(record + 3)
        left = full_lo - lo
        borders = left + hi - full_hi
        # Partial tiles, before and behind the full ones: the mask is a predicate.
        for j in range(borders):
            tile = gl.where(j < left, lo + j, j - left + full_hi)
            mbarrier.wait(s_full.index(half), n & 1)
            score = scores.index(half).load(SCORES)
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
            grown = peak > top
            # Of the group's rows, known by the end of the first exponentials. Where no weight came before, the sums are 0.
            any_grown = gl.max(gl.convert_layout((grown & (total > 0.0)).to(gl.int32), EACH), 0) > 0
            exponent = score * LOG2E - peak[:, None]
            rescale = gl.exp2(top - peak)
            total *= rescale
            exponents = (exponent,)
            for piece in gl.static_range(1):
                exponent = gl.convert_layout(exponents[piece], PIECES)
                p = gl.exp2(exponent)
                total += gl.convert_layout(gl.sum(p, 1), ROWS)
                # random(seed, b, h, q, k) >= rate
                p = gl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, p, 0.0)
                weights_in(scores.index(half), Out.dtype).slice(piece * PIECE, PIECE).store(p.to(Out.dtype))
                if piece == 0:
                    if any_grown:
                        # `s_full` means that the products before these scores are done too: nothing adds to the sums now.
                        for part in gl.static_range(1):
                            some = acc.slice(part * 64, 64)
                            some.store(some.load(SUMS) * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None])
                mbarrier.arrive(p_full.index(half * 1 + piece), count=1)
            top = peak
            n += 1
        # Full tiles: every position is visible.
        for j in range(borders, hi - lo):
            tile = j - borders + full_lo
            mbarrier.wait(s_full.index(half), n & 1)
            score = scores.index(half).load(SCORES)
            k = (k_origin + tile * BLOCK_K + columns)[None, :]
            column0 = (k - (q_origin + start)).to(gl.float32)
            # 50 * tanh(score / 50) + slope[h] * (k - q)
            score = tanh(score * fixed0) * 50.0 + (column0 - row0) * slope_h
            peak = gl.maximum(top, gl.max(score, 1) * LOG2E)
            grown = peak > top
            # Of the group's rows, known by the end of the first exponentials. Where no weight came before, the sums are 0.
            any_grown = gl.max(gl.convert_layout((grown & (total > 0.0)).to(gl.int32), EACH), 0) > 0
            exponent = score * LOG2E - peak[:, None]
            rescale = gl.exp2(top - peak)
            total *= rescale
            exponents = (exponent,)
            for piece in gl.static_range(1):
                exponent = gl.convert_layout(exponents[piece], PIECES)
                p = gl.exp2(exponent)
                total += gl.convert_layout(gl.sum(p, 1), ROWS)
                # random(seed, b, h, q, k) >= rate
                p = gl.where(uniform(stirred(stirred(stirred(stirred(seeded(seed), b), h), q), k)) >= rate, p, 0.0)
                weights_in(scores.index(half), Out.dtype).slice(piece * PIECE, PIECE).store(p.to(Out.dtype))
                if piece == 0:
                    if any_grown:
                        # `s_full` means that the products before these scores are done too: nothing adds to the sums now.
                        for part in gl.static_range(1):
                            some = acc.slice(part * 64, 64)
                            some.store(some.load(SUMS) * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None])
                mbarrier.arrive(p_full.index(half * 1 + piece), count=1)
            top = peak
            n += 1

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
    out = outs.index(half).reshape([128, DIM_V])
    mbarrier.wait(o_full.index(half), 0)
    for part in gl.static_range(1):
        found = acc.slice(part * 64, 64).load(SUMS) * weight[:, None]
        out.slice(part * 64, 64, 1).store(found.to(Out.dtype))
    hopper.fence_async_shared()
    store_tile(Out, [batch, head, start + half * 128, 0], outs.index(half))
    rows = half * 128 + gl.arange(0, 128, ROWS)  # again, so that no register keeps them over the loops
    present = start + rows < q_len
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
    Q, K, V, Out,  # descriptors of [batch, heads, length, dim], in blocks of 128 queries or BLOCK_K keys
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
    STAGES: gl.constexpr,  # tiles of keys and of values that are in shared memory at once
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
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    s_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    o_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    SCORES: gl.constexpr = blackwell.TensorMemoryLayout([128, BLOCK_K], col_stride=1)
    SUMS: gl.constexpr = blackwell.TensorMemoryLayout([128, DIM_V], col_stride=1)
    scores = blackwell.allocate_tensor_memory(gl.float32, [2, 128, BLOCK_K], SCORES)
    sums = blackwell.allocate_tensor_memory(gl.float32, [2, 128, DIM_V], SUMS)
    # A ring of tiles: a slot has one of keys, then one of values.
    ring = gl.allocate_shared_memory(K.dtype, [STAGES] + K.block_type.shape, K.layout)
    keys = ring
    values = tiles_as(ring, V.dtype, [2 * STAGES] + V.block_type.shape, V.layout)
    for half in gl.static_range(2):
        mbarrier.init(q_full.index(half), count=1)
    for buffer in gl.static_range(2):
        mbarrier.init(s_full.index(buffer), count=1)
        mbarrier.init(o_full.index(buffer), count=1)
    for piece in gl.static_range(2 * 1):
        mbarrier.init(p_full.index(piece), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    gl.warp_specialize(
        [
            (consume, (
                gl.constexpr(0), Out, outs, scores, sums, s_full, p_full, o_full,
                Lse, Top, Low, Sinks, batch, head, place, start, scale, q_len, kv_len,
                Spans, Count, entry, records,
                b, h, q_origin, k_origin, seed, rate, doc, doc_size0, doc_size1, doc_stride0, doc_stride1, slope,
                slope_size, slope_stride,
                BLOCK_K,
            )),
            (consume, (
                gl.constexpr(1), Out, outs, scores, sums, s_full, p_full, o_full,
                Lse, Top, Low, Sinks, batch, head, place, start, scale, q_len, kv_len,
                Spans, Count, entry, records,
                b, h, q_origin, k_origin, seed, rate, doc, doc_size0, doc_size1, doc_stride0, doc_stride1, slope,
                slope_size, slope_stride,
                BLOCK_K,
            )),
            (multiply, (
                queries, keys, values, scores, sums, q_full, full, free, s_full, p_full, o_full,
                Spans, Count, entry, records,
                BLOCK_K, STAGES,
            )),
            (produce, (
                Q, K, V, queries, keys, values, q_full, full, free, batch, head, kv_head, start,
                Spans, Count, entry, records,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
        ],
        [4, 1, 1],
        [232, 32, 32],
    )
