"""What the documents say is so."""

import re
from pathlib import Path

import numpy as np
import pytest
import readme
from support.pages import script

from frisket.dsl.operators import BUILT_IN
from frisket.dsl.program import read
from frisket.runtime.machine.settings import VARIABLES
from frisket.runtime.masks.mask import load

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
    *(page for folder in ("docs", "benchmarks", "tests") for page in sorted((ROOT / folder).rglob("*.md"))),
]
EXAMPLES = sorted((ROOT / "examples").glob("*.frisket"))
TABLES = {"doc": np.zeros(512, np.int32), "star": np.zeros(512, bool)}


def test_readme_quick_start_is_two_complete_commands():
    first, tests = readme.commands().values()
    clone, _ = readme.fenced()[0][1].splitlines()
    assert clone == "git clone REPOSITORY_URL frisket && cd frisket"
    for command in (first, tests):
        assert "\n" not in command
        assert command.startswith("python3 -m venv .venv && ")
        assert re.search(r"pip install .* -c constraints\.txt && ", command)
    assert first.endswith("frisket run examples/packed.frisket --tokens README.md docs/*.md CHANGELOG.md")
    assert "[torch,jax,triton]" in first
    assert tests.endswith(" && pytest")
    assert readme.fenced()[0][1].splitlines()[1] == first
    assert readme.fenced()[-1][1].strip() == tests


def test_readme_blocks_run_in_order():
    ran: list[str] = []
    readme.run(shell=ran.append)
    assert ran == ["pip install -e '.[transformers]' -c constraints.txt\n"]
    assert len(readme.blocks("python")) == 3


@pytest.mark.parametrize("block", ["python\n>>> 1 + 1\n3\n", "python\nx = 1\n", "text\nx\n"])
def test_a_readme_block_that_is_not_so_is_found(tmp_path, block):
    page = tmp_path / "README.md"
    page.write_text(f"```bash\nfirst\n```\n\n```{block}```\n\n```bash\ntests\n```\n")
    with pytest.raises(AssertionError):
        readme.run(page)


def test_settings_are_listed():
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(FRISKET_\w+)` \| (.*) \|$", page, re.M)
    assert listed == [(v.name, v.meaning) for v in VARIABLES]


def test_pictures_of_readme_are_up_to_date():
    pictures, text = script("pictures"), (ROOT / "README.md").read_text(encoding="utf-8")
    drawn = pictures.drawn()
    for name, words in pictures.badges().items():
        assert f"![{name} {words}](docs/assets/badge-{name.lower()}.svg)" in text
    assert {*drawn} == set(re.findall(r"docs/assets/([\w-]+\.svg)", text))
    assert len(drawn) == 10
    for name, picture in drawn.items():
        assert picture == (ROOT / "docs" / "assets" / name).read_text(encoding="utf-8"), "run: python docs/pictures.py"


def test_pictures_of_readme_are_dark_in_dark_mode():
    pictures = script("pictures")
    light, dark = (pictures.h100(palette) for palette in pictures.THEMES.values())
    assert re.sub("#[0-9a-f]{6}", "", light) == re.sub("#[0-9a-f]{6}", "", dark)
    for name in vars(pictures.LIGHT).values():
        assert name not in dark
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    sources = re.findall(
        r'<source media="\(prefers-color-scheme: dark\)" srcset="(.*)-dark\.svg">\n<img src="(.*)\.svg"', text
    )
    assert len(sources) == 3
    assert all(dark == light for dark, light in sources)


def test_charts_of_readme_show_the_results():
    pictures = script("pictures")
    ms = pictures.json.loads(pictures.RESULTS.read_text())["parts"]["forward"]["rows"]["causal"]["figures"]["ms"]
    assert f">{ms['native']:.0f} ms&#160;&#160;frisket, C++ kernel<" in pictures.chart(pictures.LIGHT)
    rows = pictures.json.loads(pictures.H100.read_text())["parts"]["speed"]["rows"]
    drawn = pictures.h100(pictures.LIGHT)
    rates = [rows[f"{way}: causal, D 128"]["rows"]["8192"]["figures"]["tflops"] for way in ("forward", "backward")]
    for rate in (x[name] for x in rates for name in ("frisket", "flex", "SDPA cudnn")):
        assert re.search(rf'width="{240 * rate / 700:.1f}" .*\n.*>{rate:.0f}</text>', drawn), rate


@pytest.mark.exhaustive
def test_pictures_of_block_sparsity_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    script("pictures").draw(tmp_path)
    drawn = {p.name for p in tmp_path.rglob("*.*")}
    page = (ROOT / "docs" / "block-sparsity.md").read_text(encoding="utf-8")
    shown = re.findall(r"\(assets/(.*?)\)", page)
    assert {*shown, *script("pictures").drawn(), "long-run.svg"} == drawn
    assert len(shown) == 5


def test_tour_names_each_source_file_once():
    named = re.findall(r"^- `([^`]+)`", (ROOT / "docs" / "tour.md").read_text(encoding="utf-8"), re.M)
    files = [f for room in ("grammar", "dsl", "lowering", "runtime") for f in (ROOT / room).rglob("*")]
    kinds = (".py", ".lark", ".frisket", ".html", ".js", ".hpp", ".cpp", ".tpl")
    kept = [f for f in files if f.suffix in kinds and f.stat().st_size]
    assert sorted(named) == sorted(str(f.relative_to(ROOT)) for f in kept)


def test_versions_in_the_changelog_begin_with_wrong_results():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    _, *versions, first = re.split(r"^## \[", text, flags=re.M)
    for version in versions:
        headings = re.findall(r"^### (.*)$", version, re.M)
        if version.startswith("Unreleased") and not headings:  # nothing has changed since the release
            continue
        assert headings[: headings.index("Added")] in (["Wrong results", "Memory safety"], [])
        assert "Wrong results" in headings or "### Fixed" not in version
    assert first.startswith("0.1.0]")
    assert max(len(paragraph.split()) for paragraph in text.split("\n") if not paragraph.startswith("- ")) < 79


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)\)", prose):
        assert re.match(r"https?://", target) or (page.parent / target).exists(), target


def test_tasks_lead_to_headings():
    """`How do I …?` has forty lines, each with a link, and each link leads to a heading."""
    text = (ROOT / "docs" / "how-do-i.md").read_text(encoding="utf-8")
    lines = re.findall(r"^- .*", text, re.M)
    assert len(lines) == 40
    assert all("](" in line for line in lines)
    for page, anchor in re.findall(r"\]\(([\w-]+\.md)#([^)]+)\)", text):
        target = (ROOT / "docs" / page).read_text(encoding="utf-8")
        slugs = [re.sub(r"[^\w\s-]", "", x).strip().lower() for x in re.findall(r"^#+ (.*)$", target, re.M)]
        assert anchor in [re.sub(r"[-\s]+", "-", slug) for slug in slugs], (page, anchor)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_lay_out(path):
    parsed = read(path.read_text(encoding="utf-8"), name=path.name)
    program = load(path, **{name: TABLES[name] for name in parsed.declared if name in TABLES})
    assert program.mask.layout(512, 512).visible_pairs > 0


def test_language_page_is_up_to_date():
    language = script("language")
    assert language.page() == (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
    assert len(language.MARK.findall(language.page())) == 5
    assert language.MEANINGS.keys() == BUILT_IN
