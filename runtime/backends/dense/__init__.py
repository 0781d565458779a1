"""The float64 reference, which all others are checked against."""

from frisket.lowering.features import DENSE, GRADIENTS
from frisket.runtime.backends.base import NO_GRADIENTS, Backend

Backend(
    name="dense",
    kernels="the float64 reference",
    oracle=True,
    order=90,
    features={**dict.fromkeys(GRADIENTS, NO_GRADIENTS), **DENSE},
    operators=("dense",),
).register()
