"""Documents, and sequences one after another."""

from __future__ import annotations

import itertools

import numpy as np

from support.words.registry import WORDS, each, words

# -- documents ----------------------------------------------------------------------------------------


def place(off, q):
    """(document, place in it, its length) of a token."""
    for d, (start, stop) in enumerate(itertools.pairwise(off)):
        if start <= q < stop:
            return d, int(q - start), int(stop - start)
    raise AssertionError(f"no document holds {q}")


@words
def same(c, t):
    return each(lambda q: np.flatnonzero(t[: c.kv_len] == t[q]))


@words
def same_by_batch(c, t, start=None, *_):
    if start is None:
        return lambda b, h, q: np.flatnonzero(t[b] == t[b, q])
    return lambda b, h, q: document(c, [*np.unique(start[b]), t.shape[1]], start)(b, h, q)


@words
def same_by_head(c, t):
    return lambda b, h, q: np.flatnonzero(t[b, h] == t[b, h, q])


@words
def document(c, off, inner=None, *_):
    def keys(q):
        d, inside, n = place(off, q)
        local = range(n)
        if inner is not None:  # sliding(4, 1) | sinks(2)
            local = [j for j in range(n) if inside - 4 <= j <= inside + 1 or j in (0, 1)]
        return [off[d] + j for j in local]

    return each(keys)


@words
def document_by_batch(c, off, *inner):
    return lambda b, h, q: document(c, off[b], *inner)(b, h, q)


@words
def causal_document(c, off):
    return each(lambda q: range(q - place(off, q)[1], q + 1))


@words
def causal_blockwise(c, off):
    return each(lambda q: range(0 if place(off, q)[0] == len(off) - 2 else q - place(off, q)[1], q + 1))


@words
def share_question(c, seg):
    return each(lambda q: [k for k in range(q + 1) if seg[k] in (0, seg[q])])


@words
def chunked(c, n):
    return each(lambda q: range(q - q % n, q - q % n + n))


@words
def chunked_causal(c, n):
    return each(lambda q: range(q - q % n, q + 1))


@words
def batchify(c, *args):  # sliding(4, 1) inside blocks of the last argument
    n = args[-1]
    return each(lambda q: [k for k in range(q - 4, q + 2) if k >= 0 and k // n == q // n])


@words
def token_types(c, t):
    return each(lambda q: [k for k in range(c.kv_len) if k <= q or (t[q] > 0 and t[k] == t[q])])


@words
def eviction(c, stop):
    return each(lambda q: [k for k in range(q + 1) if q < stop[k]])


# -- sequences ----------------------------------------------------------------------------------------


@words
def block_diagonal(c, qoff, koff=None):
    if koff is None:
        return chunked(c, qoff)
    return each(lambda q: range(koff[place(qoff, q)[0]], koff[place(qoff, q)[0] + 1]))


@words
def block_diagonal_causal(c, qoff, koff):
    def keys(q):
        d, inside, _ = place(qoff, q)
        return list(range(koff[d], koff[d + 1]))[: inside + 1]

    return each(keys)


@words
def block_diagonal_bottom_right(c, qoff, koff):
    def keys(q):
        d, inside, n = place(qoff, q)
        return until_the_end(list(range(koff[d], koff[d + 1])), inside, n)

    return each(keys)


@words
def block_diagonal_local(c, qoff, koff, w):
    return lambda b, h, q: block_diagonal_bottom_right(c, qoff, koff)(b, h, q)[-w:]


def until_the_end(keys, inside, n):
    """The last of `n` queries sees all keys, the one before it one less."""
    return keys[: max(len(keys) - (n - 1 - inside), 0)]


@words
def gappy_keys(c, qoff, start, lengths):
    return each(lambda q: [start[place(qoff, q)[0]] + j for j in range(lengths[place(qoff, q)[0]])])


@words
def padded_keys(c, qoff, n, lengths):
    return gappy_keys(c, qoff, np.arange(len(lengths)) * n, lengths)


@words
def paged_keys(c, qoff, pages, lengths, t):
    def keys(q):
        d = place(qoff, q)[0]
        return [page * t + j for page in pages[d] for j in range(t)][: lengths[d]]

    return each(keys)


def causal_in_each(keys):
    return lambda c, qoff, *rest: each(lambda q: until_the_end(keys(c, qoff, *rest)(0, 0, q), *place(qoff, q)[1:]))


for name in ("gappy_keys", "padded_keys", "paged_keys"):
    WORDS[f"{name}_causal"] = causal_in_each(WORDS[name])
