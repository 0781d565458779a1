"""Library tier on the CPU beside torch's own: `python benchmarks/cpu.py`.

Every pair of contestants runs in this process on the same arrays, turn about; the figure is the median of the
ratios peer / frisket (above 1: frisket is faster). Compiled flex_attention takes 12-25 s to compile once per mask.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from machine import fresh, save, seconds, turn_about
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import frisket as fk

BATCH, HEADS, LENGTH, DIM = 1, 8, 4096, 64
DOCUMENTS = 16
BAND = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-255)
SLOPES = 2.0 ** -np.arange(1, HEADS + 1)


def duel(ours: Callable[[], Any], peer: Callable[[], Any], rounds: int) -> dict[str, Any]:
    torch.testing.assert_close(ours(), peer(), rtol=1e-3, atol=1e-4)
    return turn_about(ours, peer, rounds)


def flex(compiled: Any, mask: Any, score: Any, arrays: Any) -> Callable[[], Any]:
    blocks = create_block_mask(mask, None, None, LENGTH, LENGTH, device="cpu")
    return lambda: compiled(*arrays, score_mod=score, block_mask=blocks)


def matmul_peak() -> float:
    """GFLOP/s of a square float32 matrix product, the best of ten."""
    x, y = torch.randn(2048, 2048), torch.randn(2048, 2048)
    return 2 * 2048**3 / min(seconds(lambda: x @ y) for _ in range(10)) / 1e9


def contests(arrays: Any) -> dict[str, tuple[float, Callable[[], Any], Callable[[], Callable[[], Any]]]]:
    """name -> (ratio to reach, frisket, a function that makes the peer)."""
    doc = np.sort(np.random.default_rng(0).integers(0, DOCUMENTS, LENGTH))
    documents, slopes = torch.from_numpy(doc), torch.from_numpy(SLOPES).float()
    compiled = torch.compile(flex_attention, dynamic=False)

    def ours(mask: str, score: str | None = None, **params: Any) -> Callable[[], Any]:
        attention = fk.compile(mask, score, **params)
        return lambda: attention(*arrays)

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < 256)

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (documents[q] == documents[k])

    def softcap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return 50 * torch.tanh(score / 50)

    def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + slopes[h] * (k - q)

    capped = ours("causal", "softcap(50)")
    biased = ours("causal", "score + slope[h] * (k - q)", slope=SLOPES)
    packed = ours("causal & same(doc)", doc=doc)
    return {
        "causal / SDPA is_causal": (
            1.0, ours("causal"), lambda: lambda: scaled_dot_product_attention(*arrays, is_causal=True)),
        "causal & window(256) / SDPA + mask": (
            1.0, ours("causal & window(256)"), lambda: lambda: scaled_dot_product_attention(*arrays, attn_mask=BAND)),
        "causal / flex": (1.0, ours("causal"), lambda: flex(compiled, causal, None, arrays)),
        "causal & window(256) / flex": (
            1.3, ours("causal & window(256)"), lambda: flex(compiled, window, None, arrays)),
        f"causal & same(doc), {DOCUMENTS} documents / flex": (
            1.0, packed, lambda: flex(compiled, same, None, arrays)),
        "softcap(50), causal / flex": (0.9, capped, lambda: flex(compiled, causal, softcap, arrays)),
        "ALiBi, causal / flex": (0.9, biased, lambda: flex(compiled, causal, alibi, arrays)),
    }  # fmt: skip


FIRST = """
import gc, time, torch
q, k, v = (torch.randn(1, 8, 4096, 64) for _ in range(3))
torch.nn.functional.scaled_dot_product_attention(q[:, :, :64], k[:, :, :64], v[:, :, :64])
gc.collect()  # a full collection is due after importing torch, whoever allocates next
start = time.perf_counter()
import frisket as fk
fk.attention
imported = time.perf_counter()
fk.attention(q, k, v, "causal & window(w)", w=256)
print(1e3 * (imported - start), 1e3 * (time.perf_counter() - imported))
"""


def first_call(rounds: int) -> tuple[float, float]:
    """Milliseconds to import frisket, and of the first call, in a new process that has torch already."""
    found = [fresh(FIRST) for _ in range(rounds + 1)][1:]
    imports, calls = zip(*(map(float, text.split()) for text in found), strict=True)
    return statistics.median(imports), statistics.median(calls)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", default="", help="run only contests whose name contains this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    arrays = tuple(torch.randn(BATCH, HEADS, LENGTH, DIM) for _ in range(3))
    imported, first = first_call(7)
    print(f"{'first call, torch imported':46} {first:8.1f} ms (goal 100), after an import of {imported:.1f} ms")
    rows = {}
    with torch.no_grad():
        for name, (goal, ours, peer) in contests(arrays).items():
            if args.only in name:
                rows[name] = {**duel(ours, peer(), args.rounds), "goal": goal}
                r = rows[name]
                print(
                    f"{name:46} {r['frisket_ms']:8.1f} ms {r['peer_ms']:8.1f} ms  x{r['ratio']:.2f} (goal {goal})",
                    flush=True,
                )
    if not args.only:
        found = {"threads": args.threads, "shape": [BATCH, HEADS, LENGTH, DIM], "matmul_gflops": matmul_peak(),
                 "import_ms": imported, "first_call_ms": first, "rows": rows}  # fmt: skip
        save("cpu-torch", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
