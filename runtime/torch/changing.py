"""ChangingTables: prepared calls that differ in the entries of tables of the host. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from threading import Lock
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from frisket.dsl.errors import LoweringError, ParameterError
from frisket.dsl.ir import var, walk
from frisket.lowering.plan import Spans
from frisket.lowering.planner.planner import ROOM
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.machine.cpp_build import BuildError
from frisket.runtime.plans.call import Call
from frisket.runtime.plans.device import FlatPlan
from frisket.runtime.plans.run import kernel_tables
from frisket.runtime.plans.run_cpp import Prepared, function

from .ready import Ready

Array = NDArray[Any]
KINDS = ("int8", "int16", "int32", "int64", "uint8")
LARGEST = 1 << 28  # kernels of tables whose entries nobody looked at keep to 32 bits: see `planner`

WIDER = 1.05  # a row whose first or last tile has no pair that all clauses of the mask show


class ChangingTables:
    """A call prepared for any entries of its tables: a planner in C++ makes the spans."""

    def __init__(self, ready: Ready, plan: FlatPlan, kinds: Mapping[str, str]) -> None:
        laid, self.ready, self.kinds, self.lock = plan.laid, ready, kinds, Lock()
        self.values, self.longest, self.slices = plan.values, max(laid.full[2:]), laid.slice_of
        reads = [n for n in walk(laid.host.expr) if n.op not in ("var", "param") and n.name in kinds]
        self.ordered = {n.name for n in reads if not (n.op == "lookup" and n.args[-1] in (var("b"), var("h")))}
        assert laid.planner is not None
        self.plan = Prepared(
            function(laid.planner), laid.planner, laid.at, laid.full, self.values, plan.q_len, plan.kv_len,
            (ready.target.block_q, ready.target.block_k), ROOM,
        )  # fmt: skip

    def __call__(self, bits: list[Array]) -> Ready | None:
        """The prepared call for tables of these entries, which stay as they are; None where the planner of the host
        knows more of them: the planner in C++ has the hull of the keys that a row of tiles sees, which is exact for
        tables in ascending order."""
        tables = {n: x.view(kind) for (n, kind), x in zip(self.kinds.items(), bits, strict=True)}
        for n, x in tables.items():
            if n in self.ordered and not (x[..., 1:] >= x[..., :-1]).all():
                return None
            if x.itemsize > 2 and not -LARGEST < x.min() <= x.max() < LARGEST:
                return None
        wide = {n: x.astype(np.int64) for n, x in tables.items() if n in self.plan.types}
        with self.lock:
            self.plan({n: x.ctypes.data for n, x in wide.items()})
            spans = Spans(self.plan.bounds.copy(), self.plan.count.copy(), self.slices)
        values = {**self.values, **{n: torch.from_numpy(x) for n, x in tables.items()}}
        found = kernel_tables(self.ready.plan, "torch", values, self.longest, None)
        return self.ready._with(spans, MappingProxyType(found), None)


def changing(
    att: Any, call: Call, params: Mapping[str, Any], host: Ready, prepare: Callable[..., Ready]
) -> ChangingTables | None:
    """A call like this one for any tables, if it reads as few tiles as `host`, which is for these tables."""
    tables = {n: x for n, x in params.items() if hasattr(x, "dtype")}
    kinds = {n: str(x.dtype).removeprefix("torch.") for n, x in tables.items()}
    given = {n: torch.as_tensor(x) for n, x in tables.items()}
    if host.generated is not host or host.live or call.live or not set(kinds.values()) <= set(KINDS):
        return None
    if RECORDS[host.target.backend].plans != "host":
        return None
    g, own = call.geometry, call.plan
    rest = {n: x for n, x in params.items() if n not in tables}
    try:
        plan = att.plan(
            g.q_len, g.kv_len, g.batch, g.heads, origin=own.origin, sizes=own.sizes, flat=True, **rest, **given
        )
        if plan.given.keys() != given.keys() or plan.laid.planner is None:
            return None
        ready = prepare(replace(call, plan=plan), att.options)
    except (BuildError, LoweringError, ParameterError):
        return None
    if ready.target != host.target or _read(ready.spans) > WIDER * _read(host.spans):
        return None
    return ChangingTables(ready, plan, kinds)


def _read(spans: Spans) -> int:
    """The tiles that all heads read; a partial one counts twice."""
    low, full_low, full_high, high = np.moveaxis(spans.bounds.astype(np.int64), -1, 0)
    of_slice = (2 * (high - low) - (full_high - full_low)).sum((1, 2))
    return int(of_slice[spans.slice_of].sum())
