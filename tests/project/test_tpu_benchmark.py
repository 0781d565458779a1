"""benchmarks/tpu_tables.py at a few tokens: its parts run, and count what there is."""

import pytest
import tpu_tables


@pytest.mark.matrix
def test_tables_and_visits(monkeypatch):
    monkeypatch.setattr(tpu_tables, "MASKS", {"documents": tpu_tables.MASKS["documents"]})
    monkeypatch.setattr(tpu_tables, "LENGTHS", {2048: 1})
    monkeypatch.setattr(tpu_tables, "LONGEST", 4096)
    monkeypatch.setattr(tpu_tables, "TOKENS", 1024)
    for found in tpu_tables.tables().values():
        assert set(found["rows"]) == {"2,048 tokens", "4,096 tokens"}
        assert found["rows"]["4,096 tokens"]["figures"]["ms"]["frisket"] > 0
    found = tpu_tables.visits()["documents"]["figures"]
    visible = found["tiles with a visible pair"]["all"]
    kernels = ["forward, dq", "dkv", "dq, dk and dv in one"]
    ours = [f"frisket, {kernel}" for kernel in ("forward", "dq", "dkv")]
    theirs = [*(f"splash, {kernel}" for kernel in kernels), "flex_attention, dq", "flex_attention, dkv"]
    assert found["tiles computed"] == dict.fromkeys([*ours, *theirs], visible)
    assert all(steps >= visible for steps in found["steps of the grid"].values())
