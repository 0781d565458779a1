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
exponent = score * $unit - peak[:, None]  $if by_polynomial
p = gl.where(columns[None, :] % 32 < $by_polynomial, exp2_polynomial(exponent), gl.exp2(exponent))  $if by_polynomial
p = gl.exp2(score * $unit - peak[:, None])  $if not by_polynomial
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
