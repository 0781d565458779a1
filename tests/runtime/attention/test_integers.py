"""Lengths as people have them: numpy's ints, arrays and tensors without axes, sums of lengths, symbolic sizes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import frisket as fk  # noqa: E402
import frisket.flex as flex  # noqa: E402


class Index:
    def __init__(self, n):
        self.n = n

    def __index__(self):
        return self.n


def jax_int(n):
    return pytest.importorskip("jax").numpy.asarray(n)


KINDS = {
    "numpy": np.int64, "numpy uint8": np.uint8, "numpy array": np.array, "torch": torch.tensor,
    "torch int32": lambda n: torch.tensor([n - 1, 1], dtype=torch.int32).sum(), "jax": jax_int, "index": Index,
}  # fmt: skip


ALWAYS = {"numpy", "torch int32", "index"}


@pytest.mark.parametrize("kind", [pytest.param(n, marks=[] if n in ALWAYS else pytest.mark.exhaustive) for n in KINDS])
def test_lengths_may_be_any_kind_of_integer(kind):
    i = KINDS[kind]
    m = fk.mask("causal & window(5)")
    want = m.layout(24, 24, batch=2, heads=3, block=(8, 4), sizes=(2, 3, 32, 32))
    found = m.layout(i(24), i(24), batch=i(2), heads=i(3), block=(i(8), i(4)), sizes=tuple(map(i, (2, 3, 32, 32))))
    assert str(found) == str(want)
    assert type(found.q_len) is int
    assert m.layout(i(24), i(24), block=i(8)).counts == m.layout(24, 24, block=8).counts
    assert np.array_equal(m.dense(i(7), i(9)), m.dense(7, 9))
    assert m.visible_pairs(i(24), i(24)) == m.visible_pairs(24, 24)
    for ask in (m.is_empty, m.empty_rows, lambda *n: m.implies("causal", *n), lambda *n: m.equivalent("causal", *n)):
        assert ask(i(24), i(24)) == ask(24, 24)
    att, q = fk.compile("q + 1 >= k", tile=(i(16), i(16)), backend="library"), torch.randn(1, 2, 24, 8)
    plan = att.plan(i(24), i(24), i(1), i(2))
    where = {"origin": (0, 0, i(3), 0), "sizes": (1, 2, i(32), i(32))}
    assert torch.equal(att(q, q, q, plan=plan), att(q, q, q))
    assert torch.equal(att(q, q, q, **where), att(q, q, q, origin=(0, 0, 3, 0), sizes=(1, 2, 32, 32)))
    assert att.stages(q_len=i(64), heads=i(2), head_dim=i(16)).plan is not None
    made = flex.create_block_mask(m, i(1), i(2), i(24), i(24), "cpu", i(8))
    assert made == flex.create_block_mask(m, 1, 2, 24, 24, "cpu", 8)
    assert made._adjust(i(16), i(16)).shape == (1, 2, 16, 16)
    made.seq_lengths = (i(20), i(20))
    assert made.shape == (1, 2, 20, 20)
    assert flex.create_mask(m, i(1), None, i(5), i(6), "cpu").shape == (1, 1, 5, 6)
    lists = made.kv_num_blocks, made.kv_indices
    assert flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=i(8), seq_lengths=(i(20), i(20))).shape[2:] == (20, 20)


@pytest.mark.parametrize("wrong", [24.0, True, "24", np.array([24]), torch.tensor([24]), torch.tensor(24.0), None])
def test_lengths_that_are_not_integers_are_refused(wrong):
    for ask in (lambda n: fk.mask("causal").layout(n, 24), lambda n: fk.compile("causal").plan(24, n),
                lambda n: flex.create_block_mask("causal", 1, 1, n, 24, "cpu")):  # fmt: skip
        with pytest.raises(fk.ShapeError):
            ask(wrong)


@pytest.mark.exhaustive
def test_lengths_may_be_symbolic_sizes_of_torch():
    def run(q, lengths):
        mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, q.shape[2], q.shape[2], "cpu", 16)
        return flex.flex_attention(q, q, q, block_mask=mask)

    compiled = torch.compile(run, backend="eager", fullgraph=True, dynamic=True)
    for n in (20, 33, 50):
        q = torch.randn(1, 2, n, 8)
        torch.testing.assert_close(compiled(q, None), run(q, None))
