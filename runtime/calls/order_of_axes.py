"""A warning, once, for arrays whose axes of heads and length seem to be exchanged; they are read as documented."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frisket.dsl.ir import walk
from frisket.lowering.plan import Geometry
from frisket.runtime.machine.once import warn_once

from .arrays import LAYOUTS, Arrays
from .program import CallProgram

MOST_HEADS = 128  # of keys: models with more are not known
GROUPED = 64  # this many heads that share nothing, beside fewer keys than queries, are a length rather


def check_order(arrays: Arrays, g: Geometry, program: CallProgram, params: Mapping[str, Any]) -> None:
    """Warn where shapes, or the lengths of tables, say that the axes of heads and of length are exchanged."""
    if arrays.pages or not all(type(n) is int for n in (g.batch, g.heads, g.q_len, g.kv_len)):
        return
    if g.q_len % g.kv_len or g.q_len >= g.kv_heads:  # they would not divide, or there are more heads than tokens
        return
    why = _by_shape(g) or _by_tables(g, program, params)
    if not why:
        return
    have = arrays.layout
    other = "bhsd" if have == "bshd" else "bshd"
    shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in zip("qkv", arrays.qkv, strict=True))
    warn_once(
        f"{shapes} are read as {LAYOUTS[have]}: {g.q_len} tokens of {g.heads} heads, and {why}\n"
        f'  if they are {LAYOUTS[other]} give layout="{other}"; if not, layout="{have}" says so',
        about=(have, g.q_len, g.kv_len),  # the heads, if they are exchanged: another length is not another warning
    )


def _by_shape(g: Geometry) -> str:
    if g.kv_heads > MOST_HEADS >= g.q_len:
        return f"{g.kv_heads} heads of keys are more than models have"
    if g.q_len > g.kv_len and g.heads == g.kv_heads >= max(GROUPED, 2 * g.q_len):
        return (
            f"{g.q_len} queries of {g.kv_len} keys look like {g.q_len} query heads that share {g.kv_len} heads of keys"
        )
    return ""


def _by_tables(g: Geometry, program: CallProgram, params: Mapping[str, Any]) -> str:
    """Tables that are read at bare positions and heads: all have the lengths of the other order, and some not these."""
    shapes = {n: tuple(x.shape) for n, x in {**program.tables, **params}.items() if hasattr(x, "shape")}
    here, there = {"q": g.q_len, "k": g.kv_len, "h": g.heads}, {"q": g.heads, "k": g.kv_heads, "h": g.q_len}
    read = {
        (n.name, i, a.name)
        for part in program.parts
        for n in walk(part.expr)
        if n.op == "lookup" and n.name in shapes
        for i, a in enumerate(n.args)
        if a.op == "var" and a.name in here and i < len(shapes[n.name])
    }
    found = sorted((name, axis, coordinate, shapes[name][axis]) for name, axis, coordinate in read)
    if not all(have == there[coordinate] for _, _, coordinate, have in found):
        return ""
    for name, _, coordinate, have in found:
        if have != here[coordinate] and (have >= 8 or coordinate == "h"):  # of too few heads: an error comes
            return f"`{name}`, read at `{coordinate}`, has {have} entries"
    return ""
