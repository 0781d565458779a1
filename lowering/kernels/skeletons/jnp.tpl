$# Functions for the operators that jax.numpy lacks, and the lookup of a table.

$part floordiv
def floordiv(x, y):
    safe = jnp.where(y == 0, 1, y).astype(Int)
    x, safe = x + 0 * safe, safe + 0 * x  # lax.div wants equal shapes; Mosaic has no jnp.floor_divide
    return jnp.where(y == 0, 0, lax.div(x - jnp.remainder(x, safe), safe))

$part mod
def mod(x, y):
    return jnp.where(y == 0, 0, jnp.remainder(x, jnp.where(y == 0, 1, y).astype(Int)))

$part to_int
def to_int(x):
    if x.dtype == jnp.bool_:
        return x.astype(Int)
    return jnp.where(x == x, jnp.clip(x, -LARGEST, LARGEST), 0).astype(Int)

$part random
def random(*counters):
    def mix(x):
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    first, *rest = (jnp.asarray(c).astype(jnp.uint32) for c in counters)
    x = mix(first + jnp.uint32(0x9E3779B9))
    for c in rest:
        x = mix(x ^ c * jnp.uint32(0x9E3779B1))
    return (x >> 8).astype(jnp.int32).astype(Float) * 2.0**-24

$part look
def look(table, *index):
    return table[tuple(jnp.clip(i, 0, n - 1) for i, n in zip(index, table.shape))]
