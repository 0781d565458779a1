"""Tests of the native kernels themselves have them as users do, compiled by g++ with all its optimizations."""

import os

import pytest

# a long text, and what is asked does not hang on them
QUICK = ("test_cpp_operators.py", "test_native_stored_calls.py", "test_out_of_memory.py")


@pytest.fixture(autouse=True, scope="module")
def quick(request):
    """Whether other tests compile kernels with fewer optimizations."""
    with pytest.MonkeyPatch.context() as patch:
        quick = os.path.basename(os.environ.get("CXX", "")) == "quick_g++"
        if quick and request.path.name not in QUICK:
            patch.delenv("CXX")
        yield quick
