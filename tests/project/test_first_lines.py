"""A docstring's first line and a line of docs/tour.md stand alone: neither begins with a word that points elsewhere."""

import ast
import re

import pytest
from support.pages import script, sources

HOUSE = script("house")
MORE = re.compile(r"(such|one (that|which|where|who)|the (other|latter|former|rest)(?! of))\b", re.IGNORECASE)


def points(line):
    return HOUSE.points(line) or MORE.match(line) is not None


@pytest.mark.parametrize("line", ["The same of keys.", "Those that end.", "…and more", "Its text", "One that ends"])
def test_a_line_that_points_elsewhere_is_found(line):
    assert points(line)


@pytest.mark.parametrize("line", ["One node of an expression.", "Itself", "The rest of a row", "`it` alone"])
def test_a_line_with_its_own_noun_is_let_through(line):
    assert not points(line)


def test_first_lines_of_docstrings_stand_alone():
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [(file, node) for file, node in sources().nodes if isinstance(node, kinds)]
    lines = [(file, text.split("\n")[0]) for file, node in nodes if (text := ast.get_docstring(node))]
    assert len(lines) > 2000
    assert [f"{file}: {line}" for file, line in lines if points(line)] == []


def test_lines_of_the_tour_stand_alone():
    lines = (HOUSE.ROOT / "docs" / "tour.md").read_text(encoding="utf-8").splitlines()
    said = [line.partition(" — ")[2] for line in lines if line.startswith("- `")]
    assert len(said) > 200
    assert all(said)
    assert [line for line in said if points(line)] == []
