"""Weighted rows in torch: library calls over visible tiles, and the cotangents that any backward of kernels takes.

A kernel divides a row's sum of weighted values by d = divide(total, count). With g = dout / d and s = sum(g * out) the
cotangent of a weight is g @ v - s * divide'(total) + dtotal. So a backward of kernels takes g in the place of dout. The
other two terms, one number a row, take the place of dlse. It reads neither out nor total. Imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from frisket.dsl.evaluate import unroll
from frisket.dsl.ir import SIZES, Expr
from frisket.lowering.aten.expr import TileProgram
from frisket.lowering.derive import backward_of, backward_of_divide
from frisket.lowering.plan import Cotangents, ForwardResults, KernelInputs
from frisket.runtime.attention.weighted import DIVISORS

from .differentiable import DifferentiableCall, attend, value_of

Tensor = Any


@torch.no_grad()
def forward(
    inputs: KernelInputs, q: Tensor, k: Tensor, v: Tensor, *, top: bool = False, softmax_stats: bool = False
) -> tuple[Any, ...]:
    """(out, total, count): the forward of library calls; see `LoopPlan.weighted`."""
    k, v = _unstored(inputs, k, v)
    return attend(DifferentiableCall(inputs, (), recorded=False), q, k, v, None)


def _unstored(inputs: KernelInputs, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values out of the pages of a pool, and values times their scales. Scales of keys are in the score."""
    plan, g = inputs.plan, inputs.geometry
    if plan.pages is not None:
        pages = inputs.tables[plan.pages].long().clamp(0, len(k) - 1)
        k, v = (x[pages].transpose(1, 2).flatten(2, 3)[:, :, : g.kv_len] for x in (k, v))
    if plan.value_scale is not None:
        env = _positions(inputs, v.device)
        first, keys = g.origin[3], torch.arange(g.kv_len, device=v.device)
        env |= {"h": env["h"][:, :: g.heads // g.kv_heads], "k": torch.as_tensor(first).reshape(-1, 1, 1) + keys}
        scale = TileProgram(plan.value_scale, torch.float32, in_place=False)(env, inputs.tables)
        v = v.to(torch.float32) * scale.unsqueeze(-1)
    return k, v


def backward(
    inputs: KernelInputs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: ForwardResults,
    cotangents: Cotangents,
    *,
    grad_names: frozenset[str],
) -> dict[str, Tensor]:
    """The gradients of `grad_names` by the cotangents of a row's sums of values and of weights, one row of tiles at a
    time."""
    real = torch.float64 if q.dtype == torch.float64 else torch.float32
    call = DifferentiableCall(replace(inputs, rows=None), (), recorded=False)
    captured = [x for x in backward_of(inputs.plan).gradients if x.source in grad_names]
    arrays = {"q": q, "k": k, "v": v}
    sums = {n: torch.zeros(x.shape, dtype=real, device=x.device) for n, x in arrays.items()}
    read = {"q": call.queries, "k": call.keys, "v": call.keys}
    add = {"q": call.add_queries, "k": call.add_keys, "v": call.add_keys}
    buffers: list[Any] = [0.0] * len(captured)
    for row in call.rows:
        if not row.pieces:
            continue
        q_part, k_part, v_part = (read[n](row, x).to(real) for n, x in arrays.items())
        g, c = (call.queries(row, x).to(real) for x in (cotangents.dout, cotangents.dlse))
        *of_arrays, values = call.gradients_of_weights(row, q_part, k_part, v_part, g, c, captured)
        for n, part in zip(arrays, of_arrays, strict=True):
            add[n](row, sums[n], part)
        buffers = [total + x for total, x in zip(buffers, values, strict=True)]
    grads = {n: x.to(q.dtype) for n, x in sums.items() if n in grad_names}
    for gradient, total in zip(captured, buffers, strict=True):
        n, size = gradient.source, inputs.tables[gradient.source].shape if gradient.index else ()
        x = torch.as_tensor(total, dtype=real, device=q.device).expand(size)
        grads[n] = grads[n] + x if n in grads else x
    return grads


@dataclass(frozen=True)
class RowCotangents:
    """Cotangents of weighted rows, as a backward of kernels takes them."""

    dout: Tensor  # [batch, heads, q_len, v_dim], divided by the row's divisor
    dtotal: Tensor  # [batch, heads, q_len], with the part that comes through the divisor
    of_divide: dict[str, Tensor]  # the gradients of what `divide` reads, by the plan's names

    @classmethod
    def of(
        cls, inputs: KernelInputs, results: ForwardResults, cotangents: Cotangents, grad_names: frozenset[str]
    ) -> RowCotangents:
        """Derive them from those of out and total; `results` has total as lse, the count of keys as softmax_stats."""
        plan, total, dout, dtotal = inputs.plan, results.lse, cotangents.dout, cotangents.dlse
        dtotal = torch.zeros_like(total) if dtotal is None else dtotal.to(total.dtype)
        # cotangents of rows that see no key may be NaN
        unseen = (total == 0) & (results.out == 0).all(-1)
        dout = torch.where(unseen.unsqueeze(-1), dout.nan_to_num(0.0, 0.0, 0.0), dout)
        dtotal = torch.where(unseen, dtotal.nan_to_num(0.0, 0.0, 0.0), dtotal)
        if plan.divide is None:
            return cls(dout, dtotal, {})
        count = torch.zeros_like(total) if results.softmax_stats is None else results.softmax_stats
        count = count[..., 0] if count.ndim == 4 else count  # a graph of torch adds an axis
        env = {**_positions(inputs, total.device), "total": total, "count": count.long()}

        def value(e: Expr) -> Any:
            x = TileProgram(e, total.dtype, in_place=False)(env, inputs.tables)
            return torch.as_tensor(x, device=total.device).expand(total.shape)

        divide = backward_of_divide(plan)
        divisor = value(unroll(plan.divide))
        empty = (divisor == 0) | (count == 0) if plan.counts else divisor == 0
        g = dout.to(total.dtype) / torch.where(empty, 1.0, divisor).unsqueeze(-1)
        g = torch.where(empty.unsqueeze(-1), 0.0, g)
        s = (g * results.out.to(total.dtype)).sum(-1)
        dtotal = dtotal - torch.where(empty, 0.0, s if divide.slope is None else s * value(divide.slope))
        grads: dict[str, Tensor] = {}
        for x in divide.gradients:
            if x.source not in grad_names:
                continue
            part = torch.where(empty, 0.0, -s * value(x.weight))
            if x.index:
                size = inputs.tables[x.source].shape
                index = tuple(value(e).clamp(0, n - 1) for e, n in zip(x.index, size, strict=True))
                part = total.new_zeros(size).index_put_(index, part, accumulate=True)
            else:
                part = part.sum()
            grads[x.source] = grads[x.source] + part if x.source in grads else part
        return cls(g.to(dout.dtype), dtotal, grads)


def divisor(inputs: KernelInputs, total: Tensor, count: Tensor) -> Tensor:
    """The divisors of rows, by their sums [batch, heads, q_len]; recorded by torch. It reads `divide`, slots,
    tables and shapes of the inputs. Where no key is visible there are no derivatives."""
    float_tables = {n: x for n, x in inputs.tables.items() if x.is_floating_point()}
    tables = {n: x.to(total.device) for n, x in inputs.tables.items()} | float_tables
    # the axes that `value_of` takes, the last two of length 1
    total, count = (x[..., None, None] for x in (total, count))
    env = {n: x[..., None, None] if n in ("b", "h", "q") else x for n, x in _positions(inputs, total.device).items()}
    assert inputs.plan.divide is not None
    value = value_of(inputs.plan.divide, {"total": total}, {**env, "count": count.long()}, tables, count == 0)
    return value.expand(total.shape)[..., 0, 0]


DIVISORS["torch"] = divisor


def _positions(inputs: KernelInputs, device: Any) -> dict[str, Any]:
    """Sizes, slots, and b, h and q in shapes that broadcast to [batch, heads, q_len]."""
    g = inputs.geometry
    starts = [torch.as_tensor(x, device=device).reshape(-1, 1, 1) for x in g.origin[:3]]
    along = [
        torch.arange(n, device=device).reshape([-1 if i == axis else 1 for i in range(3)])
        for axis, n in enumerate((g.batch, g.heads, g.q_len))
    ]
    places = {n: start + x for n, start, x in zip("bhq", starts, along, strict=True)}
    return {**dict(zip(SIZES, g.full, strict=True)), **inputs.slots, **places}
