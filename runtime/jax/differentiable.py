"""Tangents of a call by kernels, and tangents and gradients that can be differentiated in JAX's own operators over
visible tiles.

`primitives.py` runs these where a tangent, or a derivative of a gradient, is asked for. Arrays go by name as in
`JaxCall`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from frisket.lowering.xla.differentiable import XlaForm
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.backends.registry import library
from frisket.runtime.machine.caller import warn_once
from frisket.runtime.machine.cpp_build import BuildError

from .call import Arrays, JaxCall, in_order, kernel_inputs, permuted

WARNING = (
    "no kernel computes this tangent of attention, or a derivative of its gradient. JAX's operators compute these over "
    "visible tiles, in about the time of dense attention on as many pairs, or up to 6 times that for few tokens"
)


def _form(call: JaxCall, arrays: Arrays) -> XlaForm:
    return XlaForm(kernel_inputs(call, library("jax"), "", arrays), *(arrays[n] for n in "qkv"))


def _prepared(call: JaxCall, arrays: Arrays, names: tuple[str, ...]) -> tuple[XlaForm, Any, Arrays]:
    """The form of a call without rows, some arrays as it reads them as a function of these arrays, and the arrays."""

    def read(some: Arrays) -> Arrays:
        form = _form(call, arrays | some)
        return {n: form.arrays[n] for n in names}

    return _form(call, arrays), read, {n: arrays[n] for n in names}


def tangent_by_kernel(call: JaxCall, backend: str, platform: str, arrays: Arrays, tangents: Arrays) -> tuple[Any, Any]:
    """The tangents of (out, lse), given those of some arrays: by a kernel where the backend has one, else by JAX's
    operators."""
    run = RECORDS[backend].executors["jax"].tangent
    if run is None or call.plan.weighted or not tangents.keys() <= {*"qkv"}:
        return tangent(call, arrays, tangents)
    inputs = kernel_inputs(call, backend, platform, arrays)
    try:
        result: tuple[Any, Any] = usual_promotion()(run)(inputs, *(arrays[n] for n in (*"qkv", "out")), tangents)
    except BuildError as error:
        call.library_instead(error)
        return tangent(call, arrays, tangents)
    return result


@usual_promotion()
def tangent(call: JaxCall, arrays: Arrays, tangents: Arrays) -> tuple[Any, Any]:
    """The tangents of (out, lse), given those of some arrays."""
    warn_once(WARNING)
    if (rows := call.rows_around(library("jax"))) is not None:
        bare = replace(call, rows=None)
        results = tangent(bare, in_order(rows, arrays), in_order(rows, tangents))
        return tuple(permuted(x, rows.back, n) for n, x in zip(("out", "lse"), results, strict=True))
    form, read, some = _prepared(call, arrays, tuple(tangents))
    dout, dlse = form.tangents(*jax.jvp(read, (some,), (tangents,)))
    return dout.astype(arrays["q"].dtype), dlse


@usual_promotion()
def gradients(call: JaxCall, arrays: Arrays, grad_names: tuple[str, ...]) -> tuple[Any, ...]:
    """The gradients of `grad_names` from the cotangents "dout" and "dlse" among the arrays, to be differentiated."""
    warn_once(WARNING)
    if (rows := call.rows_around(library("jax"))) is not None:
        grads = gradients(replace(call, rows=None), in_order(rows, arrays), grad_names)
        backs = (rows.back if n == "q" else rows.keys_back for n in grad_names)
        return tuple(permuted(x, back, n) for n, x, back in zip(grad_names, grads, backs, strict=True))
    form, read, some = _prepared(call, arrays, grad_names)
    values, pull = jax.vjp(read, some)
    dlse = arrays["dlse"] if "dlse" in arrays else jnp.zeros_like(arrays["lse"])
    (grads,) = pull(form.gradients(values, arrays["dout"], dlse))
    return tuple(grads[n] for n in grad_names)
