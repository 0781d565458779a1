"""Python functions traced: what is captured, what binds, what is refused and where."""

from __future__ import annotations

import functools
import inspect
import linecache
import math

import numpy as np
import pytest

from frisket.dsl.errors import TraceError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.from_python.trace import trace
from frisket.dsl.program import parse_expression
from frisket.dsl.show import show

doc = np.array([0, 0, 1, 1, 2])
bias = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
WIDTH = 4


def helper(q, k):
    return doc[q] == doc[k]


def shown(fn, kind=None):
    found = trace(fn, kind)
    return show(found.expr, found.tables), sorted(found.tables)


def test_globals_closures_defaults_partials_and_helpers():
    ids, width = np.array([1, 2, 3]), np.int64(7)
    assert shown(lambda q, k: (q - k < WIDTH) & helper(q, k)) == ("q - k < 4 & doc[q] == doc[k]", ["doc"])
    assert shown(lambda q, k: (ids[q] == k) & (q < width)) == ("ids[q] == k & q < 7", ["ids"])
    assert shown(lambda q, k, t=ids: t[q] == k) == ("t[q] == k", ["t"])
    by_name = functools.partial(lambda b, h, q, k, t: t[q] == k, t=ids)
    by_place = functools.partial(lambda w, b, h, q, k: q - k < w, 3)
    assert shown(by_name) == ("t[q] == k", ["t"])
    assert shown(by_place) == ("q - k < 3", [])


def test_trace_leaves_the_function_unchanged():
    ids = np.array([1, 2, 3])

    def fn(q, k):
        return ids[q] == k

    trace(fn)
    assert fn(1, 2)
    assert fn.__closure__[0].cell_contents is ids
    assert isinstance(doc, np.ndarray)


def test_captured_array_is_one_table_however_often_it_is_read():
    a = np.array([1, 2])

    def outer():
        doc = np.array([5, 6])
        return lambda q, k: doc[k] > 0

    inner = outer()
    assert shown(lambda q, k: (a[q] == a[k]) & helper(q, k) & inner(q, k)) == (
        "a[q] == a[k] & doc[q] == doc[k] & doc_2[k] > 0", ["a", "doc", "doc_2"],
    )  # fmt: skip


def test_indexing_of_captured_arrays_becomes_lookups():
    assert shown(lambda b, h, q, k: bias[b][h][q, k] > 0)[0] == "bias[b, h, q, k] > 0"
    found = trace(lambda b, h, q, k: bias[0][b, q, k] > 0)
    assert show(found.expr, found.tables) == "bias[b, q, k] > 0"
    assert found.tables["bias"].shape == (1, 4, 4)
    assert shown(lambda q, k: k == doc[2])[0] == "k == 1"
    assert shown(lambda b, h, q, k: bias[b][h][q][np.int64(-1)] > k)[0] == "bias[b, h, q, 3] > k"  # from the end
    doubled = trace(lambda q, k: (doc * 2)[q] == k)
    assert doubled.tables["doc"].tolist() == [0, 0, 2, 2, 4]


NUMPY = [
    (lambda q, k: np.where(q > k, doc[q], 0) > 0, "where(q > k, doc[q], 0) > 0"),
    (lambda q, k: np.minimum(q, k) < np.maximum(q, 3), "min(q, k) < max(q, 3)"),
    (lambda q, k: np.logical_not(np.equal(q, k)), "~(q == k)"),
    (lambda q, k: np.logical_and(q, k > 1), "q != 0 & k > 1"),
    (lambda q, k: np.clip(q, 0, 4) > k, "min(max(q, 0), 4) > k"),
    (lambda q, k: (q != k) ^ (q == 3), "q != k ^ q == 3"),
    (lambda q, k: (q & 3) == (k << 1), "(q & 3) == k << 1"),
    (lambda q, k: np.int32(3) + q > k, "3 + q > k"),
    (lambda q, k: np.floor(q / 2) > k, "floor(q / 2) > k"),
    (lambda q, k: q**2 > k, "q ** 2 > k"),
    (lambda q, k: (q / 2).astype("int32") == k, "int(q / 2) == k"),
    (lambda q, k: (q / 2).astype(np.int32) == k, "int(q / 2) == k"),
    (lambda q, k: (q > k) * 2 > 1, "int(q > k) * 2 > 1"),
    (lambda q, k: np.log10(q + 1) > k, "log(q + 1) / 2.302585092994046 > k"),
    (lambda q, k: np.cosh(q) > k, "0.5 * (exp(q) + exp(-float(q))) > k"),
    (lambda q, k: np.signbit(q - k), "q - k < 0"),
    (lambda q, k: np.isinf(q / 2), "abs(q / 2) == inf"),
]


@pytest.mark.parametrize(("fn", "text"), NUMPY, ids=[t for _, t in NUMPY])
def test_numpy_functions_trace_to_their_text_and_values(fn, text):
    found = trace(fn, "mask")
    assert show(found.expr) == text
    q, k = np.arange(5)[:, None], np.arange(5)[None]
    np.testing.assert_array_equal(
        np.broadcast_to(evaluate(found.expr, {"q": q, "k": k}, found.tables), (5, 5)),
        np.broadcast_to(fn(q, k), (5, 5)),
    )


class Holder:
    def __init__(self):
        self.doc = doc

    def method(self, q, k):
        return self.doc[q] == k


REFUSED = [
    (lambda q, k: q >= k and k > 2, "`and`|write `(x) & (y)` for `x and y`"),
    (lambda q, k: q >= k or k > 2, "write `(x) | (y)` for `x or y`"),
    (lambda q, k: not q >= k, "write `~(x)` for `not x`"),
    (lambda q, k: k > 2 if q >= k else k > 3, "write `np.where(condition, a, b)`"),
    (lambda q, k: 0 <= q - k < 4, "write `(a <= x) & (x < b)` for `a <= x < b`"),
    (lambda q, k: float(q) > k, "float() of a position"),
    (lambda q, k: math.tanh(q) > k, "math.tanh(x) calls it, np.tanh(x) does not"),
    (lambda q, k: int(q) > k, "int() of a position"),
    (lambda q, k: sum(range(q)) > k, "no range()"),
    (lambda q, k: [1, 2][q] > k, "no Python indexing"),
    (lambda q, k: doc + q > k, "an array (5) and a position meet in `add`: index the array first"),
    (lambda q, k: doc[q, k] > 0, "`doc` has 1 axes, indexed with 2"),
    (lambda q, k: doc[q / 2] > 0, "`doc` is indexed with a Float"),
    (lambda q, k: np.sinc(q) > k, "np."),
    (lambda q, k: "a" + q, "a str and a position meet in `add`"),
    (Holder().method, "capture the array itself in a variable"),
]


@pytest.mark.parametrize(("fn", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_trace_errors_name_the_line_of_the_user(fn, message):
    with pytest.raises(TraceError) as caught:
        trace(fn, "mask")
    text = str(caught.value)
    assert message.split("|", 1)[-1].strip() in text or message in text
    assert f"{__file__}:" in text
    line = int(text.split(f"{__file__}:")[1].split("\n")[0])
    first = inspect.unwrap(fn).__code__.co_firstlineno
    assert first <= line <= first + 1
    assert text.split("\n")[-1].strip() == linecache.getline(__file__, line).strip()


SHAPES = [
    (lambda q, k: q - k, "mask", "a mask returns a Bool, this lambda returns an Int; compare it with something"),
    (lambda q, k: None, "mask", "this lambda returns nothing"),
    (lambda x, y: x, None, "this lambda takes x, y; name its arguments among b, h, q, k (and score)"),
    (lambda score, q: score, "mask", "this function takes `score`, so it is a score mod"),
    (lambda score, q: q > 3, "score", "a score mod returns a number, this lambda returns a Bool"),
]


@pytest.mark.parametrize(("fn", "kind", "message"), SHAPES, ids=[m for _, _, m in SHAPES])
def test_functions_of_a_wrong_form_are_refused(fn, kind, message):
    with pytest.raises(TraceError) as caught:
        trace(fn, kind)
    assert str(caught.value).startswith(message)


class WithExchangedQueriesAndKeys:
    def __call__(self, b, h, k, q):
        return q >= k


ORDERS = [
    (lambda h, b, q, k: (q >= k) & (h < 1), "`h` is the head, `b` is the batch entry",
     "`h` is the batch entry, `b` is the head"),
    (lambda b, h, k, q: q >= k, "`k` is the key, `q` is the query", "`k` is the query, `q` is the key"),
    (functools.partial(lambda n, b, h, k, q: q >= k + n, 1), "`k` is the key", "`k` is the query"),
    (functools.partial(lambda b, h, k, q, n: q >= k + n, n=1), "`k` is the key", "`k` is the query"),
    (WithExchangedQueriesAndKeys(), "`k` is the key", "`k` is the query"),
    (lambda b, h, k, q, score: score + q - k, "`score` is the score", "`b` is the score"),
    (lambda score, b, h, k, q: score + q - k, "`k` is the key, `q` is the query", "`k` is the query, `q` is the key"),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "by_name", "by_place"), ORDERS)
def test_four_coordinates_in_another_order_show_both_readings(fn, by_name, by_place):
    with pytest.raises(TraceError, match=r"write the parameters in the order (score, )?b, h, q, k") as caught:
        trace(fn)
    _, names, places, _ = str(caught.value).splitlines()
    assert by_name in names
    assert "by name" in names
    assert by_place in places
    assert "by place, as flex_attention reads it" in places


@pytest.mark.parametrize("fn", [
    lambda k, q: q >= k, lambda k, q, b: q >= k, lambda *, k, q, h, b: q >= k, lambda b, h, q, k=0: q >= k,
    functools.partial(lambda h, b, k, q: q >= k, h=0),
])  # fmt: skip
def test_parameters_by_name_alone_come_in_any_order(fn):
    assert trace(fn).expr is parse_expression("q >= k")


def test_arguments_by_place_and_constants():
    assert trace(lambda a, x, i, j: i >= j).expr is parse_expression("q >= k")
    assert trace(lambda s, a, x, i, j: s * 2.0).expr is parse_expression("score * 2.0")
    assert trace(lambda q, k: True, "mask").expr is parse_expression("true")
