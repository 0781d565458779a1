$part kernel
$# The forward on Blackwell: the warp that loads, the one that multiplies, the warp groups that compute, and the kernel.
@gluon.jit
def produce(
    Q, K, V, queries, keys, values, q_full, full, free, batch, head, kv_head, start,
    $walk,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Loads the queries of every warp group, then tiles of keys and of values in turn into one ring, by TMA."""
    for half in gl.static_range($groups):
        mbarrier.expect(q_full.index(half), Q.block_type.nbytes)
        load_tile(Q, [batch, head, start + half * (BLOCK_Q // $groups), 0], q_full.index(half), queries.index(half))
    n = 0  # tiles so far
    for i in range(gl.load(Count + entry)):  $if tabled
        $include shared.tile_range
        for j in range(hi - lo):
            $include shared.tile_of_step
            $for loads:
                slot = n % STAGES
                mbarrier.wait(free.index(slot), n // STAGES & 1 ^ 1)
                mbarrier.expect(full.index(slot), $of.block_type.nbytes)
                load_tile($of, [batch, kv_head, tile * BLOCK_K, 0], full.index(slot), $into.index($at))
                n += 1


@gluon.jit
def weights_in(score, dtype: gl.constexpr):
    """The weights of a tile, which lie where its scores were."""
    LAYOUT: gl.constexpr = blackwell.TensorMemoryLayout([score.shape[0], score.shape[1]], col_stride=1)
    return seen_as(score, dtype, [score.shape[0], 2 * score.shape[1]], LAYOUT).slice(0, score.shape[1])


@gluon.jit
def multiply(
    queries, keys, values, scores, sums, q_full, full, free, s_full, p_full, o_full,
    $walk,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Issues every product. They run in this order, during a softmax that does not wait for them; and a commit tells of
    all products before it."""
    PIECE: gl.constexpr = BLOCK_K // $pieces
    tiles = 0  $if tabled
    for i in range(gl.load(Count + entry)):  $if tabled
        $include triton.shared.record
        tiles += hi - lo  $if tabled
    tiles = hi - lo  $if not tabled
    for half in range($groups):
        mbarrier.wait(q_full.index(half), 0)
    for i in range((tiles + 1) * $groups):
        n, half = i // $groups, i % $groups
        $if alone:
            $include product_with_keys
        $include product_with_values
        $if not alone:
            $include product_with_keys
    blackwell.tcgen05_commit(o_full.index(2))  $if alone


@gluon.jit
def consume(
    half: gl.constexpr, Out, outs, scores, sums, s_full, p_full, o_full,
    $include shared.consumed
    BLOCK_K: gl.constexpr,
):
    """Attention of a warp group's queries, of which every thread has one: softmax between products of `multiply`."""
    SCORES: gl.constexpr = gl.BlockedLayout([1, BLOCK_K], [32, 1], [4, 1], [0, 1])
    PIECE: gl.constexpr = BLOCK_K // $pieces
    PIECES: gl.constexpr = gl.BlockedLayout([1, PIECE], [32, 1], [4, 1], [0, 1])
    SUMS: gl.constexpr = gl.BlockedLayout([1, $width], [32, 1], [4, 1], [0, 1])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    EACH: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])  # all rows in every warp
    rows = half * $rows + gl.arange(0, $rows, ROWS)
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, SCORES))
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
    mbarrier.wait(o_full.index(half), 0)  $if not alone
    mbarrier.wait(o_full.index(2), 0)  $if alone
    for part in gl.static_range($parts):
        found = acc.slice(part * $width, $width).load(SUMS) * weight[:, None]
        out.slice(part * $width, $width, 1).store(found.to(Out.dtype))
    hopper.fence_async_shared()
    store_tile(Out, [batch, head, start + half * $rows, 0], outs.index(half))
    rows = half * $rows + gl.arange(0, $rows, ROWS)  # again, so that no register keeps them over the loops
    present = start + rows < q_len
    $include shared.store_rows


$jit
def attention_forward(
    Q, K, V, Out,  # descriptors of [batch, heads, length, dim], in blocks of $rows queries or BLOCK_K keys
    $include shared.signature
):
    $include shared.begin
    SCORES: gl.constexpr = blackwell.TensorMemoryLayout([$rows, BLOCK_K], col_stride=1)
    SUMS: gl.constexpr = blackwell.TensorMemoryLayout([$rows, DIM_V], col_stride=1)
    scores = blackwell.allocate_tensor_memory(gl.float32, [2, $rows, BLOCK_K], SCORES)
    sums = blackwell.allocate_tensor_memory(gl.float32, [$groups, $rows, DIM_V], SUMS)
    # A ring of tiles: a slot has one of keys, then one of values.
    ring = gl.allocate_shared_memory($widest.dtype, [STAGES] + $widest.block_type.shape, $widest.layout)
    keys = $keys_in
    values = $values_in
    for half in gl.static_range($groups):
        mbarrier.init(q_full.index(half), count=1)
    for buffer in gl.static_range(2):
        mbarrier.init(s_full.index(buffer), count=1)
        mbarrier.init(o_full.index(buffer), count=1)
    mbarrier.init(o_full.index(2), count=1)  $if alone
    for piece in gl.static_range(2 * $pieces):
        mbarrier.init(p_full.index(piece), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    gl.warp_specialize(
        [
            $for halves:
                (consume, (
                    gl.constexpr($half), Out, outs, scores, sums, s_full, p_full, o_full,
                    $include shared.consumed
                    BLOCK_K,
                )),
            (multiply, (
                queries, keys, values, scores, sums, q_full, full, free, s_full, p_full, o_full,
                $walk,
                BLOCK_K, STAGES,
            )),
            (produce, (
                Q, K, V, queries, keys, values, q_full, full, free, batch, head, kv_head, start,
                $walk,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
        ],
        $warps,
        $registers,
    )

$part tile
$# One tile of keys: its scores out of tensor memory, their weights by the online softmax into it.
mbarrier.wait(s_full.index($buffer), $phase)
score = scores.index($buffer).load(SCORES)
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
# Of the group's rows, known by the end of the first exponentials. Where no weight came before, the sums are 0.
any_grown = gl.max(gl.convert_layout((grown & (total > 0.0)).to(gl.int32), EACH), 0) > 0
peak = gl.where(grown, peak, top)  $if slack
exponent = score * $unit - peak[:, None]
rescale = gl.exp2(top - peak)
total *= rescale
$if halved:
    # The product with the first half of the weights begins while the exponentials of the other half are computed.
    exponents = exponent.reshape([$rows, 2, PIECE]).permute((0, 2, 1)).split()
$else:
    exponents = (exponent,)
for piece in gl.static_range($pieces):
    exponent = gl.convert_layout(exponents[piece], PIECES)
    $if by_polynomial:
        within = gl.arange(0, PIECE, gl.SliceLayout(0, PIECES))[None, :]
        p = gl.where(within % 32 < $by_polynomial, exp2_polynomial(exponent), gl.exp2(exponent))
    $else:
        p = gl.exp2(exponent)
    total += gl.convert_layout(gl.sum(p, 1), ROWS)
    $dropout
    weights_in(scores.index($buffer), Out.dtype).slice(piece * PIECE, PIECE).store(p.to(Out.dtype))
    if piece == 0:
        if any_grown:
            # `s_full` means that the products before these scores are done too: nothing adds to the sums now.  $if not alone
            mbarrier.wait(o_full.index($before), $phase_before)  $if alone
            for part in gl.static_range($parts):
                some = acc.slice(part * $width, $width)
                some.store(some.load(SUMS) * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None])
    mbarrier.arrive(p_full.index($buffer * $pieces + piece), count=1)
top = peak
n += 1

$part product_with_values
if n > 0:
    turn = 2 * n - 1  # of the values of the tile before
    slot = turn % STAGES
    mbarrier.wait(full.index(slot), turn // STAGES & 1)
    value = values.index($value_at).reshape([BLOCK_K, DIM_V])
    for piece in gl.static_range($pieces):
        mbarrier.wait(p_full.index($before * $pieces + piece), $phase_before)
        weights = weights_in(scores.index($before), values.dtype).slice(piece * PIECE, PIECE)
        blackwell.tcgen05_mma(weights, value.slice(piece * PIECE, PIECE), sums.index(half))
    if half == $last:
        blackwell.tcgen05_commit(free.index(slot))
    blackwell.tcgen05_commit(o_full.index($before))  $if alone

$part product_with_keys
if n < tiles:
    turn = 2 * n
    slot = turn % STAGES
    mbarrier.wait(full.index(slot), turn // STAGES & 1)
    query = queries.index(half).reshape([$rows, DIM])
    key = keys.index($key_at).reshape([BLOCK_K, DIM]).permute((1, 0))
    blackwell.tcgen05_mma(query, key, scores.index($buffer), use_acc=False)
    if half == $last:
        blackwell.tcgen05_commit(free.index(slot))
    blackwell.tcgen05_commit(s_full.index($buffer))
$if not alone:
    else:
        blackwell.tcgen05_commit(o_full.index(half))
