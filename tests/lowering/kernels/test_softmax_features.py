"""Every feature of the online softmax has a test, or a reason, in each place where the online softmax is written."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.softmax_features import FEATURES, PLACES, Lacks, nodes

from frisket.runtime.backends.base import RECORDS

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("place", PLACES)
def test_each_place_of_the_softmax_has_a_test_or_a_reason(place):
    row = PLACES[place]
    assert (ROOT / row.file).is_file()
    assert row.cells.keys() == FEATURES.keys(), f"{place} has a hole"
    lacks = RECORDS[row.backend].features
    for name, cell in row.cells.items():
        if isinstance(cell, Lacks):
            assert lacks.get(cell.feature), f"{row.backend} has no reason against {cell.feature}: name a test of {name}"
        else:
            assert name not in lacks, f"{row.backend} lacks {name}: {lacks[name]}"


def test_softmax_cells_name_functions_of_their_files():
    for node in nodes():
        file, _, name = node.partition("::")
        functions = {n.name for n in ast.parse((ROOT / file).read_text(encoding="utf-8")).body if hasattr(n, "name")}
        assert name.partition("[")[0] in functions, node


@pytest.mark.exhaustive
def test_tests_named_for_the_softmax_are_collected():
    """With their parameters; those in folders `children` as their parent runs them."""
    missing = nodes()
    for children in (False, True):
        files = sorted({n.partition("::")[0] for n in nodes() if ("/children/" in n) == children})
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--collect-only", "-m", "", *files]
        env = os.environ | ({"TRITON_INTERPRET": "1"} if children else {})
        found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        missing -= set(found.stdout.splitlines())
    assert not missing
