"""The public functions compile, attention and reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import numpy as np

from frisket.grammar.memo import Memo
from frisket.lowering.plan import Origin, Sizes
from frisket.runtime.backends.registry import check_name
from frisket.runtime.calls import options as call_options
from frisket.runtime.calls.arrays import Array, arrays, by_dynamo, in_graph, kv_format, kv_inputs_of, scale_of, turn
from frisket.runtime.calls.program import check_order, program_of
from frisket.runtime.machine.parameters import as_value, call_value, is_tensor, learns, traced
from frisket.runtime.masks.mask import MaskLike, Program, ScoreLike
from frisket.runtime.plans.device import results
from frisket.runtime.plans.empty import results_of
from frisket.runtime.torch.jagged import is_jagged

from .attention import Attention
from .order import Order
from .ordered import OrderedAttention
from .report import dense_call, oracle


def compile(
    mask: MaskLike | Program | None = None, score: ScoreLike | None = None, scale: Any = None,
    enable_gqa: bool = True, deterministic: bool = True, dropout: float = 0.0, sinks: Any = None,
    backend: str | None = None, tile: int | tuple[int, int] | None = None, engines: bool | str | Sequence[str] = True,
    reorder: Order | Literal["auto"] | None = None, **params: Any,
) -> Attention:  # fmt: skip
    """Attention under a mask and a score mod, to call, plan, print and check.

    >>> att = compile("causal & window(w)", "softcap(50)", w=256)
    >>> att
    Attention(mask = causal & window(w); score = softcap(50))
    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 8, 128, 16)
    >>> att(q, k, v).shape
    torch.Size([1, 8, 128, 16])

    - `mask`, `score`: texts, Python functions, or what `frisket.mask` and `frisket.score` give. Values of their names
      follow as `**params`, here or at a call.
    - `scale`: the factor of products of queries and keys, 1 / sqrt(head_dim) unless given. It may be traced or learned.
    - `enable_gqa`: whether query heads may share key heads, in groups.
    - `dropout`: the share of weights to drop, in [0, 1), at every call. Make another attention for inference.
    - `sinks`: [heads] or one number: logits in the softmax of every query that have no value. A call may give others.
    - `backend`: one of `frisket.backends()`, "library" or "native".
    - `tile`: the (queries, keys) of a tile, in tokens.
    - `engines`: a kernel of a vendor (an engine) runs where it provably computes this mask and score mod, was compared
      in full with float64 on the platform, and is known to be faster. False keeps to generated kernels. Names, "flash,
      cudnn", are the engines that take part, compared or not. FRISKET_ENGINES does this for all calls: names, or 0.
    - `reorder`: an order that `frisket.reorder` found, or "auto". Each call then moves tokens so that the mask visits
      fewer tiles.
    - `deterministic`: False allows gradients of tables whose sums change from run to run. Triton's then take one pass
      instead of two where the place in a table is neither a function of the distance nor known to be a query's and
      key's own (`bias[bucket[q, k]]`). `torch.use_deterministic_algorithms(True)` takes precedence.

    A torch tensor that requires a gradient is learned if only the score mod reads it, whether it is given here, given
    to the call, or captured by a function. Every call reads it again. No gradient flows through a mask; it reads the
    values of such a tensor when it is made. One attention serves every length, batch and number of heads.

    Raises what `frisket.mask` and `frisket.score` raise, and `BackendError` for a backend that is not there.
    """
    check_name(backend)
    program, scale = program_of(mask, score, params), scale_of(scale)
    if not isinstance(scale, float | None):
        # options are numbers: a factor that changes is a parameter of the score mod
        program, scale = program.scaled(scale)[0], 1.0
    options = call_options.Options(
        scale,
        call_options.flag(enable_gqa, "enable_gqa"),
        backend,
        call_options.check_tile(tile),
        call_options.rate_of(dropout),
        as_value("sinks", sinks) if isinstance(sinks, np.ndarray | list | tuple) else sinks,  # a copy to compare by
        deterministic=call_options.flag(deterministic, "deterministic"),
        engines=call_options.engines_named(engines),
    )
    return Attention(program, options) if reorder is None else OrderedAttention(program, options, reorder)


_compiled = Memo("runtime.attention.entry.attention_for", 128)


# Return types, for type checkers: `keywords` are the other arguments of the function below.
@overload
def attention(
    q: Array, k: Any, v: Any, mask: MaskLike | Program | None = None, score: ScoreLike | None = None,
    scale: Any = None, enable_gqa: bool = True, *, return_max: bool, **keywords: Any,
) -> Any: ...  # fmt: skip
@overload
def attention(
    q: Array, k: Any, v: Any, mask: MaskLike | Program | None = None, score: ScoreLike | None = None,
    scale: Any = None, enable_gqa: bool = True, *, return_lse: Literal[True], **keywords: Any,
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def attention(
    q: Array, k: Any, v: Any, mask: MaskLike | Program | None = None, score: ScoreLike | None = None,
    scale: Any = None, enable_gqa: bool = True, *, return_lse: Literal[False] = ..., **keywords: Any,
) -> Array: ...  # fmt: skip
@overload
def attention(
    q: Array, k: Any, v: Any, mask: MaskLike | Program | None = None, score: ScoreLike | None = None,
    scale: Any = None, enable_gqa: bool = True, *, return_lse: bool, **keywords: Any,
) -> Any: ...  # fmt: skip
def attention(
    q: Any, k: Any, v: Any, mask: MaskLike | Program | None = None, score: ScoreLike | None = None,
    scale: Any = None, enable_gqa: bool = True, backend: str | None = None, dropout: float = 0.0,
    seed: Any = None, sinks: Any = None, origin: Origin | None = None, sizes: Sizes | None = None,
    layout: str | None = None, return_lse: bool = False, return_max: bool = False,
    deterministic: bool = True, k_scale: Any = None, v_scale: Any = None, pages: Any = None, **params: Any,
) -> Any:  # fmt: skip
    """One call: `compile(mask, score, ...)(q, k, v)`; equal masks are compiled once.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 8, 128, 16)
    >>> out, lse = attention(q, k, v, "causal & window(w)", w=64, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([1, 8, 128, 16]), torch.Size([1, 8, 128]))

    See `Attention.__call__` for shapes, results, sinks, seeds, stored keys and values, gradients; `compile` for more.
    """
    check_name(backend)
    rate, deterministic = call_options.rate_of(dropout), call_options.flag(deterministic, "deterministic")
    enable_gqa = call_options.flag(enable_gqa, "enable_gqa")
    texts = isinstance(mask, str | None) and isinstance(score, str | None)
    # Dynamo cannot trace the compiler; else functions are traced for the call, and nested tensors packed
    if in_graph(q) and (by_dynamo() or (texts and not is_jagged(q))):
        from frisket.runtime.torch.graph import written_call

        settings = scale, enable_gqa, backend, None, rate, None, deterministic, True
        params |= kv_inputs_of(k_scale, v_scale, pages)
        request = call_options.CallArgs(q, k, v, None, seed, sinks, return_max, origin, sizes, layout, params)
        # the graph holds texts, not an attention
        outputs = written_call(mask, score, settings, request, return_lse or return_max)
        return results(outputs, return_lse, return_max)
    options = call_options.Options(None, enable_gqa, backend, None, rate, deterministic=deterministic)
    # before the key is made: a list of a call has no type
    params = {n: call_value(n, x) for n, x in params.items()}
    att, params = scaled_attention(mask, score, options, scale, params)
    return att(
        q, k, v, seed=seed, sinks=sinks, origin=origin, sizes=sizes, layout=layout, return_lse=return_lse,
        return_max=return_max, k_scale=k_scale, v_scale=v_scale, pages=pages, **params,
    )  # fmt: skip


def scaled_attention(
    mask: Any, score: Any, options: call_options.Options, scale: Any, params: dict[str, Any]
) -> tuple[Attention, dict[str, Any]]:
    """`attention_for` with a scale, and the values of a call: a traced or learned scale is one of them."""
    if isinstance(scale := scale_of(scale), float | None):
        return attention_for(mask, score, replace(options, scale=scale), params), params
    # other values of the scale are no other attention
    att, name = attention_for(mask, score, replace(options, scale=1.0), params).scaled
    return att, {**params, name: scale}


def attention_for(mask: Any, score: Any, options: call_options.Options, params: dict[str, Any]) -> Attention:
    """The attention of a mask and a score mod, without the values of `params`: only their types matter."""
    text: Any = None
    if isinstance(mask, str | None) and isinstance(score, str | None):
        text = mask, score, options, tuple((n, *_kind(x)) for n, x in params.items())
        if (att := _compiled.get(text)) is not None:  # before any text is parsed
            return att  # type: ignore[no-any-return]
    program = program_of(mask, score, {n: stand_in(x) for n, x in params.items()}, once=True).without(params)
    if any(traced(x) or (is_tensor(x) and x.grad_fn) for x in program.captured.values()):  # of the current graph
        return Attention(program, options)
    learned = {n: x for n, x in program.captured.items() if learns(x)}  # by identity: their values change
    rest = program.without(learned.keys() & program.learnable)  # a mask keeps the values it was made with
    paths = tuple(x for p in program.parts for x in (*p.origin.paths.values(), *p.origin.inside))
    key = text or (rest.mask, rest.score, options, tuple((n, id(x)) for n, x in learned.items()), *map(id, paths))
    cached: Attention | None = _compiled.get(key)
    # with the objects whose ids are in the key
    return cached or _compiled.put(key, Attention(program, options), (learned, paths))


def _kind(x: Any) -> tuple[Any, ...]:
    """The rank of a value, and its type: Bool, Int or Float."""
    return (x.ndim, x.dtype) if hasattr(x, "ndim") else (type(x),)


def stand_in(x: Any) -> Any:
    """A value of the same type. Checks of library entries alone read its numbers, and all of them take 0."""
    if not hasattr(x, "ndim"):
        return x
    dtype = str(x.dtype).removeprefix("torch.")
    kind = np.float32 if dtype.startswith(("float", "bfloat")) else None
    if kind is None and not dtype.startswith(("bool", "int", "uint")):
        return x  # refused where it is read
    return np.zeros((1,) * x.ndim, kind or (bool if dtype == "bool" else int))


def reference(
    q: Any, k: Any, v: Any, mask: MaskLike | Program | None = None, score: ScoreLike | None = None,
    scale: float | None = None, layout: str | None = None, origin: Origin | None = None, sizes: Sizes | None = None,
    return_lse: bool = False, return_max: bool = False, dropout: float = 0.0, seed: int | None = None,
    sinks: Any = None, k_scale: Any = None, v_scale: Any = None, pages: Any = None, **params: Any,
) -> Any:  # fmt: skip
    """Dense attention by the float64 reference, as a numpy array; `layout` is "bhsd" or "bshd".

    >>> q = np.ones((1, 1, 4, 2))
    >>> reference(q, q, np.arange(8.0).reshape(1, 1, 4, 2), "causal", layout="bhsd")[0, 0, :, 0]
    array([0., 1., 2., 3.])

    It takes arrays of any framework, and memory in the square of the length. Every backend is compared with it. Scales
    and pages are as for `Attention.__call__`.
    """
    inputs = arrays(q, k, v, layout, numpy=True, pages=pages)
    program = program_of(mask, score, params)
    rate, g = call_options.rate_of(dropout), inputs.geometry(scale, True, origin, sizes)
    if layout is None:
        check_order(inputs, g, program, {})
    seed = call_options.seed_of(seed, rate, "numpy")
    sinks = call_options.sinks_of(sinks, g.heads, "numpy", "float64", None)
    if g.is_empty:
        program.require_bound()
        outputs = results_of(replace(inputs, framework="numpy"), g, sinks)  # arrays of any framework give numpy's
    else:
        _, kv_inputs = kv_format(inputs, g, kv_inputs_of(k_scale, v_scale, pages))
        program.require_bound()
        out, lse, top = oracle(inputs, dense_call(program, g, rate, seed, sinks), kv_inputs)
        outputs = turn(out, "bhsd", inputs.layout), lse, top
    return results(inputs.as_called(*outputs), return_lse, return_max)


call_options.register("texts", attention_for)
