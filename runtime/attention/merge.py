"""Attention over disjoint sets of keys, combined."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import reduce
from itertools import chain
from operator import add
from typing import Any

import numpy as np

from frisket.dsl.errors import ShapeError
from frisket.lowering.dtypes import FLOATS, accumulate
from frisket.runtime.calls.arrays import LAYOUTS, NATURAL, Array, check_layout, framework_of, like_jax


def merge(*parts: tuple[Array, Array], layout: str | None = None) -> tuple[Array, Array]:
    """`out, lse = merge((out1, lse1), (out2, lse2), ...)`: attention over the keys of all parts, from each part's own.

    >>> import frisket as fk, torch
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4)
    >>> halves = [fk.attention(q, k, v, m, return_lse=True) for m in ("k < 4", "k >= 4")]
    >>> out, lse = merge(*halves)
    >>> torch.allclose(out, fk.attention(q, k, v), atol=1e-6)
    True

    `out` is (batch, heads, length, dim) in torch and (batch, length, heads, dim) in JAX unless `layout` says otherwise,
    `lse` (batch, heads, length), natural log. Works in float32 (float64 for float64) and gives `out` in the dtype of
    the parts; differentiable in every `out` and `lse`. The lse of a part that saw no key is -inf, and its out is
    ignored. Where no part saw a key, the result is 0 and -inf, with gradients of 0.
    Parts of JAX and numpy may have no batch axis.

        lse = log sum_i exp(lse_i),   out = sum_i exp(lse_i - lse) out_i

    (M. Milakov and N. Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867.) Raises `ShapeError`
    for parts that do not fit together.
    """
    parts, xp, layout = _checked(parts, layout)
    out, lse, _ = merged([(*part, 0.0) for part in parts], xp, layout)
    return out, lse


def merged(parts: Sequence[tuple[Any, Any, Any]], xp: Any, layout: str) -> tuple[Any, Any, Any]:
    """(out, lse, low) of the parts' own, where lse + low is what a backward takes: low is what rounding left out."""
    first: Any = parts[0][0]
    # sums of parts in 16 bits would round once for each part
    wide = getattr(xp, accumulate(first.dtype))
    kind = first.dtype
    lses = [_cast(lse, wide) for _, lse, _ in parts]
    highest = reduce(xp.maximum, map(_constant, lses))
    # -inf - -inf is NaN
    shift = xp.where(highest == -xp.inf, xp.zeros_like(highest), highest)
    gaps = [lse - shift + low for lse, (*_, low) in zip(lses, parts, strict=True)]
    most: Any = 0.0
    if any(framework_of(low) for *_, low in parts):  # of huge scores they are more than exp takes
        most = reduce(xp.maximum, gaps)
        most = xp.where(most == -xp.inf, xp.zeros_like(most), _constant(most))
        gaps = [gap - most for gap in gaps]
    shares = [xp.exp(gap) for gap in gaps]
    total = reduce(add, shares)
    nowhere = total == 0
    # no division by 0, whose gradient is NaN even where it is not taken
    total = xp.where(nowhere, xp.ones_like(total), total)
    out = None
    for (mine, *_), share in zip(parts, shares, strict=True):
        weight = share / total
        # lse has heads before lengths in both layouts
        weight = (weight if layout == "bhsd" else weight.swapaxes(-1, -2))[..., None]
        mine = _cast(mine, wide)
        term = xp.where(weight == 0, xp.zeros_like(mine), mine) * weight  # what an empty part holds may be NaN
        out = term if out is None else out + term
    log = xp.log(total) + most
    lse = xp.where(nowhere, xp.full_like(total, -xp.inf), log + shift)
    return _cast(out, kind), lse, xp.where(nowhere, xp.zeros_like(total), shift - lse + log)


def _checked(parts: tuple[Any, ...], layout: str | None) -> tuple[tuple[Any, ...], Any, str]:
    """(parts that fit together, in one framework, its module, the layout)."""
    if layout is not None:
        check_layout(layout)
    if not parts:
        raise ShapeError("merge has nothing to merge; give it pairs: merge((out1, lse1), (out2, lse2))")
    for i, part in enumerate(parts):
        if not isinstance(part, tuple | list) or len(part) != 2:
            raise ShapeError(f"part {i} is a {type(part).__name__}; a part is a pair (out, lse)")
    frameworks = {framework_of(x) for part in parts for x in part}
    if frameworks == {"jax", "numpy"}:
        # numpy's arrays go with JAX's
        parts, frameworks = tuple(tuple(like_jax(x, *chain(*parts)) for x in part) for part in parts), {"jax"}
    if None in frameworks or len(frameworks) > 1:
        kinds = ", ".join(f"({type(out).__name__}, {type(lse).__name__})" for out, lse in parts)
        raise ShapeError(f"the parts are {kinds}; give arrays of one framework")
    framework = str(frameworks.pop())
    if framework == "numpy" and layout is None:
        raise ShapeError('numpy arrays have no natural layout; give layout="bhsd" or layout="bshd"')
    layout = layout or NATURAL[framework]
    shape, dtype = tuple(parts[0][0].shape), parts[0][0].dtype
    for i, (out, lse) in enumerate(parts):
        rows = _rows(out.shape, layout)
        if len(out.shape) not in ((4,) if framework == "torch" else (3, 4)) or tuple(lse.shape) != rows:
            raise ShapeError(
                f"part {i} has out {tuple(out.shape)} and lse {tuple(lse.shape)}\n  out is {LAYOUTS[layout]} and lse "
                '(batch, heads, length); layout="bhsd" or "bshd" says otherwise'
            )
        if tuple(out.shape) != shape or out.dtype != dtype:
            raise ShapeError(
                f"part 0 has out {shape} of {dtype}, part {i} {tuple(out.shape)} of {out.dtype}; parts are attention "
                "of the same queries over different keys, in one dtype"
            )
        if str(out.dtype).removeprefix("torch.") not in FLOATS:
            raise ShapeError(f"out of part {i} is {out.dtype}; attention gives {', '.join(FLOATS)}")
    modules = {"numpy": np, "torch": sys.modules.get("torch"), "jax": getattr(sys.modules.get("jax"), "numpy", None)}
    return parts, modules[framework], layout


def _rows(shape: Any, layout: str) -> tuple[int, ...]:
    """The shape of lse, from that of out."""
    if len(shape) < 3:
        return ()
    *batch, x, y, _ = shape
    return (*batch, x, y) if layout == "bhsd" else (*batch, y, x)


def _cast(x: Any, dtype: Any) -> Any:
    return x.to(dtype) if framework_of(x) == "torch" else x.astype(dtype)


def _constant(x: Any) -> Any:
    """`x`, without gradients: the shift cancels."""
    framework = framework_of(x)
    if framework == "torch":
        return x.detach()
    return sys.modules["jax"].lax.stop_gradient(x) if framework == "jax" else x
