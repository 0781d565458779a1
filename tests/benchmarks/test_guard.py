"""benchmarks/guard.py: verdicts by made-up times, the order of turns, and a slower tree that it finds."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import guard
import pytest

from frisket.runtime.machine.cpp_build import reason

ROOT = Path(__file__).resolve().parents[2]
# time of COMMIT / time of this tree, of twelve rounds: their interval goes from the third to the tenth
EVEN = [1 + 0.001 * i for i in range(-6, 6)]
TIMES = {
    "equal": EVEN,
    "faster": [1.1 * x for x in EVEN],
    "slower": [0.9 * x for x in EVEN],
    "undecided": [0.9] * 3 + [1.0] * 9,
}


def row_of(verdict):
    return guard.Row("torch", verdict, commit=TIMES[verdict], tree=[1.0] * 12, pairs=2)


class Tree:
    """A process that answers made-up seconds, and notes who is asked what."""

    def __init__(self, name, seconds, log, error=""):
        self.name, self.log, self.error = name, log, error
        self.seconds = itertools.cycle(seconds)
        self.started = {"rows": ["a", "ab", "b"], "failures": []}

    def ask(self, **request):
        self.log.append((self.name, request))
        if "build" in request:
            calls = {"A": 5}.get(self.name, 7)  # the row takes the larger number
            return {"error": self.error} if self.error else {"calls": calls, "seconds": 0.1}
        return {"seconds": next(self.seconds)}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.log.append((self.name, "ended"))


@pytest.mark.parametrize("verdict", TIMES)
def test_verdict_of_made_up_times_follows_from_the_interval(verdict):
    assert row_of(verdict).verdict == verdict


def test_outliers_of_two_rounds_in_twelve_change_no_verdict():
    assert guard.Row("torch", "", commit=[0.1, 0.1, *EVEN[2:]], tree=[1.0] * 12).verdict == "equal"


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [(["equal", "faster", "undecided"], 0), (["equal", "slower"], 1), (["new", "equal"], 0), (["new"], 1), ([], 1)],
)
def test_report_counts_rows_and_fails_for_a_slower_one(verdicts, status, capsys):
    rows = [guard.Row("torch", "", error="ImportError") if x == "new" else row_of(x) for x in verdicts]
    assert guard.report(rows) == status
    *undecided, last = capsys.readouterr().out.splitlines()
    assert last == ", ".join(f"{x} {verdicts.count(x)}" for x in guard.VERDICTS)
    assert undecided == ["undecided  1.000 [0.900, 1.000]  torch: undecided"] * verdicts.count("undecided")


def test_trees_are_timed_in_turns_that_alternate():
    log, row = [], guard.Row("torch", "a")
    guard.time_row(row, Tree("A", [2.0], log), Tree("B", [1.0], log))
    assert log[:2] == [("B", {"build": "a"}), ("A", {"build": "a"})]
    assert "".join(name for name, _ in log[2:]) == "ABBA" * 3
    assert all(request == {"calls": 7} for _, request in log[2:])
    assert (row.commit, row.tree, row.pairs) == ([2.0] * 6, [1.0] * 6, 1)


def test_row_that_only_the_commit_cannot_run_is_new():
    row = guard.Row("torch", "a")
    guard.time_row(row, Tree("A", [1.0], [], "KeyError: 'x'"), Tree("B", [1.0], []))
    assert str(row) == "new        torch: a: KeyError: 'x'"
    assert row.result() == {"notes": {"verdict": "new", "error": "KeyError: 'x'"}}
    with pytest.raises(RuntimeError, match="torch: a does not run on this tree: KeyError"):
        guard.time_row(row, Tree("A", [1.0], []), Tree("B", [1.0], [], "KeyError: 'x'"))


@pytest.mark.parametrize(
    ("part", "seconds", "minutes", "pairs"),
    [
        ("torch", [1.0], 0, 2),
        ("torch", [1.1], 0, 4),  # slower, and timed again to be sure
        ("torch", [0.9], 1, 4),
        ("torch", [0.9], 0, 2),
        ("torch", [1.2, 1.0, 1.0, 1.0], 0, 2),  # undecided: the minutes are over
        ("model", [1.1], 0, 1),
    ],
)
def test_pairs_of_processes_are_as_many_as_a_verdict_takes(monkeypatch, part, seconds, minutes, pairs):
    log = []
    monkeypatch.setattr(
        guard, "Process", lambda folder, part, cores: Tree(folder, seconds if folder == ROOT else [1.0], log)
    )
    options = Namespace(parts=[part], rows="a", quick=False, minutes=minutes, cores=1)
    rows = guard.measure(Path("before"), options)
    assert [row.name for row in rows] == ["a", "ab"]
    assert [row.pairs for row in rows] == [pairs] * 2
    assert log.count((ROOT, "ended")) == log.count((Path("before"), "ended")) == pairs


def test_undecided_row_gets_more_rounds_while_there_is_time(monkeypatch):
    answers = iter([[1.2, 1.0, 1.0, 1.0]] * 3 + [[0.8]] * 20)
    monkeypatch.setattr(
        guard, "Process", lambda folder, part, cores: Tree(folder, next(answers) if folder == ROOT else [1.0], [])
    )
    (row,) = guard.measure(Path("before"), Namespace(parts=["torch"], rows="ab", quick=True, minutes=1, cores=1))
    assert row.pairs > 2
    assert row.verdict in ("equal", "faster")


PLANTED = """

import time
_call = Attention.__call__
def _slower(self, *arrays, **options):
    time.sleep(0.01)
    return _call(self, *arrays, **options)
Attention.__call__ = _slower
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(reason()), reason="no compiler")
@pytest.mark.skipif(sys.platform != "linux", reason="the guard takes its clock from Linux")
def test_planted_slowdown_of_a_tree_is_found(tmp_path):
    for folder in ("benchmarks", "dsl", "grammar", "lowering", "runtime"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
    for command in (["init"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "before"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    with (tmp_path / "runtime" / "attention" / "attention.py").open("a") as file:
        file.write(PLANTED)
    command = [sys.executable, "benchmarks/guard.py", "HEAD", "--quick", "--parts", "decode", "--into", "rows.json"]
    done = subprocess.run(
        [*command, "--rows", "1 x 4096, float32"], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path / guard.UNINSTALLED)},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    *_, row, counts = done.stdout.splitlines()
    assert row.startswith("slower     0.")
    assert row.endswith("decode: 1 x 4096, float32")
    assert counts == "slower 1, undecided 0, equal 0, faster 0, new 0"
    written = json.loads((tmp_path / "rows.json").read_text())["parts"]["decode"]
    assert written["settings"]["tree"] == f"{written['settings']['commit']}-dirty"
    assert written["rows"]["1 x 4096, float32"]["figures"]["ms"]["tree"] > 10
