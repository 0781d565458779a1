"""Tests of the native kernels themselves have them as users do, compiled by g++ with all its optimizations."""

import os

import pytest

QUICK = ("test_cpp_operators.py", "test_out_of_memory.py")  # a long text, and what is asked does not hang on them


@pytest.fixture(autouse=True, scope="module")
def _all_optimizations(request):
    with pytest.MonkeyPatch.context() as patch:
        quick = os.path.basename(os.environ.get("CXX", "")) == "quick_g++"
        if quick and request.path.name not in QUICK:
            patch.delenv("CXX")
        yield
