"""The model beside an H100: the same work, the same tiles, and how far its figures may be off."""

import json
import statistics
from itertools import product
from pathlib import Path

import pytest
from gpu_sim import full, measured
from gpu_sim.ours import KERNELS, Tile

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu-model.json"
BANDS = {
    "full": (0.8, 1),
    "window 128": (1.1, 1.35),
    "window 128, D 64": (1.02, 1.2),
    "": (0.75, 1.2),
}  # model / measured

OFF = {  # steps that the model takes for slower or faster than the H100 is, by more than all others
    "4 queries, bfloat16, one piece": (0.94, 1.08),
    "4 queries, int8, pages of 64": (0.78, 1.55),
    "4 queries, float8_e4m3fn, pages of 64": (0.78, 1.55),
}


def known():
    for name, row in measured.measured("speed").items():
        direction, _, rest = name.partition(": ")
        mask, _, dim = rest.partition(", D ")
        if mask in measured.MASKS and int(dim) in measured.DIMS:
            yield name, direction, mask, int(dim), row["rows"]


@pytest.fixture(scope="module")
def rows():
    return json.loads(RESULTS.read_text())["parts"]["measured, Triton 3.6"]["rows"]


def test_model_computes_the_work_that_was_timed():
    for _, direction, mask, dim, lengths in known():
        for length, row in lengths.items():
            work = row["figures"]["tflops"]["frisket"] * row["figures"]["ms"]["frisket"] * 1e9
            asked = measured.case(mask, dim, int(length))
            assert (4 if direction == "forward" else 10) * dim * asked.pairs == pytest.approx(work, rel=1e-9)


def test_rates_beside_measured_ones(rows):
    assert {n for n in rows if ": " in n and "tiles" not in n} == {n for n, *_ in known()}, "run: gpu_model.py measured"
    for name, _, mask, dim, lengths in known():
        low, high = BANDS.get(f"{mask}, D {dim}") or BANDS.get(mask, BANDS[""])
        for length, row in lengths.items():
            found = rows[name]["rows"][length]
            for who in ("frisket", "flex"):
                assert found["figures"][measured.RATE][f"{who}, measured"] == round(measured.rate(who, row))
                assert low <= found["ratios"][f"{who}: {measured.PAIR}"][0] <= high, (name, length)


def test_orders_of_tiles(rows):
    """The tile that the model puts first is the fastest but for a few percent, and a seventh at most."""
    found = [rows[measured.tiles_of(*x)] for x in product(KERNELS, measured.TUNED, (64, 128))]
    lost = [x["ratios"]["the model's first / the fastest"][0] for x in found]
    assert 1 == min(lost) <= statistics.median(lost) < 1.01
    assert max(lost) < 1.15
    assert statistics.median(x["figures"][measured.ORDER]["all tiles"] for x in found) > 0.9


def test_steps_of_serving(rows):
    """Long caches of 16 bits are read at the rate of the memory, which is the same in both; a step of 15 us differs by
    what two launches take."""
    for name, row in measured.measured("serving").items():
        for size, real in row["rows"].items():
            found = rows[measured.step_of(name)]["rows"][size]
            us = real["figures"]["us"]["frisket"]
            assert found["figures"][measured.WAITED]["frisket, measured"] == round(us, 1), "run: gpu_model.py measured"
            low, high = (0.94, 1.06) if "bfloat16" in name and us > 100 else (0.8, 1.55)
            low, high = OFF.get(name, (low, high)) if us > 100 else (low, high)
            assert low <= found["ratios"][f"frisket: {measured.PAIR}"][0] <= high, (name, size)


def test_our_rate_is_that_of_tritons_kernels():
    both = {"frisket": 600.0, "frisket, triton": 500.0, "flex": 400.0}
    assert [measured.rate(w, {"figures": {"tflops": both}}) for w in ("frisket", "flex")] == [500, 400]
    del both["frisket, triton"]
    assert measured.rate("frisket", {"figures": {"tflops": both}}) == 600


def test_labels_of_tiles():
    assert measured.candidate("128 x 64, 8 warps, 3 stages", 1) == Tile(128, 64, 8, 3, 1)
    assert measured.candidate("as chosen", 1) is None


def test_correlations_of_ranks():
    assert measured.spearman([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1)
    assert measured.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert measured.spearman([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)
    assert measured.spearman([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)


def test_documents_are_those_of_the_measurement():
    found = full.layout(measured.DRAWN, 2048, (128, 128))
    assert found.visible_pairs < full.layout("causal", 2048, (128, 128)).visible_pairs / 8
