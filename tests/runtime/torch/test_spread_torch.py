"""Attention of DTensors, and models under TP, FSDP2 and DDP, on two gloo processes: what one process computes."""

import pytest
import torch.distributed as dist
from runtime.torch.children import spread_ranks as ranks
from support.processes import together

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")


@pytest.fixture(scope="module")
def said():
    found = together(ranks.work, ranks.RANKS, timeout=60, limit=240)
    assert not {r: x for (r, name), x in found.items() if name == "failed"}
    return found


NUMBERS = (
    *(f"{name}, {tables}" for name in ranks.SPLITS for tables in (False, True)), "flex batch", "flex heads",
    "head_dim", "tp", "tp of DTensors", "fsdp", "ddp",
)  # fmt: skip


def test_ranks_compute_what_one_process_does(said):
    """out, lse and the gradients of q, k, v, tables and sinks. One test, which one worker of pytest-xdist runs."""
    off = {(r, name): said[r, name] for r in range(ranks.RANKS) for name in NUMBERS}
    assert {which: x for which, x in off.items() if not x < 1e-4} == {}


@pytest.mark.exhaustive
def test_compiled_dtensor_attention_equals_one_process():
    found = together(ranks.compiled, ranks.RANKS, timeout=60, limit=400)
    assert not {r: x for (r, name), x in found.items() if name == "failed"}
    for r in range(ranks.RANKS):
        for backend in ("aot_eager", "inductor", "inductor again"):
            assert max(found[r, f"{backend} {name}"] for name in ("batch", "heads")) < 1e-4


def test_dtensor_attention_refuses_split_lengths(said):
    for r in range(ranks.RANKS):
        assert "q is split along its length" in said[r, "length"]
        assert "frisket.parallel" in said[r, "length"]
        assert "needs a seed" in said[r, "no seed"]


def test_sharded_parameter_as_table_is_refused(said):
    """A learned bias that fully_shard has sharded, read outside of the forward of its module."""
    for r in range(ranks.RANKS):
        assert "`slope` is a DTensor" in said[r, "table alone"]
        assert "whole in the forward of its module" in said[r, "table alone"]
