"""Attention inside torch.func: grad, vjp and their like, and vmap.

An axis that vmap adds is no batch axis: `b` of a mask keeps its meaning. Where nothing reads `b`, the entries of the
mapped axis are run as one batch all the same, otherwise one by one. Imports torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._functorch import TransformType, _unwrap_for_grad, _wrap_for_grad
from torch._functorch.autograd_function import generate_single_level_function
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI
from torch.utils._pytree import tree_map_only

from frisket.dsl.ir import uses

from . import running as running
from .autograd import each, no_forward_mode, no_second
from .running import names_of


class FuncAttend(torch.autograd.Function):
    """(out, lse, top, softmax_stats) of ((numbers, spec, names), q, k, v, sinks, *values)."""

    @staticmethod
    def forward(static: Any, q: Any, k: Any, v: Any, sinks: Any, *values: Any) -> Any:
        numbers, spec, names = static
        return torch.ops.frisket.attend(q, k, v, sinks, list(values), numbers, spec, names)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.static, *arrays = inputs
        out, lse, top, softmax_stats = output
        ctx.save_for_backward(*arrays, out, lse, softmax_stats)
        ctx.mark_non_differentiable(top, softmax_stats)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        no_forward_mode()

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, *_: Any) -> Any:
        *arrays, out, lse, softmax_stats = ctx.saved_tensors
        running.refuse_stored(arrays[0], arrays[1], ctx.static[2])
        floating = [x is not None and x.is_floating_point() for x in arrays]
        needed = [n and f for n, f in zip(ctx.needs_input_grad[1:], floating, strict=True)]
        grads = iter(FuncBackward.forward(ctx.static, tuple(needed), dout, dlse, out, lse, softmax_stats, *arrays))
        return None, *(next(grads) if need else None for need in needed)

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> Any:
        static, q, k, v, sinks, *values = args
        if _separate_calls(static, dims[4:], values):
            return each(FuncAttend.forward, info.batch_size, dims, args), (0,) * 4
        n = info.batch_size
        arrays = (_joined(x, d, n) for x, d in zip((q, k, v), dims[1:4]))
        out, lse, top, softmax_stats = FuncAttend.forward(static, *arrays, sinks, *values)
        has_top = top.ndim > 1
        results = _split(out, n), _split(lse, n), _split(top, n) if has_top else top, _split(softmax_stats, n)
        return results, (0, 0, 0 if has_top else None, 0)


class FuncBackward(torch.autograd.Function):
    """The gradients that are needed."""

    @staticmethod
    def forward(
        static: Any, needed: Any, dout: Any, dlse: Any, out: Any, lse: Any, softmax_stats: Any, *arrays: Any
    ) -> Any:
        q, k, v, sinks, *values = arrays
        flags = [*needed[:4], *(n for n, x in zip(needed[4:], values, strict=True) if x.is_floating_point())]
        inputs = running.gradient_inputs(dout, dlse, (q, k, v, sinks), values, (out, lse, softmax_stats), static, flags)
        return tuple(torch.ops.frisket.attend_backward(*inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    jvp = FuncAttend.jvp

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return no_second(ctx, *cotangents)

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> Any:
        static, needed, *arrays = args
        if any(needed[3:]) or _separate_calls(
            static, dims[10:], arrays[9:]
        ):  # every entry has a gradient of sinks and values
            grads = each(FuncBackward.forward, info.batch_size, dims, args)
            return grads, (0,) * len(grads)
        n = info.batch_size
        joined = (_joined(x, d, n) for x, d in zip(arrays[:8], dims[2:10]))
        grads = FuncBackward.forward(static, needed, *joined, *arrays[8:])
        return tuple(_split(x, n) for x in grads), (0,) * len(grads)


def transformed(name: str, *inputs: Any) -> Any:
    """An operator inside of torch.func's transforms. `functionalize` has nothing to replace: operators write to no
    argument."""
    interpreter: Any = retrieve_current_functorch_interpreter()
    if interpreter.key() != TransformType.Functionalize:
        return globals()[f"_transformed_{name}"](*inputs)
    api: Any = FunctorchFunctionalizeAPI(interpreter)
    inputs = api.unwrap_tensors(inputs)
    with api.redispatch_to_next():
        results = getattr(torch.ops.frisket, name)(*inputs)
    return api.wrap_tensors(results)


def _in_one_level(kind: Any, *operands: Any) -> Any:
    """`kind.apply` for the innermost transform. The next one gets the operator that `kind.forward` calls: functionalize
    has no rule for functions."""
    interpreter: Any = retrieve_current_functorch_interpreter()
    if interpreter.key() == TransformType.Vmap:
        return kind.apply(*operands)
    level = interpreter.level()

    def forward(*operands: Any) -> Any:
        alive = torch._C._functorch.unwrap_if_dead  # what vjp saved outlives its level
        plain = tree_map_only(torch.Tensor, lambda x: _unwrap_for_grad(alive(x), level), operands)
        with torch.enable_grad(), interpreter.lower():
            results = kind.forward(*plain)
        return tuple(_wrap_for_grad(x, level) for x in results)

    function: Any = generate_single_level_function(interpreter, kind)
    function.forward = staticmethod(forward)
    with enable_single_level_autograd_function():
        return function.apply(*operands)


def _transformed_attend(q: Any, k: Any, v: Any, sinks: Any, values: Any, *static: Any) -> Any:
    """`frisket::attend` inside of torch.func's transforms, whose rules are those of `FuncAttend`."""
    return _in_one_level(FuncAttend, static, q, k, v, sinks, *values)


def _transformed_attend_alone(*inputs: Any) -> Any:
    return _transformed_attend(*inputs)[0]


def _transformed_attend_backward(
    dout: Any,
    dlse: Any,
    q: Any,
    k: Any,
    v: Any,
    sinks: Any,
    values: Any,
    out: Any,
    lse: Any,
    softmax_stats: Any,
    *rest: Any,
) -> Any:
    """`frisket::attend_backward` inside of transforms. It names needed gradients of Floats, `FuncBackward` of all."""
    numbers, spec, names, needed = rest
    floats = iter(needed[4:])
    needed = (*needed[:4], *(x.is_floating_point() and next(floats) for x in values))
    arrays = dout, dlse, out, lse, softmax_stats, q, k, v, sinks
    return list(_in_one_level(FuncBackward, (numbers, spec, names), needed, *arrays, *values))


def _separate_calls(static: Any, dims: Any, values: Any) -> bool:
    """Whether entries of a mapped axis are different calls: with sinks or values of their own (by `dims`), with
    positions or sizes of a batch, random draws, keys that are stored, or masks and score mods that know b."""
    numbers, spec, names = static
    if any(isinstance(d, int) for d in dims) or any(" " in name for _, name in names_of(names)[1]):
        return True
    att, _ = running.call_of(values, numbers, spec, names)
    return any(uses(e) & {"b", "B"} for e in att.program.exprs if e is not None)


def _joined(x: Any, dim: Any, n: int) -> Any:
    """The mapped axis and the batch as one."""
    if x is None:
        return None
    return (x.movedim(dim, 0) if isinstance(dim, int) else x.expand(n, *x.shape)).flatten(0, 1)


def _split(x: Any, n: int) -> Any:
    return x.unflatten(0, (n, -1))
