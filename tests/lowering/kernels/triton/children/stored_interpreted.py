"""Run by test_triton_interpret.py with TRITON_INTERPRET=1: stored keys and values against the reference, in kernels of
few queries and in the forward."""

import numpy as np
import pytest
import torch
from support import attention_cases as cases
from support import stored_cases
from support.stored_cases import SOFTCAP, STORED, Stored, decode
from support.triton.call import poisoned

from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import KernelInputs
from frisket.runtime.backends.triton import grids as triton_grids
from frisket.runtime.backends.triton import torch as triton_torch

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")


def tensor(array, like=None):
    """A tensor of odd strides, in poisoned memory."""
    dtype = getattr(torch, str(array.dtype))
    return poisoned(array.astype(np.float32) if dtype.is_floating_point else array, dtype, "bhsd"[: array.ndim])


def run(stored, **target):
    made = stored_cases.problem(stored)
    tables = {n: tensor(x) for n, x in made.plan.table_values(made.tables).items()}
    arrays = [tensor(x) for x in (made.q.transpose(0, 2, 1, 3), made.k, made.v)]
    target = Target("triton", *stored.case.block, **target)
    inputs = KernelInputs(made.plan, cases.Source(stored.case), cases.geometry(stored.case), target, {}, tables)
    out, lse, _ = triton_torch.forward(inputs, *arrays)
    assert out.dtype == arrays[0].dtype
    stored_cases.check(stored, made, out.double(), lse)
    return out, lse


@pytest.mark.parametrize("name", STORED)
def test_triton_forward_reads_stored_keys_and_values(name):
    run(STORED[name], splits=1)


@pytest.mark.parametrize("name", [n for n, s in STORED.items() if s.case.q_len < 16])
def test_triton_decode_parts_read_stored_keys_and_values(name):
    run(STORED[name], splits=3)


RAGGED = 300, 0, 1, 37
UNEVEN = {
    "int8": Stored(decode(RAGGED, kv_len=304), "int8"),
    "e4m3": Stored(decode(RAGGED, kv_len=304, dtype="bfloat16"), "float8_e4m3fn"),
    "e5m2": Stored(decode(RAGGED, 4, kv_len=304, dtype="float16"), "float8_e5m2"),
    "pages of 16": Stored(decode(RAGGED, kv_len=304), scales=False, page=16),
    "pages of 64": Stored(decode(RAGGED, 4, kv_len=320, dtype="bfloat16"), scales=False, page=64),
    "int8 in pages of 16": Stored(decode(RAGGED, kv_len=304, score=SOFTCAP), "int8", page=16),
    "int8 in pages of 16, 4 queries": Stored(decode(RAGGED, 4, kv_len=304), "int8", page=16),
    "int8 in pages of 64": Stored(decode(RAGGED, kv_len=320, dtype="float16", dim=40, v_dim=72), "int8", page=64),
    "int8 in odd pages": Stored(decode(RAGGED, 4, kv_len=336), "int8", page=48),
    "e4m3 in pages of 16": Stored(decode(RAGGED, kv_len=304, dtype="bfloat16"), "float8_e4m3fn", page=16),
    "e4m3 in pages of 16, 4 queries": Stored(decode(RAGGED, 4, kv_len=304, dtype="float16"), "float8_e4m3fn", page=16),
    "heads of 8": Stored(decode(RAGGED, kv_len=304, heads=16), "int8", page=16),
    "a head each": Stored(decode(RAGGED, 4, kv_len=304, heads=2), "int8", page=16),
    "no sequence": Stored(decode((0, 0), 4, kv_len=32), "int8", page=16),
}  # fmt: skip


@pytest.mark.parametrize("name", UNEVEN)
def test_stored_decode_parts_follow_the_length_of_sequences(monkeypatch, name):
    """Sequences of which one is empty and one a single token."""
    launched = []
    steps = triton_grids.Shares.steps
    monkeypatch.setattr(triton_grids.Shares, "steps", lambda self, g: launched.append(steps(self, g)) or launched[-1])
    monkeypatch.setattr(triton_grids, "INTERPRETED", 16)
    monkeypatch.setattr(triton_grids, "RAGGED", 0)
    monkeypatch.setattr(triton_grids, "ragged", lambda *_: True)
    first, again = run(UNEVEN[name]), run(UNEVEN[name])
    assert all(map(torch.equal, first, again))
    assert ["Parts" in first.leaves for first, _ in launched] == [True, True]
