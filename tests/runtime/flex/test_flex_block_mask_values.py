"""frisket.flex.BlockMask as a value: equality, pickle, algebra, pytrees, graphs of torch."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from support.flex_masks import DOC, S, causal, dense, same
from torch.utils import _pytree as pytree

import frisket as fk
import frisket.flex as ours


def test_equality_hash_pickle():
    table = torch.rand(S, S) < 0.5
    kinds = [
        ours.create_block_mask(lambda b, h, q, k: (q >= k) & table[q, k], 2, None, S, S, "cpu", 8),
        ours.create_block_mask("causal & k < 9", None, None, S, S, "cpu", 8),
        ours.create_block_mask(causal, None, None, S, 12, "cpu", (8, 4), separate_full_blocks=False),
        ours.create_block_mask(causal, 1, 1, S, S, "cpu", 8)[:, :, 1:],
    ]
    listed = ours.BlockMask.from_kv_blocks(kinds[0].kv_num_blocks, kinds[0].kv_indices, BLOCK_SIZE=8, mask_mod=causal)
    for one in (*kinds, listed):
        back = pickle.loads(pickle.dumps(one))
        assert back == one
        assert hash(back) == hash(one)
        same(back, one)
        assert torch.equal(dense(back), dense(one))
        assert torch.equal(
            ours.create_mask(back.mask_mod, *one.shape, "cpu"), ours.create_mask(one.mask_mod, *one.shape, "cpu")
        )
    assert len({*kinds, listed, *kinds}) == 5
    assert kinds[0] != ours.create_block_mask(lambda b, h, q, k: (q >= k) & table[q, k], None, None, S, S, "cpu", 8)
    assert kinds[0] != "a text"
    alike = ours.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, S, 12, "cpu", (8, 4), separate_full_blocks=False
    )
    assert kinds[2] == alike


def test_block_masks_combine_by_and_or_and_not():
    left = ours.create_block_mask(causal, None, None, S, S, "cpu", 8)
    doc = DOC.flip(0).contiguous()

    def document(DOC):
        return lambda b, h, q, k: DOC[q] == DOC[k]

    first, second = (ours.create_block_mask(document(d), 2, None, S, S, "cpu", 8) for d in (DOC, doc))
    x, y, z = map(dense, (left, first, second))
    for made, wanted in (
        (left & first, x & y), (first | second, y | z), (~left, ~x), (~(first & second) | left, ~(y & z) | x),
        (left & "k < 5", x & (torch.arange(S) < 5)), (left | fk.mask("k < 5"), x | (torch.arange(S) < 5)),
    ):  # fmt: skip
        assert torch.equal(dense(made)[:1], wanted[:1])
        assert made.shape[0] == max(wanted.shape[0], 1)
        same(made, theirs.create_block_mask(lambda b, h, q, k, w=wanted: w[b, h, q, k], *made.shape, "cpu", 8))
        assert torch.equal(theirs.create_mask(made.mask_mod, *made.shape, "cpu"), wanted.expand(made.shape))
    one, two = (ours.create_block_mask(t, n, None, 4, 4, "cpu", 2) for t, n in (("b < B", None), ("k < 2", 2)))
    for made in (one & two, two & one):  # each keeps the sizes it was made for
        assert torch.equal(dense(made), (torch.arange(2) < 1)[:, None, None, None] & (torch.arange(4) < 2).expand(4, 4))
    with pytest.raises(fk.ShapeError, match=r"masks of \(24, 24\) in tiles of \(8, 8\) and of \(24, 24\) in tiles of"):
        left & ours.create_block_mask(causal, None, None, S, S, "cpu", 4)


def test_a_pytree_of_its_lists_and_tensors():
    made = ours.create_block_mask(lambda b, h, q, k: DOC[q] == DOC[k], None, None, S, S, "cpu", 8)
    leaves, spec = pytree.tree_flatten(made)
    assert len(leaves) == 9
    assert leaves[-1] is DOC
    back = pytree.tree_unflatten(leaves, spec)
    assert back == made
    same(back, made)
    again = ours.create_block_mask(lambda b, h, q, k: DOC[q] == DOC[k], None, None, S, S, "cpu", 8)
    assert pytree.tree_flatten(again)[1] == spec
    paths = [pytree.keystr(p) for p, _ in pytree.tree_flatten_with_path(made)[0]]
    assert (paths[0], paths[-1]) == (".kv_num_blocks", ".DOC")
    moved = pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), made)
    assert (moved.device.type, moved.tensors["DOC"].device.type) == ("meta", "meta")
    number = ours.create_block_mask(fk.mask("q - k < w", w=5), None, None, S, S, "cpu", 8)
    assert pytree.tree_map(lambda x: x, number) == number
    assert pytree.tree_flatten(number)[1] != pytree.tree_flatten(made)[1]
    listed = ours.BlockMask.from_kv_blocks(made.kv_num_blocks, made.kv_indices, BLOCK_SIZE=8, mask_mod=causal)
    assert pytree.tree_map(lambda x: x, listed) == listed


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("make", [causal, "causal & k < 100"])
def test_torchs_own_compiled_attention_reads_it(make):
    made = ours.create_block_mask(make, None, None, 256, 256, "cpu")
    q = torch.randn(1, 1, 256, 16)
    run = torch.compile(lambda q, m: theirs.flex_attention(q, q, q, block_mask=m), backend="eager", fullgraph=True)
    torch.testing.assert_close(run(q, made), theirs.flex_attention(q, q, q, block_mask=made))


def test_block_mask_can_be_made_in_a_full_graph():
    def step(x):
        return x * ours.create_block_mask(causal, None, None, 256, 256, device="cpu").kv_num_blocks.sum()

    assert torch.compile(step, backend="eager", fullgraph=True)(torch.ones(1)) == step(torch.ones(1))


def test_making_one_inside_a_compiled_function():
    made = torch.compile(ours.create_block_mask, backend="eager")(causal, None, None, 256, 256, "cpu")
    assert made == ours.create_block_mask(causal, None, None, 256, 256, "cpu")


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_takes_one(strict):
    class Net(torch.nn.Module):
        def forward(self, q, mask):
            return ours.flex_attention(q, q, q, block_mask=mask)

    def mask(doc):
        return ours.create_block_mask(lambda b, h, q, k: (q >= k) & (doc[q] == doc[k]), None, None, S, S, "cpu", 8)

    q, doc = torch.randn(1, 2, S, 16), DOC.flip(0).contiguous()
    program = torch.export.export(Net(), (q, mask(DOC)), strict=strict).module()
    for one in (mask(DOC), mask(doc)):  # captured tensors are inputs of the program
        torch.testing.assert_close(program(q, one), Net()(q, one))
