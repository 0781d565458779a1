"""PreparedCall: a call without its tensors; VendorCall: one that an engine runs; ChangingTables: prepared calls whose
tables change. Imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from threading import local
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from frisket.dsl.errors import BackendError, LoweringError, ParameterError
from frisket.dsl.ir import var, walk
from frisket.lowering.derive import backward_of
from frisket.lowering.dtypes import accumulate
from frisket.lowering.plan import KV_INPUTS, Cotangents, ForwardResults, KernelInputs, Spans, Target
from frisket.lowering.planner.planner import READS
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.backends.cpp.torch import FastPath, lse_of
from frisket.runtime.backends.engines import proof as proofs
from frisket.runtime.calls.arrays import NATURAL, capturing, keep_for_graphs
from frisket.runtime.calls.arrays import refuse_gradients as refuse_stored
from frisket.runtime.calls.options import Options
from frisket.runtime.machine.cpp_build import BuildError, PendingError
from frisket.runtime.plans.device import CallPlan, CheckedCall, FlatPlan
from frisket.runtime.plans.run import DTYPES, Prepared, SpanRequest, function, kernel_tables

from .autograd import Attend
from .weighted import RowCotangents

Tensor = Any
Array = NDArray[Any]
TAKEN = ("bool", "int8", "int16", "int32", "int64", "uint8")  # dtypes of tables, by planners in C++
CHANGES = 8, 16, 32  # plans of the host for tables in one order, after which a planner in C++ is tried
LARGEST = 1 << 28  # Ints from here on need a plan of the host: the kernels of `TablePlanner` have 32 bits

WIDER = 1.05  # times the tiles of the host's plan that a planner may read: it bounds each clause of a mask by itself
# products that a kernel computes while the host plans: two milliseconds or more, and longer with more tiles
SPARED, SPARED_BY_TILE = 60_000_000, 15_000
KEPT_TABLES = 4  # calls of an attention with tables of the host, each with copies of them
RUNS = 64  # of tiles in a row, at most, that a planner in C++ tells apart


@dataclass(eq=False)
class PreparedCall:
    """A call without its tensors, prepared by `op.prepare`. `op.attend` runs it, and so do operators in graphs
    (`running`), steps over a KV cache (`DecodeCall`), and ranks of context parallelism (`torch_ring`).

    `attend` calls `__call__`, which ends in `run`, or in `saving` where a backward follows; that ends in `gradients`.
    The fields never change; `with_tables` says why the class is not frozen."""

    # without the values that come with every call; slots and tables are read-only: executors keep what they make of
    # them. Where kernels load their tables, the spans are the `CallPlan`
    inputs: KernelInputs
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    real: Any  # the dtype of scores
    bshd: bool  # whether the axes of the arrays are (batch, length, heads, dim)
    # (name in the plan, source) of slots and tables that come with every call
    kv_inputs: tuple[tuple[str, str], ...] = ()
    loads: bool = False  # whether kernels load these values themselves, in any dtype: nothing waits for the device
    seed: str | None = None  # the slot of dropout's seed
    stats_kind: str = ""  # see `Backend.stats_kind`; the tensor of these numbers is always called `softmax_stats`
    check: Callable[..., Any] | None = None  # raises where the backward would refuse gradients
    awaits: bool = False  # whether library calls run while a native kernel is compiled
    falls_back: bool = False  # whether library calls run where a native kernel cannot be built
    compiles: Callable[..., Any] | None = None  # see `Executors`; None after the first call with gradients
    template: FlatPlan | None = None  # a plan without values: each call makes one, from the tables it brings
    runs: int = field(default=0, init=False)  # calls that did not take the fast path
    # runs such calls by the addresses of their arrays; made at the second run, as more may follow
    fast: FastPath | None = field(default=None, init=False)

    def __call__(self, arrays: tuple[Any, ...], seed: Any, top: bool, saving: bool = False) -> tuple[Any, ...]:
        """(out, lse, top), with `saving` softmax_stats too. `arrays` are q, k, v, sinks [heads] and the values of
        `kv_inputs`. All get gradients."""
        if torch._C._is_torch_function_mode_enabled():  # a default device, say: what is made here is made where q is
            with torch._C.DisableTorchFunction():
                return self(arrays, seed, top, saving)
        if self.bshd:
            arrays = (*[x.transpose(1, 2) for x in arrays[:3]], *arrays[3:])
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays):
            if self.stored:
                refuse_stored(self.inputs.geometry.stored_dtype, {source for _, source in self.kv_inputs})
            if self.check is not None:
                pairs = zip(self.kv_inputs, arrays[4:], strict=True)
                # before the forward, which would run for nothing
                self.check_gradients(arrays, seed, frozenset(n for (n, _), x in pairs if x.requires_grad))
            self.compile_together(arrays, seed, grad_names_of(arrays, self.kv_inputs))
            out, *rest = Attend.apply(self, seed, top, *arrays)  # type: ignore[no-untyped-call]
        else:
            if saving:  # a graph, where another operator is the backward
                self.compile_together(arrays, seed, frozenset("qkv"))
            out, *rest = self.saving(seed, top, *arrays) if saving else self.run(seed, top, *arrays)
        return out.transpose(1, 2) if self.bshd else out, *rest

    def compile_together(self, arrays: Sequence[Any], seed: Any, grad_names: frozenset[str]) -> None:
        """Compile the kernels of the first call with gradients at the same time, where its backend does."""
        compiles, self.compiles = self.compiles, None
        if compiles is not None and not self.stored:
            compiles(self, arrays, seed, grad_names)

    def run(self, seed: Any, top: bool, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *values: Tensor) -> Any:
        # largest scores that are not wanted take time
        return self.forward(self.inputs_of(q.device, seed, sinks, values), q, k, v, top=top)

    def saving(self, seed: Any, top: bool, q: Tensor, k: Tensor, v: Tensor, sinks: Any, *values: Tensor) -> Any:
        """The results of `run`, and what the backward knows of each row in addition to lse. None where that is nothing,
        and where in a graph the backward may be the native one, which counts rows another way."""
        if self.inputs.plan is not None and self.inputs.plan.weighted:
            out, total, count = self.run(seed, True, q, k, v, sinks, *values)[:3]
            return out, total, count if top else None, count if self.inputs.plan.counts else None
        if self.awaits or (not self.stats_kind and sinks is None):
            return *self.run(seed, top, q, k, v, sinks, *values), None
        inputs = self.inputs_of(q.device, seed, sinks, values)
        return self.forward(inputs, q, k, v, top=top, softmax_stats=True)

    def run_part(
        self, seed: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(out, lse in float64, what the backward knows of each row) of attention to a part of the keys."""
        inputs = self.inputs_of(q.device, seed, sinks, values)
        out, lse, _, softmax_stats = self.forward(inputs, q, k, v, softmax_stats=True)
        if self.stats_kind != "offset":
            # the rounding error of lse: both together fit float64
            return out, lse.double() + softmax_stats, None
        return out, lse_of(inputs, softmax_stats, lse), softmax_stats

    def gradients(
        self, seed: Any, grad_names: frozenset[str], saved: tuple[Any, ...], dout: Tensor, dlse: Any, share: Any = None
    ) -> dict[str, Tensor]:
        """Gradients by "q", "k", "v" and the names of tables and slots; `saved` is q, k, v, sinks, out, lse, what
        `saving` gave of each row, and the values. `share`: out and lse are of other keys too, and these have that part
        of each row's weights."""
        q, k, v, sinks, out, lse, softmax_stats, *values = saved
        lse_residual = softmax_stats if self.stats_kind == "lse_residual" else None
        results = ForwardResults(out, lse, lse_residual, softmax_stats if self.stats_kind == "offset" else None, share)
        inputs, cotangents = self.inputs_of(q.device, seed, sinks, values), Cotangents(dout, dlse)
        if inputs.plan.weighted:
            rows = RowCotangents.of(inputs, ForwardResults(out, lse, None, softmax_stats), cotangents, grad_names)
            sums = ForwardResults(out, lse), Cotangents(rows.dout, rows.dtotal)
            pairs = self.gradients_of_sums(seed, grad_names, (q, k, v, *values), *sums)
            named = dict(zip((n for n, _ in self.kv_inputs), values, strict=True))
            flat = {n: torch.zeros_like(x) for n, x in named.items() if n in grad_names - {*pairs, *rows.of_divide}}
            return flat | {n: _sum(pairs.get(n), rows.of_divide.get(n)) for n in {*pairs, *rows.of_divide}}
        return self.backward(inputs, q, k, v, results, cotangents, grad_names=grad_names)  # type: ignore[no-any-return]

    def gradients_of_sums(
        self,
        seed: Any,
        grad_names: frozenset[str],
        arrays: tuple[Any, ...],
        results: ForwardResults,
        cotangents: Cotangents,
    ) -> dict[str, Tensor]:
        """Gradients of weighted rows by the cotangents of their sums; of values that no weight reads there are none.
        `arrays` are q, k, v and the values. The backward reads neither out nor total of the `results`."""
        q, k, v, *values = arrays
        inputs = self.inputs_of(q.device, seed, None, values)
        names = grad_names & ({"q", "k", "v"} | {g.source for g in backward_of(inputs.plan).gradients})
        return self.backward(inputs, q, k, v, results, cotangents, grad_names=names) if names else {}

    def inputs_of(self, device: Any, seed: Any, sinks: Tensor | None, values: Sequence[Tensor]) -> KernelInputs:
        """The inputs of kernels, with the values of a call as kernels take them."""
        x = self.inputs
        if capturing(device) and self.loads:  # tables of a call on a GPU are the user's, those of the host copies
            keep_for_graphs(x.spans.static.copies if x.spans.on_device else x.tables)
        if sinks is None and self.seed is None and not self.kv_inputs:
            return x
        slots, tables = x.slots, x.tables
        if self.seed is not None:
            slots = {**slots, self.seed: seed}
        if self.kv_inputs:
            slots, tables = dict(slots), dict(tables)  # copies: other calls read these, in other threads too
            for (name, source), value in zip(self.kv_inputs, values, strict=True):
                if source in KV_INPUTS:
                    tables[name] = value
                elif self.loads:
                    (tables if value.ndim else slots)[name] = value if value.device == device else value.to(device)
                elif value.ndim:
                    tables[name] = value.to(device, self.real)
                else:
                    slots[name] = float(value)  # kernels take numbers of the host
        return _with_values(x, x.spans, slots, tables, sinks)

    def check_gradients(self, arrays: tuple[Any, ...], seed: Any, grad_names: frozenset[str]) -> None:
        """Raise where the backward would refuse gradients of q, k and v, or of the tables and slots that are wanted.
        `arrays` as in a call."""
        if self.check is not None:
            device = arrays[0].device
            self.check(self.inputs_of(device, seed, arrays[3], arrays[4:]), device, grad_names)

    @property
    def double(self) -> bool:
        return bool(self.real == torch.float64)

    @property
    def stored(self) -> bool:
        """Whether keys and values are stored, in 8 bits or pages: no gradient flows then."""
        plan, g = self.inputs.plan, self.inputs.geometry
        return bool(g.stored_dtype or plan.pages or any(t.source in KV_INPUTS for t in plan.tables))

    @property
    def generated(self) -> PreparedCall:
        """The prepared call of generated kernels: an engine's holds one too."""
        return self

    def taking(self, sinks: Tensor | None, top: bool, qkv: Iterable[Tensor] = ()) -> PreparedCall:
        """The prepared call for such arrays, sinks and `top`: generated kernels where an engine lacks them, else
        itself."""
        return self

    def bind(self, plan: FlatPlan) -> PreparedCall:
        """A prepared call for the plan of another step: other tables of a device, of the same shapes and dtypes."""
        tables = {n: t for n, t in plan.tables().items() if n in self.inputs.tables}
        there = MappingProxyType(readable(tables, plan.device, self.real))
        return self.with_tables(plan, there)

    def unbind(self, plan: Any) -> PreparedCall:
        """A prepared call without the values of one step: `bind` adds them."""
        return self.with_tables(None, dict.fromkeys(self.inputs.tables), plan.with_tables({}))

    def with_plan(self, plan: Any) -> PreparedCall:
        """A prepared call with another plan. Plans hold it with None: a cycle would keep the tables of a step."""
        return self.with_tables(plan, self.inputs.tables)

    def with_tables(self, spans: Any, tables: Mapping[str, Any], template: FlatPlan | None = None) -> PreparedCall:
        """A prepared call with other spans and tables."""
        # every call with a plan comes here: `replace` takes twice as long, and constructors of frozen classes too
        inputs = _with_values(self.inputs, spans, self.inputs.slots, tables, self.inputs.sinks)
        how = self.forward, self.backward, self.real, self.bshd, self.kv_inputs, self.loads, self.seed
        more = self.stats_kind, self.check, self.awaits, self.falls_back, self.compiles
        return PreparedCall(inputs, *how, *more, template)


def grad_names_of(arrays: Sequence[Any], kv_inputs: Sequence[tuple[str, str]]) -> frozenset[str]:
    """The names of arrays of a call that require a gradient, without sinks, whose gradient no kernel computes."""
    names = "q", "k", "v", "sinks", *(n for n, _ in kv_inputs)
    learned = (n for n, x in zip(names, arrays, strict=True) if x is not None and x.requires_grad)
    return frozenset(learned) - {"sinks"}


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor:
    return y if x is None else x if y is None else x + y


def _with_values(x: KernelInputs, spans: Any, slots: Any, tables: Any, sinks: Any) -> KernelInputs:
    """Inputs with the spans and values of a call. Fields in their order take half the time of fields by name."""
    return KernelInputs(x.plan, spans, x.geometry, x.target, slots, tables, sinks, x.rows, x.deterministic, x.platform)


def readable(tables: Mapping[str, Tensor], device: Any, real: Any) -> dict[str, Tensor]:
    return {n: t.to(device, real) if t.is_floating_point() else t.to(device) for n, t in tables.items()}


Params = Mapping[str, Any]  # of a call, by name
Prepare = Callable[..., PreparedCall]


class ChangingTables:
    """Prepared calls of one kind whose tables change from call to call, on the host. `op` asks here before it plans.

    After CHANGES plans of the host a planner in C++ makes the spans. There is a planner for each set of tables that
    ascend, its `order`. It searches these, and of a range of others it knows the least and the greatest entry and
    classes of ids. So it may read more tiles; it is kept while these take less time than a plan of the host."""

    def __init__(self, plan: CallPlan, params: Mapping[str, Any]) -> None:
        tables = {n: x for n, x in params.items() if hasattr(x, "dtype")}
        self.kinds = {n: (str(x.dtype).removeprefix("torch."), tuple(x.shape)) for n, x in tables.items()}
        mask = plan.simplified.mask
        reads = [n for n in walk(*() if mask is None else (mask,)) if n.op in READS and n.name in tables]
        # an order along batches or heads does not help a search
        self.along = frozenset(n.name for n in reads if n.op != "lookup" or n.args[-1] not in (var("b"), var("h")))
        self.possible = bool(reads) and all(dtype in TAKEN for dtype, _ in self.kinds.values())
        offsets = plan.host_program.offsets.keys() & tables.keys()  # the host checked those of `plan`
        self.covered = {n: (x[0], x[-1]) for n, x in plan.host_program.tables.items() if n in offsets}
        self.seen: Counter[frozenset[str]] = Counter()  # plans of the host, by order
        self.planners: dict[frozenset[str], TablePlanner] = {}  # assigned, never changed: other threads read it
        self.latest: tuple[tuple[tuple[bytes, ...], PreparedCall], ...] = ()  # by entries; assigned, never changed, too

    def keep(self, entries: tuple[bytes, ...], ready: PreparedCall, calls: Mapping[Any, Any]) -> PreparedCall:
        """Keep the prepared call for tables of these entries. Together with others in the table `calls` of an attention
        few are kept, since each comes with copies of tables."""
        self.latest = ((entries, ready), *self.latest)[:KEPT_TABLES]
        room = KEPT_TABLES - len(self.latest)
        for other in list(calls.values()):
            if type(other) is ChangingTables and other is not self:
                other.latest = other.latest[:room]
                room -= len(other.latest)
        return ready

    def __call__(self, entries: tuple[bytes, ...], calls: Mapping[Any, Any]) -> PreparedCall | None:
        """The prepared call for tables of these entries; None where the host is to plan them."""
        for earlier, ready in self.latest:
            if earlier == entries:
                return ready
        planned = self._planned(entries)
        return None if planned is None else self.keep(entries, planned, calls)

    def _planned(self, entries: tuple[bytes, ...]) -> PreparedCall | None:
        """The prepared call for tables that a planner in C++ reads, if there is such a planner."""
        if not self.planners:
            return None
        tables = self._tables(entries)
        if not all(self._checked(n, tables[n]) for n in self.covered):  # the host refuses them, and says why
            return None
        if (planner := self._planner(self._order(tables))) is None:
            return None
        planner.uses += 1
        # ranges may say less of later tables: at 1, 2, 4, 8, ... uses the host plans, and `host_planned` compares
        return planner(tables) if planner.order == self.along or planner.uses & (planner.uses - 1) else None

    def _checked(self, name: str, table: Array) -> bool:
        """Whether these offsets are in order and hold the positions of those that the host has checked."""
        first, last = self.covered[name]
        return bool(table[0] <= first and table[-1] >= last and (table[1:] >= table[:-1]).all())

    def host_planned(
        self,
        att: Any,
        call: CheckedCall,
        params: Params,
        host: PreparedCall,
        prepare: Prepare,
        entries: tuple[bytes, ...],
    ) -> None:
        """Take note of a plan of the host: try a planner for such tables, or compare the one there is. Raises
        `PendingError` while a planner or its kernel is compiled in the background."""
        # engines take no spans, and Floats come with calls
        if not self.possible or host.generated is not host or host.kv_inputs or call.kv_inputs:
            return
        order = self._order(tables := self._tables(entries))
        planner = self._planner(order)
        if planner is not None and not _pays(planner, tables, host):
            # a new dict: other threads read the old one
            self.planners = {n: x for n, x in self.planners.items() if x is not planner}
        if planner is None or planner.order != order:
            due = self.seen[order] in CHANGES
            candidate = _planner_for(att, call, params, host, prepare, tables.keys(), order) if due else None
            self.seen[order] += 1
            if candidate is not None and _pays(candidate, tables, host):
                self.planners = {**self.planners, order: candidate}

    def _tables(self, entries: tuple[bytes, ...]) -> dict[str, Array]:
        pairs = zip(self.kinds.items(), entries, strict=True)

        return {n: np.frombuffer(content, dtype).reshape(shape) for (n, (dtype, shape)), content in pairs}

    def _order(self, tables: Mapping[str, Array]) -> frozenset[str]:
        """The tables that ascend along their last axis."""
        return frozenset(n for n in self.along if (tables[n][..., 1:] >= tables[n][..., :-1]).all())

    def _planner(self, order: frozenset[str]) -> TablePlanner | None:
        """The planner that searches most of the tables that ascend."""
        return max((x for n, x in self.planners.items() if n <= order), key=lambda x: len(x.order), default=None)


class TablePlanner:
    """A call prepared for any entries of its tables, of which those in `order` ascend."""

    def __init__(self, run: Any, ready: PreparedCall, plan: FlatPlan, order: frozenset[str]) -> None:
        static, self.ready, self.order, self.thread, self.uses = plan.static, ready, order, local(), 0
        self.values, self.longest, self.slices = plan.values, max(plan.problem.full[2:]), static.slice_of
        self.kernel = replace(ready.inputs.plan, run_tables=())  # native kernels read none
        self.width = np.int64 if self.kernel.int64 else np.int32
        assert static.planner is not None
        block = ready.inputs.target.block_q, ready.inputs.target.block_k
        # half of the tiles, at most, are runs with a gap between
        runs = 0 if static.planner.seen else min(RUNS, -(-plan.kv_len // block[1] // 2) or 1)
        place = SpanRequest(static.at, plan.problem, block, records=runs)
        self.prepared = partial(Prepared, run, static.planner, place, self.values)

    def __call__(self, tables: Mapping[str, Array]) -> PreparedCall | None:
        """The prepared call for these tables; None where kernels of 32 bits might not hold their entries."""
        for n, x in tables.items():
            # of a table that ascends its ends are enough
            low, high = (x[..., 0], x[..., -1]) if n in self.order else (x, x)
            if x.itemsize > 2 and not -LARGEST < low.min() <= high.max() < LARGEST:
                return None
        run: Prepared | None = getattr(self.thread, "run", None)
        if run is None:  # each thread has separate memory to plan in: a lock could stay locked in a forked child
            run = self.thread.run = self.prepared()
        wide = {n: x.astype(DTYPES[run.types[n]], copy=False) for n, x in tables.items() if n in run.types}
        run({n: x.ctypes.data for n, x in wide.items()})  # `wide` is referred to until it returns
        spans = Spans(run.bounds.copy(), run.count.copy(), self.slices)  # the next call of the thread writes over them
        read = {n: torch.from_numpy(x.astype(x.dtype if x.dtype == bool else self.width)) for n, x in tables.items()}
        kernel_arrays = kernel_tables(self.kernel, "torch", {**self.values, **read}, self.longest, None)
        return self.ready.with_tables(spans, MappingProxyType(kernel_arrays))


def _planner_for(
    att: Any, call: CheckedCall, params: Params, host: PreparedCall, prepare: Prepare, names: Any, order: frozenset[str]
) -> TablePlanner | None:
    """The planner for tables of these names; None where there is none for kernels as `host` has."""
    values = {n: torch.as_tensor(params[n]) for n in names}
    if RECORDS[host.inputs.target.backend].plans != "host":
        return None
    g, host_plan = call.geometry, call.plan
    rest = {n: x for n, x in params.items() if n not in values}
    try:
        lengths, place = (g.q_len, g.kv_len, g.batch, g.heads), {"origin": host_plan.origin, "sizes": host_plan.sizes}
        plan = att.plan(*lengths, **place, flat=True, **rest, **values)
        if plan.device_values.keys() != values.keys() or plan.static.planner is None:
            return None
        # tables that ascend by their entries, as if they were declared sorted
        plan = FlatPlan(replace(plan.key, facts=plan.key.facts | order), plan.device_values, {})
        planner = plan.static.planner
        assert planner is not None
        run, ready = function(planner), prepare(replace(call, plan=plan), att.options)
        if ready.awaits:
            raise PendingError
    except PendingError:
        raise
    except (BuildError, LoweringError, ParameterError):
        return None
    # kernels of other tiles would be compared with the host's
    return TablePlanner(run, ready, plan, order) if ready.inputs.target == host.inputs.target else None


def _pays(planner: TablePlanner, tables: Mapping[str, Array], host: PreparedCall) -> bool:
    """Whether a planner reads few more tiles than the host's plan, or tiles that take less time than such a plan."""
    if (ready := planner(tables)) is None:
        return True  # the host plans for such entries
    g, target, tiles = host.inputs.geometry, host.inputs.target, _tiles_read(host.inputs.spans)
    bq, bk = target.block_q, target.block_k
    spared = SPARED + SPARED_BY_TILE * -(-g.q_len // bq) * -(-g.kv_len // bk)
    most = max(WIDER * tiles, tiles + spared / (bq * bk * (g.head_dim + g.v_dim)))
    return bool(_tiles_read(ready.inputs.spans) <= most)


def _tiles_read(spans: Spans) -> int:
    """The tiles that all heads read; a partial one counts twice."""
    low, full_low, full_high, high = np.moveaxis(spans.bounds.astype(np.int64), -1, 0)
    of_slice = (2 * (high - low) - (full_high - full_low)).sum((1, 2))
    return int(of_slice[spans.slice_of].sum())


@dataclass(eq=False)
class VendorCall(PreparedCall):
    """A prepared call of an engine. It leaves three to the generated kernels: the largest score of a row, sinks where
    the engine takes no plans, and gradients that are not the engine's. Those kernels are prepared when the first call
    asks for them."""

    proof: Any = None
    named: bool = False  # an engine that is named raises an error where it cannot run a call
    prepare: Callable[[], PreparedCall] | None = None

    @classmethod
    def of_call(
        cls, call: CheckedCall, options: Options, proof: proofs.Proof, named: bool, prepare: Callable[..., PreparedCall]
    ) -> VendorCall:
        """The engine that a proof names, and `call` by a backend that takes every call, for comparison."""
        arrays, record = call.arrays, RECORDS[proof.backend]
        empty = {n: x.new_empty(0) for n, x in zip("qkv", arrays.qkv)}  # `prepare` is remembered: no call's arrays
        bare = replace(call, arrays=replace(arrays, **empty))
        real = getattr(torch, accumulate(arrays.dtype))
        # the proof has an engine's arguments: no plan
        inputs = KernelInputs(None, None, call.geometry, Target(proof.backend, 0, 0), {}, {})  # type: ignore[arg-type]
        if record.engine is None:
            run = _by_plan(prepare(replace(bare, backend=record.name), options))
        else:
            executors = record.executors["torch"]
            run = executors.forward, executors.backward or _refused
        bshd = arrays.layout != NATURAL["torch"]
        return cls(inputs, *run, real, bshd, proof=proof, named=named, prepare=lambda: prepare(bare, options))

    @cached_property
    def generated(self) -> PreparedCall:
        assert self.prepare is not None
        return self.prepare()

    def taking(self, sinks: Tensor | None, top: bool, qkv: Iterable[Tensor] = ()) -> PreparedCall:
        lacks = RECORDS[self.proof.backend].features
        if self.proof.contiguous and (self.bshd or not all(x.is_contiguous() for x in qkv)):
            return self.generated
        return self.generated if (top and "max" in lacks) or (sinks is not None and "sinks" in lacks) else self

    @property
    def stored(self) -> bool:
        return False

    def __call__(self, arrays: tuple[Any, ...], seed: Any, top: bool, saving: bool = False) -> tuple[Any, ...]:
        sinks = arrays[3]
        if self.taking(sinks, top, arrays[:3]) is self:
            return super().__call__(arrays, seed, False, saving)
        if self.named:
            what = "sinks" if sinks is not None else "the largest score of each row"
            raise BackendError(f"backend {self.proof.backend!r} does not do {what}; leave out the backend")
        return self.generated(arrays, seed, top, saving)

    def compile_together(self, arrays: Sequence[Any], seed: Any, grad_names: frozenset[str]) -> None:
        if not self.proof.gradients and (compiles := self.generated.compiles) is not None:
            self.generated.compiles = None
            compiles(self.generated, arrays, seed, grad_names, forward=False)

    def run(self, seed: Any, top: bool, q: Tensor, k: Tensor, v: Tensor, sinks: Any, *values: Tensor) -> Any:
        return self.saving(seed, top, q, k, v, sinks)[:3]

    def saving(self, seed: Any, top: bool, q: Tensor, k: Tensor, v: Tensor, sinks: Any, *values: Tensor) -> Any:
        results = self.forward(self.proof.arguments, q, k, v, *(() if sinks is None else (sinks,)))
        return *results, None, None

    def gradients(
        self, seed: Any, grad_names: frozenset[str], saved: tuple[Any, ...], dout: Tensor, dlse: Any, share: Any = None
    ) -> dict[str, Tensor]:
        if not self.proof.gradients:
            return self.generated.gradients(seed, grad_names, saved, dout, dlse, share)
        q, k, v, _, out, lse, *_ = saved
        results, cotangents = ForwardResults(out, lse), Cotangents(dout, dlse)
        return self.backward(self.proof.arguments, q, k, v, results, cotangents)  # type: ignore[no-any-return]


def _by_plan(ready: PreparedCall) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward of an engine that takes plans."""

    def forward(_: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, ...]:
        out, lse, _ = ready.run(None, False, q, k, v, sinks)
        return out, lse

    def backward(_: Any, q: Tensor, k: Tensor, v: Tensor, results: ForwardResults, cotangents: Cotangents) -> Any:
        saved = q, k, v, None, results.out, results.lse, None
        return ready.gradients(None, frozenset("qkv"), saved, cotangents.dout, cotangents.dlse)

    return forward, backward


def _refused(*arguments: Any) -> Any:
    raise AssertionError("an engine without gradients says so in its arguments")
