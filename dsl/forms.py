"""Checks names, and the forms whose arguments are not all values: ranges, whole axes, tables, coordinates.

Trees are read by one generator per node, which asks for its parts with `yield node, frame`. So depth is bounded by
memory, not by Python's stack. All work is counted; texts that grow without end are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import GeneratorType
from typing import Any, NoReturn

from . import ir, library
from .errors import Span, TextProblem
from .evaluate import evaluate
from .ir import COORDINATES, REDUCTIONS, Expr
from .library import Definition
from .operators import ERROR, FORMS, LEAVES, RESERVED, Frame, Guess, Operators, Part, Value
from .parse import MAX_NODES, Node, fail
from .types import BOOL, INT, Type, ranked

Steps = Generator[tuple[Node, Frame], Value, Value]


@dataclass
class Walk(Operators):
    """The base of tree readers. A subclass reads a node in the method named after its kind: `_kind`. A name in a text
    is a definition, a number, a table, or a parameter whose type shows from its use. `known` gives (rank, type) of
    declared and bound names, and rank 0 is a scalar."""

    known: Mapping[str, tuple[int, Type]] = field(default_factory=dict)
    definitions: Mapping[str, dict[int, Definition]] = field(default_factory=dict)
    used: dict[str, None] = field(default_factory=dict)
    passed: dict[str, tuple[Definition, str]] = field(default_factory=dict)  # names that are arguments of definitions
    sites: list[tuple[Span, Expr]] = field(default_factory=list)
    steps: int = 0
    fresh: int = 0

    def __post_init__(self) -> None:
        self.root = Frame(self.text, {})

    def evaluate(self, node: Node, frame: Frame) -> Value:
        stack: list[tuple[Steps, Node, Frame]] = []
        while True:
            self.steps += 1
            if self.steps > MAX_NODES:
                self.too_large(node, frame)
            step = getattr(self, "_" + node.kind)(node, frame)
            if type(step) is GeneratorType:
                stack.append((step, node, frame))
                value: Any = None
            else:
                value = self._seen(node, frame, step)
            while stack:
                steps, open_node, where = stack[-1]
                try:
                    node, frame = steps.send(value)
                    break
                except StopIteration as done:
                    stack.pop()
                    value = self._seen(open_node, where, done.value)
            else:
                return value  # type: ignore[no-any-return]

    def _seen(self, node: Node, frame: Frame, value: Value) -> Value:
        if frame is self.root and value.expr is not None:  # places inside definitions are not in the user's text
            self.sites.append((node.span, value.expr))
        return value

    def too_large(self, node: Node, frame: Frame) -> NoReturn:
        at = frame.site or node
        message = f"the text expands to more than {MAX_NODES:,} nodes"
        fail(self.text, self.name, at.start, at.stop, message, "say it with fewer or smaller definitions")

    def parts(self, nodes: Sequence[Node], frame: Frame) -> Generator[tuple[Node, Frame], Value, list[Part]]:
        parts = []
        for n in nodes:
            parts.append((n, (yield n, frame)))
        return parts

    def charge(self, e: Expr, node: Node, frame: Frame, times: int = 1) -> None:
        """Count the work of substitution, so that doubling and quadratic texts end with an error."""
        self.steps += times * sum(1 for _ in ir.walk(e)) // 2
        if self.steps > MAX_NODES:
            self.too_large(node, frame)

    # -- names --------------------------------------------------------------------------------------

    def definitions_of(self, name: str, frame: Frame) -> dict[int, Definition] | None:
        """The definitions of `name` at this place; the user's names hide the library's, except inside the library."""
        if frame.site is None:
            if name in self.definitions:
                return self.definitions[name]
            if name in self.known:
                return None
        return library.definitions().get(name)

    def guess(self, frame: Frame, node: Node, name: str, rank: int | None) -> Guess | None:
        """A guess about an undeclared name. `rank` is None for `extent` and `dot`, which do not tell it."""
        guess = self.guesses.setdefault(name, Guess((frame.site or node).span))
        if guess.rank is None:
            guess.rank = rank
        if rank is not None and guess.rank != rank:
            message = f"`{name}` is {ranked(guess.rank)} elsewhere and {ranked(rank)} here"
            self.report(frame, node, message, "use two names, or the same number of indices")
            return None
        return guess

    def parameter(self, frame: Frame, node: Node, name: str) -> Value:
        self.used[name] = None
        if name not in self.known:
            guess = self.guess(frame, node, name, 0)
            return ERROR if guess is None else Value(ir.param(name, guess.type), frozenset({name}))
        rank, type_ = self.known[name]
        if rank:
            indices = ", ".join(("q", "k") if rank == 2 else COORDINATES[-rank:] if rank > 2 else ("q",))
            return self.report(frame, node, f"`{name}` is {ranked(rank)}", f"look it up: `{name}[{indices}]`")
        return Value(ir.param(name, type_))

    def table(self, frame: Frame, node: Node, rank: int | None) -> tuple[str, Type, frozenset[str]] | None:
        """(name, element type, names that decide the type) of the table that a bare name stands for."""
        if node.kind != "name":
            self.report(frame, node, f"{self.quote(frame, node)} is not a table", "only a table's name takes `[ ]`")
            return None
        name = frame.names.get(node.value, node.value)
        local = node.value in frame.names
        if not isinstance(name, str) or (not local and (name in LEAVES or self.definitions_of(name, frame))):
            self.report(frame, node, f"`{node.value}` is not a table", "only tables take `[ ]`")
            return None
        self.used[name] = None
        if name in self.known:
            have, type_ = self.known[name]
            if have == 0:
                self.report(frame, node, f"`{name}` is a number, not a table", f"write `{name}` without `[ ]`")
                return None
            if rank is not None and have != rank:
                more = self._wider(frame, name, have)
                self.report(
                    frame, node, f"`{name}` is {ranked(have)}, indexed with {rank}", f"give {have}, one per axis", more
                )
                return None
            return name, type_, frozenset()
        guess = self.guess(frame, node, name, rank)
        return None if guess is None else (name, guess.type, frozenset({name}))

    def _wider(self, frame: Frame, name: str, rank: int) -> str:
        """The library's definition for tables with more axes than the called definition takes, or with one."""
        axes = {1: ("", "[length]"), 2: ("_by_batch", "[batch, length]"), 3: ("_by_head", "[batch, heads, length]")}
        if frame.definition is None or rank not in axes:
            return ""
        suffix, shape = axes[rank]
        other = frame.definition.name.split("_by_")[0] + suffix
        return f"for a table {shape} write `{other}({name})`" if other in library.definitions() else ""

    def arity(self, node: Node, frame: Frame, signatures: str, count: int) -> Value:
        plural = "argument" if count == 1 else "arguments"
        return self.report(frame, node, f"`{node.value.text}` does not take {count} {plural}", f"it is {signatures}")

    def misspelled(self) -> None:
        """Report each undeclared Bool whose name is nearly a definition's name as a misspelling."""
        candidates = [*library.definitions(), *self.definitions]
        for name, guess in self.guesses.items():
            # a Bool alone: numbers and tables are parameters in most masks
            near = get_close_matches(name, candidates, 1, 0.75) if guess.rank == 0 and guess.type is BOOL else []
            if near and "." not in name:
                remedy = f"did you mean `{near[0]}`? A parameter of that name is declared: `param {name}: bool`"
                # another problem at this place says more
                self.problems.setdefault(guess.span, TextProblem(f"unknown name `{name}`", guess.span, remedy))


MAX_RANGE, MAX_REDUCTIONS = 4096, 6


def at(w: Walk, node: Node, frame: Frame, args: list[Node], keywords: dict[str, Node]) -> Steps:
    bad = next((a for c, a in keywords.items() if c not in COORDINATES), None)
    if len(args) != 1 or not keywords or bad is not None:
        return w.report(frame, bad or node, "`at` re-reads one expression elsewhere", f"it is `{FORMS['at']}`")
    body = yield args[0], frame
    moves = w.integers(frame, "a coordinate", (yield from w.parts([a.args[0] for a in keywords.values()], frame)))
    if moves is None or body.expr is None:
        return ERROR
    w.charge(body.expr, node, frame)
    return Value(ir.substitute(body.expr, {LEAVES[c]: e for c, e in zip(keywords, moves)}), body.flex)


def segment(w: Walk, node: Node, frame: Frame, args: list[Node]) -> Steps:
    if len(args) != 2:
        return misused(w, node, frame, args)
    table = w.table(frame, args[0], 1)
    index = w.integers(frame, "`segment`", (yield from w.parts(args[1:], frame)))
    if table is None or index is None:
        return ERROR
    name, type_, flex = table
    # a scalar stands in for the table: types and names are all that narrowing looks at
    if not w.narrow(frame, args[0], Value(ir.param(name, type_), flex), {INT}):
        return w.report(frame, args[0], f"`segment` takes a table of Ints, `{name}` is of {type_}s")
    return Value(ir.segment(name, index[0]))


def extent(w: Walk, node: Node, frame: Frame, args: list[Node]) -> Value:
    if len(args) != 2 or args[1].kind != "number" or not isinstance(args[1].value, int):
        return w.report(frame, node, "`extent` takes a table and the number of an axis", "for example `extent(t, 0)`")
    table = w.table(frame, args[0], None)
    if table is None:
        return ERROR
    rank = w.known[table[0]][0] if table[0] in w.known else None
    if args[1].value < 0 or (rank is not None and args[1].value >= rank):
        return w.report(frame, args[1], f"`{table[0]}` has no axis {args[1].value}", "axes count from 0")
    return Value(ir.extent(table[0], args[1].value))


def dot(w: Walk, node: Node, frame: Frame, args: list[Node]) -> Steps:
    """`dot(x[b, :], y[k, :])` is `sum(j in 0..extent(x, 1): x[b, j] * y[k, j])`."""
    axes = [[i for i, a in enumerate(g.args) if a.kind == "colon"] for g in args if g.kind == "lookup"]
    if len(args) != 2 or [len(a) for a in axes] != [1, 1]:
        return w.report(frame, node, "`dot` takes two tables with one whole axis each", f"for example `{FORMS['dot']}`")
    w.fresh += 1
    bound_var = ir.make("bound", (), ("dot", w.fresh))
    name = f"axis {w.fresh}"  # no name in a text has a space
    inner = replace(frame, names={**frame.names, name: Value(bound_var)})
    rows = [Node("lookup", None, [_axis(a, name) for a in g.args], g.start, g.stop) for g in args]
    parts = yield from w.parts(rows, inner)
    operands, table = w.numbers(frame, "`dot`", parts), w.table(frame, args[0].args[0], None)
    if operands is None or table is None:
        return ERROR
    (x, y), flex = operands
    end = ir.extent(table[0], axes[0][0] - 1)
    return Value(ir.reduce("sum", ir.ZERO, end, lambda j: ir.substitute(x * y, {bound_var: j})), flex)


def _axis(node: Node, name: str) -> Node:
    return Node("name", name, [], node.start, node.stop) if node.kind == "colon" else node


def misused(w: Walk, node: Node, frame: Frame, args: list[Node]) -> Value:
    return w.arity(node, frame, f"`{FORMS[node.value.text]}`", len(args))


CALLED: dict[str, Callable[[Walk, Node, Frame, list[Node]], Value | Steps]] = {
    "segment": segment,
    "extent": extent,
    "dot": dot,
    **dict.fromkeys(("any", "all", "sum"), misused),
}


def reduce(w: Walk, node: Node, frame: Frame) -> Steps:
    kind, variable = node.value
    low, high, body = node.args
    if kind.text not in REDUCTIONS:
        return w.report(frame, node, f"there is no reduction `{kind.text}`", "it is any, all, sum, min or max")
    if variable.text in RESERVED:
        return w.report(frame, node, f"`{variable.text}` is reserved", "call the variable `j`")
    bounds = w.integers(frame, "a bound", (yield from w.parts([low, high], frame)))
    fine = bounds is not None and _range(w, kind.text, bounds, node, frame)
    w.fresh += 1
    # numbered: nested reductions may use one name for their variables
    bound_var = ir.make("bound", (), ("own", w.fresh))
    inner = replace(frame, names={**frame.names, variable.text: Value(bound_var)})
    value = yield body, inner
    if kind.text in ("any", "all"):
        e, flex = w.boolean(frame, body, value, f"`{kind.text}`"), frozenset[str]()
    else:
        operands = w.numbers(frame, f"`{kind.text}`", [(body, value)])
        e, flex = (None, frozenset()) if operands is None else (operands[0][0], operands[1])
    if e is None or bounds is None or not fine:  # after the body: its errors are reported as well
        return ERROR
    inside = 1 + max((n.name[1] for n in ir.find(e, "reduce")), default=-1)
    if inside >= MAX_REDUCTIONS:
        message = f"reductions are nested more than {MAX_REDUCTIONS} deep"
        return w.report(frame, node, message, "put the inner ones in a table")
    w.charge(e, node, frame, 3**inside)  # opening a binder opens those inside it
    return Value(ir.reduce(kind.text, bounds[0], bounds[1], lambda j: ir.substitute(e, {bound_var: j})), flex)


def _range(w: Walk, kind: str, bounds: list[Expr], node: Node, frame: Frame) -> bool:
    """Whether the bounds of a range are known when the text is read, and the range has a sane size."""
    leaves = [n for n in ir.walk(*bounds) if not n.args]
    if any(n.op not in ("lit", "extent") for n in leaves):
        message = f"the bounds of `{kind}` must be known when the text is read"
        w.report(frame, node, message, "write numbers, or take them from a table: `0..extent(t, 0)`")
        return False
    if any(n.op == "extent" for n in leaves):  # a table has its lengths when it is bound
        return True
    low, high = (int(evaluate(ir.expanded(e), {})) for e in bounds)
    if high - low > MAX_RANGE:
        w.report(frame, node, f"`{kind}` runs over {high - low:,} values, more than {MAX_RANGE:,}", "use a table")
    elif high <= low and kind in ("min", "max"):
        w.report(frame, node, f"`{kind}` over an empty range has no value", "make the range longer")
    else:
        return True
    return False
