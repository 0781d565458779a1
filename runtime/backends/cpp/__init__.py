"""Kernels of C++ for the CPU, compiled on this machine."""

from frisket.lowering.kernels.features import ONLY_HOPPER
from frisket.runtime.backends.base import NATIVE, Backend, Executors
from frisket.runtime.machine.cpp_build import reason

Backend(
    name="cpp",
    kernels="kernels for this CPU",
    language="c++",
    highlight="cpp",
    reason=reason,
    package=__name__,
    module="torch",
    executors={"torch": Executors(rows=True), "jax": Executors(maps=True, rows=True)},
    order=30,
    features=ONLY_HOPPER,
    tier=NATIVE,
    platforms=("cpu",),
    rank=1,
    optional=True,
    stats_kind="offset",
    exact_delta=True,
    any_origin=True,
    int64=True,
    plans="host",
    operators=("frisket-cpp",),
).register()
