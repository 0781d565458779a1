q_first = ${open}q_origin + start$close
q_last = ${open}q_origin + tl.minimum(start + $queries, q_len) - 1$close
k_first = k_origin$wide
k_last = ${open}k_origin + kv_len - 1$close
