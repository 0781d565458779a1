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
