"""Results keep the bound that docs/reliability.md states, for the inputs of benchmarks/numerics.py.

Kernels of accelerators run in interpreters. A process of Triton's interpreter has Triton's kernels alone."""

import os

import jax
import numerics
import pytest
import torch

from frisket.runtime.machine import cpp_build

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|divide|backend )")
SHORT = [title for title in numerics.DRAWS if title not in (numerics.TINY, numerics.LONG, numerics.SHORTER)]
NATIVE = pytest.mark.skipif(bool(cpp_build.reason()), reason=cpp_build.reason())
OLD = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11)
MOSAIC = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(OLD, reason="Mosaic GPU's interpreter takes minutes for a call before JAX 0.11"),
]
ON_CPU = [pytest.param("cpp", marks=NATIVE), "aten", "xla"]
BACKENDS = ["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else [
    *ON_CPU, "gluon sm_90", "gluon sm_100", pytest.param("pallas-tpu", marks=pytest.mark.exhaustive),
    pytest.param("pallas-mosaic-gpu", marks=MOSAIC),
]  # fmt: skip
# native kernels have such scores in tests/lowering/kernels/cpp in every run
HIDING = [pytest.param("cpp", marks=[NATIVE, pytest.mark.exhaustive]) if x is ON_CPU[0] else x for x in BACKENDS]
# a process of Triton's interpreter is exhaustive, and its default run is all there is
EVERY = {d for d in numerics.EPSILON if d != "float16" or BACKENDS == ["triton"]}
INFINITE = "where(q < 100 | k % 7 == 3, -inf, score)"


def holds(dtype, backend, title=""):
    if dtype == "float32" and backend.partition(" ")[0] in numerics.HALF:
        pytest.skip("the kernel takes 16 bits alone")
    if (title, dtype) in numerics.TOO_LARGE:
        pytest.skip("the inputs are past the largest number")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("title", "dtype"),
    [pytest.param(t, d, marks=() if d in EVERY or "65504" in t else pytest.mark.exhaustive)
     for t in SHORT for d in numerics.EPSILON],
)  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_keep_their_bound(backend, title, dtype):
    holds(dtype, backend, title)
    case = numerics.Measured(title, dtype)
    output, gradients = case.errors(backend)
    assert output <= case.bound[0]
    assert (gradients is None) == (backend in numerics.FORWARD)
    assert gradients is None or gradients <= case.bound[1]


@pytest.mark.sampled(4)
@pytest.mark.skipif(BACKENDS == ["triton"], reason="a process of Triton's interpreter has its kernels alone")
@pytest.mark.parametrize("title", [*SHORT[:5:2], "one key has it all"])
def test_errors_of_kernels_for_tpus(title):  # one dtype in every run: half a minute of XLA's time
    test_errors_keep_their_bound("pallas-tpu", title, "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_over_many_keys(backend):
    few = backend.partition(" ")[0] in numerics.INTERPRETED
    dtype = "bfloat16" if backend.partition(" ")[0] in numerics.HALF else "float32"
    case = numerics.Measured(numerics.SHORTER if few else numerics.LONG, dtype)
    found = [x for x in case.errors(backend) if x is not None]
    assert all(error <= bound for error, bound in zip(found, case.bound, strict=False))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("what", ["k", "v"])
def test_numbers_that_are_not_finite(what, number, backend):
    """A key reaches the queries that see it and no other; a value may also reach others of its tile."""
    dtype = torch.float16 if backend.partition(" ")[0] in numerics.HALF else torch.float32
    given = tuple(x.to(dtype) for x in numerics.drawn())
    given["qkv".index(what)][..., 100, :] = float(number)
    found = numerics.RUNS[backend](*given)
    if what == "k":
        assert numerics.rows_off(found, given) == 0
    assert not found[:, :, 100:].isfinite().any()


@pytest.mark.parametrize("backend", HIDING)
def test_scores_of_minus_infinity_hide_their_keys(backend):
    """A row without any other score is 0, and so are its gradients."""
    case = numerics.Measured("scores of 1", "float16")
    out, found = numerics.gradients(backend, case.given, case.cotangent, INFINITE)
    q, k = torch.arange(numerics.LENGTH)[:, None], torch.arange(numerics.LENGTH)
    exact = [x.double().requires_grad_() for x in case.given]
    wanted = numerics.dense(*exact, numerics.visible() & (q >= 100) & (k % 7 != 3))
    assert numerics.off(out, wanted.detach(), case.most[0]) <= case.bound[0]
    assert not out[:, :, :100].any()
    if found is not None:
        grads = torch.autograd.grad(wanted, exact, case.cotangent.double())
        assert all(
            numerics.off(x, y, most) <= case.bound[1] for x, y, most in zip(found, grads, case.most[1:], strict=True)
        )
        assert not found[0][:, :, :100].any()


def test_a_bound_can_be_missed():
    """Attention in bfloat16 throughout is not good enough."""
    case = numerics.Measured("scores of 100", "bfloat16")
    assert case.errors("dense")[0] > 10 * case.bound[0]
