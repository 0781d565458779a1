$part kernel
$# The forward on Hopper: the warp that loads, the two warp groups that compute, and the kernel that starts them.
$include shared.produce


@gluon.jit
def consume(
    half: gl.constexpr, Out, outs, queries, keys, values, q_full, k_full, k_free, v_full, v_free, turns,
    $include shared.consumed
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
        $include shared.tile_range
        if lo < hi:
            $include run

    $include triton.shared.lse
    weight = gl.convert_layout($rescale / $whole, gl.SliceLayout(1, SUMS))
    out = outs.index(half)
    group_barrier()
    out.reshape([HALF, DIM_V]).store((acc * weight[:, None]).to(Out.dtype))
    hopper.fence_async_shared()
    store_tile(Out, [batch, head, start + half * HALF, 0], out)
    $include shared.store_rows


$jit
def attention_forward(
    Q, K, V, Out,  # descriptors of [batch, heads, length, dim], in blocks of BLOCK_Q / 2 queries or BLOCK_K keys
    $include shared.signature
):
    $include shared.begin
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
                    $include shared.consumed
                    BLOCK_Q, BLOCK_K, STAGES,
                )),
            $include shared.producer
        ],
        [4, 1],
        [240, 24],
    )

$part run
$# The tiles of one record. The product with values is one tile behind that with keys: it runs beside the softmax.
$for tiles:
    # $which
    for j in range($range):  $if loop
        tile = $tile  $if positioned
        $include tile
mbarrier.wait(v_full.index(before), before_phase)
acc = hopper.warpgroup_mma(weights, values.index(before).reshape([BLOCK_K, DIM_V]), acc, is_async=True)
acc = hopper.warpgroup_mma_wait(0, [acc])
mbarrier.arrive(v_free.index(before), count=1)

$part tile
$# One tile of keys: its scores, their weights by the online softmax, and beside it the tile before, with values.
slot, phase = n % STAGES, n // STAGES & 1
mbarrier.wait(k_full.index(slot), phase)
mbarrier.wait(turns.index(half), n & 1)
key = keys.index(slot).reshape([BLOCK_K, DIM]).permute((1, 0))
score = hopper.warpgroup_mma(query, key, zero, use_acc=False, is_async=True)
$if loop:
    mbarrier.wait(v_full.index(before), before_phase)
    acc = hopper.warpgroup_mma(weights, values.index(before).reshape([BLOCK_K, DIM_V]), acc, is_async=True)
mbarrier.arrive(turns.index(1 - half), count=1)
score = hopper.warpgroup_mma_wait($running, [score])
mbarrier.arrive(k_free.index(slot), count=1)
inside = tile * BLOCK_K + columns < kv_len  $if bounded
$column
$visible
$score_mod
score = gl.where(visible, score, -INFINITY)  $if border
peak = gl.maximum(top, gl.max(score, 1) * $unit)
p = gl.exp2(score * $unit - peak[:, None])
rescale = gl.exp2(top - peak)
total = total * rescale + gl.sum(p, 1)
$dropout
p = p.to(Out.dtype)
$if loop:
    mbarrier.wait(v_full.index(before), before_phase)  # again: no compiler moves the softmax past its branch
    acc = hopper.warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(v_free.index(before), count=1)
    acc *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
acc *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]  # of earlier records  $if tabled and not loop
weights = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS, 2))
top = peak
before, before_phase = slot, phase
n += 1
