"""Which backend runs a call of JAX on the platform that it is lowered for."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from frisket.dsl.errors import BackendError
from frisket.lowering.kernels.cpp.tiles import tiles
from frisket.lowering.plan import Geometry, LoopPlan, Target
from frisket.runtime.backends.interpreters import warn_slow
from frisket.runtime.backends.registry import interpreted
from frisket.runtime.machine import cpp_build as native_build
from frisket.runtime.machine.once import warn_once

Shapes = Mapping[str, tuple[int, ...]]
EXECUTORS = {  # backend -> modules with its forward and its backward
    "xla": ("frisket.lowering.xla.forward", "frisket.lowering.xla.backward"),
    "cpp": ("frisket.runtime.backends.cpp.jax", "frisket.runtime.backends.cpp.jax"),
    "pallas-tpu": ("frisket.runtime.backends.pallas_tpu.forward", "frisket.runtime.backends.pallas_tpu.backward"),
    "pallas-mosaic-gpu": (
        "frisket.runtime.backends.pallas_gpu.forward",
        "frisket.runtime.backends.pallas_gpu.backward",
    ),
    "triton": ("frisket.runtime.backends.triton.jax", "frisket.runtime.backends.triton.jax"),
}
BACKENDS = tuple(EXECUTORS)
PLATFORMS = {  # where each can be lowered; on a CPU Pallas interprets
    "cpp": ("cpu",), "pallas-tpu": ("tpu", "cpu"), "pallas-mosaic-gpu": ("cuda", "cpu"),
    "triton": ("cuda", "rocm", "cpu"),
}  # fmt: skip
FIRST = {"tpu": ("pallas-tpu",), "cuda": ("pallas-mosaic-gpu", "triton"), "rocm": ("triton",)}
XLA_TILE = (256, 128)


def library(backend: str) -> bool:
    """Whether it takes spans as they are, and knows its platform."""
    return backend in ("xla", "cpp")


@cache
def _module(backend: str, place: int) -> Any:
    return importlib.import_module(EXECUTORS[backend][place])


def executor(backend: str, what: str) -> Callable[..., Any]:
    """`forward` or `backward` of a backend."""
    run: Callable[..., Any] = getattr(_module(backend, int(what == "backward")), what)
    return run


def target_on(
    backend: str, plan: LoopPlan, geometry: Geometry, dtype: str, tile: tuple[int, int] | None, narrow: bool
) -> Target:
    """The tiles of a call, those of the caller where he names them."""
    if backend == "xla":
        return Target(backend, *(tile or XLA_TILE))
    if backend == "cpp":
        return Target(backend, *(tile or tiles(geometry, dtype, narrow)))
    found: Target = _module(backend, 0).target(plan, geometry, dtype, tile, narrow)
    return found


def backend_on(
    named: str, platform: str, plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Shapes, exported: bool,
    wanted: frozenset[str],
) -> str:  # fmt: skip
    """The backend that runs a call on a platform, or makes its gradients where some are `wanted`: the one that is
    named, or the first that has all it takes. One that has not says so once."""
    if named:
        allowed = PLATFORMS.get(named, (platform,))
        if platform not in allowed:
            raise BackendError(
                f"backend {named!r} runs on {' and '.join(allowed)}, and this is lowered for {platform}\n"
                "  without a backend each platform has its own"
            )
        if platform == "cpu" and not library(named):
            warn_slow(named, geometry)
        return named
    if platform == "cpu":  # kernels of this machine do not travel
        return "xla" if exported or native_build.reason() else "cpp"
    lacks = []
    for backend in (b for b in FIRST.get(platform, ()) if not _unfit(b)):
        why = missing(backend) or _reason(backend, plan, geometry, dtype, shapes, wanted)
        if not why:
            break
        lacks.append(f"{backend}: {why}")
    else:
        backend = "xla"
    if lacks:
        warn_once(f"on {platform} this runs as backend {backend!r}, for want of:\n  " + "\n  ".join(lacks))
    return backend


def _reason(
    backend: str, plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Shapes, wanted: frozenset[str]
) -> str:
    """What its kernels cannot do of this."""
    forward, backward = (_module(backend, i) for i in (0, 1))
    why: str = forward.reason(plan, geometry, dtype, shapes)
    if wanted and not why and forward is not backward:
        why = backward.reason(plan, geometry, dtype, shapes, wanted)
    return why


def missing(backend: str) -> str:
    """What a backend of JAX needs and is not installed."""
    needs = {"triton": ("triton",) if interpreted(backend) else ("triton", "jax_triton")}.get(backend, ())
    absent = [n for n in needs if not importlib.util.find_spec(n)]
    return f"{absent[0]} is not installed: pip install {absent[0].replace('_', '-')}" if absent else ""


def _unfit(backend: str) -> str:
    """Why the GPU at hand has not what a backend is written for; without one it is taken to have."""
    kinds = list(_capabilities()) if backend == "pallas-mosaic-gpu" else []
    strange = next((c for c in kinds if c.split(".")[0] != "9"), "")
    return f"it is written for GPUs of compute capability 9, this one has {strange}" if strange else ""


def _capabilities() -> Iterator[str]:
    import jax

    if jax.default_backend() == "gpu":
        yield from (str(d.compute_capability) for d in jax.local_devices(backend="gpu"))


def platform_of(x: Any) -> str:
    """ "cpu", "tpu", "cuda" or "rocm": where an array is that has values."""
    device = next(iter(x.devices()))
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def likely() -> str:
    """The backend of most calls on the platform that JAX puts arrays on by itself."""
    import jax

    platform = jax.default_backend()
    if platform == "gpu":
        platform = platform_of(jax.numpy.zeros(()))
    return next((b for b in FIRST.get(platform, ()) if not (missing(b) or _unfit(b))), "xla")
