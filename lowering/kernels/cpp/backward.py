"""Writes the native backward kernel of a LoopPlan: one self-contained C++ source, compiled apart from the forward.

Beside the forward's functions of positions it has the slope of the score mod and, for every captured value, the
weight of its gradient (lowering/derive.py); the rest is backward*.hpp.
"""

from __future__ import annotations

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import Expr
from frisket.lowering.derive import Gradient, backward_of
from frisket.lowering.plan import LoopPlan, Target

from . import call as cpp_call
from .forward import ARITHMETIC, CppArrays, CppKernel, part

OVER = {"head": "HEADS", "row": "ROWS_OF_QUERIES", "column": "COLUMNS", "diagonal": "DIAGONALS", "scatter": "ENTRIES"}
ARGUMENTS = "const Fixed &fixed, const Row &row, const Column &column, Vec score"
# Whether items agree in a coordinate, and where it ends.
APART = {
    "b": ("call->batch == 1", "call->b_origin + call->batch"),
    "h": ("call->heads == 1", "call->h_origin + call->heads"),
    "q": ("!parts", "!call->q_origin_step && call->q_origin[0] >= 0 && call->q_origin[0] + call->q_len"),
}


class BackwardKernel(CppKernel):
    """The parts of the source of a backward kernel, `int64_t frisket_backward(const Call *)`, and the same behind XLA's
    calling convention. `Call.gradients` has a zeroed buffer, or null where none is wanted, for each of
    `backward_of(plan).gradients`; so have dq, dk, dv. For one number of threads equal calls give equal bits."""

    def __init__(self, plan: LoopPlan, target: Target, arrays: CppArrays, named: bool = True) -> None:
        if plan.weight is not None or plan.pages is not None:
            raise LoweringError("stored keys and values have no gradients; call the attention on plain arrays")
        super().__init__(plan, target, arrays, named)

    def source_roots(self) -> dict[str, Expr | None]:
        derived = backward_of(self.plan)
        roots = super().source_roots() | {"slope": derived.slope}
        for n, g in enumerate(derived.gradients):
            roots[f"weight{n}"] = g.weight
            if g.over == "scatter":
                # other sums know their entry from the place of the tile
                roots |= {f"index{n}_{axis}": e for axis, e in enumerate(g.index)}
        return roots

    def interval_roots(self) -> dict[str, Expr | None]:
        return {}  # the backward asks every pair: ends made it no faster

    def source(self) -> str:
        walk = ("scores", "backward", "backward_walk", "backward_work")
        return "\n".join([self.head(), *map(part, ARITHMETIC), self.expressions(), *map(part, walk), self.entries()])

    def entries(self) -> str:
        kernel = 'extern "C" int64_t frisket_backward(const Call *call) { return backward(call); }\n'
        return "}  // namespace\n\n" + kernel + cpp_call.bridged("frisket_backward")

    def expressions(self) -> str:
        super().expressions()
        line = self.page.line
        derived = backward_of(self.plan)
        line("", "// -- derivatives of the score mod " + "-" * 80, "")
        self._function("slope", f"Vec slope({ARGUMENTS})", "reals(1)")
        for n, g in enumerate(derived.gradients):
            self._function(f"weight{n}", f"Vec weight{n}({ARGUMENTS})", "reals(1)")
            for axis in range(len(g.index) if g.over == "scatter" else 0):
                self._function(f"index{n}_{axis}", f"Ints index{n}_{axis}({ARGUMENTS})", "ints(0)")
        over = ", ".join(OVER[g.over] for g in derived.gradients) or "HEADS"  # C++ has no empty array
        # a row that sees nothing has an lse of -inf, whose exponent is no number
        guarded = self.plan.guard or derived.guard
        line("enum Over { HEADS, ROWS_OF_QUERIES, COLUMNS, DIAGONALS, ENTRIES };")
        line(f"const int CAPTURED = {len(derived.gradients)};")
        line(f"const Over OVER[CAPTURED + 1] = {{{over}}};  // on what the index of a captured value depends")
        line(f"const bool SLOPED = {'false' if derived.slope is None else 'true'};")
        line(f"const bool GUARDED = {'true' if guarded else 'false'};  // a weight of 0 may meet infinity", "")
        self._collect(derived.gradients)
        self._entries(derived.gradients)
        return str(self.page)

    def _collect(self, gradients: tuple[Gradient, ...]) -> None:
        line = self.page.line
        line("// dm times the weight of each captured value, added to its gradient; p is the weight of the softmax.")
        line("template <bool CHECKED, class C>")
        where = "const Fixed &fixed, const Row &row, const Column &column, int i, int j"
        with self.page.block(f"INLINE void collect(C &captured, {where}, Vec p, Vec dm, Vec score) {{", "}"):
            for n, g in enumerate(gradients):
                # a call may want some of the gradients: one text for all choices
                with self.page.block(f"if (captured.buffer[{n}]) {{  // {self.names[g.source]}", "}"):
                    line(f"Vec x = dm * weight{n}(fixed, row, column, score);")
                    line("if (CHECKED) x = select(p != 0, x, Vec{});")
                    if g.over == "scatter":
                        index = "".join(f", index{n}_{a}(fixed, row, column, score)" for a in range(len(g.index)))
                        line(f"captured.add_entries({n}, fixed.{self.names[g.source]}.size, x{index});")
                    else:
                        line(f"captured.add_{g.over}({n}, i, j, x);")
        self.page.blank()

    def _entries(self, gradients: tuple[Gradient, ...]) -> None:
        """Write the functions about tables whose gradient is scattered."""
        line = self.page.line
        scattered = [(n, g) for n, g in enumerate(gradients) if g.over == "scatter"]
        with self.page.block("INLINE int64_t entries(const Fixed &fixed, int n) {", "}"):
            for n, g in scattered:
                size = " * ".join(f"fixed.{self.names[g.source]}.size[{a}]" for a in range(len(g.index)))
                line(f"if (n == {n}) return {size};")
            line("return 0;")  # for gradients that are not scattered, which have no entries to count
        line("", "// Whether work items never meet at an entry, because they differ in its index.")
        with self.page.block("INLINE bool apart(const Call *call, const Fixed &fixed, int n, bool parts) {", "}"):
            line(*(f"if (n == {n}) return {self._apart(g)};" for n, g in scattered))
            line("return true;")
        line("")

    def _apart(self, g: Gradient) -> str:
        """The condition under which work items never meet: they differ in batch entry, key head and, where there are
        parts, in queries."""
        clauses = []
        for name, (same, end) in APART.items():
            axes = [axis for axis, e in enumerate(g.index) if e.op == "var" and e.name == name]
            differ = [f"({end} <= fixed.{self.names[g.source]}.size[{axis}])" for axis in axes]  # none is clamped
            clauses.append(" || ".join([same, *differ]))
        return " && ".join(f"({c})" if "||" in c else c for c in clauses)


KERNELS = {"forward": CppKernel, "backward": BackwardKernel}
