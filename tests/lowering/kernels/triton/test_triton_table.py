"""Registers, spills and shared memory of Triton's default tiles, by a compiler that is not an interpreter."""

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from itertools import product
from pathlib import Path

import pytest
from lowering.kernels.triton.spills import CAUSAL, TABULATED, listed
from readme import blocks
from support.triton.process import run

CHILDREN = Path(__file__).parent / "children"
ROOT = Path(__file__).parents[4]
RESULTS = ROOT / "benchmarks" / "results" / "compiled"


def test_triton_figures_have_each_kernel_and_architecture():
    lines = (RESULTS / "triton-3.9.txt").read_text().splitlines()
    architectures, dims = TABULATED, ("64", "128", "256")
    masks, kernels = ("causal", "window", "documents", "softcap"), ("forward", "delta", "dq", "dkv", "decode")
    lines_of = [*product(masks, kernels), ("stored", "forward"), ("stored", "decode")]
    wanted = [(a, "D", d, *line) for a, d, line in product(architectures, dims, lines_of)]
    for mask in masks:  # where dk and dv have a kernel each
        wanted.insert(wanted.index(("sm_90", "D", "256", mask, "dkv")) + 1, ("sm_90", "D", "256", mask, "dv"))
    wanted += [(a, "D", d, "causal", kernel) for a, d, kernel in product(CAUSAL, dims, kernels)]
    assert [tuple(line.split()[:5]) for line in lines] == wanted


@pytest.mark.parametrize("version", ["3.6", "3.9"])
def test_default_triton_tiles_spill_as_the_page_lists(version):
    found, seen = {}, set()
    for line in (RESULTS / f"triton-{version}.txt").read_text().splitlines():
        arch, _, dim, mask, kernel, *_ = line.split()
        seen.add(arch)
        if spilled := int(re.search(r"(\d+) spilled", line)[1]):
            found[version, arch, int(dim), mask, kernel] = spilled
    assert seen == {*TABULATED, *CAUSAL}
    assert found == {x: n for x, n in listed().items() if x[0] == version and x[3] != "captured"}


@pytest.mark.exhaustive
def test_default_tiles_fit_every_gpu_by_the_compiler(request):
    """300 kernels; `.ci/run` compiles a fifteenth of them in a step of its own."""
    if (request.config.getoption("--part") or "1/1") != "1/1":
        pytest.skip("of a part of the tests")
    run(CHILDREN / "gpus_compiled.py")


def test_cases_of_other_gpus_are_a_pairwise_cover():
    """Without compiling: the children are collected, and every architecture meets every head size."""
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", str(CHILDREN / "gpus_compiled.py")],
        env={n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}, capture_output=True, text=True, cwd=ROOT,
    ).stdout  # fmt: skip
    cases = re.findall(r"by_the_compiler\[(\w+)-(\w+)-(\d+)-(\w+)-(\w+)\]", found)
    assert len(cases) == 300
    assert len({(arch, dim) for arch, _, dim, _, _ in cases}) == 16 * 5
    assert len({(arch, mask) for arch, *_, mask in cases}) == 16 * 5


@pytest.mark.exhaustive
def test_kernels_of_amd_compile_as_they_are_launched():
    run(CHILDREN / "amd_compiled.py")


@pytest.mark.exhaustive
def test_selected_triton_tiles_compile_to_their_figures():
    run(CHILDREN / "tiles_compiled.py")


@pytest.mark.exhaustive
def test_selected_tiles_of_other_gpus_compile_to_their_figures():
    run(CHILDREN / "architectures_compiled.py")


@pytest.mark.slow
def test_remaining_tiles_of_other_gpus_compile_to_their_figures():
    run(CHILDREN / "architectures_compiled.py", only="test_remaining", PYTEST_ADDOPTS="-m slow")


@pytest.mark.slow
def test_remaining_triton_tiles_compile_to_their_figures():
    run(CHILDREN / "tiles_compiled.py", only="test_remaining", PYTEST_ADDOPTS="-m slow")


@pytest.mark.slow
def test_triton_page_shows_the_output_of_its_command():
    if not version("triton").startswith("3.9"):
        pytest.skip("the page has the figures of Triton 3.9")
    (block,) = blocks("console", ROOT / "docs" / "triton.md")
    command, shown = block.removeprefix("$ frisket ").split("\n", 1)
    env = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    argv = [sys.executable, "-m", "frisket.runtime.cli.main", *shlex.split(command)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    table = done.stdout.partition("\n\n")[0]  # what follows it is of the machine: which engines it has
    assert f"{table}\n" == shown, done.stderr
