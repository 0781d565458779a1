"""The scripts of docs/ as modules, and the sources of the tree, parsed once."""

from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

from support.pages import DOCS


@cache
def script(name: str) -> ModuleType:
    """docs/NAME.py, loaded."""
    spec = spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def sources() -> Any:
    """The `Tree` of docs/house.py over this checkout, which parses a file at its first use and keeps it."""
    house = script("house")
    return house.Tree(house.ROOT)
