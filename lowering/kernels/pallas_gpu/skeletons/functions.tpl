$# Functions of Pallas kernels for Hopper: operators that Mosaic GPU does not have.

$part choose
def choose(condition, yes, no):
    return jnp.where(*jnp.broadcast_arrays(condition, yes, no))

$part quotient
def quotient(x, y):
    return lax.div(*jnp.broadcast_arrays(x, Int(y) if isinstance(y, int) else y))

$part remainder
def remainder(x, y):
    return lax.rem(*jnp.broadcast_arrays(x, Int(y) if isinstance(y, int) else y))

$part to_int
def to_int(x):
    """Towards zero; NaN is 0, and what does not fit becomes the largest that does."""
    if x.dtype == jnp.bool_:
        return x.astype(Int)
    return choose(x == x, jnp.clip(x, -LARGEST, LARGEST), 0.0).astype(Int)

$part tanh
def tanh(x):
    return 1.0 - 2.0 / (1.0 + jnp.exp(2.0 * x))  # off by 1e-7, far below the rounding of 16 bits

$part tanh_approximate
def tanh_approximate(x):
    return jnp.tanh(x)  # one instruction, off by 2**-11 of the value at most

$part mixed
def mixed(x):
    # A. Appleby, MurmurHash3 finaliser.
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)

$part seeded
def seeded(x):
    return mixed(jnp.asarray(x).astype(jnp.uint32) + jnp.uint32(0x9E3779B9))

$part stirred
def stirred(x, counter):
    return mixed(x ^ jnp.asarray(counter).astype(jnp.uint32) * jnp.uint32(0x9E3779B1))

$part uniform
def uniform(x):
    """24 bits as a number in [0, 1); the same on every backend."""
    return (x >> 8).astype(jnp.int32).astype(Float) * 2.0**-24
