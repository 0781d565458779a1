"""torch's scaled_dot_product_attention, where it is FlashAttention: on the CPU, and on GPUs of NVIDIA."""

from frisket.runtime.backends.base import Backend, Executors, Lazy, absent, register

HERE = "frisket.runtime.backends.sdpa.torch"

register(Backend(
    name="sdpa",
    kernels="torch's scaled_dot_product_attention, of masks that it knows",
    language="torch",
    reason=lambda framework: absent("torch", "torch"),
    engine=Lazy(f"{HERE}:arguments"),
    executors={"torch": Executors(Lazy(f"{HERE}:forward"), Lazy(f"{HERE}:backward"))},
    order=74,
    platforms=("cpu", "cuda"),
    rank=30,
))  # fmt: skip
