"""Masks that read tables of a GPU: planned there, without a look at a value."""

from pathlib import Path

import pytest
from support.triton.process import run


@pytest.mark.exhaustive
def test_device_plans_launch_without_a_gpu():
    run(Path(__file__).parent / "children/flat_device_launched.py")
