"""Jagged nested tensors in attention, beside every sequence alone."""

from __future__ import annotations

from itertools import product

import pytest

torch = pytest.importorskip("torch")

import torch.nn.attention.flex_attention as theirs  # noqa: E402
from support.native.shared import ALIBI, DIM  # noqa: E402
from support.torch.dense import dense  # noqa: E402

import frisket as fk  # noqa: E402
from frisket.flex import AuxRequest, create_block_mask, create_nested_block_mask, flex_attention  # noqa: E402

LENGTHS = (3, 0, 5, 29)
KEYS = (6, 2, 0, 17)
SLOPES = torch.tensor([0.1, 0.3, 0.5, 0.7])
NATIVE = pytest.mark.skipif(bool(fk.backends()["cpp"]), reason="no C++ compiler")
FUNCTIONS = {  # a mask, a score mod: their positions are those inside the sequence, b is its number
    "neither": (None, None),
    "causal": (lambda b, h, q, k: q >= k, None),
    "positions in the score": (None, lambda s, b, h, q, k: s - 0.002 * q * k * SLOPES[b]),
    "both": (lambda b, h, q, k: (q - k).abs() < 4 + b, lambda s, b, h, q, k: s + SLOPES[h] * (q - k)),
}


def ragged(lengths, heads, seed=0):
    g = torch.Generator().manual_seed(seed)
    items = [torch.randn(n, heads, 8, generator=g) for n in lengths]
    return torch.nested.nested_tensor(items, layout=torch.jagged, requires_grad=True)


def arrays(keys, heads=4, kv_heads=2):
    return ragged(LENGTHS, heads), ragged(keys, kv_heads, 1), ragged(keys, kv_heads, 2)


def run(attend, given):
    """out and the gradients of what was given, packed."""
    out = attend(*(x.transpose(1, 2) for x in given))
    assert out.shape[2] == given[0].shape[1]  # the ragged length of the queries, torch's own symbol
    out.values().square().sum().backward()
    found = [out.transpose(1, 2).values().detach(), *(x.grad.values() for x in given)]
    for x in given:
        x.grad = None
    return found


def alone(attend, given):
    """The same, by `attend(i, q, k, v)` of one sequence."""
    rows = [
        attend(i, *(x.transpose(0, 1)[None] for x in one))[0].transpose(0, 1)
        if all(map(len, one))
        else torch.zeros_like(one[0])
        for i, one in enumerate(zip(*(x.unbind() for x in given), strict=True))
    ]
    sum(x.square().sum() for x in rows).backward()
    found = [torch.cat(rows).detach(), *(x.grad.values() for x in given)]
    for x in given:
        x.grad = None
    return found


def same(found, want):
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=1e-5)


def dense_sequence(mask, score, i, q, k, v):
    """(out, lse, largest score) of sequence i, every pair computed."""
    h, m, n = (torch.arange(x) for x in (q.shape[1], q.shape[2], k.shape[2]))
    at = torch.tensor(i), h[:, None, None], m[:, None], n
    return dense(q, k, v, mask and mask(*at), score and (lambda s: score(s, *at)))


@pytest.mark.parametrize("keys", [LENGTHS, KEYS])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_flex_attention_is_that_of_every_sequence(name, keys):
    mask, score = FUNCTIONS[name]
    given, tiles = arrays(keys), None
    if mask is not None:
        q, k, _ = (x.transpose(1, 2) for x in given)
        tiles = create_nested_block_mask(mask, 1, 1, q, k, BLOCK_SIZE=16)
    found = run(lambda q, k, v: flex_attention(q, k, v, score, tiles, enable_gqa=True), given)
    same(found, alone(lambda *one: dense_sequence(mask, score, *one)[0], given))


def lined(q, k):
    """How far keys lie behind queries, where the ends of both are in one place."""
    return q - k + k.numel() - q.numel()


TEXTS = {  # and the functions of `dense_sequence`
    "causal": ("causal", None, lambda b, h, q, k: q >= k, None),
    "positions": (None, "score - 0.002 * q * k * (b + 1)", None, lambda s, b, h, q, k: s - 0.002 * q * k * (b + 1)),
    "both": (
        "q + KV_LEN - Q_LEN >= k & (q + b) % B != k", "score - slopes[b] * abs(q - k) * (h + 1)",
        lambda b, h, q, k: (lined(q, k) >= 0) & ((q + b) % len(LENGTHS) != k),
        lambda s, b, h, q, k: s - SLOPES[b] * (q - k).abs() * (h + 1),
    ),
}  # fmt: skip


OFTEN = [("both", "library", LENGTHS), ("both", "library", KEYS), ("both", "native", KEYS)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "backend", "keys"), [
    pytest.param(*case, marks=() if case in OFTEN else pytest.mark.exhaustive)
    for case in product(TEXTS, ("library", "native"), (LENGTHS, KEYS))
])  # fmt: skip
def test_compiled_attention_is_that_of_every_sequence(name, backend, keys):
    mask, score, *functions = TEXTS[name]
    slopes = {"slopes": SLOPES} if "slopes" in (score or "") else {}
    att, given = fk.compile(mask, score, backend=backend), arrays(keys)
    want = alone(lambda *one: dense_sequence(*functions, *one)[0], given)
    same(run(lambda q, k, v: att(q, k, v, **slopes), given), want)
    same(run(lambda q, k, v: fk.attention(q, k, v, mask, score, backend=backend, **slopes), given), want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_in_one_graph(backend):
    eager = {name: lambda q, k, v, m, s=score: flex_attention(q, k, v, s, m, enable_gqa=True)
             for name, (_, score) in FUNCTIONS.items()}  # fmt: skip
    for name in ("both",):
        compiled = torch.compile(eager[name], backend=backend, fullgraph=True)
        for keys in (LENGTHS, KEYS):
            given = arrays(keys)
            q, k, _ = (x.transpose(1, 2) for x in given)
            tiles = create_nested_block_mask(FUNCTIONS[name][0], 1, 1, q, k)
            same(*(run(lambda q, k, v, f=f, m=tiles: f(q, k, v, m), given) for f in (compiled, eager[name])))
    for text in ("causal", "q + b >= k & b < B"):  # another text is another graph
        att = fk.compile(text)
        compiled = torch.compile(att, backend=backend, fullgraph=True)
        given = arrays(KEYS)
        same(run(compiled, given), run(att, given))
    q, k, _ = (x.transpose(1, 2) for x in given)
    with pytest.raises(Exception, match="sequences of other lengths"):
        compiled(q, k, ragged((5, 3, 0, 17), 2).transpose(1, 2))


def test_assertions_of_graphs_have_messages_of_one_line():
    """inductor writes a message into C++ as it is: a line break or a quote in it did not compile."""
    messages, att = [], fk.compile("causal")

    def backend(graph, inputs):
        messages.extend(node.args[1] for node in graph.graph.nodes if node.target is torch._assert_async)
        return graph

    holes = [torch.nested.narrow(x, 1, torch.zeros(2, dtype=torch.long), torch.tensor([5, 3]), layout=torch.jagged)
             for x in torch.randn(3, 2, 7, 2, 8)]  # fmt: skip
    torch.compile(att, backend=backend, fullgraph=True)(*(x.transpose(1, 2) for x in holes))
    assert len(messages) == 2  # offsets, and lengths
    assert not any(set(message) & set("\n\"'\\") for message in messages)


def test_examples_of_torchs_documentation():
    def causal_mask(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def want(query, key, value):
        for one in zip(query.unbind(), key.unbind(), value.unbind(), strict=True):
            q, k, v = (x.detach()[None] for x in one)
            tiles = theirs.create_block_mask(causal_mask, None, None, q.shape[2], k.shape[2], "cpu")
            yield theirs.flex_attention(q, k, v, None, tiles)[0]

    query, key, value = (ragged((5, 9), 2, i).transpose(1, 2) for i in range(3))
    with pytest.warns(DeprecationWarning, match="_compile has no effect"):
        block_mask = create_nested_block_mask(causal_mask, 1, 1, query, _compile=True)
    output = flex_attention(query, key, value, block_mask=block_mask)
    same(output.unbind(), want(query, key, value))
    key, value = (ragged((7, 3), 2, i).transpose(1, 2) for i in (3, 4))
    block_mask = create_nested_block_mask(causal_mask, 1, 1, query, key)
    output = flex_attention(query, key, value, block_mask=block_mask)
    same(output.unbind(), want(query, key, value))


def test_learned_tables_lse_and_holes():
    slopes = SLOPES.clone().requires_grad_()
    given = arrays(LENGTHS)
    q, k, v = (x.transpose(1, 2) for x in given)
    mod = lambda s, b, h, q, k: s + slopes[b] * (q - k)  # noqa: E731
    out, aux = flex_attention(q, k, v, mod, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True))
    aux.lse.values().sum().backward()
    found = slopes.grad.clone()
    slopes.grad = None
    for i, one in enumerate(zip(q.unbind(), k.unbind(), v.unbind(), strict=True)):
        if one[0].shape[1]:
            dense_sequence(None, mod, i, *(x.detach()[None] for x in one))[1].sum().backward()
    torch.testing.assert_close(found, slopes.grad)
    assert aux.lse.shape == aux.max_scores.shape == out.shape[:3]
    values, offsets, lengths = torch.randn(2, 12, 8), torch.tensor([0, 5, 12]), torch.tensor([3, 6])
    holes = torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=2)
    out = flex_attention(holes, holes, holes).values()
    want = [dense(*(values[None, :, s],) * 3)[0][0] for s in (slice(0, 3), slice(5, 11))]
    same([out[:, :3], out[:, 5:11]], want)


def test_layout_and_dropout_are_those_of_sequences():
    q, k, v = arrays(LENGTHS)
    att = fk.compile("causal", dropout=0.5)
    turned = att(q, k, v, layout="bshd", seed=7)
    out = att(*(x.transpose(1, 2) for x in (q, k, v)), seed=7)
    assert torch.equal(turned.values(), out.transpose(1, 2).values())
    for i, one in enumerate(zip(q.unbind(), k.unbind(), v.unbind(), strict=True)):
        if len(one[0]):
            n = len(one[0])
            where = {"origin": (i, 0, 0, 0), "sizes": (4, 4, n, n)}
            want = att(*(x.transpose(0, 1)[None] for x in one), seed=7, **where)
            torch.testing.assert_close(out.unbind()[i], want[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda q, k, v: (q, k.values()[None], v), "k is no nested tensor, and others are\n  q, k and v are nested"),
        (lambda q, k, v: (q.transpose(1, 2), k, v), "q is a nested tensor ragged in axis 1, with 4 axes"),
        (lambda q, k, v: (q, k, ragged((3, 0, 6, 28), 2).transpose(1, 2)), "k and v hold sequences of other lengths"),
        (lambda q, k, v: (q, *(ragged((3, 5), 2).transpose(1, 2),) * 2), "q, k and v hold 4, 2 and 2 sequences"),
    ],
)
def test_nested_tensors_that_do_not_fit_are_refused(change, text):
    q, k, v = (x.transpose(1, 2) for x in arrays(LENGTHS))
    with pytest.raises(fk.FrisketError, match=text):
        fk.compile("causal")(*change(q, k, v))


def test_nested_tensors_refuse_origin_check_and_block_mask():
    q, k, v = (x.transpose(1, 2) for x in arrays(LENGTHS))
    att = fk.compile("causal")
    with pytest.raises(fk.FrisketError, match="`origin` is given with nested tensors"):
        att(q, k, v, origin=(0, 0, 0, 0))
    with pytest.raises(fk.FrisketError, match="q is a nested tensor\n"):
        att.check(q, k, v)
    with pytest.raises(ValueError, match=r"for 64 queries .* hold 37 and 37 tokens\n.*create_nested_block_mask"):
        flex_attention(q, k, v, None, create_block_mask("causal", 1, 1, 64, 64, "cpu"), enable_gqa=True)
    with pytest.raises(fk.FrisketError, match=r"q is sparse, of layout torch.sparse_coo\n.*to_dense"):
        att(*(torch.zeros(1, 1, 4, 8).to_sparse(),) * 3)


SHORT = torch.zeros(12)
TABLES = {
    "score": ((None, "score + u[k]"), {}, True),
    "guarded": ((None, "score + u[k] if k < 12 else score"), {}, False),
    "function": ((None, lambda score, b, h, q, k: score + SHORT[k]), {}, True),
    "mask": (("u[k] > -1.0",), {}, True),
    "the sequence that is short": (("b == 0", "score + u[k]"), {}, False),
    "shown": (("k < w", "score + u[k]"), {"w": 13}, True),
    "hidden": (("k < w", "score + u[k]"), {"w": 12}, False),
    "of each sequence": ((None, "score + u[b, k]"), {"u": torch.zeros(2, 17)}, False),
    "one too short": ((None, "score + u[b, k]"), {"u": torch.zeros(2, 16)}, True),
    "of too few sequences": ((None, "score + u[b]"), {"u": torch.zeros(1)}, True),
}


@pytest.mark.parametrize("name", TABLES)
def test_nested_calls_refuse_tables_that_end_before_a_sequence(name):
    how, values, refused = TABLES[name]
    values = values if name == "function" else {"u": SHORT, **values}
    q = torch.nested.nested_tensor([torch.zeros(n, 1, 4) for n in (5, 17)], layout=torch.jagged).transpose(1, 2)
    if not refused:
        fk.attention(q, q, q, *how, **values, backend="aten")
        return
    with pytest.raises(fk.ParameterError, match=r"^table `\w+` has \d+ entries on axis \d and is read at `[bk]` = 0"):
        fk.attention(q, q, q, *how, **values, backend="aten")


def test_nested_calls_with_short_tables_take_transforms():
    q = torch.nested.nested_tensor([torch.zeros(n, 1, 4) for n in (5, 17)], layout=torch.jagged).transpose(1, 2)

    def loss(u):
        fk.attention(q, q, q, None, "score + u[k]", u=u, backend="aten")
        return u.sum()

    assert torch.func.grad(loss)(torch.zeros(17)).shape == (17,)
    with pytest.raises(fk.ParameterError, match="table `u` has 12 entries"):
        torch.func.grad(loss)(SHORT)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("backend", ["aten", pytest.param("cpp", marks=NATIVE)])
def test_nested_tensors_that_are_not_jagged_are_refused(backend):
    """They were an internal error of torch, which cannot tell their shape."""
    att, q = fk.compile("causal", ALIBI, backend=backend), torch.randn(1, 2, 32, DIM)
    with torch.no_grad():
        for _ in range(3):
            att(q, q, q, slope=torch.ones(2))  # the third by a prepared runner
        old = torch.nested.nested_tensor([q[0], q[0, :, :5]])
        with pytest.raises(fk.ShapeError, match="q is a nested tensor\n  attention takes q, k and v all nested"):
            att(old, old, old, slope=torch.ones(2))
