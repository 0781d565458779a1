"""Caches whose places are not in the order of positions: pages of a pool, and a ring for sliding windows.

Pages are shared by all sequences of a batch, and found by a table. A ring holds the last tokens of every sequence, at
position modulo size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.runtime.attention.attention import Attention
from frisket.runtime.attention.merge import merge

from . import positions
from .pool import LOW, OWN, PEAK, Copy, PagedRows, PagePool, empty_rows, refuse_shared, seated
from .positions import PositionMap, check_same_tokens, refuse_tree
from .torch_plain import CacheShape, Known, TorchCache, WrittenTokens, counts_of, numbers, quantized


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

    One `PagePool` on the host decides for the caches of all layers, and buffers hold its decisions: `pages` int32
    [batch, width], the pages of every row in order, `room` int32 [batch], the tokens that fit these pages, `lengths`
    int32 [batch]. `k` [pages, kv_heads, page, head_dim], `v` likewise with v_dim, scales likewise without dim. `width`
    is how many pages a sequence may have: `Q_LEN` and `KV_LEN` of masks are width * page. Other pages and shared pages
    change no shape and do not recompile.
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
        return self

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
            self._rows[LOW] = 0  # nobody knows how short they became
            return self
        was, now = (np.asarray(x, np.int32) for x in (before, known))
        low, peak, first_owned = self._rows[LOW], self._rows[PEAK], self._rows[OWN]
        low[:], peak[:] = np.where(now < was, (np.minimum(low, now), np.maximum(peak, was)), (low, peak))
        self._rooms = np.where(now < first_owned, np.minimum(self._rooms or 0, now), self._rooms or 0).tolist()
        return self

    def _nodes_kept(self, path: Tensor, start: Tensor, number: Tensor, begin: Known, host_counts: Known) -> Tensor:
        low, peak = self._rows[LOW], self._rows[PEAK]
        if begin is None or host_counts is None:
            low[:] = peak[:] = 0  # nobody knows where they begin
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
    """

    def __init__(self, shape: CacheShape) -> None:
        super().__init__(shape)
        self.window = self.slots = shape.tokens

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
    ) -> Self:
        """An empty ring of `window` tokens a sequence; `dtype` as for `KVCache`."""
        return cls(CacheShape(batch, batch, window, kv_heads, head_dim, v_dim, dtype, device))

    def attend(self, att: Attention, q: Tensor, counts: Any = None, *, tree: Any = None, **params: Any) -> Any:
        """Attend like `KVCache.attend`, without trees; `ShapeError` where the last tokens may have overwritten keys
        that they see; `attention` reads these keys first."""
        self._check(att, q, tree, params)
        positions.require_room(att, self.window, q.shape[2], params)
        return self._attend(att, q, counts, None, params)

    def attention(
        self, att: Attention, q: Tensor, k: Tensor, v: Tensor, counts: Any = None, *, tree: Any = None, **params: Any
    ) -> Any:
        """The new tokens appended, and attention of their queries. A chunk may overwrite keys that it sees. Then the
        old ring and the chunk are read separately, and the results are merged."""
        self._check(att, q, tree, params)
        new = self._new(k, v)
        room = not positions.no_room(att, self.window, new, params)
        if counts is not None or not room:
            check_same_tokens(q, k, "bhsd")
        # the chunk overwrites no key that it sees: one call does
        if room:
            return self._store(k, v, new, counts)._attend(att, q, counts, None, params)
        positions.require_room(att, self.window, 0, params)  # the ring has to hold what the first new query sees
        number, _ = counts_of([new] * self.batch if counts is None else counts, self.batch, new, self.k.device)
        out, lse = merge(*self._parts(att, q, k, v, number, dict(params)))
        self._store(k, v, new, counts)
        return (out, lse) if params.get("return_lse") else out

    def _parts(
        self, att: Attention, q: Tensor, k: Tensor, v: Tensor, number: Tensor, params: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Attention to what the ring holds, and to the new tokens as it will hold them."""
        if params.get("return_max"):
            raise ParameterError("a chunk longer than the ring has room for is read in two parts; there is no max")
        params["return_lse"] = True
        start = self.lengths.clone()
        tables = {positions.START: start, positions.END: start, positions.NEW: number}
        old = self._read(positions.placed(att, positions.ring_before(self.window)), q, tables, params)
        if att.options.sinks is not None or params.get("sinks") is not None:  # they count once
            params["sinks"] = torch.full((q.shape[1],), -torch.inf, device=q.device)
        scales: dict[str, Any] = {}
        if self.k_scale is not None:
            (k, scales["k_scale"]), (v, scales["v_scale"]) = (quantized(x, self.dtype) for x in (k, v))
        else:
            k, v = k.to(self.dtype), v.to(self.dtype)
        params |= {**scales, positions.START: start, positions.END: start + number}
        return old, positions.placed(att, positions.CHUNK)(q, k, v, **params)

    def keep(self, path: Any, drafted: Any, counts: Any = None) -> Self:
        """Refused with a `ParameterError`: drafts overwrite the oldest tokens of a ring."""
        raise ParameterError("a ring has overwritten its oldest tokens with the drafts; take a KVCache")

    def truncate(self, lengths: Any) -> Self:
        """Empty the sequences with 0 in `lengths`; others stay, as a ring has overwritten their old tokens."""
        host_lengths = numbers("lengths", lengths, self.batch)
        known = self.known()
        # where only a device knows them, nothing shows that all are 0
        if not (host_lengths and known) or any(0 < n < have for n, have in zip(host_lengths, known, strict=True)):
            raise ParameterError("a ring has overwritten its oldest tokens, and can only be emptied: lengths are 0")
        return super().truncate(lengths)

    # -- how ------------------------------------------------------------------------------------------------

    def _check(self, att: Attention, q: Tensor, tree: Any, params: dict[str, Any]) -> None:
        refuse_tree(tree)
        super()._check(att, q, None, params)

    def _reserve(self, known: list[int], more: list[int]) -> None:
        return  # there is always room

    def _clipped(self, counts: Tensor) -> Tensor:
        return counts  # a ring drops old tokens, never new ones

    def _where(self, token: Tensor, real: WrittenTokens | None = None) -> Tensor:
        return super()._where(token % self.window, real)

    def _common_place(self, known: list[int], new: int) -> int | None:
        first = super()._common_place(known, new)
        # a slice may not reach around the end
        return None if first is None or first % self.window + new > self.window else first % self.window

    def _places(self, padded: bool) -> PositionMap:
        return positions.ring(self.window, padded)

    def _sizes(self, q: Tensor) -> Any:
        return None  # masks that read lengths are refused
