"""Masks that read tables of a GPU: planned there, without a look at a value."""

from pathlib import Path

from support.triton_process import run


def test_launched_into_nothing():
    run(Path(__file__).parent / "flat_device_launched.py")
