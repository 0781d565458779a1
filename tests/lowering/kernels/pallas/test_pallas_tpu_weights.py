"""Weights that are no softmax in the Pallas TPU kernels: results and gradients in the interpreter, and lowering."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax import export
from support import attention_cases as cases
from support.attention_cases import causal
from support.pallas_cases import causal_walk, shapes_of
from support.tiers import default_only
from support.weighted_cases import CASES, DROPPED, WEIGHTS, last, weighted

from frisket.dsl.ir import TOTAL
from frisket.dsl.sugar import function, k, minimum, score
from frisket.lowering.derive import backward_of
from frisket.lowering.kernels.pallas_tpu import backward as emitted
from frisket.lowering.kernels.pallas_tpu import forward as pallas_tpu
from frisket.lowering.plan import Cotangents, ForwardResults, Geometry, KernelInputs, Target
from frisket.runtime.backends.pallas_tpu import jax as runtime
from frisket.runtime.machine.modules import load_source

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")
TARGET = Target("pallas-tpu", 128, 128)


def inputs_of(case, **fields) -> KernelInputs:
    slots = case.plan.slot_values({**case.slots, **DROPPED})
    return cases.kernel_inputs(case, Target("pallas-tpu", 128, 128), case.plan, slots=slots, **fields)


def check(case, gradients=True):
    inputs = inputs_of(case)
    q, k, v = cases.arrays(case)
    out, total, seen = (np.asarray(x, np.float64) for x in runtime.forward(inputs, q, k, v)[:3])
    out, grads = out.transpose(0, 2, 1, 3), {}
    if gradients:
        *_, dout, dtotal = case.arrays
        g, c = case.cotangents(out, total, case.seen(), dout, dtotal)
        unread = ForwardResults(*(np.full(x.shape, np.nan, np.float32) for x in (out.swapaxes(1, 2), total)))
        cotangents = Cotangents(jax.numpy.asarray(g.swapaxes(1, 2)).astype(q.dtype), c.astype(np.float32))
        names = frozenset({"q", "k", "v", *(x.source for x in backward_of(case.plan).gradients)})
        found = runtime.backward(inputs, q, k, v, unread, cotangents, grad_names=names)
        assert found.keys() == names
        grads = {n: np.asarray(x, np.float64) for n, x in found.items()}
        grads |= {n: grads[n].swapaxes(1, 2) for n in "qkv"}
    case.check(out, total, seen, grads)


OFTEN = "squared relu", "by head and query"


@pytest.mark.parametrize("name", default_only(CASES, *OFTEN))
def test_pallas_tpu_weights_equal_the_reference(name):
    check(CASES[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [*WEIGHTS, "dropout", "hidden by the score mod", "by column", "scattered"])
def test_pallas_tpu_weights_in_half_precision(name, dtype):
    check(CASES[name].but(dtype=dtype))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["retention", "gqa", "by head and query", "dropout"])
def test_pallas_tpu_weights_of_few_queries(name):
    check(last(CASES[name].but(heads=4, kv_heads=1, batch=2), 3), gradients=False)


def test_nan_at_keys_that_no_query_of_a_tpu_sees():
    case = last(weighted(causal & (k % 3 > 0), function("exp", minimum(score, 8.0)), TOTAL, kv_len=200), 2)
    inputs = inputs_of(case)
    inputs = replace(inputs, plan=replace(inputs.plan, unwritten=True))
    q_, *kv = cases.arrays(case)
    kv = [x.at[:, ::3].set(float("nan")) for x in kv]
    out, total, seen = runtime.forward(inputs, q_, *kv)[:3]
    case.check(np.asarray(out).transpose(0, 2, 1, 3), np.asarray(total), np.asarray(seen))


@pytest.mark.parametrize("name", default_only([*WEIGHTS, "dropout", "by column"], "squared relu"))
def test_pallas_tpu_weights_lower_for_a_tpu(name):
    case, g = CASES[name], Geometry(1, 4, 2, 512, 512, 128, 128, 0.1)
    plan = case.plan
    q, kv = (jax.ShapeDtypeStruct((1, 512, n, 128), "bfloat16") for n in (4, 2))
    tables = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in plan.table_values(case.tables).values()]
    numbers = (0, 0, 0, 0), (1, 4, 512, 512), tuple(plan.slot_values({**case.slots, **DROPPED}).values())
    row = jax.ShapeDtypeStruct((1, 4, 512), np.float32)
    text = pallas_tpu.emit(plan, TARGET, g, "bfloat16")
    walk = shapes_of(causal_walk(g, (128, 128)))
    calls = [(load_source(text)["attention_forward"], (q, kv, kv, walk, *shapes_of(numbers), tables))]
    target, wanted = emitted.with_tiles(TARGET), {"q", "k", "v", *(x.source for x in backward_of(plan).gradients)}
    for kind in (emitted.TpuQueryGradients, emitted.TpuKeyGradients):
        source = emitted.gradients_kernel(kind, plan, target, g, "bfloat16", wanted)
        turned = causal_walk(g, (128, 128), *[2] * (kind.down == "k"))
        arrays = (q, kv, kv, q, row, row, shapes_of(turned), *shapes_of(numbers), tables)
        calls.append((load_source(source.text)[source.entry], arrays))
    for entry, arrays in calls:
        export.export(jax.jit(entry), platforms=["tpu"])(*arrays)
