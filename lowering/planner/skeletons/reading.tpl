$# Functions by which a planner on arrays reads tables: a text has those that it uses.

$part look
def look(table, *index):
    """A lookup: indices beyond the table mean its nearest entry."""
    return typed(table[tuple(clip(i, 0, n - 1) for i, n in zip(index, table.shape))])

$part leading
def leading(table, *index):
    """The place of leading indices in a table whose leading axes are made one."""
    place = 0
    for i, n in zip(index, table.shape):
        place = place * n + clip(i, 0, n - 1)
    return place

$part segment
def segment(offsets, x):
    return clip(search(offsets, x, "right") - 1, 0, max(offsets.shape[0] - 2, 0))

$part at_least
def at_least(table, x):
    """The first position of a sorted table whose entry is at least x."""
    found = search(table, x, "left")
    return where(found < table.shape[0], found, FAR)

$part at_most
def at_most(table, x):
    """The last position of a sorted table whose entry is at most x."""
    found = search(table, x, "right")
    return where(found < table.shape[0], found - 1, FAR)

$part above
def above(table, x):
    """The first position of a sorted table whose entry is above x."""
    found = search(table, x, "right")
    return where(found < table.shape[0], found, FAR)

$part under
def under(table, x):
    """The last position of a sorted table whose entry is below x."""
    found = search(table, x, "left")
    return where(found < table.shape[0], found - 1, FAR)

$part line
def line(table, join, other):
    """For the joins (minima or maxima) of a table over any range of its last axis: joins with what lies before
    and after within a block of `grain` entries, and over 1, 2, 4, ... blocks from each block on."""
    n = table.shape[-1]
    grain = 1 if n <= FINE else GRAIN
    count = -(-n // grain)
    if count * grain > n:
        table = concat([table, *[table[..., -1:]] * (count * grain - n)])
    ahead = behind = table.reshape(*table.shape[:-1], count, grain)
    step = 1
    while step < grain:
        ahead = concat([ahead[..., :step], join(ahead[..., step:], ahead[..., :-step])])
        behind = concat([join(behind[..., :-step], behind[..., step:]), behind[..., -step:]])
        step *= 2
    levels, step = [ahead[..., -1]], 1
    while 2 * step <= count:
        last = levels[-1]
        levels.append(concat([join(last[..., :-step], last[..., step:]), last[..., -step:]]))
        step *= 2
    return n, grain, count, join, other, ahead.reshape(-1), behind.reshape(-1), concat(levels).reshape(-1), len(levels)


def over(lines, row, lo, hi):
    """The join of the entries lo..hi, both included, of one row of the table; exact, or within one block wider."""
    n, grain, count, join, other, ahead, behind, windows, levels = lines
    lo, hi = (clip(scalar(x, Int, ahead), 0, n - 1) for x in (lo, hi))
    first, last = lo // grain, hi // grain
    a, z = behind[row * (count * grain) + lo], ahead[row * (count * grain) + hi]
    between = last - first - 1
    level, width = between * 0, between * 0 + 1
    for i in range(1, levels):
        level, width = where(between >= 2**i, i, level), where(between >= 2**i, 2**i, width)
    row = (row * levels + level) * count
    inner = join(windows[row + clip(first + 1, 0, count - 1)], windows[row + clip(last - width, 0, count - 1)])
    ends = join(a, z)
    return typed(where(between > 0, join(ends, inner), where(between == 0, ends, other(a, z))))

$part plane
def plane(table, join, axes):
    """For the joins of a table over any box of its last `axes` axes: blocks of 1, 2, 4, ... entries along each axis,
    one after the other, and where the blocks of each length begin."""
    shape, starts = table.shape[-axes:], []

    def swap(t, axis):
        return t.swapaxes(axis - axes, -1)

    for axis in range(axes):
        parts = [swap(table, axis)]
        while (size := parts[-1].shape[-1]) > 1:
            t = concat([parts[-1], parts[-1][..., -1:]]) if size % 2 else parts[-1]
            parts.append(join(t[..., 0::2], t[..., 1::2]))
        table = swap(concat(parts), axis)
        starts.append([sum(t.shape[-1] for t in parts[:i]) for i in range(len(parts))])
    return shape, starts, join, table.reshape(-1), table.shape[-axes:]


def within(planes, row, los, his):
    """The join of the entries of a box, ends included, or of a box that covers it."""
    shape, starts, join, flat, sizes = planes
    ends = []
    for lo, hi, n, first in zip(los, his, shape, starts):
        lo, hi = (clip(scalar(x, Int, flat), 0, n - 1) for x in (lo, hi))
        level = (hi - lo) * 0
        for i in range(1, len(first)):
            level = where((hi >> i - 1) - (lo >> i - 1) > 1, i, level)  # two blocks reach over it
        start = known(first, level)
        ends.append((start + (lo >> level), start + (hi >> level)))
    found = None
    for corner in range(2 ** len(shape)):
        at = row
        for axis, size in enumerate(sizes):
            at = at * size + ends[axis][corner >> axis & 1]
        part = flat[at]
        found = part if found is None else join(found, part)
    return typed(found)
