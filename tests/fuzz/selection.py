"""Blocks chosen by drawn scores under a program, compared with loops over rows."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from outside import choices

import frisket as fk
from frisket import select as selection

from .attention import number_of
from .problem import Problem

RULES: dict[str, tuple[dict[str, Any], choices.Count]] = {
    "one": ({"keep": 1}, choices.keep(1)),
    "some": ({"keep": 3}, choices.keep(3)),
    "share": ({"keep": 0.4}, choices.keep(lambda n: -(-4 * n // 10))),
    "mass": ({"mass": 0.7}, choices.mass(0.7)),
    "threshold": ({"threshold": 0.15}, choices.threshold(0.15)),
}
ALWAYS = {
    "sinks(2) | window(3)": lambda q, k: (k < 2) | (abs(q - k) < 3),
    "q == k": lambda q, k: q == k,
}


def select(p: Problem) -> str:
    """Choices under the program by a drawn rule, with and without forced blocks, in groups of heads and alone; of one
    case in 16 also in JAX, which compiles for its shapes."""
    m, number = fk.mask(p.text, **p.bound), number_of(p.text)
    draw = random.Random(number)
    block = draw.choice([p.block, (1, 3), (4, 2), (5, 5)])
    place: dict[str, Any] = {"q_len": p.lengths[0], "kv_len": p.lengths[1], "mask": m}
    if m.layout(*p.lengths, block=p.block, **p.where).exact:
        seen = tiles(p.seen, p.block)
        table = np.asarray(selection.choose(torch.zeros(seen.shape), p.block, keep=1.0, share="head", **place))
        assert (table == seen).all(), f"all: {np.argwhere(table != seen)[0]}"
    if not m.layout(*p.lengths, block=block, **p.where).exact:  # tiles that the layout leaves open count as visible
        return str(m)
    seen = tiles(p.seen, block)
    scores = np.random.default_rng(number).normal(size=seen.shape) * 2
    keywords, rule = RULES[draw.choice([*RULES])]
    always = draw.choice([None, *ALWAYS])
    forced = np.zeros_like(seen)
    if always is not None:
        q, k = np.ogrid[: p.lengths[0], : p.lengths[1]]
        forced = tiles(p.seen & ALWAYS[always](q, k), block)
    heads = seen.shape[1]
    kv_heads, share = draw.choice([n for n in range(1, heads + 1) if heads % n == 0]), draw.choice(["group", "head"])
    place |= {"kv_heads": kv_heads, "share": share, "always": always}
    wanted = choices.chosen(scores, seen, forced, rule, kv_heads, share)
    for like in (torch.from_numpy(scores), *([scores_of_jax(scores)] if number % 16 == 0 else ())):
        table = np.asarray(selection.choose(like, block, **keywords, **place))
        assert table.shape == wanted.shape, f"shape: {table.shape}"
        assert (table == wanted).all(), f"choice: {np.argwhere(table != wanted)[0]} of {keywords}, {share}, {always}"
    return str(m)


def scores_of_jax(scores: Any) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(scores, jnp.float32)


def tiles(seen: Any, block: tuple[int, int]) -> Any:
    """Whether tiles have a visible pair."""
    pads = [(0, -n % size) for n, size in zip(seen.shape[2:], block, strict=True)]
    whole = np.pad(seen, [(0, 0), (0, 0), *pads])
    batch, heads, rows, columns = whole.shape
    return whole.reshape(batch, heads, rows // block[0], block[0], columns // block[1], block[1]).any((3, 5))
