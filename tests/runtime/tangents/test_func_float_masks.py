"""Float tables that a mask reads, inside of torch.func's transforms."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import frisket as fk  # noqa: E402
from frisket.dsl.errors import BackwardError, ParameterError  # noqa: E402

N = 6
Q, K, V = torch.randn(3, 1, 1, N, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
FAR = torch.randn(N, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 2 * torch.eye(N)
NEAR = FAR < 0.5
WAYS = ["plain", "made inside"]


def attended(q, far, backend=None):
    return fk.attention(q, K, V, "far[q, k] < 0.5", far=far, backend=backend).square().sum()


def dense(q, far=None):
    scores = (q @ K.mT / 2).masked_fill(~NEAR, -torch.inf)
    weights = torch.where(NEAR.any(-1, keepdim=True), scores.softmax(-1), 0.0)
    return (weights @ V).square().sum()


def pairs(way, backend):
    """A function of one array and its dense form; `made inside` computes the table from the array."""

    def f(q):
        return attended(q, FAR if way == "plain" else FAR + 0 * q.sum(), backend)

    return f, dense


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", [None, "library"])
def test_float_masks_have_values_under_transforms(way, backend):
    """A plan under torch.func.jvp took memory without values for such a table, so out was wrong too."""
    f, g = pairs(way, backend)
    ways = {
        "jvp": lambda f: torch.func.jvp(f, (Q,), (V,)),
        "grad": lambda f: torch.func.grad(f)(Q),
        "hvp": lambda f: torch.func.jvp(torch.func.grad(f), (Q,), (V,)),
        "hessian": lambda f: torch.func.hessian(f)(Q),
        "jvp of jvp": lambda f: torch.func.jvp(lambda q: torch.func.jvp(f, (q,), (K,))[1], (Q,), (V,)),
    }
    for name, way in ways.items():
        torch.testing.assert_close(way(f), way(g), msg=lambda m, name=name: f"{name}: {m}")


def test_mask_and_score_refuse_one_table_under_transforms():
    """It lost the table's gradient without a word; outside of transforms it was an error."""

    def f(far):
        return fk.attention(Q, K, V, "far[q, k] < 0.5", "score - far[q, k]", far=far).sum()

    for call in (
        lambda: torch.func.grad(f)(FAR),
        lambda: torch.func.jvp(f, (FAR,), (FAR,)),
        lambda: torch.func.jvp(torch.func.grad(f), (FAR,), (FAR,)),
    ):
        with pytest.raises(BackwardError, match="both the mask and the score mod read it"):
            call()
    assert torch.func.grad(lambda q: f(FAR) * q)(torch.tensor(1.0)).isfinite()


def test_mapped_float_masks_have_values_or_raise():
    mapped = torch.vmap(torch.func.grad(attended), (None, 0))(Q, FAR[None])[0]
    torch.testing.assert_close(mapped, torch.func.grad(dense)(Q))
    with pytest.raises(ParameterError, match="has no entries to read"):
        torch.vmap(lambda far: torch.func.jvp(lambda q: attended(q, far), (Q,), (Q,))[1])(FAR[None])
