"""Runs a compiled attention on torch tensors, with gradients.

A second call compares its key (`key_of`) with those in `att.calls`, or in `plan.calls` with `plan=`:

- shapes, dtypes and torch layouts (dense or sparse) of q, k and v; devices, or that kernels may read these arrays by
  their addresses; the axis order
- settings of the environment; origin and sizes; shapes of learned tensors; names and values of scalars
- names, shapes and dtypes of tables. Entries of a host table are compared too, bit for bit (`ChangingTables`). Entries
  of a table on a device are not: a copy of the `PreparedCall` gets the plan of this call's tables (`_earlier`)

The `PreparedCall` under the key holds all but tensors. The call checks its sinks, seed and gradients, and launches:
`PreparedCall.__call__`, or native kernels by the addresses of arrays (`PreparedCall.fast`). Without one, `_first_call`
checks all arguments, names a backend and plans (`Attention.call`: a `CheckedCall`). `prepare` then asks for an engine
(`VendorCall`), uploads tables (`_prepared`) and builds the kernel (`_built`); the next call finds the `PreparedCall`.

Graphs of torch.compile hold operators (`running`), which do the same when they run. A KV cache on a CPU keeps a
`PreparedCall` for its steps (`DecodeCall`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import Any
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd import forward_ad

from frisket.dsl.errors import BackendError, BackwardError
from frisket.dsl.ir import names_of
from frisket.dsl.types import FLOAT
from frisket.grammar.memo import cached_on, remember
from frisket.lowering.dtypes import accumulate
from frisket.lowering.pipeline import TiledPlan
from frisket.lowering.plan import KV_INPUTS, RATE, SEED, ForwardResults, KernelInputs, Spans
from frisket.lowering.planner.planner import DeviceSpans
from frisket.runtime.backends.base import LIBRARY, RECORDS, no_gradients
from frisket.runtime.backends.engines import proof as proofs
from frisket.runtime.backends.registry import automatic, library, quickest, target_of, warn_slow
from frisket.runtime.backends.stages import compiled, record
from frisket.runtime.calls.arrays import COPIED, NATURAL, arrays, transpose_to, uploaded
from frisket.runtime.calls.options import CALLS, CallArgs, Options, seed_of, sinks_of
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.machine.cpp_build import BuildError, LaterError, PendingError, deferring, fall_back, kernel_step
from frisket.runtime.machine.parameters import kind_of
from frisket.runtime.machine.settings import Settings
from frisket.runtime.plans.device import CheckedCall, DeviceTiledPlan, refuse_written
from frisket.runtime.plans.empty import nothing

from . import weighted
from .autograd import AttendAgain, gradients_with_permutation, has_tangents, with_permutation, written_out
from .differentiable import dual
from .ready import ChangingTables, PreparedCall, VendorCall, readable
from .tangents import attend as attend_with_tangents

Tensor = Any
NUMBERS = (bool, int, float)
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def attend(att: Any, request: CallArgs, saving: bool = False, lse: bool = True) -> tuple[Any, ...]:
    """(out, lse, top) of `att(q, k, v, ...)`, with `saving` softmax_stats too: see `PreparedCall.saving`. `lse` says
    whether lse is asked for; `saving` that the caller has the gradients."""
    q, k, v, plan, seed, sinks, top, _, _, _, params = request
    if torch._C._is_any_autocast_enabled():
        q, k, v = cast(q, k, v)  # operators of ours are none that autocast knows
        request = request._replace(q=q, k=k, v=v)
    settings = Settings.read()
    dual_numbers = forward_ad._current_level >= 0 and has_tangents(q, k, v, *_arrays_of(att, request).values())
    if dual_numbers and q.numel() and k.numel():  # torch differentiates the zeros of other calls
        return _with_tangents(att, request, saving)
    if plan is not None and getattr(plan, "on_device", False):
        refuse_written(plan)  # a plan of the host has copies
    try:
        key, entries = key_of(att, request, settings)
    except (AttributeError, RuntimeError):
        arrays(q, k, v)  # raises: an array of another framework, or a nested tensor that is not jagged, has no shape
        raise
    ready: PreparedCall | None = (att.calls if plan is None else getattr(plan, "calls", att.calls)).get(key)
    if entries or plan is not None or (ready is not None and ready.loads):
        ready = _earlier(att, request, key, entries, ready)
    if ready is not None and (fast := ready.fast) and seed is None and not top:
        if ready.bshd:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        values = [params[n] for _, n in ready.kv_inputs] if ready.kv_inputs else ()
        lse = lse or saving
        out: Any = None
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            # gradients flow from out alone, to q, k and v alone
            if not (lse or values) and sinks is None and q.dtype == k.dtype and fast.fits(q, k, v):
                out = AttendAgain.apply(fast, ready, q, k, v)  # type: ignore[no-untyped-call]
        elif (sinks is None or _sinks_fit(sinks, ready)) and (not values or all(map(_readable, values))):
            out = fast.forward(q, k, v, lse, sinks, values)
        if out is not None:  # else kernels cannot read these arrays where they are
            out, sums, stats = out if lse else (out, None, None)
            out = out.transpose(1, 2) if ready.bshd else out
            return (out, sums, None, stats) if saving else (out, sums, None)
        q, k, v = request.q, request.k, request.v
    tensors = q, k, v, sinks, *params.values()
    if any(isinstance(x, torch.Tensor) and x._is_zerotensor() for x in tensors):  # zeros without memory, of autograd
        q, k, v, sinks = map(written_out, (q, k, v, sinks))
        params = {n: written_out(x) for n, x in params.items()}
        request = request._replace(q=q, k=k, v=v, sinks=sinks, params=params)
    if ready is None:
        return _first_call(att, request, settings, key, entries, saving)
    if ready.runs == 1:
        ready.fast = _fast_path_of(att, ready, request, key)
    ready.runs += 1
    return ready(operands_of(att, request, ready), seed_of(seed, att.options.dropout, "torch"), top, saving)


def _arrays_of(att: Any, request: CallArgs) -> dict[str, Any]:
    """The sinks and the other arrays of a call by name, with those that its attention or its plan holds."""
    sinks = att.options.sinks if request.sinks is None else request.sinks
    return {**(att.learned if request.plan is None else request.plan.device_values), **request.params, "sinks": sinks}


def operands_of(att: Any, request: CallArgs, ready: PreparedCall, bhsd: bool = False) -> tuple[Any, ...]:
    """q, k, v, sinks and the values of `ready.kv_inputs` of a call, as `ready` takes them; in its axis order, or else
    as [batch, heads, length, dim]."""
    (q, k, v), arrays = request[:3], _arrays_of(att, request)
    values = [arrays[n] for _, n in ready.kv_inputs]
    if (sinks := arrays["sinks"]) is not None:
        sinks = sinks_of(sinks, ready.inputs.geometry.heads, "torch", accumulate(ready.real), q.device)
    if ready.bshd:
        values = [transpose_to(n, x, "bshd", "bhsd") for (_, n), x in zip(ready.kv_inputs, values, strict=True)]
    if ready.bshd and bhsd:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return q, k, v, sinks, *values


def _with_tangents(att: Any, request: CallArgs, saving: bool) -> tuple[Any, ...]:
    """`attend` of tensors that have tangents."""
    q, k, v = (dual(x)[0] for x in request[:3])
    ready = kept_ready(att, request._replace(q=q, k=k, v=v)).generated
    seed = seed_of(request.seed, att.options.dropout, "torch")
    out, lse, top = attend_with_tangents(ready, seed, request.top, *operands_of(att, request, ready, bhsd=True))
    results = out.transpose(1, 2) if ready.bshd else out, lse, top if request.top else None
    return (*results, None) if saving else results


def _first_call(
    att: Any, request: CallArgs, settings: Settings, key: Any, entries: tuple[bytes, ...], saving: bool
) -> tuple[Any, ...]:
    """The results of a call that is checked, planned and prepared."""
    began, _ = perf_counter(), kernel_step.set("")  # of this call, for its record
    call = att.call(request)
    if call.geometry.is_empty:
        # learned arrays get zeros for gradients, not None
        learned = [x for n, x in {**att.learned, **request.params}.items() if _learned(att, n, x)]
        return (*nothing(call, learned), None) if saving else nothing(call, learned)
    backend = RECORDS[call.backend]
    if not backend.has_gradients("torch"):
        refuse_gradients(call.backend, (*request[:3], *_arrays_of(att, request).values()))
    if backend.oracle or settings.check:
        result: tuple[Any, ...] = att.run(call)
        att.check_if_asked(call, result)
        return (*result, None) if saving else result
    ready = _prepare_and_keep(call, att, request, key, entries, True)
    result, ready.runs = run(call, ready, saving), 1
    record(att, call, began, ready.inputs.target.backend)  # after the run, which loads Triton's kernels
    return result


def cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The arrays in autocast's dtype, as torch's own attention; float64 stays as it is."""
    kind = q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # autocast knows no meta
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (x if x.dtype == torch.float64 or not x.is_floating_point() else x.to(dtype) for x in (q, k, v))
    return q, k, v


def _readable(x: Any) -> bool:
    """Whether a kernel can read a tensor where it is; strides may be any."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_nested or x.layout is not torch.strided:
        return False
    addressable = x.is_cpu and not x.is_neg() and x.data_ptr() != 0
    return addressable and not (x.requires_grad and torch.is_grad_enabled())


def _sinks_fit(sinks: Any, ready: PreparedCall) -> bool:
    """Whether kernels can read sinks where they are; others are cast and checked by each call."""
    return bool(
        _readable(sinks)
        and sinks.is_contiguous()
        and sinks.shape == (ready.inputs.geometry.heads,)
        and sinks.dtype == (torch.float64 if ready.double else torch.float32)
    )


def _fast_path_of(att: Any, ready: PreparedCall, request: CallArgs, key: Any) -> Any:
    """The `FastPath` of calls with the key of this one; None where they need more than addresses of their arrays."""
    repeat = RECORDS[ready.inputs.target.backend].executors["torch"].repeat
    if repeat is None or key is None or key[0] is not None or getattr(request.plan, "on_device", False):
        return None
    # a fast path takes no rows, no seed, no sinks of the options, and makes no cotangents of weighted rows
    if ready.inputs.plan.weighted or ready.seed or att.options.rows is not None or att.options.sinks is not None:
        return None
    if any(x.is_inference() for x in ready.inputs.tables.values()):
        return None
    # scales would have to be turned, and other values may learn
    params = request.params
    if ready.kv_inputs and (ready.bshd or not all(s in params and s in KV_INPUTS for _, s in ready.kv_inputs)):
        return None
    return repeat(ready.inputs, request.q.dtype, request.k.dtype, [name for name, _ in ready.kv_inputs])


def kept_ready(att: Any, request: CallArgs, defers: bool = False) -> PreparedCall:
    """The prepared call that `att(q, k, v, ...)` runs; see `prepare`."""
    key, entries = key_of(att, request, Settings.read())
    ready = _earlier(att, request, key, entries, att.calls.get(key))
    return ready or _prepare_and_keep(att.call(request), att, request, key, entries, defers)


def _earlier(att: Any, request: CallArgs, key: Any, entries: tuple[bytes, ...], ready: Any) -> PreparedCall | None:
    """The `PreparedCall` of an earlier call with this key, which kept `ready`. It is for these entries of tables of the
    host, or with this call's plan if the mask reads tables of a device."""
    plan, step = request.plan, ready
    if entries:
        step = ready(entries, att.calls) if type(ready) is ChangingTables else None
    elif plan is None:
        if ready is not None and (template := ready.template) is not None:
            tables = {**att.learned, **request.params}
            step = ready.bind(template.with_tables({n: tables[n] for n, *_ in template.key.device_specs}))
    else:
        common = getattr(plan, "common", None)
        if ready is None and common is not None and (first := common.calls.get(key)) is not None:
            step_plan = plan.stored_as(first.template.host_program.stored)
            step = plan.calls[key] = first.bind(step_plan).with_plan(None)  # for the layers to come
        if step is not None and step.loads:
            step = step.with_plan(plan)
    return step  # type: ignore[no-any-return]


def _bits(x: Any) -> Any:
    """The bits of a host table's entries, as integers; None where its memory cannot be read so."""
    # as integers, since numpy lacks bfloat16
    dense = type(x) is torch.Tensor and x.is_cpu and x.layout is torch.strided and not x.is_nested
    if dense and x.dtype.itemsize in WORDS:
        if x.requires_grad or x.is_neg() or x.is_conj() or x.nbytes > COPIED:
            return None
        return written_out(x).view(WORDS[x.dtype.itemsize]).numpy()
    if type(x) is np.ndarray and x.dtype.kind in "biuf" and x.itemsize in WORDS and x.dtype.isnative:
        return None if x.nbytes > COPIED else x.view(f"u{x.itemsize}")
    return None


def _prepare_and_keep(
    call: CheckedCall, att: Any, request: CallArgs, key: Any, entries: tuple[bytes, ...], defers: bool
) -> PreparedCall:
    plan, params = request.plan, request.params
    ready = prepare(call, att.options, defers)
    if ready.awaits or key is None:  # the next call may have the native kernel
        return ready
    calls = att.calls if plan is None else plan.calls
    if entries:
        if ready.loads:
            return ready
        if type(changing := calls.get(key)) is not ChangingTables:
            remember(calls, key, changing := ChangingTables(call.plan, params), CALLS)
        changing.keep(entries, ready, calls)
        with suppress(PendingError), deferring(defers and not (att.options.backend or Settings.read().backend)):
            builder = partial(_built, defers=defers)  # where a planner is still compiled, the next call tries again
            changing.host_planned(att, call, params, ready, builder, entries)
        return ready
    if plan is None and ready.loads and call.plan.on_device and not call.plan.by_table:
        ready = ready.with_plan(call.plan.with_tables({}))  # later calls bring their own values; these are not held
    if plan is not None or not call.plan.by_table:
        remember(calls, key, ready if plan is None or not ready.loads else ready.with_plan(None), CALLS)
    if ready.loads and call.plan.common is not None:
        remember(att.calls if plan is None else plan.common.calls, key, ready.unbind(call.plan), CALLS)
    return ready


def execute(call: CheckedCall, att: Any) -> tuple[Any, ...]:
    """(out, lse, top) of a checked call."""
    return run(call, prepare(call, att.options))


def run(call: CheckedCall, ready: PreparedCall, saving: bool = False) -> tuple[Any, ...]:
    x, sources = call.arrays, {**call.plan.device_values, **call.kv_inputs}
    values = [sources[n] for _, n in ready.kv_inputs]
    return ready((x.q, x.k, x.v, call.sinks, *values), call.seed, call.top, saving)


def key_of(att: Any, request: CallArgs, settings: Settings) -> tuple[Any, tuple[bytes, ...]]:
    """(key of a call's `PreparedCall`, or None where every call is prepared again; the entries of its host tables).

    A host table may be written to by torch, by numpy through shared memory, or through `.data`. Versions of tensors
    count some of these only, so entries are compared, bit for bit. They are bytes, whose comparison ends at the first
    difference."""
    q, k, v, plan, _, _, _, origin, sizes, layout, params = request
    entries: tuple[bytes, ...] = ()
    # `check_layout` refuses a layout that is no text
    if settings.check or att.ambiguous or not (layout is None or type(layout) is str):
        return None, entries
    place: Any = None  # kernels may read these arrays by their addresses
    elsewhere = not (q.is_cpu and k.is_cpu and v.is_cpu) or q.is_neg() or k.is_neg() or v.is_neg()
    # a default device, say: the mode sees what a call makes
    if elsewhere or torch._C._is_torch_function_mode_enabled():
        # Triton's products of float32 are by the precision
        place = q.device, k.device, v.device, torch.get_float32_matmul_precision()
    # a plan may serve several attentions, and outlive them
    whose = None if plan is None else ref(att)
    kinds = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.layout, k.layout, v.layout  # or sparse, an error
    key: tuple[Any, ...] = place, *kinds, layout, settings, whose
    if att.learned:
        key += tuple([x.shape for x in att.learned.values()])  # whose `.data` may be another
    for name, x in params.items() if params else ():
        if type(x) in NUMBERS:
            key += ((name, kind_of(x), x),)
        elif (name in KV_INPUTS and hasattr(x, "shape")) or _learned(att, name, x):
            key += ((name, x.shape, x.dtype, x.device),)
        elif plan is None and _on_accelerator(x, q.device):  # another step's entries take the same kernel
            key += ((name, x.shape, x.dtype, "planned there"),)
        elif plan is None and q.is_cpu and (bits := _bits(x)) is not None:
            entries += (bits.tobytes(),)
            key += ((name, x.shape, x.dtype, "by its entries"),)
        else:
            return None, ()
    if origin is not None or sizes is not None:
        for x in (origin, sizes):
            # tensors and numpy's vectors are no part of a key
            if x is not None and not (isinstance(x, tuple | list) and all(type(n) is int for n in x)):
                return None, ()
            key += (x if x is None else tuple(x),)
    return key, entries


def _learned(att: Any, name: str, x: Any) -> bool:
    flows = name in att.program.learnable and hasattr(x, "requires_grad") and not x.is_nested
    return flows and x.is_floating_point() and x.layout is torch.strided


def _on_accelerator(x: Any, device: Any) -> bool:
    """Whether this is a table on the queries' device, an accelerator, where it is planned."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.ndim > 0 and x.device == device and not x.is_cpu


def prepare(call: CheckedCall, options: Options, defers: bool = True) -> PreparedCall:
    """The prepared executor of calls of these shapes.

    An engine runs it where a proof and the costs say so. Library calls replace a native kernel that cannot be built,
    unless the backend was named, and where it `defers` one that is still being compiled. Its result is for one call."""
    proof = engine_call(call, options)
    if proof is not None:
        named = call.backend == proof.backend
        # a named engine is no backend of the calls that it refuses
        other = replace(call, backend=automatic("torch", call.arrays.device)) if named else call
        return VendorCall.of_call(other, options, proof, named, _built)
    if call.arrays.device != "cpu":
        call = replace(call, backend=quickest(call.backend, call.plan, call.geometry, call.arrays.dtype, options))
    return _built(call, options, defers)


def engine_call(call: CheckedCall, options: Options) -> proofs.Proof | None:
    """The proof of the engine that runs a call; None where generated kernels do. Raises where a named one cannot."""
    named, device = RECORDS[call.backend], call.arrays.device
    platform = "rocm" if device == "cuda" and torch.version.hip else device  # torch calls AMD's GPUs cuda, too
    if named.engine is not None:
        proof = proofs.prove(named, facts_of(call, options, platform))
        if isinstance(proof, str):
            raise BackendError(f"backend {named.name!r} does not run this call: {proof}\n  leave out the backend")
        return proof
    # cheap, before a proof is tried
    if not proofs.may_win("torch", platform, call.arrays.dtype, call.geometry, call.backend):
        return None
    if proofs.asked_for(options):
        return None
    return proofs.choose_engine(facts_of(call, options, platform), explain=False).proof


def facts_of(call: CheckedCall, options: Options, platform: str) -> proofs.EngineCall:
    """The facts of a call that engines are asked about."""
    plan = call.plan
    return proofs.EngineCall(
        program=plan.host_program,
        geometry=call.geometry,
        dtype=call.arrays.dtype,
        framework="torch",
        platform=platform,
        on_device=plan.on_device or bool(plan.device_values),
        stored=bool(call.kv_inputs or call.geometry.kv_dtype or plan.host_program.unwritten),
        dropout=bool(call.rate),
        sinks=call.sinks is not None,
        top=call.top,
        deterministic=options.deterministic,
        generated=call.backend,
        engines=proofs.allowed(options),
        plan=plan,
    )


def _built(call: CheckedCall, options: Options, defers: bool = False) -> PreparedCall:
    """The prepared executor of generated kernels, or of library calls."""
    ready, run = prepared_for(call, options), RECORDS[call.backend].executors["torch"]
    # nothing to build ahead, or no library calls in place of a backend that is named
    if run.build is None or options.backend or Settings.read().backend or options.tuning.invariant:
        return ready
    try:
        with deferring(defers):
            run.build(ready.inputs, call.arrays.q.dtype, call.arrays.k.dtype)
    except BuildError as error:
        fall_back(error)
        fallback = prepared_for(replace(call, backend=library("torch")), options)
        return replace(fallback, awaits=True) if isinstance(error, LaterError) else fallback
    return replace(ready, backward=_or_library(ready.backward), falls_back=True)


def _or_library(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A native backward, with library calls where it cannot be built."""

    def run(
        inputs: KernelInputs, q: Tensor, k: Tensor, v: Tensor, results: ForwardResults, *cotangents: Any, **names: Any
    ) -> dict[str, Tensor]:
        arguments = inputs, q, k, v, results, *cotangents
        try:
            with deferring(results.share is None):
                grads: dict[str, Tensor] = backward(*arguments, **names)
        except BuildError as error:
            fall_back(error)
            other = RECORDS[library("torch")].executor("torch", gradients=True)
            grads = (other if inputs.rows is None else gradients_with_permutation(other))(*arguments, **names)
        return grads

    return run


def prepared_for(call: CheckedCall, options: Options, arch: str | None = None) -> PreparedCall:
    """The prepared call of a backend, also as on a GPU of `arch` that is not here. `kv_inputs` are the Float tables and
    scalars of a flat plan."""
    inputs, geometry, plan = call.arrays, call.geometry, call.plan
    backend = RECORDS[call.backend]
    if backend.interpreter is not None and backend.interpreted:
        warn_slow(call.backend, geometry)  # Triton's interpreter
    target = target_of(call.backend, geometry, inputs.dtype, options, plan, inputs.q.device, arch)
    if Settings.read().show:
        compiled(call, options, inputs.q.device)  # prints stages
    work = plan.work((target.block_q, target.block_k), proofs=backend.guarded)
    # Ints are the plan's; Floats come with each call, and gradients flow to them
    named = {n for n, x in plan.device_values.items() if x.is_floating_point()}
    real = getattr(torch, accumulate(inputs.dtype))
    operands: list[Any] = [*work.plan.tables, *work.plan.slots]
    uses = [x for x in operands if x.source in KV_INPUTS or (x.type is FLOAT and x.source in named)]
    input_names = {x.name for x in uses}  # this call's values are not kept: they may hold its graph
    uploads = _on_device(work, inputs.q.device, real, backend.loads) if work.tables else {}
    tables = {n: t for n, t in uploads.items() if n not in input_names}
    slots = {n: x for n, x in work.slots.items() if n not in input_names}
    source = {s.source: s.name for s in work.plan.slots}
    if RATE in source:
        slots[source[RATE]] = call.rate
    spans: Any = plan if backend.loads else work.spans
    if isinstance(spans, DeviceSpans):
        spans = on_host(spans)
    fixed = MappingProxyType(slots), MappingProxyType(tables), None, options.rows, options.deterministic
    executors = backend.executors["torch"]
    forward, backward = executors.forward, executors.backward or _refused(backend.name)
    if work.plan.weighted and backend.tier == LIBRARY:
        forward, backward = weighted.forward, weighted.backward
    if options.rows is not None and not executors.rows:  # arrays are permuted around those that read no rows by tables
        forward, backward = with_permutation(forward), gradients_with_permutation(backward)
    return PreparedCall(
        KernelInputs(work.plan, spans, geometry, target, *fixed),
        forward,
        backward,
        real,
        inputs.layout != NATURAL["torch"],
        kv_inputs=tuple((x.name, str(x.source)) for x in uses),
        loads=backend.loads,
        seed=source.get(SEED),
        stats_kind=backend.stats_kind,
        check=executors.checks_gradients,
        compiles=executors.compiles,
    )


def _refused(name: str) -> Callable[..., Any]:
    def backward(*arguments: Any, **names: Any) -> Any:
        raise no_gradients(name)  # `attend` has refused gradients

    return backward


def _requires_gradient(x: Any) -> bool:
    return torch.is_grad_enabled() and getattr(x, "requires_grad", False)


def refuse_ambiguous(
    program: CallProgram, tables: Mapping[str, Any], learns: Callable[[Any], bool] = _requires_gradient
) -> None:
    """Raise where a learned tensor is read by the mask and another part: the gradient of one would be missing."""
    mask, others = program.exprs.mask, [p for p in program.every_part[1:] if p is not None]
    if mask is None:
        return
    for name, x in tables.items():
        part = next((p for p in others if name in names_of(p.expr)), None)
        if learns(x) and name in names_of(mask) and part is not None:
            raise BackwardError(
                f"`{name}` requires a gradient, and both the mask and the {part.what} read it: no gradient flows "
                "through a mask\n  give the mask a detached copy under another name"
            )


def refuse_gradients(backend: str, tensors: Iterable[Any]) -> None:
    """Raise where a gradient is asked of a backend without any."""
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors):
        raise no_gradients(backend)


def on_host(spans: DeviceSpans) -> Spans:
    """Spans for the CPU's executors; the tensors are on the CPU already."""
    return Spans(spans.bounds.numpy(), spans.count.numpy(), spans.slice_of)


def _on_device(work: TiledPlan | DeviceTiledPlan, device: Any, real: Any, loads: bool) -> Mapping[str, Tensor]:
    """The tables as tensors, those of the host made once for each plan, device and dtype of Floats. Where kernels load
    them, they are converted before the copy: what torch makes on a GPU may be in the memory of a CUDA graph that it
    warms up."""
    if isinstance(work, DeviceTiledPlan):
        return readable(work.tables, device, real)

    def tensors() -> dict[str, Tensor]:
        tables = {n: _as_read(np.asarray(t), real) if loads else t for n, t in work.tables.items()}
        return readable({n: uploaded(t, device) for n, t in tables.items()}, device, real)

    return cached_on(work.plan, (device, real, loads), tensors)


def _as_read(table: NDArray[Any], real: Any) -> NDArray[Any]:
    """A table of the host in the dtype that kernels of a GPU read: Floats as scores, Ints of 32 or 64 bits."""
    if table.dtype.kind == "f":
        return table.astype(str(real).removeprefix("torch."), copy=False)
    return table.astype(np.int32) if table.dtype.kind in "iu" and table.dtype.itemsize < 4 else table
