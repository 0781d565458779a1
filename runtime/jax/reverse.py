"""A mark on arrays that gradients flow to: reverse mode works, forward mode raises an error of frisket.

The primal of the mark is the array. The tangent goes through a primitive that can be transposed and never runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from frisket.dsl.errors import BackwardError


def reverse_only(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, marked."""
    return {n: _mark.bind(x) for n, x in arrays.items()}


def _refused(*_: Any, **__: Any) -> Any:
    raise BackwardError(
        "forward mode is asked for (jax.jvp, jax.jacfwd, jax.linearize, or jax.hessian, which takes it of a gradient); "
        "attention has first derivatives in reverse, by jax.grad, jax.vjp and jax.jacrev\n"
        "  where none are needed wrap its arguments in jax.lax.stop_gradient"
    )


def _tangent_of(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    return _mark.bind(x), t if isinstance(t, ad.Zero) else _tangent.bind(t)


def _primitive(name: str) -> Any:
    made: Any = Primitive(name)
    made.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[made] = lambda xs, axes: (made.bind(*xs), axes[0])
    return made


_mark, _tangent = _primitive("frisket_reverse_only"), _primitive("frisket_tangent")
_mark.def_impl(lambda x: x)
mlir.register_lowering(_mark, lambda ctx, x: [x])
ad.primitive_jvps[_mark] = _tangent_of
_tangent.def_impl(_refused)
mlir.register_lowering(_tangent, _refused)
ad.primitive_transposes[_tangent] = lambda cotangent, x: [cotangent]
ad.primitive_jvps[_tangent] = _refused
