"""Run by test_triton_table.py without TRITON_INTERPRET: what the default tiles of a causal mask take on GPUs of NVIDIA
that triton-<version>.txt has no lines for, compared with benchmarks/results/compiled/gpus-triton-<version>.txt.
docs/architectures.py makes the table of docs/triton.md from both. `--update-results` writes the lines of the tests that
run."""

from itertools import product

import pytest
from lowering.kernels.triton.children.tiles_compiled import KINDS, RESULTS, TABLE, lines
from lowering.kernels.triton.spills import OTHERS

GPUS_TABLE = RESULTS / f"gpus-{TABLE.name}"
CASES = list(product(OTHERS, (64, 128, 256), KINDS))
FEW = [("sm_120", 128, "whole"), ("sm_75", 64, "whole")]


def known():
    text = GPUS_TABLE.read_text(encoding="utf-8") if GPUS_TABLE.exists() else ""
    return {tuple(line.split()[:5]): line for line in text.splitlines()}


def rank(place):
    arch, _, dim, _, kernel = place
    return OTHERS.index(arch), int(dim), kernel == "decode"


def check(arch, dim, kind, update):
    if arch == "sm_110" and TABLE.name == "triton-3.6.txt":
        pytest.skip("the assembler of Triton 3.6 does not know sm_110")
    table, made = known(), {}
    for place, line, found in lines(arch, dim, "causal", kind):
        if "delta" not in place:
            made[place] = line
            assert found.fits, line
            assert update or line == table.get(place), "if it should change, run with -m '' -n 0 --update-results"
    if update:
        ranked = sorted((known() | made).items(), key=lambda x: rank(x[0]))
        GPUS_TABLE.write_text("".join(f"{line}\n" for _, line in ranked), encoding="utf-8")


@pytest.mark.parametrize(("arch", "dim", "kind"), FEW)
def test_selected_tiles_of_other_gpus_match_their_figures(arch, dim, kind, request):
    check(arch, dim, kind, request.config.getoption("--update-results"))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dim", "kind"), [x for x in CASES if x not in FEW])
def test_remaining_tiles_of_other_gpus_match_their_figures(arch, dim, kind, request):
    check(arch, dim, kind, request.config.getoption("--update-results"))
