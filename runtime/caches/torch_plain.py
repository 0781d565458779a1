"""The base of torch's caches, and the plain cache: every sequence has a separate row.

First the work that caches of torch do with arrays: 8 bits and their scales, and new tokens written to their places.
The new tokens of a step on the CPU are written by one function in C++.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from frisket.dsl.errors import BackwardError, CapacityError, ParameterError, ShapeError
from frisket.grammar.memo import memo
from frisket.lowering.dtypes import FLOATS
from frisket.runtime.attention.attention import Attention
from frisket.runtime.attention.statistics import Statistics
from frisket.runtime.backends.cpp.torch import LARGE, huge
from frisket.runtime.calls.arrays import WORDS, in_graph, kv_inputs_of
from frisket.runtime.machine import cpp_build as native_build
from frisket.runtime.machine.parameters import learns
from frisket.runtime.plans.device import results
from frisket.runtime.torch.autograd import has_tangents
from frisket.runtime.torch.decode import DecodeCall, step_of

from . import positions
from .positions import PositionMap, check_path, check_queries, check_same_tokens, of_tree, placed
from .torch_cascade import PrefixPart, plan_of

NARROW = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # and their largest numbers
Known = list[int] | None  # a number for each sequence; None where only a device knows them
LEAST = torch.finfo(torch.float32).tiny
PLAIN = tuple(getattr(torch, name) for name in FLOATS)


def stored_dtype(dtype: torch.dtype | str, known: tuple[torch.dtype, ...] = (*PLAIN, *NARROW)) -> torch.dtype:
    """`dtype`, or the one of that name, of those in `known`."""
    named = {str(d).removeprefix("torch."): d for d in known}
    name = str(dtype).removeprefix("torch.")
    if name not in named:
        raise ParameterError(f"dtype is {dtype}; caches hold {', '.join(named)}")
    return named[name]


def zeros(*size: int, dtype: torch.dtype, device: Any) -> Tensor:
    """New zeros; on a CPU in huge pages, since a step that reads pages of a pool looks many addresses up. With pages
    of 16 to 128 tokens it took 0.6 to 0.8 of the time in float32 and bfloat16, and as long as before in int8."""
    buffer = torch.empty(size, dtype=dtype, device=device)
    # fake tensors and other subclasses have no memory to advise
    if type(buffer) is Tensor and buffer.is_cpu and buffer.nbytes >= LARGE and not torch.compiler.is_compiling():
        huge(buffer)
    return buffer.zero_()


def quantized(x: Tensor, dtype: torch.dtype | str) -> tuple[Tensor, Tensor]:
    """(stored, scale) with x = stored * scale[..., None], rounded: a float32 scale for every vector, its largest
    magnitude over the largest number of `dtype`.

    >>> values, scale = quantized(torch.tensor([[1.0, -2.54]]), torch.int8)
    >>> values.tolist(), round(scale.item(), 6)
    ([[50, -127]], 0.02)
    """
    dtype = stored_dtype(dtype, tuple(NARROW))
    stored, scale = scaled(x, dtype)
    return stored.to(dtype), scale


def scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens divided by their scales before they are stored, in float32."""
    real = x if x.dtype == torch.float32 else x.float()
    scale = real.abs().amax(-1, keepdim=True).div_(_largest(dtype, x.device))
    stored = real / scale.clamp_min(LEAST)  # zeros have the scale 0
    return stored.round_() if dtype == torch.int8 else stored, scale.squeeze(-1)  # a cast to an integer truncates


@memo(64)
def _largest(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(NARROW[dtype], device=device)  # a number of Python's takes longer


class WrittenTokens(NamedTuple):
    """The new tokens that are written, where some are not. The others stand for one that is, so that writing all of
    them writes the real ones and nothing else, whatever comes last."""

    row: Tensor  # int64 [batch, 1] and [batch, new]: the token that is written
    token: Tensor
    some: Tensor  # whether there is any

    def of(self, x: Tensor) -> Tensor:
        """`x` [batch, heads, new, ...], those tokens."""
        return x.transpose(1, 2)[self.row, self.token].transpose(1, 2)


def written_tokens(counts: Tensor, new: int, most: int | None = None, first: Tensor | None = None) -> WrittenTokens:
    """The first `counts` [batch] of `new` tokens, of them the `first` [batch] and the last `most`."""
    row = torch.where(counts > 0, torch.arange(len(counts), device=counts.device), counts.argmax())[:, None]
    real = counts[row].long()
    token = torch.minimum(torch.arange(new, device=counts.device), (real - 1).clamp_min(0))
    if most is not None and new > most:
        # a slot gets one token: of two, index_copy_ writes either
        last = torch.maximum(token, (real - most).clamp_min(0))
        token = last if first is None else torch.where(token < first[row], token, last)
    return WrittenTokens(row, token, (counts > 0).any())


def write(store: Tensor, at: Tensor, new: Tensor, real: WrittenTokens | None) -> None:
    """`new` [batch, heads, n, ...] into `store`, at the flat places `at` int64 [batch * heads * n] of its vectors."""
    width = new.shape[3:]
    flat = store.view(-1, *width)
    new = new.to(store.dtype)
    if store.dtype.itemsize == 1:  # what torch copies by index are no Floats of 8 bits
        flat, new = flat.view(torch.uint8), new.view(torch.uint8)
    if real is None:
        flat.index_copy_(0, at, new.reshape(-1, *width))
    else:
        # without any real token the places get what they hold
        flat.index_copy_(0, at, torch.where(real.some, real.of(new).reshape(-1, *width), flat[at]))


def numbers(name: str, x: Any, batch: int) -> Known:
    """One integer for each sequence, from one or [batch] of them; None where a device has them."""
    on_device = isinstance(x, Tensor) and not x.is_cpu
    array = x if on_device else np.asarray(x)
    whole = x.dtype in (torch.int32, torch.int64) if on_device else array.dtype.kind in "iu"
    if array.shape not in ((), (batch,)) or not whole:
        raise ShapeError(f"{name} are {x}; they are integers [batch], one for each of {batch} sequences")
    return None if on_device else np.broadcast_to(array, (batch,)).tolist()


def on(device: torch.device, x: Any, values: Known) -> Tensor:
    """int32 [batch] on a device; nothing waits for it."""
    if values is None:
        assert isinstance(x, Tensor)
        return x.to(device, torch.int32)
    return torch.tensor(values, dtype=torch.int32, device="cpu").to(device, non_blocking=True)


def counts_of(counts: Any, batch: int, new: int, device: torch.device) -> tuple[Tensor, Known]:
    """How many of `new` tokens of each sequence are real: int32 [batch] on the device, and checked numbers if known."""
    host_counts = numbers("counts", counts, batch)
    if host_counts is not None and not 0 <= min(host_counts) <= max(host_counts) <= new:
        raise ShapeError(f"counts are {host_counts}, of {new} new tokens; each is from 0 to {new}")
    return on(device, counts, host_counts), host_counts


def read(store: Tensor, where: Tensor) -> Tensor:
    """The vectors of `store` at places `where` [batch, heads, n], copied."""
    flat = store.view(-1, *store.shape[3:])
    return flat.view(torch.uint8)[where].view(store.dtype) if store.dtype.itemsize == 1 else flat[where]


def check_on(device: torch.device, **tensors: Any) -> None:
    """Refuse what are no tensors on the device of a cache."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ShapeError(f"{name} is a {type(x).__name__}; give a torch tensor")
        if x.device != device:
            raise ShapeError(f"{name} is on {x.device}, the cache on {device}; move one of them")


CALL = struct.Struct("27q")  # int64 each, in the order that torch_native.cpp reads
FROM = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
TO = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
MAX_NATIVE_TOKENS = 64  # new tokens: for more, operations of torch take no longer and use all threads


def native_append(has: dict[str, Any], k: Tensor, v: Tensor, counts: Tensor | None, ring: int = 0) -> bool:
    """Whether new tokens are in the buffers `has` of a cache: k [batch, kv_heads, new, head_dim] and v, or the first
    `counts` int32 [batch] of them. They are behind those that are there, quantised where it has 8 bits. False, and
    nothing is written, where operations of torch have to do it. That is with another dtype, on a GPU, in a graph,
    without a compiler, many tokens, and where there is no place for them. `ring`: the last places of a row, which
    tokens share in turn."""
    keys, dtype = has["k"], k.dtype
    batch, heads, new, dim = k.shape
    plain = keys.dtype == dtype
    known = plain or (dtype in FROM and keys.dtype in TO)
    if new > MAX_NATIVE_TOKENS or not keys.is_cpu or v.dtype != dtype or not known:
        return False
    # a subclass may have no memory to write to
    if in_graph(k) or not type(k) is type(v) is type(keys) is Tensor or (run := _function()) is None:
        return False
    # a lazy negation is not in the bytes that C++ reads
    k, v = (x if x.stride(3) == 1 and not x.is_neg() else x.contiguous().resolve_neg() for x in (k, v))
    values, pages, lengths = has["v"], has["pages"], has["lengths"]
    narrow = [] if plain else [has["k_scale"], has["v_scale"]]
    written, numbers = [keys, values, *narrow], [lengths] if pages is None else [lengths, pages]
    kinds = (keys.dtype, [keys, values]), (torch.float32, narrow), (torch.int32, numbers)
    whole = all(x.dtype == kind and x.is_cpu and x.is_contiguous() for kind, have in kinds for x in have)
    if not whole or any(x.shape[:3] != keys.shape[:3] for x in written):
        return False  # the user has assigned other buffers
    k_scale, v_scale = map(_at, narrow) if narrow else (0, 0)
    sizes = batch, heads, new, keys.shape[0], keys.shape[2], ring, 0 if pages is None else pages.shape[1]
    tables = lengths.data_ptr(), _at(counts), _at(pages)
    types = FROM.get(dtype, 0), TO.get(keys.dtype, 0), dtype.itemsize
    key_words = k.data_ptr(), *k.stride()[:3], dim, keys.data_ptr(), k_scale
    value_words = v.data_ptr(), *v.stride()[:3], v.shape[3], values.data_ptr(), v_scale
    if not run(CALL.pack(*sizes, *tables, *types, *key_words, *value_words)):
        return False
    increment_version(written)  # who keeps a conversion of them sees it
    return True


def _at(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _function() -> Any:
    try:
        return _loaded()
    except native_build.BuildError as error:
        if not native_build.reason():  # else a warning was given, or no native code is expected
            native_build.fall_back(error)
        return None


@memo(1)
def _loaded() -> Any:
    """The function; an error is not remembered here, since that of a killed compiler passes."""
    if why := native_build.reason():
        raise native_build.BuildError(why)
    text = resources.files(__package__).joinpath("torch_native.cpp").read_text(encoding="utf-8")
    run = native_build.library(text).frisket_append
    run.restype, run.argtypes = ctypes.c_int64, [ctypes.c_char_p]
    return run


class CacheShape(NamedTuple):
    """The sizes of a cache: sequences, rows of tokens and heads, with the dtype and the device of its buffers."""

    batch: int
    rows: int  # of the buffers: one for each sequence, or the pages of a pool
    tokens: int  # of a row
    kv_heads: int
    head_dim: int
    v_dim: int | None = None  # None: head_dim
    dtype: torch.dtype | str = torch.float32
    device: Any = None


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
    slots: int | None  # of a ring: how many tokens are kept behind its first ones
    _token = "k"  # the token in place k

    def __init__(self, shape: CacheShape) -> None:
        super().__init__()
        batch, rows, tokens, kv_heads, head_dim, v_dim, dtype, device = shape
        dtype = stored_dtype(dtype)
        v_dim = head_dim if v_dim is None else v_dim
        if min(batch, rows, tokens, kv_heads, head_dim, v_dim) < 1:
            text = f"a cache for {batch} sequences with {tokens} tokens, {kv_heads} heads of {head_dim} and {v_dim} "
            raise ShapeError(f"{text}entries; each of them is at least 1")
        self.batch, self.kv_heads, self.head_dim, self.v_dim = batch, kv_heads, head_dim, v_dim
        vectors = rows, kv_heads, tokens
        self.register_buffer("k", zeros(*vectors, head_dim, dtype=dtype, device=device))
        self.register_buffer("v", zeros(*vectors, v_dim, dtype=dtype, device=device))
        for name in ("k_scale", "v_scale"):
            self.register_buffer(name, self.k.new_zeros(vectors, dtype=torch.float32) if dtype in NARROW else None)
        self.register_buffer("pages", None)
        self.register_buffer("lengths", torch.zeros(batch, dtype=torch.int32, device=device))
        self.register_buffer("overflowed", torch.zeros(batch, dtype=torch.bool, device=device))
        first = torch.arange(rows * kv_heads, device=device).view(rows, kv_heads, 1) * tokens
        self.register_buffer("first", first, persistent=False)  # where the tokens of a head begin
        self.capacity = self.room = tokens
        self.slots = None
        self._host: Known = [0] * batch
        self._rooms: Known = [tokens] * batch
        self._steps: dict[Any, DecodeCall] = {}  # key of a step -> its `DecodeCall`

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of stored keys and values."""
        return self.k.dtype

    def known(self) -> Known:
        """Lengths as numbers of the host; None where only a device knows them, which the host does not wait for."""
        # a buffer on a CPU is read without waiting
        return self.lengths.tolist() if self.lengths.is_cpu else self._host

    # -- what the kinds of caches differ in ---------------------------------------------------------------------

    def _reserve(self, known: list[int], more: list[int]) -> None:
        """Raise `CapacityError` where so many more tokens find no room."""
        for b, (have, new, room) in enumerate(zip(known, more, self._rooms or known, strict=True)):
            if have + new > room:
                text = f"sequence {b} has {have} tokens and {new} new ones, the cache has room for {room}\n"
                raise CapacityError(f"{text}  {self._larger}; nothing has changed")

    _larger = "make a cache of a larger capacity"

    def _clipped(self, counts: Tensor) -> Tensor:
        """The part of `counts` that finds room, computed by the device."""
        real = torch.minimum(counts, self.room - self.lengths)
        self.overflowed |= real < counts
        return real

    def _nodes_kept(self, path: Tensor, start: Tensor, number: Tensor, begin: Known, host_counts: Known) -> Tensor:
        """How many nodes of a path are written from `start` on, where the tree begins; both as the host knows them."""
        return number

    def _where(self, token: Tensor, real: WrittenTokens | None = None) -> Tensor:
        """Places int64 [batch, kv_heads, n] of tokens [batch, n] among all vectors."""
        return (self.first if real is None else self.first[real.row[:, 0]]) + token.unsqueeze(1)

    def _common_place(self, known: list[int], new: int) -> int | None:
        """The place of new tokens in every row, where that is one place."""
        return known[0] if known.count(known[0]) == self.batch else None  # `narrow` takes one place for all rows

    def _places(self, padded: bool) -> PositionMap:
        return positions.PADDED if padded else positions.APPENDED

    # -- what users call ------------------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor, counts: Any = None) -> Self:
        """Store new tokens behind those that are there, in place.

        k [batch, kv_heads, new, head_dim] and v [batch, kv_heads, new, v_dim], in any floating dtype. With 8 bits each
        vector gets a float32 scale, its largest magnitude over the dtype's largest number. `counts` [batch] says how
        many of the new tokens of each sequence are real, those in front; None: all.

        `CapacityError` where there is no room, and nothing is stored. Where `counts` live on a GPU the host does not
        wait for them: what does not fit is dropped, and `overflowed` [batch] is true there from then on."""
        return self._store(k, v, self._new(k, v), counts)

    def _new(self, k: Tensor, v: Tensor) -> int:
        """How many tokens a sequence k and v bring. Raises where they are none for this cache."""
        check_on(self.k.device, k=k, v=v)
        new = positions.check_new(k, v, "bhsd", self.batch, self.kv_heads, self.head_dim, self.v_dim)
        for name, x in (("k", k), ("v", v)):
            if x.requires_grad and torch.is_grad_enabled():
                raise BackwardError(f"{name} requires a gradient, and none flows through a cache: {name}.detach()")
            if has_tangents(x):
                raise BackwardError(f"{name} has a tangent, and none flows through a cache: {name}.detach()")
        return new

    def _store(self, k: Tensor, v: Tensor, new: int, counts: Any) -> Self:
        """`append`, of tokens that fit."""
        known = self.known()
        more = self._grown(known, new, counts)
        number = None if isinstance(more, int) else more
        if not native_append(self._buffers, k, v, number, self.slots or 0):
            self._append(known, new, number, k, v)
        self.lengths.add_(more)
        return self

    def attend(self, att: Attention, q: Tensor, counts: Any = None, *, tree: Any = None, **params: Any) -> Any:
        """Attention of the last tokens of every sequence: q [batch, heads, new, head_dim] are the queries of the
        `counts` last ones (None: of as many as q has). Out likewise with v_dim, 0 at padding. `params` as in a call of
        `att`, `return_lse=True` among them.

        With `tree` the last tokens are a tree of drafts: parents, int [new] or [batch, new], -1 for a root. A draft
        sees what is before the tree, its ancestors and itself, as far as the mask lets it. Its position is that of
        the first draft plus its depth."""
        self._check(att, q, tree, params)
        return self._attend(att, q, counts, tree, params)

    def attention(
        self, att: Attention, q: Tensor, k: Tensor, v: Tensor, counts: Any = None, *, tree: Any = None, **params: Any
    ) -> Any:
        """`append`, then `attend`, of queries that were looked at before: where they do not fit nothing is stored."""
        self._check(att, q, tree, params)
        if counts is not None:
            check_same_tokens(q, k, "bhsd")
        return self.append(k, v, counts)._attend(att, q, counts, tree, params)

    def statistics(
        self, att: Attention, q: Tensor, counts: Any = None, *, tree: Any = None, **params: Any
    ) -> Statistics:
        """Statistics of the weights of `attend`, which takes the same arguments.

        >>> import frisket as fk, torch
        >>> from frisket.caches.torch import KVCache
        >>> cache, x = KVCache.create(1, 8, 2, 16), torch.ones(1, 2, 3, 16)
        >>> _ = cache.append(x, x)
        >>> cache.statistics(fk.compile("causal"), x, columns=True).columns[0, 0].sum().round().item()
        3.0

        `columns=True`, `entropy=True`, `argmax=True`, `top=4`, `per=` and `lse=` are those of `Attention.statistics`.
        Columns and named keys count places of a row in the order of tokens, also where these are in pages, and slots of
        a ring. Padding has the results of a query that sees no key."""
        run, params = positions.statistics_run(params)
        self._check(att, q, tree, params)
        places, tables = self._places_of(q, counts, tree)
        return self._statistics(run, placed(att, places), q, tables, params)

    def keep(self, path: Any, drafted: Any, counts: Any = None) -> Self:
        """Keep some of the last `drafted` tokens (a number, or int [batch]) of every sequence. They are those on `path`
        int [batch, m], nodes of the tree in its order, behind one another; `counts` int [batch] says how many entries
        of the path are meant."""
        path = torch.as_tensor(path, device=self.k.device)
        if path.ndim != 2 or path.shape[0] != self.batch or path.is_floating_point():
            raise ShapeError(f"path is {path.dtype} {tuple(path.shape)}; it is nodes, integers [{self.batch}, m]")
        m = path.shape[1]
        number, host_counts = counts_of([m] * self.batch if counts is None else counts, self.batch, m, path.device)
        drafts, known = numbers("drafted", drafted, self.batch), self.known()
        if drafts and min(drafts) < 0:
            raise ShapeError(f"drafted are {drafts}; each is 0 or more")
        nodes = path.numpy() if path.is_cpu else None
        check_path(nodes, *(None if x is None else np.asarray(x) for x in (drafts, host_counts, known)))
        start = self.lengths - on(path.device, drafted, drafts)
        begin = known and drafts and [have - n for have, n in zip(known, drafts, strict=True)]
        real = written_tokens(self._nodes_kept(path, start, number, begin, host_counts), m)
        source, target = self._where(start[:, None] + path), self._standing(start, real)
        for x in (self.k, self.v, self.k_scale, self.v_scale):
            if x is not None:
                write(x, target.reshape(-1), read(x, source), real)
        self._tell(known, host_counts and drafts and [n - d for n, d in zip(host_counts, drafts, strict=True)])
        self.lengths.copy_(start + number)
        return self

    def truncate(self, lengths: Any) -> Self:
        """Keep the first `lengths` [batch] (or one number) tokens of every sequence, or all it has; 0 empties a row."""
        host_lengths, known = numbers("lengths", lengths, self.batch), self.known()
        if host_lengths is not None and min(host_lengths) < 0:
            raise ShapeError(f"lengths are {host_lengths}; each is 0 or more")
        new_lengths = torch.minimum(self.lengths, on(self.k.device, lengths, host_lengths))
        more = host_lengths and known and [min(0, n - have) for n, have in zip(host_lengths, known, strict=True)]
        self._tell(known, more)
        self.lengths.copy_(new_lengths)
        self.overflowed &= self.lengths > 0  # an empty row may take another sequence
        return self

    # -- how ------------------------------------------------------------------------------------------------

    def _grown(self, known: Known, new: int, counts: Any) -> int | Tensor:
        """How many tokens there are more, int32 [batch], or a number where all are kept; room is seen to."""
        number: Tensor | None = None
        host_counts: Known = [new] * self.batch
        if counts is not None:
            number, host_counts = counts_of(counts, self.batch, new, self.k.device)
        if known is None or host_counts is None:
            number = self._clipped(torch.full_like(self.lengths, new) if number is None else number)
        else:
            self._reserve(known, host_counts)
        self._tell(known, host_counts)
        # of a chunk longer than the ring only the last tokens have a slot each
        if number is None and self.slots is not None and new > self.slots:
            number = torch.full_like(self.lengths, new)
        return new if number is None else number

    def _append(self, known: Known, new: int, number: Tensor | None, k: Tensor, v: Tensor) -> None:
        """`append` in operations of torch."""
        first = None if number is not None or known is None else self._common_place(known, new)
        if first is not None:
            self._write(lambda store, x: store.narrow(2, first, new).copy_(x), k, v)
            return
        real = None if number is None else written_tokens(number, new, self.slots, self._sinks_free())
        at = (self._ragged(new) if real is None else self._standing(self.lengths, real)).reshape(-1)
        self._write(lambda store, x: write(store, at, x, real), k, v)

    def _sinks_free(self) -> Tensor | None:
        """How many of the next tokens stay as the first ones, [batch]; None: none of them."""
        return None

    def _standing(self, start: Tensor, real: WrittenTokens) -> Tensor:
        """The places of tokens behind `start`; where none is real, of any that there are."""
        token = start[real.row] + real.token
        return self._where(token if self.slots else token.clamp_max(self.capacity - 1), real)

    def _tell(self, known: Known, more: Known) -> None:
        if not self.lengths.is_cpu:
            # the lengths on a CPU are read from the buffer
            self._host = known and more and [have + n for have, n in zip(known, more, strict=True)]

    def _ragged(self, new: int) -> Tensor:
        """The places of new tokens behind those of every sequence."""
        token = self.lengths.view(-1, 1)
        # a step of one token needs no range
        return self._where(token if new == 1 else token + torch.arange(new, device=token.device))

    def _write(self, put: Callable[[Tensor, Tensor], object], k: Tensor, v: Tensor) -> None:
        has: dict[str, Any] = self._buffers
        if has["k_scale"] is not None:
            if k.shape == v.shape:  # in one, which is half as many operations
                both, scales = scaled(torch.stack((k, v)), self.dtype)
                (k, v), (k_scale, v_scale) = both.unbind(0), scales.unbind(0)
            else:
                (k, k_scale), (v, v_scale) = (scaled(x, self.dtype) for x in (k, v))
            put(has["k_scale"], k_scale)
            put(has["v_scale"], v_scale)
        put(has["k"], k)
        put(has["v"], v)

    def _check(self, att: Attention, q: Tensor, tree: Any, params: dict[str, Any]) -> None:
        """Raise where such queries cannot be asked."""
        keys = self.k
        check_on(keys.device, q=q)
        check_queries(att, q, keys, "bhsd", self.batch, params, tree)

    def _attend(self, att: Attention, q: Tensor, counts: Any, tree: Any, params: dict[str, Any]) -> Any:
        """`attend`, of queries that fit."""
        places, tables = self._places_of(q, counts, tree)
        return self._read(placed(att, places), q, tables, params)

    def _places_of(self, q: Tensor, counts: Any, tree: Any) -> tuple[PositionMap, dict[str, Tensor]]:
        """The places of the last tokens' queries and of the stored keys, and the tables of these places."""
        number = q.shape[2] if counts is None else counts_of(counts, self.batch, q.shape[2], q.device)[0]
        lengths = self.lengths
        tables = {positions.START: lengths - number, positions.END: lengths}
        if tree is None:
            return self._places(counts is not None), tables
        nodes = torch.arange(q.shape[2], device=q.device)
        places, more = of_tree(torch.as_tensor(tree, device=q.device), nodes, torch.int32, self._token)
        return places, tables | more

    def _read(
        self,
        att: Attention,
        q: Tensor,
        tables: dict[str, Tensor],
        params: dict[str, Any],
        prefix: PrefixPart | None = None,
        arrays: Mapping[str, Any] | None = None,
    ) -> Any:
        """Attention of queries to stored keys, by an attention of places. `prefix` has other pages than the cache's;
        `arrays` are read in place of the cache's."""
        has: Mapping[str, Any] = arrays or self._buffers
        if prefix is not None:
            has = {**has, "pages": prefix.pages}
        qkv, sizes = (q, has["k"], has["v"]), self._sizes(q) if prefix is None else prefix.sizes
        tables = {n: x for n, x in tables.items() if n in att.program.names}  # a mask need not ask for all
        kv_inputs = kv_inputs_of(has["k_scale"], has["v_scale"], has["pages"])
        program_params = {n: x for n, x in params.items() if n not in positions.CALL_KEYWORDS} if params else params
        lse, top, sinks, sums = map(params.get, positions.CALL_KEYWORDS)
        logits = att.options.sinks if sinks is None else sinks
        # a prepared step has no gradient, and no operators for a graph
        call = logits is not None and (in_graph(q, logits) or (torch.is_grad_enabled() and learns(logits)))
        # of weighted rows a step gives the total in the place of lse, and the count of keys in that of the top
        call |= bool(sums) or (att.program.weight is not None and bool(lse or top or sinks is not None))
        step = None if call else step_of(self._steps, att, qkv, sizes, kv_inputs, tables, program_params)
        if step is None:
            more: dict[str, Any] = {**{WORDS[n]: x for n, x in kv_inputs.items()}, **params}
            if prefix is not None and prefix.plans is not None:
                return att(*qkv, plan=plan_of(prefix, att, qkv, tables), **more)
            more |= tables
            return att(*qkv, sizes=sizes, **more)
        return results(step(qkv, kv_inputs, tables, sinks, bool(lse), bool(top)), bool(lse), bool(top))

    def _statistics(
        self, run: Callable[..., Statistics], att: Attention, q: Tensor, tables: dict[str, Tensor],
        params: dict[str, Any], arrays: Mapping[str, Any] | None = None,
    ) -> Statistics:  # fmt: skip
        """Statistics of queries and stored keys, by an attention of places; `arrays` as for `_read`."""
        has: Mapping[str, Any] = arrays or self._buffers
        kv_inputs = {WORDS[n]: x for n, x in kv_inputs_of(has["k_scale"], has["v_scale"], has["pages"]).items()}
        known = {n: x for n, x in tables.items() if n in att.program.names}  # a mask need not ask for all
        return run(att, q, has["k"], has["v"], sizes=self._sizes(q), **kv_inputs, **known, **params)

    def _sizes(self, q: Tensor) -> Any:
        """The sizes of the whole problem: equal for a prompt, a chunk and a step."""
        return self.batch, q.shape[1], self.capacity, self.capacity

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        dtype = state.get(f"{prefix}k", self.k).dtype
        # scales would be missing, or without a meaning
        if dtype != self.dtype and (dtype in NARROW or self.dtype in NARROW):
            more[-1].append(f"{prefix}k is {dtype}, and this cache holds {self.dtype}; make one of the state's dtype")
            return
        kinds = {n: x.dtype for n, x in self.named_buffers(recurse=False)}
        super()._load_from_state_dict(state, prefix, *more)
        for n, kind in kinds.items():  # assigned, they are as the state has them
            setattr(self, n, getattr(self, n).to(getattr(self, n).dtype if n in "kv" else kind).contiguous())
        self._host = self.lengths.tolist()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def convert(x: Tensor) -> Tensor:  # only Floats of a cache without scales change dtype; all stay contiguous
            converted = fn(x)
            if x.is_floating_point() and self.k_scale is None:
                return converted.to(stored_dtype(converted.dtype, PLAIN)).contiguous()
            return (converted if converted.dtype == x.dtype else x.to(converted.device)).contiguous()

        self._host = self.known()  # to a device that the host does not wait for
        return super()._apply(convert, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_steps": {}}  # prepared calls of native code are not pickled

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

    @classmethod
    def create(
        cls,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        v_dim: int | None = None,
        dtype: torch.dtype | str = torch.float32,
        device: Any = None,
    ) -> Self:
        """An empty cache; `dtype` a float, or int8, float8_e4m3fn or float8_e5m2 for 8 bits with scales, by its name or
        torch's own."""
        return cls(CacheShape(batch, batch, capacity, kv_heads, head_dim, v_dim, dtype, device))
