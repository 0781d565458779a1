"""For Triton's interpreter: a product of float32 does not depend on the shapes of its tiles.

A GPU sums each element of a product along its own row and column. On some CPUs numpy's BLAS sums some shapes in another
order, so scores of a forward and a backward differ in their last bits there: much, where scores are large.
"""

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_dot = InterpreterBuilder.create_dot


def dot(self, a, b, d, *rest):
    if a.data.dtype != np.float32 or b.data.dtype != np.float32:
        return _dot(self, a, b, d, *rest)
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))  # rounded once, whatever the order
    return TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


def install() -> None:
    InterpreterBuilder.create_dot = dot
