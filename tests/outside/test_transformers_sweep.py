"""Model types of transformers as tests/outside/transformers.json has them.

`FRISKET_SWEEP="llama bert"` chooses types; without it a tenth of those that were equal runs.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("transformers")

from outside import transformers_sweep

KNOWN = transformers_sweep.read()["types"]
EQUAL = [kind for kind, found in KNOWN.items() if found["verdict"] == "equal"]
CHOSEN = os.environ.get("FRISKET_SWEEP", "").split() or EQUAL[::10]


@pytest.fixture(scope="module", autouse=True)
def _imported_before_processes_are_forked():
    with pytest.MonkeyPatch.context() as patch:
        transformers_sweep.prepare(patch.setenv)
        yield


def test_transformers_sweep_has_each_model_type():
    assert sorted(KNOWN) == transformers_sweep.types()
    assert {found["verdict"] for found in KNOWN.values()} <= set(transformers_sweep.VERDICTS)


@pytest.mark.parametrize("kind", CHOSEN)
def test_a_type_is_what_the_results_say(kind):
    assert transformers_sweep.limited(kind) == KNOWN[kind]
