"""Call: one call of an attention, checked, with its plan and its backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from frisket.lowering.plan import RATE, SEED, Geometry, survives
from frisket.runtime.calls.arrays import Arrays
from frisket.runtime.calls.options import flag
from frisket.runtime.calls.program import CallProgram

from .device import CallPlan


@dataclass(frozen=True)
class Call:
    """Arrays that fit together and a plan that fits them. `sinks`: [heads] or None; `seed`: None without dropout."""

    given: Arrays
    geometry: Geometry
    plan: CallPlan
    backend: str
    rate: float
    seed: Any
    sinks: Any
    top: bool  # whether the largest score of every row is asked for
    live: Mapping[str, Any] = field(default_factory=dict)  # scales and pages, by the sources of their tables


def dropout_terms(program: CallProgram, rate: float, seed: Any) -> dict[str, Any]:
    """The arguments of `lowering.dense` for dropout; the names of `kept` are found in `params`."""
    if not rate:
        return {"params": {}}
    return {"kept": survives(program.positions), "rate": rate, "params": {SEED: int(seed), RATE: rate}}


def results(arrays: tuple[Any, ...], lse: bool, top: bool) -> Any:
    """out, (out, lse), (out, max) or (out, lse, max)."""
    for name, asked in (("return_lse", lse), ("return_max", top)):
        flag(asked, name)
    wanted = arrays[0], *([arrays[1]] if lse else []), *([arrays[2]] if top else [])
    return wanted if len(wanted) > 1 else wanted[0]
