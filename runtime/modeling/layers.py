"""Small things that layers need: a dtype for several arrays, what a checkpoint keeps, docstrings in parts."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from frisket.dsl.errors import ParameterError, UnknownNameError
from frisket.lowering.xla.promotion import usual_promotion

T = TypeVar("T")


@usual_promotion()
def canonicalize_dtype(*args: Any, dtype: Any = None, inexact: bool = True) -> Any:
    """The dtype that arrays are brought to before they meet: `dtype`, or what JAX promotes them to.

    >>> canonicalize_dtype(jnp.ones(2, "bfloat16"), None, jnp.ones(2, "int8"))
    dtype(bfloat16)

    None among `args` is passed over. With `inexact` it is a floating or complex one: integers alone make float32, and
    another `dtype` is an error.
    """
    if dtype is None:
        arrays = [jnp.asarray(x) for x in args if x is not None]
        if not arrays:
            raise ParameterError("there is no array to tell the dtype by; give dtype=")
        dtype = jnp.result_type(*arrays)
        if inexact and not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
        raise ParameterError(f"dtype is {jnp.dtype(dtype)}; it is a floating one here (inexact=False allows others)")
    return dtype


def get_gradient_checkpoint_policy(name: str) -> Callable[..., Any]:
    """`jax.checkpoint(f, policy=get_gradient_checkpoint_policy("dots_saveable"))`: that of `jax.checkpoint_policies`.

    Some are policies, some make one of names: `get_gradient_checkpoint_policy("save_only_these_names")("frisket out",
    "frisket lse")` keeps attention's results, so that the backward does not run it again. Another name is a `KeyError`.

    >>> policy = get_gradient_checkpoint_policy("dots_saveable")
    >>> float(jax.grad(jax.checkpoint(jnp.sin, policy=policy))(0.0))
    1.0
    """
    policies = {n: p for n in dir(jax.checkpoint_policies) if callable(p := getattr(jax.checkpoint_policies, n))}
    policies = {n: p for n, p in policies.items() if not n.startswith("_")}
    if name not in policies:
        near = difflib.get_close_matches(str(name), policies, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(f"there is no checkpoint policy {name!r}{hint}\n  there are {', '.join(policies)}")
    policy: Callable[..., Any] = policies[name]
    return policy


def add_start_docstrings(*docstr: str) -> Callable[[T], T]:
    """A decorator that puts texts before a docstring: `@add_start_docstrings(COMMON, "This one ...")`.

    >>> @add_start_docstrings("A layer of Llama. ")
    ... def block():
    ...     "Attention, then the MLP."
    >>> block.__doc__
    'A layer of Llama. Attention, then the MLP.'
    """

    def documented(fn: T) -> T:
        fn.__doc__ = "".join(docstr) + (fn.__doc__ or "")
        return fn

    return documented
