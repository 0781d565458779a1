"""The pages about operators and sharding print what they show."""

import doctest
from pathlib import Path

import pytest
import readme

from frisket.operations import AttentionRegistry, OperationRegistry

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", [pytest.param("operations.md", marks=pytest.mark.matrix), "sharding.md"])
def test_the_page(page, monkeypatch):
    for registry in (AttentionRegistry, OperationRegistry):  # a page may register more
        monkeypatch.setattr(registry, "_known", dict(registry._known))
    parser, runner, names = doctest.DocTestParser(), doctest.DocTestRunner(), {}
    for block in readme.blocks("python", DOCS / page):
        runner.run(parser.get_doctest(block, names, page, page, 0), clear_globs=False)
        names = runner.test.globs
    assert runner.summarize(verbose=False) == (0, runner.tries)
    assert runner.tries > 10
