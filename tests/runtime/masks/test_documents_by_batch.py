"""Documents of each batch entry: offsets and ids against a dense mask made of loops."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import frisket as fk

LENGTH, INNER = 48, "causal & (window(6) | sinks(2))"
OFF = np.array([[0, 7, 20, 31, 48], [0, 30, 48, 48, 48]])
IDS = np.stack([np.searchsorted(row, np.arange(LENGTH), "right") for row in OFF])
START = np.stack([np.searchsorted(row, row) for row in IDS])
BY_OFFSETS, BY_IDS = f"document_by_batch(off, {INNER})", f"same_by_batch(ids, start, {INNER})"
VALUES = {BY_OFFSETS: {"off": OFF}, BY_IDS: {"ids": IDS, "start": START}}
WANT = np.zeros((2, 1, LENGTH, LENGTH), bool)
for entry, row in enumerate(OFF.tolist()):
    for first, stop in pairwise(row):
        for q in range(first, stop):
            WANT[entry, 0, q, [k for k in range(first, q + 1) if q - k < 6 or k - first < 2]] = True
texts = pytest.mark.parametrize("text", VALUES)


def arrays(seed=0, shape=(2, LENGTH, 2, 16)):
    return np.random.default_rng(seed).standard_normal((4, *shape)).astype(np.float32)


def dense_gradients(q, k, v, dout):
    """Output and gradients in float64, with torch's own softmax over `WANT`."""
    q, k, v, dout = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (q, k, v, dout))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
    weights = torch.softmax(scores.masked_fill(~torch.tensor(WANT), -torch.inf), -1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    return [x.detach().numpy() for x in (out, *torch.autograd.grad(out, (q, k, v), dout))]


def torch_gradients(text, backend, as_values=lambda x: x):
    q, k, v, dout = (torch.tensor(x, requires_grad=True) for x in arrays())
    values = {n: as_values(x) for n, x in VALUES[text].items()}
    out = fk.compile(text, backend=backend)(q, k, v, layout="bshd", **values)
    return [x.detach().numpy() for x in (out, *torch.autograd.grad(out, (q, k, v), dout))]


@texts
def test_documents_by_batch_show_what_loops_show(text):
    mask = fk.mask(text, **VALUES[text])
    np.testing.assert_array_equal(mask.dense(LENGTH, LENGTH, 2, 1), WANT)
    layout = mask.layout(LENGTH, LENGTH, batch=2, block=(8, 8))
    seen = WANT.reshape(2, 6, 8, 6, 8).sum((2, 4))
    assert layout.visible_pairs == WANT.sum()
    assert [layout.counts.empty, layout.counts.full] == [(seen == 0).sum(), (seen == 64).sum()]


@texts
@pytest.mark.parametrize("as_values", [np.asarray, torch.tensor])
def test_documents_by_batch_train_in_torch(text, as_values):
    for have, want in zip(torch_gradients(text, "aten", as_values), dense_gradients(*arrays()), strict=True):
        np.testing.assert_allclose(have, want, atol=2e-5)


@texts
@pytest.mark.exhaustive
def test_documents_by_batch_train_in_native_kernels(text):
    for have, want in zip(torch_gradients(text, "cpp"), dense_gradients(*arrays()), strict=True):
        np.testing.assert_allclose(have, want, atol=2e-5)


@texts
@pytest.mark.sampled(3)
def test_documents_by_batch_train_under_jit(text):
    att = fk.compile(text, backend="xla")

    @jax.jit
    def run(q, k, v, dout, values):
        out, pull = jax.vjp(lambda *x: att(*x, layout="bshd", **values), q, k, v)
        return out, *pull(dout)

    values = {n: jnp.asarray(x) for n, x in VALUES[text].items()}
    for have, want in zip(run(*arrays(), values), dense_gradients(*arrays()), strict=True):
        np.testing.assert_allclose(have, want, atol=2e-5)


@pytest.mark.parametrize("text", ["document_by_batch(off)", "document_by_batch(off, causal)"])
@pytest.mark.parametrize(("off", "error"), [
    ([[0, 4, 9], [3, 4, 9]], r"`off\[b, 0\] == 0` does not hold for off=int64\[2, 3\] at b = 1; offsets begin with 0"),
    ([[5, 4], [4, 5]], r"at b = 0; .*for lengths give numpy.cumsum of each row, after a 0"),
    ([[0, 4, 9], [0, 9, 4]], r"at b = 1; give where documents start, in order, and the end"),
    ([0, 4, 9], r"for .*\[length\] write .*`document\(off\)`"),
])  # fmt: skip
def test_offsets_by_batch_are_checked_when_bound(text, off, error):
    with pytest.raises(fk.FrisketError, match=error):
        fk.mask(text, off=off)
    with pytest.raises(fk.FrisketError, match=error):
        fk.compile(text)(*(torch.zeros(2, 1, 9, 8) for _ in range(3)), off=torch.tensor(off))


@pytest.mark.parametrize(("start", "error"), [
    (IDS, r"does not hold for .*ids=int64\[2, 48\] at b = 0, q = 0; .*torch.searchsorted\(t, t\)"),
    (np.minimum(START + 1, np.arange(LENGTH)), "at b = 0, q = 1; the second table has first positions of ids"),
    (START * 0, "at b = 0, q = 7; the second table has first positions"),
])  # fmt: skip
def test_starts_of_ids_are_checked_when_bound(start, error):
    with pytest.raises(fk.ParameterError, match=error):
        fk.mask(BY_IDS, ids=IDS, start=start)


def test_traced_offsets_by_batch_are_facts_checked_on_request(monkeypatch):
    att, plans = fk.compile("document_by_batch(off)", backend="xla"), []

    def run(off):
        plans.append(att.plan(LENGTH, LENGTH, batch=2, heads=2, off=off).unchecked)
        return att(*arrays()[:3], layout="bshd", off=off)

    jax.eval_shape(run, jnp.asarray(OFF))
    assert plans == [("`off[b, 0] == 0`", "`all(j in 1..extent(off, 1): off[b, j - 1] <= off[b, j])`")]
    monkeypatch.setenv("FRISKET_CHECK", "1")

    def checked(off):
        jax.jit(lambda off: att(*arrays()[:3], layout="bshd", off=off))(off).block_until_ready()
        jax.effects_barrier()

    with pytest.raises(Exception, match="does not hold for off=int32"):
        checked(jnp.asarray(OFF[:, ::-1]))


def test_attention_of_one_call_takes_documents_by_batch():
    q, k, v, _ = (torch.tensor(x) for x in arrays())
    for text, values in VALUES.items():
        out = fk.attention(
            q, k, v, text, layout="bshd", backend="aten", **{n: torch.tensor(x) for n, x in values.items()}
        )
        np.testing.assert_allclose(out, dense_gradients(*arrays())[0], atol=1e-5)


def test_tokens_past_the_last_offset_are_hidden():
    dense = fk.mask("document_by_batch(off)", off=[[0, 3, 6], [0, 5, 5]]).dense(8, 8, 2, 1)[:, 0]
    assert [int(x.sum()) for x in dense] == [18, 25]
    assert not dense[:, 6:].any()
    assert not dense[:, :, 6:].any()


@pytest.mark.exhaustive
def test_hundreds_of_documents_in_a_row_have_a_plan():
    off = np.arange(0, 2402, 8)[None]
    assert fk.mask("document_by_batch(off)", off=off).layout(2400, 2400, block=(64, 64)).counts.partial == 38
    assert fk.compile("document_by_batch(off)").plan(2400, 2400, off=off).work((64, 64)) is not None


def test_first_positions_may_be_those_of_the_queries_alone():
    """The checks of the library ask no query beyond the last: ids are of all keys, `start` of 20 queries."""
    mask = fk.mask(BY_IDS, ids=IDS, start=START[:, :20])
    np.testing.assert_array_equal(mask.dense(20, LENGTH, 2, 1), WANT[:, :, :20])
    with pytest.raises(fk.ParameterError, match=r"does not hold for .* at b = 1, q = 3"):
        fk.mask(BY_IDS, ids=IDS, start=START[:, :20] + (np.arange(20) == 3) * [[0], [1]]).layout(20, LENGTH, batch=2)
