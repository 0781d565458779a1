"""benchmarks/gpu.py runs without a GPU, at a few dozen tokens in Triton's interpreter: each part, and the way rows
are measured in processes of their own, kept and resumed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROWS = """
import json, sys
from gpu_parts import PARTS
from gpu_scale import DRY
for part, row in json.loads(sys.argv[1]):
    assert row in PARTS[part].rows(DRY), (row, [*PARTS[part].rows(DRY)])
    print(json.dumps(PARTS[part].prepare(row, DRY)()))
"""


def python(*arguments: str) -> str:
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, cwd=BENCHMARKS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def measured(*rows: tuple[str, str]) -> list[dict]:
    return [json.loads(line) for line in python("-c", ROWS, json.dumps(rows)).splitlines()]


@pytest.mark.matrix
def test_every_part_that_runs_in_its_own_process():
    forward, backward, decode, layout, tune = measured(
        ("forward", "sinks, window 1024, D 16"), ("backward", "ALiBi, causal, D 16"), ("decode", "causal, batch 1"),
        ("layout", "documents, 512 tokens"), ("tune", "dkv, causal, D 16"),
    )  # fmt: skip
    found = forward["rows"]["48"]["figures"]
    assert set(found["tflops"]) == {"frisket", "flex", "dense"}
    pairs, took = 48 * 49 / 2, found["ms"]["frisket"] / 1e3
    assert found["tflops"]["frisket"] == pytest.approx(4 * 2 * 16 * pairs / took / 1e12)  # 2 heads of 16
    assert set(backward["rows"]["48"]["ratios"]) == {"dense / frisket"}
    assert "FlexAttention does not support backward on CPU" in backward["rows"]["48"]["notes"]["flex"]
    assert set(decode["figures"]["share of bandwidth"]) == {"frisket", "flex", "SDPA"}
    assert layout["notes"]["synchronizes"] is False
    assert set(tune["figures"]["ms"]) == {"as chosen", "16 x 16, 4 warps, 2 stages"}


@pytest.mark.matrix
def test_every_part_of_jax():
    forward, backward, window, correct = measured(
        ("jax-forward", "window 1024, D 16"), ("jax-backward", "causal, D 16"), ("jax-window", "window 1024, D 16"),
        ("jax-correctness", "triton, forward, float32"),
    )  # fmt: skip
    assert set(forward["rows"]["48"]["figures"]["tflops"]) == {"triton", "xla"}
    found = backward["rows"]["48"]["figures"]
    pairs, took = 48 * 49 / 2, found["ms"]["triton"] / 1e3
    assert found["tflops"]["triton"] == pytest.approx(10 * 2 * 16 * pairs / took / 1e12)  # 2 heads of 16
    assert set(window["rows"]) == {"48", "96", "spread"}
    assert correct["figures"]["cases"] == {"passed": 2, "refused": 0, "failed": 0}


@pytest.mark.matrix
def test_rows_are_kept_and_resumed(tmp_path):
    command = ["forward", "--dry", "--only", "full", "--into", str(tmp_path)]
    twice = f"from gpu import main\nfor _ in range(2): print('status', main({command}))"
    first, again = python("-c", twice).split("status 0\n")[:2]
    assert first.startswith("full, D 16\n    48\n")
    assert again == ""
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"]["forward"]
    assert found["machine"]["gpu"] == "none: Triton's interpreter"
    assert list(found["rows"]) == ["full, D 16"]


@pytest.mark.slow
def test_parts_that_start_others():
    first, correct = measured(("first", "frisket, with gradients"), ("correctness", "triton_interpreted.py"))
    assert first["figures"]["s"]["cold"] > 0
    assert correct["figures"]["cases"]["passed"] > 0
    assert correct["figures"]["cases"]["failed"] == 0
