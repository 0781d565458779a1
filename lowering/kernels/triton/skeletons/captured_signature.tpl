Q, K, V, DOut,  # [batch, heads, length, dim], any strides
Stats,  # float32 [batch, heads, q_len, 4], contiguous: lse, factor and delta, of attention_delta
$results
stride_qb, stride_qh, stride_qs, stride_qd,
stride_kb, stride_kh, stride_ks, stride_kd,
stride_vb, stride_vh, stride_vs, stride_vd,
stride_gb, stride_gh, stride_gs, stride_gd,
scale, $numbers,
$include parameters
