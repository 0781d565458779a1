Lse,  # float32 [batch, heads, q_len], contiguous
Top,  # the largest scores, as Lse  $if row_max
Low,  # the rounding error of Lse  $if lse_residual
Sinks,  # float32 [heads]: one more logit in the denominator  $if sinks
scale, $numbers,
$include triton.parameters
STAGES: gl.constexpr,  # tiles of keys, and of values, that are in shared memory at once
