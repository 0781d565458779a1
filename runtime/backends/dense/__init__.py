"""The float64 reference, which all others are checked against."""

from frisket.runtime.backends.base import NO_GRADIENTS, Backend

Backend(
    name="dense",
    kernels="the float64 reference",
    oracle=True,
    order=90,
    features={
        "backward": NO_GRADIENTS,
        "traced arrays": (
            "backend 'dense' reads the values of q, k and v, which JAX traces here: call it outside of jit"
        ),
    },
    operators=("dense",),
).register()
