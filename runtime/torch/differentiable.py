"""Attention in torch's own operators over visible tiles: tangents, and derivatives of derivatives, of any order.

First derivatives in reverse have kernels. Other derivatives run these operators, one row of tiles at a time: its
queries and the keys that some of them see, never all pairs of a call. torch records `attend`, so it differentiates the
call any number of times. `second` is the derivative of the gradients. It keeps the graph of one row of tiles at a time,
unless a third derivative is asked for.

A score mod is differentiated by the table of `lowering.derive`, not by torch's rules for its operators. So kernels and
this module have one convention for ties and branches, and a hidden position contributes 0, whatever its slope is.
Imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch._C._functorch import TransformType, _unwrap_for_grad, _wrap_for_grad
from torch._functorch.autograd_function import generate_single_level_function
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from frisket.dsl.evaluate import unroll
from frisket.dsl.ir import SIZES, Expr
from frisket.grammar.memo import memo
from frisket.lowering.aten.expr import TileProgram
from frisket.lowering.aten.steps import Heads, KeyPiece, heads, rows_of_step, shares, steps
from frisket.lowering.derive import Formula, Gradient, backward_of, formula_of
from frisket.lowering.plan import Geometry, KernelInputs, Spans
from frisket.lowering.planner.planner import DeviceSpans
from frisket.runtime.machine.caller import warn_once

if TYPE_CHECKING:
    from .ready import PreparedCall

WARNING = (
    "no kernel computes these tangents of attention, or derivatives of its gradients. torch's operators compute them "
    "over visible tiles, in about the time of dense attention on as many pairs, or up to 6 times that for few tokens"
)


Tensor = Any
ROOM = 1 << 22  # scores of a row of tiles that is taller than a tile
AXES = 5  # of a row of tiles: [batch, kv_heads, group, queries, keys]


# -- expressions ------------------------------------------------------------------------------------------------------


@memo(group="programs")
def _program(e: Expr, dtype: Any) -> TileProgram:
    return TileProgram(e, dtype, in_place=False)


@dataclass(frozen=True, eq=False)
class Place:
    """The values that a formula reads besides its Float leaves, at the positions of one row of tiles."""

    env: Mapping[str, Any]
    tables: Mapping[str, Tensor]
    dtype: Any

    def seen_by(self, f: Callable[[Tensor], Tensor]) -> Place:
        """The place as the next transform sees it: the number of visible keys may depend on transformed scores."""
        return replace(self, env={n: f(x) if isinstance(x, torch.Tensor) else x for n, x in self.env.items()})


class Elementwise(torch.autograd.Function):
    """`elementwise` where no transform of torch.func is left."""

    @staticmethod
    def forward(formula: Formula, place: Place, hidden: Tensor, *leaves: Tensor) -> Tensor:
        env = {**place.env, **{f"leaf {i}": x for i, x in enumerate(leaves)}}
        value: Tensor = _program(formula.expr, place.dtype)(env, place.tables)
        shape = torch.broadcast_shapes(hidden.shape, *(x.shape for x in leaves))  # type: ignore[no-untyped-call]
        # literals are on the CPU, and a result that is an operand would be a view of it
        return value.to(hidden.device).expand(shape).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.formula, ctx.place, *tensors = inputs
        ctx.shape = output.shape
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        hidden, *leaves = ctx.saved_tensors
        return _tangent(ctx.formula, ctx.place, hidden, leaves, tangents[3:], leaves[0].new_zeros(ctx.shape))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        (cotangent,), (hidden, *leaves) = cotangents, ctx.saved_tensors
        grads: list[Tensor | None] = []
        for leaf, derivative, need in zip(leaves, ctx.formula.derivatives, ctx.needs_input_grad[3:], strict=True):
            if derivative is None or not need:
                grads.append(None)
                continue
            factor = elementwise(derivative, ctx.place, hidden, *leaves)
            grads.append(torch.where(hidden, 0.0, cotangent * factor).sum_to_size(leaf.shape))
        return None, None, None, *grads


def elementwise(formula: Formula, place: Place, hidden: Tensor, *leaves: Tensor) -> Tensor:
    """The value of a formula at a place, in the shape of `hidden`: Bools [batch, kv_heads, group, queries, keys], to
    which the leaves broadcast. Its derivatives, of any order, are `Formula.derivatives`, and 0 at hidden positions."""
    functorch: Any = torch._C._functorch
    # torch.func.vjp saves tensors that outlive its level
    hidden, *leaves = map(functorch.unwrap_if_dead, (hidden, *leaves))  # type: ignore[assignment]
    interpreter: Any = None
    if functorch.maybe_current_level() is not None:
        interpreter = retrieve_current_functorch_interpreter()
    key = None if interpreter is None else interpreter.key()
    if key == TransformType.Vmap:
        return _mapped(interpreter, formula, place, hidden, leaves)
    if key is not None:
        place = place.seen_by(lambda x: below(x, interpreter.level()))
    if key == TransformType.Grad:
        value: Tensor = one_level(Elementwise, interpreter, elementwise, formula, place, hidden, *leaves)
        return value
    if key in (TransformType.Jvp, None):
        pairs = [dual(x) for x in leaves]
        # of forward_ad's level, which is the only one, a Function saves duals: a backward of these has tangents too
        alone = key is None and forward_ad._current_level >= 0
        if not alone and any(tangent is not None for _, tangent in pairs):
            return _with_tangent(formula, place, hidden, *zip(*pairs, strict=True))
    if key is not None:
        plain = [below(x, interpreter.level()) for x in (hidden, *leaves)]
        with interpreter.lower():
            result = elementwise(formula, place, *plain)
        return functorch._wrap_for_grad(result, interpreter.level())
    return Elementwise.apply(formula, place, hidden, *leaves)  # type: ignore[no-untyped-call]


def dual(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The tensor without its tangent, and the tangent. It works in compiled code, which does not see forward_ad's
    levels."""
    return torch._VF._unpack_dual(x, level=0)


def _with_tangent(
    formula: Formula, place: Place, hidden: Tensor, leaves: Sequence[Tensor], tangents: Sequence[Any]
) -> Tensor:
    """The value with its tangent. No rule of a Function gives it: torch drops outer tangents inside such rules."""
    value = elementwise(formula, place, hidden, *leaves)
    total = _tangent(formula, place, hidden, leaves, tangents, torch.zeros_like(value))
    return torch._VF._make_dual(value, total, level=0)


def _tangent(
    formula: Formula, place: Place, hidden: Tensor, leaves: Sequence[Tensor], tangents: Sequence[Any], total: Tensor
) -> Tensor:
    """`total`, which is zeros, and the tangent of the value."""
    for derivative, tangent in zip(formula.derivatives, tangents, strict=True):
        if derivative is not None and tangent is not None:
            total = total + torch.where(hidden, 0.0, tangent * elementwise(derivative, place, hidden, *leaves))
    return total


def _mapped(interpreter: Any, formula: Formula, place: Place, hidden: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """The value for all entries of a mapped axis, which is one more axis before the others."""
    functorch: Any = torch._C._functorch
    level = interpreter.level()

    def whole(x: Tensor) -> Tensor:
        if not functorch.is_batchedtensor(x) or functorch.maybe_get_level(x) != level:
            return x
        inner = functorch.get_unwrapped(x).movedim(functorch.maybe_get_bdim(x), 0)
        return inner.reshape(len(inner), *[1] * (AXES - x.ndim), *inner.shape[1:])

    with interpreter.lower():
        operands = [whole(x) for x in (hidden, *leaves)]
        if all(x is y for x, y in zip(operands, (hidden, *leaves), strict=True)):
            return elementwise(formula, place, hidden, *leaves)
        value = elementwise(formula, place.seen_by(whole), *operands)
    return functorch._add_batch_dim(value, 0, level)


def below(x: Tensor, level: int) -> Tensor:
    """The operand as the next transform sees it."""
    return _unwrap_for_grad(torch._C._functorch.unwrap_if_dead(x), level)


def one_level(kind: Any, interpreter: Any, forward: Any, *operands: Any) -> Any:
    """`kind.apply` for the transform `interpreter`, whose forward is `forward` for the next one."""
    level = interpreter.level()

    def lowered(*operands: Any) -> Any:
        plain = tree_map_only(torch.Tensor, lambda x: below(x, level), operands)
        # a Function switches off both kinds of derivatives, of all levels
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), interpreter.lower():
            results = forward(*plain)
        return tree_map_only(torch.Tensor, lambda x: _wrap_for_grad(x, level), results)

    function: Any = generate_single_level_function(interpreter, kind)
    function.forward = staticmethod(lowered)
    with enable_single_level_autograd_function():
        return function.apply(*operands)


# -- rows of tiles ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A row of tiles of some heads, and the keys that it sees, in tokens."""

    heads: Heads | None  # None: all heads of all batch entries
    start: int
    stop: int
    pieces: tuple[KeyPiece, ...]

    @property
    def index(self) -> tuple[slice, slice, slice]:
        """The row's part of arrays [batch, kv_heads, group, ...]."""
        m = self.heads
        if m is None:
            return slice(None), slice(None), slice(None)
        return slice(m.batch, m.batch + 1), slice(m.kv, m.kv + m.count), slice(m.first, m.last)


@dataclass(frozen=True, eq=False)
class DifferentiableCall:
    """A prepared call as a function of its arrays: q, k, v, sinks and the Floats that come with every call."""

    inputs: KernelInputs
    names: tuple[str, ...]  # the plan's names of these Floats
    recorded: bool = True  # whether torch differentiates it: no operator of torch may ask for that

    @staticmethod
    def of(ready: PreparedCall, seed: Any) -> DifferentiableCall:
        """The function that a prepared call of generated kernels computes."""
        x = ready.generated.inputs
        if ready.generated.seed is not None:
            slots = {**x.slots, ready.generated.seed: seed}
            x = KernelInputs(x.plan, x.spans, x.geometry, x.target, slots, x.tables, x.sinks, x.rows)
        warn_once(WARNING)
        return DifferentiableCall(x, tuple(name for name, _ in ready.generated.kv_inputs))

    @property
    def geometry(self) -> Geometry:
        return self.inputs.geometry

    @property
    def group(self) -> int:
        return self.geometry.heads // self.geometry.kv_heads

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of tiles of every head, which cover all queries."""
        target = self.inputs.target
        block, spans = (target.block_q, target.block_k), self.inputs.spans
        spans = spans.rows(block) if hasattr(spans, "rows") else spans
        if isinstance(spans, DeviceSpans):
            spans = Spans(spans.bounds.cpu().numpy(), spans.count.cpu().numpy(), spans.slice_of)
        g = self.geometry
        by_slice = heads(spans, g)
        whole = len(by_slice) == 1
        rows: list[Row] = []
        for slice_, members in by_slice.items():
            for step in steps(spans, slice_, g, block):
                tall = max(block[0], ROOM // max(1, g.batch * g.heads * step.width))
                for i in range(step.count):
                    one = rows_of_step(step, i, 1)
                    for part in shares(one.height, tall):  # a step is one tall tile where rows see the same keys
                        place = one.start + part.start, one.start + part.stop, one.pieces
                        rows += [Row(None, *place)] if whole else [Row(m, *place) for m in members]
        return rows

    def add_queries(self, row: Row, total: Tensor, part: Tensor) -> None:
        """Add the row's part to an array [batch, heads, q_len, ...]: the transpose of `queries`."""
        self.queries(row, total).add_(part)

    def add_keys(self, row: Row, total: Tensor, part: Tensor) -> None:
        """Add the row's part to an array [batch, kv_heads, kv_len, dim]: the transpose of `keys`."""
        b, kv, _ = row.index
        for p, keys in zip(row.pieces, part.split([p.width for p in row.pieces], 2), strict=True):
            total[b, kv, p.start : p.stop] += keys

    def add_sinks(self, row: Row, total: Tensor, part: Tensor) -> None:
        """Add the row's part to the sinks [heads]: the transpose of `sinks`."""
        self.sinks(row, total).add_(part)

    # -- one row -------------------------------------------------------------------------------------------

    def queries(self, row: Row, x: Tensor) -> Tensor:
        """The row's part [batch, kv_heads, group, queries, ...] of an array [batch, heads, q_len, ...]."""
        return x.unflatten(1, (self.geometry.kv_heads, self.group))[row.index][:, :, :, row.start : row.stop]

    def keys(self, row: Row, x: Tensor) -> Tensor:
        """The row's keys [batch, kv_heads, keys, dim] of an array [batch, kv_heads, kv_len, dim]."""
        b, kv, _ = row.index
        parts = [x[b, kv, p.start : p.stop] for p in row.pieces] or [x[b, kv, :0]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def sinks(self, row: Row, x: Tensor) -> Tensor:
        """The row's sinks [kv_heads, group, 1] of [heads]."""
        _, kv, heads_of_group = row.index
        return x.unflatten(0, (self.geometry.kv_heads, self.group))[kv, heads_of_group].unsqueeze(-1)

    def parts(self, row: Row, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *values: Tensor) -> list[Any]:
        """The row's parts of the arrays, which `result` takes."""
        part = None if sinks is None else self.sinks(row, sinks)
        return [self.queries(row, q), self.keys(row, k), self.keys(row, v), part, *values]

    def result(self, row: Row, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *values: Tensor) -> Any:
        """(out, lse, top) of a row of tiles: [batch, kv_heads, group, queries, dim], and without the last axis. `top`,
        the largest score, has no derivative. Of weighted rows these are (out, total, count). The out of a query that
        sees nothing is a constant, so its cotangent may be anything, NaN too."""
        real = torch.float64 if q.dtype == torch.float64 else torch.float32
        plan = self.inputs.plan
        if not row.pieces and plan.weighted:
            total = q.new_zeros(q.shape[:-1], dtype=real)
            return q.new_zeros((*q.shape[:-1], v.shape[-1])), total, total.detach()
        if not row.pieces:
            lse = q.new_full(q.shape[:-1], -math.inf, dtype=real)
            lse = lse if sinks is None else sinks.to(real).expand(lse.shape)
            return q.new_zeros((*q.shape[:-1], v.shape[-1])), lse, lse.new_full(lse.shape, -math.inf)
        s, hidden, env, tables = self.products(row, q, k, *values)
        if plan.weighted:
            sums, total, count = self._sums(s, env, tables, hidden, v.to(real))
            out = self._divided(sums, total, count, env, tables)
            return torch.where(hidden.all(-1, keepdim=True), 0.0, out).to(q.dtype), total, count.to(real)
        m, hidden = self.scores(s, hidden, env, tables)
        top = m.detach().amax(-1)
        sink = None if sinks is None else sinks.to(real)
        largest = top if sink is None else torch.maximum(top, sink.detach())
        base = torch.where(largest == -math.inf, 0.0, largest)
        e = torch.where(hidden, 0.0, (m - base.unsqueeze(-1)).exp())
        total = e.sum(-1)
        total = total if sink is None else total + (sink - base).exp()
        empty = total == 0
        safe = torch.where(empty, 1.0, total)
        lse = torch.where(empty, -math.inf, safe.log() + base)
        p = self._dropped(e / safe.unsqueeze(-1), env, tables)
        out = (p.flatten(2, 3) @ _visible(v.to(real), hidden)).unflatten(2, q.shape[2:4])
        return torch.where(empty.unsqueeze(-1), 0.0, out).to(q.dtype), lse, top

    def products(self, row: Row, q: Tensor, k: Tensor, *values: Tensor) -> tuple[Tensor, Tensor, Any, Any]:
        """(scaled products [batch, kv_heads, group, queries, keys]; the positions that the mask hides; values by name;
        tables) of a row of tiles that sees keys."""
        real = torch.float64 if q.dtype == torch.float64 else torch.float32
        named = dict(zip(self.names, values, strict=True))
        env = self._env(row, q.device) | {n: x for n, x in named.items() if not x.ndim}
        mask, tables = self.inputs.plan.mask, {**self.inputs.tables, **{n: x for n, x in named.items() if x.ndim}}
        hidden = (
            torch.zeros((), dtype=torch.bool, device=q.device) if mask is None else ~_program(mask, real)(env, tables)
        )
        hidden = hidden.expand(*q.shape[:-1], k.shape[2])
        s = (q.to(real) * self.geometry.scale).flatten(2, 3) @ _visible(k.to(real), hidden).mT
        return s.unflatten(2, q.shape[2:4]), hidden, env, tables

    def scores(self, s: Tensor, hidden: Tensor, env: Any, tables: Any) -> tuple[Tensor, Tensor]:
        """(modified scores, -inf where hidden; the hidden positions) of the results of `products`."""
        m = s
        if self.inputs.plan.score is not None:
            m, hidden = self._modified(s, env, tables, hidden, s.dtype)
            m = m.expand(s.shape)  # a score mod may read no score
        return torch.where(hidden, -math.inf, m), hidden

    def _dropped(self, p: Tensor, env: Any, tables: Any) -> Tensor:
        """The weights that survive dropout, divided by the share that does."""
        plan = self.inputs.plan
        if plan.keep_mask is None:
            return p
        assert plan.rate is not None
        rate = float(torch.tensor(self.inputs.slots[plan.rate], dtype=torch.float32))
        survives = _program(plan.keep_mask, p.dtype)({**env, plan.rate: rate}, tables)
        return torch.where(survives, p / (1 - rate), 0.0)

    def gradients_of_weights(
        self, row: Row, q: Tensor, k: Tensor, v: Tensor, g: Tensor, c: Tensor, captured: Sequence[Gradient]
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """The gradients of q, k, v and captured values of a weighted row that sees keys, in the dtype of scores, by the
        formulas of `lowering.derive`. `g` is the cotangent of its sums of values, `c` that of its sums of weights."""
        plan, env, tables, shape = self.inputs.plan, self._env(row, q.device), self.inputs.tables, q.shape[2:4]
        assert plan.score is not None
        s = ((q * self.geometry.scale).flatten(2, 3) @ k.mT).unflatten(2, shape)
        env, rows = {**env, "score": s}, g.flatten(2, 3)
        hidden = torch.zeros_like(s, dtype=torch.bool)
        if plan.mask is not None:
            hidden = (~_program(plan.mask, s.dtype)(env, tables)).expand(s.shape)

        def shown(e: Expr | None, x: Tensor) -> Tensor:
            factor = 1.0 if e is None else _program(unroll(e), s.dtype)(env, tables)
            return torch.where(hidden, 0.0, x * factor)

        ones = torch.ones_like(s)
        w, drop = shown(plan.score, ones), self._dropped(ones, env, tables)
        k, v = _visible(k, hidden), _visible(v, hidden)
        dw = drop * (rows @ v.mT).unflatten(2, shape) + c.unsqueeze(-1)
        ds = (shown(backward_of(plan).slope, dw) * self.geometry.scale).flatten(2, 3)
        values = []
        for x in captured:
            parts = shown(x.weight, dw)
            if not x.index:
                values.append(parts.sum())
                continue
            size = tables[x.source].shape
            index = (torch.as_tensor(_program(i, s.dtype)(env, tables), device=s.device) for i in x.index)
            at = tuple(i.clamp(0, n - 1).expand(s.shape) for i, n in zip(index, size, strict=True))
            values.append(s.new_zeros(size).index_put_(at, parts, accumulate=True))
        dv = (drop * w).flatten(2, 3).mT @ rows
        return (ds @ k).unflatten(2, shape), ds.mT @ q.flatten(2, 3), dv, values

    def _sums(self, s: Tensor, env: Any, tables: Any, hidden: Any, v: Tensor) -> Any:
        """The sums of a weighted row: of its weighted values, of its weights, and the number of keys that it sees."""
        w, seen = self._weights(s, env, tables, hidden)
        sums = (self._dropped(w, env, tables).flatten(2, 3) @ _visible(v, hidden)).unflatten(2, s.shape[2:4])
        return sums, w.sum(-1), seen.sum(-1)

    def _weights(self, s: Tensor, env: Any, tables: Any, hidden: Any) -> tuple[Tensor, Any]:
        """(the weights of a weighted row, whether a pair is visible)."""
        plan, seen = self.inputs.plan, ~hidden
        assert plan.score is not None
        w = torch.where(hidden, 0.0, value_of(plan.score, {"score": s}, env, tables, hidden, self.recorded))
        if plan.counted is not None:
            seen = seen & _program(plan.counted, s.dtype)({**env, "score": s.detach()}, tables)
        return w, seen

    def shares(self, s: Tensor, hidden: Tensor, env: Any, tables: Any) -> Tensor:
        """The weights of a weighted row divided by its divisor, of the results of `products`."""
        w, seen = self._weights(s, env, tables, hidden)
        return self._divided(w, w.sum(-1), seen.sum(-1), env, tables)

    def _divided(self, sums: Tensor, total: Tensor, count: Tensor, env: Any, tables: Any) -> Tensor:
        """The sums of weighted values divided by the row's divisor; 0 where that is 0."""
        if self.inputs.plan.divide is None:
            return sums
        divisor = self.divisor(total.unsqueeze(-1), count.unsqueeze(-1), env, tables)
        empty = divisor == 0
        return torch.where(empty, 0.0, sums / torch.where(empty, 1.0, divisor))

    def divisor(self, total: Tensor, count: Tensor, env: Any, tables: Any) -> Tensor:
        """The divisors of weighted rows, 0 where a row sees no key and that may matter."""
        plan = self.inputs.plan
        assert plan.divide is not None
        alone = count == 0 if plan.counts else torch.zeros_like(count, dtype=torch.bool)
        divisor = value_of(plan.divide, {"total": total}, {**env, "count": count.long()}, tables, alone, self.recorded)
        return torch.where(alone, 0.0, divisor)

    def _modified(self, s: Tensor, env: Any, tables: Any, hidden: Tensor, real: Any) -> Any:
        """The modified scores, and the hidden positions: the mask's, and those where the score mod gives -inf."""
        score = self.inputs.plan.score
        assert score is not None
        with torch.no_grad():
            unseen = value_of(score, {"score": s.detach()}, env, tables, hidden, self.recorded).detach() == -math.inf
        hidden = hidden | unseen
        return value_of(score, {"score": s}, env, tables, hidden, self.recorded), hidden

    def _env(self, row: Row, device: Any) -> dict[str, Any]:
        """Sizes, slots and positions, in shapes that broadcast to [batch, kv_heads, group, queries, keys]."""
        g, group = self.geometry, self.group
        m = row.heads or Heads(0, 0, g.kv_heads, 0, group)
        batch = range(g.batch) if row.heads is None else range(m.batch, m.batch + 1)
        b0, h0, q0, k0 = g.origin

        def along(numbers: Any, axis: int) -> Tensor:
            return torch.as_tensor(numbers, device=device).reshape([-1 if i == axis else 1 for i in range(5)])

        def start(x: Any) -> Any:
            if isinstance(x, int):
                return x
            vector = torch.as_tensor(x, device=device)
            return along(vector if len(vector) == 1 else vector[batch.start : batch.stop], 0)

        keys = torch.cat([torch.arange(p.start, p.stop, device=device) for p in row.pieces])
        kv = along(range(m.kv, m.kv + m.count), 1)
        return {
            **dict(zip(SIZES, g.full, strict=True)),
            **self.inputs.slots,
            "b": along(batch, 0) + b0,
            "h": kv * group + along(range(m.first, m.last), 2) + h0,
            "q": along(torch.arange(row.start, row.stop, device=device), 3) + start(q0),
            "k": along(keys, 4) + start(k0),
        }


def _visible(x: Tensor, hidden: Tensor) -> Tensor:
    """A row's keys or values [batch, kv_heads, keys, dim], 0 where no query of the row sees the key. Anything may stand
    there, as in a cache that is used again."""
    return torch.where(hidden.all(2).all(2).unsqueeze(-1), 0.0, x)


def value_of(e: Expr, of: Mapping[str, Tensor], env: Any, tables: Any, hidden: Tensor, recorded: bool = True) -> Tensor:
    """The value of an expression of `score` or `total` (`of`); its derivatives are 0 at `hidden` positions. `env` has
    slots and positions."""
    (formula, sources), (x,) = formula_of(e), of.values()
    leaves = []
    for leaf in sources:
        if leaf.op == "var":
            leaves.append(of[leaf.name])
        elif leaf.op == "param":
            leaves.append(torch.as_tensor(env[leaf.name], dtype=x.dtype, device=x.device))
        else:
            leaves.append(_entries(leaf, env, tables[leaf.name].to(x.device, x.dtype), tables))
    if not leaves or not recorded:  # such as the number of visible keys
        value = _program(e, x.dtype)({**env, **of}, tables)
        return torch.as_tensor(value, dtype=x.dtype, device=x.device)
    return elementwise(formula, Place(env, tables, x.dtype), hidden, *leaves)


def _entries(e: Expr, env: Any, table: Tensor, tables: Any) -> Tensor:
    """The entries of a table that a lookup reads; the table's gradient adds up the gradients of each entry."""
    at = (_program(i, table.dtype)(env, tables).to(table.device) for i in e.args)
    return table[tuple(i.clamp(0, n - 1) for i, n in zip(at, table.shape, strict=True))]


# -- all rows ---------------------------------------------------------------------------------------------------------


def attend(
    call: DifferentiableCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *values: Tensor
) -> tuple[Tensor, ...]:
    """(out, lse, top) as kernels have them, recorded by torch, of arrays [batch, heads, length, dim]."""
    g, order = call.geometry, call.inputs.rows
    if order is not None:
        q, k, v = _at(q, order.queries), _at(k, order.keys), _at(v, order.keys)
    parts: dict[tuple[int, int, int], list[tuple[Tensor, ...]]] = {}
    for row in call.rows:
        results = call.result(row, *call.parts(row, q, k, v, sinks, *values))
        m = row.heads
        for place in [(0, 0, 0)] if m is None else [(m.batch, kv, m.first) for kv in range(m.kv, m.kv + m.count)]:
            of_head = results if m is None else tuple(x[:, place[1] - m.kv : place[1] - m.kv + 1] for x in results)
            parts.setdefault(place, []).append(of_head)
    columns = []
    for i in range(3):
        rows = {place: torch.cat([x[i] for x in tiles], 3) for place, tiles in parts.items()}
        if call.rows[0].heads is None:
            columns.append(rows[0, 0, 0].flatten(1, 2))
            continue
        by_head = [
            [torch.cat([rows[x] for x in sorted(rows) if x[:2] == (b, kv)], 2) for kv in range(g.kv_heads)]
            for b in range(g.batch)
        ]
        columns.append(torch.cat([torch.cat(x, 1) for x in by_head]).flatten(1, 2))
    return tuple(x if order is None else _at(x, order.back) for x in columns)


def _at(x: Tensor, index: Any) -> Tensor:
    return x.index_select(2, torch.as_tensor(index, device=x.device))


def gradients(
    call: DifferentiableCall, dout: Any, dlse: Any, arrays: Sequence[Any], needed: Sequence[bool]
) -> list[Any]:
    """The gradients of `arrays` (q, k, v, sinks, *values), recorded: None where not `needed`."""
    inputs = [x for x, need in zip(arrays, needed, strict=True) if need]

    def of_inputs(*inputs: Tensor) -> tuple[Tensor, ...]:
        rest = iter(inputs)
        results = attend(call, *(next(rest) if need else x for x, need in zip(arrays, needed, strict=True)))
        return tuple(x for x, c in zip(results[:2], (dout, dlse), strict=True) if c is not None)

    pull: Any = torch.func.vjp(of_inputs, *inputs)[1]
    grads = iter(pull(tuple(c for c in (dout, dlse) if c is not None)))
    return [next(grads) if need else None for need in needed]


def second(
    call: DifferentiableCall,
    cotangents: Sequence[Any],
    dout: Any,
    dlse: Any,
    arrays: Sequence[Any],
    needed: Sequence[bool],
) -> list[Any]:
    """The derivatives by (dout, dlse, *arrays) of the gradients of the arrays that are `needed`, given the cotangents
    of these gradients."""
    if torch.is_grad_enabled():  # a third derivative needs a graph of all rows
        return _second_recorded(call, cotangents, dout, dlse, arrays, needed)
    order = call.inputs.rows
    if order is not None:
        indices = order.queries, order.keys, order.keys
        arrays = [*map(_at, arrays[:3], indices), *arrays[3:]]
        cotangents = [c if c is None else _at(c, i) for c, i in zip(cotangents[:3], indices)] + [*cotangents[3:]]
        dout, dlse = (None if x is None else _at(x, order.queries) for x in (dout, dlse))
    operands = [dout, dlse, *arrays]
    read = [call.queries, call.queries, call.queries, call.keys, call.keys, call.sinks]
    add = [call.add_queries, call.add_queries, call.add_queries, call.add_keys, call.add_keys, call.add_sinks]
    totals = [None if x is None else torch.zeros_like(x, memory_format=torch.contiguous_format) for x in operands]
    for row in call.rows:

        def part_of(x: Any, i: int, row: Row = row) -> Any:
            return x if x is None or i >= len(read) else read[i](row, x)

        parts = [None if x is None else part_of(x, i).detach().requires_grad_() for i, x in enumerate(operands)]
        of_row = [part_of(c, i) for i, c in enumerate(cotangents, 2)]
        derivatives = _second_of_row(call, row, parts, of_row, needed)
        for i, (total, part) in enumerate(zip(totals, derivatives, strict=True)):
            if part is not None and total is not None:
                add[i](row, total, part) if i < len(add) else total.add_(part)
    if order is not None:
        back = (order.back, order.back, order.back, order.keys_back, order.keys_back)
        totals[:5] = [x if x is None else _at(x, i) for x, i in zip(totals, back)]
    return totals


def _second_of_row(
    call: DifferentiableCall, row: Row, parts: list[Any], cotangents: list[Any], needed: Sequence[bool]
) -> list[Any]:
    """`second` of one row: `parts` and `cotangents` are the row's."""
    (dout, dlse), arrays = parts[:2], parts[2:]
    with torch.enable_grad():
        results = call.result(row, *arrays)
        pairs = [(x, c) for x, c in zip(results[:2], (dout, dlse), strict=True) if c is not None and x.requires_grad]
        inputs = [x for x, need, c in zip(arrays, needed, cotangents, strict=True) if need and c is not None]
        if not pairs or not inputs:
            return [None] * len(parts)
        options = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
        firsts = torch.autograd.grad([x for x, _ in pairs], inputs, [c for _, c in pairs], **options)
        of_firsts = [c for need, c in zip(needed, cotangents, strict=True) if need and c is not None]
        graph = [(x, c) for x, c in zip(firsts, of_firsts, strict=True) if x.requires_grad]
    by = [x for x in parts if x is not None]
    grads = iter(torch.autograd.grad([x for x, _ in graph], by, [c for _, c in graph], allow_unused=True))
    return [None if x is None else next(grads) for x in parts]


def _second_recorded(
    call: DifferentiableCall,
    cotangents: Sequence[Any],
    dout: Any,
    dlse: Any,
    arrays: Sequence[Any],
    needed: Sequence[bool],
) -> list[Any]:
    operands = [dout, dlse, *arrays]
    differentiable = [x is not None and x.is_floating_point() for x in operands]
    asks = [need and c is not None for need, c in zip(needed, cotangents, strict=True)]

    def grads(*inputs: Tensor) -> tuple[Tensor, ...]:
        rest = iter(inputs)
        whole = [next(rest) if use else x for x, use in zip(operands, differentiable, strict=True)]
        return tuple(g for g in gradients(call, whole[0], whole[1], whole[2:], asks) if g is not None)

    pull: Any = torch.func.vjp(grads, *(x for x, use in zip(operands, differentiable, strict=True) if use))[1]
    results = iter(pull(tuple(c for c, ask in zip(cotangents, asks, strict=True) if ask)))
    return [next(results) if use else None for use in differentiable]
