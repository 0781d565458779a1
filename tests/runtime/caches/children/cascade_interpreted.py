"""Run by test_cascade.py with TRITON_INTERPRET=1: a cascade by Triton, and the kernel that merges its parts."""

import pytest
import torch
from runtime.caches.test_cascade import GAIN, HEADS, ROWS, Rows, pays, require, step  # noqa: F401
from support.lowering.device_tables import pose

import frisket as fk
from frisket.runtime.caches import torch_cascade
from frisket.runtime.caches.triton_merge import merged

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|divide|backend)")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_cascade_of_triton_is_dense_attention(dtype, monkeypatch):
    """As on a GPU: the parts are merged by the kernel."""
    texts = "causal & (sinks(4) | window(21))", "score * gain[b, h] - 0.1 * (q - k)"
    rows, ran = Rows(getattr(torch, dtype)), []
    q = rows.queries(2)
    monkeypatch.setattr(torch_cascade, "_merges_by_kernel", lambda x: not ran.append(x.shape))
    att, peer = (fk.compile(*texts, backend=x) for x in ("triton", "aten"))
    got = rows.cache.attend(att, q, cascade=True, return_lse=True, gain=GAIN)
    assert ran
    for b in range(len(ROWS)):
        require([x[b : b + 1] for x in got], rows.dense(peer, q, b, gain=GAIN), 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_plan_of_a_prefix_serves_every_step(dtype, monkeypatch):
    """A plan of the device, made once: of two groups of unequal sizes, and of rows without a prefix."""
    pose(monkeypatch)
    monkeypatch.setattr(torch_cascade, "_merges_by_kernel", lambda x: True)
    rows, plans = Rows(getattr(torch, dtype), new=1), []
    att, peer = (fk.compile("causal", backend=x) for x in ("triton", "aten"))
    for _ in range(3):
        q = rows.queries(1)
        got = rows.cache.attend(att, q, cascade=True, return_lse=True)
        for b in range(len(ROWS)):
            require([x[b : b + 1] for x in got], rows.dense(peer, q, b), 1e-5)
        ((_, cascade),) = rows.cache._cascades.values()
        plans += cascade.plans.values()
        step(rows)
    assert all(plan.on_device and plan is plans[0] for plan in plans)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("new", "dim"), [(1, 16), (3, 24)])
def test_merging_kernel_equals_merge(new, dim, dtype):
    """Of parts that see nothing, of rows without a prefix, and of lse that exp alone would not take."""
    g, members, batch = torch.Generator().manual_seed(0), 3, 5
    slots = torch.tensor([0, 3, -1, 1, 4])
    before = torch.randn(2, HEADS, members * new, dim, generator=g), torch.randn(2, HEADS, members * new, generator=g)
    behind = torch.randn(batch, HEADS, new, dim, generator=g), torch.randn(batch, HEADS, new, generator=g) * 100
    before[1][0, 1], behind[1][1, 2], behind[1][0, 1, 0] = -torch.inf, -torch.inf, -torch.inf
    before, behind = ((out.to(dtype), lse) for out, lse in (before, behind))
    launches = {}
    for _ in range(2):
        got = merged(before, behind, slots, members, launches)
    out, lse = (x.unflatten(2, (members, new)).transpose(1, 2).flatten(0, 1)[slots] for x in before)
    want = fk.merge((out, torch.where(slots[:, None, None] < 0, -torch.inf, lse)), behind)
    require(got, want, 1e-6 if dtype == torch.float32 else 1e-3)
    assert len(launches) == 1
