"""The package where a clone's folder is called `frisket`: Python, started beside the folder, finds the folder first.

Without this file the folder would count as a namespace package and hide an editable install. With it, the installed
package is found past the folder and run under its name.
"""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path


def _installed() -> ModuleSpec:
    """The spec of the installed `frisket`, found as if the folder that holds the clone were not on `sys.path`."""
    beside = Path(__file__).resolve().parent.parent
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != beside]
    for finder in sys.meta_path:
        spec = finder.find_spec("frisket", elsewhere)
        if spec is not None and spec.loader is not None and spec.origin != __file__:
            return spec
    clone = Path(__file__).resolve().parent
    raise ModuleNotFoundError(f"frisket is not installed: pip install -e {clone}", name="frisket")


if __name__ == "frisket":
    _spec = _installed()
    globals().update(
        __spec__=_spec, __loader__=_spec.loader, __file__=_spec.origin, __path__=_spec.submodule_search_locations
    )
    _spec.loader.exec_module(sys.modules[__name__])  # type: ignore[union-attr]  # found only with a loader
