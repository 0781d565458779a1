"""Score mods in torch, as attention-gym and PyTorch's tests have them (the formulas of each, our code)."""

# ruff: noqa: E501 (one row, one case)

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F  # noqa: N812
from support.torch.case import Case, bound

S, B, H = 24, 2, 4


# -- attention-gym ----------------------------------------------------------------------------------


def alibi(heads):
    def mod(score, b, h, q_idx, kv_idx):
        scale = torch.exp2(-((h + 1) * 8.0 / heads))
        return score + (kv_idx - q_idx) * scale

    return mod


class Tanh(torch.autograd.Function):
    """A tanh with a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Sine(torch.autograd.Function):
    """The newer form: the context has a method of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


def softcap(cap):
    def mod(score, b, h, q, k):
        return cap * torch.tanh(score / cap)

    return mod


def sandwich(rel, scale):
    def mod(score, b, h, q_idx, kv_idx):
        return score + rel[q_idx - kv_idx + S - 1] * scale[h]

    return mod


def graphormer_spatial(table, distance):
    def mod(score, b, h, q, k):
        return score + table[h, distance[b, q, k]]

    return mod


def graphormer_edge(weights, paths):
    """The mean over the positions of a path of a learned weight."""
    length = paths.shape[-1]

    def mod(score, b, h, q, k):
        total = torch.zeros_like(score)
        for i in range(length):
            total = total + weights[h, i, paths[b, q, k, i]]
        return score + total / length

    return mod


def activated(function, eps=1e-6):
    def mod(score, b, h, q, k):
        return torch.log(function(score) + eps)

    return mod


def undo_softmax(function):
    """The score whose exponential is function(score)."""
    mod = activated(function)
    return lambda score, b, h, q, k: mod(score, b, h, q, k).to(score.dtype)


def mla_rope(query, key, scale):
    group = query.shape[1] // key.shape[1]

    def mod(score, b, h, q_idx, kv_idx):
        return score + scale * torch.dot(query[b, h, q_idx], key[b, h // group, kv_idx])

    return mod


def mla_rope_sum(query, key):
    return lambda score, b, h, q, k: score + (query[b, h, q, :] * key[b, h // 2, k, :]).sum(-1) * 0.25


def gym() -> list[Case]:
    g = torch.Generator().manual_seed(7)
    rel = torch.randn(2 * S - 1, generator=g)
    slope = torch.randn(H, generator=g)
    table = torch.nn.Parameter(torch.randn(H, 5, generator=g))
    distance = torch.randint(0, 5, (B, S, S), generator=g)
    weights = torch.nn.Parameter(torch.randn(H, 3, 6, generator=g))
    paths = torch.randint(0, 6, (B, S, S, 3), generator=g)
    query, key = torch.randn(B, H, S, 6, generator=g), torch.randn(B, 2, S, 6, generator=g)
    rope = "score + {0} * dot(x[b, h, q, :], y[b, h // 2, k, :])"
    return [
        Case("alibi", alibi(H), "score + (k - q) * exp2(-((h + 1) * 8.0 / 4))"),
        Case("softcap", softcap(20.0), "softcap(20.0)"),
        Case("softcap by a function of its own", lambda s, b, h, q, k: 5.0 * Tanh.apply(s / 5.0), "5.0 * tanh(score / 5.0)", maps=False),
        Case("function with a context method", lambda s, b, h, q, k: Sine.apply(s), "sin(score)"),
        Case("sandwich", sandwich(rel, slope), "score + r[q - k + 23] * c[h]", bound(r=rel, c=slope)),
        Case("graphormer spatial", graphormer_spatial(table, distance), "score + t[h, d[b, q, k]]", bound(t=table, d=distance)),
        Case("graphormer edge", graphormer_edge(weights, paths), None),
        Case("relu attention", activated(F.relu), "log(relu(score) + 0.000001)"),
        Case("sigmoid attention", undo_softmax(torch.sigmoid), "log(sigmoid(score) + 0.000001)"),
        Case("softplus attention", activated(F.softplus), "log(softplus(score) + 0.000001)"),
        Case("mla rope", mla_rope(query, key, 0.125), rope.format("0.125"), bound(x=query, y=key)),
        Case("mla rope as a sum", mla_rope_sum(query, key), "score + dot(x[b, h, q, :], y[b, h // 2, k, :]) * 0.25", bound(x=query, y=key)),
    ]  # fmt: skip


# -- PyTorch's tests --------------------------------------------------------------------------------


def relative(score, b, h, q, k):
    return score + (q - k)


def causal_where(score, b, h, q, k):
    return torch.where(q >= k, score, -float("inf"))


def inverse_where(score, b, h, q, k):
    return torch.where(q <= k, score, torch.tensor(-float("inf"), dtype=score.dtype, device=score.device))


def log_or(score, b, h, q, k):
    return torch.where(score > 0, torch.log(score), score)


def natten(width, kernel):
    """Rows by true division, as the published one has it."""

    def mod(score, b, h, q, k):
        qr, kr = torch.floor(q / width), torch.div(k, width, rounding_mode="floor")
        near = (torch.abs(qr - kr) <= kernel) & (torch.abs(q % width - k % width) <= kernel)
        return score.masked_fill(~near, float("-inf"))

    return mod


def windowed(inner, seq, off):
    def mod(score, b, h, q, k):
        return inner(score, b, h, q - off[seq[q]], k - off[seq[k]])

    return mod


def pure() -> list[Case]:
    g = torch.Generator().manual_seed(8)
    offset = torch.randn(H, generator=g)
    learned = torch.nn.Parameter(torch.randn(H, generator=g))
    return [
        Case("identity", lambda s, b, h, q, k: s, "score"),
        Case("twice", lambda s, b, h, q, k: s * 2, "score * 2.0"),
        Case("squared", lambda s, b, h, q, k: s * s, "score * score"),
        Case("silu", lambda s, b, h, q, k: s * torch.sigmoid(s), "silu(score)"),
        Case("one over", lambda s, b, h, q, k: 1 / s, "1 / score"),
        Case("log where positive", log_or, "log(score) if score > 0.0 else score"),
        Case("trigonometry", lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.tan(b), "sin(cos(score)) + tan(b)"),
        Case("cos sin", lambda s, b, h, q, k: torch.cos(s) * torch.sin(s), "cos(score) * sin(score)"),
        Case("inverse distance", lambda s, b, h, q, k: s / (1 + 1e-4 * torch.square(q - k)), "score / (1 + 0.0001 * (q - k) ** 2)"),
        Case("capped", lambda s, b, h, q, k: 50.0 * torch.tanh(s / 50.0), "softcap(50.0)"),
        Case("by head", lambda s, b, h, q, k: s + 0.1 * h, "score + 0.1 * h"),
        Case("quotient of positions", lambda s, b, h, q, k: s - q // (1 + k), "score - q // (1 + k)"),
        Case("relative", relative, "score + (q - k)"),
        Case("relative causal", lambda s, b, h, q, k: torch.where(q <= k, relative(s, b, h, q, k), float("-inf")), "score + (q - k) if q <= k else -inf"),
        Case("causal", causal_where, "score if q >= k else -inf"),
        Case("inverse causal", inverse_where, "score if q <= k else -inf"),
        Case("head offset", lambda s, b, h, q, k: s * offset[h], "score * o[h]", bound(o=offset)),
        Case("fixed slopes", lambda s, b, h, q, k: s + (q - k) * offset[h], "score + (q - k) * o[h]", bound(o=offset)),
        Case("learned slopes", lambda s, b, h, q, k: s - learned[h].exp() * (q - k).abs(), "score - exp(o[h]) * abs(q - k)", bound(o=learned)),
        Case("odd keys", lambda s, b, h, q, k: torch.where(k % 2 == 0, s, float("-inf")), "score if k % 2 == 0 else -inf"),
        Case("decode window", lambda s, b, h, q, k: torch.where((q + 20 >= k) & (q + 20 - k <= 6), s, float("-inf")), "score if 0 <= q + 20 - k <= 6 else -inf", q_len=3),
        Case("dead branch", lambda s, b, h, q, k: torch.where(torch.ones((), dtype=torch.bool), s, torch.finfo(s.dtype).min), "score"),
        Case("xor pattern", lambda s, b, h, q, k: s + torch.bitwise_xor(q, k) * 0.01, "score + (q ^ k) * 0.01"),
    ]  # fmt: skip


def gathers() -> list[Case]:
    g = torch.Generator().manual_seed(9)
    r = functools.partial(torch.randn, generator=g)
    tok, batch, head, bias2, bias3, bias4 = r(S), r(B), r(H), r(S, S), r(B, S, S), r(B, H, S, S)
    rel, other, gate, big = r(2 * S - 1), r(S), r(H), r(B, H, 3, S, S)
    half, wide = r(S).to(torch.bfloat16), r(S).double()
    off = torch.randint(0, S, (S,), generator=g)
    view = r(S, 2 * S)[:, ::2]
    rows = r(B, H, S, 6)
    return [
        Case("three biases", lambda s, b, h, q, k: s + tok[q] + batch[b] + head[h], "score + x[q] + y[b] + z[h]", bound(x=tok, y=batch, z=head)),
        Case("bias", lambda s, b, h, q, k: s + bias2[q, k], "score + t[q, k]", bound(t=bias2)),
        Case("bias by batch", lambda s, b, h, q, k: s + bias3[b, q, k], "score + t[b, q, k]", bound(t=bias3)),
        Case("bias by batch and head", lambda s, b, h, q, k: s + bias4[b, h, q, k], "score + t[b, h, q, k]", bound(t=bias4)),
        Case("chained", lambda s, b, h, q, k: s + bias4[b][h][q, k], "score + t[b, h, q, k]", bound(t=bias4)),
        Case("chained after a number", lambda s, b, h, q, k: s + bias4[0][h, q][k], "score + t[0, h, q, k]", bound(t=bias4)),
        Case("chained after a negative number", lambda s, b, h, q, k: s + bias4[-1, h][q, k], "score + t[1, h, q, k]", bound(t=bias4)),
        Case("half chained", lambda s, b, h, q, k: s + bias3[b][q][k - 0], "score + t[b, q, k]", bound(t=bias3)),
        Case("windows inside", lambda s, b, h, q, k: s + big[b][h][q % 3, q][k], "score + t[b, h, q % 3, q, k]", bound(t=big)),
        Case("relative table", lambda s, b, h, q, k: s + rel[q - k + S - 1], "score + t[q - k + 23]", bound(t=rel)),
        Case("table by distance", lambda s, b, h, q, k: s + tok[torch.abs(q - k)], "score + t[abs(q - k)]", bound(t=tok)),
        Case("clamped table", lambda s, b, h, q, k: s + tok[torch.clamp(q - k + 5, 0, 10)], "score + t[clamp(q - k + 5, 0, 10)]", bound(t=tok)),
        Case("same table twice", lambda s, b, h, q, k: s + tok[q] + tok[k], "score + t[q] + t[k]", bound(t=tok)),
        Case("transposed", lambda s, b, h, q, k: s + bias2[k, q], "score + t[k, q]", bound(t=bias2)),
        Case("indirect", lambda s, b, h, q, k: s + tok[off[q]], "score + t[o[q]]", bound(t=tok, o=off)),
        Case("sum index", lambda s, b, h, q, k: s + rel[q + k], "score + t[q + k]", bound(t=rel)),
        Case("times bias", lambda s, b, h, q, k: s * tok[q], "score * t[q]", bound(t=tok)),
        Case("sigmoid gate", lambda s, b, h, q, k: s * torch.sigmoid(gate[h]), "sigmoid_gate(g)", bound(g=gate)),
        Case("two tables", lambda s, b, h, q, k: s + tok[q] * other[k], "score + x[q] * y[k]", bound(x=tok, y=other)),
        Case("position table", lambda s, b, h, q, k: s + rel[k - q + S - 1], "score + t[k - q + 23]", bound(t=rel)),
        Case("strided view", lambda s, b, h, q, k: s + view[q, k], "score + t[q, k]", bound(t=view)),
        Case("narrow and wide floats", lambda s, b, h, q, k: s + half[q] + wide[k], "score + x[q] + y[k]", bound(x=half.float(), y=wide)),
        Case("decomposed relative positions", lambda s, b, h, q, k: s + rows[b, h, q, k // 4], "score + t[b, h, q, k // 4]", bound(t=rows)),
    ]  # fmt: skip


def learned() -> list[Case]:
    g = torch.Generator().manual_seed(10)
    r = functools.partial(torch.randn, generator=g)
    scalar, scale, mass = (
        torch.nn.Parameter(torch.tensor(0.7)),
        torch.nn.Parameter(r(1)),
        torch.nn.Parameter(r(1).abs() + 1),
    )
    seq = torch.sort(torch.randint(0, 3, (S,), generator=g))[0]
    lens, prefix = torch.tensor([11, 20]), torch.tensor([5, 9])
    off = torch.tensor([0, 3, 8])
    place, width, kscale, per_tensor = r(S, 3), r(H).abs() + 1, r(B, H), torch.tensor(0.02)
    table, idx, g_, mu_q, mu_k = r(30, H), torch.randint(0, 30, (S, S), generator=g), r(H), r(S), r(S)
    has_bias, flag = torch.tensor(True), True
    return [
        Case("learned scalar", lambda s, b, h, q, k: s * scalar, "score * c", bound(c=scalar)),
        Case("learned vector of one", lambda s, b, h, q, k: s * scale[0], "score * c[0]", bound(c=scale)),
        Case("log of a learned mass", lambda s, b, h, q, k: s + torch.log(mass[0]), "score + log(c[0])", bound(c=mass)),
        Case("documents", lambda s, b, h, q, k: torch.where(seq[q] == seq[k], s, float("-inf")), "score if d[q] == d[k] else -inf", bound(d=seq)),
        Case("document and causal", lambda s, b, h, q, k: torch.where((q >= k) & (seq[q] == seq[k]), s, float("-inf")), "score if causal & d[q] == d[k] else -inf", bound(d=seq)),
        Case("bidirectional prefix", lambda s, b, h, q, k: torch.where((k < prefix[b]) | (q >= k), s, float("-inf")), "score if k < n[b] | q >= k else -inf", bound(n=prefix)),
        Case("padded dense", lambda s, b, h, q, k: torch.where((q <= lens[b]) & (k <= lens[b]), s, float("-inf")), "score if q <= n[b] & k <= n[b] else -inf", bound(n=lens)),
        Case("natten by true division", natten(6, 1), "-inf if ~(abs(q // 6 - k // 6) <= 1 & abs(q % 6 - k % 6) <= 1) else score"),
        Case("nested wrapper", windowed(relative, seq, off), "score + ((q - o[d[q]]) - (k - o[d[k]]))", bound(o=off, d=seq)),
        Case("gated bias", lambda s, b, h, q, k: s + torch.where(has_bias, mu_q[q], 0.0), "score + (m[q] if g else 0.0)", bound(m=mu_q, g=has_bias)),
        Case("gate in Python", lambda s, b, h, q, k: s + mu_q[q] if flag else s, "score + m[q]", bound(m=mu_q)),
        Case("cpb gather", lambda s, b, h, q, k: s + table[idx[q, k], h] * g_[h] * (mu_q[q] + mu_k[k]), "score + t[i[q, k], h] * g[h] * (x[q] + y[k])", bound(t=table, i=idx, g=g_, x=mu_q, y=mu_k)),
        Case("distance", lambda s, b, h, q, k: torch.exp(-torch.norm(place[q] - place[k], dim=-1) / width[h]) * s, None),
        Case("distance by linalg", lambda s, b, h, q, k: torch.exp(-torch.linalg.vector_norm(place[q] - place[k]) / width[h]) * s, None),
        Case("distance by hand", lambda s, b, h, q, k: torch.exp(-torch.sqrt((place[q, 0] - place[k, 0]) ** 2 + (place[q, 1] - place[k, 1]) ** 2) / width[h]) * s, None),
        Case("dequantised", lambda s, b, h, q, k: s * kscale[b, h], "score * t[b, h]", bound(t=kscale)),
        Case("dequantised per tensor", lambda s, b, h, q, k: s * per_tensor, "score * t", bound(t=per_tensor)),
        Case("symbolic size", lambda s, b, h, q, k: s + place.size(0), "score + 24.0"),
        Case("rms", lambda s, b, h, q, k: s * (place[q] ** 2).mean(-1).rsqrt(), None),
        Case("nearest", lambda s, b, h, q, k: s - torch.amin((place[q] - place[k]).abs(), -1), None),
        Case("matrix times vector", lambda s, b, h, q, k: s + (place[q] @ place[k]) / math.sqrt(3), None),
    ]  # fmt: skip


def scores() -> list[Case]:
    return [*gym(), *pure(), *gathers(), *learned()]
