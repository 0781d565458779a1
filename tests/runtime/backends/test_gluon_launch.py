"""Gluon as a backend of torch, up to the driver: compiled for Hopper and launched as on a GPU."""

from pathlib import Path

import pytest
from support.triton.triton_process import run

HERE = Path(__file__).parent


@pytest.mark.exhaustive
def test_launched_up_to_the_driver():
    run(HERE / "gluon_launched.py")
