"""The collection of other test suites' masks and score mods, each against the formula in numpy."""

from __future__ import annotations

import numpy as np
import peer_cases
import pytest
from support.lowering import brute

from frisket.dsl.evaluate import evaluate
from frisket.dsl.library import library
from frisket.lowering.dense import coordinates
from frisket.lowering.plan import Problem

SIZE, HEADS = 40, 4
MASKS, MODS = peer_cases.masks(SIZE), peer_cases.mods(SIZE)
ENTRIES = peer_cases.entries()
b, h, q, k = np.ogrid[:2, :HEADS, :SIZE, :SIZE]
S = np.random.default_rng(4).standard_normal((2, HEADS, SIZE, SIZE)) * 3
d = q - k
NO = -np.inf


def by_fractions(w, n):
    def near(x, y):
        return abs(np.clip(x, n // 2, w - 1 - n // 2) - y) <= n // 2

    return near(q / w, k / w) & near(q % w, k % w)


MASK_FORMULAS = {
    "causal_window(w)": lambda w: (d >= 0) & (d < w),
    "causal_by_batch(off, n)": lambda off, n: q + off[b] * n >= k,
    "halved_documents(doc)": lambda doc: doc[q // 2] == doc[k // 2],
    "first_queries(n)": lambda n: q < n,
    "both_ends(a, z)": lambda a, z: (k < a) | (k >= z),
    "dropped_queries(t)": lambda t: ~t[b, q],
    "even_batches": lambda: (d >= 0) & (b == 0),
    "live_batches(id)": lambda id: id[b] >= 0,
    "open_heads(bias)": lambda bias: (d >= 0) | (bias[h[:, :2]] > 0),
    "positive_sums(x, y)": lambda x, y: x[h[:, :2]] + y[b] > 0,
    "table(t)": lambda t: t[b[:1], h[:, :2], q, k],
    "first_frames(before, moving, frame)": lambda before, moving, frame: q < before * frame + moving * frame,
    "clamped_documents(doc, n)": lambda doc, n: np.minimum(doc, n)[q] == np.minimum(doc, n)[k],
    "far_back(w)": lambda w: k < q - w,
    "late_keys(t)": lambda t: k >= t[k],
    "window_by_query(w)": lambda w: (k <= q) & (k >= q - w[q]),
    "padded_dense(len)": lambda size: (q <= size[b]) & (k <= size[b]),
    "prefix_by_batch(nb)": lambda nb: (k < nb[b]) | (q >= k),
    "natten_by_fractions(w, n)": by_fractions,
}
MOD_FORMULAS = {
    "identity": lambda: S,
    "doubled": lambda: S + S,
    "squared": lambda: S**2,
    "swish": lambda: S / (1 + np.exp(-S)),
    "inverted": lambda: S**-1.0,
    "log_of_positive": lambda: np.where(S > 0, np.log(np.maximum(S, 1e-300)), S),
    "waves": lambda: np.sin(np.cos(S)) + np.tan(b),
    "beat": lambda: np.sin(2 * S) / 2,
    "head_step": lambda: S + h / 10,
    "quotient": lambda: S - np.floor(q / (k + 1)),
    "distance": lambda: S + d,
    "causal_distance": lambda: np.where(d < 0, NO, S + d),
    "causal_score": lambda: np.where(d < 0, NO, S),
    "inverse_causal_score": lambda: np.where(d > 0, NO, S),
    "even_keys": lambda: np.where(k % 2 == 1, NO, S),
    "decoding_window(o, w)": lambda o, w: np.where((k > q + o) | (k <= q + o - w), NO, S),
    "by_head(t)": lambda t: S * t[h],
    "three_biases(x, y, z)": lambda x, y, z: S + x[q] + y[b] + z[h],
    "pair_bias(t)": lambda t: S + t,
    "batch_bias(t)": lambda t: S + t[:, None],
    "full_bias(t)": lambda t: S + t,
    "stacked_bias(t)": lambda t: S + t[0][..., None],
    "bias_by_distance(t)": lambda t: S + t[abs(d)],
    "clamped_bias(t, n)": lambda t, n: S + t[np.clip(d, -n, n) + n],
    "outer_sum(t)": lambda t: S + np.add.outer(t, t),
    "turned_bias(t)": lambda t: S + t.T,
    "indirect_bias(t, off)": lambda t, off: S + t[off][:, None],
    "bias_by_sum(t)": lambda t: S + t[q + k],
    "by_query(t)": lambda t: S * t[:, None],
    "two_biases(x, y)": lambda x, y: S + np.add.outer(x, y),
    "position_bias(t, n)": lambda t, n: S + t[n - 1 - d],
    "row_bias(t, w)": lambda t, w: S + np.repeat(t, w, -1)[None, ..., :SIZE],
    "times(c)": lambda c: c * S,
    "log_mass(t)": lambda t: S + np.log(t[0]),
    "document_score(t)": lambda t: np.where(np.equal.outer(t, t), S, NO),
    "distance_in_document(t, off)": lambda t, off: S + d - np.subtract.outer(off[t], off[t]),
    "switched_bias(t, on)": lambda t, on: S + t if on else S,
    "gated_buckets(t, idx, gate, x, y)": lambda t, idx, gate, x, y: (
        S + t[idx].transpose(2, 0, 1) * gate[:, None, None] * np.add.outer(x, y)
    ),
    "spatial_decay(m, c)": lambda m, c: S * np.exp(-np.linalg.norm(m[:, None] - m, axis=-1) / c[:, None, None]),
    "size_bias": lambda: S + SIZE,
    "checkerboard(c)": lambda c: S + c * (d % 2),
}


def arguments(one):
    """The values of a call, in order: tables in float64 and numbers."""
    call = one.text.splitlines()[-1]
    names = call.partition("(")[2].rstrip(")").split(", ") if "(" in call else []
    values = [one.params[n] if n in one.params else int(n) for n in names]
    return [v.astype(np.float64) if getattr(v, "dtype", None) == np.float32 else v for v in values]


def test_peer_collection_is_complete_and_hides_no_library_name():
    assert {*MASK_FORMULAS} == {*MASKS}
    assert {*MOD_FORMULAS} == {*MODS}
    assert {*MASKS, *MODS} == {*ENTRIES}
    assert not {e.name for e in ENTRIES.values()} & {e.name for e in library().values()}


@pytest.mark.parametrize("signature", MASK_FORMULAS)
def test_peer_masks_equal_their_numpy_formula(signature):
    one = MASKS[signature]
    want = np.asarray(MASK_FORMULAS[signature](*arguments(one)))[: one.batch, : one.heads]
    want = np.broadcast_to(want, (one.batch, one.heads, SIZE, SIZE))
    np.testing.assert_array_equal(one.mask.dense(**one.lengths), want)
    layout = one.mask.layout(**one.lengths, block=(8, 16))
    sizes = {"batch": one.batch, "heads": one.heads, "params": one.mask.scalars, "tables": one.mask.tables}
    assert layout.exact
    np.testing.assert_array_equal(
        layout.kinds(), brute.kinds(one.mask.expr, SIZE, SIZE, block=(8, 16), **sizes)
    )  # fmt: skip


@pytest.mark.parametrize("signature", MOD_FORMULAS)
def test_peer_score_mods_equal_their_numpy_formula(signature):
    one = MODS[signature]
    env = {**coordinates(Problem(SIZE, SIZE, 2, HEADS)), **one.score.scalars, "score": S}
    have = np.broadcast_to(evaluate(one.score.expr, env, one.score.tables), S.shape)
    np.testing.assert_allclose(have, MOD_FORMULAS[signature](*arguments(one)), rtol=1e-9, atol=1e-12)
