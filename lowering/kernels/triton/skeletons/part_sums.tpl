$# The place of a part's sums, or -1: loaded behind the loops, where it takes no register of theirs.
sums = tl.load(SliceOf + $place) * tl.num_programs($of_row) + tl.program_id($of_row)
sums = tl.load(Parts + sums.to(tl.int64) * 4 + 1)
