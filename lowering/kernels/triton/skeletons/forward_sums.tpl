unit = $in_unit * LOG2E  $if in_unit
top = tl.full([BLOCK_Q], LOWEST, tl.float32)
total = tl.zeros([BLOCK_Q], tl.float32)
$for values:
    acc$mark = tl.zeros([BLOCK_Q, $width], tl.float32)
