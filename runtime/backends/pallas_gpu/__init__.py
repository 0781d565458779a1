"""Kernels of Pallas, by Mosaic GPU, for Hopper; elsewhere an interpreter runs them."""

from __future__ import annotations

from collections.abc import Iterator

from frisket.lowering.kernels.features import PALLAS_GPU
from frisket.runtime.backends.base import Backend, Executors, Interpreter, absent, no_gpu


def interpreted() -> bool:
    """Whether there is no GPU."""
    import jax

    return bool(jax.default_backend() != "gpu")


def unfit() -> str:
    """A reason why this machine's GPU cannot run the kernels, else ""; also "" without a GPU."""
    strange = next((c for c in capabilities() if c.split(".")[0] != "9"), "")
    return f"it is written for GPUs of compute capability 9, this one has {strange}" if strange else ""


def capabilities() -> Iterator[str]:
    """The compute capabilities of the GPUs that JAX sees."""
    import jax

    if jax.default_backend() == "gpu":
        yield from (str(d.compute_capability) for d in jax.local_devices(backend="gpu"))


Backend(
    name="pallas-mosaic-gpu",
    kernels="kernels for Hopper",
    language="pallas",
    reason=lambda framework: absent("jax", "jax") or no_gpu(),
    missing=str,
    unfit=unfit,
    package=__name__,
    module="jax",
    executors={"jax": Executors()},
    order=70,
    platforms=("cuda",),
    rank=1,
    interpreter=Interpreter("Pallas'", 4.0, interpreted),
    features=PALLAS_GPU,
    guarded=True,
    stats_kind="lse_residual",
    operators=("frisket-pallas-mosaic-gpu",),
).register()
