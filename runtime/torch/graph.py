"""Writes a call into a graph of torch, as one operator: under Dynamo, make_fx or torch.func. Imports torch.

Graphs of torch.fx.symbolic_trace hold the call as a node of a Python function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import Proxy

from frisket.dsl.errors import ParameterError
from frisket.runtime.attention import merge
from frisket.runtime.attention.weighted import Sums, summed
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.calls.arrays import WORDS, constant, scale_of
from frisket.runtime.calls.options import CallArgs
from frisket.runtime.machine.caller import leave

from . import operators  # noqa: F401, says what `torch.ops.frisket` is
from .autograd import has_tangents, refuse_tangents
from .op import cast
from .running import RecordedCall, kind_of, operator, reserved, sorted_out
from .spec import HEAD, attention_of

# -- what a graph is written with: traced by Dynamo, so plain Python --------------------------------------------------


Results = tuple[Tensor, Tensor | None, Tensor | None]  # out, lse, top: None unless wanted


def attend(att: Any, request: CallArgs, rows: bool = True) -> Results:
    """(out, lse, top) of a call in a graph; without `rows`, lse and top may be None."""
    dynamo = torch.compiler.is_dynamo_compiling()
    if request.plan is not None:
        if dynamo:
            raise ParameterError("a graph of torch plans when it runs: leave out `plan`, give its tables to the call")
        return by_plan(att, request, rows)
    params, sinks = request.params, att.options.sinks if request.sinks is None else request.sinks
    values = {n: x for n, x in (att.inputs if dynamo else att.constants).items() if n not in params}
    rate, backend = att.options.dropout, att.options.backend
    return written(att.spec, rate, backend, request, sinks, {**values, **params}, rows)


def sums(att: Any, request: CallArgs) -> tuple[Tensor, Sums]:
    """(out, sums) of a call in a graph."""
    if not torch.compiler.is_dynamo_compiling():
        return summed(att, request, attend)
    params = {**{n: x for n, x in att.inputs.items() if n not in request.params}, **request.params}
    arrays, place = (request.q, request.k, request.v), (request.origin, request.sizes, request.layout)
    out, *rest = _sums_by_text(att.spec, arrays, request.seed, place, tuple(params), *_values(params))
    return out, Sums(*rest)


def _values(params: Mapping[str, Any]) -> list[Any]:
    """The values of a call in a graph, which holds Floats as constants."""
    return [constant(x) if isinstance(x, float) else x for x in params.values()]


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _sums_by_text(
    spec: str, arrays: tuple[Any, ...], seed: Any, place: tuple[Any, Any, Any], names: tuple[str, ...], *values: Any
) -> tuple[Tensor, ...]:
    """`sums` of the attention that the text `spec` says. Dynamo does not trace it; what records its graph does."""
    params = dict(zip(names, values, strict=True))
    att = attention_of(spec, tuple((n, *kind_of(x)) for n, x in params.items() if not reserved(n)))
    q, k, v = arrays
    out, rest = summed(att, CallArgs(q, k, v, None, seed, None, True, *place, params=params), attend)
    return out, *rest


def merged_sums(
    parts: Any, divide: str | None, layout: str | None, origin: Any, sizes: Any, params: Mapping[str, Any]
) -> tuple[Tensor, Sums]:
    """`frisket.merge_sums` in a graph of Dynamo."""
    flat = tuple([(out, *of_part) for out, of_part in parts])
    out, *rest = _merged_by_text(flat, divide, (layout, origin, sizes), tuple(params), *_values(params))
    return out, Sums(*rest)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _merged_by_text(
    parts: Any, divide: str | None, place: tuple[Any, Any, Any], names: tuple[str, ...], *values: Any
) -> tuple[Tensor, ...]:
    pairs = [(out, of_part) for out, *of_part in parts]
    layout, origin, sizes = place
    params = dict(zip(names, values, strict=True))
    merged: tuple[Any, Sums] = merge.merged_sums(pairs, divide, layout, origin, sizes, params)
    return merged[0], *merged[1]


def by_plan(att: Any, request: CallArgs, rows: bool) -> Results:
    """(out, lse, top) of a call with a plan, by the values and the place that the plan holds."""
    att.check_planned(request)
    plan: Any = request.plan
    same = type(att)(plan.host_program.stored_as(None), att.options)
    values = {**plan.device_values, **request.params}
    return attend(same, request._replace(plan=None, origin=plan.origin, sizes=plan.sizes, params=values), rows)


def written_call(texts: tuple[Any, ...], options: tuple[Any, ...], request: CallArgs, rows: bool) -> Results:
    """(out, lse, top) of `frisket.attention(q, k, v, mask, score, ...)` in a graph; `texts` are those of mask, score
    mod, weight and divisor, and `options` as a spec begins."""
    if not all(isinstance(x, (str, type(None))) for x in texts):
        raise ParameterError(
            "in a graph of torch frisket.attention takes a mask, a score mod and a weight as texts\n"
            "  or make att = frisket.compile(mask, score) outside, and call that"
        )
    scale = options[0]
    # a graph holds the scale of an attention as a number; Dynamo reads a number of numpy as an array
    if isinstance(scale, (Tensor, np.ndarray)) and not scale.ndim:
        request, scale = request._replace(q=request.q * torch.as_tensor(scale)), 1.0
    options = (scale_of(scale, known=True), *options[1:])
    if request.q.is_nested:
        raise ParameterError(
            "in a graph of torch frisket.attention takes no nested tensors\n"
            "  make att = frisket.compile(mask, score) outside, and call that"
        )
    written_texts = [x or "" for x in texts]
    spec = HEAD.format(*options, False, tuple([len(x) for x in written_texts]), ()) + "".join(written_texts)
    return written(spec, options[4], options[2], request, request.sinks, request.params, rows)


def written(
    spec: str,
    rate: float,
    backend: str | None,
    request: CallArgs,
    sinks: Any,
    params: Mapping[str, Any],
    rows: bool = True,
) -> Results:
    """One call of an operator; `rate` is the dropout rate. Where the call brings no `sinks` and `params`, they are the
    attention's."""
    q, k, v = cast(request.q, request.k, request.v)
    layout, seed = request.layout, request.seed
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        params = {n: x.transpose(1, 2) if n.startswith("scale of") else x for n, x in params.items()}
    spread = any(type(x).__name__ == "DTensor" for x in (q, k, v, sinks, *params.values()))
    if spread:
        from . import dtensor as torch_dtensor  # noqa: F401, says what the operators are on them

        # Graphs of ranks differ, and torch's cache of compiled graphs would give one rank the graph of another.
        params = {**params, " rank": torch.distributed.get_rank()}
    if rate and seed is None:
        if spread:
            raise ParameterError("dropout of DTensors needs a seed, the same in every rank and another at every step")
        # a tensor of the graph: each run draws again
        seed = torch.randint(0, 1 << 31, (), device="cpu")
    items = list(params.items())
    if rate:
        items.append((" seed", seed))
    for what, place in (("origin", request.origin), ("size", request.sizes)):
        if place is not None:
            items.extend([(f" {what}{i}", x) for i, x in enumerate(place)])
    grad_names = ""  # is_exporting() is True in all of Dynamo 2.11
    compiled = torch.compiler.is_compiling() and not torch.compiler._is_exporting_flag
    if compiled and torch.is_grad_enabled():
        learned = [n for n, x in items if isinstance(x, Tensor) and x.requires_grad]
        if learned or any(isinstance(x, Tensor) and x.requires_grad for x in (q, k, v, sinks)):
            grad_names = ":" + ":".join(learned)
    host = "host" if q.device.type != "cpu" and _reads_host(spec, rate, backend, items, q.device) else ""
    tensors, numbers, names = sorted_out(items, ("max" if request.top else "") + host + grad_names)
    if sinks is not None:
        real = torch.float64 if q.dtype == torch.float64 else torch.float32
        sinks = torch.as_tensor(sinks, dtype=real, device=q.device).expand(q.shape[1])
    lse: Tensor | None
    largest: Tensor | None
    # only inside of torch.func do the operators have a rule for tangents
    transformed = forward_ad._current_level >= 0 and _transformed()
    if forward_ad._current_level >= 0 and torch.compiler.is_dynamo_compiling() and (tensors or not transformed):
        # tangents are laid out by the entries of tables, and forward_ad's are lost in operators
        return leave(written, spec, rate, backend, request, sinks, params, rows)  # type: ignore[no-any-return]
    if forward_ad._current_level >= 0 and not transformed and has_tangents(q, k, v, sinks, *tensors):
        if torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling():
            refuse_tangents(q, k, v, sinks, *tensors)  # what AOTAutograd compiles runs without them
        out, lse, largest, _ = RecordedCall((numbers, spec, names), [q, k, v, sinks, *tensors]).results()
        return out.transpose(1, 2) if layout == "bshd" else out, lse, largest
    # torch.func.grad, which enables gradients too, is not seen by requires_grad
    if compiled and not (torch.is_grad_enabled() or spread or rows or request.top):
        alone = operator("attend_alone", names)
        out, lse, largest = alone(q, k, v, sinks, tensors, numbers, spec, names), None, None
    else:
        out, lse, largest, _ = operator("attend", names)(q, k, v, sinks, tensors, numbers, spec, names)
    return out.transpose(1, 2) if layout == "bshd" else out, lse, largest


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _transformed() -> bool:
    """Whether a transform of torch.func is around the call. Dynamo enters transforms as it traces, and guards them."""
    return torch._C._functorch.maybe_current_level() is not None


def _reads_host(
    spec: str, rate: float, backend: str | None, items: list[tuple[str, Any]], device: torch.device
) -> bool:
    """Whether no CUDA graph may hold a call on a GPU. Such a call reads values of tensors on the host, or copies
    tensors from the host. A call with Ints, such as positions, is one too: each value would need a graph."""
    if rate or (backend is not None and not RECORDS[backend].loads):  # dropout reads its seed
        return True
    for _, x in items:
        if isinstance(x, Tensor):
            if x.device != device:
                return True
        elif not isinstance(x, (bool, float)):  # torch's graph holds Bools and Floats as constants
            return True
    scalars = [(n, x) for n, x in items if isinstance(x, Tensor) and not x.ndim]
    if not scalars:
        return False
    kinds = tuple([(n, *kind_of(x)) for n, x in items if not reserved(n)])
    loaded = loaded_scalars(spec, kinds)
    return not all(x.is_floating_point() and n in loaded for n, x in scalars)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def loaded_scalars(spec: str, kinds: tuple[tuple[str, int, type], ...]) -> tuple[str, ...]:
    """The Float parameters of the score mod alone, whose values kernels load. The host reads the values of all other
    scalars."""
    return tuple(sorted(attention_of(spec, kinds).program.learnable))


def written_tiles(spec: str, like: Tensor, sizes: Any, block: Any, params: dict[str, Any]) -> Tensor:
    """uint8 [B, H, rows, columns]: the tiles of a mask, on the device of `like`. `sizes` are q_len, kv_len, B, H."""
    tensors, numbers, names = sorted_out(list(params.items()), "")
    return torch.ops.frisket.tiles(like, tensors, numbers, list(sizes), list(block), spec, names)  # type: ignore[no-any-return]


# -- a node of torch.fx.symbolic_trace ----------------------------------------------------------------


def record(att: Any, request: CallArgs, lse: bool) -> Any:
    """The Proxy of `att(q, k, v, ...)`: its node holds the attention as a text and tables as constants of the graph."""
    q, k, v, plan, seed, sinks, top, origin, sizes, layout, params = request
    if plan is not None:
        raise ParameterError("a graph of torch plans when it runs: leave out `plan`, give its tables to the call")
    sinks = att.options.sinks if sinks is None else sinks
    options = {"origin": origin, "sizes": sizes, "layout": layout, "return_lse": lse or None}
    options |= {"seed": seed, "sinks": sinks, "return_max": top or None}
    keywords = {n: x for n, x in att.inputs.items() if n not in params}
    keywords |= {WORDS.get(n, n): x for n, x in params.items()} | {n: x for n, x in options.items() if x is not None}
    # arguments of a node may be tensors, not arrays of numpy
    keywords = {n: torch.tensor(x) if isinstance(x, np.ndarray) else x for n, x in keywords.items()}
    tracer = next(x.tracer for x in (q, k, v, *keywords.values()) if isinstance(x, Proxy))
    return tracer.create_proxy("call_function", attend_by_text, (att.spec, q, k, v), keywords)


def attend_by_text(spec: str, q: Any, k: Any, v: Any, /, **options: Any) -> Any:
    """Call the attention that the text `spec` says; nodes of graphs call this function."""
    return attention_of(spec, ())(q, k, v, **options)
