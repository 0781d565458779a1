"""The cotangent of the modified scores of one tile: the shared base of the Triton kernels of captured gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from frisket.dsl.ir import Expr
from frisket.lowering.derive import Gradient
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import SCALAR
from frisket.lowering.plan import LoopPlan, Target

from .cotangents import GradientKernel
from .units import machine
from .writer import Dims, TritonKernel, launched


def weights(gradients: Sequence[Gradient]) -> list[Expr]:
    """The distinct weights, in order: the sums that `attention_diagonal` makes."""
    return list(dict.fromkeys(g.weight for g in gradients))


class CapturedKernel(GradientKernel):
    """The base of the kernels of captured gradients: `dm`, the cotangent of the modified score, of one tile wherever it
    is. The mask is a predicate on every tile, full ones too."""

    name: str
    skeleton: str
    grid: str
    shown = "present[:, None] & inside[None, :]"
    bounded = False

    def __init__(
        self, plan: LoopPlan, target: Target, dims: Dims, gradients: Sequence[Gradient], index: Sequence[Expr] = ()
    ) -> None:
        self.gradients = gradients
        self.factors = [machine(w, dims) for w in weights(gradients)]
        self.index = [expr.machine(e) for e in index]
        asked = [*self.factors, *self.index]
        super().__init__(plan, replace(target, order="forward"), dims, (), slope=False, asked=asked)
        self.tile_roots = [*self.mask, *self.score, *([] if self.kept is None else [self.kept]), *self.factors]

    def kernel(self) -> TritonKernel:
        return launched(self.name, self.filled(self.skeleton), self.grid, self.target)

    def holes(self) -> dict[str, Any]:
        return {
            **super().holes(),
            "name": self.name,
            "results": self.results(),
            "walked_d": self.tile_mask("d", "inside"),
            "walked_e": self.tile_mask("e", "inside"),
        }

    def results(self) -> list[str]:
        """The lines of the signature for the results of the kernel."""
        raise NotImplementedError

    def positioned(self, used: frozenset[str]) -> list[str]:
        """The coordinates of a tile among those that are used."""
        places = {"q": "start + rows", "k": "tile * BLOCK_K + columns"}
        return [line for n, local in places.items() if n in used for line in self.coordinate(n, local)]

    def seen(self) -> dict[str, Any]:
        """The holes of seen.tpl: the condition that the mask shows any position of a tile, and the lines before it."""
        if not self.bounds:
            return {"seen": "seen > 0"}
        roots = [self.bounds["first"], self.bounds["last"]]
        return {
            "formulas": self.lines(roots, SCALAR, set(self.hoisted)),
            "bounds": [f"{name} = {self.bound(name)}" for name in ("first", "last")],
            "seen": "(first < (tile + 1) * BLOCK_K) & (last >= tile * BLOCK_K)",
        }

    def one_tile(self, roots: Sequence[Expr], levels: Sequence[int], written: set[str]) -> dict[str, Any]:
        """The holes of captured_cotangent.tpl, and the lines that `roots` need before it of these levels."""
        return {
            "row_and_column": [*self.line(roots), *(x for level in levels for x in self.lines(roots, level, written))],
            "visible": self.visible(written),
            **self.modified(written, "visible"),
        }

    def shared(self, weight: Expr, written: set[str]) -> dict[str, Any]:
        """The lines of `dm` times a weight, as `share`."""
        lines, share = self.times(weight, "weight", written, "visible")
        return {"weight": lines, "share": share}
