columns = tl.arange(0, BLOCK_K)
$axes

# Offsets are 64 bits where they are scalars, 32 within a tile.  $if not described
