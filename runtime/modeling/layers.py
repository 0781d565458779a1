"""Helpers for layers around attention: rotary positions, repeated heads of keys, caches, products of few bits.

Rotary positions and repeated heads take arrays of JAX or torch. The cache of a layer is as model code has it: append at
the running index, mask what is not written yet. Dot products of integers of few bits are by qwix.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.caches.jax_plain import Axes, KVCache, ShardedKVCache
from frisket.runtime.calls.arrays import framework_of
from frisket.runtime.machine.extras import extras
from frisket.runtime.machine.integers import as_int
from frisket.runtime.machine.parameters import refuse_additive

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
        import torch as xp  # a program of JAX needs no torch

        steps: Any = xp.arange(0, head_dim, 2, dtype=xp.float32, device=positions.device)
        # in float32: 16 bits do not tell far positions apart
        angles = positions.to(xp.float32)[..., None] * base ** (-steps / head_dim)
        angles = xp.cat((angles, angles), -1)
        return xp.sin(angles), xp.cos(angles)
    steps = jnp.arange(0, head_dim, 2, dtype=jnp.float32)
    # of one rank, as JAX may be set to refuse others
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
        # float32 tables would widen a tensor of 16 bits
        return (tensor * cos + rotate_half(tensor) * sin).to(tensor.dtype)
    with usual_promotion():
        return (tensor * cos + rotate_half(tensor) * sin).astype(tensor.dtype)


def _fitted(name: str, table: Any, tensor: Any, layout: str) -> Any:
    """A table as [batch or 1, heads or 1, length, head_dim], or with the last three axes in the order of `layout`."""
    at, heads = LENGTH_OF[layout], -5 - LENGTH_OF[layout]  # heads and length are the axes -3 and -2, in either order
    shape, length = list(table.shape), tensor.shape[at]
    if len(shape) in (2, 3):
        # the axis of heads, which such a table lacks
        table = table[..., None, :, :] if layout == "bhsd" else table[..., None, :]
    if len(table.shape) == 3:
        table = table[None]
    right = len(table.shape) == 4 and table.shape[heads] in (1, tensor.shape[heads]) and table.shape[at] >= length
    if not (right and table.shape[-1] in (1, tensor.shape[-1]) and table.shape[0] in (1, tensor.shape[0])):
        text = f"{name} is {shape} for a tensor {list(tensor.shape)} in layout {layout!r}; it is [length, head_dim] or "
        text += f"[batch, length, head_dim], or has the axes of {layout!r} with 1 or {tensor.shape[heads]} heads; with "
        raise ShapeError(f"{text}at least {length} positions")
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
    return jnp.repeat(x, n_rep, axis)


Cache = TypeVar("Cache", KVCache, ShardedKVCache)


def init_cache(
    batch: int,
    capacity: int,
    kv_heads: int,
    head_dim: int,
    v_dim: int | None = None,
    dtype: Any = jnp.float32,
    mesh: Any = None,
    axis: Axes = "sp",
    batch_axis: Axes = None,
    head_axis: Axes = None,
) -> Any:
    """`cache = init_cache(2, 1024, 8, 128, dtype="int8")`: an empty cache of `capacity` tokens.

    >>> cache = init_cache(2, 1024, 8, 128, dtype="int8")
    >>> cache.k.shape, cache.k.dtype, cache.k_scale.shape
    ((2, 1024, 8, 128), dtype('int8'), (2, 1024, 8))

    A `frisket.caches.jax.KVCache`; with int8 (or float8_e4m3fn, float8_e5m2) one float32 scale per (batch, position,
    head) vector is stored, too. With a mesh a `ShardedKVCache`: positions are split over its `axis`, and only the
    device that owns a position writes it; `batch_axis=("dp", "fsdp"), head_axis="tp"` split batch and heads besides."""
    if mesh is None:
        if batch_axis or head_axis:
            raise ParameterError("batch_axis and head_axis are axes of a mesh; give mesh= too")
        return KVCache.create(batch, capacity, kv_heads, head_dim, v_dim, dtype)
    axes = {"axis": axis, "batch_axis": batch_axis, "head_axis": head_axis}
    return ShardedKVCache.create(batch, capacity, kv_heads, head_dim, v_dim, dtype, mesh=mesh, **axes)


@usual_promotion()
def concatenate_to_cache(
    cache: Cache, key: jax.Array, value: jax.Array, mask: jax.Array | None = None
) -> tuple[Cache, jax.Array]:
    """`cache, mask = concatenate_to_cache(cache, key, value, mask)`: new tokens at the running index of every sequence.

    >>> tokens = jnp.ones((2, 3, 1, 4))
    >>> cache, mask = concatenate_to_cache(init_cache(2, 8, 1, 4), tokens, tokens)
    >>> cache.lengths.tolist(), mask[0, 0, 0].astype(int).tolist()
    ([3, 3], [1, 1, 1, 0, 0, 0, 0, 0])

    key [batch, new, kv_heads, head_dim], value likewise. The cache that comes back is whole: `cache.k`, `cache.v`
    [batch, capacity, kv_heads, dim], their scales, and `cache.lengths`, the running index. The mask is bool [batch, 1,
    new, capacity], or as `mask` broadcasts with that: True where a token is written and `mask` is above 0. `mask` is
    what flax's `combine_masks` takes: of any dtype, 0 where a key is hidden, and it broadcasts with [batch, heads, new,
    capacity]. With the cache donated under `jax.jit` nothing is copied, and no step recompiles.

    For an attention of frisket there is no such array: `cache.attend(att, query)` reads the same mask text at every
    step. Raises `ShapeError` for a mask of other lengths and `CapacityError` for tokens without room."""
    new, capacity = key.shape[1], cache.capacity
    cache = cache.append(key, value)
    seen = jnp.arange(capacity) < cache.lengths[:, None, None, None]
    seen = jnp.broadcast_to(seen, (cache.batch, 1, new, capacity))
    if mask is None:
        return cache, seen
    mask = jnp.asarray(mask)
    axes = zip(mask.shape[::-1], (capacity, new, None, cache.batch), strict=False)  # any number of heads
    if mask.ndim > 4 or any(n != 1 and most not in (None, n) for n, most in axes):
        text = f"the mask is {mask.dtype}{list(mask.shape)}; it is [batch, heads, {new}, {capacity}], axes of 1 "
        raise ShapeError(f"{text}broadcast: of the whole capacity of the cache")
    refuse_additive(mask)
    return cache, jnp.logical_and(seen, mask > 0)  # traced numbers of a bias, 0 and below, hide every key


MODES = {"train": "train", "serve": "serve", "convert": "convert", "eval": "serve"}
BITS = range(2, 9)


class EasyMethod:
    """EasyDeL's names for the modes of `get_dot_general_by_bits`: `EasyMethod.TRAIN`.

    >>> EasyMethod.TRAIN, EasyMethod.SERVE, EasyMethod.EVAL, EasyMethod.CONVERT
    ('train', 'serve', 'serve', 'convert')
    """

    TRAIN, SERVE, EVAL, CONVERT = "train", "serve", "serve", "convert"


class Keywords(dict[str, Any]):
    """Keywords of a layer of flax nnx, with `dot_general_cls` beside them for those who make the product themselves:
    flax's layers take one of the two names each."""

    def __missing__(self, key: str) -> Any:
        if key == "dot_general_cls" and "dot_general" in self:
            return lambda: self["dot_general"]
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return key in self.keys() or (key == "dot_general_cls" and "dot_general" in self.keys())

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 (dict.get calls no __missing__)


def get_dot_general_by_bits(bits: int | None = None, mode: str = "train") -> dict[str, Any]:
    """Keywords of a layer with products of few bits: `nnx.Linear(64, 64, **get_dot_general_by_bits(8), rngs=rngs)`.

    >>> get_dot_general_by_bits()
    {}
    >>> import jax.numpy as jnp
    >>> dot = get_dot_general_by_bits(8)["dot_general"]
    >>> dot(jnp.ones((2, 64)), jnp.ones((64, 3)), (((1,), (0,)), ((), ()))).shape
    (2, 3)

    `bits` is 2 to 8; None is the layer's own product. Both sides are scaled so that the largest magnitude along what
    is summed is 2 ** (bits - 1) - 1, rounded, and multiplied as integers (int8, which every device multiplies); results
    are floats again. By `mode`:

    - "train": both products of the backward are of integers too; what was rounded passes gradients on.
    - "convert": like "serve", and the right side, the weights, is kept as integers and scales in `rhs`. Run the model
      once, then `model.set_attributes(mode="serve")`.
    - "serve": takes the weights in `rhs`, or those it is called with where there are none, or a `qwix.QArray`. No
      gradients. "eval" is the same.

    `get_dot_general_by_bits(8)["dot_general_cls"]` is a function without arguments that gives the product, for layers
    that take it so, as `flax.linen.Dense`.

    Needs qwix: `pip install 'frisket-attention[quantized]'`.
    """
    if mode not in MODES:
        raise ParameterError(f"mode is {mode!r}; it is one of {', '.join(map(repr, MODES))}")
    if bits is None:
        return {}
    if bits not in BITS:
        raise ParameterError(f"bits is {bits!r}; there are products of 2 to 8 bits")
    with extras():
        from .quantized import DotGeneral

    return Keywords(dot_general=DotGeneral(bits, MODES[mode]))
