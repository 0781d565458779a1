"""Writes the Triton forward kernel of a LoopPlan.

One program works on one tile of queries of one head. It walks the records of its row: first the border tiles of
keys, with the mask as a predicate, then the full ones without. Scores are in the units of the softmax, whose base
is 2: what turns them into these is one factor, and with the largest so far subtracted one fused multiply-add.

Keys and values of 8 bits are converted tile by tile. Where they are in pages, a tile within one page has its number as
a scalar; where a tile has several pages each of its keys has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from frisket.dsl.ir import Expr, uses
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import COLUMN, LEVELS, POSITION, ROW, SCALAR
from frisket.lowering.kernels.text import Page
from frisket.lowering.plan import LoopPlan, Target

from .parameters import Argument, parts
from .rows import Rows
from .writer import Dims, Kernel, check_tile, launched, masked, module, wrapped

ALONG = "[batch, heads, length, dim], any strides"
POOL = "[pages, heads, tokens of a page, dim], any strides"


def emit(
    plan: LoopPlan, target: Target, dims: Dims, *, sinks: bool = False, top: bool = False, low: bool = False
) -> str:
    """`emit(plan, target, Dims(128, 128, "bfloat16", group=4))`: the module's text; the same input gives the same text.

    The kernel is `attention_forward`; its parameters say by their names what they hold, and those the plan has no use
    for are absent. `sinks`, `top` and `low` ask for attention sinks, for the largest score of every row and for what
    rounding takes from its lse, which a backward wants.
    """
    return module("Attention forward", plan, dims, [kernel(plan, target, dims, sinks=sinks, top=top, low=low)])


def kernel(
    plan: LoopPlan, target: Target, dims: Dims, *, sinks: bool = False, top: bool = False, low: bool = False
) -> Kernel:
    """The forward kernel. Of `target` the text depends on the order of rows and the precision alone, and where keys are
    in pages on how many a tile has."""
    check_tile(target)
    return Forward(plan, target, dims, sinks, top, low).kernel()


@dataclass(frozen=True)
class Part:
    """A power of two along the head dimension, or along that of the values: `mark` ends the names of its tensors,
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


def parts_of(dim: int, index: str, constant: str, length: str) -> list[Part]:
    widths = parts(dim)
    if len(widths) == 1:
        return [Part("", index, 0, constant, length if widths[0] > dim else "")]
    whole, rest = widths
    return [
        Part("0", f"{index}0", 0, str(whole), ""),
        Part("1", f"{index}1", whole, str(rest), length if whole + rest > dim else ""),
    ]


class Forward(Rows):
    """What the forward kernel and that of short queries are made of."""

    name = "attention_forward"
    queries = "BLOCK_Q"  # of a tile

    def __init__(
        self, plan: LoopPlan, target: Target, dims: Dims, sinks: bool, top: bool, low: bool,
        levels: Mapping[str, int] = LEVELS,
    ) -> None:  # fmt: skip
        self.target, self.sinks, self.top, self.low = target, sinks, top, low
        self.kept = [] if plan.kept is None else [expr.machine(plan.kept)]
        self.weight = [] if plan.weight is None else [self.machine(plan.weight)]
        super().__init__(plan, dims, target, [*self.kept, *self.weight], when=levels)
        self.unit = "LOG2E" if self.score else "unit"
        self.head = parts_of(dims.head_dim, "d", "DIM", "HEAD_DIM")
        same = dims.head_dim == dims.v_dim
        self.values = self.head if same else parts_of(dims.v_dim, "e", "DIM_V", "V_DIM")
        self.cast = ".to(Q.dtype.element_ty)" if dims.kv_dtype else ""
        self.paged, self.page_size = plan.pages is not None, plan.page
        self.numbered = self.paged and plan.page % target.block_k != 0  # each key of a tile by its own page
        self.unwritten = plan.mask is not None and plan.unwritten  # keys in a border tile may be so

    def kernel(self) -> Kernel:
        with self.page.block(self._signature()):
            self._place()
            self._prologue()
            with self.records():
                self._border_tiles()
                self._full_tiles("full_lo, full_hi")
            self._epilogue()
        return launched(self.name, self.page, "(q tiles, heads, batch)", self.target)

    def _signature(self) -> str:
        tensors = [f"Q, K, V, Out,  # {ALONG}", "Lse,  # float32 [batch, heads, q_len], contiguous"]
        if self.paged:
            tensors[:1] = [f"Q, Out,  # {ALONG}", f"K, V,  # {POOL}"]
        if self.top:
            tensors.append("Top,  # the largest scores, as Lse")
        if self.low:
            tensors.append("Low,  # what rounding took from Lse")
        if self.sinks:
            tensors.append("Sinks,  # float32 [heads]: one more logit in the denominator")
        return self.parameters.signature(self.name, tensors, "qkvo", ["heads", "q_len", "kv_len", *self.pool])

    # -- before the loops ---------------------------------------------------------------------------

    def _place(self) -> None:
        line = self.page.line
        self.own_row()
        line("start = row * BLOCK_Q", "rows = tl.arange(0, BLOCK_Q)")
        if self.dims.group > 1:
            line("kv_head = head // GROUP")
        self._axes()
        line("Q += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + start.to(tl.int64) * stride_qs")
        self._pointers("kv_head" if self.dims.group > 1 else "head")
        self._queries("start + rows < q_len", "rows[:, None] * stride_qs")

    def _axes(self) -> None:
        line = self.page.line
        line("columns = tl.arange(0, BLOCK_K)")
        for axis in [self.head] if self.values is self.head else [self.head, self.values]:
            line(f"{', '.join(p.index for p in axis)} = {', '.join(p.positions for p in axis)}")
        self.page.blank()
        self.page.comment("Offsets are 64 bits where they are scalars, 32 within a tile.")

    def _pointers(self, head: str) -> None:
        line = self.page.line
        if self.paged:
            pages = self.pages
            line(f"paged = {pages.name} + batch.to(tl.int64) * {pages.strides[0]}")
        for array, step in (("K", "k"), ("V", "v")):
            batch = "" if self.paged else f"batch.to(tl.int64) * stride_{step}b + "
            line(f"{array} += {batch}{head}.to(tl.int64) * stride_{step}h")
        for p in self.head:
            key = "" if self.numbered else "columns[None, :] * stride_ks + "
            line(f"key_at{p.mark} = {key}{p.index}[:, None] * stride_kd")
        for p in self.values:
            key = "" if self.numbered else "columns[:, None] * stride_vs + "
            line(f"value_at{p.mark} = {key}{p.index}[None, :] * stride_vd")

    @property
    def pool(self) -> list[str]:
        """How many pages there are, where keys are in pages: a number of the kernel's."""
        return ["pool"] if self.paged else []

    @property
    def pages(self) -> Argument:
        """The table that says where they are."""
        return self.arguments[str(self.plan.pages)]

    def _queries(self, present: str, at: str) -> None:
        self.page.line(f"present = {present}")
        for p in self.head:
            mask = masked("present[:, None]", p.pad("[None, :]"))
            self.page.line(wrapped(f"query{p.mark} = tl.load(Q + {at} + {p.index}[None, :] * stride_qd{mask})"))

    def _prologue(self) -> None:
        line = self.page.line
        self.page.blank()
        self.scalars()
        if "q" in self.used:
            self.coordinate("q", "start + rows")
        positions = [*self.mask, *self.score, *self.kept, *self.weight]
        if self.bounds:
            self.closed_form(self.queries)
            self.page.blank()
        for level in (SCALAR, ROW):
            self.lines(positions, level, self.hoisted)
        if not self.score:
            line("unit = scale * LOG2E")
        line("top = tl.full([BLOCK_Q], LOWEST, tl.float32)", "total = tl.zeros([BLOCK_Q], tl.float32)")
        for p in self.values:
            line(f"acc{p.mark} = tl.zeros([BLOCK_Q, {p.width}], tl.float32)")

    # -- the loops ----------------------------------------------------------------------------------

    def _border_tiles(self, shared: bool = False) -> None:
        line = self.page.line
        with self.border_tiles(shared):
            line("inside = tile * BLOCK_K + columns < kv_len")
            self._scores("inside")
            written = set(self.hoisted)
            self._column(written, [*self.mask, *self.score, *self.kept, *self.weight])
            self.visible(written)
            self._modify(written, "visible")
            line("score = tl.where(visible, score, -INFINITY)")
            if self.unwritten:
                self.page.comment("What no query sees may never have been written: a NaN there is not to spread.")
                line("seen = tl.max((visible & present[:, None]).to(tl.int32), 0) > 0")
            self._accumulate(written, "seen" if self.unwritten else "inside", "visible")

    def _full_tiles(self, tiles: str) -> None:
        self.page.comment("Full tiles: every position is visible.")
        with self.page.block(f"for tile in range({tiles}):"):
            self._scores()
            written = set(self.hoisted)
            self._column(written, [*self.score, *self.kept, *self.weight])
            self._modify(written)
            self._accumulate(written)

    def _scores(self, inside: str = "") -> None:
        line = self.page.line
        self._tile()
        for p in self.head:
            mask = masked(inside and f"{inside}[None, :]", p.pad("[:, None]"))
            load = f"tl.load(K + {self._first('k', '[None, :]')} + key_at{p.mark}{mask})"
            line(wrapped(f"keys{p.mark} = {load}{self.cast}"))
        sum_so_far = ""
        for p in self.head:
            scale = " * scale" if self.score and p is self.head[-1] else ""
            line(f"score = tl.dot(query{p.mark}, keys{p.mark}{sum_so_far}{self.precision}){scale}")
            sum_so_far = ", score"

    def _tile(self) -> None:
        """Where the keys of a tile are."""
        line, size = self.page.line, self.page_size
        if not self.paged:
            line("at = tl.cast(tile * BLOCK_K, tl.int64)")
            return
        key = "tile * BLOCK_K"
        if self.numbered:
            line("at = tile * BLOCK_K + columns")
            key = "at"
        line(
            f"page = tl.load(paged + clamp({key} // {size}, {self.pages.sizes[1]}) * {self.pages.strides[1]})",
            "page = clamp(page, pool).to(tl.int64)",
            f"at = {key} % {size}" if self.numbered else f"at = tl.cast({key} % {size}, tl.int64)",
        )

    def _first(self, step: str, axes: str) -> str:
        """The offset of a tile's first key, or of each where they are `numbered`."""
        if not self.paged:
            return f"at * stride_{step}s"
        offset = f"page * stride_{step}b + at * stride_{step}s"
        return f"({offset}){axes}" if self.numbered else offset

    def _column(self, written: set[str], roots: list[Expr]) -> None:
        if any("k" in uses(r) for r in roots):
            self.coordinate("k", "tile * BLOCK_K + columns")
        self.lines(roots, COLUMN, written)

    def _modify(self, written: set[str], load_mask: str = "") -> None:
        if self.plan.score is None:
            return
        self.quote(self.plan.score)
        self.lines(self.score, POSITION, written, load_mask)
        self.page.line(f"score = {self.value(self.score[0])}")

    def _accumulate(self, written: set[str], inside: str = "", visible: str = "") -> None:
        line = self.page.line
        line(f"peak = tl.maximum(top, tl.max(score, 1) * {self.unit})")
        line(f"p = tl.exp2(score * {self.unit} - peak[:, None])")
        line("rescale = tl.exp2(top - peak)")
        line("total = total * rescale + tl.sum(p, 1)")
        if self.plan.kept is not None:
            self.quote(self.plan.kept)
            self.lines(self.kept, POSITION, written)
            line(f"p = tl.where({self.value(self.kept[0])}, p, 0.0)")
        if self.plan.weight is not None:
            self.quote(self.plan.weight)
            self.lines(self.weight, POSITION, written)
            line(wrapped(f"scaled = {self.value(self.weight[0])}"))
            line(f"p = tl.where({visible}, p * scaled, 0.0)" if visible else "p *= scaled")
        for p in self.values:
            mask = masked(inside and f"{inside}[:, None]", p.pad("[None, :]"))
            load = f"tl.load(V + {self._first('v', '[:, None]')} + value_at{p.mark}{mask})"
            line(wrapped(f"values{p.mark} = {load}{self.cast}"))
        for p in self.values:
            acc, values = f"acc{p.mark}", f"values{p.mark}"
            line(f"{acc} = tl.dot(p.to({values}.dtype), {values}, {acc} * rescale[:, None]{self.precision})")
        line("top = peak")

    # -- after them ---------------------------------------------------------------------------------

    def survival(self) -> str:
        """What a weight that survived dropout is divided by."""
        rate = self.plan.rate
        return "" if rate is None else f"(1.0 - {self.arguments[rate].name})"

    def _epilogue(self) -> None:
        line = self.page.line
        self.page.blank()
        rescale = finish(
            self.page, sinks="tl.load(Sinks + head)" if self.sinks else "", top=self.top, low=self.low,
            guard=self.plan.guard,
        )  # fmt: skip
        whole = f"(total * {self.survival()})" if self.survival() else "total"
        line(f"weight = {rescale} / {whole}")
        line("Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + start.to(tl.int64) * stride_os")
        for p in self.values:
            mask = masked("present[:, None]", p.pad("[None, :]"), other="")
            line(f"out_at = rows[:, None] * stride_os + {p.index}[None, :] * stride_od")
            line(f"tl.store(Out + out_at, (acc{p.mark} * weight[:, None]).to(Out.dtype.element_ty){mask})")
        line("row_at = place.to(tl.int64) * q_len + start + rows", "tl.store(Lse + row_at, lse, mask=present)")
        if self.top:
            line("tl.store(Top + row_at, largest, mask=present)")
        if self.low:
            line("tl.store(Low + row_at, low, mask=present)")


def finish(page: Page, *, sinks: str, top: bool, low: bool, guard: bool) -> str:
    """Write `lse` of a row from its largest score and sum of weights; return the accumulator's weight before division.

    With `top`, `largest` is written, with `low` what rounding took from lse. `sinks` loads the row's sink."""
    line = page.line
    if top:
        line(f"largest = {'tl.where(total == 0.0, -INFINITY, top * LN2)' if guard else 'top * LN2'}")
    if sinks:
        page.comment("The sink is one more logit, without a value.")
        line(
            f"sink = {sinks} * LOG2E",
            "peak = tl.maximum(top, sink)",
            "rescale = tl.exp2(top - peak)",
            "total = total * rescale + tl.exp2(sink - peak)",
            "top = peak",
        )
    if guard:
        page.comment("A row without a visible key gives 0, and lse -inf.")
        line(
            "empty = total == 0.0",
            "total = tl.where(empty, 1.0, total)",
            "lse = tl.where(empty, -INFINITY, (top + tl.log2(total)) * LN2)",
        )
    else:
        line("lse = (top + tl.log2(total)) * LN2")
    if low:
        page.comment("By the product that attention_delta stores: a maximum is not joined to the sum without rounding.")
        line("near = tl.maximum(lse * LOG2E, LOWEST)", "low = (top - near + tl.log2(total)) * LN2")
        if guard:
            line("low = tl.where(empty, 0.0, low)")
    return "rescale" if sinks else "1.0"
