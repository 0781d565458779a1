"""Writes the native kernel of column sums of a LoopPlan: one self-contained C++ source."""

from __future__ import annotations

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import Expr
from frisket.lowering.plan import LoopPlan, Target

from .forward import ARITHMETIC, CppArrays, CppKernel, part


class ColumnsKernel(CppKernel):
    """The parts of the source of `int64_t frisket_columns(const Call *)`. It sums the weights of each
    key before dropout, from q, k and lse, over the queries of each head into dv: Real [batch, heads, kv_len]."""

    def __init__(self, plan: LoopPlan, target: Target, arrays: CppArrays, named: bool = True) -> None:
        stored = plan.value_scale is not None or plan.pages is not None or arrays.kv_dtype not in ("", arrays.dtype)
        if plan.weighted or stored:
            raise LoweringError("the C++ kernel of column sums takes a softmax over plain keys; torch's operators do")
        super().__init__(plan, target, arrays, named)

    def source_roots(self) -> dict[str, Expr | None]:
        return super().source_roots() | {"kept": None}

    def interval_roots(self) -> dict[str, Expr | None]:
        return {}  # the kernel asks every pair of a partial tile

    def source(self) -> str:
        walk = ("scores", "work", "columns")
        return "\n".join([self.head(), *map(part, ARITHMETIC), self.expressions(), *map(part, walk), self.entries()])

    def entries(self) -> str:
        kernel = 'extern "C" int64_t frisket_columns(const Call *call) { return columns(call); }\n'
        return "}  // namespace\n\n" + kernel
