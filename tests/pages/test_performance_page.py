"""docs/performance.md says what benchmarks/results hold, losses among it."""

import re

import pytest
from support.pages import DOCS
from support.scripts import script

PAGE = script("performance")


def test_the_page_is_what_the_script_writes():
    assert (DOCS / "performance.md").read_text(encoding="utf-8") == PAGE.page(), "run: python docs/performance.py"


def test_its_charts(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = dict(PAGE.charts())
    assert set(drawn) == {p.name for p in (DOCS / "performance").iterdir()}
    assert set(re.findall(r"\(performance/([^)]*)\)", PAGE.page())) == set(drawn)
    name, draw = next(iter(drawn.items()))
    draw(tmp_path / name)
    again = (tmp_path / name).read_bytes()
    draw(tmp_path / name)
    assert (tmp_path / name).read_bytes() == again
    assert b"<svg" in again


def test_every_loss_is_at_the_top():
    row = {
        "figures": {"ms": {"native": 2.0, "flex": 1.0}, "s, first call": {"native": 3.0, "peer": 1.0}},
        "ratios": {"flex / native": [0.5, 0.4, 0.6], "flex / library": [0.9, 0.8, 1.1], "native / flex": [0.5]},
        "goals": {"at most": {"ms": {"native": 1.5}}, "at least": {"ratios": {"flex / library": 1.0}}},
    }
    parts = {"forward": {"rows": {"causal": {"rows": {"4,096 tokens": row}}}}}
    said = [line[2:] for line in PAGE.against({"x": parts})]
    assert said == [
        ["flex / native", "0.50 (0.40 to 0.60)", "more than 1"],
        ["flex / library", "0.90 (0.80 to 1.10)", "at least 1"],
        ["ms, native", "2", "at most 1.5"],
        ["first call, native", "3.00 s", "1.00 s, as the peer"],
    ]
    assert "**slower**" in PAGE.marked(row, "flex / native")
    assert "**goal: at least 1**" in PAGE.marked(row, "flex / library")


def test_the_gpu_that_was_measured_is_named():
    assert "Never measured: Blackwell, GPUs of AMD, and TPUs" in PAGE.page()
    machines = {t.file: [x["machine"] for x in PAGE.loaded(t).values()] for t in PAGE.topics()}
    assert {file for file, found in machines.items() if any("gpu" in m for m in found)} == {"gpu"}
    assert {m["gpu"] for m in machines["gpu"]} == {"NVIDIA H100 80GB HBM3"}  # else say what has run, and where


def test_a_part_of_the_gpu_may_be_missing():
    (topic,) = (t for t in PAGE.topics() if t.file == "gpu")
    parts = PAGE.loaded(topic)
    for name, part in parts.items():
        alone = "\n".join(topic.show({name: part}))
        assert alone.startswith("NVIDIA H100")
        assert alone.count("\n") > 2
