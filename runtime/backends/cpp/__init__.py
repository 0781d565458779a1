"""Kernels of C++ for the CPU, compiled on this machine."""

from frisket.runtime.backends.base import NATIVE, Backend, Executors, Lazy, register

REASON = Lazy("frisket.runtime.machine.cpp_build:reason")
TORCH, JAX = "frisket.runtime.backends.cpp.torch", "frisket.runtime.backends.cpp.jax"

register(Backend(
    name="cpp",
    kernels="kernels for this CPU",
    language="c++",
    highlight="cpp",
    reason=lambda framework: str(REASON()),
    tiles=Lazy("frisket.lowering.kernels.cpp.tiles:tiles"),
    target=Lazy("frisket.runtime.backends.cpp.text:target"),
    call_target=Lazy("frisket.runtime.backends.cpp.text:call_target"),
    text=Lazy("frisket.runtime.backends.cpp.text:text"),
    ahead=Lazy("frisket.runtime.backends.cpp.text:ahead"),
    executors={
        "torch": Executors(
            Lazy(f"{TORCH}:forward"), Lazy(f"{TORCH}:backward"), build=Lazy(f"{TORCH}:build"),
            repeat=Lazy("frisket.runtime.backends.cpp.decode:repeat"), rows=True,
        ),
        "jax": Executors(Lazy(f"{JAX}:forward"), Lazy(f"{JAX}:backward"), maps=True, rows=True),
    },
    order=30,
    tier=NATIVE,
    platforms=("cpu",),
    rank=1,
    optional=True,
    stats_kind="offset",
    exact_delta=True,
    int64=True,
    plans="host",
    operators=("frisket-cpp",),
))  # fmt: skip
