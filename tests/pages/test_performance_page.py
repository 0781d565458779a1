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


def test_what_was_never_measured_is_said():
    assert "Never measured: GPUs and TPUs" in PAGE.page()
    assert not any("gpu" in x["machine"] for t in PAGE.topics() for x in PAGE.loaded(t).values())  # else say so no more
