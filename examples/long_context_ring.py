# %% [markdown]
# # A long sequence over several devices
#
# A sequence too long for one device is split over several. In attention, devices need keys that others hold.
# `fk.parallel.deal` gives all devices equal work under the mask, and sends only keys that the mask shows. Here JAX
# splits this machine's CPU into several devices. `context_parallel.py` in this folder does the same in torch, over
# processes.
#
#     python examples/long_context_ring.py             # about half a minute; --small for a few seconds

# %%
# ruff: noqa: E402 - how many devices there are is read when JAX loads
import os
import sys

SMALL = "--small" in sys.argv
LENGTH, DEVICES, TILE, STEPS = (1024, 2, 64, 3) if SMALL else (8192, 4, 128, 6)
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES} " + os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from python_text import documents

import frisket as fk

# %% [markdown]
# ## The sequence
#
# Functions of Python's standard library, packed until the sequence is full. A byte sees earlier bytes of its function.

# %%
texts = documents()
text = np.concatenate(texts)[: LENGTH + 1].astype(np.int32)
doc = np.repeat(np.arange(len(texts), dtype=np.int32), list(map(len, texts)))[:LENGTH]
print(f"{LENGTH:,} bytes of {doc[-1] + 1} documents go over {DEVICES} devices.")

# %% [markdown]
# ## The deal
#
# Under a causal mask, the device with the end of the sequence would have most of the work. The deal assigns tiles so
# that the work is equal and little is sent.

# %%
deal = fk.parallel.deal("causal & same(doc)", LENGTH, DEVICES, tile=TILE, doc=doc)
HEADS, DIM = 4, 16
needed, whole = (
    int(deal.bytes(HEADS, DIM, DIM, itemsize=4, variant=v, padded=True).sum()) for v in ("ring", "all-gather")
)
print(f"A device holds {deal.shard:,} tokens, and the busiest one has {deal.imbalance:.3f} of the mean to do.")
print(
    f"A layer has to send {needed / 2**20:.2f} MiB; all keys and values to everybody would be {whole / 2**20:.2f} MiB."
)

# %% [markdown]
# ## A model, the same on one device and on all
#
# All other layers work token by token, so only the line with `attend` differs.

# %%
mesh = jax.make_mesh((DEVICES,), ("sp",), axis_types=(AxisType.Auto,))
att = fk.compile(fk.mask("causal & same(doc)", doc=doc))


def attention_alone(q, k, v):
    return att(q, k, v)


def attention_ring(q, k, v):
    return fk.parallel.attend(att, q, k, v, deal=deal, axis="sp", mesh=mesh)


def rotary(x, place):
    angle = place[:, None, None] * 10000.0 ** (-jnp.arange(0, DIM, 2) / DIM)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate((a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)), -1)


def loss(weights, tokens, labels, place, attend):
    x = weights["embed"][tokens][None]
    q, k, v = jnp.moveaxis((x @ weights["qkv"]).reshape(1, -1, 3, HEADS, DIM), 2, 0)
    x = x + attend(rotary(q, place), rotary(k, place), v).reshape(x.shape) @ weights["out"]
    said = jax.nn.log_softmax(x[0] @ weights["read"])
    return -jnp.take_along_axis(said, labels[:, None], 1).sum() / LENGTH  # padding has no label and says nothing


def initial():
    keys, n = jax.random.split(jax.random.key(0), 4), HEADS * DIM
    shapes = {"embed": (256, n), "qkv": (n, 3 * n), "out": (n, n), "read": (n, 256)}
    return {name: jax.random.normal(key, s) / n**0.5 for (name, s), key in zip(shapes.items(), keys)}


def trained(tokens, labels, place, attend):
    """The losses of some steps, and the gradients of the first."""
    step = jax.jit(jax.value_and_grad(lambda weights: loss(weights, tokens, labels, place, attend)))
    weights, losses, first = initial(), [], None
    for _ in range(STEPS):
        value, gradients = step(weights)
        first = gradients if first is None else first
        losses.append(float(value))
        weights = jax.tree.map(lambda w, g: w - g, weights, gradients)
    return losses, first


# %%
place = np.arange(LENGTH)
alone, wanted = trained(text[:-1], text[1:], place, attention_alone)


def dealt(x):
    """In the order of the deal, a part on each device."""
    return jax.device_put(deal.permute(x, 0), NamedSharding(mesh, PartitionSpec("sp")))


ring, found = trained(dealt(text[:-1]), dealt(text[1:]), dealt(place), attention_ring)
for name, losses in (("one device", alone), (f"{DEVICES} devices", ring)):
    print(f"On {name} the loss goes " + ", ".join(f"{x:.4f}" for x in losses[:: max(1, STEPS // 4)]) + ".")
errors = [float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(*map(jax.tree.leaves, (found, wanted)))]
print(f"Gradients of all weights differ by at most {max(errors):.0e} of their largest entry.")

# %%
assert max(errors) < 1e-4
assert np.allclose(ring, alone, atol=1e-4)
assert alone[-1] < alone[0], "the model learns"
assert deal.imbalance < 1.1
assert needed < whole, "not everything is sent"
