$# `lse` of a row from its largest score and sum of weights.
largest = tl.where(total == 0.0, -INFINITY, top * LN2)  $if row_max and guard
largest = top * LN2  $if row_max and not guard
$if sinks:
    # The sink is one more logit, without a value.
    sink = tl.load(Sinks + head) * LOG2E
    peak = tl.maximum(top, sink)
    rescale = tl.exp2(top - peak)
    total = total * rescale + tl.exp2(sink - peak)
    top = peak
$if guard:
    # A row without a visible key gives 0, and lse -inf.
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, -INFINITY, (top + tl.log2(total)) * LN2)
$else:
    lse = (top + tl.log2(total)) * LN2
$if lse_residual:
    # By the product that attention_delta stores: a maximum is not joined to the sum without rounding.
    near = tl.maximum(lse * LOG2E, LOWEST)
    low = (top - near + tl.log2(total)) * LN2
    low = tl.where(empty, 0.0, low)  $if guard
