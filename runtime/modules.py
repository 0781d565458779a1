"""Generated source as a module: its names, and its lines in tracebacks."""

from __future__ import annotations

import linecache
from hashlib import sha256
from typing import Any


def load(source: str, **given: Any) -> dict[str, Any]:
    """The names of a generated module, beside those it is given; tracebacks show its lines."""
    name = f"<frisket {sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": "frisket_kernel", "__file__": name, **given}
    exec(compile(source, name, "exec"), names)
    return names
