"""The kernels on a GPU beside their peers: `python benchmarks/gpu.py smoke`, a part at a time, in this order.

    smoke    3 minutes: versions, the driver, and one kernel by every way to the device, each beside float64
    right    every mask and score mod of the library with the tiles that users get, bfloat16 and float16, forward and
             backward, beside float64
    tune     other tiles than those of runtime/backends/triton/tiles.py, best first; causal masks first
    speed    TFLOP/s of visible work, forward and backward, beside frisket's engines (flash, cudnn, sdpa; why one does
             not run is a note), compiled flex_attention, SDPA (cuDNN, flash), FlashAttention and Triton's tutorial
             where they are, and a dense formula; steps of decoding as a share of the bandwidth at which the device
             copies memory
    serving  steps of 1, 4 and 16 queries over caches of bfloat16 and 8 bits, in pages too, as shares of the same
    profile  counters of two kernels, by Nsight Compute where it is installed

    cases    every case of the interpreter's tests, compiled and run on the device
    layout   documents that live on the device, planned there, any synchronization an error
    first    the first call of a process, cold and with kernels on disk

    jax-cases     cases of the tests by JAX's two ways to the device, Mosaic GPU and Triton, beside float64
    jax-forward   TFLOP/s of causal masks and windows, 2k to 32k tokens, both ways, beside cuDNN and tokamax
    jax-backward  the same for the gradients alone
    jax-window    the gradients of a window over the length: linear in it

    left     no measurement: the rows of every part that gpu.json lacks, in the order in which they will run

It runs from a checkout, installed or not; docs/device.md says what to bring to a machine without a network. A part ends
within 8 minutes and is resumed by the same command: rows measured on this GPU with these versions are kept, and written
after every row. Rows that no machine has measured run first. Each row runs in a process of its own, which a time limit
ends if it hangs. Those of a group compile side by side, flex_attention too; then each is timed alone, its contestants
turn about in an order that changes. A figure is a median over rounds; ratios are peer / frisket (above 1: frisket is
faster) with the 95 % interval of the median. Results go to gpu.json in --into.

`--dry` tries any part without a GPU, at a few dozen tokens in Triton's interpreter. Its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 - finds frisket for all that is imported from here on
from gpu_parts import PARTS
from gpu_scale import DRY, FULL, Scale
from store import RESULTS, keep, shown

from frisket.runtime.bench import schema
from frisket.runtime.bench.machine import described

READY = "== ready =="
GRACE = 20  # seconds that a last row may take beyond a part's minutes
SAME = ("gpu", "torch", "jax", "triton")  # what rows that are kept have in common with this machine


def device() -> dict[str, Any]:
    """The GPU and what runs on it, for the head of a part."""
    import torch

    if not torch.cuda.is_available():
        return {"gpu": "none: Triton's interpreter"}
    found = torch.cuda.get_device_properties(0)
    return {
        "gpu": found.name, "compute capability": f"{found.major}.{found.minor}", "cuda": torch.version.cuda,
        "multiprocessors": found.multi_processor_count, "memory_gb": round(found.total_memory / 1e9),
    }  # fmt: skip


# -- a row ----------------------------------------------------------------------------------------------


def row(part: str, name: str, scale: Scale) -> None:
    """Prepares a row, says so, and measures it when it is told to."""
    measure = PARTS[part].prepare(name, scale)
    print(READY, flush=True)
    if sys.stdin.readline():
        print(json.dumps(measure()), flush=True)


class Child:
    """A row in a process of its own, with those that it starts: they end at a time limit, for a kernel may hang."""

    def __init__(self, part: str, name: str, scale: Scale) -> None:
        dry = ["--dry"] if scale.dry else []
        command = [sys.executable, __file__, part, "--row", name, "--rounds", str(scale.rounds), *dry]
        self.name, self.errors = name, tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self.late = 0.0
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            start_new_session=True,
        )  # fmt: skip

    def ready(self) -> bool:
        assert self.process.stdout is not None
        return any(line.rstrip() == READY for line in iter(self.process.stdout.readline, ""))

    def measure(self) -> dict[str, Any] | None:
        """None where it failed; `failure` has its last words."""
        out, _ = self.process.communicate("go\n" if self.process.poll() is None else None)
        found = out.strip().split("\n")[-1]
        return json.loads(found) if self.process.returncode == 0 and found else None

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Around what waits for the process."""
        timer = threading.Timer(seconds, self.stop, [seconds])
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def stop(self, seconds: float) -> None:
        self.late = seconds
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def failure(self) -> str:
        self.errors.seek(0)
        words = "".join(self.errors.readlines()[-12:]).strip()
        if self.late:
            return f"stopped: no answer in {self.late:.0f} s\n{words}".strip()
        return words or f"exit status {self.process.returncode}"


# -- a part ---------------------------------------------------------------------------------------------


def results(part: str, folder: Path) -> dict[str, Any]:
    """A part of gpu.json, empty where there is none."""
    path = folder / "gpu.json"
    found: dict[str, Any] = json.loads(path.read_text())["parts"].get(part, {}) if path.exists() else {}
    return found


def kept(part: str, folder: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """Rows that this machine has measured before."""
    known = results(part, folder)
    return known["rows"] if known and all(known["machine"].get(n) == machine.get(n) for n in SAME) else {}


def in_turn(part: str, names: Sequence[str], folder: Path) -> list[str]:
    """Rows in the order in which they run: those that no machine has measured first, then those whose results lack what
    is asked today, then the others; those last for which something is not installed here."""
    known, own = results(part, folder).get("rows", {}), PARTS[part]
    return sorted(names, key=lambda n: (own.waits(n), 0 if n not in known else 1 + own.whole(known[n])))


def lacking(part: str, names: Sequence[str], folder: Path) -> list[str]:
    """Rows that no machine has measured, or whose results lack what is asked today."""
    known = results(part, folder).get("rows", {})
    return [n for n in in_turn(part, names, folder) if n not in known or not PARTS[part].whole(known[n])]


def tell(only: Sequence[str], scale: Scale, folder: Path) -> None:
    """Print the rows that gpu.json lacks, of every part."""
    for part, one in PARTS.items():
        names = [n for n in one.rows(scale) if all(some in f"{part}: {n}" for some in only)]
        left = lacking(part, names, folder)
        if names:
            print(f"{part}: {len(left)} of {len(names)} rows are left", *left, sep="\n    ")


def measured(part: str, names: list[str], workers: int, end: float, scale: Scale) -> Iterator[tuple[str, Any]]:
    """(row, result or the text of a failure), as long as there is time for another group."""
    longest, limit = 0.0, PARTS[part].limit

    def left() -> float:
        return max(1.0, min(limit, end + GRACE - time.monotonic()))

    size = PARTS[part].together or workers
    for group in (names[i : i + size] for i in range(0, len(names), size)):
        start = time.monotonic()
        if start + longest > end:
            return
        children = [Child(part, name, scale) for name in group]
        with ExitStack() as stack:
            for child in children:
                stack.enter_context(child.limited(left()))
            started = [c.ready() for c in children]
        for child, good in zip(children, started, strict=True):
            with child.limited(left()):
                found = child.measure() if good else None
                child.process.wait()
            yield child.name, child.failure() if found is None else found
        longest = max(longest, time.monotonic() - start)


def failures(found: dict[str, Any]) -> bool:
    """Whether a row has a case that failed."""
    return any(row.get("figures", {}).get("cases", {}).get("failed") for _, row in schema.leaves({"": found}))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "left"])
    parser.add_argument("--only", nargs="+", default=[], help="only rows whose name contains all of this")
    parser.add_argument("--again", action="store_true", help="measure rows anew that are there already")
    parser.add_argument("--minutes", type=float, help="3 of smoke, 7.5 of every other part")
    parser.add_argument("--rounds", type=int, help="15 where no other number is given")
    parser.add_argument("--workers", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--dry", action="store_true", help="tiny, in Triton's interpreter, on the CPU")
    parser.add_argument("--row", help=argparse.SUPPRESS)  # a child's
    args = parser.parse_args(argv)
    if args.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    scale = DRY if args.dry else FULL
    scale = replace(scale, rounds=args.rounds or scale.rounds)
    if args.row is not None:
        row(args.part, args.row, scale)
        return 0
    if args.part == "left":
        tell(args.only, scale, args.into)
        return 0
    minutes = PARTS[args.part].minutes if args.minutes is None else args.minutes
    end, here = time.monotonic() + 60 * minutes, device()
    if not args.dry and here["gpu"].startswith("none"):
        print("no GPU is visible to torch; --dry tries the program without one", file=sys.stderr)
        return 2
    done = kept(args.part, args.into, {**described(), **here})
    names = [n for n in PARTS[args.part].rows(scale) if all(some in n for some in args.only)]
    whole = {n for n in names if n in done and PARTS[args.part].whole(done[n]) and not failures(done[n])}
    left, failed = in_turn(args.part, [n for n in names if args.again or n not in whole], args.into), 0
    for name, found in measured(args.part, list(left), args.workers, end, scale):
        left.remove(name)
        if isinstance(found, str):
            failed += 1
            print(f"{name}\n    FAILED\n    " + found.replace("\n", "\n    "), flush=True)
            continue
        done[name] = found
        print(shown(name, found), flush=True)
        failed += failures(found)
        settings = {"rounds": scale.rounds, "dtype": str(scale.dtype).removeprefix("torch.")}
        keep("gpu", args.part, done, settings, device=here, folder=args.into)
    if left:
        print(f"{len(left)} rows are left: run this command again", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
