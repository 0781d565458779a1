$# The tile of a step: border tiles before and behind the full ones first, then these.
tile = gl.where(j < left, lo + j, j - left + full_hi)
tile = gl.where(j < borders, tile, j - borders + full_lo)
