"""Kernels of Pallas for TPUs; elsewhere Pallas' interpreter runs them."""

from frisket.lowering.kernels.features import PALLAS_TPU
from frisket.runtime.backends.base import Backend, Executors, Interpreter, absent


def interpreted() -> bool:
    """Whether there is no TPU."""
    import jax

    return bool(jax.default_backend() != "tpu")


Backend(
    name="pallas-tpu",
    kernels="kernels for TPUs",
    language="pallas",
    reason=lambda framework: absent("jax", "jax"),
    missing=str,
    how=", in Pallas' interpreter where there is no TPU",
    package=__name__,
    module="jax",
    executors={"jax": Executors()},
    order=60,
    platforms=("tpu",),
    rank=1,
    interpreter=Interpreter("Pallas'", 0.0005, interpreted),
    features=PALLAS_TPU,
    guarded=True,
    stats_kind="lse_residual",
    operators=("frisket-pallas-tpu", "splash"),
).register()
