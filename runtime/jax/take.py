"""Tokens of an array of JAX in another order, wherever it is, and marks on arrays: reverse mode works, forward raises.

The primal of the mark is the array. The tangent goes through a primitive that can be transposed and never runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from frisket.dsl.errors import BackwardError
from frisket.runtime.sharding.partition import fitting

_auto_axes: Any = jax.sharding.auto_axes  # JAX leaves some of its functions untyped
_spec: Any = PartitionSpec


def take(
    x: jax.Array, index: NDArray[np.int64], axis: int, inverse: NDArray[np.int64] | None = None, scratch: bool = False
) -> jax.Array:  # fmt: skip
    """`x` at `index` along an axis; with the index that puts rows back, gradients are gathered by it: JAX's own adds
    rows to zeros, and takes seven times as long on a CPU. On a mesh of explicit axes it stays split as it is, as far as
    the new length goes: there no gather says by itself how its result is split."""

    def gather(x: Any) -> Any:
        return jnp.take(x, jnp.asarray(index), axis=axis)

    have: Any = jax.typeof(x).sharding
    if AxisType.Explicit not in have.mesh.axis_types:
        if inverse is None:
            return gather(x)  # type: ignore[no-any-return]
        return _gather(index, inverse, axis)(reverse_only({"x": x})["x"])  # type: ignore[no-any-return]
    spec = [*have.spec, *[None] * (x.ndim - len(have.spec))]
    spec[axis] = fitting(have.mesh.shape, spec[axis], len(index))
    return _auto_axes(gather, out_sharding=NamedSharding(have.mesh, _spec(*spec)))(x)  # type: ignore[no-any-return]


def _gather(index: NDArray[np.int64], inverse: NDArray[np.int64], axis: int) -> Any:
    gather: Any = jax.custom_vjp(lambda x: jnp.take(x, jnp.asarray(index), axis=axis))
    gather.defvjp(lambda x: (gather(x), None), lambda _, out: (_gather(inverse, index, axis)(out),))
    return gather


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
    primitive: Any = Primitive(name)
    primitive.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[primitive] = lambda xs, axes: (primitive.bind(*xs), axes[0])
    return primitive


_mark, _tangent = _primitive("frisket_reverse_only"), _primitive("frisket_tangent")
_mark.def_impl(lambda x: x)
mlir.register_lowering(_mark, lambda ctx, x: [x])
ad.primitive_jvps[_mark] = _tangent_of
_tangent.def_impl(_refused)
mlir.register_lowering(_tangent, _refused)
ad.primitive_transposes[_tangent] = lambda cotangent, x: [cotangent]
ad.primitive_jvps[_tangent] = _refused
