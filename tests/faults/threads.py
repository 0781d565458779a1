"""Calls of all kinds from 64 threads at once, on a cold cache, held to the same calls one after the other."""

from __future__ import annotations

import json
import random

from .machine import environment, folder, said

THREADS = """
import itertools, json, random, sys, threading, time, warnings
warnings.simplefilter("ignore")
import numpy as np
import jax, jax.numpy as jnp
import torch, frisket as fk
from frisket.grammar import memo
draw, count, kinds = random.Random(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(2)
doc = np.sort(np.random.default_rng(0).integers(0, 9, 400))
MASKS = [
    ("causal & window(60)", None, {}), ("causal & doc[q] == doc[k]", None, {"doc": doc}),
    ("causal", "20 * tanh(score / 20)", {}),
    ("causal & q - k < w", "score + s[h] * (k - q)", {"w": 77, "s": np.float32([0.5, 0.1])}),
    ("k % 3 == 0 | q == k", None, {}),
][:kinds]
ATT = [fk.compile(mask, score, engines=False, **more) for mask, score, more in MASKS]
PLANS = ("cpp", "aten")

def arrays(n, dtype, number):
    rng = np.random.default_rng(number)
    return [rng.standard_normal((1, 2, m, 16)).astype(np.float32) for m in (n, n, n)], dtype

def by_torch(which, n, dtype, gradients, number):
    made, dtype = arrays(n, dtype, number)
    q, k, v = (torch.from_numpy(x).to(getattr(torch, dtype)).requires_grad_(gradients) for x in made)
    out = att_of(which, n)(q, k, v, **call_of(which, n, number))
    found = [out.detach(), *(torch.autograd.grad(out.float().square().sum(), (q, k, v)) if gradients else ())]
    return [x.float().numpy() for x in found]

def by_jax(which, n, dtype, gradients, number):
    made, dtype = arrays(n, dtype, number)
    q, k, v = (jnp.asarray(x.swapaxes(1, 2), dtype) for x in made)
    att, more = att_of(which, n), call_of(which, n, number)
    run = lambda q, k, v: att(q, k, v, **more)
    found = [run(q, k, v)]
    if gradients:
        found += jax.grad(lambda q, k, v: (run(q, k, v).astype(jnp.float32) ** 2).sum(), (0, 1, 2))(q, k, v)
    return [np.asarray(x.astype(jnp.float32)) for x in found]

def att_of(which, n):
    return ATT[which]

def call_of(which, n, number):  # tables that change from call to call
    if "doc" not in MASKS[which][2]:
        return {}
    return {"doc": np.sort(np.random.default_rng(number).integers(0, 9, n))}

jobs = [
    (draw.choice([by_torch, by_torch, by_jax]), draw.randrange(kinds), draw.choice([40, 130, 333, 400]),
     draw.choice(["float32", "float32", "bfloat16"]), draw.random() < 0.5, number) for number in range(count)
]
found, failed = [None] * count, []
turns, start = itertools.count(), threading.Barrier(64)
def work():
    start.wait()
    while (i := next(turns)) < count:
        try:
            found[i] = jobs[i][0](*jobs[i][1:])
        except BaseException as error:
            failed.append(f"{jobs[i][0].__name__} {MASKS[jobs[i][1]]} {jobs[i][2:]}: {type(error).__name__}: {error}")
threads = [threading.Thread(target=work) for _ in range(64)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed, failed[:5]
wrong = []
for clear in (False, True):
    if clear:
        memo.clear()
    for i, (run, *given) in enumerate(jobs):
        again = run(*given)
        if not all(map(np.array_equal, found[i], again)):
            off = max(float(np.abs(a - b).max()) for a, b in zip(found[i], again))
            wrong.append(f"{run.__name__} {MASKS[given[0]]} {given[1:]}, tables cleared {clear}: off by {off}")
assert not wrong, (len(wrong), wrong[:5])
import os
left = [x for x in os.listdir(os.environ["FRISKET_CACHE_DIR"] + "/native") if not x.endswith((".so", ".cpp"))]
assert not left, left
jaxes, gradients = sum(run is by_jax for run, *_ in jobs), sum(x[4] for x in jobs)
print(json.dumps({"calls": count, "of jax": jaxes, "with gradients": gradients}))
"""


def mixed(draw: random.Random, calls: int = 400, kinds: int = 5) -> dict[str, int]:
    with folder() as place:
        given = [str(draw.randrange(10**6)), str(calls), str(kinds)]
        (line,) = said(THREADS, environment(place / "cache"), arguments=given)
    return json.loads(line)


FAULTS = {"threads": (mixed, 2)}
