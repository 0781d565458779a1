"""Attention with every pair written out in torch, in the dtype of its arrays, for autograd to differentiate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None = None,
    score: Callable[[Tensor], Tensor] | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, largest score) of arrays [batch, heads, length, dim]; key heads may be fewer. `visible` and what
    `score` returns are [batch, heads, q_len, kv_len], `sinks` are logits [heads]. A query that sees nothing, and no
    sink, has 0 and -inf."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if score is None else score(scores)
    scores = scores if visible is None else torch.where(visible, scores, -torch.inf)
    logits = scores
    if sinks is not None:
        logits = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    empty = torch.isneginf(logits).all(-1, keepdim=True)
    logits = torch.where(empty, 0.0, logits)  # no gradient is NaN
    weights = torch.where(empty, 0.0, logits.softmax(-1))[..., : k.shape[2]]
    return weights @ v, torch.where(empty[..., 0], -torch.inf, logits.logsumexp(-1)), scores.amax(-1)
