$# The program's row of tiles, or its part of one, among those of the head that is at `$place`.
of_slice = tl.load(SliceOf + $place)
program = Parts + (of_slice * tl.num_programs($of_row) + tl.program_id($of_row)).to(tl.int64) * 4
row, sums = tl.load(program), tl.load(program + 1)  $if not swapped
row = tl.load(program)  $if swapped
begin, end = tl.load(program + 2), tl.load(program + 3)  $if not several
if row < 0:
    return  # another head has more programs
