"""Names in the text of a Triton or Gluon kernel that tables of users could have as well."""

import ast
import re

from frisket.lowering.kernels.triton import expr
from frisket.lowering.kernels.triton.parameters import OWN, SIZES, arguments


def unreserved(text, plan, users=()):
    """The names of a kernel's functions that `OWN` lacks: a table called so would be overwritten."""
    tables = arguments(plan).values()
    known = {*OWN, *SIZES, *expr.all_names(), *users, *(n for a in tables for n in a.all)}
    functions = [x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef)]
    found = {n.id for f in functions for n in ast.walk(f) if isinstance(n, ast.Name)}
    numbered = rf"(fixed|row|column|x|sum)\d+|({'|'.join(a.name for a in tables) or '-'})_\w+"
    return sorted(n for n in found - known if not re.fullmatch(numbered, n))
