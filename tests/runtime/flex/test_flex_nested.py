"""create_nested_block_mask beside the dense mask of every sequence, on the diagonal."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as theirs

import frisket as fk
import frisket.flex as ours
from frisket.runtime.flex.tensor_mask import LISTS

OFFSETS = torch.tensor([3, 0, 5, 1])
MASKS = [
    lambda b, h, q, k: q >= k,
    lambda b, h, q, k: (q + OFFSETS[b] >= k) & (q - k < 9 + h),
    lambda b, h, q, k: (k < 3) | (q >= k),
]


def nested(lengths):
    return torch.nested.nested_tensor([torch.zeros(n, 2, 8) for n in lengths], layout=torch.jagged).transpose(1, 2)


def packed(fn, q_lens, kv_lens, heads):
    out = torch.zeros(1, heads, sum(q_lens), sum(kv_lens), dtype=torch.bool)
    q = k = 0
    for i, (m, n) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if m and n:
            one = theirs.create_mask(lambda b, h, q, k, i=i: fn(b + i, h, q, k), 1, heads, m, n, "cpu")
            out[:, :, q : q + m, k : k + n] = one
        q, k = q + m, k + n
    return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fn", MASKS)
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"), [([7, 20, 1, 12], None), ([7, 20, 1, 12], [9, 5, 30, 4]), ([40, 0, 3, 8], None)]
)
@pytest.mark.parametrize("block", [8, (16, 5)])
def test_sequences_see_themselves_alone(fn, q_lens, kv_lens, block):
    q_nt, kv_nt = nested(q_lens), None if kv_lens is None else nested(kv_lens)
    made = ours.create_nested_block_mask(fn, 1, 2, q_nt, kv_nt, block)
    dense = packed(fn, q_lens, kv_lens or q_lens, 2)
    wanted = theirs.create_block_mask(lambda b, h, q, k: dense[b, h, q, k], *dense.shape, "cpu", block)
    assert made.shape == dense.shape
    for name in LISTS:
        assert torch.equal(getattr(made, name), getattr(wanted, name)), name
    assert torch.equal(theirs.create_mask(made.mask_mod, *dense.shape, "cpu"), dense)
    assert torch.equal(torch.from_numpy(made.mask.dense(*dense.shape[2:], heads=2)), dense)


def test_a_text_knows_the_lengths_of_its_sequence():
    made = ours.create_nested_block_mask("q + KV_LEN - Q_LEN >= k", 1, 1, nested([3, 5]), nested([6, 4]), 4)
    dense = torch.zeros(8, 10, dtype=torch.bool)
    dense[:3, :6], dense[3:, 6:] = torch.ones(3, 6).tril(3) > 0, torch.ones(5, 4).tril(-1) > 0
    assert torch.equal(torch.from_numpy(made.mask.dense(8, 10))[0, 0], dense)


def test_holes_see_nothing():
    values = torch.zeros(12, 4)
    holes = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 5, 12]), torch.tensor([3, 6]))
    made = ours.create_nested_block_mask("true", 1, 1, holes, BLOCK_SIZE=4)
    dense = torch.zeros(12, 12, dtype=torch.bool)
    dense[:3, :3] = dense[5:11, 5:11] = True
    assert torch.equal(torch.from_numpy(made.mask.dense(12, 12))[0, 0], dense)


def test_many_sequences_are_laid_out_by_their_borders():
    lengths = torch.randint(10, 1500, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    jagged = torch.nested.nested_tensor([torch.zeros(n, 1) for n in lengths], layout=torch.jagged)
    made = ours.create_nested_block_mask(lambda b, h, q, k: q >= k, 1, 1, jagged)
    assert made.layout.visible_pairs == sum(n * (n + 1) // 2 for n in lengths)
    assert made.layout.analysis.looked_at < sum(lengths) * 130


@pytest.mark.parametrize(
    ("q_nt", "kv_nt", "text"),
    [
        (torch.zeros(2, 2, 5, 8), None, r"q_nt is of layout torch.strided\n  it is torch.nested.nested_tensor"),
        (nested([3, 4]), 7, "kv_nt is int"),
        (nested([3, 4]), nested([3, 4, 5]), r"q_nt holds 2 sequences, kv_nt 3\n  each query sequence has its keys"),
    ],
)
def test_tensors_that_are_not_jagged(q_nt, kv_nt, text):
    with pytest.raises(ValueError, match=text) as e:
        ours.create_nested_block_mask("causal", 1, 1, q_nt, kv_nt)
    assert isinstance(e.value, fk.FrisketError)


SHORT = torch.zeros(2, 20)
BESIDES = {
    "score": lambda q, k: ours.flex_attention(q, k, k, lambda s, b, h, i, j: s + SHORT[b, j - i + 10]),
    "score under a mask": lambda q, k: ours.flex_attention(
        q, k, k, lambda s, b, h, i, j: s + SHORT[b, j - i + 10],
        ours.create_nested_block_mask(lambda b, h, i, j: i <= j, 1, 1, q, k),
    ),
    "mask": lambda q, k: ours.create_nested_block_mask(lambda b, h, i, j: SHORT[b, j - i + 10] >= 0, 1, 1, q, k),
}  # fmt: skip


@pytest.mark.parametrize("way", BESIDES)
@pytest.mark.parametrize("longer", [0, 3])  # keys have other offsets
def test_nested_lookup_errors_count_inside_a_sequence(way, longer):
    with pytest.raises(IndexError) as caught:
        BESIDES[way](nested([5, 17]), nested([5, 17 + longer]))
    said = str(caught.value).splitlines()
    assert said == [
        "`SHORT[b, k - q + 10]` reads `SHORT` at 20 on axis 1, which has entries 0..19, at query 0, key 10 of "
        "sequence 1 (h 0)",
        "  hide such positions first, `(k - q + 10 < 20) & ...`, or clamp the index: `(k - q + 10).clamp(0, 19)`",
    ]


def test_flex_lookup_errors_keep_names_that_two_tables_share():
    q_offsets = torch.tensor([0, 3, 22])
    with pytest.raises(IndexError, match=r"^`q_offsets\[k - q\]` reads `q_offsets` at -?\d+ .* of sequence \d"):
        ours.flex_attention(*[nested([5, 17])] * 3, lambda s, b, h, i, j: s + q_offsets[j - i])
    x, wide, short = torch.zeros(1, 1, 25, 8), torch.ones(25), torch.ones(20)
    seen, added = (
        (lambda t: lambda b, h, i, j: t[i] > j - 9)(wide),
        (lambda t: lambda s, b, h, i, j: s + t[i - j])(short),
    )
    held = ours.create_block_mask(seen, 1, 1, 25, 25, "cpu")  # both call their table `t`
    with pytest.raises(IndexError, match=r"^`t\[q - k\]` reads `t` at .* on axis 0"):
        ours.flex_attention(x, x, x, added, held)
