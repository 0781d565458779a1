"""Graphs around torch.func's transforms and vmap: torch.compile, torch.export and make_fx."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import frisket as fk  # noqa: E402
from frisket.dsl.errors import ParameterError  # noqa: E402
from frisket.flex import create_block_mask, flex_attention  # noqa: E402

S = 12
Q = torch.randn(3, 1, 2, S, 8, generator=torch.Generator().manual_seed(0))
DOC, BIAS = torch.arange(S) // 5, torch.linspace(-1, 1, S)
PLAIN, TABLES = fk.compile("causal"), fk.compile("causal & same(doc)", "score + bias[k]")
BLOCKS = create_block_mask(lambda b, h, q, k: q >= k, None, None, S, S, "cpu")
CALLS = {
    "plain": lambda q: PLAIN(q, Q[0], Q[1]),
    "tables": lambda q: TABLES(q, q, Q[1], doc=DOC, bias=q[0, 0, :, 0]),
    "sinks": lambda q: PLAIN(q, q, q, sinks=q[0, :, 0, 0], return_lse=True)[1],
    "flex": lambda q: flex_attention(q, q, q, lambda s, b, h, i, j: s + BIAS[j], BLOCKS),
}


def loss(f):
    return lambda q: f(q).square().sum()


TRANSFORMS = {
    "vmap": torch.vmap,
    "grad": lambda f: lambda q: torch.func.grad(loss(f))(q[0]),
    "vjp": lambda f: lambda q: torch.func.vjp(loss(f), q[0])[1](torch.tensor(1.0))[0],
    "jvp": lambda f: lambda q: torch.func.jvp(loss(f), (q[0],), (q[0],))[1],
    "jvp(grad)": lambda f: lambda q: torch.func.jvp(torch.func.grad(loss(f)), (q[0],), (q[0],))[1],
    "vmap(grad)": lambda f: torch.vmap(torch.func.grad(loss(f))),
    "grad(vmap)": lambda f: torch.func.grad(loss(torch.vmap(f))),
}
WAYS = {
    "compile": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
    "compile with breaks": lambda f: torch.compile(f, backend="aot_eager"),
    "inductor": lambda f: torch.compile(f, fullgraph=True),
    "export": lambda f: exported(f, strict=False),
    "strict export": lambda f: exported(f, strict=True),
    "make_fx": lambda f: make_fx(f)(Q),
}


def exported(f, strict):
    class Module(torch.nn.Module):
        def forward(self, q):
            return f(q)

    return torch.export.export(Module(), (Q,), strict=strict).module()


def in_turn(transform, f):
    """Results of one entry after another, by torch's autograd: no transform."""
    if transform == "vmap":
        return torch.stack([f(q) for q in Q])
    alone = transform in ("grad", "vjp", "jvp", "jvp(grad)")
    leaves = [q.clone().requires_grad_() for q in (Q[:1] if alone else Q)]
    grads = torch.autograd.grad(sum(loss(f)(q) for q in leaves), leaves, create_graph="jvp" in transform)
    along = (grads[0] * Q[0]).sum()
    if "jvp" in transform:
        return along.detach() if transform == "jvp" else torch.autograd.grad(along, leaves)[0]
    return grads[0] if alone else torch.stack(grads)


# Tangents are laid out by the entries of tables, which torch.compile does not know: a graph ends there, and flex, whose
# operator the graph already has, raises.
BREAKS = [("compile", "tables"), ("inductor", "tables"), *((way, "flex") for way in WAYS if way != "make_fx")]
# torch's exports hold no gradients of transforms. Its strict ones refuse a tensor that is first read inside of vmap:
# `torch.vmap(lambda q: q + DOC)`.
CASES = [
    (way, transform, name)
    for way in WAYS
    for transform in TRANSFORMS
    for name in CALLS
    if ("export" not in way or transform == "vmap") and (way != "strict export" or name not in ("flex", "tables"))
    if "jvp" not in transform or (way, name) not in BREAKS
]
NEAR = {"rtol": 1e-4, "atol": 1e-5}
OFTEN = [("make_fx", "vmap(grad)", "tables"), ("export", "vmap", "plain"), ("compile", "vmap(grad)", "flex"),
         ("compile", "jvp", "plain"), ("compile with breaks", "jvp(grad)", "tables")]  # fmt: skip


@pytest.mark.parametrize(
    ("way", "transform", "name"),
    [pytest.param(*case, marks=() if case in OFTEN else pytest.mark.exhaustive) for case in CASES],
)
def test_graphs_around_transforms_equal_calls_in_turn(way, transform, name):
    f = TRANSFORMS[transform](CALLS[name])
    torch.testing.assert_close(WAYS[way](f)(Q), in_turn(transform, CALLS[name]), **NEAR)


def test_graphs_map_an_attention_itself():
    """torch.vmap asks what it maps for its name, and a graph does so too."""
    mapped = torch.compile(torch.vmap(PLAIN), backend="eager", fullgraph=True)
    torch.testing.assert_close(mapped(Q, Q, Q), torch.stack([PLAIN(q, q, q) for q in Q]))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_the_operator_itself_have_rules(transform):
    """`frisket::attend` in a graph that torch made, say, with a vmap around it."""
    f = lambda q: torch.ops.frisket.attend(q, Q[0], Q[1], None, [], [], PLAIN.spec, "")[0]  # noqa: E731
    near = NEAR if "jvp" in transform else {}
    torch.testing.assert_close(TRANSFORMS[transform](f)(Q), in_turn(transform, CALLS["plain"]), **near)


NUMBERS = torch.tensor([1, 4])
DROPPED, WINDOW = fk.compile("causal", dropout=0.5), fk.compile("causal & window(3)")
OF_NUMBERS = {
    "seed": lambda q, n: DROPPED(q, q, q, seed=n),
    "seed of attention": lambda q, n: fk.attention(q, q, q, "causal", dropout=0.5, seed=n),
    "origin": lambda q, n: WINDOW(q[:, :, :4], q, q, origin=(0, 0, n, 0), sizes=(1, 2, S, S)),
}


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_seeds_and_origins_of_entries_may_be_mapped(name):
    call, q = OF_NUMBERS[name], Q[0]
    gradient = torch.func.grad(lambda q, n: call(q, n).square().sum())
    for f in (call, gradient):
        torch.testing.assert_close(torch.vmap(f, (None, 0))(q, NUMBERS), torch.stack([f(q, n) for n in (1, 4)]))
    with pytest.raises(ParameterError, match="in forward mode, call the attention for one entry after another"):
        torch.vmap(lambda n: torch.func.jvp(lambda q: call(q, n), (q,), (q,))[1])(NUMBERS)
