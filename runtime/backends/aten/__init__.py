"""Library calls of torch, on the CPU."""

from frisket.runtime.backends.base import LIBRARY, Backend, Executors, absent

Backend(
    name="aten",
    kernels="library calls of torch",
    language="torch",
    reason=lambda framework: absent("torch", "torch"),
    executors={"torch": Executors("frisket.lowering.aten.forward", "frisket.lowering.aten.backward")},
    order=10,
    tier=LIBRARY,
    platforms=("cpu",),
    exact_delta=True,
).register()
