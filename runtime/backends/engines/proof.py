"""Proofs that an engine computes a call, and the choice among engines.

An engine runs where four questions have a good answer. The mask and the score mod are made of parts that engines know
(`lowering.engines.forms`), their values fit the arrays (`lowering.engines.flags`). The engine takes them in its
version and on this device (its own `arguments`), and it has run there and is faster (`COSTS`). The first without is the
reason. An engine that takes masks as code and tiles answers the first three by itself (`engine_of_plans`).

`COSTS` is a committed table of where an engine is faster than the generated kernels, with its sources, in the order of
speed. Of engines that win, the one with the first row runs. `CHECKED` are the calls of which each engine was compared
with float64 under frisket. Nothing is measured while a program runs, so the same call on the same versions takes the
same engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from frisket.lowering.dtypes import ACCELERATED, HALVES
from frisket.lowering.engines.flags import Flags, flags_of
from frisket.lowering.engines.forms import NoForm, form_of
from frisket.lowering.kernels.features import STORED, missing
from frisket.lowering.pipeline import simplified_program
from frisket.lowering.plan import Geometry
from frisket.runtime.backends.base import RECORDS, Backend, absent, capability_of, ranked
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
    contiguous: bool = False  # whether arrays with other strides run on generated kernels: they were not compared

    def __str__(self) -> str:
        return f"{self.backend}: {self.flags}; proved"

    @property
    def gradients(self) -> bool:
        return bool(self.arguments.gradients)


@dataclass(frozen=True)
class EngineChoice:
    """The engine that runs a call, None where generated kernels do; `why` says of every other one why it does not, and
    `advice` what else the engine would run."""

    proof: Proof | None
    why: dict[str, str]
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        ran = [] if self.proof is None else [str(self.proof), *(f"    {x}" for x in self.advice)]
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
        if reason and (engine.engine is None or not explain):  # to prove an engine of plans takes a plan and code
            why[engine.name] = _unfit(engine, call) or reason
            continue
        proof = prove(engine, call)
        if isinstance(proof, Proof):
            if not reason:
                compared = None if isinstance(call.engines, tuple) else comparison(engine.name, call)
                proof = replace(proof, contiguous=compared is not None and compared.contiguous)
                return EngineChoice(proof, why, _advice(proof, call) if explain else ())
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
    weighted = call.program is not None and call.program.weight is not None
    there = {"weights": weighted, "dropout": call.dropout, "device tables": call.on_device}
    there |= {"max": call.top, "sinks": call.sinks and "sinks" in engine.features, **dict.fromkeys(STORED, call.stored)}
    return missing(LACKS, needed=[name for name, needed in there.items() if needed])


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
    """The engines for a plan of the host, besides the usual backend; None where generated kernels are asked for."""
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


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Calls of which an engine's results, lse and gradients, and the gradients that generated kernels compute from its
    lse, were compared with float64 as frisket calls it. Empty fields: any."""

    engine: str
    platform: str
    capability: tuple[int, int] = (0, 0)  # of the GPU, exactly
    dtypes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()  # of queries and values alike
    torch: tuple[int, int] = (0, 0)  # its version, at least: the engine comes with it
    shared_heads: bool = True  # whether query heads may share a key head
    contiguous: bool = False  # whether arrays are contiguous, [batch, heads, length, dim]
    source: str = ""

    def lacks(self, call: EngineCall) -> str:
        """The first fact of a call that was not compared, in words; "" where all of them were."""
        g, capability = call.geometry, capability_of(call.platform)
        if self.capability not in ((0, 0), capability):
            return "compute capability {}.{}".format(*capability)
        if self.dtypes and call.dtype not in self.dtypes:
            return call.dtype
        if self.head_dims and not (g.head_dim == g.v_dim and g.head_dim in self.head_dims):
            return f"head dim {g.head_dim}" if g.head_dim == g.v_dim else f"head dims {g.head_dim} and {g.v_dim}"
        if not self.shared_heads and g.heads != g.kv_heads:
            return "query heads that share key heads"
        return "torch before {}.{}".format(*self.torch) if self.torch > torch_version() else ""

    def __str__(self) -> str:
        facts = ["compute capability {}.{}".format(*self.capability)] * (self.capability != (0, 0))
        facts += [" and ".join(self.dtypes)] * bool(self.dtypes)
        facts += [f"head dims {' and '.join(map(str, self.head_dims))}"] * bool(self.head_dims)
        facts += ["key heads that no query heads share"] * (not self.shared_heads)
        facts += ["contiguous arrays"] * self.contiguous
        facts += ["torch {}.{} or later".format(*self.torch)] * (self.torch != (0, 0))
        return ", ".join(facts)


def torch_version() -> tuple[int, int]:
    """The version of torch, (0, 0) where it is not installed."""
    if absent("torch", "torch"):
        return 0, 0
    import torch

    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)


# On the CPU the tests compare, on other platforms `python benchmarks/gpu.py right`, whose rows are then in
# benchmarks/results/gpu.json: `cudnn, causal, bfloat16` and five more, on an H100 with torch 2.11.0 and CUDA 13.0. The
# prepared rows `cudnn, ..., shared heads` compare shared key heads, transposed arrays and other head sizes.
CHECKED = (
    Comparison(engine="sdpa", platform="cpu", source="tests/runtime/backends/engines"),
    Comparison(
        engine="cudnn",
        platform="cuda",
        capability=(9, 0),
        dtypes=HALVES,
        head_dims=(64, 128),
        torch=(2, 11),
        shared_heads=False,
        contiguous=True,
        source="benchmarks/results/gpu.json",
    ),
)


def comparison(engine: str, call: EngineCall) -> Comparison | None:
    """The comparison of an engine with float64 that has all facts of a call."""
    return next((x for x in _comparisons(engine, call.platform) if not x.lacks(call)), None)


def _comparisons(engine: str, platform: str) -> list[Comparison]:
    return [x for x in CHECKED if (x.engine, x.platform) == (engine, platform)]


def experimental(engine: str) -> str:
    """The words for an engine that was compared with float64 on no device; "" for others."""
    return "" if any(x.engine == engine for x in CHECKED) else "experimental, as no device has run it under frisket"


def _uncompared(engine: str, call: EngineCall) -> str:
    """A reason why an engine does not take a call without being named: it was not compared with float64."""
    if comparison(engine, call) is not None:
        return ""
    rows = _comparisons(engine, call.platform)
    what = rows[0].lacks(call) if rows else "it"
    why = experimental(engine) or f"{what} was not compared with float64 on {call.platform}"
    gain = next((f", in {row.gain}" for _, row, pays in _rows(engine, call) if pays and row.gain), "")
    return f"{why}: engines={engine!r} takes it{gain}"


def _advice(proof: Proof, call: EngineCall) -> tuple[str, ...]:
    """Sentences about calls that the engine would run if options allowed it."""
    row = next((row for _, row, pays in _rows(proof.backend, call) if pays), None)
    lines = ["generated kernels run arrays that are not contiguous, [batch, heads, length, dim]"] * proof.contiguous
    if row is not None and row.backward and not proof.gradients:
        lines.append(f"deterministic=False takes its backward too, in {row.backward}; its sums have no order")
    return tuple(lines)


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """Calls for which an engine is faster than generated kernels. `where` says in words where it is not, and `source`
    where both are known from."""

    engine: str
    platform: str
    dtypes: tuple[str, ...]
    capability: tuple[int, int] = (0, 0)  # of the GPU, at least
    before: tuple[int, int] = (99, 0)  # of the GPU, less than this
    head_dims: tuple[int, ...] = ()  # of queries and values alike; (): any
    queries: tuple[int, float] = (0, math.inf)  # their number, at least and at most
    generated: str = ""  # the backend that runs the call otherwise; "": any
    unordered: bool = False  # whether only calls with deterministic=False win, by the engine's backward
    gain: str = ""  # the measured time of its forward, as words
    backward: str = ""  # and of its backward
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
            # torch is asked last
            and (self.capability == (0, 0) or self.capability <= capability_of(platform) < self.before)
        )


def _rows(engine: str, call: EngineCall) -> list[tuple[int, CostRow, bool]]:
    """(place, row, whether it says that the engine wins) of the rows about an engine and the arrays of a call."""
    about = call.platform, call.dtype, call.geometry, call.generated
    mine = [(i, row) for i, row in enumerate(COSTS) if row.engine == engine and row.platform == call.platform]
    return [
        (i, row, row.pays(*about) and not (row.unordered and call.deterministic))
        for i, row in mine
        if call.dtype in row.dtypes
    ]


def turn(engine: str, call: EngineCall) -> int:
    """The place of an engine among those of a call: that of its first row that says it wins."""
    return next((i for i, _, pays in _rows(engine, call) if pays), len(COSTS))


def lost(engine: str, call: EngineCall) -> str:
    """A reason why a call does not take an engine by itself, whatever its mask; empty where it does."""
    if isinstance(call.engines, tuple) and engine not in call.engines:
        return f"engines={', '.join(call.engines)!r} leaves it out"
    if call.engines is True and (why := _uncompared(engine, call)):
        return why
    rows = _rows(engine, call)
    if any(pays for *_, pays in rows):
        return ""
    if not rows:
        return "no measurement says that it is faster here"
    return f"generated kernels are faster here: {rows[0][1].where}"


HEAD_DIMS = (64, 128)
FLEX = (
    "PyTorch's post FlexAttention + FlashAttention-4: 1.6 to 3.2 times flex_attention's Triton kernels forward and "
    "1.85 to 2.3 times backward on a GB200. On Hopper and Blackwell 1.2 times or more where arithmetic takes the time. "
    "On an H100 ours are 1.0 to 4.1 times flex_attention's (docs/performance.md)"
)
CUDNN = (
    "with fewer than 2,048 queries on Hopper (1,024 on Blackwell), or past 16,384 at head dim 128 unless "
    "deterministic=False. Also at head dims other than 64, 128 and 192, and on GPUs before Hopper"
)
FLASH = "with fewer than 2,048 queries, and head dims other than 64 and 128"
_CUDA: dict[str, Any] = {"platform": "cuda", "dtypes": HALVES, "head_dims": HEAD_DIMS}
_LONG: dict[str, Any] = {**_CUDA, "queries": (2048, math.inf), "where": FLASH}
FLASH_PAPER = f"FlashAttention 4's paper: up to 1.3 times cuDNN 9.13 and 2.7 times Triton on a B200; {FLEX}"
_OF = "of the time of generated kernels"
# benchmarks/results/gpu.json, part speed, `frisket, cudnn / frisket`: an H100, bfloat16, 2,048, 8,192 and 32,768 tokens
ON_H100 = {
    "64": "causal forward 0.95 to 0.98, without a mask 0.89 to 0.91; backward 0.89 to 0.99 and 0.80 to 0.87",
    "128": "causal forward 0.92 to 0.99, without a mask 0.94 to 0.97; backward 0.87 to 0.92 and 0.85 to 0.87",
    "128 past 16,384": "causal forward 1.04, without a mask 0.97; backward 0.84 and 0.80",
    "192": "causal forward 0.83 to 0.85; its backward was not measured",
}
NO_BLACKWELL = "no GPU of Blackwell was measured: calls take it by name alone"
_HOPPER: dict[str, Any] = {"engine": "cudnn", "platform": "cuda", "dtypes": HALVES, "where": CUDNN}
_HOPPER |= {"capability": (9, 0), "before": (10, 0)}
_ANY, _MANY = (2048, math.inf), (16385, math.inf)
SDPA = "with a C++ compiler, and past 256 queries without one"
ON_XEON = (
    "benchmarks/results/engines.json, Intel Xeon with AMX, one thread, head dim 64. Library calls take 3.8 to 11 times "
    "as long up to 256 tokens, 0.95 to 1.4 times at 1,024. C++ kernels 0.2 to 0.55 times"
)
_SHORT: dict[str, Any] = {"queries": (0, 256), "generated": "aten", "where": SDPA}
COSTS = (
    CostRow(engine="flash", capability=(10, 0), source=FLASH_PAPER, **_LONG),
    CostRow(engine="cudnn", capability=(10, 0), queries=(1024, math.inf), where=CUDNN, source=NO_BLACKWELL, **_CUDA),
    CostRow(
        head_dims=(64,),
        queries=_ANY,
        gain=f"0.89 to 0.98 {_OF}",
        backward=f"0.80 to 0.99 {_OF}",
        source=ON_H100["64"],
        **_HOPPER,
    ),
    CostRow(
        head_dims=(128,),
        queries=(2048, 16384),
        gain=f"0.92 to 0.99 {_OF}",
        backward=f"0.85 to 0.92 {_OF}",
        source=ON_H100["128"],
        **_HOPPER,
    ),
    CostRow(
        head_dims=(128,),
        queries=_MANY,
        unordered=True,
        gain=f"0.97 to 1.04 {_OF}",
        backward=f"0.80 to 0.84 {_OF}",
        source=ON_H100["128 past 16,384"],
        **_HOPPER,
    ),
    CostRow(head_dims=(192,), queries=_ANY, gain=f"0.83 to 0.85 {_OF}", source=ON_H100["192"], **_HOPPER),
    CostRow(engine="flash", capability=(9, 0), source=FLEX, **_LONG),
    CostRow(engine="sdpa", platform="cpu", dtypes=ACCELERATED, source=ON_XEON, **_SHORT),
)


def offer_of(engine: str) -> str:
    """The calls that take an engine by itself, and what its name or `deterministic=False` would add on this GPU."""
    texts = []
    for x in (x for x in CHECKED if x.engine == engine):
        if any((row.engine, row.platform) == (engine, x.platform) for row in COSTS):
            texts.append(f"by itself on {x.platform.upper()}" + (f" ({x})" if str(x) else ""))
    if not texts:
        texts.append(experimental(engine))
    capability = capability_of("cuda")
    for row in COSTS:
        if row.engine == engine and row.platform == "cuda" and row.capability <= capability < row.before and row.gain:
            first, last = row.queries
            lengths = f"{first:,} queries or more" if last == math.inf else f"{first:,} to {last:,} queries"
            more = f"deterministic=False: its backward in {row.backward}" if row.backward else f"engines={engine!r}"
            dims = " and ".join(map(str, row.head_dims))
            texts.append(f"this GPU, head dim {dims}, {lengths}: forward in {row.gain}; {more}")
    return "; ".join(x for x in texts if x)
