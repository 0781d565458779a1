"""Task: one call of the forward or the backward, by the names of its operands, as primitives of JAX hold it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from frisket.lowering.derive import norm_width
from frisket.lowering.plan import FIRST, K_SCALE, PAGES, V_SCALE
from frisket.runtime.backends.base import RECORDS

from .call import JaxCall

Level = tuple[int, tuple[bool, ...]]  # of jax.vmap: instances, and which operands have an axis for them
# the axes of arrays: batch, query, key, head, kv head, sizes of heads, page of a sequence
AXES = {
    "q": "bshd", "k": "btnd", "v": "btne", "sinks": "h", "out": "bshe", "dout": "bshe", "lse": "bhs", "low": "bhs",
    "norm": "bhsr", "top": "bhs", "dlse": "bhs", K_SCALE: "btn", V_SCALE: "btn", PAGES: "bc", FIRST: "b",
}  # fmt: skip
POOLS = {"k": "ptnd", "v": "ptne", K_SCALE: "ptn", V_SCALE: "ptn"}  # page of the pool, in place of batch
NOWHERE = AbstractMesh((), ())


@dataclass(frozen=True)
class Task:
    """The work of a primitive with operands of these names: the forward, or the backward where something is `wanted`.
    `levels` of jax.vmap are axes in front, the outermost first. `low` asks for what a backward takes beside lse."""

    call: JaxCall
    names: tuple[str, ...]
    wanted: tuple[str, ...] = ()
    levels: tuple[Level, ...] = ()
    low: bool = False

    def __repr__(self) -> str:
        return f"({self.call})" + (f" -> {', '.join(self.wanted)}" if self.wanted else "")

    @property
    def results(self) -> tuple[str, ...]:
        return self.wanted or ("out", "lse", "top", *["low", "norm"] * self.low)

    def axes(self, name: str) -> str:
        """The axes of an array, without the mapped ones in front; empty for others."""
        return (POOLS.get(name) if PAGES in self.names else None) or AXES.get(name, "")

    def depth(self, name: str) -> int:
        """How many axes in front an operand has."""
        at = self.names.index(name)
        return sum(moved[at] for _, moved in self.levels)

    def shaped(self, operands: Sequence[Any]) -> list[tuple[tuple[int, ...], Any]]:
        """(shape, dtype) of every result."""
        given = {n: (x.shape[self.depth(n) :], x.dtype) for n, x in zip(self.names, operands, strict=True)}
        (batch, q_len, heads, _), dtype = given["q"]
        rows = (batch, heads, q_len), np.dtype(np.float64 if dtype == np.float64 else np.float32)
        if not self.wanted:
            given |= {"out": ((batch, q_len, heads, given["v"][0][3]), dtype), "lse": rows, "top": rows, "low": rows}
            given["norm"] = (*rows[0], norm_width(dtype, given["v"][0][3])), rows[1]
        front = tuple(n for n, _ in self.levels)
        return [((*front, *given[n][0]), given[n][1]) for n in self.results]

    def run(self, platform: str, exported: bool, *operands: Any) -> tuple[Any, ...]:
        """Run the task on a platform, in instances in turn where they are mapped; native kernels map themselves."""
        dtype = str(operands[0].dtype)
        backend = self.call.backend_on(platform, dtype, exported, frozenset(self.wanted))

        def one(*operands: Any) -> tuple[Any, ...]:
            arrays = dict(zip(self.names, operands, strict=True))
            if not self.wanted:
                return self.call.forward(backend, platform, arrays, low=self.low)
            found = self.call.backward(backend, platform, arrays, frozenset(self.wanted))
            return tuple(found[n] for n in self.wanted)

        run: Callable[..., tuple[Any, ...]] = one
        for _, moved in reversed(self.levels):
            if RECORDS[backend].executors["jax"].maps:
                run = jax.vmap(run, tuple(0 if m else None for m in moved))
            else:
                run = partial(_in_turn, run, moved)
        return run(*operands)

    def said(self, operands: Sequence[Any], platform: str) -> str:
        """A description of the call, for errors."""
        where = ", ".join(f"{n} {x.dtype}{list(x.shape)}" for n, x in zip(self.names[:3], operands))
        return f"in attention under {self.call}\n  of {where}, lowered for {platform}"


def _in_turn(run: Callable[..., Any], moved: tuple[bool, ...], *operands: Any) -> Any:
    some = [x for x, m in zip(operands, moved, strict=True) if m]

    def step(some: list[Any]) -> Any:
        rest = iter(some)
        return run(*(next(rest) if m else x for x, m in zip(operands, moved, strict=True)))

    return jax.lax.map(step, some)
