"""Runs a compiled attention on torch tensors, with gradients. A call takes the first of three ways that is open:

1. `repeated`: native kernels, of calls that differ from two earlier ones in the entries of q, k, v, sinks, scales and
   pages alone. A runner, in `att.repeats` or with `plan=` in `plan.ready`, takes addresses and strides. Checked at each
   call: types, shapes, dtypes and devices of these arrays, the plan, positions, numbers, settings of the environment,
   and modes of torch (autocast, forward mode, function modes).
2. `attend`, where an earlier call has the same key (`key_of`: shapes, dtypes, devices, settings, numbers). The
   `PreparedCall` of that call holds all but its tensors. `_remembered` finds it in `att.ready`; in `plan.ready` with
   `plan=`; in `att.by_tables` with tables of the host, whose entries are compared. Tables on a device are no part of
   the key: a copy of the `PreparedCall` gets the plan of this call's tables. Checked at each call: the key, sinks, the
   seed, gradients.
3. `attend`, the first call of a key. `Attention.call` checks all arguments, names a backend and plans: a `CheckedCall`.
   `_prepare_and_keep` makes its `PreparedCall` by `prepare`, which asks for an engine (`VendorCall`), uploads tables
   (`_prepared`) and builds the kernel (`_built`). The next call takes way 2, and leaves the runner for way 1.

Graphs of torch.compile hold operators (`running`), which take the same ways when they run. A KV cache on a CPU keeps a
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
from torch.autograd import forward_ad

from frisket.dsl.errors import BackwardError
from frisket.dsl.types import FLOAT
from frisket.grammar.memo import cached_on, remember
from frisket.lowering.plan import KV_INPUTS, RATE, SEED, Spans
from frisket.lowering.planner.planner import DeviceSpans
from frisket.runtime.backends.base import RECORDS, Backend, no_gradients
from frisket.runtime.backends.registry import automatic, library, quickest, target_of, warn_slow
from frisket.runtime.backends.stages import compiled, record
from frisket.runtime.calls.arrays import COPIED, NATURAL, TokenPermutation, arrays, transpose_to, uploaded
from frisket.runtime.calls.options import Options
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.calls.request import CallArgs
from frisket.runtime.machine.cpp_build import BuildError, LaterError, PendingError, deferring, fall_back, kernel_step
from frisket.runtime.machine.parameters import kind_of, names_of
from frisket.runtime.machine.settings import Settings
from frisket.runtime.plans.compiled import TiledPlan
from frisket.runtime.plans.device import CheckedCall, DeviceTiledPlan, refuse_written
from frisket.runtime.plans.empty import nothing
from frisket.runtime.plans.host import Plan

from .autograd import AttendAgain, gradients_with_permutation, refuse_tangents, with_permutation, written_out
from .ready import ChangingTables, PreparedCall, VendorCall, engine_call, readable

Tensor = Any
NUMBERS = (bool, int, float)
KEPT = 64  # kinds of calls
KEPT_TABLES = 4  # calls with tables of the host, each with copies of them
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def attend(att: Any, request: CallArgs, saving: bool = False) -> tuple[Any, ...]:
    """(out, lse, top) of `att(q, k, v, ...)`; with `saving`, and no gradients, softmax_stats too: see
    `PreparedCall.saving`."""
    if any(getattr(x, "is_nested", False) for x in request[:3]):  # an array of another framework has no such field
        arrays(*request[:3])  # raises: a nested tensor that is not jagged has no shape to make a key of
    q, k, v = request.q, request.k, request.v
    if torch._C._is_any_autocast_enabled():
        q, k, v = cast(q, k, v)  # operators of ours are none that autocast knows
    tensors = q, k, v, request.sinks, *request.params.values()
    if any(isinstance(x, torch.Tensor) and x._is_zerotensor() for x in tensors):  # zeros without memory, of autograd
        q, k, v, sinks = map(written_out, (q, k, v, request.sinks))
        request = request._replace(sinks=sinks, params={n: written_out(x) for n, x in request.params.items()})
    settings, plan, params = Settings.read(), request.plan, request.params
    if forward_ad._current_level >= 0:
        refuse_tangents(q, k, v, request.sinks, *params.values(), *att.learned.values())
    if getattr(plan, "on_device", False):
        refuse_written(plan)  # a plan of the host has copies
    key, tables = key_of(att, (q, k, v), request, settings)
    calls = att.ready if plan is None else getattr(plan, "ready", att.ready)
    # an attention, or a plan, without prepared calls remembers none; those of a device share them between steps
    known = calls or att.by_tables or getattr(plan, "common", None) is not None
    if known and (ready := _remembered(att, key, tables, request, calls)) is not None:
        kind = "saving" if saving else "learning" if _learning(q, k, v) else "plain"
        _keep_repeat(att, ready, request._replace(q=q, k=k, v=v), settings, kind)  # more such calls may follow
        values = att.learned if plan is None else plan.device_values
        inputs = [params[n] if n in params else values[n] for _, n in ready.kv_inputs]
        if ready.bshd:
            inputs = [transpose_to(n, x, "bshd", "bhsd") for (_, n), x in zip(ready.kv_inputs, inputs, strict=True)]
        return ready.again(q, k, v, inputs, request.seed, att.options, request.sinks, request.top, saving)
    began, _ = perf_counter(), kernel_step.set("")  # of this call, for its record
    call = att.call(request._replace(q=q, k=k, v=v))
    if call.geometry.is_empty:
        # learned arrays get zeros for gradients, not None
        empty = nothing(call, [x for n, x in {**att.learned, **params}.items() if _learned(att, n, x)])
        return (*empty, None) if saving else empty
    backend = RECORDS[call.backend]
    if not backend.has_gradients("torch"):
        refuse_gradients(call.backend, (q, k, v, call.sinks, *params.values(), *att.learned.values()))
    if backend.oracle or settings.check:
        result: tuple[Any, ...] = att.run(call)
        att.check_if_asked(call, result)
        return (*result, None) if saving else result
    ready = _prepare_and_keep(call, att, request, key, calls, tables, True)
    result = run(call, ready, saving)
    record(att, call, began, ready.target.backend)  # after the run, which loads Triton's kernels
    return result


def cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The arrays in autocast's dtype, as torch's own attention; float64 stays as it is."""
    kind = q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # autocast knows no meta
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (x if x.dtype == torch.float64 or not x.is_floating_point() else x.to(dtype) for x in (q, k, v))
    return q, k, v


def repeated(
    att: Any, q: Tensor, k: Tensor, v: Tensor, plan: Any, sinks: Any, origin: Any, sizes: Any, layout: str | None,
    params: Mapping[str, Any], lse: bool,
) -> Any:  # fmt: skip
    """The output of `att(q, k, v, ...)`, with `lse` (out, lse), if an earlier call differs from it only in the entries
    of its arrays, else None."""
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        return None  # something that records operations, say
    if q.is_nested or k.is_nested or v.is_nested:  # not jagged: an error of `attend`
        return None
    bare = plan is sinks is origin is sizes is layout is None and not params
    if (extra := () if bare else _extra_key(att, plan, sinks, origin, sizes, layout, params)) is None:
        return None
    learning = _learning(q, k, v)
    earlier = earlier_call(att, q, k, v, "learning" if learning else "plain", plan, extra)
    if earlier is None:
        return None
    _, run, ready = earlier
    if not extra and not lse:
        if learning:
            return AttendAgain.apply(run, ready, q, k, v) if run.fits(q, k, v) else None  # type: ignore[no-untyped-call]
        return run.forward(q, k, v, False)
    if ready.bshd:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if not learning:
        results = run.forward(q, k, v, lse, sinks, [params[n] for _, n in ready.kv_inputs])
    elif not lse and sinks is None and run.fits(q, k, v):
        results = AttendAgain.apply(run, ready, q, k, v)  # type: ignore[no-untyped-call]
    else:
        return None
    if results is None:
        return None
    out = results[0] if lse else results
    out = out.transpose(1, 2) if ready.bshd else out
    return (out, results[1]) if lse else out


def earlier_call(
    att: Any, q: Tensor, k: Tensor, v: Tensor, kind: str, plan: Any = None, extra: tuple[Any, ...] = ()
) -> Any:
    """(settings, what runs it, its `PreparedCall`) of an earlier call with other entries in its arrays, or None.
    "saving" calls are those of operators, whose graph has the gradients; "learning" ones have gradients of their own,
    "plain" ones have none."""
    repeats = att.repeats if plan is None else getattr(plan, "ready", att.repeats)
    kinds = kind, type(q), type(k), type(v), q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, *extra
    earlier = repeats.get(kinds)
    if earlier is None or torch._C._is_any_autocast_enabled():
        return None
    if (settings := Settings.read()) is not earlier[0] and settings != earlier[0]:
        return None
    if forward_ad._current_level >= 0 or torch._C._is_torch_function_mode_enabled():
        return None
    return earlier if q.is_cpu and k.is_cpu and v.is_cpu and not (q.is_neg() or k.is_neg() or v.is_neg()) else None


def _extra_key(
    att: Any, plan: Any, sinks: Any, origin: Any, sizes: Any, layout: str | None, params: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """The part of a key of `repeated` beside q, k and v; () for a call of these alone. None where a call is not to be
    repeated: it brings tables of its mask or score mod, arrays that learn, or arrays that have to be copied first."""
    parts: list[Any] = []
    if sinks is not None:
        if not (_readable(sinks) and sinks.is_contiguous()):  # kernels read them without strides
            return None
        parts.append((sinks.shape, sinks.dtype))
    for name, x in params.items():
        if type(x) in NUMBERS:
            parts.append((name, kind_of(x), x))
        elif name in KV_INPUTS and _readable(x):
            parts.append((name, x.shape, x.dtype))
        else:
            return None
    for place in (origin, sizes):
        if place is not None and (type(place) is not tuple or any(type(x) is not int for x in place)):
            return None
    if not (layout is None or type(layout) is str):  # `check_layout` refuses it
        return None
    turned = layout if layout != NATURAL["torch"] else None
    if plan is None and not parts and origin is sizes is turned is None:
        return ()
    # a plan may serve several attentions, and outlive them
    return None if plan is None else ref(att), origin, sizes, turned, *parts


def _learning(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def _readable(x: Any) -> bool:
    """Whether a kernel can read a tensor where it is; strides may be any."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_nested or x.layout is not torch.strided:
        return False
    addressable = x.is_cpu and not x.is_neg() and x.data_ptr() != 0
    return addressable and not (x.requires_grad and torch.is_grad_enabled())


def _keep_repeat(att: Any, ready: PreparedCall, request: CallArgs, settings: Settings, kind: str) -> None:
    """Remember for `earlier_call` how such calls are run, if they differ in the entries of their arrays alone."""
    q, k, v, plan, seed, sinks, _, origin, sizes, layout, params = request
    repeat = RECORDS[ready.target.backend].executors["torch"].repeat
    # a runner takes no rows, no seed, and no sinks of the options
    if repeat is None or att.options.rows is not None or not (seed is att.options.sinks is None):
        return
    if ready.seed or (ready.stored and kind == "learning") or any(x.is_inference() for x in ready.tables.values()):
        return
    # scales would have to be turned, and other values may learn
    if ready.kv_inputs and (ready.bshd or not all(s in params and s in KV_INPUTS for _, s in ready.kv_inputs)):
        return
    extra = _extra_key(att, plan, sinks, origin, sizes, layout, params)
    if extra is None or not (plan is None or isinstance(plan, Plan)):
        return
    real = torch.float64 if ready.double else torch.float32  # others are cast by each call
    if sinks is not None and (sinks.shape != (ready.geometry.heads,) or sinks.dtype != real):
        return
    repeats = att.repeats if plan is None else plan.ready
    kinds = kind, type(q), type(k), type(v), q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, *extra
    if kinds not in repeats:
        input_names = [name for name, _ in ready.kv_inputs]
        arguments = ready.plan, ready.spans, ready.geometry, q.dtype, k.dtype, ready.slots, ready.tables, input_names
        remember(repeats, kinds, (settings, repeat(*arguments, ready.target), ready), 3 * KEPT)


def kept_ready(att: Any, request: CallArgs, defers: bool = False) -> PreparedCall:
    """The prepared call that `att(q, k, v, ...)` runs; see `prepare`."""
    key, tables = key_of(att, request[:3], request, Settings.read())
    ready = _remembered(att, key, tables, request, att.ready)
    return ready or _prepare_and_keep(att.call(request), att, request, key, att.ready, tables, defers)


def _remembered(att: Any, key: Any, tables: list[Any], request: CallArgs, calls: dict[Any, Any]) -> PreparedCall | None:
    """The `PreparedCall` of an earlier call of this key and these entries of tables of the host.

    Such a table may be written to by torch, by numpy through shared memory, or through `.data`, and versions of tensors
    count some of these only: entries are compared, bit for bit."""
    if not tables:
        return _remembered_by_key(att, key, request.plan, request.params, calls)
    ready: PreparedCall | None
    entries = [x.tobytes() for x in tables]  # bytes, whose comparison ends at the first difference
    for at, have, ready in att.by_tables:
        if have == entries and at == key:
            return ready
    if type(changing := calls.get(key)) is not ChangingTables:
        return None
    return None if (ready := changing(entries)) is None else _keep_by_tables(att, key, entries, ready)


def _keep_by_tables(att: Any, key: Any, have: list[bytes], ready: PreparedCall) -> PreparedCall:
    att.by_tables = ((key, have, ready), *att.by_tables)[:KEPT_TABLES]  # assigned once: other threads read it
    return ready


def _bits(x: Any) -> Any:
    """The bits of a host table's entries, as integers; None where its memory cannot be read so."""
    # as integers, since numpy lacks bfloat16
    dense = type(x) is torch.Tensor and x.is_cpu and x.layout is torch.strided and not x.is_nested
    if dense and x.dtype.itemsize in WORDS:
        return None if x.requires_grad or x.is_neg() or x.nbytes > COPIED else x.view(WORDS[x.dtype.itemsize]).numpy()
    if type(x) is np.ndarray and x.dtype.kind in "biuf" and x.itemsize in WORDS and x.dtype.isnative:
        return None if x.nbytes > COPIED else x.view(f"u{x.itemsize}")
    return None


def _remembered_by_key(
    att: Any, key: Any, plan: Any, params: Mapping[str, Any], calls: dict[Any, Any]
) -> PreparedCall | None:
    """The `PreparedCall` of an earlier call of a key, with this call's plan if the mask reads tables of a device."""
    ready: PreparedCall | None = calls.get(key)
    if plan is None:
        if ready is None or ready.template is None:
            return ready
        tables = {n: params[n] if n in params else att.learned[n] for n, *_ in ready.template.key.device_specs}
        return ready.for_step(ready.template.with_tables(tables))
    if ready is None and key is not None and getattr(plan, "common", None) is not None:
        first = plan.common.ready.get(key)
        if first is not None:
            step_plan = plan.stored_as(first.template.host_program.stored)
            ready = calls[key] = first.for_step(step_plan).with_plan(None)  # for the layers to come
    return ready.with_plan(plan) if ready is not None and ready.loads else ready


def _prepare_and_keep(
    call: CheckedCall, att: Any, request: CallArgs, key: Any, calls: dict[Any, Any], tables: list[Any], defers: bool
) -> PreparedCall:
    plan = request.plan
    ready = prepare(call, att.options, defers)
    if ready.awaits:  # the next call may have the native kernel
        return ready
    if tables and not ready.loads:
        entries = [x.tobytes() for x in tables]
        _keep_by_tables(att, key, entries, ready)
        if type(changing := calls.get(key)) is not ChangingTables:
            remember(calls, key, changing := ChangingTables(call.plan, request.params), KEPT)
        with suppress(PendingError), deferring(defers and not (att.options.backend or Settings.read().backend)):
            builder = partial(_built, defers=defers)  # where a planner is still compiled, the next call tries again
            changing.host_planned(att, call, request.params, ready, builder, entries)
    if key is None or tables:  # by its entries alone, in `by_tables`
        return ready
    if plan is None and ready.loads and call.plan.on_device and not call.plan.by_table:
        ready = ready.with_plan(call.plan.with_tables({}))  # later calls bring their own values; these are not held
    if plan is not None or not call.plan.by_table:
        remember(calls, key, ready if plan is None or not ready.loads else ready.with_plan(None), KEPT)
    if ready.loads and call.plan.common is not None:
        remember(att.ready if plan is None else plan.common.ready, key, ready.for_any_step(call.plan), KEPT)
    return ready


def execute(call: CheckedCall, att: Any) -> tuple[Any, ...]:
    """(out, lse, top) of a checked call."""
    return run(call, prepare(call, att.options))


def run(call: CheckedCall, ready: PreparedCall, saving: bool = False) -> tuple[Any, ...]:
    sources = {**call.plan.device_values, **call.kv_inputs}
    values, arrays = tuple(sources[n] for _, n in ready.kv_inputs), call.arrays
    return ready(arrays.q, arrays.k, arrays.v, values, call.seed, call.sinks, call.top, saving)


def key_of(att: Any, qkv: tuple[Tensor, ...], request: CallArgs, settings: Settings) -> tuple[Any, list[Any]]:
    """(key of a call's `PreparedCall`, or None where every call is prepared again; the entries of its tables)."""
    if settings.check or att.ambiguous:
        return None, []
    tables: list[Any] = []
    plan, origin, sizes = request.plan, request.origin, request.sizes
    parts: list[Any] = []
    for name, x in request.params.items():
        if type(x) in NUMBERS:
            parts.append((name, kind_of(x), x))
        elif (name in KV_INPUTS and hasattr(x, "shape")) or _learned(att, name, x):
            parts.append((name, x.shape, x.dtype, x.device))
        elif plan is None and _on_accelerator(x, qkv[0].device):  # another step's entries take the same kernel
            parts.append((name, x.shape, x.dtype, "planned there"))
        elif plan is None and qkv[0].is_cpu and (bits := _bits(x)) is not None:
            tables.append(bits)
            parts.append((name, x.shape, x.dtype, "by its entries"))
        else:
            return None, []
    if origin is not None or sizes is not None:
        if not all(x is None or isinstance(x, tuple | list) for x in (origin, sizes)):
            return None, []
        parts.append((None if origin is None else tuple(origin), None if sizes is None else tuple(sizes)))
        # tensors and numpy's vectors are no part of a key
        if any(type(x) is not int for place in parts[-1] if place for x in place):
            return None, []
    q, k, v = qkv
    key = (
        torch.get_float32_matmul_precision(),  # Triton's products of float32 are by it
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, request.layout,
        settings.backend, settings.engines, settings.show,
        *(x.shape for x in att.learned.values()),  # whose `.data` may be another
        None if plan is None else (att.options, att.program.exprs), *parts,
    )  # fmt: skip
    return key, tables


def _learned(att: Any, name: str, x: Any) -> bool:
    if name not in att.program.learnable or not hasattr(x, "requires_grad") or x.is_nested:
        return False
    return x.is_floating_point() and x.layout is torch.strided


def _on_accelerator(x: Any, device: Any) -> bool:
    """Whether this is a table on the queries' device, an accelerator, where it is planned."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.ndim > 0 and x.device == device and not x.is_cpu


def prepare(call: CheckedCall, options: Options, defers: bool = True) -> PreparedCall:
    """The prepared executor of calls of these shapes.

    An engine runs it where a proof and the costs say so. Library calls replace a native kernel that cannot be built,
    unless the backend was named, and where it `defers` one that is still being compiled: its result is for one call."""
    proof = engine_call(call, options)
    if proof is not None:
        named = call.backend == proof.backend
        # a named engine is no backend of the calls that it refuses
        other = replace(call, backend=automatic("torch", call.arrays.device)) if named else call
        return VendorCall.of_call(other, options, proof, named, _built)
    if call.arrays.device != "cpu":
        call = replace(call, backend=quickest(call.backend, call.plan, call.geometry, call.arrays.dtype, options))
    return _built(call, options, defers)


def _built(call: CheckedCall, options: Options, defers: bool = False) -> PreparedCall:
    """The prepared executor of generated kernels, or of library calls."""
    ready, run = _prepared(call, options), RECORDS[call.backend].executors["torch"]
    # nothing to build ahead, or no library calls in place of a backend that is named
    if run.build is None or options.backend or Settings.read().backend:
        return ready
    rows: dict[str, Any] = {"rows": options.rows} if run.rows and options.rows is not None else {}
    try:
        with deferring(defers):
            run.build(ready.plan, ready.geometry, ready.target, call.arrays.q.dtype, call.arrays.k.dtype, **rows)
    except BuildError as error:
        fall_back(error)
        fallback = _prepared(replace(call, backend=library("torch")), options)
        return replace(fallback, awaits=True) if isinstance(error, LaterError) else fallback
    return replace(ready, backward=partial(_or_library, ready.backward, options.rows))


def _or_library(
    backward: Callable[..., Any], rows: TokenPermutation | None, *arguments: Any, softmax_stats: Any = None, **more: Any
) -> dict[str, Tensor]:
    """The gradients of a native backward, or of library calls where the native one cannot be built."""
    try:
        with deferring("share" not in more):
            grads: dict[str, Tensor] = backward(*arguments, softmax_stats=softmax_stats, **more)
    except BuildError as error:
        fall_back(error)
        other = RECORDS[library("torch")].executor("torch", gradients=True)
        grads = (other if rows is None else partial(gradients_with_permutation, other, rows))(*arguments, **more)
    return grads


def _prepared(call: CheckedCall, options: Options) -> PreparedCall:
    """The prepared call of a backend; `kv_inputs` are the Float tables and scalars that were given to a flat plan."""
    inputs, geometry, plan = call.arrays, call.geometry, call.plan
    backend = RECORDS[call.backend]
    check = backend.executors["torch"].checks_gradients  # raises before a forward whose gradients would be refused
    if backend.interpreter is not None and backend.interpreted:
        warn_slow(call.backend, geometry)  # Triton's interpreter
    target = target_of(call.backend, geometry, inputs.dtype, options, plan, inputs.q.device)
    if Settings.read().show:
        compiled(call, options, inputs.q.device)  # prints stages
    work = plan.work((target.block_q, target.block_k), proofs=backend.guarded)
    # Ints are the plan's; Floats come with each call, and gradients flow to them
    named = {n for n, x in plan.device_values.items() if x.is_floating_point()}
    real = torch.float64 if inputs.dtype == "float64" else torch.float32
    operands: list[Any] = [*work.plan.tables, *work.plan.slots]
    uses = [x for x in operands if x.source in KV_INPUTS or (x.type is FLOAT and x.source in named)]
    input_names = {x.name for x in uses}  # this call's values are not kept: they may hold its graph
    tables = {n: t for n, t in _on_device(work, inputs.q.device, real).items() if n not in input_names}
    slots = {n: x for n, x in work.slots.items() if n not in input_names}
    source = {s.source: s.name for s in work.plan.slots}
    if RATE in source:
        slots[source[RATE]] = call.rate
    spans = plan if backend.loads else on_host(work.spans)
    return PreparedCall(
        work.plan, spans, geometry, target, MappingProxyType(slots), MappingProxyType(tables),
        tuple((x.name, str(x.source)) for x in uses), backend.loads, source.get(SEED),
        inputs.layout != NATURAL["torch"], real, *_executor(backend, options), backend.stats_kind,
        None if check is None else partial(check, deterministic=options.deterministic),
    )  # fmt: skip


def _executor(backend: Backend, options: Options) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward; most backwards give equal calls equal gradients, whatever is asked."""
    run = backend.executors["torch"]
    if run.backward is None:  # `attend` has refused gradients
        return run.forward, partial(_refused, backend.name)
    backward = run.backward
    if run.nondeterministic and not options.deterministic:
        backward = partial(backward, deterministic=False)
    forward, rows = run.forward, options.rows
    if rows is not None and run.rows:
        forward, backward = partial(forward, rows=rows), partial(backward, rows=rows)
    elif rows is not None:
        forward = partial(with_permutation, forward, rows)
        backward = partial(gradients_with_permutation, backward, rows)
    return forward, backward


def _refused(name: str, *arguments: Any, **more: Any) -> Any:
    raise no_gradients(name)


def refuse_ambiguous(program: CallProgram, tables: Mapping[str, Any]) -> None:
    """Raise where a learned tensor is read by the mask and the score mod: the gradient of one would be missing."""
    mask, score = program.exprs.mask, program.exprs.score
    if mask is None or score is None or not torch.is_grad_enabled():  # no gradient, nothing to miss
        return
    for name, x in tables.items():
        if getattr(x, "requires_grad", False) and name in names_of(mask) and name in names_of(score):
            raise BackwardError(
                f"`{name}` requires a gradient, and both the mask and the score mod read it: no gradient flows through "
                "a mask\n  give the mask a detached copy under another name"
            )


def refuse_gradients(backend: str, tensors: Iterable[Any]) -> None:
    """Raise where a gradient is asked of a backend without any."""
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors):
        raise no_gradients(backend)


def on_host(spans: Spans | DeviceSpans) -> Spans:
    """Spans for the CPU's executors; the tensors are on the CPU already."""
    if isinstance(spans, Spans):
        return spans
    return Spans(spans.bounds.numpy(), spans.count.numpy(), spans.slice_of)


def _on_device(work: TiledPlan | DeviceTiledPlan, device: Any, real: Any) -> Mapping[str, Tensor]:
    """The tables as tensors, those of the host made once for each plan, device and dtype of Floats."""

    if work.shared is None:
        return readable(work.tables, device, real)
    if not (tables := work.tables):
        return {}

    def tensors() -> dict[str, Tensor]:
        return readable({n: uploaded(t, device) for n, t in tables.items()}, device, real)

    return cached_on(work.shared, (device, real), tensors)
