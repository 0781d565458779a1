inside = tile * BLOCK_K + columns < kv_len
at = tl.cast(tile * BLOCK_K, tl.int64)
keys = tl.load(k_at + at * stride_ks + (columns[:, None] * stride_ks + d[None, :] * stride_kd)$walked_d)
score = tl.dot(query, tl.trans(keys)$precision)$scale
values = tl.load(v_at + at * stride_vs + (columns[:, None] * stride_vs + $e[None, :] * stride_vd)$walked_e)
dp = tl.dot(dout, tl.trans(values)$precision)
