"""Caches whose places are not in the order of positions: pages of a pool, and a ring for sliding windows.

Pages are shared by all sequences of a batch, and found by a table. A ring holds the last tokens of every sequence, at
position modulo size, and the first ones where they are sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.runtime.attention.attention import Attention
from frisket.runtime.attention.merge import merge
from frisket.runtime.attention.statistics import Statistics
from frisket.runtime.attention.weighted import keywords_of_part, merge_weighted, merged_results
from frisket.runtime.calls.options import refuse_parts
from frisket.runtime.machine.parameters import traced

from . import positions
from .jax_plain import JaxCache, call, check_new, counted, empty, grown, numbers, pathed, read, slots, stored, written
from .pool import LOW, OWN, PEAK, Copy, PagedRows, PagePool, empty_rows, refuse_shared, seated
from .positions import Ring, check_queries, check_same_tokens, of_tree, turned


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class PagedKVCache(JaxCache):
    """Keys and values in pages of a pool: a sequence takes the pages it needs, and forks share common pages.

    >>> import frisket as fk
    >>> pool = PagePool(pages=32, page=16)
    >>> cache = PagedKVCache.create(pages=32, page=16, batch=2, width=8, kv_heads=2, head_dim=8)
    >>> pool.allocate("a"), pool.allocate("b")
    ([], [])
    >>> copies = pool.append({"a": 9, "b": 9})  # the host hands out pages, or raises CapacityError
    >>> cache = cache.seat(pool, ["a", "b"], 9, copies)  # rows of the batch are these sequences from here on
    >>> q, k, v = jnp.ones((2, 9, 4, 8)), jnp.ones((2, 9, 2, 8)), jnp.ones((2, 9, 2, 8))
    >>> out, cache = cache.attention(fk.compile("causal"), q, k, v)
    >>> cache.lengths.tolist(), pool.available
    ([9, 9], 30)
    >>> cache.attend(fk.compile("causal"), q[:, :3]).shape  # the last three tokens, as drafts
    (2, 3, 4, 8)
    >>> cache = cache.keep(jnp.array([[0], [0]]), drafted=3)  # the first draft was accepted
    >>> cache.lengths.tolist(), cache.truncate([7, 0]).lengths.tolist()  # tell the pool by `pool.truncate`
    ([7, 7], [7, 0])

    A `PagePool` on the host decides, and arrays hold its decisions. These are `pages` int32 [batch, width], the pages
    of every row in order, `room` int32 [batch], the tokens that fit these pages, `lengths` int32 [batch]. k [pages,
    page, kv_heads, head_dim], v likewise with v_dim; with 8 bits `k_scale`, `v_scale` float32 [pages, page, kv_heads].
    `width` is how many pages a sequence may have: `Q_LEN` and `KV_LEN` of masks are width * page. Other pages, more
    pages and shared pages change no shape and do not recompile.

    Tokens without a page raise `CapacityError`; under `jax.jit` they are dropped and set `overflowed`, as in `KVCache`.
    """

    pages: Array
    room: Array
    lengths: Array
    overflowed: Array
    rows: Array

    @classmethod
    def create(
        cls,
        pages: int,
        page: int,
        batch: int,
        width: int,
        kv_heads: int,
        head_dim: int,
        v_dim: int | None = None,
        dtype: Any = jnp.float32,
    ) -> Self:
        """An empty pool of `pages` pages of `page` tokens, a multiple of 16, for `batch` rows of at most `width` pages
        each; `dtype` as for `KVCache`."""
        if page % 16 or batch < 1 or width < 1:
            text = f"pages of {page} tokens for {batch} rows of {width} pages; a page is a multiple of 16 tokens, and "
            raise ShapeError(f"{text}there is at least one row of one page")
        arrays = empty((pages, page, kv_heads), head_dim, v_dim, dtype)
        room, lengths = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32)  # two, or they could not be donated
        arrays |= {"pages": jnp.zeros((batch, width), jnp.int32), "overflowed": jnp.zeros(batch, bool)}
        return cls(**arrays, room=room, lengths=lengths, rows=jnp.asarray(empty_rows(batch)))

    page = property(lambda self: self.k.shape[1], doc="Tokens of a page.")
    capacity = property(lambda self: self.pages.shape[1] * self.page, doc="The most tokens that a sequence may have.")

    def seat(self, pool: PagePool, sequences: Sequence[Any], new: Any = 0, copies: Iterable[Copy] = ()) -> Self:
        """Rows of the batch become these sequences of a pool, one each, None for a row without one. `new` (a number, or
        int [batch]) are tokens that the pool counts already and that are appended next. `copies` are what `pool.append`
        gave back, done here, in place of the old cache's memory. Raises `ShapeError` where pool and rows count
        different numbers of tokens, as after a `keep` without `pool.truncate`. To compare, `seat` reads the lengths of
        the rows, and so waits for the step before."""
        # a trace has no values to compare; one wait for both
        before = (None, None) if traced(self.rows) else jax.device_get((self.rows, self.lengths))
        paged = PagedRows(*self.k.shape[:2], *self.pages.shape, *before)
        table, room, lengths, rows = seated(pool, sequences, new, paged)
        cache = self if not (pairs := list(copies)) else _copied(self, *_padded(pairs, self.k.shape[0]))
        fresh = {"pages": table, "room": room, "lengths": lengths, "rows": rows}
        fresh["overflowed"] = np.zeros(self.batch, bool)
        return replace(cache, **{n: jnp.asarray(x) for n, x in fresh.items()})

    def append(self, k: Array, v: Array, counts: Any = None) -> Self:
        """Append tokens into the pages of each row, like `KVCache.append`."""
        new = check_new(self.arrays, self.batch, k, v)
        counts = counted(counts, self.batch, new)
        lengths, over = grown(self.lengths, counts, self.room, "let its pool hand out pages, and `seat` it")
        arrays = self._put(stored(self.arrays, k, v), slots(self.lengths, counts, new, self.capacity))
        return replace(self, **arrays, lengths=lengths, overflowed=self.overflowed | over)

    def attend(self, att: Attention, q: Array, counts: Any = None, *, tree: Any = None, **params: Any) -> Any:
        """Attend like `KVCache.attend`."""
        return read(att, q, self, counts, tree, params, self.pages)

    def keep(self, path: Array, drafted: Any, counts: Any = None) -> Self:
        """Keep the drafts on `path`, as `KVCache.keep` does, and drop the others.

        Call `pool.truncate(sequence, tokens)` right after: `seat` refuses a pool that counts drafts which were not
        kept. Drafts on pages that another sequence shares are a `ShapeError`, under `jax.jit` they are left and set
        `overflowed`: `pool.own` gives copies."""
        path, start, counts = pathed(self, path, drafted, counts)
        known = (start, counts, self.rows[OWN])
        if not any(map(traced, known)):
            refuse_shared(*map(np.asarray, known))
        real = jnp.where(start >= self.rows[OWN], counts, 0)
        page, place = self._page_and_place(start[:, None] + path)
        tokens = jax.tree.map(lambda x: x[page, place], self.arrays)
        arrays = self._put(tokens, slots(start, real, path.shape[1], self.capacity))
        nodes = jnp.arange(path.shape[1])
        moves = ((path != nodes) & (nodes < counts[:, None])).any(1)
        # nodes that are where they should be do not move, and only tokens behind them are dropped
        rows = self.rows.at[LOW].min(start + jnp.where(moves, 0, counts)).at[PEAK].min(start + counts)
        over = self.overflowed | (real < counts)
        return replace(self, **arrays, lengths=start + counts, rows=rows, overflowed=over)

    def truncate(self, lengths: Any) -> Self:
        """Keep the first `lengths` tokens of each row, as `KVCache.truncate` does. Call `pool.truncate`, as after
        `keep`. A row whose last page is shared takes no tokens until `seat` has given it another page."""
        cache = super().truncate(lengths)
        shorter = cache.lengths < self.lengths
        rows = self.rows.at[LOW].min(jnp.where(shorter, cache.lengths, self.rows[LOW]))
        rows = rows.at[PEAK].max(jnp.where(shorter, self.lengths, 0))
        # a page that another sequence reads is not written to
        room = jnp.where(cache.lengths < rows[OWN], jnp.minimum(self.room, cache.lengths), self.room)
        return replace(cache, rows=rows, room=room)  # type: ignore[no-any-return]

    def _page_and_place(self, at: Array) -> tuple[Array, Array]:
        """(page, place in it) of tokens [batch, n]."""
        # past the table any page: `_put` drops such tokens by `room`
        return jnp.take_along_axis(self.pages, at // self.page, axis=1, mode="clip"), at % self.page

    def _put(self, new: dict[str, Any], at: Array) -> dict[str, Any]:
        """The arrays with `new` at tokens `at` [batch, n]; those without a page are dropped."""
        page, place = self._page_and_place(at)
        pages, size = self.k.shape[:2]
        beyond = pages * size + jnp.arange(at.size).reshape(at.shape)  # different places, as indices are unique
        flat = jnp.where(at < self.room[:, None], page * size + place, beyond)
        # as one row; None, of a cache without scales, is an empty tree to JAX
        one, many = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), (self.arrays, new))
        stores = written(one, many, flat.reshape(1, -1))
        return jax.tree.map(lambda x, like: x.reshape(like.shape), stores, self.arrays)  # type: ignore[no-any-return]


def _padded(copies: list[Copy], pages: int) -> tuple[Any, Any]:
    """(from, to), padded to a power of 2 by pages beyond the pool, so that few lengths are compiled. All copies are
    done at once, so a page that is copied twice is read from its first place."""
    origin: dict[int, int] = {}
    for source, target in copies:
        origin[target] = origin.get(source, source)
    n = 1 << (len(origin) - 1).bit_length()
    origin |= {pages + i: 0 for i in range(n - len(origin))}
    targets, sources = np.array([*origin.items()], np.int32).T
    return sources, targets


@partial(jax.jit, donate_argnums=0)
def _copied(cache: PagedKVCache, source: Any, target: Any) -> PagedKVCache:
    arrays = jax.tree.map(lambda x: x.at[target].set(x[source], mode="drop", unique_indices=True), cache.arrays)
    return replace(cache, **arrays)


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

    With `sinks` the ring also keeps that many first tokens, in separate slots before the others:

    >>> att = fk.compile("causal & (window(16) | sinks(4))")
    >>> cache = RingKVCache.create(batch=1, window=24, kv_heads=2, head_dim=8, sinks=4, drafts=8)
    >>> step = jax.jit(lambda cache, q, k, v, tree=None: cache.attention(att, q, k, v, tree=tree))
    >>> out, cache = step(cache, q, k, v)
    >>> out, cache = step(cache, q[:, :3], k[:, :3], v[:, :3], jnp.array([-1, -1, 0]))
    >>> cache.keep(jnp.array([[0, 2]]), drafted=3).lengths.tolist(), cache.k.shape
    ([42], (1, 28, 2, 8))

    Up to `drafts` of the last tokens can be taken back, by `keep` and `truncate`: then the mask may see no further than
    `window` - `drafts` before a query. Under `jax.jit` taking back more sets `overflowed`, and results of that sequence
    are wrong.

    With `absolute=False` masks, score mods and `rotary` read positions inside the cache, as in StreamingLLM. Tokens
    of the ring are numbered from 0, and so no position exceeds its size.
    """

    lengths: Array
    overflowed: Array
    peak: Array  # how long each sequence has been, when tokens were last taken back
    ring: Ring = field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        batch: int,
        window: int,
        kv_heads: int,
        head_dim: int,
        v_dim: int | None = None,
        dtype: Any = jnp.float32,
        *,
        sinks: int = 0,
        drafts: int = 0,
        absolute: bool = True,
    ) -> Self:
        """An empty ring of the last `window` tokens of a sequence and its first `sinks`; `dtype` as for `KVCache`. Of
        the last, `drafts` can be taken back. `absolute`: positions count all tokens of the sequence."""
        ring = Ring(window, sinks, drafts, absolute)
        arrays = empty((batch, ring.slots, kv_heads), head_dim, v_dim, dtype)
        lengths, peak = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32)  # two, or they could not be donated
        return cls(**arrays, lengths=lengths, overflowed=jnp.zeros(batch, bool), peak=peak, ring=ring)

    window = property(lambda self: self.ring.window, doc="Tokens that the ring holds of a sequence, without sinks.")

    def append(self, k: Array, v: Array, counts: Any = None) -> Self:
        """Append tokens like `KVCache.append`; new tokens take the place of the oldest."""
        new = check_new(self.arrays, self.batch, k, v)
        return self._written(stored(self.arrays, k, v), counted(counts, self.batch, new))

    def attend(
        self, att: Attention, q: Array, counts: Any = None, *, tree: Any = None, rotary: Any = None, **params: Any
    ) -> Any:
        """Attend like `KVCache.attend`; `ShapeError` where the last tokens may have overwritten keys that they see;
        `attention` reads these keys first. A tree has at most `drafts` nodes.

        `rotary(x, positions)` turns q and the stored keys as they are read: x [batch, n, heads, head_dim], positions
        int32 [batch, n]. Append keys that are not turned. Every call turns a copy of all keys of the ring."""
        return self._read(att, q, counts, tree, rotary, params, Attention.__call__)

    def statistics(
        self, att: Attention, q: Array, counts: Any = None, *, tree: Any = None, rotary: Any = None, **params: Any
    ) -> Statistics:
        """Statistics like `KVCache.statistics`, of slots; `tree`, `rotary` and errors are those of `attend`.

        >>> import frisket as fk, jax.numpy as jnp
        >>> from frisket.caches.jax import RingKVCache
        >>> x = jnp.ones((1, 3, 2, 16))
        >>> cache = RingKVCache.create(1, 4, 2, 16).append(x, x)
        >>> cache.statistics(fk.compile("causal & window(2)"), x[:, :1], columns=True).columns[0, 0].tolist()
        [0.0, 0.5, 0.5, 0.0]
        """
        run, params = positions.statistics_run(params)
        return self._read(att, q, counts, tree, rotary, params, run)  # type: ignore[no-any-return]

    def _read(
        self, att: Attention, q: Array, counts: Any, tree: Any, rotary: Any, params: Any, run: Callable[..., Any]
    ) -> Any:
        self._check(att, q, tree, params)
        batch, new = q.shape[:2]
        # a chunk may have overwritten keys that it sees
        self.ring.require_room(att, new, params)
        tables = self.ring.tables(self.lengths - counted(counts, batch, new), self.lengths)
        where = self.ring.places((positions.APPENDED if counts is None else positions.PADDED).seen)
        if tree is not None:
            where, more = of_tree(jnp.asarray(tree), jnp.arange(new), jnp.int32, self.ring.token)
            where, tables = self.ring.inside(where), {**tables, **more}
        q, arrays, _ = self._turned(q, tables, rotary)
        return call(att, where, q, arrays, tables, params, run)

    def keep(self, path: Array, drafted: Any, counts: Any = None) -> Self:
        """Keep the drafts on `path`, as `KVCache.keep` does; `ParameterError` where that takes back more tokens than
        `drafts`, under `jax.jit` it sets `overflowed`."""
        if not self.ring.drafts:
            self.ring.refuse_shorter()
        path, start, counts = pathed(self, path, drafted, counts)
        shorter = self._shortened(start + counts)
        rows = jnp.arange(self.batch)[:, None], self.ring.slot(start[:, None] + path)
        tokens = jax.tree.map(lambda x: x[rows], self.arrays)
        return replace(shorter, lengths=start)._written(tokens, counts)

    def truncate(self, lengths: Any) -> Self:
        """The first `lengths` tokens of every sequence, 0 or at most `drafts` fewer than it has had: the ring has
        overwritten older ones."""
        return self._shortened(jnp.minimum(self.lengths, numbers("lengths", lengths, self.batch)))

    def attention(
        self,
        att: Attention,
        q: Array,
        k: Array,
        v: Array,
        counts: Any = None,
        *,
        tree: Any = None,
        rotary: Any = None,
        **params: Any,
    ) -> tuple[Any, Self]:
        """(out, cache): the new tokens appended, and attention of their queries; `tree` and `rotary` as for `attend`. A
        chunk may overwrite keys that it sees. Then the old ring and the chunk are read separately, and the results are
        merged."""
        self._check(att, q, tree, params)
        new = check_new(self.arrays, self.batch, k, v)
        # the chunk overwrites no key that it sees: one call does
        if not self.ring.no_room(att, new, params):
            return super().attention(att, q, k, v, counts, tree=tree, rotary=rotary, **params)
        # the ring has to hold what the first new query sees, and after a tree what each of its nodes sees
        self.ring.require_room(att, 0 if tree is None else new, params)
        check_same_tokens(q, k, "bshd")
        added, real = stored(self.arrays, k, v), counted(counts, self.batch, new)
        results = self._in_parts(att, q, added, real, dict(params), rotary)
        return merged_results(*results, params), self._written(added, real)

    def _check(self, att: Attention, q: Array, tree: Any, params: dict[str, Any]) -> None:
        refuse_parts(att.options, "a ring of JAX")  # keys in the order of slots
        self.ring.check_tree(tree)
        check_queries(att, q, self.k, "bshd", self.batch, params, tree)
        self.ring.check_tree(tree, q.shape[1])

    def _in_parts(
        self, att: Attention, q: Any, added: Any, counts: Array, params: dict[str, Any], rotary: Any
    ) -> tuple[Any, Any]:
        """out and lse, or sums, of attention to what the ring holds and to the new tokens."""
        if params.get("return_max"):
            raise ParameterError("a chunk longer than the ring has room for is read in two parts; there is no max")
        params = keywords_of_part(att, params)
        tables = {**self.ring.tables(self.lengths, self.lengths), positions.NEW: counts}
        q, arrays, at = self._turned(q, tables, rotary)
        old = call(att, self.ring.before(), q, arrays, tables, params)
        if att.options.sinks is not None or params.get("sinks") is not None:  # they count once
            params["sinks"] = jnp.full(q.shape[2], -jnp.inf, jnp.float32)
        if at is not None:
            added = _turned(added, at, rotary, q.dtype)
        chunk = self.ring.inside(positions.CHUNK, chunk=True)
        tables = {**tables, positions.END: self.lengths + counts}
        parts = old, call(att, chunk, q, added, tables, params)
        if not params["return_sums"]:
            return merge(*parts)
        return merge_weighted(positions.placed(att, chunk), parts, {**tables, **params}, "bshd", None)

    def _turned(self, q: Array, tables: dict[str, Any], rotary: Any) -> tuple[Array, dict[str, Any], Any]:
        """q and the arrays of the ring, turned where there is a `rotary`, and the positions of the queries."""
        if rotary is None:
            return q, self.arrays, None
        nodes, places = (jnp.arange(n, dtype=jnp.int32) for n in (q.shape[1], self.ring.slots))
        at, keys = self.ring.counted(tables, nodes, places, jnp.take_along_axis)
        return turned(rotary, q, at).astype(q.dtype), _turned(self.arrays, keys, rotary, q.dtype), at

    def _shortened(self, lengths: Array) -> Self:
        """The cache with these `lengths`, none of them more than it has."""
        peak = jnp.maximum(self.peak, self.lengths)
        far = (lengths > 0) & (peak - lengths > self.ring.drafts)
        if not traced(far) and bool(far.any()):
            self.ring.refuse_shorter()
        # an empty row may take another sequence
        over = (self.overflowed | far) & (lengths > 0)
        return replace(self, lengths=lengths, peak=jnp.where(lengths > 0, peak, 0), overflowed=over)

    def _written(self, added: dict[str, Any], counts: Array) -> Self:
        ring, i = self.ring, jnp.arange(added["k"].shape[1], dtype=jnp.int32)
        position = self.lengths[:, None] + i
        # of the real ones, those that stay
        survivors = (i < counts[:, None]) & ((i >= counts[:, None] - ring.window) | (position < ring.sinks))
        # the others are dropped, at different places, as indices are unique
        at = jnp.where(survivors, ring.slot(position), ring.slots + i)
        return replace(self, **written(self.arrays, added, at), lengths=self.lengths + counts)


def _turned(arrays: dict[str, Any], at: Any, rotary: Any, dtype: Any) -> dict[str, Any]:
    """Stored keys, turned at their positions, and values, without scales."""
    k, v = (_dequantized(arrays[n], arrays[f"{n}_scale"], dtype) for n in "kv")
    return {"k": turned(rotary, k, at).astype(dtype), "v": v, "k_scale": None, "v_scale": None}


def _dequantized(x: Array, scale: Array | None, dtype: Any) -> Array:
    return x.astype(dtype) if scale is None else (x.astype(jnp.float32) * scale[..., None]).astype(dtype)
