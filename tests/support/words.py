"""Every mask of the library once more, from its words: for each query, the keys it sees, by lists and loops."""

from __future__ import annotations

import itertools
import math

import numpy as np


def dense(case):
    """bool [batch, heads, q_len, kv_len] of a `cases.Case`."""
    name, args = call(case.text, case.params)
    sees = WORDS[name](case, *args)
    out = np.zeros((case.batch, case.heads, case.q_len, case.kv_len), bool)
    for b, h, q in itertools.product(range(case.batch), range(case.heads), range(case.q_len)):
        for k in sees(b, h, q):
            if 0 <= k < case.kv_len:
                out[b, h, q, k] = True
    return out


def call(text, params):
    """("window", [4]) of "window(4)"; arguments that are neither numbers nor names of tables stay text."""
    name, _, rest = text.partition("(")
    args = rest[:-1].split(", ") if rest else []
    return name, [_argument(a, params) for a in args]


def _argument(text, params):
    if text in params:
        return np.asarray(params[text])
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


WORDS = {}


def words(function):
    WORDS[function.__name__] = function
    return function


def each(keys):
    """The same keys for every batch entry and head."""
    return lambda b, h, q: keys(q)


# -- order and windows --------------------------------------------------------------------------------


@words
def full(c):
    return each(lambda q: range(c.kv_len))


@words
def causal(c, offset=0):
    return each(lambda q: range(q + offset + 1))


@words
def bottom_right(c):
    return each(lambda q: range(c.kv_len - (c.q_len - 1 - q)))


@words
def inverse_causal(c):
    return each(lambda q: range(q, c.kv_len))


@words
def bi_causal(c):
    return each(lambda q: range(q, c.kv_len - (c.q_len - 1 - q)))


@words
def block_causal(c, n):
    return each(lambda q: itertools.chain(*(range(start, start + n) for start in range(0, q + 1, n))))


@words
def mini_causal(c, n):
    return each(lambda q: [start + j for start in range(0, c.kv_len, n) for j in range(q % n + 1)])


@words
def window(c, w):
    return each(lambda q: range(q - (w - 1), q + w))


@words
def sliding(c, left, right):
    return each(lambda q: range(q - left, q + right + 1))


@words
def sliding_window(c, w):
    return each(lambda q: [q - back for back in range(w + 1)])


@words
def local(c, left, right, offset):
    return each(lambda q: range(q + offset - left, q + offset + right + 1))


@words
def flash_window(c, left, right):
    return local(c, left, right, c.kv_len - c.q_len)


@words
def outside_window(c, w):
    return each(lambda q: sorted(set(range(c.kv_len)) - set(range(q - w + 1, q + w))))


@words
def streaming(c, n, w):
    return each(lambda q: [k for k in {*range(n), *range(q - w + 1, q + 1)} if k <= q])


@words
def dilated(c, w, g):
    return each(lambda q: [q + sign * step for sign in (-1, 1) for step in range(0, w + 1, g)])


@words
def strided(c, n):
    return each(lambda q: [*range(q, q - n, -1), *range(q, -1, -n)])


# -- prefixes -----------------------------------------------------------------------------------------


@words
def prefix(c, p):
    return each(lambda q: range(p))


WORDS["sinks"] = prefix


@words
def prefix_lm(c, p):
    return each(lambda q: range(max(p, q + 1)))


@words
def both_prefix(c, p):
    return each(lambda q: range(p) if q < p else range(q + 1))


@words
def prefix_document(c, off, lengths):
    def keys(q):
        d, inside, _ = place(off, q)
        return range(off[d], min(off[d] + max(lengths[d], inside + 1), off[d + 1]))

    return each(keys)


@words
def shared_prefix(c, off, prompt):
    def keys(q):
        d, inside, _ = place(off, q)
        own = list(range(off[d], off[d] + inside + 1))
        p = prompt[d]
        return own if p == d else own + list(range(off[p], off[p + 1]))

    return each(keys)


# -- documents ----------------------------------------------------------------------------------------


def place(off, q):
    """(document, place in it, its length) of a token."""
    for d, (start, stop) in enumerate(itertools.pairwise(off)):
        if start <= q < stop:
            return d, int(q - start), int(stop - start)
    raise AssertionError(f"no document holds {q}")


@words
def same(c, t):
    return each(lambda q: np.flatnonzero(t[: c.kv_len] == t[q]))


@words
def same_by_batch(c, t):
    return lambda b, h, q: np.flatnonzero(t[b] == t[b, q])


@words
def same_by_head(c, t):
    return lambda b, h, q: np.flatnonzero(t[b, h] == t[b, h, q])


@words
def document(c, off, inner=None, *_):
    def keys(q):
        d, inside, n = place(off, q)
        local = range(n)
        if inner is not None:  # sliding(4, 1) | sinks(2)
            local = [j for j in range(n) if inside - 4 <= j <= inside + 1 or j in (0, 1)]
        return [off[d] + j for j in local]

    return each(keys)


@words
def causal_document(c, off):
    return each(lambda q: range(q - place(off, q)[1], q + 1))


@words
def causal_blockwise(c, off):
    return each(lambda q: range(0 if place(off, q)[0] == len(off) - 2 else q - place(off, q)[1], q + 1))


@words
def share_question(c, seg):
    return each(lambda q: [k for k in range(q + 1) if seg[k] in (0, seg[q])])


@words
def chunked(c, n):
    return each(lambda q: range(q - q % n, q - q % n + n))


@words
def chunked_causal(c, n):
    return each(lambda q: range(q - q % n, q + 1))


@words
def batchify(c, *args):  # sliding(4, 1) inside blocks of the last argument
    n = args[-1]
    return each(lambda q: [k for k in range(q - 4, q + 2) if k >= 0 and k // n == q // n])


@words
def token_types(c, t):
    return each(lambda q: [k for k in range(c.kv_len) if k <= q or (t[q] > 0 and t[k] == t[q])])


@words
def eviction(c, stop):
    return each(lambda q: [k for k in range(q + 1) if q < stop[k]])


# -- sequences ----------------------------------------------------------------------------------------


@words
def block_diagonal(c, qoff, koff=None):
    if koff is None:
        return chunked(c, qoff)
    return each(lambda q: range(koff[place(qoff, q)[0]], koff[place(qoff, q)[0] + 1]))


@words
def block_diagonal_causal(c, qoff, koff):
    def keys(q):
        d, inside, _ = place(qoff, q)
        return list(range(koff[d], koff[d + 1]))[: inside + 1]

    return each(keys)


@words
def block_diagonal_bottom_right(c, qoff, koff):
    def keys(q):
        d, inside, n = place(qoff, q)
        return until_the_end(list(range(koff[d], koff[d + 1])), inside, n)

    return each(keys)


@words
def block_diagonal_local(c, qoff, koff, w):
    return lambda b, h, q: block_diagonal_bottom_right(c, qoff, koff)(b, h, q)[-w:]


def until_the_end(keys, inside, n):
    """The last of `n` queries sees all keys, the one before it one less."""
    return keys[: max(len(keys) - (n - 1 - inside), 0)]


@words
def gappy_keys(c, qoff, start, lengths):
    return each(lambda q: [start[place(qoff, q)[0]] + j for j in range(lengths[place(qoff, q)[0]])])


@words
def padded_keys(c, qoff, n, lengths):
    return gappy_keys(c, qoff, np.arange(len(lengths)) * n, lengths)


@words
def paged_keys(c, qoff, pages, lengths, t):
    def keys(q):
        d = place(qoff, q)[0]
        return [page * t + j for page in pages[d] for j in range(t)][: lengths[d]]

    return each(keys)


def causal_in_each(keys):
    return lambda c, qoff, *rest: each(lambda q: until_the_end(keys(c, qoff, *rest)(0, 0, q), *place(qoff, q)[1:]))


for name in ("gappy_keys", "padded_keys", "paged_keys"):
    WORDS[f"{name}_causal"] = causal_in_each(WORDS[name])


# -- rectangles ---------------------------------------------------------------------------------------


@words
def rectangle(c, q0, q1, k0, k1):
    return each(lambda q: range(k0, k1) if q in range(q0, q1) else [])


@words
def rectangle_causal(c, q0, q1, k0, k1):
    return each(lambda q: range(k0, k1 - (q1 - 1 - q)) if q in range(q0, q1) else [])


@words
def rectangle_inverse(c, q0, q1, k0, k1):
    return each(lambda q: range(k0 + (q - q0), k1) if q in range(q0, q1) else [])


@words
def rectangle_bi_causal(c, q0, q1, k0, k1):
    return each(lambda q: range(k0 + (q - q0), k1 - (q1 - 1 - q)) if q in range(q0, q1) else [])


# -- marked tokens, trees, diffusion ------------------------------------------------------------------


@words
def global_tokens(c, t):
    return each(lambda q: range(c.kv_len) if t[q] else np.flatnonzero(t))


@words
def global_window(c, t, w):
    return each(lambda q: [*global_tokens(c, t)(0, 0, q), *range(q - w, q + w + 1)])


@words
def padding(c, lengths):
    return lambda b, h, q: range(lengths[b]) if q in range(lengths[b]) else []


@words
def qk_sparse(c, kept_q, kept_k):
    return each(lambda q: [k for k in np.flatnonzero(kept_k) if k <= q] if kept_q[q] else [])


@words
def tree(c, anc, p):
    return each(lambda q: [*range(p), *(p + np.flatnonzero(anc[q]))])


@words
def draft_blocks(c, p, n):
    blocks = [[p + start + j for j in range(n)] for start in range(0, c.q_len, n)]
    return each(lambda q: [*range(p), *blocks[q // n][: q % n + 1]])


@words
def block_diffusion(c, s, n):
    noised = [range(start, min(start + n, s)) for start in range(0, s, n)]
    clean = [range(s + block.start, s + block.stop) for block in noised]

    def keys(q):
        u = (q if q < s else q - s) // n
        seen = [noised[u], *clean[:u]] if q < s else clean[: u + 1]
        return itertools.chain(*seen)

    return each(keys)


# -- images and video ---------------------------------------------------------------------------------


def neighbours(i, size, n, dilation=1, stride=1, is_causal=False):
    """The positions that position i of an axis sees: NATTEN's definition, by lists."""
    group = list(range(i % dilation, size, dilation))
    at = i // dilation
    sharing = range(at // stride * stride, min(at // stride * stride + stride, len(group)))
    if is_causal:
        return group[max(sharing[-1] - n + 1, 0) : at + 1]
    lead = min(at // stride * stride + stride // 2, len(group) - 1)
    starts = range(len(group) - n + 1)  # windows that lie inside; the one that is nearest to centred
    start = min(starts, key=lambda s: abs(s - (lead - n // 2)))
    return group[start : start + n]


@words
def natten1d(c, size, n, *rest):
    dilation, stride, is_causal = {0: (1, 1, False), 2: (1, *rest), 3: rest}[len(rest)]
    return each(lambda q: neighbours(q, size, n, dilation, stride, is_causal))


def on_canvas(shape, kernel, rest=()):
    """token -> tokens it sees, for tokens in the order of the pixels."""
    axes = len(shape)
    dilation, stride, flags = (
        [rest[i * axes : (i + 1) * axes] for i in range(3)] if rest else ([1] * axes, [1] * axes, [False] * axes)
    )
    pixels = list(itertools.product(*map(range, shape)))
    token = {pixel: i for i, pixel in enumerate(pixels)}

    def keys(q):
        near = map(neighbours, pixels[q], shape, kernel, dilation, stride, flags)
        return [token[pixel] for pixel in itertools.product(*near)]

    return each(keys)


@words
def natten2d(c, rows, cols, kernel_rows, kernel_cols, *rest):
    return on_canvas((rows, cols), (kernel_rows, kernel_cols), rest)


@words
def natten3d(c, *args):
    return on_canvas(args[:3], args[3:6], args[6:])


def ordered(c, q_pixels, k_pixels, shape, kernel):
    """Tokens in orders of their own: `q_pixels[i]` is where query i stands."""
    token = {pixel: i for i, pixel in enumerate(k_pixels)}

    def keys(q):
        near = map(neighbours, q_pixels[q], shape, kernel)
        return [token[pixel] for pixel in itertools.product(*near)]

    return each(keys)


def tile_by_tile(rows, cols, tile_rows, tile_cols):
    """The pixels of a canvas, tile after tile; tiles that stick out are whole."""
    return [
        (r * tile_rows + i, x * tile_cols + j)
        for r in range(math.ceil(rows / tile_rows))
        for x in range(math.ceil(cols / tile_cols))
        for i in range(tile_rows)
        for j in range(tile_cols)
    ]


@words
def tiled_natten(c, rows, cols, kernel_rows, kernel_cols, *tile):
    q_tile, k_tile = tile[:2], tile[-2:]
    return ordered(
        c,
        tile_by_tile(rows, cols, *q_tile),
        tile_by_tile(rows, cols, *k_tile),
        (rows, cols),
        (kernel_rows, kernel_cols),
    )


def z_order(side):
    """The pixels of a square along the Z-order curve: quarters, left to right and down, each a smaller Z."""
    if side == 1:
        return [(0, 0)]
    half = side // 2
    return [(r + dr * half, x + dx * half) for dr in (0, 1) for dx in (0, 1) for r, x in z_order(half)]


@words
def morton(c, rows, cols, kernel_rows, kernel_cols):
    curve = z_order(2 ** math.ceil(math.log2(max(c.q_len, c.kv_len)) / 2))
    return ordered(c, curve, curve, (rows, cols), (kernel_rows, kernel_cols))


def sliding_tiles(c, *args):
    axes = len(args) // 3
    shape, kernel, tile = args[:axes], args[axes : 2 * axes], args[2 * axes : 3 * axes]
    text = args[3 * axes] if len(args) > 3 * axes else 0
    pixels, inside = math.prod(shape), math.prod(tile)
    tiles = on_canvas([n // t for n, t in zip(shape, tile)], [n // t for n, t in zip(kernel, tile)])

    def keys(q):
        if q >= pixels:
            return range(pixels + text)
        seen = [i * inside + j for i in tiles(0, 0, q // inside) for j in range(inside)]
        return [*seen, *range(pixels, pixels + text)]

    return each(keys)


WORDS["sta2d"] = WORDS["sta3d"] = sliding_tiles


@words
def svg_spatial(c, p, t, w, sink=0):
    near = (w * t) - (w * t) % 128
    return each(lambda q: range(c.kv_len) if q < p else [*range(p + sink), *range(q - near + 1, q + near)])


@words
def svg_spatial_sink(c, p, t, w):
    return svg_spatial(c, p, t, w, sink=t)


@words
def svg_temporal(c, p, t, frames, w):
    where = [None] * p + [j for _ in range(c.kv_len // t + 1) for j in range(t)]
    near = (w * t) // frames

    def keys(q):
        return [k for k in range(c.kv_len) if q < p or k < p or where[k] - near < where[q] < where[k] + near]

    return each(keys)


@words
def cross_image(c, iv, img):
    readers = [set(range(start, stop)) for start, stop in iv]
    return each(lambda q: [k for k in range(c.kv_len) if q in readers[img[k]]])


# -- tiles chosen by data -----------------------------------------------------------------------------


def real(tiles, t, size=None):
    return [i * t + j for i in tiles for j in range(t if size is None else size[i])]


@words
def topk_tiles(c, chosen, t, size=None):
    return lambda b, h, q: real(np.flatnonzero(chosen[b, h, q // t]), t, size)


@words
def topk_indices(c, index, t, size=None):
    return lambda b, h, q: real({int(i) for i in index[b, h, q // t]}, t, size)
