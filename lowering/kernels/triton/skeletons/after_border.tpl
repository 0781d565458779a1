# `edge` is below `hi`, which the compiler does not know: so it computes the first addresses of the full tiles after the
# border tiles, and does not hold them in tens of registers.
full_lo = tl.where(edge < hi, full_lo, hi)
