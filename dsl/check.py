"""The tree to Expr: names, definitions, types of parameters. Collects every error before raising.

Work happens on the tree, so each error has its place. Evaluation is a loop over generators (each asks for its
parts with `yield node, frame`), so depth is bounded by memory and not by Python's stack.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import GeneratorType
from typing import Any, NoReturn

from . import ir, library
from .errors import MaskSyntaxError, Problem, Span
from .evaluate import evaluate
from .functions import BUILT_IN, FORMS, FUNCTIONS, LEAVES, RESERVED
from .ir import COORDINATES, REDUCTIONS, Expr
from .library import Definition
from .operators import ERROR, Frame, Guess, Operators, Part, Value
from .parse import MAX_NODES, Node, fail
from .types import BOOL, FLOAT, INT, Type

MAX_CALLS, MAX_RANGE, MAX_REDUCTIONS, MAX_ROUNDS = 200, 4096, 6, 50
Steps = Generator[tuple[Node, Frame], Value, Value]


@dataclass
class Checker(Operators):
    """One reading of one text. `known` gives (rank, type) of declared and bound names; rank 0 is a scalar."""

    known: Mapping[str, tuple[int, Type]] = field(default_factory=dict)
    definitions: Mapping[str, dict[int, Definition]] = field(default_factory=dict)
    used: dict[str, None] = field(default_factory=dict)
    expanded: set[tuple[str, int]] = field(default_factory=set)
    sites: list[tuple[Span, Expr]] = field(default_factory=list)
    with_score: bool = True
    steps: int = 0
    fresh: int = 0

    def __post_init__(self) -> None:
        self.root = Frame(self.text, {})

    # -- the loop -----------------------------------------------------------------------------------

    def evaluate(self, node: Node, frame: Frame) -> Value:
        stack: list[tuple[Steps, Node, Frame]] = []
        while True:
            self.steps += 1
            if self.steps > MAX_NODES:
                self._too_large(node, frame)
            step = getattr(self, "_" + node.kind)(node, frame)
            if type(step) is GeneratorType:
                stack.append((step, node, frame))
                value: Any = None
            else:
                value = self._seen(node, frame, step)
            while stack:
                steps, asked, where = stack[-1]
                try:
                    node, frame = steps.send(value)
                    break
                except StopIteration as done:
                    stack.pop()
                    value = self._seen(asked, where, done.value)
            else:
                return value  # type: ignore[no-any-return]

    def _seen(self, node: Node, frame: Frame, value: Value) -> Value:
        if frame is self.root and value.expr is not None:
            self.sites.append((node.span, value.expr))
        return value

    def _too_large(self, node: Node, frame: Frame) -> NoReturn:
        at = frame.site or node
        message = f"the text expands to more than {MAX_NODES:,} nodes"
        fail(self.text, self.name, at.start, at.stop, message, "say it with fewer or smaller definitions")

    def _parts(self, nodes: Sequence[Node], frame: Frame) -> Generator[tuple[Node, Frame], Value, list[Part]]:
        parts = []
        for n in nodes:
            parts.append((n, (yield n, frame)))
        return parts

    # -- operators ----------------------------------------------------------------------------------

    def _number(self, node: Node, frame: Frame) -> Value:
        if isinstance(node.value, int) and not -(2**63) <= node.value < 2**63:
            return self.report(frame, node, "this integer does not fit 64 bits")
        return Value(ir.lit(node.value))

    def _parens(self, node: Node, frame: Frame) -> Steps:
        return (yield node.args[0], frame)

    def _binary(self, node: Node, frame: Frame) -> Steps:
        return self.binary(frame, node.value, (yield from self._parts(node.args, frame)))

    def _compare(self, node: Node, frame: Frame) -> Steps:
        return self.chain(frame, node.value, (yield from self._parts(node.args, frame)))

    def _and(self, node: Node, frame: Frame) -> Steps:
        return self.logic(frame, node, node.value, (yield from self._parts(node.args, frame)))

    _or = _and

    def _xor(self, node: Node, frame: Frame) -> Steps:
        return self.logic(frame, node, [node.value], (yield from self._parts(node.args, frame)))

    def _not(self, node: Node, frame: Frame) -> Steps:
        (part,) = yield from self._parts(node.args, frame)
        return self.invert(frame, node, node.value, part)

    def _choose(self, node: Node, frame: Frame) -> Steps:
        return self.choose(frame, (yield from self._parts(node.args, frame)), "`if`")

    def _negative(self, node: Node, frame: Frame) -> Steps:
        (part,) = yield from self._parts(node.args, frame)
        inner, value = part
        constant = inner.kind == "name" and value.expr is not None and value.expr.op == "lit"
        if constant and value.expr is not None and value.expr.type is not BOOL:  # `-inf`, `-w` where w is 4
            return Value(ir.lit(-value.expr.name))
        return self.unary(frame, "`-`", part, lambda x: -x)

    def _then(self, node: Node, frame: Frame) -> Steps:
        parts = yield from self._parts(node.args, frame)
        found = [f for p in parts if (f := self.numbers(frame, "`then`", [p]))]
        if len(found) < 2:
            return ERROR
        first, second = (ir.to_float(f[0][0]) for f in found)
        if "score" not in ir.uses(second):
            return self.report(frame, parts[1][0], "what follows `then` does not use `score`", "add: `score + ...`")
        self._charge(second, node, frame)
        return Value(ir.substitute(second, {ir.SCORE: first}))

    def _charge(self, e: Expr, node: Node, frame: Frame, times: int = 1) -> None:
        """Substitution is work too: doubling and quadratic texts must end."""
        self.steps += times * sum(1 for _ in ir.walk(e)) // 4
        if self.steps > MAX_NODES:
            self._too_large(node, frame)

    def _colon(self, node: Node, frame: Frame) -> Value:
        return self.report(frame, node, "a whole axis `:` belongs in `dot`", f"write `{FORMS['dot']}`")

    def _keyword(self, node: Node, frame: Frame) -> Value:
        return self.report(frame, node, "a keyword does not belong here", "to compare, write `==`")

    # -- names --------------------------------------------------------------------------------------

    def _name(self, node: Node, frame: Frame) -> Value | Steps:
        name = node.value
        if name in frame.names:
            bound = frame.names[name]
            return bound if isinstance(bound, Value) else self._parameter(frame, node, bound)
        if name in LEAVES:
            if name == "score" and not self.with_score:
                return self.report(
                    frame, node, "a mask does not know `score`", "use it in a score mod, or compare positions"
                )
            return Value(LEAVES[name])
        overloads = self._definitions(name, frame)
        if overloads is None:
            return self._parameter(frame, node, name)
        if 0 not in overloads:
            return self.report(frame, node, f"`{name}` takes arguments", _signatures(overloads))
        return self._expand(node, frame, overloads[0], [], {})

    def _definitions(self, name: str, frame: Frame) -> dict[int, Definition] | None:
        """What `name` is defined as here; the user's names hide the library's, except inside the library."""
        if frame.site is None:
            if name in self.definitions:
                return self.definitions[name]
            if name in self.known:
                return None
        return library.definitions().get(name)

    def _guess(self, frame: Frame, node: Node, name: str, rank: int) -> Guess | None:
        guess = self.guesses.setdefault(name, Guess((frame.site or node).span))
        if guess.rank is None:
            guess.rank = rank
        if guess.rank != rank:
            self.report(
                frame, node, f"`{name}` is {_rank(guess.rank)} elsewhere and {_rank(rank)} here",
                "use two names, or the same number of indices",
            )  # fmt: skip
            return None
        return guess

    def _parameter(self, frame: Frame, node: Node, name: str) -> Value:
        self.used[name] = None
        if name not in self.known:
            guess = self._guess(frame, node, name, 0)
            return ERROR if guess is None else Value(ir.param(name, guess.type), frozenset({name}))
        rank, type_ = self.known[name]
        if rank:
            indices = ", ".join(("q", "k") if rank == 2 else COORDINATES[-rank:] if rank > 2 else ("q",))
            return self.report(frame, node, f"`{name}` is {_rank(rank)}", f"look it up: `{name}[{indices}]`")
        return Value(ir.param(name, type_))

    def _table(self, frame: Frame, node: Node, rank: int | None) -> tuple[str, Type, frozenset[str]] | None:
        """(name, element type, names the type hangs on) of the table a bare name stands for."""
        if node.kind != "name":
            self.report(frame, node, f"{self.quote(frame, node)} is not a table", "only a table's name takes `[ ]`")
            return None
        name = frame.names.get(node.value, node.value)
        local = node.value in frame.names
        if not isinstance(name, str) or (not local and (name in LEAVES or self._definitions(name, frame))):
            self.report(frame, node, f"`{node.value}` is not a table", "only tables take `[ ]`")
            return None
        self.used[name] = None
        if name in self.known:
            have, type_ = self.known[name]
            if have == 0:
                self.report(frame, node, f"`{name}` is a number, not a table", f"write `{name}` without `[ ]`")
                return None
            if rank is not None and have != rank:
                self.report(
                    frame, node, f"`{name}` is {_rank(have)}, indexed with {rank}", f"give {have}, one per axis"
                )
                return None
            return name, type_, frozenset()
        if rank is None:
            guess: Guess | None = self.guesses.setdefault(name, Guess((frame.site or node).span))
        else:
            guess = self._guess(frame, node, name, rank)
        return None if guess is None else (name, guess.type, frozenset({name}))

    def _lookup(self, node: Node, frame: Frame) -> Steps:
        base, *items = node.args
        table = self._table(frame, base, len(items))
        parts = yield from self._parts(items, frame)
        indices = self.integers(frame, "an index", parts)
        if table is None or indices is None:
            return ERROR
        name, type_, flex = table
        return Value(ir.lookup(name, tuple(indices), type_), flex)

    # -- calls --------------------------------------------------------------------------------------

    def _call(self, node: Node, frame: Frame) -> Value | Steps:
        name = node.value.text
        given = [a for a in node.args if a.kind != "keyword"]
        keywords = {a.value.text: a for a in node.args if a.kind == "keyword"}
        if len(given) + len(keywords) < len(node.args):
            return self.report(frame, node, "a keyword is given twice", "keep one of them")
        overloads = None if name in frame.names or name in LEAVES else self._definitions(name, frame)
        if overloads is not None:
            return self._call_definition(node, frame, overloads, given, keywords)
        if name in frame.names or name in LEAVES or name in self.known:
            return self.report(frame, node, f"`{name}` is not a function", "to multiply, write `*`")
        if name == "at":
            return self._at(node, frame, given, keywords)
        if keywords and name in BUILT_IN:
            return self.report(frame, node, f"`{name}` takes no keywords", "give the arguments in order")
        if name in FUNCTIONS:
            return self._function(node, frame, given)
        if name in FORMS:
            form: Callable[..., Value | Steps] = getattr(self, "_form_" + name, self._form)
            return form(node, frame, given)
        near = get_close_matches(name, [*BUILT_IN, *library.definitions(), *self.definitions], 1)
        known = f"did you mean `{near[0]}`?" if near else "define it: `def " + name + "(...) = ...`"
        return self.report(frame, node, f"there is no function `{name}`", known)

    def _function(self, node: Node, frame: Frame, given: list[Node]) -> Value | Steps:
        name = node.value.text
        function = FUNCTIONS[name]
        if not function.least <= len(given) <= function.most:
            extra = f", or `{name}(j in 0..n: ...)`" if name in REDUCTIONS else ""
            return self._arity(node, frame, f"`{function.signature}`{extra}", len(given))

        def steps() -> Steps:
            return function.apply(self, frame, (yield from self._parts(given, frame)))

        return steps()

    def _arity(self, node: Node, frame: Frame, signatures: str, count: int) -> Value:
        plural = "argument" if count == 1 else "arguments"
        return self.report(frame, node, f"`{node.value.text}` does not take {count} {plural}", f"it is {signatures}")

    def _form(self, node: Node, frame: Frame, given: list[Node]) -> Value:
        return self._arity(node, frame, f"`{FORMS[node.value.text]}`", len(given))

    def _call_definition(
        self, node: Node, frame: Frame, overloads: dict[int, Definition], given: list[Node], keywords: dict[str, Node]
    ) -> Value | Steps:
        name, n = node.value.text, len(given)
        definition = overloads.get(n)
        coordinates = {c: a.args[0] for c, a in keywords.items()}
        if strange := next((c for c in coordinates if c not in COORDINATES), None):
            params = {p for d in overloads.values() for p in d.params}
            remedy = _signatures(overloads) if strange in params else "coordinates are `b`, `h`, `q` and `k`"
            what = "is given by its place" if strange in params else "is not a coordinate"
            return self.report(frame, keywords[strange], f"`{strange}` {what}", remedy)
        if definition is None and 0 in overloads and n in (2, 4) and not coordinates:
            definition, coordinates, given = overloads[0], dict(zip(COORDINATES[-n:], given)), []
        if definition is None:
            for more in (2, 4):
                if n - more in overloads:
                    args = [frame.text[a.start : a.stop] for a in given]
                    pairs = [f"{c} = {a}" for c, a in zip(COORDINATES[-more:], args[n - more :])]
                    shown = ", ".join(args[: n - more] + pairs)
                    return self.report(
                        frame, node, f"`{name}` does not take {n} arguments",
                        f"coordinates are keywords: `{name}({shown})`",
                    )  # fmt: skip
            return self._arity(node, frame, _signatures(overloads).removeprefix("it is "), n)
        return self._expand(node, frame, definition, given, coordinates)

    def _expand(
        self, node: Node, frame: Frame, definition: Definition, given: list[Node], coordinates: Mapping[str, Node]
    ) -> Steps:
        """The body with its parameters and coordinates replaced, all at once."""
        if frame.depth >= MAX_CALLS:
            self._too_large(node, frame)
        above: Frame | None = frame
        while above is not None:
            if above.definition is definition:
                return self.report(frame, node, f"`{definition.name}` uses itself", "definitions cannot be recursive")
            above = above.parent
        self.expanded.add((definition.name, len(definition.params)))
        names: dict[str, Value | str] = {}
        moved: dict[Expr, Expr] = {}
        for param, arg in zip(definition.params, given):
            bare = self._bare(arg, frame)
            value = bare if bare is not None else (yield arg, frame)
            e = value.expr if isinstance(value, Value) else None
            if coordinates and isinstance(value, Value) and e is not None and e.type is not BOOL and e.op != "lit":
                # a number keeps the caller's coordinates: it goes in after they have changed
                self.fresh += 1
                place = ir.make("param", (), ("argument", self.fresh), e.type)
                moved[place] = e
                value = Value(place, value.flex)
            names[param] = value
        parts = yield from self._parts(list(coordinates.values()), frame)
        moves = self.integers(frame, "a coordinate", parts)
        inner = Frame(
            definition.text, names, frame.site or (node if definition.library else None),
            definition, frame, frame.depth + 1,
        )  # fmt: skip
        body = yield definition.body, inner
        if moves is None or body.expr is None:
            return ERROR
        if coordinates:
            moved |= {LEAVES[c]: e for c, e in zip(coordinates, moves)}
            self._charge(body.expr, node, frame)
            return Value(ir.substitute(body.expr, moved), body.flex)
        return body

    def _bare(self, node: Node, frame: Frame) -> Value | str | None:
        """An argument that is just a name may be a table: pass the name on and let its use decide."""
        if node.kind != "name" or (node.value in LEAVES and node.value not in frame.names):
            return None
        if node.value in frame.names:
            return frame.names[node.value]
        return None if self._definitions(node.value, frame) else str(node.value)

    def _at(self, node: Node, frame: Frame, given: list[Node], keywords: dict[str, Node]) -> Value | Steps:
        bad = next((a for c, a in keywords.items() if c not in COORDINATES), None)
        if len(given) != 1 or not keywords or bad is not None:
            return self.report(frame, bad or node, "`at` re-reads one expression elsewhere", f"it is `{FORMS['at']}`")

        def steps() -> Steps:
            body = yield given[0], frame
            parts = yield from self._parts([a.args[0] for a in keywords.values()], frame)
            moves = self.integers(frame, "a coordinate", parts)
            if moves is None or body.expr is None:
                return ERROR
            self._charge(body.expr, node, frame)
            moved = {LEAVES[c]: e for c, e in zip(keywords, moves)}
            return Value(ir.substitute(body.expr, moved), body.flex)

        return steps()

    # -- forms --------------------------------------------------------------------------------------

    def _form_segment(self, node: Node, frame: Frame, given: list[Node]) -> Value | Steps:
        if len(given) != 2:
            return self._form(node, frame, given)

        def steps() -> Steps:
            table = self._table(frame, given[0], 1)
            index = self.integers(frame, "`segment`", (yield from self._parts(given[1:], frame)))
            if table is None or index is None:
                return ERROR
            name, type_, flex = table
            if not self.narrow(frame, given[0], Value(ir.param(name, type_), flex), {INT}):
                return self.report(frame, given[0], f"`segment` takes a table of Ints, `{name}` is of {type_}s")
            return Value(ir.segment(name, index[0]))

        return steps()

    def _form_extent(self, node: Node, frame: Frame, given: list[Node]) -> Value:
        if len(given) != 2 or given[1].kind != "number" or not isinstance(given[1].value, int):
            return self.report(
                frame, node, "`extent` takes a table and the number of an axis", "for example `extent(t, 0)`"
            )
        table = self._table(frame, given[0], None)
        if table is None:
            return ERROR
        rank = self.known[table[0]][0] if table[0] in self.known else None
        if given[1].value < 0 or (rank is not None and given[1].value >= rank):
            return self.report(frame, given[1], f"`{table[0]}` has no axis {given[1].value}", "axes count from 0")
        return Value(ir.extent(table[0], given[1].value))

    def _form_dot(self, node: Node, frame: Frame, given: list[Node]) -> Value | Steps:
        """`dot(x[b, :], y[k, :])` is `sum(j in 0..extent(x, 1): x[b, j] * y[k, j])`."""
        axes = [[i for i, a in enumerate(g.args) if a.kind == "colon"] for g in given if g.kind == "lookup"]
        if len(given) != 2 or [len(a) for a in axes] != [1, 1]:
            return self.report(
                frame, node, "`dot` takes two tables with one whole axis each", f"for example `{FORMS['dot']}`"
            )

        def steps() -> Steps:
            self.fresh += 1
            own = ir.make("bound", (), ("dot", self.fresh))
            name = f"axis {self.fresh}"  # no name in a text has a space
            inner = replace(frame, names={**frame.names, name: Value(own)})
            rows = [Node("lookup", None, [_axis(a, name) for a in g.args], g.start, g.stop) for g in given]
            parts = yield from self._parts(rows, inner)
            found = self.numbers(frame, "`dot`", parts)
            table = self._table(frame, given[0].args[0], None)
            if found is None or table is None:
                return ERROR
            (x, y), flex = found
            end = ir.extent(table[0], axes[0][0] - 1)
            return Value(ir.reduce("sum", ir.ZERO, end, lambda j: ir.substitute(x * y, {own: j})), flex)

        return steps()

    def _reduce(self, node: Node, frame: Frame) -> Value | Steps:
        kind, variable = node.value
        low, high, body = node.args
        if kind.text not in REDUCTIONS:
            return self.report(frame, node, f"there is no reduction `{kind.text}`", "it is any, all, sum, min or max")
        if variable.text in RESERVED:
            return self.report(frame, node, f"`{variable.text}` is reserved", "call the variable `j`")

        def steps() -> Steps:
            ends = yield from self._parts([low, high], frame)
            bounds = self.integers(frame, "a bound", ends)
            fine = bounds is not None and self._range(kind.text, bounds, node, frame)
            self.fresh += 1
            own = ir.make("bound", (), ("own", self.fresh))
            inner = replace(frame, names={**frame.names, variable.text: Value(own)})
            value = yield body, inner
            if kind.text in ("any", "all"):
                e, flex = self.boolean(frame, body, value, f"`{kind.text}`"), frozenset[str]()
            else:
                found = self.numbers(frame, f"`{kind.text}`", [(body, value)])
                e, flex = (None, frozenset()) if found is None else (found[0][0], found[1])
            if e is None or bounds is None or not fine:
                return ERROR
            inside = 1 + max((n.name[1] for n in ir.walk(e) if n.op == "reduce"), default=-1)
            if inside >= MAX_REDUCTIONS:
                return self.report(
                    frame,
                    node,
                    f"reductions are nested more than {MAX_REDUCTIONS} deep",
                    "put the inner ones in a table",
                )
            self._charge(e, node, frame, 3**inside)  # opening a binder opens those inside it
            return Value(ir.reduce(kind.text, bounds[0], bounds[1], lambda j: ir.substitute(e, {own: j})), flex)

        return steps()

    def _range(self, kind: str, bounds: list[Expr], node: Node, frame: Frame) -> bool:
        """Whether the bounds are known when the text is read, and the range is of a sane size."""
        leaves = [n for n in ir.walk(*bounds) if not n.args]
        if any(n.op not in ("lit", "extent") for n in leaves):
            self.report(
                frame, node, f"the bounds of `{kind}` must be known when the text is read",
                "write numbers, or take them from a table: `0..extent(t, 0)`",
            )  # fmt: skip
            return False
        if any(n.op == "extent" for n in leaves):
            return True
        low, high = (int(evaluate(e, {})) for e in bounds)
        if high - low > MAX_RANGE:
            self.report(
                frame, node, f"`{kind}` runs over {high - low:,} values, more than {MAX_RANGE:,}", "use a table"
            )
        elif high <= low and kind in ("min", "max"):
            self.report(frame, node, f"`{kind}` over an empty range has no value", "make the range longer")
        else:
            return True
        return False


def _axis(node: Node, name: str) -> Node:
    return Node("name", name, [], node.start, node.stop) if node.kind == "colon" else node


def _rank(rank: int | None) -> str:
    return "a number" if not rank else f"a table with {rank} {'axis' if rank == 1 else 'axes'}"


def _signatures(overloads: Mapping[int, Definition]) -> str:
    return "it is " + " or ".join(f"`{overloads[n].signature}`" for n in sorted(overloads))


def elaborate(checker: Checker, roots: Mapping[str, Node]) -> dict[str, Expr]:
    """The Exprs of the statements `mask`, `score` or (kind not known) `expr`; raises with every problem."""
    for _ in range(MAX_ROUNDS):
        checker.changed, checker.steps, checker.fresh = False, 0, 0
        checker.problems.clear()
        checker.sites.clear()
        found = {kind: _root(checker, kind, node) for kind, node in roots.items()}
        _unused_definitions(checker)
        if not checker.changed:
            break
    _unknown_names(checker)
    if checker.problems:
        problems = sorted(checker.problems.values(), key=lambda p: (p.span.start, -p.span.stop))
        raise MaskSyntaxError(checker.text, problems[:20], checker.name)
    return {kind: e for kind, e in found.items() if e is not None}


def _root(checker: Checker, kind: str, node: Node) -> Expr | None:
    checker.with_score = kind != "mask"
    root = checker.root
    value = checker.evaluate(node, root)
    if kind == "mask" and not checker.narrow(root, node, value, {BOOL}) and value.expr is not None:
        shown = checker.quote(root, node).strip("`")
        example = f"{shown} >= 0" if len(shown) < 40 else "... >= 0"
        type_ = "an Int" if value.expr.type is INT else "a Float"
        checker.report(
            root, node, f"a mask needs a Bool, this is {type_}", f"compare it with something, for example `{example}`"
        )
        return None
    if kind == "score":
        checker.prefer(value, FLOAT)
        if value.expr is not None and value.expr.type is BOOL:
            checker.narrow(root, node, value, {INT, FLOAT})
            checker.report(
                root, node, "a score mod needs a number, this is a Bool", "choose with it: `score if ... else -inf`"
            )
            return None
    e = value.expr
    if e is not None and kind == "score":
        e = ir.to_float(e)
    if e is not None and tree_size(e) > MAX_NODES:
        checker._too_large(node, root)
    return e


def _unused_definitions(checker: Checker) -> None:
    """Bodies nobody calls are read too, with parameters that fit any use."""
    for overloads in checker.definitions.values():
        for d in overloads.values():
            if (d.name, len(d.params)) not in checker.expanded:
                frame = Frame(d.text, {p: f"{d.name}.{p}" for p in d.params}, None, d, checker.root, 1)
                checker.with_score = True
                checker.evaluate(d.body, frame)
                checker.expanded.discard((d.name, len(d.params)))


def _unknown_names(checker: Checker) -> None:
    """A Bool that nothing declares and that is nearly a definition's name is that name misspelled."""
    candidates = [*library.definitions(), *checker.definitions]
    for name, guess in checker.guesses.items():
        near = get_close_matches(name, candidates, 1, 0.75) if guess.rank == 0 and guess.type is BOOL else []
        if near and "." not in name:
            remedy = f"did you mean `{near[0]}`? A parameter of that name is declared: `param {name}: bool`"
            problem = Problem(f"unknown name `{name}`", guess.span, remedy)
            checker.problems.setdefault(guess.span, problem)


def tree_size(root: Expr) -> int:
    """How many nodes `root` has when shared ones are written out each time."""
    sizes: dict[Expr, int] = {}
    for node in ir.walk(root):
        sizes[node] = 1 + sum(sizes[a] for a in node.args)
    return sizes[root]


__all__ = ["Checker", "elaborate", "tree_size"]
