"""`frisket library`: what there is, and one entry in full."""

import json
import re

import pytest

from frisket.dsl.library import library
from frisket.runtime.cli.main import main
from frisket.runtime.masks.mask import program


@pytest.fixture
def run(capsys):
    def go(*args):
        status = main(["library", *args])
        return status, *capsys.readouterr()

    return go


def test_library_command_lists_each_entry(run):
    status, out, _ = run()
    lines = out.splitlines()
    assert status == 0
    assert lines[:2] == ["Order", "  full" + " " * 30 + "Every query sees every key."]
    assert [line.strip() for line in lines if line and not line.startswith(" ")] == list(
        dict.fromkeys(e.section for e in library().values())
    )
    assert sum(line.startswith("  ") for line in lines) == len(library())


def test_library_command_shows_one_entry_in_full(run):
    status, out, _ = run("causal")
    assert status == 0
    first, second = out.split("\n\nentry ")
    assert first.startswith(
        "entry     causal\n"
        "          A query sees itself and what came before.\n"
        "formula   q >= k\n"
        "source    A. Vaswani et al., Attention Is All You Need, 2017\n"
        "text      def causal = q >= k\n"
        "example   causal\n"
        "\n"
        "queries ╲ keys\n"
        "        0       512     1024    1536\n"
        "      0 ▒▒· · · · · · · · · · · · · · ·\n"
        "    128 ██▒▒· · · · · · · · · · · · · ·\n"
    )
    assert second.startswith("    causal(offset)\n          Causal, with the queries `offset` tokens further on")
    assert "\nexample   causal(512)\n\nqueries ╲ keys\n" in second
    status, out, _ = run("softcap(c)")
    assert status == 0
    assert out.endswith("text      def softcap(c) = c * tanh(score / c)\n")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("entry", [e for e in library().values() if e.example], ids=lambda e: e.signature)
def test_examples_show_something(entry):
    made = program(entry.example)
    assert re.match(rf"{entry.name}\b", entry.example)
    assert len(entry.params) == entry.example.count(",") + ("(" in entry.example) - (entry.name == "batchify")
    if made.mask is not None:
        counts = made.mask.layout(2048, 2048).counts
        assert counts.full + counts.partial > 0
        assert counts.full < 16 * 16 or entry.name == "full"


def test_words_are_searched_for(run):
    status, out, _ = run("sliding", "WINDOW")
    assert status == 0
    assert "The last `w` keys, itself included.\n" in out
    assert "causal" not in out
    assert json.loads(run("hassani", "--json")[1]).keys() == {
        e.signature for e in library().values() if "Hassani" in e.source
    }


def test_library_command_prints_json(run):
    status, out, _ = run("--json")
    assert status == 0
    assert list(json.loads(out)) == list(library())
    assert json.loads(run("window", "--json")[1])["window(w)"]["formula"] == "|q - k| < w"


def test_a_name_that_is_not_there(run):
    assert run("windw") == (
        2, "", "ParameterError: the library has no `windw`; did you mean `window`?\n  `frisket library` lists it\n",
    )  # fmt: skip
