"""What the Triton kernels of captured gradients share: the cotangent of the modified scores of one tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from frisket.dsl.ir import Expr
from frisket.lowering.derive import Gradient
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import SCALAR
from frisket.lowering.plan import LoopPlan, Target

from .cotangents import Cotangents
from .writer import Dims, Kernel, launched, wrapped


def weights(gradients: Sequence[Gradient]) -> list[Expr]:
    """The distinct ones, in order: the sums that `attention_diagonal` makes."""
    return list(dict.fromkeys(g.weight for g in gradients))


class Tiles(Cotangents):
    """What these kernels share: `dm`, the cotangent of the modified score, of one tile wherever it is. The mask is a
    predicate on every tile, full ones too."""

    name: str
    shown = "present[:, None] & inside[None, :]"
    numbers: tuple[str, ...] = ("heads", "q_len", "kv_len")

    def __init__(
        self, plan: LoopPlan, target: Target, dims: Dims, gradients: Sequence[Gradient], index: Sequence[Expr] = ()
    ) -> None:
        self.gradients = gradients
        self.factors_of = [expr.machine(w) for w in weights(gradients)]
        self.index_of = [expr.machine(e) for e in index]
        asked = [*self.factors_of, *self.index_of]
        super().__init__(plan, replace(target, order="forward"), dims, (), slope=False, asked=asked)
        self.tile_roots = [*self.mask, *self.score, *([] if self.kept is None else [self.kept]), *self.factors_of]

    def kernel(self) -> Kernel:
        tensors = [
            "Q, K, V, DOut,  # [batch, heads, length, dim], any strides",
            "Lse, Low, Delta,  # float32 [batch, heads, q_len], contiguous: of attention_delta",
            *self.results(),
        ]
        with self.page.block(self.parameters.signature(self.name, tensors, "qkvg", self.numbers)):
            self.body()
        return launched(self.name, self.page, self.grid(), self.target)

    def results(self) -> list[str]:
        raise NotImplementedError

    def grid(self) -> str:
        raise NotImplementedError

    def body(self) -> None:
        raise NotImplementedError

    # -- where things are -----------------------------------------------------------------------------

    def place(self) -> None:
        """The program's head among those of all batches, and its records."""
        self.page.line("place = batch * heads + head")
        if self.tabled:
            self.page.line("distinct = tl.load(SliceOf + place) * tl.cdiv(q_len, BLOCK_Q)")

    def head(self) -> None:
        """Where the arrays of `batch` and `head` begin."""
        line, kv = self.page.line, "head"
        if self.dims.group > 1:
            line("kv_head = head // GROUP")
            kv = "kv_head"
        for name, s, of in (("Q", "q", "head"), ("K", "k", kv), ("V", "v", kv), ("DOut", "g", "head")):
            offset = f"tl.cast(batch, tl.int64) * stride_{s}b + tl.cast({of}, tl.int64) * stride_{s}h"
            line(f"{name.lower()}_at = {name} + {offset}")

    def seen(self) -> str:
        """Whether the mask shows any of the tile `tile` of row `row` that begins at `start`: a condition."""
        line = self.page.line
        if self.bounds:
            self.corners()
            self.lines([self.bounds["first"], self.bounds["last"]], SCALAR, set(self.hoisted))
            self.page.comment("Some query of the tile sees keys first..last.")
            line(*(f"{name} = {self.bound(name)}" for name in ("first", "last")))
            return "(first < (tile + 1) * BLOCK_K) & (last >= tile * BLOCK_K)"
        line("seen = 0", "entry = tl.cast(distinct + row, tl.int64)")
        with self.page.block("for i in range(tl.load(Count + entry)):"):
            line("record = Spans + (entry * records + i) * 4")
            line("seen += ((tl.load(record) <= tile) & (tile < tl.load(record + 3))).to(tl.int32)")
        return "seen > 0"

    # -- one tile ---------------------------------------------------------------------------------------

    def queries(self) -> None:
        """The arrays of the tile's queries, `start` on."""
        line = self.page.line
        line("present = start + rows < q_len", "at = tl.cast(start, tl.int64)")
        for name, pointer, letter in (("query", "q_at", "q"), ("dout", "dout_at", "g")):
            self._load(name, pointer, letter, "rows", "present")
        line("at += tl.cast(place, tl.int64) * q_len")
        for name in ("lse", "low", "delta"):
            line(f"{name} = tl.load({name.title()} + at + rows, mask=present, other=0.0)[:, None]")

    def keys(self) -> None:
        """The arrays of the tile's keys, and the products."""
        line = self.page.line
        line("inside = tile * BLOCK_K + columns < kv_len", "at = tl.cast(tile * BLOCK_K, tl.int64)")
        self._load("keys", "k_at", "k", "columns", "inside")
        self.dot("score", "query", "keys")
        self._load("values", "v_at", "v", "columns", "inside")
        self.dot("dp", "dout", "values")

    def _load(self, name: str, pointer: str, letter: str, index: str, inside: str) -> None:
        at = f"{pointer} + at * stride_{letter}s + ({self.within(letter, index)})"
        self.page.line(wrapped(f"{name} = tl.load({at}{self.tile_mask(letter, inside)})"))

    def cotangent(self, written: set[str]) -> None:
        """`dm`, from the products."""
        self.visible(written)
        self.weights(written, "visible")
        self.page.comment("Where p is 0 so is dm, whatever else is there.")
        dp = "dp" if self.kept is None else "dp * kept"
        self.page.line(f"dm = tl.where(p == 0.0, 0.0, p * ({dp} - delta))")

    def share(self, weight: Expr, written: set[str]) -> str:
        """`dm` times a weight."""
        return self.times(weight, "weight", written, "visible")
