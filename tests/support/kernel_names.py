"""Names in the text of a kernel: those that nothing defines, and those that a user's table could have as well."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from collections.abc import Iterator

from frisket.lowering.kernels.triton import expr
from frisket.lowering.kernels.triton.module import OWN, SIZES, arguments


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


def unreserved(text, plan, users=()):
    """The names of a Triton or Gluon kernel's functions that `OWN` lacks: a table called so would be overwritten."""
    tables = arguments(plan).values()
    known = {*OWN, *SIZES, *expr.LANGUAGE.reserved, *users, *(n for a in tables for n in a.all)}
    functions = [x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef)]
    found = {n.id for f in functions for n in ast.walk(f) if isinstance(n, ast.Name)}
    numbered = rf"(fixed|row|column|x|sum)\d+|({'|'.join(a.name for a in tables) or '-'})_\w+"
    return sorted(n for n in found - known if not re.fullmatch(numbered, n))
