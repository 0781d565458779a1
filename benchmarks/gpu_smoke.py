"""The first part of gpu.py: versions of packages and the driver, and one kernel of each backend beside float64."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu_sensors
import numpy as np
import torch
from gpu_scale import Measure, Scale

import frisket as fk

PACKAGES = (
    "frisket-attention", "torch", "triton", "jax", "jaxlib", "jax-triton", "tokamax", "flash-attn", "flash-attn-4",
    "numpy", "lark", "platformdirs",
)  # fmt: skip
DIM = 64
BOUND = 0.02  # of the largest number: five units of the last place of bfloat16, 1/256
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def versions(scale: Scale) -> dict[str, str]:
    """Versions of Python and of packages, and what nvidia-smi says of the GPU and its driver."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["cpus"] = str(os.cpu_count())
    found["cudnn"] = str(torch.backends.cudnn.version())
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        found["driver"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        found["driver"] = f"{type(error).__name__}: {error}"
    found["clock, power, temperature"] = gpu_sensors.sensor()[1]
    return found


# -- one kernel each --------------------------------------------------------------------------------------


def of_torch(backend: str, what: str, scale: Scale) -> None:
    """A call on tensors: `what` is "forward", "backward", "decode" or "table", and a head size behind it."""
    att, arrays, want = case(what, scale)
    own = [torch.from_numpy(x).to(scale.device, scale.dtype) for x in arrays]
    learns = what.startswith("backward")
    own = [x.requires_grad_(learns) for x in own]
    with torch.set_grad_enabled(learns):
        got = att(backend)(*own, **({} if what != "decode" else {"origin": (0, 0, own[1].shape[2] - 1, 0)}))
        if learns:
            got = torch.cat([x.flatten() for x in torch.autograd.grad(got.float().sum(), own)])
    compared(got.detach().double().cpu().numpy(), want)


def of_jax(backend: str, what: str, scale: Scale) -> None:
    """A call on JAX arrays: `what` is "forward" or "backward"."""
    import jax
    import jax.numpy as jnp

    if scale.dry:
        jax.config.update("jax_platforms", "cpu")
    att, arrays, want = case(what, scale)
    own = [jnp.asarray(x.swapaxes(1, 2), jnp.float32 if scale.dry else jnp.bfloat16) for x in arrays]
    run = att(backend)
    if what == "backward":
        got = jax.grad(lambda own: run(*own).astype(jnp.float32).sum())(own)
        compared(np.concatenate([np.asarray(x, np.float64).swapaxes(1, 2).ravel() for x in got]), want)
    else:
        compared(np.asarray(jax.jit(run)(*own), np.float64).swapaxes(1, 2), want)


def compiled(what: str, scale: Scale) -> None:
    """torch.compile around a call."""
    att, arrays, want = case(what, scale)
    own = [torch.from_numpy(x).to(scale.device, scale.dtype) for x in arrays]
    run = torch.compile(att("triton"), fullgraph=True, backend="eager" if scale.dry else "inductor")
    compared(run(*own).double().cpu().numpy(), want)


def planned(scale: Scale) -> None:
    """Documents in a tensor on the device, planned there."""
    _, arrays, want = case("table", scale)
    own = [torch.from_numpy(x).to(scale.device, scale.dtype) for x in arrays]
    doc = torch.arange(own[0].shape[2], device=scale.device, dtype=torch.int32) // 48
    got = fk.compile("causal & same(doc)", backend="triton")(*own, doc=doc)
    compared(got.double().cpu().numpy(), want)


def case(what: str, scale: Scale) -> tuple[Callable[[str], fk.Attention], Arrays, np.ndarray]:
    """A maker of the attention, inputs [batch, heads, length, dim], and what the float64 backend for the CPU gives."""
    n = 80 if scale.dry else 1000
    queries, heads = (1, 4) if what == "decode" else (n, 2)
    draw = np.random.default_rng(0)
    what, _, dim = what.partition(", D ")
    dim = scale.dims[0] if scale.dry else int(dim or DIM)
    shapes = [(1, heads, queries, dim), (1, 2, n, dim), (1, 2, n, dim)]
    arrays = [draw.standard_normal(s, np.float32) for s in shapes]
    arrays = [torch.from_numpy(x).to(scale.dtype).float().numpy() for x in arrays]  # as the device reads them
    tables = {"doc": (np.arange(n) // 48).astype(np.int32)} if what == "table" else {}
    text = "causal & same(doc)" if tables else "causal"
    where = {"origin": (0, 0, n - 1, 0)} if what == "decode" else {}
    known = [torch.from_numpy(x).double().requires_grad_(what == "backward") for x in arrays]
    want = fk.compile(text, backend="aten", **tables)(*known, **where)
    if what == "backward":
        want = torch.cat([x.flatten() for x in torch.autograd.grad(want.sum(), known)])
    return lambda backend: fk.compile(text, backend=backend, **tables), tuple(arrays), want.detach().numpy()


def compared(got: np.ndarray, want: np.ndarray) -> None:
    """Raise where a result is wrong by more than some roundings to 16 bits."""
    error = np.abs(got - want).max() / np.abs(want).max()
    if not error <= BOUND:
        raise AssertionError(f"the largest error is {error:.3g} of the largest number, more than {BOUND}")


WARM = """
import sys
import frisket as fk
sizes = {"q_len": 2048, "batch": 2, "heads": 16, "kv_heads": 16, "head_dim": 128, "dtype": "bfloat16"}
report = fk.warm(["causal", "causal & window(300)"], sizes, arch=sys.argv[1])
print(report)
sys.exit(not report.good)
"""
CALLED = """
import torch
import frisket as fk
from triton import knobs
missed = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: None if cache_hit else missed.append(src.name)
for mask in ("causal", "causal & window(300)"):
    att = fk.compile(mask, engines=False)
    arrays = [torch.randn(2, 16, 2048, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv"]
    with torch.no_grad():
        att(*arrays)
    out = att(*arrays)
    out.backward(torch.ones_like(out))
print(" ".join(missed))
"""


def warmed(scale: Scale) -> dict[str, str]:
    """`frisket.warm` for this GPU in a process that sees none; calls of another process compile nothing."""
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TRITON_CACHE_DIR": folder}
        blind = {**env, "CUDA_VISIBLE_DEVICES": ""}
        first = subprocess.run([sys.executable, "-c", WARM, arch], env=blind, capture_output=True, text=True)
        if first.returncode:
            raise AssertionError(f"fk.warm(arch={arch!r}): {first.stdout[-500:]}{first.stderr[-500:]}")
        second = subprocess.run([sys.executable, "-c", CALLED], env=env, capture_output=True, text=True, check=True)
    if missed := second.stdout.split():
        raise AssertionError(f"kernels that were not there: {', '.join(missed)}")
    return {"kernels": str(len(first.stdout.splitlines()))}


def tuned(scale: Scale) -> dict[str, str]:
    """`frisket.tune` on this GPU, into a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("FRISKET_CACHE_DIR")
        os.environ["FRISKET_CACHE_DIR"] = folder
        try:
            sizes = {"q_len": 4096, "batch": 2, "heads": 16, "head_dim": 64, "dtype": "bfloat16"}
            report = fk.tune("causal & window(300)", sizes)
        finally:
            if before is None:
                del os.environ["FRISKET_CACHE_DIR"]
            else:
                os.environ["FRISKET_CACHE_DIR"] = before
    if not report.files:
        raise AssertionError("no winner was kept")
    return {row.kernel: str(row) for row in report.rows}


DIRECTIONS = ("forward", "backward")
CALLS: dict[str, Callable[[Scale], Any]] = {
    "versions": versions,
    **{
        f"torch, triton, {what}": partial(of_torch, "triton", what)
        for what in (*DIRECTIONS, "backward, D 256", "decode", "table")
    },
    "torch, triton, table on the device": planned,
    "torch, triton, torch.compile": partial(compiled, "forward"),
    **{f"torch, gluon, {what}": partial(of_torch, "gluon", what) for what in ("forward", "forward, D 256")},
    "torch, warmed for this GPU": warmed,
    "torch, tuned on this GPU": tuned,
    **{f"jax, triton, {what}": partial(of_jax, "triton", what) for what in DIRECTIONS},
    **{f"jax, pallas-mosaic-gpu, {what}": partial(of_jax, "pallas-mosaic-gpu", what) for what in DIRECTIONS},
}  # fmt: skip
FOR_GPUS = ("pallas-mosaic-gpu", "gluon", "this GPU")  # a dry run leaves them out: no interpreter runs whole calls


def rows(scale: Scale) -> list[str]:
    """The versions, then the calls that run here."""
    return [name for name in CALLS if not (scale.dry and any(backend in name for backend in FOR_GPUS))]


def smoke(row: str, scale: Scale) -> Measure:
    """One call, which raises where its result is wrong; its seconds, compilation and the oracle's call included."""
    start = time.perf_counter()
    found = CALLS[row](scale)
    took = time.perf_counter() - start
    print(row, f"{took:.1f} s", file=sys.stderr)
    return lambda: [{"figures": {"s": {"took": took}}, "notes": found or {}}]
