"""The flat planner in Triton: its text, and the kernels interpreted and compiled, each in a process of its own."""

from pathlib import Path

import pytest
from support import masks
from support.triton.process import run

from frisket.dsl.ir import lookup
from frisket.dsl.sugar import k, q
from frisket.lowering.planner import planner as flat
from frisket.lowering.planner import triton as text
from lowering.planner import golden_planners

CHILDREN = Path(__file__).parent / "children"


@pytest.mark.parametrize("name", golden_planners.NAMES)
def test_golden_triton_planner(name, golden):
    golden_planners.check(golden, name, ".py", lambda made: text.emit(made).text)


def test_names_of_parameters_stand_apart():
    """Whatever tables are called, the text's own names stay what they are."""
    for name in ("line", "kept", "PIECES", "Bounds", "tl", "within2", "x0"):
        made = text.emit(flat.planner((q >= k) & (q - k < lookup(name, (masks.h,)))))
        assert made.entries[0].name != name or name == "x0"
        compile(made.text, name, "exec")


@pytest.mark.exhaustive
def test_triton_planner_passes_in_the_interpreter():
    run(CHILDREN / "triton_interpreted.py", TRITON_INTERPRET="1")


@pytest.mark.exhaustive
def test_triton_planner_compiles_without_a_gpu():
    run(CHILDREN / "triton_compiled.py")
