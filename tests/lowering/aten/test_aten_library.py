"""Forward and gradients of every mask and score mod of the library and tests/peers/peers.frisket on torch's calls."""

from functools import cache

import cases
import numpy as np
import peer_cases
import pytest
import torch

import frisket as fk
from frisket.lowering import dense
from frisket.lowering.aten import backward as aten_backward
from frisket.lowering.aten import forward as aten
from frisket.lowering.derive import backward_of
from frisket.lowering.plan import Cotangents, ForwardResults, Geometry, KernelInputs, Target
from frisket.lowering.simplify import ProgramExprs

LENGTH, DIM, BLOCK = 160, 16, (32, 16)


@cache
def everything():
    """(kind, name) -> case."""
    kinds = {
        "mask": {**cases.masks(LENGTH), **peer_cases.masks(LENGTH)},
        "score": {**cases.mods(LENGTH), **peer_cases.mods(LENGTH)},
    }
    return {(kind, name): case for kind, found in kinds.items() for name, case in found.items()}


def check(kind, name):
    case = everything()[kind, name]
    texts = (case.text, None) if kind == "mask" else ("causal", case.text)
    attention = fk.compile(*texts, **case.params)
    plan = attention.plan(case.q_len, case.kv_len, case.batch, case.heads)
    made, program = plan.work(BLOCK), plan.program
    g = Geometry(case.batch, case.heads, case.heads, case.q_len, case.kv_len, DIM, DIM, DIM**-0.5)
    draw = np.random.default_rng(0)
    lengths = (case.q_len, case.kv_len, case.kv_len, case.q_len)
    q, k, v, dout = (torch.from_numpy(draw.standard_normal((case.batch, case.heads, n, DIM))) for n in lengths)
    tables = {n: torch.from_numpy(np.array(t)) for n, t in made.tables.items()}
    inputs = KernelInputs(made.plan, made.spans, g, Target("aten", *BLOCK), made.slots, tables)
    out, lse, top = aten.forward(inputs, q, k, v, top=True)
    wanted = frozenset({"q", "k", "v", *(x.source for x in backward_of(made.plan).gradients)})
    got = aten_backward.backward(inputs, q, k, v, ForwardResults(out, lse), Cotangents(dout), grad_names=wanted)
    mask, score = (None if p is None else p.expr for p in (program.mask, program.score))
    same = {"scale": g.scale, "params": program.scalars, "tables": program.tables}
    arrays = [x.numpy() for x in (q, k, v)]
    want = dense.attention(*arrays, dense.DenseCall(ProgramExprs(mask, score), **same))
    for mine, right in zip(
        (out, lse, top),
        (*want, dense.top(*arrays[:2], dense.DenseCall(ProgramExprs(mask, score), **same))),
        strict=True,
    ):
        np.testing.assert_allclose(mine.numpy(), right, rtol=1e-9, atol=1e-9)
    found = dense.gradients(*arrays, dense.DenseCall(ProgramExprs(mask, score), **same), dout.numpy())
    named = {"q": found["dq"], "k": found["dk"], "v": found["dv"]}
    named |= {t.name: found["dtables"].get(t.source) for t in made.plan.tables}
    named |= {s.name: found["dscalars"].get(s.source) for s in made.plan.slots}
    for one, mine in got.items():
        right = np.asarray(named[one])
        np.testing.assert_allclose(mine.numpy(), right, rtol=1e-8, atol=1e-8 * max(1, np.abs(right).max()), err_msg=one)


SOME = np.random.default_rng(4).permutation(len(everything()))[:16].tolist()


@pytest.mark.parametrize("case", [list(everything())[i] for i in SOME], ids=str)
def test_aten_runs_selected_library_entries(case):
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", everything(), ids=str)
def test_aten_runs_the_whole_library(case):
    check(*case)
