"""Caches whose places are not in the order of positions: pages of a pool, and a ring for sliding windows.

Pages are shared by all sequences of a batch, and found by a table. A ring holds the last tokens of every sequence, at
position modulo size, and the first ones where they are sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.runtime.attention.attention import Attention
from frisket.runtime.attention.merge import merge
from frisket.runtime.attention.statistics import Statistics
from frisket.runtime.attention.weighted import keywords_of_part, merge_weighted, merged_results
from frisket.runtime.calls.arrays import capturing, in_graph
from frisket.runtime.calls.options import ALIGNED, flag, refuse_parts

from . import positions
from .cascade import SharedPrefixes
from .pool import LOW, OWN, PEAK, Copy, PagedRows, PagePool, empty_rows, refuse_shared, seated
from .positions import PositionMap, Ring, check_same_tokens, turned
from .torch_cascade import Cascade, most_members, pays
from .torch_plain import CacheShape, Known, TorchCache, WrittenTokens, counts_of, numbers, on, quantized


class PagedKVCache(TorchCache):
    """Keys and values in pages of a pool: a sequence takes the pages it needs, and forks share common pages.

    >>> import torch, frisket as fk
    >>> pool = PagePool(pages=12, page=16)
    >>> cache = PagedKVCache.create(pages=12, page=16, batch=2, width=8, kv_heads=2, head_dim=16)
    >>> copies = pool.allocate("a", 40)  # the host hands out pages, or raises CapacityError
    >>> _ = cache.seat(pool, ["a", None], [40, 0], copies)  # rows of the batch are these sequences from here on
    >>> q, k, v = (torch.randn(2, heads, 40, 16) for heads in (4, 2, 2))
    >>> out = cache.attention(fk.compile("causal"), q, k, v, counts=[40, 0])
    >>> pool.fork("a", "b")  # the same prompt, on the same pages
    >>> copies = pool.append({"a": 1, "b": 1})
    >>> _ = cache.seat(pool, ["a", "b"], 1, copies)
    >>> q, k, v = (x[:, :, -1:] for x in (q, k, v))
    >>> out = cache.attention(fk.compile("causal"), q, k, v)
    >>> cache.pages[:, :3].tolist()  # of the page that both write to, one has a copy
    [[0, 1, 3], [0, 1, 2]]
    >>> cache.attend(fk.compile("causal"), q).shape  # the last token again
    torch.Size([2, 4, 1, 16])
    >>> cache.keep([[0], [0]], drafted=1, counts=[1, 0]).known()  # "b" drops its last token
    [41, 40]
    >>> pool.truncate("b", 40), cache.truncate([41, 40]).known()  # the pool is told
    (None, [41, 40])
    >>> cache.extra_repr()
    '2 x 128, kv_heads=2, head_dim=16, float32'

    One `PagePool` on the host decides for the caches of all layers, and buffers hold its decisions. These are `pages`
    int32 [batch, width], the pages of every row in order, `room` int32 [batch], the tokens that fit these pages,
    `lengths` int32 [batch]. `k` [pages, kv_heads, page, head_dim], `v` likewise with v_dim, scales likewise without
    dim. `width` is how many pages a sequence may have: `Q_LEN` and `KV_LEN` of masks are width * page. Other pages and
    shared pages change no shape and do not recompile.
    """

    room: Tensor
    pages: Tensor
    first_owned: Tensor  # the first token that is on pages of its row alone
    _larger = "let its pool hand out pages, and `seat` it"

    def __init__(self, shape: CacheShape, width: int) -> None:
        batch, page, device = shape.batch, shape.tokens, shape.device
        if page % 16 or width < 1:
            text = f"pages of {page} tokens for rows of {width} pages; a page is a multiple of 16 tokens, a row has at "
            raise ShapeError(f"{text}least one page")
        super().__init__(shape)
        del self.room  # register_buffer refuses the name of an attribute
        self.capacity, self.page, self._rooms = width * page, page, [0] * batch
        self.register_buffer("pages", torch.zeros(batch, width, dtype=torch.int32, device=device))
        self.register_buffer("room", torch.zeros(batch, dtype=torch.int32, device=device))
        # a state does not say who shares pages
        self.register_buffer("first_owned", torch.zeros(batch, dtype=torch.int32, device=device), persistent=False)
        self._rows = empty_rows(batch)
        self._table: Any = None  # pages [batch, width] and how many of them a row uses, as the host knows them
        self._cascades: dict[int | None, tuple[Any, Cascade | None]] = {}  # of that table, by `most_members`
        self._merges: dict[Any, Any] = {}  # launches that merge the parts of a cascade

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
        dtype: torch.dtype | str = torch.float32,
        device: Any = None,
    ) -> Self:
        """An empty pool of `pages` pages of `page` tokens, a multiple of 16, for `batch` rows of at most `width` pages
        each; `dtype` as for `KVCache`."""
        return cls(CacheShape(batch, pages, page, kv_heads, head_dim, v_dim, dtype, device), width)

    def seat(self, pool: PagePool, sequences: Sequence[Any], new: Any = 0, copies: Iterable[Copy] = ()) -> Self:
        """Rows of the batch become these sequences of a pool, one each, None for a row without one. `new` (a number,
        or int [batch]) are tokens that the pool counts already and that are appended next; `copies` what
        `pool.append` gave back, done here.

        Raises `ShapeError` where pool and rows count different numbers of tokens, as after a `keep` without
        `pool.truncate`. To compare, it waits where only a device knows the lengths."""
        stored = self.lengths.tolist() if (known := self.known()) is None else known
        batch, width = self.pages.shape
        cache = PagedRows(self.k.shape[0], self.page, batch, width, self._rows, stored)
        *arrays, rows = seated(pool, sequences, new, cache)
        for source, target in copies:
            for x in (self.k, self.v, self.k_scale, self.v_scale):
                if x is not None:
                    x[target] = x[source]
        _, self._rooms, self._host = (x.tolist() for x in arrays)
        self._rows = rows
        buffers = self.pages, self.room, self.lengths, self.first_owned
        for buffer, values in zip(buffers, (*arrays, rows[OWN]), strict=True):
            buffer.copy_(torch.from_numpy(values), non_blocking=True)
        self.overflowed.zero_()
        table = arrays[0], arrays[1] // self.page
        if self._table is None or not all(map(np.array_equal, self._table, table)):
            self._table = table
        return self

    def attend(
        self, att: Attention, q: Tensor, counts: Any = None, *, tree: Any = None, cascade: bool = False, **params: Any
    ) -> Any:
        """Attend like `KVCache.attend`. With `cascade` a prefix on pages that rows share is read once for all of them,
        where that saves more than it costs. One call has the queries of these rows over the prefix. Another one has
        the queries of each row over its other tokens. The results are merged by lse, and equal those of one call but
        for rounding, with any mask and score mod. Rows share pages after `pool.fork`; a batch may have several
        prefixes."""
        self._check(att, q, tree, params)
        return self._attend_by(att, cascade, q, params)(att, q, counts, tree, params)

    def attention(self, att: Attention, q: Tensor, k: Tensor, v: Tensor, counts: Any = None, **params: Any) -> Any:
        """`append`, then `attend` with these `params`; where the queries do not fit nothing is stored."""
        tree, cascade = params.pop("tree", None), params.pop("cascade", False)
        self._check(att, q, tree, params)
        if counts is not None:
            check_same_tokens(q, k, "bhsd")
        attend = self._attend_by(att, cascade, q, params)
        self.append(k, v, counts)
        return attend(att, q, counts, tree, params)

    def _attend_by(self, att: Attention, cascade: bool, q: Tensor, params: dict[str, Any]) -> Callable[..., Any]:
        """The way to attend: in a cascade where rows share a prefix and it pays. Raises for what a cascade lacks."""
        if not flag(cascade, "cascade"):
            return self._attend
        refuse_parts(att.options, "a cascade")
        if params.get("return_max"):
            raise ParameterError("a cascade reads keys in two parts; there is no max: leave out return_max or cascade")
        if in_graph(q) or capturing(q.device):
            text = "a cascade is planned on the host, for the pages that rows share then; a graph would keep this plan"
            raise ParameterError(f"{text}\n  call it outside of torch.compile and CUDA graphs, or leave out cascade")
        shared = self._cascade_of(q)
        return self._attend if shared is None else partial(shared.attend, self)

    def _cascade_of(self, q: Tensor) -> Cascade | None:
        """The cascade of queries like `q`; None where one call reads no more, or takes no longer."""
        most = most_members(q, self.k, self.k_scale is not None)
        if self._table is None or most == 1:
            return None
        of_table, cascade = self._cascades.get(most, (None, None))
        if of_table is not self._table or (cascade is not None and cascade.device != q.device):
            table, counts = self._table
            shared = SharedPrefixes.of(table, counts, self.page, most)
            stored = (x for x in (self.k, self.v, self.k_scale, self.v_scale) if x is not None)
            if shared is None or not pays(shared, sum(x[0, :, 0].nbytes for x in stored), q.is_cpu):
                cascade = None
            # the same rows share the same pages: plans and arrays on the device stay
            elif cascade is None or cascade.device != q.device or not cascade.shared.equals(shared):
                cascade = Cascade(shared, q.device)
            self._cascades[most] = self._table, cascade
        return cascade

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_cascades": {}, "_merges": {}}

    def keep(self, path: Any, drafted: Any, counts: Any = None) -> Self:
        """Keep the drafts on `path`, as `KVCache.keep` does, and drop the others.

        Call `pool.truncate(sequence, tokens)` right after: `seat` refuses a pool that counts drafts which were not
        kept. Drafts on pages that another sequence shares are a `ShapeError`: `pool.own` gives copies. Where only a
        device knows the lengths they are left, and `overflowed` is true."""
        return super().keep(path, drafted, counts)

    def truncate(self, lengths: Any) -> Self:
        """Keep the first `lengths` tokens of each row, as `KVCache.truncate` does. Call `pool.truncate`, as after
        `keep`. A row whose last page is shared takes no tokens until `seat` has given it another page."""
        before = self.known()
        super().truncate(lengths)
        # further tokens would go to a page that another sequence reads
        self.room.copy_(torch.where(self.lengths < self.first_owned, torch.minimum(self.room, self.lengths), self.room))
        known = self.known()
        if before is None or known is None:
            self._rows[LOW] = 0  # how short they became is not known
            return self
        was, now = (np.asarray(x, np.int32) for x in (before, known))
        low, peak, first_owned = self._rows[LOW], self._rows[PEAK], self._rows[OWN]
        low[:], peak[:] = np.where(now < was, (np.minimum(low, now), np.maximum(peak, was)), (low, peak))
        self._rooms = np.where(now < first_owned, np.minimum(self._rooms or 0, now), self._rooms or 0).tolist()
        return self

    def _nodes_kept(self, path: Tensor, start: Tensor, number: Tensor, begin: Known, host_counts: Known) -> Tensor:
        low, peak = self._rows[LOW], self._rows[PEAK]
        if begin is None or host_counts is None:
            low[:] = peak[:] = 0  # it is unknown where they begin
        else:
            refuse_shared(begin, host_counts, self._rows[OWN])
            nodes, counts = np.arange(path.shape[1]), np.asarray(host_counts)
            # on a device nothing waits for the path: all its nodes count as moved
            moves = ((path.numpy() != nodes) & (nodes < counts[:, None])).any(1) if path.is_cpu else True
            low[:] = np.minimum(low, begin + np.where(moves, 0, counts))
            peak[:] = np.minimum(peak, begin + counts)
        real = torch.where(start >= self.first_owned, number, 0)
        self.overflowed |= real < number
        return real

    def _common_place(self, known: list[int], new: int) -> int | None:
        return None  # pages are no one slice of the rows

    def _where(self, token: Tensor, real: WrittenTokens | None = None) -> Tensor:
        table = self.pages if real is None else self.pages[real.row[:, 0]]
        page = table.gather(1, (token // self.page).clamp(0, self.pages.shape[1] - 1).long())
        return self.first[page, :, 0].transpose(1, 2) + (token % self.page)[:, None]

    def _load_from_state_dict(self, *arguments: Any, **more: Any) -> None:
        super()._load_from_state_dict(*arguments, **more)
        # a state says nothing of a pool: no sequence sits in a row
        self._rooms, self._rows = self.room.tolist(), empty_rows(self.batch)
        self._table = None
        self.first_owned.zero_()


class RingKVCache(TorchCache):
    """The last `window` tokens of every sequence of any length, for masks that see no further back.

    >>> import torch, frisket as fk
    >>> att = fk.compile("causal & window(32)")
    >>> cache = RingKVCache.create(batch=2, window=32, kv_heads=2, head_dim=16)
    >>> q, k, v = (torch.randn(2, heads, 100, 16) for heads in (4, 2, 2))
    >>> out = cache.attention(att, q, k, v)
    >>> cache.lengths.tolist(), cache.k.shape
    ([100, 100], torch.Size([2, 2, 32, 16]))
    >>> q, k, v = (x[:, :, -1:] for x in (q, k, v))
    >>> cache.append(k, v).attend(att, q).shape, cache.known()
    (torch.Size([2, 4, 1, 16]), [101, 101])
    >>> cache.truncate(0).known()  # rows are free for other sequences
    [0, 0]
    >>> cache.extra_repr()
    '2 x 32, kv_heads=2, head_dim=16, float32'
    >>> cache.keep([[0], [0]], drafted=1)
    Traceback (most recent call last):
    frisket.dsl.errors.ParameterError: ...

    As `KVCache`, with the token of position p in slot `p % window`; `lengths` count what has been appended. How far
    back the mask sees is computed from its text, at positions up to 2**20: one that sees more than the ring holds is
    a `ShapeError` with a witness. Masks and score mods that read `Q_LEN` or `KV_LEN` are refused.

    With `sinks` the ring also keeps that many first tokens, in separate slots before the others:

    >>> att = fk.compile("causal & (window(32) | sinks(4))")
    >>> cache = RingKVCache.create(batch=1, window=40, kv_heads=2, head_dim=16, sinks=4, drafts=8)
    >>> q, k, v = (torch.randn(1, heads, 100, 16) for heads in (4, 2, 2))
    >>> out = cache.attention(att, q, k, v)
    >>> q, k, v = (x[:, :, :3] for x in (q, k, v))
    >>> out = cache.attention(att, q, k, v, tree=[-1, -1, 0])
    >>> cache.keep([[0, 2]], drafted=3).known(), cache.k.shape
    ([102], torch.Size([1, 2, 44, 16]))

    Up to `drafts` of the last tokens can be taken back, by `keep` and `truncate`: then the mask may see no further than
    `window` - `drafts` before a query. Where only a device knows the lengths, taking back more sets `overflowed`.

    With `absolute=False` masks, score mods and `rotary` read positions inside the cache, as in StreamingLLM. Tokens
    of the ring are numbered from 0, and so no position exceeds its size.
    """

    peak: Tensor | None  # with drafts: how long each sequence has been, int32 [batch]

    def __init__(self, shape: CacheShape, ring: Ring) -> None:
        super().__init__(shape)
        self.ring, self._token = ring, ring.token
        self.window = self.slots = ring.window
        self.register_buffer("peak", torch.zeros_like(self.lengths) if ring.drafts else None)

    @classmethod
    def create(
        cls,
        batch: int,
        window: int,
        kv_heads: int,
        head_dim: int,
        v_dim: int | None = None,
        dtype: torch.dtype | str = torch.float32,
        device: Any = None,
        *,
        sinks: int = 0,
        drafts: int = 0,
        absolute: bool = True,
    ) -> Self:
        """An empty ring of the last `window` tokens of a sequence and its first `sinks`; `dtype` as for `KVCache`. Of
        the last, `drafts` can be taken back. `absolute`: positions count all tokens of the sequence."""
        ring = Ring(window, sinks, drafts, absolute)
        return cls(CacheShape(batch, batch, ring.slots, kv_heads, head_dim, v_dim, dtype, device), ring)

    def attend(
        self, att: Attention, q: Tensor, counts: Any = None, *, tree: Any = None, rotary: Any = None, **params: Any
    ) -> Any:
        """Attend like `KVCache.attend`; `ShapeError` where the last tokens may have overwritten keys that they see;
        `attention` reads these keys first. A tree has at most `drafts` nodes.

        `rotary(x, positions)` turns q and the stored keys as they are read: x [batch, heads, n, head_dim], positions
        int64 [batch, n]. Append keys that are not turned. Every call turns a copy of all keys of the ring."""
        self._check(att, q, tree, params)
        self.ring.require_room(att, q.shape[2], params)
        return self._attend(att, q, counts, tree, params, rotary)

    def statistics(
        self, att: Attention, q: Tensor, counts: Any = None, *, tree: Any = None, rotary: Any = None, **params: Any
    ) -> Statistics:
        """Statistics like `KVCache.statistics`, of slots; `tree`, `rotary` and errors are those of `attend`.

        >>> import frisket as fk, torch
        >>> from frisket.caches.torch import RingKVCache
        >>> cache, x = RingKVCache.create(1, 4, 2, 16), torch.ones(1, 2, 6, 16)
        >>> _ = cache.append(x[:, :, :3], x[:, :, :3])
        >>> cache.statistics(fk.compile("causal & window(2)"), x[:, :, :1], columns=True).columns[0, 0].tolist()
        [0.0, 0.5, 0.5, 0.0]
        """
        run, params = positions.statistics_run(params)
        self._check(att, q, tree, params)
        self.ring.require_room(att, q.shape[2], params)
        places, tables = self._places_of(q, counts, tree)
        q, arrays, _ = self._turned(q, tables, rotary)
        return self._statistics(run, positions.placed(att, places), q, tables, params, arrays)

    def attention(
        self,
        att: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        counts: Any = None,
        *,
        tree: Any = None,
        rotary: Any = None,
        **params: Any,
    ) -> Any:
        """The new tokens appended, and attention of their queries; `tree` and `rotary` as for `attend`. A chunk may
        overwrite keys that it sees. Then the old ring and the chunk are read separately, and the results are merged."""
        self._check(att, q, tree, params)
        new = self._new(k, v)
        room = not self.ring.no_room(att, new, params)
        if counts is not None or not room:
            check_same_tokens(q, k, "bhsd")
        # the chunk overwrites no key that it sees: one call does
        if room:
            return self._store(k, v, new, counts)._attend(att, q, counts, tree, params, rotary)
        if att.options.tuning.invariant:
            self.ring.require_room(att, 1, params)  # parts of the keys would be summed up apart: halve the chunk
            outs = []
            for at in (slice(0, new // 2), slice(new // 2, new)):
                some = None if counts is None else (torch.as_tensor(counts) - at.start).clip(0, at.stop - at.start)
                outs.append(
                    self.attention(att, q[:, :, at], k[:, :, at], v[:, :, at], some, tree=tree, rotary=rotary, **params)
                )
            parts = zip(*outs, strict=True) if isinstance(outs[0], tuple) else [outs]
            whole = [torch.cat(x, 2) for x in parts]
            return tuple(whole) if isinstance(outs[0], tuple) else whole[0]
        # the ring has to hold what the first new query sees, and after a tree what each of its nodes sees
        self.ring.require_room(att, 0 if tree is None else new, params)
        number, _ = counts_of([new] * self.batch if counts is None else counts, self.batch, new, self.k.device)
        results = self._in_parts(att, q, k, v, number, dict(params), rotary)
        self._store(k, v, new, counts)
        return merged_results(*results, params)

    def _in_parts(
        self, att: Attention, q: Tensor, k: Tensor, v: Tensor, number: Tensor, params: dict[str, Any], rotary: Any
    ) -> tuple[Any, Any]:
        """out and lse, or sums, of attention to what the ring holds and to the new tokens as it will hold them."""
        if params.get("return_max"):
            raise ParameterError("a chunk longer than the ring has room for is read in two parts; there is no max")
        params = keywords_of_part(att, params)
        start = self.lengths.clone()
        tables = self.ring.tables(start, start)
        q, arrays, at = self._turned(q, tables, rotary)
        before = positions.placed(att, self.ring.before())
        old = self._read(before, q, {**tables, positions.NEW: number}, params, arrays=arrays)
        if att.options.sinks is not None or params.get("sinks") is not None:  # they count once
            params["sinks"] = torch.full((q.shape[1],), -torch.inf, device=q.device)
        scales: dict[str, Any] = {}
        if self.k_scale is not None:
            (k, scales["k_scale"]), (v, scales["v_scale"]) = (quantized(x, self.dtype) for x in (k, v))
        else:
            k, v = k.to(self.dtype), v.to(self.dtype)
        if at is not None:
            k, v = (dequantized(x, scales.pop(f"{n}_scale", None), q.dtype) for n, x in (("k", k), ("v", v)))
            k = turned(rotary, k, at).to(q.dtype)
        chunk = positions.placed(att, self.ring.inside(positions.CHUNK, chunk=True))
        tables[positions.END] = start + number
        known = {n: x for n, x in tables.items() if n in chunk.program.names}
        parts = old, chunk(q, k, v, **scales, **known, **params)
        if params["return_sums"]:
            return merge_weighted(chunk, parts, {**tables, **params}, "bhsd", self._sizes(q))
        return merge(*parts)

    def keep(self, path: Any, drafted: Any, counts: Any = None) -> Self:
        """Keep the drafts on `path`, as `KVCache.keep` does; `ParameterError` where that takes back more tokens than
        `drafts`."""
        if not self.ring.drafts:
            self.ring.refuse_shorter()
        return super().keep(path, drafted, counts)

    def truncate(self, lengths: Any) -> Self:
        """Keep the first `lengths` tokens of every sequence, 0 or at most `drafts` fewer than it has had: the ring has
        overwritten older ones."""
        host_lengths = numbers("lengths", lengths, self.batch)
        self._shorten(torch.minimum(self.lengths, on(self.k.device, lengths, host_lengths)), host_lengths)
        return super().truncate(lengths)

    def extra_repr(self) -> str:
        """Sizes and dtype, as `print(module)` shows them."""
        ring = self.ring
        more = f"sinks={ring.sinks}" * bool(ring.sinks), f"drafts={ring.drafts}" * bool(ring.drafts)
        return ", ".join([super().extra_repr(), *filter(None, more), *["absolute=False"][ring.absolute :]])

    # -- how ------------------------------------------------------------------------------------------------

    def _check(self, att: Attention, q: Tensor, tree: Any, params: dict[str, Any]) -> None:
        self.ring.check_tree(tree)
        super()._check(att, q, tree, params)
        self.ring.check_tree(tree, q.shape[2])

    def _attend(
        self, att: Attention, q: Tensor, counts: Any, tree: Any, params: dict[str, Any], rotary: Any = None
    ) -> Any:
        if att.options.tuning.invariant:
            self.ring.check_order(att, tree, rotary)
            return self._in_order(att, q, counts, params)
        places, tables = self._places_of(q, counts, tree)
        q, arrays, _ = self._turned(q, tables, rotary)
        return self._read(positions.placed(att, places), q, tables, params, arrays=arrays)

    def _in_order(self, att: Attention, q: Tensor, counts: Any, params: dict[str, Any]) -> Any:
        """Attention to the keys in the order of their positions: the memory of the ring as pages, the page with the
        newest and the oldest tokens twice."""
        slots, heads, new = self.ring.slots, self.kv_heads, q.shape[2]
        number = new if counts is None else counts_of(counts, self.batch, new, q.device)[0]
        start, end = self.lengths - number, self.lengths.clone()
        first = (end - slots).clamp_min(0) // ALIGNED * ALIGNED
        page = positions.RING_PAGE
        at = torch.arange(0, slots + ALIGNED, page, dtype=torch.int32, device=q.device)
        row = torch.arange(self.batch, dtype=torch.int32, device=q.device)[:, None] * (heads * slots // page)
        pages = row + (first[:, None] + at) % slots // page
        have = (self.batch - 1) * heads * slots // page + slots // page

        def pool(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            wide = x.shape[3:].numel()
            size, stride = (have, heads, page, *x.shape[3:]), (page * wide, slots * wide, wide, *[1] * (x.ndim - 3))
            return x.as_strided(size, stride)

        arrays = {n: pool(self._buffers[n]) for n in ("k", "v", "k_scale", "v_scale")} | {"pages": pages}
        tables = {positions.START: start, positions.END: end, positions.FROM: first}
        places = self.ring.in_order(counts is not None)
        return self._read(positions.placed(att, places), q, tables, params, arrays=arrays)

    def _places_of(self, q: Tensor, counts: Any, tree: Any) -> tuple[PositionMap, dict[str, Tensor]]:
        places, tables = super()._places_of(q, counts, tree)
        tables |= self.ring.tables(tables[positions.START], tables[positions.END])
        return places if tree is None else self.ring.inside(places), tables

    def _turned(self, q: Tensor, tables: dict[str, Tensor], rotary: Any) -> tuple[Tensor, Any, Any]:
        """q and the arrays of the ring, turned where there is a `rotary`, and the positions of the queries."""
        if rotary is None:
            return q, None, None
        nodes, slots = (torch.arange(n, device=q.device) for n in (q.shape[2], self.ring.slots))
        at, keys = self.ring.counted(tables, nodes, slots, torch.take_along_dim)
        k, v = (dequantized(x, scale, q.dtype) for x, scale in ((self.k, self.k_scale), (self.v, self.v_scale)))
        arrays = {"k": turned(rotary, k, keys).to(q.dtype), "v": v}
        return turned(rotary, q, at).to(q.dtype), {**arrays, **dict.fromkeys(("k_scale", "v_scale", "pages"))}, at

    def _shorten(self, lengths: Tensor, host_lengths: Known) -> None:
        """Refuse sequences that shorten by too much. Where only a device knows it, `overflowed` is true."""
        peak = self.lengths if self.peak is None else torch.maximum(self.peak, self.lengths)
        far = (lengths > 0) & (peak - lengths > self.ring.drafts)
        have = self.known()
        if lengths.is_cpu:
            have, host_lengths = peak.tolist(), lengths.tolist()
        if have and host_lengths and any(0 < n < m - self.ring.drafts for n, m in zip(host_lengths, have, strict=True)):
            self.ring.refuse_shorter()
        self.overflowed |= far
        if self.peak is not None:
            self.peak.copy_(torch.where(lengths > 0, peak, 0))

    def _nodes_kept(self, path: Tensor, start: Tensor, number: Tensor, begin: Known, host_counts: Known) -> Tensor:
        known = begin and host_counts and [first + n for first, n in zip(begin, host_counts, strict=True)]
        self._shorten(start + number, known)
        return number

    def _sinks_free(self) -> Tensor | None:
        return self.ring.sinks - self.lengths if self.ring.sinks else None

    def _reserve(self, known: list[int], more: list[int]) -> None:
        return  # there is always room

    def _clipped(self, counts: Tensor) -> Tensor:
        return counts  # a ring drops old tokens, never new ones

    def _where(self, token: Tensor, real: WrittenTokens | None = None) -> Tensor:
        return super()._where(self.ring.slot(token), real)

    def _common_place(self, known: list[int], new: int) -> int | None:
        first = super()._common_place(known, new)
        # a slice may not reach around the end
        return None if first is None or (slot := self.ring.slot(first)) + new > self.ring.slots else slot

    def _places(self, padded: bool) -> PositionMap:
        return self.ring.places((positions.PADDED if padded else positions.APPENDED).seen)

    def _sizes(self, q: Tensor) -> Any:
        return None  # masks that read lengths are refused


def dequantized(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Stored keys or values as numbers of `dtype`."""
    return x.to(dtype) if scale is None else (x.float() * scale[..., None]).to(dtype)
