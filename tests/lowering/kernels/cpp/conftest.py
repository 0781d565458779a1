"""Tests of the native kernels themselves have them as users do, compiled by g++ with all its optimizations."""

import os
from pathlib import Path

import pytest

# a long text, and what is asked does not hang on them
QUICK = ("test_cpp_operators.py", "test_native_stored_calls.py", "test_out_of_memory.py")


@pytest.fixture(autouse=True, scope="module")
def quick(request):
    """Whether other tests compile kernels with fewer optimizations."""
    with pytest.MonkeyPatch.context() as patch:
        compiler = Path(os.environ.get("CXX", ""))
        quick = compiler.name == "quick_g++"
        if quick and request.path.name not in QUICK:
            patch.setenv("CXX", str(compiler.with_name("counted_g++")))
        yield quick
