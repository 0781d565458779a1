"""Kernels of Gluon for Hopper and Blackwell, on tensors of torch: warp groups that load, and warp groups that compute.
Where the backend is named, one fused kernel computes gradients of q, k and v on Hopper; others are Triton's kernels."""

from __future__ import annotations

from frisket.lowering.architectures import WRITTEN
from frisket.lowering.kernels.features import GLUON
from frisket.runtime.backends.base import Backend, Executors, absent, neither_hopper_nor_blackwell


def reason(framework: str | None = None) -> str:
    """A reason why the kernels do not run here."""
    lacking = absent("torch", "torch") or absent("triton", "triton")
    return lacking or neither_hopper_nor_blackwell("its source", "written for Hopper and Blackwell,", WRITTEN)


Backend(
    name="gluon",
    kernels=(
        "kernels for Hopper and Blackwell; on Hopper they take the place of Triton's where they are faster. "
        "The fused backward, by name alone, and queries of float8_e4m3fn are experimental: no device has run them"
    ),
    language="gluon",
    reason=reason,
    package=__name__,
    module="torch",
    executors={"torch": Executors()},
    order=50,
    platforms=("cuda",),
    instead="triton",
    features={
        **GLUON,
        "float32": "the Gluon kernels take float16 and bfloat16; cast q, k and v, or take backend='triton'",
        "float64": "the Gluon kernels take float16 and bfloat16; cast q, k and v, or move them to the CPU",
    },
    guarded=True,
    loads=True,
    stats_kind="lse_residual",
).register()
