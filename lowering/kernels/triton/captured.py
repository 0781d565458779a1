"""Writes the Triton kernels of captured gradients that no row or column of tiles can sum, by `lowering.derive`.

`attention_diagonal`: a table read by distance. A program owns tiles along a diagonal, adds them up, and sums the
diagonals of what it has then. `attention_plane`: a table in which every query and key has a place of its own. A program
owns a tile of it, and sums over the batches and heads that share it. Neither adds to what another program adds to:
results repeat bit for bit. `attention_scatter`: any other table, with atomics; in fixed point, for which
`attention_total` finds the unit, results repeat too (`lowering/aten/sums.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from frisket.dsl.ir import uses
from frisket.grammar.memo import memo
from frisket.lowering.derive import Gradient, alone, backward_of
from frisket.lowering.kernels.expr import COLUMN, POSITION, ROW, SCALAR
from frisket.lowering.plan import LoopPlan, Target

from .dscores import Tiles
from .writer import Dims, Kernel, module

TITLE = "Gradients of captured tensors"
NAMES = ("attention_diagonal", "attention_plane", "attention_total", "attention_scatter")


@memo(group="programs")
def square(target: Target) -> Target:
    """The tiles of these kernels, where `target` is that of the whole backward: about as much as a tile of dq, 64 x 64
    at most, which 8 warps carry without a spill up to heads of 128."""
    own = target.dq or target
    side = min(64, 1 << ((own.block_q * own.block_k).bit_length() - 1) // 2)
    return replace(own, block_q=side, block_k=side, num_warps=8, num_stages=1, dq=None, dkv=None)


def diagonal(plan: LoopPlan, target: Target, dims: Dims, gradients: Sequence[Gradient]) -> str:
    """The module of `attention_diagonal`, for gradients by distance; those of one weight are one sum."""
    return module(TITLE, plan, dims, [_Diagonal(plan, target, dims, gradients).kernel()])


def plane(plan: LoopPlan, target: Target, dims: Dims, gradient: Gradient, shared: str) -> str:
    """The module of `attention_plane`. `shared` are those of "b" and "h" on which the place in the table does not
    depend."""
    return module(TITLE, plan, dims, [_Plane(plan, target, dims, gradient, shared).kernel()])


def scatter(plan: LoopPlan, target: Target, dims: Dims, gradient: Gradient, *, fixed: bool) -> str:
    """The module of `attention_scatter`, in fixed point with `attention_total` or in float32 without."""
    made = [_Total(plan, target, dims, gradient), _Scatter(plan, target, dims, gradient, fixed=fixed)]
    return module(TITLE, plan, dims, [k.kernel() for k in (made if fixed else made[1:])])


def kernels(plan: LoopPlan, target: Target, dims: Dims, wanted: Collection[str]) -> list[Kernel]:
    """The kernels for the tables in `wanted`, to read: as if no index were clamped, and of tables that take kernels of
    one name those of the first. Executors print a module for each table read by position."""
    gradients = [g for g in backward_of(plan).gradients if g.source in wanted]
    by_distance = [g for g in gradients if g.over == "diagonal"]
    found: list[Tiles] = [_Diagonal(plan, target, dims, by_distance)] if by_distance else []
    for g in gradients:
        if g.over != "scatter":
            continue
        apart, moving = {alone(e) for e in g.index}, frozenset[str]().union(*map(uses, g.index))
        if {"q", "k"} <= apart and not moving & {"b", "h"} - apart:
            found.append(_Plane(plan, target, dims, g, "".join(n for n in "bh" if n not in moving)))
        else:
            found += [_Total(plan, target, dims, g), _Scatter(plan, target, dims, g, fixed=True)]
    first: dict[str, Tiles] = {}
    for made in found:
        first.setdefault(made.name, made)
    return [made.kernel() for made in first.values()]


class _Diagonal(Tiles):
    name = "attention_diagonal"
    numbers = (*Tiles.numbers, "share")

    def __init__(self, plan: LoopPlan, target: Target, dims: Dims, gradients: Sequence[Gradient]) -> None:
        super().__init__(plan, target, dims, gradients)
        self.totals = [self.names.numbered("sum") for _ in self.factors_of]

    def results(self) -> list[str]:
        what = " and ".join(dict.fromkeys(self.read(g) for g in self.gradients))
        return [
            "Sums,  # float32 [batch, heads, weights, parts, 2, block diagonals, BLOCK_K]: gradients of",
            f"# {what}, by distance",
        ]

    def grid(self) -> str:
        return "(block diagonals * parts, heads, batch)"

    def body(self) -> None:
        line = self.page.line
        line("head, batch = tl.program_id(1), tl.program_id(2)")
        self.place()
        self.axes()
        self.page.comment("Tiles on one block diagonal: row - tile is shift. A part is `share` rows of tiles.")
        line(
            "diagonals = tl.cdiv(q_len, BLOCK_Q) + tl.cdiv(kv_len, BLOCK_K) - 1",
            "part, diagonal = tl.program_id(0) // diagonals, tl.program_id(0) % diagonals",
            "shift = diagonal + 1 - tl.cdiv(kv_len, BLOCK_K)",
            "begin = tl.maximum(part * share, shift)",
            "end = tl.minimum((part + 1) * share, tl.cdiv(q_len, BLOCK_Q))",
            "end = tl.minimum(end, shift + tl.cdiv(kv_len, BLOCK_K))",
        )
        self.head()
        self.page.blank()
        self.scalars()
        self.factors()
        self.lines(self.tile_roots, SCALAR, self.hoisted)
        for total in self.totals:
            line(f"{total} = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)")
        self.page.blank()
        with self.page.block("for row in range(begin, end):"):
            line("tile = row - shift", "start = row * BLOCK_Q")
            if self.plan.mask is None:
                self.one_tile()
            else:
                with self.page.block(f"if {self.seen()}:"):
                    self.one_tile()
        self._store()

    def one_tile(self) -> None:
        line = self.page.line
        self.queries()
        self.keys()
        used = frozenset[str]().union(*map(uses, self.tile_roots))
        for name, local in (("q", "start + rows"), ("k", "tile * BLOCK_K + columns")):
            if name in used:
                self.coordinate(name, local)
        written = set(self.hoisted)
        for level in (ROW, COLUMN):
            self.lines(self.tile_roots, level, written)
        self.cotangent(written)
        for total, weight in zip(self.totals, self.factors_of, strict=True):
            line(f"{total} += {self.share(weight, written)}")

    def _store(self) -> None:
        line = self.page.line
        self.page.blank()
        self.page.comment(
            "Row i turned by i places: column c has what is c below the main diagonal, in rows from c on, and what is\n"
            "BLOCK_K - c above it."
        )
        line(
            "turned = (rows[:, None] - columns[None, :]) & (BLOCK_K - 1)",
            "ahead = rows[:, None] >= columns[None, :]",
            "parts = tl.num_programs(0) // diagonals",
        )
        for i, total in enumerate(self.totals):
            at = "place" if len(self.totals) == 1 else f"(place * {len(self.totals)} + {i})"
            line(
                f"moved = tl.gather({total}, turned, 1)",
                f"to = (tl.cast({at}, tl.int64) * parts + part) * 2 * diagonals + diagonal",
                "to = Sums + to * BLOCK_K + columns",
                "tl.store(to, tl.sum(tl.where(ahead, moved, 0.0), 0))",
                "tl.store(to + diagonals * BLOCK_K, tl.sum(tl.where(ahead, 0.0, moved), 0))",
            )


class _Placed(Tiles):
    """Kernels of one gradient that know where in the table its shares go."""

    def __init__(self, plan: LoopPlan, target: Target, dims: Dims, gradient: Gradient) -> None:
        super().__init__(plan, target, dims, [gradient], gradient.index)
        self.table = self.arguments[gradient.source]

    def into(self, written: set[str], load_mask: str = "") -> None:
        """`to`, the entry of every position."""
        self.lines(self.index_of, POSITION, written, load_mask)
        entries = [f"clamp({self.value(e)}, {n})" for e, n in zip(self.index_of, self.table.sizes, strict=True)]
        self.page.line(f"to = tl.cast({entries[0]}, tl.int64)")
        for entry, size in zip(entries[1:], self.table.sizes[1:], strict=True):
            self.page.line(f"to = to * {size} + {entry}")


class _Plane(_Placed):
    name = "attention_plane"

    def __init__(self, plan: LoopPlan, target: Target, dims: Dims, gradient: Gradient, shared: str) -> None:
        super().__init__(plan, target, dims, gradient)
        self.shared = shared
        if "b" in shared:
            self.numbers = (*self.numbers, "batches")

    def results(self) -> list[str]:
        return [f"Into,  # float32, contiguous: the gradient of {self.read(self.gradients[0])}"]

    def grid(self) -> str:
        own = ["1" if "h" in self.shared else "heads", "1" if "b" in self.shared else "batch"]
        return f"(q tiles * k tiles, {', '.join(own)})"

    def body(self) -> None:
        line, of = self.page.line, {"h": ("head", 1, "heads"), "b": ("batch", 2, "batches")}
        for n, (name, axis, _) in of.items():
            if n not in self.shared:
                line(f"{name} = tl.program_id({axis})")
        line(
            "row, tile = tl.program_id(0) // tl.cdiv(kv_len, BLOCK_K), tl.program_id(0) % tl.cdiv(kv_len, BLOCK_K)",
            "start = row * BLOCK_Q",
        )
        self.axes()
        self.convert([] if "b" in self.shared else self.parameters.origins(), self.parameters.sizes())
        self.factors()
        for n, (name, *_) in of.items():
            if n not in self.shared and n in self.used:
                line(f"{n} = {self.widened(f'{n}_origin + {name}')}")
        for name, local in (("q", "start + rows"), ("k", "tile * BLOCK_K + columns")):
            self.coordinate(name, local)
        for level in (SCALAR, ROW, COLUMN):
            self.lines(self.index_of, level, self.hoisted)
        self.into(self.hoisted)
        line("total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)")
        self.page.blank()
        loops = [f"for {name} in range({count}):" for n, (name, _, count) in reversed(of.items()) if n in self.shared]
        self._within(loops)
        line(
            "present = start + rows < q_len",
            "inside = tile * BLOCK_K + columns < kv_len",
            "tl.store(Into + to, total, mask=present[:, None] & inside[None, :])",
        )

    def _within(self, loops: list[str]) -> None:
        if loops:
            with self.page.block(loops[0]):
                self._within(loops[1:])
            return
        self.place()
        for n, name in (("b", "batch"), ("h", "head")):
            if n in self.shared and n in self.used:
                self.page.line(f"{n} = {self.widened(f'{n}_origin + {name}')}")
        if self.plan.mask is None:
            self.one_tile()
        else:
            with self.page.block(f"if {self.seen()}:"):
                self.one_tile()

    def one_tile(self) -> None:
        self.head()
        self.queries()
        self.keys()
        written = set(self.hoisted)
        for level in (SCALAR, ROW, COLUMN):
            self.lines(self.tile_roots, level, written)
        self.cotangent(written)
        self.page.line(f"total += {self.share(self.factors_of[0], written)}")


class _Walk(_Placed):
    """Kernels whose program owns a tile of queries and walks the tiles of keys it sees."""

    def grid(self) -> str:
        return "(q tiles, heads, batch)"

    def body(self) -> None:
        line = self.page.line
        self.own_row()
        line("start = row * BLOCK_Q")
        self.axes()
        self.head()
        self.page.blank()
        self.scalars()
        self.factors()
        self.queries()
        if "q" in self.used:
            self.coordinate("q", "start + rows")
        if self.bounds:
            self.closed_form()
            self.page.blank()
        roots = [*self.tile_roots, *self.index_of]
        for level in (SCALAR, ROW):
            self.lines(roots, level, self.hoisted)
        self.before()
        with self.records(), self.page.block("for tile in range(lo, hi):"):
            self.keys()
            written = set(self.hoisted)
            if "k" in self.used:
                self.coordinate("k", "tile * BLOCK_K + columns")
            self.lines(roots, COLUMN, written)
            self.cotangent(written)
            share = self.share(self.factors_of[0], written)
            if share != "dm":
                line(f"share = {share}")
                share = "share"
            self.each(share, written)
        self.after()

    def before(self) -> None:
        """Lines before the loop."""

    def each(self, share: str, written: set[str]) -> None:
        """What becomes of the tile's share."""
        raise NotImplementedError

    def after(self) -> None:
        """Lines behind the loop."""


class _Total(_Walk):
    name = "attention_total"

    def results(self) -> list[str]:
        return ["Total,  # float32 [batch, heads, q tiles]: the sum of the magnitudes of all that is added"]

    def before(self) -> None:
        self.page.line("total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)")

    def each(self, share: str, written: set[str]) -> None:
        self.page.line(f"total += tl.abs({share})")

    def after(self) -> None:
        self.page.line("tl.store(Total + place * tl.num_programs(0) + row, tl.sum(total))")


class _Scatter(_Walk):
    name = "attention_scatter"

    def __init__(self, plan: LoopPlan, target: Target, dims: Dims, gradient: Gradient, *, fixed: bool) -> None:
        super().__init__(plan, target, dims, gradient)
        self.fixed = fixed

    def results(self) -> list[str]:
        what = f"contiguous: the gradient of {self.read(self.gradients[0])}"
        if not self.fixed:
            return [f"Into,  # float32, {what}"]
        return [f"Counted,  # int64, {what}, in units", "PerUnit,  # float32: how many units make 1, a power of two"]

    def before(self) -> None:
        if self.fixed:
            self.page.line("per = tl.load(PerUnit)")

    def each(self, share: str, written: set[str]) -> None:
        line = self.page.line
        self.into(written, "visible")
        if self.fixed:
            self.page.comment("Integers have one sum in any order.")
            line(f"counted = tl.floor({share} * per + 0.5).to(tl.int64)")
            line(f'tl.atomic_add(Counted + to, counted, mask={share} != 0.0, sem="relaxed")')
        else:
            line(f'tl.atomic_add(Into + to, {share}, mask={share} != 0.0, sem="relaxed")')
