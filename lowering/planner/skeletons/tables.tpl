$# The kernels of planners in Triton besides `plan_spans`: range tables, the order of rows.

$part header
import triton
import triton.language as tl

EMPTY, PARTIAL, FULL, OPEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FAR = tl.constexpr(1 << 30)  # beyond every position
FINE, GRAIN = tl.constexpr($fine), tl.constexpr($grain)  # tables up to FINE entries are searched entry by entry

$part lines
@triton.jit(do_not_specialize=["Table", "Least", "Most", "rows", "size", "stride_row", "stride"])
def lines(
    Table, Least, Most, rows, size, stride_row, stride, GRAIN_: tl.constexpr, BLOCKS: tl.constexpr,
):
    """Of each block of a row of a table, its least and greatest entries up to each place and from each place on, and
    of the whole block: the first of `windows`."""
    row = tl.program_id(0).to(tl.int64)
    count = (size + GRAIN_ - 1) // GRAIN_
    padded = (count * GRAIN_).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    i = tl.arange(0, GRAIN_)[None, :]
    place = block * GRAIN_ + i
    entry = tl.load(Table + row * stride_row + tl.minimum(place, size - 1).to(tl.int64) * stride)
    for which in tl.static_range(2):
        Lines = Most if which else Least
        ahead, behind = entry, entry
        for power in tl.static_range(5):
            if 1 << power < GRAIN_:
                near = tl.gather(ahead, tl.maximum(i + block * 0 - (1 << power), 0), 1)
                ahead = tl.where(i >= 1 << power, join(ahead, near, which), ahead)
                near = tl.gather(behind, tl.minimum(i + block * 0 + (1 << power), GRAIN_ - 1), 1)
                behind = tl.where(i < GRAIN_ - (1 << power), join(behind, near, which), behind)
        inside = block < count
        tl.store(Lines + row * padded + place, ahead, mask=inside)
        tl.store(Lines + (rows + row) * padded + place, behind, mask=inside)
        tl.store(Lines + 2 * rows * padded + row * count + block + i * 0, ahead, mask=inside & (i == GRAIN_ - 1))


@triton.jit(do_not_specialize=["Least", "Most", "rows", "count", "padded", "level"])
def windows(Least, Most, rows, count, padded, level, BLOCK: tl.constexpr):
    """The joins over 2, 4, ... blocks from each block on: least and greatest by programs of their own, five levels at a
    time, from the last level that is there."""
    if tl.program_id(1) == 0:
        windows_of(Least, rows, count, padded, level, False, BLOCK)
    else:
        windows_of(Most, rows, count, padded, level, True, BLOCK)


@triton.jit
def windows_of(Lines, rows, count, padded, level, MOST: tl.constexpr, BLOCK: tl.constexpr):
    Lines += 2 * rows * padded.to(tl.int64) + tl.program_id(0).to(tl.int64) * count
    size = rows.to(tl.int64) * count
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[:, None]
    ahead = i + (tl.arange(0, 32)[None, :] << level)
    entry = tl.load(Lines + level * size + tl.minimum(ahead, count - 1))
    for n in tl.static_range(1, 6):
        first, second = tl.split(tl.reshape(entry, (BLOCK, entry.shape[1] // 2, 2)))
        entry = join(first, second, MOST)
        j = tl.arange(0, 32 >> n)[None, :]
        inside = (j == 0) & (i < tl.where(count >> (level + n) > 0, count, 0))
        tl.store(Lines + (level + n) * size + i + j, entry, mask=inside)

$part halves
@triton.jit(do_not_specialize=[
    "Source", "Target", "outer", "size", "inner", "stride_outer", "stride", "stride_inner", "level", "room",
])
def halves(
    Source, Target, outer, size, inner, stride_outer, stride, stride_inner, level, room, BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):
    """Along the middle axis of [outer, size, inner], the joins of 1, 2, 4, ... entries: [outer, room, inner]. Five
    levels at a time: from the table (`level` 0), or from the last level that is there."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    inside = lane < outer * inner.to(tl.int64)
    before, after = lane // inner, lane % inner
    Target += before * room * inner + after
    i = tl.program_id(1) * 32 + tl.arange(0, 32)[None, :]
    held = tl.minimum(i, (size - 1) >> level).to(tl.int64)
    if level == 0:
        at = Source + before * stride_outer + held * stride + after * stride_inner
        entry = tl.load(at, mask=inside)
        tl.store(Target + i * inner.to(tl.int64), entry, mask=inside & (i < (room >> 1)))
    else:
        entry = tl.load(Target + (room - (room >> level) + held) * inner, mask=inside)
    for n in tl.static_range(1, 6):
        first, second = tl.split(tl.reshape(entry, (BLOCK, entry.shape[1] // 2, 2)))
        entry = join(first, second, MOST)
        j = tl.program_id(1) * (32 >> n) + tl.arange(0, 32 >> n)[None, :]
        start = room - (room >> (level + n))
        tl.store(Target + (start + j) * inner.to(tl.int64), entry, mask=inside & (j < (room >> (level + n + 1))))

$part order
@triton.jit(do_not_specialize=["Work", "Order", "rows"])
def longest_first(Work, Order, rows, BLOCK: tl.constexpr):
    """The rows of each slice by their work, the longest first, those of equal work as they come."""
    Work += tl.program_id(0).to(tl.int64) * rows
    mine = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    work = tl.load(Work + mine, mask=mine < rows, other=0)[:, None]
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows, BLOCK):
        other = start + tl.arange(0, BLOCK)
        theirs = tl.load(Work + other, mask=other < rows, other=-1)[None, :]
        rank += tl.sum(((theirs > work) | ((theirs == work) & (other[None, :] < mine[:, None]))).to(tl.int32), 1)
    tl.store(Order + tl.program_id(0).to(tl.int64) * rows + rank, mine, mask=mine < rows)
