"""Run by test_triton_interpret.py with TRITON_INTERPRET=1: the bytes of keys and values that steps of few queries load,
all programs together, beside those of the tiles that some query sees. The interpreter's loads are counted by address:
what the generated kernels read, of the tiles that the plan sends them to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import attention_cases as cases
from support import stored_cases
from support.stored_cases import DECODE, Stored, decode
from support.triton.call import poisoned
from triton.runtime.interpreter import InterpreterBuilder

from frisket.dsl.sugar import h
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import KernelInputs
from frisket.runtime.backends.triton import torch as triton_torch

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")
GROUP, KEY_HEADS, DIM, KEYS = 8, 2, 64, 32
ALLOWED = 1.05
# of the sequences: whole (256 keys or fewer are not worth packed heads), within a tile, at the end of one, empty
ENDS = 288, 75, 96, 0
STORES = [(kv, page) for kv in ("", "int8", "float8_e4m3fn") for page in (0, KEYS, KEYS // 2)]


def stored(queries, kv="", page=0, mask=DECODE):
    case = decode(
        ENDS, queries, kv_len=max(ENDS), mask=mask, heads=GROUP * KEY_HEADS, kv_heads=KEY_HEADS, dim=DIM, v_dim=DIM,
        dtype="bfloat16", block=(16, KEYS),
    )  # fmt: skip
    return Stored(case, kv, bool(kv), page)


def tensor(array):
    """In poisoned memory."""
    dtype = getattr(torch, str(array.dtype))
    return poisoned(array.astype(np.float32) if dtype.is_floating_point else array, dtype, "bhsd"[: array.ndim])


@pytest.fixture
def loads(monkeypatch):
    """Every load: its addresses, where its mask is true, and the bytes of an element."""
    found = []
    load = InterpreterBuilder.create_masked_load

    def counted(self, pointers, mask, *rest):
        at = np.broadcast_to(pointers.data, mask.data.shape)[mask.data]
        found.append((at, pointers.get_element_ty().primitive_bitwidth // 8))
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    return found


def step(stored, loads, splits):
    """(bytes loaded of keys, values and their scales, those of tiles that are visible, those of keys that are)."""
    made, case = stored_cases.problem(stored), stored.case
    tables = {n: tensor(x) for n, x in made.plan.table_values(made.tables).items()}
    arrays = [tensor(x) for x in (made.q.transpose(0, 2, 1, 3), made.k, made.v)]
    target = Target("triton", *case.block, splits=splits)
    inputs = KernelInputs(made.plan, cases.Source(case), cases.geometry(case), target, {}, tables)
    out, lse, _ = triton_torch.forward(inputs, *arrays)
    stored_cases.check(stored, made, out.double(), lse)
    own = [*arrays[1:], *(x for x in tables.values() if x.dtype == torch.float32)]
    assert len(own) == (4 if stored.scales else 2)
    ranges = [(x.data_ptr(), x.untyped_storage().data_ptr() + x.untyped_storage().nbytes()) for x in own]
    loaded = sum(size * int(((first <= at) & (at < end)).sum()) for at, size in loads for first, end in ranges)
    seen = stored_cases._seen(case)
    tiles = seen.reshape(case.batch, -1, KEYS).any(-1).sum()
    key = case.kv_heads * 2 * (DIM * arrays[1].element_size() + 4 * stored.scales)
    return loaded, tiles * KEYS * key, seen.sum() * key


@pytest.mark.parametrize(
    ("queries", "splits", "kv", "page"),
    [(n, s, *x) for n, s in ((1, 0), (4, 3), (16, 3)) for x in STORES[:: 1 if n == 1 else 2]],
)
def test_keys_and_values_are_loaded_once(queries, splits, kv, page, loads):
    loaded, tiles, keys = step(stored(queries, kv, page), loads, splits)
    assert keys <= loaded <= ALLOWED * tiles


def test_heads_that_the_mask_tells_apart_load_them_each(loads):
    """So the count is one of bytes, not of tiles."""
    loaded, tiles, keys = step(stored(4, mask=DECODE & (h >= 0)), loads, 3)
    assert GROUP * keys <= loaded <= ALLOWED * GROUP * tiles
