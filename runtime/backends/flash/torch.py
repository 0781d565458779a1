"""Runs calls on FlashAttention 4, `flash_attn.cute`, whose arrays are [batch, length, heads, dim], on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from hashlib import sha256
from typing import Any

from frisket.dsl.errors import BackendError, BackwardError
from frisket.grammar.memo import cached_on, memo
from frisket.lowering.kernels.features import FLASH, missing
from frisket.lowering.plan import Cotangents, ForwardResults, Geometry, KernelInputs, LoopPlan, Names
from frisket.runtime.machine.modules import load_source

from .call import INSTEAD, FlashCall, blackwell, call_of, check

Tensor = Any


def forward(
    inputs: KernelInputs, q: Tensor, k: Tensor, v: Tensor, *, top: bool = False, softmax_stats: bool = False
) -> tuple[Tensor | None, ...]:
    """(out, lse, None) of a call, with `softmax_stats` another None: the engine gives no largest scores, nor lse's
    rounding."""
    if top:
        raise BackendError(f"{FLASH['max']}\n  {INSTEAD}")
    call = prepared(inputs, q.device, False)
    q, k, v = (x.resolve_neg() for x in (q, k, v))
    out, lse = attend(call, inputs.geometry, q, k, v, inputs.sinks)
    return (out, lse, None, None) if softmax_stats else (out, lse, None)


def backward(
    inputs: KernelInputs, q: Any, k: Any, v: Any, results: ForwardResults, cotangents: Cotangents, *, grad_names: Names
) -> dict[str, Tensor]:
    """Gradients of q, k and v, of those that are wanted; sinks are part of lse already."""
    call = checks_gradients(inputs, q.device, grad_names)
    if cotangents.dlse is not None and blackwell(inputs.target.arch) and inputs.geometry.head_dim == 256:
        raise BackwardError(f"FlashAttention 4 has no gradient of lse for heads of 256 on Blackwell\n  {INSTEAD}")
    q, k, v, out, dout = (x.resolve_neg() for x in (q, k, v, results.out, cotangents.dout.to(q.dtype)))
    results, cotangents = replace(results, out=out), Cotangents(dout, cotangents.dlse)
    grads = gradients(call, (q, k, v), results, cotangents, inputs.deterministic)
    return {n: x for n, x in zip("qkv", grads, strict=True) if n in grad_names}


def checks_gradients(inputs: KernelInputs, device: Any, grad_names: Collection[str]) -> FlashCall:
    """The call of the backward. Raises where the engine lacks wanted gradients; asked before the forward, too."""
    if why := refuses_gradients(inputs.plan, inputs.geometry, "", (), grad_names):
        raise BackwardError(f"{why}\n  {INSTEAD}")
    return prepared(inputs, device, True)


def refuses_gradients(plan: LoopPlan, g: Geometry, dtype: str, shapes: Any, grad_names: Collection[str]) -> str:
    """A reason why the backward has not all of the wanted gradients; "" where it has."""
    sources = {t.name: t.source for t in plan.tables} | {s.name: str(s.source) for s in plan.slots}
    names = [source for name, source in sources.items() if name in grad_names]
    return missing(FLASH, needed=["gradients by query"] * bool(names), names=", ".join(names))


def prepared(inputs: KernelInputs, device: Any, gradients: bool) -> FlashCall:
    """The call of a direction, kept with the plan of a step as long as slots and tables are the same objects."""

    def new_call() -> FlashCall:
        return call_of(inputs, device, gradients=gradients)

    check(inputs.geometry)
    arrays, slots = tuple(inputs.tables.values()), inputs.slots
    counted = not any(x.requires_grad or x.is_inference() for x in arrays)  # writes to tables, by torch
    if not (counted and all(isinstance(x, (bool, int, float)) for x in slots.values())):
        return new_call()
    numbers, versions = tuple(slots.items()), tuple((id(x), x._version) for x in arrays)
    parts = inputs.plan, inputs.geometry, inputs.target, numbers, versions, inputs.deterministic
    key = "flash", *parts, device, gradients
    # tables are known by where they are
    return cached_on(inputs.spans, key, lambda: (new_call(), arrays))[0]


def attend(call: FlashCall, g: Geometry, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, ...]:
    """(out [batch, heads, q_len, v_dim], lse [batch, heads, q_len])."""
    from flash_attn.cute import interface  # type: ignore[import-not-found]

    arrays = [_laid(call, x) for x in (q, k, v)]
    # the forward of the engine has no parameter for the derivative of a score mod
    options = _common(call) | {n: f for n, f in _functions(call).items() if n != "score_mod_bwd"}
    with _current(q):
        out, lse, *_ = interface._flash_attn_fwd(*arrays, **options, learnable_sink=sinks, return_lse=True)
    if call.documents is not None:
        out, lse = out.view(g.batch, g.q_len, *out.shape[1:]), lse.view(-1, g.batch, g.q_len).transpose(0, 1)
    return out.transpose(1, 2), lse


def gradients(
    call: FlashCall, qkv: tuple[Tensor, ...], results: ForwardResults, cotangents: Cotangents, deterministic: bool
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, in their shapes. An lse that holds a sink gives the weights of the keys that share the
    row with it."""
    from flash_attn.cute import interface

    arrays = [_laid(call, x) for x in (*qkv, results.out, cotangents.dout)]
    rows = [None if x is None else _rows(call, x) for x in (results.lse, cotangents.dlse)]
    options = _common(call) | _functions(call)
    with _current(qkv[0]):
        grads = interface._flash_attn_bwd(*arrays, rows[0], **options, dlse=rows[1], deterministic=deterministic)
    pairs = zip(grads, qkv, strict=True)
    # gradients of packed arrays have no axis of batch entries
    return tuple(dx.view(x.shape[0], x.shape[2], *dx.shape[-2:]).transpose(1, 2) for dx, x in pairs)


def _current(x: Tensor) -> AbstractContextManager[Any]:
    """The GPU of a tensor as the current one, where the engine launches; without GPUs it only compiles."""
    import torch

    return torch.cuda.device(x.device) if torch.cuda.is_available() else nullcontext()


def _laid(call: FlashCall, x: Tensor) -> Tensor:
    """An array with its axes in the engine's order: [batch, length, heads, dim], packed [tokens, heads, dim]."""
    x = x.transpose(1, 2)
    return x if call.documents is None else x.reshape(-1, *x.shape[2:])


def _rows(call: FlashCall, x: Tensor) -> Tensor:
    """A number for each row: [batch, heads, q_len], packed [heads, tokens]."""
    return x.contiguous() if call.documents is None else x.transpose(0, 1).reshape(x.shape[1], -1)


def _common(call: FlashCall) -> dict[str, Any]:
    """The arguments that both directions take."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch  # type: ignore[import-not-found]

    arguments: dict[str, Any] = {"softmax_scale": call.scale, "seqused_k": call.used, "page_table": call.pages}
    arguments |= {"window_size_left": call.left, "window_size_right": call.right}
    arguments["aux_tensors"] = [_led(x) for x in call.tables] or None
    arguments["aux_scalars"] = tuple(_number(x) for x in call.scalars) or None
    if call.documents is not None:
        arguments["cu_seqlens_q"], arguments["cu_seqlens_k"] = call.documents.unbind()
        arguments["max_seqlen_q"], arguments["max_seqlen_k"] = call.longest
    if call.tiles is not None:
        first, second = call.order or (None, None)
        turns = {"dq_write_order": first, "dq_write_order_full": second, "spt": None if call.order is None else False}
        arguments["block_sparse_tensors"] = BlockSparseTensorsTorch(**call.tiles._asdict(), **turns)
    return arguments


def _led(x: Tensor) -> Tensor:
    """A table whose last axis the engine takes for the contiguous one, whatever the others are."""
    x = x.view(x.shape)  # another tensor: the attribute must not stay on the one of the caller
    x.__leading_dim__ = x.ndim - 1
    return x


def _number(x: int | float) -> Any:
    """A number that comes with a call; the engine builds Python's own into its kernels."""
    from cutlass import Float32, Int32  # type: ignore[import-not-found]

    return Float32(x) if isinstance(x, float) else Int32(x)


def _functions(call: FlashCall) -> dict[str, Callable[..., Any]]:
    functions = _loaded(call.mods.text, call.mods.body)
    return {n: functions[n] for n in call.mods.functions}


@memo(group="kernels", weigh=5000)
def _loaded(text: str, body: str) -> dict[str, Callable[..., Any]]:
    """The functions of a text. `__cute_hash__` names kernels: else the engine hashes a source without what it calls."""
    namespace = load_source(text)
    functions = {n: f for n, f in namespace.items() if n in ("mask_mod", "score_mod", "score_mod_bwd")}
    for name, function in functions.items():
        function.__cute_hash__ = sha256(f"{name} {body}".encode()).hexdigest()
    return functions
