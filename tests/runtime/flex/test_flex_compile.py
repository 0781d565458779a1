"""flex_attention in one graph of torch.compile, and in exported programs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.attention.flex_attention as theirs  # noqa: E402

from frisket.flex import AuxRequest, create_block_mask, flex_attention  # noqa: E402


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setenv("FRISKET_BACKEND", "aten")


def counting(backend):
    """A backend that counts its graphs."""
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend(backend)


def arrays(s=24, kv_heads=4, batch=2):
    g = torch.Generator().manual_seed(4)
    return [torch.randn(batch, h, s, 16, generator=g, requires_grad=True) for h in (4, kv_heads, kv_heads)]


def same(found, want):
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


class Model(torch.nn.Module):
    """A score_mod as models write it: inside forward, over parameters, buffers, sizes and numbers."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.slopes = torch.nn.Parameter(torch.rand(4, generator=g))
        self.relative = torch.nn.Parameter(torch.randn(127, generator=g))
        self.register_buffer("document", torch.arange(64, dtype=torch.int32) // 9)
        self.cap = 5.0

    def forward(self, q, k, v, block_mask):
        rows = torch.arange(q.shape[2]) * 0.01  # of the graph
        scale = self.slopes.exp()

        def score_mod(score, b, h, q_idx, kv_idx):
            score = score + scale[h] * (kv_idx - q_idx) + self.relative[q_idx - kv_idx + 63] - rows[q_idx] ** 2
            score = torch.where(self.document[q_idx] == self.document[kv_idx], score, -float("inf"))
            return self.cap * torch.tanh(score / self.cap) + torch.tensor(0.5)

        return flex_attention(q, k, v, score_mod, block_mask, return_aux=AuxRequest(lse=True))


def gradients(model, given, block_mask):
    for x in (*given, *model.parameters()):
        x.grad = None
    out, aux = model(*given, block_mask)
    (out.square().sum() + aux.lse.sum()).backward()
    return [out, aux.lse, *(x.grad for x in (*given, model.slopes, model.relative))]


def window(s, make=create_block_mask, width=9):
    return make(lambda b, h, q, k: (q >= k) & (q - k < width), None, None, s, s, device="cpu")


def test_compiled_flex_attention_has_one_graph_per_mask_type():
    counter = counting("aot_eager")
    model = Model()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for s in (24, 40, 64):
        for make in (create_block_mask, theirs.create_block_mask):
            block_mask = window(s, make)
            want = gradients(model, arrays(s), block_mask)
            for found, w in zip(gradients(compiled, arrays(s), block_mask), want, strict=True):
                same(found, w)
    calls = [[str(n.target) for n in graph.graph.nodes].count("frisket_flex_attention") for graph in counter.graphs]
    assert [n for n in calls if n] == [1, 1]  # torch's BlockMask is another graph


@pytest.mark.exhaustive
def test_sizes_that_are_known_beside_a_batch_that_varies():
    """Dynamo takes a number for no element of a tuple with a size that varies."""
    cache = torch.randn(2, 4, 16, 8)

    def sliced(q):
        block_mask = create_block_mask(lambda b, h, q, k: q >= k + b, q.shape[0], None, q.shape[2], 16, device="cpu")
        return flex_attention(q, cache, cache, block_mask=block_mask[:])

    for run in (sliced, lambda q: flex_attention(q, cache, cache)):
        q = torch.randn(2, 4, 24, 8)
        same(torch.compile(run, backend="eager", fullgraph=True, dynamic=True)(q), run(q))


def test_unbacked_lengths_become_checks_of_the_graph():
    """torch does so from 2.14 on; before, such lengths do not compile with a mask."""
    block_mask = create_block_mask("causal", None, None, 64, 64, "cpu", 32)
    q = torch.randn(1, 2, 64, 16)
    torch._dynamo.decorators.mark_unbacked(q, 2)
    run = torch.compile(lambda q: flex_attention(q, q, q, block_mask=block_mask), backend="eager", fullgraph=True)
    torch.testing.assert_close(run(q), flex_attention(*[q.clone()] * 3, block_mask=block_mask))


def test_flex_attention_itself_compiled():
    counter = counting("eager")
    compiled = torch.compile(flex_attention, backend=counter, fullgraph=True, dynamic=True)
    q, k, v = arrays(kv_heads=2)
    slopes, document = torch.rand(4), torch.arange(24) // 5
    documents = create_block_mask(lambda b, h, q, k: document[q] == document[k], None, None, 24, 24, device="cpu")

    def alibi(slopes, factor):
        return lambda score, b, h, q_idx, kv_idx: score + factor * slopes[h] * (q_idx - kv_idx)

    how = {"enable_gqa": True, "scale": 0.3}
    for block_mask, factor in ((None, 0.5), (documents, 0.5), (documents, 0.25)):
        for tensor in (slopes, slopes + 1):
            mod = alibi(tensor, factor)
            same(compiled(q, k, v, mod, block_mask, **how), flex_attention(q, k, v, mod, block_mask, **how))
    before = counter.frame_count
    document.copy_(torch.arange(24) // 3)
    same(compiled(q, k, v, mod, documents, **how), flex_attention(q, k, v, mod, documents, **how))
    other = torch.arange(24) // 7
    documents = create_block_mask(lambda b, h, q, k: document[q] == other[k], None, None, 24, 24, device="cpu")
    assert counter.frame_count == before
    same(compiled(q, k, v, None, documents, **how), flex_attention(q, k, v, None, documents, **how))
    for key in ("BLOCK_M", "BLOCKM"):
        if key == "BLOCKM":
            with pytest.raises(Exception, match="no kernel option 'BLOCKM'; did you mean 'BLOCK_M'"):
                compiled(q, k, v, kernel_options={key: 64}, **how)
        else:
            same(compiled(q, k, v, kernel_options={key: 64}, **how), flex_attention(q, k, v, **how))
    with pytest.raises(Exception, match="returns an Int"):
        compiled(q, k, v, lambda s, b, h, q, k: q - k, **how)
    with pytest.raises(Exception, match="enable_gqa=True shares"):
        compiled(q, k, v)


def test_compiled_flex_attention_takes_manual_tile_lists():
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    q, k, v = arrays()
    made = window(24)
    listed = type(made).from_kv_blocks(
        made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices,
        mask_mod=lambda b, h, q, k: q >= k, seq_lengths=(24, 24),
    )  # fmt: skip
    given = q, k[:1], v[:1], None, listed
    same(compiled(*given), flex_attention(*given))
    same(compiled(*given), flex_attention(*given[:4], window(24, width=99)))


@pytest.mark.parametrize("strict", [False, True])
def test_flex_attention_can_be_exported(strict):
    class Exported(Model):
        def forward(self, q, k, v):
            return super().forward(q, k, v, block_mask)[0]

    block_mask, model = window(24), Exported()
    given = tuple(x.detach() for x in arrays())
    program = torch.export.export(model, given, strict=strict)
    assert [n.target for n in program.graph.nodes if "frisket" in str(n.target)][:1] == [
        torch.ops.frisket.attend.default
    ]
    same(program.module()(*given), model(*given))


@pytest.mark.exhaustive
def test_flex_attention_alone_has_a_graph():
    """An integer of the graph inside a score_mod, and what has no values there."""

    def run(q, n):
        return flex_attention(q, q, q, lambda s, b, h, q_idx, kv_idx: s + (q_idx - kv_idx) % n)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    q = arrays()[0]
    for n in (3, 5, 7):
        same(compiled(q, n), run(q, n))
    table = torch.arange(5.0)
    with pytest.raises(Exception, match="computes with the values of a captured tensor"):
        torch.compile(flex_attention, backend="eager", fullgraph=True)(
            q, q, q, lambda s, b, h, q_idx, kv_idx: s + table.cumsum(0)[q_idx % 5]
        )
