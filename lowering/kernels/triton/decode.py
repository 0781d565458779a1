"""Writes the Triton kernels of few queries: attention to parts of the keys, and the parts combined.

A program has one tile of queries and one part of the tiles of keys that these see. The query heads of a key head are
packed into the tile, so that keys and values are read once for all of them, unless the mask tells heads apart. The
parts of a row are combined by a kernel of their own, in the order of the keys: the same bits at every call.
"""

from __future__ import annotations

from dataclasses import replace

from frisket.dsl.ir import Expr, build, transform, var
from frisket.lowering.kernels.expr import LEVELS, ROW
from frisket.lowering.kernels.text import Page
from frisket.lowering.plan import LoopPlan, Target

from .forward import ALONG, POOL, Forward, finish
from .parameters import padded
from .writer import Dims, Kernel, check_tile, masked, module, wrapped

H, FIRST = var("h"), var("h_first")  # the head, and the first of those in a tile


def emit(
    plan: LoopPlan, target: Target, dims: Dims, *, packs: bool = True, sinks: bool = False, top: bool = False,
    low: bool = False,
) -> str:  # fmt: skip
    """The text of a module with `attention_decode` and `attention_combine`, as `triton_forward.emit`; without `packs`
    every query head has tiles of its own."""
    given = kernels(plan, target, dims, packs=packs, sinks=sinks, top=top, low=low)
    return module("Attention of few queries", plan, dims, given)


def kernels(
    plan: LoopPlan, target: Target, dims: Dims, *, packs: bool = True, sinks: bool = False, top: bool = False,
    low: bool = False,
) -> list[Kernel]:  # fmt: skip
    check_tile(target)
    return [Decode(plan, target, dims, packs).kernel(), combine(plan, dims, sinks=sinks, top=top, low=low)]


def packed(plan: LoopPlan, dims: Dims) -> int:
    """How many query heads are packed into a tile, where the mask is the same for all: those of a key head, or as many
    of them as divide them and leave a tile that registers carry."""
    if plan.uses_head:
        return 1
    dim = padded(max(dims.head_dim, dims.v_dim))
    most = rows_of_a_tile(dim)
    if dims.group <= (128 if dim <= 128 else most):
        return dims.group
    return max(n for n in range(1, most + 1) if dims.group % n == 0)


def rows_of_a_tile(dim: int) -> int:
    """Queries of all heads in a packed tile, at most, unless more heads share a key head."""
    return 64 if dim <= 256 else 16


class Decode(Forward):
    name = "attention_decode"

    def __init__(self, plan: LoopPlan, target: Target, dims: Dims, packs: bool) -> None:
        self.group, self.pack = dims.group, packed(plan, dims) if packs else 1
        self.packs, self.heads = self.pack > 1, "GROUP" if self.pack == dims.group else "PACK"
        levels = {**LEVELS, "h": ROW} if self.packs else LEVELS
        super().__init__(plan, replace(target, order="forward"), dims, sinks=False, top=False, low=False, levels=levels)
        self.queries = "QUERIES" if self.packs else "BLOCK_Q"

    def kernel(self) -> Kernel:
        line = self.page.line
        with self.page.block(self._signature()):
            self._place()
            self._prologue()
            if self.tabled:
                self.page.blank()
                line("tiles = 0")
                with self.page.block("for i in range(tl.load(Count + entry)):"):
                    line("record = Spans + (entry.to(tl.int64) * records + i) * 4")
                    line("tiles += tl.load(record + 3) - tl.load(record)")
                self._share()
            with self.records():
                if not self.tabled:
                    line("tiles = hi - lo")
                    self._share()
                line("border, full = full_lo - lo + hi - full_hi, full_hi - full_lo")
                self._border_tiles(shared=True)
                line("begin, end = begin - border, end - border")
                self._full_tiles("full_lo + bounded(begin, full), full_lo + bounded(end, full)")
                if self.tabled:
                    line("begin, end = begin - full, end - full")
            self._epilogue()
        t = self.target
        heads, queries = (f"heads / {self.pack}", "packed queries") if self.packs else ("heads", "queries")
        launch = (
            f"attention_decode: grid (q tiles * splits, {heads}, batch), tiles of {t.block_q} {queries} by {t.block_k} "
            f"keys,\n    num_warps={t.num_warps}, num_stages={t.num_stages}."
        )
        return Kernel(self.name, str(self.page), launch)

    def _signature(self) -> str:
        tensors = [
            *([f"Q,  # {ALONG}", f"K, V,  # {POOL}"] if self.paged else [f"Q, K, V,  # {ALONG}"]),
            "Acc,  # float32 [splits, batch, heads, q_len, dim]: values of each part by their weights",
            "Tops, Totals,  # float32 [splits, batch, heads, q_len]: largest scores, and sums of weights",
        ]
        return self.parameters.signature(self.name, tensors, "qkv", ["heads", "q_len", "kv_len", "splits", *self.pool])

    def _place(self) -> None:
        line = self.page.line
        line("row, part = tl.program_id(0) // splits, tl.program_id(0) % splits")
        first = self.first_head
        if not self.packs:
            line("head, batch = tl.program_id(1), tl.program_id(2)")
        elif self.pack == self.dims.group:
            line("kv_head, batch = tl.program_id(1), tl.program_id(2)")
        else:
            line(f"PACK: tl.constexpr = {self.pack}")
            line("first_head, batch = tl.program_id(1) * PACK, tl.program_id(2)", "kv_head = first_head // GROUP")
        if self.tabled:
            line(f"entry = tl.load(SliceOf + batch * heads + {first}) * (tl.num_programs(0) // splits) + row")
        if self.packs:
            heads = "the GROUP" if self.heads == "GROUP" else "PACK"
            self.page.comment(f"A tile holds QUERIES queries of each of {heads} heads that share a key head.")
            line(
                f"QUERIES: tl.constexpr = BLOCK_Q // {self.heads}",
                "start = row * QUERIES",
                "packed = tl.arange(0, BLOCK_Q)",
                f"rows, head = packed // {self.heads}, {first} + packed % {self.heads}",
            )
        else:
            line("start = row * BLOCK_Q", "rows = tl.arange(0, BLOCK_Q)")
            if self.dims.group > 1:
                line("kv_head = head // GROUP")
        self._axes()
        line("Q += batch.to(tl.int64) * stride_qb")
        line("query_at = head.to(tl.int64) * stride_qh + (start + rows).to(tl.int64) * stride_qs")
        self._pointers("kv_head" if self.dims.group > 1 else "head")
        within = "start + rows < q_len"
        self._queries(f"(packed < QUERIES * {self.heads}) & ({within})" if self.packs else within, "query_at[:, None]")

    @property
    def first_head(self) -> str:
        """The first query head of a tile."""
        return "head" if not self.packs else "kv_head * GROUP" if self.pack == self.dims.group else "first_head"

    def machine(self, e: Expr) -> Expr:
        """Heads in one tile share a key head: what is read of that one is read once, not by every row of the tile."""
        return super().machine(transform(e, self._of_group) if self.packs else e)

    def _of_group(self, e: Expr) -> Expr:
        shared = e.op == "floordiv" and e.args[0] is H and e.args[1].op == "lit" and e.args[1].name > 0
        return build("floordiv", FIRST, e.args[1]) if shared and e.args[1].name % self.group == 0 else e

    def scalars(self) -> None:
        super().scalars()
        if FIRST.name in self.used:
            self.page.line(f"{FIRST.name} = {self.widened(f'h_origin + {self.first_head}')}")

    def head_coordinate(self) -> None:
        if self.packs:
            self.page.line(f"h = (h_origin + head)[:, None]{self.wide}")
        else:
            super().head_coordinate()

    def _share(self) -> None:
        self.page.comment("This part's share of the tiles that the row sees.")
        self.page.line("begin, end = part * tiles // splits, (part + 1) * tiles // splits")

    def _epilogue(self) -> None:
        line = self.page.line
        self.page.blank()
        line("row_at = ((part.to(tl.int64) * tl.num_programs(2) + batch) * heads + head) * q_len + start + rows")
        line("tl.store(Tops + row_at, top, mask=present)", "tl.store(Totals + row_at, total, mask=present)")
        whole = f" * (1.0 / {self.survival()})" if self.survival() else ""
        for p in self.values:
            mask = masked("present[:, None]", p.pad("[None, :]"), other="")
            line(f"out_at = row_at[:, None] * {self.v} + {p.index}[None, :]")
            line(f"tl.store(Acc + out_at, acc{p.mark}{whole}{mask})")


def combine(plan: LoopPlan, dims: Dims, *, sinks: bool = False, top: bool = False, low: bool = False) -> Kernel:
    """The kernel that combines the parts; of the plan it asks whether a row may be empty."""
    page, signature = Page(), Page()
    e, dim, length = ("d", "DIM", "HEAD_DIM") if dims.v_dim == dims.head_dim else ("e", "DIM_V", "V_DIM")
    ragged = padded(dims.v_dim) != dims.v_dim
    line = signature.line
    line('@triton.jit(do_not_specialize=["heads", "q_len", "splits"])')
    with signature.block("def attention_combine(", "):"):
        line("Acc, Tops, Totals,  # the parts, of attention_decode")
        line("Out,  # [batch, heads, q_len, dim], any strides", "Lse,  # float32 [batch, heads, q_len], contiguous")
        if top:
            line("Top,  # the largest scores, as Lse")
        if low:
            line("Low,  # what rounding took from Lse")
        if sinks:
            line("Sinks,  # float32 [heads]: one more logit in the denominator")
        line("stride_ob, stride_oh, stride_os, stride_od,", "heads, q_len, splits,")
    line = page.line
    with page.block(str(signature).rstrip()):
        line(
            "row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)",
            "row_at = (batch.to(tl.int64) * heads + head) * q_len + row",
            "rows = tl.num_programs(2).to(tl.int64) * heads * q_len  # of one part",
            f"{e} = tl.arange(0, {dim})",
            "top = tl.cast(LOWEST, tl.float32)",
            "total = tl.cast(0.0, tl.float32)",
            f"acc = tl.zeros([{dim}], tl.float32)",
            "",
        )
        with page.block("for first in range(0, splits, PARTS):"):
            mask = masked("part[:, None] < splits", f"{e}[None, :] < {length}" if ragged else "")
            line(
                "part = first + tl.arange(0, PARTS)",
                "at = part * rows + row_at",
                "tops = tl.load(Tops + at, mask=part < splits, other=LOWEST)",
                "totals = tl.load(Totals + at, mask=part < splits, other=0.0)",
                wrapped(f"values = tl.load(Acc + at[:, None] * {length} + {e}[None, :]{mask})"),
                "peak = tl.maximum(top, tl.max(tops, 0))",
                "weight = tl.exp2(tops - peak)",
                "rescale = tl.exp2(top - peak)",
                "total = total * rescale + tl.sum(weight * totals, 0)",
                "acc = acc * rescale + tl.sum(weight[:, None] * values, 0)",
                "top = peak",
            )
        page.blank()
        rescale = finish(page, sinks="tl.load(Sinks + head)" if sinks else "", top=top, low=low, guard=plan.guard)
        line("Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + row.to(tl.int64) * stride_os")
        mask = masked(f"{e} < {length}" if ragged else "", other="")
        line(f"out = acc * ({rescale} / total)")
        line(f"tl.store(Out + {e} * stride_od, out.to(Out.dtype.element_ty){mask})")
        line("tl.store(Lse + row_at, lse)")
        if top:
            line("tl.store(Top + row_at, largest)")
        if low:
            line("tl.store(Low + row_at, low)")
    return Kernel("attention_combine", str(page), "attention_combine: grid (q_len, heads, batch).")
