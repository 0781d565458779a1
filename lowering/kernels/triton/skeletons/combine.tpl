@triton.jit(do_not_specialize=["heads", "q_len", "splits"])  $if not balanced and not listed
@triton.jit(do_not_specialize=["heads", "q_len", "queries", "pack"])  $if balanced
@triton.jit(do_not_specialize=["heads", "q_len", "queries"])  $if listed
def attention_combine(
    Acc, Tops, Totals,  # the parts, of attention_decode  $if not listed
    Acc, Tops, Totals,  # the parts, of attention_forward  $if listed
    $if listed:
        Rows,  # int32 [slices, rows in parts, 3]: a row of tiles, the first place of its sums, and how many parts it has
        SliceOf, At,  # int32 [batch, heads]: the slice, and the first place of a head's sums
    Parts,  # int32 [tiles of heads, rows of tiles, 2]: the first of a row's parts, and how many it has  $if balanced
    Out,  # [batch, heads, q_len, dim], any strides
    Lse,  # float32 [batch, heads, q_len], contiguous
    Top,  # the largest scores, as Lse  $if row_max
    Low,  # the rounding error of Lse  $if lse_residual
    Sinks,  # float32 [heads]: one more logit in the denominator  $if sinks
    stride_ob, stride_oh, stride_os, stride_od,
    heads, q_len, splits,  $if not balanced and not listed
    heads, q_len,  $if balanced
    heads, q_len, queries,  $if listed
    queries, pack,  # of a tile, and the heads in it  $if balanced
):
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    $if listed:
        place = batch * heads + head
        $include listed
    row_at = (batch.to(tl.int64) * heads + head) * q_len + row
    rows = tl.num_programs(2).to(tl.int64) * heads * q_len  # of one part  $if not balanced and not listed
    $if balanced:
        rows_of_tiles = tl.cdiv(q_len, queries)
        at_row = Parts + ((head // pack * tl.num_programs(2) + batch) * rows_of_tiles + row // queries) * 2
        begin, splits = tl.load(at_row), tl.load(at_row + 1)
        rows = heads.to(tl.int64) * tl.minimum(q_len, queries)  # of one program
        first_at = begin * rows + head * tl.minimum(q_len, queries) + row % queries
        rows *= rows_of_tiles  # from a part of a row to its next part
    $d = tl.arange(0, $dim)
    top = tl.cast(LOWEST, tl.float32)
    total = tl.cast(0.0, tl.float32)
    acc = tl.zeros([$dim], tl.float32)

    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        at = part * rows + $part_at
        tops = tl.load(Tops + at, mask=part < splits, other=LOWEST)
        totals = tl.load(Totals + at, mask=part < splits, other=0.0)
        values = tl.load(Acc + at[:, None] * $v_dim + $d[None, :]$load)
        peak = tl.maximum(top, tl.max(tops, 0))
        weight = tl.exp2(tops - peak)
        rescale = tl.exp2(top - peak)
        total = total * rescale + tl.sum(weight * totals, 0)
        acc = acc * rescale + tl.sum(weight[:, None] * values, 0)
        top = peak

    $include lse
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + row.to(tl.int64) * stride_os
    out = acc * ($rescale / total)
    tl.store(Out + $d * stride_od, out.to(Out.dtype.element_ty)$store)
    tl.store(Lse + row_at, lse)
    tl.store(Top + row_at, largest)  $if row_max
    tl.store(Low + row_at, low)  $if lse_residual
