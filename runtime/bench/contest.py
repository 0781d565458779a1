"""A contest: a mask and a score mod, the sizes, and who takes part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.ir import uses
from frisket.lowering.simplify import prepare
from frisket.runtime.attention.entry import reference
from frisket.runtime.masks.mask import Mask, Program, ScoreMod, mask, score

Array = NDArray[Any]
Call = Callable[[], Any]
SAMPLED = 32  # queries in a row that are computed by the interpreter, in three places


class NoWordsError(Exception):
    """A peer cannot be told this mask or score mod, or does not take these sizes; the text says why."""


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens. `backward` times the forward and the gradients of q, k and v together."""

    q_len: int
    kv_len: int
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    backward: bool = False

    def settings(self) -> dict[str, Any]:
        return {
            "q_len": self.q_len, "kv_len": self.kv_len, "batch": self.batch, "heads": self.heads,
            "kv_heads": self.kv_heads, "head_dim": self.head_dim, "dtype": self.dtype,
            "direction": "forward and backward" if self.backward else "forward",
        }  # fmt: skip

    @property
    def problem(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.q_len, self.kv_len

    def drawn(self) -> tuple[Array, Array, Array, Array]:
        """Normal q, k, v and a cotangent, float32 [batch, heads, length, dim]; the same at every call."""
        draw = np.random.default_rng(0)
        shapes = [(self.heads, self.q_len), *[(self.kv_heads, self.kv_len)] * 2, (self.heads, self.q_len)]
        q, k, v, cotangent = (draw.standard_normal((self.batch, *x, self.head_dim), np.float32) for x in shapes)
        return q, k, v, cotangent


@dataclass(frozen=True)
class Contest:
    """One row: what everybody computes."""

    name: str
    mask: Mask | None
    score: ScoreMod | None
    sizes: Sizes

    @property
    def program(self) -> Program:
        return Program(self.mask, self.score)

    @property
    def everything(self) -> bool:
        """Whether it is plain that every query sees every key."""
        return self.mask is None or prepare(self.mask.expr, None)[0] is None

    def dense(self) -> Array:
        """The mask by the interpreter, bool [1 or batch, 1 or heads, q_len, kv_len]."""
        s, m = self.sizes, self.mask
        if m is None:
            return np.ones((1, 1, s.q_len, s.kv_len), bool)
        simple, _ = prepare(m.expr, None)
        read = frozenset() if simple is None else uses(simple)
        batch, heads = (n if name in read else 1 for name, n in (("b", s.batch), ("h", s.heads)))
        return m.dense(s.q_len, s.kv_len, batch=batch, heads=heads)

    def window(self) -> int | None:
        """How many keys a query sees up to its own under a causal window (0: all, plain causal); None otherwise."""
        s = self.sizes
        if self.mask is None or s.q_len != s.kv_len:
            return None

        def means(other: Mask) -> bool:
            assert self.mask is not None
            return bool(self.mask.equivalent(other, s.q_len, s.kv_len, batch=s.batch, heads=s.heads))

        if means(mask("causal")):
            return 0
        layout = self.mask.layout(s.q_len, s.kv_len, batch=s.batch, heads=s.heads)
        n = int(layout.row_counts.reshape(-1)[-1])  # of the last query
        return n if n and means(mask("causal & window(n)", n=n)) else None

    def oracle(self) -> Iterator[tuple[slice, Array]]:
        """(queries, float64 output [batch, heads, queries, dim]) at the start, middle and end; of gradients nothing."""
        if self.sizes.backward:
            return
        q, k, v, _ = self.sizes.drawn()
        n = min(SAMPLED, self.sizes.q_len)
        for start in sorted({0, (self.sizes.q_len - n) // 2, self.sizes.q_len - n}):
            at = slice(start, start + n)
            yield at, reference(
                q[:, :, at], k, v, self.mask, self.score, layout="bhsd", origin=(0, 0, start, 0),
                sizes=self.sizes.problem,
            )  # fmt: skip


@dataclass(frozen=True)
class Contestant:
    """One way to compute it. `missing`: why it does not run here; `prepare` makes the call, or raises NoWordsError."""

    name: str
    prepare: Callable[[Contest], Call]
    ours: bool = False
    missing: str = ""
    family: str = ""  # what --peers calls it


@dataclass(frozen=True)
class Stage:
    """A framework on a device: its contestants, and what it takes to compare and to time them."""

    name: str
    contestants: tuple[Contestant, ...]
    numpy: Callable[[Any], list[Array]]  # what a call returned, float32, each [batch, heads, length, dim]
    clock: Callable[[Call], float]
    truth: Callable[[Contest], Iterable[tuple[slice, Array]]] = Contest.oracle  # some rows of the right result
    rest: float = 0.0  # seconds before each call, where one gives memory back after it has answered
    machine: Mapping[str, Any] = field(default_factory=dict)


def standard(sizes: Sizes) -> list[Contest]:
    """The masks that are raced where nobody names one: causal, a window, packed documents, score mods, an image."""
    n = sizes.kv_len
    doc = np.sort(np.random.default_rng(0).integers(0, 16, n)).astype(np.int32)
    slope = np.exp2(-8 * np.arange(1, sizes.heads + 1) / sizes.heads).astype(np.float32)
    found = [
        Contest("causal", mask("causal"), None, sizes),
        Contest("causal & window(256)", mask("causal & window(256)"), None, sizes),
        Contest("causal & same(doc)", mask("causal & same(doc)", doc=doc), None, sizes),
        Contest("causal, softcap(50)", mask("causal"), score("softcap(50)"), sizes),
        Contest("causal, ALiBi", mask("causal"), score("score + slope[h] * (k - q)", slope=slope), sizes),
    ]
    side = math.isqrt(n)
    if side * side == n == sizes.q_len and side >= 8:
        kernel = min(13, side // 2 * 2 - 1)
        text = f"natten2d({side}, {side}, {kernel}, {kernel})"
        found.append(Contest(text, mask(text), None, sizes))
    return found
