"""Errors that say the right remedy: keywords in the wrong place, reserved names, backends, tables, commands, rings."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.native.compiler import needs_compiler

import frisket as fk
from frisket.caches.torch import RingKVCache
from frisket.runtime.cli.main import main

Q = torch.ones(2, 1, 6, 8)
J = jnp.ones((2, 6, 1, 8))
ATT = fk.compile("causal")


@pytest.mark.parametrize("name", ["tile", "backend", "engines", "reorder", "dropout", "scale", "mask", "enable_gqa"])
def test_keywords_of_compile_in_a_call_are_said_to_be_its(name):
    value = {"tile": 64, "backend": "cpp", "reorder": "auto"}.get(name, 0)
    for call in (lambda: ATT(Q, Q, Q, **{name: value}), lambda: ATT(J, J, J, **{name: value})):
        with pytest.raises(fk.ParameterError, match=f"`{name}=` belongs to `frisket.compile`"):
            call()
    if name in ("tile", "engines", "reorder"):
        with pytest.raises(fk.ParameterError, match=f"`{name}=` belongs to `frisket.compile`"):
            fk.attention(Q, Q, Q, "causal", **{name: value})


@pytest.mark.parametrize("name", ["b", "h", "Q_LEN"])
def test_reserved_names_in_a_call_are_said_to_be_reserved(name):
    def raises(call):
        with pytest.raises(fk.ParameterError, match=f"`{name}` is reserved; choose another name"):
            call(**{name: 4})

    raises(lambda **x: ATT(Q, Q, Q, **x))
    raises(lambda **x: fk.attention(Q, Q, Q, "causal", **x))
    raises(lambda **x: ATT.plan(6, 6, **x))
    raises(lambda **x: fk.compile("causal", **x))


def test_positions_given_to_a_plan_are_reserved():
    for name in ("q", "k"):
        with pytest.raises(fk.ParameterError, match=f"`{name}` is reserved"):
            ATT.plan(6, 6, **{name: 4})


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("tritn", "triton"), ("Triton", "triton"), ("cuda", "triton"), ("gpu", "triton"), ("CPP", "cpp"),
        ("tpu", "pallas-tpu"), ("libary", "library"), ("jax", "xla"),
    ],
)  # fmt: skip
def test_misspelt_backends_have_the_nearest_name(name, near):
    message = rf"no backend '{name}' \(did you mean '{near}'\?\); there are aten, xla"
    for call in (lambda: fk.compile("causal", backend=name), lambda: ATT.source(name)):
        with pytest.raises(fk.BackendError, match=message):
            call()


def test_unlike_names_of_backends_have_no_nearest_one():
    with pytest.raises(fk.BackendError, match=r"no backend 'qqq'; there are aten"):
        fk.compile("causal", backend="qqq")


def test_source_of_native_kernels_is_that_of_cpp(capsys):
    assert ATT.source("native", q_len=64) == ATT.source("cpp", q_len=64)
    assert main(["emit", "causal", "--backend", "native", "--q-len", "64"]) == 0
    native = capsys.readouterr().out
    assert main(["emit", "causal", "--backend", "cpp", "--q-len", "64"]) == 0
    assert native == capsys.readouterr().out
    with pytest.raises(fk.FrisketError, match="backend 'library' runs library calls"):
        ATT.source("library")


TABLES = {
    "one row": (np.zeros((1, 6), int), "a table of one axis: `same(doc)`"),
    "turned": (np.zeros((6, 2), int), "its axes are the other way round: give doc.T"),
    "short": (np.zeros((2, 5), int), "give 6, or hide what lies beyond"),
    "of one axis": (np.zeros(6, int), "for a table [length] write `same(doc)`"),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_other_axes_have_their_remedy(name):
    table, remedy = TABLES[name]
    for x in (table, torch.tensor(table)):
        with pytest.raises(fk.FrisketError, match=re.escape(remedy)):
            fk.attention(Q, Q, Q, "same_by_batch(doc)", doc=x)
        if name == "of one axis":
            remedy = "for [length] write `same(doc)`"
        with pytest.raises(fk.FrisketError, match=re.escape(remedy)):
            fk.compile("same_by_batch(doc)")(Q, Q, Q, doc=x)
        remedy = TABLES[name][1]


TEXTS = {
    "document([0, 10], 4)": "a list is a table: name it",
    "near(x) = x < 4\ncausal & near(q - k)": "to define, write `def near(x) = x < 4`; to compare, write `==`",
    "let w = 8\ncausal & window(w)": "to define, write `def w = 8`",
    "q = k": "to compare, write `==`",
    "causal & (q = k)": "to compare, write `==`",
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_other_languages_have_their_remedy(text):
    with pytest.raises(fk.MaskSyntaxError, match=re.escape(TEXTS[text])):
        fk.mask(text)


COMMANDS = {
    "table": (["--table", "doc=0,0,1"], "the numbers stand in brackets: write --table doc=[0,0,1]"),
    "set": (["--set", "doc=0,0,1"], "a list is a table: write --table doc=[0,0,1]"),
    "set a list": (["--set", "doc=[0,0,1]"], "a list is a table: write --table doc=[0,0,1]"),
    "length": (["--q-len", "1e6"], "'1e6' is not a whole number in digits, such as 1000000"),
    "length in words": (["--q-len", "many"], "'many' is not a whole number in digits, such as 4096"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_say_how_to_write_numbers(name, capsys):
    more, message = COMMANDS[name]
    try:
        status = main(["show", "causal & same(doc)", *more])
    except SystemExit as end:
        status = end.code
    assert status
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("text", "advice"), [
    ("causal & (window(4) | sinks(4))", "the first 4 keys stay visible: make the ring with sinks=4"),
    ("causal & window(64)", "make the ring larger, the chunk shorter, or add `& window(w)` to the mask"),
])  # fmt: skip
def test_advice_of_rings_keeps_sinks(text, advice):
    cache = RingKVCache.create(2, 16, 1, 8)
    with pytest.raises(fk.FrisketError, match=re.escape(advice)):
        cache.attention(fk.compile(text), Q[:, :, :1], Q[:, :, :1], Q[:, :, :1])


def test_dense_masks_beyond_the_memory_are_refused():
    with pytest.raises(
        fk.ShapeError,
        match=r"a dense array \[1, 1, 100000000, 1000000\] has .*\n  take fewer positions, or look at tiles",
    ):
        fk.mask("causal").dense(10**8, 10**6)


def test_references_beyond_the_memory_are_refused():
    q = np.broadcast_to(np.zeros(1), (1, 1, 10**7, 1))
    with pytest.raises(fk.ShapeError, match="a dense array"):
        fk.reference(q, q, q, "causal", layout="bhsd")


def test_return_max_is_a_reserved_name():
    for call in (lambda: fk.mask("k < return_max", return_max=3), lambda: fk.compile("k < return_max")):
        with pytest.raises(fk.FrisketError, match=r"`return_max`.* reserved"):
            call()


@needs_compiler
def test_warm_reports_backends_that_do_not_run():
    report = fk.warm(fk.compile("causal", backend="pallas-tpu"), {"q_len": 64}, gradients=False)
    assert report.good
    assert [row.state for row in report.rows] == ["none"]
    assert "backend 'pallas-tpu' does not take torch arrays" in str(report)
