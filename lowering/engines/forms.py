"""EngineForm: a mask and a score mod as the parts that engines have flags for, read off the simplified Exprs.

An engine is a kernel of somebody else (FlashAttention, cuDNN, splash) that knows a few masks: causal, a window,
documents, a prefix of valid keys. `form_of` proves that a mask is made of these and of nothing else:

>>> from frisket.dsl.ir import lookup, param
>>> from frisket.dsl.sugar import eq, k, q
>>> form = form_of(ProgramExprs((q >= k) & (q - k < param("w")) & eq(lookup("doc", (q,)), lookup("doc", (k,)))))
>>> form.low, form.high, form.document
((0,), (w - 1,), (doc[q],))
>>> form.proofs
('causal', 'window', 'documents')
>>> print(form_of(ProgramExprs((q >= k) | (k < 64))))
`q >= k | k < 64` bounds neither q - k nor k, and compares no documents

The proof is by CLAUSES: every term of the conjunction has to be one of them. Each says the same as the part that
it becomes, for all positions, lengths and values of parameters. Whatever no clause takes is a reason to say no.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from frisket.dsl.ir import KV_LEN, Q_LEN, SCORE, TRUE, Expr, build, clauses, conj, lit, substitute, uses, walk
from frisket.dsl.show import show
from frisket.dsl.sugar import eq
from frisket.dsl.types import FLOAT
from frisket.grammar.memo import memo
from frisket.lowering.analysis.solve import SIDES, K, Q, equation_sides, isolated, position_bound
from frisket.lowering.simplify import ProgramExprs
from frisket.lowering.simplify.affine import Linear, write

Exprs = tuple[Expr, ...]
NO_CLAUSE = "bounds neither q - k nor k, and compares no documents"


@dataclass(frozen=True)
class EngineForm:
    """A mask and a score mod in parts. A query q sees a key k where all of it holds:

    - `q - k >= x` for x in `low`, `q - k <= x` for x in `high`: Exprs of scalars and lengths, perhaps of b;
    - `first <= k <= last` for the Exprs in `first` and `last`, and likewise for q in `first_query` and `last_query`.
      These read scalars, lengths, b, and for keys tables at the query, of packed sequences (`koff[segment(qoff, q)]`);
    - equal values of each Expr in `document` at q and at k.

    The score is `factor * score`, capped to `softcap * tanh(score / softcap)`, plus `slope * distance`, in this order;
    None where there is none. `distance` is "k - q" or "-|q - k|".
    """

    low: Exprs = ()
    high: Exprs = ()
    first: Exprs = ()
    last: Exprs = ()
    first_query: Exprs = ()
    last_query: Exprs = ()
    document: Exprs = ()
    factor: Expr | None = None
    softcap: Expr | None = None
    slope: Expr | None = None
    distance: str = ""
    proofs: tuple[str, ...] = field(default=(), compare=False)  # the names of the clauses that took a term

    @property
    def mask(self) -> Expr:
        """The mask that the parts say."""
        terms = [build("ge", Q - K, x) for x in self.low] + [build("le", Q - K, x) for x in self.high]
        terms += [build("ge", K, x) for x in self.first] + [build("le", K, x) for x in self.last]
        terms += [build("ge", Q, x) for x in self.first_query] + [build("le", Q, x) for x in self.last_query]
        return conj(*terms, *(eq(x, at_key(x)) for x in self.document)) if terms or self.document else TRUE

    @property
    def score(self) -> Expr | None:
        """The score mod that the parts say."""
        expr = SCORE if self.factor is None else build("mul", self.factor, SCORE)
        if self.softcap is not None:
            expr = build("mul", self.softcap, build("tanh", build("div", expr, self.softcap)))
        if self.slope is not None:
            # the two agree where the mask is causal, and vendors differ in which they compute
            away = K - Q if self.distance == "k - q" else -abs(Q - K)
            expr = build("add", expr, build("mul", build("float", away), self.slope))
        return None if expr is SCORE else expr

    @property
    def by_rows(self) -> bool:
        """Whether the keys that a query sees are read from tables at the query."""
        return any("q" in uses(x) for x in (*self.first, *self.last))


@dataclass(frozen=True)
class NoForm:
    """A part of a mask, or a score mod, that engines do not know, and why."""

    part: Expr
    why: str

    def __str__(self) -> str:
        text = " ".join(show(self.part).splitlines()[-1].split())  # lines before the last declare parameters
        return f"`{text if len(text) <= LONG else text[:LONG] + '…'}` {self.why}"


LONG = 80  # letters of a term that a reason quotes


def at_key(e: Expr) -> Expr:
    """An Expr of the query's position, of the key's."""
    return substitute(e, {Q: K})


# -- masks ------------------------------------------------------------------------------------------

Parts = tuple[tuple[str, Expr], ...]  # names of fields of EngineForm, and what each gains


_FIXED = frozenset({"b", "B", "H", "Q_LEN", "KV_LEN"})  # what a bound may read besides parameters and tables
_BY_QUERY = _FIXED | {"q"}


Match = Callable[[Expr], Parts | None]


@dataclass(frozen=True)
class Clause:
    """One row of the proof: a term that `match` takes says the same as the parts that it gives, at every position.
    `example` is such a term, which tests compare with its parts."""

    name: str
    match: Match
    example: str


def _reads(form: Linear) -> frozenset[str]:
    return frozenset(n for a, _ in form.terms for n in uses(a))


def _bound(axis: str, low: str, high: str, rels: str = "ge le eq", exactly: Linear | None = None) -> Match:
    """Takes bounds on q, k or q - k (`axis` d) that are the same for every position of a batch entry; with `exactly`,
    one bound alone. An equation is a bound of both directions."""
    fields = {"low": low, "high": high}

    def match(term: Expr) -> Parts | None:
        known = position_bound(term)
        if known is None or known[0] != axis or known[1] not in rels.split():
            return None
        if not _reads(known[2]) <= _FIXED or exactly not in (None, known[2]):
            return None
        return tuple((fields[side], write(known[2])) for side in SIDES[known[1]])

    return match


def _keys_by_query(term: Expr) -> Parts | None:
    """Takes bounds on k that tables give for each query."""
    solved = isolated(term)
    if solved is None or solved.atom is not K or solved.factor > 1 or not _reads(solved.value) <= _BY_QUERY:
        return None
    return tuple(({"low": "first", "high": "last"}[side], write(solved.value)) for side in SIDES[solved.op])


def _documents(term: Expr) -> Parts | None:
    """Takes `x(q) == x(k)`; of Floats it does not, where NaN is not equal to itself."""
    sides = equation_sides(term)
    if sides is None or sides[0].type is FLOAT or not uses(sides[0]) <= _BY_QUERY or at_key(sides[0]) is not sides[1]:
        return None
    return (("document", sides[0]),)


_CORNER = Linear(((Q_LEN, 1), (KV_LEN, -1)), 0)

# the first clause that takes a term names its proof, so special cases come first
CLAUSES = (
    Clause("causal", _bound("d", "low", "high", "ge", Linear((), 0)), "q >= k"),
    Clause("causal, bottom right", _bound("d", "low", "high", "ge", _CORNER), "q + KV_LEN >= k + Q_LEN"),
    Clause("window ahead", _bound("d", "low", "high", "ge"), "k - q <= r"),
    Clause("window", _bound("d", "low", "high", "le"), "q - k < w"),
    Clause("one diagonal", _bound("d", "low", "high", "eq"), "q - k == w"),
    Clause("documents", _documents, "doc[q] == doc[k]"),
    Clause("prefix of keys", _bound("k", "first", "last"), "k < n[b]"),
    Clause("prefix of queries", _bound("q", "first_query", "last_query"), "q < n[b]"),
    Clause("keys of sequences", _keys_by_query, "k < at[segment(at, q) + 1]"),
)


# -- scores -----------------------------------------------------------------------------------------

PART_OF = {"scale": "factor", "softcap": "softcap", "alibi": "slope"}
_PLACES = frozenset({"b", "h", "q", "k", "score"})


def scored(score: Expr | None) -> dict[str, Any] | NoForm:
    """The fields of EngineForm that a score mod makes: a bias by distance around a soft cap around a factor."""
    fields: dict[str, Any] = {**dict.fromkeys(PART_OF.values()), "distance": ""}
    left = SCORE if score is None else score
    if left.op in ("add", "sub"):
        left, fields["slope"], fields["distance"] = _bias(left) or (left, None, "")
    if left.op == "mul" and (capped := _capped(left)) is not None:
        left, fields["softcap"] = capped
    if left is not SCORE:
        left, fields["factor"] = _factor(left) or (left, None)
    if left is not SCORE and score is not None:
        return NoForm(score, "as a score mod is no factor, soft cap or penalty by distance")
    return fields


def _bias(e: Expr) -> tuple[Expr, Expr, str] | None:
    """(score, slope, distance) of `score + slope * distance`."""
    pairs = [e.args] if e.op == "sub" else [e.args, e.args[::-1]]
    for rest, bias in pairs:
        if bias.op != "mul" or "score" in uses(bias):
            continue
        for away, slope in (bias.args, bias.args[::-1]):
            if away.op != "float" or uses(slope) & {"q", "k"}:
                continue
            for kind, expr, sign in (("k - q", K - Q, 1), ("k - q", Q - K, -1), ("-|q - k|", abs(Q - K), -1)):
                if away.args[0] is expr:
                    return rest, build("neg", slope) if ((sign < 0) != (e.op == "sub")) else slope, kind
    return None


def _capped(e: Expr) -> tuple[Expr, Expr] | None:
    """(x, c) of `c * tanh(x / c)`."""
    for cap, curve in (e.args, e.args[::-1]):
        if curve.op == "tanh" and curve.args[0].op == "div" and curve.args[0].args[1] is cap and _constant(cap):
            return curve.args[0].args[0], cap
    return None


def _factor(e: Expr) -> tuple[Expr, Expr] | None:
    """(score, c) of `c * score` and `score / c`."""
    if e.op == "mul":
        for by, rest in (e.args, e.args[::-1]):
            if _constant(by):
                return rest, by
    if e.op == "div" and _constant(e.args[1]):
        return e.args[0], build("div", lit(1.0), e.args[1])  # engines have a factor, and no divisor
    return None


def _constant(e: Expr) -> bool:
    """Whether a number is one for the whole call."""
    return not uses(e) & _PLACES and all(n.op not in ("lookup", "segment", "random") for n in walk(e))


# -- both -------------------------------------------------------------------------------------------


@memo(group="expressions")
def form_of(exprs: ProgramExprs) -> EngineForm | NoForm:
    """The parts of a simplified mask and score mod, or the term that is none. None: everything visible, no mod."""
    if exprs.weight is not None:
        return NoForm(exprs.weight, "is a weight in place of the softmax")
    parts: dict[str, Exprs] = {}
    proofs: list[str] = []
    for term in () if exprs.mask is None else clauses(exprs.mask):
        for clause in CLAUSES:
            if (matches := clause.match(term)) is not None:
                break
        else:
            return NoForm(term, NO_CLAUSE)
        proofs.append(clause.name)
        for name, value in matches:
            parts[name] = (*parts.get(name, ()), value)
    score_fields = scored(exprs.score)
    if isinstance(score_fields, NoForm):
        return score_fields
    proofs = (proofs or ["full"]) + [name for name, part in PART_OF.items() if score_fields[part] is not None]
    return EngineForm(**parts, **score_fields, proofs=tuple(dict.fromkeys(proofs)))  # type: ignore[arg-type]
