$# Where the arrays of `batch` and `head` begin.
kv_head = head // GROUP  $if grouped
q_at = Q + tl.cast(batch, tl.int64) * stride_qb + tl.cast(head, tl.int64) * stride_qh
k_at = K + tl.cast(batch, tl.int64) * stride_kb + tl.cast($kv_head, tl.int64) * stride_kh
v_at = V + tl.cast(batch, tl.int64) * stride_vb + tl.cast($kv_head, tl.int64) * stride_vh
dout_at = DOut + tl.cast(batch, tl.int64) * stride_gb + tl.cast(head, tl.int64) * stride_gh
