"""What runs here, and why the others do not."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from frisket.dsl.errors import BackendError
from frisket.runtime.machine import cpp_build as native_build
from frisket.runtime.machine.extras import pip_install
from frisket.runtime.machine.settings import BACKENDS, TIERS, Settings

if TYPE_CHECKING:
    from frisket.runtime.calls.options import Options
    from frisket.runtime.plans.call import AnyPlan

LATER = {"gluon": "the Gluon kernels come in a later version"}
PALLAS = ("pallas-tpu", "pallas-mosaic-gpu")
PRINTED = ("cpp", "triton", *PALLAS)  # backends with a kernel text
GUARDED = ("triton", *PALLAS)  # whose kernels check for empty rows, where they may be there
HOW = {"pallas-tpu": ", in Pallas' interpreter where there is no TPU"}


class Availability(dict[str, str]):
    """`fk.backends()`: name -> "" when it runs here, otherwise the reason it does not."""

    def __str__(self) -> str:
        return "\n".join(f"{name:18} {why if why else 'runs here' + HOW.get(name, '')}" for name, why in self.items())

    __repr__ = __str__


def backends() -> Availability:
    """What runs here and why the others do not.

    >>> import frisket as fk
    >>> fk.backends()["dense"]
    ''
    """
    return Availability((name, reason(name)) for name in BACKENDS)


def reason(name: str, framework: str | None = None) -> str:
    """Why a backend does not run here, on arrays of `framework` where one is named; empty when it does."""
    if name in LATER:
        return LATER[name]
    if name == "triton":
        return _triton_torch() if framework == "torch" else _triton_jax() if framework == "jax" else _triton()
    return REASONS[name]()


def _installed(module: str, extra: str) -> str:
    return "" if importlib.util.find_spec(module) else f"{module} is not installed: {pip_install(extra)}"


def _triton() -> str:
    why = _triton_torch()
    return why and (why if _triton_jax() else "")


def _triton_torch() -> str:
    missing = _installed("torch", "torch") or _installed("triton", "triton")
    if missing or interpreted("triton"):
        return missing
    import torch

    return "" if torch.cuda.is_available() else "no GPU is visible to torch; its source can be printed all the same"


def _triton_jax() -> str:
    from frisket.runtime.jax.platforms import missing

    return _installed("jax", "jax") or missing("triton") or ("" if interpreted("triton") else _no_gpu())


def _mosaic_gpu() -> str:
    return _installed("jax", "jax") or _no_gpu()


def _no_gpu() -> str:
    import jax

    if jax.default_backend() == "gpu":
        return ""
    return "no GPU is visible to JAX; its source can be printed, and calls exported, all the same"


def interpreted(backend: str) -> bool:
    """Whether the kernels of this backend run in Triton's interpreter."""
    return backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"


def check_interpreted(backend: str, *dtypes: str) -> None:
    """Refuse numbers that Triton's interpreter takes for other ones."""
    if "bfloat16" in dtypes and interpreted(backend):
        raise BackendError(
            "Triton's interpreter takes the bits of bfloat16 for integers and computes nonsense\n"
            "  give it float16 or float32, or unset TRITON_INTERPRET on a machine with a GPU"
        )


REASONS: dict[str, Callable[[], str]] = {
    "aten": lambda: _installed("torch", "torch"),
    "xla": lambda: _installed("jax", "jax"),
    "cpp": native_build.reason,
    "triton": _triton,
    "pallas-tpu": lambda: _installed("jax", "jax"),  # without a TPU in Pallas' interpreter
    "pallas-mosaic-gpu": _mosaic_gpu,
    "dense": lambda: "",
}
OF_FRAMEWORK = {
    "torch": ("aten", "cpp", "triton", "dense"),
    "jax": ("xla", "cpp", "triton", *PALLAS, "dense"),
}


def check_name(name: str | None) -> None:
    """Refuse a backend nobody knows, or that is not there yet."""
    if name is None:
        return
    if name not in BACKENDS + TIERS:
        raise BackendError(f"no backend {name!r}; there are {', '.join(BACKENDS + TIERS)}")
    name = "cpp" if name == "native" else name
    if name in LATER:
        raise BackendError(f"backend {name!r} is not there yet: {LATER[name]}; take one of {', '.join(REASONS)}")


def choose(name: str | None, framework: str, device: str) -> str:
    """The backend of a call: the keyword, else FRISKET_BACKEND, else by framework and device."""
    name = name or Settings.read().backend
    check_name(name)
    if name is None:
        name = _automatic(framework, device)
    elif name == "library":
        name = "aten" if framework == "torch" else "xla"
    elif name == "native":
        name = "cpp"
    if name not in OF_FRAMEWORK[framework]:
        raise BackendError(
            f"backend {name!r} does not take {framework} arrays; they run on {', '.join(OF_FRAMEWORK[framework])}"
        )
    if why := lowerable(name) if framework == "jax" else reason(name, framework):
        raise BackendError(f"backend {name!r} does not run here: {why}")
    if framework == "torch" and name in ("aten", "cpp") and device != "cpu":
        raise BackendError(f"backend {name!r} runs on the CPU, q is on {device}; take 'triton', or move q, k and v")
    return name


def lowerable(name: str) -> str:
    """Why JAX cannot lower for a backend, whatever devices are there."""
    from frisket.runtime.jax.platforms import missing

    return missing(name) if name == "triton" or name in PALLAS else reason(name)


def _automatic(framework: str, device: str) -> str:
    if framework == "jax" and device != "cpu":
        from frisket.runtime.jax.platforms import likely

        return likely()
    if device == "cpu" and not native_build.reason():
        return "cpp"
    if framework == "torch":
        return "triton" if device == "cuda" else "aten"
    return "xla"


def target_of(
    backend: str, geometry: Any, dtype: str, options: Options, plan: AnyPlan | None = None, device: Any = None,
    arch: str | None = None,
) -> Any:  # fmt: skip
    """The tiles and warps of a backend for one call. Without a plan those that a call is likely to have. `arch` is a
    GPU's, where it is not that of `device`."""
    from frisket.lowering.plan import Target

    tile, narrow = options.tile, plan is not None and plan.narrow  # rows see few keys: smaller tiles waste less
    if backend in ("xla", *PALLAS):
        from frisket.runtime.jax.platforms import target_on

        kernel: Any = None if plan is None else plan.work((128, 128)).plan  # tiles are found without one too
        return target_on(backend, kernel, geometry, dtype, tile, narrow)
    if backend == "triton":
        from frisket.runtime.backends.triton.tiles import target

        return target(plan, geometry, dtype, tile, options.tuning, device, arch)
    if backend == "cpp":
        from frisket.lowering.kernels.cpp.tiles import tiles

        return Target(backend, *(tile or tiles(geometry, dtype, narrow)))
    return Target(backend, *(tile or ((64, 32) if narrow else (128, 32))))
