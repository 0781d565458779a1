"""Instructions that the mask of a border tile takes for a pair of query and key, counted in what ptxas writes for
sm_90: bounds that a change of the kernels may not pass unseen. A float's selection and one or two comparisons are 2 or
3, the rest is what a tile takes once. The third stage that an H100 chose for medium windows at D128 takes 20 to 30
instructions of a border tile, 0.7 to 1 a pair, for addresses in uniform registers."""

import json
from pathlib import Path

import pytest
from gpu_sim import flex, ours, report

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu-model.json"
MOST = {"causal": 3.25, "prefix": 2.75, "documents": 3.5, "documents, both sides": 3.5, "dilation by 4": 4.0}


def test_a_mask_takes_few_instructions_a_pair():
    assert 1.5 < report.mask_cost("ours", "documents", 64) <= MOST["documents"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", MOST)
def test_mask_classes_take_few_instructions_per_pair(mask, dim):
    assert 1.5 < report.mask_cost("ours", mask, dim) <= MOST[mask]


@pytest.mark.parametrize("version", ["3.6", "3.9"])
def test_mask_cost_results_have_a_row_for_each_class(version):
    rows = json.loads(RESULTS.read_text())["parts"][f"masks, Triton {version}"]["rows"]
    assert list(rows) == list(report.CLASSES)
    assert set(report.CLASSES) <= ours.MASKS.keys() & flex.MASKS.keys()
    for mask, most in MOST.items():
        found = rows[mask]["figures"][report.MASK]
        assert max(found["frisket, D64"], found["frisket, D128"]) <= most
