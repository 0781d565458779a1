"""The program of every Pallas kernel for Hopper (Mosaic GPU), forward and backward, and the text of its module.

A program has two warpgroups that compute, each for half of the tile, and one that reads tiles of the other axis
ahead into a ring in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from frisket.dsl.ir import Expr, walk
from frisket.lowering.kernels.inputs import Down, roots
from frisket.lowering.kernels.text import fields, filled, parts
from frisket.lowering.plan import Geometry, LoopPlan, Target

from .expr import Expressions

TEXT = parts(__package__, "kernel")
# parts of the entry that a subclass brings
ENTRY = ("arguments", "doc", "of_rows", "padded", "out_types", "scratch_types")
SWIZZLE = 64  # dims of 16 bits that one swizzle of 128 bytes holds
SHARED = 227 * 1024  # bytes of shared memory of a program
BARRIERS = 2560  # of it, for barriers and the reductions of rows
MOST = 4  # tiles read ahead, at most
INEXACT = {"sin", "cos", "tan", "log", "log2", "log1p", "pow", "rsqrt", "sqrt"}  # the machine's own are too rough


def dims(dim: int) -> int:
    """The head sizes a kernel computes with, zeros behind a head's own."""
    return -(-dim // SWIZZLE) * SWIZZLE  # TMA copies rows of whole swizzles, and zeros add nothing to a product


@dataclass(eq=False)
class GpuKernel:
    """A kernel of a plan. A subclass names the expressions that it computes, has the text of its work in a template,
    and says what that reads and gives."""

    plan: LoopPlan
    target: Target
    geometry: Geometry
    interpretable: bool

    name = title = does = axis = length = semantics = walk = ""
    detail = ""  # behind the title
    owned: ClassVar[Down] = "q"  # lies down a tile, the other axis across
    template: ClassVar[Mapping[str, str]]  # the parts of the module that a subclass brings

    def __post_init__(self) -> None:
        target, used = self.target, [e for e in self.roots() if e is not None]
        self.exact = any(n.op in INEXACT for n in walk(*used))
        self.e = Expressions(used, self.owned, "exact" if self.exact else target.tanh, self.plan.score)
        self.dim, self.dim_v = dims(self.geometry.head_dim), dims(self.geometry.v_dim)
        sides = ("BLOCK_Q", target.block_q), ("BLOCK_K", target.block_k)
        (self.down, self.own_block), (self.across, self.across_block) = sides if self.owned == "q" else sides[::-1]

    def roots(self) -> Iterable[Expr | None]:
        """The expressions that the kernel computes."""
        return roots(self.plan)

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

    def readers(self) -> list[str]:
        """The functions of what comes in as tiles."""
        inputs, (down, other) = self.e.inputs, ("qk" if self.owned == "q" else "kq")
        texts = [filled(TEXT["pairs"], turned=self.owned == "k", across=self.across)] if inputs.pairs else []
        return texts + ([filled(TEXT["distances"], down=down, other=other)] if inputs.distances else [])

    def module(self, kernel: str, stages: int, **holes: Any) -> str:
        """The text of the module: its head, functions, the part `kernel` of the template, and its entry."""
        plan, g, e, template = self.plan, self.geometry, self.e, self.template
        holes |= fields(self, "title detail does name axis across walk length semantics dim dim_v")
        holes |= {"own": self.down, "stages": stages, "fast": str(not self.exact)}
        holes["values"] = ", ".join(["slice_of", "order", "count", "records", *e.operands(plan)])
        holes |= {n: filled(template[n], **holes).strip().splitlines() for n in ENTRY}
        functions = [TEXT["shared"], TEXT["interpreted" if self.interpretable else "on_device"], *self.readers()]
        head = filled(
            TEXT["head"], **{"unit": [], "narrow": []} | holes,
            text=[f"#     {line}" for line in (plan.text or "every key").splitlines()],
            block_q=self.target.block_q, block_k=self.target.block_k, group=g.heads // g.kv_heads,
            scale=repr(float(g.scale)), shared="\n\n\n".join(text.strip("\n") for text in functions).splitlines(),
        )  # fmt: skip
        products = template["products_interpreted" if self.interpretable else "products"]
        work = filled(template[kernel], **holes, once=e.once(plan))
        call = filled(TEXT["call"], **holes, before=[*e.inputs.before(plan), *e.lined()])
        sections = [head, template.get("loops", ""), products, "\n".join(e.definitions(plan)), work, call]
        return "\n\n".join(part.strip("\n") + "\n" for part in sections if part)
