"""Calls of this folder choose their backend by themselves: the suite names library calls."""

import pytest


@pytest.fixture
def automatic(monkeypatch):
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
