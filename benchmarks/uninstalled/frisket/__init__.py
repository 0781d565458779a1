"""frisket from this checkout, for machines where it is not installed: `benchmarks/checkout.py` puts this package on the
path, and this module stands in for `runtime/facade`. Folders are those of `package-dir` in pyproject.toml."""

import sys
from importlib.util import spec_from_file_location
from pathlib import Path

_root = Path(__file__).resolve().parents[3]
_facade = _root / "runtime" / "facade"
_spec = spec_from_file_location(
    "frisket", _facade / "__init__.py", submodule_search_locations=[str(_facade), str(_root), str(_root / "runtime")]
)
assert _spec is not None
assert _spec.loader is not None
globals().update(
    __spec__=_spec, __loader__=_spec.loader, __file__=_spec.origin, __path__=_spec.submodule_search_locations
)
_spec.loader.exec_module(sys.modules[__name__])
