"""Runs the tests of a group on each mutant: in a forked process, on a copy of the checkout with one file changed.

The process that forks has imported numpy, pytest and what the group needs, and nothing of frisket: each child imports
frisket from the copy. Kernels are kept in a folder of the copy under their texts, so a mutant's kernels are compiled.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from typecheck import link

from .areas import Group
from .mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 8 << 30
SLACK, TIMES = 60, 10  # a test hangs that takes a minute and ten times what it takes on sound code
# a mutant that no compiler or parser takes says nothing about tests
NOT_A_PROGRAM = re.compile(r"\b(BuildError|SyntaxError|IndentationError): ")


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the checkout's files whose package comes before the installed one."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        tree = Path(folder) / "frisket"
        left_out = [x.strip("/") for x in (ROOT / ".gitignore").read_text().split()]
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", *left_out))
        subprocess.check_call(["git", "init", "-q"], cwd=tree)
        link(tree)
        yield tree


def enter(tree: Path, group: Group) -> None:
    """Make the copy what this process and its children import."""
    os.chdir(tree)
    here = {"FRISKET_CACHE_DIR": "kernels", "XDG_CACHE_HOME": "cache", "JAX_COMPILATION_CACHE_DIR": "xla"}
    for name, folder in here.items():  # a folder that is given has kernels of other texts alone
        os.environ.setdefault(name, str(tree.parent / folder))
    os.environ.update(group.env, PYTHONPATH=str(tree / "build/types"), OMP_NUM_THREADS="1")
    others = [p for p in sys.path if not Path(p or ".").is_relative_to(ROOT / "tests")]
    sys.path[:] = [str(tree / "build/types"), *others]
    for name in ("numpy", "lark", "rich", *group.needs):
        importlib.import_module(name)
    assert "frisket" not in sys.modules


class Watched:
    """A plug-in of pytest that tells the parent what begins, what fails and how long a test took."""

    def __init__(self, tell: Callable[..., None], order: Callable[[str], Any]):
        self.tell, self.order = tell, order

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # any change changes the texts that golden files keep: those tests do not count
        items[:] = [i for i in items if "golden" not in getattr(i, "fixturenames", ())]
        items.sort(key=lambda i: self.order(i.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tell(test=report.nodeid, failed=str(report.longrepr))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tell(test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tell(test=report.nodeid, took=report.duration, failed=str(report.longrepr) if report.failed else None)


def child(tell: Callable[..., None], group: Group, order: Callable[[str], Any], mutated: str, stop: bool) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    if mutated.endswith(".py"):
        try:
            importlib.import_module("frisket." + mutated.removesuffix(".py").replace("/", "."))
        except BaseException as error:
            return tell(invalid=f"{type(error).__name__}: {error}")
    options = "-q -n 0 -p no:cacheprovider -p no:faulthandler -o addopts= --import-mode=importlib".split()
    options += ["-m", group.marked, *(["-x"] if stop else [])]
    for _, tests in groupby(group.tests, lambda test: test.partition("::")[0]):  # what is not needed is not collected
        pytest.main([*options, *tests], plugins=[Watched(tell, order)])
    return tell(done=True)


def put(pipe: int, said: dict[str, Any]) -> None:
    line = (json.dumps(said) + "\n").encode()
    while line:
        line = line[os.write(pipe, line) :]


def forked(
    group: Group, order: Callable[[str], Any], limit: Callable[[str], float], mutated: str = "", stop: bool = True
) -> Iterator[dict[str, Any]]:
    """What a child tells, a dict each; the last one says `hang` where the child was killed for saying nothing."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        try:
            os.setsid()
            os.close(read)
            child(lambda **said: put(write, said), group, order, mutated, stop)
        finally:
            os._exit(0)
    os.close(write)
    rest, test = b"", ""
    try:
        while True:
            ready, _, _ = select.select([read], [], [], limit(test))
            if not ready:
                yield {"test": test, "hang": True}
                return
            if not (part := os.read(read, 1 << 16)):
                return
            *lines, rest = (rest + part).split(b"\n")
            for said in map(json.loads, lines):
                test = said.get("test", test)
                yield said
    finally:
        os.close(read)
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has no session yet
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def sound(group: Group) -> dict[str, float]:
    """Seconds of each test on sound code; a test that fails there ends the run."""
    took: Counter[str] = Counter()
    ended = False
    for said in forked(group, lambda test: 0, lambda test: 1200, stop=False):
        if said.get("failed") or said.get("hang"):
            raise SystemExit(f"fails without any mutant: {said['test']}\n{said.get('failed', 'hangs')}")
        if "took" in said:
            took[said["test"]] += said["took"]
        ended |= "done" in said
    if not ended or not took:
        raise SystemExit(f"the tests ended early without any mutant: {', '.join(group.tests)}")
    return dict(took)


def tried(
    tree: Path, group: Group, mutant: Mutant, took: dict[str, float], killers: Counter[str], age: int
) -> tuple[str, str]:
    """(outcome, what noticed): killed, timed out, invalid or survived.

    In each file of tests, those run first that have noticed other mutants, then the fast ones. Of two texts of a file
    with one time of change, Python would take the bytecode of the first for the second's: `age` makes the times
    differ."""
    path = tree / mutant.file
    source, stat = path.read_bytes(), path.stat()
    path.write_bytes(mutant.applied(source))
    os.utime(path, (10**9 + age, 10**9 + age))
    told = forked(
        group,
        order=lambda test: (-killers[test], took.get(test, 0)),
        limit=lambda test: SLACK + TIMES * took.get(test, 0),
        mutated=mutant.file,
    )
    try:
        for said in told:
            why = said.get("invalid") or said.get("failed") or ""
            if "hang" in said:
                return "timed out", said["test"]
            if "invalid" in said or NOT_A_PROGRAM.search(why):
                return "invalid", why.strip().split("\n")[-1][:200]
            if why:
                killers[said["test"]] += 1
                return "killed", said["test"]
            if "done" in said:
                return "survived", ""
        return "killed", "the process ended"
    finally:
        told.close()
        path.write_bytes(source)
        os.utime(path, (stat.st_atime, stat.st_mtime))


def of_group(group: Group, mutants: list[Mutant]) -> Iterator[dict[str, Any]]:
    """A result for each mutant, from a process of its own: groups import different packages."""
    if not mutants:
        return
    read, write = os.pipe()
    if not (pid := os.fork()):
        try:
            os.close(read)
            with copied() as tree, os.fdopen(write, "w", buffering=1) as out:
                enter(tree, group)
                took, killers = sound(group), {m.file: Counter[str]() for m in mutants}
                print(f"{len(took)} tests, {sum(took.values()):.0f} s without a mutant", flush=True)
                for age, m in enumerate(mutants):
                    began = time.monotonic()
                    outcome, by = tried(tree, group, m, took, killers[m.file], age)
                    print(f"{outcome} {m}  [{by}]", flush=True)
                    seconds = round(time.monotonic() - began, 1)
                    line = {"id": m.id, "outcome": outcome, "by": by, "seconds": seconds, "mutant": str(m)}
                    out.write(json.dumps(line) + "\n")
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(1)
    os.close(write)
    try:
        with os.fdopen(read) as lines:
            yield from map(json.loads, lines)
    except BaseException:
        os.kill(pid, signal.SIGTERM)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
    if status:
        raise SystemExit(1)
