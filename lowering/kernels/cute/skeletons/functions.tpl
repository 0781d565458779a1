$# Functions for the operators that CuTe DSL lacks.

$part entry
def entry(table, *index):
    """What a table holds at an index; past its ends, what it holds there."""
    at = tuple(cutlass.max(cutlass.min(i[0], n - 1), 0) for i, n in zip(index, table.shape))
    found = cute.make_rmem_tensor(1, table.element_type)
    found[0] = table[at]
    return found.load()

$part inverted
def inverted(x):
    return -1 - x

$part sign
def sign(x):
    one = cute.full_like(x, 1)
    return cute.where(x > 0, one, cute.where(x < 0, -one, x))

$part minimum
def minimum(x, y):
    return cute.where((x <= y) | (x != x), x, y)

$part maximum
def maximum(x, y):
    return cute.where((x >= y) | (x != x), x, y)

$part quotient
def quotient(x, y):
    return cute.where(y == 0, 0, x // cute.where(y == 0, 1, y))

$part modulo
def modulo(x, y):
    return cute.where(y == 0, 0, x - quotient(x, y) * y)

$part remainder
def remainder(x, n):
    return x - x // n * n

$part shifted_left
def shifted_left(x, y):
    inside = (y >= 0) & (y < 32)
    return cute.where(inside, cute.TensorSSA(x << cute.where(inside, y, 0), x.shape, Int32), 0)

$part shifted_right
def shifted_right(x, y):
    inside = (y >= 0) & (y < 64)
    return cute.where(inside, cute.TensorSSA(x >> cute.where(inside & (y < 32), y, 31), x.shape, Int32), 0)

$part wrapped
def wrapped(x, bits):
    unused = cute.where(bits < 0, 32, cute.where(bits < 32, 32 - bits, 0))
    return shifted_right(shifted_left(x, unused), unused)

$part to_int
def to_int(x):
    inside = minimum(maximum(x, -2147483520.0), 2147483520.0)
    return cute.where(x == x, inside, 0.0).to(Int32)

$part sigmoid
def sigmoid(x):
    return 1.0 / (1.0 + cute.math.exp(-x))

$part finite
def finite(x):
    return abs(x) < Float32.inf

$part mix
def mix(x):
    x = (x ^ x // 65536) * Uint32(0x85EBCA6B)
    x = (x ^ x // 8192) * Uint32(0xC2B2AE35)
    return x ^ x // 65536

$part random
def random(*counters):
    x = mix(counters[0].to(Uint32) + Uint32(0x9E3779B9))
    for c in counters[1:]:
        x = mix(x ^ c.to(Uint32) * Uint32(0x9E3779B1))
    return (x // 256).to(Int32).to(Float32) * 2.0**-24
