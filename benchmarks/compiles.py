"""Kernels that scripts of ordinary variety compile on a CPU, and their time: `python benchmarks/compiles.py`.

A script tries masks and score mods as a notebook does: lengths of training, of evaluation and of a prompt, another
window, another soft cap, a table under another name. A second script tries more masks. Each runs in a process of its
own with an empty cache, and once more with what the first one left on disk. A compiler's time is that of its process,
of one at a time; `of one core` is what it computed, without waiting.

`--before FOLDER` runs the scripts with the frisket of another checkout, and keeps them as a part of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from store import keep, shown

WINDOW, PREFIX = "param w: int\nmask = causal & window(w)", "param p: int\nmask = prefix_lm(p)"
SCRIPTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, str], ...]]] = {
    # lengths of prompts and documents, of training; head sizes and dtypes
    "a script of ordinary variety": ((17, 100, 512, 1024, 2048), (128, 1024), ((64, "float32"),)),
    "more masks": ((64, 300, 1024, 4096), (64, 300), ((64, "float32"),)),
}  # fmt: skip


def tries_of(name: str, n: int) -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """Mask, score mod and values of each try at a length."""
    import torch

    documents = torch.arange(n) // 200
    found: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "causal": ("causal", None, {}),
        "everything": (None, None, {}),
        "window(300)": ("causal & window(300)", None, {}),
        "window(256)": ("causal & window(256)", None, {}),
        "window(w)": (WINDOW, None, {"w": 300}),
        "softcap(50)": ("causal", "softcap(50)", {}),
        "softcap(30)": ("causal", "softcap(30)", {}),
        "documents": ("causal & same(doc)", None, {"doc": documents}),
        "documents, another name": ("causal & same(ids)", None, {"ids": documents}),
        "alibi": ("causal", "alibi", {}),
    }
    if name != next(iter(SCRIPTS)):
        found |= {
            "window(512)": ("causal & window(512)", None, {}),
            "prefix_lm(100)": ("prefix_lm(100)", None, {}),
            "prefix_lm(p)": (PREFIX, None, {"p": 40}),
            "sinks and window": ("causal & (sinks(4) | window(256))", None, {}),
            "dropout": ("causal", None, {"dropout": 0.1}),
            "T5 bias": ("causal", "t5_decoder_bias(table, 32, 128)", {"table": torch.zeros(32, 4)}),
        }
    return found


def script(name: str) -> dict[str, Any]:
    """Runs a script; the seconds of each compilation by what asked for it, and of the whole."""
    import torch

    import frisket as fk
    from frisket.runtime.machine import cpp_build

    compiled: list[tuple[str, float, float]] = []
    asked, build = "", cpp_build._compile

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def timed(source: str, *rest: Any) -> None:
        start, before = time.perf_counter(), spent()
        build(source, *rest)
        if "frisket_forward" in source or "frisket_backward" in source:
            compiled.append((asked, time.perf_counter() - start, spent() - before))

    cpp_build._compile = timed
    begun = time.perf_counter()
    lengths, training, sizes = SCRIPTS[name]
    for title in tries_of(name, 1):
        for head_dim, dtype in sizes:
            for n in dict.fromkeys((*lengths, *training)):
                mask, mod, given = tries_of(name, n)[title]
                rate = given.pop("dropout", 0.0)
                att = fk.compile(mask, mod, backend="cpp", dropout=rate)
                asked = f"{title}, {head_dim}, {dtype}, {n} tokens{', training' if n in training else ''}"
                shape = 1, 4, n, head_dim
                q, k, v = (torch.randn(shape, dtype=getattr(torch, dtype), requires_grad=n in training) for _ in "qkv")
                out = att(q, k, v, **given, **({"seed": 7} if rate else {}))
                if n in training:
                    out.float().sum().backward()
    return {"compiled": compiled, "seconds": time.perf_counter() - begun}


def run(name: str, folder: str, before: str) -> dict[str, Any]:
    env = os.environ | {"FRISKET_CACHE_DIR": folder}
    if before:
        env["PYTHONPATH"] = os.path.join(before, "benchmarks", "uninstalled")
    done = subprocess.run(
        [sys.executable, __file__, "--script", name], env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--script", choices=SCRIPTS, help=argparse.SUPPRESS)
    options.add_argument("--before", default="", metavar="FOLDER", help="another checkout")
    given = options.parse_args()
    if given.script:
        print(json.dumps(script(given.script)))
        return
    rows = {}
    for name in SCRIPTS:
        with tempfile.TemporaryDirectory() as folder:
            cold, warm = (run(name, folder, given.before) for _ in range(2))
        seconds, computed = ([one[i] for one in cold["compiled"]] for i in (1, 2))
        figures = {
            "kernels": {"cold": len(seconds), "from disk": len(warm["compiled"])},
            "s, a kernel": {
                "median": statistics.median(seconds), "most": max(seconds),
                "median, of one core": statistics.median(computed), "most, of one core": max(computed),
            },
            "s, the script": {"cold": cold["seconds"], "from disk": warm["seconds"]},
        }  # fmt: skip
        rows[name] = {"figures": figures, "notes": {"compiled by": "; ".join(one[0] for one in cold["compiled"])}}
        print(shown(name, rows[name]), flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short=7", "HEAD"], cwd=given.before or None, capture_output=True, text=True
    )
    keep("compiles", f"commit {commit.stdout.strip()}" if given.before else "torch", rows, {"rounds": 1})


if __name__ == "__main__":
    main()
