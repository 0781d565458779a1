"""Generated source as a module: its names, and its lines in tracebacks."""

from __future__ import annotations

import linecache
import sys
from hashlib import sha256
from types import ModuleType
from typing import Any


def load(source: str, *, importable: bool = False, **scope: Any) -> dict[str, Any]:
    """The names of a generated module, beside those of `scope`; tracebacks show its lines. `importable` ones are
    modules that others can import, one for a text: torch.compile looks there for what functions call."""
    digest = sha256(source.encode()).hexdigest()[:12]
    name, file = f"frisket_kernel_{digest}", f"<frisket {digest}>"
    if importable and name in sys.modules:
        return vars(sys.modules[name])
    # None for the time of change: linecache would look for a file
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = ModuleType(name if importable else "frisket_kernel")
    names = vars(module)
    names.update(__file__=file, **scope)
    exec(compile(source, file, "exec"), names)
    if importable:
        sys.modules[name] = module  # after it ran: other threads import it
    return names
