"""Helpers for models: rotary positions, repeated heads of keys, caches, meshes of devices, products of few bits.

Rotary positions and repeated heads take arrays of JAX or torch. The cache of a layer is as model code has it: append at
the running index, mask what is not written yet. Dot products of integers of few bits are by qwix. Small things that
layers need are here too: a dtype for several arrays, what a checkpoint keeps, docstrings in parts.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding

from frisket.dsl.errors import ParameterError, ShapeError, UnknownNameError
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.caches.jax_plain import Axes, KVCache, ShardedKVCache
from frisket.runtime.calls.arrays import axis_order, framework_of
from frisket.runtime.machine.caller import as_int
from frisket.runtime.machine.modules import extras
from frisket.runtime.machine.parameters import refuse_additive
from frisket.runtime.sharding.partition import current_mesh

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
    xp = _functions_for(positions)
    steps = xp.arange(0, head_dim, 2, dtype=xp.float32, device=None if xp is jnp else positions.device)
    # in float32: 16 bits do not tell far positions apart
    positions = xp.asarray(positions, dtype=xp.float32)
    # of one rank, as JAX may be set to refuse others
    turns = (base ** (-steps / head_dim)).reshape((1,) * positions.ndim + (-1,))
    angles = positions[..., None] * turns
    angles = xp.concatenate((angles, angles), -1)
    return xp.sin(angles), xp.cos(angles)


def _functions_for(x: Any) -> Any:
    """The module with the functions on arrays like `x`: torch, or jax.numpy."""
    if framework_of(x) == "torch":
        import torch  # a program of JAX needs no torch

        return torch
    return jnp


def rotate_half(x: Any) -> Any:
    """The halves of the last axis exchanged, the second one negated: (a, b) becomes (-b, a). Of an odd length b is the
    longer half.

    >>> import torch
    >>> rotate_half(torch.arange(1, 5)).tolist()
    [-3, -4, 1, 2]
    """
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return _functions_for(x).concatenate((-b, a), -1)


def apply_rotary_pos_emb(
    tensor: Any,
    sin: Any = None,
    cos: Any = None,
    layout: str | None = None,
    *,
    sin_: Any = None,
    cos_: Any = None,
    axes: str | None = None,
) -> Any:
    """`tensor * cos + rotate_half(tensor) * sin`: queries or keys turned by their positions, in their own dtype.

    >>> import torch
    >>> q = torch.ones(2, 4, 8, 64)  # [batch, heads, length, head_dim]
    >>> apply_rotary_pos_emb(q, *rotary_tables(torch.arange(16), 64)).shape
    torch.Size([2, 4, 8, 64])

    `axes` "bhsd", the default, is [batch, heads, length, head_dim], "bshd" [batch, length, heads, head_dim]. `layout`
    is its older name. `sin` and `cos` are [length, head_dim] or [batch, length, head_dim]. With a fourth axis, heads,
    they have the axis order of `tensor`, and one table or one for each head. In place of head_dim they may have 1.
    Tables of more positions than `tensor` has are cut. `sin_` and `cos_` are EasyDeL's names.
    """
    if (sin is None) == (sin_ is None) or (cos is None) == (cos_ is None):
        raise ParameterError("give sin and cos once each: apply_rotary_pos_emb(tensor, sin, cos), or sin_= and cos_=")
    sin, cos = sin_ if sin is None else sin, cos_ if cos is None else cos
    # as EasyDeL's function, which has no framework to ask
    layout = axis_order(layout, axes) or "bhsd"
    if layout not in LENGTH_OF:
        raise ParameterError(f"the axis order is {layout!r}; it is 'bhsd' or 'bshd'")
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
        text = f"{name} is {shape} for a tensor {list(tensor.shape)} in the axis order {layout!r}; it is "
        text += "[length, head_dim] or [batch, length, head_dim], or has the axes of "
        text += f"{layout!r} with 1 or {tensor.shape[heads]} heads; with "
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
    return x.repeat_interleave(n_rep, axis) if framework_of(x) == "torch" else jnp.repeat(x, n_rep, axis)


Cache = TypeVar("Cache", KVCache, ShardedKVCache)
T = TypeVar("T")


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


def create_mesh(
    axis_dims: Sequence[int] = (1, -1, 1, 1), axis_names: Sequence[str] = ("dp", "fsdp", "tp", "sp"), backend: str = ""
) -> Mesh:
    """`create_mesh((1, -1, 2, 1))`: all devices of a backend as a mesh, in the order that suits their network.

    >>> create_mesh((1, -1, 1, 1)).axis_names
    ('dp', 'fsdp', 'tp', 'sp')

    One of `axis_dims` may be -1: as many as the others leave. `backend` is "cpu", "gpu" or "tpu", JAX's default
    where it is empty. Raises `ParameterError` where the devices do not make such a mesh.
    """
    dims, names = list(axis_dims), tuple(axis_names)
    devices = jax.devices(backend or None)
    if len(dims) != len(names) or len({*names}) != len(names):
        raise ParameterError(f"axis_dims {dims} and axis_names {list(names)}: a name for each, and each once")
    if any(d == 0 or d < -1 for d in dims) or dims.count(-1) > 1:
        raise ParameterError(f"axis_dims are {dims}; they are 1 or more, and at most one is -1, for what is left")
    known = math.prod(d for d in dims if d != -1)
    shape = [len(devices) // known if d == -1 else d for d in dims]  # a remainder is an error below
    if math.prod(shape) != len(devices):
        text = f"axis_dims {dims} make {known}{' × n' if -1 in dims else ''} devices, and there are {len(devices)}"
        raise ParameterError(text)
    # JAX's default for the types of axes differs by version
    return jax.make_mesh(tuple(shape), names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def names_in_mesh(*names: str) -> bool:
    """Whether the current mesh (`jax.set_mesh(mesh)`, `with mesh:`) has all these axes; without a mesh there are none.

    >>> with jax.set_mesh(create_mesh((1, -1), ("dp", "tp"))):
    ...     names_in_mesh("dp", "tp"), names_in_mesh("sp")
    (True, False)
    """
    mesh = current_mesh()
    return {*names} <= {*(() if mesh is None else mesh.axis_names)}


def get_names_from_partition_spec(partition_specs: Any) -> list[str]:
    """The mesh axes in a spec, or in dicts and sequences of specs, each once, in the order they are met in.

    >>> from jax.sharding import PartitionSpec as P
    >>> get_names_from_partition_spec({"w": P(("fsdp", "sp"), "tp"), "b": [P("tp"), P(None)]})
    ['fsdp', 'sp', 'tp']
    """
    return list(dict.fromkeys(_names(partition_specs)))  # in order, which a set has not


def _names(specs: Any) -> Iterable[str]:
    if isinstance(specs, str):  # first, as a text is iterable
        yield specs
    elif isinstance(specs, NamedSharding):
        yield from _names(specs.spec)
    elif isinstance(specs, Iterable):
        for one in specs.values() if isinstance(specs, Mapping) else specs:
            yield from _names(one)
    elif specs is not None:
        raise ParameterError(f"{specs!r} is no partition spec: those hold names of mesh axes, tuples of them, and None")


def get_ranks_and_size(mesh: Any) -> dict[str, Any]:
    """How processes share a mesh: `mesh`, `mp_node_size` and `dp_node_size`, `mp_node_rank` and `dp_node_rank`.

    >>> found = get_ranks_and_size(create_mesh((1, -1, 1, 1)))  # one process
    >>> found["mp_node_size"], found["dp_node_size"], found["dp_node_rank"]
    (1, 1, 0)

    A model split over "tp" and "sp" spans `mp_node_size` processes, 1 where one process has all devices;
    there are `dp_node_size` such groups. The ranks are this process's place inside its group, and its group's.
    """
    size = max(1, mesh.shape.get("tp", 1) * mesh.shape.get("sp", 1) // jax.local_device_count())
    group, rank = divmod(jax.process_index(), size)
    data: dict[str, Any] = {"mesh": mesh, "mp_node_size": size, "dp_node_size": jax.process_count() // size}
    return data | {"dp_node_rank": group, "mp_node_rank": rank}


@usual_promotion()
def canonicalize_dtype(*args: Any, dtype: Any = None, inexact: bool = True) -> Any:
    """The dtype that arrays are brought to before they meet: `dtype`, or what JAX promotes them to.

    >>> canonicalize_dtype(jnp.ones(2, "bfloat16"), None, jnp.ones(2, "int8"))
    dtype(bfloat16)

    None among `args` is passed over. With `inexact` it is a floating or complex one: integers alone make float32, and
    another `dtype` is an error.
    """
    if dtype is None:
        arrays = [jnp.asarray(x) for x in args if x is not None]
        if not arrays:
            raise ParameterError("there is no array to tell the dtype by; give dtype=")
        dtype = jnp.result_type(*arrays)
        if inexact and not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
        raise ParameterError(f"dtype is {jnp.dtype(dtype)}; it is a floating one here (inexact=False allows others)")
    return dtype


def get_gradient_checkpoint_policy(name: str) -> Callable[..., Any]:
    """`jax.checkpoint(f, policy=get_gradient_checkpoint_policy("dots_saveable"))`: that of `jax.checkpoint_policies`.

    Some are policies, some make one of names: `get_gradient_checkpoint_policy("save_only_these_names")("frisket out",
    "frisket lse")` keeps attention's results, so that the backward does not run it again. Another name is a `KeyError`.

    >>> policy = get_gradient_checkpoint_policy("dots_saveable")
    >>> float(jax.grad(jax.checkpoint(jnp.sin, policy=policy))(0.0))
    1.0
    """
    policies = {n: p for n in dir(jax.checkpoint_policies) if callable(p := getattr(jax.checkpoint_policies, n))}
    policies = {n: p for n, p in policies.items() if not n.startswith("_")}
    if name not in policies:
        near = difflib.get_close_matches(str(name), policies, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(f"there is no checkpoint policy {name!r}{hint}\n  there are {', '.join(policies)}")
    return policies[name]  # type: ignore[no-any-return]


def add_start_docstrings(*docstr: str) -> Callable[[T], T]:
    """A decorator that puts texts before a docstring: `@add_start_docstrings(COMMON, "This one ...")`.

    >>> @add_start_docstrings("A layer of Llama. ")
    ... def block():
    ...     "Attention, then the MLP."
    >>> block.__doc__
    'A layer of Llama. Attention, then the MLP.'
    """

    def documented(fn: T) -> T:
        fn.__doc__ = "".join(docstr) + (fn.__doc__ or "")
        return fn

    return documented


MODES = {"train": "train", "serve": "serve", "convert": "convert", "eval": "serve"}
BITS = range(2, 9)


class EasyMethod:
    """EasyDeL's names for the modes of `get_dot_general_by_bits`: `EasyMethod.TRAIN`.

    >>> EasyMethod.TRAIN, EasyMethod.SERVE, EasyMethod.EVAL, EasyMethod.CONVERT
    ('train', 'serve', 'serve', 'convert')
    """

    TRAIN, SERVE, EVAL, CONVERT = "train", "serve", "serve", "convert"


class Keywords(dict[str, Any]):
    """Keywords of a layer of flax nnx, and `dot_general_cls` for those who make the product themselves:
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
    is summed is 2 ** (bits - 1) - 1, rounded. They are multiplied as integers (int8, which every device multiplies);
    results are floats again. By `mode`:

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


__all__ = ["EasyMethod", "add_start_docstrings", "apply_rotary_pos_emb", "canonicalize_dtype", "concatenate_to_cache"]
__all__ += ["create_mesh", "get_dot_general_by_bits", "get_gradient_checkpoint_policy", "get_names_from_partition_spec"]
__all__ += ["get_ranks_and_size", "init_cache", "names_in_mesh", "repeat_kv_bnsh", "repeat_kv_bsnh", "rotary_tables"]
__all__ += ["rotate_half"]
