"""The tests of JAX where JAX refuses to promote shapes and dtypes by itself, as JAX's own tests have it."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import jax
import pytest

TESTS = Path(__file__).resolve().parents[2]
STRICT = {"JAX_NUMPY_RANK_PROMOTION": "raise", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
SLICE = (
    ("runtime.plans.test_flat_plan", "test_offsets_in_fewer_bits_than_positions_need", "jax"),
    ("runtime.jax.test_jax_learned", "test_a_mask_captures_documents"),
    ("runtime.caches.test_caches_jax", "test_jax_cache_refuses_more_tokens_than_its_room"),
    ("runtime.modeling.test_modeling", "test_rotary_keeps_the_dtype", "jax"),
)
WHOLE = (  # those whose own arithmetic promotes nothing
    "lowering/xla/test_xla.py lowering/xla/test_xla_backward.py",
    "runtime/plans/test_flat_plan.py runtime/jax/test_jax_learned.py runtime/jax/test_jax_transforms.py",
    "runtime/caches/test_caches_jax.py runtime/jax/test_jax_caching.py runtime/jax/test_jax_platforms.py",
    "runtime/backends/test_native_jax.py runtime/backends/test_native_jax_public.py runtime/jax/test_jax_automatic.py",
    "runtime/modeling/test_modeling.py runtime/operations/test_operations.py runtime/attention/test_merge.py",
    "runtime/integrations/test_flax_layer.py",
    "runtime/jax/test_jax_symbolic.py runtime/errors/test_order_of_axes.py",
)


def strict(*names):
    """Run tests in a process of its own under both settings."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--tb=short", "-p", "no:cacheprovider", *names]
    found = subprocess.run(command, cwd=TESTS, env={**os.environ, **STRICT}, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-8000:]


@pytest.mark.parametrize("case", SLICE, ids=lambda case: case[1])
def test_slice_of_jax_tests_passes_under_strict_promotion(case):
    module, name, *parameters = case
    test = getattr(import_module(module), name)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        test(*parameters)


@pytest.mark.slow
@pytest.mark.parametrize("names", WHOLE)
def test_jax_tests_pass_under_strict_promotion(names):
    strict(*names.split())
