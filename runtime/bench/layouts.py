"""Layouts beside those of others: torch's `create_block_mask`, splash attention's `process_mask`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from frisket.lowering.analysis.tiles import EMPTY
from frisket.runtime.export.tile_lists import mask_mod_of
from frisket.runtime.masks.mask import Mask

from .contestants import splash_mask, torchs
from .race import Array, Call, Contest, Contestant, NoWordsError, Stage, seconds

TILE = 128
PAIRS = 1 << 26
MOST = {"create_block_mask": 8192, "process_mask": 16384}  # tokens: both look at every pair, and take minutes beyond


def stage() -> Stage:
    """Calls return which tiles are read, bool [1, heads or 1, rows, columns]."""
    torch, jax = (f"{x} is not installed" if not importlib.util.find_spec(x) else "" for x in ("torch", "jax"))
    contestants = (
        Contestant("frisket", _ours, ours=True),
        Contestant("create_block_mask", _create, missing=torch, family="flex"),
        Contestant("splash process_mask", _process, missing=jax, family="splash"),
    )
    return Stage("layout", contestants, lambda read: read(), seconds, _read)


def _read(contest: Contest) -> Iterator[tuple[slice, Array]]:
    """The tiles that are read, found by looking at every pair, where pairs are few enough."""
    s = contest.sizes
    if s.q_len * s.kv_len > PAIRS:
        return
    seen = contest.dense()
    tiles = np.zeros((*seen.shape[:2], -(-s.q_len // TILE), -(-s.kv_len // TILE)), bool)
    for i in range(tiles.shape[2]):
        rows = seen[:, :, i * TILE : (i + 1) * TILE].any(2)
        tiles[:, :, i] = np.logical_or.reduceat(rows, np.arange(0, s.kv_len, TILE), axis=2)
    yield slice(None), np.broadcast_to(tiles, (s.batch, s.heads, *tiles.shape[2:]))


def _mask(contest: Contest) -> Mask:
    if contest.mask is None:
        raise NoWordsError("a score mod hides nothing: there are no tiles to tell apart")
    return contest.mask


def _short(contest: Contest, who: str) -> None:
    longest = max(contest.sizes.q_len, contest.sizes.kv_len)
    if longest > MOST[who]:
        raise NoWordsError(f"{who} looks at every pair: it is not asked for more than {MOST[who]:,} tokens")


def _ours(contest: Contest) -> Call:
    """A new layout at every call, of a new mask."""
    s, m = contest.sizes, _mask(contest)

    def run() -> Callable[[], Array]:
        layout = Mask(m.expr, m.params).layout(s.q_len, s.kv_len, batch=s.batch, heads=s.heads, block=(TILE, TILE))
        layout.spans  # noqa: B018 - what it is for
        return lambda: np.broadcast_to(layout.kinds() != EMPTY, (s.batch, s.heads, layout.rows, layout.columns))

    return run


def _create(contest: Contest) -> Call:
    """`create_block_mask`, eager, of our mask_mod."""
    from torch.nn.attention.flex_attention import create_block_mask

    s = contest.sizes
    _short(contest, "create_block_mask")
    layout = _mask(contest).layout(s.q_len, s.kv_len, batch=s.batch, heads=s.heads)
    create = partial(
        torchs(create_block_mask), mask_mod_of(layout), s.batch, s.heads, s.q_len, s.kv_len, device="cpu",
        BLOCK_SIZE=TILE,
    )  # fmt: skip

    def run() -> Callable[[], Array]:
        block_mask = create()
        return lambda: block_mask.to_dense().bool().numpy()

    return run


def _process(contest: Contest) -> Call:
    """`process_mask`, its cache emptied, of what `splash_mask` says."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

    s = contest.sizes
    _mask(contest)
    _short(contest, "process_mask")
    if s.q_len % TILE or s.kv_len % TILE:
        raise NoWordsError(f"splash attention takes lengths that are multiples of {TILE}")
    mask = splash_mask(contest)

    def run() -> Callable[[], Array]:
        info._process_mask.cache_clear()
        mask_info, _ = info.process_mask(mask, (TILE, TILE), shrink_grid=False)
        shape = (s.batch, s.heads, s.q_len // TILE, s.kv_len // TILE)
        return lambda: np.broadcast_to(np.asarray(mask_info.block_mask) > 0, shape)

    return run
