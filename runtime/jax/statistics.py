"""Statistics of weights on arrays of JAX."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from frisket.dsl.errors import FrisketError
from frisket.lowering.dtypes import accumulate
from frisket.lowering.xla.differentiable import XlaForm
from frisket.lowering.xla.promotion import usual_promotion
from frisket.lowering.xla.statistics import columns as columns_of_loops
from frisket.lowering.xla.statistics import statistics as of_form
from frisket.runtime.attention.statistics import Statistics, Wanted
from frisket.runtime.backends.registry import library
from frisket.runtime.calls.options import CallArgs
from frisket.runtime.machine.parameters import stacked

from .attend import at_traced_origin, description
from .call import Arrays, JaxCall, kernel_inputs
from .op import prepared


@usual_promotion()
def statistics(att: Any, request: CallArgs, lse: Any, chosen: Wanted) -> Statistics:
    """The statistics of `att(q, k, v, ...)`; `lse` [batch, heads, q_len] is what a call gave, or None."""
    try:
        att, request = at_traced_origin(att, request._replace(sinks=stacked("sinks", request.sinks)))
        call = att.call(request)
    except FrisketError as error:
        error.add_note(description(att, request))
        raise
    if call.geometry.is_empty:
        real = accumulate(call.arrays.dtype)
        return chosen.whole(chosen.nothing(call.geometry, jnp.full, real, "int32"))
    inner, learned, fixed = prepared(call, att.options)
    q, k, v = call.arrays.transposed("bshd")
    sinks = {} if call.sinks is None else {"sinks": call.sinks}
    arrays = {"q": q, "k": k, "v": v, **sinks, **learned, **fixed, **call.kv_inputs}
    return Statistics(*call.arrays.as_called(*_compiled(inner, chosen, arrays, lse)))


@partial(jax.jit, static_argnums=(0, 1))
def _compiled(call: JaxCall, chosen: Wanted, arrays: Arrays, lse: Any) -> Statistics:
    of_rows, results = chosen, {}
    if chosen.columns and lse is not None:
        of_rows, results = chosen._replace(columns=False), {"columns": _columns(call, arrays, lse)}
    if any(of_rows.by_name.values()):
        results |= of_form(_form(call, arrays), lse, **of_rows.by_name)
    return chosen.whole(results)


def _form(call: JaxCall, arrays: Arrays) -> XlaForm:
    return XlaForm(kernel_inputs(call, library("jax"), "", arrays), *(arrays[n] for n in "qkv"))


def _columns(call: JaxCall, arrays: Arrays, lse: Any) -> Any:
    """Columns [batch, kv_heads, group, kv_len] by the loops of the forward; derivatives are those of the form."""

    @jax.custom_jvp
    def value(arrays: Arrays, lse: Any) -> Any:
        inputs = kernel_inputs(call, library("jax"), "", arrays)
        results, g = columns_of_loops(inputs, arrays["q"], arrays["k"], lse), call.geometry
        return results.reshape(g.batch, g.kv_heads, -1, results.shape[-1])

    def form(arrays: Arrays, lse: Any) -> Any:
        return of_form(_form(call, arrays), lse, columns=True, entropy=False, argmax=False, top=0)["columns"]

    value.defjvp(lambda primals, tangents: (value(*primals), jax.jvp(form, primals, tangents)[1]))
    return value(arrays, lse)
