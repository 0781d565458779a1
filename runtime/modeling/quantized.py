"""Dot products of integers of few bits, by qwix: the products of `get_dot_general_by_bits`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import qwix  # type: ignore[import-untyped]
from flax import nnx

# qwix's public way to it is a flax module that it rewrites
from qwix._src.core.dot_general_qt import DotGeneralQtConfig, dot_general_qt  # type: ignore[import-untyped]

from frisket.dsl.errors import BackwardError, ParameterError
from frisket.lowering.xla.promotion import usual_promotion


class RoundedWeight(nnx.Variable[Any]):
    """Weights as integers with their scales, a `qwix.QArray`."""


class DotGeneral(nnx.Module):
    """Called like `jax.lax.dot_general`, it rounds both sides to `bits` bits; see `get_dot_general_by_bits`."""

    def __init__(self, bits: int, mode: str) -> None:
        self.bits, self.mode = bits, mode
        self.rhs: Any = nnx.data(None)

    def __call__(
        self,
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> Any:
        """`precision` has no meaning for integers, which are summed exactly."""
        if out_sharding is not None:
            raise ParameterError("products of few bits take no out_sharding; constrain their result")
        if self.mode not in ("train", "serve", "convert"):
            raise ParameterError(f"mode is {self.mode!r}; it is one of 'train', 'serve', 'convert'")
        # hashable, as static arguments are
        (a, b), (c, d) = dimension_numbers
        dimensions = (tuple(a), tuple(b)), (tuple(c), tuple(d))
        if self.mode == "train":
            return as_preferred(trained(lhs, rhs, dimensions, self.bits), preferred_element_type)
        if self.mode == "serve" and self.rhs is not None:
            rhs = self.rhs[...]
        elif not isinstance(rhs, qwix.QArray):
            rhs = rounded(rhs, dimensions[0][1], self.bits)
        if self.mode == "convert":
            self.rhs = RoundedWeight(rhs)
        return as_preferred(served(lhs, rhs, dimensions, self.bits), preferred_element_type)


def _scaling(bits: int) -> str:
    """How qwix finds scales. Its own put the largest magnitude of int8 at 127.5."""
    return f"absmax,{127.5 / (2 ** (bits - 1) - 1)}"


@usual_promotion()
def trained(lhs: Any, rhs: Any, dimension_numbers: Any, bits: int) -> Any:
    """The product with integers in the forward and the backward."""
    sides = ("lhs", "rhs", "dlhs_grad", "drhs_grad")
    # int8 holds fewer bits, too, and devices multiply it
    types: dict[str, Any] = {f"{side}_qtype": jnp.int8 for side in sides}
    scalings: dict[str, Any] = {f"{side}_calibration_method": _scaling(bits) for side in sides}
    return dot_general_qt(lhs, rhs, dimension_numbers, DotGeneralQtConfig(**types, **scalings))


@usual_promotion()
def rounded(x: Any, contracted: Any, bits: int) -> Any:
    """`x` as a QArray: a scale for every index of the axes that are not contracted."""
    channel_axes = [i for i in range(x.ndim) if i not in contracted]
    return qwix.quantize(x, jnp.int8, channelwise_axes=channel_axes, calibration_method=_scaling(bits))


# rounding has the gradient 0, which would go unnoticed
@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
@usual_promotion()
def served(lhs: Any, rhs: Any, dimension_numbers: Any, bits: int) -> Any:
    """The product with integers; `rhs` is a QArray."""
    return qwix.dot_general(rounded(lhs, dimension_numbers[0][0], bits), rhs, dimension_numbers)


@served.defjvp
def _no_gradient(dimension_numbers: Any, bits: int, primals: Any, tangents: Any) -> Any:
    raise BackwardError("products of rounded weights have no gradients\n  take mode='train'")


def as_preferred(x: Any, preferred_element_type: Any) -> Any:
    return x if preferred_element_type is None else x.astype(jnp.dtype(preferred_element_type))
