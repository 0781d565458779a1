"""The table's callables in attention, beside flex_attention itself."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from support.torch.callables import mask_case, score_case  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

import frisket as fk  # noqa: E402
from frisket.dsl.errors import BackwardError  # noqa: E402

PAIRS = [
    ("causal", "alibi"), ("sliding window", "softcap"), ("document", "relative table"), ("vsa top-k", "mla rope"),
    ("shared prefix", "three biases"), ("noop", "causal"), ("padding", "chained"), ("nested", "twice"),
    ("two biases", "identity"), ("longformer", "sigmoid gate"),
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mask", "score"), PAIRS)
def test_as_flex_attention_computes_it(mask, score):
    hide, change = mask_case(mask), score_case(score)
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 4, 24, 16, generator=g) for _ in range(3))
    block = create_block_mask(hide.fn, 2, 4, 24, 24, device="cpu")
    with torch.no_grad():
        want = flex_attention(q, k, v, score_mod=change.fn, block_mask=block)
        got = fk.attention(q, k, v, mask=hide.fn, score=change.fn)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", ["function", "text"])
def test_a_mask_reads_a_learned_table_as_it_is_at_the_call(where):
    q, table = torch.randn(1, 2, 8, 16), torch.nn.Parameter(torch.arange(8.0))
    reads = lambda q, k: (table[q] >= table[k]) | (q == k)  # noqa: E731
    for entries in (table.detach(), table.detach().flip(0), torch.zeros(8)):
        table.data = entries
        mask = reads if where == "function" else fk.mask("t[q] >= t[k] | q == k", t=table)
        shown = (entries[:, None] >= entries) | torch.eye(8).bool()
        want = torch.nn.functional.scaled_dot_product_attention(q, q, q, shown)
        torch.testing.assert_close(fk.attention(q, q, q, mask), want)


def test_a_learned_table_in_mask_and_score_is_refused():
    slopes = torch.nn.Parameter(torch.ones(4))
    q = torch.randn(1, 4, 8, 16)
    score = fk.score(lambda s, b, h, q, k: s + slopes[h] * (k - q))
    att = fk.compile(lambda b, h, q, k: slopes[h] > 0, score)
    with torch.no_grad():
        att(q, q, q)
    with pytest.raises(
        BackwardError, match="`slopes` requires a gradient, and both the mask and the score mod read it"
    ):
        att(q, q, q)
    att(q, q, q, slopes=slopes.detach())
    assert fk.attention(q, q, q, lambda b, h, q, k: slopes[h] > 0).isfinite().all()  # data, in a mask


@pytest.mark.parametrize("right", [False, True])
def test_searchsorted_at_the_first_position_and_past_the_last(right):
    off = torch.tensor([0, 5, 9])

    def same(b, h, q, k):
        return torch.searchsorted(off, q, right=right) == torch.searchsorted(off, k, right=right)

    place = torch.searchsorted(off, torch.arange(14), right=right)
    q = torch.randn(1, 1, 14, 16)
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=place[:, None] == place)
    torch.testing.assert_close(fk.attention(q, q, q, mask=same), want, rtol=1e-4, atol=1e-5)
