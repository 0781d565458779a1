"""Tables that calls inside of torch.func's transforms read on the host."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import frisket as fk  # noqa: E402

S = 12
Q = torch.randn(1, 2, S, 8, generator=torch.Generator().manual_seed(0))
DOC, BIAS, WIDTH = torch.arange(S) // 5, torch.linspace(-1, 1, S).bfloat16(), torch.tensor(4)
TEXT, ATT = "causal & same(doc)", fk.compile("causal & same(doc)")
WAYS = {
    "plan": lambda q: ATT(q, q, q, plan=ATT.plan(S, S, 1, 2, doc=DOC)),
    "compile": lambda q: fk.compile(TEXT, doc=DOC)(q, q, q),
    "mask": lambda q: fk.compile(fk.mask(TEXT, doc=DOC))(q, q, q),
    "number": lambda q: fk.attention(q, q, q, "window(w)", w=WIDTH),
    "captured": lambda q: fk.attention(q, q, q, lambda b, h, i, j: (i >= j) & (DOC[i] == DOC[j])),
    "score": lambda q: fk.attention(q, q, q, "causal", lambda s, b, h, i, j: s + BIAS[j]),
    "reorder": lambda q: fk.compile(TEXT, reorder="auto")(q, q, q, doc=DOC),
    "made inside": lambda q: fk.compile("t[q] == t[k]", t=q.detach()[0, 0, :, 0] > 0)(q, q, q),
    "origin": lambda q: fk.compile("causal")(q, q, q, origin=(0, 0, WIDTH, 0), sizes=(1, 2, S + 4, S)),
}


def loss(f):
    return lambda q: f(q).square().sum()


def wanted(f):
    q = Q.clone().requires_grad_()
    return torch.autograd.grad(loss(f)(q), q)[0]


@pytest.mark.parametrize("name", WAYS)
def test_host_tables_are_read_inside_of_transforms(name):
    """functorch wraps what comes of `table.detach()`, and numpy found no memory in it."""
    torch.testing.assert_close(torch.func.grad(loss(WAYS[name]))(Q), wanted(WAYS[name]))
    torch.testing.assert_close(torch.func.vjp(loss(WAYS[name]), Q)[1](torch.tensor(1.0))[0], wanted(WAYS[name]))
    if name != "made inside":
        mapped = torch.vmap(torch.func.grad(loss(WAYS[name])))(Q[None])[0]
        torch.testing.assert_close(mapped, wanted(WAYS[name]))


def test_nested_transforms_read_tables_of_outer_levels():
    q = Q.clone().requires_grad_()  # torch's own autograd is one level more
    inner = torch.func.grad(loss(WAYS["made inside"]))
    torch.testing.assert_close(torch.func.vjp(inner, q)[0].detach(), wanted(WAYS["made inside"]))


def test_check_runs_inside_of_transforms():
    def checked(q):
        ATT.check(q, q, q, doc=DOC).require()
        return ATT(q, q, q, doc=DOC)

    torch.testing.assert_close(torch.func.grad(loss(checked))(Q), wanted(checked))


def test_mapped_tables_are_refused_with_a_remedy():
    with pytest.raises(fk.ParameterError, match=r"torch.vmap maps .*\n  give it to the call"):
        torch.vmap(lambda doc: fk.compile(TEXT, doc=doc)(Q, Q, Q))(DOC[None])
