"""docs/architecture.md shows the folders as they are, and the road that a call takes."""

import re
from collections import Counter
from pathlib import Path

import pytest
from support.pages import DOCS, script, sources

ROOT = Path(__file__).resolve().parents[2]
ROOMS = script("rooms")
PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tree():
    return sources()


def test_architecture_picture_is_of_the_imports(tree):
    assert ROOMS.FILE.read_text(encoding="utf-8") == ROOMS.svg(ROOMS.imports(tree)), "run: python docs/rooms.py"


def test_picture_of_the_road_is_of_the_steps():
    assert ROOMS.ROAD.read_text(encoding="utf-8") == ROOMS.road(PAGE), "run: python docs/rooms.py"
    assert [number for number, *_ in ROOMS.STEPS.findall(PAGE)] == [str(i) for i in range(1, 16)]


def test_architecture_page_has_each_folder(tree):
    assert {ROOMS.room(name) for name in tree.parsed} - {"runtime"} == {*ROOMS.rows()}


def test_arrows_that_a_path_replaces_are_left_out():
    edges = Counter({("cli", "facade"): 1, ("facade", "flex"): 2, ("cli", "flex"): 3, ("flex", "cli"): 1})
    assert ROOMS.arrows(edges) == ([("cli", "facade"), ("facade", "flex")], [("flex", "cli")])


def test_files_named_on_the_architecture_page_exist():
    named = re.findall(r"`([\w./]+/[\w.]+\.\w+)`", PAGE)
    assert len(named) > 30
    assert not [name for name in named if not (ROOT / name).exists()]


def test_objects_on_the_architecture_page_are_classes():
    objects = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| .* \| (.*) \|$", PAGE, re.M)
    assert len(objects) > 5
    for classes, files in objects:
        text = "".join((ROOT / name).read_text(encoding="utf-8") for name in re.findall(r"`([^`]+)`", files))
        assert [c for c in re.findall(r"\w+", classes) if f"\nclass {c}" not in text] == []


def test_architecture_page_has_each_row_of_figures():
    (table,) = re.findall(r"written by docs/house\.py --write -->\n(.*?)<!-- end -->", PAGE, re.S)
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.strip().split("\n")[2:]] == [
        row.words for row in ROOMS.house.ROWS.values()
    ]
