"""The flat planner in Triton: its text, and the kernels interpreted and compiled, each in a process of its own."""

from pathlib import Path

import pytest
from support import masks
from support.triton.triton_process import run

from frisket.dsl.ir import lookup
from frisket.dsl.sugar import k, q
from frisket.lowering.planner import planner as flat
from frisket.lowering.planner import triton as text

HERE = Path(__file__).parent
DOC = frozenset({"doc"})


@pytest.mark.parametrize("name", ["documents", "sorted_documents", "window_by_table"])
def test_text(name, golden):
    mask = {"window_by_table": (q >= k) & (q - k < lookup("w", (masks.h,)))}.get(name, masks.written()["documents"])
    made = flat.planner(mask, DOC if name == "sorted_documents" else frozenset())
    golden(f"planner/triton_{name}.py", text.emit(made).text)


def test_names_of_parameters_stand_apart():
    """Whatever tables are called, the text's own names stay what they are."""
    for name in ("line", "kept", "PIECES", "Bounds", "tl", "within2", "x0"):
        made = text.emit(flat.planner((q >= k) & (q - k < lookup(name, (masks.h,)))))
        assert made.entries[0].name != name or name == "x0"
        compile(made.text, name, "exec")


@pytest.mark.matrix
def test_interpreted():
    run(HERE / "triton_planner_interpreted.py", TRITON_INTERPRET="1")


@pytest.mark.matrix
def test_compiled():
    run(HERE / "triton_planner_compiled.py")
