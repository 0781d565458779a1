"""The part of gpu.py of queries, keys and values of float8_e4m3fn: whether the Gluon forward is as right as the
definition of FlashAttention 3 on the same numbers, and its rate beside the forward of bfloat16 and FlashAttention 3."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from gpu_scale import Measure, Row, Scale, Times, rates, watched

import frisket as fk
from frisket.lowering import dense
from frisket.lowering.dtypes import FP8
from frisket.lowering.plan import Problem

MASKS = {"causal": "causal", "full": None, "window": "causal & window(1024)"}
TOKENS = 1000  # no multiple of any tile
BLOCKS = (0, 128, 64)  # tokens that share a scale; 0: those of a head
ROW = re.compile(r"(right|speed): (\w+), D (\d+), (?:a scale for (\d+) tokens|a scale for a head)")
# arXiv 2407.08608, the abstract: no mask, head size 256
PUBLISHED = "FlashAttention 3 has close to 1,200 TFLOP/s in FP8 by its paper, and up to 740 in FP16, on an H100"


def rows(scale: Scale) -> list[str]:
    dims = (32,) if scale.dry else (64, 128, 256)
    found = [(mask, dim, tokens) for mask in MASKS for dim in dims for tokens in BLOCKS]
    names = [
        f"{mask}, D {dim}, a scale for {f'{tokens} tokens' if tokens else 'a head'}" for mask, dim, tokens in found
    ]
    return [f"{kind}: {name}" for kind in ("right", "speed") for name in names]


def eight(row: str, scale: Scale) -> Measure:
    parsed = ROW.fullmatch(row)
    assert parsed is not None, row
    kind, mask, dim, tokens = parsed[1], MASKS[parsed[2]], int(parsed[3]), int(parsed[4] or 0)
    # the reference stands for the kernel where there is no GPU
    att = fk.compile(mask, backend="dense" if scale.dry else "gluon")
    return (right if kind == "right" else speed)(att, mask, dim, tokens, scale)


def drawn(length: int, heads: int, dim: int, tokens: int, scale: Scale) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """q, k and v of 8 bits, and their scales: the largest of a block is 448."""
    torch.manual_seed(0)
    arrays, scales = [], {}
    for name in "qkv":
        x = torch.randn(1, heads, length, dim, device=scale.device)
        share = tokens if tokens and name != "v" else length
        largest = torch.stack([b.abs().amax((2, 3)) for b in x.split(share, 2)], -1) / 448
        of_tokens = largest.repeat_interleave(share, -1)[..., :length, None]
        arrays.append((x / of_tokens).to(getattr(torch, FP8)))
        scales[f"{name}_scale"] = largest[..., 0].contiguous() if share == length else largest
    return arrays, scales


def right(att: fk.Attention, mask: str | None, dim: int, tokens: int, scale: Scale) -> Measure:
    """Errors of out and lse against float64, and those of FlashAttention 3's definition, as parts of the largest
    number. The tensor cores of Hopper add products of 8 bits with fewer bits than float32 has."""
    arrays, scales = drawn(scale.lengths[0] if scale.dry else TOKENS, 2, dim, tokens, scale)
    out, lse = att(*arrays, return_lse=True, **scales)

    def measure() -> Iterator[Row]:
        host, of = [x.cpu() for x in arrays], {n: x.cpu() for n, x in scales.items()}
        want, want_lse = fk.reference(*host, mask, layout="bhsd", return_lse=True, **of)
        length = host[0].shape[2]
        whole = {n: x if x.ndim == 3 else x[..., None] for n, x in of.items()}
        share = {n: tokens if x.shape[2] > 1 else length for n, x in whole.items()}
        q, k, v = (
            (x.double() * whole[n].double().repeat_interleave(share[n], -1)[..., :length, None]).numpy()
            for x, n in zip(host, ("q_scale", "k_scale", "v_scale"), strict=True)
        )
        exprs = fk.compile(mask).program.exprs
        call = dense.DenseCall(exprs, dim**-0.5, {}, {}, Problem(length, length, 1, 2), weights=dense.in_8_bits)
        defined = torch.as_tensor(dense.attention(q, k, v, call)[0]).bfloat16().double().numpy()
        largest = abs(want).max()
        error = {
            "out": float(abs(out.cpu().double().numpy() - want).max() / largest),
            "out, by the definition": float(abs(defined - want).max() / largest),
            "lse": float(abs(lse.cpu().double().numpy() - want_lse).max()),
        }
        good = error["out"] <= 2 * error["out, by the definition"] + 1e-6
        notes = {} if good else {"out": "errs by more than twice the definition"}
        yield {"figures": {"error": error, "cases": {"passed": int(good), "failed": int(not good)}}, "notes": notes}

    return measure


def speed(att: fk.Attention, mask: str | None, dim: int, tokens: int, scale: Scale) -> Measure:
    """TFLOP/s of visible work; frisket's time has the copy of the values."""
    length, heads = scale.lengths[len(scale.lengths) // 2], max(1, scale.width // dim)
    arrays, scales = drawn(length, heads, dim, tokens, scale)
    half = [x.float().to(torch.bfloat16) for x in arrays]
    plain = fk.compile(mask, backend="aten" if scale.dry else "gluon")
    calls = {"frisket": lambda: att(*arrays, **scales), "frisket, bfloat16": lambda: plain(*half)}
    notes: dict[str, Any] = {"published": PUBLISHED}
    if mask in (None, "causal") and not tokens and not scale.dry:
        try:
            from flash_attn_interface import flash_attn_func  # type: ignore[import-not-found]

            turned = [x.transpose(1, 2).contiguous() for x in arrays]
            of = {f"{n}_descale": scales[f"{n}_scale"] for n in "qkv"}
            calls["flash 3"] = lambda: flash_attn_func(*turned, causal=mask == "causal", **of)
            calls["flash 3"]()
        except Exception as error:  # not installed, or of another interface
            calls.pop("flash 3", None)
            notes["flash 3"] = f"{type(error).__name__}: {error}"[:200]
    for call in calls.values():
        call()
    work = 4.0 * heads * visible(mask, length) * dim

    def of_times(times: Times) -> Row:
        row = rates(times, work)
        ms = {n: statistics.median(t) for n, t in times.items()}
        row["figures"]["speed-up"] = {"over bfloat16": ms["frisket, bfloat16"] / ms["frisket"]}
        return row

    return lambda: watched(calls, scale, of_times, notes)


def visible(mask: str | None, length: int) -> int:
    """The pairs of queries and keys that a mask shows."""
    if mask is None:
        return length * length
    width = min(length, 1024) if "window" in mask else length
    return width * (width + 1) // 2 + (length - width) * width
