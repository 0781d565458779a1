"""Without EasyDeL; tests/real/easydel runs inside it."""

import sys

import pytest

import frisket as fk
from frisket.integrations import easydel


def test_easydel_that_is_absent_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "easydel", None)
    with pytest.raises(fk.MissingPackageError, match="easydel is not installed: pip install easydel"):
        easydel.register()
