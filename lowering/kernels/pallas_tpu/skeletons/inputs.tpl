$# Functions of generated Pallas TPU modules that bring values of positions and pairs to a kernel.

$part turn
def turned(row):
    """[1, n] as [n, 1]; n is a multiple of the 128 lanes."""
    return jnp.broadcast_to(row, (128, row.shape[1])).T[:, :1]

$part upright
def upright(row):
    """[1, n] as [n, 128], 128 times one column; n is a multiple of the 128 lanes."""
    return jnp.broadcast_to(row, (128, row.shape[1])).T

$part wide
def wide(column, width):
    """[n, 128], 128 times one column, as [n, width]: a number in all lanes is not broadcast at every use."""
    return jnp.tile(column, (1, pl.cdiv(width, 128)))[:, :width]

$part pick
def pick(table, shape, *index):
    """table[index], clamped, by trying each entry: the table is flat and in scalar memory."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    ends = [(jnp.clip(i, 0, n - 1), n, stride) for i, n, stride in zip(index, shape, strides)]
    base = sum(i * stride for i, _, stride in ends if jnp.ndim(i) == 0)
    moving = [(i, n, stride) for i, n, stride in ends if jnp.ndim(i) > 0]
    wanted = 0
    for i, n, _ in moving:
        wanted = wanted * n + i

    def attempt(entry, found):
        at, rest = base, entry
        for _, n, stride in reversed(moving):
            at, rest = at + lax.rem(rest, Int(n)) * stride, lax.div(rest, Int(n))
        return jnp.where(wanted == entry, table[at], found)

    entries = math.prod(n for _, n, _ in moving)
    return lax.fori_loop(Int(0), Int(entries), attempt, jnp.zeros(wanted.shape, table.dtype))

$part share
def share(i, x, axis):
    return jnp.minimum(i, x.shape[axis] - 1)  # one for all, or one each

$part per_query
def per_query(x, place):
    """Blocks of x [.., .., 1, q_len] that belong to the tile of queries."""

    def at(*step):
        b, h, q_tile, _ = place(*step)
        return share(b, x, 0), share(h, x, 1), 0, q_tile

    return pl.BlockSpec((1, 1, 1, BLOCK_Q), at)

$part per_key
def per_key(x, place):
    """Blocks of x [.., .., 1, kv_len] that belong to the tile of keys."""

    def at(*step):
        b, h, _, k_tile = place(*step)
        return share(b, x, 0), share(h, x, 1), 0, k_tile

    return pl.BlockSpec((1, 1, 1, BLOCK_K), at)

$part per_pair
def per_pair(x, place):
    """Tiles of x [.., .., q_len, kv_len]."""

    def at(*step):
        b, h, q_tile, k_tile = place(*step)
        return share(b, x, 0), share(h, x, 1), q_tile, k_tile

    return pl.BlockSpec((1, 1, BLOCK_Q, BLOCK_K), at)

$part distances
STRIDE = math.gcd(BLOCK_Q, BLOCK_K)  # from one window to the next


def distances(q_len, kv_len):
    """$columns - $rows, in local positions, along all windows; a tile's begins at its last row and first column."""
    q_ends, k_ends = pl.cdiv(q_len, BLOCK_Q) * BLOCK_Q, pl.cdiv(kv_len, BLOCK_K) * BLOCK_K
    return jnp.arange(1 - ${rows}_ends, 1 + ${columns}_ends, dtype=Int)


def windows(x):
    """[.., .., n, 1, BLOCK_Q + BLOCK_K]: one window every STRIDE entries of x [.., .., 1, length]."""
    parts = x.reshape(*x.shape[:2], -1, STRIDE)
    many = (BLOCK_Q + BLOCK_K) // STRIDE
    number = parts.shape[2] - many + 1
    return jnp.concatenate([parts[:, :, i : i + number] for i in range(many)], -1)[:, :, :, None]


def per_distance(x, place, length):
    """Windows of x for the tiles; `length` is that of the axis down a tile."""
    last = pl.cdiv(length, $down) - 1

    def at(*step):
        b, h, q_tile, k_tile = place(*step)
        start = (last - ${rows}_tile) * ($down // STRIDE) + ${columns}_tile * ($along // STRIDE)
        return share(b, x, 0), share(h, x, 1), start, 0, 0

    return pl.BlockSpec((1, 1, 1, 1, BLOCK_Q + BLOCK_K), at)

$part skewed

def skewed(window):
    """[$down, $along] of a window [1, BLOCK_Q + BLOCK_K]: row i is window[$down - 1 - i :]."""
    wide = jnp.broadcast_to(window, ($down, BLOCK_Q + BLOCK_K))
    return pltpu.roll(wide, $along + 1, 1, stride=1, stride_axis=0)[:, :$along]

$part skewed_by_bits

def skewed(window):
    """[$down, $along] of a window [1, BLOCK_Q + BLOCK_K]: row i is window[$down - 1 - i :]."""
    wide = pltpu.roll(jnp.broadcast_to(window, ($down, BLOCK_Q + BLOCK_K)), $along + 1, 1)
    row = lax.broadcasted_iota(Int, ($down, 1), 0)
    for bit in range(($down - 1).bit_length()):  # TPUs before v5 roll all rows by one number
        wide = jnp.where(row >> bit & 1 == 1, pltpu.roll(wide, 1 << bit, 1), wide)
    return wide[:, :$along]
