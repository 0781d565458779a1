"""Dot products of integers of few bits, by qwix."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from frisket.dsl.errors import BackwardError, ParameterError
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.machine.extras import extras

MODES = ("train", "serve", "convert")
BITS = range(2, 9)


class Keywords(dict[str, Any]):
    """Keywords of a layer of flax nnx, with `dot_general_cls` beside them for those who make the product themselves:
    flax's layers take one of the two names each."""

    def __missing__(self, key: str) -> Any:
        if key == "dot_general_cls" and "dot_general" in self:
            return lambda: self["dot_general"]
        raise KeyError(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self or (key == "dot_general_cls" and self) else default


def get_dot_general_by_bits(bits: int | None = None, mode: str = "train") -> dict[str, Any]:
    """Keywords of a layer with products of few bits: `nnx.Linear(64, 64, **get_dot_general_by_bits(8), rngs=rngs)`.

    >>> get_dot_general_by_bits()
    {}
    >>> dot = get_dot_general_by_bits(8)["dot_general"]
    >>> dot(jnp.ones((2, 64)), jnp.ones((64, 3)), (((1,), (0,)), ((), ()))).shape
    (2, 3)

    `bits` is 2 to 8; None is the layer's own product. Both sides are scaled so that the largest magnitude along what
    is summed is 2 ** (bits - 1) - 1, rounded, and multiplied as integers (int8, which every device multiplies); results
    are floats again. By `mode`:

    - "train": both products of the backward are of integers too; what was rounded passes gradients on.
    - "convert": like "serve", and the right side, the weights, is kept as integers and scales in `rhs`. Run the model
      once, then `model.set_attributes(mode="serve")`.
    - "serve": takes the weights in `rhs`, or those it is called with where there are none, or a `qwix.QArray`. No
      gradients.

    `get_dot_general_by_bits(8)["dot_general_cls"]` is a function without arguments that gives the product, for layers
    that take it so, as `flax.linen.Dense`.

    Needs qwix: `pip install 'frisket-attention[quantized]'`.
    """
    if mode not in MODES:
        raise ParameterError(f"mode is {mode!r}; it is {', '.join(map(repr, MODES[:2]))} or {MODES[2]!r}")
    if bits is None:
        return {}
    if bits not in BITS:
        raise ParameterError(f"bits is {bits!r}; there are products of 2 to 8 bits")
    with extras():
        from .dot_general_qwix import DotGeneral

    return Keywords(dot_general=DotGeneral(bits, mode))


def _scaling(bits: int) -> str:
    """How qwix finds scales. Its own put the largest magnitude of int8 at 127.5."""
    return f"absmax,{127.5 / (2 ** (bits - 1) - 1)}"


@usual_promotion()
def trained(lhs: Any, rhs: Any, dimension_numbers: Any, bits: int) -> Any:
    """The product with integers in the forward and the backward."""
    # qwix's public way to it is a flax module that it rewrites
    from qwix._src.core.dot_general_qt import (  # type: ignore[import-untyped]
        DotGeneralQtConfig,
        dot_general_qt,
    )

    sides = ("lhs", "rhs", "dlhs_grad", "drhs_grad")
    types: dict[str, Any] = {f"{side}_qtype": jnp.int8 for side in sides}
    scalings: dict[str, Any] = {f"{side}_calibration_method": _scaling(bits) for side in sides}
    config = DotGeneralQtConfig(**types, **scalings)
    return dot_general_qt(lhs, rhs, dimension_numbers, config)


@usual_promotion()
def rounded(x: Any, contracted: Any, bits: int) -> Any:
    """`x` as a QArray: a scale for every index of the axes that are not contracted."""
    import qwix  # type: ignore[import-untyped]

    kept = [i for i in range(x.ndim) if i not in contracted]
    return qwix.quantize(x, jnp.int8, channelwise_axes=kept, calibration_method=_scaling(bits))


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
@usual_promotion()
def served(lhs: Any, rhs: Any, dimension_numbers: Any, bits: int) -> Any:
    """The product with integers; `rhs` is a QArray."""
    import qwix

    return qwix.dot_general(rounded(lhs, dimension_numbers[0][0], bits), rhs, dimension_numbers)


@served.defjvp
def _no_gradient(dimension_numbers: Any, bits: int, primals: Any, tangents: Any) -> Any:
    raise BackwardError("products of rounded weights have no gradients\n  take mode='train'")


def as_asked(x: Any, preferred_element_type: Any) -> Any:
    return x if preferred_element_type is None else x.astype(jnp.dtype(preferred_element_type))
