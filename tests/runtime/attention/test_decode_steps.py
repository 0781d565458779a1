"""Steps of decoding: new positions and lengths are no new plan and no new kernel."""

import numpy as np
import pytest

import frisket as fk
from frisket.grammar.memo import clear
from frisket.lowering import pipeline as bind
from frisket.runtime.backends.cpp import torch as native_torch
from frisket.runtime.calls.options import CALLS
from frisket.runtime.machine.cpp_build import reason

torch = pytest.importorskip("torch")
NATIVE = pytest.mark.skipif(bool(reason()), reason="no compiler")
LONGEST = 96
TABLES = {"doc": np.repeat([3, 1, 2], [40, 7, 49]), "room": np.array([96, 61]), "n": 20}
MASKS = {
    "causal": None,
    "causal & window(9)": None,
    "sinks(3) | causal & window(11)": "score * 0.5 - abs(q - k) * 0.1",
    "q >= k | k < n": None,  # a prefix
    "causal & k < room[b]": None,
    "causal & doc[q] == doc[k]": "score + k",
    "causal & (q - k) % 3 == 0": None,  # not made of bounds
}

COMPILED = [m for m, score in MASKS.items() if score]
CASES = [*((m, "aten") for m in MASKS), *(pytest.param(m, "cpp", marks=NATIVE) for m in COMPILED)]


def arrays(kv_len=LONGEST, q_len=1, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, h, n, 16, generator=g) for h, n in ((4, q_len), (2, kv_len), (2, kv_len))]


def compiled(mask, score, backend):
    names = set(fk.mask(mask).unbound)
    return fk.compile(mask, score, backend=backend, **{n: x for n, x in TABLES.items() if n in names})


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("mask", "backend"), CASES)
def test_decode_steps_equal_the_reference(mask, backend):
    score = MASKS[mask]
    att = compiled(mask, score, backend)
    params = {n: TABLES[n] for n in fk.mask(mask).unbound}
    for at, q_len in [*((n, 1) for n in range(0, 92, 7)), (0, 3), (46, 16), (80, 16), (90, 5)]:
        q, k, v = arrays(q_len=q_len, seed=at)
        k, v = k[:, :, : at + q_len], v[:, :, : at + q_len]
        for origin, sizes in (((0, 0, at, 0), None), ((0, 0, np.array([at, at // 2]), 0), (2, 4, LONGEST, LONGEST))):
            have = att(q, k, v, origin=origin, sizes=sizes)
            want = fk.reference(q, k, v, mask, score, layout="bhsd", origin=origin, sizes=sizes, **params)
            np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mask", "backend"), CASES)
def test_steps_share_a_plan(mask, backend, monkeypatch):
    att = compiled(mask, MASKS[mask], backend)
    q, k, v = arrays()
    clear()
    made = []
    plan, library = bind.make_plan, native_torch.library

    def counted(*args, **rest):
        made.append("plan")
        return plan(*args, **rest)

    monkeypatch.setattr(bind, "make_plan", counted)
    monkeypatch.setattr(native_torch, "library", lambda text: made.append("text") or library(text))
    for at in range(65, 95):  # one power of two
        att(q, k[:, :, : at + 1], v[:, :, : at + 1], origin=(0, 0, at, 0))
        att(q, k, v, origin=(0, 0, at, 0), sizes=(2, 4, LONGEST, LONGEST))
    assert made == (["plan"] if backend == "aten" else ["plan", "text"])


def test_decode_source_is_one_text_for_any_length():
    att, texts = fk.compile("causal & window(9) & (q // 4) % 2 == 0"), set()
    for at in (0, 5, 100, 5000, 70_000, 1 << 25):
        for kv_len in (at + 1, at + 1 + at % 7):
            texts.add(att.source("cpp", q_len=1, kv_len=kv_len, heads=2, head_dim=16, origin=(0, 0, at, 0)))
    assert len(texts) == 1


def test_plans_of_steps_are_few():
    att = fk.compile("causal & window(9)", backend="aten")
    q, k, v = arrays()
    for at in range(CALLS):
        att(q, k, v, origin=(0, 0, at, 0), sizes=(2, 4, LONGEST + at, LONGEST))
    assert len(att.calls) == CALLS
    assert bind._works.info().entries <= bind.CACHED


def test_room_for_growing_is_no_reason_to_refuse():
    """2**31 * 2**31 fits into 64 bits, their room does not."""
    n = 3_000_000_000
    att = fk.compile("q * k >= 0 & q - k < 4", backend="aten")
    q, k, v = arrays(kv_len=8)
    have = att(q, k, v, origin=(0, 0, n, n - 7))
    want = fk.reference(q, k, v, "q - k < 4", layout="bhsd", origin=(0, 0, n, n - 7))
    np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-5)


def test_tables_are_still_too_short():
    att = compiled("causal & doc[q] == doc[k]", None, "aten")
    q, k, v = arrays()
    att(q, k, v, origin=(0, 0, 95, 0))
    with pytest.raises(fk.ParameterError, match=r"table `doc` has 96 entries on axis 0 and is read at `q` = 0..96"):
        att(q, k, v, origin=(0, 0, 96, 0))
    with pytest.raises(fk.ShapeError, match="none negative"):
        att(q, k, v, origin=(0, 0, -1, 0))
