"""Tensors that are views of every kind torch has, and calls with their gradients on them and on plain copies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

import frisket as fk

SHAPES = {
    "q": (2, 4, 24, 16), "k": (2, 2, 24, 16), "v": (2, 2, 24, 16), "bias": (24, 24), "slope": (4,), "gain": (),
    "sinks": (4,), "dout": (2, 4, 24, 16), "dlse": (2, 4, 24),
}  # fmt: skip
LEARNED = ("q", "k", "v", "bias", "slope", "gain", "sinks")


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape) / 4


def _complex(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.complex(_random(*shape), _random(*shape))


def _windows(*shape: int) -> torch.Tensor:
    """Every row begins one entry behind the row before."""
    return _random(1 + sum(n - 1 for n in shape)).as_strided(shape, [1] * len(shape))


VIEWS: dict[str, Callable[..., torch.Tensor]] = {
    "negated": lambda *s: torch._neg_view(_random(*s)),  # as dense as a copy
    "conjugate": lambda *s: _complex(s).conj().imag,
    "pairs": lambda *s: torch.view_as_real(_complex(s))[..., 1],
    "expanded": lambda *s: _random(*(1 if i == 0 else n for i, n in enumerate(s))).expand(s),
    "one number": lambda *s: _random().expand(s),
    "flipped": lambda *s: _random(*s).flip(tuple(range(len(s)))),
    "turned": lambda *s: _random(*reversed(s)).permute(tuple(reversed(range(len(s))))),
    "overlapping": _windows,
    "sliced": lambda *s: _random(*(2 * n for n in s))[tuple(slice(1, None, 2) for _ in s)],
}


def check(kind: str, backend: str, dtype: torch.dtype, *sets: Collection[str]) -> None:
    """A call in which one of these sets of tensors are views of this kind gives what plain copies of them give."""
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        views = {n: VIEWS[kind](*s) for n, s in SHAPES.items()}
        copies = {n: torch.empty(s).copy_(views[n]) for n, s in SHAPES.items()}
        assert all(x.is_neg() == (kind in ("negated", "conjugate")) for x in views.values())
        assert not any(x.is_neg() for x in copies.values())
        want = _call(copies, backend)
        for which in sets:
            for name, got in _call({n: (views if n in which else copies)[n] for n in SHAPES}, backend).items():
                told = f"{name} where {', '.join(which)} are {kind}"
                close = {} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
                torch.testing.assert_close(got, want[name], **close, msg=lambda m, t=told: f"{t}: {m}")
    finally:
        torch.set_default_dtype(torch.float32)


def _call(given: dict[str, torch.Tensor], backend: str) -> dict[str, Any]:
    x = {n: t.detach().requires_grad_() if n in LEARNED else t for n, t in given.items()}
    att = fk.compile("causal", "gain * score + bias[q, k] + slope[h] * (k - q)", backend=backend)
    own = {n: x[n] for n in ("bias", "slope", "gain", "sinks")}
    out, lse = att(x["q"], x["k"], x["v"], return_lse=True, **own)
    grads = torch.autograd.grad([out, lse], [x[n] for n in LEARNED], [x["dout"], x["dlse"]])
    return {"out": out, "lse": lse, **{f"d{n}": g for n, g in zip(LEARNED, grads, strict=True)}}
