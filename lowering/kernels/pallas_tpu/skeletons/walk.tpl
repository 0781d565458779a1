$# The function that a Pallas TPU kernel finds its tile with, by a list of words or by search.

$part locate
def locate(b, h, step, slice_of, words, $static):
    """$what of a step; whether it visits that tile, the tile is FULL, the row starts, the row ends."""
    places = slice_of.shape[0]
    own = 0 if places == 1 else h if places == programs else b * programs + h
    word = words[step] if words.shape[0] == room else words[slice_of[own] * room + step]
    tile, row = word >> $flags & (1 << tile_bits) - 1, word >> tile_bits + $flags
    $part
    return ($result), $done

$part search
def locate(b, h, step, slice_of, shift, anchor, first, records, $static):
    """$what of a step; whether it visits that tile, the tile is FULL, the row starts, the row ends."""
    at = slice_of[lax.rem(b * programs + h, Int(slice_of.shape[0]))]
    start, slices = at * (rows + 1), first.shape[0] // (rows + 1)
    here = jnp.minimum(step, first[start + rows] - 1)  # a shorter sequence stays at its last tile

    def next_row(found):
        row, _, end = found
        return row + 1, end, first[start + row + 2]

    row = anchor[at * (anchor.shape[0] // slices) + (here >> shift[0])]
    begin, end = first[start + row], first[start + row + 1]
    row, begin, end = lax.while_loop(lambda found: found[2] <= here, next_row, (row, begin, end))
    position = here - begin
    $turn
    number = records.shape[0] // (4 * slices * rows)
    base = 4 * number * (at * rows + row)

    def later(i, found):
        return jnp.where(records[base + 4 * i] <= position, i, found)

    found = lax.fori_loop(Int(1), Int(number), later, Int(0)) if number > 1 else Int(0)
    record = base + 4 * found
    sees = records[record] <= position
    full = (records[record + 2] <= position) & (position < records[record + 3])
    $part
    tile = jnp.where(sees, position + records[record + 1], 0)
    return ($result), (sees & (step < end), full, step == begin, step + 1 == end)

$part turn
each = jnp.maximum(lax.div(end - begin, Int(fold)), 1)
turn = lax.div(position, each)
position = position - turn * each
