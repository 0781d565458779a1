"""FlashAttention 4 on numpy, from what its source says of its arguments: attention of a `FlashCall` in float64.

A stand-in of the engine in `frisket.runtime.backends.flash.torch`, with which it shares nothing but the call."""

from __future__ import annotations

import numpy as np
import torch

from .cute import Float32, Scalar, Table, functions, vector


def install(monkeypatch):
    """The backend runs here, on this engine."""
    from dataclasses import replace

    from frisket.runtime.backends.base import RECORDS, register
    from frisket.runtime.backends.flash import call as flash_call
    from frisket.runtime.backends.flash import torch as flash_torch

    monkeypatch.setattr(flash_call, "version", lambda: flash_call.READ)
    monkeypatch.setattr(flash_torch, "attend", attend)
    monkeypatch.setattr(flash_torch, "gradients", gradients)
    was = RECORDS["flash"]
    register(replace(was, reason=lambda framework=None: ""))
    return lambda: register(was)


def attend(call, g, q, k, v, sinks):
    dtype = q.dtype
    q, k, v = prepared(call, q, *(x if call.pages is None else read_pages(call, x) for x in (k, v)))
    score, visible, _ = scores(call, q, k)
    score = np.where(visible, score, -np.inf)
    if sinks is not None:
        sink = np.broadcast_to(sinks.double().numpy()[:, None, None], (*score.shape[:3], 1))
        score = np.concatenate([score, sink], -1)
    top = score.max(-1, keepdims=True)
    weight = np.exp(score - np.where(np.isfinite(top), top, 0))
    total = weight.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + np.where(np.isfinite(top), top, 0))[..., 0]
    out = weight[..., : k.shape[2]] @ v / np.where(total == 0, 1, total)
    return unpacked(call, g, out).to(dtype), torch.from_numpy(lines(call, g, lse)).float()


def gradients(call, qkv, results, cotangents, deterministic):
    q, k, v = qkv
    out, lse, dout, dlse = results.out, results.lse, cotangents.dout, cotangents.dlse
    shape, group = q.shape, q.shape[1] // k.shape[1]
    assert call.tiles is None or deterministic == (call.order is not None)
    arrays, (o, do) = prepared(call, q, k, v), prepared(call, out, dout)
    score, visible, slope = scores(call, arrays[0], arrays[1], backward=True)
    known = lines_in(call, lse)
    weight = np.where(
        visible, np.exp(np.where(visible, score, 0) - np.where(np.isfinite(known), known, 0)[..., None]), 0
    )
    delta = (o * do).sum(-1) - (0 if dlse is None else lines_in(call, dlse))
    grad = slope(weight * (do @ arrays[2].swapaxes(2, 3) - delta[..., None])) * call.scale
    found = grad @ arrays[1], grad.swapaxes(2, 3) @ arrays[0], weight.swapaxes(2, 3) @ do
    ready = [unpacked(call, None, x, like=(y.shape[0], -1)) for x, y in zip(found, (q, k, v), strict=True)]
    dk, dv = (x.view(x.shape[0], -1, group, *x.shape[2:]).sum(2) for x in ready[1:])
    assert ready[0].shape == shape
    return ready[0].to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def prepared(call, *arrays):
    """The arrays in float64 with a key head for each query head; packed sequences are one."""
    heads = arrays[0].shape[1]
    found = [x.detach().double().repeat_interleave(heads // x.shape[1], 1) for x in arrays]
    if call.documents is not None:
        found = [x.transpose(1, 2).reshape(1, -1, *x.transpose(1, 2).shape[2:]).transpose(1, 2) for x in found]
    return [x.numpy() for x in found]


def read_pages(call, x):
    """Keys or values of every sequence, of a pool [pages, heads, tokens, dim]. A page of a key tile is loaded whole; of
    others the rows past the last key are zeros."""
    found = x[call.pages.long()].transpose(1, 2).flatten(2, 3)
    if call.used is not None and x.shape[2] not in (64, 80, 96, 112, 128, 144):
        past = torch.arange(found.shape[2]) >= call.used[:, None]
        found = found.masked_fill(past[:, None, :, None], 0)
    return found


def unpacked(call, g, out, like=None):
    made = torch.from_numpy(out)
    if call.documents is None:
        return made if g is None else made.to(torch.float64)
    batch = g.batch if like is None else like[0]
    return made[0].transpose(0, 1).reshape(batch, -1, *made[0].transpose(0, 1).shape[1:]).transpose(1, 2)


def lines(call, g, lse):
    return lse if call.documents is None else lse[0].reshape(-1, g.batch, g.q_len).swapaxes(0, 1).copy()


def lines_in(call, lse):
    x = lse.detach().double().numpy()
    return x if call.documents is None else x.swapaxes(0, 1).reshape(1, x.shape[1], -1)


def scores(call, q, k, backward=False):
    """(modified scores, which positions are seen, the derivative of the score mod) of a call."""
    shape = (*q.shape[:3], k.shape[2])
    score = q @ k.swapaxes(2, 3) * call.scale
    made = functions(call.mods.text)
    at = [vector(np.broadcast_to(x, shape)) for x in np.ogrid[tuple(slice(n) for n in shape)]]
    tables = [Table(t.numpy()) for t in call.tables] or None
    numbers = [Scalar(np.float32(x) if isinstance(x, float) else np.int32(x)) for x in call.scalars]
    given = (*at, None, tables, numbers)

    def called(name, *first):
        return np.broadcast_to(made[name](*(vector(x, Float32.dtype) for x in first), *given).array, shape)

    names = call.mods.functions
    visible = flagged(call, shape) if call.tiles is None else tiled(call, shape, backward, called)
    slope = (lambda grad: called("score_mod_bwd", grad, score).astype(float)) if "score_mod" in names else lambda x: x
    return (called("score_mod", score).astype(float) if "score_mod" in names else score), visible, slope


def tiled(call, shape, backward, called):
    """The positions of full tiles, and of partial ones where the mask says so."""
    mask, full = np.zeros(shape, bool), np.zeros(shape, bool)
    tiles = call.tiles
    rows, columns = tiles.block_size[::-1] if backward else tiles.block_size
    for seen, count, index in (
        (mask, tiles.mask_block_cnt, tiles.mask_block_idx), (full, tiles.full_block_cnt, tiles.full_block_idx)
    ):  # fmt: skip
        assert count.dtype == index.dtype == torch.int32
        for b in range(shape[0]):
            for h in range(shape[1]):
                place = min(b, count.shape[0] - 1), min(h, count.shape[1] - 1)
                for row in range(count.shape[2]):
                    picked = index[place][row][: count[place][row]].tolist()
                    assert picked == sorted(set(picked)), "the engine wants ascending lists"
                    for column in picked:
                        lines, keys = (
                            slice(row * rows, (row + 1) * rows),
                            slice(column * columns, (column + 1) * columns),
                        )
                        seen[b, h][(keys, lines) if backward else (lines, keys)] = True
    assert not (mask & full).any()
    return full | (mask & called("mask_mod"))


def flagged(call, shape):
    """The positions that flags show: windows around the diagonal that ends at the last query and key."""
    batch, _, n, m = shape
    assert "mask_mod" not in call.mods.functions
    seen = np.zeros((batch, n, m), bool)
    cu_q, cu_k = call.documents.tolist() if call.documents is not None else ([0, n], [0, m])
    for b in range(batch):
        for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
            stop = k1 if call.used is None else k0 + int(call.used[b])
            i, j = np.ogrid[: q1 - q0, : stop - k0]
            at = i + (stop - k0) - (q1 - q0)
            left = True if call.left is None else j >= at - call.left
            right = True if call.right is None else j <= at + call.right
            seen[b, q0:q1, k0:stop] = left & right & (j >= 0)
    return np.broadcast_to(seen[:, None], shape)
