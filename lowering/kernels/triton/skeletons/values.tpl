$if vectors:
    if ORIGIN_PER_BATCH:
        $vectors
$conversions
