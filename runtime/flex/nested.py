"""Masks over jagged nested tensors: sequences packed one after another, none of which sees another."""

from __future__ import annotations

import torch
from torch import Tensor

from frisket.dsl import ir
from frisket.dsl.errors import ShapeError
from frisket.dsl.ir import Expr, conj, lit, lookup, segment, var

from ..mask import MaskLike
from .block_mask import Block, BlockMask
from .create import create_block_mask
from .live_mask import LiveMask, Value, fresh, live_mask


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
    packed = _packed(live_mask(mask_mod), q_nt, kv_nt)
    return create_block_mask(packed, B, H, _total(q_nt), _total(kv_nt), q_nt.device, BLOCK_SIZE, _compile)


def _packed(mod: LiveMask, q_nt: Tensor, kv_nt: Tensor) -> LiveMask:
    """The mask in packed positions."""
    values: dict[str, Value] = {}
    clauses: list[Expr] = []
    places: dict[Expr, Expr] = {ir.B: lit(q_nt.shape[0])}

    def table(name: str, value: Tensor) -> str:
        name = next((n for n, x in values.items() if x is value), fresh(name, {*mod.values, *values}))
        values[name] = value
        return name

    def place(x: Expr, length: Expr, nested: Tensor, name: str) -> Expr:
        """The sequence that holds a packed position."""
        offsets = table(f"{name}_offsets", nested.offsets())  # type: ignore[attr-defined]
        of = segment(offsets, x)
        places[x] = x - lookup(offsets, (of,))
        places[length] = lookup(offsets, (of + 1,)) - lookup(offsets, (of,))
        if (lengths := nested.lengths()) is not None:  # type: ignore[attr-defined]
            places[length] = lookup(table(f"{name}_lengths", lengths), (of,))
            clauses.append(places[x] < places[length])
        return of

    mine, theirs = place(var("q"), ir.Q_LEN, q_nt, "q"), place(var("k"), ir.KV_LEN, kv_nt, "kv")
    places[var("b")] = mine
    inner = mod.at(places, values)
    outer = conj(ir.build("eq", mine, theirs), *clauses)
    return LiveMask(conj(outer, inner.expr), {**inner.values, **values}, mod.read)


def _total(nested: Tensor) -> int:
    """Tokens of all sequences."""
    return int(nested.values().shape[nested._ragged_idx - 1])  # type: ignore[attr-defined]


__all__ = ["create_nested_block_mask"]
