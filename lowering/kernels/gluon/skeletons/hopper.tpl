$part kernel
$# The forward on Hopper: the warp that loads, the two warp groups that compute, and the kernel that starts them.
$include shared.produce
$if unwritten:
    $include clean


@gluon.jit
def consume(
    half: gl.constexpr, $memory, q_full, k_full, k_free, v_full, v_free$turns,
    $include shared.consumed
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Attention of one half of the queries: a warp group that computes while the other one's products run."""
    HALF: gl.constexpr = BLOCK_Q // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_K, $depth])
    $for values:
        SUMS$mark: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, $width, $depth])
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
    borders_done = 0  # modulo 2  $if unwritten
    $for values:
        acc$mark = gl.full([HALF, $width], 0.0, gl.float32, SUMS$mark)
    $for head:
        query$mark = queries$mark.index(half).reshape([HALF, $width])
    mbarrier.wait(q_full.index(half), 0)
    n = 0  # tiles so far
    for i in range(gl.load(Count + entry)):  $if tabled
        $include shared.tile_range
        if lo < hi:
            $include run

    $include triton.shared.lse
    largest = largest + $shift * LN2  # weights are 2**$shift times as large  $if row_max and eight
    $for values:
        weight$mark = gl.convert_layout($rescale$of_values / $whole, gl.SliceLayout(1, SUMS$mark))
        out$mark = outs$mark.index(half)
    group_barrier()
    $for values:
        out$mark.reshape([HALF, $width]).store((acc$mark * weight$mark[:, None]).to(Out$mark.dtype))
    hopper.fence_async_shared()
    $for values:
        store_tile(Out$mark, [batch, head, start + half * HALF, $first], out$mark)
    $include shared.store_rows


$jit
def attention_forward(
    $descriptors,  # descriptors of [batch, heads, length, dim], in blocks of BLOCK_Q / 2 queries or BLOCK_K keys
    # K and V are pools, [pages, heads, tokens of a page, dim], in blocks of $tokens tokens  $if paged
    # 0 and 1: blocks of the first and of the second part of a head  $if split
    $include shared.signature
):
    $include shared.begin
    for half in gl.static_range(2):
        mbarrier.init(q_full.index(half), count=1)
        mbarrier.init(turns.index(half), count=1)  $if turns
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_free.index(slot), count=2)  # both halves have read it
        mbarrier.init(v_free.index(slot), count=2)
    $if unwritten:
        mbarrier.init(told.index(0), count=2)  # both halves have said which keys they see
        mbarrier.init(cleaned.index(0), count=2)
        seen = gl.allocate_shared_memory(gl.int32, [2, BLOCK_K // 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mbarrier.arrive(turns.index(0), count=1)  $if turns
    gl.warp_specialize(
        [
            $for halves:
                (consume, (
                    gl.constexpr($half), $memory, q_full, k_full, k_free, v_full, v_free$turns,
                    $include shared.consumed
                    BLOCK_Q, BLOCK_K, STAGES,
                )),
            $include shared.producer
        ],
        [4, 1],
        [$of_half, $of_producer],
    )

$part run
$# The tiles of one record. The product with values is one tile behind that with keys: it runs beside the softmax.
$for tiles:
    # $which
    for j in range($range):  $if loop
        tile = $tile  $if positioned
        $include tile
$include round_weights
mbarrier.wait(v_full.index(before), before_phase)
$include multiply_values
$sums = hopper.warpgroup_mma_wait(0, [$sums])
mbarrier.arrive(v_free.index(before), count=1)

$part round_weights
$if eight:
    # Not before: carried around the loop, numbers of 8 bits take a register each.
    $for values:
        weights$mark = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS$mark, 4)).to(values$mark.dtype)

$part multiply_values
$for values:
    acc$mark = hopper.warpgroup_mma(weights$mark, values$mark.index(before).$seen, acc$mark, is_async=True)

$part tile
$# One tile of keys: its scores, their weights by the online softmax, and beside it the tile before, with values.
slot, phase = n % STAGES, n // STAGES & 1
$factors
$if loop:
    $include round_weights
mbarrier.wait(k_full.index(slot), phase)
mbarrier.wait(turns.index(half), n & 1)  $if turns
$for head:
    key$mark = keys$mark.index(slot).reshape([BLOCK_K, $width]).permute((1, 0))
    score = hopper.warpgroup_mma(query$mark, key$mark, $so_far, is_async=True)
$if loop:
    mbarrier.wait(v_full.index(before), before_phase)
    $include multiply_values
mbarrier.arrive(turns.index(1 - half), count=1)  $if turns
score = hopper.warpgroup_mma_wait($running, [score])
mbarrier.arrive(k_free.index(slot), count=1)
inside = tile * BLOCK_K + columns < kv_len  $if bounded
$column
$visible
$score_mod
score = gl.where(visible, score, -INFINITY)  $if border
peak = gl.maximum(top, gl.max(score, 1) * $unit$less)
p = gl.exp2(score * $unit_of_rows - peak[:, None])
rescale = gl.exp2(top - peak)
total = total * rescale + gl.sum(p, 1)
$dropout
p = p.to($first_out.dtype)  $if not eight
$in_order
$if loop:
    mbarrier.wait(v_full.index(before), before_phase)  # again: no compiler moves the softmax past its branch
    $sums = hopper.warpgroup_mma_wait(0, [$sums])
    mbarrier.arrive(v_free.index(before), count=1)
    $for values:
        acc$mark *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS$mark))[:, None]
$for values:
    acc$mark *= gl.convert_layout(rescale, gl.SliceLayout(1, SUMS$mark))[:, None]  # of earlier records  $if tabled and not loop
    weights$mark = gl.convert_layout(p, gl.DotOperandLayout(0, SUMS$mark, 2))  $if not eight
$if border and unwritten:
    # Values that no query of the tile sees may never have been written, and 0 times NaN is NaN.
    bits = gl.where((p > 0) & present[:, None], 1 << (columns % 32)[None, :], 0)
    bits = gl.sum(bits.reshape([HALF, BLOCK_K // 32, 32]), 2)
    seen.index(half).store(gl.reduce(bits, 0, either))
    mbarrier.arrive(told.index(0), count=1)
    mbarrier.wait(told.index(0), borders_done)
    mbarrier.wait(v_full.index(slot), phase)
    $for values:
        clean(values$mark.index(slot).reshape([BLOCK_K, $width]), seen, half, BLOCK_K, $width)
    hopper.fence_async_shared()
    mbarrier.arrive(cleaned.index(0), count=1)
    mbarrier.wait(cleaned.index(0), borders_done)
    borders_done ^= 1
top = peak
before, before_phase = slot, phase
n += 1

$part clean


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
