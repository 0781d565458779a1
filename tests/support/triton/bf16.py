"""bfloat16 in Triton's interpreter, which keeps it as raw uint16 and multiplies and truncates those bits."""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_cast, _dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot


def wide(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.view(np.uint16).astype(np.uint32) << 16
    return TensorHandle(bits.view(np.float32), tl.float32)


def narrow(data):
    """Round to nearest, ties to even."""
    bits = np.ascontiguousarray(data, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return TensorHandle(np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)


def cast(self, source, dtype):
    source = wide(source)
    if dtype.scalar == tl.bfloat16:
        return narrow(_cast(self, source, tl.float32).data)
    return _cast(self, source, dtype)


def dot(self, a, b, *rest):
    return _dot(self, wide(a), wide(b), *rest)


def install() -> None:
    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast, dot
