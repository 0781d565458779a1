"""The base of JAX's caches, and the plain cache: one buffer for a batch of sequences, on one device or on several.

Arrays are [rows, places, kv_heads, dim], scales [rows, places, kv_heads]; a row is a sequence, or a page of a pool.
Several devices hold a range of a sequence's positions each, and decoding merges their results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import FunctionType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from frisket.dsl.errors import CapacityError, ParameterError, ShapeError
from frisket.lowering.dtypes import BYTES, FLOATS
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.attention.attention import Attention
from frisket.runtime.attention.statistics import Statistics
from frisket.runtime.calls.options import refuse_parts
from frisket.runtime.machine.parameters import traced
from frisket.runtime.sharding.partition import names_of, spec_of, split_as

from . import positions
from .positions import PositionMap, check_path, check_queries, check_same_tokens, of_tree, placed

Arrays = Mapping[str, Any]
finfo: Any = jnp.finfo  # JAX leaves some of its functions untyped


def empty(shape: tuple[int, int, int], head_dim: int, v_dim: int | None, dtype: Any) -> dict[str, Any]:
    """k, v and, with 8 bits, their scales, for (rows, places, kv_heads)."""
    v_dim = head_dim if v_dim is None else v_dim
    if any(int(n) < 1 for n in (*shape, head_dim, v_dim)):
        raise ShapeError(f"a cache of {shape}, head_dim {head_dim} and v_dim {v_dim}; every size is at least 1")
    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or kind.name not in (*FLOATS, *BYTES):
        raise ParameterError(f"dtype is {dtype}; caches hold {', '.join((*FLOATS, *BYTES))}")
    arrays = {n: jnp.zeros((*shape, dim), kind) for n, dim in (("k", head_dim), ("v", v_dim))}
    scales = {f"{n}_scale": jnp.zeros(shape, jnp.float32) if kind.name in BYTES else None for n in "kv"}
    return arrays | scales


@dataclass(frozen=True, eq=False)
class JaxCache:
    """The base of JAX caches, which are pytrees: these arrays, `lengths`, and what each kind adds."""

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None

    def __init_subclass__(cls) -> None:
        """Compute in public methods as JAX does by default, whatever dtypes the caller lets JAX promote."""
        for name, method in list(vars(cls).items()):
            if isinstance(method, FunctionType) and not name.startswith("_"):
                setattr(cls, name, usual_promotion()(method))

    batch = property(lambda self: self.lengths.shape[0], doc="Sequences.")

    @property
    def arrays(self) -> dict[str, Any]:
        """k, v and their scales, None where there are none."""
        return {"k": self.k, "v": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale}

    @usual_promotion()
    def attention(
        self: Any, att: Attention, q: jax.Array, k: jax.Array, v: jax.Array, counts: Any = None, **params: Any
    ) -> tuple[Any, Any]:
        """(out, cache): `append`, then `attend`, with the same keywords."""
        cache = self.append(k, v, counts)
        out = cache.attend(att, q, counts, **params)
        if counts is not None:
            check_same_tokens(q, k, "bshd")
        return out, cache

    @usual_promotion()
    def statistics(
        self: Any, att: Attention, q: jax.Array, counts: Any = None, *, tree: Any = None, **params: Any
    ) -> Statistics:
        """Statistics of the weights of `attend`, which takes the same arguments.

        >>> import frisket as fk, jax.numpy as jnp
        >>> from frisket.caches.jax import KVCache
        >>> x = jnp.ones((1, 3, 2, 16))
        >>> cache = KVCache.create(1, 8, 2, 16).append(x, x)
        >>> float(cache.statistics(fk.compile("causal"), x, columns=True).columns[0, 0].sum().round())
        3.0

        `columns=True`, `entropy=True`, `argmax=True`, `top=4`, `per=` and `lse=` are those of `Attention.statistics`.
        Columns and named keys count places of a row in the order of tokens, also where these are in pages, and slots of
        a ring. Padding has the results of a query that sees no key."""
        run, params = positions.statistics_run(params)
        return read(att, q, self, counts, tree, params, getattr(self, "pages", None), run)  # type: ignore[no-any-return]

    @usual_promotion()
    def truncate(self: Any, lengths: Any) -> Any:
        """The first `lengths` int [batch] tokens of every sequence, or all where there are fewer; 0 empties a row."""
        lengths = jnp.minimum(self.lengths, numbers("lengths", lengths, self.batch))
        # an empty row may take another sequence
        return replace(self, lengths=lengths, overflowed=self.overflowed & (lengths > 0))


def quantized(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """(values of 8 bits, float32 scales without the last axis): x is about values * scale[..., None].

    The largest magnitude of a vector becomes the largest number of the dtype: 127, 448 for float8_e4m3fn, 57344 for
    float8_e5m2.

    >>> values, scale = quantized(jnp.array([[1.0, -2.54]]), jnp.int8)
    >>> values.tolist(), round(float(scale[0]), 6)
    ([[50, -127]], 0.02)
    """
    if jnp.dtype(dtype).name not in BYTES:
        raise ParameterError(f"dtype is {dtype}; caches hold {', '.join(BYTES)} in 8 bits")
    x = x.astype(jnp.float32)
    whole = jnp.issubdtype(dtype, jnp.integer)
    most = 127.0 if whole else float(finfo(dtype).max)
    scale = jnp.abs(x).max(-1) / most
    values = x / jnp.where(scale == 0, 1, scale)[..., None]  # a vector of zeros: no 0 / 0
    values = jnp.round(values) if whole else values  # a cast to an integer truncates
    return jnp.clip(values, -most, most).astype(dtype), scale  # x / scale may round past the largest number


def stored(like: Arrays, k: jax.Array, v: jax.Array) -> dict[str, Any]:
    """New tokens as a cache with such arrays holds them."""
    arrays: dict[str, Any] = {}
    for n, x in (("k", k), ("v", v)):
        scaled = like[f"{n}_scale"] is not None
        arrays[n], arrays[f"{n}_scale"] = quantized(x, like[n].dtype) if scaled else (x.astype(like[n].dtype), None)
    return arrays


def written(arrays: Arrays, new: Arrays, at: jax.Array) -> dict[str, Any]:
    """The arrays with `new` [rows, n, ...] at the places `at` [rows, n], all different in a row; those beyond the end
    are dropped. In place where the arrays are donated."""
    put: Any = jax.vmap(lambda array, values, at: array.at[at].set(values, mode="drop", unique_indices=True))
    return {n: x if x is None else put(x, new[n], at) for n, x in arrays.items()}


def check_new(arrays: Arrays, batch: int, k: Any, v: Any) -> int:
    """How many new tokens a sequence, of k [batch, new, kv_heads, head_dim] and v."""
    kv_heads, head_dim = arrays["k"].shape[2:]
    kinds = sorted({arrays[n].dtype.name for n in "kv"})
    if arrays["k_scale"] is not None and not {*kinds} <= {*BYTES}:  # a cast of all Floats casts those of 8 bits too
        text = f"the cache has scales, and its k and v are {', '.join(kinds)}; it was made for 8 bits: "
        raise ParameterError(f"{text}leave their dtypes")
    return positions.check_new(k, v, "bshd", batch, kv_heads, head_dim, arrays["v"].shape[3])


def counted(counts: Any, batch: int, new: int) -> jax.Array:
    """How many of the new tokens of each sequence are real, int32 [batch]; None: all of them."""
    if counts is None:
        return jnp.full((batch,), new, jnp.int32)
    real = numbers("counts", counts, batch)
    if not traced(real) and bool((real > new).any()):
        raise ShapeError(f"counts are {np.asarray(counts)}, of {new} new tokens; each is from 0 to {new}")
    return jnp.broadcast_to(real, (batch,))


def numbers(name: str, x: Any, batch: int) -> jax.Array:
    """One integer for each sequence, int32 [batch] or [], from 0; inside of a trace their values are not looked at."""
    x = jnp.asarray(x)
    if x.shape not in ((), (batch,)) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ShapeError(f"{name} are {x.dtype}{list(x.shape)}; they are one integer, or [batch] = [{batch}]")
    if not traced(x) and bool((x < 0).any()):
        raise ShapeError(f"{name} are {np.asarray(x)}; each is 0 or more")
    return jnp.asarray(x, jnp.int32)


def pathed(cache: Any, path: Any, drafted: Any, counts: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(nodes of a tree that stay, int32 [batch, nodes], where the tree begins int32 [batch], how many of those nodes
    are meant int32 [batch])."""
    path, batch = jnp.asarray(path), cache.batch
    if path.ndim != 2 or path.shape[0] != batch or not jnp.issubdtype(path.dtype, jnp.integer):
        raise ShapeError(f"path is {path.dtype}{list(path.shape)}; it is nodes, integers [{batch}, m]")
    drafts, counts = numbers("drafted", drafted, batch), counted(counts, *path.shape)
    check_path(*(None if traced(x) else np.asarray(x) for x in (path, drafts, counts, cache.lengths)))
    return path.astype(jnp.int32), cache.lengths - drafts, counts


def grown(
    lengths: jax.Array, counts: jax.Array, room: Any, larger: str = "make a cache of a larger capacity"
) -> tuple[jax.Array, jax.Array]:
    """(lengths with `counts` more, whether a sequence has more than `room`). Outside of `jax.jit` too many are a
    `CapacityError`; in a trace nothing can be raised, and tokens without room are dropped."""
    total = lengths + counts
    over = total > room
    if not traced(over) and bool(over.any()):
        b = int(np.argmax(np.asarray(over)))
        most = int(np.broadcast_to(np.asarray(room), over.shape)[b])
        text = f"sequence {b} has {int(lengths[b])} tokens and {int(counts[b])} new ones, the cache has room for "
        raise CapacityError(f"{text}{most}\n  {larger}; nothing has changed")
    return jnp.minimum(total, room), over


def slots(lengths: jax.Array, counts: jax.Array, new: int, end: int) -> jax.Array:
    """Places [batch, new] of new tokens that follow what is stored; padding goes to places past `end`."""
    i = jnp.arange(new, dtype=jnp.int32)
    return jnp.where(i < counts[:, None], lengths[:, None] + i, end + i)  # different places, as indices are unique


def read(
    att: Attention, q: Any, cache: Any, counts: Any, tree: Any, params: Any, pages: Any = None,
    run: Callable[..., Any] = Attention.__call__,
) -> Any:  # fmt: skip
    """Attention of the last tokens' queries to what a cache, with its `pages`, stores at places that are positions; or
    what another function of an attention and a call gives."""
    arrays, lengths, capacity = {**cache.arrays, "pages": pages}, cache.lengths, cache.capacity
    batch = len(lengths)
    check_queries(att, q, arrays["k"], "bshd", batch, params, tree)
    new, heads = q.shape[1:3]
    where: PositionMap = positions.APPENDED if counts is None else positions.PADDED
    tables = {positions.START: lengths - counted(counts, batch, new), positions.END: lengths}
    if tree is not None:
        where, more = of_tree(jnp.asarray(tree), jnp.arange(new), jnp.int32)
        tables |= more
    # lengths of the cache, not of q: more new tokens are no other mask
    return call(att, where, q, arrays, tables, {"sizes": (batch, heads, capacity, capacity), **params}, run)


def call(
    att: Attention, where: PositionMap, q: Any, arrays: Arrays, tables: Arrays, params: Arrays,
    run: Callable[..., Any] = Attention.__call__,
) -> Any:  # fmt: skip
    """Attention of q to the arrays of a cache, which hold what `where` says by `tables`."""
    placed_att = placed(att, where)
    present = {n: x for n, x in arrays.items() if x is not None}
    known = {n: x for n, x in tables.items() if n in placed_att.program.names}  # a mask need not ask for all
    return run(placed_att, q, present.pop("k"), present.pop("v"), **present, **known, **params)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class KVCache(JaxCache):
    """Keys and values of a batch of sequences of different lengths, in one buffer of a fixed capacity.

    >>> import numpy as np, frisket as fk
    >>> att = fk.compile("causal & window(64)")
    >>> cache = KVCache.create(batch=2, capacity=128, kv_heads=2, head_dim=16)
    >>> q, k, v = (np.ones((2, 9, heads, 16), "float32") for heads in (4, 2, 2))
    >>> step = jax.jit(lambda cache, q, k, v: cache.attention(att, q, k, v))
    >>> out, cache = step(cache, q, k, v)  # the prompt; then a token a call, under the same mask
    >>> cache = jax.jit(lambda cache, k, v: cache.append(k, v))(cache, k[:, :3], v[:, :3])  # three drafts, a tree:
    >>> attend = jax.jit(lambda cache, q: cache.attend(att, q, tree=[-1, -1, 0]))  # two guesses, one after the first
    >>> attend(cache, q[:, :3]).shape
    (2, 3, 4, 16)
    >>> keep = jax.jit(lambda cache: cache.keep(np.array([[0, 2], [0, 2]]), drafted=3))  # the path that was accepted
    >>> keep(cache).lengths.tolist(), cache.truncate([4, 0]).lengths.tolist()
    ([11, 11], [4, 0])

    A pytree: `append` and `attention` return a new cache. Under `jax.jit` it takes the memory of the old one, if that
    is donated. Growing changes no shape and does not recompile. k [batch, capacity, kv_heads, head_dim], v likewise
    with v_dim; with 8 bits also `k_scale`, `v_scale` float32 [batch, capacity, kv_heads], one for every vector. Kernels
    apply scales as they load, so no dequantised copy is made. `lengths` int32 [batch], in tokens.

    Masks and score mods read positions in the sequence, from 0; `Q_LEN` and `KV_LEN` are the capacity.

    Where tokens do not fit, `append` raises `CapacityError`. Code under `jax.jit` cannot raise: the tokens are dropped
    and `overflowed` bool [batch] is True from then on, and results of that sequence are wrong.
    """

    lengths: jax.Array
    overflowed: jax.Array

    @classmethod
    def create(
        cls, batch: int, capacity: int, kv_heads: int, head_dim: int, v_dim: int | None = None, dtype: Any = jnp.float32
    ) -> Self:
        """An empty cache; `dtype` a float, or int8, float8_e4m3fn or float8_e5m2 for 8 bits with scales."""
        arrays = empty((batch, capacity, kv_heads), head_dim, v_dim, dtype)
        return cls(**arrays, lengths=jnp.zeros(batch, jnp.int32), overflowed=jnp.zeros(batch, bool))

    capacity = property(lambda self: self.k.shape[1], doc="The most tokens that a sequence may have.")

    def append(self, k: jax.Array, v: jax.Array, counts: Any = None) -> Self:
        """The cache with new tokens after those of every sequence: k [batch, new, kv_heads, head_dim], v likewise.
        `counts` int [batch] says how many of the new tokens are real, the first ones; None means all."""
        new = check_new(self.arrays, self.batch, k, v)
        counts = counted(counts, self.batch, new)
        lengths, over = grown(self.lengths, counts, self.capacity)
        at = slots(self.lengths, counts, new, self.capacity)
        arrays = written(self.arrays, stored(self.arrays, k, v), at)
        return replace(self, **arrays, lengths=lengths, overflowed=self.overflowed | over)

    def attend(self, att: Attention, q: jax.Array, counts: Any = None, *, tree: Any = None, **params: Any) -> Any:
        """Attention of the last tokens of every sequence: q [batch, new, heads, head_dim] are the queries of the last
        `counts` tokens (None: as many as q has). Out likewise with v_dim, 0 at padding. `params` as in a call of `att`,
        `return_lse=True` among them.

        With `tree` the last tokens are a tree of drafts: parents, int [new] or [batch, new], -1 for a root. A draft
        sees the tokens before the tree, its ancestors and itself, as far as the mask allows. Its position is that of
        the first draft plus its depth."""
        return read(att, q, self, counts, tree, params)

    def keep(self, path: jax.Array, drafted: Any, counts: Any = None) -> Self:
        """Keep some of the last `drafted` tokens (a number, or int [batch]) of every sequence. They are those on `path`
        int [batch, m], nodes of the tree in the order of the tree. `counts` int [batch] says how many entries of the
        path are used."""
        path, start, counts = pathed(self, path, drafted, counts)
        rows = jnp.arange(self.batch)[:, None], start[:, None] + path
        tokens = jax.tree.map(lambda x: x[rows], self.arrays)
        arrays = written(self.arrays, tokens, slots(start, counts, path.shape[1], self.capacity))
        return replace(self, **arrays, lengths=start + counts)


lax: Any = jax.lax  # JAX leaves some of its functions untyped
Axes = str | tuple[str, ...] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class ShardedKVCache(JaxCache):
    """A `KVCache` with positions split over the devices of a mesh axis. Of n devices, device i holds positions [i *
    capacity / n, (i + 1) * capacity / n) of every sequence.

    >>> import numpy as np, frisket as fk
    >>> mesh = jax.make_mesh((len(jax.devices()),), ("sp",))
    >>> cache = ShardedKVCache.create(batch=1, capacity=64, kv_heads=2, head_dim=8, mesh=mesh)
    >>> q, k, v = (np.ones((1, 9, heads, 8), "float32") for heads in (4, 2, 2))
    >>> out, cache = jax.jit(lambda cache, *new: cache.attention(fk.compile("causal"), *new))(cache, q, k, v)
    >>> out.shape, cache.lengths.tolist()
    ((1, 9, 4, 8), [9])
    >>> last = jax.jit(lambda cache, q, k, v: cache.append(k, v).attend(fk.compile("causal"), q))
    >>> last(cache, *(x[:, :1] for x in (q, k, v))).shape, cache.truncate([4]).lengths.tolist()
    ((1, 1, 4, 8), [4])

    `append` writes only on the device that owns a position, and sends nothing. `attend` runs on every device over its
    positions, and merges results by collectives of the size of out: one maximum and two sums. Queries and new tokens
    are whole on every device of `axis`. `batch_axis` and `head_axis` name mesh axes, one or several, that split the
    batch and the heads too: `batch_axis=("dp", "fsdp"), axis="sp", head_axis="tp"` is the layout `P(("dp", "fsdp"),
    "sp", "tp", None)`. Tables of masks and score mods are whole on every device, and are read at global b, h, q and k.
    """

    lengths: jax.Array
    overflowed: jax.Array
    mesh: Mesh = field(metadata={"static": True})
    axis: Axes = field(metadata={"static": True})
    batch_axis: Axes = field(metadata={"static": True})
    head_axis: Axes = field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        v_dim: int | None = None,
        dtype: Any = jnp.float32,
        *,
        mesh: Mesh,
        axis: Axes = "sp",
        batch_axis: Axes = None,
        head_axis: Axes = None,
    ) -> Self:
        """An empty cache on the devices of `mesh`; `dtype` as for `KVCache`. Each of the axes is the name of a mesh
        axis, or several as in a partition spec: `("dp", "fsdp")`."""
        split = {"capacity": (axis, capacity), "batch": (batch_axis, batch), "kv_heads": (head_axis, kv_heads)}
        if not axis:
            text = "axis is None; positions are split over a mesh axis, and a KVCache holds them on one device"
            raise ShapeError(text)
        for what, (axes, n) in split.items():
            over = prod(mesh.shape.get(name, 0) for name in names_of(axes))
            if not over or n % over:
                have = ", ".join(f"{a}: {m}" for a, m in mesh.shape.items())
                reason = f"its {over} devices do not divide {n}" if over else "there is no such axis"
                raise ShapeError(f"{what} {n} over the mesh axis {axes!r}: {reason}; the axes are {have}")
        used = [name for axes, _ in split.values() for name in names_of(axes)]
        if len({*used}) < len(used):
            raise ShapeError(f"a mesh axis splits one thing: {axis!r}, {batch_axis!r}, {head_axis!r}")
        axis, batch_axis, head_axis = (_axes(x, mesh) for x in (axis, batch_axis, head_axis))

        def put() -> Any:
            arrays = empty((batch, capacity, kv_heads), head_dim, v_dim, dtype)
            rows = {"lengths": jnp.zeros(batch, jnp.int32), "overflowed": jnp.zeros(batch, bool)}
            return cls(**arrays, **rows, mesh=mesh, axis=axis, batch_axis=batch_axis, head_axis=head_axis)

        shardings = jax.eval_shape(put)  # shapes alone, without memory
        specs = {n: NamedSharding(mesh, s) for n, s in shardings._specs.items() if s is not None}
        shardings = replace(shardings, **specs)
        # made where it stays: no device holds all of it
        return jax.jit(put, out_shardings=shardings)()  # type: ignore[no-any-return]

    capacity = property(lambda self: self.k.shape[1], doc="The most tokens that a sequence may have.")

    @property
    def _specs(self) -> dict[str, Any]:
        """Specs of the arrays, spelt as in the results of a step; otherwise a second step would compile again."""
        place = self.batch_axis, self.axis, self.head_axis
        specs: dict[str, Any] = {n: None if x is None else self._spec(*place) for n, x in self.arrays.items()}
        rows, vectors = self._spec(self.batch_axis), self._spec(*place, None)
        return specs | {"k": vectors, "v": vectors, "lengths": rows, "overflowed": rows}

    def _spec(self, *entries: Axes) -> Any:
        # results of a step have specs without trailing None, but for explicit axes
        while AxisType.Auto in self.mesh.axis_types and entries and entries[-1] is None:
            entries = entries[:-1]
        return spec_of(*entries)

    def append(self, k: jax.Array, v: jax.Array, counts: Any = None) -> Self:
        """Append tokens like `KVCache.append`."""
        new = check_new(self.arrays, self.batch, k, v)
        counts = counted(counts, self.batch, new)
        lengths, over = grown(self.lengths, counts, self.capacity)
        rows, tokens = spec_of(self.batch_axis), spec_of(self.batch_axis, None, self.head_axis)

        def put(arrays: Any, k: Any, v: Any, lengths: Any, counts: Any) -> Any:
            mine, i = arrays["k"].shape[1], jnp.arange(new, dtype=jnp.int32)
            at = lengths[:, None] + i - self._first(self.axis, mine)
            owned = (i < counts[:, None]) & (at >= 0) & (at < mine)
            # dropped past the part, at different places
            return written(arrays, stored(arrays, k, v), jnp.where(owned, at, mine + i))

        specs = {n: s for n, s in self._specs.items() if n in self.arrays}
        run = self._mapped(put, (specs, tokens, tokens, rows, rows), specs)
        stores = run(self.arrays, k, v, self.lengths, counts)
        return replace(self, **stores, lengths=lengths, overflowed=self.overflowed | over)

    def attend(self, att: Attention, q: jax.Array, counts: Any = None, **params: Any) -> Any:
        """Attend like `KVCache.attend`, without trees."""
        if params.pop("tree", None) is not None:
            raise ParameterError("drafts of a tree are not for several devices; take a KVCache")
        refuse_parts(att.options, "a cache on several devices")
        check_queries(att, q, self.k, "bshd", self.batch, params)
        if params.get("return_max"):
            raise ParameterError("results of several devices are merged; there is no max")
        if att.program.weight is not None and not (att.program.exprs.has_lse and not params.get("return_sums")):
            text = "devices merge parts of a row by their lse, and this attention has a weight without one"
            raise ParameterError(f"{text}\n  take a KVCache, or divide positive weights by `total`")
        return_lse = params.pop("return_lse", False)
        where = positions.SHARD if counts is None else positions.SHARD_PADDED
        batch, new, heads, _ = q.shape
        starts = self.lengths - counted(counts, batch, new)
        sinks = params.pop("sinks", None)
        sinks = att.options.sinks if sinks is None else sinks
        if sinks is not None:
            # a value for every head: devices slice it
            params["sinks"] = jnp.broadcast_to(jnp.asarray(sinks, jnp.float32), heads)
        sizes = batch, heads, self.capacity, self.capacity

        def look(arrays: Any, q: Any, starts: Any, ends: Any, params: Any) -> Any:
            first = self._first(self.axis, arrays["k"].shape[1])
            tables = {positions.START: starts, positions.END: ends, positions.FIRST: first}
            tables[positions.BATCH] = self._first(self.batch_axis, q.shape[0])
            tables[positions.HEAD] = self._first(self.head_axis, q.shape[2])
            if "sinks" in params:  # they count once
                mine = lax.dynamic_slice_in_dim(params["sinks"], tables[positions.HEAD], q.shape[2])
                params = {**params, "sinks": jnp.where(first == 0, mine, -jnp.inf)}
            out, lse = call(att, where, q, arrays, tables, {**params, "sizes": sizes, "return_lse": True})
            return (out, lse) if self.axis is None else _merged(out, lse, self.axis)

        specs = {n: s for n, s in self._specs.items() if n in self.arrays}
        queries, rows = spec_of(self.batch_axis, None, self.head_axis), spec_of(self.batch_axis)
        results = queries, spec_of(self.batch_axis, self.head_axis)
        run = self._mapped(look, (specs, queries, rows, rows, spec_of()), results)
        out, lse = run(self.arrays, q, starts, self.lengths, params)
        return (out, lse) if return_lse else out

    def statistics(self, att: Attention, q: jax.Array, counts: Any = None, **params: Any) -> Statistics:
        """Refused: each device has the keys of its positions alone.

        >>> ShardedKVCache.statistics(None, None, None)
        Traceback (most recent call last):
        frisket.dsl.errors.ParameterError: statistics are not for several devices; take a KVCache
        """
        raise ParameterError("statistics are not for several devices; take a KVCache")

    def _first(self, axis: Axes, mine: int) -> Any:
        return jnp.int32(0) if axis is None else lax.axis_index(axis) * mine

    def _mapped(self, run: Callable[..., Any], specs: Any, results: Any) -> Callable[..., Any]:
        mapped = jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=results)

        def split(*arrays: Any) -> Any:  # a mesh of explicit axes moves nothing by itself
            return mapped(*(_split(x, spec, self.mesh) for x, spec in zip(arrays, specs, strict=True)))

        return split if AxisType.Explicit in self.mesh.axis_types else mapped


def _split(x: Any, spec: Any, mesh: Mesh) -> Any:
    # a dict: arrays of the cache, which are split already
    return x if isinstance(spec, dict) else jax.tree.map(lambda y: split_as(y, mesh, spec, explicit=True), x)


def _axes(axes: Axes, mesh: Mesh) -> Axes:
    """The mesh axes with more than one device, as XLA spells them: a name for one axis, None for no axis."""
    names = tuple(n for n in names_of(axes) if mesh.shape[n] > 1)
    return names[0] if len(names) == 1 else names or None


def _merged(out: jax.Array, lse: jax.Array, axis: Axes) -> tuple[jax.Array, jax.Array]:
    """`frisket.merge` of every device's (out, lse)."""
    top = lax.pmax(lse, axis)
    share = jnp.exp(lse - jnp.where(top == -jnp.inf, 0, top))  # -inf - -inf is NaN: a query that no device shows a key
    weight = share.swapaxes(1, 2)[..., None]
    total = lax.psum(share, axis)
    mine = jnp.where(weight == 0, 0, out.astype(lse.dtype)) * weight  # what an empty part holds may be NaN
    safe = jnp.where(total == 0, 1, total)
    combined = lax.psum(mine, axis) / safe.swapaxes(1, 2)[..., None]
    return combined.astype(out.dtype), jnp.where(total == 0, -jnp.inf, jnp.log(safe) + top)
