"""Masks over jagged nested tensors, and attention to them: sequences packed one after another, none of which sees
another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from frisket.dsl import ir
from frisket.dsl.errors import ShapeError
from frisket.dsl.ir import TRUE, B, conj, lit
from frisket.runtime.machine.parameters import names_of
from frisket.runtime.masks.mask import MaskLike
from frisket.runtime.torch.jagged import JaggedTables, Ragged, names_for, ragged_of

from .block_mask import Block, BlockMask
from .create import create_block_mask
from .graph_mask import packed as graph_packed
from .leave import leave
from .live_mask import LiveMask, kept, live_mask
from .score_mod import Scored, remember


def create_nested_block_mask(
    mask_mod: MaskLike, B: int | None, H: int | None, q_nt: Tensor, kv_nt: Tensor | None = None,
    BLOCK_SIZE: Block = 128, _compile: bool = False,
) -> BlockMask:  # fmt: skip
    """`create_nested_block_mask(causal, 1, 1, query)`: a mask over the packed sequences of a jagged nested tensor.

    `q_nt` [sequences, heads, j, head_dim], in any order of axes, gives the lengths of the sequences; `kv_nt` those of
    the keys, for cross attention (the queries' own, unless given). The mask is over the packed tokens, sum(S) of them:
    `mask_mod` is told the number of the sequence as b and positions inside it, `Q_LEN` and `KV_LEN` of a text are
    its lengths, and a token sees its own sequence alone. Tokens in the holes of a tensor with `lengths` see nothing.

    Raises `ShapeError`, a ValueError, for tensors that are not jagged, that hold different numbers of sequences or
    are on different devices; the rest as `create_block_mask`.
    """
    kv_nt = q_nt if kv_nt is None else kv_nt
    for name, x in (("q_nt", q_nt), ("kv_nt", kv_nt)):
        if not isinstance(x, Tensor) or x.layout is not torch.jagged:
            what = f"of layout {x.layout}" if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(f"{name} is {what}\n  it is torch.nested.nested_tensor(..., layout=torch.jagged)")
    if q_nt.device != kv_nt.device:
        raise ShapeError(f"q_nt is on {q_nt.device}, kv_nt on {kv_nt.device}\n  expected to be on the same device")
    if q_nt.shape[0] != kv_nt.shape[0]:
        raise ShapeError(
            f"q_nt holds {q_nt.shape[0]} sequences, kv_nt {kv_nt.shape[0]}\n  each query sequence has its keys"
        )
    if torch.compiler.is_dynamo_compiling():
        if not callable(mask_mod) or any(x.lengths() is not None for x in (q_nt, kv_nt)):  # type: ignore[attr-defined]
            return leave(create_nested_block_mask, mask_mod, B, H, q_nt, kv_nt, BLOCK_SIZE)  # type: ignore[no-any-return]
        lengths = _total(q_nt), _total(kv_nt)
        fn = graph_packed(mask_mod, q_nt.offsets(), kv_nt.offsets(), *lengths)  # type: ignore[attr-defined]
        return create_block_mask(fn, B, H, *lengths, q_nt.device, BLOCK_SIZE)
    packed = _packed(live_mask(mask_mod), q_nt, kv_nt)
    return create_block_mask(packed, B, H, _total(q_nt), _total(kv_nt), q_nt.device, BLOCK_SIZE, _compile)


def _packed(mod: LiveMask, q_nt: Tensor, kv_nt: Tensor) -> LiveMask:
    """The mask in packed positions."""
    ragged = ragged_of(q_nt, kv_nt)
    names = names_in(mod, ragged)
    inner = mod.at(names.places(False), values_of(names, ragged))
    outer = own_sequence(names, ragged)
    return LiveMask(conj(outer.expr, inner.expr), {**inner.values, **outer.values}, mod.read)


def names_in(mod: LiveMask, ragged: Ragged, taken: Mapping[str, Any] | None = None) -> JaggedTables:
    """Names for tables of positions, different from all names in a mask or score mod. Where `mod` reads `B`, the number
    of sequences is a literal."""
    number = lit(ragged.sequences) if B in ir.walk(mod.expr) else lit(0)
    return names_for(ragged.pattern, {*mod.values, *(taken or {}), *names_of(mod.expr)}, number)


def values_of(names: JaggedTables, ragged: Ragged) -> dict[str, Tensor]:
    return {n: x for n, x in zip(names.tables, ragged.tensors, strict=True) if n is not None and x is not None}


def own_sequence(names: JaggedTables, ragged: Ragged) -> LiveMask:
    """The mask that shows a query the keys of its own sequence."""
    return kept(names.own_sequence(), values_of(names, ragged))


NAMES = ("query", "key", "value")
_EVERYTHING = LiveMask(TRUE, {})
_inside: WeakKeyDictionary[LiveMask, dict[Any, LiveMask]] = WeakKeyDictionary()
_local: WeakKeyDictionary[Scored, dict[Any, tuple[Scored, JaggedTables]]] = WeakKeyDictionary()


def visible_inside(visible: LiveMask | None, ragged: Ragged) -> LiveMask:
    """A mask of packed positions inside sequences, as `confined` makes it; kept with the mask."""
    visible = visible or _EVERYTHING
    made, key = _inside.setdefault(visible, {}), tuple(map(id, ragged.tensors))
    if key not in made:  # it holds these tensors, so that no other one has their id
        remember(made, key, confined(visible, ragged), 8)
    return made[key]


def confined(visible: LiveMask, ragged: Ragged) -> LiveMask:
    """A mask of packed positions, and no keys of other sequences."""
    own = own_sequence(names_in(_EVERYTHING, ragged), ragged)
    return own if visible.expr is TRUE else visible.join("and", own)


def local(mod: Scored, ragged: Ragged) -> tuple[Scored, dict[str, Tensor]]:
    """A score mod that is told positions inside the sequence, and its tables. Kept with the score mod."""
    made, key = _local.setdefault(mod, {}), (ragged.pattern, ragged.sequences)
    if key not in made:
        names = names_in(mod.live, ragged)
        live = replace(mod.live, expr=ir.substitute(mod.live.expr, names.places(True)))
        remember(made, key, (replace(mod, live=live), names), 8)
    found, names = made[key]
    return found, values_of(names, ragged)


def local_live(mod: LiveMask, ragged: Ragged) -> LiveMask:
    """A score mod in a graph that is told positions inside the sequence."""
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


def _total(nested: Tensor) -> int:
    """Tokens of all sequences."""
    return nested.values().shape[nested._ragged_idx - 1]  # type: ignore[attr-defined]


__all__ = ["create_nested_block_mask"]
