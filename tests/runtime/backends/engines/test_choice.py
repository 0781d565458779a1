"""The choice among engines: what takes part, in which order, and FlashAttention 4 in it, on its stand-in."""

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.flash import engine as stand_in
from support.tiers import default_only

import frisket as fk
from frisket.dsl.errors import ParameterError
from frisket.lowering.plan import Geometry
from frisket.runtime.backends.base import RECORDS, names, offered, register
from frisket.runtime.backends.engines import LACKS, proof
from frisket.runtime.backends.engines.proof import EngineCall, choose_engine
from frisket.runtime.backends.flash import call as flash_call
from frisket.runtime.backends.flash import torch as flash_torch
from frisket.runtime.calls.arrays import Stored
from frisket.runtime.calls.program import program_of
from frisket.runtime.machine import settings
from frisket.runtime.plans.host import Plan
from frisket.runtime.torch.ready import PreparedCall

ROOT = Path(__file__).resolve().parents[4]
DOC = np.repeat([0, 1, 2], [10, 25, 15])
PAGED = Stored(False, False, 16, "bhsd", 1, (0, 0, 0))
NEW = "experimental, as no device has run it under frisket: engines="


@pytest.fixture
def gpu(monkeypatch):
    """cuDNN and FlashAttention 4 run here, on a GPU of some compute capability, 9.0 at first."""

    def of(major):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *given: (major, 0))
        monkeypatch.setattr(flash_call, "architecture", lambda device=None: f"sm_{major}0")

    of(9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(proof, "torch_version", lambda: (2, 11))
    undo, was = stand_in.install(monkeypatch), RECORDS["cudnn"]
    register(replace(was, reason=lambda framework=None: ""))
    yield of
    register(was)
    undo()


def asked(mask, length=4096, engines=True, dim=64, kv_heads=2, deterministic=True, weight=None, divide=None):
    program = program_of(fk.mask(mask), None, {}, weight=weight, divide=divide)
    g = Geometry(1, 2, kv_heads, length, length, dim, dim, 0.125)
    plan = Plan(program, g.problem, False, ask_engines=str)
    facts = {"generated": "triton", "engines": engines, "plan": plan, "deterministic": deterministic}
    return EngineCall(program, g, "bfloat16", "torch", "cuda", **facts)


@pytest.mark.parametrize(
    ("weight", "divide"),
    [("sigmoid(score)", None), ("exp(score)", "total + 1"), ("exp(score)", None), ("score", "count")],
)
def test_engines_refuse_weights(gpu, weight, divide):
    """Each of them takes the softmax of the same mask, before and after."""
    softmax, weighted = asked("causal"), asked("causal", weight=weight, divide=divide)
    for engine in [replace(b, reason=lambda framework=None: "") for b in RECORDS.values() if b.is_engine]:
        for platform in engine.platforms:
            where = {"platform": platform, "framework": engine.frameworks[0]}
            for call in (softmax, weighted, softmax):
                said = proof.prove(engine, replace(call, **where))
                assert (said == LACKS["weights"]) == (call is weighted), engine.name
    named = choose_engine(replace(weighted, engines=("cudnn",)))
    assert (named.proof, named.why["cudnn"]) == (None, LACKS["weights"])
    assert choose_engine(replace(softmax, engines=("cudnn",))).proof is not None


def test_weights_of_the_softmax_are_an_engines(gpu):
    named = choose_engine(asked("causal", engines=("cudnn",), weight="exp(score)", divide="total"))
    assert str(named.proof) == "cudnn: causal; proved"


def test_unmeasured_engine_runs_only_where_it_is_named(gpu):
    found = choose_engine(asked("causal & window(9)"))
    assert found.proof is None
    assert found.why["flash"] == f"{NEW}'flash' takes it"
    named = choose_engine(asked("causal", engines=("cudnn",)))
    assert str(named.proof) == "cudnn: causal; proved"
    assert choose_engine(asked("causal", engines=("flash",))).why["cudnn"].endswith("engines='flash' leaves it out")


HOW = "cudnn: causal; proved\n    generated kernels run arrays that are not contiguous, [batch, heads, length, dim]"
BACKWARD = (
    "\n    deterministic=False takes its backward too, in {} of the time of generated kernels; its sums have no order"
)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({}, HOW + BACKWARD.format("0.80 to 0.99")),
        ({"dim": 128}, HOW + BACKWARD.format("0.85 to 0.92")),
        ({"dim": 128, "deterministic": False}, HOW),
        ({"dim": 128, "deterministic": False, "length": 32768}, HOW),
        ({"dim": 128, "length": 32768}, "generated kernels are faster here: with fewer than 2,048 queries on Hopper"),
        ({"length": 1024}, "generated kernels are faster here: with fewer than 2,048 queries on Hopper"),
        (
            {"dim": 192},
            "head dim 192 was not compared with float64 on cuda: engines='cudnn' takes it, in 0.83 to 0.85 of the time",
        ),
        ({"dim": 256}, "head dim 256 was not compared with float64 on cuda: engines='cudnn' takes it\n"),
        ({"kv_heads": 1}, "query heads that share key heads was not compared with float64 on cuda"),
    ],
)
def test_cudnn_runs_the_calls_that_an_h100_has_compared(gpu, how, said):
    text = str(choose_engine(asked("causal", **how))) + "\n"
    assert (text if "proved\n" in said else text.partition("cudnn: causal; proved, and ")[2]).startswith(said)


def test_cudnn_is_not_chosen_on_other_gpus_and_older_versions(gpu, monkeypatch):
    gpu(10)
    why = "causal; proved, and compute capability 10.0 was not compared with float64 on cuda: engines='cudnn' takes it"
    assert choose_engine(asked("causal")).why["cudnn"] == why
    gpu(9)
    monkeypatch.setattr(proof, "torch_version", lambda: (2, 10))
    assert "torch before 2.11 was not compared" in choose_engine(asked("causal")).why["cudnn"]


def test_doctor_says_what_engines_would_give_on_this_gpu(gpu, monkeypatch):
    own = (
        "by itself on CUDA (compute capability 9.0, float16 and bfloat16, head dims 64 and 128, key heads that no "
        "query heads share, contiguous arrays, torch 2.11 or later)"
    )
    share = "of the time of generated kernels"
    assert proof.offer_of("cudnn").split("; this GPU, ") == [
        own,
        f"head dim 64, 2,048 queries or more: forward in 0.89 to 0.98 {share}; deterministic=False: its backward in "
        f"0.80 to 0.99 {share}",
        f"head dim 128, 2,048 to 16,384 queries: forward in 0.92 to 0.99 {share}; deterministic=False: its backward in "
        f"0.85 to 0.92 {share}",
        f"head dim 128, 16,385 queries or more: forward in 0.97 to 1.04 {share}; deterministic=False: its backward in "
        f"0.80 to 0.84 {share}",
        f"head dim 192, 2,048 queries or more: forward in 0.83 to 0.85 {share}; engines='cudnn'",
    ]
    gpu(8)
    assert proof.offer_of("cudnn") == own
    assert proof.offer_of("flash") == proof.offer_of("splash") == NEW.partition(":")[0]
    assert proof.offer_of("sdpa") == "by itself on CPU"


@pytest.mark.parametrize(
    ("mask", "length", "major", "taken"),
    [
        ("causal", 4096, 9, "cudnn: causal; proved"),
        ("causal", 4096, 10, "flash: causal; proved"),
        ("causal & window(257)", 4096, 9, "flash: causal, window 256 to the left; proved"),
        ("causal & window(257)", 1024, 9, ""),
        ("causal", 1024, 10, "cudnn: causal; proved"),
        ("causal | k < 9", 4096, 9, "flash: code and tiles of 192 x 128; proved"),
        ("causal | k < 9", 4096, 10, "flash: code and tiles of 256 x 128; proved"),
        ("q * 100000000 >= k", 4096, 9, ""),
    ],
)
def test_cost_table_ranks_the_engines(gpu, mask, length, major, taken):
    gpu(major)
    found = choose_engine(asked(mask, length, ("flash", "cudnn")))
    assert ("" if found.proof is None else str(found.proof)) == taken, found
    if "100000000" in mask:
        assert "integers of 32 bits" in found.why["flash"]
    if length == 1024 and not taken:
        assert "generated kernels are faster here: with fewer than 2,048 queries" in found.why["flash"]


def test_unknown_version_of_flash_attn_is_not_chosen(gpu, monkeypatch):
    """FlashAttention 4's functions are private: pyproject.toml names the version that they were read in."""
    assert f"flash-attn-4=={flash_call.READ};" in (ROOT / "pyproject.toml").read_text()
    monkeypatch.setattr(flash_call, "version", lambda: "4.0.0b99")
    found = choose_engine(asked("causal & window(9)", engines=("flash",)))
    assert found.why["flash"] == f"flash-attn-4 4.0.0b99 is installed, and calls are held against {flash_call.READ}"


def test_checked_engines_have_right_rows_in_the_results():
    """Of every dtype and head size that `CHECKED` names on other platforms than the CPU, benchmarks/results has right
    rows, without and with a causal mask."""
    path = ROOT / "benchmarks" / "results" / "gpu.json"
    rows = json.loads(path.read_text())["parts"]["right"]["rows"] if path.exists() else {}
    for x in (x for x in proof.CHECKED if x.platform != "cpu"):
        assert x.capability == (9, 0)  # of the H100 that the results name
        assert (x.shared_heads, x.contiguous) == (False, True)  # until a row with `shared heads` is in the results
        assert x.dtypes
        assert x.head_dims
        for dtype in x.dtypes:
            for mask in ("full", "causal", "prefix(p)"):
                mine = rows[f"{x.engine}, {mask}, {dtype}"]["rows"]
                assert {str(dim) for dim in x.head_dims} <= mine.keys()
                assert not mine["count"]["figures"]["cases"]["failed"]


def test_costs_of_cudnn_are_those_of_the_results():
    """Every bound that a cost row of Hopper states is the smallest or largest measured ratio, rounded."""
    speed = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())["parts"]["speed"]["rows"]
    rows = [x for x in proof.COSTS if x.engine == "cudnn" and x.before == (10, 0)]
    assert len(rows) == 4
    for row in rows:
        (dim,), (low, high) = row.head_dims, row.queries
        for what, said in (("forward", row.gain), ("backward", row.backward)):
            found = []
            for mask in ("causal", "full"):
                measured = speed.get(f"{what}: {mask}, D {dim}", {"rows": {}})["rows"]
                ratios = {int(n): x["ratios"]["frisket, cudnn / frisket"][0] for n, x in measured.items()}
                found += [x for n, x in ratios.items() if low <= n <= high]
            assert bool(found) == bool(said)
            if said:
                assert said.startswith(f"{min(found):.2f} to {max(found):.2f} of")


def test_plans_say_which_engine_runs(gpu, monkeypatch):
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    plan = fk.compile("causal & window(257)", engines="flash, cudnn").plan(4096, 4096, 1, 2)
    assert plan.engines(128, dtype="bfloat16", device="cuda").splitlines() == [
        "flash: causal, window 256 to the left; proved",
        "cudnn: causal, window 256 to the left: cuDNN has no window",
    ]
    assert plan.engines() == "sdpa: causal, window 256 to the left: SDPA has no window"
    assert fk.compile("causal", engines=False).plan(64, 64).engines() == "generated kernels are asked for"


@pytest.mark.parametrize("other", [copy.copy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x.stored_as(PAGED)])
def test_copied_plans_keep_the_engine_options(other, monkeypatch):
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    plan = other(fk.compile("causal", engines=False).plan(64, 64))
    assert plan.engines() == "generated kernels are asked for"


def test_without_a_gpu_reasons_are_said_all_the_same(monkeypatch):
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    said = fk.compile("causal").plan(64, 64).engines(dtype="bfloat16", device="cuda").splitlines()
    assert said == [
        "flash: no GPU of NVIDIA is visible to torch; the mask's code can be printed all the same",
        "cudnn: no GPU of NVIDIA is visible to torch",
        "sdpa: SDPA's flash kernel takes compute capability 8.0 and later; here is (0, 0)",
    ]


def test_engines_by_name(monkeypatch):
    assert fk.compile("causal", engines="flash, cudnn").options.engines == ("flash", "cudnn")
    assert fk.compile("causal", engines=["sdpa"]).options.engines == ("sdpa",)
    for wrong in ("triton", "flash, aten", "splash", "", 3, [2]):
        with pytest.raises(ParameterError, match="write True, False, or names among"):
            fk.compile("causal", engines=wrong)
    monkeypatch.setenv("FRISKET_ENGINES", "flush")
    with pytest.raises(ParameterError, match="FRISKET_ENGINES=flush: write 0, 1, or names among"):
        fk.compile("causal")(*torch.randn(3, 1, 1, 8, 16))


# -- calls ------------------------------------------------------------------------------------------


@pytest.fixture
def flash_here(gpu, monkeypatch):
    """FlashAttention 4 is offered calls on the CPU, where its stand-in is; other calls are library calls."""
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    monkeypatch.setenv("CXX", "nowhere")
    was = RECORDS["flash"]
    register(replace(was, platforms=("cuda", "cpu")))
    row = proof.CostRow(engine="flash", platform="cpu", dtypes=proof.HALVES)
    monkeypatch.setattr(proof, "COSTS", (row,))
    yield gpu
    register(was)


@pytest.mark.usefixtures("flash_here")
@pytest.mark.parametrize("how", ["keyword", "variable"])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("mask", "score", "said"),
    [
        ("causal & window(12)", None, "causal, window 11 to the left"),
        ("causal & same(doc)", None, "causal, documents as cu_seqlens of 6 sequences"),
        ("causal | k < 9", "softcap(3)", "code and tiles of 192 x 128"),
    ],
)
def test_calls_that_flash_takes(mask, score, said, deterministic, how, monkeypatch):
    """Results, lse and gradients of both; those that its backward has not are generated kernels'."""
    how == "variable" and monkeypatch.setenv("FRISKET_ENGINES", "flash")
    given = {"doc": DOC} if "doc" in mask else {}
    engines = {"engines": "flash"} if how == "keyword" else {}
    att = fk.compile(mask, score, deterministic=deterministic, **engines, **given)
    arrays = [torch.randn(2, h, 50, 16).half() for h in (4, 2, 2)]
    stages = att.stages(*arrays)
    assert (stages.target.backend, stages.engines.split("\n")[0]) == ("flash", f"flash: {said}; proved")
    assert set(att.check(*arrays).gradients) == {"dq", "dk", "dv"}
    ready = next(x for x in att.calls.values() if isinstance(x, PreparedCall))
    assert ready.proof.gradients == (not (deterministic and "code" in said))
    *_, top = att(*arrays, return_max=True)
    assert torch.isfinite(top).all()
    assert torch.isfinite(att(*arrays, sinks=1.0)).all()


@pytest.mark.usefixtures("flash_here")
@pytest.mark.parametrize("mask", default_only(["causal & window(12)", "causal | k < 9", "k < 0"], "causal | k < 9"))
def test_sinks_of_calls_that_flash_takes(mask, monkeypatch):
    """The engine's own, and frisket's gradient of them; also where gradients are generated kernels'."""
    ran = []
    monkeypatch.setattr(flash_torch, "attend", lambda *given: ran.append(given[-1]) or stand_in.attend(*given))
    att = fk.compile(mask, engines="flash", sinks=torch.linspace(-1, 2, 4))
    for seed in range(25):
        torch.manual_seed(seed)
        arrays = [torch.randn(2, h, 50, 16).half() for h in (4, 2, 2)]
        assert set(att.check(*arrays).gradients) == {"dq", "dk", "dv", "dsinks"}
    assert len(ran) == 25
    assert ran[0].shape == (4,)


@pytest.mark.usefixtures("flash_here")
def test_calls_that_flash_does_not_take():
    q, k, v = (torch.randn(1, 2, 50, 16).half() for _ in range(3))
    learned = torch.zeros(2, requires_grad=True)
    for att, how in (
        (fk.compile("q * 100000000 >= k", engines="flash"), {}),
        (fk.compile("causal", engines="flash", dropout=0.1), {"seed": 1}),
        (fk.compile("causal", "alibi(slopes)", slopes=learned, engines="flash"), {}),
        (fk.compile("causal", engines="flash"), {"origin": (0, 0, np.array([3]), 0), "sizes": (1, 2, 80, 80)}),
        (fk.compile("causal"), {}),
    ):
        att(q, k, v, **how)
        assert all(x.generated is x for x in att.calls.values() if isinstance(x, PreparedCall))


def test_variables_read_before_the_records_are_checked_with_them(monkeypatch):
    monkeypatch.setenv("FRISKET_ENGINES", "bogus")
    monkeypatch.setattr(settings, "choices", {})
    assert settings.Settings.read().engines == ("bogus",)
    settings.offer(backends=names, engines=offered)
    with pytest.raises(ParameterError, match="FRISKET_ENGINES=bogus: write 0, 1, or names among"):
        settings.Settings.read()
