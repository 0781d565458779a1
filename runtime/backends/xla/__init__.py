"""Library calls of JAX, on every platform."""

from frisket.lowering.features import XLA
from frisket.runtime.backends.base import LIBRARY, Backend, Executors, absent

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
