"""The parts of README and of the site's first page that are written from results say what the results hold."""

import json
import re

import pytest
from support.pages import script

PAGES = script("first_pages")
README, INDEX = (path.read_text(encoding="utf-8") for path in (PAGES.README, PAGES.INDEX))


def test_first_pages_are_up_to_date():
    assert PAGES.readme(README) == README, "run: python docs/first_pages.py"
    assert PAGES.index(INDEX, README) == INDEX, "run: python docs/first_pages.py"
    assert len(PAGES.BLOCK.findall(README)) == 1
    assert [titles for _, titles, _ in PAGES.COPY.findall(INDEX)] == ["the top", "When not to use it, Other installs"]


def test_first_page_of_the_site_is_that_of_readme():
    """The same words down to the comparison, and the same figures."""
    top = README.removeprefix("# frisket\n\n").partition(PAGES.TOP_ENDS)[0]
    assert re.findall(r"^## (.*)$", top, re.M) == [
        "Install", "First minute", "On an H100", "On a CPU", "Which attention to use",
    ]  # fmt: skip
    site = PAGES.on_site(top)
    assert INDEX.startswith("# frisket\n\n<!-- the top")
    assert site in INDEX
    assert "<picture>" not in site
    assert len(re.findall(r"svg#only-(?:light|dark)\)$", site, re.M)) == 6
    assert "](docs/" not in site
    session = README.partition("```python\n")[2].partition("```")[0]
    assert len(session.splitlines()) <= 12


def test_speedups_on_an_h100_are_counted():
    assert PAGES.counted(PAGES.FLEX, [[1.2, 1.1, 1.3], [0.9, 0.8, 1.1]]) == "0.90 to 1.20, slower in 0 of 2 rows"
    assert PAGES.counted(PAGES.CUDNN, [[1.2, 1.1, 1.3], [0.9, 0.8, 0.95]]) == "0.90 to 1.20, **slower in 1 of 2 rows**"


def test_losses_of_readme_are_those_of_the_results():
    """The words between the figures."""

    def middles(way, rows, pair):
        return [x[0] for x in PAGES.speedups(way, rows, pair)]

    forward = {size: middles("forward", PAGES.OF_SIZE.format(size), PAGES.CUDNN) for size in (64, 128, 192, 256)}
    backward = middles("backward", PAGES.PLAIN, PAGES.CUDNN)
    assert max(backward) < 1
    assert max(*forward[64], *forward[192]) < 1 < max(forward[128]) < max(forward[256])
    assert sum(map(len, forward.values())) == len(middles("forward", PAGES.PLAIN, PAGES.CUDNN))
    names = {row.partition(": ")[2].rpartition(", D ")[0] for row in PAGES.loaded("gpu")["speed"]["rows"]}
    assert len({x for x in names if x}) == 10  # masks and score mods


def test_works_inside_names_packages_with_a_result(tmp_path, monkeypatch):
    def job(name, versions, **outcome):
        (tmp_path / name).mkdir(exist_ok=True)
        result = {"date": "2026-11-29", "versions": {"python": "3.11.9", **versions}, "failures": [], **outcome}
        (tmp_path / name / "result.json").write_text(json.dumps(result), encoding="utf-8")

    monkeypatch.setattr(PAGES, "JOBS", tmp_path)
    ours = f"[transformers](docs/transformers.md) {json.loads(PAGES.SWEEP.read_text(encoding='utf-8'))['transformers']}"
    assert list(PAGES.works_inside()) == [ours]
    job("bad", {"trl": "1.16.0"}, passed=3, failures=["job.py::test_sft"])
    job("nothing", {"torchtitan": "0.3.0"}, skipped=2)
    job("operators", {"ejkernel": "0.0.78", "jax": "0.10.2"}, passed=9)
    job("served", {"torch": "2.13.0", "vllm": "0.32.0+cpu"}, passed=12)
    job("two", {"timm": "1.0.22", "x-transformers": "2.11.1"}, passed=2)
    shown = ", ".join(PAGES.works_inside())
    assert re.sub(r"\[([^]]*)\]\(docs/[a-z]*\.md\)", r"\1", shown.removeprefix(f"{ours}, ")) == (
        "vLLM 0.32.0, timm 1.0.22, x-transformers 2.11.1"
    )
    assert "[vLLM](docs/vllm.md) 0.32.0" in shown
    job("new", {"torch": "2.13.0"}, passed=1)
    with pytest.raises(SystemExit, match=r"new/result\.json: add the package that the job is about to PACKAGES"):
        list(PAGES.works_inside())


def test_first_pages_refuse_a_page_without_their_places():
    with pytest.raises(SystemExit, match=r"README\.md has 0 rows `\| works inside \|`"):
        PAGES.readme(README.replace("| works inside |", "| runs inside |"))
    with pytest.raises(SystemExit, match=r"README\.md has no section `## When not to use it`"):
        PAGES.index(INDEX, README.replace("## When not to use it", "## Limits"))
