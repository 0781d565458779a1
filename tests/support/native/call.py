"""Runs an emitted C++ kernel on numpy arrays, with threads of Python's own behind `call->parallel`.

The text is the one that calls have: without names and numbers of the user, so that cases of one shape share a kernel.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import threading

import numpy as np

from frisket.lowering import derive
from frisket.lowering.kernels.cpp import backward as cpp_backward
from frisket.lowering.kernels.cpp import call as cpp_call
from frisket.lowering.kernels.cpp import forward as cpp
from frisket.runtime.machine import cpp_build as native_build

WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, WORK, ctypes.c_void_p, ctypes.c_int64)


@PARALLEL
def parallel(pool, work, task, workers):
    threads = [threading.Thread(target=work, args=(task, n)) for n in range(1, workers)]
    for t in threads:
        t.start()
    work(task, 0)
    for t in threads:
        t.join()


def placed(x):
    """A copy that ends where a page begins that nobody may read or write: a kernel that goes on ends the process."""
    size, page = max(x.nbytes, 1), mmap.PAGESIZE
    length = -(-size // page) * page
    room = mmap.mmap(-1, length + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + length), ctypes.c_size_t(page), 0) == 0
    made = np.frombuffer(room, x.dtype, x.size, length - x.nbytes).reshape(x.shape)
    made[...] = x
    return made


def bfloat16(x):
    """float32 to the bits of bfloat16, to nearest, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def forward(plan, spans, geometry, q, k, v, slots, tables, target, dtype="float32", *, sinks=None, threads=2,
            want_top=True, variant="native", source=None, stored="", norm=None):  # fmt: skip
    """(out, lse, top) as numpy arrays; bfloat16 arrays are their bits, uint16. Any strides,
    of rows' entries 1. `stored` is the dtype of k and v where it is not that of q, `norm` an array to be filled."""
    g = geometry
    made = cpp.CppKernel(plan, target, cpp.CppArrays(g.head_dim, g.v_dim, dtype, stored), named=False)
    library = native_build.library(source or made.source(), variant)
    real = np.float64 if dtype == "float64" else np.float32
    out = placed(np.full((g.batch, g.heads, g.q_len, g.v_dim), 7, q.dtype))
    lse = placed(np.full((g.batch, g.heads, g.q_len), 7, real))
    top = placed(lse)
    q, k, v = (placed(x) if x.flags.c_contiguous else x for x in (q, k, v))
    arrays = {"q": q, "k": k, "v": v, "out": out}
    rows = {"lse": lse, "top": top if want_top else None, "norm": norm}
    call, _keep = record(
        plan, spans, g, slots, tables, real, arrays, rows, sinks, threads, target.block_q, made.literals
    )
    kernel = library.frisket_forward
    kernel.restype, kernel.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    assert kernel(call.ctypes.data) == 0
    return out, lse, top


def backward(plan, spans, geometry, q, k, v, out, lse, dout, dlse, slots, tables, target, dtype="float32", *,
             wanted=None, sinks=None, threads=2, variant="native", source=None, norm=None):  # fmt: skip
    """dq, dk, dv by "q", "k", "v", and a buffer for each captured gradient by its number; `wanted`: of which, None
    for all. bfloat16 arrays are their bits, lse and dlse are Real."""
    g = geometry
    made = cpp_backward.BackwardKernel(plan, target, cpp.CppArrays(g.head_dim, g.v_dim, dtype), named=False)
    kernel = native_build.library(source or made.source(), variant).frisket_backward
    real = np.float64 if dtype == "float64" else np.float32
    captured = derive.backward_of(plan).gradients
    wanted = {"q", "k", "v", *range(len(captured))} if wanted is None else wanted
    shapes = {
        "head": (g.batch, g.heads), "row": (g.batch, g.heads, g.q_len), "column": (g.batch, g.heads, g.kv_len),
        "diagonal": (g.batch, g.heads, g.q_len + g.kv_len - 1),
    }  # fmt: skip
    buffers = {
        n: placed(np.zeros(np.shape(tables[x.source]) if x.over == "scatter" else shapes[x.over], real))
        for n, x in enumerate(captured)
        if n in wanted
    }
    pointers = np.array([buffers[n].ctypes.data if n in buffers else 0 for n in range(len(captured))] or [0], np.int64)
    found = {n: placed(np.full(x.shape, 7, x.dtype)) for n, x in (("q", q), ("k", k), ("v", v)) if n in wanted}
    arrays = {"q": q, "k": k, "v": v, "out": out, "dout": dout}
    arrays = {n: placed(x) if x is not None and x.flags.c_contiguous else x for n, x in arrays.items()}
    arrays |= {f"d{n}": x for n, x in found.items()}
    call, _keep = record(
        plan, spans, g, slots, tables, real, arrays,
        {"lse": np.ascontiguousarray(lse, real), "dlse": None if dlse is None else np.ascontiguousarray(dlse, real),
         "gradients": pointers, "norm": norm}, sinks, threads, target.block_q, made.literals,
    )  # fmt: skip
    kernel.restype, kernel.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    assert kernel(call.ctypes.data) == 0
    return found | buffers


def record(plan, spans, g, slots, tables, real, arrays, contiguous, sinks, threads, block_q, literals):
    """The words of a `Call`, and what has to stay alive until it is over. `arrays` have strides in the call,
    `contiguous` have none; None is a null pointer."""
    keep = []  # alive until the call is over

    def address(x):
        keep.append(x)
        return x.ctypes.data

    words = [0] * cpp_call.WORDS

    def put(name, *values):
        for i, value in enumerate(values):
            words[cpp_call.OFFSET[name] + i] = value

    full = g.full
    put("norm_width", 2 if contiguous.get("norm") is None else contiguous["norm"].shape[3])
    put("threads", threads)
    put("parallel", ctypes.cast(parallel, ctypes.c_void_p).value)
    for name in ("batch", "heads", "kv_heads", "q_len", "kv_len"):
        put(name, getattr(g, name))
    put("scale", struct.unpack("<q", struct.pack("<d", g.scale))[0])
    put("size_b", *full)
    put("b_origin", *g.origin[:2])
    for name, origin in zip(("q_origin", "k_origin"), g.origin[2:], strict=True):
        vector = np.ascontiguousarray(np.atleast_1d(origin), np.int64)
        put(name, address(vector))
        put(f"{name}_step", int(len(vector) > 1))
    packed = [struct.pack("<d" if s.type.name == "FLOAT" else "<q", slots[s.name]) for s in plan.slots]
    packed += [struct.pack("<d", x) for x in literals]
    put("slots", address(np.frombuffer(b"".join(packed) or b"\0" * 8, np.int64)))
    put("tables", address(np.array(_tables(plan, tables, real, address) or [0], np.int64)))
    put("spans", address(placed(np.ascontiguousarray(spans.bounds, np.int32))))
    put("count", address(placed(np.ascontiguousarray(spans.count, np.int32))))
    put("slice_of", address(placed(np.ascontiguousarray(spans.slice_of, np.int32))))
    put("rows", spans.bounds.shape[1])
    put("records", spans.bounds.shape[2])
    put("block_q", block_q)
    put("sinks", 0 if sinks is None else address(np.ascontiguousarray(sinks, real)))
    put("pages", len(arrays["k"]) if plan.pages is not None else 0)
    for name, x in contiguous.items():
        put(name, 0 if x is None else address(x))
    for name, x in arrays.items():
        if x is None:
            continue
        assert x.strides[3] == x.itemsize
        put(name, address(x), *(n // x.itemsize for n in x.strides[:3]))
    return np.array(words, np.int64), keep


def _tables(plan, tables, real, address):
    words = []
    for t in plan.tables:
        kind = {"BOOL": np.uint8, "INT": np.int64 if plan.int64 else np.int32, "FLOAT": real}[t.type.name]
        x = placed(np.asarray(tables[t.name]).astype(kind))
        words += [address(x), *x.shape, *(n // x.itemsize for n in x.strides)]
    return words
