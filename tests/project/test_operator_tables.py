"""Each operator has its row in every table. A new one learns which rows it lacks, a line each, by `missing(name)`.

The operators are those of `dsl.ir.OPERATORS`. Leaves, `lookup`, `segment` and `reduce` have code of their own in these
files instead of rows. A language needs no row for an operator that `legalise` writes in others.
"""

from __future__ import annotations

import builtins
import itertools
import re
from collections.abc import Callable, Container
from pathlib import Path
from typing import NamedTuple

import pytest

from frisket.dsl import evaluate, ir, operators
from frisket.dsl.from_jax import scalars as from_jax
from frisket.dsl.from_torch import scalars as from_torch
from frisket.dsl.program import parse_expression
from frisket.dsl.show import show
from frisket.dsl.types import BOOL, FLOAT, INT, Type
from frisket.lowering import derive
from frisket.lowering.analysis import intervals
from frisket.lowering.kernels import inputs, jnp_expr, legalise, torch_mask_mod
from frisket.lowering.kernels.cpp import expr as cpp
from frisket.lowering.kernels.cute import mods as cute
from frisket.lowering.kernels.language import Language
from frisket.lowering.kernels.pallas_gpu import expr as pallas_gpu
from frisket.lowering.kernels.triton import expr as triton
from frisket.lowering.planner import cpp as planner_cpp
from frisket.lowering.planner import triton as planner_triton

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Add an operator\n")[1].split("\n## ")[0]
LANGUAGES = {
    "lowering/kernels/jnp_expr.py": jnp_expr.LANGUAGE,
    "lowering/kernels/triton/expr.py": triton.LANGUAGE,
    "lowering/kernels/cute/mods.py": cute.LANGUAGE,
    "lowering/kernels/cpp/expr.py": cpp.SINGLE,
    "lowering/kernels/torch_mask_mod.py": torch_mask_mod.LANGUAGE,
}
DERIVED = [pallas_gpu.LANGUAGE, inputs.LANGUAGE, planner_cpp.LANGUAGE, planner_triton.LANGUAGE]  # from these
HPP = tuple(f"lowering/kernels/cpp/{name}.hpp" for name in ("functions", "integers", "vectors"))
ARGUMENTS = {
    INT: (ir.var("q"), ir.var("k"), ir.var("b")),
    FLOAT: (ir.SCORE, ir.SCORE * ir.SCORE, ir.SCORE + ir.SCORE),
    BOOL: (ir.var("q") >= ir.var("k"), ir.var("q") < ir.var("b"), ir.var("k") < ir.var("b")),
}


class Table(NamedTuple):
    """A table keyed by operators: its file, what a row says, whether an operator has one, and which need none."""

    file: str
    row: str
    has: Callable[[str], bool]
    spared: frozenset[str] = frozenset()
    why: str = ""
    needed: Callable[[str], bool] = lambda name: True


def names() -> list[str]:
    """All operators of the language."""
    return sorted(ir.OPERATORS)


def types(name: str) -> list[tuple[Type, ...]]:
    """The types of arguments that an operator takes, with one more where it takes any number."""
    o = ir.OPERATORS[name]
    lengths = (o.arity, o.arity + 1) if o.takes in ("bool", "counters") else (o.arity,)
    every = (given for n in lengths for given in itertools.product((INT, FLOAT, BOOL), repeat=n))
    return [each for each in every if ir.result_type(name, each)]


def results(name: str) -> set[Type | None]:
    return {ir.result_type(name, each) for each in types(name)}


def written(name: str) -> bool:
    """Whether the language has a sign or a function for it."""
    return bool(ir.OPERATORS[name].sign) or name in operators.FUNCTIONS


def printed(name: str) -> bool:
    """Whether its text parses back to the same Expr."""
    for each in types(name):
        e = ir.build(name, *(ARGUMENTS[t][i] for i, t in enumerate(each)))
        try:
            if parse_expression(show(e)) is e:
                return True
        except Exception:
            continue
    return False


def mentioned(*files: str, also: Container[str] = ()) -> Callable[[str], bool]:
    """Whether the files name it, as a string or, in JavaScript, as a key; or `also` holds it."""

    def has(name: str) -> bool:
        paths = [
            p for file in files for p in (sorted((ROOT / file).glob("*.py")) if file.endswith("/") else [ROOT / file])
        ]
        text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
        return name in also or re.search(rf'"{name}"|[" ]{name}[ "]|^\s*{name}\b[:(,]', text, re.M) is not None

    return has


def row_of(language: Language, *files: str) -> Callable[[str], bool]:
    """Whether a language has the row of an operator, and the record or the files the functions that this calls."""

    def has(name: str) -> bool:
        text = "\n".join([*language.functions.values(), *((ROOT / file).read_text(encoding="utf-8") for file in files)])
        needed = re.findall(r"(?<![.\w])([a-z]\w*)\(", language.operators.get(name, "no_row("))
        needed = [function for function in needed if not hasattr(builtins, function)]
        return all(re.search(rf"\b{function}\([\w*]|\({function},", text) for function in needed)

    return has


def undefined(name: str) -> bool:
    """Whether no definition by other operators is known."""
    return name not in legalise.DECOMPOSITIONS


def named(name: str) -> bool:
    """Whether the text of an operator is its name, as a function."""
    return not ir.OPERATORS[name].sign


def gives(*kinds: Type) -> Callable[[str], bool]:
    """Whether an operator gives one of these types."""
    return lambda name: bool(results(name) & {*kinds})


def without_floats(name: str) -> bool:
    """Whether an operator has a use without Floats."""
    uses = [{*each, ir.result_type(name, each)} for each in types(name)]
    return any(FLOAT not in use for use in uses)


UNBOUNDED = frozenset("bitnot bitor bitxor cos erf pow random rsqrt sin tan wrap".split())
BITS = frozenset("bitand bitor bitxor bitnot".split())
CHOSEN = "`&`, `|`, `^` and `~` of Ints are these"
of_frameworks = mentioned("dsl/from_torch/", "dsl/from_python/", also=from_torch.ON_FLOAT)
of_jax = mentioned("dsl/from_jax/", "dsl/from_python/", also=from_jax.SCALARS)
TABLES = [
    Table("dsl/ir.py", "_OPERATORS: the types it takes, and its sign", ir.OPERATORS.__contains__),
    Table("dsl/evaluate.py", "OPERATORS: its meaning in numpy", evaluate.OPERATORS.__contains__),
    Table(
        "docs/language.py",
        "MEANINGS: an example for docs/language.md",
        mentioned("docs/language.py"),
        needed=named,
    ),
    Table("dsl/from_torch/scalars.py", "torch's and numpy's name for it", of_frameworks, BITS, CHOSEN),
    Table("dsl/from_jax/scalars.py", "JAX's name for it", of_jax, BITS, CHOSEN),
    Table(
        "lowering/derive.py",
        "DERIVATIVES, or FLAT where the derivative is 0",
        lambda name: name in derive.DERIVATIVES or name in derive.FLAT,
        needed=gives(FLOAT),
    ),
    Table(
        "lowering/analysis/intervals.py",
        "TRANSFER: the ends of its values over a rectangle",
        intervals.TRANSFER.__contains__,
        UNBOUNDED,
        "values without ends: tiles that depend on them are partial",
        gives(INT, FLOAT),
    ),
    Table(
        "lowering/analysis/questions.py",
        "_never_literal and _always_literal: where it certainly holds, or does not",
        mentioned("lowering/analysis/questions.py", "lowering/analysis/solve.py"),
        needed=gives(BOOL),
    ),
    Table(
        "lowering/kernels/legalise.py",
        "DECOMPOSITIONS: other operators for it, or a row in each language below",
        lambda name: not undefined(name) or all(name in x.operators for x in LANGUAGES.values()),
    ),
    *(
        Table(file, "its text, and the function of that text", row_of(language, *HPP), needed=undefined)
        for file, language in LANGUAGES.items()
    ),
    Table(
        "runtime/draw/mask.js",
        "NUMBERS, BIGINTS, FLOATS or ANY: its meaning in the browser",
        mentioned("runtime/draw/mask.js"),
    ),
    Table(
        "tests/lowering/simplify/z3_terms.py",
        "its meaning for z3, for Ints and Bools",
        mentioned("tests/lowering/simplify/z3_terms.py"),
        needed=without_floats,
    ),
]


def rows(table: Table) -> list[str]:
    """The operators that need a row of a table."""
    return [name for name in names() if table.needed(name) and name not in table.spared]


def missing(name: str) -> list[str]:
    """The rows that an operator lacks, a line each."""
    return [f"{t.file}: {t.row}" for t in TABLES if t.needed(name) and name not in t.spared and not t.has(name)]


@pytest.mark.parametrize("name", names())
def test_operators_have_a_row_in_each_table(name):
    assert not missing(name), f"`{name}` lacks rows in\n" + "\n".join(missing(name))


@pytest.mark.parametrize("name", names())
def test_text_of_every_operator_parses_back(name):
    assert written(name)
    assert printed(name) or name in BITS  # of names, whose types are not known, they are operators of Bools


def test_a_new_operator_learns_every_row_it_lacks(monkeypatch):
    monkeypatch.setitem(ir.OPERATORS, "gudermann", ir.Operator("float", 1))
    assert "gudermann" in names()
    spared = {"dsl/ir.py", "lowering/analysis/questions.py", "tests/lowering/simplify/z3_terms.py"}  # it gives Floats
    assert missing("gudermann") == [f"{t.file}: {t.row}" for t in TABLES if t.file not in spared]
    monkeypatch.setitem(legalise.DECOMPOSITIONS, "gudermann", lambda e, language: e)
    spared |= {*LANGUAGES, "lowering/kernels/legalise.py"}
    assert missing("gudermann") == [f"{t.file}: {t.row}" for t in TABLES if t.file not in spared]


@pytest.mark.parametrize(
    ("table", "name", "file"),
    [
        (triton.TRITON, "erf", ""),  # `legalise` has a definition
        (triton.TRITON, "exp", "lowering/kernels/triton/expr.py lowering/kernels/legalise.py"),
        (derive.DERIVATIVES, "tan", "lowering/derive.py"),
        (intervals.TRANSFER, "abs", "lowering/analysis/intervals.py"),
        (legalise.DECOMPOSITIONS, "log1p", "lowering/kernels/triton/expr.py lowering/kernels/legalise.py"),
    ],
)
def test_a_row_that_goes_is_missed(monkeypatch, table, name, file):
    monkeypatch.delitem(table, name)
    assert {line.split(":")[0] for line in missing(name)} == set(file.split())


def test_a_function_that_goes_is_missed(monkeypatch):
    monkeypatch.setitem(triton.TRITON, "exp", "exponential({})")  # nobody defines it
    assert missing("exp") == ["lowering/kernels/triton/expr.py: its text, and the function of that text"]


@pytest.mark.parametrize("language", DERIVED, ids=lambda language: language.name)
def test_derived_languages_write_every_operator(language):
    assert not [name for name in names() if name not in language.operators and undefined(name)]


def test_an_operator_has_few_tables_and_rows():
    assert len(TABLES) <= 16
    assert sum(len(rows(t)) for t in TABLES) <= 700


def test_operators_without_a_row_are_excused_with_a_reason():
    for table in TABLES:
        assert not table.spared or table.why
        assert not [name for name in table.spared if table.has(name)], table.file
        assert table.spared <= {*names()}


def test_operator_types_and_results_are_enumerated():
    assert len(names()) == len(evaluate.OPERATORS)
    assert types("floor") == [(ir.FLOAT,)]
    assert results("where") == {ir.INT, ir.FLOAT, ir.BOOL}


def test_contributing_names_each_operator_table():
    named = set(re.findall(r"`([\w./]+/[\w.]+\.\w+)`", SECTION))
    assert {t.file for t in TABLES} <= named
    assert not [file for file in named if not (ROOT / file).exists()]
