"""cuDNN's attention on GPUs of NVIDIA, by torch's operator."""

from __future__ import annotations

from frisket.runtime.backends.base import Backend, Executors, Lazy, absent, nvidia, register

HERE = "frisket.runtime.backends.cudnn.torch"
HALVES = "cuDNN's attention takes float16 and bfloat16; cast q, k and v, or leave out the backend"
OLDEST = 90000  # of cuDNN, where its attention is as torch calls it


def reason(framework: str | None = None) -> str:
    """A reason why cuDNN's attention does not run here."""
    if lacking := absent("torch", "torch"):
        return lacking
    if not nvidia():
        return "no GPU of NVIDIA is visible to torch"
    import torch

    have = int(torch.backends.cudnn.version() or 0)  # type: ignore[no-untyped-call]
    return "" if have >= OLDEST else f"cuDNN {have} is older than {OLDEST}"


register(Backend(
    name="cudnn",
    kernels="cuDNN's attention, of masks that it knows",
    language="cudnn",
    reason=reason,
    engine=Lazy(f"{HERE}:arguments"),
    executors={"torch": Executors(Lazy(f"{HERE}:forward"), Lazy(f"{HERE}:backward"))},
    order=76,
    platforms=("cuda",),
    rank=20,
    refuses={"float32": HALVES, "float64": HALVES},
))  # fmt: skip
