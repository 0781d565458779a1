"""The operators of the language in C++, for single numbers and for vectors of keys alike.

What is known per call, batch entry and head (`fixed.x`) or per query (`row.x`) is a single number. What depends on
the key (`column.x`) or the score is a vector with a lane for every key. The functions are those of functions.hpp
and integers.hpp, overloaded for both; meanings are those of `dsl.evaluate`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import Expr, build, lit, make, substitute, transform, uses, var, walk
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.kernels import expr as exprs
from frisket.lowering.kernels.language import ASSOCIATIVE, PREFIX, SHARED, SHIFTS, Language, Text, calls
from frisket.lowering.kernels.legalise import legalise

_OF_ONE = """
abs:magnitude sign:sign int:to_int float:to_real exp:exp exp2:exp2 log:log log2:log2 log1p:log1p tanh:tanh
sigmoid:sigmoid sin:sin cos:cos tan:tan sqrt:sqrt rsqrt:rsqrt erf:erf isfinite:finite
seeded:seeded uniform:uniform wrapping_neg:wrapping_neg
"""
_OF_TWO = """
min:minimum max:maximum pow:power floordiv:floordiv mod:modulo shl:shift_left shr:shift_right wrap:wrapped
stirred:stirred wrapping_add:wrapping_add wrapping_sub:wrapping_sub wrapping_mul:wrapping_mul
wrapping_shl:shift_left wrapping_pow:power
"""
CPP: dict[str, str] = SHARED | SHIFTS | calls("{}", _OF_ONE) | calls("{}, {}", _OF_TWO)
CPP |= {"not": "!{}", "where": "select({}, {}, {})", "floor": "to_int(floor({}))"}


def number(value: bool | int | float, long: str = "LL") -> str:
    """The text of a finite number; `long` is behind integers of more than 32 bits."""
    if isinstance(value, bool):
        return str(value).lower()
    # C reads the literal as a minus before a number that fits no type
    if value == -(2**63) and isinstance(value, int):
        return "INT64_MIN"
    return f"{value}{long}" if isinstance(value, int) and abs(value) >= 2**31 else repr(value)


def _single(value: bool | int | float) -> str:
    return f"{np.float32(value)!s}f" if isinstance(value, float) else number(value)


DOUBLE = Language("C++", CPP, number, "INF", "NOT_A_NUMBER", bits=64)
SINGLE = replace(DOUBLE, number=_single, single=True)


def language(double: bool, int64: bool) -> Language:
    """C++ with Floats and Ints of 64 bits, or of 32."""
    return replace(DOUBLE if double else SINGLE, bits=64 if int64 else 32)


_SIGNS = ("|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* /")  # from loose to tight
BINDS = {sign: n for n, signs in enumerate(_SIGNS, 1) for sign in signs.split()}
COMPARES = {"==", "!=", "<", "<=", ">", ">="}
WORD = ("seeded", "stirred")  # operators with a 32-bit word for a value
FIRST = var("first")  # the first key of a vector
# sums of a row are known at its end, after everything else
WHEN = {**exprs.LEVELS, "first": exprs.COLUMN, "total": exprs.POSITION, "count": exprs.POSITION}
VARIABLES = {"q": "row.q", "k": "column.k", "first": "column.first"} | {n: n for n in ("score", "total", "count")}
CPP_TYPES = {INT: ("Int", "Ints"), FLOAT: ("Real", "Vec"), BOOL: ("bool", "Bits")}  # of one value, and of a vector
SPREAD = {INT: "ints({})", FLOAT: "reals({})", BOOL: "bits({})"}


def prepared(root: Expr, language: Language, paged: Collection[str] = ()) -> Expr:
    """Prepare Exprs for vectors of keys. Lookups along the keys become vector loads from one first index. In
    float32 a division by a number becomes a product, a tenth of its price. `paged` names tables that are read by page
    and place within: no vector crosses its end."""
    root = transform(root, lambda e: _prepared(_product(e) if language.single else e, paged))
    return legalise(root, language)


def parted(root: Expr) -> Expr:
    """An equal Expr whose remainders and quotients depend on the query or on the key alone, known once per row or once
    per vector of keys: `(q - k) % n == 0` is `q % n == k % n`."""
    return transform(transform(root, exprs.same_remainder), _joined)


def _joined(e: Expr) -> Expr:
    sides = exprs.sides_of(e, "mod", "floordiv")
    if sides is None:
        return e
    n = e.args[1]
    positive = n.op == "lit" and n.name > 0
    if positive and n.name & (n.name - 1) == 0:
        return e  # a shift or an `and` takes no longer
    row, column = (build("mod", side, n) for side in sides)
    gap = row - column
    below = gap < 0 if positive else build("and", build("ne", gap, lit(0)), build("bitxor", gap, n) < 0)
    if e.op == "mod":
        return build("where", below, gap + n, gap)
    quotients = [build("floordiv", side, n) for side in sides]
    return quotients[0] - quotients[1] - build("int", below)


def liftable(e: Expr) -> bool:
    """Whether a literal of a prepared Expr is a number of the call. Then `softcap(30)` and `softcap(50)` are one
    kernel. All Floats are but those that decide signs and powers of two, and those that no float32 is near."""
    if e.op != "lit" or e.type is not FLOAT:
        return False
    size = abs(e.name)
    return 1e-30 < size < 1e30 and math.frexp(size)[0] != 0.5


def _product(e: Expr) -> Expr:
    # reciprocals of numbers near the ends of float32 lose digits or overflow
    if e.op != "div" or e.args[1].op != "lit" or not 1e-30 < abs(e.args[1].name) < 1e30:
        return e
    return build("mul", e.args[0], lit(1 / e.args[1].name))


def _prepared(e: Expr, paged: Collection[str]) -> Expr:
    if e.op != "lookup":
        return e
    inside = e.name in paged
    axes = {i: _step(a) or int(inside and _place(a)) for i, a in enumerate(e.args) if not _one(a, inside)}
    # a vector is read along one axis, by steps of 1 or -1
    if len(axes) != 1 or not (step := next(iter(axes.values()))):
        return e
    first = (substitute(a, {var("k"): FIRST}) for a in e.args)
    return make("ahead" if step == 1 else "behind", (lit(next(iter(axes))), *first), e.name, e.type)


def _one(e: Expr, inside: bool) -> bool:
    """Whether all keys of a vector give one value; `inside` one page, its number and values looked up by it do."""
    if not _wide(e):
        return True
    return inside and (_paged(e, "shr", "floordiv") or (e.op == "lookup" and all(_one(a, True) for a in e.args)))


def _place(e: Expr) -> bool:
    """Whether an Expr is the place of a key within its page."""
    return _paged(e, "bitand", "mod")


def _paged(e: Expr, by_bits: str, divided: str) -> bool:
    return e.op in (by_bits, divided) and _step(e.args[0]) == 1 and e.args[1].op == "lit"


def _wide(e: Expr) -> bool:
    """Whether the value of a node is a vector, because it depends on the key or the score."""
    return bool(uses(e) & {"k", "score"}) or any(n.op in ("ahead", "behind") for n in walk(e))


def _step(e: Expr) -> int:
    """The step of an Int along the keys: 1 or -1 where it is k or -k plus a term free of the keys, otherwise 0."""
    if e is var("k"):
        return 1
    if e.op == "neg":
        return -_step(e.args[0])
    wide = [_wide(a) for a in e.args] if e.op in ("add", "sub") else []
    if sum(wide) != 1:
        return 0
    return (-1 if wide[1] and e.op == "sub" else 1) * _step(e.args[wide.index(True)])


class Forms:
    """The text of each node of these roots. `names` are the C++ names of the plan's tables and slots, `lifted` those of
    literals that come with the call."""

    def __init__(
        self, roots: list[Expr], names: Mapping[str, str], double: bool, int64: bool, lifted: Mapping[Expr, str]
    ) -> None:
        self.names, self.lifted, self.unlike = names, lifted, int64 != double
        self.level = exprs.levels(*roots, when=WHEN)
        self.wide: dict[Expr, bool] = {}
        for node in walk(*roots):
            varies = node.op in ("ahead", "behind") or (node.op == "var" and node.name in ("k", "score"))
            self.wide[node] = varies or any(self.wide[a] for a in node.args)

    def type(self, node: Expr) -> str:
        """The C++ type of a value."""
        one, many = ("Word", "Words") if node.op in WORD else CPP_TYPES[node.type]
        return many if self.wide[node] else one

    def leaf(self, node: Expr, args: list[Text]) -> Text | None:
        """The text of a node, given the texts of its arguments; None: that of a literal."""
        if node in self.lifted:
            return Text(f"fixed.{self.lifted[node]}")
        if node.op == "var":
            return Text(VARIABLES.get(node.name, f"fixed.{node.name}"))
        if node.op == "distance":
            return Text(f"load<Vec>(column.distances + {node.name} * SPAN - row.q)")
        if node.op in ("param", "lookup", "ahead", "behind") and node.name not in self.names:
            raise LoweringError(f"`{node.name}` is neither a slot nor a table of the plan; make it one first")
        if node.op == "param":
            return Text(f"fixed.{self.names[node.name]}")
        if node.op in ("lookup", "ahead", "behind"):
            kind = "gather" if node.op == "lookup" and self.wide[node] else "at" if node.op == "lookup" else node.op
            if kind == "gather":
                args = self._spread(node, args)
            elif kind != "at":
                axis, *args = args
                kind += f"<{axis.text}>"
            return Text(f"{kind}({', '.join([f'fixed.{self.names[node.name]}', *(a.text for a in args)])})")
        return None if node.op == "lit" else self._operator(node, args)

    def _operator(self, node: Expr, args: list[Text]) -> Text:
        row = CPP.get(node.op)
        if row is None:
            raise exprs.unknown(node, DOUBLE.name)
        infix = re.fullmatch(r"\{\} (\S+) \{\}", row)
        if infix is None and row[0] not in "-~!":
            args = self._spread(node, args)  # functions are overloaded for numbers or for vectors, not for both at once
            return Text(row.format(*(a.text for a in args)))
        if infix is None:
            symbol = "~" if node.op == "not" and self.wide[node] else row[0]
            return Text(symbol + args[0].inside(PREFIX + 1), PREFIX)
        if node.args[0].type is BOOL:
            args = self._spread(node, args)
        symbol = infix[1]
        binds = BINDS[symbol]
        within = BINDS["<<"] if symbol in "&|^" else binds
        parts = [args[0].inside(within), *(a.inside(within + (symbol not in ASSOCIATIVE)) for a in args[1:])]
        text = Text(f" {symbol} ".join(parts), binds)
        # lanes of a comparison of Ints are as wide as these, Bits as wide as a Real
        if symbol in COMPARES and self.wide[node] and node.args[0].type is INT and self.unlike:
            return Text(f"flags({text.text})")
        return text

    def _spread(self, node: Expr, args: list[Text]) -> list[Text]:
        """Texts of single numbers among vectors, copied to every lane."""
        if not self.wide[node]:
            return args
        return [
            a if self.wide[n] else Text((SPREAD[n.type] if n.op not in WORD else "words({})").format(a.text))
            for n, a in zip(node.args, args, strict=True)
        ]
