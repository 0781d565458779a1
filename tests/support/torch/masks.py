"""Mask mods in torch, as attention-gym, PyTorch's tests and FA4's tests have them (the formulas of each, our code)."""

# ruff: noqa: E501 (one row, one case)

from __future__ import annotations

import functools

import torch
from support.torch.case import Case, bound
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

S, B, H = 24, 2, 4


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


# -- attention-gym ----------------------------------------------------------------------------------


def sliding_window(window):
    def in_window(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= window

    return and_masks(in_window, causal)


def dilated(window, gap):
    def mask(b, h, q_idx, kv_idx):
        distance = torch.abs(q_idx - kv_idx)
        return torch.logical_and(distance <= window, distance % gap == 0)

    return mask


def prefix_lm(length):
    def prefix(b, h, q_idx, kv_idx):
        return kv_idx < length

    return or_masks(prefix, causal)


def longformer(window, is_global):
    def mask(b, h, q_idx, kv_idx):
        near = (q_idx - kv_idx).abs() <= window
        return near | is_global[q_idx] | is_global[kv_idx]

    return mask


def document(inner, doc, offsets):
    def mask(b, h, q_idx, kv_idx):
        same = doc[q_idx] == doc[kv_idx]
        return same & inner(b, h, q_idx - offsets[doc[q_idx]], kv_idx - offsets[doc[kv_idx]])

    return mask


def packed_causal_document(doc, offsets):
    def mask(b, h, q_idx, kv_idx):
        return torch.logical_and(kv_idx >= offsets[doc[q_idx]], q_idx >= kv_idx)

    return mask


def shared_prefix(doc, offsets, prefix_of):
    def mask(b, h, q_idx, kv_idx):
        own = (doc[q_idx] == doc[kv_idx]) & (q_idx >= kv_idx)
        prefix = prefix_of[doc[q_idx]]
        return own | ((offsets[prefix] <= kv_idx) & (kv_idx < offsets[prefix + 1]))

    return mask


def batchify(inner, n):
    def mask(b, h, q_idx, kv_idx):
        return (q_idx // n == kv_idx // n) & inner(b, h, q_idx % n, kv_idx % n)

    return mask


def block_diffusion(b, h, q_idx, kv_idx, seq_len=None, block=None):
    q_clean, k_clean = q_idx >= seq_len, kv_idx >= seq_len
    block_q = torch.where(q_clean, (q_idx - seq_len) // block, q_idx // block)
    block_k = torch.where(k_clean, (kv_idx - seq_len) // block, kv_idx // block)
    diagonal = (block_q == block_k) & (q_clean == k_clean)
    offset = (block_q > block_k) & k_clean & ~q_clean
    clean = (block_q >= block_k) & k_clean & q_clean
    return diagonal | offset | clean


def flamingo(image_of, intervals):
    def mask(b, h, q_idx, kv_idx):
        i = image_of[kv_idx]
        return (intervals[i, 0] <= q_idx) & (q_idx < intervals[i][1])

    return mask


def jetspec_tree(prefix, ancestors):
    last = ancestors.shape[1] - 1

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx < prefix) | ancestors[q_idx, torch.clamp(kv_idx - prefix, 0, last)]

    return mask


def jetspec_training(prefix, block):
    def mask(b, h, q_idx, kv_idx):
        mine = (q_idx - prefix) // block == (kv_idx - prefix) // block
        return torch.where(kv_idx < prefix, q_idx >= kv_idx, mine & (q_idx >= kv_idx))

    return mask


def natten_2d(width, height, kernel):
    half = kernel // 2

    def mask(b, h, q_idx, kv_idx):
        qx, qy = q_idx % width, q_idx // width
        kx, ky = kv_idx % width, kv_idx // width
        centre_x = qx.clamp(half, width - 1 - half)
        centre_y = qy.clamp(half, height - 1 - half)
        return ((centre_x - kx).abs() <= half) & ((centre_y - ky).abs() <= half)

    return mask


def tiled_natten(width, height, kernel, tile):
    across = width // tile

    def coordinates(i):
        t, rest = i // (tile * tile), i % (tile * tile)
        return (t % across) * tile + rest % tile, (t // across) * tile + rest // tile

    def mask(b, h, q_idx, kv_idx):
        (qx, qy), (kx, ky) = coordinates(q_idx), coordinates(kv_idx)
        half = kernel // 2
        cx, cy = qx.clamp(half, width - 1 - half), qy.clamp(half, height - 1 - half)
        return ((cx - kx).abs() <= half) & ((cy - ky).abs() <= half)

    return mask


def morton_natten(width, height, kernel):
    def bits(i):  # every other bit of i
        x = torch.zeros((), dtype=torch.int64)
        for n in range(4):
            x = x | (((i >> (2 * n)) & 1) << n)
        return x

    def mask(b, h, q_idx, kv_idx):
        half = kernel // 2
        qx, qy, kx, ky = bits(q_idx), bits(q_idx >> 1), bits(kv_idx), bits(kv_idx >> 1)
        cx, cy = qx.clamp(half, width - 1 - half), qy.clamp(half, height - 1 - half)
        return torch.bitwise_and((cx - kx).abs() <= half, (cy - ky).abs() <= half)

    return mask


def sta_2d(canvas, tile, kernel, text=0):
    """Sliding tiles: the window moves by whole tiles and stays inside the canvas; text tokens come last."""
    tiles = [c // t for c, t in zip(canvas, tile)]
    volume, visual = tile[0] * tile[1], canvas[0] * canvas[1]

    def tile_of(i):
        t = i // volume
        return t // tiles[1], t % tiles[1]

    def mask(b, h, q_idx, kv_idx):
        near = None
        for q, k, n, size in zip(tile_of(q_idx), tile_of(kv_idx), tiles, kernel):
            inside = torch.abs(torch.clamp(q, size // 2, n - 1 - size // 2) - k) <= size // 2
            near = inside if near is None else near & inside
        image = (q_idx < visual) & (kv_idx < visual)
        return (image & near) | (kv_idx >= visual) | (q_idx >= visual)

    return mask


def sta_3d(canvas, tile, kernel):
    tiles = [c // t for c, t in zip(canvas, tile)]
    volume = tile[0] * tile[1] * tile[2]

    def mask(b, h, q_idx, kv_idx):
        q, k = q_idx // volume, kv_idx // volume
        q3 = (q // (tiles[1] * tiles[2]), (q // tiles[2]) % tiles[1], q % tiles[2])
        k3 = (k // (tiles[1] * tiles[2]), (k // tiles[2]) % tiles[1], k % tiles[2])
        inside = [
            torch.le(torch.abs(torch.clamp(a, w // 2, n - 1 - w // 2) - c), w // 2)
            for a, c, n, w in zip(q3, k3, tiles, kernel)
        ]
        return functools.reduce(torch.logical_and, inside)

    return mask


def svg_spatial(prefix, frame, width, sink):
    reach = int(width * frame / 8) * 8

    def mask(b, h, q_idx, kv_idx):
        text = (q_idx < prefix) | (kv_idx < prefix + (frame if sink else 0))
        return torch.logical_or(text, (q_idx - kv_idx).abs() < reach)

    return mask


def svg_temporal(prefix, frame, frames, width):
    def mask(b, h, q_idx, kv_idx):
        text = torch.logical_or(q_idx < prefix, kv_idx < prefix)
        apart = torch.abs((q_idx - prefix) % frame - (kv_idx - prefix) % frame)
        return text | (apart < width * frame // frames)

    return mask


def vsa_topk(topk, tile):
    def mask(b, h, q_idx, kv_idx):
        return (topk[b, h, q_idx // tile] == kv_idx // tile).any(-1)

    return mask


def vsa_map(block_map, sizes, tile):
    def mask(b, h, q_idx, kv_idx):
        return block_map[b, h, q_idx // tile, kv_idx // tile] & (kv_idx % tile < sizes[kv_idx // tile])

    return mask


def gym() -> list[Case]:
    g = torch.Generator().manual_seed(5)
    doc = torch.tensor([0] * 7 + [1] * 5 + [2] * 12, dtype=torch.int32)
    off = torch.tensor([0, 7, 12, 24], dtype=torch.int32)
    star = torch.rand(S, generator=g) < 0.2
    prefix_of = torch.tensor([0, 0, 1])
    image_of = torch.arange(S) // 8
    intervals = torch.tensor([[0, 5], [5, 6], [12, 24]])
    ancestors = torch.rand(S, 20, generator=g) < 0.5
    topk = torch.randint(0, 6, (B, H, 6, 2), generator=g)
    block_map = torch.rand(B, H, 6, 6, generator=g) < 0.4
    sizes = torch.tensor([4, 3, 4, 2, 4, 1])
    diffusion = functools.partial(block_diffusion, seq_len=12, block=4)
    near = "abs(clamp({0}, 2, {n}) - {1}) <= 2"
    nat = near.format("q % 6", "k % 6", n=3) + " & " + near.format("q // 6", "k // 6", n=5)
    return [
        Case("causal", causal, "causal"),
        Case("sliding window", sliding_window(5), "0 <= q - k <= 5"),
        Case("dilated", dilated(9, 3), "dilated(9, 3)"),
        Case("prefix lm", prefix_lm(6), "k < 6 | causal"),
        Case("longformer", longformer(3, star), "abs(q - k) <= 3 | g[q] | g[k]", bound(g=star)),
        Case(
            "document", document(causal, doc, off), "doc[q] == doc[k] & causal(q = q - off[doc[q]], k = k - off[doc[k]])",
            bound(doc=doc, off=off),
        ),
        Case(
            "document of a window", document(sliding_window(3), doc, off),
            "d[q] == d[k] & at(0 <= q - k <= 3, q = q - o[d[q]], k = k - o[d[k]])", bound(d=doc, o=off),
        ),
        Case("packed causal document", packed_causal_document(doc, off), "k >= o[d[q]] & q >= k", bound(o=off, d=doc)),
        Case(
            "shared prefix", shared_prefix(doc, off, prefix_of),
            "(d[q] == d[k] & causal) | off[p[d[q]]] <= k < off[p[d[q]] + 1]", bound(d=doc, off=off, p=prefix_of),
        ),
        Case("batchify", batchify(prefix_lm(2), 8), "q // 8 == k // 8 & (k % 8 < 2 | q % 8 >= k % 8)"),
        Case("block diffusion", diffusion, None),
        Case("flamingo", flamingo(image_of, intervals), "iv[im[k], 0] <= q < iv[im[k], 1]", bound(im=image_of, iv=intervals)),
        Case("jetspec tree", jetspec_tree(4, ancestors), "k < 4 | anc[q, clamp(k - 4, 0, 19)]", bound(anc=ancestors)),
        Case(
            "jetspec training", jetspec_training(6, 6),
            "causal if k < 6 else (q - 6) // 6 == (k - 6) // 6 & causal",
        ),
        Case("natten 2d", natten_2d(6, 8, 5), nat, q_len=48, kv_len=48),
        Case("tiled natten", tiled_natten(8, 8, 3, 4), None, q_len=64, kv_len=64, batch=1, heads=1),
        Case("morton natten", morton_natten(8, 8, 3), None, q_len=64, kv_len=64, batch=1, heads=1),
        Case("sta 2d", sta_2d((8, 12), (4, 4), (1, 3), 6), None, q_len=102, kv_len=102, batch=1, heads=1),
        Case("sta 3d", sta_3d((4, 4, 6), (2, 2, 2), (1, 1, 3)), None, q_len=96, kv_len=96, batch=1, heads=1),
        Case("svg spatial", svg_spatial(3, 7, 1.5, False), "q < 3 | k < 3 | abs(q - k) < 8"),
        Case("svg spatial with a sink", svg_spatial(3, 7, 1.5, True), "q < 3 | k < 10 | abs(q - k) < 8"),
        Case("svg temporal", svg_temporal(3, 7, 3, 2), "q < 3 | k < 3 | abs((q - 3) % 7 - (k - 3) % 7) < 4"),
        Case("vsa top-k", vsa_topk(topk, 4), "any(j in 0..extent(t, 3): t[b, h, q // 4, j] == k // 4)", bound(t=topk)),
        Case(
            "vsa map", vsa_map(block_map, sizes, 4), "m[b, h, q // 4, k // 4] & k % 4 < n[k // 4]",
            bound(m=block_map, n=sizes),
        ),
    ]  # fmt: skip


# -- PyTorch's tests and FA4's ------------------------------------------------------------------------


class Held(torch.nn.Module):
    """A mask as a module that holds its table."""

    def __init__(self, doc):
        super().__init__()
        self.register_buffer("doc", doc)

    def forward(self, b, h, q_idx, kv_idx):
        return self.doc[b, q_idx] == self.doc[b, kv_idx]


class Windowed:
    """A mask as an object that is called."""

    def __init__(self, width):
        self.width = width

    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx - kv_idx < self.width


def offset_causal(offset, b, h, q_idx, kv_idx):
    return q_idx + offset >= kv_idx


def causal_by(b, h, q_idx, kv_idx, offset):
    return q_idx + offset >= kv_idx


def both_in_prefix(prefix):
    def both(b, h, q, k):
        return (q < prefix) & (k < prefix)

    return lambda b, h, q, k: both(b, h, q, k) | causal(b, h, q, k)


def tested() -> list[Case]:
    g = torch.Generator().manual_seed(6)
    per_batch = torch.tensor([0, 1])
    lens = torch.tensor([9, 24], dtype=torch.int32)
    doc = torch.sort(torch.randint(0, 4, (B, S), generator=g))[0]
    per_head = torch.sort(torch.randint(0, 3, (B, H, S), generator=g), -1)[0].to(torch.int16)
    hole = torch.rand(B, S, generator=g) < 0.3
    bias = torch.randn(H, generator=g)
    head_bias, batch_bias = torch.randn(H, generator=g), torch.randn(B, generator=g)
    dense = torch.rand(B, H, S, S, generator=g) < 0.5
    offset = torch.tensor(3)
    low = torch.randint(0, 24, (S,), generator=g).to(torch.uint8)
    width = torch.randint(1, 9, (S,), generator=g)
    clamped = torch.randint(-3, 9, (S,), generator=g)
    left, right = 6, 1
    return [
        Case("inverse causal", lambda b, h, q, k: q <= k, "q <= k"),
        Case("noop", noop_mask, "true"),
        Case("noop of ours", lambda b, h, q, k: torch.ones((), dtype=torch.bool), "true"),
        Case("window and causal", and_masks(lambda b, h, q, k: (q - k).abs() < 7, causal), "abs(q - k) < 7 & causal"),
        Case("window complement", lambda b, h, q, k: torch.logical_not((q - k).abs() < 9), "~(abs(q - k) < 9)"),
        Case("offset by batch", lambda b, h, q, k: q + per_batch[b] * 8 >= k, "q + o[b] * 8 >= k", bound(o=per_batch)),
        Case("scalar tensor offset", lambda b, h, q, k: q + offset >= k, "q + o >= k", bound(o=offset)),
        Case("partial", functools.partial(offset_causal, 5), "q + 5 >= k"),
        Case("partial by name", functools.partial(causal_by, offset=offset), "q + o >= k", bound(o=offset)),
        Case("document by batch", lambda b, h, q, k: doc[b, q] == doc[b, k], "d[b, q] == d[b, k]", bound(d=doc)),
        Case("document by half", lambda b, h, q, k: doc[0, q // 2] == doc[0, k // 2], "d[0, q // 2] == d[0, k // 2]", bound(d=doc)),
        Case("first rows", lambda b, h, q, k: q < 10, "q < 10"),
        Case("two ends", lambda b, h, q, k: (k < 6) | (k >= 18), "k < 6 | k >= 18"),
        Case("holes", lambda b, h, q, k: ~hole[b, q], "~t[b, q]", bound(t=hole)),
        Case("batch flip", lambda b, h, q, k: torch.where(b % 2 == 0, q >= k, q <= k), "q >= k if b % 2 == 0 else q <= k"),
        Case("even batches", lambda b, h, q, k: (q >= k) & (b % 2 == 0), "causal & b % 2 == 0"),
        Case("batch id", lambda b, h, q, k: (per_batch[b] != -1) & (q >= k), "o[b] != -1 & causal", bound(o=per_batch)),
        Case("padding", lambda b, h, q, k: (q < lens[b]) & (k < lens[b]), "q < n[b] & k < n[b]", bound(n=lens)),
        Case("head with a bias", lambda b, h, q, k: (q >= k) | (bias[h] > 0), "causal | t[h] > 0.0", bound(t=bias)),
        Case("two biases", lambda b, h, q, k: (head_bias[h] + batch_bias[b]) > 0, "x[h] + y[b] > 0.0", bound(x=head_bias, y=batch_bias)),
        Case("dense", lambda b, h, q, k: dense[b, h, q, k], "m[b, h, q, k]", bound(m=dense)),
        Case("dense, turned", lambda b, h, q, k: dense.mT[b][h, q][k], "m[b, h, k, q]", bound(m=dense)),
        Case("size limit", lambda b, h, q, k: q < (doc.shape[0] + 1) * 4, "q < 12"),
        Case("clamped ids", lambda b, h, q, k: doc[0, clamped[q].clamp(0, 23)] == doc[0, k], "d[0, clamp(c[q], 0, 23)] == d[0, k]", bound(d=doc, c=clamped)),
        Case("far behind", lambda b, h, q, k: q - k > 5, "q - k > 5"),
        Case("module", Held(doc), "d[b, q] == d[b, k]", bound(d=doc)),
        Case("object", Windowed(4), "q - k < 4"),
        Case("nested", and_masks(or_masks(causal, noop_mask), or_masks(Windowed(4), Held(doc))), "q - k < 4 | d[b, q] == d[b, k]", bound(d=doc)),
        Case("block diagonal", lambda b, h, q, k: q // 6 == k // 6, "block_diagonal(6)"),
        Case("mini causal", lambda b, h, q, k: q % 8 >= k % 8, "q % 8 >= k % 8"),
        Case("both in the prefix", both_in_prefix(7), "(q < 7 & k < 7) | causal"),
        Case("left, right, offset", lambda b, h, q, k: (k >= q + 2 - left) & (k <= q + 2 + right), "-1 <= q + 2 - k <= 6"),
        Case("document by batch and head", lambda b, h, q, k: per_head[b, h, q] == per_head[b, h, k], "d[b, h, q] == d[b, h, k]", bound(d=per_head)),
        Case("lower bound by row", lambda b, h, q, k: k >= low[q], "k >= t[q]", bound(t=low)),
        Case("window by row", lambda b, h, q, k: (q >= k) & (q - k < width[q]), "causal & q - k < t[q]", bound(t=width)),
        Case("decode", lambda b, h, q, k: q + 40 >= k, "q + 40 >= k", q_len=1, kv_len=48),
        Case("xor", lambda b, h, q, k: torch.bitwise_xor(q, k) % 3 == 0, "(q ^ k) % 3 == 0"),
        Case("both masks as a product", lambda b, h, q, k: (q >= k) * (k % 2 == 0), "causal & k % 2 == 0"),
    ]  # fmt: skip


def masks() -> list[Case]:
    return [*gym(), *tested()]
