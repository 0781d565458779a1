"""Context parallel attention in torch, on four gloo processes: what one process computes, no byte more than planned."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runtime.parallel.children import torch_ranks as ranks
from support.processes import together
from support.tiers import default_only
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import frisket as fk
from frisket.dsl.errors import BackwardError, ParameterError, PeerError, ShapeError

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")


OFTEN = "window by-head dropout".split()  # the others are exhaustive


@pytest.fixture(scope="module")
def said(request):
    asked = {x.callspec.params.get("name") for x in request.session.items if hasattr(x, "callspec")}
    checks = partial(ranks.all_checks, names=[n for n in ranks.CASES if n in asked])
    found = together(checks, ranks.RANKS, timeout=60, limit=240)
    assert not {r: x for (r, name), x in found.items() if name == "failed"}
    return found


@pytest.mark.parametrize("variant", ["ring", "all-gather"])
@pytest.mark.parametrize("name", default_only(ranks.CASES, *OFTEN))
def test_ranks_together_compute_what_one_does(said, name, variant):
    """out and lse beside the interpreter, gradients of q, k, v, tables, scalars and sinks beside one process."""
    for r in range(ranks.RANKS):
        assert max(said[r, ("differences", name)][variant]) < 1e-5


def test_weighted_rows_of_ranks_are_those_of_one():
    """Errors are at most twice those of one process in the same dtype, whose gradients of keys are one sum."""
    found = together(partial(ranks.weighted_checks, names=[*ranks.WEIGHTED]), ranks.RANKS, timeout=60, limit=240)
    assert not {r: x for (r, name), x in found.items() if name == "failed"}
    for r in range(ranks.RANKS):
        assert max(found[r, "lse"]) < 1e-5
        for name in ranks.WEIGHTED:
            for how, errors in found[r, ("weighted", name)].items():
                for i, (ours, theirs, largest) in enumerate(errors):
                    step = torch.finfo(how[1]).eps
                    assert ours <= 2 * theirs + (step + 1e-6) * max(1, largest), (name, how, i)


@pytest.mark.parametrize("variant", ["ring", "all-gather"])
@pytest.mark.parametrize("backend", ranks.BACKENDS)
def test_gradients_of_large_scores(said, backend, variant):
    """Weights from a float32 lse alone are off by percents at scores of 1e5, and NaN or 0 at 1e9."""
    for r in range(ranks.RANKS):
        for size in (1e3, 1e5, 1e9):
            for name, (ours, theirs, largest) in zip(
                ("q", "k", "v", "sinks"), said[r, ("large", backend, variant, size)], strict=True
            ):
                assert ours <= 2 * theirs + 2e-6 * largest, f"d{name} at {size}: {ours:.1e}, torch {theirs:.1e}"


@pytest.mark.parametrize("name", ["causal", "window", "documents"])
def test_bytes_sent_are_those_planned(said, name):
    deal = ranks.case(name)[1]
    planned = [deal.bytes(ranks.KV_HEADS, ranks.DIM, ranks.V_DIM, 4, backward=b) for b in (False, True)]
    assert (planned[1] > 0).any()
    for i, plan in enumerate(planned):
        assert [said[r, ("bytes", name)][i] for r in range(ranks.RANKS)] == plan.tolist()


def test_bytes_on_the_wire_are_those_planned(said):
    """As the kernel counts them on the sockets: nothing but headers of messages comes on top."""
    deal = fk.parallel.deal("window(900)", 8192, ranks.RANKS, batch=ranks.BATCH)
    planned = deal.bytes(ranks.KV_HEADS, ranks.DIM, ranks.V_DIM, 4).sum(axis=1)
    for r in range(ranks.RANKS):
        assert planned[r] <= said[r, "on the wire"] < planned[r] + 20_000


def test_mistakes_of_all_ranks_are_reported_on_each(said):
    """And leaves no message behind: the calls after it are right."""
    for r in range(ranks.RANKS):
        assert said[r, ("wrong", "axes")].startswith("`bias` is a table with 2 axes")
        assert said[r, ("wrong", "name")].startswith("`bais` is given and no mask")
        assert said[r, ("wrong", "no")].startswith("`bias` has no value")


@pytest.mark.parametrize("name", ["mask", "lengths", "dtype", "dropout", "learned"])
def test_ranks_that_differ_are_named(said, name):
    for r in range(ranks.RANKS):
        text = said[r, ("refused", name)]
        assert text.startswith("the ranks differ in")
        assert "ranks 0, 1 and 3: " in text
        assert "rank 2: " in text


@pytest.mark.parametrize("how", ["dies", pytest.param("stops", marks=pytest.mark.exhaustive)])
def test_a_rank_that_is_lost_is_named(how):
    found = together(getattr(ranks, how), ranks.RANKS, timeout=2, limit=60, lost=1)
    for r in (0, 1, 3):
        assert found[r, "lost"].startswith(f"rank {r} waited to ")
        assert "rank 2\n" in found[r, "lost"]


@pytest.mark.exhaustive
def test_a_rank_that_is_missed_says_whom_it_missed():
    found = together(ranks.neighbours, ranks.RANKS, timeout=2, limit=60, lost=1)
    said = found[2, "lost"].splitlines()[0]
    assert said.startswith("rank 2 waited to ")
    assert said.endswith("rank 3")
    for r in (0, 1):
        assert found[r, "lost"].splitlines()[2] == f"  before that, {said}"


# -- in one process ---------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_a_group():
    q = torch.zeros(1, 1, 128, 8)
    with pytest.raises(PeerError, match="no process group"):
        fk.parallel.attend(fk.compile("causal"), q, q, q, deal=fk.parallel.deal("causal", 128, 1))


def test_attention_on_one_rank_equals_plain_attention(alone):
    q, k, v = torch.randn(3, 1, 2, 128, 8)
    att = fk.compile("causal")
    deal = fk.parallel.deal("causal", 128, 1)
    assert (fk.parallel.attend(att, q, k, v, deal=deal) - att(q, k, v)).abs().max() < 1e-6


def test_context_parallel_refuses_tangents_and_torch_func(alone):
    x, att, deal = torch.randn(1, 2, 128, 8), fk.compile("causal"), fk.parallel.deal("causal", 128, 1)

    def run(q, sinks=None):
        return fk.parallel.attend(att, q, x, x, deal=deal, sinks=sinks)

    with pytest.raises(BackwardError, match="tangents"):
        torch.func.jvp(run, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(BackwardError, match="tangents"):
        run(x, forward_ad.make_dual(torch.zeros(2), torch.ones(2)))


def test_context_parallel_refuses_arrays_that_do_not_fit(alone):
    q, att, deal = torch.zeros(1, 2, 128, 8), fk.compile("causal"), fk.parallel.deal("causal", 128, 1)
    with pytest.raises(ShapeError, match="q is"):
        fk.parallel.attend(att, q[:, :, :100], q, q, deal=deal)
    with pytest.raises(ShapeError, match="for 2 ranks, the group has 1"):
        fk.parallel.attend(att, q, q, q, deal=fk.parallel.deal("causal", 128, 2))
    fk.parallel.attend(fk.compile("causal & window(9)"), q, q, q, deal=deal)  # shows less than the deal brings
    with pytest.raises(ParameterError, match="variant"):
        fk.parallel.attend(att, q, q, q, deal=deal, variant="tree")
    with pytest.raises(ParameterError, match=r"`doc` is split along \(0, 1\); that is one of its axes"):
        fk.parallel.attend(fk.compile("same(doc)"), q, q, q, deal=deal, split={"doc": (0, 1)}, doc=torch.zeros(128))
    spread = DTensor.from_local(q, init_device_mesh("cpu", (1,)), [Replicate()])
    for arrays in ((spread, spread, spread), (q, spread, q)):
        with pytest.raises(ParameterError, match="is a DTensor; give a plain tensor"):
            fk.parallel.attend(att, *arrays, deal=deal)
    with pytest.raises(ShapeError, match="one dtype"):
        fk.parallel.attend(att, q, q, q.double(), deal=deal)
    with pytest.raises(ParameterError, match=r"attention may show more(.|\n)*deal.under"):
        fk.parallel.attend(fk.compile("window(9)"), q, q, q, deal=deal)
    by_batch = fk.parallel.deal("causal & q - k < 9 * (b + 1)", 128, 1)
    with pytest.raises(ParameterError, match="known for 1 of 2"):
        fk.parallel.attend(fk.compile(by_batch.mask), *[q.expand(2, 2, 128, 8)] * 3, deal=by_batch)
    with pytest.raises(ParameterError, match="takes arrays of torch or JAX"):
        fk.parallel.attend(att, *[np.zeros((1, 2, 128, 8))] * 3, deal=deal)


def test_a_deal_of_other_documents_is_refused(alone):
    """What travels is by the deal: under other documents keys would be missing, in silence."""
    q = torch.zeros(1, 2, 128, 8)
    doc = torch.arange(128, dtype=torch.int32) // 30
    att, deal = fk.compile("causal & same(doc)"), fk.parallel.deal("causal & same(doc)", 128, 1, doc=doc)
    fk.parallel.attend(att, q, q, q, deal=deal, doc=doc)
    with pytest.raises(ParameterError, match="may show more"):
        fk.parallel.attend(att, q, q, q, deal=deal, doc=doc // 2)
    fk.parallel.attend(att, q, q, q, deal=deal, doc=doc)
    entries = doc.numpy()
    entries //= 2  # which torch does not count
    with pytest.raises(ParameterError, match="may show more"):
        fk.parallel.attend(att, q, q, q, deal=deal, doc=doc)
    fk.parallel.attend(att, q, q, q, deal=deal.under("causal & same(doc)", doc=doc), doc=doc)


@pytest.mark.exhaustive
def test_context_parallel_example_trains_like_one_process():
    example = Path(__file__).resolve().parents[3] / "examples" / "context_parallel.py"
    said = []
    for count in (1, 3):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", example]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-6000:]
        said.append([line for line in done.stdout.splitlines() if line.startswith("step")])
    assert len(said[0]) == 5
    assert said[0] == said[1]
