"""torch's flash kernel for masks and biases that see q and k through their distance alone, as ALiBi does.

Mask and bias are one vector of numbers by distance. The kernel adds a matrix to its scores: where queries go from the
last to the first, that matrix is a view of the vector, both of whose strides are 1. Nothing is written for a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from frisket.dsl.ir import Expr, uses

from .expr import drift
from .flash import FLASH_ROWS, columns, takes
from .steps import Heads, RowStep
from .tiles import AtenTiles, vectors

Tensor = Any
ROWS = 256  # queries of a call of the kernel
WIDER = 1.25  # keys of a call of the kernel, as a multiple of those of a row of tiles, at most


def sliding(tiles: AtenTiles, todo: list[RowStep], members: list[Heads]) -> Iterator[tuple[Any, Tensor, Tensor]] | None:
    """The (place in [batch, kv_heads, group, q_len, ...], out, lse) of steps; None where the kernel does not compute
    them. The kernel adds -inf, so hidden keys must be finite."""
    g, plan = tiles.geometry, tiles.plan
    if plan.score is None or not _bias(plan.score) or (plan.mask is not None and not tiles.still):
        return None  # without a bias, products of short rows are as fast
    if not takes(tiles) or tiles.clean or vectors(g) or g.q_len < FLASH_ROWS:
        return None
    rows = _rows(todo)
    far = [(m, j, _by_distance(tiles, m, j)) for m, j in columns(members)]
    return None if rows is None or not all(_shows(tiles, x) for *_, x in far) else _results(tiles, rows, far)


def _shows(tiles: AtenTiles, far: Tensor) -> bool:
    """Whether every query sees its own position, and nothing is NaN or infinite."""
    g = tiles.geometry
    behind = int(g.origin[2]) - int(g.origin[3])
    if behind < 0 or behind + g.q_len > g.kv_len:
        return False
    return bool(far[:, g.q_len + behind].isfinite().all() and (far < math.inf).all())  # NaN is below nothing


def _bias(score: Expr) -> bool:
    """Whether a score mod adds to the score a function of the distance of q and k, of b and of h."""
    if score.op == "var":
        return bool(score.name == "score")
    if score.op not in ("add", "sub"):
        return False
    left, right = score.args
    if score.op == "add" and "score" in uses(right):
        left, right = right, left
    return "score" not in uses(right) and drift(right)[right] == 0 and _bias(left)


def _rows(todo: list[RowStep]) -> list[tuple[int, int, int, int]] | None:
    """(first query, last, first key, last) of groups of rows of tiles, half open; None where a row has several runs."""
    found: list[tuple[int, int, int, int]] = []
    for step in todo:
        if len(step.pieces) != 1:
            return None
        (piece,) = step.pieces
        for i in range(step.count):
            lo, hi = piece.start + i * piece.stride, piece.stop + i * piece.stride
            for start in range(step.start + i * step.height, step.start + (i + 1) * step.height, ROWS):
                stop = min(start + ROWS, step.start + (i + 1) * step.height)
                first, _, *ends = found[-1] if found else (start, 0, lo, hi)
                least, most = min(lo, ends[0]), max(hi, ends[1])
                if found and stop - first <= ROWS and most - least <= WIDER * (hi - lo):
                    found[-1] = first, stop, least, most
                else:
                    found.append((start, stop, lo, hi))
    return found


def _results(
    tiles: AtenTiles, rows: list[tuple[int, int, int, int]], known: list[tuple[Heads, int, Tensor]]
) -> Iterator[tuple[Any, Tensor, Tensor]]:  # fmt: skip
    torch, q_len = tiles.torch, tiles.geometry.q_len
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for m, j, far in known:
        kv = slice(m.kv, m.kv + m.count)
        query = tiles.q[m.batch, kv, j].flip(1)
        for start, stop, lo, hi in rows:
            shape, strides = (1, m.count, stop - start, hi - lo), (0, far.stride(0), 1, 1)
            keys, values = (x[None, m.batch, kv, lo:hi] for x in (tiles.k, tiles.v))
            out, lse = kernel(
                query[None, :, q_len - stop : q_len - start], keys, values,
                attn_mask=far.as_strided(shape, strides, lo - (stop - 1) + q_len), scale=tiles.geometry.scale,
            )  # fmt: skip
            yield (m.batch, kv, j, slice(start, stop)), out[0].flip(1), lse[0].flip(1)


def _by_distance(tiles: AtenTiles, m: Heads, j: int) -> Tensor:
    """The numbers added to scores by `k - q + q_len`, both local, for the j-th query head of each key head."""
    torch, g, plan = tiles.torch, tiles.geometry, tiles.plan
    assert plan.score is not None
    count = g.q_len + g.kv_len
    heads = torch.arange(m.kv, m.kv + m.count).unsqueeze(1) * tiles.group + j
    place = {
        **tiles.env, "b": m.batch + g.origin[0], "h": heads + g.origin[1], "q": torch.tensor(g.q_len + g.origin[2]),
        "k": torch.arange(count) + g.origin[3], "score": torch.zeros(m.count, count, dtype=tiles.dtype),
    }  # fmt: skip
    found = tiles.program(plan.score)(place, tiles.tables)
    if tiles.mask is None:
        return found.expand(m.count, count).contiguous()
    return torch.where(tiles.mask(place, tiles.tables), found, -math.inf).expand(m.count, count).contiguous()
