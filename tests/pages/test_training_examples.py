"""The examples of training stacks: each ends with the original attention's losses and gradients."""

import importlib
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.exhaustive
def test_maxtext_example_replaces_splash_attention():
    pytest.importorskip("jax")
    found = runpy.run_path(str(EXAMPLES / "maxtext_style.py"))["main"]()
    assert len(found) == 2  # it compares them itself


@pytest.mark.exhaustive
def test_fsdp_and_context_parallel():
    """Over two processes; `aot_eager` traces what Inductor would compile."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, EXAMPLES / "torchtitan_style.py", "aot_eager"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count("gradients agree") == 2


@pytest.fixture
def packed(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(EXAMPLES)
    found = importlib.import_module("trainer_packed")
    found.register()
    return found


def test_a_flattened_batch_is_its_documents(packed):
    """One row without padding: its logits are those of each document alone under eager attention."""
    batch = packed.DataCollatorWithFlattening()(packed.documents()[: packed.BATCH])
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert batch["input_ids"].shape[0] == 1
    assert len(starts) == packed.BATCH
    with torch.no_grad():
        got = packed.tiny("frisket")(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[0]
        alone = batch["input_ids"][0].tensor_split(starts[1:])
        want = torch.cat([packed.tiny("eager")(input_ids=x[None]).logits[0] for x in alone])
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_packed_trainer_example_takes_twelve_steps(packed, tmp_path):
    assert len(packed.main(str(tmp_path))) == 12
