"""Calls with backend="gluon", in the interpreter of tests/support/gluon, against the float64 reference: every mask and
every score mod of the library through the whole of frisket, with the target that a call takes by itself."""

from dataclasses import replace

import cases
import pytest
import torch
from support.gluon.call import install
from support.tiers import default_only

import frisket as fk
from frisket.runtime.backends.base import RECORDS, register
from frisket.runtime.backends.triton import tiles

LENGTH = 150
MASKS, MODS = cases.masks(LENGTH), cases.mods(LENGTH)


@pytest.fixture(autouse=True, params=["sm_90", pytest.param("sm_100", marks=pytest.mark.exhaustive)])
def here(monkeypatch, request):
    """The backend runs here, on such a GPU."""
    install(monkeypatch)
    monkeypatch.setattr(tiles, "architecture", lambda device=None: request.param)
    was = RECORDS["gluon"]
    register(replace(was, reason=lambda framework=None: ""))
    yield
    register(was)


def arrays(case, dtype, kv_heads):
    draw = torch.Generator().manual_seed(5)
    shapes = ((case.heads, case.q_len), (kv_heads, case.kv_len), (kv_heads, case.kv_len))
    return [torch.randn(case.batch, n, length, 64, generator=draw).to(dtype) for n, length in shapes]


@pytest.mark.parametrize("name", default_only(MASKS, "causal", "window(w)", "same(t)"))
def test_gluon_runs_each_mask_of_the_library(name):
    case = MASKS[name]
    fk.compile(case.mask, backend="gluon").check(*arrays(case, torch.bfloat16, 1), gradients=False).require()


@pytest.mark.parametrize("name", default_only(MODS, "alibi", "softcap(c)", "relative_bias(table)"))
def test_gluon_runs_each_score_mod_of_the_library(name):
    case = MODS[name]
    fk.compile("causal", case.score, backend="gluon").check(*arrays(case, torch.float16, 2), gradients=False).require()
