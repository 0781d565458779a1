"""Masks and score mods as values."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from frisket.dsl.errors import ParameterError
from frisket.dsl.program import parse_expression
from frisket.runtime.masks.mask import Mask, ScoreMod, load, mask, program, score

doc = np.array([0, 0, 1, 1])


def test_equal_by_value_and_hashable():
    a, b = mask("same(doc) & q < w", doc=doc, w=3), mask("same(doc) & q < w", doc=doc.copy(), w=3)
    assert a == b
    assert len({a, b}) == 1
    others = [mask("same(doc) & q < w", doc=doc + 1, w=3), mask("same(doc) & q < w", doc=doc, w=4), mask("causal"), 3]
    assert all(a != o for o in others)
    assert mask("q < w", w=1) != mask("param w: float\nq < w", w=1)
    assert mask("causal") == mask(lambda q, k: q >= k) == mask("q >= k")


def test_bound_arrays_are_our_own():
    table = doc.copy()
    m = mask("same(doc)", doc=table)
    table[:] = 7
    assert m.params["doc"].tolist() == doc.tolist()
    with pytest.raises(ValueError, match="read-only"):
        m.params["doc"][0] = 1


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickle_and_copy(protocol):
    m = mask("same(doc) & any(j in 0..3: q - k == j) & w", doc=doc)
    back = pickle.loads(pickle.dumps(m, protocol))
    assert back == m
    assert back.expr is m.expr
    assert (back.source, back.sites) == (m.source, m.sites)
    assert copy.deepcopy(m) == m
    s = score("alibi").then("softcap(50)")
    assert pickle.loads(pickle.dumps(s)) == s


def test_pickle_of_a_deep_mask():
    m = mask("q + " * 5000 + "q > k")
    assert pickle.loads(pickle.dumps(m)) == m


def test_str_parses_back_with_its_parameters():
    for m in (
        mask("same(doc) & window(w)", doc=doc, w=2),
        score("score + c * slope[h]", c=3, slope=np.ones(2, np.float32)),
    ):
        assert parse_expression(str(m), dict(m.params)) is m.expr
    assert repr(mask("same(doc) & window(w)", doc=doc, w=2)) == ("Mask('same(doc) & window(w)', doc=int64[4], w=2)")


def test_algebra_is_that_of_the_dense_masks():
    m, n = mask("causal & window(w)", w=3), mask("same(doc)", doc=doc)
    a, b = m.dense(4, 4), n.dense(4, 4)
    for made, expected in (
        (m & n, a & b), (m | n, a | b), (m ^ n, a ^ b), (~m, ~a), (m - n, a & ~b),
        (m & "sinks(1)", a & (np.arange(4) < 1)),
    ):  # fmt: skip
        np.testing.assert_array_equal(made.dense(4, 4), expected)


def test_name_bound_to_two_values_becomes_two_names():
    both = mask("window(w)", w=2) | mask("prefix(w)", w=3)
    assert str(both) == "window(w) | prefix(w_2)"
    assert dict(both.params) == {"w": 2, "w_2": 3}
    assert dict((mask("window(w)", w=2) | mask("prefix(w)", w=2)).params) == {"w": 2}
    unbound = mask("window(w)", w=2) | mask("prefix(w)")
    assert (str(unbound), unbound.unbound) == ("window(w_2) | prefix(w)", ("w",))
    third = both & mask("q < w", w=9)
    assert dict(third.params) == {"w": 2, "w_2": 3, "w_3": 9}


def test_mask_at_substitutes_positions():
    m = mask("causal & window(w)", w=4)
    assert str(m.at(q="q // 2", k="k // 2")) == "causal(q = q // 2, k = k // 2) & window(w, q = q // 2, k = k // 2)"
    assert str(m.at(q=3)) == "causal(q = 3) & window(w, q = 3)"
    assert str(m.at(q="k", k="q")) == "causal(q = k, k = q) & window(w, q = k, k = q)"
    moved = mask("causal").at(q="q - off[doc[q]]", off=np.array([0, 2]), doc=doc)
    assert sorted(moved.params) == ["doc", "off"]
    assert m.at() == m
    for bad in ({"w": 2}, {"q": 1.5}, {"q": "q / 2"}):
        with pytest.raises(ParameterError):
            m.at(**bad)


def test_then_feeds_one_to_the_next():
    s = score("alibi(slopes)", slopes=np.ones(2)).then(score("softcap(c)", c=5.0))
    assert str(s) == "alibi(slopes) then softcap(c)"
    with pytest.raises(ParameterError, match="does not use `score`"):
        s.then("q * 1.0")


def test_masks_can_be_bound_later():
    m = mask("same(doc) & q < w", w=3)
    assert m.unbound == ("doc",)
    assert m.bind(doc=doc).unbound == ()
    assert mask(m, doc=doc) == m.bind(doc=doc)
    assert (m.scalars, m.bind(doc=doc).tables.keys()) == ({"w": 3}, {"doc"})
    assert score("softcap(c)").bind(c=5).params["c"] == 5.0


def test_arrays_of_other_frameworks():
    torch = pytest.importorskip("torch")
    assert mask("same(doc)", doc=torch.tensor(doc)) == mask("same(doc)", doc=doc)
    s = score("score + t[q]", t=torch.ones(3, dtype=torch.bfloat16, requires_grad=True))
    assert s.params["t"].dtype == np.float32
    assert mask("q < w", w=torch.tensor(3)).params["w"] == 3
    jnp = pytest.importorskip("jax.numpy")
    assert mask("same(doc)", doc=jnp.asarray(doc, "int32")) == mask("same(doc)", doc=doc.astype(np.int32))
    assert score("score + t[q]", t=jnp.ones(3, "bfloat16")).params["t"].dtype == np.float32


def test_programs_load_masks_and_score_mods(tmp_path):
    file = tmp_path / "gemma.frisket"
    file.write_text(
        "param w: int = 3\nparam doc: sorted int[Q_LEN]\nmask = causal & same(doc) & window(w)\nscore = softcap(50)\n"
    )
    p = load(file, doc=doc)
    assert (type(p.mask), type(p.score), p.name) == (Mask, ScoreMod, "gemma")
    assert (p.mask.params["w"], p.mask.origin.declared["doc"].fact) == (3, "sorted")
    assert dict(p.score.params) == {}
    assert load(file, doc=doc, w=2).mask.params["w"] == 2
    assert program("causal").mask == mask("causal")
    assert program("score * 2").score == score("score * 2")
    with pytest.raises(ParameterError, match="cannot read"):
        load(tmp_path / "none.frisket")


def test_mask_names_the_layout_for_its_attributes():
    for name in ("plot", "explain", "counts"):
        with pytest.raises(AttributeError, match=rf"no `{name}`; .*: write mask.layout\(q_len, kv_len\).{name}$"):
            getattr(mask("causal"), name)
    with pytest.raises(AttributeError, match=r"a mask has no `other`$"):
        _ = mask("causal").other
