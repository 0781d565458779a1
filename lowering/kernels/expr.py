"""Prints Exprs as source text through one operator table per language.

An Expr is first brought to the operators of the table, by `legalise`. Rows are as in `language`: the operator in one
gives the precedence, so parentheses appear only where they are needed. Interned nodes make common sub-expressions free
to find: what is used twice, what is long, and what can be computed earlier than its user gets a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import Expr, build, fold, lit, transform, uses, walk
from frisket.dsl.types import FLOAT, INT
from frisket.lowering.simplify.affine import Linear, linear, write

from .language import ASSOCIATIVE, ATOM, COMPARISON, PRECEDENCE, PREFIX, Language, Text
from .legalise import folded, legalise

# When a value is known: once (SCALAR), per query row, per key column, or per position. A union is a bit-or.
SCALAR, ROW, COLUMN, POSITION = 0, 1, 2, 3
LEVELS = {"q": ROW, "k": COLUMN, "score": POSITION}
MOVING = frozenset(LEVELS)

LONG = 72  # characters of an expression that earn it a name


@dataclass(frozen=True)
class Line:
    """An assignment `name = text`, for a node whose value is known at `level`."""

    node: Expr
    name: str
    text: str
    level: int


@dataclass
class Printed:
    """The printed form of several Exprs: lines in order of need, and the text of every root."""

    lines: list[Line] = field(default_factory=list)
    values: dict[Expr, str] = field(default_factory=dict)
    texts: dict[Expr, Text] = field(default_factory=dict)  # of every node
    legal: dict[Expr, Expr] = field(default_factory=dict)  # the roots in operators of the language

    def needed(self, roots: Iterable[Expr], level: int) -> list[Line]:
        """The lines of one level that these roots use, directly or through others."""
        return [line for line in self.needed_ever(roots) if line.level == level]

    def needed_ever(self, roots: Iterable[Expr]) -> list[Line]:
        """The lines of all levels that these roots use."""
        below = set(walk(*(self.legal[r] for r in roots)))
        return [line for line in self.lines if line.node in below]


def levels(*roots: Expr, when: Mapping[str, int] = LEVELS) -> dict[Expr, int]:
    """The level at which the value of each node is known; `when` gives the level of variables."""

    def level(node: Expr, args: list[int]) -> int:
        return reduce(or_, args, when.get(node.name, SCALAR) if node.op == "var" else SCALAR)

    return fold(roots, level)


Leaf = Callable[[Expr, list[Text]], Text | None]  # the text of a node that is no operator, from those of its operands


def printed(
    roots: Iterable[Expr],
    language: Language,
    leaf: Leaf,
    name: Callable[[Expr, int], str],
    inner: Collection[Expr] = (),
    when: Mapping[str, int] = LEVELS,
    early: Collection[Expr] = (),
) -> Printed:
    """Print `roots` as text. `leaf` writes what no table can (leaves, lookups; None: see the table), `name` names a
    node of a level. The roots in `inner` are used per position, those in `early` too and computed as early as possible.
    Raises LoweringError for an operator without a row."""
    legal = {r: legalise(r, language) for r in roots}
    inner, early = ({legal[r] for r in some} for some in (inner, early))
    roots = tuple(dict.fromkeys(legal.values()))
    known = levels(*roots, when=when)
    users: dict[Expr, list[Expr]] = {node: [] for node in known}
    for node in known:
        for a in node.args:
            users[a].append(node)
    texts: dict[Expr, Text] = {}
    page = Printed(legal=legal, texts=texts)
    for node in known:
        args = [texts[a] for a in node.args]
        text = written(node, args, language, leaf)
        # a value that its user needs later is computed as soon as it is known
        sooner = any(known[u] != known[node] for u in users[node])
        sooner |= node in inner and known[node] in (SCALAR, ROW)
        sooner |= node in early and known[node] != POSITION
        often = len(users[node]) > 1 or (bool(users[node]) and (node in roots or len(text.text) > LONG))
        # on a separate line a mask may restrict the load
        load = node.op in ("lookup", "gathered") and known[node] == POSITION
        if node.args and (sooner or often or load) and node.op not in language.nameless:
            page.lines.append(Line(node, name(node, known[node]), text.text, known[node]))
            text = Text(page.lines[-1].name)
        texts[node] = text
    page.values = {r: texts[legal[r]].text for r in legal}
    return page


def decisive(roots: Iterable[Expr]) -> set[Expr]:
    """The Floats that decide an Int or a Bool. A GPU's own division is off by some units in the last place, so the
    floor of 41 / 41 may be 0, in tiles that were planned with 1. `tl.div_rn` rounds correctly."""
    crossed = [n for n in walk(*roots) if n.type is not FLOAT and any(a.type is FLOAT for a in n.args)]
    return {n for n in walk(*crossed) if n.type is FLOAT}


def written(node: Expr, args: list[Text], language: Language, leaf: Leaf) -> Text:
    """The text of a node: of `leaf` where this has one, that of a literal, or the row of the operator."""
    if (text := leaf(node, args)) is not None:
        return text
    return language.literal(node.name) if node.op == "lit" else operator(node, args, language)


def unknown(node: Expr, backend: str) -> LoweringError:
    return LoweringError(
        f"`{node.op}` has no {backend} form; rewrite the expression without it, "
        "or choose another backend (frisket doctor lists them)"
    )


def assignments(
    root: Expr, language: Language, leaf: Leaf, name: Callable[[], str], when: Mapping[str, int] = LEVELS
) -> tuple[list[str], Text]:
    """The (lines that name nodes, text of the value) of one Expr, as of `printed`."""
    page = printed([root], language, leaf, lambda node, level: name(), when=when)
    return [f"{line.name} = {line.text}" for line in page.lines], page.texts[page.legal[root]]


def prelude_of(roots: Iterable[Expr], language: Language) -> tuple[list[str], list[str]]:
    """The (lines of constants, functions) that the text of these Exprs needs."""
    used = {n.op for n in walk(*(legalise(r, language) for r in roots))}
    return language.prelude(" ".join(language.operators.get(op, "") for op in sorted(used)))


def operator(node: Expr, args: list[Text], language: Language) -> Text:
    """The text of an operator: one row of the table, filled in."""
    row = language.operators.get(node.op)
    if row is None:
        raise unknown(node, language.name)
    infix = re.fullmatch(r"\{\} (\S+) \{\}", row)
    if infix:
        symbol = infix[1]
        binds = PRECEDENCE[symbol]
        # a - (b - c) keeps its parentheses, and comparisons do not chain
        right = binds + (symbol not in ASSOCIATIVE)
        left = binds + (binds == COMPARISON)
        return Text(f" {symbol} ".join([args[0].inside(left), *(a.inside(right) for a in args[1:])]), binds)
    if row[0] in "-~":
        return Text(row.format(args[0].inside(PREFIX)), PREFIX)
    if "*" in row and "{" not in row:  # a call with any number of operands
        return Text(row.replace("*", ", ".join(a.text for a in args)))
    if row.startswith("{}"):  # a method
        return Text(row.format(args[0].inside(ATOM), *(a.text for a in args[1:])))
    return Text(row.format(*(a.text for a in args)))


# -- what every backend would rather not see ----------------------------------------------------------


def machine(root: Expr) -> Expr:
    """An equal Expr of cheaper operators: literals folded, small powers multiplied out, division and remainder by 2**n
    as a shift and an `and` (both round to minus infinity)."""
    return transform(root, _cheaper)


def _cheaper(e: Expr) -> Expr:
    if (literal := folded(e)) is not e:
        return literal
    if e.op in ("floordiv", "mod") and e.args[1].op == "lit":
        n = e.args[1].name
        if n > 0 and n & (n - 1) == 0:
            shift, low = lit(n.bit_length() - 1), lit(n - 1)
            if e.op == "mod":
                return build("bitand", e.args[0], low)
            return build("shr", e.args[0], shift) if n > 1 else e.args[0]
    if e.op == "pow" and e.args[1].op == "lit":
        n = e.args[1].name
        if n == 0:
            return lit(1) if e.type is INT else lit(1.0)
        # binary powers: a few products, where `pow` is a call
        if n in range(1, 65):
            return _power(e.args[0], int(n))
    return e


def same_remainder(e: Expr) -> Expr:
    """`(q - k) % n == 0` as `q % n == k % n`: each side is known once per row or per column."""
    for rest, other in (e.args, e.args[::-1]) if e.op in ("eq", "ne") else ():
        sides = None if uses(other) & MOVING else sides_of(rest, "mod")
        if sides is None:
            continue
        n = rest.args[1]
        row, column = (build("mod", side, n) for side in sides)
        if other is lit(0):
            return build(e.op, row, column)
        possible = build("mod", other, n)  # is `other`, or no remainder is
        same = build(e.op, build("mod", row - possible, n), column)
        return build("and" if e.op == "eq" else "or", build(e.op, other, possible), same)
    return e


def sides_of(e: Expr, *ops: str) -> tuple[Expr, Expr] | None:
    """The dividend of a remainder or quotient as two terms: one of the query, and one of the key, to be taken off."""
    if e.op not in ops or uses(e.args[1]) & MOVING:
        return None
    form = linear(e.args[0])
    by_key = Linear(tuple(t for t in form.terms if uses(t[0]) & {"k", "score"}), 0)
    row, column = write(form - by_key), write(-by_key)
    return None if "q" not in uses(row) or uses(column) & MOVING != {"k"} else (row, column)


def _power(x: Expr, n: int) -> Expr:
    if n == 1:
        return x
    half = _power(x, n // 2)
    square = build("mul", half, half)
    return build("mul", square, x) if n % 2 else square
