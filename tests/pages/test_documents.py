"""What the documents say is so."""

import re
from pathlib import Path

import numpy as np
import pytest
import readme
from support.pages import blocks
from support.scripts import script

import frisket as fk
from frisket.dsl.functions import BUILT_IN
from frisket.dsl.program import read
from frisket.runtime.machine.settings import VARIABLES
from frisket.runtime.masks.mask import load

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
EXAMPLES = sorted((ROOT / "examples").glob("*.frisket"))
TABLES = {"doc": np.zeros(512, np.int32), "star": np.zeros(512, bool)}


def test_the_quick_start_is_two_complete_commands():
    first, tests = readme.commands().values()
    for command in (first, tests):
        assert "\n" not in command
        assert command.startswith("python3 -m venv .venv && ")
        assert re.search(r"pip install .* -c constraints\.txt && ", command)
    assert first.endswith("frisket run examples/packed.frisket --tokens README.md docs/*.md CHANGELOG.md")
    assert "[torch,jax,triton]" in first
    assert tests.endswith(" && pytest")


def test_the_readme_session_prints_what_it_shows():
    sessions = [b for b in blocks("README.md", readme.README.read_text(encoding="utf-8")) if b.language == "python"]
    assert len(sessions) >= 3
    names: dict = {}
    for session in sessions:
        session.run(names)


def test_the_readme_kernel_is_the_kernel():
    att = fk.compile(fk.mask("causal & window(w)", w=256), "softcap(50)")
    source = att.source("triton", q_len=4096, kv_len=4096, heads=8, head_dim=64, dtype="bfloat16")
    (excerpt,) = readme.blocks("triton")
    assert excerpt in source


def test_the_readme_lists_the_settings():
    listed = re.findall(r"^\| `(FRISKET_\w+)` \| (.*) \|$", readme.README.read_text(encoding="utf-8"), re.M)
    assert listed == [(v.name, v.meaning) for v in VARIABLES]


def test_the_tour_names_every_file_once():
    named = re.findall(r"^- `([^`]+)`", (ROOT / "docs" / "tour.md").read_text(encoding="utf-8"), re.M)
    files = [f for room in ("grammar", "dsl", "lowering", "runtime") for f in (ROOT / room).rglob("*")]
    kinds = (".py", ".lark", ".frisket", ".html", ".js", ".hpp", ".cpp", ".tpl")
    kept = [f for f in files if f.suffix in kinds and f.stat().st_size]
    assert sorted(named) == sorted(str(f.relative_to(ROOT)) for f in kept)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)\)", prose):
        assert re.match(r"https?://", target) or (page.parent / target).exists(), target


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_lay_out(path):
    parsed = read(path.read_text(encoding="utf-8"), name=path.name)
    program = load(path, **{name: TABLES[name] for name in parsed.declared if name in TABLES})
    assert program.mask.layout(512, 512).visible_pairs > 0


def test_the_tables_of_the_language_are_what_the_script_writes():
    language = script("language")
    assert language.page() == (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
    assert len(language.MARK.findall(language.page())) == 5
    assert language.MEANINGS.keys() == BUILT_IN
