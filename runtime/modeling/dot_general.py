"""Dot products of integers of few bits, by qwix."""

from __future__ import annotations

from typing import Any

from frisket.dsl.errors import ParameterError
from frisket.runtime.machine.extras import extras

MODES = {"train": "train", "serve": "serve", "convert": "convert", "eval": "serve"}
BITS = range(2, 9)


class EasyMethod:
    """EasyDeL's names for the modes of `get_dot_general_by_bits`: `EasyMethod.TRAIN`.

    >>> EasyMethod.TRAIN, EasyMethod.SERVE, EasyMethod.EVAL, EasyMethod.CONVERT
    ('train', 'serve', 'serve', 'convert')
    """

    TRAIN, SERVE, EVAL, CONVERT = "train", "serve", "serve", "convert"


class Keywords(dict[str, Any]):
    """Keywords of a layer of flax nnx, with `dot_general_cls` beside them for those who make the product themselves:
    flax's layers take one of the two names each."""

    def __missing__(self, key: str) -> Any:
        if key == "dot_general_cls" and "dot_general" in self:
            return lambda: self["dot_general"]
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return key in self.keys() or (key == "dot_general_cls" and "dot_general" in self.keys())

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 (dict.get calls no __missing__)


def get_dot_general_by_bits(bits: int | None = None, mode: str = "train") -> dict[str, Any]:
    """Keywords of a layer with products of few bits: `nnx.Linear(64, 64, **get_dot_general_by_bits(8), rngs=rngs)`.

    >>> get_dot_general_by_bits()
    {}
    >>> import jax.numpy as jnp
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
      gradients. "eval" is the same.

    `get_dot_general_by_bits(8)["dot_general_cls"]` is a function without arguments that gives the product, for layers
    that take it so, as `flax.linen.Dense`.

    Needs qwix: `pip install 'frisket-attention[quantized]'`.
    """
    if mode not in MODES:
        raise ParameterError(f"mode is {mode!r}; it is one of {', '.join(map(repr, MODES))}")
    if bits is None:
        return {}
    if bits not in BITS:
        raise ParameterError(f"bits is {bits!r}; there are products of 2 to 8 bits")
    with extras():
        from .quantized import DotGeneral

    return Keywords(dot_general=DotGeneral(bits, MODES[mode]))
