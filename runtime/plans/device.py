"""FlatPlan: a plan without the values of tables that live on a device, are traced, or learned. Where the mask reads
one, a printed planner makes the spans there, without a copy. What lengths and shapes decide is its DevicePlanTemplate.

Under `jax.jit` a plan may be made from traced tables, handed to every layer, and carried through transforms: it is
a pytree whose leaves are the tables and the spans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import LoweringError, ParameterError
from frisket.dsl.evaluate import decided
from frisket.dsl.ir import FALSE, Expr, names_of, var, walk
from frisket.dsl.program import entries_of
from frisket.dsl.show import show
from frisket.dsl.sugar import eq
from frisket.dsl.transfer import distance_only
from frisket.dsl.types import BOOL, FLOAT, INT, Type, ranked
from frisket.grammar.memo import memo
from frisket.lowering.analysis.decide import sees_itself
from frisket.lowering.analysis.layout import bind, grid_of, swap
from frisket.lowering.analysis.reach import SMALLEST, SMALLEST_DOUBLE, narrowed
from frisket.lowering.analysis.solve import facts_of
from frisket.lowering.analysis.table import RUN_LIMIT, Table
from frisket.lowering.analysis.tiling import check_block, check_reach
from frisket.lowering.kernels.features import DENSE
from frisket.lowering.pipeline import UNDRAWN, finite_tables, holds, limits_of, loop_plan, simplified_program
from frisket.lowering.plan import Geometry, LoopPlan, Problem, ProgramFacts, Spans
from frisket.lowering.planner.planner import DeviceSpans, Planner, planner
from frisket.lowering.simplify import ProgramExprs, prepare, simplify
from frisket.lowering.xla.tiles import int64_enabled
from frisket.runtime.calls.arrays import Arrays, Stored, framework_of, version_of
from frisket.runtime.calls.options import flag
from frisket.runtime.calls.program import CallProgram, check_used
from frisket.runtime.machine.parameters import check_plain, is_tensor, learns, traced
from frisket.runtime.masks.layout import Layout, make_layout
from frisket.runtime.masks.mask import Mask

from .host import FEW_TILES, Plan
from .run import SpanRequest, check_sorted, kernel_tables, on_host, source, spans


def split_host_device(
    params: Values, flat: bool | None, learnable: Collection[str] = (), framework: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(values of the host, values that stay where they are). Those that stay are traced ones, torch tables on an
    accelerator, arrays of `framework` (of any, when None) that gradients may flow to, being `learnable`. Where `flat`
    asks for the flat planner, so is every table of a framework. `flat=False` keeps all on the host but what learns."""
    for n, x in params.items():
        check_plain(n, x)
    stays = {n for n, x in params.items() if _stays(x, flat, n in learnable, framework)}
    return {n: x for n, x in params.items() if n not in stays}, {n: params[n] for n in stays}


def _stays(x: Any, flat: bool | None, learnable: bool, framework: str | None) -> bool:
    kind = framework_of(x)
    if flat is False:
        return learnable and learns(x)
    if traced(x) or kind not in ("torch", "jax"):
        return traced(x)
    on_accelerator = kind == "torch" and x.device.type != "cpu"  # JAX's are copied to the host, unless traced
    return (learnable and framework in (None, kind)) or (bool(x.ndim) and (bool(flat) or on_accelerator))


@dataclass(frozen=True)
class DeviceTiledPlan:
    """The inputs of the kernels of a `FlatPlan` at one tile size, as a `TiledPlan` has them for a `Plan`."""

    plan: LoopPlan
    spans: Spans | DeviceSpans
    slots: Values
    tables: Values
    simplified: ProgramExprs
    rules: Counter[str]
    unchecked: tuple[str, ...] = ()
    layout = None

    @property
    def facts(self) -> str:
        """The place where the plan was made, and the unchecked properties of its tables."""
        open_ = ", ".join(self.unchecked)
        return "planned on the device" + (f"; not checked, but by `att.check`: {open_}" if open_ else "")


class FlatPlan:
    """A plan of a call whose tables live on a device or are traced: `att.plan(..., doc=doc)` with such a `doc`.

    >>> import torch, frisket as fk
    >>> att, q = fk.compile("causal & same(doc)"), torch.ones(1, 2, 64, 16)
    >>> plan = att.plan(64, 64, heads=2, flat=True, doc=torch.arange(64) // 40)  # as on a device
    >>> att(q, q, q, plan=plan).shape, bool(plan.overflow)
    (torch.Size([1, 2, 64, 16]), False)
    >>> plan.rows((16, 16)).count, plan.columns((16, 16)).count.shape  # runs of tiles in every row and column
    (tensor([[1, 1, 1, 1]], dtype=torch.int32), torch.Size([1, 4]))
    >>> plan.slots(), {name: x.shape for name, x in plan.tables().items()}, plan.work((16, 16)).slots
    ({}, {'t0': torch.Size([64])}, {})
    >>> plan.with_tables({"doc": torch.arange(64) // 20}).spans((16, 16)).bounds.shape  # of another step's documents
    torch.Size([1, 4, 2, 4])

    It is used like a `Plan` and gives equal results. `overflow` is an array that is true if some row of tiles had more
    runs than there is room for; that row reads more tiles than needed.

    On a GPU Python reads no values: planning may be part of a CUDA graph, whose replays plan from the tables then."""

    on_device = True
    captured: Mapping[str, Any] = MappingProxyType({})  # arrays that the attention's functions captured, as they were

    def __init__(self, key: DevicePlanSpec, values: dict[str, Any], works: dict[Any, Any]) -> None:
        self.key, self.device_values = key, values
        # the spans it holds, by tile and whether they are transposed
        self.spans_by_tile: dict[tuple[tuple[int, int], bool], Any] = works
        self._read: dict[str, Any] = {}  # the tables that spans were made of, as they were
        self._ranges: dict[Any, Any] = {}  # what Triton's planners made from the tables
        self.static = device_plan_template(key)
        self.shown: set[Any] = set()
        self.calls: dict[Any, Any] = {}
        self._others: dict[Stored | None, FlatPlan] = {}

    @property
    def by_table(self) -> bool:
        """Whether another step's tables need another plan: they decide spans, or are no Floats every call brings."""
        return self.static.planner is not None or any("float" not in dtype for *_, dtype in self.key.device_specs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles hold the key and the tables; a copy plans again."""
        return FlatPlan, (self.key, self.device_values, {})

    def with_tables(self, values: dict[str, Any]) -> FlatPlan:
        """A plan for other values, of the shapes and dtypes that this plan was made from."""
        kinds, known = {n: dtype for n, _, dtype in self.key.device_specs}, dict(self.key.most)
        device_values = {n: x if _dtype(x) == kinds[n] else _floating(x) for n, x in values.items()}
        # kernels may need 64 bits now
        more = {n: m for n, x in device_values.items() if (m := _more(x)) > known.get(n, 0)}
        key = replace(self.key, most=tuple(sorted((known | more).items()))) if more else self.key
        return FlatPlan(key, device_values, {})

    @property
    def host_program(self) -> CallProgram:
        """The program with the host's values, without those of tensors and arrays."""
        return self.key.program

    def stored_as(self, how: Stored | None) -> FlatPlan:
        """A plan for keys and values that are stored so, with the spans this plan has."""
        if how == self.key.program.stored:
            return self
        if how not in self._others:  # the spans stay: how keys are stored moves no tile
            key = replace(self.key, program=self.key.program.stored_as(how))
            self._others[how] = FlatPlan(key, self.device_values, self.spans_by_tile)
        return self._others[how]

    problem = property(lambda self: self.key.problem, doc="Its lengths and its place.")
    batch = property(lambda self: self.key.problem.batch, doc="Sequences.")
    heads = property(lambda self: self.key.problem.heads, doc="Heads of queries.")
    q_len = property(lambda self: self.key.problem.q_len, doc="Queries of a sequence, in tokens.")
    kv_len = property(lambda self: self.key.problem.kv_len, doc="Keys of a sequence, in tokens.")
    origin = property(lambda self: self.key.problem.origin, doc="The (b, h, q, k) at which the plan begins.")
    sizes = property(lambda self: self.key.problem.sizes, doc="(B, H, Q_LEN, KV_LEN) of the whole problem.")
    dropout = property(lambda self: self.key.dropout, doc="The probability with which weights are dropped.")

    @cached_property
    def narrow(self) -> bool:
        """Whether tiles are narrow, as in a plan of the host; False where a table of a device decides the tiles."""
        if self.static.planner is not None or not distance_only(self.static.host.expr):
            return False
        return host_layout(self.key, (128, 128)).reads_at_most(FEW_TILES)

    @property
    def simplified(self) -> ProgramExprs:
        """Mask and score mod after the rules."""
        return self.static.simplified

    @property
    def scalars(self) -> Values:
        """Values of their scalars, those of the host."""
        return self.key.program.scalars

    @property
    def program(self) -> CallProgram:
        """The program with every value, copied to the host: for checks."""
        if any(traced(x) for x in self.device_values.values()):
            raise LoweringError(DENSE["device tables"])
        return checked_program(self, self.device_values)

    @property
    def unchecked(self) -> tuple[str, ...]:
        """Properties that the mask needs of tables on a device, where Python does not read entries. `att.check` and
        FRISKET_CHECK=1 check them.

        >>> import torch, frisket as fk
        >>> fk.compile("document(off)").plan(64, 64, flat=True, off=torch.tensor([0, 40, 64])).unchecked
        ('the offsets `off`',)
        """
        names, sorted_ = [n for n, *_ in self.key.device_specs], self.key.facts
        offsets = self.key.program.offsets
        words = {n: "the offsets" if n in offsets else "the order of" if n in sorted_ else "" for n in names}
        needs = (show(e) for p in self.key.program.parts for e in p.origin.needs if names_of(e).keys() & {*names})
        return *(f"{word} `{n}`" for n, word in words.items() if word), *(f"`{text}`" for text in needs)

    @property
    def common(self) -> DevicePlanTemplate | None:
        """The part shared with the plans of other steps, where there are others."""
        return self.static if self.by_table else None

    def rows(self, block: tuple[int, int]) -> Spans | DeviceSpans:
        """Records per row of tiles of `block`, on the tables' device; those the plan was made with are kept."""
        return self._spans(block, False)

    spans = rows

    def columns(self, block: tuple[int, int]) -> Spans | DeviceSpans:
        """The transposed spans: records of query tiles per row of key tiles, by the same algebra."""
        return self._spans(block, True)

    def _spans(self, block: tuple[int, int], transposed: bool) -> Spans | DeviceSpans:
        static, key = self.static, self.key
        if static.planner is None:
            layout = host_layout(key, block)
            return layout.transposed.spans if transposed else layout.spans
        if (block, transposed) not in self.spans_by_tile:  # layers share a plan
            of_device = self.device, static.copies, self._ranges
            place = SpanRequest(static.at, key.problem, block, *of_device)
            plan = static.transposed_planner() if transposed else static.planner
            self._read = self._read or self._versions()  # before they are read: a write in between is seen later
            arrays = spans(plan, key.framework, place.transposed if transposed else place, self.values)
            if key.framework == "jax" and any(traced(x) for x in arrays):
                return DeviceSpans(*arrays[:3], static.slice_of)  # belongs to the current trace
            self.spans_by_tile[block, transposed] = arrays
        bounds, count, overflow, order = self.spans_by_tile[block, transposed]
        return DeviceSpans(bounds, count, overflow, static.slice_of, order)

    def _versions(self) -> dict[str, Any]:
        if self.static.planner is None or self.key.framework == "jax":  # arrays of JAX never change
            return {}
        values, read = self.device_values.items(), self.static.planner.tables
        return {n: version_of(x) for n, x in values if n in read and (x.is_cpu or not x.is_inference())}

    @property
    def values(self) -> dict[str, Any]:
        """The values by name, wherever they are."""
        return {**self.key.program.scalars, **self.key.program.tables, **self.device_values}

    @property
    def overflow(self) -> Any:
        """Whether some row reads more tiles than needed, because its records had no room."""
        overflow: Any = next((arrays[2] for arrays in self.spans_by_tile.values()), False)
        return overflow.any() if getattr(overflow, "ndim", 0) else overflow  # Triton's planner has one for each row

    @property
    def device(self) -> Any:
        """The device of the tables: torch's, None on JAX."""
        # tracers of JAX have no device
        return next((x.device for x in self.device_values.values()), None) if self.key.framework == "torch" else None

    @property
    def planner(self) -> str:
        """The text of the planner."""
        return "" if self.static.planner is None else source(self.static.planner, self.key.framework, self.device)

    def tables(self) -> dict[str, Any]:
        """An array for every table of the kernel."""
        longest, static = max(self.problem.full[2:]), self.static
        return kernel_tables(static.plan, self.key.framework, self.values, longest, self.device, static.copies)

    def slots(self) -> dict[str, Any]:
        """A value for every slot of the kernel, but for those of dropout."""
        return self.static.plan.slot_values({**self.values, **UNDRAWN})

    def work(self, block: tuple[int, int], proofs: bool = False) -> DeviceTiledPlan:
        """The kernel's inputs in tiles of `block`, (queries, keys)."""
        static = self.static
        kernel = static.plan, self.spans(block), self.slots(), self.tables()
        return DeviceTiledPlan(*kernel, static.simplified, static.rules, self.unchecked)

    def __repr__(self) -> str:
        return f"FlatPlan({self.key.program}, {self.q_len} x {self.kv_len}, batch {self.batch}, {self.heads} heads)"


def checked_program(plan: Any, values: Values) -> CallProgram:
    """The program of a plan with values for its tables, which are in order and as long as they are read."""
    program: CallProgram = plan.host_program.bind(values)
    simplified_program(program).check_reach(plan.problem)
    return program


def refuse_written(plan: FlatPlan) -> None:
    """Raise where a table has changed since the spans were made: they would be of other entries than the mask. Entries
    that the mask does not read may change; that shapes suffice was seen when the plan was made."""
    for n, shape, _ in plan.key.device_specs:
        if tuple(plan.device_values[n].shape) != shape:
            raise ParameterError(f"table `{n}` has another shape than when it was planned\n  make another plan")
    for n, version in (plan._versions() if plan._read else {}).items():
        if version != plan._read[n]:
            raise ParameterError(f"table `{n}` has changed since it was planned\n  make another plan")


def device_plan(
    program: CallProgram,
    host: Values,
    arrays: Values,
    problem: Problem,
    block: tuple[int, int] | None,
    check: bool,
    dropout: bool = False,
) -> FlatPlan:
    """A plan from `arrays`, values that are traced or on a device, and from those of the host. With `block` the spans
    are made at once. `check` tests the order of offsets and of tables declared sorted on the device."""
    check_used(arrays, program.names)
    # one planner reads them all
    kinds = {str(framework_of(x)) for x in arrays.values()}
    if len(kinds) > 1:
        raise ParameterError(f"tables come from different frameworks: {', '.join(sorted(kinds))}; convert them to one")
    program = program.without(arrays).bind(host).without_captures()
    if missing := [n for p in program.parts for n in p.unbound if n not in arrays]:
        raise ParameterError(f"`{missing[0]}` has no value; give it: {missing[0]}=<array>")
    param_types = {n: w for p in program.parts for n, w in names_of(p.expr).items()}
    values = {n: _fitted(n, x, *param_types[n]) for n, x in arrays.items()}
    facts = frozenset(n for p in program.parts for n, d in p.origin.declared.items() if d.fact == "sorted")
    shapes = tuple((n, tuple(x.shape), _dtype(x)) for n, x in sorted(values.items()))
    if block is not None:
        check_block(block, problem)
    known = {n: d.most for p in program.parts for n, d in p.origin.declared.items() if d.most and n in values}
    most = tuple(sorted((known | {n: m for n, x in values.items() if (m := _more(x))}).items()))
    key = DevicePlanSpec(program, shapes, facts, kinds.pop(), problem, dropout, most)
    if check:
        tested = {n: x for n, x in values.items() if n in facts or n in program.offsets}  # others may be in any order
        check_sorted(key.framework, tested, program.offsets)
    if key.framework == "jax":
        _register()
    plan = FlatPlan(key, values, {})
    if block is not None and device_plan_template(key).planner is not None:
        x: Any = plan.spans(block)  # those of a trace are not remembered otherwise: here the plan belongs to it, too
        plan.spans_by_tile[block, False] = x.bounds, x.count, x.overflow, x.order
    return plan


def _more(x: Any) -> int:
    """A power of 2 that no Int of a table exceeds, if the host sees an Int of RUN_LIMIT or more; else 0."""
    # small dtypes are below the limit, and a read of a device would wait for it
    seen = "int" in _dtype(x) and x.dtype.itemsize > 2 and on_host(x) and getattr(x, "is_fully_addressable", True)
    x = np.asarray(entries_of(x)) if seen else x
    most = max(abs(int(x.min())), abs(int(x.max()))) if seen else 0
    return 1 << (most - 1).bit_length() if most >= RUN_LIMIT else 0


def _dtype(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _fitted(name: str, value: Any, rank: int | None, type: Type) -> Any:
    """An array that fits a parameter, like `parameters.fitted`, without looking at its values."""
    if rank is None:  # only its size is used
        return value
    if is_tensor(value) and value._is_zerotensor():
        value = value.clone()  # autograd's zeros have no memory, and kernels read it
    if value.ndim != rank:
        raise ParameterError(f"`{name}` is {ranked(rank)} in the text, the value is {ranked(value.ndim)}")
    if rank and 0 in value.shape:
        raise ParameterError(f"table `{name}` is empty")
    dtype = _dtype(value)
    if not dtype.startswith(("bool", "int", "uint", "float", "bfloat")):
        raise ParameterError(f"`{name}` is an array of {dtype}; give an array of bool, int or float")
    kind = BOOL if dtype == "bool" else INT if dtype.startswith(("int", "uint")) else FLOAT
    if kind is type:
        return value
    if (kind, type) != (INT, FLOAT):
        raise ParameterError(
            f"`{name}` is {type} in the text, the value is {kind}; declare it: "
            f"`param {name}: {kind.value.lower()}{'[' + ', '.join('_' * rank) + ']' if rank else ''}`"
        )
    return _floating(value)


def _floating(x: Any) -> Any:
    return x.float() if framework_of(x) == "torch" else x.astype("float32")


@memo(group="once")
def _register() -> None:
    """Make plans pytrees: tables and spans are leaves, the rest is static."""
    import jax

    def flatten(plan: FlatPlan) -> tuple[Any, Any]:
        names, blocks = tuple(sorted(plan.device_values)), tuple(plan.spans_by_tile)
        leaves = [plan.device_values[n] for n in names], [plan.spans_by_tile[b] for b in blocks]
        return leaves, (plan.key, names, blocks)

    def unflatten(static: Any, leaves: Any) -> FlatPlan:
        key, names, blocks = static
        return FlatPlan(key, dict(zip(names, leaves[0])), dict(zip(blocks, map(tuple, leaves[1]))))

    with suppress(ValueError):  # it is registered already
        jax.tree_util.register_pytree_node(FlatPlan, flatten, unflatten)


Values = Mapping[str, Any]


@dataclass(frozen=True)
class DevicePlanSpec:
    """The key of a `FlatPlan`: everything that decides it but the contents of the device's tables."""

    program: CallProgram  # with the host's values
    device_specs: tuple[tuple[str, tuple[int, ...], str], ...]  # name, shape, dtype of the device's tables
    facts: frozenset[str]  # tables that are known to ascend along their last axis
    framework: str
    problem: Problem
    dropout: bool
    most: tuple[tuple[str, int], ...] = ()  # known magnitudes of the device's tables


@dataclass(frozen=True)
class DevicePlanTemplate:
    """The part of a `FlatPlan` that is the same for all contents of the device's tables: the `LoopPlan`, and the
    planner that makes the spans from the tables. `planner` is None where no table of the device decides the spans."""

    simplified: ProgramExprs
    rules: Counter[str]
    plan: LoopPlan
    planner: Planner | None
    transposed_planner: Callable[[], Planner]  # plans the rows of key tiles
    host: Mask  # the mask with the host's values, for a layout of the host
    at: tuple[NDArray[Any], ...]  # b, h, q, k where each slice begins
    slice_of: NDArray[Any]  # the slice of each batch entry and head
    copies: dict[Any, Any] = field(default_factory=dict, compare=False)  # the host's arrays, copied to devices
    # key of a call -> its `PreparedCall`, for any step
    calls: dict[Any, Any] = field(default_factory=dict, compare=False)


@memo(16)  # the keys hold tables of the host
def device_plan_template(key: DevicePlanSpec) -> DevicePlanTemplate:
    """The `DevicePlanTemplate` of a key, from shapes and the host's values."""
    program, rules = key.program, Counter[str]()
    # arrays without memory: their entries are unknown here, and only sizes are read
    shapes = {n: np.broadcast_to(np.empty((), bool), shape) for n, shape, _ in key.device_specs}
    known = {**program.tables, **shapes}
    written = program.exprs.changed(lambda e: decided(bind(e, known), program.scalars))
    sane = finite_tables(program.tables)
    _check_lengths_of_tables(key, written, known)
    if written.weight is not None:  # windows by a table need its entries
        written, _ = narrowed(written, program.scalars, {}, SMALLEST_DOUBLE if program.double else SMALLEST)
    exprs = prepare(program.scored(written), sane, rules)
    problem = key.problem
    host = Mask(exprs.visible)
    grid, slice_of = grid_of(host.expr, problem)
    limits = limits_of(problem.full, program.scalars, program.tables) | dict(key.most)
    q, k = (np.asarray(x) for x in problem.origin[2:])
    # every query is one of the keys of the call
    on_diagonal = bool(np.all(q >= k) and np.all(q + problem.q_len <= k + problem.kv_len))
    device_names = {n for n, *_ in key.device_specs}
    tables = {n: Table(t) for n, t in program.tables.items()}

    def known_fact(fact: str, name: str) -> bool:
        return holds(tables, fact, name) if name not in device_names else fact == "segment" or name in key.facts

    nonempty = exprs.mask is None or (on_diagonal and sees_itself(exprs.mask))
    table_facts = frozenset(x for x in facts_of(host.expr) if known_fact(*x))
    facts = ProgramFacts(rows_nonempty=nonempty, limits=limits, table_facts=table_facts)
    plan = loop_plan(program, exprs, facts, sane, known, key.dropout)
    _check_segments(exprs, device_names)
    read = names_of(host.expr).keys()
    free = device_names & read
    # the planner gets the others at each call
    mine = {n: x for n, x in {**program.scalars, **program.tables}.items() if n in read - free}

    def planned(mask: Expr) -> Planner:
        sorted_ = key.facts | {n for n, t in tables.items() if t.sorted}
        # entries that the host cannot see are taken to fit 32 bits; `most` has those that it sees beyond
        beyond = {n: 2.0 ** (31 + (dtype == "uint32")) - 1 for n, _, dtype in key.device_specs if "int" in dtype}
        wide = key.framework == "torch" or int64_enabled()  # JAX has no int64 by default
        return planner(mask, frozenset(sorted_), {**beyond, **limits}, wide)

    row_planner = planned(host.expr) if free else None
    columns = memo(1)(lambda: planned(simplify(swap(host.expr))))  # for a backward alone
    at, slices = (grid.b, grid.h, grid.q, grid.k), slice_of.astype(np.int32)
    return DevicePlanTemplate(exprs, rules, plan, row_planner, columns, host.bind(**mine), at, slices)


def _check_lengths_of_tables(key: DevicePlanSpec, exprs: ProgramExprs, known: Values) -> None:
    """Check table lengths like `check_reach` on the host, where that can be known. A mask that reads a device's tables
    may show anything, but for the diagonal where it does whatever they hold."""
    mask = exprs.visible
    if names_of(mask).keys() & {n for n, *_ in key.device_specs}:
        mask = eq(var("q"), var("k")) if sees_itself(mask) else FALSE
    shapes = {n: known[n] for n, *_ in key.device_specs}
    check_reach(mask, exprs.parts, key.program.scalars, key.program.tables, key.problem, shapes)


@memo(16)
def host_layout(key: DevicePlanSpec, block: tuple[int, int]) -> Layout:
    """The layout that no table of a device decides."""
    return make_layout(device_plan_template(key).host, key.problem, block)


def _check_segments(exprs: ProgramExprs, device_names: set[str]) -> None:
    """Segments become a table as long as the positions, so they are known of positions alone."""
    for e in exprs.parts:
        for n in walk(e):
            if n.op == "segment" and n.name in device_names and n.args[0].op != "var":
                raise LoweringError(
                    f"`{n!r}` asks a traced table of offsets for something other than a position\n"
                    "  give the offsets as values of the host, or the segment of every position as a table"
                )


CallPlan: TypeAlias = Plan | FlatPlan


@dataclass(frozen=True)
class CheckedCall:
    """Arrays that fit together and a plan that fits them. `sinks`: [heads] or None; `seed`: None without dropout."""

    arrays: Arrays
    geometry: Geometry
    plan: CallPlan
    backend: str
    rate: float
    seed: Any
    sinks: Any
    top: bool  # whether the largest score of every row is asked for
    kv_inputs: Mapping[str, Any] = field(default_factory=dict)  # scales and pages, by the sources of their tables


def results(arrays: tuple[Any, ...], lse: bool, top: bool) -> Any:
    """out, (out, lse), (out, max) or (out, lse, max)."""
    for name, value in (("return_lse", lse), ("return_max", top)):
        flag(value, name)
    outputs = arrays[0], *([arrays[1]] if lse else []), *([arrays[2]] if top else [])
    return outputs if len(outputs) > 1 else outputs[0]
