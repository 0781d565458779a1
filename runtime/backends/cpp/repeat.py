"""Calls of a native kernel like one before, on torch tensors: only addresses and strides of its record change."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from frisket.lowering.kernels.cpp.call import OFFSET, WORDS
from frisket.lowering.plan import Geometry, LoopPlan, Spans, Target
from frisket.runtime.machine.cpp_threads import Threads, of_torch

from .torch import LARGE, huge, out_of_memory, prepared

SHORT = 4 << 20  # operations of a call that one thread ends before a second one has begun
THREADS = struct.Struct("3q")
ARRAYS = struct.Struct(f"{OFFSET['dout'] - OFFSET['sinks']}q")  # what is forward's alone
REST = bytes(8 * (WORDS - OFFSET["dout"]))


def repeat(
    plan: LoopPlan, spans: Spans, g: Geometry, dtype: Any, stored: Any, slots: Mapping[str, Any], target: Target
) -> Callable[..., Any]:
    """The output of a forward by q, k and v of these shapes and dtypes, with `saving` lse and norm beside it; None
    where entries of a row lie apart."""
    made = prepared(plan, spans, g, target, dtype, stored)
    run, record, kept = made.frozen("frisket_forward", slots)
    size, wide = (g.batch, g.heads, g.q_len, g.v_dim), g.head_dim == g.v_dim
    short = 2 * g.batch * g.heads * g.q_len * g.kv_len * (g.head_dim + g.v_dim) < SHORT
    head, empty_like, pack = THREADS.pack(*Threads(1)) + record, torch.empty_like, ARRAYS.pack
    strides = g.heads * g.q_len * g.v_dim, g.q_len * g.v_dim, g.v_dim

    def again(q: Tensor, k: Tensor, v: Tensor, saving: bool, kept: Any = kept) -> Any:  # `kept` has its addresses
        (*qs, q_step), (*ks, k_step), (*vs, v_step) = q.stride(), k.stride(), v.stride()
        if not q_step == k_step == v_step == 1:
            return None
        out = empty_like(q) if wide and q.is_contiguous() else q.new_empty(size)
        if out.nbytes >= LARGE:
            huge(out)
        lse = q.new_empty(size[:3], dtype=made.real) if saving else None
        norm = None if lse is None else lse.new_empty((*size[:3], 2))
        to_lse, to_norm = (0, 0) if lse is None or norm is None else (lse.data_ptr(), norm.data_ptr())
        arrays = pack(
            0, to_lse, 0, to_norm, 0, q.data_ptr(), *qs, k.data_ptr(), *ks, v.data_ptr(), *vs, out.data_ptr(), *strides
        )  # fmt: skip
        if run(head + arrays + REST if short else THREADS.pack(*of_torch()) + record + arrays + REST):
            raise out_of_memory("frisket_forward")
        return (out, lse, norm) if saving else out

    return again
