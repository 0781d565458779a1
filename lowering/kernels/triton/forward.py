"""Writes the Triton forward kernel of a LoopPlan, and the kernels that combine parts of a row in their order.

One program works on one tile of queries of one head. It walks the records of its row: first the border tiles of
keys, with the mask as a predicate, then the full ones without. Scores are in the units of the softmax, whose base
is 2: what turns them into these is one factor, and with the largest so far subtracted one fused multiply-add.

Keys and values of 8 bits are converted tile by tile. Where they are in pages, a tile within one page has its number as
a scalar; where a tile has several pages each of its keys has one.

Tensor descriptors stand for queries, keys and values where the target asks for them: the copy of a tile is one
instruction, and what lies past the lengths is 0 whatever memory holds there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frisket.dsl.ir import Expr, lookup, make, transform, var
from frisket.dsl.types import INT
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import COLUMN
from frisket.lowering.kernels.language import Text
from frisket.lowering.kernels.text import fields, filled, skeleton
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.kernels.units import machine
from frisket.lowering.plan import LoopPlan

from .rows import RowKernel
from .writer import Dims, KernelTraits, TritonKernel, check_tile, launched, masked, module, padded, parts, wrapped

FORWARD = skeleton(__package__, "forward")
PAGE, TOKEN = var("page"), var("token")  # of a tile's keys: their page, and their places in it, which a kernel knows


@dataclass(frozen=True)
class OptionalArrays:
    """The arrays of a forward kernel that a call may leave out."""

    sinks: bool = False  # read: attention sinks
    row_max: bool = False  # written: the largest score of each row
    lse_residual: bool = False  # written, for a backward: the rounding error of lse

    @property
    def holes(self) -> dict[str, Any]:
        """The holes of a forward's skeleton about them; `rescale` is the factor of the sums."""
        return {**vars(self), "rescale": "rescale" if self.sinks else "1.0"}


NO_ARRAYS = OptionalArrays()


def emit(
    plan: LoopPlan, target: Target, dims: Dims, optional: OptionalArrays = NO_ARRAYS, *, listed: bool = False
) -> str:
    """The text of the forward's module: `emit(plan, target, Dims(128, 128, "bfloat16", group=4))`; the same input gives
    the same text.

    The kernel is `attention_forward`; its parameters say by their names what they hold, and those the plan has no use
    for are absent. With `listed` a table lists the programs, and several share a long row of tiles: `attention_combine`
    combines what they write.
    """
    title = "Attention forward, long rows in parts" if listed else "Attention forward"
    return module(title, plan, dims, kernels(plan, target, dims, optional, listed=listed))


def kernels(
    plan: LoopPlan, target: Target, dims: Dims, optional: OptionalArrays = NO_ARRAYS, *, listed: bool = False
) -> list[TritonKernel]:
    """The forward kernel, and with `listed` the one that combines parts of rows. Of `target` the text depends on the
    order of rows and the precision alone, and where keys are in pages on the number of pages of a tile."""
    traits = KernelTraits(listed=listed, parted=listed)
    first = ForwardKernel(plan, target, dims, optional, traits).kernel()
    return [first, *[combine(plan, dims, optional, listed=True)] * listed]


def describable(plan: LoopPlan, dims: Dims) -> bool:
    """Whether a kernel of `plan` can read its arrays through tensor descriptors: 16-bit numbers, in one part along the
    head dimension, neither in pages nor such that keys which no query sees may hold anything."""
    whole = len(parts(dims.head_dim)) == len(parts(dims.v_dim)) == 1
    return whole and dims.half and not dims.kv_dtype and plan.pages is None and not plan.unwritten


@dataclass(frozen=True)
class HeadPart:
    """A power of two along the head dimension, or along the values' dimension: `mark` ends the names of its tensors,
    `index` names its positions."""

    mark: str
    index: str
    start: int
    width: str
    length: str  # the dimension's, where the part goes past it

    @property
    def positions(self) -> str:
        along = f"tl.arange(0, {self.width})"
        return f"{self.start} + {along}" if self.start else along

    def pad(self, axes: str) -> str:
        return f"{self.index}{axes} < {self.length}" if self.length else ""

    def holes(self, rows: str, axes: str = "[None, :]", other: str = ", other=0.0") -> dict[str, str]:
        """The holes of a part: its names, and the mask of its tile whose `rows` exist."""
        mask = masked(rows, self.pad(axes), other=other)
        return {"mark": self.mark, "d": self.index, "width": self.width, "mask": mask}


def parts_of(dim: int, index: str, constant: str, length: str) -> list[HeadPart]:
    widths = parts(dim)
    if len(widths) == 1:  # no mark: kernels of one part have the plain names
        return [HeadPart("", index, 0, constant, length if widths[0] > dim else "")]
    whole, rest = widths
    return [
        HeadPart("0", f"{index}0", 0, str(whole), ""),
        HeadPart("1", f"{index}1", whole, str(rest), length if whole + rest > dim else ""),
    ]


class ForwardKernel(RowKernel):
    """The parts that the forward kernel and the decode kernel are made of."""

    skeleton, name = FORWARD, "attention_forward"

    def __init__(
        self, plan: LoopPlan, target: Target, dims: Dims, optional: OptionalArrays, traits: KernelTraits
    ) -> None:
        check_tile(target)
        self.plan, self.target, self.optional, self.traits = plan, target, optional, traits
        if target.words:
            self.one_of = "among"
        self.paged = plan.pages is not None
        self.numbered = self.paged and plan.page % target.block_k != 0  # each key of a tile by its own page
        # a tile within one page has one number of it, which is loaded once
        token = "at" if self.numbered else f"(tile * BLOCK_K % {plan.page} + columns)"
        self.placed = {PAGE: Text("page[None, :]" if self.numbered else "page"), TOKEN: Text(f"{token}[None, :]")}
        self.page_of = lookup(plan.pages, (var("b"), var("k") // plan.page), INT) if plan.pages else None
        self.keep_mask = [] if plan.keep_mask is None else [expr.machine(plan.keep_mask)]
        levels = {**traits.levels, PAGE.name: COLUMN, TOKEN.name: COLUMN}
        self.weight = [] if plan.weight is None else [machine(self.rewritten(plan.weight), dims, levels)]
        super().__init__(plan, dims, target, [*self.keep_mask, *self.weight], traits, levels)
        self.head = parts_of(dims.head_dim, "d", "DIM", "HEAD_DIM")
        same = dims.head_dim == dims.v_dim
        # one set of masks and offsets for both
        self.values = self.head if same else parts_of(dims.v_dim, "e", "DIM_V", "V_DIM")
        # TMA reads boxes of an array as it lies: no pages, no conversion
        self.described = target.descriptors and describable(plan, dims)
        self.unwritten = plan.mask is not None and plan.unwritten  # keys in a border tile may be so
        if self.paged:
            self.numbers = (*self.numbers, "pool")

    def rewritten(self, e: Expr) -> Expr:
        """A score mod or weight whose scales are found by the page and the places in it that the tile has."""
        return super().rewritten(e if self.page_of is None else transform(e, self._in_page))

    def _in_page(self, e: Expr) -> Expr:
        if e.op != "lookup" or self.page_of not in e.args:
            return e
        known = {self.page_of: PAGE, var("k") % self.plan.page: TOKEN}
        return make("lookup", tuple(known.get(x, x) for x in e.args), e.name, e.type)

    def _leaf(self, node: Expr, args: list[Text]) -> Text | None:
        return self.placed.get(node) or super()._leaf(node, args)

    def step(self, index: Text, size: str, stride: str) -> str:
        """A step of an address: a page is in the pool, and a place in its page, which has as many scales as keys."""
        return f"{index.text} * {stride}" if self._known(index) else super().step(index, size, stride)

    def clamped(self, index: Text, size: str) -> str:
        return index.text if self._known(index) else super().clamped(index, size)

    def _known(self, index: Text) -> bool:
        return any(index is x for x in self.placed.values())

    @property
    def cast(self) -> str:
        """The conversion of keys of 8 bits for a product. GPUs convert float8 to float16, and from there to float32 by
        an addition; a conversion to bfloat16 has a quarter of the rate of other instructions."""
        wide = self.dims.fp8 and self.dims.dtype == "bfloat16"
        return ".to(tl.float32)" * wide + ".to(Q.dtype.element_ty)" * bool(self.dims.kv_dtype)

    def kernel(self) -> TritonKernel:
        return launched(self.name, self.filled(self.skeleton), self.grid_of("q tiles", "heads"), self.target)

    def holes(self) -> dict[str, Any]:
        # a descriptor carries the range of the head dimension
        axes = [self.values] if self.described or self.values is self.head else [self.head, self.values]
        pages = self.arguments[str(self.plan.pages)] if self.paged else None
        return {
            **super().holes(),
            "axes": [f"{', '.join(p.index for p in a)} = {', '.join(p.positions for p in a)}" for a in axes],
            **self.optional.holes,
            **fields(self, "paged numbered described unwritten within cast"),
            "guard": self.plan.guard, "pages": pages and pages.name, "pages_size": pages and pages.sizes[1],
            "pages_step": pages and pages.strides[0], "pages_stride": pages and pages.strides[1],
            "page_size": self.plan.page, "key": "at" if self.numbered else "tile * BLOCK_K",
            "first_key": self._first("k", "[None, :]"), "first_value": self._first("v", "[:, None]"),
            "head": [p.holes("present[:, None]") for p in self.head],
            "values": [p.holes("present[:, None]", other="") for p in self.values],
            "rows_of_q": self.coordinate("q", "start + rows") if "q" in self.used else [],
            **self.closed_form(), "hoisted": self.before_tiles(), "weighed": bool(self.weight),
            "scaled": self.value(self.weight[0]) if self.weight else "",
            "tiles": self.tiles(),
            "whole": f"(total * {self.survival})" if self.survival else "total",
            "survived": f" * (1.0 / {self.survival})" if self.survival else "",
            "v_dim": self.v,
        }  # fmt: skip

    @property
    def within(self) -> str:
        """The condition that keys of a tile exist: with one subtraction a tile, not an addition a key, where registers
        are left for it. A tile of 128 x 128 at head size 128 would spill 16 bytes with Triton 3.9."""
        few = self.traits.bounded and self.target.block_k <= 64
        return "columns < kv_len - tile * BLOCK_K" if few else "tile * BLOCK_K + columns < kv_len"

    def _first(self, step: str, axes: str) -> str:
        """The offset of a tile's first key, or of each key where keys are `numbered`."""
        if not self.paged:
            return f"at * stride_{step}s"
        # the batch axis of a pool is that of pages
        offset = f"page * stride_{step}b + at * stride_{step}s"
        return f"({offset}){axes}" if self.numbered else offset

    def tile(self, inside: str) -> dict[str, Any]:
        written = set(self.hoisted)
        roots = self.positions if inside else [*self.score, *self.keep_mask, *self.weight]  # full tiles ask no mask
        row, column = (f"{inside}[None, :]", f"{self._seen}[:, None]") if inside else ("", "")
        first, last, scale = self.head[0], self.head[-1], self.units()["scale"]
        keep_mask, weight = (next(iter(roots), None) for roots in (self.keep_mask, self.weight))
        return {
            "head": [
                {**p.holes(row, "[:, None]"), "sum": ", score" * (p is not first), "scale": scale * (p is last)}
                for p in self.head
            ],
            "values": [p.holes(column) for p in self.values],
            "column": self.along_tile("k", "tile * BLOCK_K + columns", roots, written),
            "visible": self.visible(written) if inside else [],
            "score_mod": self.score_mod("score", written, inside and "visible"),
            "dropout": self.quoted(self.plan.keep_mask, keep_mask, "p = tl.where({}, p, 0.0)", written),
            "weight": self.quoted(self.plan.weight, weight, "", written),
        }

    @property
    def _seen(self) -> str:
        """The condition that keys of a border tile have values to read."""
        return "seen" if self.unwritten else "inside"

    @property
    def survival(self) -> str:
        """The divisor of a weight that survived dropout."""
        rate = self.plan.rate
        return "" if rate is None else f"(1.0 - {self.arguments[rate].name})"


COMBINE, SUMS = skeleton(__package__, "combine"), skeleton(__package__, "sums")


def combine(
    plan: LoopPlan, dims: Dims, optional: OptionalArrays, *, balanced: bool = False, listed: bool = False
) -> TritonKernel:
    """The kernel that combines the parts of each row, or of those rows that a table lists. Of the plan it reads
    `guard`: whether a row may be empty."""
    e, dim, length = ("d", "DIM", "HEAD_DIM") if dims.v_dim == dims.head_dim else ("e", "DIM_V", "V_DIM")
    ragged = padded(dims.v_dim) != dims.v_dim  # without a mask loads are wider
    text = filled(
        COMBINE, wrapped, d=e, dim=dim, v_dim=length,
        load=masked("part[:, None] < splits", f"{e}[None, :] < {length}" if ragged else ""),
        store=masked(f"{e} < {length}" if ragged else "", other=""), guard=plan.guard, balanced=balanced, listed=listed,
        of_place="place", length="q_len", part_at="first_at" if balanced or listed else "row_at", **optional.holes,
    )  # fmt: skip
    rows = "queries of rows in parts" if listed else "q_len"
    return TritonKernel("attention_combine", text, f"attention_combine: grid ({rows}, heads, batch).")


@dataclass(frozen=True)
class PartSums:
    """The sums of a part of a row of a backward kernel, which stand beside one another in float32: `arrays` are
    (gradient, its sum, "d" or "e"), `totals` (buffer, its sum), of which each of `heads` heads has one."""

    dims: Dims
    arrays: Sequence[tuple[str, str, str]]
    totals: Sequence[tuple[str, str]]
    heads: int = 1

    def _width(self, d: str) -> int:
        return self.dims.head_dim if d == "d" else self.dims.v_dim

    @property
    def offsets(self) -> list[int]:
        """The place of each among the numbers of a query or key."""
        widths = [*(self._width(d) for *_, d in self.arrays), *[self.heads] * len(self.totals)]
        return [sum(widths[:i]) for i in range(len(widths) + 1)]

    @property
    def numbers(self) -> int:
        """Numbers of a query or key."""
        return self.offsets[-1]

    def stores(self, masks: dict[str, str]) -> list[str]:
        """The lines that store the sums of arrays at `part_at`."""
        return [
            f"tl.store(Acc + part_at[:, None] * {self.numbers} + {_behind(offset, d)}, {total}{masks[d]})"
            for offset, (_, total, d) in zip(self.offsets, self.arrays)
        ]

    def stores_of_totals(self) -> list[str]:
        """The lines that store the totals of a head there."""
        head = " + head - kv_head * GROUP" if self.heads > 1 else ""
        return [
            f"tl.store(Acc + part_at * {self.numbers} + {offset}{head}, {total}, mask=present)"
            for offset, (_, total) in zip(self.offsets[len(self.arrays) :], self.totals)
        ]

    def kernel(self, name: str, length: str, buffers: Sequence[str]) -> TritonKernel:
        """The kernel that adds the parts of rows up; `buffers` are the parameters of totals."""
        # a key head sums over its query heads, and a total has one entry for each of them
        several = self.heads > 1
        offsets = [f" + {n}" if n else "" for n in self.offsets]
        text = filled(
            SUMS,
            wrapped,
            name=name,
            numbers=self.numbers,
            length=length,
            results=", ".join(n for n, *_ in self.arrays),
            buffers=list(buffers),
            of_place="place * GROUP" if several else "place",
            several=several,
            arrays=[self._array(*x) for x in zip(offsets, self.arrays)],
            totals=[
                {"offset": offset + " + i" * several, "buffer": buffer}
                for offset, (buffer, _) in zip(offsets[len(self.arrays) :], self.totals)
            ],
        )
        return TritonKernel(name, text, f"{name}: grid (rows of tiles in parts, heads, batch).")

    def _array(self, offset: str, array: tuple[str, str, str]) -> dict[str, Any]:
        result, _, d = array
        width = self._width(d)
        ragged = padded(width) != width
        return {
            "result": result,
            "d": d,
            "dim": padded(width),
            "width": width,
            "offset": offset,
            "scaled": result != "DV",
            "load": masked("part[:, None] < splits", f"{d}[None, :] < {width}" * ragged),
            "store": masked(f"{d} < {width}" * ragged, other=""),
        }


def _behind(offset: int, d: str) -> str:
    return f"({offset} + {d}[None, :])" if offset else f"{d}[None, :]"
