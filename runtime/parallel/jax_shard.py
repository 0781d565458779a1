"""The shard of one device: its positions, the tables that masks read there, and attention to some keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from frisket.dsl.ir import param, substitute, walk
from frisket.dsl.types import INT
from frisket.lowering.kernels.jnp_expr import evaluate
from frisket.runtime.attention.attention import Attention
from frisket.runtime.calls.request import Request
from frisket.runtime.jax.arrays import narrowed
from frisket.runtime.jax.op import prepared, varying_alike
from frisket.runtime.jax.primitives import bound
from frisket.runtime.jax.task import Task
from frisket.runtime.plans.device import divided

from .deal import Deal
from .shards import AT, ShardAttention, ShardPlace, ShardTable, check_names, on_shard

Arrays = dict[str, Any]
Axes = str | tuple[str, ...] | None


def size(axes: Axes) -> int:
    return 1 if axes is None else int(lax.axis_size(axes))


@dataclass(frozen=True, eq=False)
class Shard:
    """A call as one device of a mesh axis computes it. `shard_of` makes it; the rings of `jax_ring` call its `forward`
    and `backward` with the keys that have come."""

    att: Attention  # the caller's attention, with the values that the host knows
    deal: Deal
    axis: str  # the mesh axis of the tokens
    all_keys: bool  # keys are those of the sequence, in its order; else they are distributed as queries are
    axes: tuple[Axes, Axes]  # mesh axes over which batch entries and heads are split
    split: Mapping[str, tuple[int, ...]]  # table -> axes of which a device has a part
    given: Arrays  # the caller's tables and numbers that gradients or traces may depend on
    lengths: tuple[int, int]  # batch entries and heads of this device

    @cached_property
    def whole_sizes(self) -> tuple[int, int]:
        """Batch entries and heads of all devices."""
        batch, heads = (n * size(a) for n, a in zip(self.lengths, self.axes, strict=True))
        return batch, heads

    @cached_property
    def local(self) -> ShardAttention:
        """The attention rewritten for this device."""
        batch, heads = self.whole_sizes
        moved = "".join(c for c, a in zip("bh", self.axes, strict=True) if size(a) > 1) + (
            "q" if self.all_keys else "qk"
        )
        where = ShardPlace(self.deal.length, len(self.deal.order), batch, heads, moved, self.split)
        return on_shard(self.att, where, {n: x.shape for n, x in self.given.items() if n not in self.split})

    @property
    def learnable(self) -> frozenset[str]:
        return self.att.program.learnable & self.given.keys()

    # -- where it is ------------------------------------------------------------------------------

    def of_rank(self, table: Any, shift: int = 0) -> Any:
        """A row of [ranks, ...]: this rank's, or that of the rank `shift` before it."""
        at = (lax.axis_index(self.axis) - shift) % self.deal.ranks
        return lax.dynamic_index_in_dim(jnp.asarray(table), at, keepdims=False)

    def positions(self, shift: int = 0) -> Any:
        return self.of_rank(self.deal.positions(), shift)

    def first(self, which: int) -> Any:
        """The first batch entry (0), or head (1), of this device."""
        axes = self.axes[which]
        return jnp.int32(0) if axes is None else lax.axis_index(axes).astype(jnp.int32) * self.lengths[which]

    # -- attention to some keys -------------------------------------------------------------------

    def read(self, values: Arrays, keys: Arrays, k_at: Any) -> Arrays:
        """The values that the local attention reads beside positions: of the caller's `values`, and of `keys`, the
        tables that have come with the keys at `k_at`."""
        at = {"q": self.positions(), "k": k_at}
        at |= {c: self.first(i) + jnp.arange(n, dtype=jnp.int32) for i, (c, n) in enumerate(zip("bh", self.lengths))}
        made = {t.name: self._table(t, at, {**values, **keys} if "k" in t.axes else values) for t in self.local.tables}
        names = self.local.attention.program.names
        return {n: x for n, x in {**values, **made}.items() if n in names}

    def _table(self, table: ShardTable, at: Arrays, values: Arrays) -> Any:
        program = self.att.program
        arrays = {**program.tables, **values}
        env: Arrays = {n: x for n, x in {**program.scalars, **values}.items() if not getattr(x, "ndim", 0)}
        for i, c in enumerate(table.axes):
            shape = [-1 if i == j else 1 for j in range(len(table.axes))]
            env[c], env[f"place of {c}"] = at[c].reshape(shape), jnp.arange(len(at[c])).reshape(shape)
        wide = any(arrays[n.name].dtype == np.float64 for n in walk(table.expr) if n.op == "lookup")

        def value(e: Any) -> Any:
            names = {n.name for n in walk(e) if n.op == "lookup"}
            read = {n: jnp.asarray(narrowed(n, arrays[n].dtype.kind == "f", arrays[n], False)) for n in names}
            return evaluate(e, env, read, int64=False, float64=wide)

        change: dict[Any, Any] = {}
        for n in walk(table.expr):
            if n.op == "segment":
                offsets, name = jnp.asarray(arrays[n.name]), f"segment {len(change)}"
                found = jnp.searchsorted(offsets, value(substitute(n.args[0], change)), "right") - 1
                env[name] = jnp.clip(found, 0, max(offsets.shape[0] - 2, 0))
                change[n] = param(name, INT)
        return jnp.broadcast_to(value(substitute(table.expr, change)), tuple(len(at[c]) for c in table.axes))

    def _call(self, q: Any, keys: Arrays, tables: Arrays, k_at: Any, seed: Any) -> Any:
        """(JaxCall, its arrays that gradients flow to, other arrays) of this device's queries and some keys."""
        att = self.local.attention
        at = {AT["q"]: self.positions(), AT["k"]: k_at, AT["b"]: self.first(0), AT["h"]: self.first(1)}
        params = tables | {n: x for n, x in at.items() if n in att.program.names}
        call = att.call(Request(q, keys["k"], keys["v"], seed=seed, layout="bshd", params=params))
        inner, learned, fixed = prepared(replace(call, sinks=None), att.options)
        return inner, *varying_alike({**learned, "q": q, "k": keys["k"], "v": keys["v"]}, fixed)

    def forward(self, q: Any, values: Arrays, keys: Arrays, k_at: Any) -> tuple[Any, Any, Any]:
        """(out in the dtype of lse, lse, its rounding error) of attention to these keys, without sinks."""
        inner, learned, fixed = self._call(q, keys, self.read(values, keys, k_at), k_at, values.get("seed"))
        arrays = {n: learned[n] for n in "qkv"} | learned | fixed
        out, lse, _, low, _ = bound(Task(inner, tuple(arrays), low=True), *arrays.values())
        return out.astype(lse.dtype), lse, low

    def backward(self, rows: Arrays, values: Arrays, keys: Arrays, k_at: Any) -> tuple[Any, Arrays, Arrays]:
        """(dq, gradients of `values` that are learned, of `keys`) by attention to these keys. `rows` holds q, the
        whole attention's out, lse and low, and their cotangents."""
        floats = {n: x for n, x in values.items() if n in self.learnable}
        moving = {n: x for n, x in keys.items() if n in self.learnable}

        def read(floats: Arrays, moving: Arrays) -> Arrays:
            found = self.read({**values, **floats}, {**keys, **moving}, k_at)
            return {n: x for n, x in found.items() if jnp.issubdtype(x.dtype, jnp.floating)}

        tables, back = jax.vjp(read, floats, moving)
        tables = self.read(values, keys, k_at) | tables
        inner, learned, fixed = self._call(rows["q"], keys, tables, k_at, values.get("seed"))
        source = {t.name: t.source for t in inner.plan.tables} | {s.name: s.source for s in inner.plan.slots}
        wanted = tuple(sorted(learned))
        arrays = {n: learned[n] for n in "qkv"} | learned | fixed | {n: x for n, x in rows.items() if n != "q"}
        found = dict(zip(wanted, bound(Task(inner, tuple(arrays), wanted), *arrays.values()), strict=True))
        sums: Arrays = {}
        for n, x in found.items():
            if n not in ("q", "k", "v"):
                sums[source[n]] = sums[source[n]] + x if source[n] in sums else x
        floating = {n: x for n, x in tables.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        cotangents = {n: sums[n].astype(x.dtype) if n in sums else jnp.zeros_like(x) for n, x in floating.items()}
        dfloats, dmoving = back(cotangents)
        return found["q"], dfloats, dmoving | {"k": found["k"], "v": found["v"]}


def shard_of(
    att: Attention, q: Any, deal: Deal, axis: str, whole: bool, axes: tuple[Axes, Axes],
    split: dict[str, tuple[int, ...]], params: dict[str, Any],
) -> Shard:  # fmt: skip
    """The shard of a call: values of the host are bound, the others stay what they are."""
    host, given = divided({**att.traced, **params}, None, att.program.learnable, "jax")
    given |= {n: host.pop(n) for n in split if n in host}
    check_names(att.program, {**host, **given}, split)
    program = att.program.without(given).bind(host).fixed()
    arrays = {n: jnp.asarray(x) for n, x in given.items()}
    return Shard(Attention(program, att.options), deal, axis, whole, axes, split, arrays, (q.shape[0], q.shape[2]))
