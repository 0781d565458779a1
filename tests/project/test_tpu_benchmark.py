"""benchmarks/tpu_tables.py at a few tokens: its parts run, and count what there is."""

import pytest
import tpu_tables


@pytest.mark.matrix
def test_tables_and_visits(monkeypatch):
    monkeypatch.setattr(tpu_tables, "MASKS", {"documents": tpu_tables.MASKS["documents"]})
    monkeypatch.setattr(tpu_tables, "LENGTHS", {2048: 1})
    monkeypatch.setattr(tpu_tables, "LONGEST", 4096)
    monkeypatch.setattr(tpu_tables, "TOKENS", 1024)
    for found in tpu_tables.tables()["masks"].values():
        assert set(found) == {2048, 4096}
        assert found[4096]["frisket_ms"] > 0
    for found in tpu_tables.visits()["masks"].values():
        visible = found["frisket"]["visible"]
        assert found["frisket"] == dict.fromkeys(("visible", "forward", "dq", "dkv"), visible)
        assert found["flex_attention"] == {"dq": visible, "dkv": visible}
        for kernel in found["splash"].values():
            assert kernel["computed"] == visible <= kernel["steps"]
