"""Signals at random moments, in every phase of a call."""

from __future__ import annotations

import json
import random
from collections import Counter

from .machine import environment, folder, said

HEAD = """
import json, os, random, signal, sys, threading, time, warnings
from frisket.runtime.machine import cpp_build
draw = random.Random(int(sys.argv[1]))
os.environ["CXX"] = sys.argv[2]

def built(number):
    return cpp_build.library(f'extern "C" int answer() {{ return {number}; }}').answer() == number
"""
WORK = (
    HEAD
    + """
warnings.simplefilter("ignore")
import numpy as np
import torch, frisket as fk
from frisket.grammar import memo

def dense(q, k, v, seen):
    s = (q.double() @ k.double().mT) * q.shape[-1] ** -0.5
    return torch.softmax(s.masked_fill(~torch.from_numpy(seen), -torch.inf), -1) @ v.double()

def arrays(n, heads=2, gradients=False):
    return [x.requires_grad_(gradients) for x in torch.randn(3, 1, heads, n, 16).unbind(0)]

def near(found, want):
    return (found - want).abs().max().item() < 1e-4

class Text:  # parsed, checked, simplified: a new one every time
    def __init__(self):
        self.w = draw.randrange(2, 90)
        self.text = f"causal & (q - k < {self.w} | k % {draw.randrange(2, 50)} == {draw.randrange(0, 2)})"
    def __call__(self):
        memo.clear()
        mask = fk.mask(self.text)
        return str(fk.mask(str(mask))) == str(mask) and bool(mask.implies("causal", 3000, 3000))

class Layout:  # of 100,000 tokens and more
    def __init__(self):
        doc = np.sort(np.random.default_rng(draw.randrange(10**6)).integers(0, 900, 200_000))
        self.mask, self.doc = fk.mask("causal & doc[q] == doc[k]", doc=doc), doc
    def __call__(self):
        memo.clear()
        counts = np.bincount(self.doc)
        return self.mask.layout(200_000, 200_000).visible_pairs == int((counts * (counts + 1) // 2).sum())

class Kernel:  # compiled already
    def __init__(self):
        self.n = draw.choice([700, 1500])
        self.att, self.qkv = fk.compile("causal & window(300)", engines=False), arrays(self.n, gradients=True)
        i = np.arange(self.n)
        self.seen = (i[:, None] >= i) & (i[:, None] - i < 300)
        self.want = dense(*self.qkv, self.seen)
        self.grads = torch.autograd.grad(self.want.square().sum(), self.qkv)
    def __call__(self):
        out = self.att(*self.qkv)
        found = torch.autograd.grad(out.square().sum(), self.qkv)
        return near(out, self.want) and all(near(a, b) for a, b in zip(found, self.grads))

class Compile:  # a kernel of its own, on a cold cache
    def __init__(self):
        self.m, (self.q, self.k, self.v) = draw.randrange(10**6), arrays(130)
        i = np.arange(130)
        self.seen = (i[:, None] >= i) & ((i * 37 % 1000 + self.m) % 3 > 0) | (i[:, None] == i)
    def __call__(self):
        number = self.m % 50
        text = f"(q >= k) & ((k * 37 % 1000 + {self.m}) % 3 > 0) | (q == k) & (k > -{number + 2})"
        return near(fk.compile(text, backend="cpp")(self.q, self.k, self.v), dense(self.q, self.k, self.v, self.seen))
"""
)
INTERRUPTS = (
    WORK
    + """
def after(seconds, group):
    def send():
        time.sleep(seconds)
        if armed.is_set():
            (os.killpg if group else os.kill)(os.getpid(), signal.SIGINT)
    threading.Thread(target=send, daemon=True).start()
armed = threading.Event()
kinds = {"parse": Text, "layout": Layout, "kernel": Kernel, "compile": Compile}
counts = {}
for _ in range(int(sys.argv[3])):
    name = draw.choice(sorted(kinds))
    run = kinds[name]()
    start = time.monotonic()
    assert run(), name  # code is loaded, and how long it takes
    took = time.monotonic() - start
    run = kinds[name]()
    how = "interrupted in " + name
    armed.set()
    try:
        after(draw.random() * min(took, 0.5), draw.random() < 0.5)
        assert run(), name
        armed.clear()
        time.sleep(0.01)
        how = "too late for " + name
    except KeyboardInterrupt:
        armed.clear()
    try:
        time.sleep(0.02)
    except KeyboardInterrupt:
        pass
    counts[how] = counts.get(how, 0) + 1
    assert run(), name + " after an interrupt"
folder = os.environ["FRISKET_CACHE_DIR"] + "/native"
left = [x for x in os.listdir(folder) if not x.endswith((".so", ".cpp"))]
assert not left, left
assert not cpp_build._guard.locked() and not any(x.locked() for x in cpp_build._building.values())
for table in memo.tables():
    assert table.bytes >= 0, table
print(json.dumps(counts))
"""
)
ALARMS = (
    WORK
    + """
seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
for kind in (Text, Layout, Kernel, Compile):
    for _ in range(2):
        assert kind()(), kind
signal.setitimer(signal.ITIMER_REAL, 0)
print(json.dumps({"alarms": len(seen)}))
"""
)
TERMINATED = (
    HEAD
    + """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
def end():
    while not [x for x in os.listdir(os.environ["FRISKET_CACHE_DIR"] + "/native") if x.endswith(".tmp")]:
        time.sleep(0.001)
    time.sleep(draw.random() * 0.05)
    os.kill(os.getpid(), signal.SIGTERM)
os.makedirs(os.environ["FRISKET_CACHE_DIR"] + "/native", mode=0o700)
threading.Thread(target=end, daemon=True).start()
try:
    while True:
        assert built(draw.randrange(10**6))
except SystemExit as ended:
    assert ended.code == 3
left = [x for x in os.listdir(os.environ["FRISKET_CACHE_DIR"] + "/native") if not x.endswith((".so", ".cpp"))]
assert not left, left
assert built(draw.randrange(10**6))
print(json.dumps({"terminated": 1}))
"""
)
CHILDREN = (
    HEAD
    + """
def reap(*_):  # as servers do
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
for handler in (signal.SIG_IGN, reap, signal.SIG_DFL):
    signal.signal(signal.SIGCHLD, handler)
    assert built(draw.randrange(10**6)), handler
    try:
        cpp_build.library(f'extern "C" int answer() {{ return nonsense + {draw.randrange(10**6)}; }}')
        raise AssertionError("nonsense was compiled")
    except cpp_build.BuildError as error:
        assert "nonsense" in str(error), error
print(json.dumps({"handlers": 3}))
"""
)


def counted(text: str, draw: random.Random, *arguments: str, pieces: bool = False) -> dict[str, int]:
    from .kills import compiler_in_pieces

    with folder() as place:
        compiler = compiler_in_pieces(place) if pieces else ""
        given = [str(draw.randrange(10**6)), compiler, *arguments]
        (line,) = said(text, environment(place / "cache"), arguments=given)
    return Counter(json.loads(line))


FAULTS = {
    "interrupts": (lambda draw: counted(INTERRUPTS, draw, "25"), 6),
    "alarms": (lambda draw: counted(ALARMS, draw), 2),
    "sigterm": (lambda draw: counted(TERMINATED, draw, pieces=True), 3),
    "sigchld": (lambda draw: counted(CHILDREN, draw), 1),
}
