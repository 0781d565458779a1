"""Kernels of Pallas for TPUs; elsewhere Pallas' interpreter runs them."""

from frisket.runtime.backends.base import Backend, Executors, Interpreter, Lazy, absent, register

HERE = "frisket.runtime.backends.pallas_tpu"


def interpreted() -> bool:
    """Whether there is no TPU."""
    import jax

    return bool(jax.default_backend() != "tpu")


register(Backend(
    name="pallas-tpu",
    kernels="kernels for TPUs",
    language="pallas",
    reason=lambda framework: absent("jax", "jax"),
    missing=str,
    how=", in Pallas' interpreter where there is no TPU",
    target=Lazy(f"{HERE}.forward:target"),
    text=Lazy(f"{HERE}.text:text"),
    executors={"jax": Executors(Lazy(f"{HERE}.forward:forward"), Lazy(f"{HERE}.backward:backward"),
                                Lazy(f"{HERE}.forward:reason"), Lazy(f"{HERE}.backward:reason"))},
    order=60,
    platforms=("tpu",),
    rank=1,
    interpreter=Interpreter("Pallas'", 0.0005, interpreted),
    guarded=True,
    stats_kind="low",
    operators=("frisket-pallas-tpu", "splash"),
))  # fmt: skip
