"""Pages of a pool, shared by all sequences of a batch, found by a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from frisket.dsl.errors import ShapeError
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.attention.attention import Attention
from frisket.runtime.machine.parameters import traced

from .checks import LOW, OWN, PEAK, empty_rows, refuse_shared, seated
from .jax_plain import JaxCache, check_new, counted, empty, grown, pathed, read, slots, stored, written
from .pool import Copy, PagePool


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

    A `PagePool` on the host decides, and arrays hold its decisions: `pages` int32 [batch, width], the pages of every
    row in order, `room` int32 [batch], the tokens that fit these pages, `lengths` int32 [batch]. k [pages, page,
    kv_heads, head_dim], v likewise with v_dim; with 8 bits `k_scale`, `v_scale` float32 [pages, page, kv_heads].
    `width` is how many pages a sequence may have: `Q_LEN` and `KV_LEN` of masks are width * page. Other pages, more
    pages and shared pages change no shape and do not recompile.

    Tokens without a page raise `CapacityError`; under `jax.jit` they are dropped and set `overflowed`, as in `KVCache`.
    """

    pages: jax.Array
    room: jax.Array
    lengths: jax.Array
    overflowed: jax.Array
    rows: jax.Array

    @classmethod
    def create(
        cls, pages: int, page: int, batch: int, width: int, kv_heads: int, head_dim: int, v_dim: int | None = None,
        dtype: Any = jnp.float32,
    ) -> Self:  # fmt: skip
        """An empty pool of `pages` pages of `page` tokens, a multiple of 16, for `batch` rows of at most `width` pages
        each; `dtype` as for `KVCache`."""
        if page % 16 or batch < 1 or width < 1:
            raise ShapeError(
                f"pages of {page} tokens for {batch} rows of {width} pages; a page is a multiple of 16 tokens, and "
                "there is at least one row of one page"
            )
        arrays = empty((pages, page, kv_heads), head_dim, v_dim, dtype)
        room, lengths = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32)  # two, or they could not be donated
        return cls(**arrays, pages=jnp.zeros((batch, width), jnp.int32), room=room, lengths=lengths,
                   overflowed=jnp.zeros(batch, bool), rows=jnp.asarray(empty_rows(batch)))  # fmt: skip

    page = property(lambda self: self.k.shape[1], doc="Tokens of a page.")
    capacity = property(lambda self: self.pages.shape[1] * self.page, doc="The most tokens that a sequence may have.")

    @usual_promotion()
    def seat(self, pool: PagePool, sequences: Sequence[Any], new: Any = 0, copies: Iterable[Copy] = ()) -> Self:
        """Rows of the batch become these sequences of a pool, one each, None for a row without one. `new` (a number, or
        int [batch]) are tokens that the pool counts already and that are appended next; `copies` what `pool.append`
        gave back, done here, in place of the old cache's memory. Raises `ShapeError` where pool and rows count
        different numbers of tokens, as after a `keep` without `pool.truncate`. To compare, `seat` reads the lengths of
        the rows, and so waits for the step before."""
        before = (None, None) if traced(self.rows) else jax.device_get((self.rows, self.lengths))
        table, room, lengths, rows = seated(pool, sequences, new, *self.k.shape[:2], *self.pages.shape, *before)
        cache = self if not (pairs := list(copies)) else _copied(self, *_padded(pairs, self.k.shape[0]))
        fresh = {"pages": table, "room": room, "lengths": lengths, "rows": rows}
        fresh["overflowed"] = np.zeros(self.batch, bool)
        return replace(cache, **{n: jnp.asarray(x) for n, x in fresh.items()})

    @usual_promotion()
    def append(self, k: jax.Array, v: jax.Array, counts: Any = None) -> Self:
        """Append tokens into the pages of each row, like `KVCache.append`."""
        new = check_new(self.arrays, self.batch, k, v)
        counts = counted(counts, self.batch, new)
        lengths, over = grown(self.lengths, counts, self.room, "let its pool hand out pages, and `seat` it")
        arrays = self._put(stored(self.arrays, k, v), slots(self.lengths, counts, new, self.capacity))
        return replace(self, **arrays, lengths=lengths, overflowed=self.overflowed | over)

    @usual_promotion()
    def attend(self, att: Attention, q: jax.Array, counts: Any = None, *, tree: Any = None, **params: Any) -> Any:
        """Attend like `KVCache.attend`."""
        arrays = {**self.arrays, "pages": self.pages}
        return read(att, q, arrays, self.lengths, self.capacity, counts, tree, params)

    @usual_promotion()
    def keep(self, path: jax.Array, drafted: Any, counts: Any = None) -> Self:
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
        tokens = {n: None if x is None else x[page, place] for n, x in self.arrays.items()}
        arrays = self._put(tokens, slots(start, real, path.shape[1], self.capacity))
        nodes = jnp.arange(path.shape[1])
        moves = ((path != nodes) & (nodes < counts[:, None])).any(1)
        rows = self.rows.at[LOW].min(start + jnp.where(moves, 0, counts)).at[PEAK].min(start + counts)
        return replace(self, **arrays, lengths=start + counts, rows=rows,
                       overflowed=self.overflowed | (real < counts))  # fmt: skip

    @usual_promotion()
    def truncate(self, lengths: Any) -> Self:
        """Keep the first `lengths` tokens of each row, as `KVCache.truncate` does. Call `pool.truncate`, as after
        `keep`. A row whose last page is shared takes no tokens until `seat` has given it another page."""
        cache = super().truncate(lengths)
        shorter = cache.lengths < self.lengths
        rows = self.rows.at[LOW].min(jnp.where(shorter, cache.lengths, self.rows[LOW]))
        rows = rows.at[PEAK].max(jnp.where(shorter, self.lengths, 0))
        room = jnp.where(cache.lengths < rows[OWN], jnp.minimum(self.room, cache.lengths), self.room)
        result: Self = replace(cache, rows=rows, room=room)
        return result

    def _page_and_place(self, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(page, place in it) of tokens [batch, n]."""
        return jnp.take_along_axis(self.pages, at // self.page, axis=1, mode="clip"), at % self.page

    def _put(self, new: dict[str, Any], at: jax.Array) -> dict[str, Any]:
        """The arrays with `new` at tokens `at` [batch, n]; those without a page are dropped."""
        page, place = self._page_and_place(at)
        pages, size = self.k.shape[:2]
        flat = jnp.where(
            at < self.room[:, None], page * size + place, pages * size + jnp.arange(at.size).reshape(at.shape)
        )
        one = {n: None if x is None else x.reshape(1, -1, *x.shape[2:]) for n, x in self.arrays.items()}
        many = {n: None if x is None else x.reshape(1, -1, *x.shape[2:]) for n, x in new.items()}
        stores = written(one, many, flat.reshape(1, -1))
        return {n: None if x is None else x.reshape(self.arrays[n].shape) for n, x in stores.items()}


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
    arrays: dict[str, Any] = {
        n: x if x is None else x.at[target].set(x[source], mode="drop", unique_indices=True)
        for n, x in cache.arrays.items()
    }
    return replace(cache, **arrays)
