"""Calls of a native kernel like one before, on torch tensors: only addresses and strides of its record change."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frisket.lowering.kernels.cpp.call import OFFSET, SHORT, WORDS
from frisket.lowering.plan import Geometry, LoopPlan, Spans, Target
from frisket.runtime.machine.cpp_threads import Threads, of_torch

from .torch import LARGE, huge, out_of_memory, prepared

THREADS = struct.Struct("3q")
ADDRESS, TABLES = struct.Struct("q"), 8 * OFFSET["tables"]  # of tables, in bytes
# words from `sinks` to `out`, which a forward fills in, and zeros to the end
ARRAYS = struct.Struct(f"{OFFSET['dout'] - OFFSET['sinks']}q{8 * (WORDS - OFFSET['dout'])}x")
ALL = struct.Struct(f"{WORDS - OFFSET['sinks']}q")  # words from `sinks` to the end
NONE = (0, 0, 0, 0)  # a gradient that is not wanted


class Repeat(NamedTuple):
    """Calls that differ from one in the entries of their arrays alone."""

    fits: Callable[..., bool]  # (q, k, v): whether `forward` reads such arrays where they are
    # (q, k, v, saving, sinks=None, live_tables=()): out, with `saving` (out, lse, norm). None where arrays must be
    # copied first, or a table of the plan was written to
    forward: Callable[..., Any]
    gradients: Callable[..., Any]  # [dq, dk, dv]; None where no kernel is built yet, or arrays must be copied first
    kept: list[Any]  # the memory that records point to


def repeat(
    plan: LoopPlan, spans: Spans, g: Geometry, dtype: Any, stored: Any, slots: Mapping[str, Any],
    tables: Mapping[str, Tensor], live: Sequence[str], target: Target,
) -> Repeat:  # fmt: skip
    """A forward by q, k and v of these shapes and dtypes, and its gradients. `live` names the tables of each call."""
    made = prepared(plan, spans, g, target, dtype, stored)
    size, wide = (g.batch, g.heads, g.q_len, g.v_dim), g.head_dim == g.v_dim
    pairs = 2 * g.batch * g.heads * g.q_len * g.kv_len
    short = pairs * (g.head_dim + g.v_dim) < SHORT
    short_backward = pairs * (3 * g.head_dim + 2 * g.v_dim) < SHORT
    alone, empty_like, pack = THREADS.pack(*Threads(1)), torch.empty_like, ARRAYS.pack
    large = dtype.itemsize * size[0] * size[1] * size[2] * size[3] >= LARGE
    strides = g.heads * g.q_len * g.v_dim, g.q_len * g.v_dim, g.v_dim
    shapes = (*made.shapes.values(),)
    steps = [(h * n * dim, n * dim, dim) for _, h, n, dim in shapes]
    versions = [(x, x._version) for x in tables.values() if not x.is_inference()]
    kept: list[Any] = []
    built: dict[str, tuple[Any, bytes]] = {}  # kernels, and their records

    def kernel(name: str) -> tuple[Any, bytes]:
        if name not in built:
            run, record, pointed = made.frozen(name, slots, None if live else tables)
            kept.append(pointed)
            built[name] = run, record
        return built[name]

    run, record = kernel("frisket_forward")
    head = alone + record

    def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
        here = q.stride(3) == k.stride(3) == v.stride(3) == 1 and q.data_ptr() and k.data_ptr() and v.data_ptr()
        return bool(here) and all(x._version == n for x, n in versions)

    def forward(
        q: Tensor, k: Tensor, v: Tensor, saving: bool, sinks: Tensor | None = None, live_tables: Sequence[Tensor] = ()
    ) -> Any:
        (qb, qh, qn, q_step), (kb, kh, kn, k_step), (vb, vh, vn, v_step) = q.stride(), k.stride(), v.stride()
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()  # 0 of zeros that torch has no memory for
        if not (q_step == k_step == v_step == 1 and at_q and at_k and at_v):
            return None
        for x, version in versions:
            if x._version != version:
                return None
        out = empty_like(q) if wide and q.is_contiguous() else q.new_empty(size)
        if large:
            huge(out)
        lse = q.new_empty(size[:3], dtype=made.real) if saving else None
        norm = None if lse is None else lse.new_empty((*size[:3], 2))
        to_lse, to_norm = (0, 0) if lse is None or norm is None else (lse.data_ptr(), norm.data_ptr())
        arrays = pack(
            0 if sinks is None else sinks.data_ptr(), to_lse, 0, to_norm, k.shape[0] if plan.pages else 0,
            at_q, qb, qh, qn, at_k, kb, kh, kn, at_v, vb, vh, vn, out.data_ptr(), *strides,
        )  # fmt: skip
        common = head if short else THREADS.pack(*of_torch()) + record
        if live:
            words = made.kernel.words({**tables, **dict(zip(live, live_tables, strict=True))})
            common = common[:TABLES] + ADDRESS.pack(words[0][2]) + common[TABLES + ADDRESS.size :]
        if run(common + arrays):
            raise out_of_memory("frisket_forward")
        return (out, lse, norm) if saving else out

    def gradients(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, norm: Tensor, dout: Tensor, needed: Sequence[bool]
    ) -> list[Tensor | None] | None:
        if "frisket_backward" not in made.kernel.functions:
            return None
        run, record = kernel("frisket_backward")
        if not all(x.dtype == made.real and x.is_contiguous() for x in (lse, norm)):
            return None
        words = [0, lse.data_ptr(), 0, norm.data_ptr(), 0]
        for x in (q, k, v, out, dout):
            *x_strides, step = x.stride()
            if step != 1 or x.dtype != dtype or x.is_neg() or x._is_zerotensor():
                return None
            words += (x.data_ptr(), *x_strides)
        found: list[Tensor | None] = []
        for x, shape, x_steps, need in zip((q, k, v), shapes, steps, needed):
            grad = None
            if need:
                grad = empty_like(x) if x.is_contiguous() else x.new_empty(shape)
                if grad.nbytes >= LARGE:
                    huge(grad)
            found.append(grad)
            words += NONE if grad is None else (grad.data_ptr(), *x_steps)
        if run((alone if short_backward else THREADS.pack(*of_torch())) + record + ALL.pack(*words, 0, 0)):
            raise out_of_memory("frisket_backward")
        return found

    return Repeat(fits, forward, gradients, kept)
