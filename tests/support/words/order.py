"""Order, windows and prefixes."""

from __future__ import annotations

import itertools

from support.words.documents import place
from support.words.registry import WORDS, each, words

# -- order and windows --------------------------------------------------------------------------------


@words
def full(c):
    return each(lambda q: range(c.kv_len))


@words
def causal(c, offset=0):
    return each(lambda q: range(q + offset + 1))


@words
def bottom_right(c):
    return each(lambda q: range(c.kv_len - (c.q_len - 1 - q)))


@words
def inverse_causal(c):
    return each(lambda q: range(q, c.kv_len))


@words
def bi_causal(c):
    return each(lambda q: range(q, c.kv_len - (c.q_len - 1 - q)))


@words
def block_causal(c, n):
    return each(lambda q: itertools.chain(*(range(start, start + n) for start in range(0, q + 1, n))))


@words
def mini_causal(c, n):
    return each(lambda q: [start + j for start in range(0, c.kv_len, n) for j in range(q % n + 1)])


@words
def window(c, w):
    return each(lambda q: range(q - (w - 1), q + w))


@words
def sliding(c, left, right):
    return each(lambda q: range(q - left, q + right + 1))


@words
def sliding_window(c, w):
    return each(lambda q: [q - back for back in range(w)])


@words
def gym_sliding_window(c, w):
    return each(lambda q: [q - back for back in range(w + 1)])


@words
def local(c, left, right, offset):
    return each(lambda q: range(q + offset - left, q + offset + right + 1))


@words
def flash_window(c, left, right):
    return local(c, left, right, c.kv_len - c.q_len)


@words
def outside_window(c, w):
    return each(lambda q: sorted(set(range(c.kv_len)) - set(range(q - w + 1, q + w))))


@words
def streaming(c, n, w):
    return each(lambda q: [k for k in {*range(n), *range(q - w + 1, q + 1)} if k <= q])


@words
def dilated(c, w, g):
    return each(lambda q: [q + sign * step for sign in (-1, 1) for step in range(0, w + 1, g)])


@words
def strided(c, n):
    return each(lambda q: [*range(q, q - n, -1), *range(q, -1, -n)])


# -- prefixes -----------------------------------------------------------------------------------------


@words
def prefix(c, p):
    return each(lambda q: range(p))


WORDS["sinks"] = prefix


@words
def prefix_lm(c, p):
    return each(lambda q: range(max(p, q + 1)))


@words
def both_prefix(c, p):
    return each(lambda q: range(p) if q < p else range(q + 1))


@words
def prefix_document(c, off, lengths):
    def keys(q):
        d, inside, _ = place(off, q)
        return range(off[d], min(off[d] + max(lengths[d], inside + 1), off[d + 1]))

    return each(keys)


@words
def shared_prefix(c, off, prompt):
    def keys(q):
        d, inside, _ = place(off, q)
        own = list(range(off[d], off[d] + inside + 1))
        p = prompt[d]
        return own if p == d else own + list(range(off[p], off[p + 1]))

    return each(keys)
