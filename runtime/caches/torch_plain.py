"""The base of torch's caches, and the plain cache: every sequence has a row of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from frisket.dsl.errors import CapacityError, ShapeError
from frisket.runtime.attention.attention import Attention
from frisket.runtime.backends.cpp.decode import DecodeCall, step_of
from frisket.runtime.calls.arrays import in_graph
from frisket.runtime.calls.stored_kv import WORDS, live_of
from frisket.runtime.machine.parameters import learns
from frisket.runtime.plans.call import results

from . import torch_store as store
from .checks import ASKED, check_beside, check_path, check_queries
from .masks import ANCESTORS, APPENDED, DEPTH, END, PADDED, START, TREE, TREES, Places, placed
from .torch_store import NARROW, PLAIN, Taken, ancestors, check_new, counts_of, numbers, on, stored_dtype, taken
from .torch_store import append as native_append


class TorchCache(nn.Module):
    """Lengths, arrays of tokens, and how they are written and asked. Buffers: `k` [rows, kv_heads, tokens, head_dim],
    `v` likewise with v_dim, with 8 bits `k_scale` and `v_scale` float32 [rows, kv_heads, tokens], and `lengths` int32
    [batch]."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    pages: Tensor | None
    lengths: Tensor
    overflowed: Tensor
    first: Tensor
    capacity: int  # tokens of a sequence, at most
    room: Any  # tokens of a sequence that there is a place for, one number or int32 [batch]
    slots: int | None  # of a ring: how many tokens are kept

    def __init__(
        self, batch: int, rows: int, tokens: int, kv_heads: int, head_dim: int, v_dim: int | None,
        dtype: torch.dtype | str, device: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        dtype = stored_dtype(dtype)
        v_dim = head_dim if v_dim is None else v_dim
        if min(batch, rows, tokens, kv_heads, head_dim, v_dim) < 1:
            raise ShapeError(
                f"a cache for {batch} sequences with {tokens} tokens, {kv_heads} heads of {head_dim} and {v_dim} "
                "entries; each of them is at least 1"
            )
        self.batch, self.kv_heads, self.head_dim, self.v_dim = batch, kv_heads, head_dim, v_dim
        shape = rows, kv_heads, tokens
        self.register_buffer("k", store.zeros(*shape, head_dim, dtype=dtype, device=device))
        self.register_buffer("v", store.zeros(*shape, v_dim, dtype=dtype, device=device))
        for name in ("k_scale", "v_scale"):
            self.register_buffer(name, self.k.new_zeros(shape, dtype=torch.float32) if dtype in NARROW else None)
        self.register_buffer("pages", None)
        self.register_buffer("lengths", torch.zeros(batch, dtype=torch.int32, device=device))
        self.register_buffer("overflowed", torch.zeros(batch, dtype=torch.bool, device=device))
        first = torch.arange(rows * kv_heads, device=device).view(rows, kv_heads, 1) * tokens
        self.register_buffer("first", first, persistent=False)  # where the tokens of a head begin
        self.capacity = self.room = tokens
        self.slots = None
        self._host: list[int] | None = [0] * batch
        self._rooms: list[int] | None = [tokens] * batch
        self._steps: dict[Any, DecodeCall] = {}  # key of a step -> its `DecodeCall`

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of stored keys and values."""
        return self.k.dtype

    def known(self) -> list[int] | None:
        """Lengths as numbers of the host; None where only a device knows them, which nobody waits for."""
        found: list[int] | None = x.tolist() if (x := self.lengths).is_cpu else self._host
        return found

    # -- what the kinds of caches differ in ---------------------------------------------------------------------

    def _reserve(self, known: list[int], more: list[int]) -> None:
        """Raise `CapacityError` where so many more tokens find no room."""
        for b, (have, new, room) in enumerate(zip(known, more, self._rooms or known, strict=True)):
            if have + new > room:
                raise CapacityError(
                    f"sequence {b} has {have} tokens and {new} new ones, the cache has room for {room}\n"
                    f"  {self._larger}; nothing has changed"
                )

    _larger = "make a cache of a larger capacity"

    def _clipped(self, counts: Tensor) -> Tensor:
        """The part of `counts` that finds room, computed by the device."""
        real = torch.minimum(counts, self.room - self.lengths)
        self.overflowed |= real < counts
        return real

    def _kept(
        self, path: Tensor, start: Tensor, number: Tensor, begin: list[int] | None, told: list[int] | None
    ) -> Tensor:
        """How many nodes of a path are written from `start` on, where the tree begins; both as the host knows them."""
        return number

    def _where(self, token: Tensor, real: Taken | None = None) -> Tensor:
        """Places int64 [batch, kv_heads, n] of tokens [batch, n] among all vectors."""
        return (self.first if real is None else self.first[real.row[:, 0]]) + token.unsqueeze(1)

    def _beside(self, known: list[int], new: int) -> int | None:
        """The place of new tokens in every row, where that is one place."""
        return known[0] if known.count(known[0]) == self.batch else None

    def _places(self, padded: bool) -> Places:
        return PADDED if padded else APPENDED

    # -- what users call ------------------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor, counts: Any = None) -> Self:
        """Store new tokens behind those that are there, in place.

        k [batch, kv_heads, new, head_dim] and v [batch, kv_heads, new, v_dim], in any floating dtype; with 8 bits each
        vector gets a float32 scale, its largest magnitude over the dtype's largest number. `counts` [batch] says how
        many of the new tokens of each sequence are real, those in front; None: all.

        `CapacityError` where there is no room, and nothing is stored. Where `counts` live on a GPU nobody waits for
        them: what does not fit is dropped, and `overflowed` [batch] is true there from then on."""
        return self._store(k, v, self._new(k, v), counts)

    def _new(self, k: Tensor, v: Tensor) -> int:
        """How many tokens a sequence k and v bring. Raises where they are none for this cache."""
        return check_new(k, v, self.batch, self.kv_heads, self.head_dim, self.v_dim, self.k.device)

    def _store(self, k: Tensor, v: Tensor, new: int, counts: Any) -> Self:
        """`append`, of tokens that fit."""
        known = self.known()
        more = self._grown(known, new, counts)
        number = None if isinstance(more, int) else more
        if not native_append(self._buffers, k, v, number, self.slots is not None):
            self._append(known, new, number, k, v)
        self.lengths.add_(more)
        return self

    def attend(self, att: Attention, q: Tensor, counts: Any = None, *, tree: Any = None, **params: Any) -> Any:
        """Attention of the last tokens of every sequence: q [batch, heads, new, head_dim] are the queries of the
        `counts` last ones (None: of as many as q has); out likewise with v_dim, 0 at padding. `params` as in a call of
        `att`, `return_lse=True` among them.

        With `tree` the last tokens are a tree of drafts: parents, int [new] or [batch, new], -1 for a root. A draft
        sees what is before the tree, its ancestors and itself, as far as the mask lets it, and its position is that of
        the first draft plus its depth."""
        self._check(att, q, tree, params)
        return self._attend(att, q, counts, tree, params)

    def attention(
        self, att: Attention, q: Tensor, k: Tensor, v: Tensor, counts: Any = None, *, tree: Any = None, **params: Any
    ) -> Any:
        """`append`, then `attend`, of queries that were looked at before: where they do not fit nothing is stored."""
        self._check(att, q, tree, params)
        if counts is not None:
            check_beside(q, k, "bhsd")
        return self.append(k, v, counts)._attend(att, q, counts, tree, params)

    def keep(self, path: Any, drafted: Any, counts: Any = None) -> Self:
        """Keep some of the last `drafted` tokens (a number, or int [batch]) of every sequence: those on `path` int
        [batch, m], nodes of the tree in its order, behind one another; `counts` int [batch] says how many entries of
        the path are meant."""
        path = torch.as_tensor(path, device=self.k.device)
        if path.ndim != 2 or path.shape[0] != self.batch or path.is_floating_point():
            raise ShapeError(f"path is {path.dtype} {tuple(path.shape)}; it is nodes, integers [{self.batch}, m]")
        m = path.shape[1]
        number, told = counts_of([m] * self.batch if counts is None else counts, self.batch, m, path.device)
        drafts, known = numbers("drafted", drafted, self.batch), self.known()
        if drafts and min(drafts) < 0:
            raise ShapeError(f"drafted are {drafts}; each is 0 or more")
        nodes = path.numpy() if path.is_cpu else None
        check_path(nodes, *(None if x is None else np.asarray(x) for x in (drafts, told, known)))
        start = self.lengths - on(path.device, drafted, drafts)
        begin = known and drafts and [have - n for have, n in zip(known, drafts, strict=True)]
        real = taken(self._kept(path, start, number, begin, told), m)
        source, target = self._where(start[:, None] + path), self._standing(start, real)
        for x in (self.k, self.v, self.k_scale, self.v_scale):
            if x is not None:
                store.write(x, target.reshape(-1), store.read(x, source), real)
        self._tell(known, told and drafts and [n - d for n, d in zip(told, drafts, strict=True)])
        self.lengths.copy_(start + number)
        return self

    def truncate(self, lengths: Any) -> Self:
        """Keep the first `lengths` [batch] (or one number) tokens of every sequence, or all it has; 0 empties a row."""
        told, known = numbers("lengths", lengths, self.batch), self.known()
        if told is not None and min(told) < 0:
            raise ShapeError(f"lengths are {told}; each is 0 or more")
        kept = torch.minimum(self.lengths, on(self.k.device, lengths, told))
        self._tell(known, told and known and [min(0, n - have) for n, have in zip(told, known, strict=True)])
        self.lengths.copy_(kept)
        self.overflowed &= self.lengths > 0
        return self

    # -- how ------------------------------------------------------------------------------------------------

    def _grown(self, known: list[int] | None, new: int, counts: Any) -> int | Tensor:
        """How many tokens there are more, int32 [batch], or a number where all are kept; room is seen to."""
        number: Tensor | None = None
        told: list[int] | None = [new] * self.batch
        if counts is not None:
            number, told = counts_of(counts, self.batch, new, self.k.device)
        if known is None or told is None:
            number = self._clipped(torch.full_like(self.lengths, new) if number is None else number)
        else:
            self._reserve(known, told)
        self._tell(known, told)
        if number is None and self.slots is not None and new > self.slots:
            number = torch.full_like(self.lengths, new)
        return new if number is None else number

    def _append(self, known: list[int] | None, new: int, number: Tensor | None, k: Tensor, v: Tensor) -> None:
        """`append` in operations of torch."""
        first = None if number is not None or known is None else self._beside(known, new)
        if first is not None:
            self._write(lambda held, x: held.narrow(2, first, new).copy_(x), k, v)
            return
        real = None if number is None else taken(number, new, self.slots)
        at = (self._ragged(new) if real is None else self._standing(self.lengths, real)).reshape(-1)
        self._write(lambda held, x: store.write(held, at, x, real), k, v)

    def _standing(self, start: Tensor, real: Taken) -> Tensor:
        """The places of tokens behind `start`; where none is real, of any that there are."""
        token = start[real.row] + real.token
        return self._where(token if self.slots else token.clamp_max(self.capacity - 1), real)

    def _tell(self, known: list[int] | None, more: list[int] | None) -> None:
        if not self.lengths.is_cpu:
            self._host = known and more and [have + n for have, n in zip(known, more, strict=True)]

    def _ragged(self, new: int) -> Tensor:
        """The places of new tokens behind those of every sequence."""
        token = self.lengths.view(-1, 1)
        return self._where(token if new == 1 else token + torch.arange(new, device=token.device))

    def _write(self, put: Callable[[Tensor, Tensor], object], k: Tensor, v: Tensor) -> None:
        has: dict[str, Any] = self._buffers
        if has["k_scale"] is not None:
            if k.shape == v.shape:  # in one, which is half as many operations
                both, scales = store.divided(torch.stack((k, v)), self.dtype)
                (k, v), (k_scale, v_scale) = both.unbind(0), scales.unbind(0)
            else:
                (k, k_scale), (v, v_scale) = (store.divided(x, self.dtype) for x in (k, v))
            put(has["k_scale"], k_scale)
            put(has["v_scale"], v_scale)
        put(has["k"], k)
        put(has["v"], v)

    def _check(self, att: Attention, q: Tensor, tree: Any, params: dict[str, Any]) -> None:
        """Raise where such queries cannot be asked."""
        held = self.k
        store.check_on(held.device, q=q)
        check_queries(att, q, held, "bhsd", self.batch, params, tree)

    def _attend(self, att: Attention, q: Tensor, counts: Any, tree: Any, params: dict[str, Any]) -> Any:
        """`attend`, of queries that fit."""
        number = q.shape[2] if counts is None else counts_of(counts, self.batch, q.shape[2], q.device)[0]
        lengths = self.lengths
        tables = {START: lengths - number, END: lengths}
        places = self._places(counts is not None)
        if tree is not None:
            tables[ANCESTORS], tables[DEPTH] = ancestors(tree, q.device)
            places = TREE if tables[DEPTH].ndim == 1 else TREES
        return self._read(placed(att, places), q, tables, params)

    def _read(self, att: Attention, q: Tensor, tables: dict[str, Tensor], params: dict[str, Any]) -> Any:
        """Attention of queries to stored keys, by an attention of places."""
        has: dict[str, Any] = self._buffers
        k, v, sizes = has["k"], has["v"], self._sizes(q)
        tables = {n: x for n, x in tables.items() if n in att.program.names}  # a mask need not ask for all
        live = live_of(has["k_scale"], has["v_scale"], has["pages"])
        given = {n: x for n, x in params.items() if n not in ASKED} if params else params
        lse, top, sinks = map(params.get, ASKED)
        held = att.options.sinks if sinks is None else sinks
        call = held is not None and (in_graph(q, held) or (torch.is_grad_enabled() and learns(held)))
        step = None if call else step_of(self._steps, att, q, k, v, sizes, live, tables, given)
        if step is None:
            more: dict[str, Any] = {**{WORDS[n]: x for n, x in live.items()}, **tables, **params}
            return att(q, k, v, sizes=sizes, **more)
        return results(step(q, k, v, live, tables, sinks, bool(lse), bool(top)), bool(lse), bool(top))

    def _sizes(self, q: Tensor) -> Any:
        """The sizes of the whole problem: equal for a prompt, a chunk and a step."""
        return self.batch, q.shape[1], self.capacity, self.capacity

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        held = state.get(f"{prefix}k", self.k).dtype
        if held != self.dtype and (held in NARROW or self.dtype in NARROW):
            more[-1].append(f"{prefix}k is {held}, and this cache holds {self.dtype}; make one of the state's dtype")
            return
        kinds = {n: x.dtype for n, x in self.named_buffers(recurse=False)}
        super()._load_from_state_dict(state, prefix, *more)
        for n, kind in kinds.items():  # assigned, they are as the state has them
            setattr(self, n, getattr(self, n).to(getattr(self, n).dtype if n in "kv" else kind).contiguous())
        self._host = self.lengths.tolist()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def kept(x: Tensor) -> Tensor:  # only Floats of a cache without scales change dtype; all stay contiguous
            moved = fn(x)
            if x.is_floating_point() and self.k_scale is None:
                return moved.to(stored_dtype(moved.dtype, PLAIN)).contiguous()
            return (moved if moved.dtype == x.dtype else x.to(moved.device)).contiguous()

        self._host = self.known()  # to a device that nobody waits for
        return super()._apply(kept, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_steps": {}}

    def extra_repr(self) -> str:
        """Sizes and dtype, as `print(module)` shows them."""
        bits = str(self.dtype).removeprefix("torch.")
        return f"{self.batch} x {self.capacity}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, {bits}"


class KVCache(TorchCache):
    """Keys and values of a batch of sequences of different lengths, in one buffer of a fixed capacity.

    >>> import torch, frisket as fk
    >>> cache = KVCache.create(batch=2, capacity=1024, kv_heads=2, head_dim=64, dtype=torch.int8)
    >>> att = fk.compile("causal & window(256)")
    >>> q, k, v = (torch.randn(2, heads, 40, 64) for heads in (4, 2, 2))
    >>> out = cache.attention(att, q, k, v)  # the prompt
    >>> q, k, v = (x[:, :, -1:] for x in (q, k, v))
    >>> out = cache.attention(att, q, k, v)  # and every token after it, under the same mask
    >>> q, k, v = (torch.randn(2, heads, 3, 64) for heads in (4, 2, 2))
    >>> cache.append(k, v).attend(att, q, tree=[-1, -1, 0]).shape  # drafts: two guesses, and one after the first
    torch.Size([2, 4, 3, 64])
    >>> cache.keep([[0, 2], [0, 2]], drafted=3).known()  # the path that was accepted
    [43, 43]
    >>> cache.truncate([40, 0]).known()
    [40, 0]
    >>> cache.extra_repr()
    '2 x 1024, kv_heads=2, head_dim=64, int8'

    Growing changes no shape, does not recompile and moves nothing. Masks and score mods read positions in the sequence,
    from 0; `Q_LEN` and `KV_LEN` are the capacity.
    """

    def __init__(
        self, batch: int, capacity: int, kv_heads: int, head_dim: int, v_dim: int | None = None,
        dtype: torch.dtype | str = torch.float32, device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(batch, batch, capacity, kv_heads, head_dim, v_dim, dtype, device)

    @classmethod
    def create(
        cls, batch: int, capacity: int, kv_heads: int, head_dim: int, v_dim: int | None = None,
        dtype: torch.dtype | str = torch.float32, device: Any = None,
    ) -> Self:  # fmt: skip
        """An empty cache; `dtype` a float, or int8, float8_e4m3fn or float8_e5m2 for 8 bits with scales, by its name or
        torch's own."""
        return cls(batch, capacity, kv_heads, head_dim, v_dim, dtype, device)
