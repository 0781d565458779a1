@triton.jit(do_not_specialize=["heads", "q_len"])
def attention_delta(
    Out, DOut,  # [batch, heads, q_len, dim], any strides
    Lse, Low, DLse,  # float32 [batch, heads, q_len], contiguous  $if dlse
    Lse, Low,  # float32 [batch, heads, q_len], contiguous  $if not dlse
    Stats,  # float32 [batch, heads, q_len, 4]: lse in log2, a factor, rowsum(dout * out) - dlse, nothing  $if dlse
    Stats,  # float32 [batch, heads, q_len, 4]: lse in log2, a factor, rowsum(dout * out), nothing  $if not dlse
    stride_ob, stride_oh, stride_os, stride_od,
    stride_gb, stride_gh, stride_gs, stride_gd,
    heads, q_len,
    BLOCK_Q: tl.constexpr,  # powers of two
):
    head, batch = tl.program_id(1), tl.program_id(2)
    start = tl.program_id(0) * BLOCK_Q
    rows = tl.arange(0, BLOCK_Q)
    $e = tl.arange(0, $dim)
    present = start + rows < q_len
    Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + start.to(tl.int64) * stride_os
    out = tl.load(Out + rows[:, None] * stride_os + $e[None, :] * stride_od$mask).to(tl.float32)
    DOut += batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh + start.to(tl.int64) * stride_gs
    dout = tl.load(DOut + rows[:, None] * stride_gs + $e[None, :] * stride_gd$mask).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    at = (batch * heads + head).to(tl.int64) * q_len + start + rows
    delta -= tl.load(DLse + at, mask=present, other=0.0)  $if dlse
    lse = tl.load(Lse + at, mask=present, other=0.0)
    $if guard:
        # A row that sees no key has no gradient, even where dout is NaN.
        empty = lse == -INFINITY
        delta, lse = tl.where(empty, 0.0, delta), tl.where(empty, 0.0, lse)
    low = tl.load(Low + at, mask=present, other=0.0)
    # A weight is exp2(score - lse) * factor: the factor makes up for the rounding of lse.
    near = tl.maximum(lse * LOG2E, LOWEST)  # the forward's product: a maximum is not joined to the sum
    lse = near + low * LOG2E
    factor = tl.exp2(lse - near - low * LOG2E)
    tl.store(Stats + at * 4, lse, mask=present)
    tl.store(Stats + at * 4 + 1, factor, mask=present)
    tl.store(Stats + at * 4 + 2, delta, mask=present)
