paged = $pages + batch.to(tl.int64) * $pages_step  $if paged
K += batch.to(tl.int64) * stride_kb + $kv_head.to(tl.int64) * stride_kh  $if not paged
K += $kv_head.to(tl.int64) * stride_kh  $if paged
V += batch.to(tl.int64) * stride_vb + $kv_head.to(tl.int64) * stride_vh  $if not paged
V += $kv_head.to(tl.int64) * stride_vh  $if paged
$for head:
    key_at$mark = columns[None, :] * stride_ks + $d[:, None] * stride_kd  $if not numbered
    key_at$mark = $d[:, None] * stride_kd  $if numbered
$for values:
    value_at$mark = columns[:, None] * stride_vs + $d[None, :] * stride_vd  $if not numbered
    value_at$mark = $d[None, :] * stride_vd  $if numbered
