"""The Pallas TPU kernels of the backward: gradients in the interpreter against float64, their walks, their text."""

import pytest
from support import jax_gradients
from support.attention_cases import CASES, Source
from support.jax_gradients import LEARNED, compare

from frisket.lowering.plan import Target
from frisket.runtime import pallas_tpu_backward

ALL = {**CASES, **LEARNED}


def run(case, made=None, block=(128, 128), **options):
    """{name: gradient} of the kernels, and of the interpreter."""
    target = Target("pallas-tpu", *block)
    return jax_gradients.run(pallas_tpu_backward.backward, case, target, made, Source(case), **options)


@pytest.mark.parametrize("name", ALL)
def test_every_case(name):
    compare(*run(ALL[name]))
