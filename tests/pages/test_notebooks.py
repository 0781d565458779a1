"""The notebooks of examples/notebooks: they run, and their committed outputs are what they print."""

import json
from pathlib import Path

import pytest
from support.pages import script

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
BOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_six():
    assert len(BOOKS) == 6


@pytest.mark.parametrize("path", BOOKS, ids=lambda p: p.stem)
def test_notebook_is_committed_as_it_ran(path):
    """Every cell of code in order, without an error, without what one machine or one run leaves behind."""
    text = path.read_text(encoding="utf-8")
    book = json.loads(text)
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not any(x["output_type"] == "error" for cell in code for x in cell["outputs"])
    assert set(book["metadata"]) == {"kernelspec"}
    assert not any(cell["metadata"] for cell in book["cells"])
    assert len(text) < 400_000
    assert book["cells"][0]["source"][0].startswith("# ")


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", BOOKS, ids=lambda p: p.stem)
def test_notebook_prints_its_committed_outputs(path):
    for module in ("nbclient", "nbconvert", "matplotlib", "torch", "jax"):
        pytest.importorskip(module)
    notebooks = script("notebooks")
    assert notebooks.shown(notebooks.run(path.stem)) == notebooks.shown(notebooks.read(path.stem))
