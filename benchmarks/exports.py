"""Every export at 64k and 1M tokens, and beside the peer that makes the same thing: `python benchmarks/exports.py`.

Peers evaluate every element, or walk every tile in Python: they are asked for 4k to 16k tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import process_mask
from layout import milliseconds
from store import save
from torch.nn.attention.flex_attention import create_block_mask

import frisket as fk
from frisket.dsl.errors import ExportError
from frisket.runtime.bench.machine import turn_about

EXPORTS: dict[str, Callable[[Any], Any]] = {
    "to_varlen": lambda layout: layout.to_varlen(),
    "to_slices": lambda layout: layout.to_slices(),
    "to_flashmask": lambda layout: layout.to_flashmask(),
    "to_bsr": lambda layout: layout.to_bsr(),
    "to_fa4(compact=True)": lambda layout: layout.to_fa4(compact=True),
    "to_block_mask": lambda layout: layout.to_block_mask(),
    "to_splash": lambda layout: layout.to_splash(),
}


def masks(n: int) -> dict[str, fk.Mask]:
    cuts = np.sort(np.random.default_rng(0).choice(n, n // 512, replace=False))
    doc = np.searchsorted(cuts, np.arange(n)).astype(np.int32)
    return {
        "causal & window(1024)": fk.mask("causal & window(1024)"),
        "causal & same(doc)": fk.mask("causal & same(doc)", doc=doc),
    }


def exports(n: int) -> dict[str, Any]:
    """Milliseconds of each export from a fresh layout, the layout not counted; or why it is refused."""
    rows: dict[str, Any] = {}
    for name, mask in masks(n).items():
        rows[name] = {}
        for export, run in EXPORTS.items():
            try:
                rows[name][export] = milliseconds(lambda r=run, m=mask: r(m.layout(n, n)), rounds=3)
            except ExportError as e:
                rows[name][export] = str(e).splitlines()[0]
        rows[name]["layout alone"] = milliseconds(lambda m=mask: m.layout(n, n), rounds=3)
    return rows


def block_mask(n: int) -> dict[str, dict[str, float]]:
    """Beside `create_block_mask`, eager, on the same mask; the layout counts as ours."""
    ours = masks(n)
    doc = torch.from_numpy(np.array(ours["causal & same(doc)"].tables["doc"]))
    theirs = {
        "causal & window(1024)": lambda b, h, q, k: (q >= k) & (q - k < 1024),
        "causal & same(doc)": lambda b, h, q, k: (q >= k) & (doc[q] == doc[k]),
    }
    return {
        name: turn_about(
            lambda m=mask: m.layout(n, n).to_block_mask(),
            lambda f=theirs[name]: create_block_mask(f, None, None, n, n, "cpu"), rounds=5,
        )
        for name, mask in ours.items()
    }  # fmt: skip


def mask_info(n: int) -> dict[str, float]:
    """Beside splash attention's `process_mask`, its cache emptied."""

    def peer() -> None:
        process_mask.func.cache_clear()
        process_mask(splash_masks.MultiHeadMask([splash_masks.LocalMask((n, n), (1023, 0), 0)]), (128, 128))

    return turn_about(lambda: fk.mask("causal & window(1024)").layout(n, n).to_splash(), peer, rounds=3)


def main() -> None:
    torch.set_num_threads(1)
    found = {
        "ms": {n: exports(n) for n in (2**16, 2**20)},
        "beside_create_block_mask": {n: block_mask(n) for n in (2**12, 2**13)},
        "beside_process_mask": {n: mask_info(n) for n in (2**12, 2**14)},
    }
    save("exports", found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
