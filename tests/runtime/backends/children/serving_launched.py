"""Run by test_triton_binding.py without an interpreter: what a step of serving launches, as on an H200 and into
nothing."""

from __future__ import annotations

import pytest
import torch
from support.lowering.device_tables import NoLook, NoWait, pose
from support.triton import null as triton_null

import frisket as fk
from frisket.runtime.backends import triton as backend
from frisket.runtime.backends.triton import grids as triton_grids

triton_null.install(watch=True)
backend._on_torch = lambda: ""
GROUP, KEY_HEADS, DIM, LENGTH = 8, 2, 128, 32_768
PROCESSORS = 132
KINDS = {"bfloat16": torch.bfloat16, "int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
STEPS = [(kv, page, queries) for kv in KINDS for page in (0, 16, 128) for queries in (1, 4, 16)]
PLANNERS = {"lines", "plan_spans", "longest_first"}


@pytest.fixture(autouse=True)
def posed(monkeypatch):
    pose(monkeypatch)
    monkeypatch.setattr(triton_grids, "INTERPRETED", PROCESSORS)  # processors of what tensors of the host pass for


def step(kv, page, queries, batch=2, length=LENGTH):
    """A call's arguments; sequences have lengths of their own, which only the device knows."""
    q = torch.zeros(batch, GROUP * KEY_HEADS, queries, DIM, dtype=torch.bfloat16)
    shape = (batch * length // page, KEY_HEADS, page, DIM) if page else (batch, KEY_HEADS, length, DIM)
    more = {"pages": torch.arange(shape[0], dtype=torch.int32).reshape(batch, -1)} if page else {}
    if kv != "bfloat16":
        more |= {n: torch.ones(shape[:3]) for n in ("k_scale", "v_scale")}
    k, v = (torch.zeros(shape, dtype=KINDS[kv]) for _ in "kv")
    return (q, k, v), more


def launched(run):
    triton_null.launched.clear()
    run()
    return [(kernel, grid) for kernel, grid, *_ in triton_null.launched]


def of_attention(found):
    return [kernel.name for kernel, _ in found if kernel.name not in PLANNERS]


@pytest.mark.parametrize(("kv", "page", "queries"), STEPS)
def test_a_step_is_two_launches_and_reads_nothing_back(kv, page, queries):
    """Where the plan is a formula. The next step differs in its place alone."""
    att = fk.compile("causal")
    given, more = step(kv, page, queries)
    with torch.no_grad(), NoLook(), NoWait():
        for start in (LENGTH - 100, LENGTH - 99):
            found = launched(lambda: att(*given, origin=(0, 0, start, 0), **more))  # noqa: B023
            assert of_attention(found) == ["attention_decode", "attention_combine"]
            assert len(found) == 2
    (_, grid), _ = found
    assert grid[1:] == (KEY_HEADS, 2)  # the heads of a group are in one tile
    assert grid[0] * grid[1] * grid[2] >= 0.9 * PROCESSORS


@pytest.mark.parametrize(("kv", "page", "queries"), STEPS)
def test_full_machines_take_one_launch(kv, page, queries):
    given, more = step(kv, page, queries, batch=PROCESSORS, length=512)
    with torch.no_grad(), NoLook(), NoWait():
        found = launched(lambda: fk.compile("causal")(*given, origin=(0, 0, 512 - queries, 0), **more))
    ((kernel, grid),) = found
    assert (kernel.name, grid) == ("attention_decode", (1, KEY_HEADS, PROCESSORS))


@pytest.mark.parametrize(("kv", "page"), [("bfloat16", 0), ("int8", 16), ("float8_e4m3fn", 128)])
def test_lengths_on_the_device_are_planned_there(kv, page):
    """Once for the step: the next layer is two launches again."""
    att = fk.compile("param start: int[B]\nmask = k <= q + start[b]")
    given, more = step(kv, page, 1)
    with torch.no_grad(), NoLook(), NoWait():
        start = torch.tensor([LENGTH - 1, 77])
        plan = att.plan(1, LENGTH, 2, GROUP * KEY_HEADS, start=start)
        first, again = (launched(lambda: att(*given, plan=plan, **more)) for _ in range(2))
    two = ["attention_decode", "attention_combine"]
    assert of_attention(first) == two
    assert [kernel.name for kernel, _ in again] == two
