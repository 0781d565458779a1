"""Stages: a printable record of the steps from a text to a kernel, in the order of docs/how-it-works.md, for a plan, a
geometry and a backend. FRISKET_SHOW, and why a call compiled."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from frisket.dsl.notebook import sections
from frisket.dsl.program import ROOTS
from frisket.dsl.show import show
from frisket.lowering.kernels.units import overflow_fact
from frisket.lowering.plan import Geometry, LoopPlan, Target
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.calls.options import Options
from frisket.runtime.machine.cpp_build import kernel_step, there
from frisket.runtime.machine.parameters import is_tensor
from frisket.runtime.machine.settings import STAGES, Settings
from frisket.runtime.plans.device import CallPlan, CheckedCall

from .base import RECORDS
from .registry import library, target_of


@dataclass(frozen=True, repr=False)
class Stages:
    """The stages of a mask and a score mod: `print(att.stages(...))`, or one field of it.

    >>> import frisket as fk
    >>> print(fk.compile("causal & window(64)").stages(q_len=256).simplified)
    mask = q >= k & q - k <= 63
    >>> print(fk.compile("causal").stages(q_len=256).text("expr"))
    mask = causal

    `expr` as written, `simplified` after the rules (`rules` counts them) and with masks hoisted out of the score mod,
    `facts` and `layout` of the analysis. The `plan` every backend shares, the `target` chosen, and the `source` of the
    kernel, empty for backends that run library calls. `engines` says which kernel of a vendor runs instead of a
    generated one, and why others do not. `awaits` is the backend that runs after FRISKET_COMPILE has compiled its
    kernel. `overflow` says which exponential of a weight may be infinite; `text("facts")` has it.
    """

    expr: ProgramExprs
    simplified: ProgramExprs
    facts: Any
    layout: Any
    plan: LoopPlan
    target: Target
    source: str
    rules: Counter[str] = field(default_factory=Counter)
    engines: str = ""
    awaits: str = ""
    overflow: str = ""

    def text(self, name: str) -> str:
        """The text of one stage."""
        if name not in STAGES:
            raise ValueError(f"no stage {name!r}; there are {', '.join(STAGES)}")
        if name == "target":
            t = self.target
            if not t.block_q:
                return self.engines.partition("\n")[0]  # an engine has other tiles
            lines = [f"{t.backend}: {_launch(t)}"]
            if self.awaits:
                lines[0] += f", until the kernel of {self.awaits} is compiled"
            # kernels of gradients may have tiles different from those of the forward
            lines += [f"    {n}: {_launch(part)}" for n in ("dq", "dkv", "dv") if (part := getattr(t, n))]
            if fused := getattr(t, "fused", None):
                lines.append(f"    dq, dk and dv in one kernel: {_launch(fused)}, where its text is below")
            return "\n".join(lines)
        shown = str(getattr(self, name))
        if name == "simplified" and self.rules:
            fired = ", ".join(f"{n} x {c}" if c > 1 else n for n, c in self.rules.most_common())
            shown += f"\nrules: {fired}"
        if name == "facts" and self.layout is not None:
            questions = self.layout.questions
            shown += "".join(f"\n{n:9} {show(questions[n])}" for n in ("always", "never"))
        if name == "facts" and self.overflow:
            shown += f"\noverflow  {self.overflow}"
        return shown or "library calls"

    def _repr_html_(self) -> str:
        return sections((name, self.text(name)) for name in STAGES)

    def __str__(self) -> str:
        return "\n\n".join(f"-- {name} {'-' * (76 - len(name))}\n{self.text(name)}" for name in STAGES)

    __repr__ = __str__


def _launch(t: Target) -> str:
    measured = f"; tile {where}" if (where := getattr(t, "measured", "")) else ""
    return f"{t.block_q} queries x {t.block_k} keys, {t.num_warps} warps, {t.num_stages} stages{measured}"


@dataclass(frozen=True)
class PlanCompilation:
    """A plan compiled for one geometry and backend, a stage when it is first asked for. `learned` are the user's names
    of what gradients flow to besides the arrays; `arch` is a GPU's, where it is not that of `device`."""

    plan: CallPlan
    backend: str
    geometry: Geometry
    dtype: str
    options: Options
    device: Any = None
    arch: str | None = None
    sinks: bool = False
    learned: Collection[str] = ()
    framework: str = "torch"
    engines: str = ""  # which engine runs, and why the others do not, a line each
    awaits: str = ""  # the backend whose kernel is being compiled, or will be, while this one runs
    as_written: ProgramExprs | None = None  # by the user of this one: equal ones share a plan

    @cached_property
    def target(self) -> Target:
        """The target that is chosen; the kernel's text may ask for another one."""
        facts = self.geometry, self.dtype, self.options, self.plan, self.device, self.arch
        return target_of(self.backend, *facts)  # type: ignore[no-any-return]

    @cached_property
    def work(self) -> Any:
        """The plan's work for the tiles of the target; an engine chooses its tiles."""
        engine = RECORDS[self.backend].engine is not None
        block = (128, 128) if engine else (self.target.block_q, self.target.block_k)
        return self.plan.work(block, proofs=RECORDS[self.backend].guarded)

    @cached_property
    def kernel(self) -> tuple[str, Target]:
        """The text and target of the kernel; the text of the planner where there is one besides library calls."""
        if RECORDS[self.backend].engine is not None:
            return "", Target(self.backend, 0, 0)
        emit, text, target = RECORDS[self.backend].text, "", self.target
        if emit is not None:
            spans = self.plan if self.framework != "jax" else None  # JAX prints kernels before spans are known
            text, target = emit(self.work.plan, target, self.geometry, self.dtype, self.sinks, self.learned, spans)
        return text or self.plan.planner, target

    def stages(self) -> Stages:
        """The record of all stages."""
        written, work = self.as_written or self.plan.host_program.exprs, self.work
        source, target = self.kernel
        steps = written, work.simplified, work.facts, work.layout, work.plan, target, source
        overflow = overflow_fact(work.simplified, self.plan.host_program.scalars)
        return Stages(*steps, work.rules, self.engines, self.awaits, overflow)

    def now(self) -> PlanCompilation:
        """The compilation of library calls where FRISKET_COMPILE lets no call wait for the kernel; else this one."""
        ahead = RECORDS[self.backend].ahead
        if ahead is None or self.geometry.kv_dtype or Settings.read().compile != "background":
            return self
        text = ahead(self.work.plan, self.target, self.geometry, self.dtype, "forward", self.options.rows is not None)
        return self if there(text) else replace(self, backend=library("torch"), awaits=self.backend)


def compiled(call: CheckedCall, options: Options, device: Any = None) -> PlanCompilation:
    """The compilation of a checked call. Stages that FRISKET_SHOW names go to stderr, once for a target of a plan."""
    learned = [n for n, x in call.plan.device_values.items() if is_tensor(x) and x.is_floating_point()]
    facts = call.plan, call.backend, call.geometry, call.arrays.dtype, options, device
    compilation = PlanCompilation(*facts, framework=call.arrays.framework, learned=learned)
    if (names := [n for n in Settings.read().show if n in STAGES]) and compilation.target not in call.plan.shown:
        call.plan.shown.add(compilation.target)
        print("\n\n".join(map(compilation.stages().text, names)), file=sys.stderr)
    return compilation


USUAL = Options()
SHAPES = (*(f.name for f in fields(Geometry) if f.name not in ("q", "k", "v")), "kv_dtype")


class CompileRecord(NamedTuple):
    """A record of why a call compiled. `what` is "built" if a compiler ran, "loaded" if a kernel came from disk, else
    "planned". `new` names the parts of `key` that differ from `before`, the key of the most similar earlier call."""

    at: float  # seconds since the epoch
    what: str
    seconds: float  # of the whole call
    new: tuple[str, ...]
    key: dict[str, Any]
    before: dict[str, Any]  # empty for a first call

    def __repr__(self) -> str:
        parts = [f"{n} {self.key[n]} ({self.before.get(n, 'none')} before)" for n in self.new]
        why = f"new {', '.join(parts) or 'kernel, under a known key'}" if self.before else "first call"
        clock, backend = time.strftime("%H:%M:%S", time.localtime(self.at)), self.key["backend"]
        return f"{clock} {self.what} {backend} in {self.seconds:.2g} s: {why}"


def record(att: Any, call: CheckedCall, began: float, backend: str) -> None:
    """Record a call that was prepared since `began`, of `time.perf_counter`, unless its key and kernel are known. Every
    step of decoding with a growing cache comes here: texts and comparisons with other keys are made by `records`."""
    program, device_values = call.plan.host_program, call.plan.device_values
    values = {**program.scalars, **program.tables, **device_values, **call.kv_inputs}
    parts = [(n, p) for n, p in zip(ROOTS, program.every_part, strict=True) if p is not None or n in ("mask", "score")]
    chosen = "" if att.options == USUAL else ", ".join(f"{n} {x}" for n, x in att.options.chosen())
    key = {
        **{n: None if p is None else (p.expr, (*sorted(p.params),)) for n, p in parts},
        **{n: getattr(call.geometry, n) for n in SHAPES},
        "dtype": call.arrays.dtype, "device": call.arrays.device, "layout": call.arrays.layout, "backend": backend,
        "sinks": call.sinks is not None, "options": chosen, "origin": str(call.geometry.origin),
        **{n: f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else x for n, x in values.items()},
    }  # fmt: skip
    entries: Any = frozenset((n, type(x), x) for n, x in key.items())  # types too: 1, 1.0 and True are equal
    what, seconds, at = kernel_step.get() or "planned", time.perf_counter() - began, time.time()
    # a kernel that was built under a known key is another kernel
    if what != "built" and any(entries == earlier[0] for earlier in list(att.history)):
        return
    att.history.append((entries, at, what, seconds, key))
    if "compiles" in Settings.read().show:
        print(f"frisket: {records(att.history)[-1]}\n  {att!r}", file=sys.stderr)


def new_history() -> deque[Any]:
    """A history without records; it keeps the last 256."""
    return deque(maxlen=256)


def records(history: Iterable[Any]) -> list[CompileRecord]:
    """The records of a history, each compared with the most similar key before it."""
    compiles: list[CompileRecord] = []
    for _, at, what, seconds, key in list(history):
        key = key | {n: str(key[n] and show(*key[n])) for n in ROOTS if n in key}
        others = [x.key for x in reversed(compiles)]
        differing = [(tuple(n for n in key if (type(key[n]), key[n]) != (type(x.get(n)), x.get(n))), x) for x in others]
        new, before = min(differing, key=lambda pair: len(pair[0]), default=(tuple(key), {}))
        compiles.append(CompileRecord(at, what, seconds, new, key, before))
    return compiles
