unit = $in_unit * LOG2E  $if in_unit
survivor = 1.0 / (1.0 - $rate)  $if dropped
