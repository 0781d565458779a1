"""`fk.warm`: kernels compiled into the cache before the first call that needs them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from frisket.dsl.errors import BackendError, FrisketError, ParameterError
from frisket.lowering.dtypes import HALVES, SUMS
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.backends.registry import automatic, reason
from frisket.runtime.backends.stages import compiled
from frisket.runtime.backends.triton.ahead import rows_of
from frisket.runtime.calls.options import CallArgs
from frisket.runtime.machine.caller import as_int
from frisket.runtime.machine.cpp_build import build_ahead
from frisket.runtime.machine.cpp_build import source as threads
from frisket.runtime.machine.modules import loaded

from .attention import Attention, operators_of
from .entry import compile
from .ordered import OrderedAttention

SIZES = {"q_len": 4096, "kv_len": "q_len", "batch": 1, "heads": 1, "kv_heads": "heads", "head_dim": 64,
         "v_dim": "head_dim", "dtype": "float32"}  # fmt: skip
DTYPES = (*SUMS, *HALVES)


class WarmRow(NamedTuple):
    """One kernel: `state` is "there", "built", "failed", or "none" where a call loads no native kernel; `seconds` is
    its compiler's time, `why` a reason why it is not there."""

    kernel: str
    state: str
    seconds: float
    why: str = ""


@dataclass(frozen=True)
class Warmed:
    """The report of `frisket.warm`: a `WarmRow` for each kernel.

    >>> row = WarmRow("forward of causal", "failed", 0.4, "no space left on device")
    >>> print(Warmed((row,)))
    failed  0.4 s  forward of causal no space left on device
    """

    rows: tuple[WarmRow, ...]

    @property
    def built(self) -> int:
        """The number of kernels that were compiled now."""
        return sum(row.state == "built" for row in self.rows)

    @property
    def good(self) -> bool:
        """Whether no kernel failed."""
        return all(row.state != "failed" for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(f"{x.state:6} {x.seconds:4.1f} s  {' '.join([x.kernel, *x.why.split()])}" for x in self.rows)


def warm(
    masks: Any, *shapes: Mapping[str, Any], gradients: bool = True, framework: str = "torch", arch: str | None = None
) -> Warmed:
    """Compile the kernels of later calls into the cache on disk, with one compiler for each core. They are native
    kernels of the CPU, or with `arch` those of a GPU, which need not be here.

    >>> import frisket as fk
    >>> report = fk.warm("causal & window(256)", {"q_len": 1024, "head_dim": 32}, gradients=False)
    >>> report.good, fk.warm("causal & window(256)", {"q_len": 1024, "head_dim": 32}, gradients=False).built
    (True, 0)

    - `masks`: an `Attention`, or a mask as `frisket.compile` takes it, with values; or a list of them.
    - `shapes`: sizes of calls by name: q_len, kv_len, batch, heads, kv_heads, head_dim, v_dim, in tokens, heads and
      numbers, and dtype. A size that is left out is that of `Attention.source`; without `shapes`, all are.
    - `gradients`: whether the kernels of gradients are compiled too.
    - `framework`: "torch" or "jax", whose arrays the calls take.
    - `arch`: the architecture of a GPU, such as "sm_90" or "gfx942". Triton compiles the kernels of torch calls on it
      into its own folder (TRITON_CACHE_DIR, or ~/.triton/cache); no GPU is needed. A later process with that folder,
      the same version of Triton and such a GPU does not recompile.

    The report has a row for each kernel. The row of a kernel that cannot be compiled, or whose backend does not run
    here, says why. A mask that no call could take raises the call's error.
    """
    if framework not in ("torch", "jax"):
        raise ParameterError(f"framework={framework!r}: write 'torch' or 'jax'")
    kernels: dict[str, str] = {}
    rows: list[WarmRow] = []
    attentions = [x if isinstance(x, Attention) else compile(x) for x in listed(masks)]
    if arch is not None:
        if framework != "torch":
            raise ParameterError(f"arch={arch!r} is for calls of torch: XLA compiles the kernels of JAX's calls")
        calls = [(att, sizes) for att in attentions for sizes in map(sizes_of, shapes or ({},))]
        return Warmed(tuple(WarmRow(*row) for row in rows_of(calls, gradients, arch)))
    for att in attentions:
        for shape in map(sizes_of, shapes or ({},)):
            for name, source, why in _kernels(att, shape, gradients, framework == "torch"):
                if source:
                    kernels.setdefault(source, name)  # masks and shapes may share a kernel
                else:
                    rows.append(WarmRow(name, "failed" if reason("cpp") else "none", 0.0, why))
    if not kernels:
        return Warmed(tuple(rows))
    if framework == "torch":
        kernels[threads()] = "threads of torch"  # every call loads this library, too
    else:
        kernels[loaded("frisket.runtime.backends.cpp.jax").bridge_source()] = "calls of XLA"
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # threads suffice: the compiler is a process
        return Warmed((*rows, *pool.map(_row, kernels.values(), kernels)))


def listed(masks: Any) -> list[Any]:
    return list(masks) if isinstance(masks, list | tuple) else [masks]


def _row(name: str, source: str) -> WarmRow:
    start = time.perf_counter()
    try:
        state, why = "built" if build_ahead(source) else "there", ""
    except FrisketError as error:
        state, why = "failed", str(error)
    return WarmRow(name, state, time.perf_counter() - start, why)


def sizes_of(shape: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(shape, Mapping):
        raise ParameterError(f"a shape is {shape!r}; it is a dict of sizes, and several shapes are several arguments")
    if unknown := [*(shape.keys() - SIZES)]:
        raise ParameterError(f"a shape has no {unknown[0]!r}; it has {', '.join(SIZES)}")
    sizes = {n: as_int(shape.get(n, x)) for n, x in SIZES.items()}
    sizes |= {n: sizes[SIZES[n]] for n in ("kv_len", "kv_heads", "v_dim") if shape.get(n) is None}  # type: ignore[index]
    dtype = sizes.pop("dtype")  # the others are numbers
    for name, size in sizes.items():
        if type(size) is not int or size <= 0:  # bool is an int
            raise ParameterError(f"{name}={size!r}: sizes are positive integers")
    sizes["dtype"] = getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    if sizes["dtype"] not in DTYPES:
        raise ParameterError(f"dtype={dtype!r}: write {', '.join(DTYPES)}")
    return sizes


def _kernels(att: Attention, s: dict[str, Any], gradients: bool, torch: bool) -> Iterator[tuple[str, str, str]]:
    """The name and source of each kernel of a call, or a reason why it has none."""
    name = f"{att!r}, {s['dtype']}, head_dim {s['head_dim']}"
    if why := reason("cpp"):
        yield name, "", why
        return
    if isinstance(att, OrderedAttention):
        order, *both = att._at(s["q_len"], s["kv_len"], "cpu", {})
        att = both[order.rows is not None]  # native kernels find rows by themselves
    try:
        call, engine = (_torch_call if torch else _jax_call)(att, s)
    except BackendError as error:
        yield name, "", str(error)
        return
    ahead = RECORDS[call.backend].ahead
    if engine is not None and (engine.gradients or not gradients):
        yield name, "", f"backend {engine.backend!r} runs it"
    elif ahead is None:
        yield name, "", f"backend {call.backend!r} has no native kernel"
    else:
        compilation, permuted = compiled(call, att.options), att.options.rows is not None
        for kind in ("forward",) * (engine is None) + ("backward",) * gradients:
            source = ahead(compilation.work.plan, compilation.target, call.geometry, s["dtype"], kind, permuted)
            yield f"{kind} of {name}", source, ""


def _torch_call(att: Attention, s: dict[str, Any]) -> tuple[Any, Any]:
    import torch

    at = [(s["heads"], s["q_len"], s["head_dim"]), *((s["kv_heads"], s["kv_len"], s[n]) for n in ("head_dim", "v_dim"))]
    # no entry is read: a call is checked and planned, and does not run
    q, k, v = (torch.empty((s["batch"], *x), dtype=getattr(torch, s["dtype"])) for x in at)
    call = att.call(CallArgs(q, k, v, seed=0))  # a seed, for dropout: none is drawn
    proof = operators_of("torch").engine_call(call, att.options)
    named = proof is not None and call.backend == proof.backend
    # its backward may be the generated kernels'
    return replace(call, backend=automatic("torch", "cpu")) if named else call, proof


def _jax_call(att: Attention, s: dict[str, Any]) -> tuple[Any, None]:
    import jax

    calls: list[Any] = []
    shape: Any = jax.ShapeDtypeStruct  # JAX leaves some of its functions untyped
    at = [(s["q_len"], s["heads"], s["head_dim"]), *((s["kv_len"], s["kv_heads"], s[n]) for n in ("head_dim", "v_dim"))]
    arrays = [shape((s["batch"], *x), jax.numpy.dtype(s["dtype"])) for x in at]
    # shapes alone, no memory
    jax.eval_shape(lambda *qkv: calls.append(att.call(CallArgs(*qkv)._replace(seed=0))), *arrays)
    return calls[0] if att.options.backend else replace(calls[0], backend=automatic("jax", "cpu")), None
