"""The meaning of torch's reductions, indexing and shape changes on arrays of Exprs, by name. Nothing here needs torch.

>>> from frisket.dsl.from_python.symbol import table
>>> from frisket.dsl.ir import var
>>> from frisket.dsl.show import show
>>> from frisket.dsl.types import FLOAT
>>> x, q = table("x", (8, 3), FLOAT), Symbol(var("q"))
>>> show(norm(x[q], p=1, dim=-1).expr, ["x"])
'sum(j in 0..extent(x, 1): abs(x[q, j]))'
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

from frisket.dsl import ir
from frisket.dsl.from_python.elements import alike
from frisket.dsl.from_python.symbol import Symbol, aligned, apply_binary, axis, indexed, operand, product, reduced
from frisket.dsl.from_python.user_line import fail
from frisket.dsl.ir import Expr, lit
from frisket.dsl.sugar import eq, where

from .scalars import SCALARS, Function, to


def _reduce(kind: str) -> Function:
    def call(input: Any, dim: Any = None, keepdim: bool = False, **names: Any) -> Symbol:
        x = _vector(input, kind)
        dtype = names.pop("dtype", None)
        dim, keepdim = names.pop("axis", dim), names.pop("keepdims", keepdim)
        if names:
            raise TypeError(f"unexpected {', '.join(names)}")
        return reduced(kind, x if dtype is None else to(x, dtype), dim, keepdim)

    return call


def _vector(x: Any, what: str) -> Symbol:
    return stack(x) if isinstance(x, list | tuple) else operand(x, f"`{what}`")


def _extreme(kind: str) -> Function:
    def call(input: Any, other: Any = None, **names: Any) -> Symbol:
        if other is None and not names:
            return reduced(kind, operand(input, f"`{kind}`"))
        if names or isinstance(other, int):
            fail(f"`{kind}` along an axis gives indices too, which a mask cannot hold: write `torch.a{kind}`")
        return apply_binary(kind, input, other)

    return call


def mean(input: Any, dim: Any = None, keepdim: bool = False, **names: Any) -> Symbol:
    x = to(input, dtype="float")
    total = REDUCTIONS["sum"](x, dim, keepdim, **names)
    dim = names.get("axis", dim)
    chosen = x.shape if dim is None or not x.shape else [x.shape[d] for d in ([dim] if isinstance(dim, int) else dim)]
    return apply_binary("div", total, float(math.prod(chosen)))


def prod(input: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Symbol:
    x = operand(input, "`prod`")
    if x.ndim == 0:
        return x
    if (x.ndim > 1 and dim is None) or keepdim or x.shape[dim or 0] > 64:
        fail("`prod` is over one axis of at most 64 entries")
    return reduce(partial(apply_binary, "mul"), moveaxis(x, dim or 0, 0), Symbol(lit(1)))


def norm(input: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, *, ord: Any = None, dtype: Any = None,
         out: Any = None) -> Symbol:  # fmt: skip
    x = to(input, dtype="float")
    p = ord if ord is not None else 2 if p in (None, "fro") else p
    if p == 2:
        total = reduced("sum", apply_binary("mul", x, x), dim, keepdim)
        root = SCALARS["sqrt"](total)  # its derivative is infinite at 0, where torch takes 0 for the norm's
        return SCALARS["where"](apply_binary("eq", total, 0.0), 0.0, root)  # type: ignore[no-any-return]
    if p == 1:
        return reduced("sum", abs(x), dim, keepdim)
    if p == math.inf:
        return reduced("max", abs(x), dim, keepdim)
    return fail(f"`norm` of order {p}: the orders are 1, 2 and inf")


def dot(input: Any, tensor: Any = None, *, other: Any = None, dim: int = -1) -> Symbol:
    return reduced("sum", apply_binary("mul", input, tensor if other is None else other), dim)


def inner(input: Any, other: Any) -> Symbol:
    x, y = operand(input, "`inner`"), operand(other, "`inner`")
    if x.ndim > 1 and y.ndim > 1:
        fail(f"`inner` of arrays with {x.ndim} and {y.ndim} axes: one of them is a vector, the other has axes too")
    return dot(x, y) if x.ndim and y.ndim else apply_binary("mul", x, y)


def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Symbol:
    x, y = operand(elements, "`isin`"), operand(test_elements, "`isin`")
    flat = reshape(y, -1)
    found = reduced("any", apply_binary("eq", x[..., None] if x.ndim else x, flat), -1)
    return ~found if invert else found


def linear(input: Any, weight: Any, bias: Any = None) -> Symbol:
    """The product `weight @ input + bias` for one vector."""
    x = operand(input, "`linear`")
    if x.ndim != 1:
        fail(f"`linear` of an array with {x.ndim} axes: it takes one vector")
    found = product(operand(weight, "`linear`"), x)
    return found if bias is None else apply_binary("add", found, bias)


def embedding(input: Any, weight: Any, padding_idx: Any = None, *_: Any, **__: Any) -> Symbol:
    return indexed(operand(weight, "`embedding`"), operand(input, "`embedding`"))


def stack(tensors: Sequence[Any], dim: int = 0) -> Symbol:
    parts, axes = aligned([operand(t, "`stack`") for t in tensors], "`stack`")
    for i in range(1, len(parts)):
        parts[0], parts[i] = alike(parts[0], parts[i])
    parts = [alike(p, parts[0])[0] for p in parts]
    new, found = axis(len(parts)), parts[-1]
    for i in reversed(range(len(parts) - 1)):
        found = where(eq(new.bound, i), parts[i], found)
    return moveaxis(Symbol(found, (new, *axes)), 0, dim)


def permute(input: Any, *dims: Any) -> Symbol:
    x = operand(input, "`permute`")
    order = dims[0] if dims and not isinstance(dims[0], int) else dims
    return Symbol(x.expr, tuple(x.axes[d] for d in order))


def moveaxis(input: Any, source: int, destination: int) -> Symbol:
    x = operand(input, "`moveaxis`")
    axes = list(x.axes)
    moved = axes.pop(source)
    axes.insert(destination % x.ndim, moved)
    return Symbol(x.expr, tuple(axes))


def transpose(input: Any, dim0: int, dim1: int) -> Symbol:
    x = operand(input, "`transpose`")
    axes = list(x.axes)
    axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return Symbol(x.expr, tuple(axes))


def turned(input: Any) -> Symbol:
    """The transpose `x.t()`, `x.T`, `x.mT`."""
    return transpose(input, -2, -1) if operand(input, "`t`").ndim > 1 else operand(input, "`t`")


def unsqueeze(input: Any, dim: int) -> Symbol:
    x = operand(input, "`unsqueeze`")
    at = dim % (x.ndim + 1)
    return Symbol(x.expr, (*x.axes[:at], axis(1), *x.axes[at:]))


def squeeze(input: Any, dim: Any = None) -> Symbol:
    x = operand(input, "`squeeze`")
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % x.ndim for d in dims if x.axes and x.shape[d] == 1}
    moves = {x.axes[d].bound: ir.ZERO for d in gone}
    return Symbol(ir.substitute(x.expr, moves), tuple(a for i, a in enumerate(x.axes) if i not in gone))


def reshape(input: Any, *shape: Any) -> Symbol:
    """A row-major view in another shape: the old indices are quotients and remainders of the flat index."""
    x = operand(input, "`reshape`")
    given = [int(n) for n in (shape[0] if shape and not isinstance(shape[0], int) else shape)]
    total, known = math.prod(x.shape), math.prod(n for n in given if n >= 0)
    sizes = [total // max(known, 1) if n < 0 else n for n in given]
    if math.prod(sizes) != total:
        fail(f"an array of {total} entries has no shape {tuple(given)}")
    if tuple(sizes) == x.shape:
        return x
    axes = tuple(axis(n) for n in sizes)
    flat: Expr = ir.ZERO
    for a in axes:
        flat = a.bound if flat is ir.ZERO else flat * a.size + a.bound
    moves, below = {}, total
    for i, old in enumerate(x.axes):
        below //= max(old.size, 1)
        quotient = flat // below if below > 1 else flat
        moves[old.bound] = quotient % old.size if i else quotient
    return Symbol(ir.substitute(x.expr, moves), axes)


def flatten(input: Any, start_dim: int = 0, end_dim: int = -1) -> Symbol:
    x = operand(input, "`flatten`")
    if not x.ndim:
        return reshape(x, 1)
    first, last = start_dim % x.ndim, end_dim % x.ndim
    return reshape(x, (*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :]))


def expand(input: Any, *sizes: Any) -> Symbol:
    x = operand(input, "`expand`")
    want = list(sizes[0] if sizes and not isinstance(sizes[0], int) else sizes)
    full = [1] * (len(want) - x.ndim) + list(x.shape)
    wide = tuple(axis(n if w < 0 else w) for n, w in zip(full, want, strict=True))
    parts, axes = aligned([x, Symbol(ir.ZERO, wide)], "`expand`")
    return Symbol(parts[0], axes)


def select(input: Any, dim: int, index: Any) -> Symbol:
    x = operand(input, "`select`")
    return x[(*(slice(None),) * (dim % x.ndim), index)]


def same(input: Any, *_: Any, **__: Any) -> Symbol:
    """The input unchanged: copies, devices and memory formats mean nothing here."""
    return operand(input, "a copy")


REDUCTIONS: dict[str, Function] = {
    "sum": _reduce("sum"), "any": _reduce("any"), "all": _reduce("all"), "amax": _reduce("max"),
    "amin": _reduce("min"), "mean": mean,
}  # fmt: skip

ARRAYS: dict[str, Function] = {
    **REDUCTIONS,
    "max": _extreme("max"), "min": _extreme("min"), "prod": prod, "norm": norm, "vector_norm": norm,
    "dot": dot, "vdot": dot, "inner": inner, "vecdot": dot,
    "matmul": lambda input, other: product(operand(input, "`@`"), operand(other, "`@`")),
    "mv": lambda input, vec: product(operand(input, "`@`"), operand(vec, "`@`")),
    "rmatmul": lambda input, other: product(operand(other, "`@`"), operand(input, "`@`")),
    "isin": isin, "embedding": embedding, "linear": linear,
    "take": lambda input, index: indexed(reshape(input, -1), operand(index, "`take`")),
    "index_select": lambda input, dim, index: select(input, dim, index),
    "getitem": lambda input, key: indexed(operand(input, "an index"), key),
    "stack": stack, "permute": permute, "moveaxis": moveaxis, "movedim": moveaxis, "transpose": transpose,
    "swapaxes": transpose, "swapdims": transpose, "t": turned, "T": turned, "mT": turned,
    "unsqueeze": unsqueeze, "squeeze": squeeze, "reshape": reshape, "view": reshape, "flatten": flatten,
    "expand": expand, "broadcast_to": expand, "select": select,
    "expand_as": lambda input, other: expand(input, operand(other, "`expand_as`").shape),
    "clone": same, "contiguous": same, "cpu": same, "cuda": same,
}  # fmt: skip
