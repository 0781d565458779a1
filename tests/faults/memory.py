"""Processes that may have no more memory: while a layout is made, and while a kernel runs."""

from __future__ import annotations

import json
import random
from collections import Counter

from .machine import environment, folder, said

LIMITED = """
import json, random, resource, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
import torch, frisket as fk

def held():
    return int(next(x for x in open("/proc/self/status") if x.startswith("VmSize")).split()[1]) << 10

class Limit:
    def __init__(self, mib):
        self.mib = mib
    def __enter__(self):
        resource.setrlimit(resource.RLIMIT_AS, (held() + int(self.mib * 2**20), resource.RLIM_INFINITY))
    def __exit__(self, *error):
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)

def tried(what, mib):
    try:
        with Limit(mib):
            return "done", what()
    except MemoryError:
        return "MemoryError", None
    except fk.FrisketError as error:
        assert "memory" in str(error), error
        return type(error).__name__, None
    except RuntimeError as error:
        assert "can't allocate memory" in str(error) or "memory" in str(error).lower(), error
        return "RuntimeError", None
draw = random.Random(int(sys.argv[1]))
"""
PLANS = (
    LIMITED
    + """
n = 1_000_000
tables = {
    "causal & doc[q] == doc[k]": {"doc": np.sort(np.random.default_rng(0).integers(0, 5000, n))},
    "strided(977) & causal": {},
    "causal & seen[k]": {"seen": np.random.default_rng(0).random(n) < 0.5},
    "(q // 64 == k // 64) | (k % 1000 < 3)": {},
}
def laid(text):
    layout = fk.mask(text, **tables[text]).layout(n, n)
    return layout.visible_pairs, int(layout.spans.count.sum())
for text in tables:
    fk.mask(text, **tables[text]).layout(1000, 1000)  # the code of the analysis is loaded
for text in tables:
    seen = []
    for mib in draw.sample(range(1, 60), 4) + draw.sample(range(60, 300), 2):
        seen.append(tried(lambda: laid(text), mib))
    want = laid(text)
    assert all(x in (None, want) for _, x in seen), (text, seen, want)
    print(json.dumps([x for x, _ in seen]))
"""
)
KERNELS = (
    LIMITED
    + """
torch.set_num_threads(2)
draws = np.random.default_rng(0)
def made(kind):
    rows, dim, q_len, kv_len, mask, more = kind
    q = torch.randn(1, rows, q_len, dim, requires_grad=q_len > 1)
    k, v = (torch.randn(1, rows, kv_len, dim, requires_grad=q_len > 1) for _ in "kv")
    att = fk.compile(mask, engines=False, **more)
    def run():
        out = att(q, k, v)
        return [out.detach(), *(torch.autograd.grad(out.sum(), (q, k, v)) if q_len > 1 else ())]
    return run
bias = torch.randn(1999, requires_grad=True)
kinds = [
    (4, 64, 3000, 3000, "causal & window(100)", {}), (1, 16, 1, 400_000, "bottom_right", {}),
    (2, 128, 1000, 1000, "causal", {"score": "score + bias[q - k + 999]", "bias": bias}),
    (4, 64, 2000, 2000, "causal & doc[q] == doc[k]", {"doc": np.sort(draws.integers(0, 40, 2000))}),
]
for kind in kinds:
    run = made(kind)
    want, seen = run(), []
    for mib in sorted(draw.sample(range(0, 16), 12) + draw.sample(range(16, 160), 3)):
        how, found = tried(run, mib / 4)
        seen.append(how)
        assert found is None or all(map(torch.equal, found, want)), (kind, mib)
        assert all(map(torch.equal, run(), want)), (kind, mib)  # the next call
    print(json.dumps(seen))
"""
)


def limited(text: str, draw: random.Random) -> dict[str, int]:
    counts: Counter[str] = Counter()
    with folder() as place:
        env = environment(place / "cache", MALLOC_ARENA_MAX="1")
        for line in said(text, env, arguments=[str(draw.randrange(10**6))]):
            counts.update(json.loads(line))
    return counts


FAULTS = {
    "memory-of-plans": (lambda draw: limited(PLANS, draw), 3),
    "memory-of-kernels": (lambda draw: limited(KERNELS, draw), 3),
}
