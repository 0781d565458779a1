"""Runs a compiled attention on torch tensors, with gradients.

`prepare` does once what a call needs beside its tensors; a `Ready` then runs any number of calls of the same shapes
and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from frisket.dsl.errors import BackwardError
from frisket.dsl.types import FLOAT
from frisket.grammar.memo import beside
from frisket.lowering.plan import LIVE, RATE, SEED, Geometry, LoopPlan, Spans, Target
from frisket.lowering.planner.planner import DeviceSpans
from frisket.runtime.backends.base import RECORDS, Backend, no_gradients
from frisket.runtime.backends.cpp.torch import lse_of
from frisket.runtime.backends.interpreters import warn_slow
from frisket.runtime.backends.registry import library
from frisket.runtime.backends.stages import compiled
from frisket.runtime.calls.arrays import NATURAL, uploaded
from frisket.runtime.calls.empty import nothing
from frisket.runtime.calls.options import Options, seed_of, sinks_of
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.calls.request import Request
from frisket.runtime.calls.stored_kv import refuse_gradients as refuse_stored
from frisket.runtime.calls.stored_kv import turned
from frisket.runtime.machine.cpp_build import BuildError, fall_back
from frisket.runtime.machine.parameters import names_of
from frisket.runtime.machine.settings import Settings
from frisket.runtime.plans.call import Call
from frisket.runtime.plans.compiled import Work
from frisket.runtime.plans.device import DeviceWork, FlatPlan

from .autograd import Attend

Tensor = Any


@dataclass(frozen=True, eq=False)
class Ready:
    """A prepared call: everything but its tensors. `live` names the tables and slots of the plan that come with every
    call, and whose values they are."""

    plan: LoopPlan
    spans: Any
    geometry: Geometry
    target: Target
    slots: Mapping[str, Any]  # both read-only: executors may keep what they make of them
    tables: Mapping[str, Tensor]
    live: tuple[tuple[str, str], ...]
    loaded: bool  # whether kernels load live values themselves, in any dtype: nothing waits for the device
    seed: str | None  # the slot of dropout's seed
    turned: bool  # whether the axes of the arrays are (batch, length, heads, dim)
    real: Any  # the dtype of scores
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    rows: str  # what the backward knows of each row beside lse: see `Backend.rows`
    step: FlatPlan | None = None  # without values: every call has a plan of its own, from the tables it brings

    @property
    def normed(self) -> bool:
        """Whether its backward knows more of each row than lse, which rounds away what large scores differ by."""
        return self.rows != ""

    @property
    def stored(self) -> bool:
        """Whether keys and values are: no gradient flows then."""
        plan = self.plan
        return bool(self.geometry.kv_dtype or plan.pages or any(t.source in LIVE for t in plan.tables))

    def of(self, plan: FlatPlan) -> Ready:
        """A prepared call for the plan of another step: other tables of a device, of the same shapes and dtypes."""
        tables = {n: t for n, t in plan.tables().items() if n in self.tables}
        return self._with(plan, MappingProxyType(_readable(tables, plan.device, self.real)), None)

    def bare(self, plan: Any) -> Ready:
        """A prepared call without what belongs to one step."""
        return self._with(None, dict.fromkeys(self.tables), plan.again({}))

    def alone(self) -> Ready:
        """A prepared call without the plan, which keeps it: in a ring, tables of a step would outlive the step."""
        return self._with(None, self.tables, None)

    def beside(self, plan: Any) -> Ready:
        return self._with(plan, self.tables, None)

    def _with(self, spans: Any, tables: Mapping[str, Any], step: FlatPlan | None) -> Ready:
        made = object.__new__(Ready)
        made.__dict__.update(self.__dict__, spans=spans, tables=tables, step=step)
        return made

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, values: tuple[Tensor, ...], seed: Any, sinks: Tensor | None, top: bool,
        saving: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        """(out, lse, top), with `saving` norm too; `values` are those of `live`, sinks [heads]. Gradients flow to all
        of them."""
        if torch._C._is_torch_function_mode_enabled():  # a default device, say: what is made here is made where q is
            with torch._C.DisableTorchFunction():
                return self(q, k, v, values, seed, sinks, top, saving)
        if self.turned:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        given = q, k, v, sinks, *values
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
            if self.stored:
                refuse_stored(self.geometry.kv_dtype, {source for _, source in self.live})
            out, *rest = Attend.apply(self, seed, top, *given)  # type: ignore[no-untyped-call]
        else:
            out, *rest = self.saving(seed, top, *given) if saving else self.run(seed, top, *given)
        return out.transpose(1, 2) if self.turned else out, *rest

    def again(
        self, q: Tensor, k: Tensor, v: Tensor, values: Any, seed: Any, options: Options, sinks: Any, top: bool,
        saving: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        """A call as users write it, of arrays that are known to fit."""
        sinks = options.sinks if sinks is None else sinks
        seed = seed_of(seed, options.dropout, "torch")
        if sinks is not None:
            sinks = sinks_of(sinks, self.geometry.heads, "torch", "float64" if self.double else "float32", q.device)
        return self(q, k, v, values, seed, sinks, top, saving)

    @property
    def double(self) -> bool:
        return "float64" in str(self.real)

    def run(self, seed: Any, top: bool, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *values: Tensor) -> Any:
        slots, tables = self.values(q.device, seed, values)
        given = self.plan, self.spans, self.geometry, q, k, v, slots, tables, self.target
        return self.forward(*given, sinks=sinks, top=top)  # largest scores that nobody asks for take time

    def saving(self, seed: Any, top: bool, q: Tensor, k: Tensor, v: Tensor, sinks: Any, *values: Tensor) -> Any:
        """The results of `run`, and what the backward knows of each row beside lse; None where that is nothing."""
        if not self.normed and sinks is None:
            return *self.run(seed, top, q, k, v, sinks, *values), None
        slots, tables = self.values(q.device, seed, values)
        given = self.plan, self.spans, self.geometry, q, k, v, slots, tables, self.target
        return self.forward(*given, sinks=sinks, top=top, norm=True)

    def parted(self, seed: Any, *values: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """(out, lse in float64, what the backward knows of each row) of attention to a part of the keys."""
        slots, tables = self.values(values[0].device, seed, values[4:])
        common = self.plan, self.spans, self.geometry, *values[:3], slots, tables, self.target
        out, lse, _, norm = self.forward(*common, sinks=values[3], top=False, norm=True)
        if self.rows != "offset":
            return out, lse.double() + norm, None
        return out, lse_of(self.plan, norm, lse), norm

    def gradients(
        self, seed: Any, wanted: frozenset[str], saved: tuple[Any, ...], dout: Tensor, dlse: Tensor | None,
        share: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Gradients by "q", "k", "v" and the names of tables and slots; `saved` is q, k, v, sinks, out, lse, what
        `saving` gave of each row, and the values. `share`: out and lse are of other keys too, and these have that part
        of each row's weights."""
        q, k, v, sinks, out, lse, norm, *values = saved
        slots, tables = self.values(q.device, seed, values)
        more = {"norm": norm} if self.normed else {}
        if share is not None and self.rows != "low":  # there lse and norm say all
            more["share"] = share
        found: dict[str, Tensor] = self.backward(
            self.plan, self.spans, self.geometry, q, k, v, out, lse, dout, dlse, slots, tables, self.target,
            wanted=wanted, sinks=sinks, **more,
        )  # fmt: skip
        return found

    def values(self, device: Any, seed: Any, values: Any) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """Slots and tables, as kernels take them."""
        slots, tables = self.slots, self.tables
        if self.seed is not None:
            slots = {**slots, self.seed: seed}
        if self.live:
            slots, tables = dict(slots), dict(tables)
            for (name, source), x in zip(self.live, values, strict=True):
                if source in LIVE:
                    tables[name] = x
                elif self.loaded:
                    (tables if x.ndim else slots)[name] = x.to(device)
                elif x.ndim:
                    tables[name] = x.to(device, self.real)
                else:
                    slots[name] = float(x)
        return slots, tables


def cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The arrays in autocast's dtype, as torch's own attention; float64 stays as it is."""
    kind = q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (x if x.dtype == torch.float64 or not x.is_floating_point() else x.to(dtype) for x in (q, k, v))
    return q, k, v


NUMBERS = (bool, int, float)
KEPT = 64  # kinds of calls


def attend(att: Any, request: Request, saving: bool = False) -> tuple[Any, ...]:
    """(out, lse, top) of `att(q, k, v, ...)`; with `saving`, and no gradients, norm too: see `Ready.saving`."""
    q, k, v = cast(request.q, request.k, request.v)
    settings, plan, params = Settings.read(), request.plan, request.params
    key = key_of(att, (q, k, v), request, settings)
    kept = att.ready if plan is None else getattr(plan, "ready", att.ready)
    ready = _found(att, key, plan, params, kept)
    if ready is not None:
        values = att.learned if plan is None else plan.given
        found = [params[n] if n in params else values[n] for _, n in ready.live]
        if ready.turned:
            found = [turned(n, x, "bshd", "bhsd") for (_, n), x in zip(ready.live, found, strict=True)]
        return ready.again(q, k, v, found, request.seed, att.options, request.sinks, request.top, saving)
    call = att.call(request._replace(q=q, k=k, v=v))
    if call.geometry.vacant:
        empty = nothing(call, [x for n, x in {**att.learned, **params}.items() if _learned(att, n, x)])
        return (*empty, None) if saving else empty
    if not RECORDS[call.backend].has_gradients("torch"):
        refuse_gradients(call.backend, (q, k, v, call.sinks, *params.values(), *att.learned.values()))
    if RECORDS[call.backend].oracle or settings.check:
        result: tuple[Any, ...] = att.run(call)
        att.check_if_asked(call, result)
        return (*result, None) if saving else result
    return run(call, _remembered(call, att, plan, key, kept), saving)


def kept_ready(att: Any, request: Request) -> Ready:
    """The prepared call that `att(q, k, v, ...)` runs."""
    key = key_of(att, request[:3], request, Settings.read())
    if (ready := _found(att, key, request.plan, request.params, att.ready)) is not None:
        return ready
    return _remembered(att.call(request), att, request.plan, key, att.ready)


def _found(att: Any, key: Any, plan: Any, params: Mapping[str, Any], kept: dict[Any, Any]) -> Ready | None:
    """The remembered answer for such a call; of calls whose masks read tables of a device, all but those."""
    ready: Ready | None = kept.get(key)
    if plan is None:
        if ready is None or ready.step is None:
            return ready
        given = {n: params[n] if n in params else att.learned[n] for n, *_ in ready.step.key.given}
        return ready.of(ready.step.again(given))
    if ready is None and key is not None and getattr(plan, "common", None) is not None:
        first = plan.common.ready.get(key)
        if first is not None:
            own = plan.stored_as(first.step.host_program.stored)
            ready = kept[key] = first.of(own).alone()  # for the layers to come
    return ready.beside(plan) if ready is not None and ready.loaded else ready


def _remembered(call: Call, att: Any, plan: Any, key: Any, kept: dict[Any, Any]) -> Ready:
    ready = prepare(call, att.options)
    if key is None:
        return ready
    if plan is None and ready.loaded and call.plan.on_device and not call.plan.by_table:
        ready = ready.beside(call.plan.again({}))  # calls to come bring values of their own, and this one's are let go
    if plan is not None or not call.plan.by_table:
        _keep(kept, key, ready if plan is None or not ready.loaded else ready.alone())
    if ready.loaded and call.plan.common is not None:
        _keep(att.ready if plan is None else plan.common.ready, key, ready.bare(call.plan))
    return ready


def _keep(kept: dict[Any, Any], key: Any, ready: Ready) -> None:
    kept[key] = ready
    while len(kept) > KEPT:
        kept.pop(next(iter(kept)), None)  # another thread may have taken it


def execute(call: Call, options: Options) -> tuple[Any, ...]:
    """(out, lse, top) of a checked call."""
    return run(call, prepare(call, options))


def run(call: Call, ready: Ready, saving: bool = False) -> tuple[Any, ...]:
    given = {**call.plan.given, **call.live}
    values = tuple(given[n] for _, n in ready.live)
    return ready(*call.given.qkv, values, call.seed, call.sinks, call.top, saving)


def key_of(att: Any, qkv: tuple[Tensor, ...], request: Request, settings: Settings) -> Any:
    """The key of the `Ready` of a call; None where the values of a table are part of it."""
    if settings.check or att.ambiguous:
        return None
    plan, origin, sizes = request.plan, request.origin, request.sizes
    said: list[Any] = []
    for name, x in request.params.items():
        if type(x) in NUMBERS:
            said.append((name, type(x), x))
        elif (name in LIVE and hasattr(x, "shape")) or _learned(att, name, x):
            said.append((name, x.shape, x.dtype, x.device))
        elif plan is None and _stays(x, qkv[0].device):
            said.append((name, x.shape, x.dtype, "planned there"))
        else:
            return None
    if origin is not None or sizes is not None:
        if not all(x is None or isinstance(x, tuple | list) for x in (origin, sizes)):
            return None
        said.append((None if origin is None else tuple(origin), None if sizes is None else tuple(sizes)))
        if any(type(x) is not int for place in said[-1] if place for x in place):
            return None
    q, k, v = qkv
    return (
        torch.get_float32_matmul_precision(),  # Triton's products of float32 are by it
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, request.layout,
        settings.backend, settings.show, None if plan is None else (att.options, att.program.exprs), *said,
    )  # fmt: skip


def _learned(att: Any, name: str, x: Any) -> bool:
    return name in att.program.learnable and hasattr(x, "requires_grad") and x.is_floating_point()


def _stays(x: Any, device: Any) -> bool:
    """Whether this is a table that is planned where it lives, beside the queries."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.ndim > 0 and x.device == device and not x.is_cpu


def prepare(call: Call, options: Options) -> Ready:
    """The prepared executor of calls of these shapes.

    Library calls replace a native kernel that cannot be built, unless the backend was named."""
    ready, run = _prepared(call, options), RECORDS[call.backend].executors["torch"]
    if run.build is None or options.backend or Settings.read().backend:
        return ready
    try:
        run.build(ready.plan, ready.geometry, ready.target, call.given.q.dtype, call.given.k.dtype)
    except BuildError as error:
        fall_back(error)
        return _prepared(replace(call, backend=library("torch")), options)
    made: Ready = object.__new__(Ready)
    made.__dict__.update(ready.__dict__, backward=partial(_or_library, ready.backward))
    return made


def _or_library(backward: Callable[..., Any], *given: Any, norm: Any = None, **more: Any) -> dict[str, Tensor]:
    """The gradients of a native backward, or of library calls where the native one cannot be built."""
    try:
        found: dict[str, Tensor] = backward(*given, norm=norm, **more)
    except BuildError as error:
        fall_back(error)
        found = RECORDS[library("torch")].executor("torch", gradients=True)(*given, **more)
    return found


def _prepared(call: Call, options: Options) -> Ready:
    """Float tables and scalars that were given to a flat plan are live."""
    given, geometry, plan = call.given, call.geometry, call.plan
    backend = RECORDS[call.backend]
    if backend.interpreted:
        warn_slow(call.backend, geometry)
    found = compiled(call, options, given.q.device)
    target, made = found.target, found.work
    named = {n for n, x in plan.given.items() if x.is_floating_point()}
    real = torch.float64 if given.dtype == "float64" else torch.float32
    wanted: list[Any] = [*made.plan.tables, *made.plan.slots]
    uses = [x for x in wanted if x.source in LIVE or (x.type is FLOAT and x.source in named)]
    live = {x.name for x in uses}  # this call's values are not kept: they may hold its graph
    tables = {n: t for n, t in _on_device(made, given.q.device, real).items() if n not in live}
    slots = {n: x for n, x in made.slots.items() if n not in live}
    source = {s.source: s.name for s in made.plan.slots}
    if RATE in source:
        slots[source[RATE]] = call.rate
    spans = plan if backend.loads else on_host(made.spans)
    return Ready(
        made.plan, spans, geometry, target, MappingProxyType(slots), MappingProxyType(tables),
        tuple((x.name, str(x.source)) for x in uses), backend.loads, source.get(SEED),
        given.layout != NATURAL["torch"], real, *_executor(backend, options.deterministic), backend.rows,
    )  # fmt: skip


def _executor(backend: Backend, deterministic: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward; most backwards give equal calls equal gradients, whatever is asked."""
    run = backend.executors["torch"]
    if run.backward is None:  # `attend` has refused gradients
        return run.forward.function, partial(_refused, backend.name)
    backward = run.backward.function
    if run.nondeterministic and not deterministic:
        backward = partial(backward, deterministic=False)
    return run.forward.function, backward


def _refused(name: str, *given: Any, **more: Any) -> Any:
    raise no_gradients(name)


def refuse_ambiguous(program: CallProgram, tables: Mapping[str, Any]) -> None:
    """Raise where a learned tensor is read by the mask and the score mod: the gradient of one would be missing."""
    mask, score = program.exprs
    if mask is None or score is None or not torch.is_grad_enabled():
        return
    for name, x in tables.items():
        if getattr(x, "requires_grad", False) and name in names_of(mask) and name in names_of(score):
            raise BackwardError(
                f"`{name}` requires a gradient, and the mask reads it beside the score mod: no gradient flows through "
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


def _on_device(work: Work | DeviceWork, device: Any, real: Any) -> Mapping[str, Tensor]:
    """The tables as tensors, those of the host made once for each plan, device and dtype of Floats."""

    if work.inputs is None:
        return _readable(work.tables, device, real)
    tables = work.tables

    def made() -> dict[str, Tensor]:
        return _readable({n: uploaded(t, device) for n, t in tables.items()}, device, real)

    return beside(work.inputs, (device, real), made)


def _readable(tables: Mapping[str, Tensor], device: Any, real: Any) -> dict[str, Tensor]:
    return {n: t.to(device, real) if t.is_floating_point() else t.to(device) for n, t in tables.items()}
