"""Checks the forms of the language whose arguments are not all values: ranges, whole axes, tables, coordinates.

Trees are read by one generator per node, which asks for its parts with `yield node, frame`. So depth is bounded by
memory, not by Python's stack. All work is counted; texts that grow without end are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from types import GeneratorType
from typing import Any, NoReturn

from . import ir
from .errors import Span
from .evaluate import evaluate
from .ir import COORDINATES, REDUCTIONS, Expr
from .names import KnownNames
from .operators import ERROR, FORMS, LEAVES, RESERVED, Frame, Part, Value
from .parse import MAX_NODES, Node, fail
from .types import INT

Steps = Generator[tuple[Node, Frame], Value, Value]


@dataclass
class Walk(KnownNames):
    """The base of tree readers. A subclass reads a node in the method named after its kind: `_kind`."""

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
    """Whether the bounds of a range are known when the text is read, and the range is of a sane size."""
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
