"""The masks of gpu.py as frisket, flex_attention, SDPA, FlashAttention and plain torch take them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from typing import Any

import torch
import torch._functorch.config
from gpu_scale import Call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import frisket as fk

DOCUMENTS, EQUAL = 12, "documents of 512"
FLASH = {  # module -> name; the first argument of each is [batch, length, heads, dim]
    "flash_attn_interface": "FlashAttention 3", "flash_attn.cute": "FlashAttention 4", "flash_attn": "FlashAttention 2",
}  # fmt: skip
TUTORIAL = "TRITON_TUTORIAL"  # the path of 06-fused-attention.py of Triton's repository, which its wheel lacks
DENSE = "dense"  # the formula that needs all of the memory
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
    """A mask and a score mod in our words and in flex_attention's; `is_causal` is SDPA's, `flash` the arguments of
    FlashAttention: None where they have no word."""

    mask: str | None
    peer_mask: Any
    score: str | None = None
    peer_score: Any = None
    params: dict[str, Any] = field(default_factory=dict)
    is_causal: bool | None = None
    flash: dict[str, Any] | None = None


def contests(length: int, heads: int, device: str) -> dict[str, Contest]:
    """By name, for one length in tokens."""
    draw = torch.Generator().manual_seed(0)
    doc = torch.randint(0, DOCUMENTS, (length,), generator=draw).sort().values.to(device, torch.int32)
    equal = torch.arange(length, device=device, dtype=torch.int32) // 512
    slope = torch.exp2(-8 * torch.arange(1, heads + 1) / heads).to(device)
    prefix = length // 8
    return {
        "full": Contest(None, everything, is_causal=False, flash={}),
        "causal": Contest("causal", causal, is_causal=True, flash={"causal": True}),
        "window 128": Contest("causal & window(128)", window(128), flash={"causal": True, "window_size": (127, 0)}),
        "window 1024": Contest(
            "causal & window(1024)", window(1024), flash={"causal": True, "window_size": (1023, 0)}
        ),
        f"{DOCUMENTS} documents": Contest(
            "causal & same(doc)", lambda b, h, q, k: (q >= k) & (doc[q] == doc[k]), params={"doc": doc}
        ),
        EQUAL: Contest(
            "causal & same(doc)", lambda b, h, q, k: (q >= k) & (equal[q] == equal[k]), params={"doc": equal}
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


ENGINES = ("flash", "cudnn", "sdpa")  # backends that are kernels of vendors, for GPUs of NVIDIA


def ours(case: Contest, backend: str | None = None, deterministic: bool = True) -> fk.Attention:
    """The generated kernels that a call takes by itself, or a backend; in Triton's interpreter, Triton's."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        backend = backend or "triton"
    return fk.compile(
        case.mask, case.score, backend=backend, deterministic=deterministic, engines=False, **case.params
    )  # fmt: skip


def visible_pairs(case: Contest, length: int) -> int:
    """Of one batch entry and head."""
    params = {n: x.cpu().numpy() if isinstance(x, torch.Tensor) else x for n, x in case.params.items()}
    if case.mask is None:
        return length * length
    names = fk.mask(case.mask).unbound
    return fk.mask(case.mask, **{n: x for n, x in params.items() if n in names}).visible_pairs(length, length)


def flex(case: Contest, arrays: Any, compiled: bool = True) -> Call:
    """With its block mask made beforehand, compiled for these shapes alone."""
    torch._dynamo.config.recompile_limit = 64  # masks and lengths of a process; it gives up after eight otherwise
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
            return sdpa(*arrays, is_causal=bool(case.is_causal), enable_gqa=heads_of_a_key_head(arrays) > 1)

    return run


def by_sdpa_expanded(case: Contest, arrays: Any) -> Call:
    """The kernel that torch chooses, with a copy of the keys and values for every query head, made in each call."""
    return lambda: sdpa(arrays[0], *expanded(arrays), is_causal=bool(case.is_causal))


def heads_of_a_key_head(arrays: Any) -> int:
    q, k, _ = arrays
    return int(q.shape[1] // k.shape[1])


def expanded(arrays: Any) -> list[torch.Tensor]:
    """Keys and values with as many heads as there are query heads."""
    group = heads_of_a_key_head(arrays)
    return [x if group == 1 else x.repeat_interleave(group, 1) for x in arrays[1:]]


def by_flash(case: Contest, arrays: Any, module: str) -> Call:
    run = partial(importlib.import_module(module).flash_attn_func, **(case.flash or {}))

    def call() -> Any:
        out = run(*[x.transpose(1, 2) for x in arrays])
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


def by_tutorial(case: Contest, arrays: Any) -> Call:
    """The forward of Triton's tutorial, which is written for float16."""
    spec = spec_from_file_location("tutorial", os.environ[TUTORIAL])
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := module_from_spec(spec))
    half = [x.detach().half() for x in arrays]
    return lambda: module.attention(*half, bool(case.is_causal), half[0].shape[3] ** -0.5, False)


def dense(case: Contest, arrays: Any) -> Call:
    """Every score in memory, in float32."""
    q = arrays[0]
    at = torch.arange(arrays[1].shape[2], device=q.device)
    head = torch.arange(q.shape[1], device=q.device)[:, None, None]
    seen = case.peer_mask(0, 0, at[:, None], at[None, :])

    def run() -> Any:
        k, v = expanded(arrays)
        score = (q @ k.transpose(2, 3)).float() * q.shape[3] ** -0.5
        if case.peer_score is not None:
            score = case.peer_score(score, 0, head, at[:, None], at[None, :])
        return torch.softmax(score.masked_fill(~seen, -torch.inf), 3).to(v.dtype) @ v

    return run


def peers(case: Contest, arrays: Any, dry: bool, direction: int) -> dict[str, Callable[[], Call]]:
    """All that can be asked; each is built when it is first called, and may fail then."""
    found: dict[str, Callable[[], Call]] = {"flex": lambda: flex(case, arrays, not dry)}
    # an engine's own gradients are asked for: those of most have no order
    for name in ENGINES:
        found[f"frisket, {name}"] = lambda name=name: partial(ours(case, name, deterministic=False), *arrays)
    if not direction and not dry:
        found |= {f"frisket, {n}": lambda n=n: partial(ours(case, n), *arrays) for n in ("triton", "gluon")}
    if direction and not dry:  # the fused backward, in order and in any order; "frisket" has the pair of kernels
        orders = {"gluon": True, "gluon, any order": False}
        found |= {f"frisket, {n}": lambda d=d: partial(ours(case, "gluon", d), *arrays) for n, d in orders.items()}
    if case.is_causal is not None:
        found |= {name: partial(by_sdpa, case, arrays, backend) for name, backend in SDPA.items()}
    if case.is_causal is not None and heads_of_a_key_head(arrays) > 1:
        found["SDPA, expanded heads"] = lambda: by_sdpa_expanded(case, arrays)
    if case.flash is not None and not dry:
        there = {module: name for module, name in FLASH.items() if installed(module)}
        found |= {name: partial(by_flash, case, arrays, module) for module, name in there.items()}
    if case.is_causal is not None and TUTORIAL in os.environ and not direction:
        found["Triton's tutorial, float16"] = partial(by_tutorial, case, arrays)
    if arrays[0].shape[2] <= 2048:
        found[DENSE + (", expanded heads" if heads_of_a_key_head(arrays) > 1 else "")] = lambda: dense(case, arrays)
    return found


def installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that holds it
        return False
