"""Rules as rows. A row is `(name, before, after, when)`; `before` is a pattern or an operator name.

A pattern is an Expr whose leaves may be *holes*: `x y z` match any Int, `m n` an Int literal, `p r` any Bool,
`u v` any Float, `c d` Float literals. The same hole twice means the same node twice; commutative operators
match both ways round. `after` is another pattern, or a function from what matched to an Expr (None: no change).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from frisket.dsl.ir import Expr, make, rebuild
from frisket.dsl.types import BOOL, FLOAT, INT, Type

Bindings = dict[str, Expr]
COMMUTATIVE = frozenset(["add", "mul", "min", "max", "eq", "ne", "xor", "bitand", "bitor", "bitxor"])


def hole(name: str, type: Type, literal: bool = False) -> Expr:
    return make("hole", (), (name, literal), type)


x, y, z = (hole(n, INT) for n in "xyz")
m, n = (hole(n, INT, literal=True) for n in "mn")
p, r = (hole(n, BOOL) for n in "pr")
u, v = (hole(n, FLOAT) for n in "uv")
c, d = (hole(n, FLOAT, literal=True) for n in "cd")


def match(pattern: Expr, node: Expr, bindings: Bindings) -> Bindings | None:
    """The Exprs that the holes of `pattern` stand for in `node`, added to `bindings`; None if there is no match."""
    if pattern.op == "hole":
        name, literal = pattern.name
        # holes have types: a rule of Ints would be wrong of Floats, which round
        if node.type is not pattern.type or (literal and node.op != "lit"):
            return None
        if name in bindings:
            return bindings if bindings[name] is node else None  # equal nodes are one object
        return {**bindings, name: node}
    if pattern is node:
        return bindings
    if (pattern.op, pattern.type, len(pattern.args)) != (node.op, node.type, len(node.args)) or not pattern.args:
        return None
    result = _match_all(pattern.args, node.args, bindings)
    # the operands of a commutative operator are in canonical order, which the pattern's need not be
    if result is None and pattern.op in COMMUTATIVE:
        result = _match_all(pattern.args, node.args[::-1], bindings)
    return result


def _match_all(patterns: tuple[Expr, ...], nodes: tuple[Expr, ...], bindings: Bindings) -> Bindings | None:
    result: Bindings | None = bindings
    for a, b in zip(patterns, nodes, strict=True):
        result = match(a, b, result) if result is not None else None
    return result


def fill(pattern: Expr, bindings: Bindings) -> Expr:
    """The pattern with its holes filled."""
    if pattern.op == "hole":
        return bindings[pattern.name[0]]
    return rebuild(pattern, tuple(fill(a, bindings) for a in pattern.args))


@dataclass(frozen=True, eq=False)
class Rule:
    """One row of a table of rules; `origin` is the line it is written on."""

    name: str
    before: Expr | str
    after: Expr | Callable[..., Expr | None]
    when: Callable[..., bool] | None = None
    of: Type | None = None
    origin: str = ""

    @cached_property
    def below(self) -> frozenset[str]:
        """Operators that must stand right below the top: a quick test before the full match."""
        if isinstance(self.before, str):
            return frozenset()
        parts = (("lit" if a.name[1] else "") if a.op == "hole" else a.op for a in self.before.args)
        return frozenset(p for p in parts if p)

    @property
    def type(self) -> Type | None:
        """The required type of the first operand, or None."""
        return self.of if isinstance(self.before, str) else self.before.args[0].type

    @property
    def op(self) -> str:
        return self.before if isinstance(self.before, str) else self.before.op

    def apply(self, node: Expr) -> Expr | None:
        """The rewritten node, or None where the row does not apply."""
        if isinstance(self.before, str):
            assert not isinstance(self.after, Expr)
            if self.of is not None and node.args[0].type is not self.of:
                return None
            result = self.after(node)
            return None if result is node else result
        bindings = match(self.before, node, {})
        if bindings is None or (self.when is not None and not self.when(*bindings.values())):
            return None
        result = fill(self.after, bindings) if isinstance(self.after, Expr) else self.after(*bindings.values())
        return None if result is node else result


def rule(
    name: str,
    before: Expr | str,
    after: Expr | Callable[..., Expr | None],
    when: Callable[..., bool] | None = None,
    of: Type | None = None,
) -> Rule:
    """A row of a table of rules. `when`, and `after` if it is a function, get what the holes matched, in order of
    appearance. Where `before` is an operator name, `after` gets the node, if its first operand has the type `of`."""
    frame = sys._getframe(1)  # tests name the line of a rule that is not proved
    return Rule(name, before, after, when, of, f"{frame.f_globals['__name__']}:{frame.f_lineno}")
