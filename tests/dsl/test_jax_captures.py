"""JAX functions: which are JAX's, what they capture and under which names, what is refused and how it is said."""

from __future__ import annotations

import functools
import linecache
import subprocess
import sys

import numpy as np
import pytest

import frisket
from frisket.dsl.errors import TraceError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.from_jax.callables import reaches_jax
from frisket.dsl.from_python.closure import reached
from frisket.dsl.from_python.trace import trace
from frisket.dsl.show import show

jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax
doc = jnp.array([0, 0, 1, 1, 2])
bias = jnp.zeros((2, 5, 5))
width = jnp.int32(3)
plain = np.array([1, 2, 3, 4, 5])


def helper(q, k):
    return doc[q] == doc[k]


class Module:
    def __init__(self):
        self.ids = jnp.array([4, 4, 5])

    def __call__(self, q, k):
        return self.ids[q] == self.ids[k]

    def method(self, q, k):
        return self.ids[q] < k


def shown(fn, kind=None):
    found = trace(fn, kind)
    return show(found.expr, found.tables), sorted(found.tables)


# -- which functions go through a jaxpr -------------------------------------------------------------


def test_a_function_is_jaxs_by_what_it_reads():
    table, width_ = doc, width
    assert reaches_jax(lambda q, k: table[q] == k)
    assert reaches_jax(lambda q, k: q - k < width_)
    assert reaches_jax(lambda q, k: helper(q, k))
    assert reaches_jax(lambda q, k: jnp.where(q > k, q, k) > 0)
    assert reaches_jax(functools.partial(lambda q, k, t: t[q] > k, t=doc))
    assert reaches_jax(functools.partial(lambda t, b, h, q, k: t[q] > k, doc))
    assert reaches_jax(lambda q, k, t=doc: t[q] > k)
    assert reaches_jax(jax.jit(lambda q, k: q > k))
    assert reaches_jax(Module())
    assert reaches_jax(Module().method)
    assert reaches_jax(lambda q, k: [doc][0][q] > k)
    assert not reaches_jax(lambda q, k: q >= k)
    assert not reaches_jax(lambda q, k: plain[q] == np.minimum(q, k))
    assert not reaches_jax(lambda q, k: q.doc > k)  # an attribute, not the global of that name


def test_a_function_that_imports_jax_itself():
    def fn(q, k):
        import jax.numpy as xp

        return xp.where(q > k, q, k) > 3

    assert not reaches_jax(fn)
    assert shown(fn) == ("where(q > k, q, k) > 3", [])


class Trainer:
    """An object with much behind it, none of which the mask reads."""

    def __init__(self):
        self.settings = {str(i): [object()] * 9 for i in range(300)}
        self.next = self
        self.far = [[[Module()]]]
        self.width = 3


def test_captures_of_an_object_are_searched_one_level_deep():
    chain = value = Trainer()
    for _ in range(3000):
        value.inner = Trainer.__new__(Trainer)
        value = value.inner
    value.doc = doc
    names = [n for n, *_ in reached(lambda q, k: q < chain.width)]
    assert "far" in names
    assert len(names) < 100


def test_jax_is_not_imported_for_others():
    code = "import sys, frisket; frisket.mask(lambda q, k: q >= k); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- what is captured -------------------------------------------------------------------------------


def test_arrays_get_their_names_back():
    ids = jnp.array([1, 2, 3])
    assert shown(lambda q, k: helper(q, k) & (ids[q] > k)) == ("doc[q] == doc[k] & ids[q] > k", ["doc", "ids"])
    assert shown(lambda q, k, t=ids: t[q] == k) == ("t[q] == k", ["t"])
    assert shown(functools.partial(lambda b, h, q, k, t: t[q] == k, t=ids)) == ("t[q] == k", ["t"])
    assert shown(functools.partial(lambda t, b, h, q, k: t[q] == k, ids)) == ("t[q] == k", ["t"])
    assert shown(Module()) == ("ids[q] == ids[k]", ["ids"])
    assert shown(Module().method) == ("ids[q] < k", ["ids"])
    assert shown(jax.jit(helper)) == ("doc[q] == doc[k]", ["doc"])
    assert shown(lambda q, k: jnp.array([3, 1, 2])[q] > k) == ("table[q] > k", ["table"])
    assert shown(lambda q, k: {"inner": [ids]}["inner"][0][q] > k) == ("ids[q] > k", ["ids"])


def test_two_arrays_of_one_name_and_one_array_twice():
    def outer():
        doc = jnp.array([7, 8])
        return lambda q, k: doc[k] > 0

    inner, again = outer(), doc
    text, names = shown(lambda q, k: helper(q, k) & inner(q, k) & (again[q] == 1))
    assert names == ["again", "doc"]
    assert text == "again[q] == again[k] & doc[k] > 0 & again[q] == 1"


def test_captured_arrays_are_not_copied_by_the_jax_trace():
    assert trace(lambda q, k: doc[q] == doc[k]).tables["doc"] is doc
    wide = np.array([1, 2**20, 3])
    assert trace(lambda q, k: jnp.asarray(wide)[q] > k).tables["wide"] is wide


def test_captured_scalars_are_parameters():
    found = frisket.mask(lambda q, k: q - k < width)
    assert str(found) == "q - k < width"
    assert found.params == {"width": 3}
    scale = jnp.float32(0.5)
    found = frisket.score(lambda score, q: score * scale + jnp.log(scale))
    assert str(found) == "score * scale_ + log(scale_)"
    limit = int(width)  # a Python number is a literal
    assert shown(lambda q, k: jnp.less(q, limit)) == ("q < 3", [])
    assert shown(lambda q, k: q < jnp.int32(4)) == ("q < 4", [])


def test_captured_scalars_side_by_side_stay_parameters():
    other = jnp.int32(5)
    text, names = shown(lambda q, k: jnp.max(jnp.stack([width, other])) > jnp.array([q, width])[1])
    assert text == "max(width, other) > width"
    assert names == ["other", "width"]


def test_negative_indices_count_from_the_end_only_as_numbers():
    assert shown(lambda q, k: doc[-1] == doc[k]) == ("doc[4] == doc[k]", ["doc"])
    assert shown(lambda q, k: doc[q - 1] == doc[k]) == ("doc[q - 1] == doc[k]", ["doc"])


def test_jax_expressions_of_captures_alone_are_computed_once():
    found = trace(lambda q, k: jnp.cumsum(doc)[q] > k)
    assert show(found.expr, found.tables) == "doc_2[q] > k"
    assert found.tables["doc_2"].tolist() == [0, 0, 1, 2, 4]
    found = trace(lambda q, k: doc[1:][q] > jnp.max(doc) + doc[k])
    assert show(found.expr, found.tables) == "doc_3[q] > doc_2 + doc[k]"
    assert [np.asarray(found.tables[n]).tolist() for n in ("doc", "doc_2", "doc_3")] == [doc.tolist(), 2, [0, 1, 1, 2]]


def test_searchsorted_is_a_segment_with_a_place_before_and_after():
    off = jnp.array([2, 4])
    found = trace(lambda q, k: jnp.searchsorted(off, q, side="right") == k)
    assert show(found.expr) == "segment(off_2, q) == k"  # a table of its own: off between two ends
    q = np.arange(7)
    left = trace(lambda q, k: jnp.searchsorted(off, q) == k)
    for traced, side in ((found, "right"), (left, "left")):
        got = evaluate(traced.expr.args[0], {"q": q}, traced.tables)
        np.testing.assert_array_equal(got, np.searchsorted([2, 4], q, side=side))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_past_all_positions_is_never_passed(side):
    padded = jnp.array([0, 3, 2**31 - 1, 2**31 - 1])
    found = trace(lambda q, k: jnp.searchsorted(padded, q, side=side) == k)
    q, k = np.arange(6)[:, None], np.arange(5)
    got = evaluate(found.expr, {"q": q, "k": k}, found.tables)
    np.testing.assert_array_equal(got, np.searchsorted(np.asarray(padded), q, side=side) == k)


def test_a_function_of_that_name_that_is_another():
    @jax.jit
    def searchsorted(a, x):
        return a[x] + 1

    assert shown(lambda q, k: searchsorted(doc, q) == k) == ("doc[q] + 1 == k", ["doc"])


def test_names_positions_and_literals():
    assert shown(lambda a, x, i, j: jnp.greater(i, j))[0] == "q > k"
    assert shown(lambda s, a, x, i, j: jnp.tanh(s))[0] == "tanh(score)"
    assert shown(lambda score, *, h: jnp.exp2(-score) * h)[0] == "exp2(-score) * h"
    assert shown(lambda score: jnp.multiply(score, 0.1) + jnp.pi)[0] == f"score * 0.1 + {np.pi}"
    assert shown(lambda q, k: jnp.bool_(True))[0] == "true"


# -- what is refused --------------------------------------------------------------------------------

REFUSED = [
    (lambda q, k: doc[k] > 2 if q >= k else k > 3, "write `jnp.where(condition, a, b)` for `a if condition else b`"),
    (lambda q, k: doc[q] >= k and k > 2, "write `(x) & (y)` for `x and y`"),
    (lambda q, k: doc[q] >= k or k > 2, "write `(x) | (y)` for `x or y`"),
    (lambda q, k: not doc[q] >= k, "write `~(x)` for `not x`"),
    (lambda q, k: 0 <= doc[q] < k, "write `(a <= x) & (x < b)` for `a <= x < b`"),
    (lambda q, k: jnp.sinh(q) > k, "`sinh` of positions has no counterpart in the language"),
    (lambda q, k: jnp.sort(doc + q)[0] > k, "`sort` of positions has no counterpart in the language"),
    (lambda q, k: lax.while_loop(lambda a: a > 3, lambda a: a - 1, q) > k, "a loop that runs until a condition holds"),
    (lambda q, k: lax.fori_loop(0, 99, lambda i, a: a + i, q) > k, "a loop of 99 turns, more than 64"),
    (lambda q, k: jax.random.uniform(jax.random.key(q)) < 0.5, "write `random(seed, b, h, q, k)` in text"),
    (lambda q, k: jax.random.bernoulli(jax.random.PRNGKey(0)), "jax.random inside a mask: positions draw nothing"),
    (lambda q, k: doc[q / 2] > k, "TypeError: Indexer must have integer or boolean type"),
    (lambda q, k: doc[q, k] > 0, "IndexError: Too many indices"),
    (lambda q, k: sum(range(doc[q])) > k, "a position is not a number while the function is traced: no range()"),
    (
        lambda q, k: float(doc[q]) > k,
        "a position has no value while the function is traced: leave float() and int() out",
    ),
    (lambda q, k: jnp.abs(plain[q]) > k, "numpy meets a position that JAX traces: use jax.numpy, and index"),
    (lambda q, k: jnp.abs(np.exp(q)) > k, "numpy meets a position that JAX traces"),
    (lambda q, k: jnp.float32(q) % 3.0 > k, "`%` and `//` of floats; write `x - y * jnp.floor(x / y)`"),
    (lambda q, k: jnp.power(q, k) > 3, "an integer to a power that varies"),
    (lambda q, k: jnp.abs(q + 1j * k) > 3, "an array of complex64; the language has bool, int and float"),
    (lambda q, k: jnp.abs(q) > 2**40, "OverflowError: "),
    (lambda q, k: [jax.debug.print("{}", q), doc[q] > k][1], "a callback into Python; leave it out"),
    (lambda q, k: jnp.sum(jnp.arange(5000) * q) > k, "a reduction over 5,000 elements for every position"),
    (lambda q, k: doc[q] > undefined, "name 'undefined' is not defined"),  # noqa: F821
]


@pytest.mark.parametrize(("fn", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_jax_errors_name_the_line_of_the_user(fn, message):
    with pytest.raises((TraceError, NameError)) as caught:
        trace(fn, "mask")
    text = str(caught.value)
    assert message in text
    if not isinstance(caught.value, TraceError):
        return
    line = int(text.split(f"{__file__}:")[1].split("\n")[0])
    assert line == fn.__code__.co_firstlineno
    assert text.split("\n")[-1].strip() == linecache.getline(__file__, line).strip()


SHAPES = [
    (lambda q, k: jnp.where(q > k, 1, 0), "mask", "a mask returns a Bool, this lambda returns an Int; compare it with"),
    (lambda q, k: doc, "mask", "the function returns an array (5); return one number or Bool: index or reduce it"),
    (lambda q, k: bias[0, q] > 0, "mask", "the function returns an array (5); return one number"),
    (lambda q, k: (doc[q], doc[k]), "mask", "this lambda returns a tuple; return one expression of its arguments"),
    (lambda q, k: print(doc), "mask", "this lambda returns nothing"),
    (
        lambda score, q: jnp.isnan(score),
        "score",
        "a score mod returns a number, this lambda returns a Bool; is it a mask?",
    ),
]


@pytest.mark.parametrize(("fn", "kind", "message"), SHAPES, ids=[m for _, _, m in SHAPES])
def test_jax_functions_of_a_wrong_form_are_refused(fn, kind, message):
    with pytest.raises(TraceError) as caught:
        trace(fn, kind)
    assert str(caught.value).startswith(message)


def test_an_array_that_is_traced_itself():
    found = []
    jax.jit(lambda ids: found.append(frisket.mask(lambda q, k: (ids[q] + 1 == ids[k]) & (q >= k))))(doc)
    assert found[0].unbound == ("ids",)
    assert found[0] == frisket.mask("ids[q] + 1 == ids[k] & q >= k")


def test_a_mask_made_inside_jit_over_arrays_that_are_not():
    @jax.jit
    def step(x):
        visible = frisket.mask(lambda q, k: (doc[q] == doc[k]) & (jnp.cumsum(doc)[q] >= 0)).dense(5, 5)[0, 0]
        return x + jnp.asarray(visible).sum()

    assert step(jnp.float32(0)) == sum(int(a == b) for a in doc.tolist() for b in doc.tolist())


def test_a_captured_array_gives_way_to_a_traced_one():
    x = jnp.ones((1, 5, 1, 4))
    visible = frisket.compile(mask=frisket.mask(lambda q, k: doc[q] == doc[k]))
    other = jnp.array([0, 1, 1, 1, 1])
    got = jax.jit(lambda ids: visible(x, x, x * jnp.arange(5.0)[:, None, None], doc=ids))(other)
    np.testing.assert_allclose(got[0, :, 0, 0], [0.0, 2.5, 2.5, 2.5, 2.5])
