"""SIGKILL at random moments, with 16 processes on one cold cache."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from frisket.grammar.memo import Memo
from frisket.runtime.machine import cpp_build

from .machine import answer, end, environment, folder, said, separate, source, whole

PROCESSES = 16
KILLS = 25  # of a round
PHASES = ("look", "lock", "compile", "write", "load")
AIMS = "lock", "compile", "compile", "write", "write", "load"  # where a kill is to hit
PATIENCE = 60.0  # seconds for a process to come to a phase
MARK = 0x5EED1234
TESTS = Path(__file__).resolve().parents[1]

# It writes a library that was made before, with the number of the source in it, piece by piece.
STAND_IN = """#!{python} -IS
import re, sys, time
if sys.argv[1] == "--version":
    print("1.0")
    sys.exit()
out, text = sys.argv[sys.argv.index("-o") + 1], sys.argv[-1]
number = int(re.search(r"return (\\d+);", open(text).read())[1])
content = open({library!r}, "rb").read().replace({mark!r}, number.to_bytes(4, "little"))
with open(out, "wb", buffering=0) as file:
    for start in range(0, len(content), 4096):
        file.write(content[start : start + 4096])
        time.sleep(0.004)
"""


def compiler_in_pieces(place: Path) -> str:
    text, library = place / "template.cpp", place / "template.so"
    text.write_text(f'static volatile const int value = {MARK};\nextern "C" int answer() {{ return value; }}\n')
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", str(library), str(text)], check=True)
    mark = MARK.to_bytes(4, "little")
    assert library.read_bytes().count(mark) == 1
    made = place / "stand-in"
    made.write_text(STAND_IN.format(python=sys.executable, library=str(library), mark=mark))
    made.chmod(0o755)
    return str(made)


# -- in the processes that are killed ------------------------------------------------------------------------------


def build(phases: mmap.mmap, at: int, seed: str) -> None:
    """Build kernels that others build too, slowly where it writes, until the byte behind the phases is set."""
    draw = random.Random(seed)
    for name, phase in (("_alone", "lock"), ("_run", "compile"), ("put", "write"), ("_opened", "load")):
        setattr(cpp_build, name, told(getattr(cpp_build, name), phases, at, PHASES.index(phase)))
    replace, fdopen = os.replace, os.fdopen

    def slow_replace(*names) -> None:
        time.sleep(draw.random() * 0.01)
        replace(*names)
        time.sleep(draw.random() * 0.01)

    os.replace = slow_replace
    os.fdopen = lambda *given: Slow(fdopen(*given), draw)
    native = Path(os.environ["FRISKET_CACHE_DIR"]) / "native"
    while not phases[PROCESSES]:
        there = len([*native.glob("*.so")])
        number = draw.randrange(max(0, there - 2), there + PROCESSES // 2)
        found = cpp_build.library(source(number)).answer()
        assert found == number, f"kernel {number} says {found}"


def told(function, phases, at, phase):
    def run(*given, **more):
        phases[at] = phase
        return function(*given, **more)

    return run


class Slow:
    """A file that is written in two halves."""

    def __init__(self, file, draw) -> None:
        self.file, self.draw = file, draw

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.file.close()

    def write(self, content: bytes) -> None:
        for part in (content[: len(content) // 2], content[len(content) // 2 :]):
            self.file.write(part)
            self.file.flush()
            time.sleep(self.draw.random() * 0.01)


# -- in the process that kills -------------------------------------------------------------------------------------


def start(phases: mmap.mmap, at: int, seed: str) -> int:
    phases[at] = 0
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        build(phases, at, seed)
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def run(draw: random.Random, compiler: str, cache: Path, wanted: int) -> Counter[str]:
    """Kill `wanted` times, then let the last ones end; what was hit."""
    os.environ.update(CXX=compiler, FRISKET_CACHE_DIR=str(cache), TMPDIR=str(cache.parent / "temporary"))
    tempfile.tempdir = None
    (cache.parent / "temporary").mkdir()
    cpp_build._loaded = Memo("faults", 1)  # of the children: this process loads nothing
    cpp_build.compiler_version(cpp_build.compiler())
    phases = mmap.mmap(-1, PROCESSES + 1)
    running = {at: start(phases, at, f"{draw.random()}") for at in range(PROCESSES)}
    groups, hit = [*running.values()], Counter()
    try:
        while sum(hit.values()) < wanted:
            phase = PHASES.index(draw.choice(AIMS))
            found = reached(phases, running, phase, draw)
            time.sleep(draw.random() * 0.01)  # a moment that it does not choose
            pid, there = running[found], PHASES[phases[found]]
            try:  # with its compiler, or without
                (os.killpg if draw.random() < 0.5 else os.kill)(pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no group yet
                os.kill(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status == -9, f"a process ended with {status}"
            hit[f"killed in {there}"] += 1
            running[found] = start(phases, found, f"{draw.random()}")
            groups.append(running[found])
        phases[PROCESSES] = 1
        for at, pid in running.items():
            status = ended(pid)
            assert status == 0, f"process {at} ended with {status} in {PHASES[phases[at]]}"
    finally:
        for group in groups:
            end(group)
    return hit


def reached(phases: mmap.mmap, running: dict[int, int], phase: int, draw: random.Random) -> int:
    """A process that has come to a phase; any one where none does."""
    order, until = draw.sample(sorted(running), len(running)), time.monotonic() + 2
    while time.monotonic() < until:
        for at in order:
            if phases[at] == phase:
                return at
        time.sleep(0.0005)
    return order[0]


def ended(pid: int) -> int | None:
    """A child's exit status; None if a lock holds it, or something else, for good."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def check(cache: Path, compiler: str) -> Counter[str]:
    """Hold a cache to what it should be after the kills: all libraries whole and right, the rest swept."""
    native = cache / "native"
    libraries = sorted(native.glob("*.so"))
    assert len(libraries) > 3, "hardly anything was built"
    for path in libraries:
        assert whole(path), f"{path} is not whole"
        assert path.with_suffix(".cpp").read_text() == source(answer(path)), f"{path} is of another source"
    left = [p for p in native.iterdir() if p.suffix not in (".so", ".cpp")]
    for path in left:
        os.utime(path, (0, 0))  # an hour later
    numbers = [*range(len(libraries) + PROCESSES), 7777]  # those that nobody finished, and a new one
    again = (
        "from frisket.runtime.machine.cpp_build import library\n"
        f"from faults.machine import source\nprint([library(source(n)).answer() for n in {numbers}])"
    )
    assert said(again, environment(cache, CXX=compiler, PYTHONPATH=str(TESTS))) == [str(numbers)]
    kinds = {p.suffix for p in native.iterdir()}
    assert kinds == {".so", ".cpp"}, f"left behind: {kinds}"
    stray = [p for p in (cache.parent / "temporary").iterdir() if p.name.startswith("cc")]
    assert not stray, f"temporary files of the compiler: {stray}"
    return Counter({"leftovers swept": len(left), "libraries": len(libraries)})


def killed(draw: random.Random, wanted: int = KILLS, real: bool = False) -> dict[str, int]:
    with folder() as place:
        compiler = shutil.which("g++") if real else compiler_in_pieces(place)
        cache = place / "cache"
        return separate(run, draw, compiler, cache, wanted) + check(cache, compiler)


FAULTS = {
    "kills": (killed, 20),
    "kills-of-gcc": (lambda draw: killed(draw, real=True), 4),
}
