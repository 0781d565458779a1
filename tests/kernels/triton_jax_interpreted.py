"""Run by test_triton_jax.py with TRITON_INTERPRET=1: the Triton kernels as JAX calls them, against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import attention_cases as cases
from support import jax_gradients, triton_bf16
from support.attention_cases import CASES, Case, causal
from support.jax_gradients import LEARNED, compare

from frisket.dsl import ir
from frisket.dsl.sugar import k, q
from frisket.lowering import dense
from frisket.lowering.flat import DeviceSpans
from frisket.lowering.plan import RATE, SEED, Target, make_plan, survives
from frisket.runtime import triton_jax

triton_bf16.install()
DROPPED = {SEED: 11, RATE: 0.3}


def forward(case, made=None, sinks=None, spans=None, **target):
    made = made or cases.plan(case)
    return triton_jax.forward(
        made, spans or cases.Source(case), cases.geometry(case), *cases.arrays(case),
        made.slot_values({**case.slots, **DROPPED}), cases.tables(case, made), Target("triton", *case.block, **target),
        sinks=sinks,
    )  # fmt: skip


def gradients(case, made=None, **options):
    target = Target("triton", *case.block)
    return jax_gradients.run(triton_jax.backward, case, target, made, **options)


def with_dropout(case):
    limits = dict.fromkeys((*ir.COORDINATES, *case.slots, *case.tables), 2.0**14)
    return make_plan(case.mask, case.score, limits=limits, dropout=True)


def smaller(case):
    """Fewer queries and keys, where no table or place says how many there are."""
    if case.sizes is not None:
        return case
    return case.but(q_len=min(case.q_len, 100), kv_len=min(case.kv_len, 110), block=(32, 32))


@pytest.mark.parametrize("name", CASES)
def test_every_case(name):
    case = smaller(CASES[name])
    out, lse, _ = forward(case, splits=1)
    cases.check(case, out, lse)


@pytest.mark.parametrize("name", [*CASES, *LEARNED])
def test_every_gradient(name):
    compare(*gradients(smaller({**CASES, **LEARNED}[name])))
