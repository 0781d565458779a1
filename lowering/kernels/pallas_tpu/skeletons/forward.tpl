$# The work of the Pallas TPU forward kernel, with holes that `pallas_tpu.forward` fills.

$part least
LEAST = -3.4028234663852886e38  # the running maximum starts finite: -inf - LEAST is -inf, never NaN

$part visit
$here
v = $values
s = lax.dot_general(
    q_ref[0, $part], $keys, (((1,), (1,)), ((), ())), precision=EXACT, preferred_element_type=Float
)
s = s * SCALE  $if not products
$if weighted:
    seen = jnp.ones(s.shape, Float)  # 0 where a pair is hidden
    $score
    $counted
    if partial:  # the mask
        $seen
        if kv_len % BLOCK_K:  # memory behind the last key may hold anything
            behind = kv_len - k_tile * BLOCK_K
            seen = jnp.where(lax.broadcasted_iota(Int, (1, BLOCK_K), 1) < behind, seen, 0.0)
            v = jnp.where(lax.broadcasted_iota(Int, (BLOCK_K, 1), 0) < behind, v, jnp.zeros_like(v))
        p = jnp.where(seen > 0, p, 0.0)
        $if unwritten:
            $include values_seen
    total[$own] += p.sum(axis=1, keepdims=True)
    count[$own] += seen.sum(axis=1, keepdims=True)  $if counting
    $drop
    $weigh
    acc[$own] += lax.dot_general(
        p.astype(v.dtype), v, (((1,), (0,)), ((), ())), precision=EXACT, preferred_element_type=Float
    )
$else:
    $include softmax

$part softmax
$score
if partial:  # the mask
    $seen
    if kv_len % BLOCK_K:  # memory behind the last key may hold anything
        behind = kv_len - k_tile * BLOCK_K
        s = jnp.where(lax.broadcasted_iota(Int, (1, BLOCK_K), 1) < behind, s, -jnp.inf)
        v = jnp.where(lax.broadcasted_iota(Int, (BLOCK_K, 1), 0) < behind, v, jnp.zeros_like(v))
new = jnp.maximum(top[$own], s.max(axis=1, keepdims=True))
p = jnp.exp(s - wide(new, BLOCK_K))
shrink = jnp.exp(top[$own] - new)
total[$own] = total[$own] * shrink + p.sum(axis=1, keepdims=True)
$drop
$weigh
acc[$own] = acc[$own] * wide(shrink, acc.shape[-1]) + lax.dot_general(
    p.astype(v.dtype), v, (((1,), (0,)), ((), ())), precision=EXACT, preferred_element_type=Float
)
top[$own] = new

$part unwritten
s = jnp.where(seen, s, -jnp.inf)
$include values_seen

$part values_seen
# Values that no query sees may never have been written: a NaN there must not reach the sums.
rows = q_tile * BLOCK_Q + lax.broadcasted_iota(Int, (BLOCK_Q, 1), 0) < q_len
some = jnp.where(seen & rows, 1.0, 0.0).max(axis=0, keepdims=True)  $if not weighted
some = jnp.where(rows, seen, 0.0).max(axis=0, keepdims=True)  $if weighted
v = jnp.where(turned(some) > 0, v, jnp.zeros_like(v))

$part finish
$if weighted:
    $include finish_weighted
$else:
    $include finish_softmax

$part finish_weighted
whole = total[$own][:, :1]
many = count[$own][:, :1].astype(Int)  $if counting
top_ref[0, $part] = laid(count[$own])  $if counting
top_ref[0, $part] = jnp.zeros(top_ref.shape[2:], Float)  $if not counting
lse_ref[0, $part] = laid(total[$own])
low_ref[0, $part] = jnp.zeros(low_ref.shape[2:], Float)  $if lse_residual
numerator = $out
$if divided:
    $of_row
    $divide
    nothing = divisor == 0  $if not counting
    nothing = (divisor == 0) | (many == 0)  $if counting
    numerator = jnp.where(nothing, 0.0, numerator / jnp.where(nothing, 1.0, divisor))
out_ref[0, $part] = numerator.astype(out_ref.dtype)

$part finish_softmax
most, whole = top[$own], total[$own]
top_ref[0, $part] = laid(jnp.where(whole == 0, -jnp.inf, most))
$if sinks:
    sink = sinks[head]
    higher = jnp.maximum(most, sink)
    shrink = jnp.exp(most - higher)
    most, whole = higher, whole * shrink + jnp.exp(sink - higher)
nothing = whole == 0
out_ref[0, $part] = ($out / wide(jnp.where(nothing, 1, whole), acc.shape[-1])).astype(out_ref.dtype)
lse = most + jnp.log(whole)
lse_ref[0, $part] = laid(jnp.where(nothing, -jnp.inf, lse))
$if lse_residual:
    # The rounding error of lse: at large scores, all but the largest.
    low_ref[0, $part] = laid(jnp.where(nothing, 0, most - lse + jnp.log(whole)))

$part below
def laid(column):
    """[BLOCK_Q, 128], 128 times one column, as [1, BLOCK_Q]."""
    return column.T[:1]


$include inputs.wide

$part signature
def attention_forward(query, key, value, walk, origin, sizes, slots=(), tables=(), sinks=None, interpret=False):

$part doc
"""(out [batch, q_len, heads, v_dim], lse, top$named [batch, heads, q_len]) of arrays
[batch, length, heads, dim]."""

$part at_row
def at_row(b, h, *step):
    _, _, q_tile, _ = place(b, h, *step)
    return b, h, 0, q_tile

$part together
def together(dtype, *refs):
    """The pages of a tile, converted each by itself."""
    return jnp.concatenate([ref[0, 0].astype(dtype) for ref in refs])

$part at_page
def at_page(part):
    def at(*step):
        b, h, *step = step
        _, _, _, k_tile = place(b, h, *step)
        token = k_tile * BLOCK_K + part * PAGE
        entry = jnp.minimum(lax.div(token, Int(PAGE)), pages.shape[1] - 1)
        page = step[$pages][b * pages.shape[1] + entry]
        return page, $kv_head, lax.div(lax.rem(token, Int(PAGE)), Int(ROWS)), 0

    return at
