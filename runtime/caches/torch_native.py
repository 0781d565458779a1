"""New tokens of a step written into a cache of torch on the CPU by one function in C++."""

from __future__ import annotations

import ctypes
import struct
from importlib import resources
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from frisket.grammar.memo import memo
from frisket.runtime.calls.arrays import in_graph
from frisket.runtime.machine import cpp_build as native_build

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
