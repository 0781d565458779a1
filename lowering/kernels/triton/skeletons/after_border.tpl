# `edge` is below `hi`: only after the border tiles does the compiler know where the full ones begin. Otherwise it
# works out their first addresses before, and holds them in tens of registers.
full_lo = tl.where(edge < hi, full_lo, hi)
