"""Positions inside jagged nested tensors: sequences packed one after another, none of which sees another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from frisket.dsl import ir
from frisket.dsl.errors import ShapeError
from frisket.dsl.ir import TRUE, B, Expr, conj, lit
from frisket.grammar.memo import beside, remember
from frisket.runtime.machine.parameters import names_of
from frisket.runtime.torch.jagged import JaggedTables, Ragged, names_for, ragged_of

from .live_mask import LiveMask, only_read
from .score_mod import Scored


def packed(mod: LiveMask, q_nt: Tensor, kv_nt: Tensor) -> LiveMask:
    """The mask in packed positions."""
    ragged = ragged_of(q_nt, kv_nt)
    names = names_in(mod, ragged)
    inner = mod.at(names.places(False), values_of(names, ragged))
    outer = own_sequence(names, ragged)
    made = LiveMask(conj(outer.expr, inner.expr), {**inner.values, **outer.values}, mod.read)
    beside(made, "words", lambda: partial(in_sequences, names, ragged))
    return made


def in_sequences(names: JaggedTables, ragged: Ragged, node: Expr, at: tuple[int, ...]) -> tuple[Expr, str]:
    """A lookup of packed positions as the user wrote it, inside a sequence, and the position (b, h, q, k) in words."""
    places = [x for visible in (True, False) for x in names.places(visible).items() if x[0] is not B]
    offsets = ragged.q_offsets.numpy(), ragged.kv_offsets.numpy()
    s = int(np.searchsorted(offsets[0], at[2], "right")) - 1
    q, k = (x - of[s] for x, of in zip(at[2:], offsets, strict=True))
    return ir.substitute(node, {e: name for name, e in places}), f"query {q:,}, key {k:,} of sequence {s} (h {at[1]})"


def names_in(mod: LiveMask, ragged: Ragged, taken: Mapping[str, Any] | None = None) -> JaggedTables:
    """Names for tables of positions, unlike all names in a mask or score mod; `B` in `mod` becomes a literal."""
    number = lit(ragged.sequences) if B in ir.walk(mod.expr) else lit(0)
    return names_for(ragged.pattern, {*mod.values, *(taken or {}), *names_of(mod.expr)}, number)


def values_of(names: JaggedTables, ragged: Ragged) -> dict[str, Tensor]:
    return {n: x for n, x in zip(names.tables, ragged.tensors, strict=True) if n is not None and x is not None}


def own_sequence(names: JaggedTables, ragged: Ragged) -> LiveMask:
    """The mask that shows a query the keys of its own sequence."""
    return only_read(names.own_sequence(), values_of(names, ragged))


NAMES = ("query", "key", "value")
_EVERYTHING = LiveMask(TRUE, {})


def visible_inside(visible: LiveMask | None, ragged: Ragged) -> LiveMask:
    """A mask of packed positions inside sequences, as `confined` makes it; kept with the mask."""
    visible = visible or _EVERYTHING
    made: dict[Any, LiveMask] = beside(visible, "inside sequences", dict)
    key = tuple(map(id, ragged.tensors))
    if key not in made:  # it holds these tensors, so that no other one has their id
        remember(made, key, confined(visible, ragged), 8)
    return made[key]


def confined(visible: LiveMask, ragged: Ragged) -> LiveMask:
    """A mask of packed positions, and no keys of other sequences."""
    own = own_sequence(names_in(_EVERYTHING, ragged), ragged)
    return own if visible.expr is TRUE else visible.join("and", own)


def local(mod: Scored, ragged: Ragged) -> tuple[Scored, JaggedTables]:
    """A score mod that gets positions inside the sequence, and the names of its tables; kept with the score mod."""
    made: dict[Any, tuple[Scored, JaggedTables]] = beside(mod, "inside sequences", dict)
    key = ragged.pattern, ragged.sequences
    if key not in made:
        names = names_in(mod.live, ragged)
        live = replace(mod.live, expr=ir.substitute(mod.live.expr, names.places(True)))
        remember(made, key, (replace(mod, live=live), names), 8)
    return made[key]


def local_live(mod: LiveMask, ragged: Ragged) -> LiveMask:
    """A score mod in a graph that gets positions inside the sequence."""
    names = names_in(mod, ragged)
    return mod.at(names.places(True), values_of(names, ragged))


def check_total(block_mask: Any, q: Tensor, k: Tensor) -> None:
    """Refuse a mask that is not one of the packed tokens."""
    lengths = tuple(getattr(block_mask, "shape", ())[-2:])
    if lengths and lengths != (q.shape[2], k.shape[2]):
        raise ShapeError(
            f"block_mask is for {lengths[0]} queries and {lengths[1]} keys, the nested tensors hold {q.shape[2]} and "
            f"{k.shape[2]} tokens\n  make it for them: create_nested_block_mask(mask_mod, 1, 1, query, key)"
        )
