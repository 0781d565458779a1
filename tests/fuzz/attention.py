"""Targets that attend: outputs and gradients beside dense attention in float64 by torch, without any of frisket."""

from __future__ import annotations

import os
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
BACKEND = os.environ.get("WEIGHTS_BACKEND", "library")  # of the target `weights`: native, triton, pallas-tpu, ...


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


def statistics(p: Problem) -> str:
    """Columns, entropies and the largest weights under a program and a score mod: of torch, with gradients, in
    float64."""
    m, number = fk.mask(p.text, **p.bound), number_of(p.text)
    text, seen = scores.make_score(number), torch.from_numpy(p.seen.copy())
    q, k, v, _ = arrays(tuple(p.seen.shape), number)
    learned = scores.parameters(text, number)
    sinks = torch.linspace(-1, 1, q.shape[1], dtype=torch.float64) if number % 2 else None
    leaves = [x.requires_grad_() for x in (q, k, *learned.values(), *(() if sinks is None else (sinks,)))]
    eye = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
    w, dense_lse, _ = dense(q, k, eye, seen, lambda x: scores.value(text, x, learned), sinks)
    entropy = -(w * w.clamp_min(1e-300).log()).sum(-1)
    if sinks is not None:
        log_sink = sinks[:, None] - dense_lse
        entropy = entropy - log_sink.exp() * log_sink
    per, top = ("query", "key")[number // 2 % 2], 1 + number % 4
    columns = w.sum(2) if per == "query" else w.sum(2).unflatten(1, (k.shape[1], -1)).sum(2)
    asked = {"columns": True, "entropy": True, "argmax": True, "top": top, "per": per}
    att = fk.compile(m, score=text, backend="library", tile=(16, 16) if number % 5 else None)
    lse = att(q, k, v, sinks=sinks, return_lse=True, **learned)[1] if number % 3 == 0 else None
    found = att.statistics(q, k, v, sinks=sinks, lse=lse, **asked, **learned)

    def compare(found: fk.Statistics, allowed: float) -> None:
        close("columns", found.columns.detach(), columns.detach(), allowed)
        close("entropy", found.entropy.detach(), entropy.detach(), max(allowed, 1e-7))
        at, weight = found.top, found.top_weight.detach()
        assert (at[..., 0] == found.argmax).all(), "argmax: is not the first of top"
        named = at >= 0
        assert (named.sum(-1) == (seen & (w > 0)).sum(-1).clamp_max(top)).all() or (w == 0).any(), "top: how many"
        wide = torch.nn.functional.pad(w.detach(), (0, max(0, top - w.shape[-1])))
        close("top", weight, wide.topk(top).values, allowed)
        close("weight", torch.where(named, weight, 0), torch.where(named, wide.gather(-1, at.clamp_min(0)), 0), allowed)

    compare(found, CLOSE)
    if not columns.requires_grad:  # the score mod reads nothing that has a gradient
        return str(m)
    draw = torch.Generator().manual_seed(number)
    cotangents = [torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in (columns, entropy)]
    more = {"allow_unused": True, "materialize_grads": True}
    wanted = torch.autograd.grad([columns, entropy], leaves, cotangents, **more)
    if all(x.isfinite().all() for x in wanted):
        ours = torch.autograd.grad([found.columns, found.entropy], leaves, cotangents, **more)
        for name, a, b in zip(["dq", "dk", *(f"d {n}" for n in learned), "dsinks"], ours, wanted, strict=False):
            close(name, a, b, 1e-6)
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


WEIGHTS = (
    "sigmoid(score)", "relu(score) ** 2", "score", "exp(min(score, 3.0))", "score * 0.8 ** abs(q - k)",
    "softplus(score)", "tanh(score)", "sigmoid(score) * 0.9 ** (q - k)",
)  # fmt: skip
DIVISORS: dict[str | None, Any] = {
    None: None,
    "count": lambda total, count: count,
    "total": lambda total, count: total,
    "total + 1": lambda total, count: total + 1,
    "max(abs(total), 1)": lambda total, count: total.abs().clamp(min=1.0),
    "sqrt(count) + 0.5": lambda total, count: count.sqrt() + 0.5,
}


def weights(p: Problem) -> str:
    """A program with a score mod, a weight and a divisor: out, and gradients of q, k, v and learned values."""
    m, number = fk.mask(p.text, **p.bound), number_of(p.text)
    weight = WEIGHTS[number % len(WEIGHTS)] if number % 3 else scores.make_score(number + 1, smooth=True)
    divide, divisor = [*DIVISORS.items()][number // 7 % len(DIVISORS)]
    # steps such as floor differ where scores cancel up to rounding
    mod, seen = scores.make_score(number, smooth=True), torch.from_numpy(p.seen.copy())
    *inputs, cotangent = arrays(tuple(seen.shape), number)
    learned = scores.parameters(f"{mod} {weight}", number)
    leaves = [x.requires_grad_() for x in (*inputs, *learned.values())]
    q, k, v = inputs
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = scores.value(mod, q @ k.mT / DIM**0.5, learned)
    hidden = ~seen | (s == -torch.inf)
    w = torch.where(hidden, 0.0, scores.value(weight, torch.where(hidden, 0.0, s), learned))
    out, count = w @ v, (~hidden).sum(-1).double()
    if divisor is not None:
        d = torch.where(count == 0, 0.0, divisor(w.sum(-1), count))
        if ((d.abs() < 1e-3) & (d != 0)).any():  # a quotient by what is nearly 0 has no digits to compare
            return str(m)
        out = torch.where((d == 0)[..., None], 0.0, out / torch.where(d == 0, 1.0, d)[..., None])
    wanted = torch.autograd.grad(out, leaves, cotangent, allow_unused=True, materialize_grads=True)
    if not all(x.isfinite().all() for x in (out, *wanted)):
        return str(m)
    att = fk.compile(m, mod, weight=weight, divide=divide, backend=BACKEND)
    dtype = torch.float64 if BACKEND == "library" else torch.float32
    allowed = CLOSE if BACKEND == "library" else 1e-3
    narrow = [x.detach().to(dtype) for x in (*leaves, cotangent)]
    answers = weights_in_jax if BACKEND in ("xla", "pallas-tpu") else weights_in_torch
    found = answers(att, narrow[:3], dict(zip(learned, narrow[3:-1], strict=True)), narrow[-1])
    for name, a, b in zip(["out", "dq", "dk", "dv", *(f"d {n}" for n in learned)], found, (out, *wanted), strict=True):
        close(name, a, b.detach(), allowed)
    return f"{m} {mod} {weight} {divide}"


def weights_in_torch(att: Any, arrays: list[Tensor], learned: dict[str, Tensor], cotangent: Tensor) -> list[Tensor]:
    """The output of torch, and gradients of the arrays and of learned values."""
    leaves = [x.requires_grad_() for x in (*arrays, *learned.values())]
    out = att(*leaves[:3], **learned)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent, allow_unused=True, materialize_grads=True)]


def weights_in_jax(att: Any, arrays: list[Tensor], learned: dict[str, Tensor], cotangent: Tensor) -> list[Any]:
    """What `weights_in_torch` returns, of JAX, in torch's order of axes."""
    import jax
    import jax.numpy as jnp

    q, k, v, end = (jnp.asarray(x.transpose(1, 2).numpy()) for x in (*arrays, cotangent))
    out, back = jax.vjp(lambda q, k, v, x: att(q, k, v, **x), q, k, v, {n: jnp.asarray(x) for n, x in learned.items()})
    *slopes, of_learned = back(end)
    return [*(np.asarray(x).swapaxes(1, 2) for x in (out, *slopes)), *(of_learned[n] for n in learned)]


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
