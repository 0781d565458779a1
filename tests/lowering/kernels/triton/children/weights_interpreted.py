"""Run by test_triton_interpret.py with TRITON_INTERPRET=1: weights that are no softmax, forward and backward."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import attention_cases as cases
from support.attention_cases import causal
from support.triton import bf16 as triton_bf16
from support.triton.call import poisoned, tensors
from support.weighted_cases import CASES, DROPPED, WEIGHTS, count, last, relu2, weighted

from frisket.dsl.ir import TOTAL, lookup
from frisket.dsl.sugar import b, function, h, k, minimum, q, score
from frisket.dsl.types import FLOAT
from frisket.lowering.derive import backward_of
from frisket.lowering.kernels.triton import backward, forward
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Cotangents, ForwardResults, KernelInputs
from frisket.runtime.backends.triton import grids as triton_grids
from frisket.runtime.backends.triton import jax as triton_jax
from frisket.runtime.backends.triton import torch as triton_torch

triton_bf16.install()
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")
HALVES = ["float16", "bfloat16"]
BOUNDED = function("exp", minimum(score, 8.0))


def inputs_of(case, **target):
    plan = case.plan
    tables = {
        n: poisoned(a, torch.as_tensor(np.asarray(a)).dtype, "bhsd"[: np.ndim(a)])
        for n, a in plan.table_values(case.tables).items()
    }
    values = plan.slot_values({**case.slots, **DROPPED}), tables
    return KernelInputs(
        plan, cases.Source(case), cases.geometry(case), Target("triton", *case.block, **target), *values
    )


def check(case, gradients=True, by=1, within=None, **target):
    """Results, and where asked for gradients, whose kernels read neither out nor the sums of weights."""
    inputs = inputs_of(case, **target)
    qkv = tensors(case, by=by)
    results = triton_torch.forward(inputs, *qkv, top=True)
    out, total, seen = (x.double().numpy() for x in results)
    grads = {}
    if gradients:
        *_, dout, dtotal = case.arrays
        g, c = case.cotangents(out, total, case.seen(), dout, dtotal)
        g, c = (torch.from_numpy(x).to(dtype) for x, dtype in ((g, qkv[0].dtype), (c, torch.float32)))
        names = frozenset({"q", "k", "v", *(x.source for x in backward_of(inputs.plan).gradients)})
        unread = ForwardResults(*(torch.full_like(x, float("nan")) for x in results[:2]))
        found = triton_torch.backward(inputs, *qkv, unread, Cotangents(g, c), grad_names=names)
        assert found.keys() == names
        grads = {n: x.double().numpy() for n, x in found.items()}
    case.check(out, total, seen, grads, within)


@pytest.mark.parametrize("name", CASES)
def test_triton_weights_equal_the_reference(name):
    check(CASES[name])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", [*WEIGHTS, "dropout", "hidden by the score mod", "by column", "scattered"])
def test_triton_weights_in_half_precision(name, dtype):
    check(CASES[name].but(dtype=dtype))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", ["retention", "softmax1", "gqa", "empty rows", "by head and query", "dropout"])
def test_triton_weights_of_few_queries(name, splits):
    """Heads of a group are packed, and parts of a row are divided once, by the kernel that combines them."""
    check(last(CASES[name].but(heads=4, kv_heads=1, batch=2), 3), gradients=False, splits=splits)


def test_triton_weights_in_parts_by_length(monkeypatch):
    launched = []
    steps = triton_grids.Shares.steps
    monkeypatch.setattr(triton_grids.Shares, "steps", lambda self, g: launched.append(steps(self, g)) or launched[-1])
    monkeypatch.setattr(triton_grids, "RAGGED", 0)
    monkeypatch.setattr(triton_grids, "EVEN", 0)
    ends = np.array([200, 0, 37])
    case = weighted(
        k < lookup("end", (b,)), BOUNDED, count + TOTAL, batch=3, heads=4, kv_heads=1, q_len=2, kv_len=200,
        tables={"end": ends}, block=(16, 32), dim=16, v_dim=16,
    )  # fmt: skip
    check(case, gradients=False)
    assert "Parts" in launched[0][0].leaves


@pytest.mark.parametrize("divide", [None, TOTAL * lookup("d", (h, q), FLOAT), count])
def test_triton_weights_of_long_rows_in_parts(monkeypatch, divide):
    monkeypatch.setattr(triton_grids, "shares", lambda *a: None)
    monkeypatch.setattr(triton_grids, "INTERPRETED", 1 << 10)
    monkeypatch.setattr(triton_grids, "LEAST", 2)
    monkeypatch.setattr(triton_grids, "LONG", 0)
    tables = {"d": np.random.default_rng(0).random((4, 70)).astype(np.float32)} if divide is not None else {}
    case = weighted((abs(q - k) <= 20) | (k < 5) | (q < 20), relu2 + 0.1, divide, q_len=70, kv_len=90, heads=4,
                    kv_heads=2, dim=16, v_dim=16, block=(16, 16), tables=tables, drops=divide is count)  # fmt: skip
    check(case, order="longest-first")


@pytest.mark.parametrize("name", ["sigmoid", "softmax1"])
def test_triton_weights_by_tensor_descriptors(name):
    check(CASES[name].but(dtype="float16"), by=16, descriptors=True)


def test_weights_past_float16_keep_their_exponents():
    """The weights reach 1e8, and their quotients by the total fit."""
    check(weighted(causal, relu2 * 1e8 + 1.0, TOTAL, dtype="float16"), gradients=False, within=1e-3)


def test_slopes_past_float16_keep_their_exponents():
    """Each slope is 750,000, and the scale of scores takes gradients back to where float16 has them."""
    weight = function("sigmoid", score) * 3e6
    check(weighted(causal, weight, count * 1e4, score=score * 1e-4, dtype="float16", dim=16, v_dim=16), within=2e-3)


@pytest.mark.parametrize(
    ("weight", "divide", "wide"),
    [
        (function("sigmoid", score), None, ()),
        (BOUNDED, TOTAL, ("ds",)),
        (score, None, ("p",)),
        (relu2, count, ("p", "ds")),
    ],
)
def test_products_in_16_bits_are_proved_to_fit(weight, divide, wide):
    plan, target, dims = weighted(causal, weight, divide).plan, Target("triton", 64, 64), Dims(64, 64, "float16")
    forwards, backwards = forward.emit(plan, target, dims), backward.emit(plan, target, dims, {"q", "k", "v"})
    assert ("tf32" in forwards) == ("p" in wide)
    products = [x for x in backwards.splitlines() if "tl.dot(in_tf32" in x]
    assert {x.split("in_tf32(")[1].split(")")[0] for x in products} == {*wide}
    for dtype in ("bfloat16", "float32"):
        assert "tf32" not in forward.emit(plan, target, Dims(64, 64, dtype))


def test_nan_at_hidden_keys_of_a_cache_stays_there():
    """Keys and values that no query sees are NaN."""
    case = last(weighted(causal & (k % 3 > 0), BOUNDED, TOTAL, kv_len=200), 2)
    inputs = inputs_of(case, splits=3)
    inputs = replace(inputs, plan=replace(inputs.plan, unwritten=True))
    q_, *kv = tensors(case)
    for x in kv:
        x[:, :, ::3] = float("nan")
    out, total, seen = triton_torch.forward(inputs, q_, *kv, top=True)
    case.check(out.numpy(), total.numpy(), seen.numpy())


@pytest.mark.parametrize("name", ["by head and query", "hidden by the score mod", "scattered", "origin by batch"])
def test_triton_weights_in_jax_equal_the_reference(name):
    case = CASES[name].but(block=(32, 32))
    slots = case.plan.slot_values({**case.slots, **DROPPED})
    inputs = cases.kernel_inputs(case, Target("triton", 32, 32, splits=1), case.plan, slots=slots)
    q_, k_, v_ = cases.arrays(case)
    out, total, seen = (np.asarray(x, np.float64) for x in triton_jax.forward(inputs, q_, k_, v_))
    *_, dout, dtotal = case.arrays
    g, c = case.cotangents(out.transpose(0, 2, 1, 3), total, case.seen(), dout, dtotal)
    unread = ForwardResults(*(np.full(x.shape, np.nan, np.float32) for x in (out, total)))
    cotangents = Cotangents(g.swapaxes(1, 2).astype(np.float32), c.astype(np.float32))
    names = frozenset({"q", "k", "v", *(x.source for x in backward_of(inputs.plan).gradients)})
    found = triton_jax.backward(inputs, q_, k_, v_, unread, cotangents, grad_names=names)
    grads = {n: np.asarray(x, np.float64) for n, x in found.items()}
    case.check(out.transpose(0, 2, 1, 3), total, seen, grads | {n: grads[n].swapaxes(1, 2) for n in "qkv"})


def test_triton_weights_of_few_queries_in_jax():
    case = last(CASES["by head and query"].but(heads=4, kv_heads=1, batch=2), 3)
    inputs = cases.kernel_inputs(case, Target("triton", *case.block, splits=3), case.plan)
    out, total, seen = (np.asarray(x) for x in triton_jax.forward(inputs, *cases.arrays(case)))
    case.check(out.transpose(0, 2, 1, 3), total, seen)
