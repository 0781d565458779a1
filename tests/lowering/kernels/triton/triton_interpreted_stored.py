"""Run by test_triton_interpret.py with TRITON_INTERPRET=1: stored keys and values against the oracle, in kernels of few
queries and in the forward."""

import numpy as np
import pytest
import torch
from support import attention_cases as cases
from support import stored_cases
from support.stored_cases import STORED
from support.triton.triton_call import poisoned

from frisket.lowering.plan import Target
from frisket.runtime.backends.triton import forward as triton_launch

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")


def tensor(array, like=None):
    """Of odd strides, in poisoned memory."""
    dtype = getattr(torch, str(array.dtype))
    return poisoned(array.astype(np.float32) if dtype.is_floating_point else array, dtype, "bhsd"[: array.ndim])


def run(name, **target):
    stored = STORED[name]
    made = stored_cases.problem(stored)
    tables = {n: tensor(x) for n, x in made.plan.table_values(made.tables).items()}
    arrays = [tensor(x) for x in (made.q.transpose(0, 2, 1, 3), made.k, made.v)]
    out, lse, _ = triton_launch.forward(
        made.plan, cases.Source(stored.case), cases.geometry(stored.case), *arrays, {}, tables,
        Target("triton", *stored.case.block, **target),
    )  # fmt: skip
    assert out.dtype == arrays[0].dtype
    stored_cases.check(stored, made, out.double(), lse)


@pytest.mark.parametrize("name", STORED)
def test_forward(name):
    run(name, splits=1)


@pytest.mark.parametrize("name", [n for n, s in STORED.items() if s.case.q_len < 16])
def test_parts(name):
    run(name, splits=3)
