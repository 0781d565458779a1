"""The LoopPlan on torch's own library calls: nothing is compiled, no key or value is gathered or copied.

For each row of tiles and each run of keys one batched GEMM over heads (or over rows of equal relative spans),
a float32 softmax in base 2, the mask added on PARTIAL tiles only. Where the mask is a plain triangle and
there is no score mod, torch's built-in flash kernel does the block and the pieces are merged by their lse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from threading import local
from typing import Any

from frisket.dsl.ir import Expr, binary, walk

from .aten_expr import Program, distance_only
from .aten_steps import Heads, Piece, Step, chunks, heads, joined, moved, partial, shares, steps, triangles
from .aten_workers import spread
from .plan import Geometry, LoopPlan, Spans, Target

Tensor = Any
LOG2E, LN2 = math.log2(math.e), math.log(2.0)
FLASH_ROWS = 512  # below, a few batched products are as fast and need no merging
BUDGET = 1 << 22  # scores of one step: fewer, larger steps pay for their Python even out of the second-level cache

# Operators that make no NaN or +inf of finite values: a mask may be *added* to such scores.
TAME = frozenset(
    "lit var param lookup float add sub mul neg abs min max tanh sigmoid where lt le gt ge eq ne and or not"
    " bitand bitor bitxor floordiv mod sign".split()
)


def forward(
    plan: LoopPlan, spans: Spans, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor,
    slots: Mapping[str, Any], tables: Mapping[str, Tensor], target: Target,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [batch, heads, q_len, v_dim], lse [batch, heads, q_len]) for q [batch, heads, q_len, head_dim] and
    k, v [batch, kv_heads, kv_len, dim]. Scores and lse are float32, float64 when q is float64."""
    run = _Run(plan, spans, geometry, (q, k, v), slots, tables, target)
    tame = plan.score is None or all(n.op in TAME or _safe_division(n) for n in walk(plan.score))
    out, lse = run.everything(careful=not tame)
    # A NaN may come from a masked position (inf or NaN in K): then masks have to overwrite, not to be added.
    if tame and plan.mask is not None and bool(lse.isnan().any()):
        out, lse = run.everything(careful=True)
    return out, lse


def _safe_division(n: Expr) -> bool:
    return n.op == "div" and n.args[1].op == "lit" and n.args[1].name != 0


@dataclass(frozen=True)
class _Block:
    """Rows and heads that run as one batch: `[batch, group, height, width]` of scores."""

    heads: Heads
    step: Step
    by_row: bool  # the batch axis walks rows; otherwise key heads

    @property
    def batch(self) -> int:
        return self.step.count if self.by_row else self.heads.count

    @property
    def group(self) -> int:
        return self.heads.last - self.heads.first

    @property
    def cells(self) -> int:
        return self.batch * self.group * self.step.height * self.step.width

    def slides(self, piece: Piece) -> bool:
        """Whether all rows see the piece at one distance."""
        return not self.by_row or self.step.count == 1 or piece.stride == self.step.height


class _Run:
    """One call: arrays, compiled predicates and reused buffers."""

    def __init__(
        self, plan: LoopPlan, spans: Spans, geometry: Geometry, qkv: tuple[Tensor, Tensor, Tensor],
        slots: Mapping[str, Any], tables: Mapping[str, Tensor], target: Target,
    ) -> None:  # fmt: skip
        import torch

        self.torch, self.plan, self.spans, self.geometry = torch, plan, spans, geometry
        self.tables, self.target = tables, target
        self.given = qkv[0].dtype
        self.dtype = torch.float64 if self.given == torch.float64 else torch.float32
        # Half precision multiplies in float32: scores keep their digits, and no CPU call is faster for it.
        self.q, self.k, self.v = (x.to(self.dtype) for x in qkv)
        if self.q.stride(-1) != 1:
            self.q = self.q.contiguous()
        self.k, self.v = (x if x.stride(-1) == 1 else x.contiguous() for x in (self.k, self.v))
        self.q = self.q.unflatten(1, (geometry.kv_heads, geometry.heads // geometry.kv_heads))
        sizes = dict(zip(("B", "H", "Q_LEN", "KV_LEN"), geometry.full, strict=True))
        self.env = {**sizes, **slots}
        self.buffers = local()  # of each thread, reused by its blocks
        self.memory: dict[tuple[int, ...], Tensor] = {}  # masks that depend on q - k only, by place
        self.mask = None if plan.mask is None else Program(plan.mask, self.dtype)
        self.still = plan.mask is not None and distance_only(plan.mask) and not _vectors(geometry)
        self.score = self.strips = None
        if plan.score is not None:
            shared = _hoisted(plan.score) if not _vectors(geometry) else {}
            self.score = Program(_in_base_2(plan.score), self.dtype, shared)
            self.strips = {name: Program(e, self.dtype) for e, name in shared.items()}

    # -- the whole call -------------------------------------------------------------------------------

    def everything(self, careful: bool) -> tuple[Tensor, Tensor]:
        g, torch = self.geometry, self.torch
        self.careful = careful
        group = g.heads // g.kv_heads
        shape = (g.batch, g.kv_heads, group, g.q_len)
        self.out = torch.empty((*shape, g.v_dim), dtype=self.dtype, device=self.q.device)
        self.lse = torch.empty(shape, dtype=self.dtype, device=self.q.device)
        block = (self.target.block_q, self.target.block_k)
        blocks: list[_Block] = []
        for slice_, members in heads(self.spans, g).items():
            todo = self._flash(steps(self.spans, slice_, g, block), members)
            for step in todo:
                for member in members:
                    blocks.extend(self._cut(step, member))
        blocks.sort(key=lambda x: x.cells)  # the largest go first: the last ones to end are short
        spread(self._attend, blocks)
        out = self.out.flatten(1, 2).to(self.given)
        return out, self.lse.flatten(1, 2)

    def _cut(self, step: Step, member: Heads) -> Iterator[_Block]:
        """Blocks whose scores fit the budget, cut along whichever axis needs fewer of them."""
        if not step.pieces:
            rows = slice(step.start, step.start + step.height * step.count)
            place = (member.batch, slice(member.kv, member.kv + member.count), slice(member.first, member.last), rows)
            self.out[place], self.lse[place] = 0, -math.inf
            return
        room = max(1, BUDGET // ((member.last - member.first) * step.height * step.width))
        by_head = step.count * -(-member.count // min(room, member.count))
        by_row = member.count * -(-step.count // min(room, step.count))
        if by_head <= by_row:
            for i in range(step.count):
                for part in shares(member.count, room):
                    some = replace(member, kv=member.kv + part.start, count=len(part))
                    yield _Block(some, moved(step, i, 1), by_row=False)
            return
        for j in range(member.count):
            one = replace(member, kv=member.kv + j, count=1)
            for part in shares(step.count, room):
                yield _Block(one, moved(step, part.start, len(part)), by_row=True)

    # -- one block --------------------------------------------------------------------------------------

    def _attend(self, block: _Block) -> None:
        torch, step = self.torch, block.step
        rows = block.group * step.height
        query = self._queries(block)
        top = total = acc = None
        for chunk in chunks(step.pieces, max(64, BUDGET // (block.batch * rows))):
            tiles = self._scores(block, query, chunk)
            peak = tiles[0].amax(-1, keepdim=True)
            for t in tiles[1:]:
                peak = torch.maximum(peak, t.amax(-1, keepdim=True))
            if top is not None:
                peak = torch.maximum(peak, top)
            base = peak
            if self.plan.guard or self.careful:  # a row without a finite score: -inf - -inf is NaN
                base = torch.where(peak == -math.inf, 0.0, peak)
            if acc is not None:
                shrink = torch.exp2(top - base)
                total *= shrink
                acc *= shrink
            top = peak
            for t, piece in zip(tiles, chunk, strict=True):
                t.sub_(base).exp2_()
                part = t.sum(-1, keepdim=True)
                total = part if total is None else total.add_(part)
                value = self._keys(self.v, block, piece)
                if acc is None:
                    acc = self._buffer("acc", block.batch, rows, self.geometry.v_dim)
                    torch.bmm(t, value, out=acc)
                else:
                    acc.baddbmm_(t, value)
        self._store(block, acc, top, total)

    def _scores(self, block: _Block, query: Tensor, chunk: list[Piece]) -> list[Tensor]:
        """Masked scores times log2(e), one matrix per piece, [batch, group * height, width]."""
        step, found, used = block.step, [], 0
        rows = block.group * step.height
        factor = self.geometry.scale * (LOG2E if self.score is None else 1.0)
        room = self._buffer("scores", block.batch * rows * sum(p.width for p in chunk))
        for piece in chunk:
            size = block.batch * rows * piece.width
            s = room[used : used + size].view(block.batch, rows, piece.width)
            used += size
            keys = self._keys(self.k, block, piece)
            s.baddbmm_(query, keys.mT, beta=0, alpha=factor)
            cells = s.view(block.batch, block.group, step.height, piece.width)
            if self.score is not None:
                self._modify(block, piece, cells)
            for lo, hi in ((piece.start, piece.full_start), (piece.full_stop, piece.stop)):
                if hi > lo and self.mask is not None:
                    self._hide(block, piece, lo, hi, cells[..., lo - piece.start : hi - piece.start])
            found.append(s)
        return found

    def _modify(self, block: _Block, piece: Piece, cells: Tensor) -> None:
        assert self.score is not None
        assert self.strips is not None
        env = self._coordinates(block, piece, piece.start, piece.stop)
        env["score"] = cells
        for name, program in self.strips.items():
            env[name] = self._strip(name, program, block, piece)
        value = self.score(env, self.tables)
        if value.data_ptr() != cells.data_ptr():
            cells.copy_(value)

    def _hide(self, block: _Block, piece: Piece, lo: int, hi: int, cells: Tensor) -> None:
        assert self.mask is not None
        torch, step = self.torch, block.step
        still = self.still and block.slides(piece)
        place = (lo - step.start, hi - lo, step.height, int(self.careful))
        hidden = self.memory.get(place) if still else None
        if hidden is None:
            seen = self.mask(self._coordinates(block, piece, lo, hi, still=still), self.tables)
            hidden = ~seen if self.careful else torch.where(seen, 0.0, -math.inf).to(self.dtype)
            if still:
                self.memory[place] = hidden
        if self.careful:
            cells.masked_fill_(hidden, -math.inf)
        else:
            cells.add_(hidden)

    def _strip(self, name: str, program: Program, block: _Block, piece: Piece) -> Tensor:
        """A part of the score mod that only sees q - k: one strip of tiles serves all rows."""
        torch, g, step = self.torch, self.geometry, block.step
        if not block.slides(piece):
            return program(self._coordinates(block, piece, piece.start, piece.stop), self.tables)
        place = (-1, len(name), int(name[1:]), step.height)
        strip = self.memory.get(place)
        if strip is None:
            q = torch.arange(step.height).unsqueeze(1) + (g.q_len + int(g.origin[2]))
            k = torch.arange(g.q_len + g.kv_len) + int(g.origin[3])
            strip = program({**self.env, "q": q, "k": k}, self.tables).expand(step.height, len(k))
            self.memory[place] = strip
        lo = piece.start - step.start + g.q_len
        return strip[:, lo : lo + piece.width]

    # -- views ------------------------------------------------------------------------------------------

    def _queries(self, block: _Block) -> Tensor:
        """[batch, group * height, head_dim]; a copy only where a group is packed."""
        m, step = block.heads, block.step
        if not block.by_row:
            part = self.q[m.batch, m.kv : m.kv + m.count, m.first : m.last, step.start : step.start + step.height]
        else:
            rows = self.q[m.batch, m.kv, m.first : m.last, step.start : step.start + step.height * step.count]
            part = rows.unflatten(1, (step.count, step.height)).transpose(0, 1)
        return part.flatten(1, 2)

    def _keys(self, x: Tensor, block: _Block, piece: Piece) -> Tensor:
        """[batch, width, dim]: always a view; the rows of a sliding window overlap."""
        m = block.heads
        if not block.by_row:
            return x[m.batch, m.kv : m.kv + m.count, piece.start : piece.stop]
        first = x[m.batch, m.kv, piece.start : piece.stop]
        shape = (block.step.count, *first.shape)
        return first.as_strided(shape, (piece.stride * first.stride(0), *first.stride()))

    def _coordinates(self, block: _Block, piece: Piece, lo: int, hi: int, still: bool = False) -> dict[str, Any]:
        """Global `b h q k` of keys [lo, hi) beside the block's queries, for cells [batch, group, height, width].
        `still`: all rows look alike, so the first one's coordinates do."""
        torch, g, m, step = self.torch, self.geometry, block.heads, block.step
        b0, h0, q0, k0 = g.origin
        q0, k0 = (x if isinstance(x, int) else _entry(x, m.batch) for x in (q0, k0))
        q = torch.arange(step.start + q0, step.start + q0 + step.height).unsqueeze(1)
        k = torch.arange(lo + k0, hi + k0)
        if block.by_row and not still:
            row = torch.arange(step.count).view(-1, 1, 1, 1)
            q, k = q + row * step.height, k + row * piece.stride
        group = g.heads // g.kv_heads
        inner = torch.arange(m.first, m.last).view(1, -1, 1, 1)
        kv = torch.arange(m.kv, m.kv + m.count).view(-1, 1, 1, 1)
        return {**self.env, "b": m.batch + b0, "h": kv * group + inner + h0, "q": q, "k": k}

    def _buffer(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        known = getattr(self.buffers, name, None)
        if known is None or known.numel() < size:
            known = self.torch.empty(size, dtype=self.dtype, device=self.q.device)
            setattr(self.buffers, name, known)
        return known[:size].view(shape)

    def _store(self, block: _Block, acc: Tensor, top: Tensor, total: Tensor) -> None:
        torch, m, step = self.torch, block.heads, block.step
        safe = torch.where(total == 0, 1.0, total) if self.plan.guard or self.careful else total
        acc = acc.div_(safe)
        lse = total.log2_().add_(top).mul_(LN2).squeeze(-1)
        rows = slice(step.start, step.start + step.height * step.count)
        out, kept = (x[m.batch, m.kv : m.kv + m.count, m.first : m.last, rows] for x in (self.out, self.lse))
        inner = (block.group, step.height)
        if not block.by_row:
            out.copy_(acc.unflatten(1, inner))
            kept.copy_(lse.unflatten(1, inner))
            return
        out[0].unflatten(1, (step.count, -1)).copy_(acc.unflatten(1, inner).transpose(0, 1))
        kept[0].unflatten(1, (step.count, -1)).copy_(lse.unflatten(1, inner).transpose(0, 1))

    # -- torch's flash kernel ---------------------------------------------------------------------------

    def _flash(self, todo: list[Step], members: list[Heads]) -> list[Step]:
        """Do what torch's fused kernel can do: blocks without a predicate and plain triangles, where nothing
        changes the scores. Gives back the rest."""
        g = self.geometry
        if self.score is not None or g.head_dim != g.v_dim or self.q.device.type != "cpu":
            return todo
        rest: list[Step] = []
        for rows in triangles(todo):
            step = joined(rows, self.target.block_q)
            corner = rows[0].pieces[-1].full_stop if rows[0].pieces else 0
            tall = step.height >= FLASH_ROWS and step.count == 1 and len(step.pieces) == 1
            plain = tall and not partial(step.pieces[0])
            if tall and (plain or self._is_triangle(step, corner)):
                self._fused(step, None if plain else corner, members)
            else:
                rest.extend(rows)
        return rest

    def _is_triangle(self, step: Step, corner: int) -> bool:
        """Whether the mask on the diagonal tiles is exactly `local query >= local key`."""
        if not self.still or self.mask is None:
            return False
        torch, n, g = self.torch, self.target.block_q, self.geometry
        q = torch.arange(step.start + int(g.origin[2]), step.start + int(g.origin[2]) + n).unsqueeze(1)
        k = torch.arange(corner + int(g.origin[3]), corner + int(g.origin[3]) + n)
        seen = self.mask({**self.env, "q": q, "k": k}, self.tables).expand(n, n)
        return bool((seen == torch.ones(n, n, dtype=torch.bool).tril()).all())

    def _fused(self, step: Step, corner: int | None, members: list[Heads]) -> None:
        """Keys before `corner` in full, and the triangle from there on; merged by lse."""
        torch, piece = self.torch, step.pieces[0]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        rows = slice(step.start, step.start + step.height)
        split = piece.stop if corner is None else corner
        parts = [(slice(piece.start, split), False), (slice(split, piece.stop), True)]
        parts = [(keys, triangle) for keys, triangle in parts if keys.stop > keys.start]
        for m in members:
            kv = slice(m.kv, m.kv + m.count)
            for j in range(m.first, m.last):
                query = self.q[m.batch, kv, j, rows].unsqueeze(0)
                done = [
                    kernel(query, *(x[m.batch, kv, keys].unsqueeze(0) for x in (self.k, self.v)),
                           is_causal=triangle, scale=self.geometry.scale)
                    for keys, triangle in parts
                ]  # fmt: skip
                out, lse = done[0]
                if len(done) == 2:
                    out, lse = _merge(torch, done)
                if out.numel() == self.out.numel():  # the whole call: no copy
                    self.out, self.lse = out.unsqueeze(2), lse.unsqueeze(2)
                    return
                self.out[m.batch, kv, j, rows] = out[0]
                self.lse[m.batch, kv, j, rows] = lse[0]


def _merge(torch: Any, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over disjoint keys, combined."""
    (out1, lse1), (out2, lse2) = parts
    lse = torch.logaddexp(lse1, lse2)
    return out1 * (lse1 - lse).exp().unsqueeze(-1) + out2 * (lse2 - lse).exp().unsqueeze(-1), lse


def _in_base_2(score: Expr) -> Expr:
    """The score mod times log2(e), in one factor with a literal that is there already."""
    if score.op == "mul" and (known := next((a for a in score.args if a.op == "lit"), None)) is not None:
        other = score.args[1] if score.args[0] is known else score.args[0]
        return binary("mul", other, float(known.name) * LOG2E)
    return binary("mul", score, LOG2E)


def _vectors(g: Geometry) -> bool:
    return not all(isinstance(x, int) for x in g.origin[2:])


def _entry(vector: Any, b: int) -> int:
    return int(vector[b] if getattr(vector, "shape", (1,)) != (1,) else vector[0])


def _hoisted(score: Expr) -> dict[Expr, str]:
    """The largest parts that see q and k through their distance only, with names for them."""
    found: dict[Expr, str] = {}

    def visit(e: Expr) -> None:
        if not e.args or e in found:
            return
        if distance_only(e) and {"q", "k"} <= {n.name for n in walk(e) if n.op == "var"}:
            found[e] = f"~{len(found)}"
            return
        for a in e.args:
            visit(a)

    visit(score)
    return found


__all__ = ["forward"]
