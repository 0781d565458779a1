"""Every file of benchmarks/results is in the form of runtime/bench/schema.py."""

import json
from pathlib import Path

import pytest

from frisket.runtime.bench import schema

FILES = sorted((Path(__file__).resolve().parents[2] / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_results_are_in_the_one_form(path):
    found = json.loads(path.read_text(encoding="utf-8"))
    schema.check(found)
    for part in found["parts"].values():
        for _, row in schema.leaves(part["rows"]):
            named = sum(len(x) for side in row.get("goals", {}).values() for x in side.values())
            assert len([*schema.goals(row)]) == named  # every goal has its figure
