$include produce


@gluon.jit
def consume(
    half: gl.constexpr, Out, outs, queries, keys, values, q_full, k_full, k_free, v_full, v_free, turns,
    Lse,$results batch, head, place, start, scale, q_len, kv_len,
    $walk,
    $passed
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
    $rows_of_q
    $hoisted
    unit = $in_unit * LOG2E  $if in_unit
    top = gl.full([HALF], LOWEST, gl.float32, ROWS)
    total = gl.full([HALF], 0.0, gl.float32, ROWS)
    zero = gl.full([HALF, BLOCK_K], 0.0, gl.float32, SCORES)
    acc = gl.full([HALF, DIM_V], 0.0, gl.float32, SUMS)
    query = queries.index(half).reshape([HALF, DIM])
    mbarrier.wait(q_full.index(half), 0)
    n = 0  # tiles so far
    for i in range(gl.load(Count + entry)):  $if tabled
        $include triton.record
        left = full_lo - lo
        borders = left + hi - full_hi
        if lo < hi:
            $include run

    $include triton.lse
    weight = gl.convert_layout($rescale / $whole, gl.SliceLayout(1, SUMS))
    out = outs.index(half)
    group_barrier()
    out.reshape([HALF, DIM_V]).store((acc * weight[:, None]).to(Out.dtype))
    hopper.fence_async_shared()
    store_tile(Out, [batch, head, start + half * HALF, 0], out)
    row_at = place.to(gl.int64) * q_len + start + rows
    gl.store(Lse + row_at, lse, mask=present)
    gl.store(Top + row_at, largest, mask=present)  $if row_max
    gl.store(Low + row_at, low, mask=present)  $if lse_residual
    tma.store_wait(0)


$jit
def attention_forward(
    Q, K, V, Out,  # descriptors of [batch, heads, length, dim], in blocks of BLOCK_Q / 2 queries or BLOCK_K keys
    $include signature
):
    $include begin
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
            $for halves:
                (consume, (
                    gl.constexpr($half), Out, outs, queries, keys, values, q_full, k_full, k_free, v_full, v_free, turns,
                    Lse,$results batch, head, place, start, scale, q_len, kv_len,
                    $walk,
                    $passed
                    BLOCK_Q, BLOCK_K, STAGES,
                )),
            (produce, (
                Q, K, V, queries, keys, values, q_full, k_full, k_free, v_full, v_free, batch, head, kv_head, start,
                $walk,
                BLOCK_Q, BLOCK_K, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )
