"""Every mask of the library once more, from its words: for each query, the keys it sees, by lists and loops."""

from __future__ import annotations

import itertools

import numpy as np

from support.words import documents, images, marked, order  # noqa: F401 (each enters its words)
from support.words.registry import WORDS


def dense(case):
    """bool [batch, heads, q_len, kv_len] of a `cases.Case`."""
    name, args = call(case.text, case.params)
    sees = WORDS[name](case, *args)
    out = np.zeros((case.batch, case.heads, case.q_len, case.kv_len), bool)
    for b, h, q in itertools.product(range(case.batch), range(case.heads), range(case.q_len)):
        for k in sees(b, h, q):
            if 0 <= k < case.kv_len:
                out[b, h, q, k] = True
    return out


def call(text, params):
    """("window", [4]) of "window(4)"; arguments that are neither numbers nor names of tables stay text."""
    name, _, rest = text.partition("(")
    args = rest[:-1].split(", ") if rest else []
    return name, [_argument(a, params) for a in args]


def _argument(text, params):
    if text in params:
        return np.asarray(params[text])
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
