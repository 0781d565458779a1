$# Functions for the operators that CuTe DSL lacks.

$part entry
def entry(table, *index):
    """What a table holds at an index; past its ends, what it holds there."""
    at = tuple(cutlass.max(cutlass.min(i[0], n - 1), 0) for i, n in zip(index, table.shape))
    found = cute.make_rmem_tensor(1, table.element_type)
    found[0] = table[at]
    return found.load()

$part minimum
def minimum(x, y):
    return cute.where((x <= y) | (x != x), x, y)

$part maximum
def maximum(x, y):
    return cute.where((x >= y) | (x != x), x, y)

$part shifted_left
def shifted_left(x, y):
    return cute.TensorSSA(x << y, x.shape, Int32)

$part shifted_right
def shifted_right(x, y):
    return cute.TensorSSA(x >> y, x.shape, Int32)

$part to_int
def to_int(x):
    inside = minimum(maximum(x, -2147483520.0), 2147483520.0)
    return cute.where(x == x, inside, 0.0).to(Int32)

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
