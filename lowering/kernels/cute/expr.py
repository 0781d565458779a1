"""The operators of the language in CuTe DSL: one table of templates and the small functions it calls.

FlashAttention 4 calls a mask or score mod with vectors (`cute.TensorSSA`) of positions and scores, and expressions are
printed on those: 32-bit Ints, Floats of 32 bits. Meanings are those of `dsl.evaluate`. CuTe's own `%` rounds to zero,
its `//` to minus infinity; its `~`, `<<` and `>>` give vectors that no other operator takes, so `legalise` writes them
as `^ True`, `*` and `//`; its maximum loses NaN.
"""

from __future__ import annotations

from frisket.dsl.ir import Expr
from frisket.dsl.types import BOOL, INT, Type
from frisket.lowering.kernels.expr import operator as row
from frisket.lowering.kernels.language import SHARED, Language, Text, calls
from frisket.lowering.kernels.text import parts

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
    "CuTe",
    CUTE,
    infinity="Float32.inf",
    nan='Float32(float("nan"))',
    functions=parts(__package__, "functions"),
)

TYPES: dict[Type, str] = {BOOL: "Boolean", INT: "Int32"}  # Float32 beside them
TENSORS = frozenset({"pow", "lshift", "rshift", "random"})  # operators that take no number in the place of a vector


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


def prelude(source: str) -> str:
    """The functions that a text uses, each below those that it uses itself."""
    return "".join(f"\n{text}" for text in LANGUAGE.prelude(source)[1])
