"""JAX's splash attention on TPUs; elsewhere Pallas' interpreter runs it. Its gradients are generated kernels'."""

from frisket.runtime.backends.base import Backend, Executors, Interpreter, Lazy, absent, register
from frisket.runtime.backends.pallas_tpu import interpreted

HERE = "frisket.runtime.backends.splash.jax"

register(Backend(
    name="splash",
    kernels="JAX's splash attention for TPUs, of masks that it knows, by name alone",
    language="splash",
    reason=lambda framework: absent("jax", "jax"),
    missing=str,
    how=", in Pallas' interpreter where there is no TPU",
    engine=Lazy(f"{HERE}:arguments"),
    executors={"jax": Executors(Lazy(f"{HERE}:forward"))},
    order=78,
    platforms=("tpu",),
    interpreter=Interpreter("Pallas'", 0.0005, interpreted),
    refuses={"float64": "splash attention takes float32 and halves; cast q, k and v, or take backend='xla'"},
))  # fmt: skip
