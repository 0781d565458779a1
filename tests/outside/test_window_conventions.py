"""The rows of "Window conventions" in docs/migrating.md, compared with the libraries' own code or formulas."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from jax._src.nn.functions import _get_window_mask
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import make_local_attention_mask

import frisket as fk

masking_utils = pytest.importorskip("transformers.masking_utils")
PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## Window conventions")[2].partition("\n## ")[0]
ROWS = {cells[1].strip().replace("`", ""): cells[5].strip(" `") for cells in
        (line.split("|") for line in TABLE.splitlines() if line.startswith("| ") and "`" in line)}  # fmt: skip
W, LEFT, RIGHT, OFFSET = 5, 4, 2, 3


def pairs(q_len, kv_len):
    return np.arange(q_len)[:, None], np.arange(kv_len)[None, :]


def transformers(q, k):
    """The overlay on a causal mask."""
    function = masking_utils.sliding_window_causal_mask_function(W)
    return function(0, 0, torch.from_numpy(q), torch.from_numpy(k)).numpy()


def flash_attention(q, k, left=LEFT, right=RIGHT):
    """`construct_local_mask` of its tests, negated."""
    ahead = k.size - q.size
    over = k > np.minimum(q + ahead + right, k.size) if right >= 0 else np.zeros((q.size, k.size), bool)
    return ~(over | (k < q + ahead - left)) if left >= 0 else ~over


def flex_blog(q, k):
    return (q >= k) & (q - k <= W)


def lower_triangular_local(q, k):
    """xformers' `_materialize_causal_mask` with a window, from the bottom right."""
    shift = k.size - q.size
    return np.triu(np.tril(np.ones((q.size, k.size), bool), shift), shift - W + 1)


def local_from_bottom_right(q, k):
    """xformers' `LocalAttentionFromBottomRightMask.materialize`."""
    shift = k.size - q.size
    return np.triu(np.tril(np.ones((q.size, k.size), bool), shift + RIGHT), shift - LEFT)


def natten(q, k):
    """NATTEN's `get_window_start` without dilation."""
    start = np.clip(q - W // 2, 0, k.size - W)
    return (start <= k) & (k < start + W)


PEERS = {
    "transformers, sliding_window": transformers,
    "FlashAttention, window_size": flash_attention,
    "flex_attention's blog, SLIDING_WINDOW": flex_blog,
    "attention-gym, generate_sliding_window": flex_blog,
    "Splash attention, LocalMask": lambda q, k: make_local_attention_mask(
        (q.size, k.size), (LEFT, RIGHT), offset=OFFSET
    ),
    "jax.nn, local_window_size": lambda q, k: np.asarray(_get_window_mask(q.size, k.size, (LEFT, RIGHT)))[0, 0],
    "xformers, LowerTriangularFromBottomRightLocalAttentionMask": lower_triangular_local,
    "xformers, LocalAttentionFromBottomRightMask": local_from_bottom_right,
    "NATTEN, kernel_size": natten,
}


def test_window_conventions_have_a_peer_for_each_row():
    assert ROWS.keys() == PEERS.keys()


@pytest.mark.parametrize("row", PEERS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(24, 24), (17, 24), (24, 17)])
def test_windows_are_those_of_the_peer(row, q_len, kv_len):
    if row.startswith("NATTEN") and q_len != kv_len:
        q_len = kv_len  # neighbourhoods are of one sequence
    values = {"w": W, "left": LEFT, "right": RIGHT, "offset": OFFSET, "n": kv_len}
    text = re.sub(r"\b(w|left|right|offset|n)\b", lambda m: str(values[m[1]]), ROWS[row])
    bound = {n: x for n, x in values.items() if re.search(rf"\b{n}\b", ROWS[row])}
    for mask in (fk.mask(text), fk.mask(ROWS[row], **bound)):
        np.testing.assert_array_equal(mask.dense(q_len, kv_len)[0, 0], PEERS[row](*pairs(q_len, kv_len)))


@pytest.mark.parametrize(("left", "right"), [(-1, 0), (4, -1), (-1, -1), (0, 0)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(24, 24), (3, 24), (24, 3)])
def test_flash_windows_without_limit_are_those_of_the_peer(left, right, q_len, kv_len):
    want = flash_attention(*pairs(q_len, kv_len), left, right)
    for mask in (fk.mask(f"flash_window({left}, {right})"), fk.mask("flash_window(a, c)", a=left, c=right)):
        np.testing.assert_array_equal(mask.dense(q_len, kv_len)[0, 0], want)
        np.testing.assert_array_equal(mask.layout(q_len, kv_len, block=1).kinds()[0, 0] > 0, want)
