"""Runs calls on FlashAttention 4, on torch tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from frisket.dsl.errors import BackendError, BackwardError
from frisket.grammar.memo import beside
from frisket.lowering.plan import Geometry, LoopPlan, SpanSource, Target

from . import engine
from .call import FlashCall, call_of, check, mods_of
from .tiles import INSTEAD

Tensor = Any


def text(
    plan: LoopPlan, target: Target, g: Geometry, dtype: str, sinks: bool = False, learned: Collection[str] = (),
    spans: SpanSource | None = None,
) -> tuple[str, Target]:  # fmt: skip
    """The functions of mask and score mod, and their target. Where flags say the whole mask, it has no function."""
    placed = frozenset(n for n, x in zip("bhqk", g.origin, strict=True) if type(x) is not int or x)
    return mods_of(plan, placed).text, target


def forward(
    plan: LoopPlan, spans: Any, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor, slots: Mapping[str, Any],
    tables: Mapping[str, Tensor], target: Target, *, sinks: Tensor | None = None, top: bool = False, norm: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(out, lse, None) of a call, with `norm` another None: the engine gives no largest scores, nor lse's rounding."""
    if top:
        raise BackendError(f"FlashAttention 4 does not tell the largest score of a row\n  {INSTEAD}")
    g = geometry
    call = prepared(plan, spans, g, target, slots, tables, q.device, False, True)
    q, k, v = (x.resolve_neg() for x in (q, k, v))
    out, lse = engine.attend(call, g, q, k, v, sinks)
    return (out, lse, None, None) if norm else (out, lse, None)


def backward(
    plan: LoopPlan, spans: Any, geometry: Geometry, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    dout: Tensor, dlse: Tensor | None, slots: Mapping[str, Any], tables: Mapping[str, Tensor], target: Target, *,
    wanted: frozenset[str], sinks: Tensor | None = None, deterministic: bool = True,
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients of q, k and v, of those that are wanted; sinks are part of lse already."""
    g = geometry
    call = backward_call(plan, spans, g, q.device, slots, tables, target, wanted=wanted, deterministic=deterministic)
    if dlse is not None and target.arch == "sm_100" and g.head_dim == 256:
        raise BackwardError(f"FlashAttention 4 has no gradient of lse for heads of 256 on Blackwell\n  {INSTEAD}")
    q, k, v, out, dout = (x.resolve_neg() for x in (q, k, v, out, dout.to(q.dtype)))
    found = engine.gradients(call, q, k, v, out, lse, dout, dlse, deterministic)
    return {n: x for n, x in zip("qkv", found, strict=True) if n in wanted}


def backward_call(
    plan: LoopPlan, spans: Any, geometry: Geometry, device: Any, slots: Mapping[str, Any], tables: Mapping[str, Tensor],
    target: Target, *, wanted: Collection[str], deterministic: bool = True,
) -> FlashCall:  # fmt: skip
    """The call of the backward. Raises where the engine lacks wanted gradients; asked before the forward, too."""
    if why := refuses_gradients(plan, geometry, "", (), wanted):
        raise BackwardError(f"{why}\n  {INSTEAD}")
    return prepared(plan, spans, geometry, target, slots, tables, device, True, deterministic)


def refuses_gradients(plan: LoopPlan, g: Geometry, dtype: str, shapes: Any, wanted: Collection[str]) -> str:
    """A reason why the backward has not all of the wanted gradients; "" where it has."""
    sources = {t.name: t.source for t in plan.tables} | {s.name: str(s.source) for s in plan.slots}
    names = [source for name, source in sources.items() if name in wanted]
    return f"FlashAttention 4 has no gradient of {', '.join(names)}" if names else ""


def prepared(
    plan: LoopPlan, spans: Any, g: Geometry, target: Target, slots: Mapping[str, Any], tables: Mapping[str, Tensor],
    device: Any, gradients: bool, deterministic: bool,
) -> FlashCall:  # fmt: skip
    """The call of a direction, kept beside the plan of a step as long as slots and tables are the same objects."""

    def made() -> FlashCall:
        return call_of(plan, spans, g, target, slots, tables, device, gradients=gradients, deterministic=deterministic)

    check(g)
    given = tuple(tables.values())
    counted = not any(x.requires_grad or x.is_inference() for x in given)  # writes to tables, by torch
    if not (counted and all(isinstance(x, (bool, int, float)) for x in slots.values())):
        return made()
    numbers, versions = tuple(slots.items()), tuple((id(x), x._version) for x in given)
    key = "flash", plan, g, target, numbers, versions, device, gradients, deterministic
    found: FlashCall = beside(spans, key, lambda: (made(), given))[0]  # tables are known by where they are
    return found
