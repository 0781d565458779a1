"""Run by test_triton_interpret.py with TRITON_INTERPRET=1: values that are the first numbers of keys are read with the
keys, as in multi-head latent attention (MLA); all results against float64."""

import numpy as np
import pytest
import torch

import frisket as fk
from frisket.runtime.backends.triton import grids

LENGTHS, ROOM = (300, 133), 320  # tokens: up to 256 the forward is as good


@pytest.fixture
def known(monkeypatch):
    """Whether the kernels of each call knew that values are numbers of keys."""
    seen = []
    emit = grids.triton_forward.emit_decode

    def spy(plan, target, dims, *args, **flags):
        seen.append(dims.values_in_keys)
        return emit(plan, target, dims, *args, **flags)

    monkeypatch.setattr(grids.triton_forward, "emit_decode", spy)
    return seen


def wanted(q, k, v, visible):
    """Attention in float64: q [batch, heads, queries, dim], k and v with one head, visible [batch, queries, keys]."""
    q, k, v = (x.double().nan_to_num() for x in (q, k, v))
    score = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(~visible[:, None], -torch.inf)
    return torch.softmax(score, 3) @ v


def shown(queries):
    """Pairs of the last queries of each sequence."""
    ends, at = torch.tensor(LENGTHS), torch.arange(ROOM)
    return at <= (ends[:, None] - queries + torch.arange(queries))[:, :, None]


def call(q, k, v, **more):
    ends = torch.tensor(LENGTHS, dtype=torch.int32)
    att = fk.compile("k <= q + first[b]", backend="triton")
    with torch.no_grad():
        return att(q, k, v, first=ends - q.shape[2], **more).double()


def near(result, want, dtype):
    bound = {torch.float32: 1e-5, torch.float16: 4e-3}[dtype]
    assert (result - want).abs().max() <= bound * want.abs().max()


def drawn(heads, queries, dim, dtype):
    torch.manual_seed(0)
    return torch.randn(2, heads, queries, dim).to(dtype), torch.randn(2, 1, ROOM, dim).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("dim", "v_dim"), [(576, 512), (80, 64), (96, 96), (64, 50)])
def test_latent_of_ragged_sequences(dim, v_dim, dtype, known):
    q, k = drawn(4, 2, dim, dtype)
    v = k[..., :v_dim]
    near(call(q, k, v), wanted(q, k, v, shown(2)), dtype)
    assert known == [True]


@pytest.mark.parametrize(("heads", "queries", "page"), [
    (16, 1, 0), (16, 1, 64), (16, 1, 16), (16, 4, 0), (16, 4, 16), (24, 1, 64), (40, 1, 64), (96, 1, 0),
])  # fmt: skip
def test_latent_in_tiles_of_warp_groups(heads, queries, page, known):
    q, k = drawn(heads, queries, 576, torch.float16)
    want, more = wanted(q, k, k[..., :512], shown(queries)), {}
    if page:  # behind the ends of sequences pages hold anything
        k = torch.where(torch.arange(ROOM)[:, None] < torch.tensor(LENGTHS).reshape(2, 1, 1, 1), k, torch.nan)
        places = torch.randperm(2 * ROOM // page)
        pool = torch.empty(len(places), 1, page, 576, dtype=k.dtype)
        pool[places] = k.reshape(len(places), 1, page, 576)
        k, more = pool, {"pages": places.reshape(2, -1).int()}
    near(call(q, k, k[..., :512], **more), want, q.dtype)
    assert known == [True]


@pytest.mark.parametrize(("heads", "queries"), [(16, 1), (96, 1), (16, 3)])
def test_latent_in_parts_by_length(heads, queries, known, monkeypatch):
    monkeypatch.setattr(grids, "RAGGED", 0)
    monkeypatch.setattr(grids, "EVEN", 0)
    q, k = drawn(heads, queries, 576, torch.float16)
    near(call(q, k, k[..., :512]), wanted(q, k, k[..., :512], shown(queries)), q.dtype)
    assert known == [True]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_latent_of_8_bits(dtype, known):
    q, _ = drawn(16, 1, 576, torch.float16)
    k = torch.randint(-50, 50, (2, 1, ROOM, 576)).float()
    scale = torch.rand(2, 1, ROOM) / 50 + 0.01
    stored = k.to(dtype)
    key = stored.float() * scale[..., None]
    result = call(q, stored, stored[..., :512], k_scale=scale, v_scale=scale)
    near(result, wanted(q, key, key[..., :512], shown(1)), q.dtype)
    assert known == [True]


def test_values_elsewhere_in_the_memory_of_keys_are_read_apart(known):
    """Values at another offset, with other strides, longer than keys, or in other memory."""
    q, k = drawn(4, 1, 128, torch.float32)
    whole = torch.randn(2, 1, 2 * ROOM, 128)
    longer = torch.randn(2, 1, ROOM, 128)
    for key, value in (
        (k, k[..., 64:]), (k, k.flip(2)), (k, k[..., :64].clone()), (whole[:, :, ::2], whole[:, :, :ROOM, :64]),
        (longer[..., :64], longer),
    ):  # fmt: skip
        mine = q[..., : key.shape[3]]
        near(call(mine, key, value), wanted(mine, key, value, shown(1)), q.dtype)
    assert known == [False] * len(known)
    assert known


def test_mask_of_heads_over_a_latent(known):
    q, k = drawn(8, 3, 576, torch.float16)
    with torch.no_grad():
        result = fk.compile("(q + k + h) % 3 > 0", backend="triton")(q, k, k[..., :512]).double()
    _, h, i, j = np.indices((2, 8, 3, ROOM))
    visible = torch.from_numpy((i + j + h) % 3 > 0)
    score = (q.double() @ k.double().transpose(2, 3) * 576**-0.5).masked_fill(~visible, -torch.inf)
    near(result, torch.softmax(score, 3) @ k[..., :512].double(), q.dtype)
    assert known == []  # tiles of one head would hold three queries: the forward is as good


def test_gradients_of_keys_that_are_values_too():
    q, k = drawn(4, 2, 80, torch.float32)
    grads = []
    for way in (call_with_gradients, lambda q, k: wanted(q, k, k[..., :64], shown(2))):
        leaves = [x.clone().double().float().requires_grad_() for x in (q, k)]
        out = way(*leaves)
        (out.double() * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
        grads.append([x.grad for x in leaves])
    for ours, want in zip(*grads):
        assert (ours - want).abs().max() <= 1e-4 * want.abs().max()


def call_with_gradients(q, k):
    first = torch.tensor(LENGTHS, dtype=torch.int32) - q.shape[2]
    return fk.compile("k <= q + first[b]", backend="triton")(q, k, k[..., :64], first=first)
