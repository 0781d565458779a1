"""Kernels of Gluon for Hopper and Blackwell, on tensors of torch: warp groups that load, and warp groups that compute.
Their gradients are Triton's kernels."""

from __future__ import annotations

from frisket.lowering.kernels.features import GLUON
from frisket.runtime.backends.base import Backend, Executors, absent, neither_hopper_nor_blackwell


def reason(framework: str | None = None) -> str:
    """A reason why the kernels do not run here."""
    lacking = absent("torch", "torch") or absent("triton", "triton")
    return lacking or neither_hopper_nor_blackwell("its source", "written for Hopper and Blackwell,")


Backend(
    name="gluon",
    kernels="kernels for Hopper and Blackwell, on Hopper in the place of Triton's where they are faster",
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
