$# Functions for the operators that torch lacks, or has with another meaning.

$part minimum
def minimum(x, y):
    return torch.where((x <= y) | (x != x), x, y)

$part maximum
def maximum(x, y):
    return torch.where((x >= y) | (x != x), x, y)

$part floordiv
def floordiv(x, y):
    zero = y == 0
    return torch.where(zero, 0, x // torch.where(zero, 1, y))

$part mod
def mod(x, y):
    zero = y == 0
    return torch.where(zero, 0, x % torch.where(zero, 1, y))

$part shl
def shl(x, y):
    inside = (y >= 0) & (y < 64)
    return torch.where(inside, x << torch.where(inside, y, 0), 0)

$part shr
def shr(x, y):
    inside = (y >= 0) & (y < 64)
    return torch.where(inside, x >> torch.where(inside, y, 0), 0)

$part wrapped
def wrapped(x, bits):
    unused = 64 - torch.as_tensor(bits).clamp(0, 64)
    inside = unused < 64
    unused = torch.where(inside, unused, 0)
    return torch.where(inside, (x.to(torch.int64) << unused) >> unused, 0)

$part to_int
def to_int(x):
    if x.dtype == torch.bool:
        return x.to(torch.int64)
    return x.nan_to_num(0.0, math.inf, -math.inf).clamp(-(2.0**62), 2.0**62).to(torch.int64)

$part random
def times(x, factor):
    return (((x >> 16) * factor << 16) + (x & 0xFFFF) * factor) & 0xFFFFFFFF


def mix(x):
    x = times(x ^ (x >> 16), 0x85EBCA6B)
    x = times(x ^ (x >> 13), 0xC2B2AE35)
    return x ^ (x >> 16)


def random(*counters):
    x = mix((counters[0] + 0x9E3779B9) & 0xFFFFFFFF)
    for c in counters[1:]:
        x = mix(x ^ times(c & 0xFFFFFFFF, 0x9E3779B1))
    return (x >> 8).to(torch.float64) * 2.0**-24
