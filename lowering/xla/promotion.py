"""JAX's default promotion of shapes and dtypes inside frisket, whatever the program around it has set.

Executors, generated planners and kernels promote ranks and dtypes, which JAX refuses under
`jax_numpy_rank_promotion="raise"` and `jax_numpy_dtype_promotion="strict"`. They are traced and run under the defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def usual_promotion() -> Iterator[None]:
    """A context manager and decorator with JAX's default promotion: `@usual_promotion()`."""
    jax = sys.modules.get("jax")  # a program of torch alone has no JAX to ask
    if jax is None or (
        jax.config.jax_numpy_rank_promotion == "allow" and jax.config.jax_numpy_dtype_promotion == "standard"
    ):
        yield
        return
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
