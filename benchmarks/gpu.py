"""The kernels on a GPU, compared with float64 and with other libraries: `python benchmarks/gpu.py --minutes 8`.

Without a part it runs one list of rows, the most valuable first (gpu_order.py): smoke; grouped heads forward and
backward; cuDNN on shared heads; head sizes 192, 192/128, 160, 96 and 512; orders; decoding with 8 bits and MLA; CUDA
graphs; training steps; FlashAttention 4. The same command goes on where the last one stopped. The parts, each with more
rows:

    smoke    3 minutes: versions, the driver, and one kernel by every way to the device, against float64
    right    every mask and score mod of the library with the tiles that users get, bfloat16 and float16, forward and
             backward, against float64
    tune     other tiles than those of runtime/backends/triton/tiles.py, best first; causal masks first
    speed    TFLOP/s of visible work, forward and backward, against frisket's engines (flash, cudnn, sdpa; why one does
             not run is a note), compiled flex_attention, SDPA (cuDNN, flash), FlashAttention and Triton's tutorial
             where they are, and a dense formula; steps of decoding as a share of the bandwidth at which the device
             copies memory
    serving  steps of 1, 4 and 16 queries over caches of bfloat16 and 8 bits, in pages too, as shares of the same; one
             and four queries of multi-head latent attention; a prefix that sequences share, read once
    orders   tokens in the order that frisket finds for a mask, and as they come
    graphs   the replay of a CUDA graph with other documents, and the step that it records; reduce-overhead
    steps    tokens a second of training steps of a small model on packed documents
    profile  counters of two kernels, by Nsight Compute where it is installed

    cases    every case of the interpreter's tests, compiled and run on the device
    layout   documents that live on the device, planned there, any synchronization an error
    first    the first call of a process, cold and with kernels on disk

    jax-cases     cases of the tests by JAX's two ways to the device, Mosaic GPU and Triton, against float64
    jax-forward   TFLOP/s of causal masks and windows, 2k to 32k tokens, both ways, against cuDNN and tokamax
    jax-backward  the same for the gradients alone
    jax-window    the gradients of a window over the length: linear in it

    left     no measurement: the rows that gpu.json lacks, of the list and of every part, in the order in which they
             will run

It runs from a checkout, installed or not; docs/device.md says what to bring to a machine without a network. It ends
within its minutes, compilation included, and the same command goes on: rows measured on this GPU with these versions
are kept, and written after every row. So is what there is of an unfinished row; the part's `notes` say what it lacks.
In a part, rows that no machine has measured run first. Each row runs in a process of its own, which a time limit ends
if it hangs. Those of a group compile side by side, flex_attention too; then each is timed alone, its contestants in an
order that changes from round to round. A figure is a median over rounds. Ratios are peer / frisket (above 1: frisket is
faster) with the 95 % interval of the median, of one process on one GPU. The `run` of a row names its GPU and versions,
and `rounds` are the clock, power and temperature in each. Results go to gpu.json in --into, or to a file with the GPU's
name where gpu.json has rows of another GPU.

`--dry` tries the list or a part without a GPU, at a few dozen tokens in Triton's interpreter. Its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import checkout  # noqa: F401 - finds frisket for all that is imported from here on
from gpu_order import MINUTES, ROUNDS, ordered
from gpu_parts import PARTS
from gpu_results import Results, device, failures, in_turn, lacking, loaded
from gpu_scale import DRY, FULL, Deadline, Row, Scale
from store import RESULTS, shown

from frisket.runtime.bench.race import described

READY, LACKS = "== ready ==", "== lacks =="  # what a row says before it is measured, and behind its results
GRACE = 20  # seconds before the end in which nothing new begins
Job = tuple[str, str]  # part, row


# -- a row ----------------------------------------------------------------------------------------------


def measure(part: str, name: str, scale: Scale) -> None:
    """Prepares a row, says so, and measures it when it is told to; its results are a line each time that they grow."""
    rows = PARTS[part].prepare(name, scale)
    print(READY, flush=True)
    if sys.stdin.readline():
        for row in rows():
            print(json.dumps(row), flush=True)
        print(LACKS + "; ".join(scale.deadline.left_out), flush=True)


class Child:
    """A row in a process of its own, with those that it starts: they end at a time limit, for a kernel may hang.
    `deadline`, of time.monotonic(), is when the row begins nothing more."""

    def __init__(self, part: str, name: str, scale: Scale, deadline: float = math.inf) -> None:
        dry = ["--dry"] if scale.dry else []
        numbers = ["--rounds", str(scale.rounds), "--deadline", str(deadline)]
        command = [sys.executable, __file__, part, "--row", name, *numbers, *dry]
        self.name, self.errors = name, tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self.late = 0.0
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
            start_new_session=True,
        )  # fmt: skip

    def ready(self) -> bool:
        assert self.process.stdout is not None
        return any(line.rstrip() == READY for line in iter(self.process.stdout.readline, ""))

    def measure(self) -> tuple[Row | None, str]:
        """The row's results as far as they go, and what they lack: "" where they are whole."""
        out, _ = self.process.communicate("go\n" if self.process.poll() is None else None)
        lines = out.split("\n")[:-1]  # a process that was stopped may leave half of a line
        rows = [line for line in lines if line.startswith("{")]
        row = json.loads(rows[-1]) if rows else None
        if lines and lines[-1].startswith(LACKS):
            return row, lines[-1].removeprefix(LACKS)
        return row, "failed: " + self.failure()

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
        words = "".join(self.errors.readlines()[-12:]).strip()[-2000:]
        if self.late:
            return f"stopped: no answer in {self.late:.0f} s\n{words}".strip()
        return words or f"exit status {self.process.returncode}"


# -- rows -----------------------------------------------------------------------------------------------


def tell(only: Sequence[str], scale: Scale, folder: Path) -> None:
    """Print the rows that gpu.json lacks, of the list and of every part."""
    parts = loaded(folder / "gpu.json")
    jobs = chosen(ordered(scale), only)
    left = [f"{part}: {name}" for part, name in jobs if lacking(part, [name], parts)]
    if jobs:
        print(f"in the order of their value: {len(left)} of {len(jobs)} rows are left", *left, sep="\n    ")
    for part, of in PARTS.items():
        names = [name for _, name in chosen([(part, n) for n in of.rows(scale)], only)]
        missing = lacking(part, names, parts)
        if names:
            print(f"{part}: {len(missing)} of {len(names)} rows are left", *missing, sep="\n    ")


def chosen(jobs: Sequence[Job], only: Sequence[str]) -> list[Job]:
    return [(part, name) for part, name in jobs if all(text in f"{part}: {name}" for text in only)]


def groups(jobs: Sequence[Job], workers: int) -> Iterator[list[Job]]:
    """Neighbouring rows of a part that compile side by side."""
    for part, of_part in groupby(jobs, key=lambda job: job[0]):
        rows, size = list(of_part), PARTS[part].together or workers
        yield from (rows[i : i + size] for i in range(0, len(rows), size))


def measured(jobs: Sequence[Job], workers: int, end: float, scale: Scale) -> Iterator[tuple[Job, Row | None, str]]:
    """(row, its results, what they lack), as long as there is time for half of another group. Rows that the end stopped
    before they had results are left for the next time."""
    longest = 0.0

    def left(part: str) -> float:
        return max(0.1, min(PARTS[part].limit, end - time.monotonic()))

    for group in groups(jobs, workers):
        start = time.monotonic()
        if start + longest / 2 > end - GRACE:
            return
        children = [Child(part, name, scale, end - GRACE) for part, name in group]

        def ready(child: Child, limit: float) -> bool:
            with child.limited(limit):  # no longer than it prepares: rows that are ready wait for the others
                return child.ready()

        with ThreadPoolExecutor(len(children)) as pool:
            started = list(pool.map(ready, children, [left(part) for part, _ in group]))
        for child, job, good in zip(children, group, started, strict=True):
            with child.limited(left(job[0])):
                row, lacks = child.measure() if good else (None, "failed: " + child.failure())
                child.process.wait()
            if child.late and time.monotonic() >= end:  # the row has not failed
                lacks = "what was to follow when the minutes were over"
                if row is None:
                    continue
            yield job, row, lacks
        longest = max(longest, time.monotonic() - start)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=[*PARTS, "left"], help="the list of rows unless named")
    parser.add_argument("--only", nargs="+", default=[], help="only rows whose part and name contain all of this")
    parser.add_argument("--again", action="store_true", help="measure rows again that are there already")
    parser.add_argument("--minutes", type=float, help="8 of the list, 3 of smoke, 7.5 of every other part")
    parser.add_argument("--rounds", type=int, help="9 of the list and 15 of a part where no other number is given")
    parser.add_argument("--workers", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--dry", action="store_true", help="tiny, in Triton's interpreter, on the CPU")
    parser.add_argument("--row", help=argparse.SUPPRESS)  # a child's
    parser.add_argument("--deadline", type=float, default=math.inf, help=argparse.SUPPRESS)  # a child's
    args = parser.parse_args(argv)
    if args.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    scale = DRY if args.dry else FULL
    rounds = args.rounds or (ROUNDS if args.part is None and not args.dry else scale.rounds)
    scale = replace(scale, rounds=rounds, deadline=Deadline(args.deadline))
    if args.row is not None:
        measure(args.part, args.row, scale)
        return 0
    if args.part == "left":
        tell(args.only, scale, args.into)
        return 0
    return run(args, scale)


def run(args: argparse.Namespace, scale: Scale) -> int:
    """Measure what is left of the list or of a part; 1 where something failed."""
    minutes = args.minutes or (MINUTES if args.part is None else PARTS[args.part].minutes)
    end, machine = time.monotonic() + 60 * minutes, {**described(), **device()}
    if not args.dry and machine["gpu"].startswith("none"):
        print("no GPU is visible to torch; --dry tries the program without one", file=sys.stderr)
        return 2
    results = Results(args.into, machine, scale)
    if args.part is None:
        jobs = [(part, name) for part, name in ordered(scale) if not PARTS[part].waits(name)]
        jobs.sort(key=lambda job: results.failed(*job))  # a row that hung does not hang first again
    else:
        jobs = [(args.part, n) for n in in_turn(args.part, [*PARTS[args.part].rows(scale)], results.parts)]
    left = [job for job in chosen(jobs, args.only) if args.again or not results.done(*job)]
    failed = 0
    for job, row, lacks in measured(list(left), args.workers, end, scale):
        part, name = job
        results.add(part, name, row, lacks)
        if not lacks:
            left.remove(job)
        if row is not None:
            print(shown(name, row), flush=True)
        if lacks:
            print(f"{name}\n    UNFINISHED\n    " + lacks.replace("\n", "\n    "), flush=True)
        failed += lacks.startswith("failed") or (row is not None and failures(row))
    if left:
        print(f"{len(left)} rows are left: run this command again", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
