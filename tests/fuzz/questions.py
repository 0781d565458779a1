"""Targets that ask: questions about masks, and formats of other systems, beside dense masks of numpy."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from outside.programs import FULL, LIBRARY, PARTIAL, Array, kinds_of
from support import formats

import frisket as fk

from .problem import Problem

OTHERS = ["causal", "window(3)", "sinks(2)", "chunked(4)", "block_causal(3)", "strided(5)", "sliding(2, 1)"]


def answers(p: Problem) -> str:
    """Every question with its witness, of the program, a mask of the library, and both joined."""
    m = fk.mask(p.text, **p.bound)
    text = OTHERS[zlib.crc32(p.text.encode()) % len(OTHERS)]
    n, other = fk.mask(text), np.broadcast_to(of_library(text, p.lengths), p.seen.shape)
    both, either, one = (m & n, p.seen & other), (m | n, p.seen | other), (m ^ n, p.seen ^ other)
    for name, (first, a), (second, b) in [
        ("implies", (m, p.seen), (n, other)),
        ("implied", (n, other), (m, p.seen)),
        ("both imply", both, (m, p.seen)),
        ("implies either", (m, p.seen), either),
        ("either implies", either, (n, other)),
        ("one implies", one, (~m, ~p.seen)),
    ]:
        asked(f"{name} {text}", lambda x=first, y=second: x.implies(y, *p.lengths, **p.where), a & ~b, True)
        asked(f"{name} {text}, equal", lambda x=first, y=second: x.equivalent(y, *p.lengths, **p.where), a ^ b, True)
    asked("twice", lambda: (one[0] ^ n).equivalent(m, *p.lengths, **p.where), np.zeros_like(p.seen), True)
    for name, (x, seen) in [("", (m, p.seen)), ("both", both), ("either", either), ("one", one)]:
        asked(f"{name} is_empty", lambda x=x: x.is_empty(*p.lengths, **p.where), seen, True)
        asked(f"{name} empty_rows", lambda x=x: x.empty_rows(*p.lengths, **p.where), ~seen.any(-1), False)
        try:
            pairs = x.visible_pairs(*p.lengths, **p.where)
        except fk.Undecided:
            continue
        assert pairs == seen.sum(), f"{name} visible_pairs: {pairs}"
    return str(m)


def asked(name: str, ask: Callable[[], Any], shows: Array, none: bool) -> None:
    """`shows` marks the positions that are a witness; where there are none, the answer is `none`."""
    try:
        answer = ask()
    except fk.Undecided:
        return
    assert bool(answer) == (none != shows.any()), f"{name}: {answer}"
    assert (answer.witness is None) == (not shows.any()), f"{name}, witness: {answer}"
    if answer.witness is not None:
        assert shows[answer.witness[: shows.ndim]], f"{name}, witness: {answer}"


def of_library(text: str, lengths: tuple[int, int]) -> Array:
    name, _, rest = text.partition("(")
    return LIBRARY[name](*np.ogrid[: lengths[0], : lengths[1]], *(int(x) for x in rest.rstrip(")").split(",") if x))


def exports(p: Problem) -> str:
    """Every export, read back by the format's documentation; a refusal only of what does not fit."""
    m = fk.mask(p.text, **p.bound)
    layout = m.layout(*p.lengths, block=p.block, **p.where)
    kinds, (bq, bk) = kinds_of(p.seen, p.block), p.block
    batch, heads, q_len, kv_len = p.seen.shape

    rows = layout.to_bsr(bits=True)
    for b, h in np.ndindex(batch, heads):
        seen = formats.bsr(rows.slices[rows.slice_of[b, h]], rows.shape)
        same("BSR", seen[:q_len, :kv_len], p.seen[b, h])
        assert seen.sum() == p.seen[b, h].sum(), "BSR: a position beyond the lengths"

    found = layout.to_fa4()
    for way, true in ((found.forward, kinds), (found.backward, kinds.swapaxes(2, 3))):
        partial, full = (
            formats.lists(count.numpy(), index.numpy(), true.shape[3])
            for count, index in ((way.mask_block_cnt, way.mask_block_idx), (way.full_block_cnt, way.full_block_idx))
        )
        assert not (partial & full).any(), "FA4: a tile in both lists"
        fits("FA4", partial, full, true, layout.exact)

    if layout.exact:
        block = layout.to_block_mask()
        lists = [(block.kv_num_blocks, block.kv_indices), (block.full_kv_num_blocks, block.full_kv_indices)]
        partial, full = (
            np.zeros((1, 1, *kinds.shape[2:]), bool)
            if count is None
            else formats.lists(count.numpy(), index.numpy(), kinds.shape[3])
            for count, index in lists
        )
        fits("BlockMask", partial, full, kinds, True)
        at = (torch.arange(n).reshape([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(p.seen.shape))
        same("mask_mod", np.broadcast_to(block.mask_mod(*at).numpy(), p.seen.shape), p.seen)

    # runs of hidden queries, of every key
    runs = (np.diff(np.pad(~p.seen, ((0, 0), (0, 0), (1, 1), (0, 0))).astype(np.int8), axis=2) == 1).sum(2)
    if (flash := exported("FlashMask", layout.to_flashmask, bool(runs.max() > 2))) is not None:
        same("FlashMask", formats.flashmask(flash.startend_row_indices, flash.causal, q_len), p.seen)
    packed, total = formats.packed(p.seen), (batch * q_len, batch * kv_len)
    differ = (p.seen != p.seen[:, :1]).any()
    if (slices := exported("slices", layout.to_slices, None)) is not None:
        assert not differ, "slices: of heads that differ"
        same("slices", formats.slices(slices, *total), packed.astype(int))
    if (varlen := exported("varlen", layout.to_varlen, None)) is not None:
        assert not differ, "varlen: of heads that differ"
        same("varlen", formats.varlen(varlen, *total), packed)
    hard = bool((p.seen != p.seen[:1]).any() or q_len % bq or kv_len % bk or not p.seen.any(-1).all())
    if (splash := exported("splash", layout.to_splash, hard)) is not None:
        for info, dkv in ((splash.forward, False), (splash.dkv, True)):
            same("splash", formats.splash(info, splash.block, heads, q_len, kv_len, dkv), p.seen[0].astype(int))
    return str(m)


def exported(name: str, export: Callable[[], Any], hard: bool | None) -> Any:
    """What is exported, or None of a mask that does not fit: one that is not `hard` does, None says nobody knows."""
    try:
        found = export()
    except fk.ExportError as refused:
        if hard is False:
            raise AssertionError(f"{name}, refused: {refused}") from refused
        return None
    assert not hard, f"{name}, not refused"
    return found


def same(name: str, found: Array, wanted: Array) -> None:
    wrong = np.argwhere(np.broadcast_to(found, wanted.shape) != wanted)
    assert not len(wrong), f"{name}: {wrong[0]}"


def fits(name: str, partial: Array, full: Array, true: Array, exact: bool) -> None:
    """Lists of tiles beside their kinds; partial tiles may be any where a layout is not exact."""
    assert not (full & (true != FULL)).any(), f"{name}: a full tile that is not"
    assert not (~full & ~partial & (true != 0)).any(), f"{name}: a tile is missing"
    assert not (exact and (partial & (true != PARTIAL)).any()), f"{name}: a loose tile in an exact layout"
