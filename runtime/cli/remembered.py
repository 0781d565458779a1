"""`frisket doctor --caches`: the tables of remembered answers, with their sizes and bounds."""

from __future__ import annotations

from frisket.grammar.memo import Info, tables
from frisket.runtime.attention import entry as _entry  # noqa: F401 (the tables of a call are listed too)
from frisket.runtime.masks.mask import mask

from .answer import CommandResult, table
from .show import size

EXAMPLE = "causal & window(256)"


def remembered() -> CommandResult:
    """The contents of this process's tables after a mask was laid out; tables of one name count as one."""
    _ = mask(EXAMPLE).layout(1024, 1024).facts
    found: dict[str, Info] = {}
    for t in tables():
        first = found.get(t.name, Info(t.name, 0, 0, 0, 0, 0))
        found[t.name] = Info(t.name, *(a + b for a, b in zip(first[1:], t[1:], strict=True)))
    lines = [
        (t.name, f"{t.entries:,}", f"{t.bound:,}", size(t.bytes), f"{t.hits:,}", f"{t.misses:,}")
        for t in found.values()
    ]
    header = [tuple(name if name != "bound" else "at most" for name in Info._fields)]
    data = {"after": EXAMPLE, "tables": [t._asdict() for t in found.values()]}
    return CommandResult(data, table([*header, *lines], right=range(1, 6)))
