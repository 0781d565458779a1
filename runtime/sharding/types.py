"""Names of types that eformer's `common_types` has, for annotations of model code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

Array = jax.Array
PRNGKey = jax.Array
DType = jnp.dtype
Shape = Sequence[int]
AxisIdxes = tuple[int, ...]
AxisNames = tuple[str, ...]
AxisType = tuple[str, ...] | str | Any | None  # the mesh axes of one dimension
RUNTIME_MODE_TYPES = Literal["__autoregressive__", "__prefill__", "__train__", "__insert__"]

__all__ = ["RUNTIME_MODE_TYPES", "Array", "AxisIdxes", "AxisNames", "AxisType", "DType", "Mesh", "PRNGKey", "Shape"]
