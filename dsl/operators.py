"""The typing of every operator: accepted types, conversions, and error texts.

A name that nothing declares gets its type from use. Its occurrences carry the name in `Value.flex`; operators
narrow what it can be, and the checker starts again when a guess has changed.

A built-in function has a signature, a number of arguments, and a meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from . import ir
from .errors import CALL_KEYWORDS, Span, TextProblem
from .ir import FLOAT_FUNCTIONS, Expr, build, lit, nest, to_float
from .library import Definition
from .parse import Node
from .types import BOOL, FLOAT, INT, Type, axes

NUMBERS, INTS = frozenset({INT, FLOAT}), frozenset({INT})


class Value(NamedTuple):
    """The elaborated value of a node; `expr` is None after an error, `flex` names parameters that decide the type."""

    expr: Expr | None
    flex: frozenset[str] = frozenset()


@dataclass
class Frame:
    """The scope of a lookup: the text itself, or the body of a definition at one of its calls."""

    text: str
    names: dict[str, Value | str]  # a value, or the name of a parameter or table passed on
    site: Node | None = None  # in a library body: the call in the user's text
    definition: Definition | None = None
    parent: Frame | None = None
    depth: int = 0


@dataclass
class Guess:
    """The type and rank known so far of an undeclared parameter."""

    span: Span
    allowed: frozenset[Type] = frozenset({BOOL, INT, FLOAT})
    floating: bool = False  # stands with a Float
    logical: bool = False  # stands in `&`, `|`, `~` or `^`
    rank: int | None = None

    @property
    def type(self) -> Type:
        wish = (FLOAT, self.floating), (BOOL, self.logical), (INT, True), (FLOAT, True), (BOOL, True)
        return next(t for t, applies in wish if applies and t in self.allowed)


Part = tuple[Node, Value]
ERROR = Value(None)
# a sign of Bools and of Ints means the operator of Bools: `logic` finds that of Ints by the types
SIGNS = {sign: op for op, sign in ir.INFIX.items() if op not in ir.ON_INT.values()} | {op: op for op in ir.ON_INT}
ON_INTS = frozenset({"//", "%", "<<", ">>"})


@dataclass
class Operators:
    """The typing rules of operators. The checker subclasses them and knows where values come from."""

    text: str
    name: str = "mask"
    problems: dict[Span, TextProblem] = field(default_factory=dict)  # one per place: the first is the cause
    guesses: dict[str, Guess] = field(default_factory=dict)
    changed: bool = False

    # -- saying it ----------------------------------------------------------------------------------

    def report(self, frame: Frame, node: Node, message: str, remedy: str = "", more: str = "") -> Value:
        """Record one problem. Inside a definition of the library the problem stands at the call, and its remedy is the
        definition, with `more` before it."""
        if frame.site is not None:
            inner = frame.definition
            assert inner is not None
            message, node = f"in `{inner.signature}`: {message}", frame.site
            remedy = "; ".join(filter(None, (more, f"it is `def {inner.signature} = {inner.formula}`")))
        self.problems.setdefault(node.span, TextProblem(message, node.span, remedy))
        return ERROR

    def quote(self, frame: Frame, node: Node) -> str:
        # a quote of several lines would break the layout of an error
        text = " ".join(frame.text[node.start : node.stop].split())
        return f"`{text}`" if len(text) <= 60 else f"`{text[:57]}...`"

    # -- what an undeclared name can be -------------------------------------------------------------

    def narrow(self, frame: Frame, node: Node, value: Value, allowed: Iterable[Type]) -> bool:
        """Whether the type of `value` is allowed, once its undeclared names are given one."""
        allowed = frozenset(allowed)
        for name in value.flex:
            guess = self.guesses[name]
            both = guess.allowed & allowed
            if not both:
                kinds, types = _types(guess.allowed), _types(allowed)
                self.report(frame, node, f"`{name}` is {kinds} elsewhere and {types} here", _declare(name, guess.rank))
                return False
            self._update(guess, both, guess.floating, guess.logical)
        return value.expr is not None and value.expr.type in allowed

    def prefer(self, value: Value, type: Type) -> None:
        for name in value.flex:
            g = self.guesses[name]
            self._update(g, g.allowed, g.floating or type is FLOAT, g.logical or type is BOOL)

    def _update(self, guess: Guess, allowed: frozenset[Type], floating: bool, logical: bool) -> None:
        before = guess.type
        guess.allowed, guess.floating, guess.logical = allowed, floating, logical
        self.changed |= guess.type is not before

    # -- operands -----------------------------------------------------------------------------------

    def numbers(self, frame: Frame, label: str, parts: Sequence[Part]) -> tuple[list[Expr], frozenset[str]] | None:
        """The operands brought to one number type, and the names that decide that type."""
        exprs = self._operands(frame, label, parts, NUMBERS)
        return None if exprs is None else self.joined([v for _, v in parts], exprs)

    def joined(self, values: Sequence[Value], exprs: list[Expr]) -> tuple[list[Expr], frozenset[str]]:
        flex = frozenset[str]().union(*(v.flex for v in values))
        if any(e.type is FLOAT for e in exprs):
            for value in values:
                self.prefer(value, FLOAT)
            # a Float without undeclared names decides the type: the names decide nothing any more
            if any(e.type is FLOAT and not v.flex for v, e in zip(values, exprs)):
                flex = frozenset()
            exprs = [to_float(e) for e in exprs]
        return exprs, flex

    def integers(self, frame: Frame, label: str, parts: Sequence[Part], remedy: str = "") -> list[Expr] | None:
        return self._operands(frame, label, parts, INTS, remedy)

    def _operands(
        self, frame: Frame, label: str, parts: Sequence[Part], allowed: frozenset[Type], remedy: str = ""
    ) -> list[Expr] | None:
        good = True  # no early return: every operand gets its error
        for node, value in parts:
            if not self.narrow(frame, node, value, allowed) and value.expr is not None:
                good = False
                shown = self.quote(frame, node)
                kinds = "Ints" if allowed is INTS else "numbers"
                message = f"{label} takes {kinds}, {shown} is {value.expr.type.with_article}"
                self.report(frame, node, message, remedy or f"write `{_cast(shown)}`")
        exprs = [v.expr for _, v in parts if v.expr is not None]
        return exprs if good and len(exprs) == len(parts) else None

    def boolean(self, frame: Frame, node: Node, value: Value, label: str) -> Expr | None:
        if self.narrow(frame, node, value, {BOOL}):
            return value.expr
        if value.expr is not None:
            shown = self.quote(frame, node)
            message = f"{label} takes a Bool, {shown} is {value.expr.type.with_article}"
            self.report(frame, node, message, f"compare it with something, for example `{_compared(shown)}`")
        return None

    # -- operators ----------------------------------------------------------------------------------

    def binary(self, frame: Frame, sign: str, parts: Sequence[Part]) -> Value:
        if sign in ON_INTS:
            remedy = "" if sign != "//" else "for Floats write `floor(x / y)`"
            ints = self.integers(frame, f"`{sign}`", parts, remedy)
            return ERROR if ints is None else Value(build(SIGNS[sign], *ints))
        if sign == "**":
            return self.power(frame, parts)
        operands = self.numbers(frame, f"`{sign}`", parts)
        if operands is None:
            return ERROR
        (x, y), flex = operands
        if sign == "/":
            for _, value in parts:
                self.prefer(value, FLOAT)
            return Value(build("div", to_float(x), to_float(y)))
        return Value(build(SIGNS[sign], x, y), flex)

    def power(self, frame: Frame, parts: Sequence[Part]) -> Value:
        (_, base), (_, exponent) = parts
        operands = self.numbers(frame, "`**`", parts)
        if operands is None or base.expr is None or exponent.expr is None:
            return ERROR
        # a negative or unknown exponent has no Int as result
        literal = exponent.expr.op == "lit" and exponent.expr.type is INT and exponent.expr.name >= 0
        if literal and base.expr.type is INT:
            return Value(build("pow", base.expr, exponent.expr), base.flex)
        for _, value in parts:
            self.prefer(value, FLOAT)
        x, y = (to_float(e) for e in operands[0])
        return Value(build("pow", x, y))

    def chain(self, frame: Frame, signs: Sequence[str], parts: Sequence[Part]) -> Value:
        """`0 <= q - k < w` is `0 <= q - k & q - k < w`."""
        links = [self.compare(frame, s, parts[i : i + 2]).expr for i, s in enumerate(signs)]
        good = [e for e in links if e is not None]
        if len(good) < len(links):
            return ERROR
        return Value(good[0] if len(good) == 1 else build("and", *good))

    def compare(self, frame: Frame, sign: str, parts: Sequence[Part]) -> Value:
        (_, x), (_, y) = parts
        if sign in ("==", "!="):  # `<` takes numbers alone: Bools have no order
            self._agree(frame, parts)
            if x.expr is not None and y.expr is not None and x.expr.type is y.expr.type is BOOL:
                return Value(build(SIGNS[sign], x.expr, y.expr))
        operands = self.numbers(frame, f"`{sign}`", parts)
        return ERROR if operands is None else Value(build(SIGNS[sign], *operands[0]))

    def _agree(self, frame: Frame, parts: Sequence[Part], number: bool = False) -> None:
        """Narrow the undeclared names of two operands that have one type. `number`: a name is computed with."""
        for (node, value), (_, other) in (parts, parts[::-1]):
            if value.expr is None or other.expr is None or not value.flex:
                continue
            if other.flex and number:  # `y + k`
                self.narrow(frame, node, value, NUMBERS)
            elif not other.flex:
                self.narrow(frame, node, value, {BOOL} if other.expr.type is BOOL else NUMBERS)
            elif other.expr.type is BOOL:
                self.prefer(value, BOOL)

    def logic(self, frame: Frame, node: Node, signs: Sequence[str], parts: Sequence[Part]) -> Value:
        """`and or xor`: logic on Bools, bitwise on Ints where spelled with a sign."""
        op = SIGNS[signs[0]]
        word = next((s for s in signs if s.isalpha()), None)
        rigid = {v.expr.type for _, v in parts if v.expr is not None and not v.flex}
        want = BOOL if BOOL in rigid or word else INT if INT in rigid else None
        if want is None and any(BOOL not in self.guesses[n].allowed for _, v in parts for n in v.flex):
            want = INT  # an undeclared name that is computed with: `x | (y * 3)`
        for part, value in parts:
            if want is None:
                self.narrow(frame, part, value, {BOOL, INT})
                self.prefer(value, BOOL)
            elif value.flex:
                self.narrow(frame, part, value, {want})
        exprs = [v.expr for _, v in parts if v.expr is not None]
        if len(exprs) < len(parts):
            return ERROR
        kinds = {e.type for e in exprs}
        flex = frozenset[str]() if want else frozenset[str]().union(*(v.flex for _, v in parts))
        if kinds == {BOOL}:
            return Value(nest(op, exprs), flex)
        if kinds == {INT} and not word:
            return Value(nest(ir.ON_INT[op], exprs), flex)
        return self._mixed(frame, node, word or signs[0], parts, exprs)

    def _mixed(self, frame: Frame, node: Node, sign: str, parts: Sequence[Part], exprs: list[Expr]) -> Value:
        i = next(i for i, e in enumerate(exprs) if e.type is not BOOL)
        part = parts[i][0]
        shown = self.quote(frame, part)
        message = f"`{sign}` takes Bools, {shown} is {exprs[i].type.with_article}"
        if not sign.isalpha():
            message = f"`{sign}` takes Bools or Ints, not both; {shown} is {exprs[i].type.with_article}"
        neighbours = [p for p, _ in parts[i + 1 : i + 2]] + [p for p, _ in parts[max(i - 1, 0) : i]]
        for other in neighbours:
            # Python reads `q & 3 == 0` as `(q & 3) == 0`; here a comparison binds tighter
            if other.kind == "compare" and not sign.isalpha() and exprs[i].type is INT:
                return self.report(frame, node, message, _grouped(frame.text, sign, part, other))
        bits = "; for bits write `" + {"and": "&", "or": "|", "xor": "^"}[SIGNS[sign]] + "`"
        extra = bits if sign.isalpha() and exprs[i].type is INT else ""
        example = _compared(shown, "!=")
        return self.report(frame, part, message, f"compare it, for example `{example}`{extra}")

    def invert(self, frame: Frame, node: Node, sign: str, part: Part) -> Value:
        inner, value = part
        if sign != "not" and inner.kind not in ("name", "lookup", "call", "reduce", "parens", "not", "number"):
            shown = frame.text[inner.start : inner.stop]
            message = f"`{sign}` before {self.quote(frame, inner)} reads differently here and in Python"
            remedy = f"put it in parentheses: `{sign}({shown})`" if len(shown) < 60 else "use parentheses"
            return self.report(frame, node, message, remedy)
        if sign == "~":
            self.narrow(frame, inner, value, {BOOL, INT})
            self.prefer(value, BOOL)
            if value.expr is not None and value.expr.type is not FLOAT:
                return Value(build("not" if value.expr.type is BOOL else "bitnot", value.expr), value.flex)
        e = self.boolean(frame, inner, value, f"`{sign}`")
        return ERROR if e is None else Value(build("not", e))

    def choose(self, frame: Frame, parts: Sequence[Part], label: str) -> Value:
        (cn, c), (yn, y), (nn, n) = parts
        cond = self.boolean(frame, cn, c, f"the condition of {label}")
        if y.expr is None or n.expr is None:
            return ERROR
        self._agree(frame, parts[1:], any(BOOL not in self.guesses[name].allowed for name in y.flex | n.flex))
        types = {y.expr.type, n.expr.type}
        if types == {BOOL}:
            joined, flex = [y.expr, n.expr], y.flex | n.flex
            flex = flex if y.flex and n.flex else frozenset()  # a branch whose type is fixed decides that of both
        elif BOOL in types:
            bad, good = ((yn, nn), (nn, yn))[n.expr.type is BOOL]
            message = f"{label} gives {self.quote(frame, bad)}, a Bool, or {self.quote(frame, good)}, a number"
            return self.report(frame, bad, message, "both must be Bools or both numbers")
        else:
            joined, flex = self.joined([y, n], [y.expr, n.expr])
        return ERROR if cond is None else Value(build("where", cond, *joined), flex)

    def of_numbers(self, frame: Frame, label: str, parts: Sequence[Part], make: Callable[..., Expr]) -> Value:
        """A function that keeps the type of its numbers."""
        operands = self.numbers(frame, label, parts)
        return ERROR if operands is None else Value(make(*operands[0]), operands[1])


def _types(types: frozenset[Type]) -> str:
    return " or ".join(str(t) for t in Type if t in types)


def _declare(name: str, rank: int | None) -> str:
    return f"declare it, for example `param {name}: int{axes(rank)}`"


def _cast(quoted: str) -> str:
    """The text `int(x)` of a quoted text, without doubled parentheses."""
    text = quoted.strip("`")
    return f"int{text}" if text.startswith("(") and text.endswith(")") and ")" not in text[:-1] else f"int({text})"


def _compared(quoted: str, sign: str = ">=") -> str:
    text = quoted.strip("`")
    return f"{text} {sign} 0" if len(text) <= 40 and not text.endswith("...") else f"... {sign} 0"


def _grouped(text: str, sign: str, part: Node, compare: Node) -> str:
    """The remedy for `q & 3 == 0`: the grouping that was probably meant."""
    first, second = compare.args[0], compare.args[-1]
    if compare.start > part.start:
        meant = f"({text[part.start : first.stop]}){text[first.stop : compare.stop]}"
    else:
        meant = f"{text[compare.start : second.start]}({text[second.start : part.stop]})"
    return f"`{sign}` binds looser than `{compare.value[0]}`: write `{' '.join(meant.split())}`"


Meaning = Callable[[Operators, Frame, Sequence[Part]], Value]


class Function(NamedTuple):
    signature: str
    least: int
    most: int
    apply: Meaning


CONSTANTS: dict[str, Expr] = {"inf": ir.INF, "nan": lit(math.nan), "pi": lit(math.pi), "e": lit(math.e)}
CONSTANTS |= {"true": ir.TRUE, "false": ir.FALSE, "True": ir.TRUE, "False": ir.FALSE}

LEAVES = {n: ir.var(n) for n in (*ir.COORDINATES, *ir.SIZES)} | {"score": ir.SCORE} | CONSTANTS
SUMS = {"total": ir.TOTAL, "count": ir.COUNT}  # of a row, in `divide` alone
RESERVED = frozenset({*LEAVES, *CALL_KEYWORDS})


# Functions of one Float without an operator.
MADE_OF: dict[str, Callable[[Expr], Expr]] = {
    "relu": lambda x: build("max", x, lit(0.0)),
    "silu": lambda x: x * build("sigmoid", x),
    # exp(x) overflows for large x
    "softplus": lambda x: build("max", x, lit(0.0)) + build("log1p", build("exp", -abs(x))),
    "gelu": lambda x: 0.5 * x * (1.0 + build("erf", x / math.sqrt(2.0))),
}


def expm1(x: Expr) -> Expr:
    """exp(x) - 1 without the loss of all digits near 0."""
    return build("tanh", x * 0.5) * (build("exp", x) + 1.0)


def _float_function(name: str, c: Operators, frame: Frame, parts: Sequence[Part]) -> Value:
    operands = c.numbers(frame, f"`{name}`", parts)
    c.prefer(parts[0][1], FLOAT)
    return ERROR if operands is None else Value(FLOATING[name](to_float(operands[0][0])))


def _rounded(name: str, c: Operators, frame: Frame, parts: Sequence[Part]) -> Value:
    c.prefer(parts[0][1], FLOAT)  # an Int has nothing to round, so an undeclared operand is a Float
    return Value(c.of_numbers(frame, f"`{name}`", parts, ROUNDING[name]).expr)


FLOATING = {n: partial(build, n) for n in sorted(FLOAT_FUNCTIONS | {"isfinite"})} | MADE_OF
ROUNDING: dict[str, Callable[[Expr], Expr]] = {
    "floor": lambda x: x if x.type is INT else build("floor", x),
    "ceil": lambda x: x if x.type is INT else -build("floor", -x),
}


def _int(c: Operators, frame: Frame, parts: Sequence[Part]) -> Value:
    x = parts[0][1].expr
    return ERROR if x is None else Value(x if x.type is INT else build("int", x))


def _float(c: Operators, frame: Frame, parts: Sequence[Part]) -> Value:
    node, value = parts[0]
    if value.expr is not None and value.expr.type is BOOL and not value.flex:
        return c.report(
            frame, node, f"`float` takes a number, {c.quote(frame, node)} is a Bool", "write `1.0 if ... else 0.0`"
        )
    operands = c.numbers(frame, "`float`", parts)
    return ERROR if operands is None else Value(ir.to_float(operands[0][0]))


def _on_ints(op: str, c: Operators, frame: Frame, parts: Sequence[Part]) -> Value:
    ints = c.integers(frame, f"`{op}`", parts)
    return ERROR if ints is None else Value(build(op, *ints))


def _clamped(x: Expr, low: Expr, high: Expr) -> Expr:
    return build("min", build("max", x, low), high)


def _on_numbers(op: str, arity: int) -> Function:
    signature, most = (f"{op}(x, y, ...)", 64) if arity == 2 else (f"{op}(x)", 1)
    make = partial(build, op) if arity == 1 else lambda *args: nest(op, args)
    return Function(signature, arity, most, lambda c, f, p: c.of_numbers(f, f"`{op}`", p, make))


FUNCTIONS: dict[str, Function] = {
    **{name: Function(f"{name}(x)", 1, 1, partial(_float_function, name)) for name in sorted(FLOATING)},
    **{op: _on_numbers(op, o.arity) for op, o in ir.OPERATORS.items() if o.takes == "number" and not o.sign},
    "clamp": Function("clamp(x, low, high)", 3, 3, lambda c, f, p: c.of_numbers(f, "`clamp`", p, _clamped)),
    **{name: Function(f"{name}(x)", 1, 1, partial(_rounded, name)) for name in ROUNDING},
    "int": Function("int(x)", 1, 1, _int),
    "float": Function("float(x)", 1, 1, _float),
    "where": Function("where(condition, a, b)", 3, 3, lambda c, f, p: c.choose(f, p, "`where`")),
    "pow": Function("pow(x, y)", 2, 2, lambda c, f, p: c.power(f, p)),
    "random": Function("random(seed, i, ...)", 1, 64, partial(_on_ints, "random")),
    "wrap": Function("wrap(x, bits)", 2, 2, partial(_on_ints, "wrap")),
}

# Forms whose arguments are not all values; the checker handles them.
FORMS = {
    "at": "at(mask, q = ..., k = ...)",
    "dot": "dot(x[b, :], y[k, :])",
    "segment": "segment(offsets, x)",
    "extent": "extent(table, axis)",
    "any": "any(j in 0..n: ...)",
    "all": "all(j in 0..n: ...)",
    "sum": "sum(j in 0..n: ...)",
}
BUILT_IN = frozenset(FUNCTIONS) | frozenset(FORMS)
