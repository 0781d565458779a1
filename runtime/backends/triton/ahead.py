"""Kernels of Triton and Gluon compiled before their launch.

The kernels of a first call and of its gradients compile at the same time (`compile_together`). `fk.warm(...,
arch="sm_90")` compiles kernels for a GPU that need not be here (`rows_of`). Both make a dry run: the call runs on
tensors without memory, so every launch has the arguments that it will have on the GPU. It runs nothing, and adds a
`CompileJob`. A kernel's key in Triton's folder (TRITON_CACHE_DIR, or ~/.triton/cache) holds its text, the types of its
arguments and which of them 16 divides, options, the architecture and Triton's version. A dry run gives the same key as
the launch on the GPU, so the launch finds the kernel, in this process or on disk.

Threads suffice: Triton's passes and LLVM release the lock of the interpreter, and ptxas is a process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from threading import local
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from frisket.dsl.errors import BackendError, FrisketError, ParameterError
from frisket.grammar.memo import Memo
from frisket.lowering.architectures import GPUS
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.calls.options import AS_CHOSEN, CallArgs, attention_by
from frisket.runtime.machine.modules import loaded, pip_install

from .launch import CompileJob, DryRun, dry_run
from .tiles import interpreted

if TYPE_CHECKING:
    from frisket.runtime.torch.ready import PreparedCall

Attention = Any
Job = tuple[str, CompileJob]  # with the kernel's name and call, in words
# calls whose kernels were compiled together; they depend on no lengths, so another length needs no dry run
_together = Memo("kernels compiled together", 256)


class Compiled(NamedTuple):
    """The outcome of a job: whether the kernel was on disk, or compiled before in this process; the kernel, None where
    an error was raised."""

    job: CompileJob
    there: bool
    seconds: float
    kernel: Any = None
    error: Exception | None = None


def jobs_of_call(
    ready: PreparedCall,
    arrays: Sequence[Any],
    seed: Any,
    grad_names: frozenset[str] | None,
    run: DryRun,
    forward: bool = True,
) -> list[CompileJob]:
    """The jobs of a prepared call of q, k, v, sinks and values, in the order of its launches. `grad_names` are the
    gradients that are computed; None: the call runs without any. Without `forward`, an engine ran the forward."""
    import torch

    q, k, v, *values = [_without_memory(x) for x in (*arrays[:3], *arrays[4:])]
    sinks = None if arrays[3] is None else _without_memory(arrays[3])
    before = dry_run.set(run)
    try:
        with torch.no_grad():
            if grad_names is None:
                ready.run(seed, False, q, k, v, sinks, *values)
            else:
                g = ready.inputs.geometry
                out, lse, stats = q.new_empty((*q.shape[:3], g.v_dim)), q.new_empty(q.shape[:3], dtype=ready.real), None
                if forward:
                    out, lse, _, stats = ready.saving(seed, False, q, k, v, sinks, *values)
                saved = q, k, v, sinks, out, lse, stats, *values
                ready.gradients(seed, grad_names, saved, torch.empty_like(out), None)
    finally:
        dry_run.reset(before)
    return run.jobs


def _without_memory(x: Any) -> Any:
    import torch

    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def compile_together(
    ready: PreparedCall, arrays: Sequence[Any], seed: Any, grad_names: frozenset[str], forward: bool = True
) -> None:
    """Compile the kernels of a first call and of its gradients at the same time, with a thread for each. A kernel that
    cannot be compiled raises its error where it is launched. Without `forward`, the kernels of gradients alone."""
    import torch

    x, q = ready.inputs, arrays[0]
    workers, g = _processors(), x.geometry
    if interpreted() or workers < 2 or not grad_names:
        return  # one thread compiles a kernel when it is launched
    if type(q) not in (torch.Tensor, torch.nn.Parameter) or torch._C._functorch.maybe_current_level() is not None:
        return  # launches get other strides than those of a wrapped tensor
    key = x.plan, x.target, g.head_dim, g.v_dim, g.heads // g.kv_heads, q.dtype, q.device, grad_names, forward
    if _together.get(key) is not None:
        return
    _together.put(key, True)
    jobs = jobs_of_call(ready, arrays, seed, grad_names, DryRun(q.device), forward)
    for _ in outcomes(jobs, workers, q.device):
        pass


def outcomes(jobs: Iterable[CompileJob], workers: int = 0, device: Any = None) -> Iterator[Compiled]:
    """Run jobs in threads, for a device of torch or the driver that is active. Jobs of one function of Triton run one
    after another: its compiled kernels are one dict."""
    by_function: dict[int, list[CompileJob]] = {}
    for job in jobs:
        by_function.setdefault(id(job.function), []).append(job)
    with ThreadPoolExecutor(workers or _processors()) as pool, _listening() as hits:
        for compiled in pool.map(lambda jobs: [_outcome(x, device, hits) for x in jobs], by_function.values()):
            yield from compiled


def _outcome(job: CompileJob, device: Any, hits: Any) -> Compiled:
    """The outcome of a job in a thread, where another device may be the current one."""
    import torch

    start, hits.missed = time.perf_counter(), False
    try:
        with torch.cuda.device(device) if getattr(device, "type", "") == "cuda" else nullcontext():
            kernel = job.compile()
    except Exception as error:  # Triton has no common class of errors, and LLVM raises RuntimeError
        return Compiled(job, False, time.perf_counter() - start, error=error)
    return Compiled(job, not hits.missed, time.perf_counter() - start, kernel)


@contextmanager
def _listening() -> Iterator[Any]:
    """Yield an object whose `missed` says, in each thread, whether Triton compiled a kernel that was not on disk."""
    from triton import knobs  # type: ignore[import-untyped]

    hits, before = local(), knobs.compilation.listener

    def listener(*, cache_hit: bool, **facts: Any) -> None:
        hits.missed = not cache_hit
        if before is not None:
            before(cache_hit=cache_hit, **facts)

    knobs.compilation.listener = listener
    try:
        yield hits
    finally:
        knobs.compilation.listener = before


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def compiling_for(arch: str) -> Iterator[None]:
    """Let Triton compile for an architecture without a GPU; a BackendError where this process uses another GPU."""
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.runtime import driver  # type: ignore[import-untyped]

    gpu = GPUTarget(*GPUS[arch].compiler)
    active = vars(driver).get("_active")  # None until something is launched: a driver needs a GPU
    if active is not None and active.get_current_target() == gpu:
        yield
        return
    if active is not None:
        raise BackendError(
            f"this process runs Triton kernels for {active.get_current_target().arch}, and arch={arch!r} is another\n"
            "  compile in a separate process, with CUDA_VISIBLE_DEVICES= set to nothing"
        )
    # Triton keeps the compiler of a device: one for each architecture
    of_driver: dict[str, Callable[..., Any]] = {
        "get_current_device": lambda: arch,
        "get_current_stream": lambda device: 0,
    }
    driver.set_active(SimpleNamespace(**of_driver, get_current_target=lambda: gpu))
    try:
        yield
    finally:
        driver.set_active(None)


# -- for a GPU that is not here --------------------------------------------------------------------------------------


def check_arch(arch: str) -> None:
    """Raise where no kernels can be compiled for `arch`."""
    if arch not in GPUS:
        known = f"{', '.join(GPUS)}\n  `frisket doctor` says which GPUs these are"
        raise ParameterError(f"arch={arch!r}: write {known}")
    record = RECORDS["triton"]
    for package in ("torch", "triton"):
        if record.reason("torch").startswith(f"{package} is not installed"):
            raise BackendError(f"{package} is not installed: {pip_install(package)}")
    if record.interpreted:
        raise BackendError("TRITON_INTERPRET=1 is set: start Python without it to compile kernels")


def jobs_of(att: Attention, sizes: dict[str, Any], gradients: bool, arch: str) -> Iterator[Job]:
    """The kernels of the calls of an attention on a GPU. Raises where no kernel of a GPU runs them."""
    import torch

    call, options = _call(att, sizes, arch)
    ready = loaded("frisket.runtime.torch.op").prepared_for(call, options, arch)
    values = [att.learned[n] if n in att.learned else call.plan.device_values[n] for _, n in ready.kv_inputs]
    sinks = None if options.sinks is None else torch.empty(sizes["heads"], dtype=ready.real, device="meta")
    arrays = *(x.transpose(1, 2) if ready.bshd else x for x in call.arrays.qkv), sinks, *values
    learned = frozenset(n for n, source in ready.kv_inputs if source in att.learned)
    call_kinds: list[tuple[str, Any]] = [("", None)]
    if gradients:
        call_kinds.append((", with gradients", frozenset("qkv") | learned))
    for suffix, grad_names in call_kinds:
        name = f"of {att!r}, {sizes['dtype']}, head_dim {sizes['head_dim']}, {arch}{suffix}"
        for job in jobs_of_call(ready, arrays, call.seed, grad_names, DryRun(arch=arch)):
            yield f"{job.function.__name__} {name}", job


def _call(att: Attention, s: dict[str, Any], arch: str) -> tuple[Any, Any]:
    """A checked call of these sizes by the backend that runs it on a GPU of `arch`, and its options."""
    import torch

    named = att.options.backend
    if named not in (None, "triton", "gluon"):
        raise BackendError(f"backend {named!r} has no kernels of Triton")
    # a backend of the CPU checks and plans the call, and no entry is read
    plain = attention_by("program")(att.program, replace(att.options, backend="aten", engines=False))
    shapes = [(s["heads"], s["q_len"], s["head_dim"])]
    shapes += [(s["kv_heads"], s["kv_len"], s[n]) for n in ("head_dim", "v_dim")]
    q, k, v = (torch.empty((s["batch"], *x), dtype=getattr(torch, s["dtype"])) for x in shapes)
    call = plain.call(CallArgs(q, k, v, seed=0))  # a seed, for dropout: none is drawn
    options = replace(att.options, engines=False)
    if named is None and options.tile is None:
        pays, as_chosen = RECORDS["gluon"].pays, options.rows is None and options.tuning == AS_CHOSEN
        faster = as_chosen and pays is not None and pays(call.plan, call.geometry, s["dtype"], arch)
        named = "gluon" if faster else None
    backend = RECORDS[named or "triton"]
    if why := backend.refused_dtype(s["dtype"]):
        raise BackendError(why)
    return replace(call, backend=backend.name), options


def compiled_rows(jobs: list[Job], arch: str) -> Iterator[tuple[str, str, float, str]]:
    """(kernel, state, seconds, why) of each job, as `WarmRow` has them; kernels compile at the same time."""
    names = {id(job): name for name, job in jobs}
    with compiling_for(arch):
        for x in outcomes([job for _, job in jobs]):
            state, why = "there" if x.there else "built", ""
            if x.error is not None:
                lines = str(x.error).strip().splitlines() or [type(x.error).__name__]
                state, why = "failed", lines[-1]
            elif x.kernel.metadata.shared > GPUS[arch].shared:
                state, why = "failed", f"takes {x.kernel.metadata.shared} bytes of shared memory of {GPUS[arch].shared}"
            yield names[id(x.job)], state, x.seconds, why


def rows_of(
    calls: list[tuple[Attention, dict[str, Any]]], gradients: bool, arch: str
) -> Iterator[tuple[str, str, float, str]]:
    """The rows of `fk.warm` for a GPU."""
    check_arch(arch)
    jobs: list[Job] = []
    for att, sizes in calls:
        try:
            jobs += jobs_of(att, sizes, gradients, arch)
        except FrisketError as error:
            name = f"{att!r}, {sizes['dtype']}, head_dim {sizes['head_dim']}, {arch}"
            yield name, "failed", 0.0, str(error)
    if jobs:
        yield from compiled_rows(jobs, arch)
