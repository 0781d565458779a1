"""A JAX training step in the style of MaxText, its splash attention replaced by frisket.

    python examples/maxtext_style.py

A layer projects, turns positions (RoPE) and attends to packed documents under a causal mask, or a local window, with a
soft cap. Splash attention is made for one length and mask, takes documents as `SegmentIds` and wants queries scaled
before. frisket takes the mask as a text and documents as a table of the call. Losses and gradients are compared; off a
TPU splash runs in Pallas' interpreter.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

import frisket as fk

BATCH, LENGTH, HEADS, DIM, WINDOW, CAP = 1, 256, 2, 128, 96, 20.0


def splash_attend(window):
    """Attention as MaxText asks splash for it: (q, k, v [batch, length, heads, dim], segment ids [batch, length])."""
    mask = masks.CausalMask((LENGTH, LENGTH))
    if window is not None:
        mask = mask & masks.LocalMask((LENGTH, LENGTH), (window - 1, window - 1), 0)
    sizes = splash.BlockSizes(
        block_q=128, block_kv=128, block_kv_compute=128, block_q_dkv=128, block_kv_dkv=128, block_kv_dkv_compute=128,
        block_q_dq=128, block_kv_dq=128,
    )  # fmt: skip
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * HEADS), head_shards=1, q_seq_shards=1, block_sizes=sizes,
        attn_logits_soft_cap=CAP, interpret=jax.default_backend() != "tpu",
    )  # fmt: skip

    def attend(q, k, v, segments):
        q, k, v = (x.swapaxes(1, 2) for x in (q * DIM**-0.5, k, v))
        return jax.vmap(lambda q, k, v, s: kernel(q, k, v, splash.SegmentIds(s, s)))(q, k, v, segments).swapaxes(1, 2)

    return attend


def frisket_attend(window):
    """Splash attention's mask as a text of frisket: no length, no head and no block size is part of it."""
    local = "causal" if window is None else "causal & q - k < w"
    att = fk.compile(f"{local} & segments[b, q] == segments[b, k]", f"softcap({CAP})")
    more = {} if window is None else {"w": window}
    return lambda q, k, v, segments: att(q, k, v, segments=segments, **more)


def rotary(x, positions):
    angle = positions[..., None, None] * 10000.0 ** (-jnp.arange(0, DIM, 2) / DIM)
    a, b = x[..., ::2], x[..., 1::2]
    turned = a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)
    return jnp.stack(turned, -1).reshape(x.shape)


def step_of(attend):
    """A compiled step: (loss, gradients) of the layer's weights."""

    def loss(weights, x, targets, segments, positions):
        q, k, v = (jnp.einsum("bte,ehd->bthd", x, w) for w in (weights["q"], weights["k"], weights["v"]))
        out = attend(rotary(q, positions), rotary(k, positions), v, segments)
        found = jnp.einsum("bthd,hde->bte", out, weights["out"])
        return jnp.square(found - targets).mean()

    return jax.jit(jax.value_and_grad(loss))


def batch():
    """Tokens of four packed documents: features, targets, segment ids and positions in the documents."""
    x, targets = jax.random.normal(jax.random.key(0), (2, BATCH, LENGTH, HEADS * DIM))
    lengths = jnp.array([70, 100, 50, 36])
    segments = jnp.repeat(jnp.arange(4), lengths, total_repeat_length=LENGTH)
    positions = jnp.arange(LENGTH) - jnp.repeat(jnp.cumsum(lengths) - lengths, lengths, total_repeat_length=LENGTH)
    return x, targets, segments[None].astype(jnp.int32), positions[None]


def main():
    keys = dict(zip(("q", "k", "v", "out"), jax.random.split(jax.random.key(1), 4)))
    shapes = {n: (HEADS * DIM, HEADS, DIM) if n != "out" else (HEADS, DIM, HEADS * DIM) for n in keys}
    weights = {n: jax.random.normal(keys[n], shapes[n]) * (HEADS * DIM) ** -0.5 for n in keys}
    differences = []
    for window in (None, WINDOW):
        (ours, mine), (theirs, wanted) = (
            step_of(attend(window))(weights, *batch()) for attend in (frisket_attend, splash_attend)
        )
        off = max(float(jnp.linalg.norm(mine[n] - wanted[n]) / jnp.linalg.norm(wanted[n])) for n in weights)
        named = "causal" if window is None else f"a window of {window}"
        print(f"{named}: loss {ours:.6f}, with splash {theirs:.6f}; gradients differ by {off:.0e} in norm")
        differences.append((abs(float(ours - theirs)), off))
    assert max(a for a, _ in differences) < 1e-5
    assert max(b for _, b in differences) < 1e-4
    return differences


if __name__ == "__main__":
    main()
