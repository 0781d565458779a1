"""A tiny Llama of random weights: RMSNorm, rotary positions, grouped heads, SwiGLU; what its layers attend with is the
caller's."""

import torch
from support.torch.dense import dense
from torch.nn.functional import silu

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, DIM, HIDDEN = 61, 32, 2, 4, 2, 8, 48


def weights(seed=0):
    draw = torch.Generator().manual_seed(seed)

    def matrix(n, m):
        return torch.randn(n, m, generator=draw) / n**0.5

    def layer():
        sizes = {"q": (WIDTH, HEADS * DIM), "k": (WIDTH, KV_HEADS * DIM), "v": (WIDTH, KV_HEADS * DIM)}
        sizes |= {"o": (HEADS * DIM, WIDTH), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
        return {n: matrix(*size) for n, size in sizes.items()}

    return {"embed": matrix(VOCAB, WIDTH) * 5, "layers": [layer() for _ in range(LAYERS)], "head": matrix(WIDTH, VOCAB)}


def norm(x):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def rotated(x, positions):
    """x [batch, heads, n, DIM] at positions [batch, n]."""
    angles = positions[:, None, :, None] * 10000.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
    left, right = x.chunk(2, -1)
    return torch.cat(
        [left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1
    )  # fmt: skip


def forward(w, tokens, positions, attend):
    """Logits [batch, n, VOCAB] of tokens [batch, n]; `attend(layer, q, k, v)` is attention, and keeps what it likes."""
    x = w["embed"][tokens]
    for i, layer in enumerate(w["layers"]):
        y = norm(x)
        q, k, v = ((y @ layer[n]).unflatten(-1, (-1, DIM)).transpose(1, 2) for n in "qkv")
        out = attend(i, rotated(q, positions), rotated(k, positions), v)
        x = x + out.transpose(1, 2).flatten(2) @ layer["o"]
        y = norm(x)
        x = x + (silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
    return norm(x) @ w["head"]


def attend_densely(visible, stored=lambda x: x):
    """Attention of a whole sequence under a dense mask [n, n]; `stored` is what a cache makes of keys and values."""

    def attend(layer, q, k, v):
        return dense(q, stored(k), stored(v), visible)[0]

    return attend


def generated(w, att, caches, prompt, new, seat=None):
    """(tokens [batch, prompt + new], logits of all but the last): greedily, a token at a time behind the prompt.
    `seat(n)` is called before every step of n tokens."""
    tokens, logits, chunk = [prompt], [], prompt
    for _ in range(new):
        if seat:
            seat(chunk.shape[1])
        at = sum(x.shape[1] for x in tokens) - chunk.shape[1]
        positions = at + torch.arange(chunk.shape[1]).expand(chunk.shape)
        logits.append(forward(w, chunk, positions, lambda i, q, k, v: caches[i].attention(att, q, k, v)))
        chunk = logits[-1][:, -1:].argmax(-1)
        tokens.append(chunk)
    return torch.cat(tokens, 1), torch.cat(logits, 1)
