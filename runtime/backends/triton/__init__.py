"""Kernels of Triton for GPUs, on tensors of torch and on arrays of JAX."""

from __future__ import annotations

import importlib
import importlib.util
import os

from frisket.grammar.memo import memo
from frisket.lowering.kernels.features import TRITON
from frisket.runtime.backends.base import Backend, Executors, Interpreter, absent, no_driver, no_gpu


def interpreted() -> bool:
    """Whether Triton interprets its kernels in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def reason(framework: str | None = None) -> str:
    """A reason why the kernels do not run here."""
    if framework == "torch":
        return _on_torch()
    if framework == "jax":
        return _on_jax()
    why = _on_torch()
    return why and (why if _on_jax() else "")


def missing() -> str:
    """The packages that JAX needs to call the kernels, and that are not installed or cannot be imported."""
    needs = ("triton",) if interpreted() else ("triton", "jax_triton")  # XLA calls the interpreter back, as Python
    lacking = [n for n in needs if not importlib.util.find_spec(n)]
    if lacking:
        return f"{lacking[0]} is not installed: pip install {lacking[0].replace('_', '-')}"
    return _importing(needs[-1])


@memo(2)
def _importing(package: str) -> str:
    try:
        importlib.import_module(package)
    except Exception as error:  # it is for another JAX or Triton, say
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return f"{package} cannot be imported: {first}; install versions of jax, triton and {package} that fit together"
    return ""


def _on_torch() -> str:
    lacking = absent("torch", "torch") or absent("triton", "triton")
    if lacking or interpreted():
        return lacking
    if not no_driver("torch"):
        import torch

        if torch.cuda.is_available():
            return ""
    return "no GPU is visible to torch; its source can be printed all the same"


def _on_jax() -> str:
    return absent("jax", "jax") or missing() or ("" if interpreted() else no_gpu())


BFLOAT16 = (
    "Triton's interpreter takes the bits of bfloat16 for integers and computes nonsense\n"
    "  give it float16 or float32, or unset TRITON_INTERPRET on a machine with a GPU"
)
Backend(
    name="triton",
    kernels="kernels for GPUs",
    language="triton",
    reason=reason,
    missing=missing,
    package=__name__,
    module="kernels",
    executors={"torch": Executors(), "jax": Executors()},
    order=40,
    platforms=("cuda", "rocm"),
    rank=2,
    instead="pallas-mosaic-gpu",
    interpreter=Interpreter("Triton's", 0.03, interpreted, {"bfloat16": BFLOAT16}),
    features=TRITON,
    guarded=True,
    loads=True,
    stats_kind="lse_residual",
    plans="device",
    operators=("frisket-triton",),
).register()
