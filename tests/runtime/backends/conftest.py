"""A compiler for tests of when kernels are built."""

from pathlib import Path

import pytest

from frisket.runtime.machine import cpp_build

KNOWN = Path(__file__).parents[2] / "support/native/known_g++"


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def known_compiler(compiled, monkeypatch):
    """The path of a compiler that compiles each text once in a run, whatever the cache of kernels is."""
    command = cpp_build.compiler()
    assert command is not None
    monkeypatch.setenv("KNOWN", str(compiled))
    monkeypatch.setenv("REAL", command[0])
    return str(KNOWN)
