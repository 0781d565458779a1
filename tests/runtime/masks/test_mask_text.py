"""Masks and score mods print with the calls of the library that stand in their texts, and parse back to the same."""

import copy
import pickle

import numpy as np
import pytest
from cases import masks, mods

import frisket as fk
from frisket.dsl.program import read

MASKS, MODS = masks(64), mods(64)
EVERY = [*((fk.mask, s, one) for s, one in MASKS.items()), *((fk.score, s, one) for s, one in MODS.items())]


def check_text(part):
    """`part`, whose text and whose formula parse to its Expr, as do those of its copies."""
    make = fk.mask if isinstance(part, fk.Mask) else fk.score
    for one in (part, pickle.loads(pickle.dumps(part)), copy.deepcopy(part)):
        assert str(one) == str(part)
        assert make(str(one), **one.params).expr is part.expr, str(one)
        assert make(one.expanded, **one.params).expr is part.expr, one.expanded
    return str(part)


@pytest.mark.parametrize(("make", "signature", "one"), EVERY, ids=[s for _, s, _ in EVERY])
def test_text_of_every_entry_keeps_its_call(make, signature, one):
    part = make(one.text, **one.params)
    text = one.text.replace("relu(score)", "max(score, 0.0)")  # `relu` is made of `max`
    assert check_text(part) == text
    name = signature.partition("(")[0]
    assert name in check_text(part.at(q="q + 8", k="k // 2"))
    if make is fk.mask:
        assert check_text(~part | "k < 4") == f"~{text} | k < 4"
        assert name in check_text(part & fk.mask("window(64)").at(k="q"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("causal & window(8)", "causal & window(8)"),
        ("causal and (window(2 ** 3) or sinks(4))", "causal & (window(2 ** 3) | sinks(4))"),
        ("strided(4) & k < 9", "strided(4) & k < 9"),  # which is one conjunction
        ("document(off, causal & window(4))", "document(off, causal & window(4))"),
        ("document(off, document(inner, causal))", "document(off, document(inner, causal))"),
        ("causal(q + 1, k)", "causal(q = q + 1)"),
        ("window(q // 2, q = q + 1)", "window(q // 2, q = q + 1)"),
        ("at(causal & sinks(4), q = q + 8)", "causal(q = q + 8) & sinks(4)"),
        ("at(document(off, causal), q = q + 8)", "document(off, causal, q = q + 8)"),
        ("flash_window(2 + 3, 0, q = q + 1)", "flash_window(2 + 3, 0, q = q + 1)"),
        ("any(n in 0..3: window(n + 2) & causal(q = q + n))", "any(j in 0..3: window(j + 2) & causal(q = q + j))"),
        ("def near(w) = window(w) & causal\nnear(q // 2, q = q + 1)", "window(q // 2, q = q + 1) & causal(q = q + 1)"),
        ("def f(m, n) = at(m, q = n)\nf(sinks(4) | causal, k)", "sinks(4) | causal(q = k)"),
        ("def causal = q > k\ncausal & window(8)", "q > k & window(8)"),
        ("def window(w) = q - k < w\nwindow(8) & strided(4)", "q - k < 8 & strided(4)"),
        ("param causal: bool\ncausal & strided(4)", "param causal: bool\ncausal & strided(4)"),
        ("param same: int[_]\nsame[q] == same[k] & causal", "param same: int[_]\nsame[q] == same[k] & causal"),
        ("~(causal & window(8)) ^ ~full", "~(causal & window(8)) ^ ~full"),
        ("k < morton_col(morton_row(q))", "k < morton_col(morton_row(q))"),
        ("dilated(w * 2, g) & w > 1", "dilated(w * 2, g) & w > 1"),
    ],
)
def test_text_of_a_mask_keeps_calls_of_the_library(text, shown):
    assert check_text(fk.mask(text)) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("alibi then softcap(50)", "alibi then softcap(50)"),
        ("score + 1 then softcap(c) then alibi", "score + 1 then softcap(c) then alibi"),
        ("0.5 * (alibi then softcap(5))", "0.5 * (alibi then softcap(5))"),
        ("at(alibi then score * bias[q], q = q + 8)", "alibi(q = q + 8) then score * bias[q + 8]"),
        ("score if causal else -inf", "where(causal, score, -inf)"),
    ],
)
def test_text_of_a_score_mod_keeps_calls_of_the_library(text, shown):
    assert check_text(fk.score(text)) == shown


def test_masks_joined_in_python_keep_the_calls_of_both():
    m, w = fk.mask("causal & window(w)", w=8), fk.mask("window(w)", w=4)
    assert check_text(m | "k < 4") == "causal & window(w) | k < 4"
    assert check_text("sinks(4)" | ~m) == "sinks(4) | ~(causal & window(w))"
    assert repr(m | w) == "Mask('causal & window(w) | window(w_2)', w=8, w_2=4)"
    assert check_text(m & (lambda q, k: q >= 2 * k)) == "causal & window(w) & q >= 2 * k"
    assert check_text(m.at(q="q + 8").at(q="2 * q")) == "causal(q = 2 * q + 8) & window(w, q = 2 * q + 8)"
    assert check_text(m - "sinks(4)") == "causal & window(w) & ~sinks(4)"
    assert check_text(m.bind(w=16)) == str(m)
    assert check_text(fk.score("alibi").then("softcap(5)").at(q="q + 1")) == "alibi(q = q + 1) then softcap(5)"
    assert check_text(fk.score("q - k").then("softcap(score)")) == "float(q - k) then softcap(score)"


def test_shadowing_definition_prints_as_its_formula_when_joined():
    mine = fk.mask("def causal = q > k\nmask = causal & window(8)")
    assert check_text(mine | "causal") == "q > k & window(8) | causal"


def test_parameter_hides_the_call_of_its_name():
    """The name of a call is that of a parameter of the other mask."""
    both = fk.mask("window(4)") & fk.mask("param window: int\nq < window")
    assert check_text(both) == "param window: int\nabs(q - k) < 4 & q < window"
    assert check_text(both.bind(window=3)) == "abs(q - k) < 4 & q < window"


def test_equal_masks_of_other_texts_are_one():
    long, short = fk.mask("q >= k & abs(q - k) < 8"), fk.mask("causal & window(8)")
    assert long == short
    assert hash(long) == hash(short)
    assert (str(long), str(short)) == (long.expanded, "causal & window(8)")
    att, other = fk.compile(short), fk.compile(long)
    assert att.spec == other.spec
    assert att.program.expanded == other.program.expanded == "mask = q >= k & abs(q - k) < 8"
    assert att.source("cpp", q_len=64) == other.source("cpp", q_len=64)
    assert str(att.stages(q_len=64).expr) == "mask = causal & window(8)"
    assert str(other.stages(q_len=64).expr) == "mask = q >= k & abs(q - k) < 8"


def test_pickle_of_an_earlier_version_prints_its_formula():
    m = fk.mask("causal & document(off)", off=[0, 4])
    make, args, (rows, params, origin) = m.__reduce__()
    earlier = make(*args)
    earlier.__setstate__(((rows[0], rows[1][:-1]), params, origin))
    assert earlier == m
    assert str(earlier) == m.expanded == "q >= k & segment(off, q) == segment(off, k)"


def test_expressions_that_are_compiled_hold_no_call():
    text = "def f = window(4)\nparam w: int\nmask = f & document(off, causal)\nscore = alibi then softcap(w)"
    found = read(text)
    sites = [e for _, e in found.sites]
    for e in (found.mask, found.score, *sites, *found.needs):
        assert all(n.op != "call" for n in fk.dsl.ir.walk(e))


def test_reasons_name_the_call_and_the_formula():
    layout = fk.mask("causal & (window(4) | sinks(2))").layout(64, 64, block=16)
    assert layout.explain(9, 20).because == "in causal, q >= k is false: q = 9, k = 20"
    assert layout.explain(3, 1).because == (
        "in causal, q >= k is true: q = 3, k = 1; in window(4), abs(q - k) < 4 is true: abs(q - k) = 2"
    )
    tile = layout.explain(tile=(2, 1)).because
    assert (
        tile == ("in window(4), abs(q - k) < 4 is false throughout: abs(q - k) = 1..31; in sinks(2), k < 2 is false")
        or "in sinks(2), k < 2 is false throughout: k = 16..31" in layout.explain(tile=(3, 1)).because
    )
    assert repr(layout).startswith("Layout('causal & (window(4) | sinks(2))', 64 x 64")


def test_reason_of_the_users_formula_has_no_call():
    layout = fk.mask("q >= k & window(4)").layout(64, 64)
    assert layout.explain(9, 20).because == "q >= k is false: q = 9, k = 20"
    same = fk.mask("same(doc) & causal", doc=np.repeat([0, 1], 32)).layout(64, 64)
    assert same.explain(40, 2).because == "in same(doc), doc[q] == doc[k] is false: doc[q] = 1, doc[k] = 0"
