"""The tests of JAX where JAX refuses to promote shapes and dtypes by itself, as JAX's own tests have it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
STRICT = {"JAX_NUMPY_RANK_PROMOTION": "raise", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
SLICE = (
    "runtime/test_flat_plan.py::test_offsets_in_fewer_bits_than_positions_need",
    "runtime/test_jax_learned.py::test_a_mask_captures_documents",
    "runtime/test_jax_learned.py::test_a_score_mod_captures_what_is_learned",
    "runtime/test_caches_jax.py::test_too_many_tokens",
    "runtime/test_modeling.py::test_rotary_keeps_the_dtype",
)
WHOLE = (  # those whose own arithmetic promotes nothing
    "kernels/test_xla.py kernels/test_xla_backward.py",
    "runtime/test_flat_plan.py runtime/test_jax_learned.py runtime/test_jax_transforms.py",
    "runtime/test_caches_jax.py runtime/test_jax_caching.py runtime/test_jax_platforms.py",
    "runtime/test_native_jax.py runtime/test_native_jax_public.py runtime/test_jax_automatic.py",
    "runtime/test_modeling.py runtime/test_operations.py runtime/test_merge.py runtime/test_flax_layer.py",
    "runtime/test_jax_symbolic.py runtime/test_order_of_axes.py",
)


def strict(*names):
    """Run tests in a process of its own under both settings."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--tb=short", "-p", "no:cacheprovider", *names]
    found = subprocess.run(command, cwd=TESTS, env={**os.environ, **STRICT}, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-8000:]


def test_a_slice():
    strict(*SLICE)


@pytest.mark.slow
@pytest.mark.parametrize("names", WHOLE)
def test_all(names):
    strict(*names.split())
