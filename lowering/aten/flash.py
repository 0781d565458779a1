"""torch's built-in flash kernel for the blocks it can compute: tall blocks without a predicate, and plain triangles,
under unmodified scores. There the kernel, in tiles of its own and in one call, beats products of whole rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .steps import Heads, RowStep, joined, partial, triangles
from .tiles import AtenTiles

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
    changed = plan.kept is not None or plan.weight is not None or tiles.stored
    return not changed and g.head_dim == g.v_dim and bool(tiles.q.device.type == "cpu")


def fusible(tiles: AtenTiles, todo: list[RowStep]) -> tuple[list[Fused], list[RowStep]]:
    """Divide steps into steps for the flash kernel, and the rest."""
    if tiles.plan.score is not None or not takes(tiles):
        return [], todo
    found, rest = [], []
    for rows in triangles(todo):
        step = joined(rows)
        tall = step.height >= FLASH_ROWS and step.count == 1 and len(step.pieces) == 1
        corner = rows[0].pieces[-1].full_stop if rows[0].pieces else 0
        if tall and not partial(step.pieces[0]):
            found.append(Fused(step, None))
        elif tall and _is_triangle(tiles, step, corner):
            found.append(Fused(step, corner))
        else:
            rest.extend(rows)
    return found, rest


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
        done = [
            kernel(query, *(x[m.batch, kv, keys].unsqueeze(0) for x in (tiles.k, tiles.v)),
                   is_causal=triangle, scale=tiles.geometry.scale)
            for keys, triangle in part.parts
        ]  # fmt: skip
        out, lse = done[0] if len(done) == 1 else _merged(torch, done)
        yield place, out[0], lse[0]


def flash_backward(
    tiles: AtenTiles, part: Fused, members: list[Heads], rows: tuple[Tensor, Tensor, Tensor],
    sums: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:  # fmt: skip
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
            found = kernel(dout, query, key, value, out, lse, 0.0, triangle, scale=tiles.geometry.scale)
            for total, where, share in zip(sums, (place, at, at), found, strict=True):
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
