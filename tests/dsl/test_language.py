"""What texts mean: precedence, definitions, hygiene, types from use, the library."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from frisket.dsl.errors import MaskSyntaxError
from frisket.dsl.from_python.trace import trace
from frisket.dsl.program import parse_expression, read
from frisket.dsl.show import show
from frisket.grammar import build, load
from frisket.runtime.masks.mask import mask, score


def same(a, b, **params):
    assert parse_expression(a, params) is parse_expression(b, params)


def test_shipped_parser_tables_are_those_of_the_grammar():
    with open(build.HERE / "mask.json", encoding="utf-8") as f:
        assert f.read() == build.text()
    assert {action for _, _, action in load().rules} - {None} == set(_actions())


def _actions():
    from frisket.dsl.parse import ACTIONS

    return ACTIONS


LOOSEST_FIRST = ["|", "^", "&", "<<", "+", "*", "**"]


@pytest.mark.parametrize(("loose", "tight"), list(itertools.combinations(LOOSEST_FIRST, 2)))
def test_operators_bind_in_the_order_of_precedence(loose, tight):
    same(f"q {loose} k {tight} 3", f"q {loose} (k {tight} 3)")
    same(f"q {tight} 3 {loose} k", f"(q {tight} 3) {loose} k")


MEANS = [
    ("q >= k & q - k < 4", "(q >= k) & ((q - k) < 4)"),
    ("q >= k or k > 2 and q > 1", "(q >= k) | ((k > 2) & (q > 1))"),
    ("not q >= k and k > 2", "(~(q >= k)) & (k > 2)"),
    ("~(q >= k) & k > 2", "(~(q >= k)) & (k > 2)"),
    ("!(q > k)", "~(q > k)"),
    ("0 <= q - k < 4", "0 <= q - k & q - k < 4"),
    ("q - k - 1 > 0", "((q - k) - 1) > 0"),
    ("2 ** 3 ** 2 > q", "2 ** (3 ** 2) > q"),
    ("-q ** 2 < k", "-(q ** 2) < k"),
    ("-q // 2 < k", "(-q) // 2 < k"),
    ("score if q > k else 0.0 if k > 2 else 1.0", "where(q > k, score, where(k > 2, 0.0, 1.0))"),
    ("bias[b][h][q, k] > 0", "bias[b, h, q, k] > 0"),
    ("causal(q, k)", "q >= k"),
    ("causal(b, h, k, q)", "k >= q"),
    ("causal(3)", "q + 3 >= k"),
    ("causal(q = q // 2, k = k // 2)", "q // 2 >= k // 2"),
    ("window(8, q = k, k = q)", "abs(k - q) < 8"),
    ("at(causal & window(4), q = q + 1)", "q + 1 >= k & abs(q + 1 - k) < 4"),
    ("clamp(q, 0, 4) > k", "min(max(q, 0), 4) > k"),
    ("ceil(score) > 2", "-floor(-score) > 2"),
    ("relu(score)", "max(score, 0.0)"),
    ("silu(score)", "score * sigmoid(score)"),
    ("gelu(score)", "0.5 * score * (1.0 + erf(score / 1.4142135623730951))"),
    ("softplus(score)", "max(score, 0.0) + log1p(exp(-abs(score)))"),
    ("alibi then softcap(50)", "50 * tanh((score + (k - q) * exp2(-8.0 * (h + 1) / H)) / 50)"),
    ("score + dot(x[b, :], y[k, :])", "score + sum(j in 0..extent(x, 1): x[b, j] * y[k, j])"),
    ("any(i in 0..2: any(j in 0..3: i * j == q))", "any(j in 0..2: any(i in 0..3: j * i == q))"),
    ("def f(w) = abs(q - k) <= w\nf(3)", "abs(q - k) <= 3"),
    ("def f = q\ndef f(x) = f + x\nf(k) > f", "q + k > q"),
    ("q > 0x10 & k > 1_000 # comment", "q > 16 & k > 1000"),
    ("(q >=\n k)", "q >= k"),
]


@pytest.mark.parametrize(("text", "meaning"), MEANS, ids=[t for t, _ in MEANS])
def test_texts_have_the_documented_meaning(text, meaning):
    same(text, meaning)


def test_scalar_arguments_keep_the_callers_coordinates():
    same("sliding(q // 2, 4, q = q - 1)", "-4 <= q - 1 - k & q - 1 - k <= q // 2")


def test_masks_as_arguments_move_with_the_body():
    same("def twice(m) = m & q > 3\ntwice(causal, q = q // 2)", "q // 2 >= k & q // 2 > 3")


def test_substitution_is_simultaneous():
    same("causal(q = k, k = q)", "k >= q")
    same("def swap(x) = q - k + x\nswap(q, q = k, k = q) > 0", "k - q + q > 0")


def test_a_name_in_an_argument_is_not_caught_by_the_body():
    same("def f(x) = any(j in 0..3: x == j)\nany(j in 0..5: f(j + q))", "any(i in 0..5: any(j in 0..3: i + q == j))")
    same("def f(w, x) = w + x\ndef g(x) = f(x, q)\ng(k) > 1", "k + q > 1")


def test_tables_pass_through_definitions():
    same("def own(t) = same(t) & t[q] > 0\nown(doc)", "doc[q] == doc[k] & doc[q] > 0")


def test_user_names_hide_library_names_with_a_note():
    found = read("def window(w) = q > w\nwindow(3) & sliding(1, 1)", kind="mask")
    assert found.mask is parse_expression("q > 3 & sliding(1, 1)")
    assert found.notes == ["`window` is defined here and hides the library's `window`"]
    bound = mask("q < prefix", prefix=3)
    assert bound.expr is parse_expression("param prefix: int\nq < prefix")
    assert bound.origin.notes == ("`prefix` is a parameter here and hides the library's `prefix`",)


INFERRED = [
    ("q < w", {"w": "Int"}),
    ("score * w", {"w": "Float"}),
    ("w & q > k", {"w": "Bool"}),
    ("(w & 3) == 0", {"w": "Int"}),
    ("~t[q] & ~w", {"t": "Bool", "w": "Bool"}),
    ("score + slope[h] * (k - q)", {"slope": "Float"}),
    ("score if flag else -inf", {"flag": "Bool"}),
    ("doc[off[q]] == doc[k]", {"doc": "Int", "off": "Int"}),
    ("w / 2 > q", {"w": "Float"}),
    ("w % 2 == q & w / 2 > q", {"w": "Int"}),
    ("a < c & score * c > 0.0", {"a": "Float", "c": "Float"}),
    ("global_tokens(t)", {"t": "Bool"}),
    ("score + t[q] * t[k] * 0.5", {"t": "Float"}),
]


@pytest.mark.parametrize(("text", "types"), INFERRED, ids=[t for t, _ in INFERRED])
def test_types_from_use(text, types):
    from frisket.dsl.ir import free_names

    scalars, tables = free_names(parse_expression(text))
    found = {n: str(t) for n, t in scalars.items()} | {n: str(t) for n, (_, t) in tables.items()}
    assert found == types


def test_values_and_declarations_win_over_use():
    assert show(parse_expression("score * w", {"w": 3}), {"w"}) == "score * w"
    assert parse_expression("param w: float\nq < w").args[1].type.value == "Float"
    assert read("param w: int = 4\nq < w").defaults == {"w": 4}
    declared = read("param doc: sorted int[Q_LEN]\nsame(doc)").declared["doc"]
    assert (declared.rank, declared.fact, declared.axes) == (1, "sorted", ("Q_LEN",))


def test_sites_are_the_parts_of_the_text_outermost_first():
    text = "causal & window(4)"
    found = read(text, kind="mask")
    shown = [(text[s.start : s.stop], show(e)) for s, e in found.sites]
    assert shown[:3] == [
        (text, "q >= k & abs(q - k) < 4"), ("causal", "q >= k"), ("window(4)", "abs(q - k) < 4"),
    ]  # fmt: skip


doc = np.array([0, 0, 1, 1])
seen = np.array([True, False, True, False])
lens = np.array([3])
slopes = np.array([0.5, 0.25])

LIBRARY = {
    "causal": lambda q, k: q >= k,
    "causal(3)": lambda q, k: q + 3 >= k,
    "window(4)": lambda q, k: abs(q - k) < 4,
    "q - k >= -2 & q - k <= 4": lambda q, k: (q - k >= -2) & (q - k <= 4),
    "prefix(4)": lambda k: k < 4,
    "same(doc)": lambda q, k: doc[q] == doc[k],
    "sinks(4)": lambda k: k < 4,
    "chunked(4)": lambda b, h, q, k: q // 4 == k // 4,
    "dilated(4, 2)": lambda q, k: (np.abs(q - k) <= 4) & ((q - k) % 2 == 0),
    "global_tokens(seen)": lambda q, k: np.logical_or(seen[q], seen[k]),
    "padding(lens)": lambda b, q, k: (q < lens[b]) & (k < lens[b]),
}


@pytest.mark.parametrize("text", LIBRARY)
def test_a_lambda_is_the_same_expression_as_the_text(text):
    tables = {n: v for n, v in {"doc": doc, "seen": seen, "lens": lens}.items() if f"({n})" in text}
    traced = trace(LIBRARY[text], "mask")
    assert traced.expr is mask(text, **tables).expr
    assert traced.tables.keys() == tables.keys()


def test_score_lambdas_give_the_expr_of_the_library():
    assert score(lambda score, q, k, h: score + slopes[h] * (k - q)).expr is score("alibi(slopes)", slopes=slopes).expr
    assert score(lambda score: 50.0 * np.tanh(score / 50.0)).expr is score("softcap(50.0)").expr


def test_reading_a_mask_imports_neither_torch_nor_jax_nor_lark():
    code = (
        "import sys; from frisket.runtime.masks.mask import mask; mask('causal');"
        "print([m for m in ('torch', 'jax', 'lark', 'triton') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    "text", ["def f(x, y) = x | (y * 3)\nmask = q >= k", "((w & 3) | (v * 2)) > q", "(v - 1 ^ w) == k"]
)
def test_undeclared_names_in_sums_turn_a_bar_into_bitwise_or(text):
    """`y * 3` is a number, so `x | (y * 3)` is of bits, though nothing declares x or y."""
    assert read(text, kind="mask").mask is not None


SIGNS_OF_EITHER = ["x & x", "~x", "x | y", "x ^ z", "x & z if q > 2 else ~x", "where(q > 1, x | z, z)"]
NUMBERS_OR_EITHER = ["k + y", "min(y, k)", "y / 2", "y % 2", "sum(j in 0..3: y)", "y", "~y", "y & z"]


@pytest.mark.parametrize("either", SIGNS_OF_EITHER)
@pytest.mark.parametrize("other", NUMBERS_OR_EITHER)
def test_a_definition_that_nobody_calls_may_be_of_bits(either, other):
    """`x & x` may be bits, so it may stand in one branch and `k + y` in the other; a call then says what x is."""
    for a, b in ((either, other), (other, either)):
        for body in (f"({a}) if q > k else ({b})", f"where(q > k, {a}, {b})", f"max(({a}) if q > k else ({b}), 3)"):
            assert read(f"def f(x, y, z) = {body}\nmask = q >= k", kind="mask").mask is not None


@pytest.mark.parametrize("body", ["x & (k > 1) if q > k else y + k", "(x and y) if q > k else y + k"])
def test_unused_definition_that_fits_no_call_is_refused(body):
    with pytest.raises(MaskSyntaxError):
        read(f"def f(x, y, z) = {body}\nmask = q >= k", kind="mask")
