"""Gluon as a backend of torch, up to the driver: compiled for Hopper and launched as on a GPU."""

from pathlib import Path

import pytest
from support.triton.process import run

CHILDREN = Path(__file__).parent / "children"


@pytest.mark.exhaustive
def test_launched_up_to_the_driver():
    run(CHILDREN / "gluon_launched.py")
