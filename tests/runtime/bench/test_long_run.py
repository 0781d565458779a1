"""benchmarks/long_run.py: runs of both frameworks begin alike, and distances are those of weights."""

from functools import cache
from pathlib import Path

import long_run
import numpy as np
import pytest


@pytest.fixture
def short(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(long_run.__file__).parents[1] / "examples"))
    monkeypatch.setattr(long_run, "STEPS", 3)


@cache
def eager(run):
    """The losses of the first steps."""
    return [x for x, _ in run("eager")][1:]


@pytest.mark.parametrize(
    ("run", "how"),
    [(long_run.by_torch, "third"), (long_run.by_torch, "frisket"),
     *(pytest.param(long_run.by_jax, how, marks=pytest.mark.exhaustive) for how in ("frisket", "third"))],
)  # fmt: skip
def test_first_training_steps_equal_eager_up_to_rounding(run, how, short):
    if run is long_run.by_jax:
        pytest.importorskip("optax")
    wanted = eager(run)
    assert len(wanted) == 3
    np.testing.assert_allclose([x for x, _ in run(how)][1:], wanted, rtol=1e-6)


@pytest.mark.exhaustive
def test_both_frameworks_train_one_model(short):
    pytest.importorskip("optax")
    np.testing.assert_allclose(eager(long_run.by_torch), eager(long_run.by_jax), rtol=1e-5)


def test_distances_between_runs_are_those_of_weights():
    start, losses = np.zeros(4), np.arange(1.0, 201.0)
    runs = {
        name: {"start": start, "losses": losses + off, "weights": np.full((len(long_run.SEEN), 4), 1.0 + off)}
        for name, off in (("eager", 0.0), ("threads", 0.0), ("third", 0.5), ("frisket", 0.25))
    }
    rows = dict(long_run.compared("torch", runs))
    assert rows["torch, frisket"]["figures"]["distance"] == {str(n): 0.25 for n in long_run.SEEN}
    assert rows["torch, third"]["figures"]["loss"] == {
        "largest difference in 20 steps": 0.5, "mean of the last 100 steps": 151.0,
    }  # fmt: skip
    assert rows["torch, at the end"]["ratios"] == {"frisket / furthest": [0.5]}
