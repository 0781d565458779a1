"""The Gluon forward against dense attention, in the interpreter of tests/support/gluon: every mask and score mod, in
any order of warps, copies and products that the scheduler draws; `on` is the architecture that a text is for."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import attention_cases as cases
from support.attention_cases import CASES, DOCUMENTS, Case, causal
from support.gluon.call import check, install, run, tensors, with_everything
from support.gluon.machine import Columns
from support.tiers import default_only, thinned

from frisket.dsl import ir
from frisket.dsl.ir import lit, var
from frisket.dsl.sugar import eq, h, k, q, score
from frisket.lowering import dense
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import Bounds, KernelInputs, ProgramFacts, make_plan
from frisket.lowering.simplify import ProgramExprs
from frisket.runtime.backends import flash, gluon
from frisket.runtime.backends.gluon import torch as gluon_launch

BLOCKS = {"sm_90": (128, 64), "sm_100": (256, 64)}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    install(monkeypatch)


@pytest.fixture(params=["sm_90", pytest.param("sm_100", marks=pytest.mark.exhaustive)])
def on(request):
    return request.param


def half(case, on, **changes):
    return case.but(**{"dtype": "bfloat16", "block": BLOCKS[on]} | changes)


@pytest.mark.parametrize("name", thinned(DOCUMENTS))
def test_gluon_document_masks_equal_the_reference(name, on):
    case = half(DOCUMENTS[name][0], on)
    check(case, *run(case, arch=on))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", thinned(CASES))
def test_gluon_cases_equal_the_reference(name, on):
    case = half(CASES[name], on)
    check(case, *run(case, arch=on))


@pytest.mark.parametrize(
    "mask",
    [(k < 64) | (k >= 192), eq(k // 64 % 2, 0), causal & ((k < 4) | (q - k < 40))],
    ids=["two", "every", "sinks"],
)
def test_rows_of_several_runs_of_tiles(mask, on):
    """The first tile of a later run scales down what earlier ones have summed: scores rise with the key."""
    case = half(Case(mask, score + 0.03 * ir.to_float(k), q_len=300, kv_len=330), on)
    assert cases.spans(case).count.max() > 1
    check(case, *run(case, arch=on))


@pytest.mark.parametrize(
    "name", default_only(["causal", "gqa", "documents-by-batch", "origin-by-batch"], "gqa", "documents-by-batch")
)
def test_gluon_longest_rows_of_all_heads_come_first(name, on):
    case = half(CASES[name], on)
    check(case, *run(case, arch=on, order="longest-of-all-first"))


@pytest.mark.parametrize("mod", [ir.lit(1.5), 0.125 * ir.to_float(q), 0.125 * ir.to_float(k)])
def test_score_mods_without_a_score(mod, on):
    case = half(Case(causal, mod, q_len=150, kv_len=150), on)
    check(case, *run(case, arch=on))


@pytest.mark.parametrize(
    "name",
    default_only(["gqa", "empty-rows", "nothing", "softcap", "visible-minus-inf", "documents-by-batch", "crop"],
                 "gqa", "empty-rows", "visible-minus-inf", "crop"),
)  # fmt: skip
def test_gluon_cases_with_sinks_and_dropout(name, on):
    with_everything(half(CASES[name], on), arch=on)


def test_gluon_forward_has_the_rounding_error_of_lse(on):
    case = half(cases.LARGE.but(q_len=40, kv_len=40), on)
    _, lse, _, residual = run(case, softmax_stats=True, arch=on)
    cases.check_residual(case, lse, residual)


@pytest.mark.parametrize(
    ("dim", "v_dim", "keys"),
    [(16, 16, 64), (24, 40, 32), (64, 64, 128), (96, 96, 64), (128, 64, 128), (256, 256, 32), (192, 192, 64),
     (160, 160, 64), (192, 128, 128), (136, 152, 32), (96, 192, 64), (192, 256, 32)],
)  # fmt: skip
def test_gluon_head_dims_of_many_sizes_equal_the_reference(dim, v_dim, keys, on):
    case = Case(causal & (q - k < 150), q_len=200, kv_len=200, heads=1, kv_heads=1, dim=dim, v_dim=v_dim)
    queries = 256 if on == "sm_100" and max(dim, v_dim) <= 128 else 128
    case = half(case, on, dtype="float16", block=(queries, keys))
    check(case, *run(case, arch=on))


SIZES = {"192": (192, 192), "160": (160, 160), "192/128": (192, 128)}  # of heads in two parts
RISING = Case((k < 64) | (k >= 192), score + 0.03 * ir.to_float(k), q_len=140, kv_len=270, heads=1, kv_heads=1)
IN_PARTS = {  # a case, the size of its heads, whether sinks and dropout, too
    "gqa": (CASES["gqa"].but(heads=2, kv_heads=1, batch=1, q_len=140, kv_len=140), "192", False),
    "gqa, everything": (CASES["gqa"].but(heads=2, kv_heads=1, batch=1, q_len=140, kv_len=140), "192/128", True),
    "documents": (CASES["documents"].but(heads=1, kv_heads=1, q_len=200, kv_len=200), "160", False),
    "documents, everything": (CASES["documents"].but(heads=1, kv_heads=1, q_len=200, kv_len=200), "192", True),
    "empty rows, everything": (CASES["empty-rows"].but(heads=1, kv_heads=1, q_len=140), "160", True),
    "nothing": (CASES["nothing"], "192", False),
    "soft cap": (CASES["softcap"].but(heads=1, kv_heads=1), "192/128", False),
    "crop, everything": (CASES["crop"], "192", True),
    "several runs": (RISING, "192", False),
    "several runs, values of 128": (RISING, "192/128", False),
}


@pytest.mark.parametrize(
    "name", default_only(IN_PARTS, "gqa", "documents, everything", "empty rows, everything", "several runs")
)
def test_heads_in_two_parts_equal_the_reference(name):
    case, sizes, everything = IN_PARTS[name]
    dim, v_dim = SIZES[sizes]
    case = half(case, "sm_90", dim=dim, v_dim=v_dim)
    if everything:
        with_everything(case)
    else:
        check(case, *run(case))


@pytest.mark.parametrize(("seed", "stages"), [(1, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize("sizes", default_only(SIZES, "192"))
def test_any_schedule_of_heads_in_two_parts(monkeypatch, sizes, seed, stages):
    dim, v_dim = SIZES[sizes]
    case = half(LONG, "sm_90", dim=dim, v_dim=v_dim, heads=1, kv_heads=1, kv_len=400, q_len=100, origin=(0, 0, 300, 0))
    install(monkeypatch, seed=seed)
    found = run(case, stages=stages)
    check(case, *found)
    install(monkeypatch)
    assert all((a == b).all() for a, b in zip(found[:2], run(case)[:2], strict=True))  # bit for bit


@pytest.mark.parametrize("layout", default_only(["bhsd", "bshd", "sbhd", "bhds"], "sbhd", "bhds"))
def test_gluon_reads_arrays_in_any_axis_order(layout, on):
    case = half(Case(causal, dim=48, v_dim=80, heads=4, kv_heads=2, batch=2, q_len=140, kv_len=140), on)
    check(case, *run(case, layout=layout, arch=on))


q0, q1, k0, k1 = (var(n) for n in ("q0", "q1", "k0", "k1"))
w = ir.param("w")
CLOSED = {
    "causal": (causal, Bounds(k0, k0, q0, q1)),
    "anticausal": (k >= q, Bounds(q0, q1, k1, k1)),
    "window": (causal & (q - k < w), Bounds(q0 - w + 1, q1 - w + 1, q0, q1)),
    "by-head": (causal & (q - k < w + 20 * h), Bounds(q0 - w - 20 * h + 1, q1 - w - 20 * h + 1, q0, q1)),
    "chunked": (causal & eq(q // 48, k // 48), Bounds(q0 // 48 * 48, q1 // 48 * 48, q0, q1)),
    "nothing": (ir.FALSE, Bounds(lit(1), lit(1), lit(0), lit(0))),
    "far away": (k > q + 10**6, Bounds(q0 + 10**6 + 1, q1 + 10**6 + 1, k1, k1)),
}


@pytest.mark.parametrize("origin", [(0, 0, 0, 0), (1, 1, 70, 20)])
@pytest.mark.parametrize("name", thinned(CLOSED))
def test_gluon_closed_form_bounds_equal_the_reference(name, origin, on):
    mask, bounds = CLOSED[name]
    sizes = tuple(o + n for o, n in zip(origin, (1, 2, 300, 330), strict=True))
    case = half(Case(mask, q_len=300, kv_len=330, slots={"w": 50}, origin=origin, sizes=sizes), on)
    made = make_plan(
        ProgramExprs(case.mask),
        facts=ProgramFacts(bounds=bounds, limits=dict.fromkeys((*ir.COORDINATES, "w"), 2.0**14)),
    )
    assert made.bounds is not None
    check(case, *run(case, made, arch=on))


LONG = Case(causal & (k % 7 > 0), q_len=200, kv_len=700, sizes=(1, 2, 700, 700), origin=(0, 0, 500, 0))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("seed", "stages"), [  # each once a run
    pytest.param(seed, stages, marks=() if stages == seed + 1 else pytest.mark.exhaustive)
    for seed in range(4) for stages in range(1, 5)
])  # fmt: skip
def test_any_schedule_and_number_of_stages(monkeypatch, seed, stages, on):
    case = half(LONG, on)
    stages += on == "sm_100"  # whose ring has tiles of keys and of values
    install(monkeypatch, seed=seed)
    found = run(case, stages=stages, arch=on)
    check(case, *found)
    install(monkeypatch)
    assert all((a == b).all() for a, b in zip(found[:2], run(case, arch=on)[:2], strict=True))  # bit for bit


ORDERS = {  # with sums that are rescaled, with and without border tiles first
    "causal": Case(causal, None, origin=(0, 0, 200, 0)),
    "rising": Case(None, score + 0.2 * k, origin=(0, 0, 200, 0)),
    "two runs": Case((k < 64) | (k >= 192), score + 0.1 * k),
    "nothing": Case(k > q + 10**6, None),
}


@pytest.mark.parametrize(
    ("dim", "v_dim", "block"), [(128, 128, (256, 128)), (256, 256, (128, 64)), (200, 72, (128, 32))]
)
@pytest.mark.parametrize(
    ("seed", "stages"), [(0, 2), *(pytest.param(n, s, marks=pytest.mark.exhaustive) for n in (1, 2) for s in (3, 5))]
)
@pytest.mark.parametrize("name", default_only(ORDERS, "rising", "nothing"))
def test_products_of_blackwell_in_any_schedule(monkeypatch, name, seed, stages, dim, v_dim, block):
    """Weights in two pieces at head size 128; past it the next scores are computed during a softmax, into the other
    tile of scores."""
    install(monkeypatch, seed=seed)
    sizes = {"q_len": 140, "kv_len": 384, "heads": 1, "kv_heads": 1, "sizes": (1, 1, 384, 384)}
    case = half(ORDERS[name], "sm_100", **sizes, dim=dim, v_dim=v_dim, block=block)
    check(case, *run(case, stages=stages, arch="sm_100"))


def test_names_of_triton_3_6(monkeypatch, on):
    install(monkeypatch, late=False)
    case = half(CASES["window"], on)
    check(case, *run(case, arch=on))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["gqa", "empty-rows", "nothing", "softcap"])
def test_gluon_selected_cases_on_blackwell(name):
    case = half(CASES[name], "sm_100")
    check(case, *run(case, arch="sm_100"))
    with_everything(case, arch="sm_100")


def test_keys_past_the_end_on_blackwell():
    """The last tile of keys is cut, and no mask but the length hides what lies behind it."""
    case = half(Case(k % 3 > 0, q_len=140, kv_len=150, heads=1, kv_heads=1), "sm_100")
    check(case, *run(case, arch="sm_100"))


@pytest.mark.parametrize("rise", [0.02, 0.2, 40.0])
def test_scores_that_rise_along_the_row(rise):
    """By less than what weights may grow, so that sums are not rescaled, by more, and by more than float32 holds."""
    case = half(Case(causal, rise * k + score, q_len=300, kv_len=300, heads=1, kv_heads=1), "sm_100")
    check(case, *run(case, arch="sm_100"))


@pytest.mark.parametrize(("rise", "rescaled"), [(0.0, 0), (0.02, 0), (0.2, 1)])
def test_sums_are_rescaled_where_a_weight_would_be_too_large(monkeypatch, rise, rescaled):
    """The first tile rescales nothing: its maximum exceeds none. A tile has 64 keys, and 64 * 0.2 exceeds 8 * ln 2."""
    stores, store = [], Columns.store

    def counted(self, value):
        stores.append(self.slot.name)
        store(self, value)

    monkeypatch.setattr(Columns, "store", counted)
    case = half(Case(None, rise * k, q_len=256, kv_len=192, heads=1, kv_heads=1, sizes=(1, 1, 256, 192)), "sm_100")
    check(case, *run(case, arch="sm_100"))
    groups, later_tiles = 2, 2
    assert sum(name.startswith("sums") for name in stores) == groups * (1 + later_tiles * rescaled)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_turn_the_order_of_scores(scale, on):
    case = half(CASES["causal"], on)
    g = replace(cases.geometry(case), scale=scale)
    arrays = tensors(case)
    target = Target("gluon", *BLOCKS[on], 4, 2, arch=on)
    out, *_ = gluon_launch.forward(KernelInputs(cases.plan(case), cases.Source(case), g, target, {}, {}), *arrays)
    call = dense.DenseCall(ProgramExprs(case.mask), scale=scale, params={}, tables={})
    want, _ = dense.attention(*(x.double().numpy() for x in arrays), call)
    assert np.abs(out.double().numpy() - want).max() < cases.allowed(case)


@pytest.mark.parametrize(
    ("capability", "runs"), [((9, 0), True), ((10, 0), True), ((10, 3), True), ((8, 0), False), ((11, 0), False)]
)
def test_gpus_that_run_the_kernels(monkeypatch, capability, runs):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    said = (
        "written for Hopper and Blackwell, compute capabilities 9.0, 10.0 and 10.3; this GPU has {}.{}: "
        "take backend='triton'"
    )
    assert gluon.reason() == ("" if runs else said.format(*capability))


def test_engines_run_where_they_were_checked(monkeypatch):
    """A B300 has kernels of ours, and FlashAttention 4 was not compiled for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    said = "checked on compute capabilities 9.0 and 10.0; this GPU has 10.3: take backend='triton'"
    assert flash.reason() == said
