"""Autograd functions: of attention on torch tensors, and of their tokens in another order. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

from frisket.dsl.errors import BackwardError
from frisket.grammar.memo import memo
from frisket.lowering.plan import Cotangents, ForwardResults, KernelInputs
from frisket.runtime.backends.cpp.torch import HUGE, LARGE, huge, lse_of
from frisket.runtime.calls.arrays import in_graph, recorded
from frisket.runtime.machine.caller import outside

from .differentiable import DifferentiableCall, dual, second
from .differentiable import gradients as gradients_recorded

if TYPE_CHECKING:
    from .ready import PreparedCall


def transformed(*cotangents: Any) -> bool:
    """Whether the cotangents of a backward, which is no operator, are mapped. Refuses a backward that is recorded,
    transformed otherwise, or of tensors without memory."""
    functorch: Any = torch._C._functorch
    modes = torch._C._len_torch_dispatch_stack() and (recorded() or type(torch.empty(0)) is not Tensor)
    kind, tensors = Tensor.__torch_dispatch__, [x for x in cotangents if x is not None]
    # a subclass without a rule of dispatch is memory, as a Parameter is
    bare = any(type(x).__torch_dispatch__ is not kind or not torch._C._has_storage(x) for x in tensors)
    if not (modes or bare or functorch.maybe_current_level() is not None):
        return False
    if any(functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x) for x in tensors):
        return True
    raise BackwardError(
        "this backward is recorded or transformed (make_fx, functionalize, fake tensors), and its forward ran before\n"
        "  call the attention inside of what is recorded or transformed, as torch.func does"
    )


def has_tangents(*arrays: Any) -> bool:
    """Whether some of the tensors have forward_ad's tangents. Raises inside an operator of torch, which hides them and
    has no rule for them."""
    if forward_ad._current_level < 0:
        return False
    c = torch._C
    if c._dispatch_tls_is_dispatch_key_excluded(c.DispatchKey.AutogradFunctionality):
        if not c._len_torch_dispatch_stack():
            keys = c._dispatch_tls_local_include_set(), c.DispatchKeySet(c.DispatchKey.Undefined)
            with c._ForceDispatchKeyGuard(*keys):
                refuse_tangents(*arrays)
        return False
    return any(isinstance(x, Tensor) and dual(x)[1] is not None for x in arrays)


def refuse_tangents(*arrays: Any) -> None:
    """Refuse tensors that have tangents, in a graph or an operator of torch."""
    if has_tangents(*arrays):
        raise BackwardError(
            "an operator of a compiled graph gets tangents of torch.autograd.forward_ad, and has no rule for them\n"
            "  take torch.func.jvp inside of what is compiled, or call the attention outside of the graph"
        )


def written_out(x: Any) -> Any:
    """The argument; zeros that torch keeps no memory for are written out."""
    return x.clone() if isinstance(x, Tensor) and x._is_zerotensor() else x


class Attend(torch.autograd.Function):
    """(out, lse, top) of (ready, seed, top, q, k, v, sinks, *values)."""

    @staticmethod
    def forward(ctx: Any, ready: PreparedCall, seed: Any, largest: bool, *arrays: Any) -> Any:
        out, lse, top, softmax_stats = ready.saving(seed, largest, *arrays)
        ctx.ready, ctx.seed, ctx.versions = ready, seed, versions(ready)
        ctx.save_for_backward(*arrays[:4], out, lse, softmax_stats, *arrays[4:])
        ctx.set_materialize_grads(False)  # no zeros as large as lse, where out alone has a cotangent
        if top is not None:
            ctx.mark_non_differentiable(top)
        return out, lse, top

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        dout, dlse, _ = cotangents
        refuse_changed(ctx)
        saved = ctx.saved_tensors
        inputs = saved[:4] + saved[7:]  # q, k, v, sinks and values
        if dout is None and dlse is None:
            return (None,) * (3 + len(inputs))  # no result was used
        run = partial(gradients, ctx.ready, ctx.seed, saved, needed=ctx.needs_input_grad[3:])
        return None, None, None, *recorded_gradients(run, ctx.ready, ctx.seed, inputs, dout, dlse)


class AttendAgain(torch.autograd.Function):
    """out of (repeat, ready, q, k, v): a call like one before, in which no other array learns. It saves what `Attend`
    saves, in that order: with torch.utils.checkpoint either may run what the other one ran."""

    @staticmethod
    def forward(ctx: Any, repeat: Any, ready: PreparedCall, q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse, softmax_stats = repeat.forward(q, k, v, True)
        ctx.again, ctx.versions = (repeat, ready), versions(ready)
        ctx.save_for_backward(q, k, v, None, out, lse, softmax_stats)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        if dout is None:
            return (None,) * 5
        refuse_changed(ctx)
        saved = ctx.saved_tensors
        repeat, ready = ctx.again
        run = partial(gradients_again, repeat, ready, saved, needed=(*ctx.needs_input_grad[2:], False))
        return None, None, *recorded_gradients(run, ready, None, saved[:4], dout, None)[:3]


def recorded_gradients(
    run: Any, ready: PreparedCall, seed: Any, inputs: Sequence[Any], dout: Any, dlse: Any
) -> list[Any]:
    """The gradients `run(dout, dlse)`, which have gradients where a graph of the backward is asked for; of mapped
    cotangents one after another."""
    needed = run.keywords["needed"]
    if transformed(dout, dlse):
        return list(mapped(lambda *both: recorded_gradients(run, ready, seed, inputs, *both), dout, dlse))
    if not torch.is_grad_enabled():
        return run(dout, dlse)  # type: ignore[no-any-return]
    with torch.no_grad():
        grads = run(dout, dlse)
    return list(Gradients.apply(ready, seed, needed, grads, dout, dlse, *inputs))  # type: ignore[no-untyped-call]


def mapped(run: Callable[..., Sequence[Any]], *operands: Any) -> Sequence[Any]:
    """`run(*operands)`, tensors of tensors or None, for one entry of a mapped axis after another. vmap of torch.func
    and that of is_grads_batched wrap tensors by different functions of torch, with the same arguments."""
    functorch: Any = torch._C._functorch
    for maps, batched in ((functorch, functorch.is_batchedtensor), (torch, functorch.is_legacy_batchedtensor)):
        where = [0 if x is not None and batched(x) else None for x in operands]
        if 0 not in where:
            continue
        if maps is torch:
            # torch tells the level only as it changes it
            level, below = torch._C._vmapmode_increment_nesting() - 1, nullcontext()
            torch._C._vmapmode_decrement_nesting()
        else:
            interpreter: Any = retrieve_current_functorch_interpreter()
            level, below = interpreter.level(), interpreter.lower()
            # others are mapped further out
            where = [d if d is None or functorch.maybe_get_level(x) == level else None for x, d in zip(operands, where)]
        with below:
            if 0 not in where:
                return mapped(run, *operands)
            whole = [x if d is None else maps._remove_batch_dim(x, level, 1, d) for x, d in zip(operands, where)]
            results = each(partial(mapped, run), len(whole[where.index(0)]), where, whole)
        return [x if x is None else maps._add_batch_dim(x, 0, level) for x in results]
    return run(*operands)


def each(run: Callable[..., Sequence[Any]], n: int, dims: Sequence[Any], operands: Sequence[Any]) -> tuple[Any, ...]:
    """The results of `run` for the `n` entries of mapped axes, stacked; None where they are None."""
    some = [isinstance(d, int) for d in dims]
    rows = (run(*(x.select(d, i) if m else x for x, d, m in zip(operands, dims, some, strict=True))) for i in range(n))
    return tuple(None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True))


def refuse_changed(ctx: Any) -> None:
    ready = ctx.again[1] if hasattr(ctx, "again") else ctx.ready
    if versions(ready) != ctx.versions:
        raise BackwardError(
            "a table of this attention was changed in place between the forward and the backward, which needs what "
            "the forward saw\n  change it after the backward, or make a new tensor and a new plan"
        )


def versions(ready: PreparedCall) -> list[int]:
    """torch's counts of writes to a plan's tables, which are the user's own on a device; torch checks live ones."""
    # tensors of inference mode have no count
    return [x._version for x in ready.inputs.tables.values() if not x.is_inference()]


@outside  # compiled autograd traces what calls it
def gradients(ready: PreparedCall, seed: Any, saved: tuple[Any, ...], dout: Any, dlse: Any, needed: Any) -> list[Any]:
    """Gradients of q, k, v, sinks and values, in this order, None where not `needed`."""
    q, k, v, sinks, out, lse, softmax_stats, *values = saved
    names, grad_names = _gradient_names(ready.kv_inputs, needed)
    if forward_ad._current_level >= 0 and has_tangents(*saved, dout, dlse):
        arrays = q, k, v, sinks, *values
        return gradients_recorded(DifferentiableCall.of(ready, seed), dout, dlse, arrays, needed)
    if torch._C._is_torch_function_mode_enabled():
        with torch._C.DisableTorchFunction():
            return gradients(ready, seed, saved, dout, dlse, needed)
    # one number for all: kernels take any strides
    dout, dlse = out.new_zeros(()).expand(out.shape) if dout is None else written_out(dout), written_out(dlse)
    grads = ready.gradients(seed, grad_names, saved, dout, dlse) if grad_names else {}
    if needed[3]:
        grads = {**grads, "sinks": dsinks(share_of_sinks(ready, sinks, lse, softmax_stats), out, lse, dout, dlse)}
    inputs = (q, k, v, sinks, *values)
    # gradients of tables are sums in the dtype of scores
    return [grads[n].to(x) if need else None for n, need, x in zip(names, needed, inputs, strict=True)]


def gradients_again(
    repeat: Any, ready: PreparedCall, saved: tuple[Any, ...], dout: Any, dlse: Any, needed: Any
) -> list[Any]:
    """`gradients` of a call of q, k and v alone that a `repeat` ran."""
    plain = dout is not None and dlse is None and forward_ad._current_level < 0
    plain = plain and not torch._C._is_torch_function_mode_enabled()
    if plain and not torch.compiler.is_compiling():  # compiled autograd would guard on addresses
        arrays = (*saved[:3], *saved[4:])  # such a call has no sinks
        grads: list[Any] | None = repeat.gradients(arrays, dout, needed)
        if grads is not None:
            return [*grads, None]
    return gradients(ready, None, saved, dout, dlse, needed)


@memo(256, weigh=500)
def _gradient_names(
    kv_inputs: tuple[tuple[str, str], ...], needed: tuple[bool, ...]
) -> tuple[tuple[str, ...], frozenset[str]]:
    """The names of all gradients, and of those that the executor is asked for."""
    names = ("q", "k", "v", "sinks", *(n for n, _ in kv_inputs))
    return names, frozenset(n for n, need in zip(names, needed, strict=True) if need and n != "sinks")


def share_of_sinks(ready: PreparedCall, sinks: Tensor, lse: Tensor, softmax_stats: Any) -> Tensor:
    """The weight of the sink in each row, [batch, heads, q_len]: exp(sink - lse). It takes what `softmax_stats` knows
    of the row where it does: a float32 lse of 1e5 is off by 0.004."""
    sinks, lse = (x.clamp(max=torch.finfo(torch.float32).max) for x in (sinks, lse))  # inf - inf is 0 here
    if softmax_stats is None:
        share: Tensor = (sinks[:, None] - lse).exp()
    elif ready.stats_kind == "offset":
        share = (sinks.double()[:, None] - lse_of(ready.inputs, softmax_stats, lse)).exp().to(lse.dtype)
    else:  # the rounding error of lse; twice, where it comes from a graph
        share = (sinks[:, None] - lse - (softmax_stats if softmax_stats.ndim == 3 else softmax_stats[..., 0])).exp()
    return share


def dsinks(share: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Any) -> Tensor:
    """The gradient of the sinks: one more logit of every row, with weight `share` and value 0."""
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    # a row without keys and a sink of -inf: exp(-inf + inf) is NaN
    return -(torch.where(lse == -torch.inf, 0.0, share) * delta).sum((0, 2))


class Gradients(torch.autograd.Function):
    """`grads`, the gradients of a call, as a function of (ready, seed, needed, grads, dout, dlse, *inputs)."""

    @staticmethod
    def forward(ctx: Any, ready: PreparedCall, seed: Any, needed: Any, grads: list[Any], *operands: Any) -> Any:
        ctx.call = ready, seed, needed
        ctx.save_for_backward(*operands)
        ctx.set_materialize_grads(False)
        return tuple(None if g is None else g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        ready, seed, needed = ctx.call
        dout, dlse, *inputs = ctx.saved_tensors
        call = DifferentiableCall.of(ready, seed)

        # cotangents are mapped by is_grads_batched
        results = mapped(lambda *of_one: second(call, of_one, dout, dlse, inputs, needed), *cotangents)
        return None, None, None, None, *results


# -- tokens in another order ---------------------------------------------------------------------------

Index = NDArray[np.int64]
APART = 1 << 16  # bytes of a batch entry or head from which it is worth a separate call


def take(x: Tensor, index: Index, axis: int, inverse: Index | None = None, scratch: bool = False) -> Tensor:
    """`x` at `index` along an axis. With the index that puts rows back, gradients are gathered by it: torch's own
    gradient adds rows to zeros, and takes three times as long. `scratch`: no user sees the tensor."""
    # what follows reads memory of the host
    if in_graph(x) or not x.is_cpu or x.is_neg() or forward_ad._current_level >= 0:
        return x.index_select(axis, torch.as_tensor(index, device=x.device))
    if not (torch.is_grad_enabled() and x.requires_grad):
        return gathered(x, index, axis, scratch)
    if inverse is None:
        return x.index_select(axis, torch.as_tensor(index))
    permuted: Tensor = Moved.apply(x, index, inverse, axis, scratch)  # type: ignore[no-untyped-call]
    return permuted


class Moved(torch.autograd.Function):
    """`x` in another order: of (x, index, inverse, axis, scratch)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Index, inverse: Index, axis: int, scratch: bool) -> Tensor:
        ctx.back = inverse, axis, index, not scratch
        return gathered(x, index, axis, scratch)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return take(cotangents[0], *ctx.back), None, None, None, None


def gathered(x: Tensor, index: Index, axis: int, scratch: bool) -> Tensor:
    """`x` at `index` along an axis, a batch entry and head at a time, which torch copies in half the time."""
    places, lead = torch.as_tensor(index), x.shape[:axis]
    size = torch.Size((*lead, len(index), *x.shape[axis + 1 :]))
    if x.nbytes < APART * prod(lead):  # a call of torch for few bytes takes longer than the copy
        return x.index_select(axis, places)
    rows = empty(size, x.dtype, scratch)
    for at in np.ndindex(*lead):
        torch.index_select(x[at], 0, places, out=rows[at])
    return rows


def empty(size: torch.Size, dtype: torch.dtype, scratch: bool) -> Tensor:
    """A tensor in huge pages where it is large; of a `scratch` one, whose storage may be larger, every page is huge."""
    n = size.numel() * dtype.itemsize
    if scratch and n >= LARGE:
        memory = torch.empty(n + HUGE, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % HUGE :][:n]  # from a border of huge pages on
        huge(memory)
        return memory.view(dtype).view(size)
    tensor = torch.empty(size, dtype=dtype)
    huge(tensor)
    return tensor


# -- around executors that do not read rows by tables ----------------------------------------------


def with_permutation(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward whose arrays are put in the order of `inputs.rows`, and its results back."""

    def permuted(inputs: KernelInputs, q: Tensor, k: Tensor, v: Tensor, **results: bool) -> tuple[Any, ...]:
        rows = inputs.rows
        q, (k, v) = _at(q, rows.queries), (_at(x, rows.keys) for x in (k, v))
        return tuple(_at(x, rows.back) for x in forward(inputs, q, k, v, **results))

    return permuted


def gradients_with_permutation(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward whose arrays are put in the order of `inputs.rows`, and its gradients back."""

    def permuted(
        inputs: KernelInputs, q: Tensor, k: Tensor, v: Tensor, results: Any, cotangents: Any, **names: Any
    ) -> dict[str, Tensor]:
        rows = inputs.rows
        q, (k, v) = _at(q, rows.queries), (_at(x, rows.keys) for x in (k, v))
        results = ForwardResults(*(_at(x, rows.queries) for x in vars(results).values()))
        cotangents = Cotangents(*(_at(x, rows.queries) for x in vars(cotangents).values()))
        grads: dict[str, Tensor] = backward(inputs, q, k, v, results, cotangents, **names)
        back = {"q": rows.back, "k": rows.keys_back, "v": rows.keys_back}
        return {n: _at(x, back[n]) if n in back else x for n, x in grads.items()}

    return permuted


def _at(x: Any, index: NDArray[Any]) -> Any:
    # lengths are third of all, lse and statistics too
    return None if x is None else x.index_select(2, torch.as_tensor(index))
