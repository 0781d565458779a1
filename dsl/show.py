"""Prints an Expr as text that parses back to the same Expr.

>>> from frisket.dsl.sugar import q, k
>>> show((q - k) * 2 >= 0)
'(q - k) * 2 >= 0'

Conversions of Int to Float are left out where the parser puts them back. A name whose type its use does not
tell is declared first: `param p: float`, a newline, `p >= x`. A call prints as its formula where a parameter hides it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeAlias

from . import library
from .errors import BudgetError, Span
from .ir import COMPARISONS, FLOAT_FUNCTIONS, INFIX, OPERATORS, Expr, expanded, find, fold, literal_value, named, walk
from .types import BOOL, FLOAT, INT, Type, axes

MAX_NODES = 20_000
THEN, OR, XOR, AND, NOT, COMPARE, SHIFT, SUM, PRODUCT, UNARY, POWER, ATOM = range(-1, 11)
_SIGNS = {OR: "|", XOR: "^", AND: "&", SHIFT: "<< >>", SUM: "+ -", PRODUCT: "* / // %", POWER: "**"}
_SIGNS[COMPARE] = "< <= > >= == !="
LEVELS = {sign: level for level, signs in _SIGNS.items() for sign in signs.split()}
BITS = frozenset("bitand bitor bitxor bitnot".split())
JOINING = frozenset("add sub mul min max".split()) | COMPARISONS
LOGIC = frozenset(op for op, o in OPERATORS.items() if o.takes == "bool")
Piece: TypeAlias = "str | tuple[Expr, int]"
Pieces: TypeAlias = "tuple[int, list[Piece]]"  # how tightly a text binds, and its parts


def show(e: Expr, known: Collection[str] = ()) -> str:
    """The text of `e`; names in `known` get their types elsewhere (from values) and are not declared."""
    _within_budget(e)
    printer = _Printer(e, known)
    lines = [
        f"param {name}: {str(type).lower()}{axes(rank)}"
        for name, (rank, type) in _undetermined(expanded(e), printer.flex).items()
        if name not in known
    ]
    return "\n".join([*lines, printer.marked()[0]])


def places(e: Expr, known: Collection[str] = ()) -> tuple[str, list[tuple[Span, Expr]]]:
    """The text of `e` without declarations, and the place in the text of every sub-expression; all parts of what a
    call stands for are at the call.

    >>> from frisket.dsl.sugar import q, k
    >>> text, spans = places((q >= k) & (k < 4))
    >>> [text[span.start : span.stop] for span, _ in spans]
    ['q', 'k', 'q >= k', 'k', '4', 'k < 4', 'q >= k & k < 4']
    """
    _within_budget(e)
    text, marked = _Printer(e, known).marked()
    return text, [(span, x) for span, n in marked for x in (walk(expanded(n)) if n.op == "call" else (n,))]


def _within_budget(e: Expr) -> None:
    size = tree_size(e)
    if size > MAX_NODES:
        raise BudgetError(f"this expression prints as {size:,} nodes, more than {MAX_NODES:,}")


class _Printer:
    def __init__(self, root: Expr, known: Collection[str]) -> None:
        self.root = root
        self.flex = _flex((root, expanded(root)), known)
        free = {n.name if n.op != "extent" else n.name[0] for n in walk(root) if n.op != "lit"}
        self.free = free | set(known)
        heights = {n.name[1] for n in find(root, "reduce")}
        self.bound: dict[int, str] = {}
        for height in sorted(heights):
            name = "j" if height == 0 else f"j{height}"
            while name in free:  # the variable of a reduction would hide a parameter
                name += "_"
            self.bound[height] = name

    def marked(self) -> tuple[str, list[tuple[Span, Expr]]]:
        """The text of a node, and the places of all nodes in the text, without enclosing parentheses."""
        out: list[str] = []
        at = 0
        places: list[tuple[Span, Expr]] = []
        # a list, as texts may nest deeper than the stack of Python
        stack: list[Piece | tuple[int, Expr, None]] = [(self.root, THEN)]
        while stack:
            piece = stack.pop()
            if isinstance(piece, str):
                out.append(piece)
                at += len(piece)
            elif len(piece) == 3:  # what began there ends here
                places.append((Span(piece[0], at), piece[1]))
            else:
                node, least = piece
                level, pieces = self.pieces(node)
                bare = level >= least
                stack += [] if bare else [")"]
                stack.append((at + (not bare), node, None))
                stack.extend(reversed(pieces))
                stack += [] if bare else ["("]
        return "".join(out), places

    def pieces(self, e: Expr) -> Pieces:
        return PIECES.get(e.op, _Printer.applied)(self, e)

    def applied(self, e: Expr, args: tuple[Expr, ...] | None = None) -> Pieces:
        """An operator that is written as a function."""
        return ATOM, [f"{e.op}(", *_separated(e.args if args is None else args), ")"]

    def literal(self, e: Expr) -> Pieces:
        # Python writes the Bools in capitals, and inf and nan as the language does
        text = repr(e.name).lower()
        return (UNARY if text.startswith("-") else ATOM), [text]

    def negative(self, e: Expr) -> Pieces:
        (x,) = e.args
        # `-1` is one literal
        return UNARY, ["-", (x, UNARY)] if literal_value(x) is None else ["-(", (x, OR), ")"]

    def inverse(self, e: Expr) -> Pieces:
        bare = e.args[0].op in ("not", "bitnot", "lit")
        return NOT, ["~", (e.args[0], OR if bare else ATOM)]

    def call(self, e: Expr) -> Pieces:
        (name, read), (formula, *args) = e.name, e.args
        if name == "then":
            return THEN, [(args[0], THEN), " then ", (args[1], OR)]
        if name in self.free:
            return self.pieces(formula)
        keywords = ["" for _ in args[len(read) :]] + [f"{c} = " for c in read]
        inside = [piece for word, a in zip(keywords, args) for piece in (", ", word, (a, OR))]
        return ATOM, [name, "(", *inside[1:], ")"] if args else [name]

    def infix(self, e: Expr, args: tuple[Expr, ...] | None = None) -> Pieces:
        sign, level = INFIX[e.op], LEVELS[INFIX[e.op]]
        args = (self.joined(e.args) if e.op in JOINING else e.args) if args is None else args
        # `a < b < c` would read as a chain, and `a & b & c` as one node: such operands take parentheses
        out: list[Piece] = [(args[0], level + 1 if level == COMPARE or e.op in ("and", "or") else level)]
        for a in args[1:]:
            out += [f" {sign} ", (a, level + 1)]
        return level, out

    def power(self, e: Expr) -> Pieces:
        x, y = e.args
        if e.type is FLOAT:
            x, y = (x if _whole(y) else self.plain(x)), self.plain(y)
        return POWER, [(x, ATOM), " ** ", (y, UNARY)]

    def reduction(self, e: Expr) -> Pieces:
        kind, height = e.name
        low, high, body = e.args
        variable = self.bound[height]
        return ATOM, [f"{kind}({variable} in ", (low, OR), "..", (high, OR), ": ", (body, OR), ")"]

    def least_or_most(self, e: Expr) -> Pieces:
        """The extremes of a table that the analysis reads: not in the language."""
        half = len(e.args) // 2
        name = e.op.removeprefix("range_") if e.type is not BOOL else {"range_min": "all", "range_max": "any"}[e.op]
        out: list[Piece] = [f"{name}({e.name}["]
        for i in range(half):
            out += [", " if i else "", (e.args[i], SUM), "..", (e.args[half + i], SUM)]
        return ATOM, [*out, "])"]

    def plain(self, e: Expr) -> Expr:
        """The operand of an operator that converts Int by itself."""
        return e.args[0] if e.op == "float" and not self.flex[e.args[0]] else e

    def joined(self, args: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """Two operands of one type: the conversion to a Float is implicit."""
        x, y = args
        if x.op != "float":
            return x, self.plain(y)
        # one of two conversions has to stay, to say that the type is Float
        return (x, self.plain(y)) if y.op == "float" else (self.plain(x), y)


# The texts of nodes; an operator without a row is written as a function.
PIECES: dict[str, Callable[[_Printer, Expr], Pieces]] = {
    "lit": _Printer.literal,
    **dict.fromkeys(("var", "param"), lambda printer, e: (ATOM, [str(e.name)])),
    # a part of a reduction that is printed alone has a variable that nothing binds
    "bound": lambda printer, e: (ATOM, [printer.bound.get(e.name, f"j{e.name or ''}")]),
    "call": _Printer.call,
    **dict.fromkeys(INFIX, _Printer.infix),
    "div": lambda printer, e: printer.infix(e, tuple(map(printer.plain, e.args))),
    "pow": _Printer.power,
    "neg": _Printer.negative,
    **dict.fromkeys(("not", "bitnot"), _Printer.inverse),
    "lookup": lambda printer, e: (ATOM, [f"{e.name}[", *_separated(e.args), "]"]),
    "segment": lambda printer, e: (ATOM, [f"segment({e.name}, ", (e.args[0], OR), ")"]),
    "extent": lambda printer, e: (ATOM, [f"extent({e.name[0]}, {e.name[1]})"]),
    "reduce": _Printer.reduction,
    **dict.fromkeys(("range_min", "range_max"), _Printer.least_or_most),
    **dict.fromkeys(("min", "max"), lambda printer, e: printer.applied(e, printer.joined(e.args))),
    "where": lambda printer, e: printer.applied(e, (e.args[0], *printer.joined(e.args[1:]))),
    **dict.fromkeys((*FLOAT_FUNCTIONS, "isfinite"), lambda printer, e: printer.applied(e, (printer.plain(e.args[0]),))),
}


def _whole(exponent: Expr) -> bool:
    """Whether an Expr is written as a whole number that is not negative: then the power of an Int is an Int."""
    return exponent.op == "float" and bool(literal_value(exponent.args[0], -1) >= 0)


def _separated(args: tuple[Expr, ...]) -> list[Piece]:
    out: list[Piece] = []
    for a in args:
        out += [", ", (a, OR)]
    return out[1:]


# -- which names the parser cannot type -------------------------------------------------------------


# The arguments whose type is the type of a node; none of an operator without a row.
TYPED_BY: dict[str, Callable[[Expr], tuple[Expr, ...]]] = {
    **dict.fromkeys([op for op, o in OPERATORS.items() if o.takes == "number" or op in BITS], lambda e: e.args),
    "where": lambda e: e.args[1:],
    "pow": lambda e: e.args[:1] if e.type is INT else (),
    "reduce": lambda e: e.args[2:] if e.name[0] in ("sum", "min", "max") else (),
    "call": lambda e: e.args[:1],
}


def _flex(roots: tuple[Expr, ...], known: Collection[str]) -> dict[Expr, frozenset[str]]:
    """The names that decide the type of each node; empty when the type is fixed."""

    def step(node: Expr, args: list[frozenset[str]]) -> frozenset[str]:
        if node.op in ("param", "lookup"):
            return frozenset({node.name}) - set(known)
        by_argument = dict(zip(node.args, args, strict=True))
        sets = [by_argument[a] for a in TYPED_BY[node.op](node)] if node.op in TYPED_BY else []
        fixed = not sets or ((node.type is not INT or node.op in BITS) and not all(sets))
        return frozenset() if fixed else frozenset().union(*sets)

    return fold(roots, step)


def _undetermined(root: Expr, flex: dict[Expr, frozenset[str]]) -> dict[str, tuple[int, Type]]:
    """Names to declare, with rank and type: without a declaration the parser would infer another type or fail."""
    declared = ("param", "lookup", "segment")
    names = {name: (rank, type) for op, name, rank, type in named(root) if op in declared}
    doubtful: set[str] = set()
    evident: set[str] = set()
    ambiguous: set[str] = set()
    for node in walk(root):
        if node.op in BITS and all(flex[a] for a in node.args):
            doubtful.update(*(flex[a] for a in node.args))
        evident.update(_evidence(node, flex))
        if node.op in ("eq", "ne", "where"):
            ambiguous.update(n for a in node.args[node.op == "where" :] for n in _either(a))
    entries = library.definitions()
    return {
        name: (rank, type)
        for name, (rank, type) in names.items()
        if name in entries or (name in doubtful if type is INT else name not in evident or name in ambiguous)
    }


def _either(e: Expr) -> frozenset[str]:
    """The names of a value whose operators have the signs of those of bits: `(~a) == b` reads as one of Ints."""
    if e.op not in LOGIC:
        return frozenset()
    parts = [frozenset({a.name}) if a.op in ("param", "lookup") else _either(a) for a in e.args]
    return frozenset().union(*parts) if all(parts) else frozenset()  # a comparison says that all are Bools


def _evidence(node: Expr, flex: dict[Expr, frozenset[str]]) -> Iterator[str]:
    """Names of Bools and Floats whose type follows from this use."""
    yield from _named(EVIDENT[node.op](node, flex) if node.op in EVIDENT else (), BOOL, FLOAT)
    if node.op == "where":
        yield from _named(node.args[:1], BOOL)


def _beside_float(args: tuple[Expr, ...], flex: Mapping[Expr, frozenset[str]]) -> tuple[Expr, ...]:
    x, y = args
    return tuple(a for a, b in ((x, y), (y, x)) if b.type is FLOAT and not flex[b] and b.op != "float")


# The arguments whose type follows from a use; none of an operator without a row.
EVIDENT: dict[str, Callable[[Expr, Mapping[Expr, frozenset[str]]], tuple[Expr, ...]]] = {
    **dict.fromkeys(JOINING, lambda e, flex: _beside_float(e.args, flex)),
    # these take Bools, or prefer Floats
    **dict.fromkeys((*"and or xor not div floor isfinite".split(), *FLOAT_FUNCTIONS), lambda e, flex: e.args),
    # `p ** 2` is an Int where nothing says that p is none
    "pow": lambda e, flex: () if e.type is not FLOAT or _whole(e.args[1]) else e.args,
    "reduce": lambda e, flex: e.args[2:] if e.name[0] in ("any", "all") else (),
    "where": lambda e, flex: _beside_float(e.args[1:], flex),
}


def _named(args: tuple[Expr, ...], *types: Type) -> Iterator[str]:
    for a in args:
        if a.op in ("param", "lookup") and a.type in types:
            yield a.name


def tree_size(root: Expr) -> int:
    """The number of nodes of `root` when shared nodes are written out each time."""
    # no formula of a call
    return fold(root, lambda node, args: 1 + sum(args[node.op == "call" :]))[root]
