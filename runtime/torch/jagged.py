"""Attention to jagged nested tensors of torch: their packed tokens as one row, positions inside each sequence.

A mask and a score mod are rewritten. In a packed row, b is the sequence that holds the query. q and k count from the
first token of their sequences, and `Q_LEN` and `KV_LEN` are the lengths of those. A query sees its own sequence alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from frisket.dsl import ir
from frisket.dsl.errors import ParameterError, ShapeError
from frisket.dsl.ir import Expr, conj, lookup, segment, var
from frisket.dsl.program import entries_of
from frisket.lowering.analysis.tiling import check_reach, short_tables
from frisket.lowering.plan import Problem
from frisket.runtime.calls.options import CallArgs
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.machine.parameters import BoundExpr, as_value, is_tensor
from frisket.runtime.masks.mask import Mask

if TYPE_CHECKING:
    from frisket.runtime.attention.attention import Attention

Tensor = Any
Pattern = tuple[int | None, ...]
NAMES = ("q_offsets", "kv_offsets", "q_lengths", "kv_lengths")


@dataclass(frozen=True)
class JaggedTables:
    """The tables of a rewritten mask by their names: where sequences begin, and, where there are holes behind some,
    how long they are. `sequences` stands for their number."""

    q_offsets: str
    kv_offsets: str
    q_lengths: str | None
    kv_lengths: str | None
    sequences: Expr

    @property
    def tables(self) -> tuple[str | None, ...]:
        """The names of the tables, in the order of `NAMES`."""
        return self.q_offsets, self.kv_offsets, self.q_lengths, self.kv_lengths

    def own_sequence(self) -> Expr:
        """Whether query and key are tokens of one sequence."""
        q, k = var("q"), var("k")
        mine, theirs = segment(self.q_offsets, q), segment(self.kv_offsets, k)
        clauses = [ir.build("eq", mine, theirs)]
        for x, offsets, lengths in ((q, self.q_offsets, self.q_lengths), (k, self.kv_offsets, self.kv_lengths)):
            if lengths is not None:
                of = segment(offsets, x)
                clauses.append(x < lookup(offsets, (ir.extent(offsets, 0) - 1,)))  # a hole may be the end of all
                clauses.append(x - lookup(offsets, (of,)) < lookup(lengths, (of,)))
        return conj(*clauses)

    def places(self, visible: bool) -> dict[Expr, Expr]:
        """The expression that replaces each variable.

        At a visible pair the key's sequence is the query's, which is found once for a row."""
        q, k = var("q"), var("k")
        mine = segment(self.q_offsets, q)
        theirs = mine if visible else segment(self.kv_offsets, k)
        return {
            var("b"): mine, q: q - lookup(self.q_offsets, (mine,)), k: k - lookup(self.kv_offsets, (theirs,)),
            ir.B: self.sequences, ir.Q_LEN: _length(self.q_offsets, self.q_lengths, mine),
            ir.KV_LEN: _length(self.kv_offsets, self.kv_lengths, theirs),
        }  # fmt: skip


def _length(offsets: str, lengths: str | None, of: Expr) -> Expr:
    return lookup(lengths, (of,)) if lengths is not None else lookup(offsets, (of + 1,)) - lookup(offsets, (of,))


@dataclass(frozen=True)
class Ragged:
    """The offsets of sequences in packed queries and keys, and their lengths where there are holes."""

    q_offsets: Tensor
    kv_offsets: Tensor
    q_lengths: Tensor | None = None
    kv_lengths: Tensor | None = None
    known: Pattern | None = None  # which of them are one, where their identity does not say so

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors in the order of `NAMES`."""
        return self.q_offsets, self.kv_offsets, self.q_lengths, self.kv_lengths

    @property
    def sequences(self) -> int:
        return int(self.q_offsets.shape[0]) - 1

    @property
    def pattern(self) -> Pattern:
        """The index, for each tensor, of the first that is the same object: keys often share the queries' offsets."""
        x = self.tensors
        if self.known is not None:
            return self.known
        return tuple(None if t is None else min(j for j in range(i + 1) if x[j] is t) for i, t in enumerate(x))


def names_for(pattern: Pattern, reserved: Iterable[str], sequences: Expr) -> JaggedTables:
    """Names that are free, one for every tensor."""
    used = set(reserved)
    names: list[str | None] = []
    for name, first in zip(NAMES, pattern, strict=True):
        if first is None or first < len(names):
            names.append(None if first is None else names[first])
        else:
            names.append(fresh(name, used))
            used.add(str(names[-1]))
    q, kv, q_len, kv_len = names
    assert q is not None
    assert kv is not None
    return JaggedTables(q, kv, q_len, kv_len, sequences)


def fresh(name: str, used: Iterable[str]) -> str:
    """The name, with a number behind it where it is taken."""
    return next(new for i in count() if (new := f"{name}_{i}" if i else name) not in used)


def is_jagged(x: Any) -> bool:
    return is_tensor(x) and bool(x.is_nested)


# -- nested tensors as packed ones ------------------------------------------------------------------------------------


def opened(
    q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str, str] = ("q", "k", "v"), error: type[ShapeError] = ShapeError
) -> tuple[tuple[Tensor, Tensor, Tensor], Ragged]:
    """Packed q, k and v [1, heads, tokens, dim], of nested ones [sequences, heads, j, dim]."""
    import torch

    all_three = "{}, {} and {}".format(*names)
    for name, x in zip(names, (q, k, v), strict=True):
        if not is_jagged(x):
            raise error(f"{name} is no nested tensor, and others are\n  {all_three} are nested, all or none")
        if x.layout is not torch.jagged or x.dim() != 4 or x._ragged_idx != 2:
            what = f"of layout {x.layout}" if x.layout is not torch.jagged else f"ragged in axis {x._ragged_idx}"
            raise error(
                f"{name} is a nested tensor {what}, with {x.dim()} axes\n"
                "  attention takes (sequences, heads, j, dim) of torch.jagged: "
                "nested_tensor([...], layout=torch.jagged).transpose(1, 2) where items are (length, heads, dim)"
            )
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise error(
            f"{all_three} hold {q.shape[0]}, {k.shape[0]} and {v.shape[0]} sequences\n  each sequence has all three"
        )
    _check_alike(k, v)
    # one batch entry, whose segments are the sequences
    return (q.values()[None], k.values()[None], v.values()[None]), ragged_of(q, k)


def ragged_of(q: Tensor, k: Tensor) -> Ragged:
    """The offsets and lengths of nested queries and keys; keys of the same lengths share the queries' tensors."""
    mine = q.offsets(), q.lengths()
    theirs = mine if _alike(q, k) else (k.offsets(), k.lengths())
    return Ragged(mine[0], theirs[0], mine[1], theirs[1])


def _check_alike(k: Tensor, v: Tensor) -> None:
    import torch

    wrong = "k and v hold sequences of other lengths: every key has one value"  # one line: inductor writes it into C++
    if not torch.compiler.is_compiling():
        if not _alike(k, v):
            raise ShapeError(wrong)
    elif k.offsets() is not v.offsets():  # what the graph looks at when it runs
        if k.values().shape[1] != v.values().shape[1] or (k.lengths() is None) != (v.lengths() is None):
            raise ShapeError(wrong)
        pairs = [(k.offsets(), v.offsets()), *([] if k.lengths() is None else [(k.lengths(), v.lengths())])]
        for x, y in pairs:
            torch._assert_async((x == y).all(), wrong)


def _alike(x: Tensor, y: Tensor) -> bool:
    """Whether both hold sequences with the same lengths at the same places. Of two tensors of offsets a graph says
    no."""
    import torch

    mine, theirs = ((t.offsets(), t.lengths()) for t in (x, y))
    if mine[0] is theirs[0] and mine[1] is theirs[1]:
        return True
    if torch.compiler.is_compiling() or (mine[1] is None) != (theirs[1] is None):
        return False
    return all(torch.equal(s, t) for s, t in zip(mine, theirs, strict=True) if s is not None and t is not None)


def closed_all(results: tuple[Tensor, Tensor, Any], like: Tensor) -> tuple[Tensor, Tensor, Any]:
    """(out, lse, max), where there is a max: it may be empty in graphs."""
    out, lse, top = results
    return closed(out, like), closed(lse, like), closed(top, like) if top is not None and top.dim() == 3 else top


def closed(x: Tensor, like: Tensor) -> Tensor:
    """A packed result [1, heads, tokens, ...] as a nested tensor with the sequences of `like`."""
    import torch

    return torch.nested.nested_tensor_from_jagged(x[0], like.offsets(), like.lengths(), jagged_dim=2)


# -- attention --------------------------------------------------------------------------------------------------------


def rewritten(program: CallProgram, pattern: Pattern) -> tuple[CallProgram, JaggedTables, str | None]:
    """A mask and a score mod of sequences as those of a packed row, over tables without values yet. The names of those
    tables, and that of the number of sequences where it is read."""
    number = fresh("sequences", program.names)
    names = names_for(pattern, {*program.names, number}, ir.param(number))
    same_sequence, inner, outer = names.own_sequence(), names.places(True), names.places(False)

    def put(p: BoundExpr) -> Any:
        if isinstance(p, Mask):
            return Mask(conj(same_sequence, ir.substitute(p.expr, outer)), p.params, p.origin.names)
        return type(p)(ir.substitute(p.expr, inner), p.params, p.origin.names)

    places = program.places or ()
    places = (*(BoundExpr(var(n)) for n in ir.COORDINATES[: 4 - len(places)]), *places)
    packed = replace(program, places=places).changed(put)
    if packed.mask is None:  # sequences stay apart under any mask
        packed = replace(packed, mask=Mask(same_sequence))
    return packed, names, number if number in packed.names else None


def _check_tables(program: CallProgram, ragged: Ragged, heads: int, params: Mapping[str, Any]) -> None:
    """Refuse tables on the host that end before a sequence does, as calls of dense tensors do."""
    readers = [p.expr for p in program.parts]
    values = {**program.scalars, **program.tables, **{n: x for n, x in params.items() if n in program.names}}
    read = {name for e in readers for op, name, *_ in ir.named(e) if op == "lookup"}
    tensors = [x for x in (*values.values(), *ragged.tensors) if is_tensor(x)]
    sized = {ir.Q_LEN.name, ir.KV_LEN.name} & {n for e in readers for n in ir.uses(e)}  # each sequence has other ones
    if not read or sized or not read <= values.keys() or not all(x.is_cpu for x in tensors):
        return
    sides = (ragged.q_offsets, ragged.q_lengths), (ragged.kv_offsets, ragged.kv_lengths)
    counts = [np.diff(entries_of(offsets)) if of is None else entries_of(of) for offsets, of in sides]
    lengths = dict(zip(("q lengths", "kv lengths"), counts, strict=True))
    # the longest: most tables pass without a look at each
    q_len, kv_len = (int(x.max(initial=0)) for x in counts)
    longest = Problem(q_len, kv_len, ragged.sequences, heads)
    if not any(short_tables(e, values, dict(zip("bhqk", longest.ends, strict=True))) for e in readers):
        return
    inside = conj(*(var(x) < lookup(n, (var("b"),)) for x, n in zip("qk", lengths, strict=True)))
    mask = inside if program.mask is None else conj(inside, program.mask.expr)
    known = {n: as_value(n, x) for n, x in values.items()}
    tables = {n: x for n, x in known.items() if np.ndim(x)}
    check_reach(mask, readers, {n: x for n, x in known.items() if n not in tables}, {**tables, **lengths}, longest)


def attend(att: Attention, request: CallArgs) -> tuple[Tensor, Tensor, Any]:
    """(out, lse, max) of `att(q, k, v, ...)`, nested. In a graph this is traced by Dynamo, so plain Python."""
    import torch

    q, k, v, params, layout = request.q, request.k, request.v, request.params, request.layout
    stored = next((n for n in params if " of " in n), None)
    refused = {"`plan`": request.plan, "`origin`": request.origin, "`sizes`": request.sizes}
    for name, x in {**refused, "a scale or `pages`": stored}.items():
        if x is not None:
            raise ParameterError(
                f"{name} is given with nested tensors\n"
                "  leave it out, or give packed tokens: positions count inside each sequence, all of it present"
            )
    if att.options.tuning.invariant:
        # in their one row a sequence begins in any tile
        raise ParameterError("invariant=True takes no nested tensors\n  pad the sequences to one length")
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) if is_jagged(x) else x for x in (q, k, v))  # `opened` refuses the others
    packed, ragged = opened(q, k, v)
    names, number, spec = att.jagged_names(ragged.pattern, att.spec)
    values = {n: x for n, x in zip(names, ragged.tensors, strict=True) if n is not None}
    if number is not None:
        values[number] = ragged.sequences
    if torch.compiler.is_compiling():
        from .graph import written

        rest = {n: x for n, x in att.constants.items() if n not in params}
        sinks = att.options.sinks if request.sinks is None else request.sinks
        packed_request = CallArgs(*packed, seed=request.seed, top=request.top)
        rate, backend = att.options.dropout, att.options.backend
        results = written(spec, rate, backend, packed_request, sinks, {**rest, **values, **params})
    else:
        _check_tables(att.program, ragged, packed[0].shape[1], {**att.constants, **params})
        inside: Any = att.jagged(ragged.pattern)[0]
        if att.program.weight is None:
            results = inside(
                *packed, seed=request.seed, sinks=request.sinks, return_lse=True, return_max=True, **values, **params
            )
        else:
            out, total = inside.with_total(*packed, seed=request.seed, params={**values, **params})
            results = out, total, total
    out, lse, largest = closed_all(results, q)
    return out.transpose(1, 2) if layout == "bshd" else out, lse, largest
