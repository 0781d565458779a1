"""Attention as operators of torch, for graphs: torch.compile, torch.export, torch.func, fake and meta tensors.

`frisket::attend(q, k, v, sinks, values, numbers, spec, names)` and `frisket::attend_backward`. A graph holds nothing
but them: `spec` is the attention as a text, and its layout is planned when the operator runs, from the shapes it then
gets, so one graph serves many lengths. `names` says, in order, what `values` (tensors) and `numbers` are; of what is
beside keys and values that are stored, the names are no identifiers. Imports torch, and nothing else of frisket before
an operator runs: `import frisket` beside torch registers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from frisket.dsl.errors import BackwardError, ParameterError

LIBRARY: Any = torch.library.Library("frisket", "DEF")  # type: ignore[no-untyped-call]
# Operators read a seed, and keep what they upload and plan for calls to come: torch.compile records no CUDA graph of
# them, in any mode.
_TAGS = (torch.Tag.cudagraph_unsafe,)
LIBRARY.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor[] values, SymInt[] numbers, str spec, str names)"
    " -> (Tensor out, Tensor lse, Tensor top, Tensor norm)",
    tags=_TAGS,
)
LIBRARY.define(
    "attend_backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor[] values,"
    " Tensor out, Tensor lse, Tensor norm, SymInt[] numbers, str spec, str names, bool[] needed) -> Tensor[]",
    tags=_TAGS,
)


LIBRARY.define(
    "tiles(Tensor like, Tensor[] values, SymInt[] numbers, SymInt[] sizes, SymInt[] block, str spec, str names)"
    " -> Tensor",
    tags=_TAGS,
)


# -- what a graph is written with: traced by Dynamo, so plain Python --------------------------------------------------


def traced_call(
    att: Any, q: Tensor, k: Tensor, v: Tensor, plan: Any, seed: Any, sinks: Any, top: bool, origin: Any, sizes: Any,
    layout: str | None, params: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse, top) of `att(q, k, v, ...)` in a graph."""
    dynamo = torch.compiler.is_dynamo_compiling()
    if plan is not None:
        if dynamo:
            raise ParameterError("a graph of torch plans when it runs: leave out `plan`, give its tables to the call")
        return by_plan(att, q, k, v, plan, seed, sinks, top, origin, sizes, layout, params)
    values = {n: x for n, x in (att.inputs if dynamo else att.constants).items() if n not in params}
    rate = att.options.dropout
    return written(att.spec, rate, q, k, v, seed, att.options.sinks if sinks is None else sinks, top, origin, sizes,
                   layout, {**values, **params})  # fmt: skip


def by_plan(
    att: Any, q: Tensor, k: Tensor, v: Tensor, plan: Any, seed: Any, sinks: Any, top: bool, origin: Any, sizes: Any,
    layout: str | None, params: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse, top) of `att(q, k, v, plan=plan, ...)`, by the values and the place that the plan holds."""
    from frisket.runtime.attention.attention import Attention

    att.check_planned(q, k, v, plan, origin, sizes, layout, params)
    same = Attention(plan.host_program.stored_as(None), att.options)
    values = {**plan.given, **params}
    return traced_call(same, q, k, v, None, seed, sinks, top, plan.origin, plan.sizes, layout, values)


def written_call(
    mask: Any, score: Any, options: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, seed: Any, sinks: Any, top: bool,
    origin: Any, sizes: Any, layout: str | None, params: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse, top) of `frisket.attention(q, k, v, mask, score, ...)` in a graph; `options` as a spec begins."""
    if not isinstance(mask, (str, type(None))) or not isinstance(score, (str, type(None))):
        raise ParameterError(
            "in a graph of torch frisket.attention takes a mask and a score mod as texts\n"
            "  or make att = frisket.compile(mask, score) outside, and call that"
        )
    if type(options[0]) not in (int, float, type(None)):
        raise ParameterError(
            "scale is a tensor, and a graph of torch holds it as a number\n"
            "  multiply q by a factor that is learned or changes, and give scale=1"
        )
    if q.is_nested:
        raise ParameterError(
            "in a graph of torch frisket.attention takes no nested tensors\n"
            "  make att = frisket.compile(mask, score) outside, and call that"
        )
    from .spec import HEAD

    text = mask or ""
    spec = HEAD.format(*options, False, len(text), "-") + text + (score or "")
    return written(spec, options[4], q, k, v, seed, sinks, top, origin, sizes, layout, params)


def written(
    spec: str, rate: float, q: Tensor, k: Tensor, v: Tensor, seed: Any, sinks: Any, top: bool, origin: Any, sizes: Any,
    layout: str | None, params: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One call of the operator."""
    from .op import cast

    q, k, v = cast(q, k, v)
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        params = {n: x.transpose(1, 2) if n.startswith("scale of") else x for n, x in params.items()}
    spread = type(q).__name__ == "DTensor"
    if spread:
        from . import dtensor as torch_dtensor  # noqa: F401, says what the operators are on them
    if rate and seed is None:
        if spread:
            raise ParameterError("dropout of DTensors needs a seed, the same in every rank and another at every step")
        seed = torch.randint(0, 1 << 31, (), device="cpu")
    items = list(params.items())
    if rate:
        items.append((" seed", seed))
    for what, place in (("origin", origin), ("size", sizes)):
        if place is not None:
            items.extend([(f" {what}{i}", x) for i, x in enumerate(place)])
    tensors, numbers, names = _sorted_out(items, "max" if top else "")
    if sinks is not None:
        real = torch.float64 if q.dtype == torch.float64 else torch.float32
        sinks = torch.as_tensor(sinks, dtype=real, device=q.device).expand(q.shape[1])
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is None:
        out, lse, largest, _ = torch.ops.frisket.attend(q, k, v, sinks, tensors, numbers, spec, names)
    else:
        from .func import FuncAttend

        out, lse, largest, _ = FuncAttend.apply((numbers, spec, names), q, k, v, sinks, *tensors)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2) if layout == "bshd" else out, lse, largest


def _sorted_out(items: list[tuple[str, Any]], names: str) -> tuple[list[Tensor], list[int], str]:
    """(tensors, numbers, names and kinds of both) of the values of a call."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    for name, x in items:
        if isinstance(x, (bool, float)):  # part of the graph
            names += f",{x} {name}"
        elif isinstance(x, Tensor):
            tensors.append(x)
            names += f",tensor {name}"
        elif isinstance(x, (int, torch.SymInt)):
            numbers.append(x)  # type: ignore[arg-type]
            names += f",number {name}"
        else:
            tensors.append(torch.tensor(x, device="cpu"))
            names += f",tensor {name}"
    return tensors, numbers, names


def written_tiles(spec: str, like: Tensor, sizes: Any, block: Any, params: dict[str, Any]) -> Tensor:
    """uint8 [B, H, rows, columns]: the tiles of a mask, on the device of `like`. `sizes` are q_len, kv_len, B, H."""
    tensors, numbers, names = _sorted_out(list(params.items()), "")
    found: Tensor = torch.ops.frisket.tiles(like, tensors, numbers, list(sizes), list(block), spec, names)
    return found


# -- what runs ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def names_of(text: str) -> tuple[bool, tuple[tuple[str, str], ...]]:
    """Whether the largest scores are asked for, and (kind, name) of every value."""
    top, *rest = text.split(",")
    return top == "max", tuple((kind, name) for kind, _, name in (x.partition(" ") for x in rest))


def reserved(name: str) -> bool:
    """Whether it is none of the user's: what is beside keys and values that are stored."""
    return " of " in name


def call_of(values: Sequence[Tensor], numbers: Sequence[int], spec: str, names: str) -> tuple[Any, dict[str, Any]]:
    """The attention and the keywords of a call of it."""
    from .spec import attention_of

    top, said = names_of(names)
    tensors, ints = iter(values), iter(numbers)
    literal = {"True": True, "False": False}
    params: dict[str, Any] = {}
    for kind, name in said:
        if kind == "tensor":
            params[name] = next(tensors)
        elif kind == "number":
            params[name] = next(ints)
        else:
            params[name] = literal[kind] if kind in literal else float(kind)
    seed = params.pop(" seed", None)
    place = {w: [_known(params.pop(f" {w}{i}")) for i in range(4) if f" {w}{i}" in params] for w in ("origin", "size")}
    att = attention_of(spec, tuple((n, *_kind(x)) for n, x in params.items() if not reserved(n)))
    return att, {
        "plan": None, "seed": None if seed is None else int(seed), "top": top, "origin": tuple(place["origin"]) or None,
        "sizes": tuple(place["size"]) or None, "layout": "bhsd", "params": params,
    }  # fmt: skip


def _known(x: Any) -> Any:
    """The number that a tensor without axes holds: torch.jit.trace gives lengths as such tensors."""
    return int(x) if isinstance(x, Tensor) and not x.ndim else x


def _kind(x: Any) -> tuple[int, type]:
    if not isinstance(x, Tensor):
        return 0, type(x)
    return x.ndim, float if x.is_floating_point() else bool if x.dtype == torch.bool else int


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, values: Sequence[Tensor], numbers: Sequence[int], spec: str,
    names: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from .op import attend

    att, call = call_of(values, numbers, spec, names)
    with torch.no_grad():
        out, lse, top, norm = attend(att, q, k, v, sinks=sinks, saving=True, **call)
    top = lse.new_empty(0) if top is None or not call["top"] else top.contiguous()
    if norm is None:
        norm = lse.new_zeros((*lse.shape, 2))
    elif norm.ndim == 3:  # a graph has one shape for all that executors know of rows
        norm = torch.stack([norm, norm], -1)
    return out.contiguous(), lse.contiguous(), top, norm


def _tiles(
    like: Tensor, values: Sequence[Tensor], numbers: Sequence[int], sizes: Sequence[int], block: Sequence[int],
    spec: str, names: str,
) -> Tensor:  # fmt: skip
    att, call = call_of(values, numbers, spec, names)
    q_len, kv_len, batch, heads = sizes
    mask = att.mask.bind(**call["params"])
    kinds = mask.layout(q_len, kv_len, batch=batch, heads=heads, block=(block[0], block[1])).kinds()
    return torch.from_numpy(kinds).to(like.device)


def _fake_tiles(
    like: Tensor, values: Sequence[Tensor], numbers: Sequence[int], sizes: Sequence[int], block: Sequence[int],
    spec: str, names: str,
) -> Tensor:  # fmt: skip
    rows, columns = (-(-n // size) for n, size in zip(sizes, block))
    return like.new_empty((sizes[2], sizes[3], rows, columns), dtype=torch.uint8)


def _attend_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    values: Sequence[Tensor], out: Tensor, lse: Tensor, norm: Tensor, numbers: Sequence[int], spec: str, names: str,
    needed: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    from .autograd import gradients
    from .op import kept_ready

    if not (q.numel() and k.numel()):
        return _vacant_gradients(dlse, q, k, v, sinks, values, needed)
    att, call = call_of(values, numbers, spec, names)
    with torch.no_grad():
        ready = kept_ready(att, q, k, v, sinks=sinks, **call)
        live = [call["params"][n] for _, n in ready.live]
        saved = (q, k, v, sinks, out, lse, norm, *live)
        learned = {n for _, n in ready.live}
        wanted = dict(zip(_learnable(values, names), needed[4:], strict=True))
        asked = (*needed[:4], *(wanted[n] for _, n in ready.live))
        found = gradients(ready, call["seed"], saved, dout, dlse, asked)
        by_name = {n: g for (_, n), g in zip(ready.live, found[4:], strict=True) if n in learned}
    grads = [g for g, need in zip(found[:4], needed[:4], strict=True) if need]
    named = dict(zip(_learnable(values, names), _floats(values), strict=True))
    for name, need in wanted.items():
        if need:  # a table the score mod reads through no derivative, or the mask alone, has none
            grads.append(by_name[name] if name in by_name else torch.zeros_like(named[name]))
    return [g.contiguous() for g in grads]


def _vacant_gradients(
    dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, values: Sequence[Tensor],
    needed: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """The gradients of a call without queries or keys: lse is the sink, and every other gradient is 0."""
    grads = [None if x is None else torch.zeros_like(x) for x in (q, k, v, sinks, *_floats(values))]
    if sinks is not None and dlse is not None:
        grads[3] = dlse.sum((0, 2)).to(sinks.dtype)
    return [g for g, need in zip(grads, needed, strict=True) if need and g is not None]


def _floats(values: Sequence[Tensor]) -> list[Tensor]:
    return [x for x in values if x.is_floating_point()]


def _learnable(values: Sequence[Tensor], names: str) -> list[str]:
    """The names of the Float tensors among the values."""
    tensors = [n for kind, n in names_of(names)[1] if kind == "tensor"]
    return [n for n, x in zip(tensors, values, strict=True) if x.is_floating_point()]


# -- shapes, and gradients --------------------------------------------------------------------------------------------


def _fake(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, values: Sequence[Tensor], numbers: Sequence[int], spec: str,
    names: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from frisket.runtime.calls.arrays import check_devices

    check_devices(q, k, v)
    real = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty(q.shape[:3], dtype=real)
    top = torch.empty_like(lse) if names_of(names)[0] else lse.new_empty(0)
    return q.new_empty((*q.shape[:3], v.shape[3])), lse, top, lse.new_empty((*lse.shape, 2))


def _fake_backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    values: Sequence[Tensor], out: Tensor, lse: Tensor, norm: Tensor, numbers: Sequence[int], spec: str, names: str,
    needed: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    given = (q, k, v, sinks, *_floats(values))
    return [x.new_empty(x.shape) for x, need in zip(given, needed, strict=True) if need and x is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sinks, values, numbers, spec, names = inputs
    out, lse, top, norm = output
    ctx.save_for_backward(q, k, v, sinks, out, lse, norm, *values)
    ctx.mark_non_differentiable(top, norm)
    ctx.set_materialize_grads(False)
    ctx.said = numbers, spec, names


def _gradient(ctx: Any, dout: Any, dlse: Any, *_: Any) -> tuple[Any, ...]:
    q, k, v, sinks, out, lse, norm, *values = ctx.saved_tensors
    numbers, _, names = ctx.said
    refuse_stored(q, k, names)
    floating = [x.is_floating_point() for x in values]
    need_values = ctx.needs_input_grad[4]
    if not isinstance(need_values, (list, tuple)):
        need_values = [bool(need_values) and x.requires_grad for x in values]
    needed = [*ctx.needs_input_grad[:4], *(n for n, f in zip(need_values, floating, strict=True) if f)]
    if (dout is None and dlse is None) or not any(needed):
        return None, None, None, None, [None] * len(values), None if numbers else [], None, None
    given = gradient_inputs(dout, dlse, (q, k, v, sinks), values, (out, lse, norm), ctx.said, needed)
    found = iter(torch.ops.frisket.attend_backward(*given))
    grads = [next(found) if need else None for need in needed]
    rest = iter(grads[4:])
    return *grads[:4], [next(rest) if f else None for f in floating], None if numbers else [], None, None


def gradient_inputs(
    dout: Any, dlse: Any, given: tuple[Any, ...], values: Any, found: tuple[Any, ...], said: Any, needed: Any
) -> tuple[Any, ...]:
    """The arguments of the backward operator; `found` are out, lse and norm."""
    numbers, spec, names = said
    return dout, dlse, *given, list(values), *found, numbers, spec, names, list(needed)


def refuse_stored(q: Tensor, k: Tensor, names: str) -> None:
    """Raise where keys and values are stored: such calls have no gradients."""
    live = [n for _, n in names_of(names)[1] if reserved(n)]
    if live or q.dtype != k.dtype:
        from frisket.runtime.calls.stored_kv import refuse_gradients

        refuse_gradients("" if q.dtype == k.dtype else str(k.dtype).removeprefix("torch."), live)


def no_second(ctx: Any, *cotangents: Any) -> Any:
    raise BackwardError(
        "a gradient of a gradient of attention is asked for, and there is none\n"
        "  leave out create_graph=True, or write attention with dense operations where second derivatives matter"
    )


for _key in ("CPU", "CUDA"):
    LIBRARY.impl("attend", _attend, _key)
    LIBRARY.impl("attend_backward", _attend_backward, _key)
    LIBRARY.impl("tiles", _tiles, _key)
torch.library.register_fake("frisket::tiles", _fake_tiles, lib=LIBRARY)
torch.library.register_fake("frisket::attend", _fake, lib=LIBRARY)
torch.library.register_fake("frisket::attend_backward", _fake_backward, lib=LIBRARY)
torch.library.register_autograd("frisket::attend", _gradient, setup_context=_setup, lib=LIBRARY)
torch.library.register_autograd("frisket::attend_backward", no_second, lib=LIBRARY)
