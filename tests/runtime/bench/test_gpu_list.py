"""The list of rows that `python benchmarks/gpu.py --minutes 8` runs: every kind of row without a GPU, the order, the
results that are kept of rows that do not end, and the clock of the GPU."""

import ctypes
import json
import math
import re
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import gpu
import gpu_contests
import gpu_order
import gpu_scale
import gpu_sensors
import pytest
import torch
from gpu_parts import PARTS
from gpu_results import Results
from gpu_scale import DRY, FULL, Deadline, Entrants
from support.triton.gpu_rows import measured

from frisket.runtime.bench import schema

H100, H200 = ({"gpu": f"NVIDIA {name}", "torch": "2.11.0", "triton": "3.6.0"} for name in ("H100", "H200"))
MACHINE = {"date": "2026-11-28", "cpu": "x", "cores": 16, "python": "3.12.3"}

# -- rows -------------------------------------------------------------------------------------------------


def test_short_gpu_rows_are_measured():
    wide, shared, stored, latent, drafts, graph = measured(
        ("speed", "backward: causal, D 192/128"), ("right", "sdpa, causal, float32, shared heads"),
        ("serving", "1 queries, int8, one piece"), ("serving", "MLA 576/512, 16 heads"),
        ("serving", "MLA 576/512, 16 heads, 4 queries"), ("graphs", "forward"),
        rounds=1,
    )  # fmt: skip
    figures = wide["rows"]["48"]["figures"]
    assert set(figures["tflops"]) == {"frisket", "dense"}
    pairs, took = 48 * 49 / 2, figures["ms"]["frisket"] / 1e3  # of one head
    assert figures["tflops"]["frisket"] == pytest.approx(2 * (3 * 192 + 2 * 128) * pairs / took / 1e12)
    assert shared["rows"]["count"]["figures"]["cases"] == {"passed": 8, "failed": 0}
    assert set(stored["rows"]["1 x 96"]["figures"]["share of bandwidth"]) == {"frisket"}
    for row in (latent, drafts):
        assert set(row["rows"]["1 x 96"]["figures"]["share of bandwidth"]) == {"frisket", "two products"}
    assert set(graph["rows"]["32"]["ratios"]) == {"eager / replay"}


@pytest.mark.exhaustive
def test_long_gpu_rows_are_measured():
    grouped, ordered, step = measured(
        ("speed", "forward: causal, D 64, GQA 8"), ("orders", "64 documents, shuffled"), ("steps", "eager"), rounds=1
    )
    peers = {"flex", "frisket, sdpa", "SDPA flash", "SDPA, expanded heads", "dense, expanded heads"}
    assert set(grouped["rows"]["32"]["figures"]["tflops"]) == {"frisket", *peers}
    for direction in ("forward", "backward"):
        tiles = ordered["rows"][direction]["figures"]["tiles"]
        assert tiles["after"] < tiles["before"]
        assert set(ordered["rows"][direction]["ratios"]) == {"as they come / order"}
    difference = step["figures"]["difference of a gradient"]
    assert difference["SDPA, dense mask, expanded heads"] < 1e-4
    assert difference["SDPA causal, no documents"] > 1  # what the comparison would find
    assert set(step["ratios"]) == {"SDPA, dense mask, expanded heads / frisket"}  # of the same function alone


@pytest.mark.exhaustive
def test_gpu_list_rows_all_run_in_the_interpreter():
    jobs = gpu_order.ordered(DRY)
    found = measured(*jobs, rounds=1)
    assert len(found) == len(jobs)
    assert not any(gpu.failures(row) for row in found)


def test_valuable_gpu_rows_come_first():
    jobs = gpu_order.ordered(FULL)
    kinds = (
        "smoke: versions", "speed: forward: causal, D 128, GQA 4", "speed: backward: 12 documents, D 128, GQA 4",
        "right: cudnn, causal, bfloat16, shared heads", "right: cudnn, causal, bfloat16, shared heads, D 192",
        "speed: backward: causal, D 192", "speed: forward: causal, D 192/128", "speed: backward: causal, D 96",
        "speed: backward: causal, D 512", "orders: dilated window", "serving: 1 queries, int8, one piece",
        "serving: MLA 576/512, 128 heads", "graphs: forward and backward", "steps: eager",
        "right: flash, causal, bfloat16",
    )  # fmt: skip
    places = [[f"{part}: {row}" for part, row in jobs].index(kind) for kind in kinds]
    assert places == sorted(places)
    assert len(set(jobs)) == len(jobs)
    for part, pattern in gpu_order.ORDER:
        assert any(re.fullmatch(pattern, name) for name in PARTS[part].rows(FULL)), (part, pattern)


def test_grouped_heads_are_drawn_as_a_row_says():
    class Drawn(Exception):  # noqa: N818
        pass

    shapes = []

    def drawn(*sizes, **more):
        shapes.append(sizes[:5] + sizes[6:])
        raise Drawn

    def shape(sizes, length):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu_contests, "drawn", drawn)
            with pytest.raises(Drawn):
                gpu_contests.Contestants("causal", sizes, length, replace(FULL, device="cpu"), 1)
        return shapes[-1]

    # batch, heads, queries, keys, head size, key heads, head size of values
    assert shape("128, GQA 4", 4096) == (4, 32, 4096, 4096, 128, 8, 128)
    assert shape("64, GQA 8", 16384) == (1, 32, 16384, 16384, 64, 4, 64)
    assert shape("192/128", 8192) == (4, 10, 8192, 8192, 192, 10, 128)


# -- what is kept -----------------------------------------------------------------------------------------

STUB = """
import json, pathlib, sys, time
lines, then = json.loads((pathlib.Path(__file__).parent / "rows.json").read_text())[sys.argv[3]]
print("a library prints this", flush=True)
if then == "never ready":
    time.sleep(60)
print("== ready ==", flush=True)
sys.stdin.readline()
for line in lines:
    print(json.dumps(line), flush=True)
if then == "hangs":
    time.sleep(60)
if then == "breaks":
    sys.exit("a kernel failed")
print("== lacks ==" + then, flush=True)
"""
JOBS = [("smoke", "versions"), ("graphs", "breaks"), ("graphs", "hangs"), ("speed", "half"), ("speed", "whole")]


def row(**ms):
    return {"figures": {"ms": ms}}


def rows(**lengths):
    return {"rows": {name.removeprefix("n"): each for name, each in lengths.items()}}


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """`stub({row: (lines of results, what it lacks)})`: rows are processes that print these."""
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as --dry does, which leaves it
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "stub.py"))
    monkeypatch.setattr(gpu, "ordered", lambda scale: JOBS)
    monkeypatch.setattr(gpu, "device", lambda: H100)
    monkeypatch.setitem(PARTS, "graphs", replace(PARTS["graphs"], limit=1))
    return lambda of: (tmp_path / "rows.json").write_text(json.dumps(of))


def run(folder, *more):
    assert gpu.main(["--dry", "--into", str(folder), "--workers", "1", *more]) in (0, 1)
    written = json.loads((folder / "gpu.json").read_text())
    schema.check(written)
    return written["parts"]


def test_gpu_list_resumes_where_it_stopped(tmp_path, stub, capsys):
    first = rows(n48=row(frisket=1.0), n96=row(frisket=2.0))
    stub({
        "versions": ([row(s=1.0)], ""), "breaks": ([], "breaks"), "hangs": ([rows(n48=row(replay=1.0))], "hangs"),
        "half": ([rows(n48=row(frisket=1.0)), first], "rounds after 1 of 2; flex"),
        "whole": ([rows(n48=row(frisket=9.0)), rows(n48=row(frisket=3.0))], ""),
    })  # fmt: skip
    parts = run(tmp_path)
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if not line.startswith(" ")] == [
        "versions", "breaks", "hangs", "hangs", "half", "half", "whole", "3 rows are left: run this command again",
    ]  # fmt: skip
    assert "breaks\n    UNFINISHED\n    failed: a kernel failed\n" in said
    assert parts["speed"]["rows"]["whole"]["rows"] == {"48": row(frisket=3.0)}
    assert parts["speed"]["rows"]["half"]["rows"] == first["rows"]
    assert parts["speed"]["notes"] == {"half": "rounds after 1 of 2; flex"}
    assert parts["graphs"]["rows"]["hangs"]["rows"] == {"48": row(replay=1.0)}
    assert parts["graphs"]["notes"]["hangs"].startswith("failed: stopped: no answer in 1 s")
    assert parts["speed"]["rows"]["whole"]["run"].items() >= H100.items()

    again = {
        "half": ([rows(n48=row(frisket=5.0))], "96 tokens"), "breaks": ([row(s=2.0)], ""), "hangs": ([row(s=3.0)], ""),
    }  # fmt: skip
    stub(again)
    parts = run(tmp_path)
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if not line.startswith(" ")] == [
        "half", "half", "breaks", "hangs", "1 rows are left: run this command again",
    ]  # fmt: skip
    assert parts["speed"]["rows"]["half"]["rows"] == {"48": row(frisket=5.0), "96": row(frisket=2.0)}
    assert "notes" not in parts["graphs"]

    stub({"half": ([rows(n48=row(frisket=6.0))], "")})
    parts = run(tmp_path)
    assert parts["speed"]["rows"]["half"]["rows"] == {"48": row(frisket=6.0)}
    assert gpu.main(["--dry", "--into", str(tmp_path)]) == 0
    assert gpu.main(["left", "--dry", "--only", "speed: half", "--into", str(tmp_path)]) == 0
    assert "in the order of their value: 0 of 1 rows are left\n" in capsys.readouterr().out


def test_end_of_the_minutes_fails_no_gpu_row(tmp_path, stub, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "GRACE", 0.1)
    monkeypatch.setattr(gpu, "ordered", lambda scale: [("speed", "half"), ("speed", "whole"), ("steps", "late")])
    stub({"half": ([rows(n48=row(frisket=1.0))], "hangs"), "whole": ([], "hangs"), "late": ([], "")})
    parts = run(tmp_path, "--minutes", "0.03", "--workers", "2")
    assert parts["speed"]["rows"].keys() == {"half"}
    assert parts["speed"]["notes"] == {"half": "what was to follow when the minutes were over"}
    assert "3 rows are left" in capsys.readouterr().out


def test_a_row_that_hangs_ends_no_other_row_of_its_group(tmp_path, stub, monkeypatch):
    monkeypatch.setattr(gpu, "ordered", lambda scale: [("graphs", "hangs"), ("graphs", "whole")])
    stub({"hangs": ([], "never ready"), "whole": ([row(frisket=1.0)], "")})
    part = run(tmp_path)["graphs"]
    assert part["rows"].keys() == {"whole"}
    assert part["notes"] == {"hangs": "failed: stopped: no answer in 1 s"}


def test_rows_of_another_gpu_have_a_file_of_their_own(tmp_path, stub, monkeypatch):
    stub(dict.fromkeys(("versions", "breaks", "hangs", "half", "whole"), ([row(frisket=1.0)], "")))
    run(tmp_path)
    before = (tmp_path / "gpu.json").read_bytes()
    monkeypatch.setattr(gpu, "device", lambda: H200)
    run(tmp_path)
    assert (tmp_path / "gpu.json").read_bytes() == before
    parts = json.loads((tmp_path / "gpu-NVIDIA-H200.json").read_text())["parts"]
    assert {each["run"]["gpu"] for part in parts.values() for each in part["rows"].values()} == {"NVIDIA H200"}


def test_unfinished_gpu_row_merges_with_its_own_machine(tmp_path):
    """So that no ratio or figure of a row is of two machines."""
    half = rows(n48=row(frisket=1.0))
    for torch_version in ("2.11.0", "2.12.0"):
        results = Results(tmp_path, {**MACHINE, **H100, "torch": torch_version}, DRY)
        results.add("speed", "a", half if torch_version == "2.11.0" else rows(n96=row(frisket=2.0)), "more")
    kept = json.loads((tmp_path / "gpu.json").read_text())["parts"]["speed"]["rows"]["a"]
    assert kept["rows"] == {"96": row(frisket=2.0)}
    assert kept["run"] == {"date": "2026-11-28", "rounds": 2, **H100, "torch": "2.12.0"}


def test_smoke_is_of_the_day_and_other_rows_are_of_the_versions(tmp_path):
    results = Results(tmp_path, {**MACHINE, **H100}, DRY)
    for part in ("smoke", "speed"):
        results.add(part, "a", row(s=1.0), "")
    for change, done in (({}, [True, True]), ({"date": "2026-11-29"}, [False, True]), ({"triton": "3.9"}, [False] * 2)):
        now = Results(tmp_path, {**MACHINE, **H100, **change}, DRY)
        assert [now.done(part, "a") for part in ("smoke", "speed")] == done
    results.add("speed", "a", None, "failed: it hung")
    assert results.parts["speed"]["rows"]["a"]["figures"] == {"ms": {"s": 1.0}}
    assert not results.done("speed", "a")
    assert results.failed("speed", "a")


def test_after_the_deadline_a_row_begins_nothing_more():
    late = replace(DRY, deadline=Deadline(0))
    entrants = Entrants(late)
    for name in ("frisket", "flex"):
        entrants.enter(name, lambda: lambda: torch.zeros(1))
    assert [*entrants.calls] == ["frisket"]
    found = [*gpu_scale.one_after_another(
        {n: lambda: gpu_scale.watched(entrants.calls, late, lambda t: row(n=len(t["frisket"]))) for n in "ab"}, late
    )]  # fmt: skip
    assert found == [{"rows": {"a": row(n=1)}}]
    assert late.deadline.left_out == ["flex", "rounds after 1 of 2", "b"]
    assert math.inf == DRY.deadline.at


def test_absent_contestants_are_noted_wrong_ones_are_errors():
    entrants = Entrants(DRY)
    entrants.enter("frisket", lambda: lambda: torch.ones(3))
    entrants.enter("missing", lambda: [].pop)
    assert entrants.notes == {"missing": "IndexError: pop from empty list"}
    with pytest.raises(AssertionError, match="results differ by 1, the largest is 1"):
        entrants.enter("wrong", lambda: lambda: torch.zeros(3))
    with pytest.raises(IndexError):
        Entrants(DRY).enter("frisket", lambda: [].pop)


# -- clocks -----------------------------------------------------------------------------------------------


class Library:
    """NVML with one GPU."""

    def nvmlInit_v2(self):  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):  # noqa: N802
        handle._obj.value = 7
        return 0 if uuid == b"GPU-1-2" else 6

    def nvmlDeviceGetClockInfo(self, handle, clock, out):  # noqa: N802
        out._obj.value = {1: 1755}[clock]
        return 0

    def nvmlDeviceGetPowerUsage(self, handle, out):  # noqa: N802
        out._obj.value = 655500
        return 0

    def nvmlDeviceGetTemperature(self, handle, sensor, out):  # noqa: N802
        out._obj.value = {0: 61}[sensor]
        return 0


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    gpu_sensors.sensor.cache_clear()
    yield
    gpu_sensors.sensor.cache_clear()


def no_library(name):
    raise OSError(f"{name} is missing")


def smi(command, **more):
    assert command[:2] == ["nvidia-smi", "--id=GPU-1-2"]
    return SimpleNamespace(stdout="1980, 350.25, 48\n")


def no_smi(command, **more):
    raise FileNotFoundError(command[0])


@pytest.mark.usefixtures("card")
def test_clocks_are_read_by_nvml(monkeypatch):
    calls = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    assert gpu_sensors.reading(lambda: calls.append("a call")) == (1755, 655.5, 61)
    assert gpu_sensors.sensor()[1] == "NVML"
    assert calls == ["a call"]


@pytest.mark.usefixtures("card")
def test_clocks_are_read_by_nvidia_smi_or_not_at_all(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    monkeypatch.setattr(subprocess, "run", smi)
    assert gpu_sensors.reading(lambda: None) == (1980, 350.25, 48)
    assert gpu_sensors.sensor()[1] == "nvidia-smi"
    monkeypatch.setattr(subprocess, "run", no_smi)
    assert gpu_sensors.reading(lambda: None) is None

    gpu_sensors.sensor.cache_clear()
    want = "NVML: OSError: libnvidia-ml.so.1 is missing; nvidia-smi: FileNotFoundError: nvidia-smi"
    assert gpu_sensors.sensor() == (None, want)
    assert gpu_sensors.reading(no_library) is None  # calls nothing
    gpu_sensors.sensor.cache_clear()
    monkeypatch.setattr(gpu_sensors, "seconds", lambda read: 1.5)
    assert gpu_sensors.sensor()[1].endswith("; nvidia-smi: a reading takes 1.5 s")


def test_rounds_with_a_slower_clock_are_marked(monkeypatch):
    read = iter([(1980, 600.0, 50), (1410, 700.0, 61), (1965, 690.0, 60)])
    monkeypatch.setattr(gpu_sensors, "reading", lambda call: next(read))
    scale = replace(DRY, rounds=3)
    *_, last = gpu_scale.watched({"a": lambda: None}, scale, lambda t: row(a=1.0), {"flex": "not installed"})
    assert last["rounds"] == {"SM MHz": [1980, 1410, 1965], "W": [600.0, 700.0, 690.0], "C": [50, 61, 60]}
    assert last["notes"] == {"flex": "not installed", "slower clock": "in rounds 2, below 95% of 1980 MHz"}
    monkeypatch.setattr(gpu_sensors, "reading", lambda call: None)
    *_, last = gpu_scale.watched({"a": lambda: None}, scale, lambda t: row(a=1.0))
    assert last == row(a=1.0)
