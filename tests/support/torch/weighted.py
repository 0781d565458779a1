"""Weighted programs, and dense attention by them in torch's own operators, written out again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import frisket as fk

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 16, 8


@dataclass(frozen=True)
class Weighted:
    """A program, and the same by functions: `w(m, b, h, q, k, **params)`, `d(total, count, b, h, q, **params)`."""

    mask: str | None
    weight: str
    divide: str | None
    w: Any
    d: Any = None
    seen: Any = None  # (q, k) -> Bool
    score: str | None = None
    m: Any = None
    params: dict[str, Any] = field(default_factory=dict)

    def attention(self, **options: Any) -> Any:
        return fk.compile(self.mask, self.score, weight=self.weight, divide=self.divide, **options)

    def dense(self, q: Any, k: Any, v: Any, **params: Any) -> Any:
        """(out, total), differentiable by torch."""
        batch, heads, q_len, dim = q.shape
        kv_len, group = k.shape[2], heads // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        at = torch.meshgrid(*(torch.arange(n) for n in (batch, heads, q_len, kv_len)), indexing="ij")
        s = q @ k.mT / dim**0.5
        m = s if self.m is None else self.m(s, *at, **params)
        hidden = m == -torch.inf
        hidden = hidden if self.seen is None else hidden | ~self.seen(at[2], at[3])
        w = self.w(torch.where(hidden, 0.0, m), *at, **params)
        w = torch.where(hidden, 0.0, w)
        total, count = w.sum(-1), (~hidden).sum(-1)
        out = w @ v
        if self.d is not None:
            rows = [x[..., 0] for x in at[:3]]
            alone = count == 0
            divisor = self.d(torch.where(alone, 1.0, total), torch.where(alone, 1, count), *rows, **params)
            divisor = torch.where(alone, 0.0, divisor)
            empty = divisor == 0
            out = torch.where(empty[..., None], 0.0, out / torch.where(empty, 1.0, divisor)[..., None])
        return out, total


def causal(q: Any, k: Any) -> Any:
    return q >= k


def table(*shape: int, low: float = -1.0, high: float = 1.0) -> Any:
    g = torch.Generator().manual_seed(sum(shape))
    return low + (high - low) * torch.rand(*shape, generator=g, dtype=torch.float64)


CASES = {
    "sigmoid": Weighted(
        "causal", "sigmoid(score + bias)", None, lambda m, *_, bias: torch.sigmoid(m + bias),
        seen=causal, params={"bias": torch.tensor(-0.3, dtype=torch.float64)},
    ),
    "relu squared": Weighted(
        "causal & window(9)", "relu(score) ** 2", "count", lambda m, *_: m.relu() ** 2, lambda t, n, *_: n.to(t),
        seen=lambda q, k: (q >= k) & (q - k < 9),
    ),
    "retention": Weighted(
        "causal", "score * gamma[h] ** (q - k)", "max(abs(total), 1)",
        lambda m, b, h, q, k, gamma: m * gamma[h] ** (q - k), lambda t, n, *_, gamma: t.abs().clamp(min=1.0),
        seen=causal, params={"gamma": table(HEADS, low=0.7, high=0.99)},
    ),
    "off by one": Weighted(
        "q > k", "exp(min(score, 8))", "total + c[h]", lambda m, *_, c: m.clamp(max=8.0).exp(),
        lambda t, n, b, h, q, c: t + c[h], seen=lambda q, k: q > k, params={"c": table(HEADS, low=0.5, high=2.0)},
    ),
    "linear": Weighted(
        "causal", "score", None, lambda m, *_, t: m, seen=causal, score="softcap(3) + t[k]",
        m=lambda s, b, h, q, k, t: 3 * torch.tanh(s / 3) + t[k], params={"t": table(37)},
    ),
    "hidden by a table": Weighted(
        None, "relu(score + 1)", "count + 1", lambda m, *_, t: (m + 1).relu(), lambda x, n, *_, t: n + 1.0,
        score="score + t[k]", m=lambda s, b, h, q, k, t: s + t[k],
        params={"t": torch.where(torch.arange(37) % 3 == 0, -torch.inf, table(37))},
    ),
    "nothing to divide": Weighted(
        "q > k + 3 & q % 3 > 0", "exp(score)", "total / abs(total) * 2", lambda m, *_: m.exp(),
        lambda t, n, *_: t / t.abs() * 2, seen=lambda q, k: (q > k + 3) & (q % 3 > 0),
    ),
}  # fmt: skip


def arrays(q_len: int = 37, kv_len: int = 37, dtype: Any = torch.float64, seed: int = 0) -> list[Any]:
    """q, k and v [2, heads, length, dim]."""
    g = torch.Generator().manual_seed(seed)
    shapes = (HEADS, q_len, DIM), (KV_HEADS, kv_len, DIM), (KV_HEADS, kv_len, V_DIM)
    return [torch.randn(2, *s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]
