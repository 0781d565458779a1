"""Attention in JAX's own operators over visible tiles: tangents, and derivatives of derivatives, of any order.

First derivatives in reverse have kernels. What asks for more differentiates this form: a row of tiles at a time, its
queries against the tiles of keys that some of them see. Rows that see about as many keys are the steps of one
`lax.scan`. Each step is a `jax.checkpoint`, so derivatives hold one row of tiles, never all pairs of a call.

Where the spans are traced the number of visible tiles is a value and no shape: then each row stands against all keys,
and hidden ones are masked. That takes the time of dense attention, and the memory of a row of tiles.

A score mod is differentiated by the table of `lowering.derive`, not by JAX's rules for its operators. Ties and branches
then have one convention in kernels and here. A hidden position contributes 0, whatever slope is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.ir import Expr
from frisket.dsl.types import FLOAT
from frisket.grammar.memo import memo
from frisket.lowering.derive import Formula, formula_of
from frisket.lowering.kernels.jnp_expr import evaluate
from frisket.lowering.plan import KernelInputs

from .tiles import ZERO, Numbers, Static, TileRow, XlaTiles, dot, prepared

Array = Any  # a jax.Array, traced or not
Ints: TypeAlias = NDArray[np.integer[Any]]


# -- expressions ------------------------------------------------------------------------------------------------------


@memo(group="programs")
def elementwise(formula: Formula, int64: bool, float64: bool) -> Callable[..., Array]:
    """The function (env, tables, hidden, leaves) -> values of a formula, in the shape of `hidden`. Its derivatives by
    the leaves, of any order, are `Formula.derivatives`, and 0 where it is `hidden`."""
    import jax
    import jax.numpy as jnp
    from jax.custom_derivatives import SymbolicZero

    @jax.custom_jvp
    def value(env: Any, tables: Any, hidden: Array, leaves: Any) -> Array:
        whole = {**env, **{f"leaf {i}": x for i, x in enumerate(leaves)}}
        result = evaluate(formula.expr, whole, tables, int64=int64, float64=float64)
        return jnp.broadcast_to(result, hidden.shape)

    def rule(primals: Any, tangents: Any) -> tuple[Array, Array]:
        result, hidden = value(*primals), primals[2]
        total = jnp.zeros_like(result)
        for derivative, tangent in zip(formula.derivatives, tangents[3], strict=True):
            if derivative is not None and not isinstance(tangent, SymbolicZero):
                slope = elementwise(derivative, int64, float64)(*primals)
                # both factors may be infinite there, and 0 times either is NaN, in this product or in its transpose
                total = total + jnp.where(hidden, 0, tangent * jnp.where(hidden, 0, slope))
        return result, total

    value.defjvp(rule, symbolic_zeros=True)
    return value


# -- rows of tiles ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowGroup:
    """Rows of tiles that see equally many tiles of keys."""

    rows: Ints  # [n], their numbers
    tiles: Ints  # [n, width]: tiles of keys; the one after the last is of no key
    records: Array | None  # [n, R, 4] of traced spans


def row_groups(inputs: KernelInputs, numbers: Numbers, static: Static) -> Iterator[RowGroup]:
    """The rows of tiles, by the next power of two of the tiles of keys that they see."""
    block_k, kv_len = inputs.target.block_k, inputs.geometry.kv_len
    last, numbered = -(-kv_len // block_k), np.arange(len(numbers.rows), dtype=np.int32)
    if static.block_k is not None:
        yield RowGroup(
            numbered, np.broadcast_to(np.arange(last, dtype=np.int32), (len(numbered), last)), numbers.ends[0]
        )
        return
    spans: Any = inputs.spans
    visible = [_tiles_of(spans, place) for place in np.asarray(numbers.rows)]
    widths = np.array([min(last, 1 << max(0, len(x) - 1).bit_length()) for x in visible])
    for width in np.unique(widths):
        rows = numbered[widths == width]
        tiles = np.full((len(rows), width), last, np.int32)
        for line, r in zip(tiles, rows, strict=True):
            line[: len(visible[r])] = visible[r]
        yield RowGroup(rows, tiles, None)


def _tiles_of(spans: Any, place: Ints) -> Ints:
    """The tiles of keys that a row at (batch, head, tile of queries) sees."""
    b, h, tile = place
    slice_ = spans.slice_of[b, h]
    records = spans.bounds[slice_, tile][: spans.count[slice_, tile]]
    pieces = [np.arange(lo, hi, dtype=np.int32) for lo, _, _, hi in records]
    return np.unique(np.concatenate(pieces)) if pieces else np.zeros(0, np.int32)


class XlaForm:
    """A call as a function of its Float arrays by name: q, k, v, sinks, and those of the plan's tables and slots.

    `arrays` has them as rows of tiles read them: queries in whole tiles, keys [batch, tile, key of the tile, kv head,
    n], all in the dtype of scores."""

    def __init__(self, inputs: KernelInputs, q: Array, k: Array, v: Array) -> None:
        import jax
        import jax.numpy as jnp

        static, numbers = prepared(inputs, q.dtype == jnp.float64)
        self.groups = list(row_groups(inputs, numbers, static))
        self.t = t = XlaTiles(static, Numbers(*jax.tree.map(jnp.asarray, tuple(numbers))), q, k)
        self.block_k = inputs.target.block_k
        k, v = self._gathered(k), self._gathered(v)
        plan = static.plan
        floats = [t.name for t in plan.tables if t.type is FLOAT] + [s.name for s in plan.slots if s.type is FLOAT]
        both = {**t.tables, **t.constants}
        arrays = {"q": t.padded(q), "k": self._in_tiles(k), "v": self._in_tiles(v), **{n: both[n] for n in floats}}
        arrays |= {} if inputs.sinks is None else {"sinks": inputs.sinks}
        self.arrays: dict[str, Array] = {n: jnp.asarray(x).astype(static.dtype) for n, x in arrays.items()}

    def _gathered(self, x: Array) -> Array:
        """An array of keys [batch, key, kv head, n], where it is a pool of pages."""
        if self.t.pages is None:
            return x
        # entries of pages without a visible key may have any number
        pages = x.at[self.t.pages].get(mode="clip")
        return pages.reshape(len(pages), -1, *x.shape[2:])

    def _in_tiles(self, x: Array) -> Array:
        import jax.numpy as jnp

        last = -(-self.t.kv_len // self.block_k) + 1  # one more, of no key
        padded = jnp.pad(x, ((0, 0), (0, last * self.block_k - self.t.kv_len), (0, 0), (0, 0)))
        return padded.reshape(x.shape[0], last, self.block_k, *x.shape[2:])

    # -- all rows: derivatives of these hold one row, because each step is a checkpoint of its own ---------

    def tangents(self, some: dict[str, Array], tangents: dict[str, Array]) -> tuple[Array, Array]:
        """The tangents of (out [batch, q_len, heads, v_dim], lse [batch, heads, q_len]) by those of some arrays."""
        import jax

        def step(some: Any, tangents: Any, place: Any) -> Any:
            return jax.jvp(lambda some: self.row(some, *place), (some,), (tangents,))[1]

        def each(carry: None, place: Any) -> Any:
            return carry, jax.checkpoint(step, prevent_cse=False)(some, tangents, place)

        parts = [jax.lax.scan(each, None, place)[1] for place in self.places()]
        return self._whole(parts)

    def gradients(self, some: dict[str, Array], dout: Array, dlse: Array) -> dict[str, Array]:
        """The gradients of some arrays by the cotangents of (out, lse)."""
        import jax

        t = self.t
        cotangents = t.padded(dout), t.padded(dlse, 2)

        def step(some: Any, cotangents: Any, place: Any) -> Any:
            tile_row = t.row(place[0])
            dout, dlse = t.queries(cotangents[0], tile_row), t.lines(cotangents[1], tile_row)
            _, pull = jax.vjp(lambda some: self.row(some, *place), some)
            return pull((dout.reshape(*t.part, -1), dlse))[0]

        def each(sums: Any, place: Any) -> Any:
            part = jax.checkpoint(step, prevent_cse=False)(some, cotangents, place)
            return jax.tree.map(lambda x, y: x + y, sums, part), None

        sums = {n: t.full(x.shape, 0.0) for n, x in some.items()}
        for place in self.places():
            sums = jax.lax.scan(each, sums, place)[0]
        return sums

    def places(self) -> list[Any]:
        """The numbers of rows, their tiles of keys and traced records, by group: the operands of a step."""
        import jax.numpy as jnp

        return [(jnp.asarray(x.rows), jnp.asarray(x.tiles), x.records) for x in self.groups]

    def _whole(self, parts: list[Any]) -> tuple[Array, Array]:
        """(out, lse) of the call from those of each group's rows."""
        out, lse = self.lines([x for x, _ in parts]), self.lines([x for _, x in parts])
        return out.transpose(0, 2, 1, 3), lse

    def lines(self, parts: list[Array]) -> Array:
        """[batch, heads, q_len, ...] of the call from [rows, batch, kv head, group, query, ...] of each group."""
        import jax.numpy as jnp

        t = self.t
        back = np.argsort(np.concatenate([group.rows for group in self.groups]))
        x = jnp.concatenate(parts)[back] if len(parts) > 1 else parts[0]
        rest = x.shape[5:]
        x = x.reshape(t.batch // t.static.batches, t.heads // t.static.heads, -1, *t.part, *rest)
        x = x.transpose(0, 3, 1, 4, 5, 2, 6, *range(7, x.ndim))
        return x.reshape(t.batch, t.heads, t.length, *rest)[:, :, : t.q_len]

    # -- one row -------------------------------------------------------------------------------------------

    def row(self, some: dict[str, Array], r: Array, tiles: Array, records: Array | None) -> tuple[Array, Array]:
        """(out [batch, kv head, group, query, v_dim], lse) of row r, over these tiles of keys, with some arrays in
        place of the form's."""
        import jax.numpy as jnp
        from jax import lax

        t, static, arrays = self.t, self.t.static, {**self.arrays, **some}
        tile_row = t.row(r)
        m, hidden, env = self.products(arrays, tile_row, tiles, records)
        if static.plan.weighted:
            return self._weighted(m, env, hidden, arrays, tile_row, tiles)
        m, hidden = self.scores(m, hidden, env, arrays)
        largest = lax.stop_gradient(m).max(-1)
        if (sink := self.sinks(arrays, tile_row)) is not None:
            largest = jnp.maximum(largest, lax.stop_gradient(sink))
        base = jnp.where(largest == -jnp.inf, 0, largest)
        e = jnp.where(hidden, 0, jnp.exp(m - base[..., None]))
        total = e.sum(-1)
        total = total if sink is None else total + jnp.exp(sink - base)
        empty = total == 0
        total = jnp.where(empty, 1, total)
        lse = jnp.where(empty, -jnp.inf, jnp.log(total) + base)
        p = e / total[..., None]
        if (survivors := t.survivors(env)) is not None:
            p = jnp.where(survivors, p, 0) * t.keep
        v_tile = self._keys(arrays["v"], tile_row, tiles, hidden)
        out = dot(p.reshape(*t.part[:2], -1, p.shape[-1]), v_tile, (3, 2)).reshape(*t.part, -1)
        # a row that sees nothing may have any cotangent, NaN too
        return jnp.where(empty[..., None], 0, out), lse

    def products(
        self, arrays: dict[str, Array], tile_row: TileRow, tiles: Array, records: Array | None
    ) -> tuple[Array, Array, dict[str, Array]]:
        """(scaled products [batch, kv head, group, query, key] of a row; the positions that the mask hides; values by
        name)."""
        local = self.local(tiles)
        env = {**tile_row.env, "k": tile_row.k_origin + local}
        hidden = self._hidden(tile_row, local, records, env)
        q_tile = self.t.queries(arrays["q"], tile_row) * self.t.static.scale
        s = dot(q_tile, self._keys(arrays["k"], tile_row, tiles, hidden), (3, 3))
        return s.reshape(hidden.shape), hidden, env

    def scores(self, s: Array, hidden: Array, env: dict[str, Array], arrays: dict[str, Array]) -> tuple[Array, Array]:
        """(modified scores, -inf where hidden; the hidden positions) of the results of `products`."""
        import jax.numpy as jnp

        score = self.t.static.plan.score
        m, hidden = (s, hidden) if score is None else self._modified(score, s, env, hidden, arrays)
        return jnp.where(hidden, -jnp.inf, m), hidden

    def local(self, tiles: Array) -> Array:
        """The places of the keys of tiles."""
        import jax.numpy as jnp

        return (tiles[:, None] * self.block_k + jnp.arange(self.block_k, dtype=jnp.int32)).reshape(-1)

    def sinks(self, arrays: dict[str, Array], tile_row: TileRow) -> Array | None:
        """The sinks [1, kv head, group, 1] of a row; None: no sinks."""
        from jax import lax

        if "sinks" not in arrays:
            return None
        mine = lax.dynamic_slice(arrays["sinks"], (tile_row.h,), (self.t.static.heads,))
        return mine.reshape(1, self.t.kvs, self.t.groups, 1)

    def _hidden(self, tile_row: TileRow, local: Array, records: Array | None, env: dict[str, Array]) -> Array:
        """The positions that the mask hides, those beyond the last query and key, and those outside traced spans."""
        import jax.numpy as jnp

        t = self.t
        queries = tile_row.start + jnp.arange(t.static.block_q, dtype=jnp.int32)
        seen = (queries < t.q_len)[:, None] & (local < t.kv_len)
        if records is not None:
            lo, _, _, hi = records.T[..., None] * self.block_k
            seen &= ((lo <= local) & (local < hi)).any(0)
        if t.static.plan.mask is not None:
            seen = seen & t.value(t.static.plan.mask, env)
        return jnp.broadcast_to(~seen, (*t.part, len(local)))

    def _keys(self, x: Array, tile_row: TileRow, tiles: Array, hidden: Array) -> Array:
        """Tiles of an array of keys, as [batch, kv head, key, n]. 0 where no query of the row sees the key, because
        anything may stand there, as in a cache that is used again."""
        import jax.numpy as jnp
        from jax import lax

        _, last, block, _, n = x.shape
        corner = tile_row.b, ZERO, ZERO, tile_row.kv, ZERO
        mine = lax.dynamic_slice(x, corner, (self.t.static.batches, last, block, self.t.kvs, n))[:, tiles]
        mine = mine.transpose(0, 3, 1, 2, 4).reshape(*self.t.part[:2], -1, n).astype(self.t.static.dtype)
        return jnp.where(hidden.all((2, 3))[..., None], 0, mine)

    def _modified(
        self, score: Expr, s: Array, env: dict[str, Array], hidden: Array, arrays: dict[str, Array]
    ) -> tuple[Array, Array]:
        """The modified scores, and the hidden positions: the mask's, and those where the score mod gives -inf."""
        import jax.numpy as jnp
        from jax import lax

        unseen = lax.stop_gradient(self._value(score, lax.stop_gradient(s), env, hidden, arrays)) == -jnp.inf
        hidden = hidden | unseen
        return self._value(score, s, env, hidden, arrays), hidden

    def _value(self, e: Expr, of: Array, env: dict[str, Array], hidden: Array, arrays: dict[str, Array]) -> Array:
        """The value of an expression of `score` or `total` (`of`); its derivatives are 0 where it is `hidden`."""
        import jax.numpy as jnp

        widths, (formula, sources) = self.t.static.widths, formula_of(e)
        tables = {n: arrays.get(n, x) for n, x in self.t.tables.items()}
        env = {n: x if n in ("q", "k") else jnp.asarray(arrays.get(n, x)) for n, x in env.items()}
        leaves = tuple(of if e.op == "var" else evaluate(e, env, tables, **widths) for e in sources)
        return elementwise(formula, **widths)(env, tables, hidden, leaves)

    def _weighted(
        self, s: Array, env: dict[str, Array], hidden: Array, arrays: dict[str, Array], tile_row: TileRow, tiles: Array
    ) -> tuple[Array, Array]:
        """(out, total) of a weighted row, from its plain scores."""
        import jax.numpy as jnp

        t, w = self.t, self._weights(s, hidden, env, arrays)
        total, p = w.sum(-1), w
        if (survivors := t.survivors(env)) is not None:
            p = jnp.where(survivors, w, 0) * t.keep
        v_tile = self._keys(arrays["v"], tile_row, tiles, hidden)
        out = dot(p.reshape(*p.shape[:2], -1, p.shape[-1]), v_tile, (3, 2)).reshape(*t.part, -1)
        # as with softmax, a row that sees nothing may have any cotangent
        return jnp.where(hidden.all(-1, keepdims=True), 0, self._divided(out, w, s, env, hidden, arrays)), total

    def _weights(self, s: Array, hidden: Array, env: dict[str, Array], arrays: dict[str, Array]) -> Array:
        import jax.numpy as jnp

        plan = self.t.static.plan
        assert plan.score is not None
        return jnp.where(hidden, 0, self._value(plan.score, s, env, hidden, arrays))

    def shares(self, s: Array, hidden: Array, env: dict[str, Array], arrays: dict[str, Array]) -> Array:
        """The weights of a weighted row divided by its divisor, of the results of `products`."""
        w = self._weights(s, hidden, env, arrays)
        return self._divided(w, w, s, env, hidden, arrays)

    def _divided(
        self, x: Array, w: Array, s: Array, env: dict[str, Array], hidden: Array, arrays: dict[str, Array]
    ) -> Array:
        """`x` [..., query, n] divided by the divisors of rows with weights `w`; 0 where a divisor is 0."""
        import jax.numpy as jnp
        from jax import lax

        t, plan, total = self.t, self.t.static.plan, w.sum(-1)
        if plan.divide is None:
            return x
        seen = t.counted(~hidden, {**env, "score": lax.stop_gradient(s)})
        count = jnp.broadcast_to(seen, s.shape).sum(-1, dtype=jnp.int32)[..., None]
        of_row = {n: x for n, x in env.items() if n != "k"} | {"count": count}
        alone = count == 0
        divisor = self._value(plan.divide, total[..., None], of_row, alone, arrays)
        empty = alone | (divisor == 0)
        return jnp.where(empty, 0, x / jnp.where(empty, 1, divisor))
