"""Results keep the bound that docs/reliability.md states, for the inputs of benchmarks/numerics.py."""

import numerics
import pytest

from frisket.runtime.machine import cpp_build

SHORT = [title for title in numerics.DRAWS if title not in (numerics.TINY, numerics.LONG)]
NATIVE = pytest.mark.skipif(bool(cpp_build.reason()), reason=cpp_build.reason())
BACKENDS = [pytest.param("cpp", marks=NATIVE), "aten", "xla"]


@pytest.mark.parametrize("dtype", numerics.EPSILON)
@pytest.mark.parametrize("title", SHORT)
@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_keep_their_bound(backend, title, dtype):
    if (title, dtype) in numerics.TOO_LARGE:
        pytest.skip("the inputs are past the largest number")
    case = numerics.Measured(title, dtype)
    for error, bound in zip(case.errors(backend), case.bound, strict=True):
        assert error <= bound


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_over_a_million_keys(backend):
    case = numerics.Measured(numerics.LONG, "float32")
    assert all(error <= bound for error, bound in zip(case.errors(backend), case.bound, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_a_hidden_key_that_is_not_finite_reaches_no_result(number, backend):
    q, k, v = (x.float() for x in numerics.drawn())
    k[..., 100, :] = float(number)
    assert numerics.rows_off(numerics.RUNS[backend](q, k, v), (q, k, v)) == 0


def test_a_bound_can_be_missed():
    """Attention in bfloat16 throughout is not good enough."""
    case = numerics.Measured("scores of 100", "bfloat16")
    assert case.errors("dense")[0] > 10 * case.bound[0]
