"""Heads and length in the other order: a warning where the shapes say so, and none where they may be meant."""

import warnings

import numpy as np
import pytest

import frisket as fk
from frisket.runtime.calls.arrays import arrays
from frisket.runtime.calls.program import check_order
from frisket.runtime.machine.caller import SAID

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
FRAMEWORKS = ("jax", "torch")
# (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim) of arrays in the order of the other framework
EXCHANGED = [
    ((1, 4, 512, 64), (1, 4, 512, 64)),
    ((2, 8, 1024, 64), (2, 8, 1024, 64)),
    ((1, 32, 4096, 128), (1, 8, 4096, 128)),
    ((1, 32, 4096, 128), (1, 1, 4096, 128)),
    ((1, 32, 128, 128), (1, 8, 128, 128)),
    ((1, 8, 64, 64), (1, 2, 64, 64)),
    ((1, 12, 197, 64), (1, 12, 197, 64)),
    ((1, 8, 600, 64), (1, 8, 300, 64)),
    ((1, 128, 129, 128), (1, 128, 129, 128)),
]
# (batch, q_len, heads, dim), (batch, kv_len, kv_heads, dim) that are in order
IN_ORDER = [
    *(((2, n, 64, 128), (2, 4096, kv, 128)) for n in (1, 2, 3, 4, 8, 16) for kv in (1, 8, 64)),
    *(((1, n, 128, 128), (1, 1024, 128, 128)) for n in (1, 4, 16)),
    *(((1, n, 128, 128), (1, n, 128, 128)) for n in (1, 2, 5, 12, 127)),  # short prompts of models with many heads
    *(((1, n, 32, 128), (1, n, 8, 128)) for n in (1, 3, 7, 31)),
    *(((1, n, 256, 64), (1, n, 1, 64)) for n in (1, 7)),  # one head of keys
    ((1, 1, 256, 64), (1, 300, 256, 64)),
    ((2, 2, 4, 8), (2, 2, 4, 8)),
    ((2, 3, 8, 4), (2, 3, 8, 4)),
    ((1, 16, 32, 64), (1, 4, 32, 64)),  # few keys of another sequence
    ((1, 30, 32, 64), (1, 1, 32, 64)),
    ((1, 200, 256, 64), (1, 200, 256, 64)),
    ((4, 512, 8, 64), (4, 512, 8, 64)),
    ((4, 512, 8, 64), (4, 512, 2, 64)),
]


def empty(framework, *shapes):
    """Arrays without memory of their own: nothing is computed."""
    if framework == "torch":
        return [torch.empty((1,) * 4).expand(s) for s in shapes]
    return [jax.ShapeDtypeStruct(s, np.float32) for s in shapes]


def said(framework, q, k, mask=None, **tables):
    """The warnings about an order."""
    SAID.clear()
    found = []

    def ask(q, k):
        program = fk.compile(mask).program
        given = arrays(q, k, k)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_order(given, given.geometry(None, True), program, tables)
        found.extend(str(w.message) for w in caught)
        return q

    q, k = empty(framework, q, k)
    if framework == "torch":
        ask(q, k)
    else:
        jax.eval_shape(ask, q, k)
    return found


def swapped(shape):
    b, x, y, d = shape
    return b, y, x, d


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_exchanged_axes_are_named_with_the_keyword(framework):
    turned = tuple if framework == "jax" else swapped
    other = "bhsd" if framework == "jax" else "bshd"
    for q, k in EXCHANGED:
        (text,) = said(framework, turned(q), turned(k))
        assert f"{q[1]} tokens of {q[2]} heads" in text, (q, k)
        assert f'give axes="{other}"' in text


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_shapes_that_may_be_meant_are_taken_as_they_are(framework):
    turned = tuple if framework == "jax" else swapped
    for q, k in IN_ORDER:
        assert not said(framework, turned(q), turned(k)), (q, k)


def test_tables_of_the_other_length_tell():
    doc, slope = np.zeros(64, int), np.ones(4)
    text = "causal & same(doc)"
    (found,) = said("jax", (1, 4, 64, 16), (1, 4, 64, 16), text, doc=doc)
    assert "and `doc`, read at `k`, has 64 entries" in found
    (found,) = said("torch", (1, 64, 4, 16), (1, 64, 4, 16), text, doc=doc)
    assert 'give axes="bshd"' in found
    (found,) = said("jax", (1, 4, 64, 16), (1, 4, 64, 16), "k < slope[h] * q", slope=slope)
    assert "`slope`, read at `h`, has 4 entries" in found
    assert said("jax", (2, 4, 64, 16), (2, 2, 64, 16), "causal & doc[b, q] == doc[b, k]", doc=np.zeros((2, 64), int))
    # tables that are longer than they are read, as those of the longest sequence are
    assert not said("jax", (1, 4, 32, 16), (1, 4, 32, 16), text, doc=doc)
    assert not said("jax", (1, 4, 64, 16), (1, 4, 8, 16), text, doc=doc)
    assert not said("jax", (1, 1, 64, 16), (1, 64, 64, 16), "k < start[b] & same(doc)", doc=doc, start=np.zeros(1, int))
    assert not said("jax", (1, 64, 4, 16), (1, 64, 4, 16), text, doc=doc)
    assert not said("jax", (1, 3, 4, 16), (1, 3, 4, 16), text, doc=doc[:4])


def test_swapped_axes_warn_once_at_the_line_of_the_user():
    SAID.clear()
    q = jax.numpy.ones((1, 2, 160, 4))
    with pytest.warns(UserWarning, match="2 tokens of 160 heads") as caught:
        fk.attention(q, q, q, "causal")
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fk.attention(q, q, q, "causal")
        fk.attention(*[q[:, :, :150]] * 3, "causal")  # of another length
        for layout in ("bhsd", "bshd"):
            assert fk.attention(q[:, :, :150], *[q[:, :, :150]] * 2, "causal", layout=layout).shape == (1, 2, 150, 4)
        x = torch.ones(1, 170, 2, 4)
        fk.flex.flex_attention(x, x, x)
        fk.attention(x, x, x, "causal", layout="bhsd")
    with pytest.warns(UserWarning, match="2 tokens of 170 heads"):
        fk.attention(x, x, x, "causal")
    with pytest.warns(UserWarning, match="1 tokens of 140 heads"):
        fk.reference(*[q[:, :1, :140]] * 3, "causal")


def test_a_plan_of_the_other_order_says_how_to_read_the_arrays():
    att = fk.compile("causal")
    q = jax.numpy.ones((1, 4, 32, 8))
    with pytest.raises(fk.ShapeError, match='the arrays have \\(1, 32, 4, 4\\); axes="bhsd" reads them so'):
        att(q, q, q, plan=att.plan(32, 32, 1, 4))
    assert att(q, q, q, plan=att.plan(32, 32, 1, 4), layout="bhsd").shape == q.shape
    with pytest.raises(fk.ShapeError, match="make a plan for these lengths"):
        att(q, q, q, plan=att.plan(30, 30, 1, 4))


HALVES = "k < 2", "k > 1"


def uses(framework):
    """name -> a call with a keyword of the axis order, over arrays in the other framework's order."""
    shape = (1, 6, 4, 8) if framework == "torch" else (1, 4, 6, 8)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x = torch.from_numpy(x) if framework == "torch" else jax.numpy.asarray(x)
    att = fk.compile("causal")
    ordered = fk.compile("causal", reorder=fk.reorder("causal", 6, 6, block=(2, 2)))
    sin, cos = fk.modeling.rotary_tables((torch if framework == "torch" else jax.numpy).arange(6), 8)
    return {
        "attention": lambda **o: fk.attention(x, x, x, "causal", **o),
        "compile": lambda **o: att(x, x, x, **o),
        "reorder": lambda **o: ordered(x, x, x, **o),
        "reference": lambda **o: fk.reference(x, x, x, "causal", **o),
        "statistics": lambda **o: att.statistics(x, x, x, columns=True, **o).columns,
        "stages": lambda **o: str(att.stages(x, x, x, **o).plan),
        "check": lambda **o: str(att.check(x, x, x, **o)),
        "merge": lambda **o: fk.merge(*(fk.attention(x, x, x, m, return_lse=True, **o) for m in HALVES), **o)[0],
        "rotary": lambda **o: fk.modeling.apply_rotary_pos_emb(x, sin, cos, **o),
    }  # fmt: skip


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_axes_and_layout_name_one_axis_order(framework):
    other = "bshd" if framework == "torch" else "bhsd"
    for name, call in uses(framework).items():
        found, same = call(axes=other), call(layout=other)
        assert np.array_equal(found, same) if not isinstance(found, str) else found == same, name
        # without a keyword the reference warns, and tables turn "bhsd" in both frameworks
        if not isinstance(found, str) and name not in ("reference", "rotary"):
            natural = call()
            assert natural.shape != found.shape or not np.array_equal(natural, found), name
        with pytest.raises(fk.ParameterError, match=f"layout is '{other}' and axes is '{other}': both name the axis"):
            call(axes=other, layout=other)
        with pytest.raises(fk.FrisketError, match="the axis order is 'sbhd'; it is "):
            call(axes="sbhd")
