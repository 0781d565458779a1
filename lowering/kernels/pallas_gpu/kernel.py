"""The program of every Pallas kernel for Hopper (Mosaic GPU), forward and backward, and the text of its module.

A program has two warpgroups that compute, each for half of its own tile, and one that reads tiles of the other axis
ahead into a ring in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from frisket.dsl.ir import Expr, walk
from frisket.lowering.kernels.inputs import Down
from frisket.lowering.kernels.text import filled, parts
from frisket.lowering.plan import Geometry, LoopPlan, Target

from .expr import Expressions

TEXT = parts(__package__, "kernel")
SWIZZLE = 64  # dims of 16 bits that one swizzle of 128 bytes holds
SHARED = 227 * 1024  # bytes of shared memory of a program
BARRIERS = 2560  # of it, for barriers and the reductions of rows
MOST = 4  # tiles read ahead, at most
INEXACT = {"sin", "cos", "tan", "log", "log2", "log1p", "pow", "rsqrt", "sqrt"}  # the machine's own are too rough


def dims(dim: int) -> int:
    """The head sizes a kernel computes with, zeros behind a head's own."""
    return -(-dim // SWIZZLE) * SWIZZLE  # TMA copies rows of whole swizzles, and zeros add nothing to a product


class GpuKernel:
    """A kernel of a plan. A subclass has the text of its work in a template, and says what that reads and gives."""

    name = title = does = axis = length = semantics = walk = ""
    detail = ""  # behind the title
    owned: Down = "q"  # lies down a tile, the other axis across

    def __init__(
        self, plan: LoopPlan, target: Target, geometry: Geometry, interpretable: bool, roots: Iterable[Expr | None]
    ) -> None:
        self.plan, self.target, self.geometry, self.interpretable = plan, target, geometry, interpretable
        used = [e for e in roots if e is not None]
        self.exact = any(n.op in INEXACT for e in used for n in walk(e))
        self.e = Expressions(used, self.owned, "exact" if self.exact else target.tanh, plan.score)
        self.dim, self.dim_v = dims(geometry.head_dim), dims(geometry.v_dim)
        sides = ("BLOCK_Q", "BLOCK_K")
        self.down, self.across = sides if self.owned == "q" else sides[::-1]
        blocks = {"BLOCK_Q": target.block_q, "BLOCK_K": target.block_k}
        self.own_block, self.across_block = blocks[self.down], blocks[self.across]

    @property
    def unit(self) -> str:
        """The text of what exponents of 2 are, for each unit of a modified score."""
        return "LOG2E" if self.e.factor == 1.0 else f"{self.e.factor!r} * LOG2E"

    def score(self, name: str) -> list[str]:
        """The lines of the modified score, `name`, from the product `s`."""
        lines = [] if self.e.products else ["s = s * SCALE"]
        return lines + self.assigned(self.plan.score, "y", f"{name} = {{}}")

    def assigned(self, root: Expr | None, temporary: str, form: str) -> list[str]:
        """The lines of an expression and of the statement `form` with its value; none where there is no expression."""
        if root is None:
            return []
        lines, value = self.e.written(root, temporary)
        return [*lines, form.format(value)]

    def operands(self) -> list[str]:
        """The operands before the arrays."""
        return ["slice_of", "order", "count", "records", *self.e.operands(self.plan)]

    def readers(self) -> list[str]:
        """The functions of what comes in as tiles."""
        inputs, (down, other) = self.e.inputs, ("qk" if self.owned == "q" else "kq")
        turned = self.owned == "k"
        pairs = {
            "first": "keys first, " * turned,
            "values": f"values{'.swapaxes(2, 3)' * turned}",
            "own": self.down,
            "across": self.across,
            "own_len": "kv_len" if turned else "q_len",
            "across_len": "q_len" if turned else "kv_len",
        }
        texts = [filled(TEXT["pairs"], **pairs)] if inputs.pairs else []
        return texts + ([filled(TEXT["distances"], down=down, other=other)] if inputs.distances else [])

    def module(self, stages: int, before: str, kernel: str, **holes: Any) -> str:
        """The text of the module: its head, functions `before` the kernel, the kernel, and its entry."""
        plan, g, e = self.plan, self.geometry, self.e
        common = {n: getattr(self, n) for n in ("title", "detail", "does", "name", "axis", "across", "walk")}
        common |= {"own": self.down, "length": self.length, "semantics": self.semantics, "fast": str(not self.exact)}
        functions = [TEXT["shared"], TEXT["interpreted" if self.interpretable else "on_device"], *self.readers()]
        head = filled(
            TEXT["head"], **common | {"unit": [], "narrow": []} | holes,
            text=[f"#     {line}" for line in (plan.text or "every key").splitlines()],
            block_q=self.target.block_q, block_k=self.target.block_k, dim=self.dim, dim_v=self.dim_v,
            group=g.heads // g.kv_heads, stages=stages, scale=repr(float(g.scale)),
            shared="\n\n\n".join(text.strip("\n") for text in functions).splitlines(),
        )  # fmt: skip
        call = filled(TEXT["call"], **common, **holes, before=[*e.inputs.before(plan), *e.lined()])
        sections = [head, before, "\n".join(e.definitions(plan)), kernel, call]
        return "\n\n".join(part.strip("\n") + "\n" for part in sections if part)
