"""The public functions compile, attention, reference and merge_sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import numpy as np

from frisket.dsl.errors import ParameterError
from frisket.grammar.memo import Memo
from frisket.lowering.plan import Origin, Sizes
from frisket.runtime.backends.registry import check_name
from frisket.runtime.calls import options as call_options
from frisket.runtime.calls.arrays import (
    Array,
    arrays,
    axis_order,
    by_dynamo,
    framework_of,
    in_graph,
    kv_format,
    kv_inputs_of,
    scale_of,
    turn,
)
from frisket.runtime.calls.program import check_order, program_of
from frisket.runtime.machine.parameters import as_value, call_value, is_tensor, learns, stand_in, traced
from frisket.runtime.masks.mask import MaskLike, Program, ScoreLike, WeightLike
from frisket.runtime.plans.device import results
from frisket.runtime.plans.empty import results_of
from frisket.runtime.torch.jagged import is_jagged

from .attention import Attention, operators_of
from .merge import merged_sums
from .order import Order
from .ordered import OrderedAttention
from .report import dense_call, oracle
from .weighted import Sums, check_weighted, no_sinks


def compile(
    mask: MaskLike | Program | None = None, score: ScoreLike | None = None, scale: Any = None,
    enable_gqa: bool = True, deterministic: bool = True, dropout: float = 0.0, sinks: Any = None,
    backend: str | None = None, tile: int | tuple[int, int] | None = None, engines: bool | str | Sequence[str] = True,
    reorder: Order | Literal["auto"] | None = None, weight: WeightLike | None = None, divide: Any = None,
    invariant: bool = False, **params: Any,
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
    - `weight`, `divide`: what a visible pair weighs in place of the softmax, and what a row is divided by; see
      `frisket.weight`. Where they are no softmax there are no sinks, and no lse unless `divide` is `total` of weights
      that are positive.
    - `scale`: the factor of products of queries and keys, 1 / sqrt(head_dim) unless given. It may be traced or learned.
    - `enable_gqa`: whether query heads may share key heads, in groups.
    - `dropout`: the share of weights to drop, in [0, 1), at every call. Make another attention for inference.
    - `sinks`: sink logits, [heads] or one number: they take part in the softmax of every query and have no value. A
      call may give others. Sink tokens, which every query sees, are a mask: `causal & (sinks(4) | window(256))`.
    - `backend`: one of `frisket.backends()`, "library" or "native".
    - `tile`: the (queries, keys) of a tile, in tokens.
    - `engines`: whether kernels of vendors (engines) may run. One does where it provably computes
      this mask and score mod, was compared in full with float64 on the platform, and is known to be faster. False
      keeps to generated kernels. Names, "flash, cudnn", are the engines that take part, compared or not.
      FRISKET_ENGINES does this for all calls: names, or 0.
    - `invariant`: whether the bits of a row are the same in any batch: they do not depend on other queries, on threads,
      or on the kind of cache. A prompt at once, in chunks and token by token give the same. Backends 'cpp' and 'triton'
      do it. Gradients are the usual ones. See docs/invariant.md.
    - `reorder`: an order that `frisket.reorder` found, or "auto". Each call then moves tokens so that the mask visits
      fewer tiles.
    - `params`: values of scalars and tables that the mask and score mod name.
    - `deterministic`: False allows gradients of tables whose sums change from run to run. With Triton these then take
      one pass instead of two for lookups such as `bias[bucket[q, k]]`. The place in the table is neither a function of
      the distance there, nor known to belong to one pair. `torch.use_deterministic_algorithms(True)` takes precedence.

    A torch tensor that requires a gradient is learned if only the score mod reads it, whether it is given here, given
    to the call, or captured by a function. Every call reads it again. No gradient flows through a mask; it reads the
    values of such a tensor when it is made. One attention serves every length, batch and number of heads.

    Raises what `frisket.mask` and `frisket.score` raise, and `BackendError` for a backend that is not there.
    """
    check_name(backend)
    program, scale = program_of(mask, score, params, weight=weight, divide=divide), scale_of(scale)
    if sinks is not None and program.weight is not None:
        raise no_sinks()
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
        tuning=call_options.tuning_of(invariant, program.weight is not None, reorder is not None),
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
    q: Array,
    k: Any,
    v: Any,
    mask: MaskLike | Program | None = None,
    score: ScoreLike | None = None,
    scale: Any = None,
    enable_gqa: bool = True,
    *,
    return_sums: Literal[True],
    **keywords: Any,
) -> tuple[Array, Sums]: ...
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
    deterministic: bool = True, q_scale: Any = None, k_scale: Any = None, v_scale: Any = None, pages: Any = None,
    weight: WeightLike | None = None, divide: Any = None, return_sums: bool = False, axes: str | None = None,
    invariant: bool = False, **params: Any,
) -> Any:  # fmt: skip
    """One call: `compile(mask, score, ...)(q, k, v)`; equal masks are compiled once.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 8, 128, 16)
    >>> out, lse = attention(q, k, v, "causal & window(w)", w=64, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([1, 8, 128, 16]), torch.Size([1, 8, 128]))

    - `q`, `k`, `v`: torch tensors [batch, heads, length, head_dim] or JAX arrays [batch, length, heads, head_dim]. k
      and v may have fewer heads, and v another head_dim. Without a batch axis in JAX, out has none.
    - `mask`, `score`: texts, Python functions, or what `frisket.mask` and `frisket.score` give. Values of their names
      follow as `**params`.
    - `scale`: the factor of products of queries and keys, 1 / sqrt(head_dim) unless given.
    - `enable_gqa`: whether query heads may share key heads, in groups.
    - `backend`: one of `frisket.backends()`, "library" or "native"; chosen by frisket unless given.
    - `dropout`: the share of weights to drop, in [0, 1).
    - `seed`: 0 <= seed < 2**31, of dropout. Without a seed torch draws one; JAX needs one.
    - `sinks`: sink logits, [heads] or one number: they take part in the softmax of every query and have no value.
      The mask `sinks(n)` is something else: the first n tokens, which every query sees (sink tokens).
    - `origin`, `sizes`: (b, h, q, k) where the arrays begin in the whole problem, and its (B, H, Q_LEN, KV_LEN).
    - `axes`: the axis order, "bhsd" or "bshd"; the framework's unless given. `layout` is its older name.
    - `return_lse`: return (out, lse). lse [batch, heads, q_len] is the natural log of what the softmax divides by.
    - `return_max`: return (out, max), or (out, lse, max). max is the largest visible score of a query.
    - `return_sums`: return (out, `Sums`), of a program with a weight. `merge_sums` adds those of other keys.
    - `deterministic`: whether equal calls have equal gradients, bit for bit.
    - `q_scale`, `k_scale`, `v_scale`, `pages`: scales and pages of stored keys and values.
    - `weight`, `divide`: what a visible pair weighs in place of the softmax, and what a row is divided by.
    - `invariant`: whether the bits of a row are the same in any batch, chunk, and cache.

    The call of an `Attention` says more about results, stored keys and gradients, `compile` about options, which keep
    an attention for many calls: `tile`, `engines`, `reorder`.

    Raises `ShapeError` for arrays that do not fit, and what `compile` raises.
    """
    layout = axis_order(layout, axes)
    rate, deterministic = call_options.rate_of(dropout), call_options.flag(deterministic, "deterministic")
    tuning = call_options.tuning_of(invariant, weight is not None)
    enable_gqa = call_options.flag(enable_gqa, "enable_gqa")
    parts = mask, score, weight, divide
    texts = all(isinstance(x, str | None) for x in parts)
    # Dynamo cannot trace the compiler; else functions are traced for the call, and nested tensors packed
    if in_graph(q) and (by_dynamo() or (texts and not is_jagged(q) and not return_sums)):
        if return_sums or (weight is not None and (return_lse or return_max or sinks is not None)):
            raise ParameterError(
                "in a graph of torch frisket.attention with a weight gives out alone, and takes no sinks\n"
                "  make att = frisket.compile(mask, score, weight=weight) outside, and call that"
            )
        settings = scale, enable_gqa, backend, None, rate, tuning.choices, deterministic, True
        params |= kv_inputs_of(k_scale, v_scale, pages, q_scale)
        request = call_options.CallArgs(q, k, v, None, seed, sinks, return_max, origin, sizes, layout, params)
        # the graph holds texts, not an attention
        outputs = torch_graphs().written_call(parts, settings, request, return_lse or return_max)
        return results(outputs, return_lse, return_max)
    check_name(backend)
    options = call_options.Options(None, enable_gqa, backend, None, rate, tuning=tuning, deterministic=deterministic)
    # before the key is made: a list of a call has no type
    params = {n: call_value(n, x) for n, x in params.items()}
    att, params = scaled_attention(mask, score, options, scale, params, weight, divide)
    return att(
        q, k, v, seed=seed, sinks=sinks, origin=origin, sizes=sizes, layout=layout, return_lse=return_lse,
        return_max=return_max, return_sums=return_sums, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, pages=pages,
        **params,
    )  # fmt: skip


def scaled_attention(
    mask: Any, score: Any, options: call_options.Options, scale: Any, params: dict[str, Any], *weights: Any
) -> tuple[Attention, dict[str, Any]]:
    """`attention_for` with a scale, and the values of a call: a traced or learned scale is one of them. `weights` are a
    weight and a divisor."""
    if isinstance(scale := scale_of(scale), float | None):
        return attention_for(mask, score, replace(options, scale=scale), params, *weights), params
    # other values of the scale are no other attention
    att, name = attention_for(mask, score, replace(options, scale=1.0), params, *weights).scaled
    return att, {**params, name: scale}


def attention_for(
    mask: Any, score: Any, options: call_options.Options, params: dict[str, Any], weight: Any = None, divide: Any = None
) -> Attention:
    """The attention of the parts of a program, without the values of `params`: only their types matter."""
    text: Any = None
    if all(isinstance(x, str | None) for x in (mask, score, weight, divide)):
        text = mask, score, weight, divide, options, tuple((n, *_kind(x)) for n, x in params.items())
        if (att := _compiled.get(text)) is not None:  # before any text is parsed
            return att  # type: ignore[no-any-return]
    stand_ins = {n: stand_in(x) for n, x in params.items()}
    program = program_of(mask, score, stand_ins, once=True, weight=weight, divide=divide).without(params)
    if any(traced(x) or (is_tensor(x) and x.grad_fn) for x in program.captured.values()):  # of the current graph
        return Attention(program, options)
    learned = {n: x for n, x in program.captured.items() if learns(x)}  # by identity: their values change
    rest = program.without(learned.keys() & program.learnable)  # a mask keeps the values it was made with
    paths = tuple(x for p in program.parts for x in (*p.origin.paths.values(), *p.origin.inside))
    key = text or (*rest.every_part, options, tuple((n, id(x)) for n, x in learned.items()), *map(id, paths))
    cached: Attention | None = _compiled.get(key)
    # with the objects whose ids are in the key
    return cached or _compiled.put(key, Attention(program, options), (learned, paths))


def _kind(x: Any) -> tuple[Any, ...]:
    """The rank of a value, and its type: Bool, Int or Float."""
    return (x.ndim, x.dtype) if hasattr(x, "ndim") else (type(x),)


def reference(
    q: Any, k: Any, v: Any, mask: MaskLike | Program | None = None, score: ScoreLike | None = None,
    scale: float | None = None, layout: str | None = None, origin: Origin | None = None, sizes: Sizes | None = None,
    return_lse: bool = False, return_max: bool = False, dropout: float = 0.0, seed: int | None = None,
    sinks: Any = None, q_scale: Any = None, k_scale: Any = None, v_scale: Any = None, pages: Any = None,
    weight: WeightLike | None = None, divide: Any = None, axes: str | None = None, **params: Any,
) -> Any:  # fmt: skip
    """Dense attention by the float64 reference, as a numpy array; `axes` is "bhsd" or "bshd".

    >>> q = np.ones((1, 1, 4, 2))
    >>> reference(q, q, np.arange(8.0).reshape(1, 1, 4, 2), "causal", axes="bhsd")[0, 0, :, 0]
    array([0., 1., 2., 3.])

    It takes arrays of any framework, and memory in the square of the length. Every backend is compared with it. Scales
    and pages are as for the call of an `Attention`.
    """
    layout = axis_order(layout, axes)
    inputs = arrays(q, k, v, layout, numpy=True, pages=pages)
    program = program_of(mask, score, params, weight=weight, divide=divide)
    kv_inputs = kv_inputs_of(k_scale, v_scale, pages, q_scale)
    if program.weight is not None:
        check_weighted(program.exprs, sinks, return_lse, return_max)
    rate, g = call_options.rate_of(dropout), inputs.geometry(scale, True, origin, sizes, kv_inputs)
    if layout is None:
        check_order(inputs, g, program, {})
    seed = call_options.seed_of(seed, rate, "numpy")
    sinks = call_options.sinks_of(sinks, g.heads, "numpy", "float64", None)
    if g.is_empty:
        program.require_bound()
        outputs = results_of(replace(inputs, framework="numpy"), g, sinks)  # arrays of any framework give numpy's
    else:
        _, kv_inputs = kv_format(inputs, g, kv_inputs)
        program.require_bound()
        out, lse, top = oracle(inputs, dense_call(program, g, rate, seed, sinks), kv_inputs)
        outputs = turn(out, "bhsd", inputs.layout), lse, top
    if program.weight is not None and return_lse:
        outputs = outputs[0], np.log(outputs[1]), outputs[2]
    return results(inputs.as_called(*outputs), return_lse, return_max)


def merge_sums(
    *parts: tuple[Array, Sums],
    divide: Any,
    axes: str | None = None,
    origin: Origin | None = None,
    sizes: Sizes | None = None,
    **params: Any,
) -> tuple[Array, Sums]:
    """`out, sums = merge_sums((out1, sums1), (out2, sums2), divide=...)`: rows of a weight over the keys of all parts.

    >>> import frisket as fk, torch
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4)
    >>> program = {"weight": "relu(score)", "divide": "total + 1"}
    >>> parts = [fk.attention(q, k, v, m, return_sums=True, **program) for m in ("k < 4", "k >= 4")]
    >>> out, sums = merge_sums(*parts, divide="total + 1")
    >>> torch.allclose(out, fk.attention(q, k, v, **program), atol=1e-6)
    True

    Parts are what calls with `return_sums=True` give for the same queries and disjoint keys; of the `out` of a part the
    dtype alone is read. Numerators, totals and counts are added in float32 (float64 for float64), and each row is
    divided once. It is 0, with gradients of 0, where the divisor is 0 or no part saw a key. Gradients flow to every
    numerator and total, and to Float parameters of `divide`.

    - `divide`: the divisor of the whole, a text as for `frisket.attention`, or None where rows are not divided. It has
      no default, because sums do not tell what the parts were divided by. `params` are values of its names.
    - `axes`: the axis order of out and numerators, "bhsd" or "bshd"; the framework's unless given.
    - `origin`: (b, h, q, k) where the rows begin, for a divisor that reads positions.
    - `sizes`: (B, H, Q_LEN, KV_LEN), for a divisor that reads them. Without it the problem ends where the rows end,
      and KV_LEN is not known.

    Raises `ShapeError` for parts that do not fit together, and `ParameterError` for a divisor without its values.
    """
    arguments = parts, divide, axes, origin, sizes, params
    if by_dynamo():
        return torch_graphs().merged_sums(*arguments)  # type: ignore[no-any-return]
    if (framework := framework_of(parts[0][0]) if parts and parts[0] else None) in ("torch", "jax"):
        operators_of(framework)  # adds the divisors of its arrays
    return merged_sums(*arguments)


def torch_graphs() -> Any:
    """The module of calls in graphs of torch; imports torch."""
    from frisket.runtime.torch import graph

    return graph


call_options.register("texts", attention_for)
