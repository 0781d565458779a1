$# The program's row among those that are in parts: the numbers of its first part, and how far those of others stand.
listed = Rows + (tl.load(SliceOf + $of_place) * (tl.num_programs(0) // queries) + row // queries) * 3
within, splits = row % queries, tl.load(listed + 2)
row = tl.load(listed) * queries + within
if (splits == 0) | (row >= $length):
    return  # another head has more rows in parts
rows = tl.cast(queries, tl.int64)  # of one part
first_at = (tl.load(At + place) + tl.load(listed + 1)) * rows + within
