"""Attention inside torch.func: grad, vjp and their like; vmap runs entry by entry of the mapped axis.

An axis that vmap adds is no batch axis: `b` of a mask stays what it was. Imports torch.
"""

from __future__ import annotations

from typing import Any

import torch

from .torch_library import gradient_inputs, no_second


class Attend(torch.autograd.Function):
    """(out, lse, top) of ((numbers, spec, names), q, k, v, sinks, *values)."""

    @staticmethod
    def forward(said: Any, q: Any, k: Any, v: Any, sinks: Any, *values: Any) -> Any:
        numbers, spec, names = said
        return torch.ops.frisket.attend(q, k, v, sinks, list(values), numbers, spec, names)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.said, *given = inputs
        out, lse, top = output
        ctx.save_for_backward(*given, out, lse)
        ctx.mark_non_differentiable(top)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, _: Any) -> Any:
        *given, out, lse = ctx.saved_tensors
        floating = [x is not None and x.is_floating_point() for x in given]
        needed = [n and f for n, f in zip(ctx.needs_input_grad[1:], floating, strict=True)]
        found = iter(Backward.apply(ctx.said, tuple(needed), dout, dlse, out, lse, *given))  # type: ignore[no-untyped-call]
        return None, *(next(found) if need else None for need in needed)

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> Any:
        return _each(Attend, info, dims, args)


class Backward(torch.autograd.Function):
    """The gradients that are needed."""

    @staticmethod
    def forward(said: Any, needed: Any, dout: Any, dlse: Any, out: Any, lse: Any, *given: Any) -> Any:
        q, k, v, sinks, *values = given
        asked = [*needed[:4], *(n for n, x in zip(needed[4:], values, strict=True) if x.is_floating_point())]
        inputs = gradient_inputs(dout, dlse, (q, k, v, sinks), values, out, lse, said, asked)
        return tuple(torch.ops.frisket.attend_backward(*inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return no_second(ctx, *cotangents)

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> Any:
        return _each(Backward, info, dims, args)


def _each(what: Any, info: Any, dims: Any, args: Any) -> Any:
    """One call for every entry of the mapped axis, stacked."""
    rows = []
    for i in range(info.batch_size):
        rows.append(
            what.apply(*(x if d is None or not isinstance(d, int) else x.select(d, i) for x, d in zip(args, dims)))
        )
    return tuple(torch.stack(column) for column in zip(*rows, strict=True)), (0,) * len(rows[0])
