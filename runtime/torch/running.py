"""Runs the operators of torch in a graph (`operators.py`) on tensors with values. Imports torch.

`names` says, in order, what `values` (tensors) and `numbers` are; the names of scales and pages are no identifiers.
Before them it says "max" where the largest scores are asked for, and "host" where the call reads numbers or tables on
the host. Then it says ":" where a graph may ask for gradients, and the names of the values that want one, with ":"
between.

Inside torch.func (grad, vjp and their like, and vmap) an axis that vmap adds is no batch axis: `b` of a mask keeps its
meaning. Where nothing reads `b`, the entries of the mapped axis are run as one batch all the same, otherwise one after
another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI
from torch.utils._python_dispatch import _disable_current_modes

from frisket.dsl.ir import names_of as reads
from frisket.dsl.ir import uses
from frisket.dsl.program import outside_transforms, unwrapped
from frisket.grammar.memo import memo
from frisket.lowering.derive import norm_width
from frisket.lowering.plan import NOWHERE
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.calls.arrays import check_devices, constant, refuse_gradients, uploaded
from frisket.runtime.calls.options import CallArgs
from frisket.runtime.machine.caller import outside
from frisket.runtime.machine.settings import Settings
from frisket.runtime.plans.empty import results_of

from .autograd import each, gradients, gradients_again, mapped
from .differentiable import DifferentiableCall, dual, one_level, second
from .differentiable import gradients as gradients_recorded
from .op import attend as attend_op
from .op import kept_ready, refuse_ambiguous
from .spec import attention_of
from .tangents import attend as attend_with_tangents

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
    att = attention_of(spec, tuple((n, *kind_of(x)) for n, x in params.items() if not reserved(n)))
    origin, sizes = (tuple(x) or None for x in place.values())
    return att, CallArgs(*qkv, None, _known(seed), sinks, top, origin, sizes, "bhsd", params)


def _known(x: Any) -> Any:
    """The number that a tensor without axes holds: torch.jit.trace gives lengths as such tensors. One that torch.vmap
    maps stays, until a call of each entry is made."""
    mapped = isinstance(x, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x)
    return int(x) if isinstance(x, Tensor) and not (x.ndim or mapped) else x


def kind_of(x: Any) -> tuple[int, type]:
    """How many axes a value has, and bool, int or float."""
    if not isinstance(x, Tensor):
        return 0, type(x)
    return x.ndim, float if x.is_floating_point() else bool if x.dtype == torch.bool else int


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, values: Tensors, numbers: Ints, spec: str, names: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    att, request = call_of(values, numbers, spec, names, (q, k, v), sinks)
    grad_names, record = grad_names_of(names), RECORDS.get(att.options.backend or Settings.read().backend or "")
    checks = record is not None and "torch" in record.executors and record.executors["torch"].checks_gradients
    if checks and grad_names is not None and not _is_empty(q, k):
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
    if values:
        return torch.from_numpy(_kinds(values, numbers, sizes, block, spec, names)).to(like.device)
    # another operator may write to what this returns
    return _tiles_on(str(like.device), tuple(numbers), tuple(sizes), tuple(block), spec, names).clone()


@memo(32)
def _tiles_on(device: str, numbers: Ints, sizes: Ints, block: Ints, spec: str, names: str) -> Tensor:
    """Tiles that no tensor decides are remembered, because a CUDA graph can capture no copy from the host."""
    return uploaded(_kinds((), numbers, sizes, block, spec, names), torch.device(device))  # type: ignore[no-any-return]


def _kinds(values: Tensors, numbers: Ints, sizes: Ints, block: Ints, spec: str, names: str) -> Any:
    att, request = call_of(values, numbers, spec, names)
    q_len, kv_len, batch, heads = sizes
    place = (block[0], block[1]), request.origin or NOWHERE, request.sizes
    layout = att.mask.bind(**request.params).layout(q_len, kv_len, batch, heads, *place)
    return layout.kinds()


def attend_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> list[Tensor]:
    """The gradients that are `needed`; `rest` is what the schema in `operators` lists after the sinks."""
    values, out, lse, softmax_stats, numbers, spec, names, needed = rest
    if _is_empty(q, k):  # lse is the sink, and every other gradient is 0
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
    ready = ready.taking(sinks, request.top, (q, k, v))  # as in the forward
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
    backward = operator("attend_backward", rest[-2])
    return list(mapped(lambda *both: backward(*both, *rest), dout, dlse))


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
    return fake_attend_alone(q, k, v), lse, top, softmax_stats


def fake_attend_alone(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    check_devices(q, k, v)
    return q.new_empty((*q.shape[:3], v.shape[3]), dtype=torch.bfloat16 if q.itemsize == 1 else q.dtype)


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
    results = iter(operator("attend_backward", names)(*inputs))
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
    if stored or k.itemsize == 1:
        refuse_gradients(str(k.dtype).removeprefix("torch.") if k.itemsize == 1 else "", stored)


def sorted_out(items: list[tuple[str, Any]], names: str) -> tuple[list[Tensor], list[int], str]:
    """(tensors, numbers, names and kinds of both) of the values of a call."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    for name, x in items:
        if isinstance(x, (bool, float)):  # part of the graph
            names += f",{x if isinstance(x, bool) else constant(x)} {name}"
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


def operator(name: str, names: str) -> Any:
    """The operator `name`, or its like that reads the host where `names` says so."""
    head = names.partition(",")[0].partition(":")[0]
    return getattr(torch.ops.frisket, f"{name}_reads_host" if head.endswith("host") else name)


def _is_empty(q: Tensor, k: Tensor) -> bool:
    """Whether a call has no queries, keys, batch entries or heads."""
    return not (q.numel() and k.numel())


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
        return operator("attend", names)(q, k, v, sinks, list(values), numbers, spec, names)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.static, *arrays = inputs
        out, lse, top, softmax_stats = output
        ctx.save_for_backward(*arrays, out, lse, softmax_stats)
        ctx.mark_non_differentiable(top, softmax_stats)

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
        return tuple(operator("attend_backward", static[2])(*inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.static, ctx.needed, dout, dlse, _, _, _, *arrays = inputs
        ctx.save_for_backward(dout, dlse, *arrays)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        dout, dlse, *arrays = ctx.saved_tensors
        call = RecordedCall(ctx.static, arrays)
        dout, dlse, *grads = call.second(iter(cotangents), dout, dlse, ctx.needed)
        return None, None, dout, dlse, None, None, None, *grads

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


def transformed(name: str, host: str, *inputs: Any) -> Any:
    """The operator `name + host` inside of torch.func's transforms. `functionalize` has nothing to replace: operators
    write to no argument."""
    interpreter: Any = retrieve_current_functorch_interpreter()
    if interpreter.key() != TransformType.Functionalize:
        return globals()[f"_transformed_{name}"](*inputs)
    api: Any = FunctorchFunctionalizeAPI(interpreter)
    inputs = api.unwrap_tensors(inputs)
    with api.redispatch_to_next():
        results = getattr(torch.ops.frisket, name + host)(*inputs)
    return api.wrap_tensors(results)


def _in_one_level(kind: Any, *operands: Any) -> Any:
    """`kind.apply` for the innermost transform. The next one gets the operator that `kind.forward` calls: functionalize
    has no rule for functions."""
    interpreter: Any = retrieve_current_functorch_interpreter()
    if interpreter.key() == TransformType.Vmap:
        return kind.apply(*operands)
    return one_level(kind, interpreter, kind.forward, *operands)


def _transformed_attend(q: Any, k: Any, v: Any, sinks: Any, values: Any, *static: Any) -> Any:
    """`frisket::attend` inside of torch.func's transforms, whose rules are those of `FuncAttend`, but for tangents."""
    if values:
        numbers, spec, names = static
        att, request = call_of(values, numbers, spec, names)
        refuse_ambiguous(att.program, request.params, _differentiated)
    if _has_tangents() or _is_empty(q, k):
        return RecordedCall(static, [q, k, v, sinks, *values]).results()
    return _in_one_level(FuncAttend, static, q, k, v, sinks, *values)


def _transformed_attend_alone(*inputs: Any) -> Any:
    return _transformed_attend(*inputs)[0]


def _transformed_attend_backward(*inputs: Any) -> Any:
    """`frisket::attend_backward` inside of transforms. It names needed gradients of Floats, `FuncBackward` of all."""
    dout, dlse, *arrays, values, out, lse, softmax_stats, numbers, spec, names, needed = inputs
    flags = iter(needed[4:])
    needed = (*needed[:4], *(x.is_floating_point() and next(flags) for x in values))
    if _has_tangents():
        grads = RecordedCall((numbers, spec, names), [*arrays, *values]).gradients(dout, dlse, needed)
        return [g for g, need in zip(grads, needed, strict=True) if need]
    arrays = [dout, dlse, out, lse, softmax_stats, *arrays]  # q, k, v and sinks are last
    return list(_in_one_level(FuncBackward, (numbers, spec, names), needed, *arrays, *values))


def _separate_calls(static: Any, dims: Any, values: Any) -> bool:
    """Whether entries of a mapped axis are different calls. They are with sinks or separate values (by `dims`), with
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


# -- tangents, and derivatives of gradients -------------------------------------------------------------


def _has_tangents() -> bool:
    interpreter: Any = retrieve_current_functorch_interpreter()
    return bool(interpreter.key() == TransformType.Jvp)


def _entries_or_shape(x: Tensor) -> Tensor:
    """A value as a plan reads it: without transforms. Floats that torch.vmap maps have a shape alone."""
    return torch.empty(x.shape, dtype=x.dtype) if x.is_floating_point() and _mapped(x) else unwrapped(x).detach()


def _levels(x: Tensor) -> Iterator[Tensor]:
    """The tensor as each transform of torch.func sees it, the innermost transform first."""
    functorch: Any = torch._C._functorch
    yield x
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
        yield x


def _mapped(x: Tensor) -> bool:
    return any(map(torch._C._functorch.is_batchedtensor, _levels(x)))


def _differentiated(x: Any) -> bool:
    mapped = torch._C._functorch.is_batchedtensor  # torch.vmap has no rule for tangents
    levels = _levels(x) if isinstance(x, Tensor) else ()
    return any(not mapped(y) and (y.requires_grad or dual(y)[1] is not None) for y in levels)


def _tensors(names: str) -> list[str]:
    return [name for kind, name in names_of(names)[1] if kind == "tensor"]


class RecordedCall:
    """An operator's call as a `DifferentiableCall`, from (numbers, spec, names) and [q, k, v, sinks, *values]."""

    @outside
    def __init__(self, static: Any, arrays: Sequence[Any]) -> None:
        numbers, spec, names = static
        self.arrays = arrays
        q, k, v, _, *values = arrays
        with outside_transforms(), _disable_current_modes(), torch.no_grad():
            plain = [_entries_or_shape(x) for x in values]
            device = "cpu" if q.is_meta else q.device  # no kernel runs, and plans ask which would
            qkv: Any = tuple(torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k, v))
            att, request = call_of(plain, numbers, spec, names, qkv, None)
            mask, named = att.program.exprs.mask, dict(zip(_tensors(names), values, strict=True))
            for name in () if mask is None else named.keys() & reads(mask):
                unwrapped(named[name])  # a mask is laid out by entries, and torch.vmap's raise
            self.seed, self.top = request.seed, request.top
            self.checked = att.call(request) if _is_empty(q, k) else None
            if self.checked is not None:
                return
            self.ready = kept_ready(att, request).generated
        tensors = _tensors(names)
        self.places = [tensors.index(name) for _, name in self.ready.kv_inputs]  # among the values

    @cached_property
    def call(self) -> DifferentiableCall:
        return DifferentiableCall.of(self.ready, self.seed)

    def _read(self, values: Sequence[Any]) -> list[Any]:
        return [values[i] for i in self.places]

    @outside
    def results(self) -> tuple[Any, ...]:
        """The results of `frisket::attend`."""
        q, k, v, sinks, *values = self.arrays
        if self.checked is not None:  # there is nothing to plan, and torch's rules for zeros and sinks are all
            arrays = replace(self.checked.arrays, q=q, k=k, v=v)
            out, lse, top = results_of(arrays, self.checked.geometry, sinks, floats(values))
        else:
            out, lse, top = attend_with_tangents(self.ready, self.seed, self.top, q, k, v, sinks, *self._read(values))
        width = norm_width(q.dtype, v.shape[3], q.device.type)
        return out, lse, top if self.top else lse.new_empty(0), lse.new_zeros((*lse.shape, width))

    @outside
    def gradients(self, dout: Any, dlse: Any, needed: Sequence[bool]) -> list[Any]:
        """The gradients of the arrays that are `needed`."""
        arrays, values = self.arrays[:4], self.arrays[4:]
        flags = [*needed[:4], *self._read(needed[4:])]
        grads = gradients_recorded(self.call, dout, dlse, [*arrays, *self._read(values)], flags)
        return self._spread(grads, needed)

    @outside
    def second(self, cotangents: Any, dout: Any, dlse: Any, needed: Sequence[bool]) -> list[Any]:
        """The derivatives by (dout, dlse, *arrays) of the gradients that are `needed`, one cotangent for each."""
        by_array = [next(cotangents) if need else None for need in needed]
        if self.checked is not None:  # gradients of zeros, but for the sinks, whose gradient is a sum of dlse
            of_sinks = None if dlse is None or by_array[3] is None else by_array[3][:, None].expand_as(dlse)
            return [None, None if of_sinks is None else of_sinks.to(dlse.dtype), *[None] * len(needed)]
        flags = [*needed[:4], *self._read(needed[4:])]
        arrays = [*self.arrays[:4], *self._read(self.arrays[4:])]
        of_grads = [*by_array[:4], *self._read(by_array[4:])]
        dout, dlse, *grads = second(self.call, of_grads, dout, dlse, arrays, flags)
        return [dout, dlse, *self._spread(grads, [False] * len(needed))]

    def _spread(self, grads: Sequence[Any], needed: Sequence[bool]) -> list[Any]:
        """Gradients of all values, from those that the score mod reads; the others are 0 where they are `needed`."""
        by_place = dict(zip(self.places, grads[4:], strict=True))
        values = [
            torch.zeros_like(x) if need and i not in by_place else by_place.get(i)
            for i, (x, need) in enumerate(zip(self.arrays[4:], needed[4:], strict=True))
        ]
        return [*grads[:4], *values]


def setup_second(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    dout, dlse, q, k, v, sinks, values, _, _, _, *static, needed = inputs
    ctx.save_for_backward(dout, dlse, q, k, v, sinks, *values)
    ctx.call = static, needed


def second_gradient(ctx: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
    """The gradient of `frisket::attend_backward`."""
    (dout, dlse, *arrays), (static, needed) = ctx.saved_tensors, ctx.call
    flags = iter(needed[4:])
    needed = (*needed[:4], *(x.is_floating_point() and next(flags) for x in arrays[4:]))
    dout, dlse, *grads = RecordedCall(static, arrays).second(iter(cotangents), dout, dlse, needed)
    return dout, dlse, *grads[:4], list(grads[4:]), None, None, None, None if static[0] else [], None, None, None
