"""The autograd function of attention on torch tensors. Imports torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from frisket.dsl.errors import BackwardError


class Attend(torch.autograd.Function):
    """(out, lse, top) of (job, q, k, v, sinks, *values)."""

    @staticmethod
    def forward(ctx: Any, job: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Any, *values: Tensor) -> Any:
        out, lse, top = job.forward(q, k, v, sinks, *values)
        ctx.job = job
        ctx.save_for_backward(q, k, v, sinks, out, lse, *values)
        ctx.set_materialize_grads(False)
        if top is not None:
            ctx.mark_non_differentiable(top)
        return out, lse, top

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        dout, dlse, _ = cotangents
        saved = ctx.saved_tensors
        given = saved[:4] + saved[6:]  # q, k, v, sinks and values
        if dout is None and dlse is None:
            return (None,) * (1 + len(given))
        with torch.no_grad():
            grads = gradients(ctx.job, saved, dout, dlse, ctx.needs_input_grad[1:])
        if torch.is_grad_enabled():  # a graph of the backward is asked for
            grads = list(_Once.apply(grads, dout, dlse, *given))
        return None, *grads


def gradients(job: Any, saved: tuple[Any, ...], dout: Any, dlse: Any, needed: Any) -> list[Any]:
    """Gradients of q, k, v, sinks and values, in this order, None where not `needed`."""
    q, k, v, sinks, out, lse, *values = saved
    names = ("q", "k", "v", "sinks", *job.names)
    wanted = frozenset(n for n, need in zip(names, needed, strict=True) if need)
    dout = out.new_zeros(()).expand(out.shape) if dout is None else dout
    found: dict[str, Any] = {}
    if rest := wanted - {"sinks"}:
        found = job.backward(rest, saved, dout, dlse)
    if "sinks" in wanted:
        found = {**found, "sinks": _dsinks(sinks, out, lse, dout, dlse)}
    given = (q, k, v, sinks, *values)
    return [found[n].to(x) if n in wanted else None for n, x in zip(names, given, strict=True)]


def _dsinks(sinks: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Any) -> Tensor:
    """Of one more logit of every row, whose weight is exp(sink - lse) and whose value is 0."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    weight = torch.where(lse == -torch.inf, 0.0, torch.exp(sinks[:, None] - lse))
    return -(weight * delta).sum((0, 2))


class _Once(torch.autograd.Function):
    """Gradients that have none themselves."""

    @staticmethod
    def forward(ctx: Any, grads: list[Any], *inputs: Any) -> Any:
        return tuple(None if g is None else g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise BackwardError(
            "a gradient of a gradient of attention is asked for, and there is none\n"
            "  leave out create_graph=True, or write attention with dense operations where second derivatives matter"
        )
