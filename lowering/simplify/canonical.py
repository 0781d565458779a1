"""One canonical Expr for a mask, whatever the names of its parameters and the order of its operands.

>>> from frisket.dsl.ir import lookup, param
>>> from frisket.dsl.sugar import eq, k, q
>>> canonical(eq(lookup("doc", (k,)), lookup("doc", (q,))) & (k <= q) & (q - k < param("w")))
Canonical(expr=q >= k & q - k < s0 & t0[q] == t0[k], names={'s0': 'w', 't0': 'doc'})

Parameters are told apart as the vertices of a graph are (colour refinement). They differ by type and rank, then by
where they occur, then by where their neighbours occur, until nothing more is learnt. Where several still look alike,
each of them is tried as the first and the smallest outcome kept. Parameters that look alike are nearly always
interchangeable, so that every choice gives the same Expr; past WORK looks at a node the user's names decide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from frisket.dsl.ir import ONE, Expr, renamed, walk
from frisket.dsl.types import BOOL, FLOAT, INT

from .affine import Linear, by_length, digest, linear, user_name
from .engine import simplify
from .rules_order import MIRRORED, chain

WORK = 15_000
Colours = dict[str, bytes]


@dataclass(frozen=True)
class Canonical:
    """A canonical Expr: scalars are s0, s1, ... and tables t0, t1, ... in order; `names` gives the user's names."""

    expr: Expr
    names: Mapping[str, str] = field(default_factory=dict)


def canonical(e: Expr) -> Canonical:
    """The simplified `e` with operands and parameters in an order that depends on neither names nor writing."""
    names: dict[str, str] = {n: n for n in _kinds([e])}  # ours to the user's
    for _ in range(2):  # the rules see operands in canonical order, and what they leave is numbered again
        e, names = _numbered(e, names, ranked([e]))
        e = simplify(e)
    for _ in range(4):  # numbers follow the order of appearance, and ties between operands follow numbers
        order = list(_kinds([e]))
        renumbered, names = _numbered(e, names, order)
        if renumbered is e:
            break
        e = simplify(renumbered)
    return Canonical(e, names)


def _numbered(e: Expr, names: dict[str, str], order: list[str]) -> tuple[Expr, dict[str, str]]:
    kinds = _kinds([e])
    count = {"s": 0, "t": 0}
    new: dict[str, str] = {}
    for name in order:
        letter = "s" if "param" in kinds[name] else "t"
        new[name] = f"{letter}{count[letter]}"
        count[letter] += 1
    return renamed(e, new), {new[n]: names[n] for n in order}


def _kinds(roots: Iterable[Expr]) -> dict[str, tuple[str, ...]]:
    """Every parameter and table, in order of appearance, with its kind."""
    out: dict[str, set[str]] = {}
    for e in walk(*roots):
        name = user_name(e)
        if name is not None:
            out.setdefault(name, set()).add("param" if e.op == "param" else f"table of {len(e.args)}")
            out[name].add(f"{e.op} of {e.type}")
    return {n: tuple(sorted(kind, reverse=True)) for n, kind in out.items()}


def ranked(roots: Sequence[Expr]) -> list[str]:
    """The parameters of some Exprs, in an order that depends only on their use."""
    start = {n: digest(*kind) for n, kind in sorted(_kinds(roots).items())}
    # kinds tell all parameters apart: no graph is built
    if len(set(start.values())) == len(start):
        return sorted(start, key=lambda n: start[n])
    return _settled(_Graph(roots, WORK), start)[1]


def untied(roots: Sequence[Expr]) -> dict[str, str]:
    """New names for the parameters of simplified Exprs under which `simplify` orders operands as `canonical` does;
    empty where the user's names do so already."""
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, kind in _kinds(roots).items():
        alike[kind].append(name)
    if all(len(names) == 1 for names in alike.values()):
        return {}
    order = ranked(roots)
    if all(sorted(names, key=order.index) == sorted(names, key=by_length) for names in alike.values()):
        return {}
    kinds = ((name, "s" if "param" in kind else "t") for kind, names in alike.items() for name in names)
    return {name: f"{letter}{order.index(name)}" for name, letter in kinds}


def _settled(graph: _Graph, colours: Colours) -> tuple[bytes, list[str]]:
    """The smallest encoding of the graph, and the order of parameters that gives it."""
    colours, picture = graph.refined(colours)
    classes: dict[bytes, list[str]] = defaultdict(list)
    for name, colour in colours.items():
        classes[colour].append(name)
    tied = min(((c, names) for c, names in classes.items() if len(names) > 1), default=None)
    if tied is None or graph.left <= 0:  # past the budget the user's names decide
        return picture, sorted(colours, key=lambda n: (colours[n], by_length(n)))
    best: tuple[bytes, list[str]] | None = None
    for name in tied[1]:  # each of the tied parameters may give the smallest picture
        if best is not None and graph.left <= 0:
            break
        candidate = _settled(graph, {**colours, name: digest("first", tied[0])})
        if best is None or candidate[0] < best[0]:
            best = candidate
    assert best is not None
    return best


class _Graph:
    """The graph of an Expr: every node with its operands as labelled edges. The label is the place, or where places do
    not matter nothing in a conjunction and the coefficient in a sum."""

    def __init__(self, roots: Sequence[Expr], work: int) -> None:
        self.roots, self.left = roots, work
        for e in walk(*roots):  # operands first, so that no depth is too deep
            if e.type is INT:
                linear(e)
        edges: dict[Expr, list[tuple[str, Expr]]] = {}
        tags: dict[Expr, str] = {}
        stack = list(roots)
        while stack:
            e = stack.pop()
            if e not in tags:
                tags[e], edges[e] = _view(e)
                stack.extend(a for _, a in edges[e])
        self.tags, self.edges = tags, edges
        self.nodes = [*walk(*roots[::-1], below=lambda e: [a for _, a in edges[e]][::-1])]  # operands first

    def refined(self, colours: Colours) -> tuple[Colours, bytes]:
        """Colours refined until no more classes appear, and a digest of the coloured graph."""
        while True:
            down = self._below(colours)
            new = self._around(colours, down)
            self.left -= len(self.nodes)
            # no class was split: further rounds would find none either
            if len(set(new.values())) == len(set(colours.values())) or self.left <= 0:
                return new, digest(*(down[r] for r in self.roots))
            colours = new

    def _below(self, colours: Colours) -> dict[Expr, bytes]:
        """An encoding of each node from its operands, with names replaced by colours."""
        out: dict[Expr, bytes] = {}
        for e in self.nodes:
            name = user_name(e)
            label = colours[name] if name is not None else str(e.name)
            out[e] = digest(self.tags[e], str(e.type), label, *self._sides(e, out)[0])
        return out

    def _sides(self, e: Expr, below: Mapping[Expr, bytes]) -> tuple[list[bytes], bool]:
        """The edges as sorted bytes, and whether signs were turned: `a - b == 0` is `b - a == 0`."""
        edges = self.edges[e]
        plain = sorted(digest(label, below[a]) for label, a in edges)
        # an equation is the same with all signs turned: the smaller encoding stands for both
        if not self.tags[e].endswith("+-"):
            return plain, False
        turned = sorted(digest(_negated(label), below[a]) for label, a in edges)
        return (turned, True) if turned < plain else (plain, False)

    def _around(self, colours: Colours, below: Mapping[Expr, bytes]) -> Colours:
        """The colour of each parameter, with the places where the parameter occurs."""
        above: dict[Expr, list[bytes]] = defaultdict(list)
        for r in self.roots:
            above[r].append(b"root")
        places: dict[str, list[bytes]] = defaultdict(list)
        for e in reversed(self.nodes):
            context = digest(*sorted(above[e]))
            name = user_name(e)
            if name is not None:
                places[name].append(digest(context, below[e]))
            sides, turned = self._sides(e, below)
            # equal to its mirror image, so a sign tells nothing about a parameter
            either = self.tags[e].endswith("+-") and sides == self._mirror(e, below)
            for label, a in self.edges[e]:
                label = label.lstrip("-") if either else _negated(label) if turned else label
                above[a].append(digest(label, context, below[e]))
        return {n: digest(c, *sorted(places[n])) for n, c in colours.items()}

    def _mirror(self, e: Expr, below: Mapping[Expr, bytes]) -> list[bytes]:
        turned = self._sides(e, below)[1]
        return sorted(digest(label if turned else _negated(label), below[a]) for label, a in self.edges[e])


def _negated(label: str) -> str:
    return label[1:] if label.startswith("-") else f"-{label}"


View = tuple[str, list[tuple[str, Expr]]]


def _view(e: Expr) -> View:
    """The operator and the labelled operands of a node. A tag that ends in `+-` means all signs may be turned."""
    return _VIEWS.get(e.op, _in_places)(e)


def _in_places(e: Expr) -> View:
    return e.op, [(str(i), a) for i, a in enumerate(e.args)]


def _unordered(e: Expr) -> View:
    return e.op, [("", a) for a in e.args]


def _chained(e: Expr) -> View:
    # Floats may change places, and are never regrouped: only the two operands of one node are alike
    return (e.op, [("", a) for a in chain(e)]) if e.type is not FLOAT else _unordered(e)


def _summed(otherwise: Callable[[Expr], View]) -> Callable[[Expr], View]:
    def view(e: Expr) -> View:
        form = linear(e) if e.type is INT else Linear(((e, 1),), 0)
        return otherwise(e) if form.terms == ((e, 1),) else ("sum", _terms(form))

    return view


def _comparison(e: Expr) -> View:
    # one direction: `u > v` is `v < u`, with NaN too
    op = e.op if e.op in ("lt", "le") else MIRRORED[e.op]
    low, high = e.args if op == e.op else e.args[::-1]
    if low.type is not INT:
        return op, [("0", low), ("1", high)]
    form = linear(high) - linear(low)
    # a strict bound is one more, so `q > k` and `q - 1 >= k` look alike
    return "ge", _terms(Linear(form.terms, form.const - (op == "lt")))


def _equation(e: Expr) -> View:
    left, right = e.args
    return (f"{e.op} +-", _terms(linear(left) - linear(right))) if left.type is INT else _unordered(e)


_VIEWS: dict[str, Callable[[Expr], View]] = {
    **dict.fromkeys(("and", "or"), _unordered),
    **dict.fromkeys(("eq", "ne"), _equation),
    **dict.fromkeys(("lt", "le", "gt", "ge"), _comparison),
    **dict.fromkeys(("min", "max", "bitand", "bitor", "bitxor", "xor"), _chained),
    **dict.fromkeys(("sub", "neg"), _summed(_in_places)),
    "add": _summed(lambda e: _unordered(e) if e.type is FLOAT else _in_places(e)),
    "mul": _summed(_chained),
    "abs": lambda e: ("abs +-", _terms(linear(e.args[0]))) if e.type is INT else _in_places(e),
    "extent": lambda e: (f"extent {e.name[1]}", []),
    "lit": lambda e: ("lit" if e.type is BOOL else f"lit {e.name!r}", []),
}


def _terms(form: Linear) -> list[tuple[str, Expr]]:
    terms = [(str(f), a) for a, f in form.terms]
    return [*terms, (str(form.const), ONE)] if form.const else terms
