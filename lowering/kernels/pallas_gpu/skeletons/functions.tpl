$# Functions of Pallas kernels for Hopper: operators that Mosaic GPU does not have.

$part choose
def choose(condition, yes, no):
    return jnp.where(*jnp.broadcast_arrays(condition, yes, no))

$part opposite
def opposite(x):
    return x ^ True

$part sign
def sign(x):
    one, zero = jnp.ones_like(x), jnp.zeros_like(x)
    return choose(x > 0, one, choose(x < 0, -one, choose(x == 0, zero, x)))

$part floordiv
def floordiv(x, y):
    """Rounds to minus infinity; 0 where y is 0."""
    x, y = jnp.broadcast_arrays(x, Int(y) if isinstance(y, int) else y)
    divisor = jnp.where(y == 0, jnp.ones_like(y), y)
    quotient = lax.div(x, divisor)
    down = (quotient * divisor != x) & ((x < 0) ^ (divisor < 0))
    return jnp.where(y == 0, jnp.zeros_like(x), quotient - down.astype(Int))

$part mod
def mod(x, y):
    """Has the sign of y; 0 where y is 0."""
    x, y = jnp.broadcast_arrays(x, Int(y) if isinstance(y, int) else y)
    divisor = jnp.where(y == 0, jnp.ones_like(y), y)
    rest = lax.rem(x, divisor)
    off = (rest != 0) & ((rest < 0) ^ (divisor < 0))
    return jnp.where(y == 0, jnp.zeros_like(x), jnp.where(off, rest + divisor, rest))

$part shl
def shl(x, y):
    x, y = jnp.broadcast_arrays(x, y)
    inside = (y >= 0) & (y < WIDTH)
    return jnp.where(inside, x << jnp.where(inside, y, jnp.zeros_like(y)), jnp.zeros_like(x))

$part shr
def shr(x, y):
    x, y = jnp.broadcast_arrays(x, y)
    return jnp.where((y >= 0) & (y < 64), x >> jnp.clip(y, 0, WIDTH - 1), jnp.zeros_like(x))

$part wrapped
def wrapped(x, bits):
    unused = WIDTH - (min(max(bits, 0), WIDTH) if isinstance(bits, int) else jnp.clip(bits, 0, WIDTH))
    return shr(shl(x, unused), unused)

$part to_int
def to_int(x):
    """Towards zero; NaN is 0, and what does not fit becomes the largest that does."""
    if x.dtype == jnp.bool_:
        return x.astype(Int)
    return choose(x == x, jnp.clip(x, -LARGEST, LARGEST), 0.0).astype(Int)

$part whole
def whole(cut, x):
    found = cut(x)
    return found - (found.astype(Float) > jnp.maximum(x, -LARGEST)).astype(Int)

$part power
def power(x, y):
    x, y = jnp.broadcast_arrays(x, jnp.asarray(y, Float))
    near = jnp.clip(y, -(2.0**24), 2.0**24)  # beyond that all are even
    integral = near.astype(Int).astype(Float) == near
    odd = integral & ((near.astype(Int) & 1) == 1) & (jnp.abs(y) < 2.0**24)
    negative = (x < 0) | ((x == 0) & (1.0 / x < 0))
    size = jnp.exp2(y * jnp.log2(jnp.abs(x)))
    size = choose((jnp.abs(x) == 1.0) & (y == y), 1.0, size)
    signed = choose(negative & odd, -size, size)
    signed = choose((x < 0) & (x > -jnp.inf) & opposite(integral), jnp.nan, signed)
    return choose((y == 0.0) | (x == 1.0), 1.0, signed)

$part log1p
def log1p(x):
    # W. Kahan: the rounding error of 1 + x cancels in the quotient.
    y = 1.0 + x
    near = jnp.log(y) * (x / choose(y == 1.0, 1.0, y - 1.0))
    return choose(jnp.abs(x) < 0.5, choose(y == 1.0, x, near), jnp.log(y))

$part tanh
def tanh(x):
    return 1.0 - 2.0 / (1.0 + jnp.exp(2.0 * x))  # off by 1e-7, far below the rounding of 16 bits

$part tanh_approximate
def tanh_approximate(x):
    return jnp.tanh(x)  # one instruction, off by 2**-11 of the value at most

$part root
def root(x):
    return choose((x == 0.0) | (x == jnp.inf), x, x * lax.rsqrt(x))

$part erf
def erf(x):
    # M. Abramowitz, I. Stegun, 7.1.26: off by 1.5e-7.
    t = 1.0 / (1.0 + 0.3275911 * jnp.abs(x))
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    size = 1.0 - series * jnp.exp(-x * x)
    return choose(x < 0, -size, size)

$part finite
def finite(x):
    return jnp.abs(x) < jnp.inf

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
