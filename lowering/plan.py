"""LoopPlan: the work of a kernel, in one form for every backend.

A kernel walks, for each tile of `block_q` queries, a list of records `lo <= full_lo <= full_hi <= hi` of key
tiles: `[lo, full_lo)` and `[full_hi, hi)` with the mask as a predicate, `[full_lo, full_hi)` without. The
records come from a table (`Spans`) or, for a convex mask, from four formulas (`Bounds`) in the kernel's prologue.

A `Geometry` holds the shapes of a call. Its `Problem` holds the lengths and the place, which a layout depends on.
Executors take a `LoopPlan` with the values of a call, in one record: `KernelInputs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import LoweringError, ShapeError
from frisket.dsl.ir import (
    NEG_INF,
    SIZES,
    Expr,
    build,
    lit,
    lookup,
    make,
    param,
    random,
    renamed,
    substitute,
    uses,
    var,
    walk,
)
from frisket.dsl.show import show
from frisket.dsl.sugar import ne, where
from frisket.dsl.transfer import finite, interval, magnitude
from frisket.dsl.types import BOOL, FLOAT, INT, Type
from frisket.dsl.work import RING, modular
from frisket.lowering.analysis.solve import ENDS_OF_RUNS, Ends, Fact, ends_of
from frisket.lowering.architectures import H100
from frisket.lowering.dtypes import BYTES, FLOATS, FP8, UNSAID, Operand
from frisket.lowering.simplify.canonical import untied

from .analysis.table import RUN_LIMIT, derived_table
from .simplify import ProgramExprs, simplify

Origin = tuple[Any, Any, Any, Any]  # b, h, q, k; q and k may be vectors with one entry per batch
NOWHERE: Origin = (0, 0, 0, 0)  # a call that begins where the whole problem does
Sizes = tuple[int, int, int, int]  # B, H, Q_LEN, KV_LEN of the whole problem, never of the crop
SEED, RATE = "seed of dropout", "rate of dropout"  # sources of two slots, besides the user's names
K_SCALE, V_SCALE, PAGES, FIRST = "scale of keys", "scale of values", "pages of keys", "first keys"  # of tables
Q_SCALE = "scale of queries"
KV_INPUTS = frozenset((Q_SCALE, K_SCALE, V_SCALE, PAGES, FIRST))  # they come with every call
Names = frozenset[str]  # of what gradients flow to: "q", "k", "v", and tables and slots of a plan
MAX_DECODE_QUERIES = 16  # queries of a call that decodes: read once, in small steps


def whole(origin: Origin, lengths: Sizes) -> Sizes:
    """The sizes of the whole problem when none are given: the problem ends where the call does."""
    b, h, q, k = (x if type(x) is int else int(np.max(x)) for x in origin)  # a plain number needs no array
    return b + lengths[0], h + lengths[1], q + lengths[2], k + lengths[3]


@dataclass(frozen=True, eq=False)
class Problem:
    """The lengths of a call in tokens, and its place in the whole problem. It compares and hashes by value."""

    q_len: int
    kv_len: int
    batch: int = 1
    heads: int = 1
    origin: Origin = NOWHERE
    sizes: Sizes | None = None

    @classmethod
    def of(
        cls,
        q_len: int,
        kv_len: int,
        batch: int = 1,
        heads: int = 1,
        origin: Origin = NOWHERE,
        sizes: Sizes | None = None,
    ) -> Problem:
        """The problem of a user's arguments, or `ShapeError` for what cannot be laid out."""
        for name, n in (("q_len", q_len), ("kv_len", kv_len), ("batch", batch), ("heads", heads)):
            may = name in ("q_len", "kv_len")
            if not is_positive(n) and not (may and type(n) is int and n == 0):
                what = "lengths are integers, 0 or more, in tokens" if may else "counts are positive integers"
                shape = tuple(getattr(n, "shape", ()))
                raise ShapeError(f"{name} is {f'an array of shape {shape}' if shape else n}\n  {what}")
            if n >= LONGEST:
                raise ShapeError(f"{name} is {n:,}, {LONGEST:,} or more\n  positions are computed in 64 bits")
        if not np.iterable(origin) or len(origin) != 4 or not all(map(is_start, origin)):
            raise ShapeError(f"origin is {origin}\n  it is (b, h, q, k), none negative, in global positions")
        wrong = [x for x in origin[2:] if type(x) is not int and np.ndim(x) and np.shape(x) != (batch,)]
        if wrong:
            text = f"origin has {np.size(wrong[0])} entries for {batch} batch entries\n"
            raise ShapeError(f"{text}  give one int, or one per batch entry")
        start: Any = tuple(map(_start, origin))
        problem = cls(int(q_len), int(kv_len), int(batch), int(heads), start)  # numpy's would wrap
        if sizes is None:
            return problem
        if not np.iterable(sizes) or len(sizes) != 4 or not all(map(is_positive, sizes)):
            raise ShapeError(f"sizes is {sizes}\n  it is (B, H, Q_LEN, KV_LEN), the lengths of the whole problem")
        for name, stop, size in zip(SIZES, problem.ends, sizes, strict=True):
            if stop > size:
                text = f"the crop ends at {stop} but {name} is {size}\n"
                raise ShapeError(f"{text}  `sizes` are the lengths of the whole problem: (B, H, Q_LEN, KV_LEN)")
        whole_sizes: Any = tuple(map(int, sizes))
        return replace(problem, sizes=whole_sizes)

    @property
    def lengths(self) -> Sizes:
        """Batch entries, heads, queries and keys of the call."""
        return self.batch, self.heads, self.q_len, self.kv_len

    @property
    def is_empty(self) -> bool:
        """Whether there are no batch entries, heads, queries or keys."""
        return 0 in self.lengths

    @cached_property
    def ends(self) -> Sizes:
        """The b, h, q and k past the last of the call."""
        return whole(self.origin, self.lengths)

    @property
    def full(self) -> Sizes:
        """B, H, Q_LEN and KV_LEN of the whole problem."""
        return self.sizes or self.ends

    @property
    def named_sizes(self) -> dict[str, int]:
        """The sizes of the whole problem by the names that masks have for them."""
        return dict(zip(SIZES, self.full, strict=True))

    @property
    def key(self) -> tuple[Any, ...]:
        """The problem as plain numbers: a key is compared on the way of every call."""
        # arrays have no hash, and origins of a batch are arrays
        start = tuple(x if type(x) is int else tuple(x.tolist()) for x in self.origin)
        return self.q_len, self.kv_len, self.batch, self.heads, start, self.sizes

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Problem) and self.key == other.key)


LONGEST = 1 << 48  # tokens


def is_positive(n: Any) -> bool:
    """Whether n is an integer above 0."""
    if type(n) is int:  # the usual case, without numpy
        return n > 0
    # lengths come as numbers of numpy too
    return np.ndim(n) == 0 and np.asarray(n).dtype.kind in "iu" and n > 0


def is_start(x: Any) -> bool:
    """Whether x can be a start: an integer, or one per batch entry, none negative."""
    if type(x) is int:
        return x >= 0
    at = np.asarray(x)
    return at.dtype.kind in "iu" and bool((at >= 0).all())


def _start(x: Any) -> Any:
    """A start as an int, or an int64 vector."""
    if type(x) is int:
        return x
    return np.asarray(x, np.int64) if np.ndim(x) else int(x)


@dataclass(frozen=True)
class Slot:
    """A run-time scalar of the kernel: a parameter of the user's (`source` is its name), or a literal lifted
    out of the text (`value`). So `window(256)` and `window(512)` are one kernel."""

    name: str
    type: Type
    source: str | None = field(default=None, compare=False)
    value: int | float | bool | None = field(default=None, compare=False)


@dataclass(frozen=True)
class TableUse:
    """A run-time table of the kernel; `source` is the user's name for it. `derived` names the table computed from the
    user's before the kernel. "segment" is the segment of every index from 0 to the start of the last segment, "segment
    below" the segment of -1, -2 and on to the first. "run_first" and "run_last" are the ends of the run of equal
    entries that holds an index, "segment_first" and "segment_last" those of its segment, or -RUN_LIMIT, RUN_LIMIT."""

    name: str
    source: str = field(compare=False)
    rank: int
    type: Type
    derived: str = ""


@dataclass(frozen=True)
class Pages:
    """Keys and values in pages of a pool. The arrays are [pages, heads, tokens of a page, dim] (JAX: [pages, tokens of
    a page, heads, dim]). Key k of batch entry b is token `k % size` of page `source[b, k // size]`, an Int table of
    the user's. Entries of pages that hold no visible key may be anything: kernels clamp them into the pool."""

    source: str
    size: int  # tokens, a multiple of 16


@dataclass(frozen=True)
class Bounds:
    """The closed form of a row of tiles: global key positions, inclusive. They are Exprs in `q0 q1` (first and last
    global query of the tile, inside the crop), `k0 k1` (first and last global key of the crop), `b h`, sizes and slots.
    Some query of the tile may see keys `first..last`; every query sees all of `full_first..full_last`. A range with
    last < first is empty."""

    first: Expr
    full_first: Expr
    full_last: Expr
    last: Expr


@dataclass(frozen=True)
class LoopPlan:
    """The backend-neutral description of one kernel. Mask and score speak of `b h q k score`, sizes, slots (`param`
    leaves) and tables (by `TableUse.name`)."""

    mask: Expr | None  # the predicate of PARTIAL tiles; None: every position inside the lengths is visible
    score: Expr | None  # None: identity
    score_class: Literal["identity", "affine", "general"]
    slots: tuple[Slot, ...]
    tables: tuple[TableUse, ...]
    bounds: Bounds | None  # None: read the span table
    guard: bool  # a visible row may have no finite score: keep the -inf checks
    uses_batch: bool  # the mask depends on b
    uses_head: bool  # the mask depends on h
    int64: bool  # an index of the mask or score may leave 32 bits
    text: str = field(compare=False)  # the mask and score as the user would write them
    keep_mask: Expr | None = None  # whether a position survives dropout; its weight is then divided by 1 - rate
    value_scale: Expr | None = None  # factor of its weight, once weights are summed: the scale of a stored value
    pages: str | None = None  # the table that says where pages of keys are, see `Pages`
    page: int = 0  # tokens of a page
    unwritten: bool = False  # keys that no query sees may hold anything, NaN too, as in a cache that is used again
    by_query: Ends | None = None  # the mask as the keys that one query sees
    by_key: Ends | None = None  # and as the queries that see one key
    run_tables: tuple[TableUse, ...] = ()  # the ends of runs that both read besides `tables`
    weighted: bool = False  # `score` is the weight of a pair, 0 where the pair is hidden, and no exponent of a softmax
    divide: Expr | None = None  # of weighted rows: what they are divided by, in `total`, `count`, b, h and q
    counts: bool = False  # of weighted rows: visible keys are counted, for `divide`, which is 0 where there are none
    counted: Expr | None = None  # whether a pair that the mask shows is visible; None: every one

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self) if f.compare))

    def __hash__(self) -> int:
        return self._hash  # plans are keys of several tables: their many fields are looked at once

    @property
    def every_table(self) -> tuple[TableUse, ...]:
        """The tables of the kernel, and those of ends of runs."""
        return self.tables + self.run_tables

    def holding(self, limits: Mapping[str, float]) -> LoopPlan:
        """The plan for slots and tables with Ints up to `limits`: in 64 bits, if mask or score may leave 32."""
        # dropout draws from 32-bit words, whatever the width
        parts = [e for e in (self.mask, self.score, self.value_scale, self.divide) if e is not None]
        if self.int64 or needs_int64(parts, limits, np.inf):
            return replace(self, int64=True)
        return replace(self, by_query=_near(self.by_query, limits), by_key=_near(self.by_key, limits))

    @property
    def rate(self) -> str | None:
        """The slot that holds the rate of dropout."""
        return next((s.name for s in self.slots if s.source == RATE), None)

    def __str__(self) -> str:
        names = [s.name for s in self.slots] + [t.name for t in self.every_table]
        lines = [f"mask     {'every position' if self.mask is None else show(self.mask, names)}"]
        # a plan without a score mod runs no code for one
        score = "as it is" if self.score is None else show(self.score, names)
        lines.append(f"{'weight ' if self.weighted else 'score  '}  {score}")
        exprs = {"divided": self.divide, "counted": self.counted, "kept": self.keep_mask, "scaled": self.value_scale}
        lines += [f"{label:8} {show(e, names)}" for label, e in exprs.items() if e is not None]
        if self.pages is not None:
            lines.append(f"pages    of {self.page} keys, by {self.pages}")
        if self.unwritten:
            lines.append("unseen   keys may hold anything")
        if self.bounds is None:
            lines.append("bounds   read from the span table")
        else:
            for name in ("first", "full_first", "full_last", "last"):
                lines.append(f"{name:10} = {show(getattr(self.bounds, name), names)}")
        lines.append(f"guard    {'a row may be empty: -inf is checked' if self.guard else 'no row is empty'}")
        lines += [f"slot     {s.name} = {s.value if s.source is None else s.source}" for s in self.slots]
        lines += [f"table    {t.name} = {t.source}{' by index' if t.derived else ''}" for t in self.tables]
        lines += [f"table    {t.name} = {t.derived.replace('_', ' ')} of {t.source}" for t in self.run_tables]
        lines.append(f"integers {64 if self.int64 else 32} bits")
        return "\n".join(lines)

    def slot_values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """A value for every slot, from the literals lifted and the user's parameters."""
        return {s.name: s.value if s.source is None else params[s.source] for s in self.slots}

    def table_values(self, tables: Mapping[str, Any]) -> dict[str, Any]:
        """An array for every table of the kernel, from the user's tables; tables of single calls have none."""
        known = [t for t in self.every_table if t.source not in KV_INPUTS]
        return {t.name: derived_table(tables[t.source], t.derived) for t in known}


@dataclass(frozen=True)
class Target:
    """The numbers of a backend and machine that change a result by rounding at most. A backend with more of them adds
    fields, as `TritonTarget` does. `dq` and `dkv` are the targets of the backward kernels and `decode` that of
    decoding; None: the forward's. With a `dv`, a separate kernel computes dv."""

    backend: str
    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2
    precision: Literal["ieee", "tf32", "tf32x3", "bf16x6"] = "ieee"  # of products of float32
    tanh: Literal["exact", "approximate"] = "exact"  # of 16-bit inputs: as the GPU's own instruction has it
    fixed: bool = field(default=False, repr=False)  # whether the user gave tile, warps or stages
    arch: str = H100.name  # of a backend that has a text for each architecture
    invariant: bool = False  # one order of sums for each row, whatever the call is
    dq: Target | None = None
    dkv: Target | None = None
    dv: Target | None = None
    decode: Target | None = None

    def everywhere(self, **fields: Any) -> Self:
        """The target with these fields, and with them in the targets of its other kernels."""
        # kernels that have a target of their kind keep their tiles, and take the other fields
        parts = {n: x and replace(x, **fields) for n in ("dq", "dkv", "dv", "decode") for x in [getattr(self, n)]}
        return replace(self, **fields, **parts)


@dataclass(frozen=True)
class Geometry:
    """The shapes of one call, and the forms of its arrays. Lengths in tokens; `origin` and `sizes` place the call in
    the whole problem. A form that no kernel reads is a LoweringError."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_dim: int
    scale: float
    origin: Origin = NOWHERE
    sizes: Sizes | None = None
    q: Operand = UNSAID
    k: Operand = UNSAID
    v: Operand = UNSAID

    def __post_init__(self) -> None:
        for name, x, dim in (("q", self.q, self.head_dim), ("k", self.k, self.head_dim), ("v", self.v, self.v_dim)):
            # an operand that nothing has said yet is checked when it is known
            if x is not UNSAID and not x.has_kernels(name, dim):
                raise LoweringError(
                    f"no kernel reads {name} of {x}\n  q is of {', '.join(FLOATS)}; k and v are of these or "
                    f"{', '.join(BYTES)}, one value in a byte, with one scale for each token and head or none.\n"
                    f"  q, k and v together may be of {FP8}, with a scale for each head or block of tokens"
                )

    @cached_property
    def kv_dtype(self) -> str:
        """The dtype of k and v where it is not that of q: of 8 bits."""
        return "" if self.k.dtype == self.q.dtype else self.k.dtype

    @property
    def stored_dtype(self) -> str:
        """The dtype of k and v where it has 8 bits, which no gradient flows to."""
        return self.k.dtype if self.k.dtype in BYTES else ""

    @property
    def is_empty(self) -> bool:
        """Whether a call is empty: no batch entries, heads, queries or keys."""
        return 0 in (self.batch, self.heads, self.q_len, self.kv_len)

    @property
    def full(self) -> Sizes:
        """B, H, Q_LEN and KV_LEN of the whole problem; lengths may be symbols of an export."""
        return self.sizes or whole(self.origin, (self.batch, self.heads, self.q_len, self.kv_len))

    @property
    def named_sizes(self) -> dict[str, int]:
        """The sizes of the whole problem by the names that masks have for them."""
        return dict(zip(SIZES, self.full, strict=True))

    @cached_property
    def problem(self) -> Problem:
        """The lengths and the place, checked: no lengths are 0 or symbols."""
        return Problem.of(self.q_len, self.kv_len, self.batch, self.heads, self.origin, self.sizes)


@dataclass(frozen=True)
class Spans:
    """Span records of every row of tiles, at most R a row, in key tiles, half-open.

    `bounds` int32 [slices, rows, R, 4] holds (lo, full_lo, full_hi, hi), ordered and disjoint; only the first
    `count[slice, row]` are meant, the rest are zero. `slice_of` int32 [batch, heads] names the slice.
    """

    bounds: NDArray[np.int32]
    count: NDArray[np.int32]
    slice_of: NDArray[np.int32]


@dataclass(eq=False)
class KernelInputs:
    """The inputs of a call's kernels besides arrays and cotangents; executors of plans take them first.

    `_prepared` of runtime/torch/op.py and `kernel_inputs` of runtime/jax/call.py make them. `inputs_of` and
    `with_tables` of a `PreparedCall` copy them.

    The fields never change. The class is not frozen, because it would take five times as long to make, and every call
    with a plan makes one."""

    plan: LoopPlan
    spans: Any  # `Spans`, or a `SpanSource` where the kernels take any tile; None: bounds in closed form
    geometry: Geometry
    target: Any  # the backend's `Target`
    slots: Mapping[str, Any]  # by the plan's names
    tables: Mapping[str, Any]
    sinks: Any = None  # [heads]
    rows: Any = None  # the `TokenPermutation` in which executors with `rows` read and write their rows
    deterministic: bool = True  # whether equal calls get equal gradients
    platform: str = "cpu"  # of JAX: what it is lowered for

    @property
    def table_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(table.shape) for name, table in self.tables.items()}

    @property
    def operands(self) -> tuple[Origin, Sizes, list[Any], list[Any]]:
        """The operands of a kernel that takes any origin, sizes, slots and tables; the last two in the plan's order."""
        slots, tables = [self.slots[s.name] for s in self.plan.slots], [self.tables[t.name] for t in self.plan.tables]
        return self.geometry.origin, self.geometry.full, slots, tables


@dataclass(frozen=True, eq=False)
class ForwardResults:
    """The results of a forward that its backward reads: out, lse [batch, heads, q_len], and what some backwards know of
    each row in addition."""

    out: Any
    lse: Any
    lse_residual: Any = None  # the rounding error of lse
    softmax_stats: Any = None  # as the backend's `stats_kind` says
    share: Any = None  # the part of each row's weight that these keys have, where out and lse are of other keys too


@dataclass(frozen=True, eq=False)
class Cotangents:
    """The cotangents of out and of lse; None where there is none."""

    dout: Any
    dlse: Any = None


class SpanSource(Protocol):
    """A source of the spans of one call for any tile (block_q, block_k): computed on request and kept."""

    def rows(self, block: tuple[int, int]) -> Any:
        """`Spans` or `DeviceSpans`: records of key tiles per row of query tiles."""

    def columns(self, block: tuple[int, int]) -> Any:
        """Transposed spans for the same tile: records of query tiles per row of key tiles."""


@dataclass(frozen=True)
class ProgramFacts:
    """The facts that were proved of a program at the lengths of a call; by default there are none."""

    bounds: Bounds | None = None  # the closed form of the mask
    rows_nonempty: bool = False  # whether every query sees a key
    score_finite: bool = False  # whether the score mod is finite wherever scores are
    # the largest magnitudes of variables, parameters and tables, by name; unknown ones are taken to stay below 2**28
    limits: Mapping[str, float] = field(default_factory=dict)
    table_facts: frozenset[Fact] = frozenset()  # those of `facts_of(mask)` that hold


def make_plan(
    exprs: ProgramExprs,
    text: str = "",
    facts: ProgramFacts | None = None,
    *,
    keep_mask: Expr | None = None,
    value_scale: Expr | None = None,
    pages: Pages | None = None,
    unwritten: bool = False,
) -> LoopPlan:
    """The plan of a simplified mask and score mod, reductions written out.

    Without the facts that rows are not empty and scores are finite, the -inf checks stay. The limits of the facts
    decide between 32- and 64-bit integers, and facts of tables let a row's ends come from tables. `keep_mask` is that
    of dropout, see `survives`. `value_scale` and `pages` are of stored keys and values; those that no query sees may
    hold anything, and with `unwritten` plain ones may as well.

    >>> from frisket.dsl.sugar import q, k
    >>> make_plan(ProgramExprs((q >= k) & (q - k <= 255))).mask
    q >= k & q - k <= s0
    """
    facts = ProgramFacts() if facts is None else facts
    bounds, limits, score = facts.bounds, facts.limits, exprs.score
    formulas = [] if bounds is None else [bounds.first, bounds.full_first, bounds.full_last, bounds.last]
    # a mask that reads neither b nor h has one layout for all
    reads = uses(exprs.mask) if exprs.mask is not None else frozenset()
    # before literals are lifted: a slot has no known size
    wide = needs_int64((*exprs.parts, *formulas), limits)
    ours = untied(exprs.parts)
    if ours:  # operands that only names tell apart: in an order that names do not decide
        exprs = exprs.changed(lambda e: simplify(renamed(e, ours)))
        formulas = [simplify(renamed(e, ours)) for e in formulas]
    names = _Names({new: name for name, new in ours.items()})
    weighted, counts, counted = exprs.weight is not None, False, None
    if exprs.weight is not None:
        # what may be NaN or infinite without any key is not evaluated there
        counts = exprs.divide is not None and ("count" in uses(exprs.divide) or not finite(exprs.divide, {}))
        seen = ne(exprs.score, NEG_INF) if exprs.score is not None and not facts.score_finite else None
        counted = None if seen is None else names.lift(simplify(seen))
        exprs = replace(exprs, score=simplify(exprs.weight_of_score(facts.score_finite)), weight=None)
        score = exprs.score
    lifted = exprs.changed(names.lift)
    # the 1 of an end says whether a bound is strict, and is no number of the user's
    new_bounds = Bounds(*(names.lift(e, units=False) for e in formulas)) if bounds is not None else None
    new_keep = names.lift(renamed(keep_mask, ours)) if keep_mask is not None else None
    new_scale = names.lift(renamed(value_scale, ours)) if value_scale is not None else None
    hold = frozenset((fact, ours.get(name, name)) for fact, name in facts.table_facts)
    by_query, by_key = (
        None if exprs.mask is None else names.ends(exprs.mask, axis, wide, limits, hold) for axis in "kq"
    )
    # pages are read like a table of the user's, so that one code clamps both
    place = lookup(pages.source, (var("b"), var("k") // pages.size), INT) if pages else None
    paged = names.lift(renamed(place, ours)) if place is not None else None
    tables = list(names.tables.values())
    return LoopPlan(
        mask=lifted.mask, score=lifted.score, score_class=score_class(score), slots=tuple(names.slots.values()),
        tables=tuple(t for t in tables if t.derived not in ENDS_OF_RUNS),
        bounds=new_bounds,
        guard=not (facts.rows_nonempty and (score is None or facts.score_finite)) and not weighted,
        uses_batch="b" in reads, uses_head="h" in reads, int64=wide, text=text, keep_mask=new_keep,
        value_scale=new_scale,
        pages=None if paged is None else paged.name, page=pages.size if pages else 0,
        unwritten=unwritten or pages is not None or (value_scale is not None and "k" in uses(value_scale)),
        by_query=by_query, by_key=by_key,
        run_tables=tuple(t for t in tables if t.derived in ENDS_OF_RUNS),
        weighted=weighted, divide=lifted.divide, counts=counts, counted=counted,
    )  # fmt: skip


def survives(at: tuple[Expr, ...] | None = None) -> Expr:
    """The Expr that says whether a position survives dropout, in the names SEED and RATE.

    Every position has a random draw, from a seed and global coordinates: the same on any backend, tile and shard. `at`
    are those of (q, k), or of (b, h, q, k), where the arrays hold positions in another order."""
    where = (var("b"), var("h"), *(at or (var("q"), var("k"))))[-4:]
    return build("ge", random(param(SEED, INT), *where), param(RATE, FLOAT))


class _Names:
    """The numbered names of slots and tables, in order of first use: kernels of one shape are one text."""

    def __init__(self, users: Mapping[str, str]) -> None:
        self.users = users  # the user's names, where parameters have other ones
        self.slots: dict[tuple[Any, ...], Slot] = {}
        self.tables: dict[tuple[str, str], TableUse] = {}

    def lift(self, root: Expr, units: bool = True) -> Expr:
        """Lift literals to slots: bounds and summands become slots. Divisors, factors, shifts and Float literals stay,
        and so does the 1 of a formula (`units`), which says strict or not and is no number of the user's."""
        done: dict[Expr, Expr] = {}
        for e in walk(root):
            # a parameter is a slot: another value is the same kernel
            if e.op == "param":
                done[e] = self._slot(("param", e.name), e.type, source=self.users.get(e.name, e.name))
            elif e.op in ("lookup", "segment"):
                done[e] = self._read(e, tuple(done[a] for a in e.args))
            elif e.op in ENDS_OF_RUNS:
                done[e] = self._table(e, tuple(done[a] for a in e.args), e.op)
            elif e.op in _LIFTED and e.args[0].type is INT:
                done[e] = build(e.op, *(self._operand(a, done[a], units) for a in e.args))
            else:
                # divisors, factors and Floats stay literals: the text of a kernel depends on them
                done[e] = make(e.op, tuple(done[a] for a in e.args), e.name, e.type) if e.args else e
        return done[root]

    def ends(
        self, mask: Expr, axis: str, wide: bool, limits: Mapping[str, float], facts: frozenset[Fact]
    ) -> Ends | None:
        """The ends of a mask along an axis, lifted; None where there are none, or where they leave the mask's integers:
        `q - k <= n` is `k >= q - n`, which is further from 0."""
        reach = max(limits.get(n, 0) for n in "qk")
        ends = ends_of(mask, axis, facts if reach < RUN_LIMIT else frozenset())
        # no interval: the kernel asks every pair
        if ends is None:
            return None
        # ends may leave 32 bits where no clause does; asking pairs is cheaper than 64 bits
        if not wide and needs_int64([e for e in (ends.first, ends.last) if e is not None], limits):
            return None
        first, last = (e if e is None else self._operand(e, self.lift(e, False)) for e in (ends.first, ends.last))
        return Ends(first, last, self.lift(ends.asks), self.lift(ends.rest))

    def _operand(self, e: Expr, lifted: Expr, units: bool = False) -> Expr:
        """An operand: a slot for a literal, `lifted` for anything else."""
        # 0, and the 1 of an end, are no numbers of the user's: another value would be another mask
        if e.op != "lit" or e.type is not INT or e.name == 0 or (abs(e.name) == 1 and not units):
            return lifted
        return self._slot(("lit", e.name), INT, value=e.name)

    def _slot(self, key: tuple[Any, ...], type: Type, **what: Any) -> Expr:
        # equal literals share a slot, so their number does not depend on how often they occur
        if key not in self.slots:
            self.slots[key] = Slot(f"s{len(self.slots)}", type, **what)
        return param(self.slots[key].name, type)

    def _read(self, e: Expr, args: tuple[Expr, ...]) -> Expr:
        if e.op == "lookup":
            return self._table(e, args)
        at, (least, _) = args[0], interval(e.args[0])
        known = self._table(e, args, "segment")
        # a position that is never negative needs one of the two tables
        if least is not None and least >= 0:
            return known
        return where(at >= 0, known, self._table(e, (-1 - at,), "segment below"))

    def _table(self, e: Expr, args: tuple[Expr, ...], derived: str = "") -> Expr:
        source = self.users.get(e.name, e.name)
        key = (e.name, derived)
        if key not in self.tables:
            self.tables[key] = TableUse(f"t{len(self.tables)}", source, len(args), e.type, derived)
        return lookup(self.tables[key].name, args, e.type)


_LIFTED = frozenset({"add", "sub", "lt", "le", "gt", "ge", "eq", "ne", "min", "max"})


def score_class(score: Expr | None) -> Literal["identity", "affine", "general"]:
    """The way a score mod uses `score`: unchanged, `score + f` with f free of it, or anything else."""
    if score is None:
        return "identity"
    # s + f(q, k) has the derivative 1, so a backward multiplies by no slope
    if score.op in ("add", "sub") and score.args[0].op == "var" and "score" not in uses(score.args[1]):
        return "affine"
    return "general"


# -- widths ---------------------------------------------------------------------------------------


def _near(ends: Ends | None, limits: Mapping[str, float]) -> Ends | None:
    """Ends that stay in 32 bits: a number far past all positions stands for any further one. None where an end reads
    several numbers, or by other operators."""
    bounds = [] if ends is None else [e for e in (ends.first, ends.last) if e is not None]
    if ends is None or not needs_int64(bounds, {n: x + 1 for n, x in limits.items()}, np.inf):
        return ends
    leaves = [{n for n in walk(e) if n.op in ("param", "lookup") and n.name in limits} for e in bounds]
    linear = {"add", "sub", "min", "max", "lit", "var", "param", "lookup"}
    # the clamp below is exact for one unknown number in a linear end alone
    if max(map(len, leaves)) > 1 or not {n.op for n in walk(*bounds)} <= linear:
        return None
    near = {n: build("max", build("min", n, lit(2 * RUN_LIMIT)), lit(-2 * RUN_LIMIT)) for n in set().union(*leaves)}
    return replace(ends, **{n: substitute(e, near) for n in ("first", "last") if (e := getattr(ends, n)) is not None})


def needs_int64(parts: Iterable[Expr], limits: Mapping[str, float], most: float = 2.0**63) -> bool:
    """Whether some Int of these expressions may leave 32 bits; an Int that leaves 64 bits, or `most`, is an error."""
    parts, size, widest = list(parts), dict[Expr, float](), 0.0
    wrapping = modular(*parts)
    for e in walk(*parts):
        # Ints that wrap by themselves, as in a hash, have no size to check
        if e.type is INT and e not in wrapping:
            args = [size.get(a, 0.0) for a in e.args]
            size[e] = float(RUN_LIMIT) if e.op in ENDS_OF_RUNS else magnitude(e, args, limits)
            # an entry of a table is checked when the table is bound, not here
            wide = min(size[e], 2.0**62 if e.op == "lookup" else size[e])
            # comparisons and divisions make no Int larger than their operands
            if wide >= most and (e.op in RING or e.op == "abs"):
                remedy = "bound its parameters, or keep its products and powers smaller"
                raise LoweringError(f"an integer of this mask may leave 64 bits in `{e!r}`\n  {remedy}")
            widest = max(widest, wide)
        elif e.type is BOOL:
            size[e] = 1.0
    return widest >= 2.0**31
