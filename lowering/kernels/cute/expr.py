"""The operators of the language in CuTe DSL: one table of templates and the small functions it calls.

FlashAttention 4 calls a mask or score mod with vectors (`cute.TensorSSA`) of positions and scores, and expressions are
printed on those: 32-bit Ints, Floats of 32 bits. Meanings are those of `dsl.evaluate`. CuTe's own `%` rounds to zero,
its `//` to minus infinity; its `~`, `<<` and `>>` give vectors that no other operator takes, so they are written as
`^ True`, `*` and `//`; its maximum loses NaN.
"""

from __future__ import annotations

import math
import re

from frisket.dsl.ir import Expr
from frisket.dsl.transfer import interval
from frisket.dsl.types import BOOL, INT, Type
from frisket.lowering.kernels.expr import PRECEDENCE, PREFIX, SHARED, Language, Text, calls
from frisket.lowering.kernels.text import parts

_OF_ONE = """
abs:abs sign:sign int:to_int sigmoid:sigmoid isfinite:finite random:random
exp:cute.math.exp exp2:cute.math.exp2 log:cute.math.log log2:cute.math.log2 log1p:cute.math.log1p
sin:cute.math.sin cos:cute.math.cos tan:cute.math.tan sqrt:cute.math.sqrt rsqrt:cute.math.rsqrt erf:cute.math.erf
"""
_OF_TWO = """
min:minimum max:maximum pow:cute.math.pow floordiv:quotient mod:modulo shl:shifted_left shr:shifted_right wrap:wrapped
"""
CUTE: dict[str, str] = SHARED | calls("{}", _OF_ONE) | calls("{}, {}", _OF_TWO)
CUTE |= {"bitnot": "inverted({})", "not": "{} ^ True"}  # see `operator`
CUTE |= {"where": "cute.where({}, {}, {})", "float": "{}.to(Float32)", "floor": "to_int(cute.math.floor({}))"}
CUTE |= {"tanh": "cute.math.tanh({}, fastmath=True)"}
LANGUAGE = Language("CuTe", CUTE)

PRELUDE = parts(__package__, "functions")
TYPES: dict[Type, str] = {BOOL: "Boolean", INT: "Int32"}  # Float32 beside them
BITS = 32
TENSORS = frozenset({"pow", "shl", "shr", "wrap", "random"})  # operators that take no number in the place of a vector


def operator(node: Expr, args: list[Text]) -> Text | None:
    """The text of operators that depend on more than the operator; None: the table's row."""
    if node.op == "lit":
        return literal(node.name)
    if node.op == "not":
        return Text(f"{args[0].inside(PRECEDENCE['^'])} ^ True", PRECEDENCE["^"])
    if node.op in ("floordiv", "mod") and node.args[1].op == "lit":
        return _divided(node, args[0])
    if node.op in ("shl", "shr") and node.args[1].op == "lit":
        return _shifted(node, args[0])
    if node.op == "int" and node.args[0].type is BOOL:
        return Text(f"{args[0].inside(10)}.to(Int32)")
    if node.op in TENSORS or (node.op == "where" and all(a.op == "lit" for a in node.args[1:])):
        filled = [full(a, t) if a.op == "lit" else t for a, t in zip(node.args, args, strict=True)]
        return Text(CUTE[node.op].replace("({})", "({}" + ", {}" * (len(filled) - 1) + ")").format(*map(_text, filled)))
    return None


def _text(x: Text) -> str:
    return x.text


def _divided(node: Expr, x: Text) -> Text:
    n, (least, _) = node.args[1].name, interval(node.args[0])
    if n == 0:
        return Text(f"0 * {x.inside(PRECEDENCE['*'])}", PRECEDENCE["*"])  # a plain 0 has no shape
    if node.op == "floordiv":
        return Text(f"{x.inside(7)} // {_inside(n)}", 7)
    if n > 0 and least is not None and least >= 0:  # then CuTe rounds as the language does
        return Text(f"{x.inside(7)} % {n}", 7)
    return Text(f"remainder({x.text}, {n})")


def _shifted(node: Expr, x: Text) -> Text:
    n = node.args[1].name
    if not 0 <= n < (BITS if node.op == "shl" else 64):
        return Text(f"0 * {x.inside(7)}", 7)
    if node.op == "shl":
        # 2**31 is no Int32, and -(2**31) has its bits
        return Text(f"{x.inside(7)} * {2**n if n < BITS - 1 else -(2**n)}", 7)
    return Text(f"{x.inside(7)} // {2**n}" if n < BITS - 1 else f"{x.inside(7)} // {2**30} // 2", 7)


def _inside(n: int) -> str:
    return f"({n})" if n < 0 else str(n)


def literal(value: bool | int | float) -> Text:
    """The text of a literal, `5`, `-0.5`, `Float32.inf`."""
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return Text('Float32(float("nan"))')
        return Text("Float32.inf") if value > 0 else Text("-Float32.inf", PREFIX)
    return Text(repr(value), PREFIX if repr(value)[0] == "-" else 10)


def full(node: Expr, text: Text) -> Text:
    """A vector of a number, as long as that of the positions."""
    return Text(f"cute.full(q_idx.shape, {text.text}, {TYPES.get(node.type, 'Float32')})")


def prelude(source: str) -> str:
    """The functions that a text uses, each below those that it uses itself."""
    used, names = set[str](), words(source)
    while new := [n for n in PRELUDE if n in names and n not in used]:
        used.update(new)
        names |= words("".join(PRELUDE[n] for n in new))
    return "".join(f"\n{PRELUDE[n]}" for n in PRELUDE if n in used)


def words(source: str) -> set[str]:
    """The identifiers of a text."""
    return set(re.findall(r"[A-Za-z_]\w*", source))
