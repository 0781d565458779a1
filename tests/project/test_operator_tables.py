"""Each operator has its row in every table, and a new one learns which rows it lacks."""

import re

import pytest
from support import operator_tables
from support.operator_tables import ROOT, TABLES, missing, names

from frisket.dsl import ir
from frisket.lowering import derive
from frisket.lowering.analysis import intervals
from frisket.lowering.kernels.triton import expr as triton

SECTION = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Add an operator\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("name", names())
def test_operators_have_a_row_in_each_table(name):
    assert not missing(name), f"`{name}` lacks rows in\n" + "\n".join(missing(name))


def test_a_new_operator_learns_every_row_it_lacks(monkeypatch):
    monkeypatch.setattr(ir, "FLOAT_FUNCTIONS", ir.FLOAT_FUNCTIONS | {"gudermann"})
    assert "gudermann" in names()
    on_bools = {"lowering/analysis/questions.py", "tests/support/lowering/z3_terms.py"}  # it takes and gives Floats
    assert missing("gudermann") == [f"{t.file}: {t.row}" for t in TABLES if t.file not in on_bools]


@pytest.mark.parametrize(
    ("module", "table", "name"),
    [
        (triton, "TRITON", "erf"),
        (triton, "PRELUDE", "tanh"),
        (derive, "DERIVATIVES", "tan"),
        (intervals, "TRANSFER", "abs"),
    ],
)
def test_a_row_that_goes_is_missed(monkeypatch, module, table, name):
    files = {module.__name__.removeprefix("frisket.").replace(".", "/") + ".py"}
    functions = "lowering/kernels/triton/skeletons/functions.tpl"
    if table == "TRITON":  # no text, and no function of it
        files.add(functions)
    if table == "PRELUDE":  # its text then calls a function that nobody defines
        monkeypatch.setitem(triton.TRITON, name, "hyperbolic({})")
        files = {functions}
    else:
        monkeypatch.delitem(getattr(module, table), name)
    assert {line.split(":")[0] for line in missing(name)} == files


def test_operators_without_a_row_are_excused_with_a_reason():
    for table in TABLES:
        assert not table.spared or table.why
        assert not [name for name in table.spared if table.has(name)], table.file
        assert table.spared <= {*names()}


def test_operator_types_and_results_are_enumerated():
    assert len(names()) == len(operator_tables.evaluate.OPERATORS)
    assert operator_tables.types("floor")[0] == (ir.FLOAT,)
    assert operator_tables.results("where") == {ir.INT, ir.FLOAT, ir.BOOL}


def test_contributing_names_each_operator_table():
    named = set(re.findall(r"`([\w./]+/[\w.]+\.\w+)`", SECTION))
    assert {t.file for t in TABLES} <= named
    assert not [file for file in named if not (ROOT / file).exists()]
