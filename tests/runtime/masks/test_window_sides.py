"""Sides of windows that are negative: -1 is no limit where the peer has it so, and an error elsewhere."""

import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import frisket as fk
from frisket.operations import AttentionRegistry
from frisket.runtime.machine import caller

Q, K, V = (jnp.asarray(x) for x in np.random.default_rng(0).standard_normal((3, 1, 24, 2, 8)).astype(np.float32))


@pytest.mark.parametrize(("text", "word"), [
    ("sliding(-1, 0)", r"`sliding\(left, right\)` needs `left != -1`\n(.*\n)+  a window has left >= 0; .*flash_window"),
    ("sliding(3, -1)", "needs `right != -1`"), ("local(-1, 0, 2)", "needs `left != -1`"),
    ("local(0, -1, 2)", r"flash_window\(left, -1\)"), ("flash_window(-2, 0)", "needs `left >= -1`"),
    ("flash_window(0, -7)", "needs `right >= -1`"), ("document(off, sliding(-1, 0))", "needs `left != -1`"),
    ("sliding(-1, 0, q = q // 2)", "needs `left != -1`"), ("def f(a) = sliding(a, 0)\nmask = f(-1)", "left != -1"),
])  # fmt: skip
def test_negative_sides_are_refused_at_the_call(text, word):
    with pytest.raises(fk.MaskSyntaxError, match=word):
        fk.mask(text)


def test_bands_ahead_and_behind_stay():
    for text, formula in (("sliding(-5, 10)", "5 <= k - q <= 10"), ("local(-2, 7, 1)", "2 <= k - q - 1 <= 7")):
        assert fk.mask(text).equivalent(formula, 40, 40)
    assert fk.mask("sliding(q // 2 - 1, 0)").layout(8, 8).visible_pairs  # a width of its own for each query
    assert fk.mask("flash_window(5, 2)").expanded == "q + KV_LEN - Q_LEN - k <= 5 & -2 <= q + KV_LEN - Q_LEN - k"


def test_bound_sides_are_checked_whenever_they_are_bound():
    error = "`w != -1` does not hold for w=-1; a window has left >= 0"
    made = fk.mask("causal & sliding(w, 0)")
    for late in (made, made & "k > 2", ~made, made.at(q="q + 1"), pickle.loads(pickle.dumps(made))):
        with pytest.raises(fk.ParameterError, match=error):
            late.bind(w=-1)
        assert late.bind(w=3).layout(8, 8).visible_pairs
    with pytest.raises(fk.ParameterError, match=error):
        fk.mask("param w: int = -1\nmask = sliding(w, 0)")
    with pytest.raises(fk.ParameterError, match=r"`w\[h\] >= -1` does not hold for w=int64\[2\]"):
        fk.mask("flash_window(w[h], 0)", w=[3, -2])
    with pytest.raises(fk.ParameterError, match=error):
        (fk.mask("window(w)", w=3) & fk.mask("sliding(w, 0)")).bind(w=-1)
    att = fk.compile("sliding(w, 0)")
    for x in (Q, torch.ones(1, 2, 24, 8)):
        att(x, x, x, w=3)
        with pytest.raises(fk.ParameterError, match=error):
            att(x, x, x, w=-1)


def test_sides_of_no_limit_leave_closed_forms():
    for text, bound in (
        ("flash_window(-1, 0)", {}),
        ("flash_window(w, 0)", {"w": -1}),
        ("flash_window(w, 0)", {"w": 9}),
    ):
        assert fk.mask(text, **bound).layout(4096, 4096).facts.closed_form
    one, other = (fk.compile("flash_window(w, 0)", w=w).stages(q_len=256).simplified for w in (-1, 1))
    assert str(one) == "mask = q - k >= Q_LEN - KV_LEN"
    assert str(other) == "mask = q - k >= Q_LEN - KV_LEN & q - k <= Q_LEN + w - KV_LEN"


def test_traced_sides_are_a_fact_and_checked_on_request(monkeypatch):
    att, plans = fk.compile("flash_window(w, 0)", backend="xla"), []

    def run(w):
        plans.append(att.plan(24, 24, heads=2, w=w).unchecked)
        return att(Q, K, V, w=w)

    np.testing.assert_allclose(jax.jit(run)(-1), fk.attention(Q, K, V, "causal", backend="xla"), atol=1e-6)
    assert plans == [("`w >= -1`",)]
    monkeypatch.setenv("FRISKET_CHECK", "1")

    def checked():
        jax.jit(lambda w: att(Q, K, V, w=w))(-3).block_until_ready()
        jax.effects_barrier()

    with pytest.raises(Exception, match="`w >= -1` does not hold for w=-3"):
        checked()


@pytest.mark.parametrize(("window", "causal", "mask"), [
    ((-1, 0), False, "causal"), (-1, True, "causal"), (-1, False, None), ((4, -1), False, "q - k <= 4"),
    ((np.int64(-1), 3), False, "k - q <= 3"), ((4, 0), False, "sliding(4, 0)"),
])  # fmt: skip
def test_operators_take_a_side_without_limit(window, causal, mask):
    found = AttentionRegistry.create("frisket")(Q, K, V, sliding_window=window, causal=causal).attention_outputs
    np.testing.assert_allclose(found, fk.attention(Q, K, V, mask), atol=1e-6)


def test_operators_refuse_other_negative_sides():
    for window in (-2, (3, -5)):
        with pytest.raises(fk.ParameterError, match="a side is a number of tokens, or -1 for no limit"):
            AttentionRegistry.create("frisket")(Q, K, V, sliding_window=window)


def test_sliding_window_warns_of_its_new_meaning_once(monkeypatch):
    monkeypatch.setattr(caller, "SAID", set())

    def largest():
        masks = fk.mask("sliding_window(3)"), fk.mask("gym_sliding_window(3)")
        fk.mask("causal & sliding_window(5)")
        return [m.layout(9, 9).row_counts.max() for m in masks]

    with pytest.warns(UserWarning, match=r"shows w keys, as in transformers; .* `gym_sliding_window\(w\)`") as seen:
        assert largest() == [3, 4]
    assert len(seen) == 1
    assert Path(seen[0].filename).name == "test_window_sides.py"
