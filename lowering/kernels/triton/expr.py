"""The operators of the language in Triton: one table of templates and the small functions it calls.

Meanings are those of `dsl.evaluate`: `//` and `%` round to minus infinity (Triton's own round to zero), a division
by zero and a shift outside 0..63 give 0, min and max hand NaN on. Nothing here needs libdevice, so all of it runs
in Triton's interpreter too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import numpy as np

from frisket.dsl.ir import Expr, walk
from frisket.dsl.types import FLOAT
from frisket.lowering.kernels.expr import PREFIX, SHARED, Language, Text, calls
from frisket.lowering.kernels.text import filled, parts
from frisket.lowering.simplify.affine import interval

_OF_ONE = """
abs:tl.abs sign:sign int:to_int exp:tl.exp exp2:tl.exp2 log:tl.log log2:tl.log2 log1p:log1p tanh:tanh
sigmoid:tl.sigmoid sin:tl.sin cos:tl.cos tan:tan sqrt:tl.sqrt_rn rsqrt:tl.rsqrt erf:tl.erf isfinite:finite
random:uniform
"""
_OF_TWO = """
min:tl.minimum max:tl.maximum pow:power floordiv:floordiv mod:modulo shl:shift_left shr:shift_right wrap:wrapped
"""
TRITON: dict[str, str] = SHARED | calls("{}", _OF_ONE) | calls("{}, {}", _OF_TWO)
TRITON |= {"not": "~{}", "where": "tl.where({}, {}, {})", "float": "{}.to(tl.float32)", "floor": "to_int(tl.floor({}))"}
LANGUAGE = Language("Triton", TRITON)


def power(name: str, kind: str) -> str:
    """x to the power of y, in Floats of one kind: C's `pow`, without a library."""
    return f"""
def {name}(x, y):
    x, y = tl.broadcast(x, tl.cast(y, {kind}))
    whole = tl.floor(y) == y
    odd = whole & (2.0 * tl.floor(0.5 * y) != y)
    negative = (x < 0) | ((x == 0) & (1.0 / x < 0))
    size = tl.exp2(y * tl.log2(tl.abs(x)))
    size = tl.where((tl.abs(x) == 1.0) & (y == y), 1.0, size)
    signed = tl.where(negative & odd, -size, size)
    signed = tl.where((x < 0) & (x > -INFINITY) & ~whole, float("nan"), signed)
    return tl.where((y == 0.0) | (x == 1.0), 1.0, signed)
"""


FUNCTIONS = filled(
    parts(__package__, "functions")["functions"], power=power("power", "tl.float32").strip().splitlines()
)
PRELUDE = {text.split("(")[0]: f"\ndef {text.strip()}\n" for text in FUNCTIONS.removeprefix("def ").split("\n\ndef ")}

# With 16-bit inputs the cancellation near 0 (1e-7) is far below the rounding of the result.
TANH_16 = """
def tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))
"""
NAN_AWARE = ", propagate_nan=tl.PropagateNan.ALL)"


def operator(node: Expr, args: list[Text], int64: bool) -> Text | None:
    """The text of operators that depend on more than the operator; None: the table's row."""
    if node.op == "lit":
        return literal(node.name)
    if node.op in ("min", "max") and node.type is FLOAT:
        return Text(TRITON[node.op].format(*(a.text for a in args))[:-1] + NAN_AWARE)
    if node.op in ("floordiv", "mod") and node.args[1].op == "lit" and node.args[1].name > 0:
        least, _ = interval(node.args[0])
        if least is not None and least >= 0:  # then Triton rounds as the language does
            sign = "//" if node.op == "floordiv" else "%"
            return Text(f"{args[0].inside(7)} {sign} {args[1].text}", 7)
    if node.op in ("shl", "shr") and node.args[1].op == "lit":
        n, bits = node.args[1].name, 64 if int64 else 32
        if node.op == "shr" and bits <= n < 64:
            n = bits - 1  # only the sign is left
        if 0 <= n < bits:
            return Text(f"{args[0].inside(5)} {'<<' if node.op == 'shl' else '>>'} {n}", 5)
        return Text("tl.cast(0, INT)")
    if node.op == "int" and node.args[0].type is not FLOAT:
        return Text(f"{args[0].inside(10)}.to(INT)")
    if node.op == "random":
        state = f"seeded({args[0].text})"
        for counter in args[1:]:
            state = f"stirred({state}, {counter.text})"
        return Text(f"uniform({state})")
    return None


def decisive(roots: Iterable[Expr]) -> set[Expr]:
    """The Floats that decide an Int or a Bool. A GPU's own division is off by some units in the last place, so the
    floor of 41 / 41 may be 0, in tiles that were planned with 1; `tl.div_rn` rounds correctly."""
    crossed = [n for n in walk(*roots) if n.type is not FLOAT and any(a.type is FLOAT for a in n.args)]
    return {n for n in walk(*crossed) if n.type is FLOAT}


def literal(value: bool | int | float) -> Text:
    """The text of a literal, `5`, `-0.5`, `INFINITY`, as Triton reads it, Float being float32."""
    if isinstance(value, float):
        with np.errstate(over="ignore", under="ignore"):
            rounded = float(np.float32(value))
        if math.isnan(rounded):
            return Text('float("nan")')
        if math.isinf(rounded):
            return Text("INFINITY") if rounded > 0 else Text("-INFINITY", PREFIX)
        if 0 < abs(value) < 2.0**-126:
            return Text(f"tl.cast({value!r}, tl.float32)")  # Triton reads subnormal constants as float64
    return Text(repr(value), PREFIX if isinstance(value, (int, float)) and repr(value)[0] == "-" else 10)


def prelude(source: str, dtype: str, int64: bool) -> str:
    """The constants and functions that `source` uses, each under `@triton.jit`."""
    used = [name for name in PRELUDE if name in words(source)]
    if "tanh_approximate" in used and "tanh" not in used:
        used.insert(0, "tanh")
    if "among" in used and "one_of" not in used:  # it calls one_of in the interpreter
        used.insert(0, "one_of")
    if "seeded" in used:  # which calls it
        used.insert(0, "mix")
    bodies = {n: TANH_16 if n == "tanh" and dtype != "float32" else PRELUDE[n] for n in used}
    text = "".join(bodies.values()) + source
    constants = {
        "INT": "tl.int64" if int64 else "tl.int32",
        "BITS": "64" if int64 else "32",
        "LARGEST": "4611686018427387904.0" if int64 else "2147483520.0",
        "INTERPRETED": "triton.knobs.runtime.interpret",
    }
    lines = [f"{n} = tl.constexpr({v})\n" for n, v in constants.items() if n in words(text)]
    return "".join(lines) + "".join(f"\n\n@triton.jit{b}" for b in bodies.values())


def words(source: str) -> set[str]:
    """The identifiers of a text."""
    return set(re.findall(r"[A-Za-z_]\w*", source))


def all_names() -> Iterable[str]:
    """The names that a user's name may not shadow."""
    return {*PRELUDE, *words("".join(PRELUDE.values())), "tl", "triton", "INFINITY", "LOG2E", "LN2"}
