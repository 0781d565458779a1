"""Prints the mask and score mod of a LoopPlan as CuTe functions, which FlashAttention 4 builds into its kernels.

>>> from frisket.dsl.sugar import k, q
>>> from frisket.lowering.plan import make_plan
>>> from frisket.lowering.simplify import ProgramExprs
>>> print(emit(make_plan(ProgramExprs((q >= k) & (q - k <= 255)), "causal & window(256)")).body, end="")
def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars=()):
    s0 = cute.full(q_idx.shape, aux_scalars[0], Int32)
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= s0)

The engine calls them at positions past the last query and key too, and hides those itself. Tables of the plan are its
`aux_tensors`, clamped lookups. Numbers that come with a call are its `aux_scalars`: slots of the plan, sizes of the
problem, and where the call lies in it. So `window(256)` and `window(512)` are one text, and one kernel.

FlashAttention 4 calls a mask or score mod with vectors (`cute.TensorSSA`) of positions and scores, and expressions are
printed on those: 32-bit Ints, Floats of 32 bits. Meanings are those of `dsl.evaluate`. CuTe's own `%` rounds to zero,
its `//` to minus infinity. Its `~`, `<<` and `>>` give vectors that no other operator takes, so `legalise` writes them
as `^ True`, `*` and `//`; its maximum loses NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import COORDINATES, SIZES, Expr, transform, uses, walk
from frisket.dsl.types import BOOL, FLOAT, INT, Type
from frisket.lowering.derive import backward_of
from frisket.lowering.kernels import features
from frisket.lowering.kernels.expr import assignments, machine, same_remainder
from frisket.lowering.kernels.expr import operator as row
from frisket.lowering.kernels.language import SHARED, Language, Text, calls
from frisket.lowering.kernels.text import Names, Page, parts, words
from frisket.lowering.kernels.units import cheaper
from frisket.lowering.plan import LoopPlan

_OF_ONE = """
abs:abs int:to_int exp:cute.math.exp exp2:cute.math.exp2 log:cute.math.log log2:cute.math.log2 log1p:cute.math.log1p
sin:cute.math.sin cos:cute.math.cos tan:cute.math.tan sqrt:cute.math.sqrt rsqrt:cute.math.rsqrt erf:cute.math.erf
"""
_OF_TWO = "min:minimum max:maximum pow:cute.math.pow lshift:shifted_left rshift:shifted_right"
CUTE: dict[str, str] = {op: row for op, row in SHARED.items() if op != "bitnot"} | calls("{}", _OF_ONE)
CUTE |= calls("{}, {}", _OF_TWO) | {"floor_quotient": "{} // {}", "remainder": "{} % {}", "random": "random(*)"}
CUTE |= {"where": "cute.where({}, {}, {})", "float": "{}.to(Float32)", "floor": "to_int(cute.math.floor({}))"}
CUTE |= {"tanh": "cute.math.tanh({}, fastmath=True)"}
LANGUAGE = Language(
    "CuTe", CUTE, infinity="Float32.inf", nan='Float32(float("nan"))', functions=parts(__package__, "functions")
)

TYPES: dict[Type, str] = {BOOL: "Boolean", INT: "Int32"}  # and Float32
TENSORS = frozenset({"pow", "lshift", "rshift", "random"})  # operators that take no number in the place of a vector

POSITIONS = {"b": "b", "h": "h", "q": "q_idx", "k": "kv_idx", "score": "score"}
INSTEAD = "take backend='triton'"
MODS = ("mask_mod", "score_mod", "score_mod_bwd")


@dataclass(frozen=True)
class Mods:
    """The text of a plan's functions. `tables` and `scalars` are, in their order, the names of what they read:
    tables of the plan. Slots of the plan, sizes of the problem and "first q", the origin along an axis."""

    title: str
    body: str  # equal bodies are one kernel
    tables: tuple[str, ...]
    scalars: tuple[str, ...]
    functions: tuple[str, ...]  # of MODS

    @property
    def text(self) -> str:
        """The module's source."""
        code = "".join(f"\n{text}" for text in LANGUAGE.prelude(self.body)[1])  # each below those that it uses itself
        names = [n for n in ("Boolean", "Float32", "Int32", "Uint32") if n in words(code + self.body)]
        lines = [f'"""{self.title}"""', "", *["import cutlass"] * ("cutlass." in code), "import cutlass.cute as cute"]
        lines += [f"from cutlass import {', '.join(names)}"] * bool(names)
        return "\n".join(lines) + f"\n{code}\n\n{self.body}"


def emit(plan: LoopPlan, *, gradients: bool = True, placed: frozenset[str] = frozenset()) -> Mods:
    """The functions of a plan; `placed` are the axes of `b h q k` along which the call begins past 0. Raises
    LoweringError for what a function of a position cannot say: `features.CUTE` has the words."""
    if why := features.missing(features.CUTE, plan):
        raise LoweringError(f"{why}\n  {INSTEAD}")
    roots = {} if plan.mask is None else {"mask_mod": plan.mask}
    if plan.score is not None:
        roots["score_mod"] = plan.score
        if gradients and (slope := backward_of(plan).slope) is not None:
            roots["score_mod_bwd"] = slope
    ready = {name: transform(cheaper(machine(root)), same_remainder) for name, root in roots.items()}
    read = {n.name for n in walk(*ready.values()) if n.op in ("lookup", "param")} | {
        n for root in ready.values() for n in uses(root)
    }
    # the simplified functions may read less than the plan
    tables = tuple(t.name for t in plan.tables if t.name in read)
    scalars = [s.name for s in plan.slots if s.name in read] + [n for n in SIZES if n in read]
    scalars += [f"first {n}" for n in COORDINATES if n in placed and n in read]
    writer = _Writer(plan, tables, tuple(scalars))
    texts = [writer.function(name, root, backward_of(plan).guard) for name, root in ready.items()]
    # a slope of 1 has no text, and the engine asks for a function
    if gradients and plan.score is not None and "score_mod_bwd" not in roots:
        texts.append(f"{writer.head('score_mod_bwd')}\n    return grad\n")
    functions = tuple(n for n in MODS if n in roots or (n == "score_mod_bwd" and plan.score is not None and gradients))
    return Mods(_title(plan), "\n\n".join(texts), tables, tuple(scalars), functions)


def _title(plan: LoopPlan) -> str:
    """The plan as the user wrote it, and what its slots and tables are, fit for a docstring."""
    lines = [plan.text or "every key visible, plain scores"]
    lines += [f"{s.name} = {s.source if s.value is None else s.value}" for s in plan.slots]
    # equal bodies are one kernel: names of the user are in the title alone
    lines += [f"{t.name} = {t.derived.replace('_', ' ')}{' of ' * bool(t.derived)}{t.source}" for t in plan.tables]
    return "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")


def operator(node: Expr, args: list[Text]) -> Text | None:
    """The text of operators that depend on more than the operator; None: the table's row."""
    if node.op == "int" and node.args[0].type is BOOL:
        return Text(f"{args[0].inside(10)}.to(Int32)")
    if node.op in TENSORS or (node.op == "where" and all(a.op == "lit" for a in node.args[1:])):
        filled = [full(a, t) if a.op == "lit" else t for a, t in zip(node.args, args, strict=True)]
        return row(node, filled, LANGUAGE)
    return None


def full(node: Expr, text: Text) -> Text:
    """A vector of a number, as long as that of the positions."""
    return Text(f"cute.full(q_idx.shape, {text.text}, {TYPES.get(node.type, 'Float32')})")


class _Writer:
    """The writer of the functions of one plan."""

    def __init__(self, plan: LoopPlan, tables: tuple[str, ...], scalars: tuple[str, ...]) -> None:
        self.tables, self.scalars = tables, scalars
        self.types = {s.name: s.type for s in plan.slots} | {t.name: t.type for t in plan.tables}

    def function(self, name: str, root: Expr, guard: bool) -> str:
        # a function has numbers from x0 on, whatever was written before: texts are compared
        ours = {*self.tables, *self.scalars, *LANGUAGE.functions}
        names = Names({"grad", *POSITIONS.values(), *ours, "cute", "cutlass"})
        lines, value = assignments(root, LANGUAGE, self._leaf, lambda: names.numbered("x"), {})
        page = Page()
        with page.block(self.head(name)):
            page.line(*self._arguments(root), *lines)
            if name == "score_mod_bwd" and guard:
                page.line(f"return cute.where(grad == 0.0, 0.0, grad * {value.inside(8)})")
            elif name == "score_mod_bwd":
                page.line(f"return grad * {value.inside(8)}")
            else:
                page.line(f"return {(full(root, value) if root.op == 'lit' else value).text}")
        return str(page)

    def head(self, name: str) -> str:
        # the order in which FlashAttention 4 passes them
        first = {"score_mod": "score, ", "score_mod_bwd": "grad, score, "}.get(name, "")
        return f"def {name}({first}b, h, q_idx, kv_idx, seqlen_info, aux_tensors, aux_scalars=()):"

    def _arguments(self, root: Expr) -> list[str]:
        """The lines that name the tables and numbers that a function reads."""
        read = uses(root) | {n.name for n in walk(root) if n.op in ("lookup", "param")}
        lines = [f"{t} = aux_tensors[{i}]" for i, t in enumerate(self.tables) if t in read]
        for i, name in enumerate(self.scalars):
            axis = name.removeprefix("first ")
            if axis != name and axis in read:
                lines.append(f"{POSITIONS[axis]} = {POSITIONS[axis]} + aux_scalars[{i}]")
            elif name in read:
                kind = "Float32" if self.types.get(name) is FLOAT else "Int32"
                # as wide as the positions, which FlashAttention 4 gives as vectors
                number = f"cute.full(q_idx.shape, aux_scalars[{i}], {kind})"
                lines.append(f"{name} = {number}{' != 0' * (self.types.get(name) is BOOL)}")
        return lines

    def _leaf(self, node: Expr, args: list[Text]) -> Text | None:
        if node.op == "var":
            return Text(POSITIONS.get(node.name, node.name))
        if node.op == "param":
            return Text(node.name)
        if node.op == "lookup":
            at = [full(n, t) if n.op == "lit" else t for n, t in zip(node.args, args, strict=True)]
            read = f"entry({', '.join([node.name, *(t.text for t in at)])})"
            return Text(f"{read} != 0", 1) if node.type is BOOL else Text(read)
        return operator(node, args)
