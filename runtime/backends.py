"""What runs here, and why the others do not."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from frisket.dsl.errors import BackendError

from . import native_build
from .settings import BACKENDS, TIERS, Settings

if TYPE_CHECKING:
    from .call import AnyPlan
    from .options import Options

LATER = {
    "gluon": "the Gluon kernels come in a later version",
    "pallas-mosaic-gpu": "the Mosaic GPU kernels come in a later version",
}
PRINTED = ("cpp", "triton", "pallas-tpu")  # backends with a kernel text
GUARDED = ("triton", "pallas-tpu")  # whose kernels check for empty rows, where they may be there
FORWARD_ONLY = ("pallas-tpu",)  # without gradients, dropout, attention sinks and max scores
DIFFERENTIABLE = ("aten", "xla", "cpp", "triton")  # with all of these
COMPLETE = (*DIFFERENTIABLE, "dense")  # with all but gradients
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


def reason(name: str) -> str:
    """Why a backend does not run here; empty when it does."""
    return LATER[name] if name in LATER else REASONS[name]()


def _installed(module: str, extra: str) -> str:
    return "" if importlib.util.find_spec(module) else f"{module} is not installed: pip install 'frisket[{extra}]'"


def _triton() -> str:
    missing = _installed("torch", "torch") or _installed("triton", "triton")
    if missing or interpreted("triton"):
        return missing
    import torch

    return "" if torch.cuda.is_available() else "no GPU is visible to torch; its source can be printed all the same"


def _pallas() -> str:
    return _installed("jax", "jax")  # without a TPU in Pallas' interpreter


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
    "pallas-tpu": _pallas,
    "dense": lambda: "",
}
OF_FRAMEWORK = {
    "torch": ("aten", "cpp", "triton", "dense"),
    "jax": ("xla", "cpp", "pallas-tpu", "dense"),
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
    if why := reason(name):
        raise BackendError(f"backend {name!r} does not run here: {why}")
    if name in ("aten", "cpp") and device != "cpu":
        other = "triton" if framework == "torch" else "xla"
        raise BackendError(f"backend {name!r} runs on the CPU, q is on {device}; take {other!r}, or move q, k and v")
    return name


def _automatic(framework: str, device: str) -> str:
    if device == "cpu" and not native_build.reason():
        return "cpp"
    if framework == "torch":
        return "triton" if device == "cuda" else "aten"
    return "pallas-tpu" if device == "tpu" else "xla"


def target_of(
    backend: str, geometry: Any, dtype: str, options: Options, plan: AnyPlan | None = None, device: Any = None,
    arch: str | None = None,
) -> Any:  # fmt: skip
    """The tiles and warps of a backend for one call. Without a plan those that a call is likely to have. `arch` is a
    GPU's, where it is not that of `device`."""
    from frisket.lowering.plan import Target

    tile, narrow = options.tile, plan is not None and plan.narrow  # rows see few keys: smaller tiles waste less
    if backend in ("xla", "pallas-tpu"):
        from .jax_op import default_target

        made = default_target(backend, geometry)
        return Target(backend, *tile) if tile else made
    if backend == "triton":
        from .triton_tiles import target

        return target(plan, geometry, dtype, tile, options.tuning, device, arch)
    if backend == "cpp":
        from frisket.lowering.cpu_tiles import tiles

        return Target(backend, *(tile or tiles(geometry, dtype, narrow)))
    return Target(backend, *(tile or ((64, 32) if narrow else (128, 32))))
