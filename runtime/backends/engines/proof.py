"""Proofs that an engine computes a call, and the choice among engines.

An engine runs where four questions have an answer: the mask and the score mod are made of parts that engines know
(`lowering.engines.forms`), their values fit the arrays (`lowering.engines.flags`), the engine takes them in its
version and on this device (its own `arguments`), and it has run there and is faster (`COSTS`). The first without is the
reason. An engine that takes masks as code and tiles answers the first three by itself (`engine_of_plans`).

`COSTS` is a committed table of where an engine is faster than the generated kernels, with its sources, in the order of
speed. Of engines that win, the one with the first row runs. `CHECKED` are the platforms on which each engine was
compared with float64 under frisket. Nothing is measured while a program runs, so the same call on the same versions
takes the same engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from frisket.lowering.dtypes import ACCELERATED, HALVES
from frisket.lowering.engines.flags import Flags, flags_of
from frisket.lowering.engines.forms import NoForm, form_of
from frisket.lowering.kernels.features import STORED, missing
from frisket.lowering.pipeline import simplified_program
from frisket.lowering.plan import Geometry
from frisket.runtime.backends.base import RECORDS, Backend, capability_of, ranked
from frisket.runtime.backends.engines import LACKS
from frisket.runtime.backends.registry import automatic
from frisket.runtime.calls.options import AS_CHOSEN, Options
from frisket.runtime.machine.settings import Settings


@dataclass(frozen=True)
class EngineCall:
    """The facts of a call that engines are asked about."""

    program: Any  # with values of the host
    geometry: Geometry
    dtype: str
    framework: str
    platform: str  # of "cpu", "cuda", "rocm", "tpu"
    on_device: bool = False  # tables of the mask live on a device, and are not read
    stored: bool = False  # keys and values are as a cache stores them
    dropout: bool = False
    sinks: bool = False
    top: bool = False
    deterministic: bool = True
    generated: str = ""  # the backend that runs it otherwise
    engines: bool | tuple[str, ...] = True  # which of them are offered the call: True, or names
    plan: Any = None  # of the host, for engines that take plans


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
        return bool(self.arguments.gradients)


@dataclass(frozen=True)
class EngineChoice:
    """The engine that runs a call, None where generated kernels do; `why` says of every other one why it does not."""

    proof: Proof | None
    why: dict[str, str]

    def __str__(self) -> str:
        ran = [] if self.proof is None else [str(self.proof)]
        return "\n".join([*ran, *(f"{name}: {why}" for name, why in self.why.items())])


def may_win(framework: str, platform: str, dtype: str, g: Geometry, generated: str) -> bool:
    """Whether a cost row says that an engine wins on such arrays. Without one no engine is asked what it computes."""
    rows = [row for row in COSTS if row.platform == platform and row.generated in ("", generated)]
    winners = {row.engine for row in rows if row.pays(platform, dtype, g, generated)}
    return bool(winners) and not winners.isdisjoint(e.name for e in ranked(framework, platform, engines=True))


def choose_engine(call: EngineCall, explain: bool = True) -> EngineChoice:
    """The first engine of the platform, in the order of the costs, that a proof and the costs allow. Without `explain`
    no engine is proved that the costs refuse."""
    why: dict[str, str] = {}
    for engine in sorted(ranked(call.framework, call.platform, engines=True), key=lambda e: turn(e.name, call)):
        reason = lost(engine.name, call)
        if reason and (engine.engine is None or not explain):  # a proof of the former takes a plan and code
            why[engine.name] = _unfit(engine, call) or reason
            continue
        proof = prove(engine, call)
        if isinstance(proof, Proof):
            if not reason:
                return EngineChoice(proof, why)
            proof = f"{proof.flags}; proved, and {reason}"
        why[engine.name] = proof
    return EngineChoice(None, why)


def prove(engine: Backend, call: EngineCall) -> Proof | str:
    """A proof that an engine computes a call, or the first reason why there is none."""
    if why := _unfit(engine, call):
        return why
    if engine.engine_of_plans is not None:
        facts = engine.engine_of_plans(call)
        return facts if isinstance(facts, str) else Proof(engine.name, *facts)
    assert engine.engine is not None
    program = call.program
    form = form_of(simplified_program(program).simplified)
    if isinstance(form, NoForm):
        return str(form)
    flags = flags_of(form, call.geometry, program.scalars, program.tables)
    if isinstance(flags, str):
        return flags
    arguments = engine.engine(flags, call)
    return arguments if isinstance(arguments, str) else Proof(engine.name, flags, arguments, form.proofs)


def _unfit(engine: Backend, call: EngineCall) -> str:
    """A reason why an engine does not take a call, whatever its mask."""
    if call.platform not in engine.lowered_for:
        return f"it runs on {' and '.join(engine.platforms)}, and q is on {call.platform}"
    if why := engine.reason(call.framework) or engine.refused_dtype(call.dtype):
        return why
    there = {"dropout": call.dropout, "device tables": call.on_device, "max": call.top}
    there |= {"sinks": call.sinks and "sinks" in engine.features, **dict.fromkeys(STORED, call.stored)}
    return missing(LACKS, needed=[name for name, asked in there.items() if asked])


def asked_for(options: Options) -> bool:
    """Whether generated kernels are asked for: by name, by their tiles, or by `engines=False`."""
    by_name = options.backend or Settings.read().backend or options.tile or options.tuning != AS_CHOSEN
    return bool(by_name) or not allowed(options)


def allowed(options: Options) -> bool | tuple[str, ...]:
    """The engines offered to calls, by keyword or FRISKET_ENGINES: all that ran on the platform, none, or names."""
    return Settings.read().engines if options.engines is True else options.engines


def engines_for(
    plan: Any, g: Geometry, dtype: str, framework: str, device: str, generated: str, options: Options
) -> EngineChoice | None:
    """The engines for a plan of the host, beside the usual backend; None where generated kernels are asked for."""
    record = RECORDS[generated]
    if not record.is_engine and asked_for(options):
        return None
    platform = device or (record.platforms or ("cpu",))[0]
    asks: dict[str, Any] = {"dropout": bool(options.dropout), "sinks": options.sinks is not None}
    asks |= {"deterministic": options.deterministic, "engines": allowed(options), "generated": generated, "plan": plan}
    call = EngineCall(plan.host_program, g, dtype, framework, platform, **asks)
    if not record.is_engine:
        return choose_engine(call)
    proof = prove(record, call)
    return EngineChoice(proof, {}) if isinstance(proof, Proof) else EngineChoice(None, {record.name: proof})


def engines_text(options: Options, plan: Any, geometry: Geometry, dtype: str, framework: str, device: str) -> str:
    """The engines for a plan of the host, a line each: `Plan.engines`."""
    choice = engines_for(plan, geometry, dtype, framework, device, automatic(framework, device), options)
    return "generated kernels are asked for" if choice is None else str(choice)


# Where an engine was compared with the reference as frisket calls it. On the CPU the tests do so, on other platforms
# `python benchmarks/gpu.py right`, whose rows are then in benchmarks/results/gpu.json. It compares results, lse, the
# gradients of the engine, and those of generated kernels from its results, but on an H100 no heads that share keys.
CHECKED: dict[str, tuple[str, ...]] = {"sdpa": ("cpu",)}


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """Calls for which an engine is faster than generated kernels. `where` says in words where it is not, and `source`
    where both are known from."""

    engine: str
    platform: str
    dtypes: tuple[str, ...]
    capability: tuple[int, int] = (0, 0)  # of the GPU, at least
    head_dims: tuple[int, ...] = ()  # of queries and values alike; (): any
    queries: tuple[int, float] = (0, math.inf)  # their number, at least and at most
    generated: str = ""  # the backend that runs the call otherwise; "": any
    where: str = ""
    source: str = ""

    def pays(self, platform: str, dtype: str, g: Geometry, generated: str) -> bool:
        """Whether the engine wins."""
        return (
            platform == self.platform
            and dtype in self.dtypes
            and self.queries[0] <= g.q_len <= self.queries[1]
            and (not self.head_dims or (g.head_dim == g.v_dim and g.head_dim in self.head_dims))
            and self.generated in ("", generated)
            and (self.capability == (0, 0) or capability_of(platform) >= self.capability)  # torch is asked last
        )


def _rows(engine: str, call: EngineCall) -> list[tuple[int, CostRow, bool]]:
    """(place, row, whether it says that the engine wins) of the rows about an engine and the arrays of a call."""
    about = call.platform, call.dtype, call.geometry, call.generated
    mine = [(i, row) for i, row in enumerate(COSTS) if row.engine == engine and row.platform == call.platform]
    return [(i, row, row.pays(*about)) for i, row in mine if call.dtype in row.dtypes]


def turn(engine: str, call: EngineCall) -> int:
    """The place of an engine among those of a call: that of its first row that says it wins."""
    return next((i for i, _, pays in _rows(engine, call) if pays), len(COSTS))


def lost(engine: str, call: EngineCall) -> str:
    """A reason why a call does not take an engine by itself, whatever its mask; empty where it does."""
    if isinstance(call.engines, tuple) and engine not in call.engines:
        return f"engines={', '.join(call.engines)!r} leaves it out"
    if call.engines is True and call.platform not in CHECKED.get(engine, ()):
        return f"not all of it was compared with float64 on {call.platform}: engines={engine!r} takes it"
    rows = _rows(engine, call)
    if any(pays for *_, pays in rows):
        return ""
    if not rows:
        return "no measurement says that it is faster here"
    return f"generated kernels are faster here: {rows[0][1].where}"


HEAD_DIMS = (64, 128)
FLEX = (
    "PyTorch's post FlexAttention + FlashAttention-4: 1.6 to 3.2 times flex_attention's Triton kernels forward and "
    "1.85 to 2.3 times backward on a GB200; on Hopper and Blackwell 1.2 times or more where arithmetic takes the time. "
    "On an H100 ours are 1.0 to 4.1 times flex_attention's (docs/performance.md)"
)
CUDNN = "with fewer than 1,024 queries, head dims other than 64 and 128, and on GPUs before Hopper"
FLASH = "with fewer than 2,048 queries, and head dims other than 64 and 128"
_CUDA: dict[str, Any] = {"platform": "cuda", "dtypes": HALVES, "head_dims": HEAD_DIMS}
_LONG: dict[str, Any] = {**_CUDA, "queries": (2048, math.inf), "where": FLASH}
FLASH_PAPER = f"FlashAttention 4's paper: up to 1.3 times cuDNN 9.13 and 2.7 times Triton on a B200; {FLEX}"
ON_H100 = (
    "benchmarks/results/gpu.json, an H100, 2,048 to 32,768 tokens: causal forward 0.92 to 1.04 of the time of "
    "generated kernels, backward 0.84 to 0.99, whose sums have no order"
)
SDPA = "with a C++ compiler, and past 256 queries without one"
ON_XEON = (
    "benchmarks/results/engines.json, Intel Xeon with AMX, one thread, head dim 64: library calls take 3.8 to 11 times "
    "as long up to 256 tokens, 0.95 to 1.4 times at 1,024; C++ kernels 0.2 to 0.55 times"
)
_SHORT: dict[str, Any] = {"queries": (0, 256), "generated": "aten", "where": SDPA}
COSTS = (
    CostRow(engine="flash", capability=(10, 0), source=FLASH_PAPER, **_LONG),
    CostRow(engine="cudnn", capability=(9, 0), queries=(1024, math.inf), where=CUDNN, source=ON_H100, **_CUDA),
    CostRow(engine="flash", capability=(9, 0), source=FLEX, **_LONG),
    CostRow(engine="sdpa", platform="cpu", dtypes=ACCELERATED, source=ON_XEON, **_SHORT),
)
