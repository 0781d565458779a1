"""`fk.warm(arch=...)`: Triton's kernels compiled for a GPU that is not here."""

from pathlib import Path

import pytest
from support.triton.process import run

import frisket as fk
from frisket.dsl.errors import ParameterError

CHILDREN = Path(__file__).parent / "children"


@pytest.mark.exhaustive
def test_warmed_kernels_are_found_by_launches():
    run(CHILDREN / "warm_launched.py")


def test_an_unknown_architecture():
    with pytest.raises(ParameterError, match=r"arch='sm_91': write sm_75, sm_80, .*, gfx942, "):
        fk.warm("causal", arch="sm_91")


def test_kernels_of_jax_are_not_compiled_ahead():
    with pytest.raises(ParameterError, match="arch='sm_90' is for calls of torch"):
        fk.warm("causal", framework="jax", arch="sm_90")


@pytest.mark.parametrize(
    ("att", "dtype", "why"),
    [
        (fk.compile("causal", backend="aten"), "float32", "backend 'aten' has no kernels of Triton"),
        (fk.compile("causal"), "float64", "float64"),
        (fk.compile("causal", backend="gluon"), "float32", "the Gluon kernels take float16 and bfloat16"),
    ],
)
def test_calls_without_kernels_say_why(att, dtype, why):
    (row,) = fk.warm(att, {"q_len": 256, "dtype": dtype}, arch="sm_90").rows
    assert row.state == "failed"
    assert why in row.why
