"""Attention to queries, keys and values of float8_e4m3fn as FlashAttention 3 defines it, in numpy; calls, and how wrong
they may be."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

import frisket as fk
from frisket.dsl.evaluate import evaluate
from frisket.lowering import dense
from frisket.lowering.plan import NOWHERE, Problem

SHIFT = 256.0  # the largest weight of a row


@dataclass(frozen=True)
class Call:
    """A call of a mask and a score mod. `blocks`: tokens that share a scale of queries, and one of keys; 0: a head."""

    mask: str | None = "causal"
    score: str | None = None
    q_len: int = 150
    kv_len: int = 150
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (64, 64)
    blocks: tuple[int, int] = (0, 0)
    batch: int = 1
    scaled: bool = True
    values: dict = field(default_factory=dict)
    more: dict = field(default_factory=dict)  # keywords of the call

    def arrays(self) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """((q, k, v), scales): numbers of a normal distribution, scaled to the largest that 8 bits have."""
        draw = torch.Generator().manual_seed(self.q_len + self.kv_len + self.dims[0])
        (heads, kv_heads), (dim, v_dim) = self.heads, self.dims
        shapes = (heads, self.q_len, dim), (kv_heads, self.kv_len, dim), (kv_heads, self.kv_len, v_dim)
        arrays, scales = [], {}
        for name, shape, tokens in zip("qkv", shapes, (*self.blocks, 0), strict=True):
            x = torch.randn(self.batch, *shape, generator=draw)
            x *= 1 + 0.5 * torch.arange(shape[1])[:, None] % 7  # so that blocks have other scales
            if not self.scaled:
                arrays.append(x.to(torch.float8_e4m3fn))
                continue
            tokens = tokens or shape[1]
            largest = torch.stack([b.abs().amax((2, 3)) for b in x.split(tokens, 2)], -1)
            scale = largest / 448
            arrays.append((x / of_tokens(scale, tokens, shape[1])[..., None]).to(torch.float8_e4m3fn))
            scales[f"{name}_scale"] = scale[..., 0] if tokens == shape[1] else scale
        return tuple(arrays), scales


def of_tokens(scale: torch.Tensor, tokens: int, length: int) -> torch.Tensor:
    return scale.repeat_interleave(tokens, -1)[..., :length]


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.as_tensor(np.array(x)).float().to(dtype).double().numpy()


def definition(scores: np.ndarray, v8: np.ndarray, v_scale: np.ndarray) -> np.ndarray:
    """out of modified scores, -inf where hidden, [batch, heads, q, k], and of values and their scales by query head."""
    top = scores.max(-1, keepdims=True)
    weights = SHIFT * np.exp(scores - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    out = rounded(weights, torch.float8_e4m3fn) @ v8 * v_scale[..., None, None] / np.where(total == 0, 1, total)
    return rounded(out, torch.bfloat16)


def scores(call: Call) -> np.ndarray:
    """The modified scores of the call's numbers [batch, heads, q_len, kv_len], -inf where hidden, in float64."""
    (q, k, _), scales = call.arrays()
    group = call.heads[0] // call.heads[1]
    s = q.double() @ k.double().repeat_interleave(group, 1).mT
    if call.scaled:
        of_q, of_k = (
            of_tokens(x if x.ndim == 3 else x[..., None], tokens or length, length)
            for x, tokens, length in zip(
                (scales["q_scale"], scales["k_scale"]), call.blocks, (call.q_len, call.kv_len), strict=True
            )
        )
        s *= of_q.double()[..., :, None] * of_k.double().repeat_interleave(group, 1)[..., None, :]
    s = s.numpy() * call.more.get("scale", call.dims[0] ** -0.5)
    program = fk.compile(call.mask, call.score).program.bind(call.values)
    origin, sizes = call.more.get("origin", NOWHERE), call.more.get("sizes")
    problem = Problem.of(call.q_len, call.kv_len, call.batch, call.heads[0], origin, sizes)
    env = {**dense.coordinates(problem), **program.scalars, "score": s}
    exprs = program.exprs
    m = s if exprs.score is None else np.broadcast_to(evaluate(exprs.score, env, program.tables), s.shape)
    return m if exprs.mask is None else np.where(dense.visible(exprs.mask, env, program.tables, s.shape), m, -np.inf)


def check(call: Call, out: torch.Tensor, lse: torch.Tensor) -> None:
    """The error of out is at most twice that of the definition, against float64 on the same numbers; lse is right."""
    (q, k, v), scales = call.arrays()
    group, more = call.heads[0] // call.heads[1], {**call.more, **call.values}
    want, want_lse = fk.reference(
        q, k, v, call.mask, call.score, layout="bhsd", return_lse=True, **scales, **more
    )  # fmt: skip
    v_scale = scales.get("v_scale", torch.ones(call.batch, call.heads[1]))
    v8, v_scale = (x.double().repeat_interleave(group, 1).numpy() for x in (v, v_scale))
    theirs = np.abs(definition(scores(call), v8, v_scale) - want).max()
    ours = np.abs(out.double().numpy() - want).max()
    assert out.dtype is torch.bfloat16
    assert ours <= 2 * theirs + 1e-6, (ours, theirs)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=3e-6, atol=6e-6)  # products are exact, sums are float32


def run(call: Call, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the Gluon kernel."""
    (q, k, v), scales = call.arrays()
    more = dict(call.more)
    options |= {n: more.pop(n) for n in ("scale",) if n in more}
    att = fk.compile(call.mask, call.score, backend="gluon", **options)
    result: tuple[torch.Tensor, torch.Tensor] = att(q, k, v, return_lse=True, **scales, **more, **call.values)
    return result
