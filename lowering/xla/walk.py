"""Walks traced spans in the XLA executor: the records of a row become steps inside the loop.

Nothing is listed in advance, since how many steps a row takes is a value: step i of a row finds the segment it
falls in by comparing i with the running number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

WIDE, EDGE = 512, 256  # tokens of key length that one step takes, without the predicate and with it
Chunk = Callable[[Any], tuple[Any, Any, Any]]  # step -> start of the slice, first key that counts, end of those
Loop = tuple["Body", Any, Any, Chunk]  # with its first step and the end of its steps


@dataclass(frozen=True)
class Body:
    """One inner loop: `width` keys a step, with the predicate or without."""

    width: int
    partial: bool


def bodies(kv_len: int) -> tuple[Body, ...]:
    return Body(min(WIDE, kv_len), False), Body(min(EDGE, kv_len), True)


def of_records(both: tuple[Body, ...], records: Any, block_k: int, kv_len: int) -> Iterator[Loop]:
    """The steps of one row, (body, first step, end of the steps, chunk of a step), from `records` [R, 4], in key tiles;
    unused records are zero. The part of a FULL segment beyond whole wide steps goes with the PARTIAL one after it."""
    import jax.numpy as jnp

    full, partial = both
    lo, full_lo, full_hi, hi = jnp.minimum(records.T * block_k, kv_len)
    taken = jnp.where(hi - lo <= partial.width, 0, (full_hi - full_lo) // full.width)
    full_lo, rest = jnp.where(taken > 0, full_lo, hi), jnp.where(taken > 0, full_lo + taken * full.width, hi)
    edges = jnp.concatenate([lo, rest]), jnp.concatenate([full_lo, hi])
    yield full, *_steps(full_lo, full_lo + taken * full.width, full.width, kv_len)
    yield partial, *_steps(*edges, partial.width, kv_len)


def _steps(start: Any, stop: Any, width: int, kv_len: int) -> tuple[int, Any, Chunk]:
    """Segments cut from their starts into steps of `width` keys; the last may be cut short by the predicate."""
    import jax.numpy as jnp

    count = (stop - start + width - 1) // width
    ends = jnp.cumsum(count, dtype=jnp.int32)

    def chunk(i: Any) -> tuple[Any, Any, Any]:
        at = (ends <= i).sum(dtype=jnp.int32)
        first = start[at] + (i - (ends[at] - count[at])) * width
        # a slice may not run over the end: it begins earlier, and the keys before `first` are masked
        return jnp.minimum(first, kv_len - width), first, jnp.minimum(first + width, stop[at])

    return 0, ends[-1], chunk
