"""The Gluon forward over keys in pages, and over keys that may never have been written, in the interpreter of
tests/support/gluon. Whatever no query sees is NaN, and pages that hold no visible key have nonsense for numbers."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import attention_cases as cases
from support import stored_cases
from support.attention_cases import CASES, Case, causal
from support.gluon.call import install
from support.gluon.machine import FaultError
from support.stored_cases import DECODE, SOFTCAP, Stored, decode
from support.tiers import default_only

from frisket.dsl import ir
from frisket.dsl.ir import lookup
from frisket.dsl.sugar import b, eq, h, k, q
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Bounds, KernelInputs
from frisket.runtime.backends.gluon import torch as gluon_launch


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    install(monkeypatch)


def tensor(x):
    wide = x.astype(np.float32) if x.dtype.kind == "V" or x.dtype.itemsize == 2 else x
    return torch.from_numpy(np.ascontiguousarray(wide)).to(getattr(torch, str(x.dtype)))


def run(stored, keys=64, stages=2, bounds=None, of_keys=True, **results):
    """Check the forward in tiles of so many keys; the results. Without `of_keys`, hidden keys are numbers, and only
    hidden values are NaN."""
    case = stored.case.but(block=(128, keys))
    made = stored_cases.problem(replace(stored, case=case, scales=False))
    plan = replace(made.plan, bounds=bounds)
    tables = {n: tensor(x) for n, x in plan.table_values(made.tables).items()}
    arrays = [tensor(x) for x in (made.q.transpose(0, 2, 1, 3), made.k, made.v)]
    arrays[1] = arrays[1] if of_keys else arrays[1].nan_to_num(0.5)
    target = Target("gluon", 128, keys, 4, stages)
    inputs = KernelInputs(plan, cases.Source(case), cases.geometry(case), target, plan.slot_values({}), tables)
    out, lse, *_ = gluon_launch.forward(inputs, *arrays, **results)
    assert out.dtype == arrays[0].dtype
    stored_cases.check(stored, made, out.double(), lse)
    return out, lse


def prefill(ends, queries, page, mask=DECODE, **changes):
    """The last queries of sequences in pages, whose arrays have room for some keys more than these see."""
    room = -(-(max(ends) + 40) // (page or 16)) * (page or 16)
    known = {"kv_len": room, "dtype": "bfloat16", "heads": 2, "kv_heads": 1, "dim": 32, "v_dim": 32} | changes
    return Stored(decode(ends, queries, mask=mask, **known), page=page)


START = lookup("start", (b,))
SEEN = {
    "pages of 16": prefill((300, 133), 150, 16),
    "pages of 32, several sequences": prefill((290, 37, 0, 1, 150), 30, 32),
    "pages of 64": prefill((333, 201), 140, 64, heads=4, kv_heads=2),
    "pages of 128": prefill((400, 129), 130, 128),
    "pages of 256": prefill((400, 260), 70, 256, dtype="float16"),
    "odd pages": prefill((200, 96), 60, 48),
    "no pages": prefill((300, 133), 150, 0),
    "a window": prefill((300, 170), 150, 16, DECODE & (q + START - k < 60)),
    "first keys and a window": prefill((400, 390), 70, 32, DECODE & ((q + START - k < 50) | (k < 4))),
    "documents": prefill((300, 290), 140, 64, DECODE & eq((q + START) // 70, k // 70)),
    "every third": prefill((200, 150), 40, 16, DECODE & eq((q + START - k) % 3, 0)),
    "by head": prefill((200, 150), 40, 32, DECODE & (q + START - k < 30 + 20 * h), kv_heads=2),
    "a soft cap": prefill((200, 150), 40, 16, score=SOFTCAP),
    "head sizes": prefill((200, 150), 40, 16, dim=128, v_dim=64),
    "values of 256": prefill((150, 90), 40, 32, dim=64, v_dim=256),
    "small heads": prefill((150, 90), 40, 32, dim=24, v_dim=16),
    "two parts": prefill((150, 90), 40, 16, dim=192, v_dim=160),
    "no mask": Stored(Case(heads=2, batch=2, q_len=70, kv_len=144, dtype="bfloat16"), page=48),
    "origins by batch": Stored(CASES["origin-by-batch"].but(dtype="bfloat16", kv_len=192), page=32),
    "empty rows": Stored(CASES["empty-rows"].but(dtype="bfloat16", kv_len=160), page=16),
}


@pytest.mark.parametrize("keys", [64, pytest.param(128, marks=pytest.mark.exhaustive), 32])
@pytest.mark.parametrize(
    "name",
    default_only(
        SEEN,
        "pages of 16",
        "pages of 32, several sequences",
        "pages of 128",
        "odd pages",
        "no pages",
        "a window",
        "every third",
        "two parts",
        "no mask",
        "origins by batch",
    ),
)
def test_hidden_keys_reach_no_result(name, keys):
    run(SEEN[name], keys)


@pytest.mark.parametrize(("seed", "stages"), [(1, 1), (2, 2), (3, 3), (4, 4)])
@pytest.mark.parametrize("name", default_only(["pages of 16", "two parts", "first keys and a window"], "pages of 16"))
def test_any_schedule_over_pages(monkeypatch, name, seed, stages):
    install(monkeypatch, seed=seed)
    first = run(SEEN[name], stages=stages)
    install(monkeypatch)
    assert all(map(torch.equal, first, run(SEEN[name])))


@pytest.mark.parametrize("page", [16, 128])
def test_closed_form_bounds_over_pages(page):
    q0, q1, k0 = (ir.var(n) for n in ("q0", "q1", "k0"))
    case = Case(
        causal,
        heads=2,
        kv_heads=1,
        q_len=200,
        kv_len=384,
        origin=(0, 0, 130, 0),
        sizes=(1, 2, 384, 384),
        dtype="bfloat16",
    )
    run(Stored(case, page=page), bounds=Bounds(k0, k0, q0, q1))


def test_names_of_triton_3_6_over_pages(monkeypatch):
    install(monkeypatch, late=False)
    run(SEEN["pages of 16"])


FAULTS = {  # a pattern of the text, how often it is there, what takes its place, what is said
    "values that are not set to 0": (r"(\n +)clean\(values.*", 2, r"\1pass", "nan"),
    "no fence": (r"( +)hopper.fence_async_shared\(\)\n(?= +mbarrier.arrive\(cleaned)", 2, "", "without a fence"),
    "products before the other half has cleaned": (
        r"mbarrier.wait\(cleaned.index\(0\), borders_done\)",
        2,
        "pass",
        "values.*before it is known|is reading it",
    ),
    "values before their copy": (
        r"mbarrier.wait\(v_full.index\(slot\), phase\)",
        2,
        "pass",
        "values.*(nobody has written|before it is known)",
    ),
    "the other half's keys before they are told": (
        r"mbarrier.wait\(told.index\(0\), borders_done\)",
        2,
        "pass",
        "seen.*(nobody has written|before it is known)",
    ),
    "a phase that does not turn": (r"borders_done \^= 1", 2, "pass", "before it is known|too many|all partitions wait"),
    "one half of a slot": (r"half \* HALF \+ i", 3, "i", "is reading|before it is known|has read it|nan"),
    "rows that are no queries": (r" & present\[:, None\]", 2, "", "nan"),
    "a piece too few": (r"static_range\(4\)", 2, "static_range(3)", "all partitions wait"),
    "pieces in the place of the first": (r"slice\(piece \* 16", 2, "slice(0 * 16", "still to arrive"),
    "the bytes of one piece": (r"nbytes \* 4\)", 2, "nbytes)", "bytes arrive where|before it is known|all part"),
    "pages beyond those of a sequence": (r"clamp\(at // 16, (\w+)\)", 2, "(at // 16)", "address"),
}
BEYOND = Stored(  # a row's last tile goes past the pages of its sequence; rows that are no queries see the last keys
    Case(
        k <= q,
        heads=1,
        kv_heads=1,
        batch=2,
        q_len=70,
        kv_len=208,
        origin=(0, 0, 130, 0),
        sizes=(2, 1, 208, 208),
        dtype="bfloat16",
    ),
    page=16,
)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_over_pages_are_seen(monkeypatch, name):
    was, count, now, words = FAULTS[name]

    def change(text):
        changed, times = re.subn(was, now, text)
        assert times == count
        return changed

    install(monkeypatch, change)
    with pytest.raises((AssertionError, FaultError, IndexError), match=words):
        run(BEYOND, of_keys=False)


@pytest.mark.parametrize("of_keys", [False, True])
def test_pages_without_faults_equal_the_reference(of_keys):
    run(BEYOND, of_keys=of_keys)


def test_page_numbers_outside_the_pool_read_the_nearest_page():
    case = Case(heads=1, kv_heads=1, q_len=20, kv_len=64, dtype="bfloat16", block=(128, 64))
    made = stored_cases.problem(Stored(case, scales=False, page=16))
    arrays = [tensor(x) for x in (made.q.transpose(0, 2, 1, 3), made.k, made.v)]
    arrays[1:] = [x.nan_to_num(0.5) for x in arrays[1:]]

    def attended(pages):
        tables = {str(made.plan.pages): torch.tensor([pages], dtype=torch.int32)}
        target = Target("gluon", *case.block, 4, 2)
        inputs = KernelInputs(made.plan, cases.Source(case), cases.geometry(case), target, {}, tables)
        return gluon_launch.forward(inputs, *arrays)[0]

    last = len(arrays[1]) - 1
    assert torch.equal(attended([-7, 2, 1000, 1]), attended([0, 2, last, 1]))
