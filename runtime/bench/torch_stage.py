"""Contestants in torch, on the CPU or a GPU: frisket's backends, SDPA, flex_attention, FlashAttention."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from frisket.dsl.errors import FrisketError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import SCORE, SIZES, Expr, free_names, lit, param, substitute, uses, var
from frisket.lowering import dense
from frisket.lowering.kernels.torch_mask_mod import score_mod
from frisket.lowering.plan import needs_int64
from frisket.lowering.simplify import simplify
from frisket.runtime.attention.entry import compile
from frisket.runtime.backends.base import ranked
from frisket.runtime.backends.registry import library, reason
from frisket.runtime.machine.generated import load

from .race import Array, Call, Contest, Contestant, NoWordsError, Stage, seconds

BIASES = 1 << 31  # bytes of a bias for every pair


def stage(device: str, lengths: bool = False) -> Stage:
    """`device` is "cpu" or "cuda". `lengths`: the same contestants meet several lengths, so that flex_attention is
    compiled with torch's defaults; else for these shapes alone, which is faster."""
    import torch

    tiers = [b.name for b in ranked("torch", device)] + ([library("torch")] if device == "cpu" else [])
    found = [Contestant(f"frisket {tier}", partial(_ours, tier, device), True, reason(tier, "torch")) for tier in tiers]
    found += [
        Contestant("SDPA is_causal", partial(_is_causal, device), family="sdpa"),
        Contestant("SDPA with a mask", partial(_masked, device), family="sdpa"),
        Contestant("flex_attention, compiled", partial(_flex, device, lengths), family="flex"),
    ]
    if device == "cuda":
        found.insert(-2, Contestant("SDPA cuDNN is_causal", partial(_cudnn, device), family="sdpa"))
        missing = "" if importlib.util.find_spec("flash_attn") else "flash_attn is not installed"
        found.append(Contestant("FlashAttention", partial(_flash, device), missing=missing, family="flash"))
    properties = torch.cuda.get_device_properties(0) if device == "cuda" else None
    return Stage(
        "torch", tuple(found), _numpy, seconds if device == "cpu" else on_device,
        machine={} if properties is None else {"gpu": properties.name, "cuda": torch.version.cuda},
    )  # fmt: skip


def on_device(call: Call) -> float:
    """Seconds of a call on the GPU: some in a row, the host ahead of all of them."""
    import torch

    many = 5
    cuda: Any = torch.cuda
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda.synchronize()
    cuda._sleep(5_000_000)  # cycles, some milliseconds
    start.record()
    for _ in range(many):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / many


def _numpy(given: Any) -> list[Array]:
    return [x.detach().float().cpu().numpy() for x in (given if isinstance(given, tuple) else (given,))]


def _call(contest: Contest, device: str, attend: Callable[..., Any], swap: bool = False) -> Call:
    """`attend(q, k, v)` on the contest's arrays, and wanted gradients. `swap`: arrays [batch, length, heads, dim]."""
    import torch

    s = contest.sizes
    *arrays, cotangent = (torch.from_numpy(x).to(device, getattr(torch, s.dtype)) for x in s.drawn())
    if swap:
        arrays, cotangent = [x.transpose(1, 2).contiguous() for x in arrays], cotangent.transpose(1, 2).contiguous()

    def turned(xs: Any) -> Any:
        return tuple(x.transpose(1, 2) for x in xs) if swap else xs

    def forward() -> Any:
        with torch.no_grad():
            out = attend(*arrays)
        return turned((out,))[0]

    def both() -> Any:
        return turned(torch.autograd.grad(attend(*arrays), arrays, cotangent))

    if not s.backward:
        return forward
    arrays = [x.requires_grad_() for x in arrays]
    return both


def _ours(tier: str, device: str, contest: Contest) -> Call:
    return _call(contest, device, compile(contest.program, backend=tier))


# -- SDPA -------------------------------------------------------------------------------------------------


def _is_causal(device: str, contest: Contest) -> Call:
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    _plain(contest, "SDPA")
    causal = not contest.everything
    if causal and contest.window() != 0:
        raise NoWordsError("it takes plain causal masks alone, of as many queries as keys")
    s = contest.sizes
    return _call(contest, device, partial(sdpa, is_causal=causal, enable_gqa=s.heads != s.kv_heads))


def _cudnn(device: str, contest: Contest) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    call = _is_causal(device, contest)

    def run() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return call()

    return run


def _masked(device: str, contest: Contest) -> Call:
    """A bool for every pair by the interpreter; where a score mod only adds something, that in the array's dtype."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    s = contest.sizes
    seen: Any = torch.from_numpy(contest.dense()).to(device)
    if contest.score is not None:
        bias = torch.from_numpy(bias_of(contest, "SDPA").copy()).to(device, getattr(torch, s.dtype))
        seen = bias.masked_fill(~seen, -math.inf)
    return _call(contest, device, partial(sdpa, attn_mask=seen, enable_gqa=s.heads != s.kv_heads))


def _plain(contest: Contest, who: str) -> None:
    if contest.score is not None:
        raise NoWordsError(f"{who} has no word for a score mod")


def bias_of(contest: Contest, who: str) -> Array:
    """The bias that equals the score mod, float32 [1 or batch, 1 or heads, q_len, kv_len]."""
    s = contest.sizes
    e, tables = _bound(contest)
    added = next((x for x, y in (e.args, e.args[::-1]) if y is SCORE), None) if e.op == "add" else None
    if added is None or "score" in uses(added):
        raise NoWordsError(f"{who} adds a bias to the score: it has no word for other score mods")
    batch, heads = (n if name in uses(added) else 1 for name, n in (("b", s.batch), ("h", s.heads)))
    if 8 * batch * heads * s.q_len * s.kv_len > BIASES:
        raise NoWordsError(f"a bias for every pair of {heads} heads is more than {BIASES >> 30} GiB")
    env = dense.coordinates(batch, heads, s.q_len, s.kv_len, sizes=s.problem)
    found = np.asarray(evaluate(added, env, tables), np.float32)
    return np.ascontiguousarray(np.broadcast_to(found, (batch, heads, s.q_len, s.kv_len)))


# -- flex_attention ---------------------------------------------------------------------------------------


def _flex(device: str, lengths: bool, contest: Contest) -> Call:
    """A call of torch's flex_attention with our block mask, made beforehand, and our mask_mod and score_mod."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    s = contest.sizes
    if device == "cpu" and s.backward:
        raise NoWordsError("flex_attention has no backward on the CPU")
    if not lengths:
        torch._dynamo.reset()  # it gives up after eight masks otherwise
    layout = None if contest.mask is None else contest.mask.layout(s.q_len, s.kv_len, batch=s.batch, heads=s.heads)
    attend = partial(
        torch.compile(flex_attention, dynamic=None if lengths else False), score_mod=flex_score_mod(contest, device),
        block_mask=None if layout is None else layout.to_block_mask(device), enable_gqa=s.heads != s.kv_heads,
    )  # fmt: skip
    return _call(contest, device, attend)


def flex_score_mod(contest: Contest, device: str) -> Any:
    """The score mod as flex_attention takes it, its tables on `device`; None where there is none."""
    import torch

    if contest.score is None:
        return None
    e, tables = _bound(contest)
    reach = dict(zip("bhqk", contest.sizes.problem, strict=True))
    arrays = {n: np.asarray(tables[n]) for n in free_names(e)[1]}
    arrays = {n: x.astype(np.float32) if x.dtype.kind == "f" else x for n, x in arrays.items()}
    largest = {n: float(np.abs(x).max()) for n, x in arrays.items() if x.dtype.kind == "i"}
    try:
        source = score_mod(
            e, {n: x.shape for n, x in arrays.items()}, reach=reach, int64=needs_int64([e], {**reach, **largest}),
            title=str(contest.score),
        )  # fmt: skip
    except (FrisketError, KeyError) as error:
        raise NoWordsError(f"torch has no word for it: {error}") from None
    given = (torch.from_numpy(x.copy()).to(device) for x in arrays.values())
    return load(source, importable=True, torch=torch, math=math)["make"](*given)


def _bound(contest: Contest) -> tuple[Expr, Any]:
    """The score mod with sizes and scalars written in, and its tables."""
    assert contest.score is not None
    values: dict[Expr, Expr] = {var(n): lit(int(x)) for n, x in zip(SIZES, contest.sizes.problem, strict=True)}
    scalars = free_names(contest.score.expr)[0]
    values |= {param(n, t): lit(contest.score.scalars[n]) for n, t in scalars.items()}
    return simplify(substitute(contest.score.expr, values)), contest.score.tables


# -- FlashAttention ---------------------------------------------------------------------------------------


def _flash(device: str, contest: Contest) -> Call:
    """Causal masks and windows; for 16 bits on GPUs."""
    from flash_attn import flash_attn_func  # type: ignore[import-not-found,unused-ignore]

    _plain(contest, "FlashAttention")
    if contest.sizes.dtype not in ("float16", "bfloat16"):
        raise NoWordsError(f"FlashAttention computes in 16 bits, not in {contest.sizes.dtype}")
    window = contest.window()
    if window is None and not contest.everything:
        raise NoWordsError("flash_attn_func has words for causal masks and causal windows")
    inside = {"window_size": (window - 1, 0)} if window else {}
    attend = partial(flash_attn_func, causal=not contest.everything, **inside)
    return _call(contest, device, attend, swap=True)


def warm_up(device: str) -> None:
    """Run the work that torch does once in a process, whoever computes first."""
    import torch

    x = torch.randn(1, 1, 64, 16, device=device)
    torch.nn.functional.scaled_dot_product_attention(x, x, x)
    if device == "cuda":
        torch.cuda.synchronize()
