$# The place of a part's sums, or -1. It is loaded behind the loops, so that it takes none of their registers.
sums = tl.load(SliceOf + $place) * tl.num_programs($of_row) + tl.program_id($of_row)
sums = tl.load(Parts + sums.to(tl.int64) * 4 + 1)
