"""Adapters of every cache, torch's and JAX's, for the operations that `cache_model.Run` draws."""

import functools

import numpy as np
import pytest

import frisket as fk

from .cache_model import MASK, NEW, NODES, PAGE, PAGES, SCORE, WIDTH, WINDOW, B, D, G, Run, V, arrays

KINDS = [(kind, dtype) for kind in ("plain", "paged", "ring") for dtype in ("float32", "int8")]


def made(module, kind, dtype):
    if kind == "paged":
        return module.PagedKVCache.create(PAGES, PAGE, B, WIDTH, G, D, V, dtype)
    if kind == "plain":
        return module.KVCache.create(B, PAGE * WIDTH, G, D, V, dtype)
    return module.RingKVCache.create(B, WINDOW + NEW, G, D, V, dtype)


class OfTorch:
    def __init__(self, kind, dtype):
        self.torch, self.module = pytest.importorskip("torch"), pytest.importorskip("frisket.caches.torch")
        self.cache, self.dtype = made(self.module, kind, dtype), dtype
        self.att = fk.compile(MASK, SCORE, backend="aten")

    def stored(self, x):
        if self.dtype == "float32":
            return x
        values, scale = self.module.quantized(self.torch.from_numpy(x), self.torch.int8)
        return (values.float() * scale[..., None]).numpy()

    def attention(self, tokens, tree=None):
        given = arrays(tokens, NEW if tree is None else NODES)
        q, k, v = (self.torch.from_numpy(x).transpose(1, 2) for x in given)
        return self.cache.attention(self.att, q, k, v, [len(x) for x in tokens], tree=tree).transpose(1, 2).numpy()

    def keep(self, path, drafted, counts):
        self.cache.keep(path, drafted, counts)

    def truncate(self, lengths):
        self.cache.truncate(lengths)

    def seat(self, *given):
        self.cache.seat(*given)


@functools.cache
def jitted():
    import jax

    att = fk.compile(MASK, SCORE)
    return (
        jax.jit(lambda c, q, k, v, n: c.attention(att, q, k, v, n), donate_argnums=0),
        jax.jit(lambda c, q, k, v, n, tree: c.attention(att, q, k, v, n, tree=tree), donate_argnums=0),
        jax.jit(lambda c, *given: c.keep(*given), donate_argnums=0),
    )


class OfJax:
    def __init__(self, kind, dtype, eager=False):
        self.module = pytest.importorskip("frisket.caches.jax")
        self.cache, self.dtype, self.eager = made(self.module, kind, dtype), dtype, eager

    def stored(self, x):
        if self.dtype == "float32":
            return x
        import jax.numpy as jnp

        values, scale = self.module.quantized(jnp.asarray(x), jnp.int8)
        return np.asarray(values.astype(jnp.float32) * scale[..., None])

    def attention(self, tokens, tree=None):
        given = (*arrays(tokens, NEW if tree is None else NODES), np.array([len(x) for x in tokens]))
        plain, drafts, _ = jitted()
        out, self.cache = plain(self.cache, *given) if tree is None else drafts(self.cache, *given, np.array(tree))
        if hasattr(self.cache, "overflowed"):
            assert not self.cache.overflowed.any()
        return np.asarray(out)

    def keep(self, *given):
        if self.eager:
            self.cache = self.cache.keep(*given)
            return
        before = self.cache
        self.cache = jitted()[2](before, *given)
        if hasattr(self.cache, "rows"):
            assert not self.cache.overflowed.any()

    def truncate(self, lengths):
        self.cache = self.cache.truncate(np.array(lengths))

    def seat(self, *given):
        self.cache = self.cache.seat(*given)


def run(of, kind, dtype, seed, steps=20, **how):
    cache = of(kind, dtype, **({"eager": True} if of is OfJax and how.get("forgetful") else {}))
    made = Run(cache, seed, cache.stored, kind, **how)
    made.steps(steps)
    return made
