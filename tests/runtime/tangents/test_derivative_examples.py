"""The examples of derivatives compare themselves with dense attention and with differences."""

import runpy
import warnings
from pathlib import Path

import pytest
from support.tiers import default_only

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SAID = {
    "meanflow": "gradients differ by",
    "hessian_vector": "The product differs from that of dense attention by",
    "laplacian": "by differences of log psi.",
}


@pytest.mark.parametrize("program", default_only(SAID, "hessian_vector"))
def test_derivative_examples_run(program, capsys):
    if program == "laplacian":
        pytest.importorskip("jax")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of their cost
        runpy.run_path(str(EXAMPLES / f"{program}.py"))["main"]()
    assert SAID[program] in capsys.readouterr().out
