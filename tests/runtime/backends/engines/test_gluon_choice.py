"""Which calls take Gluon's forward in the place of Triton's."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import frisket as fk
from frisket.lowering.dtypes import Operand
from frisket.lowering.plan import Geometry
from frisket.runtime.backends.base import RECORDS, register
from frisket.runtime.backends.gluon.torch import pays
from frisket.runtime.backends.registry import quickest
from frisket.runtime.calls.arrays import Stored, TokenPermutation
from frisket.runtime.calls.options import LaunchOptions, Options, Tuning

LENGTH = 16_384


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(multi_processor_count=132)
    )


def asked(mask, score=None, length=LENGTH, dim=128, v_dim=None, dtype="bfloat16", dropout=0.0, **params):
    plan = fk.compile(mask, score, dropout=dropout, **params).plan(length, length, 1, 4)
    return pays(plan, Geometry(1, 4, 4, length, length, dim, v_dim or dim, 0.1), dtype)


def paged(page=16, dim=128, v_dim=None, queries=2048, scales="", dtype="bfloat16", more=""):
    """Whether a part of a prompt over keys in pages takes it, or over an int8 cache with `scales`."""
    stored = Stored("k" in scales, "v" in scales, page, "bhsd", 8, (0, 0, 0))
    start = np.array([14_000], np.int32)
    text = f"param start: int[B]\nparam end: int[B]\nmask = k <= q + start[b] & k < end[b]{more}"
    made = fk.compile(text, start=start, end=start + queries).plan(queries, LENGTH, 1, 64)
    g = Geometry(1, 64, 8, queries, LENGTH, dim, v_dim or dim, 0.1)
    g = replace(g, k=Operand("int8"), v=Operand("int8")) if scales else g
    return pays(made.stored_as(stored), g, dtype)


@pytest.mark.parametrize("given", [{}, {"page": 128}, {"dim": 96}, {"dtype": "float16"}])
def test_calls_over_pages_that_take_it(given):
    assert paged(**given)


HEADS = [{"dim": 64}, {"dim": 256}, {"dim": 192}, {"dim": 192, "v_dim": 128}]


@pytest.mark.parametrize(
    "given", [*HEADS, {"queries": 512}, {"scales": "kv"}, {"scales": "k"}, {"more": " & k % 2 == 0"}]
)
def test_calls_over_pages_that_do_not(given):
    assert not paged(**given)


def documents(length, of):
    return (np.arange(length) // of).astype(np.int32)


@pytest.mark.parametrize("given", [
    {"mask": None}, {"mask": "causal"}, {"mask": "causal & window(1024)"}, {"mask": "causal", "length": 1024},
    {"mask": "causal", "score": "softcap(50)"}, {"mask": "causal", "score": "score + slope[h] * (k - q)"},
    {"mask": "causal & same(doc)"}, {"mask": "causal", "dim": 96}, {"mask": "causal", "dtype": "float16"},
    {"mask": "causal | k < 256", "length": 2048}, {"mask": None, "dim": 256}, {"mask": "causal", "dim": 256},
    {"mask": "causal", "dim": 192}, {"mask": "causal & window(1024)", "dim": 256},
    {"mask": "causal", "score": "softcap(50)", "dim": 256}, {"mask": "causal", "dim": 160},
    {"mask": "causal", "dim": 192, "v_dim": 128}, {"mask": "causal", "score": "score - (q - k)", "dim": 192},
    {"mask": "causal", "score": "score - (q - k)", "dim": 192, "v_dim": 128},
])  # fmt: skip
def test_calls_that_take_it(given):
    more = {"slope": np.ones(4, np.float32)} if "slope" in (given.get("score") or "") else {}
    more |= {"doc": documents(LENGTH, 2048)} if "doc" in str(given["mask"]) else {}
    assert asked(**given, **more)


@pytest.mark.parametrize("given", [
    {"mask": "causal", "dim": 64}, {"mask": "causal", "v_dim": 64}, {"mask": "causal", "dim": 256, "v_dim": 128},
    {"mask": "causal & same(doc)", "dim": 192, "doc": documents(LENGTH, 2048)},
    {"mask": "causal & (q - k) % 3 == 0", "dim": 192}, {"mask": "causal", "dim": 192, "v_dim": 64},
    {"mask": "causal", "dim": 128, "v_dim": 192},
    {"mask": "causal", "dim": 192, "score": "score + bias[q - k]", "bias": np.ones(LENGTH, np.float32)},
    {"mask": "causal & same(doc)", "dim": 256, "doc": documents(LENGTH, 2048)}, {"mask": "window(256)", "dim": 256},
    {"mask": "causal", "score": "score - (q - k)", "dim": 256}, {"mask": "causal & (q - k) % 3 == 0", "dim": 256},
    {"mask": "causal", "dim": 100}, {"mask": "causal", "dtype": "float32"}, {"mask": "causal", "length": 1000},
    {"mask": "causal & window(128)"}, {"mask": "causal & window(768)"}, {"mask": "causal", "dropout": 0.1},
    {"mask": "causal", "score": "score + bias[q - k]", "bias": np.ones(LENGTH, np.float32)},
    {"mask": "causal & same(doc)", "length": 8192, "doc": documents(8192, 2048)},
    {"mask": "causal & (window(1024) | k < 4)", "length": 8192}, {"mask": "causal & k % 2 == 0", "length": 8192},
    {"mask": "window(256) | k < 64 | q < 64"},  # long rows, which Triton's forward divides
])  # fmt: skip
def test_calls_that_do_not(given):
    assert not asked(**given)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (10, 3), (12, 0)])
def test_gluon_is_chosen_on_hopper_alone(monkeypatch, capability):
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert not asked("causal")


def test_kernels_that_are_asked_for_run(monkeypatch):
    monkeypatch.delenv("FRISKET_BACKEND", raising=False)
    was, seen = RECORDS["gluon"], []
    register(replace(was, reason=lambda framework=None: ""))
    monkeypatch.setattr("frisket.runtime.backends.gluon.torch.pays", lambda *given: seen.append(given) or True)
    try:
        plan, g = fk.compile("causal").plan(64, 64), Geometry(1, 1, 1, 64, 64, 128, 128, 0.1)
        assert quickest("triton", plan, g, "bfloat16", Options()) == "gluon"
        assert quickest("triton", plan, g, "bfloat16", Options(engines=False)) == "gluon"
        assert quickest("cpp", plan, g, "bfloat16", Options()) == "cpp"
        assert len(seen) == 2
        at = np.arange(64, dtype=np.int32)
        for options in (
            Options(backend="triton"), Options(tile=(64, 64)), Options(rows=TokenPermutation(at, at)),
            Options(tuning=Tuning(forward=LaunchOptions(num_stages=2))),
        ):  # fmt: skip
            assert quickest("triton", plan, g, "bfloat16", options) == "triton"
        monkeypatch.setenv("FRISKET_BACKEND", "triton")
        assert quickest("triton", plan, g, "bfloat16", Options()) == "triton"
        assert len(seen) == 2
    finally:
        register(was)
