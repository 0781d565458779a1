"""torch's built-in flash kernel for the blocks it can compute: tall blocks without a predicate, and plain triangles,
under unmodified scores. There the kernel, in separate tiles and in one call, beats products of whole rows.

It also takes masks and biases that see q and k through their distance alone, as ALiBi does. Mask and bias are one
vector of numbers by distance. The kernel adds a matrix to its scores. Where queries go from the last to the first, that
matrix is a view of the vector, both of whose strides are 1. Nothing is written for a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from frisket.dsl.ir import Expr, uses
from frisket.dsl.transfer import drift

from .steps import Heads, RowStep, joined, partial, triangles
from .tiles import AtenTiles, vectors

Tensor = Any
FUSED = 64.0  # |lse| up to which weights by its float32 are right to 1e-5
FLASH_ROWS = 512  # below, a few batched products are as fast and need no merging


@dataclass(frozen=True)
class Fused:
    """A step of one piece: all keys of the piece, or the keys before `corner` and the triangle from there on."""

    step: RowStep
    corner: int | None

    @property
    def parts(self) -> list[tuple[slice, bool]]:
        """The ranges of keys, and whether keys are hidden right of the diagonal that begins at the first."""
        piece = self.step.pieces[0]
        split = piece.stop if self.corner is None else self.corner
        both = [(slice(piece.start, split), False), (slice(split, piece.stop), True)]
        return [(keys, triangle) for keys, triangle in both if keys.stop > keys.start]


def takes(tiles: AtenTiles) -> bool:
    """Whether the kernel takes such arrays, and keeps every weight as it is."""
    g, plan = tiles.geometry, tiles.plan
    changed = plan.keep_mask is not None or plan.value_scale is not None or tiles.stored
    return not changed and g.head_dim == g.v_dim and bool(tiles.q.device.type == "cpu")


def fusible(tiles: AtenTiles, todo: list[RowStep]) -> tuple[list[Fused], list[RowStep]]:
    """Divide steps into steps for the flash kernel, and the rest."""
    if tiles.plan.score is not None or not takes(tiles):
        return [], todo
    fused, rest = [], []
    for rows in triangles(todo):
        step = joined(rows)
        tall = step.height >= FLASH_ROWS and step.count == 1 and len(step.pieces) == 1
        corner = rows[0].pieces[-1].full_stop if rows[0].pieces else 0
        if tall and not partial(step.pieces[0]):
            fused.append(Fused(step, None))
        elif tall and _is_triangle(tiles, step, corner):
            fused.append(Fused(step, corner))
        else:
            rest.extend(rows)
    return fused, rest


def _is_triangle(tiles: AtenTiles, step: RowStep, corner: int) -> bool:
    """Whether the mask on the diagonal tiles is exactly `local query >= local key`."""
    if not tiles.still or tiles.mask is None:
        return False
    torch, n, g = tiles.torch, tiles.target.block_q, tiles.geometry
    q = torch.arange(step.start + int(g.origin[2]), step.start + int(g.origin[2]) + n).unsqueeze(1)
    k = torch.arange(corner + int(g.origin[3]), corner + int(g.origin[3]) + n)
    seen = tiles.mask({**tiles.env, "q": q, "k": k}, tiles.tables).expand(n, n)
    return bool((seen == torch.ones(n, n, dtype=torch.bool).tril()).all())


def flash(tiles: AtenTiles, part: Fused, members: list[Heads]) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """The (place in [batch, kv_heads, group, q_len, ...], out, lse) of the part, merged by lse."""
    torch, step = tiles.torch, part.step
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for m, j in columns(members):
        kv = slice(m.kv, m.kv + m.count)
        place = (m.batch, kv, j, slice(step.start, step.start + step.height))
        query = tiles.q[place].unsqueeze(0)
        done = []
        for keys, triangle in part.parts:
            arrays = (x[m.batch, kv, keys].unsqueeze(0) for x in (tiles.k, tiles.v))
            done.append(kernel(query, *arrays, is_causal=triangle, scale=tiles.geometry.scale))
        out, lse = done[0] if len(done) == 1 else _merged(torch, done)
        yield place, out[0], lse[0]


def flash_backward(
    tiles: AtenTiles, part: Fused, members: list[Heads], rows: tuple[Tensor, ...], sums: tuple[Tensor | None, ...]
) -> None:
    """Add dq, dk, dv of the part to `sums`, whose shapes are those of q (grouped), k and v. `rows`: dout, out and lse,
    [batch, kv_heads, group, q_len, ...]. P comes from the whole row's lse, so parts need no merging."""
    torch, step = tiles.torch, part.step
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for m, j in columns(members):
        kv = slice(m.kv, m.kv + m.count)
        place = (m.batch, kv, j, slice(step.start, step.start + step.height))
        dout, query, out, lse = (x[place].unsqueeze(0) for x in (rows[0], tiles.q, *rows[1:]))
        for keys, triangle in part.parts:
            at = (m.batch, kv, keys)
            key, value = (x[at].unsqueeze(0) for x in (tiles.k, tiles.v))
            gradients = kernel(dout, query, key, value, out, lse, 0.0, triangle, scale=tiles.geometry.scale)
            for total, where, share in zip(sums, (place, at, at), gradients, strict=True):
                if total is not None:
                    total[where] += share[0]


def columns(members: list[Heads]) -> Iterator[tuple[Heads, int]]:
    """The query heads, one of each key head at a time."""
    return ((m, j) for m in members for j in range(m.first, m.last))


def _merged(torch: Any, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over disjoint keys, combined by lse."""
    (out1, lse1), (out2, lse2) = parts
    lse = torch.logaddexp(lse1, lse2)
    return out1 * (lse1 - lse).exp().unsqueeze(-1) + out2 * (lse2 - lse).exp().unsqueeze(-1), lse


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
    groups: list[tuple[int, int, int, int]] = []
    for step in todo:
        if len(step.pieces) != 1:
            return None
        (piece,) = step.pieces
        for i in range(step.count):
            lo, hi = piece.start + i * piece.stride, piece.stop + i * piece.stride
            for start in range(step.start + i * step.height, step.start + (i + 1) * step.height, ROWS):
                stop = min(start + ROWS, step.start + (i + 1) * step.height)
                first, _, *ends = groups[-1] if groups else (start, 0, lo, hi)
                least, most = min(lo, ends[0]), max(hi, ends[1])
                if groups and stop - first <= ROWS and most - least <= WIDER * (hi - lo):
                    groups[-1] = first, stop, least, most
                else:
                    groups.append((start, stop, lo, hi))
    return groups


def _results(
    tiles: AtenTiles, rows: list[tuple[int, int, int, int]], known: list[tuple[Heads, int, Tensor]]
) -> Iterator[tuple[Any, Tensor, Tensor]]:
    torch, q_len = tiles.torch, tiles.geometry.q_len
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for m, j, far in known:
        kv = slice(m.kv, m.kv + m.count)
        query = tiles.q[m.batch, kv, j].flip(1)  # backwards, so that both strides of the matrix are 1
        for start, stop, lo, hi in rows:
            shape, strides = (1, m.count, stop - start, hi - lo), (0, far.stride(0), 1, 1)
            keys, values = (x[None, m.batch, kv, lo:hi] for x in (tiles.k, tiles.v))
            bias = far.as_strided(shape, strides, lo - (stop - 1) + q_len)
            some = query[None, :, q_len - stop : q_len - start]
            out, lse = kernel(some, keys, values, attn_mask=bias, scale=tiles.geometry.scale)
            yield (m.batch, kv, j, slice(start, stop)), out[0].flip(1), lse[0].flip(1)


def _by_distance(tiles: AtenTiles, m: Heads, j: int) -> Tensor:
    """The numbers added to scores by `k - q + q_len`, both local, for the j-th query head of each key head."""
    torch, g, plan = tiles.torch, tiles.geometry, tiles.plan
    assert plan.score is not None
    count = g.q_len + g.kv_len
    heads = torch.arange(m.kv, m.kv + m.count).unsqueeze(1) * tiles.group + j
    place = {**tiles.env, "b": m.batch + g.origin[0], "h": heads + g.origin[1]}
    place |= {"q": torch.tensor(g.q_len + g.origin[2]), "k": torch.arange(count) + g.origin[3]}
    place["score"] = torch.zeros(m.count, count, dtype=tiles.dtype)
    bias = tiles.program(plan.score)(place, tiles.tables)
    if tiles.mask is None:
        # `as_strided` reads memory, which an expanded tensor does not have
        return bias.expand(m.count, count).contiguous()
    return torch.where(tiles.mask(place, tiles.tables), bias, -math.inf).expand(m.count, count).contiguous()
