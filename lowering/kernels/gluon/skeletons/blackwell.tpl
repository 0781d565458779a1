$include produce


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
        $include triton.record
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
    Lse,$results batch, head, place, start, scale, q_len, kv_len,
    $walk,
    $passed
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
        $include triton.record
        left = full_lo - lo
        borders = left + hi - full_hi
        $for tiles:
            # $which
            for j in range($range):
                tile = $tile  $if positioned
                $include blackwell_tile

    $include triton.lse
    weight = gl.convert_layout($rescale / $whole, gl.SliceLayout(1, SUMS))
    out = outs.index(half).reshape([$rows, DIM_V])
    mbarrier.wait(o_full.index(half), 0)
    for part in gl.static_range($parts):
        found = acc.slice(part * $width, $width).load(SUMS) * weight[:, None]
        out.slice(part * $width, $width, 1).store(found.to(Out.dtype))
    hopper.fence_async_shared()
    store_tile(Out, [batch, head, start + half * $rows, 0], outs.index(half))
    row_at = place.to(gl.int64) * q_len + start + rows
    gl.store(Lse + row_at, lse, mask=present)
    gl.store(Top + row_at, largest, mask=present)  $if row_max
    gl.store(Low + row_at, low, mask=present)  $if lse_residual
    tma.store_wait(0)


$jit
def attention_forward(
    Q, K, V, Out,  # descriptors of [batch, heads, length, dim], in blocks of $rows queries or BLOCK_K keys
    $include signature
):
    $include begin
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
                    Lse,$results batch, head, place, start, scale, q_len, kv_len,
                    $walk,
                    $passed
                    BLOCK_K,
                )),
            (multiply, (
                queries, keys, values, scores, sums, q_full, k_full, k_free, v_full, v_free, s_full, p_full, o_full,
                $walk,
                BLOCK_K, STAGES,
            )),
            (produce, (
                Q, K, V, queries, keys, values, q_full, k_full, k_free, v_full, v_free, batch, head, kv_head, start,
                $walk,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
        ],
        $warps,
        $registers,
    )
