"""Statistics of weights on torch tensors, in torch's own operators over one row of tiles at a time. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from frisket.dsl.errors import ParameterError
from frisket.lowering.plan import Geometry
from frisket.runtime.attention.statistics import Statistics, Wanted
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.calls.arrays import in_graph
from frisket.runtime.calls.options import CallArgs
from frisket.runtime.machine.cpp_build import BuildError, fall_back

from .autograd import has_tangents
from .differentiable import DifferentiableCall, Row
from .op import cast, kept_ready, operands_of
from .ready import PreparedCall

Tensor = Any


def statistics(att: Any, request: CallArgs, lse: Tensor | None, chosen: Wanted) -> Statistics:
    """The statistics of `att(q, k, v, ...)`; `lse` [batch, heads, q_len] is what a call gave, or None."""
    if in_graph(request.q, request.k, lse, *request.params.values()):
        raise ParameterError(
            "statistics take plain tensors, outside of torch.compile, torch.export and torch.func\n"
            "  call them where the graph ends, in a function that torch.compiler.disable wraps"
        )
    if torch._C._is_any_autocast_enabled():
        q, k, v = cast(*request[:3])
        with torch.autocast(q.device.type, enabled=False):
            return _of_call(att, request._replace(q=q, k=k, v=v), lse, chosen)
    return _of_call(att, request, lse, chosen)


def _of_call(att: Any, request: CallArgs, lse: Tensor | None, chosen: Wanted) -> Statistics:
    q, k, v = request[:3]
    if not (q.numel() and k.numel()):
        return chosen.whole(_nothing(chosen, att.call(request).geometry, q))
    ready = kept_ready(att, request).generated
    g = ready.inputs.geometry
    q, k, v, sinks, *values = operands_of(att, request, ready, bhsd=True)
    reads = q, k, sinks, lse, *values
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in reads)
    columns = None
    kernel = None if has_tangents(*reads) else RECORDS[ready.inputs.target.backend].executors["torch"].columns
    if chosen.columns and not (recorded or ready.stored or ready.inputs.plan.weighted) and kernel is not None:
        columns = _columns_of_kernel(kernel, ready, q, k, v, sinks, lse, values)
        chosen = chosen._replace(columns=columns is None)
    call = DifferentiableCall(ready.inputs, tuple(n for n, _ in ready.kv_inputs))
    results = _nothing(chosen, g, q)
    run = partial(_of_row, call, chosen)
    if recorded:  # a graph of every row would hold every weight
        run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
    for row in call.rows if results else ():
        of_row = None if sinks is None else call.sinks(row, sinks), None if lse is None else call.queries(row, lse)
        _put(call, row, results, run(row, call.queries(row, q), _keys(call, row, k, values), *of_row, *values))
    for x in results.values():
        if recorded and x.is_floating_point():
            x.requires_grad_()  # no score reads what learns: gradients are 0
    if columns is not None:
        results["columns"] = columns.unflatten(1, (g.kv_heads, -1))
    return chosen.whole(results)


def _columns_of_kernel(
    kernel: Any, ready: PreparedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Any, lse: Any, values: Sequence[Tensor]
) -> Tensor | None:
    """Columns [batch, heads, kv_len] by a backend's kernel; None where it cannot be built."""
    if lse is None:
        lse = ready.run(0, False, q, k, v, sinks, *values)[1]
    try:
        return kernel(ready.inputs_of(q.device, 0, sinks, values), q, k, lse)
    except BuildError as error:
        fall_back(error)
        return None


def _nothing(chosen: Wanted, g: Geometry, q: Tensor) -> dict[str, Tensor]:
    def full(shape: tuple[int, ...], value: int, dtype: Any) -> Tensor:
        return q.new_full(shape, value, dtype=dtype)

    return chosen.nothing(g, full, torch.float64 if q.dtype == torch.float64 else torch.float32, torch.int64)


def _put(call: DifferentiableCall, row: Row, results: dict[str, Tensor], of_row: dict[str, Tensor]) -> None:
    """Write the results of a row, and add its columns."""
    for name, part in of_row.items():
        if name != "columns":
            call.queries(row, results[name]).copy_(part)
            continue
        columns, start = results[name][row.index], 0
        for p in row.pieces:
            columns[..., p.start : p.stop].add_(part[..., start : (start := start + p.width)])


def _keys(call: DifferentiableCall, row: Row, k: Tensor, values: Sequence[Tensor]) -> Tensor:
    """The keys [batch, kv_heads, keys, dim] that a row sees, which may be in pages of a pool."""
    plan = call.inputs.plan
    if plan.pages is None:
        return call.keys(row, k)
    table = dict(zip(call.names, values, strict=True))[plan.pages].long().clamp(0, len(k) - 1)
    b, kv, _ = row.index
    parts = []
    for p in row.pieces:
        first, last = p.start // plan.page, -(-p.stop // plan.page)
        pages = k[table[b, first:last]][:, :, kv]  # [batch, pages, kv_heads, tokens, dim]
        parts.append(pages.transpose(1, 2).flatten(2, 3)[:, :, p.start - first * plan.page :][:, :, : p.width])
    return torch.cat(parts, 2) if parts else k[:0]


def _of_row(
    call: DifferentiableCall, chosen: Wanted, row: Row, q: Tensor, k: Tensor, sinks: Any, lse: Any, *values: Tensor
) -> dict[str, Tensor]:
    """The results of a row of tiles: columns [batch, kv_heads, group, keys], others [batch, kv_heads, group, queries,
    ...]. A row that sees no key takes the values of `nothing`."""
    if not row.pieces:
        return {}
    if call.inputs.plan.weighted:
        p = call.shares(*call.products(row, q, k, *values))
        results = {"columns": p.sum(3)} if chosen.columns else {}
        # a key that weighs nothing may be in a tile that is not read
        m = torch.where(p > 0, p, -math.inf).detach()
        return results | _largest(m, p, _places(row, q), chosen)
    m, hidden = call.scores(*call.products(row, q, k, *values))
    sink = None if sinks is None else sinks.to(m.dtype)
    if lse is None:
        top = m.detach().amax(-1)
        base = top if sink is None else torch.maximum(top, sink.detach())
    else:
        base = lse.to(m.dtype)
    base = torch.where(base == -math.inf, 0.0, base)  # -inf - -inf is NaN
    log = m - base.unsqueeze(-1)
    log = torch.where(hidden, 0.0, log)
    p = torch.where(hidden, 0.0, log.exp())
    log_sink: Any = None if sink is None else torch.where(sink == -math.inf, 0.0, sink - base)
    p_sink: Any = None if sink is None else torch.where(sink == -math.inf, 0.0, log_sink.exp())
    if lse is None:
        total = p.sum(-1) if p_sink is None else p.sum(-1) + p_sink
        total = torch.where(total == 0, 1.0, total)
        p, log = p / total.unsqueeze(-1), log - total.log().unsqueeze(-1)
        if p_sink is not None:
            p_sink, log_sink = p_sink / total, log_sink - total.log()
    results = {"columns": p.sum(3)} if chosen.columns else {}
    if chosen.entropy:
        entropy = -(p * log).sum(-1)
        results["entropy"] = entropy if p_sink is None else entropy - p_sink * log_sink
    return results | _largest(m.detach(), p, _places(row, q), chosen)


def _places(row: Row, q: Tensor) -> Tensor:
    """The places of the keys of a row of tiles."""
    return torch.cat([torch.arange(x.start, x.stop, device=q.device) for x in row.pieces])


def _largest(m: Tensor, p: Tensor, keys: Tensor, chosen: Wanted) -> dict[str, Tensor]:
    """The keys with the largest scores and their weights; of equal ones the first. -1 where no key is visible."""
    results = {}
    if chosen.argmax:
        score, at = m.max(-1, keepdim=True)  # the first of equal ones
        none = score == -math.inf
        results = {"argmax": torch.where(none, -1, keys[at]), "argmax_weight": p.gather(-1, at).where(~none, 0)}
        results = {n: x.squeeze(-1) for n, x in results.items()}
    if chosen.top:
        n = min(chosen.top, m.shape[-1])
        score, at = (x[..., :n] for x in m.sort(dim=-1, descending=True, stable=True))  # topk leaves ties in any order
        results |= {"top": torch.where(score == -math.inf, -1, keys[at]), "top_weight": p.gather(-1, at)}
        more = (0, chosen.top - n)
        results["top"] = torch.nn.functional.pad(results["top"], more, value=-1)
        results["top_weight"] = torch.nn.functional.pad(results["top_weight"], more)
    return results
