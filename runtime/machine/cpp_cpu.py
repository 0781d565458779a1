"""The CPU of this machine, and the machines a kernel can be built for."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

from frisket.grammar.memo import memo

V3 = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe".split())
V4 = V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
SCALAR = ("-DFRISKET_SCALAR", "-fno-tree-vectorize", "-fno-tree-slp-vectorize")  # the prelude's vectors have one lane
AMX = frozenset("avx512_bf16 amx_tile amx_bf16 amx_int8".split())
MATRIX_UNIT = "-DFRISKET_AMX"  # multiply bfloat16 and int8 on the matrix unit

# name: (flags of the compiler, what /proc/cpuinfo has to list). "native" is whatever this CPU has.
VARIANTS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "native": (("-march=native",), frozenset()),
    "amx": (("-march=x86-64-v4", "-mavx512bf16", MATRIX_UNIT), V4 | AMX),
    "avx512bf16": (("-march=x86-64-v4", "-mavx512bf16"), V4 | {"avx512_bf16"}),
    "avx512": (("-march=x86-64-v4",), V4),
    "avx2": (("-march=x86-64-v3",), V3),
    "scalar": (SCALAR, frozenset()),
    "neon": (("-march=armv8-a",), frozenset({"asimd"})),
}


@memo(group="once")
def this_cpu() -> tuple[str, frozenset[str]]:
    """The CPU as a text, and its features beyond the least of its kind, in the words of /proc/cpuinfo.

    Two machines share the text only if code built for one runs on the other."""
    entries: dict[str, str] = {}  # of the first CPU; none where there is no such file
    try:
        with Path("/proc/cpuinfo").open() as lines:
            for line in lines:
                name, colon, value = line.partition(":")
                if not colon and entries:  # a blank line: the other CPUs are alike
                    break
                entries[name.strip()] = " ".join(value.split())
    except OSError:
        pass
    # x86 and Arm name the row otherwise
    features = frozenset((entries.get("flags") or entries.get("Features", "")).split())
    kind = ("model name", "cpu family", "model", "CPU implementer", "CPU part", "CPU variant")
    return " ".join([platform.machine(), *(entries.get(n, "-") for n in kind), *sorted(features)]), features


def lacking(variant: str) -> str:
    """The features that this CPU lacks to run a variant; empty when it can."""
    flags, required = VARIANTS[variant]
    if missing := sorted(required - this_cpu()[1]):
        return f"this CPU has no {', '.join(missing)}"
    return "the system lets no program use this CPU's matrix unit" if MATRIX_UNIT in flags and not _allowed() else ""


@memo(group="once")
def _allowed() -> bool:
    """Whether this process may use the matrix unit. This asks Linux for it, by
    arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA)."""
    return bool(ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0)


def flags_of(variant: str) -> tuple[str, ...]:
    """The compiler's flags for a variant."""
    flags = VARIANTS[variant][0]
    # -march=native has the unit's instructions even where the system lets no process use them
    return (*flags, MATRIX_UNIT) if "-march=native" in flags and not lacking("amx") else flags


def best() -> str:
    """The widest of the named variants that runs here: what "native" amounts to."""
    return next(name for name in ("amx", "avx512bf16", "avx512", "avx2", "neon", "scalar") if not lacking(name))
