"""The parts of gpu.py: the rows of each, and how a row is compiled and then measured."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gpu_eight
import gpu_jax
import gpu_profile
import gpu_right
import gpu_serving
import gpu_smoke
import gpu_steps
import torch
from gpu_contests import speed, speed_rows, tune, tune_rows
from gpu_scale import Measure, Part, Row, Scale, Times, drawn, same, watched

import frisket as fk
from frisket.lowering.plan import Geometry
from frisket.runtime.backends.triton.tiles import target
from frisket.runtime.bench.race import fresh, rounds_of

TESTS = Path(__file__).resolve().parent.parent / "tests"
WORKERS = min(12, os.cpu_count() or 1)  # of a part's tests

# -- layout -----------------------------------------------------------------------------------------------


def layout_rows(scale: Scale) -> list[str]:
    return [f"documents, {scale.documents_at} tokens"]


def layout(row: str, scale: Scale) -> Measure:
    """Documents of a tensor on the device, other ones at every call: the records of the forward and of dk and dv. A
    call with a new plan runs too."""
    from torch.nn.attention.flex_attention import create_block_mask

    n, dim = scale.documents_at, scale.dims[-1]
    steps = [torch.arange(n, device=scale.device, dtype=torch.int32) // (n // some) for some in range(8, 16)]
    docs = itertools.cycle(steps)
    att = fk.compile("causal & same(doc)", backend="triton")
    arrays = drawn(1, 1, n, n, dim, scale)
    g, dtype = Geometry(1, 1, 1, n, n, dim, dim, 1.0), str(scale.dtype).removeprefix("torch.")
    strict = torch.cuda.set_sync_debug_mode if scale.device == "cuda" else (lambda mode: None)

    def plan() -> Any:
        made = att.plan(n, n, doc=next(docs))
        t = target(made, g, dtype)
        back = t.dkv or t
        made.rows((t.block_q, t.block_k)), made.columns((back.block_q, back.block_k))
        return made

    def block_mask() -> Any:
        doc = next(docs)
        return create_block_mask(
            lambda b, h, q, k: (q >= k) & (doc[q] == doc[k]), None, None, n, n, device=scale.device,
            _compile=not scale.dry,
        )  # fmt: skip

    with torch.no_grad():
        att(*arrays, plan=plan())
        block_mask()
        strict("error")  # nothing of a step waits for the device
        try:
            out = att(*arrays, doc=steps[4])
        finally:
            strict("default")
        same(out, fk.compile("causal & same(doc)", backend="triton", doc=steps[4].cpu().numpy())(*arrays))
    calls = {"frisket": plan, "create_block_mask": block_mask}

    def measure() -> Iterator[Row]:
        host = 1e3 * statistics.median(rounds_of({"frisket": plan}, scale.rounds)["frisket"])

        def of(times: Times) -> Row:
            ms = {n: 1e3 * statistics.median(t) for n, t in times.items()}
            figures = {"ms": {**ms, "frisket, on the host": host}}
            return {"figures": figures, "goals": {"at most": {"ms": {"frisket": 0.3}}}}

        yield from watched(calls, scale, of, {"synchronizes": False})

    return measure


# -- first call -------------------------------------------------------------------------------------------

FIRST = """
import time, torch
at = "{device}"
q, k, v = torch.randn(3, 1, {heads}, {length}, {dim}, device=at).to(torch.{dtype}).requires_grad_({learns}).unbind()
torch.nn.functional.scaled_dot_product_attention(q[:, :, :16], k[:, :, :16], v[:, :, :16])
def finished():
    if at == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
start = finished()
{setup}
def run():
    out = call(q, k, v)
    if {learns}:
        out.sum().backward()
run()
first = finished()
run()
again = finished()
print(first - start - (again - first))
"""
SETUP = {
    "frisket": "import frisket as fk\ncall = fk.compile('causal & window(1024)', backend='triton')",
    "flex": """
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from functools import partial
blocks = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 1024), None, None, {length}, {length}, device=at)
call = partial(torch.compile(flex_attention), block_mask=blocks)
""",
}


def first_rows(scale: Scale) -> list[str]:
    learns = ("forward", "with gradients")
    return [f"{who}, {what}" for who in (("frisket",) if scale.dry else SETUP) for what in learns]


def first(row: str, scale: Scale) -> Measure:
    """Seconds of a process's first call less those of its second; torch is there, and has used the GPU."""
    who, _, what = row.partition(", ")
    numbers = {"heads": scale.width // scale.dims[-1], "length": scale.lengths[-1] // 4 or 1, "dim": scale.dims[-1]}
    learns, dtype = what == "with gradients", str(scale.dtype).removeprefix("torch.")
    setup = SETUP[who].format(**numbers)
    code = FIRST.format(setup=setup, device=scale.device, dtype=dtype, learns=learns, **numbers)
    caches = ("FRISKET_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")

    def measure() -> Iterator[Row]:
        with tempfile.TemporaryDirectory() as folder:
            where = {n: str(Path(folder, n)) for n in caches}
            cold, *warm = (float(fresh(code, **where)) for _ in range(2 if scale.dry else 4))
        goals = {"at most": {"s": {"cold": 3.0}}} if who == "frisket" else {}
        yield {"figures": {"s": {"cold": cold, "from disk": statistics.median(warm)}}, "goals": goals}

    return measure


# -- cases of the tests ------------------------------------------------------------------------------------------


def cases_rows(scale: Scale) -> list[str]:
    """Files of tests; not the one that counts the interpreter's loads. JAX's are in the part jax-cases."""
    found = sorted(str(p.relative_to(TESTS)) for p in (TESTS / "lowering").rglob("children/*_interpreted.py"))
    return [n for n in found if not n.endswith("bytes_interpreted.py")]


def cases(row: str, scale: Scale) -> Measure:
    """The interpreter's tests with their tensors on the GPU, and kernels compiled; in a dry run a few of them as they
    are."""

    def measure() -> Iterator[Row]:
        env = {n: x for n, x in os.environ.items() if scale.dry or n != "TRITON_INTERPRET"}
        env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path[1:]])}
        how = ["-n", "0", "-k", "causal"] if scale.dry else ["-n", str(WORKERS), "-p", "support.triton.on_gpu"]
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *how]
            start = time.perf_counter()
            done = subprocess.run(
                [*command, str(TESTS / row)], capture_output=True, text=True, cwd=TESTS.parent, env=env
            )
            took = time.perf_counter() - start
            if not report.exists():
                raise RuntimeError(done.stdout[-1000:] + done.stderr[-1000:])
            outcomes = {
                str(c.get("name")): {x.tag for x in c} for c in ElementTree.parse(report).getroot().iter("testcase")
            }
        bad = sorted(n for n, tags in outcomes.items() if tags & {"failure", "error"})
        skipped = sum("skipped" in tags for tags in outcomes.values())
        passed = len(outcomes) - len(bad) - skipped
        count = {"passed": passed, "skipped": skipped, "failed": len(bad)}
        yield {"figures": {"cases": count, "s": {"took": took}}, "notes": dict.fromkeys(bad, "failed")}

    return measure


PARTS = {
    "smoke": Part(gpu_smoke.rows, gpu_smoke.smoke, minutes=3, limit=60, of_the_day=True),
    "right": Part(gpu_right.rows, gpu_right.right, whole=gpu_right.whole, waits=gpu_right.waits),
    "tune": Part(tune_rows, tune),
    "speed": Part(speed_rows, speed, 5),
    "serving": Part(gpu_serving.rows, gpu_serving.serving),
    "eight": Part(gpu_eight.rows, gpu_eight.eight, 3),
    "orders": Part(gpu_steps.order_rows, gpu_steps.order, 3),
    "graphs": Part(gpu_steps.graph_rows, gpu_steps.graph, 2),
    "steps": Part(gpu_steps.step_rows, gpu_steps.step, 2, limit=200),
    "profile": Part(gpu_profile.rows, gpu_profile.profile, 1, limit=220),
    "cases": Part(cases_rows, cases, 1, limit=440),
    "layout": Part(layout_rows, layout, 1),
    "first": Part(first_rows, first, 1),
    "jax-cases": Part(gpu_jax.cases_rows, gpu_jax.cases, limit=300),
    "jax-forward": Part(gpu_jax.contest_rows, partial(gpu_jax.contest, 0), 1, limit=200),
    "jax-backward": Part(gpu_jax.contest_rows, partial(gpu_jax.contest, 1), 1, limit=200),
    "jax-window": Part(gpu_jax.window_rows, gpu_jax.window, 1, limit=200),
}
