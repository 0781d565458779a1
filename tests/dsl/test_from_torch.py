"""torch callables, unchanged: each gives what the function gives in torch, and is the text's own Expr."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.torch.callables import MASKS, SCORES, in_torch, mask_case, score_case  # noqa: E402
from torch.nn.attention.flex_attention import create_mask  # noqa: E402

import frisket as fk  # noqa: E402
from frisket.dsl.evaluate import evaluate  # noqa: E402
from frisket.dsl.from_python.trace import trace  # noqa: E402
from frisket.lowering.dense import coordinates  # noqa: E402
from frisket.lowering.plan import Problem  # noqa: E402
from frisket.lowering.simplify import canonical  # noqa: E402


@pytest.fixture(autouse=True)
def double():
    """torch's own arithmetic in float64, so that only mistakes differ."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def values(bound, case, score=None):
    env = {**coordinates(Problem(*case.shape[2:], *case.shape[:2])), **bound.scalars}
    if score is not None:
        env["score"] = score.numpy()
    return np.broadcast_to(evaluate(bound.expr, env, bound.tables), case.shape)


@pytest.mark.parametrize("name", MASKS)
def test_masks_show_what_torch_shows(name):
    case = mask_case(name)
    mask = fk.mask(case.fn)
    want = in_torch(case).numpy()
    np.testing.assert_array_equal(values(mask, case), want)
    made = create_mask(
        lambda b, h, q, k: case.fn(b, h, q, k), case.batch, case.heads, case.q_len, case.kv_len, device="cpu"
    )
    np.testing.assert_array_equal(mask.dense(case.q_len, case.kv_len, case.batch, case.heads), made.numpy())


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_what_torch_computes(name):
    case = score_case(name)
    score = torch.randn(case.shape, generator=torch.Generator().manual_seed(3)) * 4
    want = in_torch(case, score).detach().numpy()
    np.testing.assert_allclose(values(fk.score(case.fn), case, score), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in MASKS if mask_case(n).text])
def test_masks_are_the_texts_expr(name):
    case = mask_case(name)
    assert canonical(fk.mask(case.fn).expr).expr is canonical(fk.mask(case.text, **case.bind).expr).expr


@pytest.mark.parametrize("name", [n for n in SCORES if score_case(n).text])
def test_scores_are_the_texts_expr(name):
    case = score_case(name)
    assert canonical(fk.score(case.fn).expr).expr is canonical(fk.score(case.text, **case.bind).expr).expr


def test_a_trace_says_which_values_it_looked_at():
    table, scale, flag = torch.ones(24), torch.tensor(0.5), torch.tensor(True)

    def mod(score, b, h, q, k):
        return score + table[k] * table.shape[0] * scale.item() if flag else score

    found = trace(mod)
    assert {id(x) for x in found.read} == {id(scale), id(flag)}
    assert list(found.tables) == ["table"]
    assert trace(lambda score, q: score + table[q] * scale).read == ()


def test_views_of_one_memory_that_differ_by_their_signs():
    both = torch.complex(torch.zeros(24), torch.arange(24.0))
    one, other = both.imag, both.conj().imag
    found = trace(lambda score, q, k: score + one[q] * other[k])
    assert [t.resolve_neg().sum() for t in found.tables.values()] == [276, -276]


def test_a_trace_of_tensors_without_values():
    table, factor = torch.ones(24, device="meta"), torch.ones((), device="meta")
    found = trace(lambda score, q: score + table[q] * factor.item(), valueless=True)
    assert str(found.expr) == str(fk.score("score + table[q] * factor", table=np.ones(24), factor=0.5).expr)
    with pytest.raises(fk.TraceError, match="computes with the values of a captured tensor"):
        trace(lambda score, q: score + table.cumsum(0)[q], valueless=True)
    with pytest.raises(fk.TraceError, match="no values to read"):
        trace(lambda score, q: score + table[q])
