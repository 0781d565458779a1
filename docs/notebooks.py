"""The notebooks of examples/notebooks, run: `python docs/notebooks.py [NAME ...]` writes their outputs anew.

The site shows them as pages: docs/site_hooks.py turns each into Markdown. tests/pages/test_notebooks.py runs them
again and compares what they print.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "notebooks"
NAMES = ("quick_start", "masks_gallery", "packed_training", "serving_with_caches", "vision", "with_jax")


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def run(name: str) -> Any:
    """The notebook with the outputs of a new kernel. What differs from run to run is left out: times and addresses."""
    book = read(name)
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}).execute()
    book.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for number, cell in enumerate(book.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
    return book


def shown(book: Any) -> list[list[str]]:
    """The text of every cell's outputs."""
    return [
        [x.get("text") or x["data"].get("text/plain", "") for x in cell.outputs]
        for cell in book.cells if cell.cell_type == "code"
    ]  # fmt: skip


def page(name: str) -> tuple[str, dict[str, bytes]]:
    """The notebook as Markdown, and the pictures that it shows, by their paths beside it."""
    from nbconvert import MarkdownExporter

    book = read(name)
    book.metadata["language_info"] = {"name": "python"}  # the colours of code
    text, resources = MarkdownExporter().from_notebook_node(book, {"output_files_dir": name, "unique_key": "picture"})
    return text, resources["outputs"]


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        nbformat.write(run(name), FOLDER / f"{name}.ipynb")
