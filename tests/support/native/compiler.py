"""The mark of tests that need a C++ compiler."""

import pytest

from frisket.runtime.machine import cpp_build

needs_compiler = pytest.mark.skipif(bool(cpp_build.reason()), reason=cpp_build.reason() or "")
