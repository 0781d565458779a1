"""A call of attention as a node of the graphs that torch.fx.symbolic_trace makes. Imports torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.fx import Proxy

from frisket.dsl.errors import ParameterError
from frisket.lowering.plan import K_SCALE, PAGES, V_SCALE
from frisket.runtime.calls.request import Request

from .spec import attention_of

_NAMES = {K_SCALE: "k_scale", V_SCALE: "v_scale", PAGES: "pages"}


def record(att: Any, request: Request, lse: bool) -> Any:
    """The Proxy of `att(q, k, v, ...)`: its node holds the attention as a text and tables as constants of the graph."""
    q, k, v, plan, seed, sinks, top, origin, sizes, layout, params = request
    if plan is not None:
        raise ParameterError("a graph of torch plans when it runs: leave out `plan`, give its tables to the call")
    options = {
        "origin": origin, "sizes": sizes, "layout": layout, "return_lse": lse or None, "seed": seed,
        "sinks": att.options.sinks if sinks is None else sinks, "return_max": top or None,
    }  # fmt: skip
    keywords = {n: x for n, x in att.inputs.items() if n not in params}
    keywords |= {_NAMES.get(n, n): x for n, x in params.items()} | {n: x for n, x in options.items() if x is not None}
    keywords = {n: torch.tensor(x) if isinstance(x, np.ndarray) else x for n, x in keywords.items()}
    tracer = next(x.tracer for x in (q, k, v, *keywords.values()) if isinstance(x, Proxy))
    return tracer.create_proxy("call_function", attend, (att.spec, q, k, v), keywords)


def attend(spec: str, q: Any, k: Any, v: Any, /, **options: Any) -> Any:
    """Call the attention that the text `spec` says; nodes of graphs call this function."""
    return attention_of(spec, ())(q, k, v, **options)
