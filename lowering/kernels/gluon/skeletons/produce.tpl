@gluon.jit
def produce(
    Q, K, V, queries, keys, values, q_full, k_full, k_free, v_full, v_free, batch, head, kv_head, start,
    $walk,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):
    """Loads the queries of every warp group, then every tile of keys and of values into the rings, by TMA."""
    for half in gl.static_range($groups):
        mbarrier.expect(q_full.index(half), Q.block_type.nbytes)
        load_tile(Q, [batch, head, start + half * (BLOCK_Q // $groups), 0], q_full.index(half), queries.index(half))
    n = 0  # tiles so far
    for i in range(gl.load(Count + entry)):  $if tabled
        $include triton.record
        left = full_lo - lo
        borders = left + hi - full_hi
        for j in range(hi - lo):
            $include walked
            slot = n % STAGES
            phase = n // STAGES & 1 ^ 1
            mbarrier.wait(k_free.index(slot), phase)
            mbarrier.expect(k_full.index(slot), K.block_type.nbytes)
            load_tile(K, [batch, kv_head, tile * BLOCK_K, 0], k_full.index(slot), keys.index(slot))
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_full.index(slot), V.block_type.nbytes)
            load_tile(V, [batch, kv_head, tile * BLOCK_K, 0], v_full.index(slot), values.index(slot))
            n += 1
