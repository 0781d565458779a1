"""The simplifier: applies rules to a fixpoint, bottom up, each interned node once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from frisket.dsl.ir import Expr, rebuild
from frisket.dsl.types import Type
from frisket.grammar.memo import memo

from . import rules_arithmetic, rules_boolean, rules_compare, rules_division, rules_order, rules_select
from .pattern import Rule
from .rules_order import LONGEST

_FAMILIES = rules_order, rules_arithmetic, rules_division, rules_compare, rules_boolean, rules_select
RULES: tuple[Rule, ...] = tuple(r for family in _FAMILIES for r in family.RULES)
_STEPS = 100_000  # two rules that undo each other would never end; no ordinary text comes near
_WORK = 1 << 20  # pairs of operands that rules may compare, some seconds; past it a node stays as it is


Row = tuple[str, frozenset[str], Callable[[Expr], Expr | None]]  # a rule's name, what must stand below, the rule


@memo(group="once")
def _by_operator(rules: tuple[Rule, ...]) -> dict[tuple[str, Type], list[Row]]:
    """The rules for an operator and the type of its first operand."""
    rows: dict[tuple[str, Type], list[Row]] = {}
    for r in rules:
        for type in Type:
            if r.type in (None, type):
                run = r.apply if isinstance(r.after, Expr) or isinstance(r.before, Expr) else r.after
                rows.setdefault((r.op, type), []).append((r.name, r.below, run))
    return rows


class Simplifier:
    """The rules, indexed by operator; `counts` says how often each rule fired."""

    def __init__(self, rules: tuple[Rule, ...] = RULES) -> None:
        self.rules, self.by_op = rules, _by_operator(rules)
        self.done: dict[Expr, Expr] = {}
        self.counts: Counter[str] = Counter()
        self.steps = 0
        self.work = 0

    def __call__(self, root: Expr) -> Expr:
        """The simplest form that the rules reach: the same object when no rule applies.

        In very large expressions the nodes past `_WORK` stay as they are."""
        stack = [root]
        while stack:
            node = stack[-1]
            if node in self.done:
                stack.pop()
                continue
            if node.settled is self.rules:  # remembered across calls: rules that change nothing do not run again
                self.done[node] = node
                continue
            missing = [a for a in node.args if a not in self.done]
            if missing:
                stack.extend(missing)
                continue
            inner = rebuild(node, tuple(self.done[a] for a in node.args))
            # the rules may have met the rebuilt node elsewhere
            new = self.done.get(inner) if inner is not node else None
            if new is None:
                # new operands may be unsimplified where rebuilding flattened or renamed them: they go first
                new = self._once(inner) if inner is node or all(a in self.done for a in inner.args) else inner
            if new is node:
                self.done[node] = node
                stack.pop()
            elif new in self.done:
                self.done[node] = self.done[new]
                stack.pop()
            else:
                stack.append(new)
        return self.done[root]

    def _once(self, node: Expr) -> Expr:
        if not node.args:
            return node
        # rules compare the operands of chains in pairs
        operands = min(node.depth, LONGEST) if node.op in ("min", "max") else len(node.args)
        self.work += 1 + operands * operands // 16
        if self.work > _WORK:
            return node
        below = {a.op for a in node.args}
        for name, required, run in self.by_op.get((node.op, node.args[0].type), ()):
            if required and not required <= below:
                continue
            new = run(node)
            if new is not None and new is not node:
                self.counts[name] += 1
                self.steps += 1
                if self.steps > _STEPS:
                    raise RuntimeError(f"the rules do not settle: {self.counts.most_common(4)}")
                return new
        node.settled = self.rules
        return node


def simplify(root: Expr, off: Iterable[str] = ()) -> Expr:
    """Simplify an Expr: `simplify(e)`. Rows named in `off` do not run."""
    skipped = frozenset(off)
    return Simplifier(tuple(r for r in RULES if r.name not in skipped) if skipped else RULES)(root)
