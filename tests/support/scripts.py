"""The scripts of docs/ as modules."""

from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

from support.pages import DOCS


def script(name: str) -> ModuleType:
    """docs/NAME.py, loaded."""
    spec = spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
