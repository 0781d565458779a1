"""The parts of gpu.py that run JAX: its two ways to a GPU, through Mosaic and through Triton, beside JAX's own peers.

Arrays are [batch, length, heads, dim]. A backward is timed alone: what the forward keeps is an argument.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch has some of the memory, too

import numpy as np
from gpu_scale import Call, Measure, Row, Scale, Times, one_after_another, reached, watched

import frisket as fk
from frisket.runtime.bench.race import row, seconds

TESTS = Path(__file__).resolve().parent.parent / "tests"
OURS = ("pallas-mosaic-gpu", "triton")
MASKS = {"causal": ("causal", None), "window 1024": ("causal & window(1024)", 1024)}
LENGTHS = (2048, 4096, 8192, 16384, 32768)
WINDOW_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
GOALS = {("causal", 128, 8192): ((560, 620), (380, 440))}  # TFLOP/s of visible work: (must, should), both directions
CALLS = 10
CHECKED = (  # of tests/support/attention_cases.py and jax/gradients.py: every kind of plan, lookup and gradient
    "full", "causal", "window", "documents-by-batch", "heads-and-batches", "gqa", "mqa", "empty-rows", "nothing",
    "holes", "crop", "origin-by-batch", "softcap", "alibi", "relative-bias", "bias-plane", "visible-minus-inf",
    "bool-by-head", "decode", "random",
)  # fmt: skip
LEARNED = (
    "scalar-twice", "by-row", "by-column", "by-diagonal", "diagonal-of-buckets", "plane-by-head", "nested", "clamped",
)  # fmt: skip


def backends(scale: Scale) -> tuple[str, ...]:
    return ("triton",) if scale.dry else OURS


def platform(scale: Scale) -> str:
    import jax

    if scale.dry:
        jax.config.update("jax_platforms", "cpu")
        return "cpu"
    from frisket.runtime.backends.registry import platform_of

    return platform_of(jax.numpy.zeros(()))


# -- cases ------------------------------------------------------------------------------------------


def cases_rows(scale: Scale) -> list[str]:
    kinds = [("forward", "float32"), ("backward", "float32"), ("forward", "bfloat16"), ("backward", "bfloat16")]
    return [f"{b}, {what}, {dtype}" for b in backends(scale) for what, dtype in kinds[: 1 if scale.dry else 4]]


def cases(row: str, scale: Scale) -> Measure:
    """Cases of the tests on the device, each beside the interpreter in float64. What a backend does not take is named
    with its reason."""
    backend, what, dtype = row.split(", ")
    sys.path.insert(0, str(TESTS))
    where = platform(scale)

    def measure() -> Iterator[Row]:
        start, passed, refused, bad = time.perf_counter(), 0, {}, {}
        for name, case in _cases(dtype, scale):
            why, error = _checked(backend, what, case, where)
            if why:
                refused[name] = why
            elif error:
                bad[name] = error
            else:
                passed += 1
        took = time.perf_counter() - start
        count = {"passed": passed, "refused": len(refused), "failed": len(bad)}
        yield {"figures": {"cases": count, "s": {"took": took}}, "notes": {**refused, **bad}}

    return measure


def _cases(dtype: str, scale: Scale) -> Iterator[tuple[str, Any]]:
    from support.attention_cases import CASES
    from support.jax.gradients import LEARNED as GRADIENTS

    names = [("", CASES, n) for n in CHECKED] + [("learned ", GRADIENTS, n) for n in LEARNED]
    for kind, cases, name in names[1 : 3 if scale.dry else None]:
        yield kind + name, cases[name].but(dtype=dtype, **({} if scale.dry else {"dim": 64, "v_dim": 64}))


def _checked(backend: str, what: str, case: Any, where: str) -> tuple[str, str]:
    """(why it is not taken, what is wrong)."""
    from support import attention_cases as cases
    from support.jax import gradients as jax_gradients

    from frisket.lowering.derive import backward_of
    from frisket.runtime.backends.base import RECORDS
    from frisket.runtime.backends.registry import target_on

    made, g = cases.plan(case), cases.geometry(case)
    tables = cases.tables(case, made)
    run, backward = RECORDS[backend].executors["jax"], what == "backward"
    shapes = {n: x.shape for n, x in tables.items()}
    why = run.refuses(made, g, case.dtype, shapes) if run.refuses else ""
    if backward and not why and run.refuses_gradients:
        wanted = frozenset({*"qkv", *(x.source for x in backward_of(made).gradients)})
        why = run.refuses_gradients(made, g, case.dtype, shapes, wanted)
    if why:
        return why, ""
    target = target_on(backend, made, g, case.dtype, None, False)
    run = partial(RECORDS[backend].executor("jax", backward), platform=where)
    try:
        if what == "forward":
            slots = cases.slots(case, made)
            out, lse, *_ = run(made, cases.Source(case), g, *cases.arrays(case), slots, tables, target)
            cases.check(case, out, lse)
        else:
            got, want = jax_gradients.run(run, case, target)
            jax_gradients.compare(got, want, 2e-5 if case.dtype == "float32" else 2e-2)
    except Exception as error:  # a wrong number, or a kernel that does not compile
        text = [line for line in str(error).strip().split("\n") if line.strip()] or [""]
        return "", f"{type(error).__name__}: {' '.join(text[:3])[:300]}"
    return "", ""


# -- forward and backward ---------------------------------------------------------------------------------


def drawn(scale: Scale, batch: int, heads: int, length: int, dim: int) -> list[Any]:
    import jax.numpy as jnp

    draw = np.random.default_rng(0)
    dtype = jnp.float32 if scale.dry else jnp.bfloat16
    return [jnp.asarray(draw.standard_normal((batch, length, heads, dim), np.float32), dtype) for _ in range(4)]


def peers(mask: str, dry: bool) -> dict[str, Callable[..., Any]]:
    """JAX's own attention for a mask, and tokamax's where it is installed, by name."""
    import jax

    window = MASKS[mask][1]
    inside = {} if window is None else {"local_window_size": (window - 1, 0)}
    how = "xla" if dry else "cudnn"
    found = {how: partial(jax.nn.dot_product_attention, is_causal=True, implementation=how, **inside)}
    if window is None and not dry:
        try:
            import tokamax
            from absl import flags

            flags.FLAGS(sys.argv[:1])  # tokamax reads flags, and would take those of this program for its own
        except ImportError:
            return found
        found["tokamax"] = partial(tokamax.dot_product_attention, is_causal=True)
    return found


class Contestants:
    """The contestants of one mask, length and head size. Each runs once before it is timed, and agrees with the first;
    why one cannot is part of the result."""

    def __init__(self, mask: str, length: int, batch: int, dim: int, scale: Scale, direction: int) -> None:
        import jax

        self.mask, self.length, self.dim, self.scale, self.direction = mask, length, dim, scale, direction
        self.batch, self.heads = batch, max(1, scale.width // dim)
        *arrays, cotangent = drawn(scale, batch, self.heads, length, dim)
        self.calls: dict[str, Call] = {}
        self.failed: dict[str, str] = {}
        first = None
        ours = {b: fk.compile(MASKS[mask][0], backend=b) for b in backends(scale)}
        for name, attend in (ours | peers(mask, scale.dry)).items():
            try:
                call = jax.jit(attend), arrays
                if direction:
                    _, pullback = jax.jit(partial(jax.vjp, attend))(*arrays)
                    call = jax.jit(lambda back, given: back(given)), [pullback, cotangent]
                got = jax.block_until_ready(call[0](*call[1]))
                first = got if first is None else first
                same(got, first)
            except Exception as error:  # of any library
                self.failed[name] = f"{type(error).__name__}: {error}".split("\n")[0][:300]
                continue
            self.calls[name] = partial(finished if scale.dry else _given, *call)

    def measured(self) -> Iterator[Row]:
        if not self.calls:
            yield {"notes": self.failed}
            return
        clock = seconds if self.scale.dry else in_a_row
        yield from watched(self.calls, self.scale, self.rates, self.failed, clock)
        self.calls.clear()

    def rates(self, times: Times) -> Row:
        pairs = fk.mask(MASKS[self.mask][0]).visible_pairs(self.length, self.length)
        work, best = (4, 10)[self.direction] * self.batch * self.heads * pairs * self.dim, next(iter(self.calls))
        found = row(times, [best])
        found["figures"]["tflops"] = {n: work / ms / 1e9 for n, ms in found["figures"]["ms"].items()}
        goals = GOALS.get((self.mask, self.dim, self.length))
        return found | ({} if goals is None else {"goals": reached(goals[self.direction], best)})


def _given(run: Callable[..., Any], arguments: Any) -> Any:
    return run(*arguments)


def finished(run: Callable[..., Any], arguments: Any) -> Any:
    import jax

    return jax.block_until_ready(run(*arguments))


def in_a_row(call: Call) -> float:
    """Seconds of a call on the GPU: some of them enqueued, the host ahead of all but the first."""
    import jax

    jax.block_until_ready(call())
    start = time.perf_counter()
    for _ in range(CALLS):
        last = call()
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / CALLS


def same(got: Any, want: Any) -> None:
    """Within what 16 bits leave of gradients that sum thousands of terms."""
    import jax
    import jax.numpy as jnp

    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        error, size = float(jnp.abs(x - y).max()), float(jnp.abs(y).max())
        if not error <= 0.02 * max(size, 1.0):
            raise AssertionError(f"results differ by {error:.3g}, the largest is {size:.3g}")


def contest_rows(scale: Scale) -> list[str]:
    return [f"{mask}, D {dim}" for mask in MASKS for dim in sorted(scale.dims, reverse=True)]


def contest(direction: int, row: str, scale: Scale) -> Measure:
    """`direction` 0: the forward; 1: the gradients of q, k and v alone."""
    mask, _, dim = row.rpartition(", D ")
    platform(scale)
    lengths = scale.lengths if scale.dry else LENGTHS

    def measure(n: int) -> Measure:  # makes a length when it is measured: pullbacks hold what they were given
        return lambda: Contestants(mask, n, max(1, scale.tokens // n), int(dim), scale, direction).measured()

    return lambda: one_after_another({str(n): measure(n) for n in lengths}, scale)


# -- the backward of a window over the length ----------------------------------------------------------------


def window_rows(scale: Scale) -> list[str]:
    return [f"window 1024, D {dim}" for dim in sorted(scale.dims, reverse=True)]


def window(row: str, scale: Scale) -> Measure:
    """Milliseconds of the gradients at batch 1, and those of 1024 tokens: the same at every length where work is linear
    in it. `spread` is the largest of these over the smallest, from 16k tokens on, where the GPU is full."""
    dim = int(row.rpartition(", D ")[2])
    platform(scale)
    lengths = (48, 96) if scale.dry else WINDOW_LENGTHS

    def measure() -> Iterator[Row]:
        found = {}
        for n in lengths:
            for each in Contestants("window 1024", n, 1, dim, scale, 1).measured():
                found[n] = each
                yield {"rows": {str(n): x for n, x in found.items()}}
        ms = {n: x.get("figures", {}).get("ms", {}) for n, x in found.items()}
        settled: dict[str, list[float]] = {}
        for n, by in ms.items():
            found[n].get("figures", {})["ms of 1024 tokens"] = {b: 1024 * t / n for b, t in by.items()}
            for b, t in by.items():
                settled.setdefault(b, []).extend([t / n] if n >= 16384 or scale.dry else [])
        spread = {b: max(x) / min(x) for b, x in settled.items() if x}
        yield {"rows": {**{str(n): x for n, x in found.items()}, "spread": {"figures": {"largest / smallest": spread}}}}

    return measure
