$# The tile of a step: first border tiles, before and behind the full ones, then the full ones.
tile = gl.where(j < left, lo + j, j - left + full_hi)
tile = gl.where(j < borders, tile, j - borders + full_lo)
