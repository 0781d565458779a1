"""`python tests/compiled/flash.py`: kernels of FlashAttention 4 around frisket's masks and score mods, compiled for
GPUs that are not here. Compared with benchmarks/results/compiled/flash-attn-4.json, which `--update-results` writes:
which forms of kernels compile for which architecture. Then CuTe's own compiler builds the printed functions of the
whole library for the CPU, and their values are compared with the reference. `--all` compiles the forward of every mask
and score mod of the library for Hopper instead, and writes the seconds to flash-attn-4-library.json there; words choose
entries.

Needs flash-attn-4 (`pip install -e .[flash-compile]`), and no GPU. Calls go through the backend's own executors, on
tensors of torch's fake mode. What would ask the driver is told instead: the device's number, its processors, and
clusters at a time."""

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
RESULTS = HERE.parents[2] / "benchmarks" / "results" / "compiled"
ARCHITECTURES = {"sm_90": ("sm_90a", "132"), "sm_100": ("sm_100a", "148")}
WORDS = [a for a in sys.argv[1:] if not a.startswith("--")]
ARCH = next((a.removeprefix("--arch=") for a in sys.argv if a.startswith("--arch=")), "")
LENGTH = 1000
DOC = "same(doc)"
FORMS: dict[str, dict[str, Any]] = {
    "flags, causal": {"mask": "causal"},
    "flags, window, heads of 64": {"mask": "causal & window(256)", "dim": 64},
    "flags, packed documents": {"mask": f"causal & {DOC}", "tables": ("doc",)},
    "flags, pages": {"mask": "k < n", "params": {"n": 900}, "page": 16, "kv_len": 1024},
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
    if "--cpu" in sys.argv:
        functions_on_cpu()
        return
    subprocess.run([sys.executable, str(HERE), "--cpu", *WORDS], env=environment("sm_90"), check=True)
    found = {}
    for arch in ARCHITECTURES:
        command = [sys.executable, str(HERE), f"--arch={arch}", *WORDS]
        made = subprocess.run(command, env=environment(arch), stdout=subprocess.PIPE, text=True, check=True)
        found |= json.loads(made.stdout.splitlines()[-1])
    path = RESULTS / "flash-attn-4.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    if "--update-results" in sys.argv:
        path.write_text(json.dumps(known | found, indent=1) + "\n")
        return
    wrong = {n: (known.get(n), x) for n, x in found.items() if known.get(n) != x}
    assert not wrong, f"(was, is): {wrong}; if it should change, run with --update-results"


def environment(arch: str) -> dict[str, str]:
    """The engine's own switches for an architecture that is not here."""
    compiled, processors = ARCHITECTURES[arch]
    own = {"FLASH_ATTENTION_ARCH": compiled, "CUTE_DSL_ARCH": compiled, "FLASH_ATTENTION_NUM_SMS": processors}
    return {**os.environ, **own, "PYTHONWARNINGS": "ignore"}


def compile_here(arch: str) -> None:
    import cutlass
    import torch

    torch.cuda.current_device = lambda: 0
    hardware, processors = cutlass.utils.HardwareInfo, int(ARCHITECTURES[arch][1])
    hardware.__init__ = lambda self, *given: None
    hardware.get_max_active_clusters = lambda self, cluster_size, **more: processors // cluster_size
    hardware.get_device_multiprocessor_count = lambda self: processors
    if "--all" in sys.argv:
        library()
        return
    found = {}
    for name, form in FORMS.items():
        for direction in ("forward", "backward")[: 1 if "page" in form else 2]:
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
    batch: int = 2, heads: int = 4, page: int = 0,
) -> None:  # fmt: skip
    """Compile a direction of a call, by running it on tensors without values."""
    from dataclasses import replace

    import numpy as np
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    import frisket as fk
    from frisket.lowering.plan import Cotangents, ForwardResults, Geometry, KernelInputs
    from frisket.runtime.backends.flash import call as flash_call
    from frisket.runtime.backends.flash import torch as flash_torch
    from frisket.runtime.backends.flash.call import flags_for

    known = {n: np.arange(q_len, dtype=np.int32) // 300 for n in tables} | (params or {})
    plan = fk.compile(mask, score, **known).plan(q_len, kv_len, batch, heads)
    g = Geometry(batch, heads, kv_heads, q_len, kv_len, dim, dim, dim**-0.5)
    target = flash_call.call_target(plan, g, "bfloat16", arch=arch)
    work = plan.work((target.block_q, target.block_k), proofs=True)

    def array(count: int, length: int) -> Any:
        return torch.empty(batch, length, count, dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2)

    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = array(heads, q_len), array(kv_heads, kv_len), array(kv_heads, kv_len)
        made = work.plan
        if page:
            k, v = (torch.empty(200, page, kv_heads, dim, dtype=q.dtype, device="cuda").transpose(1, 2) for _ in "kv")
            made = replace(made, pages="pages", page=page)
        read = {n: torch.from_numpy(np.asarray(t)) for n, t in work.tables.items()}
        read["pages"] = torch.empty(batch, kv_len // (page or kv_len), dtype=torch.int32, device="cuda")
        inputs = KernelInputs(made, plan, g, target, work.slots, read)
        if direction == "forward":
            sink = torch.empty(heads, device="cuda") if sinks else None
            flash_torch.forward(replace(inputs, sinks=sink), q, k, v)
        else:
            lse = torch.empty(batch, heads, q_len, device="cuda")
            rows = ForwardResults(torch.empty_like(q), lse), Cotangents(torch.empty_like(q), lse)
            flags = flags_for(work.plan, plan, g, work.slots)
            exact = arch != "sm_90" or not isinstance(flags, str)
            inputs = replace(inputs, plan=work.plan, deterministic=exact)
            flash_torch.backward(inputs, q, k, v, *rows, grad_names=frozenset("qkv"))


def entries(length: int) -> dict[str, tuple[dict[str, Any], Any]]:
    """The masks and score mods of the library: how each is compiled, and its case."""
    sys.path.insert(0, str(HERE.parents[2] / "benchmarks"))
    import cases

    found = {n: ({"mask": c.mask}, c) for n, c in cases.masks(length).items()}
    return found | {n: ({"mask": "causal", "score": c.score}, c) for n, c in cases.mods(length).items()}


def functions_on_cpu() -> None:
    """Run the printed functions as CuTe's compiler builds them for the CPU, at random positions, and compare."""
    import numpy as np

    import frisket as fk
    from frisket.dsl.evaluate import evaluate
    from frisket.dsl.ir import SIZES
    from frisket.lowering.derive import backward_of

    rng, count = np.random.default_rng(3), 0
    for name, (form, case) in entries(200).items():
        if not all(w in name for w in WORDS):
            continue
        lengths = case.batch, case.heads, case.q_len, case.kv_len
        work = fk.compile(form["mask"], form.get("score")).plan(*lengths[2:], *lengths[:2]).work((128, 128))
        places = np.stack([rng.integers(0, n, 500) for n in lengths]).astype(np.int32)
        score, grad = rng.standard_normal((2, 500)).astype(np.float32)
        tables = {n: np.asarray(t) for n, t in work.tables.items()}
        env = dict(zip("bhqk", places.astype(np.int64), strict=True)) | {"score": score} | dict(work.slots)
        env |= dict(zip(SIZES, lengths, strict=True))
        plan = work.plan
        visible = np.ones(500, bool) if plan.mask is None else np.broadcast_to(evaluate(plan.mask, env, tables), 500)
        right = {"mask_mod": visible}
        if plan.score is not None:
            slope = backward_of(plan).slope
            right["score_mod"] = evaluate(plan.score, env, tables)
            right["score_mod_bwd"] = grad * (1.0 if slope is None else evaluate(slope, env, tables))
        for function, got in built_for_cpu(plan, env, tables, places, score, grad).items():
            seen = visible | (function == "mask_mod")
            np.testing.assert_allclose(got[seen], np.broadcast_to(right[function], 500)[seen], 1e-4, 1e-5, err_msg=name)
            count += 1
    print(f"{count} printed functions have the interpreter's values on the CPU", flush=True)


def built_for_cpu(plan: Any, env: Any, tables: Any, places: Any, score: Any, grad: Any) -> dict[str, Any]:
    """The values of a plan's functions, each built by CuTe's compiler."""
    import numpy as np
    import torch
    from cutlass import Float32, Int32, cute
    from cutlass.cute.runtime import from_dlpack
    from flash_attn.cute.utils import AuxData, scalar_to_ssa

    from frisket.lowering.kernels.cute.mods import emit
    from frisket.runtime.machine.modules import load_source

    mods, found = emit(plan), {}
    made = load_source(mods.text)
    narrow = [t.astype(np.float32 if t.dtype.kind == "f" else np.int32) for t in (tables[n] for n in mods.tables)]
    kept = [torch.from_numpy(np.ascontiguousarray(x)) for x in (*narrow, places, score, grad)]
    *read, at, before, cotangent = (from_dlpack(x) for x in kept)
    numbers = tuple(Float32(x) if isinstance(x, float) else Int32(int(x)) for x in (env[n] for n in mods.scalars))

    def run_of(function: Any, firsts: int) -> Any:
        @cute.jit  # type: ignore[untyped-decorator]
        def run(at: cute.Tensor, score: cute.Tensor, grad: cute.Tensor, aux: AuxData, out: cute.Tensor) -> None:
            for i in range(cute.size(score)):
                b, h = scalar_to_ssa(at[0, i], Int32), scalar_to_ssa(at[1, i], Int32)
                q, k = scalar_to_ssa(at[2, i], Int32), scalar_to_ssa(at[3, i], Int32)
                s, g = scalar_to_ssa(score[i], Float32), scalar_to_ssa(grad[i], Float32)
                value = function(*(g, s)[2 - firsts :], b, h, q, k, None, aux.tensors, aux.scalars)
                out[i] = value[0].to(Float32)

        return run

    for name in mods.functions:
        out = torch.zeros(score.shape[0])
        run = run_of(made[name], {"score_mod": 1, "score_mod_bwd": 2}.get(name, 0))
        run(at, before, cotangent, AuxData(read or None, numbers or (Int32(0),)), from_dlpack(out))
        found[name] = out.numpy()
    return found


def library() -> None:
    """Compile the forward of every entry of the library."""
    path = RESULTS / "flash-attn-4-library.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for name, (form, case) in entries(LENGTH).items():
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
