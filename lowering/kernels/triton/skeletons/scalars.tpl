$# Origins, sizes, slots, `b` and `h` as the expressions read them.
$include values
b = ${open}b_origin + batch$close  $if by_batch
h = ${open}h_origin + head$close  $if by_head and not packs
