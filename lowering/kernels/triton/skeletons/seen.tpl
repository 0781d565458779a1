$# Whether the mask shows any of the tile `tile` of row `row`, which begins at `start`.
$if closed:
    $include corners
    $formulas
    # Some query of the tile sees keys first..last.
    $bounds
$if tabled:
    seen = 0
    entry = tl.cast(distinct + row, tl.int64)
    for i in range(tl.load(Count + entry)):
        record = Spans + (entry * records + i) * 4
        seen += ((tl.load(record) <= tile) & (tile < tl.load(record + 3))).to(tl.int32)
