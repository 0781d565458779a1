"""Turns the tree of a text into Exprs: one method per kind of node. Collects every error before raising.

Work happens on the tree, so each error has its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

from . import ir, library
from .errors import MaskSyntaxError, TextProblem
from .evaluate import decided, evaluate
from .forms import CALLED, Steps, Walk, at, reduce
from .ir import COORDINATES, REDUCTIONS, Expr
from .library import Definition
from .operators import BUILT_IN, ERROR, FORMS, FUNCTIONS, LEAVES, SUMS, Frame, Value
from .parse import MAX_NODES, Node
from .show import tree_size
from .types import BOOL, FLOAT, INT

# depth of calls, and rounds of guessing types: hostile texts would go on without end
MAX_CALLS, MAX_ROUNDS = 200, 50

# what a root of a kind may not read, with a remedy
ABSENT = {
    ("mask", "score"): ("a mask does not know `score`: only a score mod (`score =`) does", "compare positions"),
    ("divide", "score"): ("`divide` is one number a query, and a score belongs to a pair", "sum weights by `total`"),
    ("divide", "k"): ("`divide` is one number a query, and `k` is a key", "count visible keys by `count`"),
}
# roots that are numbers: what they are called, and what a Bool there may have meant
NUMBERS = {
    "score": ("a score mod", "write it as the mask, or choose with it: `score if ... else -inf`"),
    "weight": ("a weight", "write it as the mask, or choose with it: `1.0 if ... else 0.0`"),
    "divide": ("`divide`", "choose with it: `total if ... else 1.0`"),
}


@dataclass
class Checker(Walk):
    """A reader of one text that builds its Exprs."""

    expanded: set[tuple[str, int]] = field(default_factory=set)
    kind: str = "score"  # of the root that is read
    needs: dict[Expr, str] = field(default_factory=dict)  # conditions on parameters, each with an advice
    changed_meanings: set[str] = field(default_factory=set)  # warnings of library entries that this text calls

    # -- operators ----------------------------------------------------------------------------------

    def _number(self, node: Node, frame: Frame) -> Value:
        # integers of Python have no end, those of a kernel have
        if isinstance(node.value, int) and not -(2**63) <= node.value < 2**63:
            return self.report(frame, node, "this integer does not fit 64 bits")
        return Value(ir.lit(node.value))

    def _parens(self, node: Node, frame: Frame) -> Steps:
        return (yield node.args[0], frame)

    def _binary(self, node: Node, frame: Frame) -> Steps:
        return self.binary(frame, node.value, (yield from self.parts(node.args, frame)))

    def _compare(self, node: Node, frame: Frame) -> Steps:
        return self.chain(frame, node.value, (yield from self.parts(node.args, frame)))

    def _and(self, node: Node, frame: Frame) -> Steps:
        return self.logic(frame, node, node.value, (yield from self.parts(node.args, frame)))

    _or = _xor = _and

    def _not(self, node: Node, frame: Frame) -> Steps:
        (part,) = yield from self.parts(node.args, frame)
        return self.invert(frame, node, node.value, part)

    def _choose(self, node: Node, frame: Frame) -> Steps:
        return self.choose(frame, (yield from self.parts(node.args, frame)), "`if`")

    def _negative(self, node: Node, frame: Frame) -> Steps:
        (part,) = yield from self.parts(node.args, frame)
        inner, value = part
        constant = inner.kind == "name" and value.expr is not None and value.expr.op == "lit"
        if constant and value.expr is not None and value.expr.type is not BOOL:  # `-inf`, `-w` where w is 4
            return Value(ir.lit(-value.expr.name))
        return self.of_numbers(frame, "`-`", [part], lambda x: -x)

    def _then(self, node: Node, frame: Frame) -> Steps:
        parts = yield from self.parts(node.args, frame)
        operands = [f for p in parts if (f := self.numbers(frame, "`then`", [p]))]
        if len(operands) < 2:
            return ERROR
        first, second = (ir.to_float(f[0][0]) for f in operands)
        if "score" not in ir.uses(second):  # else the first score mod would have no effect
            return self.report(frame, parts[1][0], "what follows `then` does not use `score`", "add: `score + ...`")
        # each node of the second is built again, with the first in place of `score`
        self.charge(second, node, frame)
        return Value(ir.then(first, second))

    def _colon(self, node: Node, frame: Frame) -> Value:
        return self.report(frame, node, "a whole axis `:` belongs in `dot`", f"write `{FORMS['dot']}`")

    def _keyword(self, node: Node, frame: Frame) -> Value:
        return self.report(frame, node, "a keyword does not belong here", "to compare, write `==`")

    # -- names --------------------------------------------------------------------------------------

    def _name(self, node: Node, frame: Frame) -> Value | Steps:
        name = node.value
        if name in frame.names:
            bound = frame.names[name]
            # a name passed on is a table or a scalar: its use decides
            return bound if isinstance(bound, Value) else self.parameter(frame, node, bound)
        if name in LEAVES:
            if (self.kind, name) in ABSENT:
                return self.report(frame, node, *ABSENT[self.kind, name])
            return Value(LEAVES[name])
        if self.kind == "divide" and name in SUMS:
            return Value(SUMS[name])
        overloads = self.definitions_of(name, frame)
        if overloads is None:
            return self.parameter(frame, node, name)
        if 0 not in overloads:
            return self.report(frame, node, f"`{name}` takes arguments", _signatures(overloads))
        return self._expand(node, frame, overloads[0], [], {})

    def _lookup(self, node: Node, frame: Frame) -> Steps:
        base, *items = node.args
        table = self.table(frame, base, len(items))
        indices = self.integers(frame, "an index", (yield from self.parts(items, frame)))
        # both were read before either is refused, so that one report has the errors of both
        if table is None or indices is None:
            return ERROR
        name, type_, flex = table
        return Value(ir.lookup(name, tuple(indices), type_), flex)

    # -- calls --------------------------------------------------------------------------------------

    def _call(self, node: Node, frame: Frame) -> Value | Steps:
        name = node.value.text
        arg_nodes = [a for a in node.args if a.kind != "keyword"]
        keywords = {a.value.text: a for a in node.args if a.kind == "keyword"}
        if len(arg_nodes) + len(keywords) < len(node.args):
            return self.report(frame, node, "a keyword is given twice", "keep one of them")
        # parameters of a definition hide definitions of their name
        overloads = None if name in frame.names or name in LEAVES else self.definitions_of(name, frame)
        if overloads is not None:
            return self._call_definition(node, frame, overloads, arg_nodes, keywords)
        if name in frame.names or name in LEAVES or name in self.known:
            remedy = "to multiply, write `*`"
            if name in self.known and self.known[name][0]:
                remedy = f"it is a table: write `{name}[{self._written(frame, arg_nodes)}]`"
            return self.report(frame, node, f"`{name}` is not a function", remedy)
        if name == "at":
            return at(self, node, frame, arg_nodes, keywords)
        if keywords and name in BUILT_IN:  # `at`, which takes keywords, has returned above
            return self.report(frame, node, f"`{name}` takes no keywords", "give the arguments in order")
        if name in FUNCTIONS:
            return self._function(node, frame, arg_nodes)
        if name in CALLED:
            return CALLED[name](self, node, frame, arg_nodes)
        near = get_close_matches(name, [*BUILT_IN, *library.definitions(), *self.definitions], 1)
        known = f"did you mean `{near[0]}`?" if near else "define it: `def " + name + "(...) = ...`"
        # a near name of the library is a likelier mistake than a table in parentheses
        if arg_nodes and not keywords and not (near and near[0] in library.definitions()):
            known += f"{'' if near else '.'} A table is read with brackets: `{name}[{self._written(frame, arg_nodes)}]`"
        return self.report(frame, node, f"there is no function `{name}`", known)

    def _written(self, frame: Frame, arg_nodes: list[Node]) -> str:
        return ", ".join(frame.text[a.start : a.stop] for a in arg_nodes)

    def _function(self, node: Node, frame: Frame, arg_nodes: list[Node]) -> Steps:
        name = node.value.text
        function = FUNCTIONS[name]
        if not function.least <= len(arg_nodes) <= function.most:
            extra = f", or `{name}(j in 0..n: ...)`" if name in REDUCTIONS else ""
            return self.arity(node, frame, f"`{function.signature}`{extra}", len(arg_nodes))

        return function.apply(self, frame, (yield from self.parts(arg_nodes, frame)))

    def _call_definition(
        self, node: Node, frame: Frame, overloads: dict[int, Definition], nodes: list[Node], keywords: dict[str, Node]
    ) -> Value | Steps:
        name, n = node.value.text, len(nodes)
        definition = overloads.get(n)
        coordinates = {c: a.args[0] for c, a in keywords.items()}
        if strange := next((c for c in coordinates if c not in COORDINATES), None):
            params = {p for d in overloads.values() for p in d.params}
            remedy = _signatures(overloads) if strange in params else "coordinates are `b`, `h`, `q` and `k`"
            what = "is given by its place" if strange in params else "is not a coordinate"
            if params and strange not in params:  # natten3d(t=4, ...): parameters elsewhere have other names
                what = f"is no parameter of `{name}`, and parameters are given by their place"
                remedy = _signatures(overloads)
            return self.report(frame, keywords[strange], f"`{strange}` {what}", remedy)
        # `causal(q, k)` as a mask_mod is called: entries without parameters take positions by place
        if definition is None and 0 in overloads and n in (2, 4) and not coordinates:
            definition, coordinates, nodes = overloads[0], dict(zip(COORDINATES[-n:], nodes)), []
        if definition is None:
            for more in (2, 4):
                if n - more in overloads and n > max(overloads):  # else some of a longer form are missing
                    args = [frame.text[a.start : a.stop] for a in nodes]
                    pairs = [f"{c} = {a}" for c, a in zip(COORDINATES[-more:], args[n - more :])]
                    shown = ", ".join(args[: n - more] + pairs)
                    message = f"`{name}` does not take {n} arguments"
                    return self.report(frame, node, message, f"coordinates are keywords: `{name}({shown})`")
            return self.arity(node, frame, _signatures(overloads).removeprefix("it is "), n)
        return self._expand(node, frame, definition, nodes, coordinates)

    def _expand(
        self, node: Node, frame: Frame, definition: Definition, arg_nodes: list[Node], coordinates: Mapping[str, Node]
    ) -> Steps:
        """The body of a definition with its parameters and coordinates replaced, all at once."""
        if frame.depth >= MAX_CALLS:
            self.too_large(node, frame)
        above: Frame | None = frame
        while above is not None:
            if above.definition is definition:  # by identity: overloads of a name may use each other
                return self.report(frame, node, f"`{definition.name}` uses itself", "definitions cannot be recursive")
            above = above.parent
        self.expanded.add((definition.name, len(definition.params)))
        names: dict[str, Value | str] = {}
        mapping: dict[Expr, Expr] = {}
        args: list[Expr | None] = []
        for param, arg in zip(definition.params, arg_nodes):
            bare = self._bare(arg, frame)
            value = bare if bare is not None else (yield arg, frame)
            e = value.expr if isinstance(value, Value) else None
            args.append(ir.param(value) if isinstance(value, str) else e)
            if coordinates and isinstance(value, Value) and e is not None and e.type is not BOOL and ir.uses(e):
                # a number keeps the caller's coordinates: it goes in after they have changed
                self.fresh += 1
                place = ir.make("param", (), ("argument", self.fresh), e.type)
                mapping[place] = e
                value = Value(place, value.flex)
            names[param] = value
            if isinstance(bare, str):
                # names the culprit when the parameter turns out to be unused
                self.passed.setdefault(bare, (definition, param))
        moves = self.integers(frame, "a coordinate", (yield from self.parts(list(coordinates.values()), frame)))
        # errors inside the library are shown at the call in the text, which is all that its writer sees
        site = frame.site or (node if definition.library else None)
        inner = Frame(definition.text, names, site, definition, frame, frame.depth + 1)
        for (_, advice), condition in zip(definition.checks, definition.conditions):
            holds = yield condition.body, replace(inner, text=condition.text)
            if holds.expr is not None:
                self.require(condition, inner.site or node, ir.expanded(ir.substitute(holds.expr, mapping)), advice)
        self.changed_meanings |= {definition.changed} - {""}
        body = yield definition.body, inner
        if moves is None or body.expr is None:
            return ERROR
        # arguments may decide conditions such as `left == -1`
        named = definition.library and frame.site is None and None not in args
        e = ir.expanded(body.expr) if named else body.expr
        e = decided(e, {}) if arg_nodes else e
        if coordinates:
            mapping |= {LEAVES[c]: x for c, x in zip(coordinates, moves)}
            self.charge(e, node, frame)
            e = ir.substitute(e, mapping)
        if named:
            # `q = q` moves nothing and is not printed
            places = {c: x for c, x in zip(coordinates, moves) if x is not LEAVES[c]}
            e = ir.call(definition.name, ir.expanded(e), [a for a in args if a is not None], places)
        return Value(e, body.flex)

    def require(self, definition: Definition, place: Node, condition: Expr, advice: str) -> None:
        """Report a condition on arguments that is false; one of parameters is decided when they have values."""
        if any(ir.free_names(condition)):
            self.needs[condition] = advice
        # a condition on sizes has no value before a call
        elif not ir.uses(condition) and not evaluate(condition, {}, {}):
            message = f"`{definition.signature}` needs `{definition.formula}`"
            self.problems.setdefault(place.span, TextProblem(message, place.span, advice))

    def _bare(self, node: Node, frame: Frame) -> Value | str | None:
        """An argument that is a bare name: a table or a scalar, as its use decides later."""
        if node.kind != "name" or (node.value in LEAVES and node.value not in frame.names):
            return None
        if node.value in frame.names:
            return frame.names[node.value]
        return None if self.definitions_of(node.value, frame) else str(node.value)

    def _reduce(self, node: Node, frame: Frame) -> Steps:
        return reduce(self, node, frame)


def _signatures(overloads: Mapping[int, Definition]) -> str:
    return "it is " + " or ".join(f"`{overloads[n].signature}`" for n in sorted(overloads))


def elaborate(checker: Checker, roots: Mapping[str, Node]) -> dict[str, Expr]:
    """The Exprs of statements by their kind (`expr`: not known), with calls; raises with every problem."""
    # a guess that changes gives earlier uses another meaning: the text is read again until no guess changes
    for _ in range(MAX_ROUNDS):
        checker.changed, checker.steps, checker.fresh = False, 0, 0
        checker.problems.clear()  # errors of a round with wrong guesses are no errors of the text
        checker.sites.clear()
        checker.needs.clear()
        exprs = {kind: _root(checker, kind, node) for kind, node in roots.items()}
        _unused_definitions(checker)
        if not checker.changed:
            break
    checker.misspelled()
    if checker.problems:
        problems = sorted(checker.problems.values(), key=lambda p: (p.span.start, -p.span.stop))
        raise MaskSyntaxError(checker.text, problems[:20], checker.name)  # one mistake may be followed by hundreds
    return {kind: e for kind, e in exprs.items() if e is not None}


def _root(checker: Checker, kind: str, node: Node) -> Expr | None:
    checker.kind = kind
    root = checker.root
    value = checker.evaluate(node, root)
    if kind == "mask" and not checker.narrow(root, node, value, {BOOL}) and value.expr is not None:
        shown = checker.quote(root, node).strip("`")
        example = f"{shown} >= 0" if len(shown) < 40 else "... >= 0"
        message = f"a mask needs a Bool, this is {value.expr.type.with_article}"
        checker.report(root, node, message, f"compare it with something, for example `{example}`")
        return None
    if kind in NUMBERS:
        checker.prefer(value, FLOAT)
        if value.expr is not None and value.expr.type is BOOL:
            checker.narrow(root, node, value, {INT, FLOAT})
            what, remedy = NUMBERS[kind]
            checker.report(root, node, f"{what} needs a number, this is a Bool", remedy)
            return None
    e = value.expr
    if e is not None and kind in NUMBERS:
        e = ir.to_float(e)
    # printers write a shared node out at each use, with calls of the library and without
    if e is not None and max(tree_size(e), tree_size(ir.expanded(e))) > MAX_NODES:
        checker.too_large(node, root)
    return e


def _unused_definitions(checker: Checker) -> None:
    """Checks the bodies of definitions without a call, with parameters that fit any use."""
    for overloads in checker.definitions.values():
        for d in overloads.values():
            if (d.name, len(d.params)) not in checker.expanded:
                # no name of a text has a dot: such a parameter meets no name of the text
                frame = Frame(d.text, {p: f"{d.name}.{p}" for p in d.params}, None, d, checker.root, 1)
                checker.kind = "score"  # the definition may be for a score mod
                checker.evaluate(d.body, frame)
                checker.expanded.discard((d.name, len(d.params)))
