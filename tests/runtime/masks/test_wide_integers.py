"""Integers that leave 64 bits: the error names the clause, its place in the text, and what to write in its place."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import frisket as fk
from frisket.flex import create_block_mask

N = 8
BITS, MOD = np.arange(N) - 3, np.array([3, 63] * 4)
Q = torch.zeros(1, 1, N, 4)
FIELD = """an integer leaves 64 bits in `1 << mod[k]`
  mask 1:22
    causal & (bits[q] & (1 << mod[k])) != 0
                         ^^^^^^^^^^^
  to test a bit write `(bits[q] >> mod[k]) & 1`"""
PRODUCT = """an integer leaves 64 bits in `q * w`
  mask 1:1
    q * w >= k * w
    ^^^^^
  bound its factors, for example by `%`; integers wrap as in torch in `wrap(q * w, 64)`"""


def message(f):
    with pytest.raises(fk.FrisketError) as caught:
        f()
    return str(caught.value)


@pytest.mark.parametrize("way", ["dense", "layout", "attention"])
def test_text_whose_integers_leave_64_bits_is_pointed_at(way):
    for text, values, said in (
        ("causal & (bits[q] & (1 << mod[k])) != 0", {"bits": BITS, "mod": MOD}, FIELD),
        ("q * w >= k * w", {"w": 1 << 62}, PRODUCT),
    ):
        mask = fk.mask(text, **values)
        ask = {
            "dense": lambda m: m.dense(N, N), "layout": lambda m: m.layout(N, N),
            "attention": lambda m: fk.attention(Q, Q, Q, m, backend="aten"),
        }[way]  # fmt: skip
        assert message(lambda a=ask, m=mask: a(m)) == said


def test_advice_for_bits_shows_the_same_mask():
    values = {"bits": BITS, "mod": np.minimum(MOD, 62)}
    shifted, field = (
        fk.mask("((bits[q] >> mod[k]) & 1) != 0", **values),
        fk.mask("(bits[q] & (1 << mod[k])) != 0", **values),
    )
    np.testing.assert_array_equal(shifted.dense(N, N), field.dense(N, N))
    whole = fk.mask("((bits[q] >> mod[k]) & 1) != 0", bits=BITS, mod=MOD).dense(N, N)[0, 0]
    np.testing.assert_array_equal(whole, (BITS[:, None] >> MOD) & 1 != 0)


def test_scores_whose_integers_leave_64_bits_are_pointed_at():
    text = "where((bits[q] & (1 << 63)) != 0, score, -inf)"
    found = message(lambda: fk.attention(Q, Q, Q, None, text, bits=BITS, backend="aten"))
    assert "\n  score mod 1:19\n" in found
    assert found.endswith("\n  to test a bit write `(bits[q] >> 63) & 1`")
    found = message(lambda: fk.attention(Q, Q, Q, None, "score + float(q * w)", w=1 << 62, backend="aten"))
    assert re.match("an integer of this mask may leave 64 bits in `.*`\n  bound its parameters", found)


def test_functions_whose_integers_leave_64_bits_wrap():
    bits, mod = torch.from_numpy(BITS), torch.from_numpy(MOD)

    def mask_mod(b, h, q, k):
        return (bits[q] & (1 << mod[k])) != 0

    want = mask_mod(0, 0, torch.arange(N)[:, None], torch.arange(N))
    np.testing.assert_array_equal(fk.mask(mask_mod).dense(N, N)[0, 0], want)
    assert create_block_mask(mask_mod, None, None, N, N, "cpu").layout is not None


def test_advice_to_wrap_is_followed():
    mask = fk.mask("wrap(q * w, 64) >= wrap(k * w, 64)", w=(1 << 62) + 1)
    q, k = np.ogrid[:N, :N]
    np.testing.assert_array_equal(mask.dense(N, N)[0, 0], q * np.int64((1 << 62) + 1) >= k * np.int64((1 << 62) + 1))
