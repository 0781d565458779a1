@triton.jit(do_not_specialize=["$length", "queries"])
def $name(
    Acc,  # float32 [places, queries, $numbers]: sums of the parts of rows
    Rows,  # int32 [slices, rows in parts, 3]: a row of tiles, the first place of its sums, and how many parts it has
    SliceOf, At,  # int32 [batch, heads]: the slice, and the first place of a head's sums
    $results,  # [batch, heads, $length, dim], contiguous  $if results
    $buffers
    scale, $length, queries,
):
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = batch * tl.num_programs(1) + head
    $include listed
    row_at = place.to(tl.int64) * $length + row
    $for arrays:
        $d = tl.arange(0, $dim)
        total = tl.zeros([$dim], tl.float32)
        for first in range(0, splits, PARTS):
            part = first + tl.arange(0, PARTS)
            at = (part * rows + first_at) * $numbers$offset
            values = tl.load(Acc + at[:, None] + $d[None, :]$load)
            total += tl.sum(values, 0)
        total *= scale  $if scaled
        tl.store($result + row_at * $width + $d, total.to($result.dtype.element_ty)$store)
    $for totals:
        for i in range(GROUP):  $if several
            share = tl.cast(0.0, tl.float32)
            for first in range(0, splits, PARTS):
                part = first + tl.arange(0, PARTS)
                at = (part * rows + first_at) * $numbers$offset
                share += tl.sum(tl.load(Acc + at, mask=part < splits, other=0.0), 0)
            tl.store($buffer + row_at, share)  $if not several
            tl.store($buffer + (place * GROUP + i).to(tl.int64) * $length + row, share)  $if several
