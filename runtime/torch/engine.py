"""EngineReady: a prepared call that an engine runs, in the place of generated kernels. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch

from frisket.dsl.errors import BackendError
from frisket.lowering.plan import Target
from frisket.runtime.backends.base import RECORDS, Backend, engines_of
from frisket.runtime.backends.engines import proof as proofs
from frisket.runtime.calls.arrays import NATURAL
from frisket.runtime.calls.options import Options
from frisket.runtime.plans.call import Call

from .ready import Ready

Tensor = Any


@dataclass(frozen=True, eq=False)
class EngineReady(Ready):
    """A prepared call of an engine. The largest score of a row, sinks where the engine takes no plans, and gradients
    that are not the engine's are the generated kernels', which are prepared when the first call asks for them."""

    proof: Any = None
    named: bool = False  # an engine that is named raises an error where it cannot run a call
    prepare: Callable[[], Ready] | None = None

    @classmethod
    def of_call(
        cls, call: Call, options: Options, proof: proofs.Proof, named: bool, prepare: Callable[[Call, Options], Ready]
    ) -> EngineReady:
        """The engine that a proof names, and `call` by a backend that takes every call beside it."""
        given, record = call.given, RECORDS[proof.backend]
        bare = replace(
            call, given=replace(given, q=given.q.new_empty(0), k=given.k.new_empty(0), v=given.v.new_empty(0))
        )
        real = torch.float64 if given.dtype == "float64" else torch.float32
        return cls(
            None, None, call.geometry, Target(proof.backend, 0, 0), MappingProxyType({}), MappingProxyType({}), (),  # type: ignore[arg-type]
            False, None, given.layout != NATURAL["torch"], real,
            *_by_plan(prepare(replace(bare, backend=record.name), options)) if record.engine is None else
            _by_arguments(record), "", None, False, None, proof, named, lambda: prepare(bare, options),
        )  # fmt: skip

    @cached_property
    def generated(self) -> Ready:
        assert self.prepare is not None
        return self.prepare()

    def taking(self, sinks: Tensor | None, top: bool) -> Ready:
        by_plan = RECORDS[self.proof.backend].engine is None
        return self.generated if top or (sinks is not None and not by_plan) else self

    @property
    def stored(self) -> bool:
        return False

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, values: tuple[Tensor, ...], seed: Any, sinks: Tensor | None, top: bool,
        saving: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        if self.taking(sinks, top) is self:
            return super().__call__(q, k, v, values, seed, sinks, False, saving)
        if self.named:
            what = "sinks" if sinks is not None else "the largest score of each row"
            raise BackendError(f"backend {self.proof.backend!r} does not do {what}; leave out the backend")
        return self.generated(q, k, v, values, seed, sinks, top, saving)

    def run(self, seed: Any, top: bool, q: Tensor, k: Tensor, v: Tensor, sinks: Any, *values: Tensor) -> Any:
        return self.saving(seed, top, q, k, v, sinks)[:3]

    def saving(self, seed: Any, top: bool, q: Tensor, k: Tensor, v: Tensor, sinks: Any, *values: Tensor) -> Any:
        found = self.forward(self.proof.arguments, q, k, v, *(() if sinks is None else (sinks,)))
        return *found, None, None

    def gradients(
        self, seed: Any, wanted: frozenset[str], saved: tuple[Any, ...], dout: Tensor, dlse: Tensor | None,
        share: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        if not self.proof.gradients:
            return self.generated.gradients(seed, wanted, saved, dout, dlse, share)
        q, k, v, _, out, lse, *_ = saved
        found: dict[str, Tensor] = self.backward(self.proof.arguments, q, k, v, out, lse, dout, dlse)
        return found


def _by_arguments(record: Backend) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward of an engine's own arguments."""
    run = record.executors["torch"]
    return run.forward.function, _refused if run.backward is None else run.backward.function


def _by_plan(ready: Ready) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward of an engine that takes plans."""

    def forward(_: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, ...]:
        out, lse, _ = ready.run(None, False, q, k, v, sinks)
        return out, lse

    def backward(_: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *cotangents: Any) -> Any:
        return ready.gradients(None, frozenset("qkv"), (q, k, v, None, out, lse, None), *cotangents)

    return forward, backward


def _refused(*given: Any) -> Any:
    raise AssertionError("an engine without gradients says so in its arguments")


def engine_call(call: Call, options: Options) -> proofs.Proof | None:
    """The proof of the engine that runs a call; None where generated kernels do. Raises where a named one cannot."""
    named = RECORDS[call.backend]
    if named.engine is not None:
        found = proofs.prove(named, facts_of(call, options))
        if isinstance(found, str):
            raise BackendError(f"backend {named.name!r} does not run this call: {found}\n  leave out the backend")
        return found
    return None if proofs.asked_for(options) else choice(call, options).proof


def choice(call: Call, options: Options) -> proofs.EngineChoice:
    """The engine of a call, and why not the others."""
    facts = facts_of(call, options)
    return proofs.choose_engine(facts) if engines_of("torch", facts.platform) else proofs.EngineChoice(None, {})


def facts_of(call: Call, options: Options) -> proofs.EngineCall:
    plan, device = call.plan, call.given.device
    return proofs.EngineCall(
        plan.host_program, call.geometry, call.given.dtype, "torch",
        "rocm" if device == "cuda" and torch.version.hip else device, plan.on_device or bool(plan.given),
        bool(call.live or call.geometry.kv_dtype or plan.host_program.unwritten), bool(call.rate),
        call.sinks is not None, call.top, options.deterministic, call.backend, proofs.allowed(options), plan,
    )  # fmt: skip
