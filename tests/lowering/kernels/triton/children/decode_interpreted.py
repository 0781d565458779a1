"""Run by test_triton_interpret.py with TRITON_INTERPRET=1: few queries against dense attention."""

import numpy as np
import pytest
import torch
from support import attention_cases as cases
from support.attention_cases import CASES, Case, causal
from support.triton.call import check, run, tensors, with_everything

import frisket as fk
from frisket.dsl import ir
from frisket.dsl.errors import BackwardError
from frisket.dsl.sugar import b, h, k, q, score
from frisket.lowering import dense
from frisket.lowering.kernels.triton.module import Dims
from frisket.lowering.plan import Bounds, ProgramFacts, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends.triton import grids as triton_grids
from frisket.runtime.backends.triton import launch as triton_launch

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")
q0, q1, k0, k1 = (ir.var(n) for n in ("q0", "q1", "k0", "k1"))
w = ir.param("w")
WINDOW = make_plan(
    ProgramExprs(causal & (q - k < w)), facts=ProgramFacts(bounds=Bounds(q0 - w + 1, q1 - w + 1, q0, q1))
)


def last(case, queries):
    """The case for its last queries alone, where it is not placed already."""
    if case.sizes is not None:
        return case.but(q_len=queries)
    most = min(case.q_len, case.kv_len)
    sizes = case.batch, case.heads, most, case.kv_len
    return case.but(q_len=queries, origin=(0, 0, most - queries, 0), sizes=sizes, block=(16, 32))


@pytest.mark.parametrize("name", CASES)
def test_parts_of_every_case(name):
    check(case := last(CASES[name], 2), *run(case, splits=3))


@pytest.mark.parametrize(
    ("group", "queries", "splits"),
    [(1, 1, 2), (1, 20, 3), (3, 1, 20), (3, 7, 2), (4, 1, 1), (4, 17, 2), (8, 1, 3), (8, 9, 1), (8, 2, 20)],
)
def test_parts_of_packed_heads(group, queries, splits):
    mask = causal & (q - k < w) & (k % 7 > 0)
    case = last(Case(mask, heads=group, kv_heads=1, slots={"w": 90}, dim=16, v_dim=16), queries)
    check(case, *run(case, splits=splits))


@pytest.mark.parametrize("name", ["gqa", "empty-rows", "nothing", "heads-and-batches", "scaled", "holes"])
def test_parts_with_everything(name):
    with_everything(last(CASES[name], 4), splits=5)


@pytest.mark.parametrize("splits", [1, 3])
def test_parts_have_the_rounding_error_of_lse(splits):
    case = last(cases.LARGE, 5)
    _, lse, _, residual = run(case, splits=splits, stats=True)
    cases.check_residual(case, lse, residual)


def test_parts_of_scores_far_below_zero():
    with_everything(last(Case(causal, score - 300.0), 2), splits=3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("dim", "v_dim"), [(40, 72), (96, 80), (64, 64)])
def test_parts_of_any_head_size(dim, v_dim, dtype):
    case = last(Case(causal, heads=4, kv_heads=2, dim=dim, v_dim=v_dim, dtype=dtype), 3)
    check(case, *run(case, splits=2, layout="bshd"))


def test_decode_at_any_position_is_one_triton_kernel():
    made = triton_launch.emitted_kernels.memo.info
    seen = []
    for at, keys in ((299, 300), (120, 130), (30, 300), (0, 17)):
        case = Case(
            causal & (q - k < w), slots={"w": 50}, q_len=1, kv_len=keys, heads=4, kv_heads=1, origin=(0, 0, at, 0),
            sizes=(1, 4, 300, 300), block=(16, 32), dim=16, v_dim=16,
        )  # fmt: skip
        check(case, *run(case, WINDOW, spans=cases.Source(CASES["nothing"]), splits=3))
        seen.append(made().misses)
    assert len(set(seen)) == 1


def test_parts_by_head_where_the_mask_tells_heads_apart():
    mask = causal & (q - k < w + 20 * h)
    bounds = Bounds(q0 - w - 20 * h + 1, q1 - w - 20 * h + 1, q0, q1)
    case = last(Case(mask, heads=4, kv_heads=2, slots={"w": 30}), 2)
    check(case, *run(case, make_plan(ProgramExprs(mask), facts=ProgramFacts(bounds=bounds)), splits=3))


def test_parts_of_some_heads_of_a_large_group():
    case = last(Case(causal, heads=130, kv_heads=1, dim=16, v_dim=16, q_len=60, kv_len=60), 1)
    assert triton_grids.packed(cases.plan(case), Dims(16, 16, "float32", 130)) == 26
    check(case, *run(case, splits=2))


def test_parts_are_the_same_bits_at_every_call():
    case = last(CASES["gqa"], 3).but(dtype="float16")
    first, again = run(case, splits=4), run(case, splits=4)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


@pytest.fixture
def balanced(monkeypatch):
    """Rows have parts in proportion to what they see, however short and alike."""
    launched = []
    steps = triton_grids.Shares.steps
    monkeypatch.setattr(triton_grids.Shares, "steps", lambda self, g: launched.append(steps(self, g)) or launched[-1])
    monkeypatch.setattr(triton_grids, "RAGGED", 0)
    monkeypatch.setattr(triton_grids, "EVEN", 0)
    yield launched
    assert launched
    assert all("Parts" in first.leaves for first, _ in launched)


def uneven(*ends, **more):
    """Sequences of these lengths, each with its last queries."""
    mask = (k <= q + ir.lookup("end", (b,)) - w) & (k < ir.lookup("end", (b,)))
    queries = more.get("q_len", 1)
    given = {"q_len": 1, "kv_len": max(ends), "heads": 4, "kv_heads": 1, "dim": 16, "v_dim": 16} | more
    return Case(
        mask, batch=len(ends), slots={"w": queries}, tables={"end": np.array(ends)}, block=(16, 32), **given
    )  # fmt: skip


@pytest.mark.parametrize("ends", [(700, 40, 3, 90), (5, 0, 333, 64), (0, 0, 90), (300, 300), (31, 800)])
@pytest.mark.parametrize("queries", [1, 3, 40])
def test_decode_parts_follow_the_length_of_sequences(balanced, ends, queries):
    case = uneven(*ends, q_len=queries)
    check(case, *run(case))
    again, once = run(case), run(case)
    assert torch.equal(again[0], once[0])
    assert torch.equal(again[1], once[1])


@pytest.mark.parametrize(("queries", "group"), [(65, 4), (70, 3)])
def test_parts_of_a_prompt_over_long_caches(balanced, queries, group):
    """Heads are packed where that fills tiles, and sequences of many rows of tiles are divided."""
    case = uneven(300, 90, q_len=queries, heads=group, dtype="bfloat16").but(block=(128, 64))
    first = run(case)
    check(case, *first)
    ((parts, _),) = balanced
    assert parts.grid[0] == 1  # the heads of a group are one tile
    assert torch.equal(run(case)[0], first[0])


def test_more_sequences_than_a_program_looks_at_at_a_time(balanced):
    case = uneven(*np.random.default_rng(0).integers(0, 90, 140).tolist(), 400, heads=2)
    check(case, *run(case))


@pytest.mark.parametrize("name", ["gqa", "heads-and-batches"])
def test_parts_in_proportion_with_everything(balanced, monkeypatch, name):
    monkeypatch.setattr(triton_grids, "INTERPRETED", 100)
    case = last(CASES[name], 4)
    with_everything(case.but(batch=max(2, case.batch)) if case.sizes is None else case)


def test_a_long_sequence_has_parts_of_its_own(balanced):
    """Of three rows of 3 tiles one sees 25 and has more than a half of the parts; programs beyond those do nothing."""
    case = uneven(800, 96, 96)
    check(case, *run(case))
    ((parts, _),) = balanced
    rows, splits = 3, parts.numbers["splits"]
    share = -(-31 // (rows * splits))
    assert parts.grid == (1, rows * (splits + 1), 1)
    assert sum(-(-n // share) for n in (25, 3, 3)) <= rows * (splits + 1)


@pytest.fixture
def one_part(monkeypatch):
    """Calls of a machine without processors, which nothing fills."""
    launched = []
    steps = triton_grids.Shares.steps
    monkeypatch.setattr(triton_grids.Shares, "steps", lambda self, g: launched.append(steps(self, g)) or launched[-1])
    monkeypatch.setattr(triton_grids, "INTERPRETED", 0)
    monkeypatch.setattr(triton_grids, "LEAST_TILES", -1)
    yield
    assert launched
    assert all(len(steps) == 1 for steps in launched)


@pytest.mark.parametrize("name", ["gqa", "holes", "scaled"])
def test_decode_in_one_part_is_one_launch(one_part, name):
    case = last(CASES[name], 4).but(heads=4, kv_heads=1)
    check(case, *run(case))
    with_everything(case)


@pytest.mark.parametrize("queries", [1, 3, 9, 40])
def test_decode_in_one_part_takes_any_head_size(one_part, queries):
    mask = causal & (q - k < w) & (k % 7 > 0)
    case = last(Case(mask, heads=24, kv_heads=3, slots={"w": 90}, dim=40, v_dim=72, dtype="float16"), queries)
    check(case, *run(case, layout="bshd"))


def test_decode_in_one_part_of_rows_without_keys(one_part):
    case = last(Case(causal & (k > q), heads=4, kv_heads=1), 3)
    check(case, *run(case))


def test_parts_and_packing_are_chosen_where_they_pay(monkeypatch):
    launched = []
    steps = triton_grids.Shares.steps
    monkeypatch.setattr(triton_grids.Shares, "steps", lambda self, g: launched.append(steps(self, g)) or launched[-1])
    long = last(Case(causal, q_len=600, kv_len=600, heads=1, kv_heads=1, dim=16, v_dim=16), 1)
    for case, splits in ((long, 7), (last(CASES["gqa"].but(q_len=270, kv_len=270), 1), 1), (CASES["causal"], None)):
        check(case, *run(case))
        assert [first.numbers["splits"] for first, *_ in launched] == ([] if splits is None else [splits])
        launched.clear()


@pytest.mark.parametrize("keys", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("dtype", "queries"), [("bfloat16", 70), ("float16", 2)])
def test_keys_and_values_of_8_bits(keys, dtype, queries):
    case = last(Case(causal, heads=4, kv_heads=2, dim=96, v_dim=64, dtype=dtype), queries)
    out, lse, _ = run(case, keys=getattr(torch, keys))
    given = [x.double().numpy() for x in tensors(case, keys=getattr(torch, keys))]
    want, want_lse = dense.attention(
        *given,
        dense.DenseCall(ProgramExprs(causal), scale=96**-0.5, params={}, tables={}, problem=case.problem),
    )
    assert np.abs(out.double().numpy() - want).max() <= cases.allowed(case)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=2e-2, atol=2e-2)


def test_keys_and_values_of_8_bits_are_for_the_forward():
    q, k = torch.randn(1, 2, 40, 16).half(), torch.randn(1, 2, 40, 16).to(torch.float8_e5m2)
    out = fk.attention(q, k, k, "causal", backend="triton")
    want = fk.attention(q, k.half(), k.half(), "causal", backend="dense")
    np.testing.assert_allclose(out.float(), want.float(), atol=4e-3)
    with pytest.raises(BackwardError) as caught:
        fk.attention(q.requires_grad_(), k, k, "causal", backend="triton")
    assert str(caught.value) == (
        "keys and values of float8_e5m2 are for the forward alone, without gradients\n"
        "  train with keys and values as they are; for the forward alone write with torch.no_grad():"
    )
