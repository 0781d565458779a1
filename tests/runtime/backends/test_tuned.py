"""`fk.tune` and `frisket tune`: races of tiles, and machines without a GPU."""

from pathlib import Path

import pytest
from support.triton.process import run as run_child

import frisket as fk
from frisket.dsl.errors import BackendError, ParameterError
from frisket.runtime.backends.triton import tuned
from frisket.runtime.cli.main import main
from frisket.runtime.machine.settings import Settings

CHILDREN = Path(__file__).parent / "children"


@pytest.mark.exhaustive
def test_tiles_are_raced_in_the_interpreter():
    run_child(CHILDREN / "tuned_interpreted.py", TRITON_INTERPRET="1")


def test_without_a_gpu_tune_says_so(capsys):
    with pytest.raises(BackendError, match="no GPU is visible to torch: `frisket tune` races tiles"):
        fk.tune("causal", {"q_len": 512})
    assert main(["tune", "causal & window(w)", "--set", "w=9", "--shape", "q_len=512,heads=2"]) == 2
    assert "BackendError: no GPU is visible to torch" in capsys.readouterr().err


def test_wrong_sizes_of_a_shape(capsys):
    assert main(["tune", "causal", "--shape", "length=3"]) == 2
    assert "'length=3' is no size; there are q_len, kv_len" in capsys.readouterr().err


def test_variable_of_tuned_tiles():
    assert Settings.read({}).tuned
    assert not Settings.read({"FRISKET_TUNED": "0"}).tuned
    with pytest.raises(ParameterError, match="FRISKET_TUNED=no: write 0 or 1"):
        Settings.read({"FRISKET_TUNED": "no"})


@pytest.mark.parametrize(("length", "bound"), [(1, 1), (2, 2), (128, 128), (129, 256), (4000, 4096)])
def test_lengths_up_to_a_power_of_two(length, bound):
    assert tuned.up_to(length) == bound
