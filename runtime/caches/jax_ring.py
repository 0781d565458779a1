"""A ring for sliding windows: the last tokens of every sequence, at position modulo size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp

from frisket.dsl.errors import ParameterError
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.attention.attention import Attention
from frisket.runtime.attention.merge import merge
from frisket.runtime.machine.parameters import traced

from .checks import check_beside, check_queries, refuse_tree
from .jax_plain import JaxCache, call, check_new, counted, empty, numbers, stored, written
from .masks import CHUNK, END, NEW, START, no_room, require_room, ring, ring_before, ring_padded


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class RingKVCache(JaxCache):
    """The last `window` tokens of every sequence of any length, for masks that see no further back.

    >>> import frisket as fk
    >>> cache = RingKVCache.create(batch=1, window=16, kv_heads=2, head_dim=8)
    >>> q, k, v = jnp.ones((1, 40, 4, 8)), jnp.ones((1, 40, 2, 8)), jnp.ones((1, 40, 2, 8))
    >>> out, cache = cache.attention(fk.compile("causal & window(16)"), q, k, v)
    >>> cache.k.shape, cache.lengths.tolist()
    ((1, 16, 2, 8), [40])
    >>> cache = cache.append(k[:, :1], v[:, :1])
    >>> cache.attend(fk.compile("causal & window(16)"), q[:, :1]).shape
    (1, 1, 4, 8)
    >>> cache.truncate([0]).lengths.tolist()  # the row is free for another sequence
    [0]

    As `KVCache`, with the token of position p in slot `p % window`; `lengths` count what has been appended. How far
    back the mask sees is computed from its text, at positions up to 2**20: one that sees more than the ring holds is
    a `ShapeError` with a witness. Masks and score mods that read `Q_LEN` or `KV_LEN` are refused.
    """

    lengths: jax.Array

    @classmethod
    def create(
        cls, batch: int, window: int, kv_heads: int, head_dim: int, v_dim: int | None = None, dtype: Any = jnp.float32
    ) -> Self:
        """An empty ring of `window` tokens a sequence; `dtype` as for `KVCache`."""
        return cls(**empty((batch, window, kv_heads), head_dim, v_dim, dtype), lengths=jnp.zeros(batch, jnp.int32))

    window = property(lambda self: self.k.shape[1], doc="Tokens that the ring holds of a sequence.")

    @usual_promotion()
    def append(self, k: jax.Array, v: jax.Array, counts: Any = None) -> Self:
        """Append tokens like `KVCache.append`; new tokens take the place of the oldest."""
        new = check_new(self.arrays, self.batch, k, v)
        return self._written(stored(self.arrays, k, v), counted(counts, self.batch, new))

    @usual_promotion()
    def attend(self, att: Attention, q: jax.Array, counts: Any = None, *, tree: Any = None, **params: Any) -> Any:
        """Attend like `KVCache.attend`; `ShapeError` where the last tokens may have overwritten keys that they see;
        `attention` reads these keys first."""
        self._check(att, q, tree, params)
        batch, new = q.shape[:2]
        require_room(att, self.window, new, params)
        where = ring(self.window) if counts is None else ring_padded(self.window)
        tables = {START: self.lengths - counted(counts, batch, new), END: self.lengths}
        return call(att, where, q, self.arrays, tables, params)

    @usual_promotion()
    def truncate(self, lengths: Any) -> Self:
        """Empty the sequences with 0 in `lengths`; others stay, as a ring has overwritten their old tokens."""
        lengths = numbers("lengths", lengths, self.batch)
        partly = (lengths > 0) & (lengths < self.lengths)
        if not traced(partly) and bool(partly.any()):
            raise ParameterError("a ring has overwritten its oldest tokens, and can only be emptied: lengths are 0")
        return replace(self, lengths=jnp.where(lengths > 0, self.lengths, 0))

    @usual_promotion()
    def attention(
        self, att: Attention, q: jax.Array, k: jax.Array, v: jax.Array, counts: Any = None, *, tree: Any = None,
        **params: Any,
    ) -> tuple[Any, Self]:  # fmt: skip
        """(out, cache): the new tokens appended, and attention of their queries. A chunk may overwrite keys that it
        sees. Then the old ring and the chunk are read separately, and the results are merged."""
        self._check(att, q, tree, params)
        new = check_new(self.arrays, self.batch, k, v)
        if not no_room(att, self.window, new, params):
            return super().attention(att, q, k, v, counts, **params)
        require_room(att, self.window, 0, params)
        check_beside(q, k, "bshd")
        added, real = stored(self.arrays, k, v), counted(counts, self.batch, new)
        out, lse = merge(*self._parts(att, q, added, real, dict(params)))
        return ((out, lse) if params.get("return_lse") else out), self._written(added, real)

    def _check(self, att: Attention, q: jax.Array, tree: Any, params: dict[str, Any]) -> None:
        refuse_tree(tree)
        check_queries(att, q, self.k, "bshd", self.batch, params)

    def _parts(
        self, att: Attention, q: Any, added: dict[str, Any], counts: jax.Array, params: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Attention to what the ring holds, and to the new tokens."""
        if params.get("return_max"):
            raise ParameterError("a chunk longer than the ring has room for is read in two parts; there is no max")
        params["return_lse"] = True
        tables = {START: self.lengths, END: self.lengths, NEW: counts}
        old = call(att, ring_before(self.window), q, self.arrays, tables, params)
        if att.options.sinks is not None or params.get("sinks") is not None:  # they count once
            params["sinks"] = jnp.full(q.shape[2], -jnp.inf, jnp.float32)
        return old, call(att, CHUNK, q, added, {**tables, END: self.lengths + counts}, params)

    def _written(self, added: dict[str, Any], counts: jax.Array) -> Self:
        size = self.window
        i = jnp.arange(added["k"].shape[1], dtype=jnp.int32)
        survivors = (i < counts[:, None]) & (i >= counts[:, None] - size)  # of the real ones, those that stay
        at = jnp.where(survivors, (self.lengths[:, None] + i) % size, size + i)
        return replace(self, **written(self.arrays, added, at), lengths=self.lengths + counts)
