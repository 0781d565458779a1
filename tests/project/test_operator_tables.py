"""Each operator has its row in every table. A new one learns which rows it lacks, a line each, by `missing(name)`.

The operators are those that `dsl.ir.result_type` types, and `random`. Leaves, `lookup`, `segment` and `reduce` have
code of their own in these files instead of rows.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Callable, Container
from pathlib import Path
from typing import NamedTuple

import pytest
from support.lowering import planner_numpy

from frisket.dsl import evaluate, ir, operators
from frisket.dsl.from_jax import scalars as from_jax
from frisket.dsl.from_python import numpy_functions
from frisket.dsl.from_torch import scalars as from_torch
from frisket.dsl.program import parse_expression
from frisket.dsl.show import show
from frisket.dsl.types import BOOL, FLOAT, INT, Type
from frisket.lowering import derive
from frisket.lowering.analysis import intervals
from frisket.lowering.aten import expr as aten
from frisket.lowering.kernels import jnp_expr, torch_mask_mod
from frisket.lowering.kernels.cpp import expr as cpp
from frisket.lowering.kernels.cute import expr as cute
from frisket.lowering.kernels.pallas_gpu import expr as pallas_gpu
from frisket.lowering.kernels.triton import expr as triton
from frisket.lowering.planner import cpp as planner_cpp
from frisket.lowering.planner import triton as planner_triton

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Add an operator\n")[1].split("\n## ")[0]
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
    tree = ast.parse(inspect.getsource(ir.result_type))
    words = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return sorted([name for name in words | ir.FLOAT_FUNCTIONS if types(name)] + ["random"])


def types(name: str) -> list[tuple[Type, ...]]:
    """The types of arguments that an operator takes."""
    if name == "random":
        return [(INT,), (INT, INT)]
    found = []
    for each in (given for n in (1, 2, 3) for given in itertools.product((INT, FLOAT, BOOL), repeat=n)):
        try:
            if ir.result_type(name, each):
                found.append(each)
        except (ValueError, IndexError):  # no operator of this name, or fewer arguments than `where` has
            pass
    return found


def results(name: str) -> set[Type | None]:
    return {FLOAT} if name == "random" else {ir.result_type(name, each) for each in types(name)}


def written(name: str) -> bool:
    """Whether the language has a sign or a function for it."""
    signs = {*operators.SIGNS.values(), *ir.ON_INT.values(), "neg", "not", "bitnot"}
    return name in signs or name in operators.FUNCTIONS


def printed(name: str) -> bool:
    """Whether its text parses back to the same Expr."""
    for each in types(name):
        args = tuple(ARGUMENTS[t][i] for i, t in enumerate(each))
        e = ir.random(*args) if name == "random" else ir.build(name, *args)
        try:
            if parse_expression(show(e)) is e:
                return True
        except Exception:
            continue
    return False


def documented(name: str) -> bool:
    """Whether docs/language.md has it: functions by name, signs are held by that page's own test."""
    return (name not in operators.FUNCTIONS and written(name)) or mentioned("docs/language.py")(name)


def mentioned(*files: str, also: Container[str] = ()) -> Callable[[str], bool]:
    """Whether the files name it, as a string or, in JavaScript, as a key; or `also` holds it."""

    def has(name: str) -> bool:
        paths = [
            p for file in files for p in (sorted((ROOT / file).glob("*.py")) if file.endswith("/") else [ROOT / file])
        ]
        text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
        return name in also or re.search(rf'"{name}"|[" ]{name}[ "]|^\s*{name}\b[:(,]', text, re.M) is not None

    return has


def called(table: dict[str, str], *files: str) -> Callable[[str], bool]:
    """Whether the files define the functions that the row of an operator calls."""

    def has(name: str) -> bool:
        text = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in files)
        needed = re.findall(r"(?<![.\w])([a-z]\w*)\(", table.get(name, "no_row("))
        return all(re.search(rf"\b{function}\([\w*]|\({function},", text) for function in needed)

    return has


def gives(*kinds: Type) -> Callable[[str], bool]:
    """Whether an operator gives one of these types."""
    return lambda name: bool(results(name) & {*kinds})


def without_floats(name: str) -> bool:
    """Whether an operator has a use without Floats."""
    uses = [{*each, ir.result_type(name, each)} for each in types(name)] if name != "random" else []
    return any(FLOAT not in use for use in uses)


UNBOUNDED = frozenset("bitnot bitor bitxor cos erf pow random rsqrt sin tan wrap".split())
BITS = frozenset("bitand bitor bitxor bitnot".split())
CHOSEN = "`&`, `|`, `^` and `~` of Ints are these"
of_torch = mentioned("dsl/from_torch/", "dsl/from_python/", also=from_torch.ON_FLOAT)
of_jax = mentioned("dsl/from_jax/", "dsl/from_python/", also=from_jax.SCALARS)
of_numpy = mentioned("dsl/from_python/", also=numpy_functions.FLOAT_FUNCTIONS)
TABLES = [
    Table("dsl/evaluate.py", "OPERATORS: its meaning in numpy", evaluate.OPERATORS.__contains__),
    Table("dsl/operators.py", "FUNCTIONS, or a sign in SIGNS of dsl/operators.py: how the language writes it", written),
    Table("dsl/show.py", "its text, which parses back to the same Expr", printed),
    Table("docs/language.py", "MEANINGS or OPERATORS: an example for docs/language.md", documented),
    Table("dsl/from_python/numpy_functions.py", "numpy's name for it", of_numpy, BITS | {"random"}, CHOSEN),
    Table("dsl/from_torch/scalars.py", "torch's name for it", of_torch, BITS, CHOSEN),
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
    Table("lowering/aten/expr.py", "OPERATORS: its call of torch", aten.OPERATORS.__contains__),
    Table("lowering/kernels/jnp_expr.py", "JNP: its text for XLA and Pallas on TPUs", jnp_expr.JNP.__contains__),
    Table(
        "lowering/kernels/jnp_expr.py",
        "PRELUDE: the function of that text",
        called(jnp_expr.JNP, "lowering/kernels/skeletons/jnp.tpl"),
    ),
    Table(
        "lowering/kernels/pallas_gpu/expr.py",
        "MOSAIC_GPU or JNP: its text for Pallas on GPUs",
        pallas_gpu.MOSAIC_GPU.__contains__,
    ),
    Table(
        "lowering/kernels/pallas_gpu/expr.py",
        "PRELUDE: the function of that text",
        called(
            pallas_gpu.MOSAIC_GPU,
            "lowering/kernels/pallas_gpu/skeletons/functions.tpl",
            "lowering/kernels/skeletons/jnp.tpl",
        ),
    ),
    Table("lowering/kernels/triton/expr.py", "TRITON: its text", triton.TRITON.__contains__),
    Table(
        "lowering/kernels/triton/skeletons/functions.tpl",
        "the function of that text",
        called(triton.TRITON, "lowering/kernels/triton/expr.py", "lowering/kernels/triton/skeletons/functions.tpl"),
    ),
    Table("lowering/kernels/cute/expr.py", "CUTE: its text for FlashAttention 4", cute.CUTE.__contains__),
    Table(
        "lowering/kernels/cute/expr.py",
        "PRELUDE: the function of that text",
        called(cute.CUTE, "lowering/kernels/cute/skeletons/functions.tpl"),
    ),
    Table("lowering/kernels/cpp/expr.py", "CPP: its text", cpp.CPP.__contains__),
    Table("lowering/kernels/cpp/functions.hpp", "the function of that text, or in integers.hpp", called(cpp.CPP, *HPP)),
    Table(
        "lowering/kernels/torch_mask_mod.py", "TORCH: its text for flex_attention", torch_mask_mod.TORCH.__contains__
    ),
    Table(
        "lowering/kernels/torch_mask_mod.py",
        "PRELUDE: the function of that text",
        called(torch_mask_mod.TORCH, "lowering/kernels/skeletons/torch.tpl"),
    ),
    Table("lowering/planner/cpp.py", "ROWS: its text in the planner, from CPP", planner_cpp.ROWS.__contains__),
    Table("lowering/planner/triton.py", "TRITON: its text in the planner", planner_triton.TRITON.__contains__),
    Table(
        "runtime/draw/mask.js",
        "NUMBERS, BIGINTS, FLOATS or ANY: its meaning in the browser",
        mentioned("runtime/draw/mask.js"),
    ),
    Table(
        "tests/support/lowering/planner_numpy.py",
        "NAMES: its name in the tests' planner",
        planner_numpy.TABLE.__contains__,
        frozenset({"random"}),
        "layouts read no score",
    ),
    Table(
        "tests/lowering/simplify/z3_terms.py",
        "its meaning for z3, for Ints and Bools",
        mentioned("tests/lowering/simplify/z3_terms.py"),
        needed=without_floats,
    ),
]


def missing(name: str) -> list[str]:
    """The rows that an operator lacks, a line each."""
    return [f"{t.file}: {t.row}" for t in TABLES if t.needed(name) and name not in t.spared and not t.has(name)]


@pytest.mark.parametrize("name", names())
def test_operators_have_a_row_in_each_table(name):
    assert not missing(name), f"`{name}` lacks rows in\n" + "\n".join(missing(name))


def test_a_new_operator_learns_every_row_it_lacks(monkeypatch):
    monkeypatch.setattr(ir, "FLOAT_FUNCTIONS", ir.FLOAT_FUNCTIONS | {"gudermann"})
    assert "gudermann" in names()
    on_bools = {"lowering/analysis/questions.py", "tests/lowering/simplify/z3_terms.py"}  # it takes and gives Floats
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
    assert len(names()) == len(evaluate.OPERATORS)
    assert types("floor")[0] == (ir.FLOAT,)
    assert results("where") == {ir.INT, ir.FLOAT, ir.BOOL}


def test_contributing_names_each_operator_table():
    named = set(re.findall(r"`([\w./]+/[\w.]+\.\w+)`", SECTION))
    assert {t.file for t in TABLES} <= named
    assert not [file for file in named if not (ROOT / file).exists()]
