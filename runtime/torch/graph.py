"""A call of attention as graphs of torch hold it: one operator, and the values beside it. Imports torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from frisket.dsl.errors import ParameterError

from . import operators  # noqa: F401, says what `torch.ops.frisket` is
from .func import FuncAttend
from .op import cast
from .spec import HEAD
from .values import sorted_out

# -- what a graph is written with: traced by Dynamo, so plain Python --------------------------------------------------


def traced_call(
    att: Any, q: Tensor, k: Tensor, v: Tensor, plan: Any, seed: Any, sinks: Any, top: bool, origin: Any, sizes: Any,
    layout: str | None, params: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse, top) of `att(q, k, v, ...)` in a graph."""
    dynamo = torch.compiler.is_dynamo_compiling()
    if plan is not None:
        if dynamo:
            raise ParameterError("a graph of torch plans when it runs: leave out `plan`, give its tables to the call")
        return by_plan(att, q, k, v, plan, seed, sinks, top, origin, sizes, layout, params)
    values = {n: x for n, x in (att.inputs if dynamo else att.constants).items() if n not in params}
    rate = att.options.dropout
    return written(att.spec, rate, q, k, v, seed, att.options.sinks if sinks is None else sinks, top, origin, sizes,
                   layout, {**values, **params})  # fmt: skip


def by_plan(
    att: Any, q: Tensor, k: Tensor, v: Tensor, plan: Any, seed: Any, sinks: Any, top: bool, origin: Any, sizes: Any,
    layout: str | None, params: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse, top) of `att(q, k, v, plan=plan, ...)`, by the values and the place that the plan holds."""
    att.check_planned(q, k, v, plan, origin, sizes, layout, params)
    same = type(att)(plan.host_program.stored_as(None), att.options)
    values = {**plan.given, **params}
    return traced_call(same, q, k, v, None, seed, sinks, top, plan.origin, plan.sizes, layout, values)


def written_call(
    mask: Any, score: Any, options: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, seed: Any, sinks: Any, top: bool,
    origin: Any, sizes: Any, layout: str | None, params: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse, top) of `frisket.attention(q, k, v, mask, score, ...)` in a graph; `options` as a spec begins."""
    if not isinstance(mask, (str, type(None))) or not isinstance(score, (str, type(None))):
        raise ParameterError(
            "in a graph of torch frisket.attention takes a mask and a score mod as texts\n"
            "  or make att = frisket.compile(mask, score) outside, and call that"
        )
    if type(options[0]) not in (int, float, type(None)):
        raise ParameterError(
            "scale is a tensor, and a graph of torch holds it as a number\n"
            "  multiply q by a factor that is learned or changes, and give scale=1"
        )
    if q.is_nested:
        raise ParameterError(
            "in a graph of torch frisket.attention takes no nested tensors\n"
            "  make att = frisket.compile(mask, score) outside, and call that"
        )
    text = mask or ""
    spec = HEAD.format(*options, False, len(text), "-") + text + (score or "")
    return written(spec, options[4], q, k, v, seed, sinks, top, origin, sizes, layout, params)


def written(
    spec: str, rate: float, q: Tensor, k: Tensor, v: Tensor, seed: Any, sinks: Any, top: bool, origin: Any, sizes: Any,
    layout: str | None, params: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One call of the operator."""
    q, k, v = cast(q, k, v)
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        params = {n: x.transpose(1, 2) if n.startswith("scale of") else x for n, x in params.items()}
    spread = type(q).__name__ == "DTensor"
    if spread:
        from . import dtensor as torch_dtensor  # noqa: F401, says what the operators are on them
    if rate and seed is None:
        if spread:
            raise ParameterError("dropout of DTensors needs a seed, the same in every rank and another at every step")
        seed = torch.randint(0, 1 << 31, (), device="cpu")
    items = list(params.items())
    if rate:
        items.append((" seed", seed))
    for what, place in (("origin", origin), ("size", sizes)):
        if place is not None:
            items.extend([(f" {what}{i}", x) for i, x in enumerate(place)])
    tensors, numbers, names = sorted_out(items, "max" if top else "")
    if sinks is not None:
        real = torch.float64 if q.dtype == torch.float64 else torch.float32
        sinks = torch.as_tensor(sinks, dtype=real, device=q.device).expand(q.shape[1])
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is None:
        out, lse, largest, _ = torch.ops.frisket.attend(q, k, v, sinks, tensors, numbers, spec, names)
    else:
        out, lse, largest, _ = FuncAttend.apply((numbers, spec, names), q, k, v, sinks, *tensors)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2) if layout == "bshd" else out, lse, largest


def written_tiles(spec: str, like: Tensor, sizes: Any, block: Any, params: dict[str, Any]) -> Tensor:
    """uint8 [B, H, rows, columns]: the tiles of a mask, on the device of `like`. `sizes` are q_len, kv_len, B, H."""
    tensors, numbers, names = sorted_out(list(params.items()), "")
    found: Tensor = torch.ops.frisket.tiles(like, tensors, numbers, list(sizes), list(block), spec, names)
    return found
