"""Rotary positions, and heads of keys repeated for heads of queries; arrays of JAX or torch."""

from __future__ import annotations

from typing import Any

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.calls.arrays import framework_of
from frisket.runtime.machine.integers import as_int

LENGTH_OF = {"bhsd": -2, "bshd": -3}  # layout -> the axis of positions


def rotary_tables(positions: Any, head_dim: int, base: float = 10000.0) -> tuple[Any, Any]:
    """(sin, cos) [..., length, head_dim] in float32 for `apply_rotary_pos_emb`, of the framework of `positions`.

    >>> import jax.numpy as jnp
    >>> sin, cos = rotary_tables(jnp.arange(8), 64)
    >>> sin.shape
    (8, 64)

    `positions` [length] or [batch, length], any integers: those of a shard, or of tokens split over ranks. Angles are
    position / base ** (2 i / head_dim), once for each half of the head (Su et al. 2021, in the order of Llama).
    """
    if head_dim % 2:
        raise ShapeError(f"head_dim is {head_dim}; rotary positions turn pairs, so it is even")
    if framework_of(positions) == "torch":
        import torch as xp

        steps: Any = xp.arange(0, head_dim, 2, dtype=xp.float32, device=positions.device)
        angles = positions.to(xp.float32)[..., None] * base ** (-steps / head_dim)
        angles = xp.cat((angles, angles), -1)
        return xp.sin(angles), xp.cos(angles)
    import jax.numpy as jnp

    steps = jnp.arange(0, head_dim, 2, dtype=jnp.float32)
    turns = (base ** (-steps / head_dim)).reshape((1,) * jnp.ndim(positions) + (-1,))
    angles = jnp.asarray(positions, jnp.float32)[..., None] * turns
    angles = jnp.concatenate((angles, angles), -1)
    return jnp.sin(angles), jnp.cos(angles)


def rotate_half(x: Any) -> Any:
    """The halves of the last axis exchanged, the second one negated: (a, b) becomes (-b, a). Of an odd length b is the
    longer half.

    >>> import torch
    >>> rotate_half(torch.arange(1, 5)).tolist()
    [-3, -4, 1, 2]
    """
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    if framework_of(x) == "torch":
        import torch

        return torch.cat((-b, a), -1)
    import jax.numpy as jnp

    return jnp.concatenate((-b, a), -1)


def apply_rotary_pos_emb(
    tensor: Any, sin: Any = None, cos: Any = None, layout: str = "bhsd", *, sin_: Any = None, cos_: Any = None
) -> Any:
    """`tensor * cos + rotate_half(tensor) * sin`: queries or keys turned by their positions, in their own dtype.

    >>> import torch
    >>> q = torch.ones(2, 4, 8, 64)  # [batch, heads, length, head_dim]
    >>> apply_rotary_pos_emb(q, *rotary_tables(torch.arange(16), 64)).shape
    torch.Size([2, 4, 8, 64])

    `layout` "bhsd" is [batch, heads, length, head_dim], "bshd" [batch, length, heads, head_dim]. `sin` and `cos` are
    [length, head_dim], [batch, length, head_dim], or have an axis of heads where the layout has it, of length 1 or one
    table for each head. In place of head_dim they may have 1. Tables of more positions than `tensor` has are cut.
    `sin_` and `cos_` are EasyDeL's names.
    """
    if (sin is None) == (sin_ is None) or (cos is None) == (cos_ is None):
        raise ParameterError("give sin and cos once each: apply_rotary_pos_emb(tensor, sin, cos), or sin_= and cos_=")
    sin, cos = sin_ if sin is None else sin, cos_ if cos is None else cos
    if layout not in LENGTH_OF:
        raise ParameterError(f"layout is {layout!r}; it is 'bhsd' or 'bshd'")
    if len(tensor.shape) != 4:
        raise ShapeError(f"tensor is {list(tensor.shape)}; it has 4 axes, {' '.join(layout)}")
    sin, cos = (_fitted(name, x, tensor, layout) for name, x in (("sin", sin), ("cos", cos)))
    if framework_of(tensor) == "torch":
        return (tensor * cos + rotate_half(tensor) * sin).to(tensor.dtype)
    with usual_promotion():
        return (tensor * cos + rotate_half(tensor) * sin).astype(tensor.dtype)


def _fitted(name: str, table: Any, tensor: Any, layout: str) -> Any:
    """A table as [batch or 1, heads or 1, length, head_dim], or with the last three axes in the order of `layout`."""
    at, heads = LENGTH_OF[layout], -5 - LENGTH_OF[layout]
    shape, length = list(table.shape), tensor.shape[at]
    if len(shape) in (2, 3):
        table = table[..., None, :, :] if layout == "bhsd" else table[..., None, :]
    if len(table.shape) == 3:
        table = table[None]
    right = len(table.shape) == 4 and table.shape[heads] in (1, tensor.shape[heads]) and table.shape[at] >= length
    if not (right and table.shape[-1] in (1, tensor.shape[-1]) and table.shape[0] in (1, tensor.shape[0])):
        raise ShapeError(
            f"{name} is {shape} for a tensor {list(tensor.shape)} in layout {layout!r}; it is [length, head_dim] or "
            f"[batch, length, head_dim], or has the axes of {layout!r} with 1 or {tensor.shape[heads]} heads; with at "
            f"least {length} positions"
        )
    return table[:, :, :length] if layout == "bhsd" else table[:, :length]


def repeat_kv_bnsh(x: Any, n_rep: int) -> Any:
    """[batch, kv heads, length, head_dim] with each head `n_rep` times in a row: [batch, heads, length, head_dim].

    frisket's own attention needs no such copy: query head h reads key head h // n_rep.

    >>> import jax.numpy as jnp
    >>> repeat_kv_bnsh(jnp.ones((1, 2, 8, 64)), 4).shape
    (1, 8, 8, 64)
    """
    return _repeated(x, n_rep, 1)


def repeat_kv_bsnh(x: Any, n_rep: int) -> Any:
    """[batch, length, kv heads, head_dim] with each head `n_rep` times in a row: [batch, length, heads, head_dim].

    >>> import torch
    >>> repeat_kv_bsnh(torch.ones(1, 8, 2, 64), 4).shape
    torch.Size([1, 8, 8, 64])
    """
    return _repeated(x, n_rep, 2)


def _repeated(x: Any, n_rep: int, axis: int) -> Any:
    if type(n_rep := as_int(n_rep)) is not int or n_rep < 1:
        raise ParameterError(f"n_rep is {n_rep!r}; it is how often every head is there, 1 or more")
    if len(x.shape) != 4:
        raise ShapeError(f"x is {list(x.shape)}; it has 4 axes, the heads being axis {axis}")
    if framework_of(x) == "torch":
        return x.repeat_interleave(n_rep, axis)
    import jax.numpy as jnp

    return jnp.repeat(x, n_rep, axis)
