"""Targets that attend: outputs and gradients beside dense attention in float64 by torch, without any of frisket."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from support.torch.dense import dense

import frisket as fk
from frisket.dsl.evaluate import evaluate
from frisket.lowering.simplify import canonical, simplify

from . import scores
from .problem import Problem

Tensor = Any
CLOSE = 1e-8  # of float64 beside float64, a part of the largest entry
SHAPE = 2, 3, 6, 9  # of what a score mod alone is asked about
DIM = 8


def number_of(text: str) -> int:
    return zlib.crc32(text.encode())


def close(name: str, found: Any, wanted: Tensor, allowed: float = CLOSE) -> None:
    """Equal where `wanted` is infinite, and elsewhere near it: by `allowed` parts of its largest entry, or of 1."""
    ours, theirs = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert ours.shape == theirs.shape, f"{name}: shape {ours.shape}"
    finite = np.isfinite(theirs)
    assert (ours[~finite] == theirs[~finite]).all(), f"{name}: an infinite entry"
    if finite.any():
        worst = np.abs(ours[finite] - theirs[finite]).max() / max(1.0, np.abs(theirs[finite]).max())
        assert worst <= allowed, f"{name}: off by {worst:.3g}"


def arrays(shape: tuple[int, ...], number: int, dtype: Any = torch.float64) -> list[Tensor]:
    """q, k, v and a cotangent. Key heads are as many as heads, or one."""
    draw = torch.Generator().manual_seed(number)
    batch, heads, q_len, kv_len = shape
    kv_heads = heads if number % 3 else 1
    sizes = [(heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len), (heads, q_len)]
    return [torch.randn(batch, h, n, DIM, generator=draw, dtype=dtype) for h, n in sizes]


def score(text: str) -> str:
    """A score mod: its values by the interpreter, as written, simplified and as functions of Python; attention with it
    and all gradients, beside autograd."""
    number = number_of(text)
    learned = {n: x.float().double() for n, x in scores.parameters(text, number).items()}
    mod = fk.score(text, **{n: x.numpy() for n, x in learned.items()})
    draw = torch.Generator().manual_seed(number)
    x = 2 * torch.randn(SHAPE, generator=draw, dtype=torch.float64)
    at = {n: np.arange(size).reshape([-1 if i == j else 1 for j in range(4)])
          for i, (n, size) in enumerate(zip("bhqk", SHAPE, strict=True))}  # fmt: skip
    wanted = scores.value(text, x, learned)

    def compare(name: str, e: Any, params: Any, allowed: float = CLOSE) -> None:
        env = {**at, **{n: np.asarray(t).item() for n, t in params.items() if not np.ndim(t)}, "score": x.numpy()}
        tables = {n: np.asarray(t) for n, t in params.items() if np.ndim(t)}
        close(name, np.broadcast_to(evaluate(e, env, tables), SHAPE), wanted, allowed)

    compare("value", mod.expr, mod.params)
    compare("simplified", simplify(mod.expr), mod.params)
    same = canonical(mod.expr)
    compare("canonical", same.expr, {n: mod.params[old] for n, old in same.names.items()})
    for name, function in scores.functions(text, learned).items():
        read = fk.score(function)
        compare(name, read.expr, read.params, 1e-6)  # constants of float32
    trained(torch.ones(SHAPE, dtype=torch.bool), None, text, number)
    return str(mod)


def gradients(p: Problem) -> str:
    """A program with a score mod, in float64: out, lse, and gradients of q, k, v and learned values."""
    m = fk.mask(p.text, **p.bound)
    number = number_of(p.text)
    trained(torch.from_numpy(p.seen.copy()), m, scores.make_score(number), number)
    return str(m)


def trained(seen: Tensor, mask: Any, text: str, number: int, **options: Any) -> None:
    *inputs, cotangent = arrays(tuple(seen.shape), number)
    learned = scores.parameters(text, number)
    leaves = [x.requires_grad_() for x in (*inputs, *learned.values())]
    out, lse, _ = dense(*inputs, seen, lambda x: scores.value(text, x, learned))
    wanted = torch.autograd.grad(out, leaves, cotangent, allow_unused=True, materialize_grads=True)
    if not all(x.isfinite().all() for x in wanted):
        return
    att = fk.compile(mask, score=text, backend="library", **options)
    ours, ours_lse = att(*inputs, return_lse=True, **learned)
    close("out", ours.detach(), out.detach())
    close("lse", ours_lse.detach(), lse.detach())
    found = torch.autograd.grad(ours, leaves, cotangent, allow_unused=True, materialize_grads=True)
    for name, a, b in zip(["dq", "dk", "dv", *(f"d {n}" for n in learned)], found, wanted, strict=True):
        close(name, a, b)


def in_jax(att: Any, given: tuple[Tensor, ...], more: dict[str, Any]) -> tuple[Any, Any]:
    """(out, lse) of arrays of torch that JAX attends to, in torch's order of axes."""
    import jax.numpy as jnp

    q, k, v = (jnp.asarray(x.transpose(1, 2).numpy()) for x in given)
    out, lse = att(q, k, v, return_lse=True, **more)
    return np.asarray(out).swapaxes(1, 2), np.asarray(lse)


def dropout(p: Problem) -> str:
    """Weights that survive are the same on every backend and in a part of the problem, and grow by the rate."""
    m, number = fk.mask(p.text, **p.bound), number_of(p.text)
    batch, _, q_len, kv_len = sizes = tuple(p.seen.shape)
    rate, seed = (0.1, 0.25, 0.5, 0.9)[number % 4], number >> 1
    q, k, _, _ = arrays(sizes, number, torch.float32)
    v = torch.eye(kv_len).expand(batch, k.shape[1], kv_len, kv_len).contiguous()  # outputs are weights
    wanted = dense(q.double(), k.double(), v.double(), torch.from_numpy(p.seen.copy()))[0].numpy()
    kept = None
    for name in ("library", "native", "xla", "cpp"):
        att = fk.compile(m, dropout=rate, backend=name)
        in_torch = name in ("library", "native")
        ours = att(q, k, v, seed=seed).numpy() if in_torch else in_jax(att, (q, k, v), {"seed": seed})[0]
        kept = ours != 0 if kept is None else kept
        assert ((ours != 0) == kept).all(), f"{name}: drops others"
        close(name, ours, np.where(kept, wanted / (1 - rate), 0), 1e-5 / (1 - rate))
        if in_torch:
            q0, k0 = q_len // 3, kv_len // 2
            part = att(q[:, :, q0:], k[:, :, k0:], v[:, :, k0:], seed=seed, origin=(0, 0, q0, k0), sizes=sizes)
            assert ((part.numpy() != 0) == (kept & (np.arange(kv_len) >= k0))[:, :, q0:]).all(), f"{name}, part: others"
    assert not (kept & ~p.seen).any(), "a hidden position"
    n = int(p.seen.sum())
    off = abs(kept.sum() - n * (1 - rate))
    assert off <= 6 * (n * rate * (1 - rate)) ** 0.5 + 3, f"share: {kept.sum()} of {n} at rate {rate}"
    return str(m)


def reorder(p: Problem) -> str:
    """Tokens in another order: the same outputs and gradients."""
    m, number = fk.mask(p.text, **p.bound), number_of(p.text)
    order = fk.reorder(m, *p.lengths, block=p.block, moving=0.0)
    text = scores.make_score(number)
    trained(torch.from_numpy(p.seen.copy()), m, text, number, reorder=order)
    return str(m)
