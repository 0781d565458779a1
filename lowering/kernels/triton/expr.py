"""The operators of the language in Triton: one table of templates and the small functions it calls.

Meanings are those of `dsl.evaluate`, though Triton's own `//` and `%` round to zero; min and max hand NaN on. Nothing
here needs libdevice, so all of it runs in Triton's interpreter too.
"""

from __future__ import annotations

from frisket.dsl.ir import Expr
from frisket.dsl.types import FLOAT
from frisket.lowering.kernels.language import SHARED, SHIFTS, TRUNCATED, Language, Text, calls
from frisket.lowering.kernels.text import filled, parts, words

_OF_ONE = """
abs:tl.abs int:to_int exp:tl.exp exp2:tl.exp2 log:tl.log log2:tl.log2 tanh:tanh sigmoid:tl.sigmoid sin:tl.sin
cos:tl.cos sqrt:tl.sqrt_rn rsqrt:tl.rsqrt erf:tl.erf seeded:seeded uniform:uniform
"""
_OF_TWO = "min:tl.minimum max:tl.maximum stirred:stirred"
TRITON: dict[str, str] = SHARED | SHIFTS | TRUNCATED | calls("{}", _OF_ONE) | calls("{}, {}", _OF_TWO)
TRITON |= {"not": "~{}", "where": "tl.where({}, {}, {})", "float": "{}.to(tl.float32)", "floor": "to_int(tl.floor({}))"}


FUNCTIONS = filled(parts(__package__, "functions")["functions"])
_FUNCTIONS = FUNCTIONS.removeprefix("def ").split("\n\ndef ")
PRELUDE = {text.split("(")[0]: f"\n\n@triton.jit\ndef {text.strip()}\n" for text in _FUNCTIONS}

# With 16-bit inputs the cancellation near 0 (1e-7) is far below the rounding of the result.
TANH_16 = """

@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))
"""
NAN_AWARE = ", propagate_nan=tl.PropagateNan.ALL)"


def operator(node: Expr, args: list[Text]) -> Text | None:
    """The text of operators that depend on more than the operator; None: the table's row."""
    if node.op in ("min", "max") and node.type is FLOAT:
        return Text(TRITON[node.op].format(*(a.text for a in args))[:-1] + NAN_AWARE)
    if node.op == "int" and node.args[0].type is not FLOAT:
        return Text(f"{args[0].inside(10)}.to(INT)")
    return None


def _number(value: bool | int | float) -> str:
    # Triton reads subnormal constants as float64
    tiny = isinstance(value, float) and 0 < abs(value) < 2.0**-126
    return f"tl.cast({value!r}, tl.float32)" if tiny else repr(value)


def language(half: bool = False, int64: bool = False) -> Language:
    """Triton with Ints of 64 bits or of 32, for inputs of 16 bits (`half`) or of 32."""
    constants = {
        "INT": "tl.int64" if int64 else "tl.int32",
        "LARGEST": "4611686018427387904.0" if int64 else "2147483520.0",
        "INTERPRETED": "triton.knobs.runtime.interpret",
    }
    return Language(
        "Triton",
        TRITON,
        _number,
        infinity="INFINITY",
        nan='float("nan")',
        single=True,
        bits=64 if int64 else 32,
        functions=PRELUDE | {"tanh": TANH_16} if half else PRELUDE,
        constants={name: f"{name} = tl.constexpr({value})\n" for name, value in constants.items()},
        further=frozenset(words("".join(PRELUDE.values()) + " tl triton INFINITY LOG2E LN2")),
        nameless=frozenset({"seeded", "stirred"}),
    )


LANGUAGE = language()


def prelude(source: str, language: Language) -> str:
    """The constants and functions that `source` uses, each under `@triton.jit`."""
    constants, functions = language.prelude(source)
    return "".join(constants + functions)
