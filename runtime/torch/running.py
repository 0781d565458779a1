"""Runs the operators of torch in a graph (`operators.py`) on tensors with values. Imports torch.

`names` says, in order, what `values` (tensors) and `numbers` are; the names of scales and pages are no identifiers.
Before them it says "max" where the largest scores are asked for, then ":" where a graph may ask for gradients, and the
names of the values that want one, with ":" between.

Inside torch.func (grad, vjp and their like, and vmap) an axis that vmap adds is no batch axis: `b` of a mask keeps its
meaning. Where nothing reads `b`, the entries of the mapped axis are run as one batch all the same, otherwise one after
another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, _unwrap_for_grad, _wrap_for_grad
from torch._functorch.autograd_function import generate_single_level_function
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.utils import enable_single_level_autograd_function
from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI
from torch.utils._pytree import tree_map_only

from frisket.dsl.ir import uses
from frisket.grammar.memo import memo
from frisket.lowering.derive import norm_width
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.calls.arrays import check_devices, refuse_gradients
from frisket.runtime.calls.options import CallArgs
from frisket.runtime.machine.settings import Settings

from .autograd import each, gradients, gradients_again, mapped, no_forward_mode, no_second
from .op import attend as attend_op
from .op import kept_ready
from .spec import attention_of

Tensors = Sequence[Tensor]
Ints = Sequence[int]
Triple = tuple[Any, Any, Any]  # q, k and v
BARE = "", ":"  # the names of a call of q, k and v alone


def call_of(
    values: Tensors, numbers: Ints, spec: str, names: str, qkv: Triple = (None, None, None), sinks: Any = None
) -> tuple[Any, CallArgs]:
    """The attention and the keywords of a call of it."""
    if names in BARE:  # most calls: fields in their order take half the time of fields by name
        args: tuple[Any, ...] = (*qkv, None, None, sinks, False, None, None, "bhsd", {})
        return attention_of(spec, ()), tuple.__new__(CallArgs, args)
    top, entries = names_of(names)
    tensors, ints = iter(values), iter(numbers)
    params: dict[str, Any] = {}
    for kind, name in entries:
        if kind == "tensor":
            params[name] = next(tensors)
        elif kind == "number":
            params[name] = next(ints)
        else:
            params[name] = kind == "True" if kind in ("True", "False") else float(kind)
    seed, _ = params.pop(" seed", None), params.pop(" rank", None)  # the rank is there to tell graphs apart
    place = {w: [_known(params.pop(f" {w}{i}")) for i in range(4) if f" {w}{i}" in params] for w in ("origin", "size")}
    att = attention_of(spec, tuple((n, *_kind(x)) for n, x in params.items() if not reserved(n)))
    origin, sizes = (tuple(x) or None for x in place.values())
    seed = None if seed is None else int(seed)
    return att, CallArgs(*qkv, None, seed, sinks, top, origin, sizes, "bhsd", params)


def _known(x: Any) -> Any:
    """The number that a tensor without axes holds: torch.jit.trace gives lengths as such tensors."""
    return int(x) if isinstance(x, Tensor) and not x.ndim else x


def _kind(x: Any) -> tuple[int, type]:
    if not isinstance(x, Tensor):
        return 0, type(x)
    return x.ndim, float if x.is_floating_point() else bool if x.dtype == torch.bool else int


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, values: Tensors, numbers: Ints, spec: str, names: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    att, request = call_of(values, numbers, spec, names, (q, k, v), sinks)
    grad_names, record = grad_names_of(names), RECORDS.get(att.options.backend or Settings.read().backend or "")
    checks = record is not None and "torch" in record.executors and record.executors["torch"].checks_gradients
    if checks and grad_names is not None and q.numel() and k.numel():
        ready = kept_ready(att, request)
        learned = frozenset(n for n, source in ready.kv_inputs if source in grad_names)
        arrays = q, k, v, sinks, *(request.params[n] for _, n in ready.kv_inputs)
        ready.check_gradients(arrays, request.seed, learned)
    out, lse, top, softmax_stats = attend_op(att, request, saving=True)
    top = lse.new_empty(0) if top is None or not request.top else top.contiguous()
    # known from shapes, before a backend is chosen: fake tensors have none
    width = norm_width(q.dtype, v.shape[3], q.device.type)
    if softmax_stats is None:
        softmax_stats = lse.new_zeros((*lse.shape, width))
    elif softmax_stats.ndim == 3:  # a graph has one shape for all that executors know of rows
        zeros = [torch.zeros_like(softmax_stats)] * (width - 2)
        softmax_stats = torch.stack([softmax_stats, softmax_stats, *zeros], -1)
    # as the fake operator says: inductor relies on strides
    return out.contiguous(), lse.contiguous(), top, softmax_stats


def attend_alone(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, values: Tensors, numbers: Ints, spec: str, names: str
) -> Tensor:
    att, request = call_of(values, numbers, spec, names, (q, k, v), sinks)
    out: Tensor = attend_op(att, request, lse=False)[0]
    return out.contiguous()


def tiles(like: Tensor, values: Tensors, numbers: Ints, sizes: Ints, block: Ints, spec: str, names: str) -> Tensor:
    att, request = call_of(values, numbers, spec, names)
    q_len, kv_len, batch, heads = sizes
    mask = att.mask.bind(**request.params)
    kinds = mask.layout(q_len, kv_len, batch=batch, heads=heads, block=(block[0], block[1])).kinds()
    return torch.from_numpy(kinds).to(like.device)


def attend_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> list[Tensor]:
    """The gradients that are `needed`; `rest` is what the schema in `operators` lists after the sinks."""
    values, out, lse, softmax_stats, numbers, spec, names, needed = rest
    if not (q.numel() and k.numel()):  # lse is the sink, and every other gradient is 0
        zeros = [None if x is None else torch.zeros_like(x) for x in (q, k, v, sinks, *floats(values))]
        if sinks is not None and dlse is not None:
            zeros[3] = dlse.sum((0, 2)).to(sinks.dtype)
        return [g for g, need in zip(zeros, needed, strict=True) if need and g is not None]
    att, request = call_of(values, numbers, spec, names, (q, k, v), sinks)
    ready = kept_ready(att, request, defers=True)
    if ready.fast and sinks is None and names in BARE:
        saved: tuple[Any, ...] = (q, k, v, None, out, lse, softmax_stats)
        results = gradients_again(ready.fast, ready, saved, dout, dlse, tuple(needed[:4]))
        return [g.contiguous() for g in results if g is not None]
    ready = ready.taking(sinks, request.top)  # as in the forward
    inputs = [request.params[n] for _, n in ready.kv_inputs]
    saved = (q, k, v, sinks, out, lse, softmax_stats, *inputs)
    needed_by_name = dict(zip(learnable(values, names), needed[4:], strict=True))
    flags = (*needed[:4], *(needed_by_name[n] for _, n in ready.kv_inputs))
    results = gradients(ready, request.seed, saved, dout, dlse, flags)
    by_name = {n: g for (_, n), g in zip(ready.kv_inputs, results[4:], strict=True)}
    grads = [g for g, need in zip(results[:4], needed[:4], strict=True) if need]
    named = dict(zip(learnable(values, names), floats(values), strict=True))
    for name, need in needed_by_name.items():
        if need:  # a table the score mod reads through no derivative, or the mask alone, has none
            grads.append(by_name[name] if name in by_name else torch.zeros_like(named[name]))
    return [g.contiguous() for g in grads]


def mapped_backward(dout: Any, dlse: Any, *rest: Any) -> list[Tensor]:
    """`frisket::attend_backward` of cotangents that torch.autograd.grad(is_grads_batched=True) maps."""
    return list(mapped(lambda *both: torch.ops.frisket.attend_backward(*both, *rest), dout, dlse))


def fake_tiles(like: Tensor, values: Tensors, numbers: Ints, sizes: Ints, block: Ints, spec: str, names: str) -> Tensor:
    rows, columns = (-(-n // size) for n, size in zip(sizes, block))
    return like.new_empty((sizes[2], sizes[3], rows, columns), dtype=torch.uint8)


# -- shapes, and gradients --------------------------------------------------------------------------------------------


def fake_attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, values: Tensors, numbers: Ints, spec: str, names: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_devices(q, k, v)
    lse = q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    # an operator returns a tensor, if an empty one
    top = torch.empty_like(lse) if names_of(names)[0] else lse.new_empty(0)
    softmax_stats = lse.new_empty((*lse.shape, norm_width(q.dtype, v.shape[3], q.device.type)))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse, top, softmax_stats


def fake_attend_alone(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    check_devices(q, k, v)
    return q.new_empty((*q.shape[:3], v.shape[3]))


def fake_attend_backward(dout: Any, dlse: Any, *rest: Any) -> list[Tensor]:
    *arrays, values, _, _, _, _, _, _, needed = rest
    inputs = (*arrays, *floats(values))
    return [x.new_empty(x.shape) for x, need in zip(inputs, needed, strict=True) if need and x is not None]


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sinks, values, numbers, spec, names = inputs
    out, lse, top, softmax_stats = output
    ctx.save_for_backward(q, k, v, sinks, out, lse, softmax_stats, *values)
    ctx.mark_non_differentiable(top, softmax_stats)
    ctx.set_materialize_grads(False)  # a cotangent of lse that is None costs nothing
    ctx.static = numbers, spec, names


def gradient(ctx: Any, dout: Any, dlse: Any, *_: Any) -> tuple[Any, ...]:
    q, k, v, sinks, out, lse, softmax_stats, *values = ctx.saved_tensors
    numbers, _, names = ctx.static
    refuse_stored(q, k, names)
    floating = [x.is_floating_point() for x in values]
    need_values = ctx.needs_input_grad[4]
    if not isinstance(need_values, (list, tuple)):
        need_values = [bool(need_values) and x.requires_grad for x in values]
    needed = [*ctx.needs_input_grad[:4], *(n for n, f in zip(need_values, floating, strict=True) if f)]
    if (dout is None and dlse is None) or not any(needed):
        return None, None, None, None, [None] * len(values), None if numbers else [], None, None
    inputs = gradient_inputs(dout, dlse, (q, k, v, sinks), values, (out, lse, softmax_stats), ctx.static, needed)
    results = iter(torch.ops.frisket.attend_backward(*inputs))
    grads = [next(results) if need else None for need in needed]
    rest = iter(grads[4:])
    return *grads[:4], [next(rest) if f else None for f in floating], None if numbers else [], None, None


def gradient_inputs(
    dout: Any, dlse: Any, arrays: tuple[Any, ...], values: Any, results: tuple[Any, ...], static: Any, needed: Any
) -> tuple[Any, ...]:
    """The arguments of the backward operator; `results` are out, lse and softmax_stats."""
    numbers, spec, names = static
    return dout, dlse, *arrays, list(values), *results, numbers, spec, names, list(needed)


def refuse_stored(q: Tensor, k: Tensor, names: str) -> None:
    """Raise where keys and values are stored: such calls have no gradients."""
    stored = [n for _, n in names_of(names)[1] if reserved(n)]
    if stored or q.dtype != k.dtype:
        refuse_gradients("" if q.dtype == k.dtype else str(k.dtype).removeprefix("torch."), stored)


def sorted_out(items: list[tuple[str, Any]], names: str) -> tuple[list[Tensor], list[int], str]:
    """(tensors, numbers, names and kinds of both) of the values of a call."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    for name, x in items:
        if isinstance(x, (bool, float)):  # part of the graph
            names += f",{x} {name}"
        elif isinstance(x, (int, torch.SymInt)):
            numbers.append(x)  # type: ignore[arg-type]
            names += f",number {name}"
        else:
            tensors.append(x if isinstance(x, Tensor) else torch.tensor(x, device="cpu"))
            names += f",tensor {name}"
    return tensors, numbers, names


@memo(256, weigh=500)
def names_of(text: str) -> tuple[bool, tuple[tuple[str, str], ...]]:
    """Whether the largest scores are asked for, and (kind, name) of every value."""
    top, *rest = text.split(",")
    return top.startswith("max"), tuple((kind, name) for kind, _, name in (x.partition(" ") for x in rest))


def grad_names_of(text: str) -> frozenset[str] | None:
    """The names of the values that a graph may ask gradients of; None where it asks for none at all."""
    _, colon, names = text.partition(",")[0].partition(":")
    return frozenset(names.split(":")) if colon else None


def reserved(name: str) -> bool:
    """Whether a name is not the user's, but that of scales or pages of stored keys and values."""
    return " of " in name


def floats(values: Sequence[Tensor]) -> list[Tensor]:
    return [x for x in values if x.is_floating_point()]


def learnable(values: Sequence[Tensor], names: str) -> list[str]:
    """The names of the Float tensors among the values."""
    tensors = [n for kind, n in names_of(names)[1] if kind == "tensor"]
    return [n for n, x in zip(tensors, values, strict=True) if x.is_floating_point()]


# -- inside torch.func --------------------------------------------------------------------------------


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
        refuse_stored(arrays[0], arrays[1], ctx.static[2])
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
        inputs = gradient_inputs(dout, dlse, (q, k, v, sinks), values, (out, lse, softmax_stats), static, flags)
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
        # every entry has a gradient of sinks and values
        if any(needed[3:]) or _separate_calls(static, dims[10:], arrays[9:]):
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


def _transformed_attend_backward(*inputs: Any) -> Any:
    """`frisket::attend_backward` inside of transforms. It names needed gradients of Floats, `FuncBackward` of all."""
    dout, dlse, *arrays, values, out, lse, softmax_stats, numbers, spec, names, needed = inputs
    flags = iter(needed[4:])
    needed = (*needed[:4], *(x.is_floating_point() and next(flags) for x in values))
    arrays = [dout, dlse, out, lse, softmax_stats, *arrays]  # q, k, v and sinks are last
    return list(_in_one_level(FuncBackward, (numbers, spec, names), needed, *arrays, *values))


def _separate_calls(static: Any, dims: Any, values: Any) -> bool:
    """Whether entries of a mapped axis are different calls: with sinks or values of their own (by `dims`), with
    positions or sizes of a batch, random draws, keys that are stored, or masks and score mods that know b."""
    numbers, spec, names = static
    # names with blanks are those of places, seeds and stored keys
    if any(isinstance(d, int) for d in dims) or any(" " in name for _, name in names_of(names)[1]):
        return True
    att, _ = call_of(values, numbers, spec, names)
    return any(uses(e) & {"b", "B"} for e in att.program.exprs.parts)


def _joined(x: Any, dim: Any, n: int) -> Any:
    """The mapped axis and the batch as one."""
    if x is None:
        return None
    # an operand that is not mapped serves all entries
    return (x.movedim(dim, 0) if isinstance(dim, int) else x.expand(n, *x.shape)).flatten(0, 1)


def _split(x: Any, n: int) -> Any:
    return x.unflatten(0, (n, -1))
