"""A slice of the faults, and that each of the checks fails where something is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.tiers import default_only

from frisket.runtime.machine import cpp_build

from . import campaign, compilers, kills, machine, memory, places, signals, threads

SEED = 105  # of disk-full: room for the first kernel and none for the second
FAST = ("disk-full", "read-only", "noexec", "links", "sigterm", "sigchld")
MINUTES = [x for x in campaign.FAULTS if x not in (*FAST, "kills", "kills-of-gcc")]

pytestmark = pytest.mark.skipif(bool(cpp_build.reason()), reason=cpp_build.reason())


def run(*arguments: str) -> subprocess.CompletedProcess:
    """The command in a process of its own: it forks, and this one may have threads."""
    command = [sys.executable, str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=550)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", default_only(FAST, "disk-full", "read-only", "sigterm"))
def test_fault_round_ends_without_a_failure(name):
    line = campaign.one(campaign.FAULTS[name][0], name, SEED, 0)
    if line["left_out"]:
        pytest.skip(f"left out: {line['left_out']}")
    assert not line["failure"], line["failure"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", default_only(kills.FAULTS, "kills"))
def test_kills_during_a_build_leave_a_usable_cache(name, tmp_path):
    """One round of kills with a stand-in compiler that writes in pieces, or with the real compiler."""
    file = tmp_path / "rounds.jsonl"
    done = run(name, "--seed", "100", "--rounds", "1", "--resume", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = map(json.loads, file.read_text().splitlines())
    assert sum(n for what, n in line["counts"].items() if what.startswith("killed")) == kills.KILLS


@pytest.mark.slow
@pytest.mark.parametrize("name", MINUTES)
def test_rounds_that_take_minutes(name):
    done = run(name, "--seed", "101", "--rounds", "2")
    assert done.returncode == 0, done.stdout + done.stderr


# -- the checks ----------------------------------------------------------------------------------------------------

WRONG = {  # what is broken -> what is said
    # a lock that outlives its process
    "lock": ("""
@contextmanager
def alone(path):
    while True:
        try:
            os.close(os.open(path.with_suffix(".held"), os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            time.sleep(0.01)
    yield
    path.with_suffix(".held").unlink()
cpp_build._alone, kills.PATIENCE = alone, 2
""", "ended with None"),
    # files written in place, and believed
    "torn": ("""
def put(path, content):
    with open(path, "wb") as file:
        for start in range(0, len(content), 512):
            file.write(content[start : start + 512])
            file.flush()
            time.sleep(0.0005)
cpp_build.put = put
cpp_build._opened = lambda path, name: ctypes.CDLL(str(path))
""", "ended with -|is not whole|libraries for"),
    # leftovers that stay
    "kept": ("os.utime = lambda *given: None\n", "left behind"),
}  # fmt: skip
PLANTED = """
import ctypes, os, random, sys, time
from contextlib import contextmanager
sys.path.insert(0, {tests!r})
from faults import kills
from frisket.runtime.machine import cpp_build
{wrong}
kills.killed(random.Random(1))
"""


@pytest.mark.slow  # the moments of the kills decide, and those depend on the machine
@pytest.mark.parametrize("what", WRONG)
def test_a_planted_fault_of_the_cache_is_found(what):
    wrong, words = WRONG[what]
    text = PLANTED.format(tests=str(Path(__file__).parents[1]), wrong=wrong)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert any(x in done.stderr for x in words.split("|")), done.stderr


def test_leftover_files_fail_the_check_of_a_fault(tmp_path):
    (tmp_path / "a.tmp").touch()
    with pytest.raises(AssertionError, match="left behind"):
        places.clean(tmp_path)
    (tmp_path / "a.tmp").rename(tmp_path / "a.so")
    with pytest.raises(AssertionError, match="is not whole"):
        places.clean(tmp_path)


def test_a_wrong_answer_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "BUILD", places.BUILD.replace("found.answer()", "found.answer() + 1"))
    with pytest.raises(AssertionError, match="kernel 5 says 6"):
        places.built([5], machine.environment(tmp_path / "cache"))


def test_texts_of_other_processes_are_python():
    for text in (places.BUILD, places.CALL, compilers.CALLS, memory.PLANS, memory.KERNELS, threads.THREADS):
        compile(text, "text", "exec")
    for text in (signals.INTERRUPTS, signals.ALARMS, signals.TERMINATED, signals.CHILDREN):
        compile(text, "text", "exec")


# -- the campaign --------------------------------------------------------------------------------------------------


def test_fault_campaign_resumes_where_it_stopped(tmp_path, monkeypatch):
    seen, file = [], tmp_path / "rounds.jsonl"

    def work(draw):
        seen.append(draw.round)
        assert draw.round != 2, "a fault"
        return {"tries": 1}

    def elsewhere(draw):
        raise machine.NotHereError("no such thing here")

    monkeypatch.setitem(campaign.FAULTS, "one", (work, 2))
    monkeypatch.setitem(campaign.FAULTS, "two", (elsewhere, 5))
    campaign.run("one", 7, None, file)
    with file.open("a") as f:
        f.write('{"fault": "one", "se')  # killed while it wrote
    shown = []
    outcome = campaign.run("one", 7, 4, file, shown.append)
    assert seen == [0, 1, 2, 3]
    assert (outcome.rounds, outcome.failed, outcome.counts) == (4, 1, {"tries": 3})
    assert "one, seed 7, round 2\nAssertionError: a fault" in shown[0]
    assert str(campaign.run("two", 7, 4, file)) == "not run: no such thing here"
    assert len(file.read_text().splitlines()) == 4
    campaign.run("one", 8, 1, file)
    assert seen == [0, 1, 2, 3, 0], "another seed has rounds of its own"


def test_an_unknown_name():
    done = run("flood")
    assert done.returncode == 2
    assert "there is no flood; there are kills, kills-of-gcc" in done.stderr
