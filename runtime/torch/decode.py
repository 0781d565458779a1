"""Steps of decoding on the CPU, in torch: from call to call nothing changes but the values of small tables.

A `DecodeCall` has the rest of a call ready: to run it is one call of the spans' C++ planner, and one of the kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from frisket.dsl.types import BOOL, FLOAT, Type
from frisket.grammar.memo import remember
from frisket.lowering.analysis.tiling import segments_of_coordinates, short_tables
from frisket.lowering.dtypes import accumulate
from frisket.lowering.plan import KV_INPUTS, PAGES, Sizes, Spans
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.backends.registry import choose
from frisket.runtime.calls.arrays import in_graph, version_of
from frisket.runtime.calls.options import CallArgs, sinks_of
from frisket.runtime.machine import cpp_build as native_build
from frisket.runtime.machine.parameters import check_offsets, kind_of
from frisket.runtime.machine.settings import Settings
from frisket.runtime.plans.device import FlatPlan, Values
from frisket.runtime.plans.run import Prepared, SpanRequest, function

from .op import NUMBERS, prepare

MAX_STEP_QUERIES = 64  # queries: a kernel of more takes longer than a plan
KEPT = 16
Tensors = tuple[Tensor, Tensor, Tensor]  # q, k, v
READ: dict[Type, torch.dtype] = {BOOL: torch.bool, FLOAT: torch.float64}  # by planners; Ints have 64 bits


class DecodeCall:
    """A call of `att` like this one, whatever the values of `tables` are. `kv_inputs` are scales and pages, by the
    sources of their tables. Not for two threads at once."""

    def __init__(
        self, att: Any, qkv: Tensors, sizes: Sizes | None, kv_inputs: Values, tables: Values, params: Values
    ) -> None:
        q, k, v = qkv
        (batch, heads, q_len, _), kv_len = q.shape, k.shape[2]
        kv_len = kv_inputs[PAGES].shape[1] * kv_len if PAGES in kv_inputs else kv_len
        self.versions = [version_of(x) for x in params.values() if isinstance(x, Tensor)]
        params = {n: x.clone() if isinstance(x, Tensor) else x for n, x in params.items()}  # as they were
        plan = att.plan(q_len, kv_len, batch, heads, sizes=sizes, flat=True, **tables, **params)
        assert isinstance(plan, FlatPlan)
        stops = dict(zip("bhqk", sizes or (batch, heads, q_len, kv_len), strict=True))
        readers = att.program.exprs.parts
        self.short = any(short_tables(e, plan.values, stops) for e in readers)
        fixed = {n: x for n, x in plan.device_values.items() if n in params}
        check_offsets(plan.host_program.offsets, fixed)
        ends = (x for e in readers for x in segments_of_coordinates(e, fixed))
        self.short |= any(first > 0 or stops[c] > last for c, _, first, last in ends)
        if self.short:  # only the lengths of a call say whether visible positions read past the end
            return
        call = att.call(CallArgs(q, k, v, plan, params=kv_inputs))
        self.options, self.ready = att.options, prepare(call, att.options)
        inputs = self.ready.inputs
        repeat = RECORDS[inputs.target.backend].executors["torch"].repeat
        self.native = repeat is not None
        self.param_values = {n: x for n, x in plan.device_values.items() if n not in tables}
        self.names = [(t.name, t.source) for t in inputs.plan.tables if t.source in tables]
        self.spans, self.planner, self.reads = inputs.spans, None, []
        static, target = plan.static, inputs.target
        if static.planner is not None:  # tables decide what is seen
            place = SpanRequest(static.at, plan.problem, (target.block_q, target.block_k))
            self.planner = Prepared(function(static.planner), static.planner, place, plan.values)
            types = self.planner.types
            self.reads = [(n, READ.get(types[n], torch.int64)) for n in static.planner.tables if n in tables]
            self.spans = Spans(self.planner.bounds, self.planner.count, static.slice_of)
        self.repeat = None
        if repeat is not None and not self.ready.awaits and all(s in KV_INPUTS for _, s in self.ready.kv_inputs):
            names = [name for name, _ in [*self.ready.kv_inputs, *self.names]]
            fixed = {n: x for n, x in inputs.tables.items() if n not in names}
            self.repeat = repeat(replace(inputs, spans=self.spans, tables=fixed), q.dtype, k.dtype, names)

    def __call__(
        self, qkv: Tensors, kv_inputs: Values, tables: Values, sinks: Any, lse: bool, top: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(out, lse, top); `lse` and `top` say what is asked for."""
        (q, k, v), ready, spans = qkv, self.ready, self.spans
        if self.planner is not None:
            read = {n: tables[n].to(dtype).contiguous() for n, dtype in self.reads}
            self.planner({n: x.data_ptr() for n, x in read.items()})
            if not self.native:  # other executors remember what they make of spans
                spans = Spans(spans.bounds.copy(), spans.count.copy(), spans.slice_of)
        sinks = self.options.sinks if sinks is None else sinks
        if self.repeat is not None and sinks is None and not top:
            arrays = [kv_inputs[source] for _, source in ready.kv_inputs] + [tables[source] for _, source in self.names]
            repeated = self.repeat.forward(q, k, v, lse, None, arrays)
            if repeated is not None:
                return (*repeated[:2], None) if lse else (repeated, None, None)
        values = [kv_inputs[n] if n in KV_INPUTS else self.param_values[n] for _, n in ready.kv_inputs]
        if sinks is not None:
            sinks = sinks_of(sinks, q.shape[1], "torch", accumulate(ready.real), q.device)
        inputs = ready.inputs_of(q.device, None, sinks, values)
        inputs = replace(inputs, spans=spans, tables={**inputs.tables, **{n: tables[s] for n, s in self.names}})
        return ready.forward(inputs, q, k, v, top=top)  # type: ignore[no-any-return]


Steps = dict[Any, DecodeCall]  # by what a call is, but for entries of its tensors


def step_of(
    steps: Steps, att: Any, qkv: Tensors, sizes: Sizes | None, kv_inputs: Values, tables: Values, params: Values
) -> DecodeCall | None:
    """The `DecodeCall` for a call of q, k and v, kept in `steps`, whose calls all have the same `sizes`.

    None where a call is more than a step: on a GPU, in a graph, under autocast or a default device, with gradients or
    under `forward_ad`, or of many queries."""
    (q, k, v), settings = qkv, Settings.read()
    # under forward_ad queries, sinks and parameters may have tangents, which a prepared step does not see
    if in_graph(q) or not q.is_cpu or q.shape[2] > MAX_STEP_QUERIES or settings.check or forward_ad._current_level >= 0:
        return None
    modes = torch._C._is_torch_function_mode_enabled() or torch.is_autocast_enabled("cpu")
    if modes or q.is_neg() or q._is_zerotensor() or (q.requires_grad and torch.is_grad_enabled()):
        return None
    param_keys: list[Any] = []
    versions: list[Any] = []
    for name, x in params.items():
        if type(x) in NUMBERS:
            param_keys.append((name, kind_of(x), x))
        elif type(x) is Tensor and x.is_cpu and not x.requires_grad:
            param_keys.append((name, x))  # tensors are compared by where they are
            versions.append(version_of(x))
        else:
            return None
    shapes = [x.shape for x in (q, k, v, *kv_inputs.values(), *tables.values())]
    key = (att, q.dtype, k.dtype, settings.backend, *tables, *shapes, *param_keys)
    step = steps.get(key)
    if step is not None and step.versions == versions:
        return step
    if settings.show or att.learned or native_build.reason():
        return None
    if not RECORDS[
        choose(att.options.backend, "torch", "cpu", invariant=att.options.tuning.invariant)
    ].tier:  # kernels of a GPU, or an engine's
        return None
    try:
        with native_build.deferring(not (att.options.backend or settings.backend or att.options.tuning.invariant)):
            step = DecodeCall(att, qkv, sizes, kv_inputs, tables, params)
    except native_build.BuildError as error:  # of its planner
        if att.options.backend or settings.backend or att.options.tuning.invariant:
            raise
        native_build.fall_back(error)
        return None
    if step.short or step.ready.awaits:
        return None
    remember(steps, key, step, KEPT)
    return step
