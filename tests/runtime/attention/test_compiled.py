"""`att.compiled()` and FRISKET_SHOW=compiles: one record for each new key, which names its new parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.native.compiler import needs_compiler
from support.native.shared import DIM, LENGTH, PROGRAMS

import frisket as fk
from frisket.flex import create_block_mask, flex_attention

MASK = PROGRAMS["window"][0]


def array(length=LENGTH, dtype="float32", framework="torch"):
    x = np.ones((1, 2, length, DIM), np.float32)
    if framework == "torch":
        return torch.from_numpy(x).to(getattr(torch, dtype))
    return jnp.asarray(x.swapaxes(1, 2), dtype)


def news(att):
    return [record.new for record in att.compiled()[1:]]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_compiled_then_each_new_part_is_named(framework):
    att = fk.compile(MASK, backend="library")
    calls = [(LENGTH, "float32", 9), (LENGTH, "bfloat16", 9), (LENGTH, "bfloat16", 5), (32, "bfloat16", 5)]
    for length, dtype, w in calls:
        x = array(length, dtype, framework)
        for _ in range(3):
            att(x, x, x, w=w)
    assert news(att) == [("dtype",), ("w",), ("q_len", "kv_len")]
    assert att.compiled()[0].before == {}
    assert set(att.compiled()[0].new) == set(att.compiled()[0].key)
    assert [r.what for r in att.compiled()] == ["planned"] * 4
    assert [(r.before["w"], r.key["w"]) for r in att.compiled()[2:3]] == [(9, 5)]


def test_compiled_then_the_nearest_record_is_compared():
    att = fk.compile(MASK, backend="library")
    for length, w in ((16, 1), (32, 2), (16, 3)):
        att(*[array(length)] * 3, w=w)
    assert news(att) == [("q_len", "kv_len", "w"), ("w",)]
    assert att.compiled()[2].before["w"] == 1


def test_compiled_then_calls_compare_no_keys(monkeypatch):
    """Every step of decoding with a growing cache compared its key with up to 255 earlier ones."""
    att = fk.compile(MASK, backend="library")
    monkeypatch.setattr("frisket.runtime.backends.stages.records", lambda history: pytest.fail("compared"))
    for length in (16, 32, 16):
        att(*[array(length)] * 3, w=1)
    monkeypatch.undo()
    assert news(att) == [("q_len", "kv_len")]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_compiled_then_tables_are_named_where_their_shape_is_new(framework):
    att, x = fk.compile("causal & doc[b] < q", backend="library"), array(framework=framework)
    for doc in (np.arange(2), np.arange(2), np.arange(3), np.ones(3, int)):
        att(x, x, x, doc=doc)
    assert news(att) == [("doc",)]
    assert att.compiled()[1].key["doc"] == "int64[3]"


def test_compiled_then_a_trace_of_jax_is_one_record():
    att = fk.compile(MASK, backend="library")
    run = jax.jit(lambda q, w: att(q, q, q, w=w))
    for length in (LENGTH, LENGTH, 32):
        run(array(length, framework="jax"), 9)
    assert news(att) == [("q_len", "kv_len")]


@pytest.mark.exhaustive
def test_compiled_then_gradients_of_jax_add_no_record():
    att, x = fk.compile(MASK, backend="library"), array(framework="jax")
    for run in (lambda q: att(q, q, q, w=9), jax.grad(lambda q: att(q, q, q, w=9).sum())):
        run(x)
    assert len(att.compiled()) == 1


@needs_compiler
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_compiled_then_native_kernels_are_built_once(framework, monkeypatch):
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    att, x = fk.compile(MASK, backend="native"), array(framework=framework)
    for w in (9, 9, 5):
        att(x, x, x, w=w)
    first, second = att.compiled()
    assert (first.key["backend"], second.what, second.new) == ("cpp", "planned", ("w",))
    assert first.seconds > 0
    assert first.at <= second.at


@needs_compiler
def test_compiled_then_a_compiler_that_ran_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FRISKET_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "no such folder"))  # kernels of other tests may be there
    monkeypatch.setenv("FRISKET_SHOW", "compiles")
    att, x = fk.compile(MASK, backend="native"), array()
    att(x, x, x, w=9)
    shown = capsys.readouterr().err
    assert [r.what for r in att.compiled()] == ["built"]
    assert f"built {tmp_path}" in shown
    assert f"frisket: {att.compiled()[0]}\n  {att!r}\n" in shown


def test_compiled_then_derived_attentions_share_the_records():
    att, x = fk.compile("causal", backend="library"), array()
    att(x, x, x)
    att.at(q="q + start")(x, x, x, start=3)
    assert news(att) == [("mask", "start")]
    ordered = fk.compile("causal & k % 4 == 0", backend="library", reorder="auto")
    ordered(x, x, x)
    assert len(ordered.compiled()) == 1


def test_compiled_then_calls_of_graphs_have_records():
    """A graph holds the text of the attention, and its operators make an attention of that."""
    att = fk.compile("causal & window(w) & q < 1000", backend="library", w=7)
    graph = torch.compile(lambda x: att(x, x, x), backend="eager", fullgraph=True)
    for length in (LENGTH, 32, 32):
        graph(array(length))
    assert news(att) == [("q_len", "kv_len")]
    att(*[array(16)] * 3)
    assert [record.key["q_len"] for record in att.compiled()] == [LENGTH, 32, 16]
    assert att.compiled()[2].before == {}, "eager calls are prepared for themselves"


def test_compiled_then_lines_print_with_stages_and_once(monkeypatch, capsys):
    monkeypatch.setenv("FRISKET_SHOW", "target,compiles")
    x = array()
    for _ in range(2):
        fk.attention(x, x, x, "causal & window(7)", backend="library")
    shown = capsys.readouterr().err
    assert shown.count("frisket: ") == shown.count("first call\n  Attention(mask = causal & window(7))") == 1
    assert "aten" in shown.partition("frisket: ")[0]


def test_compiled_then_flex_attention_prints_its_mask(monkeypatch, capsys):
    monkeypatch.setenv("FRISKET_SHOW", "compiles")
    for length in (LENGTH, LENGTH, 32):
        x, seen = array(length), create_block_mask(lambda b, h, i, j: i - j >= 3, None, None, length, length, "cpu")
        flex_attention(x, x, x, None, seen)
    shown = capsys.readouterr().err
    assert shown.count("frisket: ") == shown.count("mask = q - k >= 3") == 2
    assert "first call\n" in shown
    assert "new q_len 32 (48 before), kv_len 32 (48 before)\n" in shown


def test_compiled_then_lines_are_those_of_the_records():
    att = fk.compile(MASK, backend="library")
    for w in (9, 5):
        att(*[array()] * 3, w=w)
    first, second = map(str, att.compiled())
    assert first.endswith(" s: first call")
    assert " planned aten in " in first
    assert second.endswith(" s: new w 5 (9 before)")
