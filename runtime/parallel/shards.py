"""An attention as one rank computes it: mask, score mod and weight read tables of the rank's own places.

Place q of a shard holds position `q_at[q]` of the sequence. A mask reads `q_at[q]` in place of `q`. A lookup at `q`
alone becomes a table of places, `doc[q]` the table `doc_of_q`. The flat planner finds in it the facts of `doc`: places
ascend with positions, so a sorted table stays sorted.

>>> import frisket as fk
>>> shard = on_shard(fk.compile("causal & same(doc)"), ShardPlace(1024, 1024), {"doc": (1024,)})
>>> shard.attention
Attention(mask = q_at[q] >= k_at[k] & doc_of_q[q] == doc_of_k[k])
>>> [(t.name, t.expr, t.axes) for t in shard.tables]
[('doc_of_q', doc[q], 'q'), ('doc_of_k', doc[k], 'k')]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from frisket.dsl import ir
from frisket.dsl.errors import FrisketError, ParameterError
from frisket.dsl.ir import SIZES, Expr, clauses, conj, find, lit, lookup, names_of, param, substitute, uses, var
from frisket.dsl.program import Declared
from frisket.dsl.types import INT
from frisket.lowering.analysis.layout import bind as written_out
from frisket.runtime.attention.attention import Attention
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.machine.parameters import BoundExpr, Origin, digest
from frisket.runtime.masks.mask import Divide, Mask, ScoreMod, Weight

from .deal import Deal

AT = {"q": "q_at", "k": "k_at", "b": "first_batch", "h": "first_head"}  # parameters: positions, and offsets of b, h


@dataclass(frozen=True)
class ShardPlace:
    """The place of a shard in the whole problem: `on_shard` rewrites an attention by it."""

    length: int  # tokens of the sequence, without padding
    places: int  # tokens of all ranks, with padding
    batch: int = 1  # batch entries of all devices
    heads: int = 1  # heads of all devices
    coordinates: str = "qk"  # coordinates that differ in a shard: q, k by a table of positions, b, h by an offset
    split: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # table -> axes of which a rank has a part


@dataclass(frozen=True)
class ShardTable:
    """A table that a shard makes before a call: the values of `expr` along `axes`."""

    name: str
    expr: Expr  # coordinates are positions of the sequence; `place(c)`, an index in the shard, is for split tables
    axes: str  # some of "bhqk", in this order


@dataclass(frozen=True)
class ShardAttention:
    """An attention rewritten for one shard, by `on_shard`. A shard makes its tables and calls it."""

    attention: Attention
    tables: tuple[ShardTable, ...]  # tables that the attention reads besides AT
    sent_with_keys: Mapping[str, int]  # tables of the caller that are split along keys -> the axis of keys


def place(coordinate: str) -> Expr:
    return ir.make("var", (), f"place of {coordinate}", INT)


def on_shard(att: Attention, where: ShardPlace, shapes: Mapping[str, tuple[int, ...]]) -> ShardAttention:
    """`att` on a shard. `shapes`: of the tables that every call brings whole. Raises `ParameterError` where a split
    table is read at coordinates of another shard."""
    program = att.program
    if clashes := sorted(program.names & set(AT.values())):
        text = f"`{clashes[0]}` is a name of context parallel's own; rename it, for example `my_{clashes[0]}`"
        raise ParameterError(text)
    known = {**program.tables, **{n: np.broadcast_to(np.empty((), bool), s) for n, s in shapes.items()}}
    rewriter = _Rewriter(program, where, known)
    seen = None if program.mask is None else rewriter.rewritten(program.mask)
    padding = [rewriter.at[c] < where.length for c in "qk" if c in where.coordinates]
    # without padding every place is a token
    if padding and where.places > where.length:
        seen = conj(*([] if seen is None else [seen]), *padding)
    score, weight, divide = (None if p is None else rewriter.rewritten(p) for p in program.every_part[1:])
    origin = Origin(declared=rewriter.declared)
    values = {**program.scalars, **program.tables}

    def bound(kind: type[Any], e: Expr | None) -> Any:
        names = () if e is None else names_of(e)
        return None if e is None else kind(e, {n: x for n, x in values.items() if n in names}, origin)

    draws = program.places or ()  # where dropout draws already, of q and k or of all four
    draws = (*(BoundExpr(var(c)) for c in "bhqk"[: 4 - len(draws)]), *draws) if att.options.dropout else ()
    places = tuple(bound(BoundExpr, rewriter.rewritten(x)) for x in draws) or None
    program = replace(
        program,
        mask=bound(Mask, seen),
        score=bound(ScoreMod, score),
        places=places,
        weight=bound(Weight, weight),
        divide=bound(Divide, divide),
    )
    return ShardAttention(Attention(program, att.options), tuple(rewriter.tables.values()), rewriter.sent_with_keys)


def check_covered(program: CallProgram, deal: Deal, brought: Collection[str], batch: int, heads: int) -> None:
    """Raise `ParameterError` unless a deal brings every key that the mask shows: it is of that mask, or of one that
    shows more. Tables in `brought`, without values yet, are taken to be those of the deal."""
    mine, theirs = Mask(ir.TRUE) if program.mask is None else program.mask, deal.mask
    for c, n, have in (("b", batch, deal.batch), ("h", heads, deal.heads)):
        if c in uses(theirs.expr) and have < n:
            text = f"the deal's mask depends on {c} and is known for {have} of {n}\n  {theirs}\n"
            raise ParameterError(f"{text}  deal(..., batch={batch}, heads={heads})")
    seen = clauses(mine.expr)

    def same(n: str) -> bool:
        return n in brought or digest(mine.params.get(n)) == digest(theirs.params.get(n))

    if all(e in seen and all(map(same, names_of(e))) for e in clauses(theirs.expr)):
        return
    try:
        if not mine.unbound and mine.implies(theirs, deal.length, deal.length, batch=batch, heads=heads):
            return
    except FrisketError:  # it cannot be told
        pass
    text = f"the deal brings what this mask shows:\n  {theirs}\nand attention may show more:\n  {mine}\n"
    raise ParameterError(f"{text}  deal out for the attention's own mask, or take deal.under(mask, ...)")


def check_names(program: CallProgram, brought: Collection[str], split: Collection[str] = ()) -> None:
    """Raise `ParameterError` unless `brought` are names that are read, and all that have no value yet."""
    if unused := [n for n in (*split, *brought) if n not in program.names]:
        raise ParameterError(f"`{unused[0]}` is given and no mask, score mod or weight uses it")
    if missing := [n for p in program.parts for n in p.unbound if n not in brought]:
        raise ParameterError(f"`{missing[0]}` has no value; give it: {missing[0]}=<array>")


def check_sides(read: Expr, split_axes: tuple[int, ...]) -> None:
    """Raise `ParameterError` where a table is split along queries and keys: a rank would have one square of it."""
    if {"q", "k"} <= {a.name for i, a in enumerate(read.args) if i in split_axes and a.op == "var"}:
        text = f"`{read.name}` is split along queries and along keys; a rank needs its queries' rows of every key\n"
        text += f"  it is read at [{', '.join(repr(a).splitlines()[-1] for a in read.args)}]; split one of these axes"
        raise ParameterError(text)


# Whether an Int never decreases along the positions, from whether its arguments do; no other operator is known to.
RISING: dict[str, Callable[..., bool]] = {
    "var": lambda e: e.name in "qk",
    "segment": lambda e, x: x,
    **dict.fromkeys(("add", "sub"), lambda e, x, by: x and e.args[1].op == "lit"),
    # a negative divisor would turn the order round
    "floordiv": lambda e, x, by: x and ir.literal_value(e.args[1], 0) > 0,
}


class _Rewriter:
    """Rewrites the parts of a program and places of dropout for a shard; what two of them read becomes one table."""

    def __init__(self, program: CallProgram, where: ShardPlace, known: Mapping[str, Any]) -> None:
        self.program, self.where, self.known = program, where, known
        self.tables: dict[Expr, ShardTable] = {}  # by the lookup that each replaces
        self.sent_with_keys: dict[str, int] = {}  # as in `ShardAttention`
        self.declared: dict[str, Declared] = {}  # of the tables and numbers that a shard adds
        self.at: dict[str, Expr] = {c: self._position(c) if c in where.coordinates else var(c) for c in "bhqk"}

    def _position(self, c: str) -> Expr:
        if c in "bh":
            self.declared[AT[c]] = Declared(0, INT, most=self.where.batch if c == "b" else self.where.heads)
            return var(c) + param(AT[c], INT)
        self.declared[AT[c]] = Declared(1, INT, "sorted", most=self.where.places)
        return lookup(AT[c], (var(c),))

    def rewritten(self, part: BoundExpr) -> Expr:
        e, w = written_out(part.expr, self.known), self.where
        change: dict[Expr, Expr] = {var(c): self.at[c] for c in w.coordinates}
        change |= dict(zip(map(var, SIZES), map(lit, (w.batch, w.heads, w.length, w.length)), strict=True))
        change |= {n: self._table(n) for n in find(e, "lookup", "segment") if self._own(n)}
        self._check_split(e)
        return substitute(e, change)

    def _own(self, e: Expr) -> bool:
        """Whether what is read becomes a table of places: it is read on one side, or at bare coordinates."""
        read = uses(e) - frozenset(SIZES)
        if not read <= frozenset("bhqk") or not (read & set(self.where.coordinates) or e.name in self.where.split):
            return False
        return not {"q", "k"} <= read or all(a.op == "var" for a in e.args)

    def _table(self, e: Expr) -> Expr:
        axes = "".join(c for c in "bhqk" if c in uses(e))
        if e not in self.tables:
            name = f"{e.name}_of_{axes}"
            while name in self.program.names or name in {t.name for t in self.tables.values()}:
                name += "_"
            self.tables[e] = ShardTable(name, self._in_places(e), axes)
            fact = "sorted" if len(axes) == 1 and self._rises(e) else None
            self.declared[name] = Declared(len(axes), e.type, fact, most=self._most(e))
        return lookup(self.tables[e].name, tuple(map(var, axes)), e.type)

    def _in_places(self, e: Expr) -> Expr:
        """An expression that reads split tables at places."""
        change = {}
        for n in find(e, "lookup"):
            if split := self.where.split.get(n.name):  # a lookup that stays may read one that changes
                at = tuple(place(a.name) if i in split else a for i, a in enumerate(n.args))
                change[n] = lookup(n.name, at, n.type)
        return substitute(e, change)

    def _rises(self, root: Expr) -> bool:
        """Whether it never decreases from one position to the next."""
        by_row = RISING | {"lookup": lambda e, *args: args == (True,) and self._sorted(e.name)}
        return ir.fold(root, lambda e, args: e.op in by_row and by_row[e.op](e, *args))[root]

    def _sorted(self, name: str) -> bool:
        for p in self.program.parts:
            declared = p.origin.declared.get(name)
            if declared is not None and declared.fact == "sorted":
                return True
            if name in p.tables:
                return bool((p.tables[name][1:] >= p.tables[name][:-1]).all())
        return False

    def _most(self, e: Expr) -> int | None:
        """The largest magnitude of its Ints, where that is known."""
        if e.type is not INT:
            return None
        if e.op == "segment":
            return int(self.known[e.name].shape[0])
        table = self.program.tables.get(e.name)
        return None if table is None else max(abs(int(table.max())), abs(int(table.min())))

    def _check_split(self, e: Expr) -> None:
        for n in find(e, "lookup", "segment"):
            split_axes = self.where.split.get(n.name, ())
            check_sides(n, split_axes)
            for i in split_axes:
                if n.op == "segment" or i not in range(len(n.args)):
                    raise ParameterError(f"`{n.name}` cannot be split along axis {i} as it is read; give it whole")
                if n.args[i].op != "var":
                    text = f"`{n.name}` is split along axis {i} and read there at `{n.args[i]!r}`, maybe on another "
                    raise ParameterError(f"{text}device\n  give it whole: split= without `{n.name}`")
                if n.args[i].name == "k" and self.sent_with_keys.setdefault(n.name, i) != i:
                    raise ParameterError(f"`{n.name}` is split along two axes of keys; give it whole")
