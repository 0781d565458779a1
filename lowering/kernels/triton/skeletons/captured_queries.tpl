present = start + rows < q_len
at = tl.cast(start, tl.int64)
query = tl.load(q_at + at * stride_qs + (rows[:, None] * stride_qs + d[None, :] * stride_qd)$own_d)
dout = tl.load(dout_at + at * stride_gs + (rows[:, None] * stride_gs + $e[None, :] * stride_gd)$own_e)
at_q = at + tl.cast(place, tl.int64) * q_len
$include stats
