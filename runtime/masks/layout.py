"""Layout: the tiles of a mask, its pictures, and its exports to other libraries.

Below it are questions about masks, answered exactly or not at all.

>>> from frisket.runtime.masks.mask import mask
>>> print(mask("causal & window(256)").implies("window(512)", 4096, 4096))
yes: every position the first mask shows, the second shows
>>> print(mask("causal").implies("window(256)", 4096, 4096))
no: query 256 sees key 0 under the first mask and not under the second (b 0, h 0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from frisket.dsl.errors import ExportError, MismatchError, Undecided
from frisket.dsl.evaluate import decided, evaluate
from frisket.dsl.ir import TRUE, Expr, make
from frisket.dsl.notebook import sentence
from frisket.lowering.analysis.count import literal
from frisket.lowering.analysis.decide import Lookup, first_empty_row, first_visible, lookups, pair_counts
from frisket.lowering.analysis.groups import Beyond
from frisket.lowering.analysis.layout import AnalysedMask, bind_in_part, grid_of
from frisket.lowering.analysis.runs import Runs
from frisket.lowering.analysis.table import Table
from frisket.lowering.analysis.tiles import WORK, Grid, Scope, Spent
from frisket.lowering.analysis.tiling import Tiling, check_block, check_reach
from frisket.lowering.plan import Problem
from frisket.lowering.simplify import ProgramExprs, prepare, simplify
from frisket.runtime.draw.terminal import draw
from frisket.runtime.machine.caller import outside
from frisket.runtime.machine.parameters import BoundExpr, separated

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.nn.attention.flex_attention import BlockMask

    from frisket.runtime.export.bsr import BSR, Splash
    from frisket.runtime.export.slices import FlashMask, Slices, Varlen
    from frisket.runtime.export.tile_lists import FA4

    from .mask import Mask

Block = tuple[int, int] | int
BUDGET = 1 << 30  # steps: one operator at one position or rectangle
Witness = tuple[int, int, int, int | None]
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Ask = Callable[[Expr, Grid, Scope], T | None]


def of_something(method: F) -> F:
    """Refuses a layout without queries or keys, of which there is no picture and no export."""

    @wraps(method)
    def run(self: Layout, *args: Any, **kwargs: Any) -> Any:
        if self.problem.is_empty:
            text = f"{method.__name__}() of a layout of {self.q_len} x {self.kv_len} tokens\n"
            raise ExportError(f"{text}  there is nothing to show: leave out layouts without queries or keys")
        return method(self, *args, **kwargs)

    return cast(F, run)


# Exports and pictures are imported by the methods that make them: `frisket show` starts without them.
class Layout(Tiling):
    """The block-sparse layout of a mask: `m.layout(q_len, kv_len, ...)`.

    >>> import frisket as fk
    >>> layout = fk.mask("causal & window(256)").layout(1024, 1024)
    >>> layout.counts, layout.visible_pairs
    (Counts(empty=43, partial=14, full=7), 229504)
    >>> layout.density, layout.exact, layout.kinds().shape, layout.rows_nonempty
    (0.328125, True, (1, 1, 8, 8), True)
    >>> layout.row_counts[0, 0, [0, 1023]], layout.row_pairs[:2]
    (array([  1, 256]), array([ 8256, 24640]))
    >>> layout.runs.row_ptr[..., :3], layout.transposed.spans.count.shape, layout.facts.contiguous
    (array([0, 1, 3]), (1, 8), True)
    >>> print(layout.explain(q=300, k=17))
    hidden: in window(256), abs(q - k) < 256 is false: abs(q - k) = 283
    >>> layout.to_varlen().window_size, layout.to_bsr().shape, layout.to_slices().attn_type_map.tolist()
    ((255, 0), (1024, 1024), [1, 3])
    >>> layout.to_flashmask().startend_row_indices.shape, layout.to_splash().block
    ((1, 1, 1024, 1), (128, 128))
    >>> layout.to_block_mask().kv_num_blocks.shape, layout.to_fa4().forward.mask_block_cnt.shape
    (torch.Size([1, 1, 8]), torch.Size([1, 1, 8]))
    >>> layout.reads_at_most(3)  # tiles of any row
    True
    >>> figure, page = layout.plot(), layout.to_html()  # with a path, each writes a file

    Tiles are `block = (queries, keys)` tokens; the last of a row or column may be cut by the lengths, and what
    lies outside counts as hidden. Positions are global: `origin = (b, h, q, k)` is where the layout begins and
    `sizes = (B, H, Q_LEN, KV_LEN)` are the lengths of the whole problem.
    """

    @of_something
    def plot(self, path: str | Path | None = None, **options: Any) -> Figure:
        """A picture of the tiles, written to a `.png` or `.svg` if there is a path: `layout.plot("mask.png")`.

        Options: `b` and `h`, a batch entry and head counted in the layout; `tokens`, positions instead of tiles;
        `compact`, without axes; `dark`. `size` of the longer side is in inches; `dpi`; `title`. Gives the matplotlib
        figure. Raises `ParameterError` for other suffixes and for options that do not fit.
        """
        from frisket.runtime.draw.pixels import plot

        return plot(self, path, **options)

    @of_something
    def to_html(self, path: str | Path | None = None) -> str:
        """The text of one page that works offline: zoom, pan, and ask any position why. Written to `path` if there is
        one: `layout.to_html("mask.html")`."""
        from frisket.runtime.draw.html import to_html

        return to_html(self, path)

    def _repr_html_(self) -> str | None:
        if self.problem.is_empty:
            return None  # there is a text
        from frisket.runtime.draw.html import notebook

        return notebook(self)

    @outside
    @of_something
    def to_block_mask(self, device: Any = "cpu", separate_full_blocks: bool = True) -> BlockMask:
        """torch's `BlockMask`, its lists bit for bit those of `create_block_mask`. `ExportError` where the layout is
        not exact, or the lists would take more than 8 GiB."""
        from frisket.runtime.export.tile_lists import to_block_mask

        return to_block_mask(self, device, separate_full_blocks)

    @of_something
    def to_flashmask(self) -> FlashMask:
        """FlashMask's start and end rows per key column. `ExportError` where three runs of queries do not see a key."""
        from frisket.runtime.export.slices import to_flashmask

        return to_flashmask(self)

    @of_something
    def to_slices(self) -> Slices:
        """MagiAttention's query ranges, key ranges, kinds. `ExportError` where heads differ, slices exceed queries."""
        from frisket.runtime.export.slices import to_slices

        return to_slices(self)

    @of_something
    def to_bsr(self, bits: bool = False) -> BSR:
        """Block sparse rows of each distinct slice, with the elements of partial tiles as `bits`."""
        from frisket.runtime.export.bsr import to_bsr

        return to_bsr(self, bits)

    @of_something
    def to_splash(self, fused: bool = False) -> Splash:
        """Splash attention's `MaskInfo`, forward and transposed; `fused` for its fused backward kernel. `ExportError`
        where batch entries differ, lengths are no whole tiles, or a query sees no key."""
        from frisket.runtime.export.bsr import to_splash

        return to_splash(self, fused)

    @of_something
    def to_fa4(self, device: Any = "cpu", compact: bool = False) -> FA4:
        """FlashAttention 4's block-sparse tensors; `compact` cuts index lists to the longest."""
        from frisket.runtime.export.tile_lists import to_fa4

        return to_fa4(self, device, compact)

    @of_something
    def to_varlen(self) -> Varlen:
        """`cu_seqlens` and the causal and window flags of variable-length attention. `ExportError` where the mask is
        not documents on the diagonal under one flag and one window."""
        from frisket.runtime.export.slices import to_varlen

        return to_varlen(self)

    def __str__(self) -> str:
        return draw(self)

    def __repr__(self) -> str:
        shape = f"{self.q_len} x {self.kv_len}, block {self.block[0]} x {self.block[1]}"
        c = self.counts
        return f"Layout({repr(self.shown)!r}, {shape}: {c.full} full, {c.partial} partial, {c.empty} empty)"


def make_layout(
    mask: BoundExpr, problem: Problem, block: Block = (128, 128), exact: bool = True, budget: int | None = None
) -> Layout:
    """The layout of a mask over the queries and keys of a problem.

    `exact=False` leaves tiles PARTIAL that only a look at their elements could decide. `budget` are the steps that the
    analysis may take, one operator at one position each; past them tiles stay PARTIAL and `exact` is False.

    Raises `ShapeError` for tiles that make no sense, `ParameterError` for a missing value.
    """
    pair: tuple[Any, ...] = tuple(block) if isinstance(block, Iterable) else (block, block)
    check_block(pair, problem)
    mask.require_bound()
    # the analysis would clamp a lookup past the end of its table
    check_reach(mask.expr, [mask.expr], mask.scalars, mask.tables, problem)
    tables = {n: Table(t) for n, t in mask.tables.items()}
    simple = prepare(ProgramExprs(decided(bind_in_part(mask.expr, mask.tables), mask.scalars))).visible
    analysed = AnalysedMask(simple, mask.expr, dict(mask.scalars), tables, mask.shown)
    layout = Layout(analysed, problem, (int(pair[0]), int(pair[1])), exact, WORK if budget is None else budget)
    layout.analysis  # noqa: B018 - errors are raised here
    return layout


# -- questions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Answer:
    """An answer to a question about a mask, truthy or falsy.

    >>> from frisket.runtime.masks.mask import mask
    >>> found = mask("causal").is_empty(8, 8)
    >>> bool(found), found.witness, str(found)
    (False, (0, 0, 0, 0), 'no: query 0 sees key 0 (b 0, h 0)')

    `witness` is the (b, h, q, k) that shows why, in global positions; None where no one
    position can. `because` says it in words, and `str(answer)` with yes or no before it."""

    holds: bool
    witness: Witness | None = None
    because: str = ""

    def __bool__(self) -> bool:
        return self.holds

    def __str__(self) -> str:
        return f"{'yes' if self.holds else 'no'}: {self.because}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return sentence("yes" if self.holds else "no", self.because, good=self.holds)


def implies(first: Mask, second: Mask, problem: Problem, budget: int = BUDGET) -> Answer:
    """Whether `second` shows every position `first` shows."""
    at = _visible("implies", (first, second), first - second, problem, budget)
    if at is None:
        return Answer(True, None, "every position the first mask shows, the second shows")
    return Answer(False, at, f"{_sees(at)} under the first mask and not under the second {_slice(at)}")


def equivalent(first: Mask, second: Mask, problem: Problem, budget: int = BUDGET) -> Answer:
    """Whether both show the same positions."""
    at = _difference(first, second, problem, budget)
    if at is None:
        return Answer(True, None, "both show the same positions")
    one, other = ("first", "second") if _shows(first, at, problem) else ("second", "first")
    return Answer(False, at, f"{_sees(at)} under the {one} mask and not under the {other} {_slice(at)}")


def _difference(first: Mask, second: Mask, problem: Problem, budget: int) -> Witness | None:
    both = (first, second)
    try:  # each difference by itself is solved by row more often than both at once
        sides = (first - second, second - first)
        # a part of the budget: the rest is for both at once
        witnesses = [_visible("equivalent", both, d, problem, budget >> 8) for d in sides]
    except Undecided:
        return _visible("equivalent", both, first ^ second, problem, budget)
    # both sides may have one: the first of the two
    return min((at for at in witnesses if at is not None), default=None)


def is_empty(mask: Mask, problem: Problem, budget: int = BUDGET) -> Answer:
    """Whether nothing is visible."""
    at = _visible("is_empty", (mask,), mask, problem, budget)
    return Answer(True, None, "no query sees a key") if at is None else Answer(False, at, f"{_sees(at)} {_slice(at)}")


def empty_rows(mask: Mask, problem: Problem, budget: int = BUDGET) -> Answer:
    """Whether some query sees no key."""
    at = _answered("empty_rows", (mask,), mask, first_empty_row, problem, budget)
    if at is None:
        return Answer(False, None, "every query sees a key")
    return Answer(True, (*at, None), f"query {at[2]:,} sees no key {_slice(at)}")


def score_lookups(score: BoundExpr, shown: Mask | None, problem: Problem, budget: int = BUDGET) -> tuple[Lookup, ...]:
    """Every table lookup of a score mod, and whether it stays inside its table wherever `shown` shows a position. For a
    mask alone, wherever the rest of the mask does not decide."""
    score.require_bound()
    left: BoundExpr = score
    values, visible = dict(left.params), TRUE
    if shown is not None:
        shown.require_bound()
        left, right = separated(score, shown)  # a name may stand for another table in each
        values = {**left.params, **right.params}
        visible = bind_in_part(right.expr, right.tables)
    e = bind_in_part(left.expr, left.tables)
    # a grid that tells apart what either of them reads
    grid, _ = grid_of(make("both", (e, visible)), problem)
    tables = {n: Table(v) for n, v in values.items() if isinstance(v, np.ndarray)}
    env = {**problem.named_sizes, **{n: v for n, v in values.items() if n not in tables}}
    return lookups(e, visible, grid, Scope(env, tables, budget))


def visible_pairs(mask: Mask, problem: Problem) -> int:
    """Visible pairs over every batch entry and head; a layout is made only where they cannot be counted by row."""

    def runs() -> Runs:
        raise Beyond  # there is no layout: only counting by row

    _check((mask,), problem)
    e = simplify(bind_in_part(mask.expr, mask.tables))
    grid, slice_of = grid_of(e, problem)
    scope = Scope({**problem.named_sizes, **mask.scalars}, {n: Table(t) for n, t in mask.tables.items()})
    try:
        return int(pair_counts(e, grid, scope, runs)[slice_of].sum())
    except Beyond:
        # a layout has the runs that counting needs
        return make_layout(mask, problem).visible_pairs


# -- asking -----------------------------------------------------------------------------------------


def _visible(question: str, masks: tuple[Mask, ...], joint: Mask, problem: Problem, budget: int) -> Witness | None:
    """A position `joint` shows, checked by the interpreter."""
    at = _answered(question, masks, joint, first_visible, problem, budget)
    if at is not None and not _shows(joint, at, problem):
        raise MismatchError(f"the analysis and the interpreter differ at {at}\n  please report this with the mask")
    return at


def _answered(
    question: str, masks: tuple[Mask, ...], joint: Mask, ask: Ask[T], problem: Problem, budget: int
) -> T | None:
    """The answer of `ask` for a joint mask, once the masks are checked; `Undecided` where the budget is too small."""
    _check(masks, problem)
    env = {**problem.named_sizes, **joint.scalars}
    e = literal(simplify(bind_in_part(joint.expr, joint.tables)), env)
    grid, _ = grid_of(e, problem)
    scope = Scope(env, {n: Table(t) for n, t in joint.tables.items()}, budget)
    try:
        return ask(e, grid, scope)
    except Spent:
        text = f"{question} is not decided within a budget of {budget:,} steps\n  ask about a part (shorter lengths, "
        raise Undecided(f"{text}`origin`, `sizes`), or allow more: budget={4 * max(budget, 1 << 26)}") from None


def _check(masks: tuple[Mask, ...], problem: Problem) -> None:
    """Raise for what cannot be asked."""
    for one in masks:
        one.require_bound()
        check_reach(one.expr, [one.expr], one.scalars, one.tables, problem)


def _shows(mask: Mask, at: Witness, problem: Problem) -> bool:
    env = {**problem.named_sizes, **mask.scalars, **dict(zip("bhqk", at, strict=True))}
    return bool(np.asarray(evaluate(mask.expr, env, mask.tables)))


def _sees(at: Witness) -> str:
    return f"query {at[2]:,} sees key {at[3]:,}"


def _slice(at: tuple[int | None, ...]) -> str:
    return f"(b {at[0]}, h {at[1]})"
