"""Names that a module's text reads and nowhere defines: found without running it."""

from __future__ import annotations

import builtins
import symtable
from collections.abc import Iterator


def unknown_names(text: str) -> set[str]:
    """
    >>> unknown_names("def twice(x): return x + y")
    {'y'}
    """
    module = symtable.symtable(text, "<text>", "exec")
    known = {s.get_name() for s in module.get_symbols() if s.is_assigned() or s.is_imported()}
    read = {s.get_name() for scope in _scopes(module) for s in scope.get_symbols() if s.is_global() or scope is module}
    return read - known - set(vars(builtins))


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for inner in table.get_children():
        yield from _scopes(inner)
