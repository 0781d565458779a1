"""Arrays of 16 bits so large that the softmax is peaked, and how wrong gradients of causal attention to them are.

There the weight of one key is near 1, and p * (dp - delta) cancels: a delta of another rounding than dp is most of dq.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from frisket.dsl.sugar import k, q
from frisket.lowering import dense
from frisket.lowering.simplify import ProgramExprs

B, H, D = 1, 2, 16
LENGTH = 33
SCALES = (1, 3, 5, 10, 30)  # of q, k and v
SEEDS = 12


def bfloat16(x):
    """Numbers rounded to bfloat16, in float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def float16(x):
    return np.asarray(x, np.float16).astype(np.float32)


ROUNDED = {"bfloat16": bfloat16, "float16": float16}


@cache
def arrays(dtype: str, scale: float, seed: int, length: int = LENGTH) -> np.ndarray:
    """q, k and v [3, batch, heads, length, dim], float32 numbers that the dtype has; dout is 1 everywhere."""
    return ROUNDED[dtype](np.random.default_rng(seed).standard_normal((3, B, length, H, D)) * scale).swapaxes(2, 3)


@cache
def right(*what) -> dict:
    """The gradients of `arrays`."""
    return gradients(arrays(*what))


def gradients(x, **rounded) -> dict:
    return dense.gradients(
        *x, dense.DenseCall(ProgramExprs(q >= k), scale=D**-0.5, params={}, tables={}, **rounded), np.ones_like(x[2])
    )


@cache
def baseline(dtype: str, *what) -> np.ndarray:
    """The errors of dense attention in the dtype, see `errors`."""
    return errors(lambda *x: [gradients(x, rounded=ROUNDED[dtype])[n] for n in ("dq", "dk", "dv")], dtype, *what)


def errors(run, dtype: str, scale: float, length: int = LENGTH, seeds: int = SEEDS) -> np.ndarray:
    """The relative errors of dq, dk and dv by norms [seeds, 3], where `run` gives dq, dk and dv of q, k and v."""
    found = []
    for seed in range(seeds):
        want = right(dtype, scale, seed, length)
        pairs = zip(run(*arrays(dtype, scale, seed, length)), (want[n] for n in ("dq", "dk", "dv")), strict=True)
        found.append([np.linalg.norm(np.float64(x) - y) / np.linalg.norm(y) for x, y in pairs])
    return np.array(found)


def require(run, dtype: str = "bfloat16", scales=SCALES, **size) -> None:
    """The median over the seeds is at most twice that of dense attention, and up to 10 the worst seed is too. Beyond,
    which of two keys wins depends on the last bits of a score, in dense attention as well."""
    for scale in scales:
        mine, plain = errors(run, dtype, scale, **size), baseline(dtype, scale, *size.values())
        assert (np.median(mine, 0) <= 2 * np.median(plain, 0)).all(), (scale, np.median(mine, 0), np.median(plain, 0))
        if scale <= 10:
            assert (mine.max(0) <= 2 * plain.max(0)).all(), (scale, mine.max(0), plain.max(0))
