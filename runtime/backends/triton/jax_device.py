"""The GPU that Triton kernels are compiled for when JAX calls them, and what it takes to call them."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from frisket.dsl.errors import BackendError
from frisket.grammar.memo import memo
from frisket.runtime.machine.extras import pip_install

NOWHERE = "sm_90", 132  # where there is no GPU: an H100
# what vendors call GPUs -> architecture, for JAX's abstract devices, which have nothing but a name
KINDS = {
    "B200": "sm_100", "B300": "sm_103", "H100": "sm_90", "H200": "sm_90", "GH200": "sm_90", "A100": "sm_80",
    "A10": "sm_86", "A40": "sm_86", "RTX A": "sm_86", "RTX 30": "sm_86", "L4": "sm_89", "RTX 40": "sm_89",
    "RTX 50": "sm_120", "MI250": "gfx90a", "MI300": "gfx942", "MI325": "gfx942", "MI35": "gfx950",
}  # fmt: skip


def architecture() -> str:
    """The architecture as in `report.ARCHITECTURES`: that of the current mesh where JAX lowers for an abstract
    device, else of the first GPU, else sm_90."""
    return _found()[0]


def processors() -> int:
    """Streaming multiprocessors, or compute units."""
    return _found()[1]


def capability(platform: str) -> int | None:
    """The capability that jax-triton compiles for: 90 for sm_90. On AMD's GPUs it asks the device."""
    return int(architecture()[3:]) if platform != "rocm" else None


def _found() -> tuple[str, int]:
    import jax

    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None and abstract.platform in ("gpu", "cuda", "rocm", None):
        kind = next((n for n in sorted(KINDS, key=len, reverse=True) if n in abstract.device_kind), "")
        if kind:
            return KINDS[kind], abstract.num_cores or NOWHERE[1]
    return _first()


@memo(group="once")
def _first() -> tuple[str, int]:
    import jax

    try:
        device: Any = jax.devices("gpu")[0]
    except RuntimeError:
        return NOWHERE
    of_amd = str(device.compute_capability).split(":")[0]
    name = of_amd if of_amd.startswith("gfx") else f"sm_{str(device.compute_capability).replace('.', '')}"
    return name, int(getattr(device, "core_count", NOWHERE[1]))


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def check(platform: str, dtype: str) -> None:
    """Raise where the kernels cannot be called on arrays of a platform."""
    if platform == "cpu" and not interpreted():
        raise BackendError(
            "Triton kernels need a GPU: on the CPU take backend='xla' or 'cpp', or set TRITON_INTERPRET=1 before "
            "Python starts to run them in Triton's interpreter"
        )
    if platform not in ("cpu", "cuda", "rocm"):
        raise BackendError(f"no Triton kernel runs on {platform}; they run on cuda and rocm")
    if platform == "rocm" and _release("jax-triton") <= (0, 3, 1) and _release("triton") >= (3, 9):
        raise BackendError(
            "jax-triton 0.3.1 does not compile for AMD's GPUs with Triton 3.9\n"
            "  install triton==3.6.0, or take backend='xla'"
        )
    if platform != "cpu" and interpreted():
        raise BackendError("TRITON_INTERPRET=1 is set, so that no Triton kernel is compiled; unset it on a GPU")


def _release(package: str) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in re.findall(r"\d+", version(package))[:3])
    except PackageNotFoundError:
        return (0,)


@memo(group="once")
def triton_call() -> Any:
    """`jax_triton.triton_call`."""
    kept = os.environ.get("TRITON_CACHE_DIR")
    try:
        from jax_triton import triton_call as call  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except (ImportError, AttributeError) as error:
        raise BackendError(
            f"the Triton kernels are called through jax-triton, which cannot be imported here: {error}\n"
            f"  {pip_install('jax-gpu')}, and a JAX with GPU support"
        ) from error
    finally:  # jax-triton points it at no folder, for everybody in this process
        if kept is None:
            os.environ.pop("TRITON_CACHE_DIR", None)
        else:
            os.environ["TRITON_CACHE_DIR"] = kept
    return call
