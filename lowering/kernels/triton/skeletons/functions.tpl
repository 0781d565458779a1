$part functions
$# The functions that Triton kernels call: a module has those that it uses. Nothing here needs libdevice.
def mix(x):
    # A. Appleby, MurmurHash3 finaliser.
    x = tl.mul(x ^ (x >> 16), 0x85EBCA6B, sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 13), 0xC2B2AE35, sanitize_overflow=False)
    return x ^ (x >> 16)

def step(i, size, stride):
    return tl.minimum(tl.maximum(i, 0), size - 1).to(tl.int64) * stride

def clamp(i, size):
    return tl.minimum(tl.maximum(i, 0), size - 1)

def step_from(i, first, size, stride, NEAR: tl.constexpr):
    """The step from index `first` of an axis to others of its tile: 32 bits where they are near."""
    steps = clamp(i, size) - clamp(first, size)
    if NEAR:
        return steps * stride
    else:
        return steps.to(tl.int64) * stride

def bounded(i, n):
    return tl.minimum(tl.maximum(i, 0), n)

def tiles_seen(sequence, rows, batches, heads, head, Spans, Count, SliceOf, records):
    """The tiles of keys that all rows of tiles of sequences see, by one head; 0 from sequence `batches` on."""
    known = sequence < batches
    first = tl.load(SliceOf + sequence * heads + head, mask=known, other=0) * rows
    tiles = tl.zeros_like(sequence)
    for row in range(rows):
        used = tl.load(Count + first + row, mask=known, other=0)
        for i in range(records):
            record = Spans + ((first + row).to(tl.int64) * records + i) * 4
            tiles += tl.load(record + 3, mask=i < used, other=0) - tl.load(record, mask=i < used, other=0)
    return tiles

def span(first, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """`first` and what follows it: as many as a tile has diagonals, up to the next power of two."""
    return first + tl.arange(0, 2 * BLOCK_Q if BLOCK_Q > BLOCK_K else 2 * BLOCK_K)

def along(line, away, seen=None):
    """For every position the entry of a vector that is `away` from its first; 0 where it is not `seen`."""
    found = tl.reshape(tl.gather(line, tl.ravel(away), 0), away.shape)
    if seen is not None:
        found = tl.where(seen, found, 0)
    return found

def placed(end, origin, first, last):
    """The end of what a row sees, counted from the call's first position, as far as it is in first..last."""
    return (tl.minimum(tl.maximum(end, origin + first), origin + last) - origin).to(tl.int32)

def up_to(columns, most):
    """Whether columns of a tile are at most `most`. Bits 1 and 2 of a column tell the threads of a warp apart where
    products leave their results, and the others are constants of a thread's registers: apart, a comparison takes one
    instruction."""
    return (columns & ~6) <= most - (columns & 6)

def one_of(columns, least, many):
    """Whether columns of a tile are among `many` from `least` on, in two instructions: bits 1 and 2 stand apart, as
    in `up_to`."""
    return ((columns & ~6) - (least - (columns & 6))).to(tl.uint32) < many.to(tl.uint32)

def up_to_apart(columns, most, APART: tl.constexpr):
    """Whether columns of a tile are at most `most`, as `up_to`, on GPUs where the bits APART of a column tell threads
    apart."""
    return (columns & ~APART) <= most - (columns & APART)

def one_of_apart(columns, least, many, APART: tl.constexpr):
    """Whether columns of a tile are among `many` from `least` on, as `one_of`, on such GPUs."""
    return ((columns & ~APART) - (least - (columns & APART))).to(tl.uint32) < many.to(tl.uint32)

def among(columns, least, many):
    """Whether columns of a tile are among `many` from `least` on. A row has a word for each 32 columns, made in four
    instructions, and one tests a bit: as assembly, because Triton 3.6 makes more of it."""
    if INTERPRETED:
        return one_of(columns, least, many)
    else:
        first = columns & ~31
        begin = tl.maximum(least - first, 0)
        width = tl.maximum(least + many - first - begin, 0)
        word = tl.inline_asm_elementwise("bmsk.clamp.b32 $$0, $$1, $$2;", "=r,r,r", [begin, width], tl.int32, True, 1)
        bit = tl.inline_asm_elementwise("and.b32 $$0, $$1, $$2;", "=r,r,r", [word, 1 << (columns & 31)], tl.int32, True, 1)
        return bit != 0

def to_int(x):
    """Towards zero; NaN is 0, and what does not fit becomes the largest that does."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), 0.0).to(INT)

def tanh(x):
    # S. Moshier, Cephes tanhf: a polynomial near 0, where 1 - 2 / (1 + exp(2x)) would cancel.
    z = x * x
    series = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
    near = (series - 3.33332819422e-1) * z * x + x
    return tl.where(tl.abs(x) < 0.625, near, 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x)))

def tanh_approximate(x):
    """The instruction of NVIDIA's GPUs from sm_75 on: 2**-11 of the value away at most, by the PTX manual."""
    if INTERPRETED:
        return tanh(x)  # Triton's interpreter knows no instructions
    else:
        return tl.inline_asm_elementwise("tanh.approx.f32 $$0, $$1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)

def in_tf32(x):
    """The nearest Float of 11 bits, as TF32 and float16 have them: the units of products cut the others off."""
    near = ((x.to(tl.int32, bitcast=True) + 0x1000) & ~0x1FFF).to(tl.float32, bitcast=True)
    return tl.where(x == x, near, x)

def seeded(x):
    return mix(tl.add(tl.cast(x, tl.uint32), 0x9E3779B9, sanitize_overflow=False))

def stirred(x, counter):
    return mix(x ^ tl.mul(tl.cast(counter, tl.uint32), 0x9E3779B1, sanitize_overflow=False))

def uniform(x):
    """24 bits as a number in [0, 1); the same on every backend."""
    return (x >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
