"""Attention without keys, queries, batch entries or heads, with the results of torch's SDPA.

A query without keys has out 0 and lse -inf, or its sink; all gradients of q, k, v and tables are 0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from frisket.lowering.dtypes import DOUBLE, accumulate, result_of
from frisket.lowering.plan import Geometry
from frisket.runtime.calls.arrays import Arrays
from frisket.runtime.calls.program import CallProgram
from frisket.runtime.machine.parameters import learns

from .device import CheckedCall


def check_bound(program: CallProgram, params: Mapping[str, Any]) -> None:
    """Refuse names without a value, as any other call does."""
    for part in program.parts:
        if any(n not in params for n in part.unbound):
            part.require_bound()  # raises, with the part's own hint


def nothing(call: CheckedCall, learned: Iterable[Any] = ()) -> tuple[Any, Any, Any]:
    """(out, lse, top) of a call; `learned` are further arrays that gradients flow to."""
    return results_of(call.arrays, call.geometry, call.sinks, learned)


def results_of(arrays: Arrays, g: Geometry, sinks: Any = None, learned: Iterable[Any] = ()) -> tuple[Any, Any, Any]:
    q, k, v = arrays.qkv
    # the reference computes in float64
    real = DOUBLE if arrays.framework == "numpy" else accumulate(arrays.dtype)
    rows = (g.batch, g.heads, g.q_len)
    out = (*rows, g.v_dim) if arrays.layout == "bhsd" else (g.batch, g.q_len, g.heads, g.v_dim)
    if arrays.framework == "torch":
        torch = sys.modules["torch"]
        real = getattr(torch, real)
        inputs = [x for x in (q, k, v, sinks, *learned) if x is not None and learns(x)]
        # an empty sum is 0, and gives each input a gradient of 0
        link = sum((x.reshape(-1)[:0].sum().to(real) for x in inputs), torch.zeros((), dtype=real, device=q.device))
        half = getattr(torch, result_of(arrays.dtype))
        zeros = torch.zeros(out, dtype=half, device=q.device) + link.to(half)
        empty = torch.full(rows, -torch.inf, dtype=real, device=q.device)
        lse = empty if sinks is None else sinks.to(real)[None, :, None].expand(rows).clone()
        return zeros, lse + link, empty.clone()
    # JAX takes 0 for gradients of what is not read
    np_like: Any = np if arrays.framework == "numpy" else sys.modules["jax"].numpy
    empty = np_like.full(rows, -np.inf, real)
    lse = empty if sinks is None else np_like.broadcast_to(np_like.asarray(sinks, real)[None, :, None], rows)
    return np_like.zeros(out, real if arrays.framework == "numpy" else q.dtype), lse, empty
