$# dm, the cotangent of the modified score. The mask is a predicate on every tile, full ones too.
$visible
$score_mod
p = tl.where(visible, tl.exp2($exponent - lse) * factor, 0.0)
$dropout
# Where p is 0, dm is 0, even beside infinity.
dm = tl.where(p == 0.0, 0.0, p * (dp * kept - delta))  $if dropped
dm = tl.where(p == 0.0, 0.0, p * (dp - delta))  $if not dropped
