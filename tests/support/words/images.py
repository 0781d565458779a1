"""Images and video."""

from __future__ import annotations

import itertools
import math

from support.words.registry import WORDS, each, words


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
