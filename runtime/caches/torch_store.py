"""Work that caches of torch do with arrays: 8 bits and their scales, and new tokens written to their places.

The new tokens of a step on the CPU are written by one function in C++.
"""

from __future__ import annotations

import ctypes
import struct
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from frisket.dsl.errors import BackwardError, ParameterError, ShapeError
from frisket.grammar.memo import memo
from frisket.runtime.backends.cpp.torch import LARGE, huge
from frisket.runtime.calls.arrays import FLOATS, in_graph
from frisket.runtime.machine import cpp_build as native_build

from . import checks

NARROW = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # and their largest numbers
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
    """New zeros; on a CPU in huge pages, since a step that reads pages of a pool looks many addresses up: with pages
    of 16 to 128 tokens it took 0.6 to 0.8 of the time in float32 and bfloat16, and as long as before in int8."""
    found = torch.empty(size, dtype=dtype, device=device)
    if type(found) is Tensor and found.is_cpu and found.nbytes >= LARGE and not torch.compiler.is_compiling():
        huge(found)
    return found.zero_()


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(stored, scale) with x = stored * scale[..., None], rounded: a float32 scale for every vector, its largest
    magnitude over the largest number of `dtype`.

    >>> values, scale = quantized(torch.tensor([[1.0, -2.54]]), torch.int8)
    >>> values.tolist(), round(scale.item(), 6)
    ([[50, -127]], 0.02)
    """
    stored, scale = divided(x, dtype)
    return stored.to(dtype), scale


def divided(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens divided by their scales before they are stored, in float32."""
    real = x if x.dtype == torch.float32 else x.float()
    scale = real.abs().amax(-1, keepdim=True).div_(_largest(dtype, x.device))
    stored = real / scale.clamp_min(LEAST)  # zeros have the scale 0
    return stored.round_() if dtype == torch.int8 else stored, scale.squeeze(-1)


@memo(64)
def _largest(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(NARROW[dtype], device=device)  # a number of Python's takes longer


class Taken(NamedTuple):
    """The new tokens that are written, where some are not. The others stand for one that is, so that writing all of
    them writes the real ones and nothing else, whatever comes last."""

    row: Tensor  # int64 [batch, 1] and [batch, new]: the token that is written
    token: Tensor
    some: Tensor  # whether there is any

    def of(self, x: Tensor) -> Tensor:
        """`x` [batch, heads, new, ...], those tokens."""
        return x.transpose(1, 2)[self.row, self.token].transpose(1, 2)


def taken(counts: Tensor, new: int, most: int | None = None) -> Taken:
    """The first `counts` [batch] of `new` tokens, of them the last `most`."""
    own = torch.arange(len(counts), device=counts.device)
    row = torch.where(counts > 0, own, counts.argmax())[:, None]
    real = counts[row].long()
    token = torch.minimum(torch.arange(new, device=counts.device), (real - 1).clamp_min(0))
    if most is not None and new > most:
        token = torch.maximum(token, (real - most).clamp_min(0))
    return Taken(row, token, (counts > 0).any())


def write(store: Tensor, at: Tensor, new: Tensor, real: Taken | None) -> None:
    """`new` [batch, heads, n, ...] into `store`, at the flat places `at` int64 [batch * heads * n] of its vectors."""
    width = new.shape[3:]
    flat = store.view(-1, *width)
    new = new.to(store.dtype)
    if store.dtype.itemsize == 1:  # what torch copies by index are no Floats of 8 bits
        flat, new = flat.view(torch.uint8), new.view(torch.uint8)
    if real is None:
        flat.index_copy_(0, at, new.reshape(-1, *width))
    else:
        flat.index_copy_(0, at, torch.where(real.some, real.of(new).reshape(-1, *width), flat[at]))


def numbers(name: str, x: Any, batch: int) -> list[int] | None:
    """One integer for each sequence, from one or [batch] of them; None where a device has them."""
    if isinstance(x, Tensor) and not x.is_cpu:
        if x.shape not in ((), (batch,)) or x.dtype not in (torch.int32, torch.int64):
            raise _wrong(name, x, batch)
        return None
    found = np.asarray(x)
    if found.shape not in ((), (batch,)) or found.dtype.kind not in "iu":
        raise _wrong(name, x, batch)
    told: list[int] = np.broadcast_to(found, (batch,)).tolist()
    return told


def _wrong(what: str, x: Any, batch: int) -> ShapeError:
    return ShapeError(f"{what} are {x}; they are integers [batch], one for each of {batch} sequences")


def on(device: torch.device, x: Any, told: list[int] | None) -> Tensor:
    """int32 [batch] on a device; nothing waits for it."""
    if told is None:
        assert isinstance(x, Tensor)
        return x.to(device, torch.int32)
    return torch.tensor(told, dtype=torch.int32, device="cpu").to(device, non_blocking=True)


def counts_of(counts: Any, batch: int, new: int, device: torch.device) -> tuple[Tensor, list[int] | None]:
    """How many of `new` tokens of each sequence are real: int32 [batch] on the device, and checked numbers if known."""
    told = numbers("counts", counts, batch)
    if told is not None and not 0 <= min(told) <= max(told) <= new:
        raise ShapeError(f"counts are {told}, of {new} new tokens; each is from 0 to {new}")
    return on(device, counts, told), told


def read(store: Tensor, where: Tensor) -> Tensor:
    """The vectors of `store` at places `where` [batch, heads, n], copied."""
    flat = store.view(-1, *store.shape[3:])
    if store.dtype.itemsize == 1:
        return flat.view(torch.uint8)[where].view(store.dtype)
    return flat[where]


def check_on(device: torch.device, **tensors: Any) -> None:
    """Refuse what are no tensors on the device of a cache."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ShapeError(f"{name} is a {type(x).__name__}; give a torch tensor")
        if x.device != device:
            raise ShapeError(f"{name} is on {x.device}, the cache on {device}; move one of them")


def check_new(k: Tensor, v: Tensor, batch: int, kv_heads: int, head_dim: int, v_dim: int, device: torch.device) -> int:
    """How many new tokens a sequence, of k [batch, kv_heads, new, head_dim] and v."""
    check_on(device, k=k, v=v)
    new = checks.check_new(k, v, "bhsd", batch, kv_heads, head_dim, v_dim)
    for name, x in (("k", k), ("v", v)):
        if x.requires_grad and torch.is_grad_enabled():
            raise BackwardError(f"{name} requires a gradient, and none flows through a cache: {name}.detach()")
    return new


def ancestors(parents: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """(whether node j is node i or above it, bool [..., n, n]; depths int32 [..., n]) of trees whose node i hangs below
    parents[..., i], -1 for a root; a root has depth 0."""
    parents = torch.as_tensor(parents, device=device)
    n = parents.shape[-1]
    above = (parents[..., None] == torch.arange(n, device=device)) | torch.eye(n, dtype=torch.bool, device=device)
    for _ in range(max(n - 1, 1).bit_length()):  # paths of 1, 2, 4, ... edges
        above = (above.float() @ above.float()) > 0
    return above, above.sum(-1, dtype=torch.int32) - 1


CALL = struct.Struct("27q")
FROM = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
TO = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
FEW = 64  # new tokens: for more, operations of torch take no longer and use all threads


def append(has: dict[str, Any], k: Tensor, v: Tensor, counts: Tensor | None, ring: bool) -> bool:
    """Whether new tokens k [batch, kv_heads, new, head_dim] and v, or the first `counts` int32 [batch] of them, now are
    in the buffers `has` of a cache, behind those that are there, quantised where it has 8 bits. False, and nothing is
    written, where operations of torch have to do it: beside another dtype, on a GPU, in a graph, without a compiler,
    many tokens, and where there is no place for them."""
    held, dtype = has["k"], k.dtype
    batch, heads, new, dim = k.shape
    plain = held.dtype == dtype
    if new > FEW or not held.is_cpu or v.dtype != dtype or not (plain or (dtype in FROM and held.dtype in TO)):
        return False
    if in_graph(k) or not type(k) is type(v) is type(held) is Tensor or (run := _function()) is None:
        return False
    k, v = (x if x.stride(3) == 1 and not x.is_neg() else x.contiguous().resolve_neg() for x in (k, v))
    values, pages, lengths = has["v"], has["pages"], has["lengths"]
    narrow = [] if plain else [has["k_scale"], has["v_scale"]]
    written, numbers = [held, values, *narrow], [lengths] if pages is None else [lengths, pages]
    kinds = (held.dtype, [held, values]), (torch.float32, narrow), (torch.int32, numbers)
    whole = all(x.dtype == kind and x.is_cpu and x.is_contiguous() for kind, have in kinds for x in have)
    if not whole or any(x.shape[:3] != held.shape[:3] for x in written):
        return False  # the user has assigned other buffers
    k_scale, v_scale = map(_at, narrow) if narrow else (0, 0)
    words = CALL.pack(
        batch, heads, new, held.shape[0], held.shape[2], ring, 0 if pages is None else pages.shape[1],
        lengths.data_ptr(), _at(counts), _at(pages), FROM.get(dtype, 0), TO.get(held.dtype, 0), dtype.itemsize,
        k.data_ptr(), *k.stride()[:3], dim, held.data_ptr(), k_scale,
        v.data_ptr(), *v.stride()[:3], v.shape[3], values.data_ptr(), v_scale,
    )  # fmt: skip
    if not run(words):
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
