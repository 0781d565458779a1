"""Where a published version is wrong and the library is not: the difference, in a canvas small enough to count.

The published formulas are restated here in numpy; `words` is what the papers say.
"""

from __future__ import annotations

import cases
import numpy as np
import pytest
from support import words

import frisket as fk


def square(n):
    return np.ogrid[:n, :n]


def ours(text, n):
    one = cases.Case(text, n, n)
    have = one.mask.dense(n, n)[0, 0]
    np.testing.assert_array_equal(have, words.dense(one)[0, 0])
    return have


def attention_gym_natten(q, k, width, kernel_w, kernel_h):
    """The row of a pixel is clamped as if it were a column: right on square canvases only."""
    (qx, qy), (kx, ky) = (divmod(i, width) for i in (q, k))
    center_x = np.clip(qx, kernel_w // 2, width - 1 - kernel_w // 2)
    center_y = np.clip(qy, kernel_h // 2, width - 1 - kernel_h // 2)
    return (abs(center_x - kx) <= kernel_w // 2) & (abs(center_y - ky) <= kernel_h // 2)


def test_neighborhoods_on_canvases_that_are_not_square():
    theirs = attention_gym_natten(*square(36), 6, 3, 3)
    np.testing.assert_array_equal(ours("natten2d(6, 6, 3, 3)", 36), theirs)
    have, theirs = ours("natten2d(4, 9, 3, 3)", 36), attention_gym_natten(*square(36), 9, 3, 3)
    assert (have != theirs).any()
    assert (have.sum(-1) == 9).all()
    assert (theirs.sum(-1) == 6).any()  # the last row's window sticks out of the canvas


def test_neighborhoods_with_different_kernels_on_the_axes():
    """Kernel width and height are swapped along with the canvas."""
    have, theirs = ours("natten2d(6, 6, 5, 3)", 36), attention_gym_natten(*square(36), 6, 3, 5)
    assert (have != theirs).any()


def test_neighborhoods_with_even_kernels():
    """|center - key| <= n // 2 holds n + 1 keys for an even n."""
    have, theirs = ours("natten2d(8, 8, 4, 4)", 64), attention_gym_natten(*square(64), 8, 4, 4)
    assert (have.sum(-1) == 16).all()
    assert theirs.sum(-1).max() == 25


def test_neighborhoods_by_true_division():
    """flex_attention's own test takes q / W for the row: a fraction."""
    width, kernel = 6, 3

    def theirs(q, k):
        qx, qy, kx, ky = q / width, q % width, k / width, k % width
        cx, cy = (np.clip(x, kernel // 2, width - 1 - kernel // 2) for x in (qx, qy))
        return (abs(cx - kx) <= kernel // 2) & (abs(cy - ky) <= kernel // 2)

    have = ours("natten2d(6, 6, 3, 3)", 36)
    assert (have != theirs(*square(36))).any()
    assert (theirs(*square(36)).sum(-1) < 9).any()


def test_tiles_of_different_sizes_for_queries_and_keys():
    """NATTEN's flex mask takes the place in a key's tile modulo the size of the query's tile."""
    rows, cols, q_tile, k_tile = 4, 8, (2, 2), (2, 4)

    def pixel(i, tile, modulo):
        number, inside = i // (tile[0] * tile[1]), i % modulo
        r, x = divmod(number, cols // tile[1])
        return r * tile[0] + inside // tile[1], x * tile[1] + inside % tile[1]

    def mask(modulo):
        q, k = square(32)
        (qr, qx), (kr, kx) = pixel(q, q_tile, 4), pixel(k, k_tile, modulo)
        cr, cx = np.clip(qr, 1, rows - 2), np.clip(qx, 1, cols - 2)
        return (abs(cr - kr) <= 1) & (abs(cx - kx) <= 1)

    have = ours("tiled_natten(4, 8, 3, 3, 2, 2, 2, 4)", 32)
    np.testing.assert_array_equal(have, mask(8))
    assert (have != mask(4)).any()  # as published
    assert (have.sum(-1) == 9).all()


def test_sliding_tiles_with_even_kernels_have_the_exact_count():
    """FastVideo's mask takes the tiles with |center - tile| <= n // 2: three for a kernel of two."""

    def theirs(q, k, tiles, kernel, tile):
        (qr, qx), (kr, kx) = (divmod(i // (tile[0] * tile[1]), tiles[1]) for i in (q, k))
        centers = [np.clip(x, n // 2, size - 1 - n // 2) for x, n, size in zip((qr, qx), kernel, tiles)]
        return (abs(centers[0] - kr) <= kernel[0] // 2) & (abs(centers[1] - kx) <= kernel[1] // 2)

    odd = ours("sta2d(8, 16, 6, 12, 2, 4)", 128)
    np.testing.assert_array_equal(odd, theirs(*square(128), (4, 4), (3, 3), (2, 4)))
    even = ours("sta2d(8, 16, 4, 8, 2, 4)", 128)
    assert (even.sum(-1) == 4 * 8).all()
    assert theirs(*square(128), (4, 4), (2, 2), (2, 4)).sum(-1).max() == 9 * 8


@pytest.mark.parametrize("remainder", [np.mod, np.fmod])
def test_places_in_a_frame_before_the_first_frame(remainder):
    """Sparse VideoGen takes (q - p) mod t of the prompt too, where it is negative: C and Python differ there, and
    neither matters, since the prompt sees and is seen by all."""
    p, t, frames, w = 9, 11, 4, 2
    q, k = square(p + t * frames)
    near = abs(remainder(q - p, t) - remainder(k - p, t)) < w * t // frames
    np.testing.assert_array_equal(ours(f"svg_temporal({p}, {t}, {frames}, {w})", 53), (q < p) | (k < p) | near)


def test_windows_in_true_division():
    """The width of Sparse VideoGen's spatial heads, rounded down as published."""
    for t in (63, 64, 65, 127, 128, 300):
        have = fk.mask(f"svg_spatial(0, {t}, 3)").dense(1, 2000)[0, 0, 0].sum()
        assert have == max(int(np.floor(t * 3 / 128)) * 128, 0)


def test_both_prefix_hides_no_more_than_prefix_lm():
    """`both_prefix` hides nothing more than `prefix_lm`: a query behind the prefix is causal and sees all of it."""
    for n, p in ((20, 7), (7, 20), (9, 0)):
        np.testing.assert_array_equal(ours(f"both_prefix({p})", n), ours(f"prefix_lm({p})", n))
