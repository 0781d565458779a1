"""Run by test_cascade.py without an interpreter: what a step of a cascade launches, as on an H200 and into nothing."""

import pytest
import torch
from support.lowering.device_tables import Watch, pose
from support.triton import null as triton_null

import frisket as fk
from frisket.caches import PagePool
from frisket.caches.torch import PagedKVCache
from frisket.runtime.backends import triton as backend
from frisket.runtime.backends.triton import grids as triton_grids
from frisket.runtime.caches import torch_cascade, torch_paged_ring, torch_plain

triton_null.install(watch=True)
backend._on_torch = lambda: ""
BATCH, SHARED, OWN, PAGE, HEADS, KV_HEADS, DIM = 8, 1024, 128, 64, 16, 2, 64
OF_ONE_CALL = ["plan_spans", "attention_decode", "attention_combine"]
# operators of torch without a kernel on a GPU
VIEWS = "alias as_strided detach expand permute select slice transpose unbind unsqueeze view empty empty_like".split()


class Kernels(Watch):
    """The operators of torch that launch a kernel."""

    WATCHED = (*Watch.WATCHED, torch_paged_ring, torch_plain)

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def posed(monkeypatch):
    pose(monkeypatch)
    monkeypatch.setattr(triton_grids, "INTERPRETED", 132)  # processors of what tensors of the host pass for
    monkeypatch.setattr(torch_cascade, "_merges_by_kernel", lambda x: True)
    monkeypatch.setattr(torch_paged_ring, "most_members", lambda *a: None)
    monkeypatch.setattr(torch_cascade, "CPU_BYTES", 0)


def seated(dtype):
    """A pool and a cache of sequences with a common prefix."""
    pages = SHARED // PAGE + BATCH * (OWN // PAGE + 1)
    pool, width = PagePool(pages, PAGE), (SHARED + OWN) // PAGE + 1
    cache = PagedKVCache.create(pages, PAGE, BATCH, width, KV_HEADS, DIM, dtype=dtype)
    pool.allocate("prefix", SHARED)
    for b in range(BATCH):
        pool.fork("prefix", b)
    pool.free("prefix")
    cache.seat(pool, range(BATCH), 0, pool.append(dict.fromkeys(range(BATCH), OWN)))
    return pool, cache


def launched(cache, q, att, **kind):
    """(kernels of Triton, operators of torch) of a step."""
    triton_null.launched.clear()
    with torch.no_grad(), Kernels() as watch:
        cache.attend(att, q, **kind)
    return [kernel.name for kernel, *_ in triton_null.launched], watch.names


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_step_launches_three_kernels_more_than_one_call(dtype):
    """The prefix is planned once, for steps on new pages as well; one query of rows in order is packed by a view."""
    pool, cache = seated(dtype)
    q, att = torch.zeros(BATCH, HEADS, 1, DIM, dtype=torch.bfloat16), fk.compile("causal")
    for kind in 2 * [{}, {"cascade": True}]:
        launched(cache, q, att, **kind)  # first calls plan for tiles that they guess, and copy what lasts to the device
    assert launched(cache, q, att) == (OF_ONE_CALL, ["sub"])
    for _ in range(2):  # the first token takes a new page
        cache.seat(pool, range(BATCH), 1, pool.append(dict.fromkeys(range(BATCH), 1)))
        cache.append(*torch.zeros(2, BATCH, KV_HEADS, 1, DIM, dtype=torch.bfloat16))
        kernels = [*OF_ONE_CALL[1:], *OF_ONE_CALL, "merge_prefix"]
        assert launched(cache, q, att, cascade=True) == (kernels, ["sub"])


def test_masks_that_hide_earlier_keys_are_planned_at_every_step():
    _, cache = seated("bfloat16")
    q, att = torch.zeros(BATCH, HEADS, 1, DIM, dtype=torch.bfloat16), fk.compile("causal & window(1100)")
    for _ in range(2):
        kernels, operators = launched(cache, q, att, cascade=True)
    assert kernels[-7:] == [*OF_ONE_CALL, *OF_ONE_CALL, "merge_prefix"]
    assert set(kernels[:-7]) == {"lines", "windows"}  # of the places of queries
    assert operators == ["sub", "index"]
