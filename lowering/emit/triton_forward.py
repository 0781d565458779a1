"""Writes the Triton forward kernel of a LoopPlan.

One program works on one tile of queries of one head. It walks the records of its row: first the border tiles of
keys, with the mask as a predicate, then the full ones without.
"""

from __future__ import annotations

from frisket.dsl.ir import Expr, uses
from frisket.lowering.plan import LoopPlan, Target

from .expr import COLUMN, POSITION, ROW, SCALAR
from .triton_rows import Rows
from .triton_writer import Dims, Kernel, check_tile, masked, module, wrapped


def emit(plan: LoopPlan, target: Target, dims: Dims) -> str:
    """`emit(plan, target, Dims(128, 128, "bfloat16", group=4))`: the module's text; the same input gives the same text.

    The kernel is `attention_forward`; its parameters say by their names what they hold, and those the plan has no use
    for are absent.
    """
    return module("Attention forward", plan, dims, [kernel(plan, target, dims)])


def kernel(plan: LoopPlan, target: Target, dims: Dims) -> Kernel:
    """The forward kernel. Of `target` the text depends on the order of rows and the precision alone."""
    check_tile(target)
    return _Forward(plan, target, dims).kernel()


class _Forward(Rows):
    def __init__(self, plan: LoopPlan, target: Target, dims: Dims) -> None:
        self.target = target
        super().__init__(plan, dims, target)

    def kernel(self) -> Kernel:
        t = self.target
        signature = self.parameters.signature(
            "attention_forward",
            [
                "Q, K, V, Out,  # [batch, heads, length, dim], any strides",
                "Lse,  # float32 [batch, heads, q_len], contiguous",
            ],
            "qkvo", ["heads", "q_len", "kv_len"],
        )  # fmt: skip
        with self.page.block(signature):
            self._place()
            self._prologue()
            with self.records():
                self._border_tiles()
                self._full_tiles()
            self._epilogue()
        launch = (
            f"attention_forward: grid (q tiles, heads, batch), tiles of {t.block_q} queries by {t.block_k} keys, "
            f"num_warps={t.num_warps}, num_stages={t.num_stages}."
        )
        return Kernel("attention_forward", str(self.page), launch)

    # -- before the loops ---------------------------------------------------------------------------

    def _place(self) -> None:
        line = self.page.line
        self.own_row()
        line(
            "start = row * BLOCK_Q",
            "rows = tl.arange(0, BLOCK_Q)",
            "columns = tl.arange(0, BLOCK_K)",
            "d = tl.arange(0, DIM)",
        )
        if self.e == "e":
            line("e = tl.arange(0, DIM_V)")
        kv = "head"
        if self.dims.group > 1:
            line("kv_head = head // GROUP")
            kv = "kv_head"
        self.page.blank()
        self.page.comment("Offsets are 64 bits where they are scalars, 32 within a tile.")
        batch = "batch.to(tl.int64)"
        line(f"Q += {batch} * stride_qb + head.to(tl.int64) * stride_qh + start.to(tl.int64) * stride_qs")
        line(f"K += {batch} * stride_kb + {kv}.to(tl.int64) * stride_kh")
        line(f"V += {batch} * stride_vb + {kv}.to(tl.int64) * stride_vh")
        line("key_at = columns[None, :] * stride_ks + d[:, None] * stride_kd")
        line(f"value_at = columns[:, None] * stride_vs + {self.e}[None, :] * stride_vd")
        line("present = start + rows < q_len")
        mask = masked("present[:, None]", self.head_pad("d[None, :]"))
        line(wrapped(f"query = tl.load(Q + rows[:, None] * stride_qs + d[None, :] * stride_qd{mask})"))

    def _prologue(self) -> None:
        line = self.page.line
        self.page.blank()
        self.scalars()
        if "q" in self.used:
            self.coordinate("q", "start + rows")
        positions = [*self.mask, *self.score]
        if self.bounds:
            self.closed_form()
            self.page.blank()
        for level in (SCALAR, ROW):
            self.lines(positions, level, self.hoisted)
        if self.plan.score is None:
            line("unit = scale * LOG2E")
        line(
            "top = tl.full([BLOCK_Q], LOWEST, tl.float32)",
            "total = tl.zeros([BLOCK_Q], tl.float32)",
            f"acc = tl.zeros([BLOCK_Q, {'DIM' if self.e == 'd' else 'DIM_V'}], tl.float32)",
        )

    # -- the loops ----------------------------------------------------------------------------------

    def _border_tiles(self) -> None:
        line = self.page.line
        self.page.comment("Border tiles, before and behind the full ones: the mask is a predicate.")
        with self.page.block("for j in range(lo, hi - full_hi + full_lo):"):
            line("tile = tl.where(j < full_lo, j, j - full_lo + full_hi)")
            line("inside = tile * BLOCK_K + columns < kv_len")
            self._scores("inside")
            written = set(self.hoisted)
            self._column(written, [*self.mask, *self.score])
            self.lines(self.mask, POSITION, written)
            if self.plan.mask is not None:
                self.quote(self.plan.mask)
            line("visible = inside[None, :]")
            for term in self.mask:
                line(f"visible &= {self.value(term)}")
            self._modify(written, "visible")
            line("score = tl.where(visible, score, -INFINITY)")
            self._accumulate("inside")

    def _full_tiles(self) -> None:
        self.page.comment("Full tiles: every position is visible.")
        with self.page.block("for tile in range(full_lo, full_hi):"):
            self._scores()
            written = set(self.hoisted)
            self._column(written, self.score)
            self._modify(written)
            self._accumulate()

    def _scores(self, inside: str = "") -> None:
        line = self.page.line
        line("at = tl.cast(tile * BLOCK_K, tl.int64)")
        mask = masked(inside and f"{inside}[None, :]", self.head_pad("d[:, None]"))
        line(f"keys = tl.load(K + at * stride_ks + key_at{mask})")
        line(f"score = tl.dot(query, keys{self.precision})" + ("" if not self.score else " * scale"))

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

    def _accumulate(self, inside: str = "") -> None:
        line = self.page.line
        if self.score:
            line("peak = tl.maximum(top, tl.max(score, 1))")
            line("p = tl.exp2((score - peak[:, None]) * LOG2E)")
            line("rescale = tl.exp2((top - peak) * LOG2E)")
        else:
            line("peak = tl.maximum(top, tl.max(score, 1) * unit)")
            line("p = tl.exp2(score * unit - peak[:, None])")
            line("rescale = tl.exp2(top - peak)")
        mask = masked(inside and f"{inside}[:, None]", self.value_pad(f"{self.e}[None, :]"))
        line(f"values = tl.load(V + at * stride_vs + value_at{mask})")
        line("total = total * rescale + tl.sum(p, 1)")
        line("acc = acc * rescale[:, None]")
        line(f"acc = tl.dot(p.to(values.dtype), values, acc{self.precision})")
        line("top = peak")

    def _epilogue(self) -> None:
        line = self.page.line
        self.page.blank()
        log = "top + tl.log(total)" if self.score else "(top + tl.log2(total)) * LN2"
        if self.plan.guard:
            self.page.comment("A row without a visible key gives 0, and lse -inf.")
            line("empty = total == 0.0")
            line("total = tl.where(empty, 1.0, total)")
            line(f"lse = tl.where(empty, -INFINITY, {log})")
        else:
            line(f"lse = {log}")
        line("out = acc * (1.0 / total)[:, None]")
        mask = masked("present[:, None]", self.value_pad(f"{self.e}[None, :]"), other="")
        line(
            "Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + start.to(tl.int64) * stride_os",
            f"out_at = rows[:, None] * stride_os + {self.e}[None, :] * stride_od",
            f"tl.store(Out + out_at, out.to(query.dtype){mask})",
            "Lse += place.to(tl.int64) * q_len + start",
            "tl.store(Lse + rows, lse, mask=present)",
        )
