"""Runs rows of benchmarks/gpu.py without a GPU, in Triton's interpreter and a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
ROWS = """
import json, sys
from dataclasses import replace
from gpu_parts import PARTS
from gpu_scale import DRY
scale = replace(DRY, rounds=int(sys.argv[2]))
for part, row in json.loads(sys.argv[1]):
    assert row in PARTS[part].rows(scale), (row, [*PARTS[part].rows(scale)])
    *_, last = PARTS[part].prepare(row, scale)()
    print(json.dumps(last))
"""


def python(*arguments: str) -> str:
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, cwd=BENCHMARKS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def measured(*rows: tuple[str, str], before: str = "", rounds: int = 2) -> list[dict]:
    """The results of (part, row), after a text of Python has run."""
    return [json.loads(line) for line in python("-c", before + ROWS, json.dumps(rows), str(rounds)).splitlines()]
