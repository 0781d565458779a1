$part kernel
$# The forward on Blackwell: the warp that loads, the one that multiplies, the warp groups that compute, and the kernel.
$include shared.produce


@gluon.jit
def weights_in(score, dtype: gl.constexpr):
    """The weights of a tile, which lie where its scores were."""
    LAYOUT: gl.constexpr = blackwell.TensorMemoryLayout([score.shape[0], score.shape[1]], col_stride=1)
    return seen_as(score, dtype, [score.shape[0], 2 * score.shape[1]], LAYOUT).slice(0, score.shape[1])


@gluon.jit
def multiply(
    queries, keys, values, scores, sums, q_full, k_full, k_free, v_full, v_free, s_full, p_full, o_full,
    $walk,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Issues every product. They run in this order, so those of one warp group beside the softmax of the other; and a
    commit tells of all products before it."""
    tiles = 0  $if tabled
    for i in range(gl.load(Count + entry)):  $if tabled
        $include triton.shared.record
        tiles += hi - lo  $if tabled
    tiles = hi - lo  $if not tabled
    for half in range($groups):
        mbarrier.wait(q_full.index(half), 0)
    for i in range((tiles + 1) * $groups):
        n, half = i // $groups, i % $groups
        slot, before = n % STAGES, (n - 1) % STAGES
        score = scores.index(half)
        if n > 0:
            mbarrier.wait(v_full.index(before), (n - 1) // STAGES & 1)
            mbarrier.wait(p_full.index(half), (n - 1) & 1)
            value = values.index(before).reshape([BLOCK_K, DIM_V])
            blackwell.tcgen05_mma(weights_in(score, values.dtype), value, sums.index(half))
            if half == $last:
                blackwell.tcgen05_commit(v_free.index(before))
        if n < tiles:
            mbarrier.wait(k_full.index(slot), n // STAGES & 1)
            query = queries.index(half).reshape([$rows, DIM])
            key = keys.index(slot).reshape([BLOCK_K, DIM]).permute((1, 0))
            blackwell.tcgen05_mma(query, key, score, use_acc=False)
            if half == $last:
                blackwell.tcgen05_commit(k_free.index(slot))
            blackwell.tcgen05_commit(s_full.index(half))
        else:
            blackwell.tcgen05_commit(o_full.index(half))


@gluon.jit
def consume(
    half: gl.constexpr, Out, outs, scores, sums, s_full, p_full, o_full,
    $include shared.consumed
    BLOCK_K: gl.constexpr,
):
    """Attention of a warp group's queries, of which every thread has one: softmax between products of `multiply`."""
    SCORES: gl.constexpr = gl.BlockedLayout([1, BLOCK_K], [32, 1], [4, 1], [0, 1])
    SUMS: gl.constexpr = gl.BlockedLayout([1, $width], [32, 1], [4, 1], [0, 1])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    EACH: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])  # all rows in every warp
    rows = half * $rows + gl.arange(0, $rows, ROWS)
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, SCORES))
    present = start + rows < q_len
    $rows_of_q
    $hoisted
    unit = $in_unit * LOG2E  $if in_unit
    top = gl.full([$rows], LOWEST, gl.float32, ROWS)
    total = gl.full([$rows], 0.0, gl.float32, ROWS)
    acc = sums.index(half)
    for part in gl.static_range($parts):
        acc.slice(part * $width, $width).store(gl.full([$rows, $width], 0.0, gl.float32, SUMS))
    n = 0  # tiles so far
    for i in range(gl.load(Count + entry)):  $if tabled
        $include shared.tile_range
        $for tiles:
            # $which
            for j in range($range):
                tile = $tile  $if positioned
                $include tile

    $include triton.shared.lse
    weight = gl.convert_layout($rescale / $whole, gl.SliceLayout(1, SUMS))
    out = outs.index(half).reshape([$rows, DIM_V])
    mbarrier.wait(o_full.index(half), 0)
    for part in gl.static_range($parts):
        found = acc.slice(part * $width, $width).load(SUMS) * weight[:, None]
        out.slice(part * $width, $width, 1).store(found.to(Out.dtype))
    hopper.fence_async_shared()
    store_tile(Out, [batch, head, start + half * $rows, 0], outs.index(half))
    $include shared.store_rows


$jit
def attention_forward(
    Q, K, V, Out,  # descriptors of [batch, heads, length, dim], in blocks of $rows queries or BLOCK_K keys
    $include shared.signature
):
    $include shared.begin
    SCORES: gl.constexpr = blackwell.TensorMemoryLayout([$rows, BLOCK_K], col_stride=1)
    SUMS: gl.constexpr = blackwell.TensorMemoryLayout([$rows, DIM_V], col_stride=1)
    scores = blackwell.allocate_tensor_memory(gl.float32, [$groups, $rows, BLOCK_K], SCORES)
    sums = blackwell.allocate_tensor_memory(gl.float32, [$groups, $rows, DIM_V], SUMS)
    for half in gl.static_range($groups):
        mbarrier.init(q_full.index(half), count=1)
        mbarrier.init(s_full.index(half), count=1)
        mbarrier.init(p_full.index(half), count=1)
        mbarrier.init(o_full.index(half), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_free.index(slot), count=1)
        mbarrier.init(v_free.index(slot), count=1)
    gl.warp_specialize(
        [
            $for halves:
                (consume, (
                    gl.constexpr($half), Out, outs, scores, sums, s_full, p_full, o_full,
                    $include shared.consumed
                    BLOCK_K,
                )),
            (multiply, (
                queries, keys, values, scores, sums, q_full, k_full, k_free, v_full, v_free, s_full, p_full, o_full,
                $walk,
                BLOCK_K, STAGES,
            )),
            $include shared.producer
        ],
        $warps,
        $registers,
    )

$part tile
$# One tile of keys: its scores out of tensor memory, their weights by the online softmax into it.
mbarrier.wait(s_full.index(half), n & 1)
score = scores.index(half).load(SCORES)
inside = tile * BLOCK_K + columns < kv_len  $if bounded
$column
$visible
$score_mod
score = gl.where(visible, score, -INFINITY)  $if border
peak = gl.maximum(top, gl.max(score, 1) * $unit)
$if slack:
    # Weights are relative to `top`, which follows the largest score once that is 2**8 times as large: up to 256 they are
    # as exact as up to 1, the same `top` is in the sums, and so in none of the results. Sums are rarely rescaled.
grown = peak > top$slack
# Of the group's rows, known by the end of the exponentials. Where no weight came before, the sums are 0.
any_grown = gl.max(gl.convert_layout((grown & (total > 0.0)).to(gl.int32), EACH), 0) > 0
peak = gl.where(grown, peak, top)  $if slack
$if by_polynomial:
    exponent = score * $unit - peak[:, None]
    p = gl.where(columns[None, :] % 32 < $by_polynomial, exp2_polynomial(exponent), gl.exp2(exponent))
$else:
    p = gl.exp2(score * $unit - peak[:, None])
rescale = gl.exp2(top - peak)
total = total * rescale + gl.sum(p, 1)
$dropout
weights_in(scores.index(half), Out.dtype).store(p.to(Out.dtype))
if any_grown:
    # `s_full` means that the products before these scores are done too: nothing adds to the sums now.
    for part in gl.static_range($parts):
        some = acc.slice(part * $width, $width)
        some.store(some.load(SUMS) * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None])
mbarrier.arrive(p_full.index(half), count=1)
top = peak
n += 1
