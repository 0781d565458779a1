"""Results of benchmarks have one form, and what has another is refused with its place."""

import json

import pytest

from frisket.dsl.errors import ParameterError
from frisket.runtime.bench import schema


def changed(path, value):
    """A good result with one thing another."""
    good = json.loads(json.dumps(GOOD))
    *above, last = path
    at = good
    for key in above:
        at = at[key]
    at[last] = value
    return good


ROW = ("parts", "p", "rows", "r")
GOOD = {
    "schema": 1,
    "parts": {
        "p": {
            "machine": {"date": "2026-01-01", "cpu": "x", "cores": 2, "python": "3.11"},
            "settings": {"rounds": 9},
            "rows": {"r": {"figures": {"ms": {"a": 1.0}}, "ratios": {"b / a": [2.0, 1.5, 2.5]}}},
        }
    },
}


def test_a_good_result():
    schema.check(GOOD)
    nested = changed(ROW, {"rows": {"x": {"notes": {"n": "y"}}}})
    schema.check(nested)
    assert [names for names, _ in schema.leaves(nested["parts"]["p"]["rows"])] == [("r", "x")]


def test_a_row_of_another_run():
    """It names its date and machine, and has what was read in each round."""
    leaf = {"figures": {"ms": {"a": 1.0}}, "rounds": {"W": [650.0, 655.5]}}
    for row in (leaf, {"rows": {"x": leaf}}):
        schema.check(changed(ROW, {**row, "run": {"date": "2026-01-02", "gpu": "y", "rounds": 2}}))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), 2, "schema: 2 is not 1"),
        (("parts", "p", "machine"), {}, "parts.p.machine: date must be given"),
        (("parts", "p", "settings"), {}, "`rounds` must be given"),
        (ROW, {}, "parts.p.rows.r: nothing is said"),
        (ROW, {"ms": {"a": 1.0}}, "the keys are ms"),
        ((*ROW, "figures", "ms", "a"), "1", "figures.ms.a: '1' is no number"),
        ((*ROW, "figures", "ms", "a"), float("nan"), "is no number"),
        ((*ROW, "ratios"), {"b": [1.0]}, "name both sides"),
        ((*ROW, "ratios"), {"b / a": 1.0}, r"must be \[median\] or"),
        ((*ROW, "ratios"), {"b / a": [3.0, 1.0, 2.0]}, "outside of its interval"),
        ((*ROW, "goals"), {"at least": {"us": {"a": 1.0}}}, "there are no figures in 'us'"),
        ((*ROW, "goals"), {"about": {}}, "the keys are about"),
        (ROW, [], "must be an object with names, got list"),
        (ROW, {"run": {"gpu": "y"}}, "nothing is said"),
        ((*ROW, "run"), {"gpu": None}, "parts.p.rows.r.run.gpu: None must be text, a number"),
        ((*ROW, "rounds"), {"W": ["650"]}, r"parts.p.rows.r.rounds.W: \['650'\] must be"),
    ],
)  # fmt: skip
def test_a_result_in_another_form(path, value, message):
    with pytest.raises(ParameterError, match=message):
        schema.check(changed(path, value))


def test_goals_beside_figures():
    row = {
        "figures": {"ms": {"a": 3.0}}, "ratios": {"b / a": [2.0]},
        "goals": {"at least": {"ratios": {"b / a": 1.5, "c / a": 1.0}}, "at most": {"ms": {"a": 2.0}}},
    }  # fmt: skip
    assert [(g.name, g.met) for g in schema.goals(row)] == [("b / a", True), ("a", False)]
