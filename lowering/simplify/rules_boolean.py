"""Rules of logic: negation normal form, absorption, complement, factoring, and bounds that imply one another."""

from __future__ import annotations

from frisket.dsl import ir
from frisket.dsl.ir import FALSE, TRUE, ZERO_OF, Expr, build, connect, literal_value, operands, substitute, uses, walk
from frisket.dsl.sugar import where
from frisket.dsl.types import BOOL, INT
from frisket.grammar.memo import memo

from .affine import NEGATE, Linear, Terms, is_int_comparison, relation, sort_key, write_relation
from .pattern import p, r, rule
from .rules_order import LONGEST, chain

DUAL = {"and": "or", "or": "and"}


@memo(group="expressions")
def negate(e: Expr) -> Expr:
    """The negation of e, pushed to the leaves where that costs nothing."""
    if e.op == "not":
        return e.args[0]
    if e is TRUE or e is FALSE:
        return FALSE if e is TRUE else TRUE
    if is_int_comparison(e):
        return build(NEGATE[e.op], *e.args)
    if e.op in DUAL:
        return build(DUAL[e.op], *map(negate, e.args))
    return build("not", e)


def push_not(node: Expr) -> Expr | None:
    inner = node.args[0]
    if inner.op in ("and", "or", "not", "lit") or is_int_comparison(inner):
        return negate(inner)
    if inner.op in ("eq", "ne") and inner.args[0].type is not INT:  # NaN: == and != are complements, < is not
        return build(NEGATE[inner.op], *inner.args)
    # the comparison takes the negation, as `exclusive` has it
    if inner.op == "xor" and any(is_int_comparison(a) for a in chain(inner)):
        return build("xor", TRUE, inner)
    if inner.op == "where":
        return where(inner.args[0], negate(inner.args[1]), negate(inner.args[2]))
    return None


def junction(node: Expr) -> Expr | None:
    """Remove constants, repeats and complements of a conjunction or disjunction."""
    terms = set(node.args)
    against = any(a.op == "not" and a.args[0] in terms for a in node.args)
    return ZERO_OF[node.op] if against else connect(node.op, node.args)


def absorb(node: Expr) -> Expr | None:
    """Absorption: p & (p | r) is p; more generally, a term that another one implies is dropped."""
    if len(node.args) > _VERY_MANY:  # each term is compared with each
        return None
    terms = list(node.args)
    for term in node.args:
        if term.op != DUAL[node.op]:
            continue
        if any(_decides(a, t, node.op) for a in terms if a is not term for t in term.args):
            terms.remove(term)
    return build(node.op, *terms) if 1 < len(terms) < len(node.args) else terms[0] if len(terms) == 1 else None


def resolve(node: Expr) -> Expr | None:
    """Resolution, where a sibling decides a term: p & (~p | r) is p & r, and p & (p & r | s) is p & (r | s)."""
    if len(node.args) > _VERY_MANY:
        return None
    new, changed = [], False
    for term in node.args:
        if term.op == DUAL[node.op]:
            siblings = [a for a in node.args if a is not term and a.op != DUAL[node.op]]
            parts = [_without_known(t, siblings, node.op) for t in term.args]
            parts = [t for t in parts if not any(_refutes(a, t, node.op) for a in siblings)]
            if parts != list(term.args):
                changed = True
                term = connect(term.op, parts)
        new.append(term)
    return connect(node.op, new) if changed else None


def _without_known(part: Expr, siblings: list[Expr], op: str) -> Expr:
    """A nested conjunction (disjunction) without the terms that a sibling implies (is implied by)."""
    if part.op != op:
        return part
    return connect(op, (c for c in part.args if not any(_decides(a, c, op) for a in siblings)))


def _decides(sibling: Expr, part: Expr, op: str) -> bool:
    # in a conjunction a sibling holds: parts it implies hold, too; in a disjunction it fails, and what implies it
    return _implies(sibling, part) if op == "and" else _implies(part, sibling)


def _refutes(sibling: Expr, part: Expr, op: str) -> bool:
    # in a conjunction a sibling holds: parts it excludes go; in a disjunction it fails: parts it leaves true go
    return _implies(sibling, _negated(part)) if op == "and" else _implies(_negated(sibling), part)


@memo(group="expressions")
def _negated(e: Expr) -> Expr:
    if is_int_comparison(e):
        return write_relation(*relation(NEGATE[e.op], *e.args))
    return e.args[0] if e.op == "not" else build("not", e)


@memo(group="expressions")
def _implies(a: Expr, b: Expr) -> bool:
    """A sufficient test of implication: the same term, or a tighter bound of the same form."""
    if a is b:
        return True
    if not (is_int_comparison(a) and is_int_comparison(b)):
        return False
    (op_a, form_a), (op_b, form_b) = relation(a.op, *a.args), relation(b.op, *b.args)
    if form_a.terms != form_b.terms:  # bounds on different forms say nothing about each other
        return False
    ca, cb = -form_a.const, -form_b.const  # terms op constant
    if op_b == "ge":
        return op_a in ("ge", "eq") and ca >= cb
    if op_b == "le":
        return op_a in ("le", "eq") and ca <= cb
    if op_b == "ne":
        return (op_a == "ge" and ca > cb) or (op_a == "le" and ca < cb) or (op_a == "eq" and ca != cb)
    return False


def factor(node: Expr) -> Expr | None:
    """Factoring: (p & a) | (p & b) is p & (a | b)."""
    dual = DUAL[node.op]
    groups = [operands(dual, a) for a in node.args]
    common = set.intersection(*map(set, groups))
    if not common or len(node.args) < 2:  # one term has everything in common with itself
        return None
    rest = connect(node.op, [connect(dual, (t for t in group if t not in common)) for group in groups])
    return connect(dual, (*(t for t in groups[0] if t in common), rest))


def merge_bounds(node: Expr) -> Expr | None:
    """Keep the tightest bounds of an affine form, loosest in a disjunction; contradictions are false, covers true."""
    groups: dict[Terms, list[tuple[str, int]]] = {}
    for a in node.args:
        if is_int_comparison(a):
            op, form = relation(a.op, *a.args)
            groups.setdefault(form.terms, []).append((op, -form.const))
    if all(len(g) == 1 for g in groups.values()):
        return None
    new: dict[Expr, None] = {}
    for a in node.args:
        if not is_int_comparison(a):
            new[a] = None
            continue
        terms = relation(a.op, *a.args)[1].terms
        if terms not in groups:  # merged where its first bound stands
            continue
        if len(groups[terms]) == 1:
            new[a] = None
            continue
        merged = (_intersect if node.op == "and" else _unite)(groups.pop(terms))
        if merged is None:
            return ZERO_OF[node.op]
        for op, bound in merged:
            new[write_relation(op, Linear(terms, -bound))] = None
    return None if new.keys() == set(node.args) else connect(node.op, new)


def _intersect(bounds: list[tuple[str, int]]) -> list[tuple[str, int]] | None:
    lo = max((b for op, b in bounds if op in ("ge", "eq")), default=None)
    hi = min((b for op, b in bounds if op in ("le", "eq")), default=None)
    holes = sorted({b for op, b in bounds if op == "ne"})
    while lo is not None and lo in holes:  # a bound on a hole moves past it
        lo += 1
    while hi is not None and hi in holes:
        hi -= 1
    if lo is not None and hi is not None:
        if lo > hi:
            return None
        if lo == hi:
            return [("eq", lo)]
    holes = [b for b in holes if (lo is None or b > lo) and (hi is None or b < hi)]
    return [*((op, b) for op, b in (("ge", lo), ("le", hi)) if b is not None), *(("ne", b) for b in holes)]


def substitute_equal(node: Expr) -> Expr | None:
    """Substitution: with doc[q] == doc[k] every other doc[k] is doc[q], and with q // n == k // n every k % n is k
    - n * (q // n); so too in a disjunction, with !=."""
    if len(node.args) > _MANY:
        return None
    equal = {"and": "eq", "or": "ne"}[node.op]
    for term in node.args:
        if term.op != equal or any(a.op not in _NAMED or a.type is not INT for a in term.args):
            continue
        base, gone = sorted(term.args, key=lambda a: ("k" in uses(a), a.depth, sort_key(a)))
        known = {gone: base}
        if gone.op == "floordiv" and literal_value(gone.args[1], 0) > 0:
            known[build("mod", *gone.args)] = gone.args[0] - gone.args[1] * base
        new = [a if a is term else substitute(a, known) for a in node.args]
        # else the substitution would go round in a circle
        if new != list(node.args) and not any(k in walk(base) for k in known):
            return connect(node.op, new)
    return None


_MANY = 32  # terms in which equals are substituted
_VERY_MANY = 256  # terms compared each with each
_NAMED = ("lookup", "segment", "floordiv", "mod")

NEGATED = {"ge": ("le", -1), "le": ("ge", 1), "eq": ("ne", 0), "ne": ("eq", 0)}


def _unite(bounds: list[tuple[str, int]]) -> list[tuple[str, int]] | None:
    # the complement of a union is the intersection of the complements
    def complement(op: str, b: int) -> tuple[str, int]:
        new, step = NEGATED[op]
        return new, b + step

    merged = _intersect([complement(op, b) for op, b in bounds])
    return None if merged is None else [complement(op, b) for op, b in merged]


def exclusive(node: Expr) -> Expr | None:
    """A chain of xor, in order: repeats cancel, `not` and the true constant negate the whole, and a comparison of Ints
    absorbs the negation. `a ^ (k < 4)` is `~(a ^ (k >= 4))`, so bounds are compared in one direction."""
    odd = False
    parts: dict[Expr, None] = {}
    operands = chain(node)
    if len(operands) >= LONGEST:  # very long chains come in parts, which repeats may straddle
        return None
    for e in operands:
        positive, flipped = _upright(e)
        odd ^= flipped
        if positive in parts:
            del parts[positive]
        elif positive is not FALSE:
            parts[positive] = None
    terms = sorted(parts, key=sort_key)
    at = next((i for i in reversed(range(len(terms))) if is_int_comparison(terms[i])), None)
    if odd and at is not None:
        terms[at] = _negated(terms[at])
    if not terms:
        return TRUE if odd else FALSE
    new = ir.nest("xor", terms)
    new = build("not", new) if odd and at is None else new
    return None if new is node else new


def _upright(e: Expr) -> tuple[Expr, bool]:
    """(e or its negation, whether it is the negation): an equality or lower bound, without `not`."""
    if e.op == "not":
        inner, flipped = _upright(e.args[0])
        return inner, not flipped
    if e is TRUE:
        return FALSE, True
    if is_int_comparison(e):
        return (_negated(e), True) if relation(e.op, *e.args)[0] in ("le", "ne") else (e, False)
    return (build("eq", *e.args), True) if e.op == "ne" else (e, False)


def choose(node: Expr) -> Expr | None:
    """Simplify a choice between Bools: facts from the condition, common parts, complementary branches."""
    if node.type is not BOOL:
        return None
    cond, yes, no = node.args
    yes2, no2 = _under(cond, yes), _under(_negated(cond), no)
    if yes2 is not yes or no2 is not no:
        return where(cond, yes2, no2)
    if _negated(yes) is no or _negated(no) is yes:
        return build("xor", cond, no)
    for op in ("and", "or"):
        groups = [operands(op, a) for a in (yes, no)]
        common = [t for t in groups[0] if t in groups[1]]
        if common:
            rests = (connect(op, (t for t in g if t not in common)) for g in groups)
            return connect(op, (*common, where(cond, *rests)))
    return None


def _under(cond: Expr, e: Expr) -> Expr:
    """The Expr `e` simplified where `cond` holds."""
    known = operands("and", cond)
    if any(_implies(a, e) for a in known):
        return TRUE
    if any(_implies(a, _negated(e)) for a in known):
        return FALSE
    if e.op not in DUAL:
        return e
    parts = tuple(_under(cond, t) for t in e.args)
    return e if parts == e.args else connect(e.op, parts)


ON_JUNCTIONS = (junction, merge_bounds, absorb, resolve, factor, substitute_equal)
RULES = [
    rule("push-not", "not", push_not),
    *(rule(f.__name__.replace("_", "-"), op, f) for f in ON_JUNCTIONS for op in ("and", "or")),
    rule("xor", "xor", exclusive),
    rule("where-true-false", where(p, True, False), p),
    rule("where-false-true", where(p, False, True), lambda p: negate(p)),
    rule("where-true", where(p, True, r), p | r),
    rule("where-false", where(p, False, r), lambda p, r: build("and", negate(p), r)),
    rule("where-or-true", where(p, r, True), lambda p, r: build("or", negate(p), r)),
    rule("where-or-false", where(p, r, False), p & r),
    rule("choose", "where", choose),
]
