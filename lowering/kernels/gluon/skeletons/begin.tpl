$include triton.row
start = row * BLOCK_Q
kv_head = head // GROUP
$include triton.scalars
$include triton.closed_form
lo, full_lo = 0, 0  $if everything
full_hi, hi = kv_len // BLOCK_K, gl.cdiv(kv_len, BLOCK_K)  $if everything
queries = gl.allocate_shared_memory(Q.dtype, [$groups] + Q.block_type.shape, Q.layout)
outs = queries  # the queries have been read by then  $if same
outs = gl.allocate_shared_memory(Out.dtype, [$groups] + Out.block_type.shape, Out.layout)  $if not same
keys = gl.allocate_shared_memory(K.dtype, [STAGES] + K.block_type.shape, K.layout)
values = gl.allocate_shared_memory(V.dtype, [STAGES] + V.block_type.shape, V.layout)
$for barriers:
    $name = gl.allocate_shared_memory(gl.int64, [$count, 1], mbarrier.MBarrierLayout())
