"""benchmarks/gpu.py runs without a GPU, at a few dozen tokens in Triton's interpreter: each part, and the way rows
are measured in processes of their own, kept and resumed."""

import json
import signal

import cases
import gpu
import gpu_order
import gpu_profile
import gpu_right
import pytest
import torch
from support.triton.gpu_rows import measured, python

STAND_INS = """
import sys
from dataclasses import replace
sys.path.insert(0, "../tests")
import pytest
import checkout
from frisket.runtime.backends.base import RECORDS, register
from support.flash import engine
engine.install(pytest.MonkeyPatch())
register(replace(
    RECORDS["cudnn"], reason=lambda framework=None: "", platforms=("cuda", "cpu"), features={},
    engine=RECORDS["sdpa"].engine, executors=RECORDS["sdpa"].executors,
))
of_triton = {n: getattr(RECORDS["triton"], n) for n in ("executors", "module", "platforms", "interpreter")}
register(replace(RECORDS["gluon"], reason=lambda framework=None: "", instead="", **of_triton))
"""


@pytest.mark.exhaustive
def test_gpu_benchmark_parts_measure_in_separate_processes():
    forward, backward, strided, decode, serving, shared, chunk, layout, tune, right, profile = measured(
        ("speed", "forward: sinks, window 1024, D 16"), ("speed", "backward: ALiBi, causal, D 16"),
        ("speed", "backward: causal, D 64, transposed"), ("speed", "decode: causal, batch 1"),
        ("serving", "4 queries, int8, pages of 64"), ("serving", "shared prefix, int8"),
        ("serving", "chunk of 2048, pages of 16"),
        ("layout", "documents, 512 tokens"),
        ("tune", "dkv, causal, D 16, 2 stages"), ("right", "triton, softcap(c), float32"),
        ("profile", "backward: causal, D 16"),
    )  # fmt: skip
    found = forward["rows"]["48"]["figures"]
    assert set(found["tflops"]) == {"frisket", "flex", "dense"}
    assert "backend 'sdpa' does not run this call" in forward["rows"]["48"]["notes"]["frisket, sdpa"]
    pairs, took = 48 * 49 / 2, found["ms"]["frisket"] / 1e3
    assert found["tflops"]["frisket"] == pytest.approx(4 * 2 * 16 * pairs / took / 1e12)  # 2 heads of 16
    assert set(backward["rows"]["48"]["ratios"]) == {"dense / frisket"}
    assert {"SDPA flash", "dense"} <= set(strided["rows"]["48"]["figures"]["ms"])
    assert "FlexAttention does not support backward on CPU" in backward["rows"]["48"]["notes"]["flex"]
    assert set(decode["figures"]["share of bandwidth"]) == {"frisket", "flex", "SDPA"}
    assert set(serving["rows"]["1 x 96"]["figures"]["share of bandwidth"]) == {"frisket"}
    assert set(shared["rows"]["2 x 96"]["figures"]["share of bandwidth"]) == {"one call", "cascade"}
    assert set(chunk["rows"]["1 x 96"]["figures"]["share of bandwidth"]) == {"frisket, triton"}  # of 16 bits: gluon
    assert layout["notes"]["synchronizes"] is False
    assert set(tune["figures"]["ms"]) == {"as chosen", "16 x 16, 4 warps, 2 stages"}
    assert set(right["rows"]["16"]["figures"]["error"]) == {"out", "lse", "dq", "dk", "dv"}
    assert right["rows"]["count"]["figures"]["cases"] == {"passed": 5, "failed": 0}
    assert profile["rows"]["Nsight Compute"]["notes"] or profile["rows"]


@pytest.mark.exhaustive
def test_rows_of_engines():
    """Right rows of each engine (lse, gradients of its own and of generated kernels) and its speed, and right rows of
    Gluon, which has no gradients of its own, by stand-ins."""
    *right, mask, score, forward, backward = measured(
        ("right", f"sdpa, causal, float32{gpu_right.SHARED}"), ("right", "cudnn, causal, float16"),
        ("right", "flash, causal, float16"),
        ("right", "flash, causal_document(off), float16"), ("right", "flash, softcap(c), float16"),
        ("right", "gluon, causal_document(off), float16"), ("right", "gluon, softcap(c), float16"),
        ("speed", "forward: causal, D 16"), ("speed", "backward: causal, D 16"), before=STAND_INS,
    )  # fmt: skip
    for engine in right:
        assert engine["rows"]["count"]["figures"]["cases"] == {"passed": 8, "failed": 0}
    for gluon in (mask, score):
        assert set(gluon["rows"]["16"]["figures"]["error"]) == {"out", "lse"}
        assert gluon["rows"]["count"]["figures"]["cases"] == {"passed": 2, "failed": 0}
        assert gpu_right.whole(gluon)
    for row in (forward, backward):
        assert {"frisket", "frisket, cudnn", "frisket, sdpa"} <= set(row["rows"]["48"]["figures"]["tflops"])
        assert "takes float16 and bfloat16" in row["rows"]["48"]["notes"]["frisket, flash"]


@pytest.mark.exhaustive
def test_gpu_smoke_lists_versions_and_tries_each_launcher():
    versions, *ways = measured(
        ("smoke", "versions"), ("smoke", "torch, triton, backward"), ("smoke", "torch, triton, table on the device"),
        ("smoke", "jax, triton, forward"),
    )  # fmt: skip
    assert {"python", "torch", "triton", "jax", "driver", "flash-attn-4"} <= set(versions["notes"])
    assert all(way["figures"]["s"]["took"] > 0 for way in ways)


def test_gpu_benchmark_parts_of_the_first_hour_come_first():
    from gpu_parts import PARTS
    from gpu_scale import FULL

    assert [*PARTS][:5] == ["smoke", "right", "tune", "speed", "serving"]
    assert PARTS["smoke"].minutes == 3
    assert all(part.minutes <= 7.5 and part.limit <= 60 * part.minutes for part in PARTS.values())
    assert next(iter(PARTS["tune"].rows(FULL))).startswith("forward, causal, D 128, 3 stages")
    assert any("4 stages" in row for row in PARTS["tune"].rows(FULL))
    assert next(iter(PARTS["speed"].rows(FULL))) == "forward: causal, D 128"
    entries = {*cases.masks(1000), *cases.mods(1000)}
    dtypes = ("bfloat16", "float16")
    wanted = {f"{backend}, {name}, {dtype}" for backend in ("triton", "gluon") for name in entries for dtype in dtypes}
    known = ("full", "causal", "prefix(p)")
    wanted |= {f"{engine}, {name}, {dtype}" for engine in ("sdpa", "cudnn") for name in known for dtype in dtypes}
    more = (*known, "window(w)", "same(t)", "softcap(c)", "alibi")
    wanted |= {f"flash, {name}, bfloat16" for name in entries} | {f"flash, {name}, float16" for name in more}
    engines = [(engine, name, dtype) for engine in ("sdpa", "cudnn", "flash") for name in known for dtype in dtypes]
    wanted |= {f"{', '.join(row)}{gpu_right.SHARED}" for row in engines}
    wanted |= {f"cudnn, {name}, bfloat16{gpu_right.SHARED}, D {dim}" for name in known for dim in (96, 192, 256)}
    assert {*PARTS["right"].rows(FULL)} == wanted
    speed = [*PARTS["speed"].rows(FULL)]
    of_the_issue = [f"forward: {name}, D {dim}" for name in ("window 128", "documents of 512") for dim in (128, 64)]
    assert [row for row in speed if row in of_the_issue] == of_the_issue
    assert max(map(speed.index, of_the_issue)) < speed.index("decode: causal, batch 1")
    assert 32768 in FULL.lengths
    listed = {row for part, row in gpu_order.ordered(FULL) if part == "speed"}
    wanted = {
        f"{way}: {name}" for way in ("forward", "backward") for name in ("full, D 192", "causal, D 128, transposed")
    }
    assert ("first", "frisket, with gradients") in gpu_order.ordered(FULL)
    assert listed >= {*wanted, "backward: causal, D 192", "forward: causal, D 128, GQA 8"}


def test_gpu_benchmark_rows_without_results_come_first(tmp_path, capsys):
    names = ["triton, a, bfloat16", "triton, b, bfloat16", "triton, c, bfloat16", "triton, d, bfloat16"]

    def row(**error):
        return {"rows": {"64": {"figures": {"error": error}}, "count": {"figures": {"cases": {"failed": 0}}}}}

    rows = {names[0]: row(out=0, lse=0), names[1]: row(out=0)}
    results = {"parts": {"right": {"machine": {"gpu": "another"}, "rows": rows}}}
    (tmp_path / "gpu.json").write_text(json.dumps(results))
    parts = gpu.loaded(tmp_path / "gpu.json")
    assert gpu.in_turn("right", names, parts) == [*names[2:], names[1], names[0]]
    assert gpu.lacking("right", names, parts) == [*names[2:], names[1]]
    assert gpu.in_turn("right", names, gpu.loaded(tmp_path / "none.json")) == names
    assert gpu.main(["left", "--only", "right: triton, causal,", "--into", str(tmp_path)]) == 0
    said = "right: 2 of 2 rows are left\n    triton, causal, bfloat16\n    triton, causal, float16\n"
    assert capsys.readouterr().out == said


def test_gpu_page_states_the_rows_that_results_lack():
    """The page says what the results lack. Rows that never ran come before what ran without lse."""
    from gpu_parts import PARTS
    from gpu_scale import FULL

    parts = gpu.loaded(gpu.RESULTS / "gpu.json")
    rows = gpu.lacking("right", PARTS["right"].rows(FULL), parts)
    known = parts["right"]["rows"]
    page = " ".join((gpu.RESULTS.parent / "h100.md").read_text().split())
    left = {True: dict[str, list[str]](), False: dict[str, list[str]]()}  # by whether a row never ran
    for row in rows:
        backend, name, dtype, shared, _ = gpu_right.ROW.fullmatch(row).groups()
        more = shared if shared and backend != "flash" else ""
        left[row not in known].setdefault(f"{backend}, {dtype}{more}", []).append(name)
    never, no_lse = left[True], left[False]
    engines = {f"{n}, {d}{gpu_right.SHARED}" for n in ("sdpa", "cudnn") for d in gpu_right.DTYPES}
    newer = [left[True].pop(f"{n}, {d}") for n in ("triton", "gluon") for d in gpu_right.DTYPES]
    entries = ["gym_sliding_window(w)", "same_by_batch(t, start, m)", "document_by_batch(off)"]
    assert newer == [[*entries, "document_by_batch(off, m)"]] * 4
    assert "- `gym_sliding_window`, `document_by_batch` and `same_by_batch(t, start, m)`, which are newer" in page
    assert never.keys() == {"flash, bfloat16", "flash, float16", *engines}
    assert no_lse.keys() == {"triton, bfloat16"}
    assert f"- the lse of {len(no_lse['triton, bfloat16'])} masks in bfloat16 on Triton" in page
    assert [part for part in PARTS if part not in parts] == ["eight", "orders", "graphs", "steps", "jax-window"]
    files = PARTS["cases"].rows(FULL)
    assert len(set(files) - parts["cases"]["rows"].keys()) == 4
    assert "Four files have not run to their end" in page
    first = [row not in known for row in rows]
    assert first == sorted(first, reverse=True)


def test_a_row_that_hangs_is_stopped():
    from gpu_scale import DRY

    child = gpu.Child("smoke", "versions", DRY)  # it waits for a word that nobody says
    with child.limited(0.2):
        child.process.wait()
    assert child.failure().startswith("stopped: no answer in 0 s")
    assert child.process.returncode == -signal.SIGKILL


def test_a_wrong_result_is_a_failure_of_its_part():
    good = {"rows": {"64": {"figures": {"error": {"out": 0.1}}}, "count": {"figures": {"cases": {"failed": 0}}}}}
    bad = {"rows": {**good["rows"], "count": {"figures": {"cases": {"failed": 1}}}}}
    assert not gpu.failures(good)
    assert gpu.failures(bad)
    nan = torch.tensor([0.0, float("nan")])
    assert gpu_right.error(nan, torch.ones(2)) == float("inf")
    assert gpu_right.error(torch.tensor([1.0, 1.5]), torch.tensor([1.0, 2.0])) == 0.25


def test_counters_are_read_from_what_ncu_writes():
    text = """==PROF== Connected to process 1
"ID","Kernel Name","gpu__time_duration.sum","dram__bytes.sum"
"","","nsecond","byte"
"0","attention_forward","12,345","1,000"
"""
    assert gpu_profile.read(text) == {
        "attention_forward": {"figures": {"count": {"ns": 12345.0, "bytes of memory": 1000.0}}}
    }
    with pytest.raises(ValueError, match="ncu counted nothing: ==ERROR== no permission"):
        gpu_profile.read("==ERROR== no permission")


@pytest.mark.exhaustive
def test_gpu_benchmark_measures_each_part_of_jax():
    forward, backward, window, correct = measured(
        ("jax-forward", "window 1024, D 16"), ("jax-backward", "causal, D 16"), ("jax-window", "window 1024, D 16"),
        ("jax-cases", "triton, forward, float32"),
    )  # fmt: skip
    assert set(forward["rows"]["48"]["figures"]["tflops"]) == {"triton", "xla"}
    found = backward["rows"]["48"]["figures"]
    pairs, took = 48 * 49 / 2, found["ms"]["triton"] / 1e3
    assert found["tflops"]["triton"] == pytest.approx(10 * 2 * 16 * pairs / took / 1e12)  # 2 heads of 16
    assert set(window["rows"]) == {"48", "96", "spread"}
    assert correct["figures"]["cases"] == {"passed": 2, "refused": 0, "failed": 0}


@pytest.mark.exhaustive
def test_rows_are_kept_and_resumed(tmp_path):
    command = ["speed", "--dry", "--only", "forward: full, D 16", "--into", str(tmp_path)]
    twice = f"from gpu import main\nfor _ in range(2): print('status', main({command}))"
    first, again = python("-c", twice).split("status 0\n")[:2]
    assert first.startswith("forward: full, D 16\n    48\n")
    assert again == ""
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"]["speed"]
    assert found["machine"]["gpu"] == "none: Triton's interpreter"
    assert list(found["rows"]) == ["forward: full, D 16"]


def test_queries_of_8_bits_are_compared_and_timed():
    name = "causal, D 32, a scale for 64 tokens"
    correct, speed = measured(("eight", f"right: {name}"), ("eight", f"speed: {name}"))
    error = correct["figures"]["error"]
    assert (
        0 < error["out"] < error["out, by the definition"]
    )  # the reference stands for the kernel, and rounds out alone
    assert correct["figures"]["cases"] == {"passed": 1, "failed": 0}
    assert set(speed["figures"]["tflops"]) == {"frisket", "frisket, bfloat16"}
    assert "1,200 TFLOP/s in FP8" in speed["notes"]["published"]


@pytest.mark.slow
def test_parts_that_start_others():
    case = "lowering/kernels/triton/children/forward_interpreted.py"
    first, correct = measured(("first", "frisket, with gradients"), ("cases", case))
    assert first["figures"]["s"]["cold"] > 0
    assert correct["figures"]["cases"]["passed"] > 0
    assert correct["figures"]["cases"]["failed"] == 0
