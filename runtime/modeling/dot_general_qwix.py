"""The product of `get_dot_general_by_bits`, which keeps what it converts."""

from __future__ import annotations

from typing import Any

import qwix  # type: ignore[import-untyped]
from flax import nnx

from frisket.dsl.errors import ParameterError

from .dot_general import MODES, as_asked, rounded, served, trained


class RoundedWeight(nnx.Variable[Any]):
    """Weights as integers with their scales, a `qwix.QArray`."""


class DotGeneral(nnx.Module):
    """Called like `jax.lax.dot_general`, it rounds both sides to `bits` bits; see `get_dot_general_by_bits`."""

    def __init__(self, bits: int, mode: str) -> None:
        self.bits, self.mode = bits, mode
        self.rhs: Any = nnx.data(None)

    def __call__(
        self, lhs: Any, rhs: Any, dimension_numbers: Any, precision: Any = None, preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> Any:  # fmt: skip
        """`precision` has no meaning for integers, which are summed exactly."""
        if out_sharding is not None:
            raise ParameterError("products of few bits take no out_sharding; constrain their result")
        if self.mode not in MODES:
            raise ParameterError(f"mode is {self.mode!r}; it is one of {', '.join(map(repr, MODES))}")
        # hashable, as static arguments are
        (a, b), (c, d) = dimension_numbers
        dimensions = (tuple(a), tuple(b)), (tuple(c), tuple(d))
        if self.mode == "train":
            return as_asked(trained(lhs, rhs, dimensions, self.bits), preferred_element_type)
        if self.mode == "serve" and self.rhs is not None:
            rhs = self.rhs[...]
        elif not isinstance(rhs, qwix.QArray):
            rhs = rounded(rhs, dimensions[0][1], self.bits)
        if self.mode == "convert":
            self.rhs = RoundedWeight(rhs)
        return as_asked(served(lhs, rhs, dimensions, self.bits), preferred_element_type)
