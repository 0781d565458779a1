"""Our C++ in programs of its own, under sanitizers and on other processors.

A program is a kernel, the pool of threads and a main function that reads a call from a file. The calls are the matrix
of tests/lowering/kernels/cpp: forward and backward, decoding, pages, 8 bits, half precision, grouped heads, ragged
lengths, empty rows, dropout, score mods and tables. Results are held to the float64 reference.
"""

from __future__ import annotations

import importlib.util
import random
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from frisket.runtime.machine import cpp_build

from .machine import NotHereError, environment, folder, python, script

TESTS = Path(__file__).resolve().parents[1]
SANITIZERS = {
    "address,undefined": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
SLICE = (  # exhaustive, on every processor
    "plain", "bfloat16", "float16", "float64", "relative-bias", "documents", "empty-rows", "decode", "gqa", "holes",
    "decode-pages", "prefill-holes",
)  # fmt: skip
ARM = "aarch64-linux-gnu-g++", "qemu-aarch64-static"


@cache
def tests_of(name: str) -> ModuleType:
    """A module of tests, for its cases."""
    spec = importlib.util.spec_from_file_location(name, TESTS / "lowering/kernels/cpp" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def cases() -> list[tuple[str, str]]:
    """(file, name) of each case."""
    variants, stored = tests_of("test_native_variants"), tests_of("test_native_stored")
    return [("variants", x) for x in variants.MATRIX] + [("stored", x) for x in stored.CASES]


def check(file: str, name: str, runner: Any) -> None:
    if file == "variants":
        tests_of("test_native_variants").check(name, runner)
        return
    stored = tests_of("test_native_stored")
    made = stored.Problem(stored.CASES[name])
    found = stored.Watched(made).run(runner, backward=False)
    made.check([found[n] for n in ("out", "lse", "top")])


def sanitized(draw: random.Random) -> dict[str, int]:
    """A case under a sanitizer, by the number of the round."""
    from support.native import image as native_image

    number, builds = draw.round, [*SANITIZERS]  # type: ignore[attr-defined]
    (file, name), build = cases()[number // len(builds)], builds[number % len(builds)]
    flags = ("-O1", "-g1", "-march=native", *SANITIZERS[build])
    with folder() as place:
        check(file, name, native_image.program(place, cpp_build.compiler(), flags, threads=4))
    return {build: 1}


def processor(draw: random.Random) -> dict[str, int]:
    """A case on a processor, by the number of the round; as it is built for users."""
    from support.native import image as native_image

    number, variants = draw.round, [v for v in cpp_build.VARIANTS if v != "native"]  # type: ignore[attr-defined]
    name, variant = SLICE[number // len(variants)], variants[number % len(variants)]
    file = next(file for file, known in cases() if known == name)
    with folder() as place:
        if variant == "neon":
            if lacking := [x for x in ARM if not shutil.which(x)]:
                raise NotHereError(f"no {', '.join(lacking)}")
            flags = ("-O3", "-static", *native_image.flags_of("neon"))
            check(file, name, native_image.program(place, ARM[:1], flags, ARM[1:]))
        elif why := cpp_build.lacking(variant):
            compiled(place, file, name, variant)
            return {f"{variant} compiled, not run: {why}": 1}
        else:
            flags = ("-O3", *native_image.flags_of(variant))
            check(file, name, native_image.program(place, cpp_build.compiler(), flags, threads=2))
    return {variant: 1}


def compiled(place: Path, file: str, name: str, variant: str) -> None:
    """A kernel for a processor that is not here."""
    module = tests_of(f"test_native_{file}")
    problem = module.problem(name) if file == "variants" else module.Watched(module.Problem(module.CASES[name]))
    text = place / "kernel.cpp"
    text.write_text(problem.source("forward"))
    flags = [*cpp_build.FLAGS, *cpp_build.VARIANTS[variant][0]]
    subprocess.run(["g++", *flags, "-o", str(place / "kernel.so"), str(text)], check=True, capture_output=True)


# calls of users where all C++ of ours is built for a sanitizer: planners, caches and the bridge to XLA as well
CALLS = """
import sys, warnings
warnings.simplefilter("ignore")
import jax, numpy as np, torch, frisket as fk
from frisket.caches.torch import KVCache
from frisket.runtime.machine import cpp_build
torch.set_num_threads(2)
rng = np.random.default_rng(0)
q, k, v = (torch.randn(2, 4, n, 16, requires_grad=True) for n in (150, 177, 177))
bias, doc = torch.randn(4, 400, requires_grad=True), np.sort(rng.integers(0, 9, 200))
for mask, score, more in [
    ("q - k < 60", None, {}),
    ("doc[q] == doc[k]", "score + bias[h, q - k + 180]", {"doc": doc, "bias": bias}),
    ("t[q, k] > 0 & q % 7 != 3", None, {"t": rng.integers(0, 3, (200, 200))}),
]:
    out = fk.compile(mask, score, backend="cpp", dropout=0.2, **more)(q, k, v, seed=3)
    torch.autograd.grad(out.square().sum(), (q, k, v))
    fk.compile(mask, score, backend="cpp", **more)(q[:, :, -1:].detach(), k.detach(), v.detach())
x = torch.randn(3, 1, 2, 1024, 16, requires_grad=True)
for text, more in [("causal & (q - k) % 4 == 0", {}), ("near[q] == near[k]", {"near": rng.permutation(1024) // 64})]:
    order = fk.reorder(text, 1024, 1024, **more)
    assert order.gain > 1, text
    for dropout in (0.0, 0.2):
        out = fk.compile(text, reorder=order, backend="cpp", dropout=dropout, **more)(*x, seed=3)
        torch.autograd.grad(out.square().sum(), x)
for text, shape in [
    ("causal & t[q] == t[k]", (300,)), ("t[h, q] >= t[h, k]", (2, 300)), ("t[q, k] > 3", (300, 300)),
    ("segment(t, q) == segment(t, k)", (9,)),
]:
    t = torch.from_numpy(np.sort(rng.integers(0, 300, shape), -1))
    fk.compile(text, backend="cpp").plan(300, 300, 1, 2, flat=True, t=t).spans((16, 16))
att = fk.compile("causal & window(50)", backend="cpp")
for more in ({}, {"dtype": torch.int8}, {"dtype": torch.float8_e4m3fn}):
    cache = KVCache.create(batch=2, capacity=90, kv_heads=2, head_dim=16, **more)
    for n in (40, 1, 7, 1):
        cache.attention(att, torch.randn(2, 4, n, 16), *torch.randn(2, 2, 2, n, 16))
x = jax.numpy.asarray(rng.standard_normal((2, 150, 4, 16)).astype("f"))
att = fk.compile("causal & window(w)", w=33, backend="cpp")
jax.block_until_ready(jax.jit(jax.grad(lambda x: att(x, x, x).sum()))(x))
jax.block_until_ready(jax.vmap(lambda x: att(x, x, x))(x[:, None]))
print("done", flush=True)
text = '#include <stdlib.h>\\nextern "C" int past() { return ((volatile char *)malloc(9))[9]; }\\n'
cpp_build.library(text).past()
"""


def calls_sanitized(draw: random.Random) -> dict[str, int]:
    """The calls end, and then what reads past an end is reported: the sanitizer watches."""
    found = [subprocess.run(["g++", f"-print-file-name={x}"], capture_output=True, text=True).stdout.strip()
             for x in ("libasan.so", "libubsan.so", "libstdc++.so.6")]  # fmt: skip
    if not all(Path(x).is_absolute() for x in found):
        raise NotHereError("g++ has no libasan.so to load before Python")
    flags = "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
    with folder() as place:
        compiler = script(place / "compiler", f'exec g++ "$@" {flags}')
        env = environment(place / "cache", CXX=compiler, LD_PRELOAD=" ".join(found), ASAN_OPTIONS="detect_leaks=0")
        done = python(CALLS, env)
    assert done.stdout == "done\n", f"{done.stdout}{done.stderr[-4000:]}"
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr or "runtime error: load of address" in done.stderr, done.stderr[-4000:]
    return {"processes": 1}


FAULTS = {
    "sanitizers": (sanitized, lambda: len(SANITIZERS) * len(cases())),
    "sanitized-calls": (calls_sanitized, 1),
    "processors": (processor, len(SLICE) * (len(cpp_build.VARIANTS) - 1)),
}
