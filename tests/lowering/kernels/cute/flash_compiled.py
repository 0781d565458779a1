"""`python tests/lowering/kernels/cute/flash_compiled.py`: kernels of FlashAttention 4 around frisket's masks and score
mods, compiled for GPUs that are not here, and the printed functions run by CuTe's own compiler on the CPU. Compared
with tests/golden/cute/compiled.json, which `--update-golden` writes: which forms of kernels compile for which
architecture. `--all` compiles the forward of every mask and score mod of the library for Hopper instead, and keeps the
seconds in tests/golden/cute/library.json; words choose entries.

Needs flash-attn-4 (`pip install -e .[flash-compile]`), and no GPU. Calls go through the backend's own executors, on
tensors of torch's fake mode; what would ask the driver is told instead: the device's number, and clusters at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
GOLDEN = HERE.parents[3] / "golden" / "cute"
ARCHITECTURES = {"sm_90": ("sm_90a", "132"), "sm_100": ("sm_100a", "148")}
WORDS = [a for a in sys.argv[1:] if not a.startswith("--")]
ARCH = next((a.removeprefix("--arch=") for a in sys.argv if a.startswith("--arch=")), "")
LENGTH = 1000
DOC = "same(doc)"
FORMS: dict[str, dict[str, Any]] = {
    "flags, causal": {"mask": "causal"},
    "flags, window, heads of 64": {"mask": "causal & window(256)", "dim": 64},
    "flags, packed documents": {"mask": f"causal & {DOC}", "tables": ("doc",)},
    "flags and score code": {"mask": "causal", "score": "softcap(30)"},
    "code, numbers and grouped heads": {"mask": "causal | k < n", "params": {"n": 64}, "kv_heads": 2},
    "code, tables and sinks": {
        "mask": f"(causal | k < 9) & {DOC}",
        "score": "alibi",
        "tables": ("doc",),
        "sinks": True,
    },
}


def main() -> None:
    if ARCH:
        compile_here(ARCH)
        return
    if "--all" in sys.argv:
        subprocess.run([sys.executable, str(HERE), "--arch=sm_90", *sys.argv[1:]], env=environment("sm_90"), check=True)
        return
    found = {}
    for arch in ARCHITECTURES:
        command = [sys.executable, str(HERE), f"--arch={arch}", *WORDS]
        made = subprocess.run(command, env=environment(arch), stdout=subprocess.PIPE, text=True, check=True)
        found |= json.loads(made.stdout.splitlines()[-1])
    path = GOLDEN / "compiled.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    if "--update-golden" in sys.argv:
        path.write_text(json.dumps(known | found, indent=1) + "\n")
        return
    wrong = {n: (known.get(n), x) for n, x in found.items() if known.get(n) != x}
    assert not wrong, f"(was, is): {wrong}; if it should change, run with --update-golden"


def environment(arch: str) -> dict[str, str]:
    """The engine's own switches for an architecture that is not here."""
    compiled, processors = ARCHITECTURES[arch]
    own = {"FLASH_ATTENTION_ARCH": compiled, "CUTE_DSL_ARCH": compiled, "FLASH_ATTENTION_NUM_SMS": processors}
    return {**os.environ, **own, "PYTHONWARNINGS": "ignore"}


def compile_here(arch: str) -> None:
    import cutlass
    import torch

    torch.cuda.current_device = lambda: 0
    cutlass.utils.HardwareInfo.get_max_active_clusters = lambda self, cluster_size, **more: 148 // cluster_size
    if "--all" in sys.argv:
        library()
        return
    found = {}
    for name, form in FORMS.items():
        for direction in ("forward", "backward"):
            key = f"{arch}, {name}, {direction}"
            if all(w in key for w in WORDS):
                found[key], seconds = tried(arch, direction, **form)
                print(f"{key:70} {found[key]} {seconds:.0f} s", file=sys.stderr, flush=True)
    print(json.dumps(found))


def tried(arch: str, direction: str, **form: Any) -> tuple[str, float]:
    """ "compiles", or the words of the error; seconds."""
    start = time.time()
    try:
        compiled(arch, direction, **form)
        said = "compiles"
    except Exception as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        if "--traceback" in sys.argv:
            traceback.print_exc()
    return said, time.time() - start


def compiled(
    arch: str, direction: str, mask: Any, score: Any = None, dim: int = 128, kv_heads: int = 4, sinks: bool = False,
    params: dict[str, Any] | None = None, tables: tuple[str, ...] = (), q_len: int = LENGTH, kv_len: int = LENGTH,
    batch: int = 2, heads: int = 4,
) -> None:  # fmt: skip
    """Compile a direction of a call, by running it on tensors without values."""
    import numpy as np
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    import frisket as fk
    from frisket.lowering.plan import Geometry
    from frisket.runtime.backends.flash import executors, tiles
    from frisket.runtime.backends.flash.call import flags_for

    known = {n: np.arange(q_len, dtype=np.int32) // 300 for n in tables} | (params or {})
    plan = fk.compile(mask, score, **known).plan(q_len, kv_len, batch, heads)
    g = Geometry(batch, heads, kv_heads, q_len, kv_len, dim, dim, dim**-0.5)
    target = tiles.target(plan, g, "bfloat16", arch=arch)
    work = plan.work((target.block_q, target.block_k), proofs=True)

    def array(count: int, length: int) -> Any:
        return torch.empty(batch, length, count, dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2)

    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = array(heads, q_len), array(kv_heads, kv_len), array(kv_heads, kv_len)
        read = {n: torch.from_numpy(np.asarray(t)) for n, t in work.tables.items()}
        common = work.slots, read, target
        if direction == "forward":
            sink = torch.empty(heads, device="cuda") if sinks else None
            executors.forward(work.plan, plan, g, q, k, v, *common, sinks=sink)
        else:
            lse = torch.empty(batch, heads, q_len, device="cuda")
            rows = q, k, v, torch.empty_like(q), lse, torch.empty_like(q), lse
            flags = flags_for(work.plan, plan, g, work.slots)
            exact = arch != "sm_90" or not isinstance(flags, str)  # deterministic
            executors.backward(work.plan, plan, g, *rows, *common, wanted=frozenset("qkv"), deterministic=exact)


def library() -> None:
    """Compile the forward of every entry of the library; an entry whose code another has is not compiled again."""
    sys.path.insert(0, str(HERE.parents[4] / "benchmarks"))
    import cases

    path = GOLDEN / "library.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    entries = {n: ({"mask": c.mask}, c) for n, c in cases.masks(LENGTH).items()}
    entries |= {n: ({"mask": "causal", "score": c.score}, c) for n, c in cases.mods(LENGTH).items()}
    for name, (form, case) in entries.items():
        if not all(w in name for w in WORDS) or (not WORDS and name in found):
            continue
        said, seconds = tried(
            "sm_90", "forward", **form, q_len=case.q_len, kv_len=case.kv_len, batch=case.batch, heads=case.heads,
            kv_heads=case.heads,
        )  # fmt: skip
        found[name] = {"result": said, "seconds": round(seconds, 1)}
        print(f"{name:70} {said} {seconds:.0f} s", flush=True)
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
