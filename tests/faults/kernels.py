"""Our C++ in programs of its own, under sanitizers and on other processors.

A program is a kernel, the pool of threads and a main function that reads a call from a file. The calls are the matrix
of tests/lowering/kernels/cpp: forward and backward, decoding, pages, 8 bits, half precision, grouped heads, ragged
lengths, empty rows, dropout, score mods and tables. Results are held to the float64 oracle.
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

from frisket.runtime.machine import cpp_build, cpp_cpu

from .machine import NotHereError, folder

TESTS = Path(__file__).resolve().parents[1]
SANITIZERS = {
    "address,undefined": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
SLICE = (  # of the matrix, on every processor
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
    from support.native import native_image

    number, builds = draw.round, [*SANITIZERS]  # type: ignore[attr-defined]
    (file, name), build = cases()[number // len(builds)], builds[number % len(builds)]
    flags = ("-O1", "-g1", "-march=native", *SANITIZERS[build])
    with folder() as place:
        check(file, name, native_image.program(place, cpp_build.compiler(), flags, threads=4))
    return {build: 1}


def processor(draw: random.Random) -> dict[str, int]:
    """A case on a processor, by the number of the round; as it is built for users."""
    from support.native import native_image

    number, variants = draw.round, [v for v in cpp_cpu.VARIANTS if v != "native"]  # type: ignore[attr-defined]
    name, variant = SLICE[number // len(variants)], variants[number % len(variants)]
    file = next(file for file, known in cases() if known == name)
    with folder() as place:
        if variant == "neon":
            if lacking := [x for x in ARM if not shutil.which(x)]:
                raise NotHereError(f"no {', '.join(lacking)}")
            flags = ("-O3", "-static", *native_image.flags_of("neon"))
            check(file, name, native_image.program(place, ARM[:1], flags, ARM[1:]))
        elif why := cpp_cpu.lacking(variant):
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
    flags = [*cpp_build.FLAGS, *cpp_cpu.VARIANTS[variant][0]]
    subprocess.run(["g++", *flags, "-o", str(place / "kernel.so"), str(text)], check=True, capture_output=True)


FAULTS = {
    "sanitizers": (sanitized, lambda: len(SANITIZERS) * len(cases())),
    "processors": (processor, len(SLICE) * (len(cpp_cpu.VARIANTS) - 1)),
}
