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
from frisket.dsl.types import BOOL, INT, Type
from frisket.lowering.kernels.expr import PRECEDENCE, PREFIX, SHARED, Text
from frisket.lowering.simplify.facts import interval

CUTE: dict[str, str] = SHARED | {
    "bitnot": "inverted({})", "not": "{} ^ True",  # see `operator`
    "abs": "abs({})", "sign": "sign({})",
    "min": "minimum({}, {})", "max": "maximum({}, {})", "pow": "cute.math.pow({}, {})",
    "floordiv": "quotient({}, {})", "mod": "modulo({}, {})",
    "shl": "shifted_left({}, {})", "shr": "shifted_right({}, {})", "where": "cute.where({}, {}, {})",
    "int": "to_int({})", "float": "{}.to(Float32)", "floor": "to_int(cute.math.floor({}))",
    "exp": "cute.math.exp({})", "exp2": "cute.math.exp2({})", "log": "cute.math.log({})",
    "log2": "cute.math.log2({})", "log1p": "cute.math.log1p({})", "tanh": "cute.math.tanh({}, fastmath=True)",
    "sigmoid": "sigmoid({})", "sin": "cute.math.sin({})", "cos": "cute.math.cos({})", "tan": "cute.math.tan({})",
    "sqrt": "cute.math.sqrt({})", "rsqrt": "cute.math.rsqrt({})", "erf": "cute.math.erf({})",
    "isfinite": "finite({})", "random": "random({})",
}  # fmt: skip

PRELUDE: dict[str, str] = {
    "entry": '''
def entry(table, *index):
    """What a table holds at an index; past its ends, what it holds there."""
    at = tuple(cutlass.max(cutlass.min(i[0], n - 1), 0) for i, n in zip(index, table.shape))
    found = cute.make_rmem_tensor(1, table.element_type)
    found[0] = table[at]
    return found.load()
''',
    "inverted": """
def inverted(x):
    return -1 - x
""",
    "sign": """
def sign(x):
    one = cute.full_like(x, 1)
    return cute.where(x > 0, one, cute.where(x < 0, -one, x))
""",
    "minimum": """
def minimum(x, y):
    return cute.where((x <= y) | (x != x), x, y)
""",
    "maximum": """
def maximum(x, y):
    return cute.where((x >= y) | (x != x), x, y)
""",
    "quotient": """
def quotient(x, y):
    return cute.where(y == 0, 0, x // cute.where(y == 0, 1, y))
""",
    "modulo": """
def modulo(x, y):
    return cute.where(y == 0, 0, x - quotient(x, y) * y)
""",
    "remainder": """
def remainder(x, n):
    return x - x // n * n
""",
    "shifted_left": """
def shifted_left(x, y):
    inside = (y >= 0) & (y < 32)
    return cute.where(inside, cute.TensorSSA(x << cute.where(inside, y, 0), x.shape, Int32), 0)
""",
    "shifted_right": """
def shifted_right(x, y):
    inside = (y >= 0) & (y < 64)
    return cute.where(inside, cute.TensorSSA(x >> cute.where(inside & (y < 32), y, 31), x.shape, Int32), 0)
""",
    "to_int": """
def to_int(x):
    inside = minimum(maximum(x, -2147483520.0), 2147483520.0)
    return cute.where(x == x, inside, 0.0).to(Int32)
""",
    "sigmoid": """
def sigmoid(x):
    return 1.0 / (1.0 + cute.math.exp(-x))
""",
    "finite": """
def finite(x):
    return abs(x) < Float32.inf
""",
    "mix": """
def mix(x):
    x = (x ^ x // 65536) * Uint32(0x85EBCA6B)
    x = (x ^ x // 8192) * Uint32(0xC2B2AE35)
    return x ^ x // 65536
""",
    "random": """
def random(*counters):
    x = mix(counters[0].to(Uint32) + Uint32(0x9E3779B9))
    for c in counters[1:]:
        x = mix(x ^ c.to(Uint32) * Uint32(0x9E3779B1))
    return (x // 256).to(Int32).to(Float32) * 2.0**-24
""",
}
TYPES: dict[Type, str] = {BOOL: "Boolean", INT: "Int32"}  # Float32 beside them
BITS = 32
TENSORS = frozenset({"pow", "shl", "shr", "random"})  # operators that take no number in the place of a vector


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
        return Text(f"0 * {x.inside(PRECEDENCE['*'])}", PRECEDENCE["*"])
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
