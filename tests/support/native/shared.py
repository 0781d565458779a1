"""Programs for tests whose subject is the way of a call and not its kernel: with these texts, float32 or bfloat16 and a
head size of `DIM`, all of them share a dozen native kernels, which one run builds once."""

from __future__ import annotations

import numpy as np

DIM = 16
LENGTH = 48
ALIBI = "score + slope[h] * (k - q)"
# (mask, score mod, values for two heads and LENGTH tokens)
PROGRAMS = {
    "causal": ("causal", None, {}),
    "window": ("causal & window(w)", None, {"w": 9}),
    "documents": ("causal & same(doc)", None, {"doc": np.arange(LENGTH) // 11}),
    "lengths": ("k < n[b]", None, {"n": np.array([LENGTH - 7, 20])}),
    "alibi": ("causal", ALIBI, {"slope": np.array([0.5, 0.125], np.float32)}),
    "softcap": ("causal & window(w)", "softcap(c)", {"w": 9, "c": 20.0}),
}
