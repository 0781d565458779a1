"""The default tests on other machines than this one, as far as it can play them: `python tests/settings.py [NAME ...]`.

Each setting runs the part of the cases that `--part I/N` names (all of them by default), in the environment of the
Python that runs this. What fails in one of them depends on the machine, and no test may.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AVX2 = ROOT / "tests/support/avx2"
LOAD = 10  # busy processes

# name: variables of the environment
SETTINGS: dict[str, dict[str, str]] = {
    "AVX2 alone": {"PYTHONPATH": str(AVX2), "CXX": str(AVX2 / "quick_g++"), "XLA_FLAGS": "--xla_cpu_max_isa=AVX2"},
    "no C++ compiler": {"CXX": "/no/such/compiler"},
    "one core": {},
    "four cores": {},
    "ten busy processes": {},
    "a narrow terminal in color": {"COLUMNS": "44", "LINES": "12", "FORCE_COLOR": "1", "TERM": "xterm-256color"},
    "no terminal, interrupts ignored": {"TERM": "dumb", "NO_COLOR": "1", "LC_ALL": "C"},
}


@contextmanager
def busy(processes: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(name: str, arguments: list[str]) -> int:
    """The exit status of pytest in a setting."""
    workers = {"one core": 1, "four cores": 4}.get(name, 2)
    cores = sorted(os.sched_getaffinity(0))[: 1 if name == "one core" else None]

    def before() -> None:
        os.sched_setaffinity(0, cores)
        if "interrupts ignored" in name:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    variables = {**os.environ, **SETTINGS[name]}
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), *arguments]
    with busy(LOAD if "busy" in name else 0):
        return subprocess.run(command, cwd=ROOT, env=variables, preexec_fn=before, check=False).returncode


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SETTINGS)}; all unless named")
    options.add_argument("--part", metavar="I/N", default="1/1")
    chosen = options.parse_args()
    if unknown := set(chosen.names) - set(SETTINGS):
        options.error(f"there is no setting {', '.join(sorted(unknown))}")
    if not shutil.which("g++"):
        options.error("g++ is not on PATH")
    failed = []
    for name in chosen.names or SETTINGS:
        print(f"-- {name}", flush=True)
        if run(name, ["--part", chosen.part]):
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "good in every setting")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
