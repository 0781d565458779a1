"""Masked scores of a block, for forward and backward: the arrays of one call, views of them, and scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from threading import local
from typing import Any

import numpy as np

from frisket.dsl.ir import SIZES, Expr, binary, lit, rebuild, uses, walk
from frisket.dsl.transfer import distance_only
from frisket.grammar.memo import memo
from frisket.lowering.plan import Geometry, KernelInputs

from .expr import TileProgram
from .steps import Block, Heads, KeyPiece, RowStep, heads, steps

Tensor = Any
LOG2E, LN2 = math.log2(math.e), math.log(2.0)
RECENT = 8  # masks of blocks
STRIP = 1 << 24  # entries of a strip at most
MAX_VECTOR_ROWS = 8  # rows that a product takes twice as long over as over columns

# Operators that make no NaN or +inf of finite values: a mask may be *added* to such scores.
TAME = frozenset(
    "lit var param lookup float add sub mul neg abs min max tanh sigmoid where lt le gt ge eq ne and or not"
    " bitand bitor bitxor floordiv mod sign".split()
)


@memo(group="programs")
def tame(score: Expr | None) -> bool:
    """Whether a score mod makes no NaN or +inf of finite values."""
    return score is None or all(
        n.op in TAME or (n.op == "div" and n.args[1].op == "lit" and n.args[1].name != 0) for n in walk(score)
    )


def finite(torch: Any, top: Tensor) -> Tensor:
    """The maximum of a row, to subtract from its scores: 0 where the row sees no key."""
    return torch.where(top == -math.inf, 0.0, top)


class AtenTiles:
    """One call: arrays, compiled predicates and reused buffers. Where `careful`, masked scores are overwritten; else
    -inf is added to them, which is faster and a NaN there would survive."""

    unit = 1.0  # of scores; log2(e) where exponentials are those of 2, which torch has faster: exp minds infinities

    def __init__(self, inputs: KernelInputs, qkv: tuple[Tensor, Tensor, Tensor], *, careful: bool) -> None:
        import torch

        plan, geometry, slots, tables = inputs.plan, inputs.geometry, inputs.slots, inputs.tables
        self.torch, self.plan, self.spans, self.geometry = torch, plan, inputs.spans, geometry
        self.tables, self.target, self.careful = tables, inputs.target, careful
        self.group = geometry.heads // geometry.kv_heads
        self.input_dtype = qkv[0].dtype
        self.dtype = torch.float64 if self.input_dtype == torch.float64 else torch.float32
        # Half precision multiplies in float32, so that scores keep their digits. Products of weights may take bfloat16
        # as it is, where the processor has it: weights are rounded, sums stay float32.
        self.half = self.input_dtype == torch.bfloat16 and _fast_bfloat16()
        self.given_k, self.given_v = qkv[1:]
        self.stored = bool(plan.page or plan.value_scale is not None or geometry.kv_dtype)  # they are read tile by tile
        self.clean = self.stored  # hidden values are 0: anything may stand in a cache where nothing is seen
        self.pages = tables[plan.pages].long() if plan.pages is not None else None
        self.q = self.grouped(self.worked(qkv[0]))
        self.k = qkv[1] if self.stored else self.worked(qkv[1])
        self.env = {**dict(zip(SIZES, geometry.full, strict=True)), **slots}
        self.buffers = local()  # of each thread, reused by its blocks
        self.memory: dict[tuple[int, ...], Tensor] = {}  # masks that depend on q - k only, by place
        self.recent: dict[tuple[int, ...], Tensor] = {}  # masks that all heads share, the last few
        self.common = not (plan.uses_batch or plan.uses_head or vectors(geometry))
        self.mask = None if plan.mask is None else self.program(plan.mask)
        self.still = plan.mask is not None and distance_only(plan.mask) and not vectors(geometry)
        self.score = self.keep_mask = None
        self.factor = self.unit  # of scaled products
        self.weight = None if plan.value_scale is None else self.program(plan.value_scale)
        self.strips: dict[str, TileProgram] = {}
        if plan.score is not None:
            programs = _score_programs(plan.score, self.dtype, not vectors(geometry), self.unit)
            self.score, self.strips, self.factor = programs
        if plan.keep_mask is not None:
            assert plan.rate is not None
            rate = float(np.float32(slots[plan.rate]))
            self.env[plan.rate], self.keep = rate, 1 - rate
            self.keep_mask = self.program(plan.keep_mask)

    @cached_property
    def v(self) -> Tensor:
        return self.worked(self.given_v)

    def worked(self, x: Tensor) -> Tensor:
        """`x` in the dtype of the scores, as a GEMM reads it without a copy."""
        x = x.to(self.dtype)
        return x if x.stride(-1) == 1 else x.contiguous()

    def grouped(self, x: Tensor) -> Tensor:
        """[batch, heads, ...] as [batch, kv_heads, group, ...]."""
        return x.unflatten(1, (self.geometry.kv_heads, self.group))

    def steps(self) -> list[tuple[list[RowStep], list[Heads]]]:
        """The rows of every slice, and the heads that share the slice."""
        block = (self.target.block_q, self.target.block_k)
        by_slice = heads(self.spans, self.geometry)
        return [(steps(self.spans, s, self.geometry, block), members) for s, members in by_slice.items()]

    # -- scores -----------------------------------------------------------------------------------------

    def scores(
        self, block: Block, query: Tensor, pieces: Sequence[KeyPiece], raws: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Masked scores times the unit for each piece, [batch, group * height, width]; `raws` gets them unmodified."""
        tiles, used = [], 0
        size = block.batch * block.rows * sum(p.width for p in pieces)
        room = self.buffer("scores", size)
        raw_room = None if raws is None else self.buffer("raw", size)
        for piece in pieces:
            shape = block.batch, block.rows, piece.width
            part = slice(used, used := used + math.prod(shape))
            s = self.products(block, query, piece, room[part].view(shape))
            if raw_room is not None and raws is not None:
                raws.append(raw_room[part].view(shape).copy_(s))
            self.modify(block, piece, s)
            self.hide(block, piece, s)
            tiles.append(s)
        return tiles

    def products(self, block: Block, query: Tensor, piece: KeyPiece, s: Tensor) -> Tensor:
        """Scaled products of the block's queries and the piece's keys into `s` [batch, group * height, width]; times
        the unit where the score mod takes them so."""
        factor = self.geometry.scale * self.factor
        keys = self.keys(self.k, block, piece, self.dtype)
        if 1 < block.rows <= MAX_VECTOR_ROWS:
            # the keys as left factor: a product of few rows is slow
            return s.copy_(self.torch.bmm(keys, (query * factor).mT).mT)
        return s.baddbmm_(query, keys.mT, beta=0, alpha=factor)

    def modify(self, block: Block, piece: KeyPiece, s: Tensor) -> None:
        """Turn scaled products into modified scores times the unit."""
        if self.score is None:
            return
        cells = self.cells(block, s)
        env = self.coordinates(block, piece, piece.start, piece.stop)
        env["score"] = cells
        for name, program in self.strips.items():
            env[name] = self._strip(name, program, block, piece)
        value = self.score(env, self.tables)
        if value.data_ptr() != cells.data_ptr():  # the program may have worked in place
            cells.copy_(value)

    def hide(self, block: Block, piece: KeyPiece, s: Tensor, hidden: float = -math.inf) -> None:
        """Put `hidden` at hidden positions; where not careful, -inf is added."""
        if self.mask is None:
            return
        cells = self.cells(block, s)
        for lo, hi in ((piece.start, piece.full_start), (piece.full_stop, piece.stop)):
            if hi > lo:
                part, cover = cells[..., lo - piece.start : hi - piece.start], self._cover(block, piece, lo, hi)
                if self.careful:
                    part.masked_fill_(cover, hidden)
                else:
                    part.add_(cover)

    def _cover(self, block: Block, piece: KeyPiece, lo: int, hi: int) -> Tensor:
        """The mask as the tensor that `hide` adds, or as the places it writes; kept if it is asked for again."""
        assert self.mask is not None
        step = block.step
        still = self.still and block.slides(piece)
        place: tuple[int, ...] = (lo - step.start, hi - lo, step.height)
        if not still:  # a mask by distance looks alike from every row
            place += (step.start, step.count if block.by_row else 0, piece.stride)
        known = self.memory if still else self.recent
        cover = known.get(place)
        if cover is None:
            seen = self.mask(self.coordinates(block, piece, lo, hi, still=still), self.tables)
            cover = ~seen if self.careful else self.torch.where(seen, 0.0, -math.inf).to(self.dtype)
            if still or self.common:
                known[place] = cover
            for old in list(self.recent)[: max(0, len(self.recent) - RECENT)]:  # a list: other threads add meanwhile
                self.recent.pop(old, None)
        return cover

    def _strip(self, name: str, program: TileProgram, block: Block, piece: KeyPiece) -> Tensor:
        """A part of the score mod that only sees q - k: one strip of tiles serves all rows."""
        torch, g, step = self.torch, self.geometry, block.step
        if not block.slides(piece) or step.height * (g.q_len + g.kv_len) > STRIP:
            return self.at(program, block, piece)
        place = (-1, int(name[1:]), step.height)
        strip = self.memory.get(place)
        if strip is None:
            q = torch.arange(step.height).unsqueeze(1) + (g.q_len + int(g.origin[2]))
            k = torch.arange(g.q_len + g.kv_len) + int(g.origin[3])
            strip = program({**self.env, "q": q, "k": k}, self.tables).expand(step.height, len(k))
            self.memory[place] = strip
        lo = piece.start - step.start + g.q_len
        return strip[:, lo : lo + piece.width]

    def survivors(self, block: Block, piece: KeyPiece) -> Tensor:
        """The weights of the piece that dropout keeps, 1 or 0, for cells [batch, group, height, width]."""
        assert self.keep_mask is not None
        return self.at(self.keep_mask, block, piece).to(self.dtype)

    # -- views ------------------------------------------------------------------------------------------

    def cells(self, block: Block, s: Tensor) -> Tensor:
        return s.view(block.batch, block.group, block.step.height, -1)

    def rows(self, x: Tensor, block: Block) -> Tensor:
        """The block's rows [batch, group * height, ...] of x [batch, kv_heads, group, q_len, ...]; packed, a copy."""
        part = x[block.place]
        if block.by_row:
            part = part[0].unflatten(1, (block.step.count, block.step.height)).transpose(0, 1)
        return part.flatten(1, 2)

    def put(self, x: Tensor, block: Block, value: Tensor, add: bool = False) -> None:
        """The inverse of `rows`: write `value` to the block's part of `x`, or add it."""
        part, value = x[block.place], value.unflatten(1, (block.group, block.step.height))
        if block.by_row:
            part = part[0].unflatten(1, (block.step.count, block.step.height))
            value = value.transpose(0, 1)
        if add:
            part.add_(value)
        else:
            part.copy_(value)

    def keys(self, x: Tensor, block: Block, piece: KeyPiece, dtype: Any = None) -> Tensor:
        """The keys [batch, width, dim] of a piece: always a view, of x or, where keys are stored, of a tile of them
        that is converted to `dtype`. The rows of a sliding window overlap."""
        m, start = block.heads, piece.start
        heads = slice(m.kv, m.kv + m.count)
        if self.stored:
            stop = piece.stop + (block.step.count - 1) * piece.stride * block.by_row
            part, start = self._read(x, m.batch, heads, start, stop).to(dtype), 0
        else:
            part = x[m.batch, heads]
        if not block.by_row:
            return part[:, start : start + piece.width]
        first = part[0, start : start + piece.width]
        return first.as_strided((block.step.count, *first.shape), (piece.stride * first.stride(0), *first.stride()))

    def _read(self, x: Tensor, b: int, heads: slice, start: int, stop: int) -> Tensor:
        """The stored keys [start, stop) of a batch entry, [heads, stop - start, dim]."""
        if self.pages is None:
            return x[b, heads, start:stop]
        page = self.plan.page
        first, last = start // page, -(-stop // page)
        pages = x[self.pages[b, first:last].clamp(0, len(x) - 1), heads]  # [pages, heads, tokens, dim]
        return pages.transpose(0, 1).flatten(1, 2)[:, start - first * page : stop - first * page]

    def rough_product(self, left: Tensor, right: Tensor) -> Tensor:
        """The product left @ right in bfloat16, in a buffer: new memory costs as much as the product."""
        shape = (left.shape[0], left.shape[1], right.shape[2])
        return self.torch.bmm(left, right, out=self.buffer("rough product", *shape, dtype=self.input_dtype))

    def rounded(self, x: Tensor, name: str, unit: Any = 1) -> Tensor:
        """`x` / unit as the products of weights take it, in the thread's buffer `name`; without `half` x as it is."""
        return self.torch.div(x, unit, out=self.buffer(name, *x.shape, dtype=self.input_dtype)) if self.half else x

    def disjoint_views(self, x: Tensor, block: Block, piece: KeyPiece) -> Iterator[tuple[slice, Tensor]]:
        """The entries of the block's batch axis whose keys do not overlap, and their views [n, width, dim] of x [batch,
        kv_heads, kv_len, dim]. Every addition to a view is counted once."""
        if not block.by_row:
            yield slice(None), self.keys(x, block, piece)
            return
        count, m = block.step.count, block.heads
        # rows so far apart share no key
        spacing = min(count, -(-piece.width // piece.stride) if piece.stride else count)
        for i in range(spacing):
            start = piece.start + i * piece.stride
            first = x[m.batch, m.kv, start : start + piece.width]
            shape = (len(range(i, count, spacing)), *first.shape)
            strides = (spacing * piece.stride * first.stride(0), *first.stride())
            yield slice(i, None, spacing), first.as_strided(shape, strides)

    def add_keys(
        self, x: Tensor | None, block: Block, piece: KeyPiece, left: Tensor, right: Tensor, scale: float = 1.0
    ) -> None:
        """Add scale * left.T @ right to x, for left [batch, rows, width], right [batch, rows, dim] and the keys' part
        of x [batch, kv_heads, kv_len, dim]. With `half`, left and right are bfloat16."""
        if x is None:
            return
        places = self.disjoint_views(x, block, piece)
        if block.by_row and piece.stride == 0:  # the same keys for all rows
            left, right = left.flatten(0, 1).unsqueeze(0), right.flatten(0, 1).unsqueeze(0)
            m = block.heads
            places = iter([(slice(None), x[m.batch, m.kv : m.kv + 1, piece.start : piece.stop])])
        product = self.rough_product(left.mT, right) if self.half else None
        for rows, part in places:
            if product is None:
                part.baddbmm_(left[rows].mT, right[rows], alpha=scale)
            else:
                part.add_(product[rows], alpha=scale)

    def program(self, e: Expr) -> TileProgram:
        return _program(e, self.dtype)

    def at(self, program: TileProgram, block: Block, piece: KeyPiece, raw: Tensor | None = None) -> Tensor:
        """The value of a program for cells [batch, group, height, width] of the piece; `raw`, the scaled products, may
        be overwritten."""
        env = self.coordinates(block, piece, piece.start, piece.stop)
        if raw is not None:
            env["score"] = self.cells(block, raw)
        return program(env, self.tables)

    def coordinates(self, block: Block, piece: KeyPiece, lo: int, hi: int, still: bool = False) -> dict[str, Any]:
        """The global `b h q k` of keys [lo, hi) and the block's queries, for cells [batch, group, height, width].
        `still`: all rows look alike, so the first one's coordinates do."""
        torch, g, m, step = self.torch, self.geometry, block.heads, block.step
        b0, h0, q0, k0 = g.origin
        q0, k0 = (x if isinstance(x, int) else _entry(x, m.batch) for x in (q0, k0))
        q = torch.arange(step.start + q0, step.start + q0 + step.height).unsqueeze(1)
        k = torch.arange(lo + k0, hi + k0)
        if block.by_row and not still:
            row = torch.arange(step.count).view(-1, 1, 1, 1)
            q, k = q + row * step.height, k + row * piece.stride
        inner = torch.arange(m.first, m.last).view(1, -1, 1, 1)
        kv = torch.arange(m.kv, m.kv + m.count).view(-1, 1, 1, 1)
        return {**self.env, "b": m.batch + b0, "h": kv * self.group + inner + h0, "q": q, "k": k}

    def buffer(self, name: str, *shape: int, dtype: Any = None) -> Tensor:
        size = math.prod(shape)
        known = getattr(self.buffers, name, None)
        if known is None or known.numel() < size:
            known = self.torch.empty(size, dtype=dtype or self.dtype, device=self.q.device)
            setattr(self.buffers, name, known)
        return known[:size].view(shape)


@memo(group="once")
def _fast_bfloat16() -> bool:
    import torch

    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not in every version
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


@memo(group="programs")
def _program(e: Expr, dtype: Any) -> TileProgram:
    return TileProgram(e, dtype)


@memo(group="programs")
def _score_programs(
    score: Expr, dtype: Any, strips: bool, unit: float
) -> tuple[TileProgram, dict[str, TileProgram], float]:
    """The program of the score mod times the unit, the programs of the parts computed as strips, by name, and the
    factor of the scores that the program takes."""
    linear = _linear(score, unit)
    scaled = _times(score, unit) if linear is None else linear
    shared = _hoisted(scaled) if strips else {}
    programs = {name: TileProgram(e, dtype) for e, name in shared.items()}
    return TileProgram(scaled, dtype, shared), programs, 1.0 if linear is None else unit


def _linear(e: Expr, unit: float) -> Expr | None:
    """The score mod times a unit, of scores times the unit: no tile is multiplied. None where it takes other functions
    of the score than sums and multiples."""
    if "score" not in uses(e):
        return _times(e, unit)
    if e.op in ("add", "sub", "neg"):
        parts = [_linear(a, unit) for a in e.args]
    elif e.op == "mul" and sum("score" in uses(a) for a in e.args) == 1:
        parts = [_linear(a, unit) if "score" in uses(a) else a for a in e.args]
    else:
        return e if e.op == "var" else None
    known = tuple(p for p in parts if p is not None)
    return rebuild(e, known) if len(known) == len(parts) else None


def _times(e: Expr, unit: float) -> Expr:
    """An expression times a unit; a factor that no query and no key changes is multiplied with it."""
    if unit == 1:
        return e
    if e.op == "lit":
        return lit(float(e.name) * unit)
    if e.op == "mul":
        small = next((i for i, a in enumerate(e.args) if not uses(a) & {"q", "k", "score"}), None)
        if small is not None:
            return rebuild(e, tuple(_times(a, unit) if i == small else a for i, a in enumerate(e.args)))
    return binary("mul", e, unit)


def vectors(g: Geometry) -> bool:
    """Whether the sequences of a batch begin at different positions."""
    return not all(isinstance(x, int) for x in g.origin[2:])


def _entry(vector: Any, b: int) -> int:
    # a vector of one entry serves all batch entries
    return int(vector[b] if getattr(vector, "shape", (1,)) != (1,) else vector[0])


def _hoisted(score: Expr) -> dict[Expr, str]:
    """The largest parts that see q and k through their distance alone, with names for the parts."""
    parts: dict[Expr, str] = {}

    def visit(e: Expr) -> None:
        if not e.args or e in parts:
            return
        if distance_only(e) and {"q", "k"} <= uses(e):
            parts[e] = f"~{len(parts)}"
            return
        for a in e.args:
            visit(a)

    visit(score)
    return parts
