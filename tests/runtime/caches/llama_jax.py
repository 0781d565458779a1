"""A tiny Llama of random weights: RMSNorm, rotary positions, grouped heads, SwiGLU; what its layers attend with is the
caller's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from support.jax.dense import dense

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, DIM, HIDDEN = 61, 32, 2, 4, 2, 8, 48


def weights(seed=0):
    draw = np.random.default_rng(seed)

    def matrix(n, m):
        return jnp.asarray(draw.standard_normal((n, m)) / np.sqrt(n), jnp.float32)

    def matrices():
        sizes = {"q": (WIDTH, HEADS * DIM), "k": (WIDTH, KV_HEADS * DIM), "v": (WIDTH, KV_HEADS * DIM)}
        sizes |= {"o": (HEADS * DIM, WIDTH), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
        return {n: matrix(*size) for n, size in sizes.items()}

    return {
        "embed": matrix(VOCAB, WIDTH) * 5,
        "layers": [matrices() for _ in range(LAYERS)],
        "head": matrix(WIDTH, VOCAB),
    }


def norm(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def rotated(x, positions):
    """x [batch, n, heads, DIM] at positions [batch, n]."""
    angles = positions[:, :, None, None] * 10000.0 ** (-jnp.arange(DIM // 2) / (DIM // 2))
    left, right = jnp.split(x, 2, -1)
    return jnp.concatenate(
        [left * jnp.cos(angles) - right * jnp.sin(angles), right * jnp.cos(angles) + left * jnp.sin(angles)], -1
    )


def layer(w, x, positions, attend):
    y = norm(x)
    q, k, v = ((y @ w[n]).reshape(*y.shape[:2], -1, DIM) for n in "qkv")
    out = attend(rotated(q, positions), rotated(k, positions), v)
    x = x + out.reshape(*x.shape[:2], -1) @ w["o"]
    y = norm(x)
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def forward(w, tokens, positions, attend):
    """Logits [batch, n, VOCAB] of tokens [batch, n]; `attend(layer, q, k, v)` is attention."""
    x = w["embed"][tokens]
    for i, one in enumerate(w["layers"]):
        x = layer(one, x, positions, partial(attend, i))
    return norm(x) @ w["head"]


def attend_densely(visible):
    """Attention of a whole sequence under a dense mask [n, n]."""

    def attend(layer, q, k, v):
        return dense(q, k, v, visible)[0]

    return attend


def generated(w, att, caches, prompt, new, seat=None):
    """(tokens [batch, prompt + new], logits of all but the last, the caches, how often the step was traced): greedily,
    a token at a time behind the prompt. `seat(caches, n)` is asked before every step of n tokens."""
    traced = []

    @partial(jax.jit, donate_argnums=1)
    def step(one, cache, x, positions):  # compiled once for all layers
        traced.append(x.shape[:2])

        def attend(q, k, v):
            nonlocal cache
            out, cache = cache.attention(att, q, k, v)
            return out

        return layer(one, x, positions, attend), cache

    @jax.jit
    def last(x):
        logits = norm(x) @ w["head"]
        return logits, logits[:, -1:].argmax(-1)

    tokens, kept, chunk, at = [prompt], [], prompt, 0
    for _ in range(new):
        caches = list(seat(caches, chunk.shape[1]) if seat else caches)
        positions = at + np.arange(chunk.shape[1]) + np.zeros((len(chunk), 1), int)
        x = w["embed"][chunk]
        for i, one in enumerate(w["layers"]):
            x, caches[i] = step(one, caches[i], x, positions)
        at += chunk.shape[1]
        logits, chunk = last(x)
        tokens.append(chunk)
        kept.append(logits)
    return jnp.concatenate(tokens, 1), jnp.concatenate(kept, 1), caches, traced
