$# The program's tile, among those of all heads and batches: the grid is (rows, heads, batch), or (heads, rows, batch),
$# where the longest rows of all heads come before the shorter ones of any.
head, batch = tl.program_id($of_head), tl.program_id(2)
place = batch * heads + head
$if listed:
    $include part
    distinct = of_slice * $rows_of_slice
distinct = tl.load(SliceOf + place) * tl.num_programs($of_row)  $if tabled and not listed
row = tl.load(Order + distinct + tl.program_id($of_row))  # longest first  $if tabled and ordered
row = tl.num_programs($of_row) - 1 - tl.program_id($of_row)  # longest first  $if ordered and not tabled
row = tl.program_id($of_row)  $if not ordered and not listed
entry = distinct + row  $if tabled
