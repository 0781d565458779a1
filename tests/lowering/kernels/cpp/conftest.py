"""Tests of the native kernels themselves have them as users do, compiled by g++ with all its optimizations."""

import os
from pathlib import Path

import pytest

QUICK = ("test_cpp_operators.py", "test_out_of_memory.py")  # a long text, and what is asked does not hang on them


@pytest.fixture(autouse=True, scope="module")
def _all_optimizations(request):
    with pytest.MonkeyPatch.context() as patch:
        compiler = Path(os.environ.get("CXX", ""))
        if compiler.name == "quick_g++" and request.path.name not in QUICK:
            patch.setenv("CXX", str(compiler.with_name("counted_g++")))
        yield
