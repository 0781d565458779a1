"""Writes the native kernels of a LoopPlan's derivatives: self-contained C++ sources, compiled apart from the forward.

In addition to the forward's functions of positions they have the slope of the score mod (lowering/derive.py). The
tangent kernel is the forward with tangents. The backward has, for every captured value, the weight of its gradient; the
rest is backward*.hpp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import Expr
from frisket.lowering.derive import Gradient, backward_of
from frisket.lowering.kernels.text import filled
from frisket.lowering.plan import LoopPlan, Target

from . import call as cpp_call
from .columns import ColumnsKernel
from .forward import ARGUMENTS, ARITHMETIC, TEXT, CppArrays, CppKernel, part

OVER = {"head": "HEADS", "row": "ROWS_OF_QUERIES", "column": "COLUMNS", "diagonal": "DIAGONALS", "scatter": "ENTRIES"}
# Whether items agree in a coordinate, and where it ends.
APART = {
    "b": ("call->batch == 1", "call->b_origin + call->batch"),
    "h": ("call->heads == 1", "call->h_origin + call->heads"),
    "q": ("!parts", "!call->q_origin_step && call->q_origin[0] >= 0 && call->q_origin[0] + call->q_len"),
}


class SlopedKernel(CppKernel):
    """A kernel with the slope of the score mod."""

    def __init__(self, plan: LoopPlan, target: Target, arrays: CppArrays, named: bool = True) -> None:
        if plan.value_scale is not None or plan.pages is not None:
            raise LoweringError("stored keys and values have no gradients; call the attention on plain arrays")
        # a row that sees nothing has an lse of -inf, whose exponent is no number
        self.guarded = plan.guard or backward_of(plan).guard
        super().__init__(plan, target, arrays, named)

    def source_roots(self) -> dict[str, Expr | None]:
        return super().source_roots() | {"slope": backward_of(self.plan).slope}


class TangentKernel(SlopedKernel):
    """The parts of the source of `int64_t frisket_tangent(const Call *)`: the forward, and the tangents `dout` and
    `dlse` of out and lse, given `dq`, `dk` and `dv`. One text serves calls in which some of these are null. float32 is
    multiplied by vectors alone."""

    name = "frisket_tangent"
    tangent = True

    def __init__(self, plan: LoopPlan, target: Target, arrays: CppArrays, named: bool = True) -> None:
        if plan.weighted:
            raise LoweringError("no kernel computes tangents of rows that are no softmax")
        super().__init__(plan, replace(target, precision="ieee"), arrays, named)


class BackwardKernel(SlopedKernel):
    """The parts of the source of a backward kernel, `int64_t frisket_backward(const Call *)`, and the same behind XLA's
    calling convention. `Call.gradients` has a zeroed buffer, or null where none is wanted, for each of
    `backward_of(plan).gradients`; so have dq, dk, dv. For one number of threads equal calls give equal bits."""

    def __init__(self, plan: LoopPlan, target: Target, arrays: CppArrays, named: bool = True) -> None:
        if plan.weighted:  # terms hold no slopes of any size
            target = replace(target, precision="ieee")
        super().__init__(plan, target, arrays, named)

    def source_roots(self) -> dict[str, Expr | None]:
        roots = super().source_roots()
        if self.plan.weighted:
            roots["counted"] = self.plan.counted  # gradients are 0 where a pair is hidden
            del roots["divisor"]
        for n, g in enumerate(backward_of(self.plan).gradients):
            roots[f"weight{n}"] = g.weight
            if g.over == "scatter":
                # other sums know their entry from the place of the tile
                roots |= {f"index{n}_{axis}": e for axis, e in enumerate(g.index)}
        return roots

    def interval_roots(self) -> dict[str, Expr | None]:
        return {}  # the backward asks every pair: ends made it no faster

    def source(self) -> str:
        walk = ("scores", "work", "backward", "backward_walk", "backward_work")
        return "\n".join([self.head(), *map(part, ARITHMETIC), self.expressions(), *map(part, walk), self.entries()])

    def entries(self) -> str:
        kernel = 'extern "C" int64_t frisket_backward(const Call *call) { return backward(call); }\n'
        return "}  // namespace\n\n" + kernel + cpp_call.bridged("frisket_backward")

    def expressions(self) -> str:
        derived = backward_of(self.plan)
        arguments = f"{ARGUMENTS}, Vec score"
        functions: list[str] = []
        gradients: list[dict[str, Any]] = []
        for n, g in enumerate(derived.gradients):
            functions += self._function(f"weight{n}", f"Vec weight{n}({arguments})", "reals(1)")
            index = [f"index{n}_{axis}" for axis in range(len(g.index) if g.over == "scatter" else 0)]
            for name in index:
                functions += self._function(name, f"Ints {name}({arguments})", "ints(0)")
            table = self.names[g.source]
            gradients.append(
                {
                    "n": n,
                    "name": table,
                    "over": g.over,
                    "index": "".join(f", {name}(fixed, row, column, score)" for name in index),
                    "size": " * ".join(f"fixed.{table}.size[{axis}]" for axis in range(len(index))),
                    "apart": self._apart(g),
                }
            )
        derivatives = filled(
            TEXT["derivatives"],
            functions=functions,
            captured=len(gradients),
            over=", ".join(OVER[g.over] for g in derived.gradients) or "HEADS",  # C++ has no empty array
            arguments=ARGUMENTS,
            gradients=gradients,
            scattered=[g for g in gradients if g["index"]],
        )
        return f"{super().expressions()}\n{derivatives}"

    def _apart(self, g: Gradient) -> str:
        """The condition under which work items never meet: they differ in batch entry, key head and, where there are
        parts, in queries."""
        clauses = []
        for name, (same, end) in APART.items():
            axes = [axis for axis, e in enumerate(g.index) if e.op == "var" and e.name == name]
            differ = [f"({end} <= fixed.{self.names[g.source]}.size[{axis}])" for axis in axes]  # none is clamped
            clauses.append(" || ".join([same, *differ]))
        return " && ".join(f"({c})" if "||" in c else c for c in clauses)


KERNELS = {"forward": CppKernel, "backward": BackwardKernel, "tangent": TangentKernel, "columns": ColumnsKernel}
