"""One sequence over several devices: each holds a range of its positions, and decoding merges results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.attention.attention import Attention
from frisket.runtime.sharding.partition import names_of, split_as

from .checks import check_queries
from .jax_plain import JaxCache, call, check_new, counted, empty, grown, stored, written
from .masks import BATCH, END, FIRST, HEAD, SHARD, SHARD_PADDED, START

lax: Any = jax.lax  # JAX leaves some of its functions untyped
P: Any = jax.sharding.PartitionSpec
Axes = str | tuple[str, ...] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class ShardedKVCache(JaxCache):
    """A `KVCache` with positions split over the devices of a mesh axis: of n devices, device i holds positions [i *
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
    are whole on every device of `axis`; `batch_axis` and `head_axis` name mesh axes, one or several, that split the
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
        cls, batch: int, capacity: int, kv_heads: int, head_dim: int, v_dim: int | None = None,
        dtype: Any = jnp.float32, *, mesh: Mesh, axis: Axes = "sp", batch_axis: Axes = None, head_axis: Axes = None,
    ) -> Self:  # fmt: skip
        """An empty cache on the devices of `mesh`; `dtype` as for `KVCache`. Each of the axes is the name of a mesh
        axis, or several as in a partition spec: `("dp", "fsdp")`."""
        split = {"capacity": (axis, capacity), "batch": (batch_axis, batch), "kv_heads": (head_axis, kv_heads)}
        if not axis:
            raise ShapeError(
                "axis is None; positions are split over a mesh axis, and a KVCache holds them on one device"
            )
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

        shardings = jax.eval_shape(put)
        shardings = replace(
            shardings, **{n: NamedSharding(mesh, s) for n, s in shardings._specs.items() if s is not None}
        )
        cache: Self = jax.jit(put, out_shardings=shardings)()  # made where it stays: no device holds all of it
        return cache

    capacity = property(lambda self: self.k.shape[1], doc="The most tokens that a sequence may have.")

    @property
    def _specs(self) -> dict[str, Any]:
        """Specs of the arrays, spelt as in the results of a step; otherwise a second step would compile again."""
        place = self.batch_axis, self.axis, self.head_axis
        specs: dict[str, Any] = {n: None if x is None else self._spec(*place) for n, x in self.arrays.items()}
        rows, vectors = self._spec(self.batch_axis), self._spec(*place, None)
        return specs | {"k": vectors, "v": vectors, "lengths": rows, "overflowed": rows}

    def _spec(self, *entries: Axes) -> Any:
        while AxisType.Auto in self.mesh.axis_types and entries and entries[-1] is None:
            entries = entries[:-1]
        return P(*entries)

    @usual_promotion()
    def append(self, k: jax.Array, v: jax.Array, counts: Any = None) -> Self:
        """Append tokens like `KVCache.append`."""
        new = check_new(self.arrays, self.batch, k, v)
        counts = counted(counts, self.batch, new)
        lengths, over = grown(self.lengths, counts, self.capacity)
        rows, tokens = P(self.batch_axis), P(self.batch_axis, None, self.head_axis)

        def put(arrays: Any, k: Any, v: Any, lengths: Any, counts: Any) -> Any:
            mine, i = arrays["k"].shape[1], jnp.arange(new, dtype=jnp.int32)
            at = lengths[:, None] + i - self._first(self.axis, mine)
            owned = (i < counts[:, None]) & (at >= 0) & (at < mine)
            return written(arrays, stored(arrays, k, v), jnp.where(owned, at, mine + i))

        specs = {n: s for n, s in self._specs.items() if n in self.arrays}
        run = self._mapped(put, (specs, tokens, tokens, rows, rows), specs)
        return replace(self, **run(self.arrays, k, v, self.lengths, counts), lengths=lengths,
                       overflowed=self.overflowed | over)  # fmt: skip

    @usual_promotion()
    def attend(self, att: Attention, q: jax.Array, counts: Any = None, **params: Any) -> Any:
        """Attend like `KVCache.attend`, without trees."""
        if params.pop("tree", None) is not None:
            raise ParameterError("drafts of a tree are not for several devices; take a KVCache")
        check_queries(att, q, self.k, "bshd", self.batch, params)
        if params.get("return_max"):
            raise ParameterError("results of several devices are merged; there is no max")
        return_lse, where = params.pop("return_lse", False), SHARD if counts is None else SHARD_PADDED
        batch, new, heads, _ = q.shape
        starts = self.lengths - counted(counts, batch, new)
        sinks = params.pop("sinks", None)
        sinks = att.options.sinks if sinks is None else sinks
        if sinks is not None:
            params["sinks"] = jnp.broadcast_to(jnp.asarray(sinks, jnp.float32), heads)
        sizes = batch, heads, self.capacity, self.capacity

        def look(arrays: Any, q: Any, starts: Any, ends: Any, params: Any) -> Any:
            first = self._first(self.axis, arrays["k"].shape[1])
            tables = {START: starts, END: ends, FIRST: first}
            tables |= {BATCH: self._first(self.batch_axis, q.shape[0]), HEAD: self._first(self.head_axis, q.shape[2])}
            if "sinks" in params:  # they count once
                mine = lax.dynamic_slice_in_dim(params["sinks"], tables[HEAD], q.shape[2])
                params = {**params, "sinks": jnp.where(first == 0, mine, -jnp.inf)}
            out, lse = call(att, where, q, arrays, tables, {**params, "sizes": sizes, "return_lse": True})
            return (out, lse) if self.axis is None else _merged(out, lse, self.axis)

        specs = {n: s for n, s in self._specs.items() if n in self.arrays}
        queries, rows = P(self.batch_axis, None, self.head_axis), P(self.batch_axis)
        results = queries, P(self.batch_axis, self.head_axis)
        run = self._mapped(look, (specs, queries, rows, rows, P()), results)
        out, lse = run(self.arrays, q, starts, self.lengths, params)
        return (out, lse) if return_lse else out

    def _first(self, axis: Axes, mine: int) -> Any:
        return jnp.int32(0) if axis is None else lax.axis_index(axis) * mine

    def _mapped(self, run: Callable[..., Any], specs: Any, results: Any) -> Callable[..., Any]:
        mapped = jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=results)

        def split(*arrays: Any) -> Any:  # a mesh of explicit axes moves nothing by itself
            return mapped(*(_split(x, spec, self.mesh) for x, spec in zip(arrays, specs, strict=True)))

        return split if AxisType.Explicit in self.mesh.axis_types else mapped


def _split(x: Any, spec: Any, mesh: Mesh) -> Any:
    return x if isinstance(spec, dict) else jax.tree.map(lambda y: split_as(y, mesh, spec, explicit=True), x)


def _axes(axes: Axes, mesh: Mesh) -> Axes:
    """The mesh axes with more than one device, as XLA spells them: a name for one axis, None for no axis."""
    names = tuple(n for n in names_of(axes) if mesh.shape[n] > 1)
    return names[0] if len(names) == 1 else names or None


def _merged(out: jax.Array, lse: jax.Array, axis: Axes) -> tuple[jax.Array, jax.Array]:
    """`frisket.merge` of every device's (out, lse)."""
    top = lax.pmax(lse, axis)
    share = jnp.exp(lse - jnp.where(top == -jnp.inf, 0, top))
    weight = share.swapaxes(1, 2)[..., None]
    total = lax.psum(share, axis)
    mine = jnp.where(weight == 0, 0, out.astype(lse.dtype)) * weight  # what an empty part holds may be NaN
    safe = jnp.where(total == 0, 1, total)
    combined = lax.psum(mine, axis) / safe.swapaxes(1, 2)[..., None]
    return combined.astype(out.dtype), jnp.where(total == 0, -jnp.inf, jnp.log(safe) + top)
