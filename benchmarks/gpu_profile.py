"""The part of gpu.py that counts inside the kernels of a forward and a backward, by Nsight Compute; where that is
missing or may not count, their times by torch's profiler."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

import torch
from gpu_contests import DIRECTIONS
from gpu_masks import contests, ours
from gpu_scale import Measure, Row, Scale

COUNTED = {  # metrics of Nsight Compute
    "gpu__time_duration.sum": "ns", "sm__inst_executed_pipe_tensor.sum": "tensor instructions",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "% of tensor peak",
    "smsp__inst_executed.sum": "instructions", "dram__bytes.sum": "bytes of memory",
    "lts__t_bytes.sum": "bytes of L2", "launch__registers_per_thread": "registers",
    "launch__occupancy_limit_registers": "blocks by registers",
    "launch__occupancy_limit_shared_mem": "blocks by shared memory",
}  # fmt: skip
RUN = """
import json, sys
import gpu_profile
gpu_profile.run(*json.loads(sys.argv[1]))
"""


def rows(scale: Scale) -> list[str]:
    """A forward and a backward, of the largest head size."""
    return [f"{way}: causal, D {scale.dims[-1]}" for way in DIRECTIONS]


def run(way: str, length: int, dim: int, heads: int, batch: int, dtype: str, device: str) -> None:
    """One causal call, forward or with gradients, in this process or in the one that Nsight Compute watches."""
    torch.manual_seed(0)
    made = [torch.randn(batch, heads, length, dim, device=device).to(getattr(torch, dtype)) for _ in range(3)]
    arrays = [x.requires_grad_(way == "backward") for x in made]
    out = ours(contests(length, heads, device)["causal"])(*arrays)
    if way == "backward":
        out.backward(torch.ones_like(out))


def profile(row: str, scale: Scale) -> Measure:
    """The counters of a row's kernels, or their times and a note why there are no counters."""
    way, _, rest = row.partition(": ")
    dim = int(rest.rpartition(" ")[2])
    length = scale.lengths[len(scale.lengths) // 2]
    call = (
        way, length, dim, scale.width // dim, max(1, scale.tokens // length), str(scale.dtype).removeprefix("torch."),
        scale.device,
    )  # fmt: skip
    run(*call)  # compiled now

    def measure() -> Iterator[Row]:
        tool = which("ncu")
        notes = {} if tool else {"ncu": "not installed: torch's profiler"}
        if tool:
            try:
                yield {"rows": counted(tool, call)}
                return
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                notes["ncu"] = f"{type(error).__name__}: {error}"[:300]
        yield {"rows": timed(call, scale) | ({"Nsight Compute": {"notes": notes}} if notes else {})}

    return measure


def counted(tool: str, call: tuple[Any, ...]) -> dict[str, Any]:
    """Kernel -> its counters, of the call in a process under Nsight Compute."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "counted.csv")
        command = [
            tool, "--csv", "--page", "raw", "--log-file", str(path), "--kernel-name", "regex:attention_",
            "--metrics", ",".join(COUNTED), sys.executable, "-c", RUN, json.dumps(call),
        ]  # fmt: skip
        here = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])}
        subprocess.run(command, check=True, capture_output=True, timeout=200, env=here)
        return read(path.read_text())


def read(text: str) -> dict[str, Any]:
    """The rows of what `ncu --csv --page raw` wrote: messages, a header, a line of units, a line a kernel."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("ncu counted nothing: " + " ".join(lines[-3:])[:200])
    found = {}
    for one in list(csv.DictReader(lines[start:]))[1:]:
        figures = {
            name: float(one[metric].replace(",", "")) for metric, name in COUNTED.items() if one.get(metric)
        }  # fmt: skip
        found[one["Kernel Name"]] = {"figures": {"count": figures}}
    return found


def timed(call: tuple[Any, ...], scale: Scale) -> dict[str, Any]:
    """Kernel -> microseconds by torch's profiler."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    with profiled(activities=[ProfilerActivity.CPU if scale.dry else ProfilerActivity.CUDA]) as found:
        run(*call)
        if not scale.dry:
            torch.cuda.synchronize()
    longest = sorted(found.key_averages(), key=lambda e: -time_of(e, scale))[:8]
    return {e.key: {"figures": {"us": {"took": time_of(e, scale)}}} for e in longest}


def time_of(event: Any, scale: Scale) -> float:
    return float(event.cpu_time_total if scale.dry else event.device_time_total)
