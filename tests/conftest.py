"""Options and fixtures of the whole suite."""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Bytecode is kept whatever the environment says: without it, every worker and every child of a test parses the tests
# and frisket again, which is a tenth of the processor time of a run.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if "PYTEST_XDIST_WORKER" in os.environ:  # one thread a worker, set before torch and numpy load
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# what a terminal asks for: tests that are about it say it themselves
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR"):
    os.environ.pop(name, None)

# Interpreters of Pallas kernels wait for one another inside XLA's threads: with one for each of two cores they hang.
os.environ.setdefault("NPROC", "16")

# Tests that are not about the native kernels compile none; those that are name the backend, or take this away.
os.environ.setdefault("FRISKET_BACKEND", "library")

# XLA compiles thousands of programs, most of them for one call: optimized less, and none of them twice
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Tests make objects by the million and few cycles among them, which a worker looks for less often
gc.set_threshold(20_000, 10, 10)

EMITTERS = "--xla_cpu_use_fusion_emitters"
TESTS = Path(__file__).parent
QUICK = TESTS / "support/native/quick_g++"
BUILDS = TESTS / "builds.json"


@pytest.fixture(autouse=True, scope="module")
def _looked_through_once():
    """What the tests of a file leave (compiled functions, interned Exprs) is not looked through again by every garbage
    collection of the files behind it: by the end of a run that is gigabytes, and some tests collect on purpose."""
    yield
    for thread in threading.enumerate():
        if thread.name == "frisket compiler":  # what it builds counts for this file
            thread.join()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests():
    """Dynamo knows nothing of what tests before compiled: torch's own flex_attention compiles itself, and where a mask
    with captured tensors came before one without, Dynamo fails while it words why it compiles again."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture(autouse=True, scope="session")
def _no_idle_checks_of_integers():
    """Triton's interpreter works out in 64 bits whether a sum or product of integers overflows, and asserts nothing
    unless it debugs: a quarter of its time."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from triton.runtime.interpreter import interpreter_builder

        interpreter_builder.options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)


def xla_has_older_emitters() -> bool:
    """XLA of this JAX has two emitters of fusions for CPUs, the older of which compiles in half the time. Exhaustive
    cases and JAX 0.11, which has no other, take the newer."""
    try:
        return importlib.metadata.version("jaxlib").split(".")[:2] == ["0", "10"]
    except importlib.metadata.PackageNotFoundError:
        return False


def pytest_configure(config: pytest.Config) -> None:
    """What XLA compiled is kept, for the other workers and the next run; `pytest --cache-clear` forgets it."""
    if config.pluginmanager.hasplugin("cacheprovider"):
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.cache.mkdir("xla")))
    if xla_has_older_emitters() and EMITTERS not in os.environ.get("XLA_FLAGS", ""):  # nor did the process before this
        newer = str(exhaustive(config)).lower()
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {EMITTERS}={newer}".strip()
    # native kernels are optimized less, but exhaustive tests and lowering/kernels/cpp take what users have
    if not exhaustive(config) and "CXX" not in os.environ and shutil.which("g++") and os.access(QUICK, os.X_OK):
        os.environ["CXX"] = str(QUICK)
    if "NATIVE_BUILDS" not in os.environ:  # neither a worker nor a pytest that a test runs
        config.pluginmanager.register(Compiled(), "compiled")


class Compiled:
    """Counts what a run compiles, native kernels and XLA programs, and fails it where a file builds too many kernels.

    tests/builds.json has the most kernels of each file and of the whole default run; a file that it does not name
    builds none. A kernel counts where it is built first, so a file has no more in a whole run than alone: its number
    is that of `pytest FILE` with empty folders for FRISKET_CACHE_DIR and TMPDIR, and a fourth or two for other
    processors."""

    def __init__(self) -> None:
        descriptor, self.builds = tempfile.mkstemp(prefix="frisket-builds-")
        os.close(descriptor)
        os.environ["NATIVE_BUILDS"] = self.builds
        self.programs = self.xla()
        self.over: list[str] = []

    def xla(self) -> int:
        folder = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", ""))
        return sum(1 for _ in folder.glob("*-cache")) if folder.name else 0

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        names = Path(self.builds).read_text().splitlines()
        os.unlink(self.builds)
        shutil.rmtree(f"{self.builds}.known", ignore_errors=True)  # of quick_g++
        counts = Counter(name.partition("::")[0] or "between tests" for name in names)
        self.total, self.programs = len(names), self.xla() - self.programs
        if exhaustive(session.config):
            return
        most = json.loads(BUILDS.read_text())
        for file, n in counts.items():
            if n > most.get(file, 0):
                tests = sorted({name for name in names if name.startswith(file)})
                self.over += [f"{file}: {n}, at most {most.get(file, 0)}", *(f"  {test}" for test in tests)]
        if self.total > most["in all"]:
            self.over.append(f"in all: {self.total}, at most {most['in all']}")
        if self.over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"compiled: {self.total} native kernels, {self.programs} XLA programs")
        if self.over:
            terminalreporter.section("too many native kernels (tests/builds.json)", red=True)
            terminalreporter.write_line("\n".join(self.over))


def exhaustive(config: pytest.Config) -> bool:
    return asks_for("exhaustive", config)


def asks_for(tier: str, config: pytest.Config) -> bool:
    """Whether `-m` names a tier, and not behind `not`."""
    return tier in config.option.markexpr.replace(f"not {tier}", "")


def left_out(config: pytest.Config) -> set[str]:
    """The tiers of which `-m` wants no case."""
    return {tier for tier in ("exhaustive", "slow", "outside") if f"not {tier}" in config.option.markexpr}


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> list[Any] | None:
    """No item is made of a test whose tier is left out."""
    if not name.startswith("test_"):
        return None
    marks = getattr(obj, "pytestmark", [])
    names = {mark.name for mark in (*collector.iter_markers(), *(marks if isinstance(marks, list) else [marks]))}
    return [] if names & left_out(collector.config) else None


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """One case in N of a test marked `sampled(N)` is in every run, chosen by a hash of its name; the others are
    exhaustive. No item is made of parameters whose tier is left out; ids stay those of the whole list."""
    yield
    calls = metafunc._calls
    if sampled := metafunc.definition.get_closest_marker("sampled"):
        often = [call for call in calls if not any(mark.name == "exhaustive" for mark in call.marks)]
        often.sort(key=lambda call: zlib.crc32(call.id.encode()))
        for call in often[math.ceil(len(often) / sampled.args[0]) :]:
            call.marks.append(pytest.mark.exhaustive.mark)
    tiers = left_out(metafunc.config)
    stay = [call for call in calls if not any(mark.name in tiers for mark in call.marks)]
    metafunc._calls = stay or calls  # without any, pytest would make an item without parameters


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="I/N", help="run the I-th of N parts, into which tests are dealt by their names")
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew; read `git diff`")
    parser.addoption("--update-results", action="store_true", help="write benchmarks/results/compiled anew")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("--part"):
        at, _, parts = part.partition("/")
        if not (at.isdecimal() and parts.isdecimal() and 1 <= int(at) <= int(parts)):
            raise pytest.UsageError(f"--part {part}: it is I/N, the I-th of N parts, 1/2 or 2/2")
        kept, others = [], []
        for item in items:
            (kept if zlib.crc32(item.nodeid.encode()) % int(parts) == int(at) - 1 else others).append(item)
        config.hook.pytest_deselected(items=others)
        items[:] = kept


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """`golden("name.py", text)` in tests/area/test_x.py: the text is what tests/golden/area/test_x/name.py holds."""
    folder = TESTS / "golden" / request.path.relative_to(TESTS).with_suffix("")

    def check(name: str, text: str) -> None:
        path = folder / name
        if request.config.getoption("--update-golden"):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"{name} changed; if it should have, run pytest --update-golden"

    return check
