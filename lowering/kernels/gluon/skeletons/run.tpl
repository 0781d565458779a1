$# The tiles of one record. The product with values is one tile behind that with keys: it runs beside the softmax.
$for tiles:
    # $which
    for j in range($range):  $if loop
        tile = $tile  $if positioned
        $include tile
mbarrier.wait(v_full.index(before), before_phase)
acc = hopper.warpgroup_mma(weights, values.index(before).reshape([BLOCK_K, DIM_V]), acc, is_async=True)
acc = hopper.warpgroup_mma_wait(0, [acc])
mbarrier.arrive(v_free.index(before), count=1)
