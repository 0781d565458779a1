"""The order of the operands of commutative operators: readable, and independent of how a mask was written.

Structure decides first, then literals, and names only where nothing else tells two operands apart, so that
neither the order of writing nor (but for such ties, see `canonical`) the user's names change a mask.

>>> from frisket.dsl.sugar import k, q
>>> sorted([q - k < 256, (k < 4) | (q >= k), q >= k], key=sort_key)
[q >= k, q - k < 256, k < 4 | q >= k]
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from frisket.dsl.ir import COMPARISONS, SIZES, Expr
from frisket.dsl.types import BOOL, INT

# the analysis writes rectangles in q0 q1 k0 k1 (first and last query and key)
VARIABLES = {name: i for i, name in enumerate(("q", "q0", "q1", "k", "k0", "k1", "b", "h", *SIZES))}
_QUERY = {0, 1, 2}
_KEY = {3, 4, 5}
_OTHER = 20  # `score` and the analysis' own variables
NAMED = frozenset({"param", "lookup", "segment", "extent"})  # operators whose name is the user's
_AFFINE = frozenset({"lit", "var", "param", "extent", "bound", "add", "sub", "neg", "mul"})
_KEPT = 8  # literals and names compared one by one; beyond them a digest decides


@dataclass(frozen=True, slots=True)
class _Known:
    """The properties of a node that decide the order; made from the properties of its arguments."""

    key: tuple[Any, ...]
    short: tuple[Any, ...]
    held: tuple[int, ...]  # variables, by rank
    plain: bool  # an affine Int
    tables: bool
    shape: bytes  # digest without literals and names
    whole: bytes  # digest with them
    literals: tuple[Any, ...]
    names: tuple[str, ...]


def sort_key(e: Expr) -> tuple[Any, ...]:
    """The sort key of a node, comparable with the key of any node of the same type; the same in every process.

    Int and Float: variables (q before k), then parameters, then the rest by the variables held, literals last.
    Bool: bounds on positions, then other comparisons, those of tables, what is no comparison, and what is made of
    several; inside each kind those of both q and k first, then by depth and operator.
    """
    stack = [] if e.rank else [e]
    while stack:
        node = stack[-1]
        missing = [a for a in node.args if a.rank is None]
        stack.extend(missing)
        if not missing:
            stack.pop()
            node.rank = _look(node, [a.rank for a in node.args])
    key: tuple[Any, ...] = e.rank.key
    return key


def _look(e: Expr, args: list[_Known]) -> _Known:
    held = {i for a in args for i in a.held}
    if e.op == "var":
        held.add(VARIABLES.get(e.name, _OTHER))
    plain = e.type is INT and e.op in _AFFINE and all(a.plain for a in args)
    tables = e.op in ("lookup", "segment") or any(a.tables for a in args)
    order = tuple(sorted(held))
    sides = (not held.isdisjoint(_QUERY)) + (not held.isdisjoint(_KEY)) if e.type is BOOL else 0
    short = (_rank(e, args, tables), -sides, order, e.depth, e.op)
    named = e.op in NAMED
    own = "" if named or e.op == "lit" else str(e.name)
    if e.op == "extent":
        own = str(e.name[1])
    shape = digest(e.op, str(e.type), own, *(a.shape for a in args))
    name = str(e.name[0] if e.op == "extent" else e.name) if named else ""
    literal = _bits(e.name) if e.op == "lit" else b""
    comparable = (0, 0) if e.name != e.name else (1, e.name)
    literals = (comparable,) if e.op == "lit" else _gather(a.literals for a in args)
    names = _gather([(name,) if named else (), *(a.names for a in args)])
    whole = digest(shape, literal, name, *(a.whole for a in args))
    numbered = tuple(by_length(n) for n in names)
    key = (short, own if e.op == "var" else "", tuple(a.short for a in args), shape, literals, numbered, whole)
    return _Known(key, short, order, plain, tables, shape, whole, literals, names)


def _rank(e: Expr, args: list[_Known], tables: bool) -> int:
    if e.op == "lit":
        return 50
    if e.op == "var":
        return VARIABLES.get(e.name, _OTHER)
    if e.op == "param":
        return 30
    if e.type is not BOOL:
        return 40
    if e.op in COMPARISONS and e.args[0].type is INT:
        return 31 if all(a.plain for a in args) else 33 if tables else 32
    return 36 if e.op in ("and", "or") else 35 if e.op in ("xor", "not", "where") else 34


def _gather(parts: Any) -> tuple[Any, ...]:
    out: dict[Any, None] = {}
    for part in parts:
        out.update(dict.fromkeys(part))
        if len(out) >= _KEPT:
            break
    return tuple(out)[:_KEPT]


def by_length(name: str) -> tuple[int, str]:
    """A sort key of names by which s2 comes before s10."""
    return len(name), name


def _bits(value: Any) -> bytes:
    return struct.pack("<d", value) if isinstance(value, float) else str(value).encode()


def digest(*parts: str | bytes) -> bytes:
    state = blake2b(digest_size=12)
    for part in parts:
        raw = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        state.update(len(raw).to_bytes(4, "little") + raw)
    return state.digest()
