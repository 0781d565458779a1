"""Every example in a docstring is true. (pytest's own collector cannot import these folders by path.)"""

import doctest
import importlib
import tomllib
from pathlib import Path

import pytest
from support.native.compiler import needs_compiler

import frisket.operations  # noqa: F401 - registers the operations that examples ask for
from frisket.runtime.operations.base import AttentionRegistry, OperationRegistry

ROOT = Path(__file__).resolve().parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
ROOMS = {name: package for package, name in SETUPTOOLS["package-dir"].items() if name != "runtime/facade"}


def modules():
    for room, package in ROOMS.items():
        for file in sorted((ROOT / room).rglob("*.py")):
            inside = file.relative_to(ROOT / room).with_suffix("").parts
            # a cheap look first: importing every emitter for nothing takes seconds
            if inside[0] != "facade" and ">>> " in file.read_text():
                yield ".".join((package, *(part for part in inside if part != "__init__")))
    yield "frisket"


@pytest.fixture(autouse=True)
def _own_registries(monkeypatch):
    """Examples register operations, which other tests are not to find."""
    for registry in (OperationRegistry, AttentionRegistry):
        monkeypatch.setattr(registry, "_known", dict(registry._known))


# compiled by JAX for seconds; what they show is what tests beside those modules hold
LONG = {"frisket.runtime.caches.jax_paged_ring", "frisket.parallel"}


MARKS = {**dict.fromkeys(LONG, pytest.mark.exhaustive), "frisket.runtime.attention.warm": needs_compiler}


@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in modules()])
def test_docstring_examples_print_the_shown_output(name, monkeypatch):
    if name.startswith("frisket.runtime.caches.torch"):  # planners of their few steps would be compiled for nothing
        monkeypatch.setattr("frisket.runtime.torch.decode.MAX_STEP_QUERIES", 0)
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0
