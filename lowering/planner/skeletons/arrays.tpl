$# What every planner on arrays does, in functions that jax.numpy, torch and numpy share.

$part shared
EMPTY, PARTIAL, FULL, OPEN = 0, 1, 2, 3
FAR = 1 << 30  # beyond every position
FINE, GRAIN = 4096, 32  # tables up to FINE entries are searched entry by entry, longer ones in blocks


def nth(flags, n):
    """Where the first n true flags of each row are, and whether there are so many."""
    count, wanted = cumsum(flags), arange(n, flags) + 1
    return minimum(below(count, wanted), flags.shape[-1] - 1), wanted <= count[..., -1:]


def stops(start, columns):
    return concat([start[..., 1:], start[..., :1] * 0 + columns])


def shifted(kind, by):
    return concat([kind[..., :by] * 0, kind[..., :-by]])


def kept(flags, start, kind, n, columns):
    """The pieces with a flag, in n slots; slots without a piece begin at `columns`."""
    place, there = nth(flags, n)
    return where(there, take(start, place), columns), where(there, take(kind, place), EMPTY)


def joined(start, kind, columns):
    """Neighbours of one kind become one piece, EMPTY ones before the first are left out."""
    new = (kind != shifted(kind, 1)) | (kind == OPEN)
    return kept(new & (start < columns), start, kind, start.shape[-1], columns)


def records_of(start, kind, columns, n):
    """Runs of tiles as records (lo, full_lo, full_hi, hi), n per row: bounds, count, whether that was enough.
    Partial, full, partial share a record; every other full run opens a new one."""
    stop = stops(start, columns)
    live, before, second = kind != EMPTY, shifted(kind, 1), shifted(shifted(kind, 1), 1)
    follows = (before == PARTIAL) & (second == EMPTY)
    opens = live & ((before == EMPTY) | ((kind == FULL) & ~follows))
    place, there = nth(opens, n)

    def at(x, i):
        return take(x, minimum(i, x.shape[-1] - 1))

    def kind_at(i):
        return where(i < kind.shape[-1], at(kind, i), EMPTY)

    full = where(kind_at(place) == FULL, place, place + 1)
    has = kind_at(full) == FULL
    last = where(has, full + (kind_at(full + 1) == PARTIAL), place)
    lo, hi = at(start, place), at(stop, last)
    total = cumsum(opens)[..., -1:]
    more = (arange(n, start) == n - 1) & (total > n)  # the last record takes in what is left, as PARTIAL
    hi = where(more, top(where(live, stop, 0)), hi)
    parts = (lo, where(has, at(start, full), hi), where(has, at(stop, full), hi), hi)
    bounds = concat([where(there, x, 0)[..., None] for x in parts])
    return bounds, minimum(total, n)[..., 0], (total > n).any()

$part intervals
def swept(seen, hidden, columns):
    """Intervals of tiles united: pieces of every row, PARTIAL where a hidden interval reaches."""
    ends = sort(concat([x for pair in (*seen, *hidden) for x in pair]))
    start = concat([ends[..., :1] * 0, ends])

    def covered(parts):
        hit = start < 0
        for lo, hi in parts:
            hit = hit | ((lo <= start) & (start < hi))
        return hit

    kind = where(covered(seen), where(covered(hidden), PARTIAL, FULL), EMPTY)
    start, kind = kept(stops(start, columns) > start, start, kind, start.shape[-1], columns)
    return joined(start, kind, columns)

$part pieces
def widths(columns, room):
    """Tiles of a piece, level by level: half the room at first, then four pieces for one, down to a tile."""
    width = 1 if columns <= room else -(-columns // max(room // 2, 1))
    found = [width]
    while found[-1] > 1:
        found.append(-(-found[-1] // 4))
    return found


def split(start, kind, width, columns):
    """Open pieces cut into pieces of `width` tiles, first come first served while there is room."""
    room = start.shape[-1]
    used = where(start < columns, 1, 0)
    parts = where(kind == OPEN, (stops(start, columns) - start + width - 1) // width, used)
    fits = cumsum(parts - used) <= room - cumsum(used)[..., -1:]
    parts = where(fits, parts, used)
    end = cumsum(parts)
    slot = arange(room, start)
    source = minimum(below(end, slot + 1), room - 1)
    offset = slot - take(end - parts, source)
    there = slot < end[..., -1:]
    start = where(there, take(start, source) + offset * width, columns)
    return start, where(there, take(kind, source), EMPTY)
