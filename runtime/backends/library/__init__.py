"""Library calls of torch, on the CPU, and of JAX, on every platform; the float64 reference, against which all others
are checked."""

from frisket.lowering.kernels.features import ATEN, DENSE, GRADIENTS, XLA
from frisket.runtime.backends.base import LIBRARY, NO_GRADIENTS, Backend, Executors, absent

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
    features=ATEN,
).register()
Backend(
    name="xla",
    kernels="library calls of JAX",
    language="jax",
    reason=lambda framework: absent("jax", "jax"),
    tiles=lambda geometry, dtype, narrow: (256, 128),
    executors={"jax": Executors("frisket.lowering.xla.forward", "frisket.lowering.xla.backward")},
    order=20,
    tier=LIBRARY,
    stats_kind="lse_residual",
    exact_delta=True,
    features=XLA,
    operators=("frisket-xla", "vanilla"),
).register()
Backend(
    name="dense",
    kernels="the float64 reference",
    oracle=True,
    order=90,
    features={**dict.fromkeys(GRADIENTS, NO_GRADIENTS), **DENSE},
    operators=("dense",),
).register()
