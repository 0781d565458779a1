"""Sequences of operations on a cache beside lists of tokens: a prompt is a list, and so is what a fork of it becomes.

Tokens are numbers with a query, a key and a value of their own, so that a list is all that attention needs. `Run` draws
operations and does each to a cache and to the lists; what the cache answers is attention to the list.
"""

from __future__ import annotations

import functools
import random
import re

import numpy as np
import pytest

import frisket as fk
from frisket.caches import PagePool

B, H, G, D, V = 2, 4, 2, 16, 8  # sequences, heads, key heads, dim, dim of values
PAGE, WIDTH, PAGES = 16, 4, 40
NEW, NODES, TOKENS = 9, 4, 50  # tokens of a chunk, of a tree, and all there are
WINDOW = 11
MASK, SCORE = f"causal & window({WINDOW})", "alibi"
PINNED = 3  # first tokens that a ring keeps
MASKS = dict.fromkeys(("plain", "paged", "ring"), MASK) | {"pinned": f"causal & (window({WINDOW}) | sinks({PINNED}))"}
_draw = np.random.default_rng(12)
Q, K, VALUES = (_draw.standard_normal((TOKENS, n, d)).astype(np.float32) for n, d in ((H, D), (G, D), (G, V)))


def arrays(tokens: list[list[int]], new: int) -> list[np.ndarray]:
    """q, k, v [batch, new, heads, dim] of the tokens of every row, padded with what must not matter."""
    made = [np.full((B, new, *x.shape[1:]), 1e4, np.float32) for x in (Q, K, VALUES)]
    for b, its in enumerate(tokens):
        for x, of in zip(made, (Q, K, VALUES), strict=True):
            x[b, : len(its)] = of[its]
    return made


class Sequence:
    def __init__(self, tokens=(), drafts=None):
        self.tokens, self.drafts = list(tokens), drafts  # drafts: (parents, tokens) behind them
        self.peak = 0  # how many there were when some were taken back


class Run:
    """`cache` is an adapter with `attention(tokens, tree=None)` -> [batch, new, heads, v_dim], `keep(path, drafted,
    counts)`, `truncate(lengths)` and, of pages, `seat(pool, names, new, copies)`. With `forgetful` the pool is
    sometimes not told what the cache dropped, or not asked for pages of its own: then the cache has to refuse."""

    def __init__(self, cache, seed, stored=lambda x: x, kind="plain", forgetful=False):
        self.cache, self.draw, self.kind, self.forgetful = cache, random.Random(seed), kind, forgetful
        self.k, self.v = (stored(x) for x in (K, VALUES))
        self.sequences = {b: Sequence() for b in range(B)}
        self.rows, self.names, self.refused, self.copies = list(range(B)), B, 0, []
        self.pool = PagePool(PAGES, PAGE) if kind == "paged" else None
        self.most = PAGE * WIDTH - NEW if kind in ("plain", "paged") else 500
        if self.pool:
            for b in range(B):
                self.pool.allocate(b)

    def steps(self, n):
        what = {"plain": "append append tree keep truncate", "ring": "append append append empty"}
        what["pinned"] = what["plain"] + " append empty"
        what["paged"] = what["plain"] + " tree fork fork leave free back"
        for _ in range(n):
            getattr(self, self.draw.choice(what[self.kind].split()))()

    # -- what is done to both ---------------------------------------------------------------------------------

    def append(self):
        self.settle()
        room = [0 if s is None else max(0, self.most - len(self.sequences[s].tokens)) for s in self.rows]
        new = [self.some(self.draw.randint(0, min(NEW, n))) for n in room]
        if not all(new) and self.draw.random() < 0.5:
            new = [[*x, *self.some(1)][:1] if n else [] for x, n in zip(new, room, strict=True)]
        self.seat(new)
        out = self.cache.attention(new)
        for b, tokens in enumerate(new):
            if tokens:
                seq = self.sequences[self.rows[b]]
                seq.tokens += tokens
                self.compare(out[b, : len(tokens)], seq.tokens, len(tokens))

    def tree(self):
        self.settle()
        fits = [s is not None and len(self.sequences[s].tokens) + NODES <= self.most for s in self.rows]
        parents = [self.draw.randint(-1, i - 1) for i in range(NODES)]
        new = [self.some(NODES) if fit else [] for fit in fits]
        self.seat(new)
        out = self.cache.attention(new, parents)
        for b, tokens in enumerate(new):
            if tokens:
                seq = self.sequences[self.rows[b]]
                seq.drafts = parents, tokens
                for i in range(NODES):
                    self.compare(out[b, i : i + 1], seq.tokens + [tokens[j] for j in path_to(parents, i)], 1)
        if self.pool and self.draw.random() < 0.5:  # another path of the same tree
            self.fork(self.draw.choice([s for s in self.rows if s is not None] or [None]))

    def keep(self):
        drafted = [0 if s is None or self.sequences[s].drafts is None else NODES for s in self.rows]
        if not any(drafted):
            return
        paths, counts = np.zeros((B, NODES), int), np.zeros(B, int)
        for b, n in enumerate(drafted):
            if n:
                path = path_to(self.sequences[self.rows[b]].drafts[0], self.draw.randrange(NODES))
                path = path[: self.draw.choice((len(path), self.draw.randint(0, len(path))))]
                paths[b, : len(path)], counts[b] = path, len(path)
        self.owned(drafted)
        try:
            self.cache.keep(paths, np.array(drafted), counts)
        except fk.ShapeError as error:  # eagerly; what `jax.jit` says is looked at there
            self.refusal(error, "pool.own")
            self.refused += 1
            self.owned(drafted, always=True)
            self.cache.keep(paths, np.array(drafted), counts)
        for b, n in enumerate(drafted):
            if n:
                seq = self.sequences[self.rows[b]]
                seq.peak = max(seq.peak, len(seq.tokens) + NODES)
                seq.tokens += [seq.drafts[1][i] for i in paths[b, : counts[b]]]
                seq.drafts = None
                self.tell(self.rows[b])

    def truncate(self):
        self.settle()
        if self.pool:  # rows are who they are to be
            self.seated(lambda: [0] * B)
        held = [0 if s is None else len(self.sequences[s].tokens) for s in self.rows]
        least = [0] * B
        if self.kind == "pinned":  # the last tokens alone can be taken back
            for b, s in enumerate(self.rows):
                self.sequences[s].peak = max(self.sequences[s].peak, held[b])
                least[b] = max(0, self.sequences[s].peak - NODES)
        lengths = [self.draw.choice((n, self.draw.randint(m, n))) for m, n in zip(least, held, strict=True)]
        if not self.pool or self.draw.random() < 0.7:
            self.cache.truncate(lengths)
            told = self.tell
        else:
            told = self.tell_all  # nobody but the pool knows
        for s, n in zip(self.rows, lengths, strict=True):
            if s is not None:
                del self.sequences[s].tokens[n:]
                self.sequences[s].peak *= n > 0
                told(s)

    def empty(self):
        self.settle()
        gone = [self.draw.random() < 0.3 for _ in self.rows]
        self.cache.truncate([0 if g else len(self.sequences[s].tokens) for s, g in zip(self.rows, gone, strict=True)])
        for s, g in zip(self.rows, gone, strict=True):
            if g:
                self.sequences[s].tokens.clear()
                self.sequences[s].peak = 0

    def fork(self, s=None):
        """A copy of a row or of what has left, with its drafts if it has some."""
        if not 0 < len(self.sequences) < 7:
            return
        s = self.draw.choice(list(self.sequences)) if s is None else s
        old = self.sequences[s]
        self.sequences[self.names] = Sequence(old.tokens, old.drafts)
        self.pool.fork(s, self.names)
        self.names += 1
        if self.draw.random() < 0.5:  # into a row, at the next `seat`
            self.rows[self.draw.randrange(B)] = self.names - 1

    def leave(self):
        self.rows[self.draw.randrange(B)] = None

    def back(self):
        away = [s for s in self.sequences if s not in self.rows]
        if None in self.rows and away:
            self.rows[self.rows.index(None)] = self.draw.choice(away)

    def free(self):
        away = [s for s in self.sequences if s not in self.rows]
        if away:
            s = self.draw.choice(away)
            self.pool.free(s)
            del self.sequences[s]

    # -- how ----------------------------------------------------------------------------------------------------

    def some(self, n):
        return [self.draw.randrange(TOKENS) for _ in range(n)]

    def settle(self):
        """Drafts of rows are kept before anything is appended to them."""
        self.keep()

    def tell_all(self, s):
        self.pool.truncate(s, len(self.sequences[s].tokens))

    def tell(self, s):
        if self.pool and not (self.forgetful and self.draw.random() < 0.3):
            self.tell_all(s)

    def owned(self, drafted, always=False):
        """Pages of their own for drafts about to be kept, in rows that are those sequences."""
        if not self.pool:
            return
        if always or not (self.forgetful and self.draw.random() < 0.6):
            starts = {s: len(self.sequences[s].tokens) for s, n in zip(self.rows, drafted, strict=True) if n}
            self.copies += self.pool.own(starts)
        self.seated(lambda: [0] * B)

    def seat(self, new):
        if not self.pool:
            return

        def appended():
            counts = {s: len(x) for s, x in zip(self.rows, new, strict=True) if s is not None}
            self.copies += self.pool.append(counts)
            return [len(x) for x in new]

        self.seated(appended)

    def seated(self, appended):
        """The pool says what is in rows; where it was not told something that is refused, and it is told."""
        for attempt in range(6):
            try:
                self.cache.seat(self.pool, self.rows, appended(), self.copies)
            except fk.ShapeError as error:
                self.refusal(error, "pool.truncate(")
                self.refused += attempt == 0
                # a fork of what `keep` moved, and the pool did not know: what is not moved is all that it has
                if attempt and (lost := re.search(r"(\d+) tokens of the sequence (\d+) are stored", str(error))):
                    seq = self.sequences[int(lost[2])]
                    seq.drafts = None
                    del seq.tokens[int(lost[1]) :]
                for s, seq in self.sequences.items():
                    there = len(seq.tokens) + NODES * (seq.drafts is not None)
                    self.pool.truncate(s, min(self.pool.length(s), there))
            else:
                self.copies = []
                return
        raise AssertionError("refused although the pool knows everything")

    def refusal(self, error, words):
        """An error that says what to write, where something was left out."""
        if not self.forgetful or words not in str(error):
            raise error

    def compare(self, out, tokens, new):
        q, k, v = Q[tokens[-new:]], self.k[tokens], self.v[tokens]
        origin = 0, 0, len(tokens) - new, 0
        want = fk.reference(q[None], k[None], v[None], MASKS[self.kind], SCORE, layout="bshd", origin=origin)[0]
        np.testing.assert_allclose(out, want, atol=5e-6)


def path_to(parents, node):
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


# -- every cache, as an adapter ------------------------------------------------------------------------------------

KINDS = [(kind, dtype) for kind in ("plain", "paged", "ring", "pinned") for dtype in ("float32", "int8")]


def made(module, kind, dtype):
    if kind == "paged":
        return module.PagedKVCache.create(PAGES, PAGE, B, WIDTH, G, D, V, dtype)
    if kind == "plain":
        return module.KVCache.create(B, PAGE * WIDTH, G, D, V, dtype)
    if kind == "pinned":  # chunks overwrite tokens that they see, trees do not
        return module.RingKVCache.create(B, WINDOW + NODES, G, D, V, dtype, sinks=PINNED, drafts=NODES)
    return module.RingKVCache.create(B, WINDOW + NEW, G, D, V, dtype)


class OfTorch:
    def __init__(self, kind, dtype):
        self.torch, self.module = pytest.importorskip("torch"), pytest.importorskip("frisket.caches.torch")
        self.cache, self.dtype = made(self.module, kind, dtype), dtype
        self.att = fk.compile(MASKS[kind], SCORE, backend="aten")

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
def jitted(mask=MASK):
    import jax

    att = fk.compile(mask, SCORE)
    return (
        jax.jit(lambda c, q, k, v, n: c.attention(att, q, k, v, n), donate_argnums=0),
        jax.jit(lambda c, q, k, v, n, tree: c.attention(att, q, k, v, n, tree=tree), donate_argnums=0),
        jax.jit(lambda c, *given: c.keep(*given), donate_argnums=0),
    )


class OfJax:
    def __init__(self, kind, dtype, eager=False):
        self.module = pytest.importorskip("frisket.caches.jax")
        self.cache, self.dtype, self.eager = made(self.module, kind, dtype), dtype, eager
        self.jitted = jitted(MASKS[kind])

    def stored(self, x):
        if self.dtype == "float32":
            return x
        import jax

        values, scale = map(np.asarray, jax.jit(self.module.quantized, static_argnums=1)(x, np.dtype("int8")))
        return values.astype(np.float32) * scale[..., None]

    def attention(self, tokens, tree=None):
        given = (*arrays(tokens, NEW if tree is None else NODES), np.array([len(x) for x in tokens]))
        plain, drafts, _ = self.jitted
        out, self.cache = plain(self.cache, *given) if tree is None else drafts(self.cache, *given, np.array(tree))
        if hasattr(self.cache, "overflowed"):
            assert not self.cache.overflowed.any()
        return np.asarray(out)

    def keep(self, *given):
        if self.eager:
            self.cache = self.cache.keep(*given)
            return
        before = self.cache
        self.cache = self.jitted[2](before, *given)
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
