"""`frisket library`: what there is, and one entry in full."""

import json

import pytest

from frisket.dsl.library import library
from frisket.runtime.cli import main


@pytest.fixture
def run(capsys):
    def go(*args):
        status = main(["library", *args])
        return status, *capsys.readouterr()

    return go


def test_every_entry_has_a_line(run):
    status, out, _ = run()
    lines = out.splitlines()
    assert status == 0
    assert lines[:2] == ["Order", "  full" + " " * 42 + "Every query sees every key."]
    assert [line.strip() for line in lines if line and not line.startswith(" ")] == list(
        dict.fromkeys(e.section for e in library().values())
    )
    assert sum(line.startswith("  ") for line in lines) == len(library())


def test_one_name_in_full(run):
    status, out, _ = run("causal")
    assert status == 0
    assert out == (
        "entry     causal\n"
        "          A query sees itself and what came before.\n"
        "formula   q >= k\n"
        "source    A. Vaswani et al., Attention Is All You Need, 2017\n"
        "text      def causal = q >= k\n"
        "\n"
        "entry     causal(offset)\n"
        "          Causal, with the queries `offset` tokens further on than their index says.\n"
        "formula   q + offset >= k\n"
        "source    decoding with a key cache; Splash attention's CausalMask(offset)\n"
        "text      def causal(offset) = q + offset >= k\n"
    )


def test_json(run):
    status, out, _ = run("--json")
    assert status == 0
    assert list(json.loads(out)) == list(library())
    assert json.loads(run("window", "--json")[1])["window(w)"]["formula"] == "|q - k| < w"


def test_a_name_that_is_not_there(run):
    assert run("windw") == (
        2, "", "ParameterError: the library has no `windw`; did you mean `window`?\n  `frisket library` lists it\n",
    )  # fmt: skip
