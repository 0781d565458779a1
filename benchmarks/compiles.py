"""Kernels that a script of ordinary variety compiles on a CPU, and their time: `python benchmarks/compiles.py`.

The script tries masks and score mods as a notebook does: lengths of training, of evaluation and of a prompt, another
window, another soft cap, a table under another name. It runs in a process of its own with an empty cache, and once
more with what the first one left on disk. A compiler's time is that of its process, of one at a time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from store import keep, shown

LENGTHS = (17, 100, 512, 1024, 2048)  # of prompts and documents
TRAINING = (128, 1024)


def script() -> dict[str, Any]:
    """Runs the script; the seconds of each compilation by what asked for it, and of the whole."""
    import torch

    import frisket as fk
    from frisket.runtime.machine import cpp_build

    compiled: list[tuple[str, float]] = []
    asked, build = "", cpp_build._build

    def timed(source: str, *rest: Any) -> None:
        start = time.perf_counter()
        build(source, *rest)
        if "frisket_probe" not in source:
            compiled.append((asked, time.perf_counter() - start))

    cpp_build._build = timed
    begun = time.perf_counter()
    documents = {n: torch.arange(n) // 200 for n in (*LENGTHS, *TRAINING)}
    window = "param w: int\nmask = causal & window(w)"
    tries: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "causal": ("causal", None, {}),
        "everything": (None, None, {}),
        "window(300)": ("causal & window(300)", None, {}),
        "window(256)": ("causal & window(256)", None, {}),
        "window(w)": (window, None, {"w": 300}),
        "softcap(50)": ("causal", "softcap(50)", {}),
        "softcap(30)": ("causal", "softcap(30)", {}),
        "documents": ("causal & same(doc)", None, {"doc": documents}),
        "documents, another name": ("causal & same(ids)", None, {"ids": documents}),
        "alibi": ("causal", "alibi", {}),
    }
    for name, (mask, mod, given) in tries.items():
        att = fk.compile(mask, mod, backend="cpp")
        for n in (*LENGTHS, *TRAINING):
            asked = f"{name}, {n} tokens{', training' if n in TRAINING else ''}"
            q, k, v = (torch.randn(1, 4, n, 64, requires_grad=n in TRAINING) for _ in "qkv")
            out = att(q, k, v, **{p: x[n] if isinstance(x, dict) else x for p, x in given.items()})
            if n in TRAINING:
                out.sum().backward()
    return {"compiled": compiled, "seconds": time.perf_counter() - begun}


def run(folder: str) -> dict[str, Any]:
    env = os.environ | {"FRISKET_CACHE_DIR": folder}
    done = subprocess.run([sys.executable, __file__, "script"], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    if sys.argv[1:] == ["script"]:
        print(json.dumps(script()))
        return
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = run(folder), run(folder)
    seconds = [s for _, s in cold["compiled"]]
    figures = {
        "kernels": {"cold": len(seconds), "from disk": len(warm["compiled"])},
        "s, a kernel": {"median": statistics.median(seconds), "most": max(seconds)},
        "s, the script": {"cold": cold["seconds"], "from disk": warm["seconds"]},
    }
    row = {"figures": figures, "notes": {"compiled by": "; ".join(name for name, _ in cold["compiled"])}}
    print(shown("a script of ordinary variety", row))
    keep("compiles", "torch", {"a script of ordinary variety": row}, {"rounds": 1})


if __name__ == "__main__":
    main()
