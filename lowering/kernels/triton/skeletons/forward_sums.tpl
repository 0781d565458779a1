unit = scale * LOG2E  $if plain
top = tl.full([BLOCK_Q], LOWEST, tl.float32)
total = tl.zeros([BLOCK_Q], tl.float32)
$for values:
    acc$mark = tl.zeros([BLOCK_Q, $width], tl.float32)
