"""Attention forward in Gluon, written by frisket for

    causal & window(w)
    s0 = w

Head size 128, bfloat16, 8 query heads to a key head.
attention_forward: grid (q tiles, heads, batch), tiles of 256 queries by 128 keys in 2 stages, num_warps=4 and 6 warps more.
"""

from triton import language as tl
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

GROUP = gl.constexpr(8)
DIM = gl.constexpr(128)
DIM_V = gl.constexpr(128)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.4028234663852886e38)
INFINITY = gl.constexpr(float("inf"))


@gluon.jit
def exp2_polynomial(x):
    """2**x on the FMA units instead of MUFU: relative error at most 2.5e-7, and 0 below -126.5."""
    x = gl.maximum(x, -127.0, propagate_nan=tl.PropagateNan.ALL)
    # Floats of this size are whole numbers: the sum rounds x. Its low bits are the exponent of `whole`.
    biased = x + 12583039.0  # 1.5 * 2**23 + 127
    rest = x - (biased - 12583039.0)
    whole = (biased.to(gl.int32, bitcast=True) << 23).to(gl.float32, bitcast=True)
    return whole * (1.0 + rest * (0.6931469 + rest * (0.24022119 + rest * (0.05550713 + rest * (0.009675541 + rest * 0.0013276471)))))


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
    Q, K, V, queries, keys, values, q_full, full, free, batch, head, kv_head, start,
    lo, full_lo, full_hi, hi,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Loads the queries of every warp group, then tiles of keys and of values in turn into one ring, by TMA."""
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
        mbarrier.wait(free.index(slot), n // STAGES & 1 ^ 1)
        mbarrier.expect(full.index(slot), K.block_type.nbytes)
        load_tile(K, [batch, kv_head, tile * BLOCK_K, 0], full.index(slot), keys.index(slot))
        n += 1
        slot = n % STAGES
        mbarrier.wait(free.index(slot), n // STAGES & 1 ^ 1)
        mbarrier.expect(full.index(slot), V.block_type.nbytes)
        load_tile(V, [batch, kv_head, tile * BLOCK_K, 0], full.index(slot), values.index(slot))
        n += 1


@gluon.jit
def weights_in(score, dtype: gl.constexpr):
    """The weights of a tile, which lie where its scores were."""
    LAYOUT: gl.constexpr = blackwell.TensorMemoryLayout([score.shape[0], score.shape[1]], col_stride=1)
    return seen_as(score, dtype, [score.shape[0], 2 * score.shape[1]], LAYOUT).slice(0, score.shape[1])


@gluon.jit
def multiply(
    queries, keys, values, scores, sums, q_full, full, free, s_full, p_full, o_full,
    lo, full_lo, full_hi, hi,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Issues every product. They run in this order, during a softmax that does not wait for them; and a commit tells of
    all products before it."""
    PIECE: gl.constexpr = BLOCK_K // 2
    tiles = hi - lo
    for half in range(2):
        mbarrier.wait(q_full.index(half), 0)
    for i in range((tiles + 1) * 2):
        n, half = i // 2, i % 2
        if n > 0:
            turn = 2 * n - 1  # of the values of the tile before
            slot = turn % STAGES
            mbarrier.wait(full.index(slot), turn // STAGES & 1)
            value = values.index(slot).reshape([BLOCK_K, DIM_V])
            for piece in gl.static_range(2):
                mbarrier.wait(p_full.index(half * 2 + piece), (n - 1) & 1)
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
    Lse, batch, head, place, start, scale, q_len, kv_len,
    lo, full_lo, full_hi, hi,
    q_origin, k_origin, s0,
    BLOCK_K: gl.constexpr,
):
    """Attention of a warp group's queries, of which every thread has one: softmax between products of `multiply`."""
    SCORES: gl.constexpr = gl.BlockedLayout([1, BLOCK_K], [32, 1], [4, 1], [0, 1])
    PIECE: gl.constexpr = BLOCK_K // 2
    PIECES: gl.constexpr = gl.BlockedLayout([1, PIECE], [32, 1], [4, 1], [0, 1])
    SUMS: gl.constexpr = gl.BlockedLayout([1, 64], [32, 1], [4, 1], [0, 1])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    EACH: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])  # all rows in every warp
    rows = half * 128 + gl.arange(0, 128, ROWS)
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, SCORES))
    q = (q_origin + start + rows)[:, None]
    row0 = q - s0 + 1
    # The first of the call's keys that a query may see, and the number of those up to the last.
    least = placed(row0, k_origin, 0, kv_len)
    many = gl.maximum(placed(q, k_origin, -1, kv_len - 1) + 1 - least, 0)
    unit = scale * LOG2E
    top = gl.full([128], LOWEST, gl.float32, ROWS)
    total = gl.full([128], 0.0, gl.float32, ROWS)
    acc = sums.index(half)
    for part in gl.static_range(2):
        acc.slice(part * 64, 64).store(gl.full([128, 64], 0.0, gl.float32, SUMS))
    n = 0  # tiles so far
    left = full_lo - lo
    borders = left + hi - full_hi
    # Partial tiles, before and behind the full ones: the mask is a predicate.
    for j in range(borders):
        tile = gl.where(j < left, lo + j, j - left + full_hi)
        mbarrier.wait(s_full.index(half), n & 1)
        score = scores.index(half).load(SCORES)
        # q >= k & q - k < s0
        visible = one_of(columns[None, :], least - tile * BLOCK_K, many)
        score = gl.where(visible, score, -INFINITY)
        peak = gl.maximum(top, gl.max(score, 1) * unit)
        # Weights are relative to `top`, which follows the largest score once that is 2**8 times as large: up to 256 they are
        # as exact as up to 1, the same `top` is in the sums, and so in none of the results. Sums are rarely rescaled.
        grown = peak > top + 8
        # Of the group's rows, known by the end of the first exponentials. Where no weight came before, the sums are 0.
        any_grown = gl.max(gl.convert_layout((grown & (total > 0.0)).to(gl.int32), EACH), 0) > 0
        peak = gl.where(grown, peak, top)
        exponent = score * unit - peak[:, None]
        rescale = gl.exp2(top - peak)
        total *= rescale
        # The product with the first half of the weights begins while the exponentials of the other half are computed.
        exponents = exponent.reshape([128, 2, PIECE]).permute((0, 2, 1)).split()
        for piece in gl.static_range(2):
            exponent = gl.convert_layout(exponents[piece], PIECES)
            p = gl.exp2(exponent)
            total += gl.convert_layout(gl.sum(p, 1), ROWS)
            weights_in(scores.index(half), Out.dtype).slice(piece * PIECE, PIECE).store(p.to(Out.dtype))
            if piece == 0:
                if any_grown:
                    # `s_full` means that the products before these scores are done too: nothing adds to the sums now.
                    for part in gl.static_range(2):
                        some = acc.slice(part * 64, 64)
                        some.store(some.load(SUMS) * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None])
            mbarrier.arrive(p_full.index(half * 2 + piece), count=1)
        top = peak
        n += 1
    # Full tiles: every position is visible.
    for j in range(borders, hi - lo):
        mbarrier.wait(s_full.index(half), n & 1)
        score = scores.index(half).load(SCORES)
        peak = gl.maximum(top, gl.max(score, 1) * unit)
        # Weights are relative to `top`, which follows the largest score once that is 2**8 times as large: up to 256 they are
        # as exact as up to 1, the same `top` is in the sums, and so in none of the results. Sums are rarely rescaled.
        grown = peak > top + 8
        # Of the group's rows, known by the end of the first exponentials. Where no weight came before, the sums are 0.
        any_grown = gl.max(gl.convert_layout((grown & (total > 0.0)).to(gl.int32), EACH), 0) > 0
        peak = gl.where(grown, peak, top)
        exponent = score * unit - peak[:, None]
        rescale = gl.exp2(top - peak)
        total *= rescale
        # The product with the first half of the weights begins while the exponentials of the other half are computed.
        exponents = exponent.reshape([128, 2, PIECE]).permute((0, 2, 1)).split()
        for piece in gl.static_range(2):
            exponent = gl.convert_layout(exponents[piece], PIECES)
            within = gl.arange(0, PIECE, gl.SliceLayout(0, PIECES))[None, :]
            p = gl.where(within % 32 < 10, exp2_polynomial(exponent), gl.exp2(exponent))
            total += gl.convert_layout(gl.sum(p, 1), ROWS)
            weights_in(scores.index(half), Out.dtype).slice(piece * PIECE, PIECE).store(p.to(Out.dtype))
            if piece == 0:
                if any_grown:
                    # `s_full` means that the products before these scores are done too: nothing adds to the sums now.
                    for part in gl.static_range(2):
                        some = acc.slice(part * 64, 64)
                        some.store(some.load(SUMS) * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None])
            mbarrier.arrive(p_full.index(half * 2 + piece), count=1)
        top = peak
        n += 1

    lse = (top + gl.log2(total)) * LN2
    weight = gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUMS))
    out = outs.index(half).reshape([128, DIM_V])
    mbarrier.wait(o_full.index(half), 0)
    for part in gl.static_range(2):
        found = acc.slice(part * 64, 64).load(SUMS) * weight[:, None]
        out.slice(part * 64, 64, 1).store(found.to(Out.dtype))
    hopper.fence_async_shared()
    store_tile(Out, [batch, head, start + half * 128, 0], outs.index(half))
    rows = half * 128 + gl.arange(0, 128, ROWS)  # again, so that no register keeps them over the loops
    present = start + rows < q_len
    row_at = place.to(gl.int64) * q_len + start + rows
    gl.store(Lse + row_at, lse, mask=present)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "q_len", "kv_len", "q_origin", "k_origin", "s0"])
def attention_forward(
    Q, K, V, Out,  # descriptors of [batch, heads, length, dim], in blocks of 128 queries or BLOCK_K keys
    Lse,  # float32 [batch, heads, q_len], contiguous
    scale, heads, q_len, kv_len,
    q_origin, k_origin,  # of this call in the whole problem
    s0,
    ORIGIN_PER_BATCH: gl.constexpr,  # q_origin and k_origin are int32 [batch]
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,  # powers of two
    STAGES: gl.constexpr,  # tiles of keys and of values that are in shared memory at once
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
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    s_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    o_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    SCORES: gl.constexpr = blackwell.TensorMemoryLayout([128, BLOCK_K], col_stride=1)
    SUMS: gl.constexpr = blackwell.TensorMemoryLayout([128, DIM_V], col_stride=1)
    scores = blackwell.allocate_tensor_memory(gl.float32, [2, 128, BLOCK_K], SCORES)
    sums = blackwell.allocate_tensor_memory(gl.float32, [2, 128, DIM_V], SUMS)
    # A ring of tiles: a slot has one of keys, then one of values.
    ring = gl.allocate_shared_memory(K.dtype, [STAGES] + K.block_type.shape, K.layout)
    keys = ring
    values = ring
    for half in gl.static_range(2):
        mbarrier.init(q_full.index(half), count=1)
    for buffer in gl.static_range(2):
        mbarrier.init(s_full.index(buffer), count=1)
        mbarrier.init(o_full.index(buffer), count=1)
    for piece in gl.static_range(2 * 2):
        mbarrier.init(p_full.index(piece), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    gl.warp_specialize(
        [
            (consume, (
                gl.constexpr(0), Out, outs, scores, sums, s_full, p_full, o_full,
                Lse, batch, head, place, start, scale, q_len, kv_len,
                lo, full_lo, full_hi, hi,
                q_origin, k_origin, s0,
                BLOCK_K,
            )),
            (consume, (
                gl.constexpr(1), Out, outs, scores, sums, s_full, p_full, o_full,
                Lse, batch, head, place, start, scale, q_len, kv_len,
                lo, full_lo, full_hi, hi,
                q_origin, k_origin, s0,
                BLOCK_K,
            )),
            (multiply, (
                queries, keys, values, scores, sums, q_full, full, free, s_full, p_full, o_full,
                lo, full_lo, full_hi, hi,
                BLOCK_K, STAGES,
            )),
            (produce, (
                Q, K, V, queries, keys, values, q_full, full, free, batch, head, kv_head, start,
                lo, full_lo, full_hi, hi,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )
