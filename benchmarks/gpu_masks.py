"""The masks of gpu.py as frisket, flex_attention, SDPA and plain torch take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from gpu_scale import Call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import frisket as fk

DOCUMENTS = 12
SDPA = {"SDPA cudnn": SDPBackend.CUDNN_ATTENTION, "SDPA flash": SDPBackend.FLASH_ATTENTION}


def everything(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= 0


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def window(n: int) -> Any:
    return lambda b, h, q, k: (q >= k) & (q - k < n)


def sinks_and_window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & ((q - k < 1024) | (k < 4))


def softcap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 50 * torch.tanh(score / 50)


@dataclass(frozen=True)
class Contest:
    """A mask and a score mod in our words and in flex_attention's; `is_causal` is SDPA's, None where it has no word."""

    mask: str | None
    peer_mask: Any
    score: str | None = None
    peer_score: Any = None
    params: dict[str, Any] = field(default_factory=dict)
    is_causal: bool | None = None


def contests(length: int, heads: int, device: str) -> dict[str, Contest]:
    """By name, for one length in tokens."""
    draw = torch.Generator().manual_seed(0)
    doc = torch.randint(0, DOCUMENTS, (length,), generator=draw).sort().values.to(device, torch.int32)
    slope = torch.exp2(-8 * torch.arange(1, heads + 1) / heads).to(device)
    prefix = length // 8
    return {
        "full": Contest(None, everything, is_causal=False),
        "causal": Contest("causal", causal, is_causal=True),
        "window 128": Contest("causal & window(128)", window(128)),
        "window 1024": Contest("causal & window(1024)", window(1024)),
        f"{DOCUMENTS} documents": Contest(
            "causal & same(doc)", lambda b, h, q, k: (q >= k) & (doc[q] == doc[k]), params={"doc": doc}
        ),
        "prefix": Contest(
            "prefix(n) | causal", lambda b, h, q, k: (q >= k) | (k < prefix), params={"n": prefix}
        ),
        "sinks, window 1024": Contest("causal & (window(1024) | sinks(4))", sinks_and_window),
        "softcap, causal": Contest("causal", causal, "softcap(50)", softcap),
        "ALiBi, causal": Contest(
            "causal", causal, "score + slope[h] * (k - q)",
            lambda score, b, h, q, k: score + slope[h] * (k - q), {"slope": slope},
        ),
    }  # fmt: skip


def ours(case: Contest) -> fk.Attention:
    return fk.compile(case.mask, case.score, backend="triton", **case.params)


def visible_pairs(case: Contest, length: int) -> int:
    """Of one batch entry and head."""
    params = {n: x.cpu().numpy() if isinstance(x, torch.Tensor) else x for n, x in case.params.items()}
    if case.mask is None:
        return length * length
    names = fk.mask(case.mask).unbound
    return fk.mask(case.mask, **{n: x for n, x in params.items() if n in names}).visible_pairs(length, length)


def flex(case: Contest, arrays: Any, compiled: bool = True) -> Call:
    """With its block mask made beforehand, compiled for these shapes alone."""
    torch._dynamo.reset()  # it gives up after eight masks otherwise
    torch._functorch.config.donated_buffer = False  # a graph is kept, and run backward again and again
    q, k, _ = arrays
    run = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    blocks = None
    if case.mask is not None:
        blocks = create_block_mask(case.peer_mask, None, None, q.shape[2], k.shape[2], device=q.device)
    return partial(run, *arrays, score_mod=case.peer_score, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])


def by_sdpa(case: Contest, arrays: Any, backend: SDPBackend) -> Call:
    def run() -> Any:
        with sdpa_kernel(backend):
            return sdpa(*arrays, is_causal=bool(case.is_causal))

    return run


def dense(case: Contest, arrays: Any) -> Call:
    """Every score in memory, in float32."""
    q, k, v = arrays
    at = torch.arange(k.shape[2], device=q.device)
    head = torch.arange(q.shape[1], device=q.device)[:, None, None]
    seen = case.peer_mask(0, 0, at[:, None], at[None, :])

    def run() -> Any:
        score = (q @ k.transpose(2, 3)).float() * q.shape[3] ** -0.5
        if case.peer_score is not None:
            score = case.peer_score(score, 0, head, at[:, None], at[None, :])
        return torch.softmax(score.masked_fill(~seen, -torch.inf), 3).to(v.dtype) @ v

    return run


def peers(case: Contest, arrays: Any, dry: bool) -> dict[str, Callable[[], Call]]:
    """All that can be asked; each is built when it is first called, and may fail then."""
    found: dict[str, Callable[[], Call]] = {"flex": lambda: flex(case, arrays, not dry)}
    if case.is_causal is not None and not dry:
        found |= {name: partial(by_sdpa, case, arrays, backend) for name, backend in SDPA.items()}
    if arrays[0].shape[2] <= 2048:
        found["dense"] = lambda: dense(case, arrays)
    return found
