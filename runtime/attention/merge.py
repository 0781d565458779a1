"""Attention over disjoint sets of keys, combined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain
from operator import add
from typing import Any

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.dsl.ir import uses
from frisket.lowering.dtypes import FLOATS, accumulate
from frisket.lowering.plan import Origin, Sizes
from frisket.runtime.calls.arrays import LAYOUTS, NATURAL, Array, axis_order, check_layout, framework_of, like_jax
from frisket.runtime.calls.program import check_used
from frisket.runtime.machine.parameters import stand_in
from frisket.runtime.masks.mask import weight

from .weighted import Sums, cast, constant, divided, module_of, of_rows, problem_of


def merge(*parts: tuple[Array, Array], layout: str | None = None, axes: str | None = None) -> tuple[Array, Array]:
    """`out, lse = merge((out1, lse1), (out2, lse2), ...)`: attention over the keys of all parts, from each part's own.

    >>> import frisket as fk, torch
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4)
    >>> halves = [fk.attention(q, k, v, m, return_lse=True) for m in ("k < 4", "k >= 4")]
    >>> out, lse = merge(*halves)
    >>> torch.allclose(out, fk.attention(q, k, v), atol=1e-6)
    True

    `out` is (batch, heads, length, dim) in torch and (batch, length, heads, dim) in JAX unless `axes` says otherwise,
    `lse` (batch, heads, length), natural log. Works in float32 (float64 for float64) and gives `out` in the dtype of
    the parts; differentiable in every `out` and `lse`. The lse of a part that saw no key is -inf, and its out is
    ignored. Where no part saw a key, the result is 0 and -inf, with gradients of 0.
    Parts of JAX and numpy may have no batch axis.

        lse = log sum_i exp(lse_i),   out = sum_i exp(lse_i - lse) out_i

    (M. Milakov and N. Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867.) Raises `ShapeError`
    for parts that do not fit together.
    """
    parts, xp, layout = _checked(parts, axis_order(layout, axes))
    out, lse, _ = merged([(*part, 0.0) for part in parts], xp, layout)
    return out, lse


def merged(parts: Sequence[tuple[Any, Any, Any]], xp: Any, layout: str) -> tuple[Any, Any, Any]:
    """(out, lse, low) of the parts' own, where lse + low is what a backward takes: low is what rounding left out."""
    first: Any = parts[0][0]
    # sums of parts in 16 bits would round once for each part
    wide = getattr(xp, accumulate(first.dtype))
    kind = first.dtype
    lses = [cast(lse, wide) for _, lse, _ in parts]
    highest = reduce(xp.maximum, map(constant, lses))
    # -inf - -inf is NaN
    shift = xp.where(highest == -xp.inf, xp.zeros_like(highest), highest)
    gaps = [lse - shift + low for lse, (*_, low) in zip(lses, parts, strict=True)]
    most: Any = 0.0
    if any(framework_of(low) for *_, low in parts):  # of huge scores they are more than exp takes
        most = reduce(xp.maximum, gaps)
        most = xp.where(most == -xp.inf, xp.zeros_like(most), constant(most))
        gaps = [gap - most for gap in gaps]
    shares = [xp.exp(gap) for gap in gaps]
    total = reduce(add, shares)
    nowhere = total == 0
    # no division by 0, whose gradient is NaN even where it is not taken
    total = xp.where(nowhere, xp.ones_like(total), total)
    out = None
    for (mine, *_), share in zip(parts, shares, strict=True):
        factor = of_rows(share / total, layout)
        mine = cast(mine, wide)
        term = xp.where(factor == 0, xp.zeros_like(mine), mine) * factor  # what an empty part holds may be NaN
        out = term if out is None else out + term
    log = xp.log(total) + most
    lse = xp.where(nowhere, xp.full_like(total, -xp.inf), log + shift)
    return cast(out, kind), lse, xp.where(nowhere, xp.zeros_like(total), shift - lse + log)


def merged_sums(
    parts: Sequence[Any],
    divide: Any,
    layout: str | None,
    origin: Origin | None,
    sizes: Sizes | None,
    params: Mapping[str, Any],
) -> tuple[Array, Sums]:
    """`frisket.merge_sums` outside of graphs that Dynamo makes."""
    for i, part in enumerate(parts):
        if not (isinstance(part, tuple | list) and len(part) == 2 and isinstance(part[1], tuple | list)):
            kind = type(part[1] if isinstance(part, tuple | list) and len(part) == 2 else part).__name__
            raise ShapeError(
                f"part {i} has a {kind}; a part is a pair (out, sums), as return_sums=True gives it; "
                "of a list of parts, write merge_sums(*parts)"
            )
    flat = [(out, *sums) for out, sums in parts]
    checked, _, layout = _checked(tuple(flat), layout, ("out", "numerator"), ("total", "count"), "merge_sums")
    out, *columns = zip(*checked, strict=True)
    sums = Sums(*(reduce(add, column) for column in columns))
    divisor = None if divide is None else weight("score", divide, **{n: stand_in(x) for n, x in params.items()}).divide
    if divisor is None:
        check_used(params, ())
    elif sizes is None and "KV_LEN" in uses(divisor.expr):
        raise ParameterError(
            "`divide` reads KV_LEN, which sums of rows do not tell\n  give sizes=(B, H, Q_LEN, KV_LEN)"
        )
    problem = problem_of(sums.total, origin, sizes)
    return divided(sums, divisor, params, layout, problem, out[0].dtype), sums


def _checked(
    parts: tuple[Any, ...],
    layout: str | None,
    wide: Sequence[str] = ("out",),
    rows: Sequence[str] = ("lse",),
    name: str = "merge",
) -> tuple[tuple[Any, ...], Any, str]:
    """(parts that fit together, in one framework, its module, the layout). A part has `wide` arrays in the shape of out
    and `rows` arrays of one number for each query; `name` is that of the function."""
    if layout is not None:
        check_layout(layout)
    names = (*wide, *rows)
    pair = "(out, lse)" if len(names) == 2 else "(out, sums)"
    if not parts:
        text = f"{name} has nothing to merge; give it pairs: {name}"
        raise ShapeError(f"{text}(({pair[1:-1].replace(', ', '1, ')}1), ({pair[1:-1].replace(', ', '2, ')}2))")
    for i, part in enumerate(parts):
        if not isinstance(part, tuple | list) or len(part) != len(names):
            raise ShapeError(f"part {i} is a {type(part).__name__}; a part is a pair {pair}")
    frameworks = {framework_of(x) for part in parts for x in part}
    if frameworks == {"jax", "numpy"}:
        # numpy's arrays go with JAX's
        parts, frameworks = tuple(tuple(like_jax(x, *chain(*parts)) for x in part) for part in parts), {"jax"}
    if None in frameworks or len(frameworks) > 1:
        kinds = ", ".join(f"({', '.join(type(x).__name__ for x in part)})" for part in parts)
        summed = any(isinstance(x, Sums) for part in parts for x in part)
        remedy = "join sums by frisket.merge_sums" if summed else "give arrays of one framework"
        raise ShapeError(f"the parts are {kinds}; {remedy}")
    framework = str(frameworks.pop())
    if framework == "numpy" and layout is None:
        raise ShapeError('numpy arrays have no usual axis order; give axes="bhsd" or axes="bshd"')
    layout = layout or NATURAL[framework]
    shape, dtype = tuple(parts[0][0].shape), parts[0][0].dtype
    for i, part in enumerate(parts):
        out, shapes = part[0], [tuple(x.shape) for x in part]
        wanted = [tuple(out.shape)] * len(wide) + [_rows(out.shape, layout)] * len(rows)
        if len(out.shape) not in ((4,) if framework == "torch" else (3, 4)) or shapes != wanted:
            have = " and ".join(f"{n} {x}" for n, x in zip(names, shapes, strict=True))
            raise ShapeError(
                f"part {i} has {have}\n  {' and '.join(wide)} is {LAYOUTS[layout]} and {' and '.join(rows)} "
                '(batch, heads, length); axes="bhsd" or "bshd" says otherwise'
            )
        if tuple(out.shape) != shape or out.dtype != dtype:
            raise ShapeError(
                f"part 0 has out {shape} of {dtype}, part {i} {tuple(out.shape)} of {out.dtype}; parts are attention "
                "of the same queries over different keys, in one dtype"
            )
        if str(out.dtype).removeprefix("torch.") not in FLOATS:
            raise ShapeError(f"out of part {i} is {out.dtype}; attention gives {', '.join(FLOATS)}")
    return parts, module_of(parts[0][0]), layout


def _rows(shape: Any, layout: str) -> tuple[int, ...]:
    """The shape of lse, from that of out."""
    if len(shape) < 3:
        return ()
    *batch, x, y, _ = shape
    return (*batch, x, y) if layout == "bhsd" else (*batch, y, x)
