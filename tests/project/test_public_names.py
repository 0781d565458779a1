"""The names of the public contract, with the arguments people write."""

import inspect
import re
from pathlib import Path

import pytest

import frisket as fk

DOORS = "caches", "flex", "modeling", "operations", "parallel", "select", "sharding"
FUNCTIONS = {
    "mask": "what **params",
    "score": "what **params",
    "load": "path **params",
    "compile": "mask score scale enable_gqa deterministic dropout sinks backend tile",
    "attention": "q k v mask score scale enable_gqa backend dropout seed sinks origin sizes layout return_lse **params",
    "reference": "q k v mask score",
    "merge": "parts layout",
    "merge_sums": "parts divide axes origin sizes **params",
    "backends": "",
    "library": "",
}
METHODS = {
    "Mask": "layout dense at __and__ __or__ __xor__ __invert__ __sub__ params",
    "ScoreMod": "then params",
    "Layout": "counts visible_pairs density exact facts spans runs transposed kinds explain",
    "Attention": "__call__ plan source stages check compiled",
    "Program": "mask score",
    "Report": "good",
    "Stages": "expr simplified facts layout plan target source",
    "Explanation": "visible because",
    "Entry": "signature sentence formula source text",
}
ERRORS = (
    "FrisketError MaskSyntaxError TraceError ParameterError ShapeError EvaluationError LoweringError BackendError "
    "MismatchError BudgetError ExportError Undecided"
).split()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_have_their_parameters(name):
    have = inspect.signature(getattr(fk, name)).parameters
    shown = [f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name for p in have.values()]
    assert set(FUNCTIONS[name].split()) <= set(shown)


@pytest.mark.parametrize("name", METHODS)
def test_public_classes_have_their_methods(name):
    kind = getattr(fk, name)
    fields = {f for base in kind.__mro__ for f in getattr(base, "__annotations__", {})}
    assert set(METHODS[name].split()) <= {*dir(kind), *fields}


def test_mask_layout_has_its_parameters_and_defaults():
    have = inspect.signature(fk.Mask.layout).parameters
    wanted = "q_len kv_len batch heads block origin sizes exact budget".split()
    assert [n for n in have if n != "self"] == wanted
    assert (have["block"].default, have["origin"].default) == ((128, 128), (0, 0, 0, 0))


@pytest.mark.parametrize("name", ERRORS)
def test_public_errors_are_frisket_errors(name):
    assert issubclass(getattr(fk, name), fk.FrisketError)


def test_public_names_are_exported_and_exist():
    assert {*FUNCTIONS, *METHODS, *ERRORS} <= set(fk.__all__)
    assert all(hasattr(fk, name) for name in fk.__all__)
    with pytest.raises(AttributeError, match="module 'frisket' has no attribute 'maks'"):
        fk.maks  # noqa: B018


@pytest.mark.parametrize("wrong", [lambda: fk.compil, lambda: fk.mask("causal").compil])
def test_python_can_suggest_a_name(wrong):
    """Tracebacks compare the name with `dir` of the object, where an error says both."""
    with pytest.raises(AttributeError) as error:
        wrong()
    assert error.value.name == "compil"
    assert error.value.obj is fk or isinstance(error.value.obj, fk.Mask)
    assert {"compile", "caches", "flex"} <= {*dir(fk)}


def test_ten_names_that_people_need_come_first():
    ten = "mask score library load attention compile reference merge backends warm".split()
    assert fk.__all__[:10] == ten
    assert re.findall(r"\w+", " ".join(re.findall(r"^    ([\w, ]+?)  ", fk.__doc__, re.M))) == ten
    page = (Path(__file__).parents[2] / "docs" / "api" / "index.md").read_text(encoding="utf-8")
    rows = "".join(re.findall(r"^\| \[.*? \|", page, re.M))
    assert re.findall(r"#frisket\.(\w+)", rows) == ten
    assert {n for n in dir(fk) if not n.startswith("__")} <= {*fk.__all__, "sdpa", "sdpa_for", *DOORS}
