"""Every export at 64k and 1M tokens, and beside the peer that makes the same thing: `python benchmarks/exports.py`.

Peers evaluate every element, or walk every tile in Python: they are asked for 4k to 16k tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import process_mask
from layout import milliseconds
from store import keep, shown
from torch.nn.attention.flex_attention import create_block_mask

import frisket as fk
from frisket.dsl.errors import ExportError
from frisket.runtime.bench.race import raced

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
        ms, refused = {}, {}
        for export, run in EXPORTS.items():
            try:
                ms[export] = milliseconds(lambda r=run, m=mask: r(m.layout(n, n)), rounds=3)
            except ExportError as e:
                refused[export] = str(e).splitlines()[0]
        ms["layout alone"] = milliseconds(lambda m=mask: m.layout(n, n), rounds=3)
        rows[name] = {"figures": {"ms": ms}} | ({"notes": refused} if refused else {})
    return {"rows": rows}


def block_mask(n: int) -> dict[str, Any]:
    """Beside `create_block_mask`, eager, on the same mask; the layout counts as ours."""
    ours = masks(n)
    doc = torch.from_numpy(np.array(ours["causal & same(doc)"].tables["doc"]))
    theirs = {
        "causal & window(1024)": lambda b, h, q, k: (q >= k) & (q - k < 1024),
        "causal & same(doc)": lambda b, h, q, k: (q >= k) & (doc[q] == doc[k]),
    }
    return {
        "rows": {
            name: raced({
                "frisket": lambda m=mask: m.layout(n, n).to_block_mask(),
                "create_block_mask": lambda f=theirs[name]: create_block_mask(f, None, None, n, n, "cpu"),
            }, rounds=5)
            for name, mask in ours.items()
        }
    }  # fmt: skip


def mask_info(n: int) -> dict[str, Any]:
    """Beside splash attention's `process_mask`, its cache emptied."""

    def peer() -> None:
        process_mask.func.cache_clear()
        process_mask(splash_masks.MultiHeadMask([splash_masks.LocalMask((n, n), (1023, 0), 0)]), (128, 128))

    ours = lambda: fk.mask("causal & window(1024)").layout(n, n).to_splash()  # noqa: E731
    return raced({"frisket": ours, "process_mask": peer}, rounds=3)


def main() -> None:
    torch.set_num_threads(1)
    parts: dict[str, tuple[Callable[[int], Any], tuple[int, ...], int]] = {
        "exports": (exports, (2**16, 2**20), 3), "create_block_mask": (block_mask, (2**12, 2**13), 5),
        "process_mask": (mask_info, (2**12, 2**14), 3),
    }  # fmt: skip
    for part, (measure, lengths, rounds) in parts.items():
        rows = {f"{n:,} tokens": measure(n) for n in lengths}
        keep("exports", part, rows, {"rounds": rounds, "threads": 1})
        print(*(shown(n, row) for n, row in rows.items()), sep="\n", flush=True)


if __name__ == "__main__":
    main()
