"""frisket.sdpa compared with torch's SDPA, under dense masks: `python benchmarks/sdpa.py`.

float32 on one thread of the CPU; time is the process' own. "training" is forward and backward of [2, 4, 2048, 64] under
a mask that earlier calls brought, as in the layers of a model. "recognition" is a forward of [1, 4, S, 64].
In recognition, a "first call" has a mask that no call brought before, and frisket looks for one range of keys in every
row; "table" reads all entries instead. In a "later call" the mask is known; "table" has its plan already and compares
nothing.
Before anything is timed, outputs and gradients have to agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from store import Row, run_parts
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import frisket as fk
from frisket.integrations import sdpa as front
from frisket.runtime.bench.race import processor_seconds, raced

LENGTH, BATCH, HEADS, DIM = 2048, 2, 4, 64


def masks(length: int) -> dict[str, dict[str, Any]]:
    """The keywords of both functions, by what the mask says."""
    q, k = torch.arange(length)[:, None], torch.arange(length)
    causal, packed = q >= k, q // (length // 8) == k // (length // 8)
    real = k < torch.tensor([length, length // 2])[:, None, None, None]
    slopes = torch.tensor([2.0**-n for n in range(HEADS)])[:, None, None]
    far = -torch.inf
    return {
        "no mask": {},
        "is_causal": {"is_causal": True},
        "causal, Bools": {"attn_mask": causal},
        "8 packed documents, causal, Bools": {"attn_mask": packed & causal},
        "8 packed documents, causal, Floats": {
            "attn_mask": torch.zeros(length, length).masked_fill(~(packed & causal), far)
        },
        "causal, half of the second row is padding, Bools": {"attn_mask": real & causal},
        "window of an eighth, causal, Bools": {"attn_mask": causal & (q - k < length // 8)},
        "ALiBi and causal, Floats": {"attn_mask": (slopes * (k - q)).masked_fill(~causal, far)[None]},
        "each pair by chance, Bools": {"attn_mask": torch.rand(length, length) < 0.5},
    }


def arrays(batch: int, length: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(batch, HEADS, length, DIM, requires_grad=True) for _ in range(3)]


def training(rounds: int) -> Iterator[tuple[str, Row]]:
    qkv = arrays(BATCH, LENGTH)
    cotangent = torch.randn(BATCH, HEADS, LENGTH, DIM)

    def step(function: Callable[..., Tensor], how: dict[str, Any]) -> list[Tensor]:
        out = function(*qkv, **how)
        return [out.detach(), *torch.autograd.grad(out, qkv, cotangent)]

    for name, how in masks(LENGTH).items():
        steps = {"frisket": partial(step, fk.sdpa, how), "sdpa": partial(step, scaled_dot_product_attention, how)}
        torch.testing.assert_close(*(run() for run in steps.values()), rtol=0, atol=2e-5)
        yield name, raced(steps, rounds, clock=processor_seconds)


def seen(rounds: int, length: int) -> Iterator[tuple[str, Row]]:
    q, k, v = (x.detach() for x in arrays(1, length))
    for name, how in masks(length).items():
        if name.split(",")[0] not in ("8 packed documents", "window of an eighth", "each pair by chance"):
            continue
        mask = how["attn_mask"]

        def first(ranges: Callable[..., Any], mask: Tensor = mask) -> Tensor:
            front._latest.clear()
            with patch.object(front, "row_ranges", ranges), patch.object(front, "LOOKED_AT", 0):
                return fk.sdpa(q, k, v, mask)

        att = fk.compile("seen[q, k]")
        plan = att.plan(length, length, 1, HEADS, seen=mask if mask.dtype == torch.bool else mask == 0)
        sdpa = partial(scaled_dot_product_attention, q, k, v, mask)
        for when, ranges, table in (
            ("first", partial(first, front.row_ranges), partial(first, lambda seen: None)),
            ("later", partial(fk.sdpa, q, k, v, mask), partial(att, q, k, v, plan=plan)),
        ):
            calls = {"frisket": ranges, "table": table, "sdpa": sdpa}
            for run in calls.values():
                torch.testing.assert_close(run(), sdpa(), rtol=0, atol=2e-5)
            if when == "later":
                first(front.row_ranges)
            yield f"{name}, {length:,} tokens, {when} call", raced(calls, rounds, clock=processor_seconds)


def recognition(rounds: int) -> Iterator[tuple[str, Row]]:
    for length in (512, 2048, 4096):
        yield from seen(rounds, length)


def settings(part: str) -> dict[str, Any]:
    shape = [BATCH, HEADS, LENGTH, DIM] if part == "training" else [1, HEADS, "S", DIM]
    return {"shape": shape, "dtype": "float32", "threads": 1}


def main() -> None:
    torch.set_num_threads(1)
    run_parts(__doc__, {"training": training, "recognition": recognition}, "sdpa", settings)


if __name__ == "__main__":
    main()
