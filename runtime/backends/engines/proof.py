"""Proofs that an engine computes a call, and the choice among engines.

An engine runs where four questions have an answer: the mask and the score mod are made of parts that engines know
(`lowering.engines.forms`), their values fit the arrays (`lowering.engines.flags`), the engine takes them in its
version and on this device (its own `arguments`), and it has run there and is faster (`costs`). The first without is the
reason. An engine that takes masks as code and tiles answers the first three by itself (`engine_of_plans`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from frisket.lowering.engines.flags import Flags, flags_of
from frisket.lowering.engines.forms import NoForm, form_of
from frisket.lowering.plan import Geometry
from frisket.runtime.backends.base import RECORDS, Backend, engines_of
from frisket.runtime.calls.options import Options
from frisket.runtime.calls.tuning import AS_CHOSEN
from frisket.runtime.machine.settings import Settings
from frisket.runtime.plans.compiled import compiled_program

from .costs import lost, turn


@dataclass(frozen=True)
class EngineCall:
    """The facts of a call that engines are asked about."""

    program: Any  # with values of the host
    geometry: Geometry
    dtype: str
    framework: str
    platform: str  # of "cpu", "cuda", "rocm", "tpu"
    on_device: bool = False  # tables of the mask live on a device, and nobody looks at them
    stored: bool = False  # keys and values are as a cache stores them
    dropout: bool = False
    sinks: bool = False
    top: bool = False
    deterministic: bool = True
    generated: str = ""  # the backend that runs it otherwise
    engines: bool | tuple[str, ...] = True  # which of them are offered the call: True, or names
    plan: Any = None  # of the host, for engines that take plans

    @cached_property
    def capability(self) -> tuple[int, int]:
        """The compute capability of this machine's GPU; (0, 0) without one."""
        if self.platform != "cuda":
            return 0, 0
        import torch

        return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


@dataclass(frozen=True, eq=False)
class Proof:
    """A proof that an engine computes a call: what would be called, and the clauses that say so. `flags` are words
    where the engine takes a plan; `gradients` says whether the engine makes them, or generated kernels do."""

    backend: str
    flags: Flags | str
    arguments: Any
    clauses: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.backend}: {self.flags}; proved"

    @property
    def gradients(self) -> bool:
        found: bool = self.arguments.gradients
        return found


@dataclass(frozen=True)
class EngineChoice:
    """The engine that runs a call, None where generated kernels do; `why` says of every other one why it does not."""

    proof: Proof | None
    why: dict[str, str]

    def __str__(self) -> str:
        ran = [] if self.proof is None else [str(self.proof)]
        return "\n".join([*ran, *(f"{name}: {why}" for name, why in self.why.items())])


def choose_engine(call: EngineCall) -> EngineChoice:
    """The first engine of the platform, in the order of the costs, that a proof and the costs allow."""
    why: dict[str, str] = {}
    for engine in sorted(engines_of(call.framework, call.platform), key=lambda e: turn(e.name, call)):
        reason = lost(engine.name, call)
        if reason and engine.engine is None:  # its proof takes a plan and code, which nobody would run
            why[engine.name] = _unfit(engine, call) or reason
            continue
        found = prove(engine, call)
        if isinstance(found, Proof):
            if not reason:
                return EngineChoice(found, why)
            found = f"{found.flags}; proved, and {reason}"
        why[engine.name] = found
    return EngineChoice(None, why)


def prove(engine: Backend, call: EngineCall) -> Proof | str:
    """A proof that an engine computes a call, or the first reason why there is none."""
    if why := _unfit(engine, call):
        return why
    if engine.engine_of_plans is not None:
        made = engine.engine_of_plans(call)
        return made if isinstance(made, str) else Proof(engine.name, *made)
    assert engine.engine is not None
    program = call.program
    form = form_of(*compiled_program(program).simplified)
    if isinstance(form, NoForm):
        return str(form)
    flags = flags_of(form, call.geometry, program.scalars, program.tables)
    if isinstance(flags, str):
        return flags
    found = engine.engine(flags, call)
    return found if isinstance(found, str) else Proof(engine.name, flags, found, form.proofs)


def _unfit(engine: Backend, call: EngineCall) -> str:
    """A reason why an engine does not take a call, whatever its mask."""
    if call.platform not in engine.lowered_for:
        return f"it runs on {' and '.join(engine.platforms)}, and q is on {call.platform}"
    return engine.reason(call.framework) or engine.refused_dtype(call.dtype) or _unlike(engine, call)


def _unlike(engine: Backend, call: EngineCall) -> str:
    """A reason why engines like this one do not take a call, whatever its mask."""
    if call.dropout:
        return "dropout is drawn by position, which generated kernels do"
    if call.on_device:
        return "tables on a device are not looked at, so nothing is proved of them"
    if call.stored:
        return "keys and values are as a cache stores them"
    if call.sinks and engine.engine is not None:
        return "sinks are the generated kernels'"
    return "the largest score of a row is asked for" if call.top else ""


def asked_for(options: Options) -> bool:
    """Whether generated kernels are asked for: by name, by their tiles, or by `engines=False`."""
    by_name = options.backend or Settings.read().backend or options.tile or options.tuning != AS_CHOSEN
    return bool(by_name) or not allowed(options)


def allowed(options: Options) -> bool | tuple[str, ...]:
    """The engines offered to calls, by keyword or FRISKET_ENGINES: all that ran on the platform, none, or names."""
    return Settings.read().engines if options.engines is True else options.engines


def engines_for(
    plan: Any, geometry: Geometry, dtype: str, framework: str, device: str, generated: str, options: Options,
    named: bool,
) -> EngineChoice | None:  # fmt: skip
    """The engines for a plan of the host, beside the usual backend; None where generated kernels are asked for."""
    record = RECORDS[generated]
    if not record.is_engine and (named or asked_for(options)):
        return None
    platform = device or (record.platforms or ("cpu",))[0]
    call = EngineCall(
        plan.host_program, geometry, dtype, framework, platform, dropout=bool(options.dropout),
        sinks=options.sinks is not None, deterministic=options.deterministic, generated=generated,
        engines=allowed(options), plan=plan,
    )  # fmt: skip
    if not record.is_engine:
        return choose_engine(call)
    found = prove(record, call)
    return EngineChoice(found, {}) if isinstance(found, Proof) else EngineChoice(None, {record.name: found})
