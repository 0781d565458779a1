"""A layer of flax that picks its attention by name: train it under one operator, serve it from a cache.

python examples/flax_layer.py [operator]
"""

import sys

import jax
import jax.numpy as jnp
from flax import nnx

import frisket as fk
from frisket.integrations.flax import Attention
from frisket.operations import AttentionRegistry

LENGTH, FEATURES = 48, 32


class Block(nnx.Module):
    def __init__(self, operator: str, rngs: nnx.Rngs) -> None:
        mask = fk.mask("causal & window(w)", w=16)
        self.attention = Attention(FEATURES, heads=4, kv_heads=2, mask=mask, operator=operator, rngs=rngs)
        self.norm = nnx.RMSNorm(FEATURES, rngs=rngs)

    def __call__(self, x, cache=None):
        if cache is None:
            return x + self.attention(self.norm(x))
        out, cache = self.attention(self.norm(x), cache=cache)
        return x + out, cache


def main(operator: str = "frisket") -> float:
    """The largest difference between all tokens at once and one at a time."""
    block = Block(operator, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, LENGTH, FEATURES))

    @nnx.jit
    def gradients(block, x):
        return nnx.grad(lambda block: jnp.square(block(x)).mean())(block)

    print(operator, "gradients of", len(jax.tree.leaves(gradients(block, x))), "arrays")
    whole = block(x)

    @nnx.jit
    def step(block, x, cache):
        return block(x, cache)

    cache, found = block.attention.empty_cache(batch=2, capacity=64), []
    for part in (x[:, :40], *jnp.split(x[:, 40:], LENGTH - 40, axis=1)):  # a prompt, then token by token
        out, cache = step(block, part, cache)
        found.append(out)
    error = float(jnp.abs(jnp.concatenate(found, axis=1) - whole).max())
    print(f"a prompt of 40 tokens and {LENGTH - 40} steps differ from all at once by {error:.0e}")
    return error


if __name__ == "__main__":
    if sys.argv[1:] == ["--list"]:
        print(*AttentionRegistry.list_implementations(), sep="\n")
    else:
        main(*sys.argv[1:])
