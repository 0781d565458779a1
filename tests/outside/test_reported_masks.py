"""Masks and biases that users of other libraries report bugs about, under torch and JAX.

Each formula is written a second time from its source, of one pair of positions. Dense attention in float64 follows from
it, and keys that no query sees hold NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import frisket as fk

RNG = np.random.default_rng(7)
LIMITS = {"float32": 1e-5, "bfloat16": 6e-3}  # of norms; no score is large


@dataclass
class Case:
    """Text and values for frisket; for the reference, what one pair sees and the score of all."""

    mask: str
    visible: Callable[[int, int, int, int], bool]
    values: dict[str, Any] = field(default_factory=dict)
    score: str | None = None
    scored: Callable[..., torch.Tensor] = lambda score: score
    learned: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, int] = (37, 37)
    heads: tuple[int, int, int] = (2, 4, 2)  # batch, heads, key heads
    size: int = 16
    latent: int | None = None  # values are so many features of keys
    scale: float | None = None

    def arrays(self, dtype, members=1):
        """{name: float32 [members, ...]}, rounded to `dtype`; `dout` multiplies the result."""
        rng = np.random.default_rng(3)
        (q_len, kv_len), (batch, heads, kv_heads) = self.lengths, self.heads
        shapes = {"q": (heads, q_len, self.size), "k": (kv_heads, kv_len, self.size), "v": (kv_heads, kv_len, 16)}
        if self.latent:
            del shapes["v"]
        made = {n: rng.standard_normal((members, batch, *s)) for n, s in shapes.items()}
        made["dout"] = rng.standard_normal((members, batch, heads, q_len, self.latent or 16))
        made |= {n: x + rng.random((members, *np.shape(x))) for n, x in self.learned.items()}
        return {n: torch.tensor(x).to(getattr(torch, dtype)).float().numpy() for n, x in made.items()}

    def dense(self):
        batch, heads, _ = self.heads
        return np.vectorize(self.visible, otypes=[bool])(*np.indices((batch, heads, *self.lengths)))


# -- the formulas -----------------------------------------------------------------------------------------------------

LENGTHS = np.array([24, 17])
GROUPS = np.stack([np.repeat([-1, 0, -1, 1, -1], n) for n in ([3, 20, 2, 9, 3], [0, 11, 1, 25, 0])])
WIDTHS = np.array([5, 64])
NEAR = RNG.integers(1, 20, (4, 37))
CONTEXT, DRAFT = 30, 5
ANCHORS = np.array([[3, 11, 12, 30], [0, 8, 25, 25]])
DRAFTED = np.array([[1, 1, 1, 1], [1, 1, 0, 1]], bool)
SLOTS = np.stack([np.r_[RNG.permutation(33), [-1] * 10][RNG.permutation(43)] for _ in range(2)])
STARTS = np.array([24, 16])
RESIDUES = RNG.random((6, 23)) < 0.8


def eagle3(b, h, i, j, shift=0):
    """SpecForge's training-time test: step 0 is causal, each later step has one key of the same token."""
    step, token = divmod(j, 24)
    if step == 0:
        return token + shift <= i < (24 if shift else LENGTHS[b]) and token < LENGTHS[b]
    return token == i and token < LENGTHS[b]


def gemma3(b, h, i, j):
    """transformers' sliding window of 6 or the same image."""
    return 0 <= i - j < 6 or GROUPS[b, i] == GROUPS[b, j] != -1


def dflash(b, h, i, j):
    """SpecForge's drafts: a block sees the context before its anchor, and itself."""
    block = i // DRAFT
    inside = j < ANCHORS[b, block] if j < CONTEXT else (j - CONTEXT) // DRAFT == block
    return bool(DRAFTED[b, block] and inside)


def dflash_window(b, h, i, j, width=7):
    """DFlash in sliding windows: each draft token has a separate window, and drafts are causal."""
    low = ANCHORS[b, i // DRAFT] + i % DRAFT - (width - 1)
    return dflash(b, h, i, j) and (low <= j if j < CONTEXT else (j - CONTEXT) % DRAFT <= i % DRAFT)


DFLASH = "(k < c & k < anchor[b, q // n] | k >= c & (k - c) // n == q // n) & drafted[b, q // n]"
DRAFTS = {"c": CONTEXT, "n": DRAFT, "anchor": ANCHORS, "drafted": DRAFTED}
EAGLE3 = "k >= Q_LEN & k % Q_LEN < n[b] & (k - q) % Q_LEN == 0"
CASES = {
    "eagle3": Case(f"q >= k & k < n[b] & q < n[b] | {EAGLE3}", eagle3, {"n": LENGTHS}, lengths=(24, 72)),
    "eagle3 shifted": Case(
        f"q - shift >= k & k < n[b] | {EAGLE3}", lambda *at: eagle3(*at, shift=2), {"n": LENGTHS, "shift": 2},
        lengths=(24, 72),
    ),
    "images wider than the window": Case(
        "causal & q - k < 6 | group[b, q] == group[b, k] & group[b, q] >= 0", gemma3, {"group": GROUPS}
    ),
    "windows by row": Case(
        "causal & q - k < width[b]", lambda b, h, i, j: 0 <= i - j < WIDTHS[b], {"width": WIDTHS}
    ),
    "windows by head and query": Case(
        "causal & q - k < width[h, q]", lambda b, h, i, j: 0 <= i - j < NEAR[h, i], {"width": NEAR}
    ),
    "anchored drafts": Case(DFLASH, dflash, DRAFTS, lengths=(20, 50)),
    "anchored drafts in windows": Case(
        f"{DFLASH} & (k >= c | k >= anchor[b, q // n] + q % n - (w - 1)) & (k < c | (k - c) % n <= q % n)",
        dflash_window, {**DRAFTS, "w": 7}, lengths=(20, 50),
    ),
    "slots in any order": Case(
        "pos[b, k] >= 0 & pos[b, k] <= q + start[b] & q + start[b] - pos[b, k] < 12",
        lambda b, h, i, j: SLOTS[b, j] >= 0 and 0 <= i + STARTS[b] - SLOTS[b, j] < 12,
        {"pos": SLOTS, "start": STARTS}, lengths=(7, 43),
    ),
    "latent attention": Case(
        "k <= q + start[b]", lambda b, h, i, j: j <= i + STARTS[b], {"start": STARTS}, lengths=(5, 33),
        heads=(2, 4, 1), size=576, latent=512, scale=192**-0.5,
    ),
    "triangle bias": Case(  # AlphaFold 2, algorithm 13: rows of three, one bias of a sequence's pairs
        "seen[b, k]", lambda b, h, i, j: RESIDUES[b, j], {"seen": RESIDUES}, "score + pair[b // 3, h, q, k]",
        lambda score, pair: score + pair.repeat_interleave(3, 0), {"pair": np.zeros((2, 4, 23, 23))},
        lengths=(23, 23), heads=(6, 4, 4),
    ),
    "learned scalar read twice": Case(
        "causal", lambda b, h, i, j: j <= i, {}, "c * tanh(score / c) + t[h, q] - t[h, k]",
        lambda score, c, t: c * torch.tanh(score / c) + t[:, :, None] - t[:, None, :],
        {"c": 1.5, "t": np.zeros((4, 37))},
    ),
}  # fmt: skip


# -- both sides -------------------------------------------------------------------------------------------------------


def reference(case, arrays):
    """{name: float64} of one member: the result, and the gradients of the others."""
    x = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in arrays.items()}
    groups = case.heads[1] // case.heads[2]
    k, v = (y.repeat_interleave(groups, 1) for y in (x["k"], x.get("v", x["k"][..., : case.latent])))
    scores = case.scored(x["q"] @ k.mT * (case.scale or case.size**-0.5), **{n: x[n] for n in case.learned})
    weights = scores.exp() * torch.from_numpy(case.dense())
    out = weights @ v / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    wrt = [n for n in x if n != "dout"]
    gradients = torch.autograd.grad((out * x["dout"]).sum(), [x[n] for n in wrt])
    return {n: y.detach().numpy() for n, y in zip(("out", *wrt), (out, *gradients), strict=True)}


def run(case, x, framework, way, backend):
    """{name: array of members} as `reference`; the arrays `x` are those of torch or JAX."""

    def loss(x, dout):
        q, k, v = (flip(y) for y in (x["q"], x["k"], x.get("v", x["k"][..., : case.latent])))
        values = case.values | {n: x[n] for n in case.learned}
        out = flip(fk.attention(q, k, v, case.mask, case.score, case.scale, backend=backend, **values))
        return (out * dout).sum(), out

    flip, dout = (lambda y: y if framework == "torch" else y.swapaxes(1, 2)), x.pop("dout")
    if framework == "jax":
        gradients, out = jax.jit(jax.vmap(jax.grad(loss, has_aux=True)) if way == "vmap" else single(loss))(x, dout)
    elif way == "vmap":
        gradients, out = torch.func.vmap(torch.func.grad(loss, has_aux=True))(x, dout)
    else:
        leaves = {n: y[0].requires_grad_() for n, y in x.items()}
        total, out = loss(leaves, dout[0])
        found = torch.autograd.grad(total, [*leaves.values()])
        gradients, out = dict(zip(x, (y[None] for y in found), strict=True)), out.detach()[None]
    return {"out": out, **gradients}


def single(loss):
    """The gradient of the one member, without `vmap`."""

    def gradient(*args):
        found = jax.grad(loss, has_aux=True)(*jax.tree.map(lambda y: y[0], args))
        return jax.tree.map(lambda y: y[None], found)

    return gradient


def check(case, dtype, way, framework, backend):
    arrays = case.arrays(dtype, 3 if way == "vmap" else 1)
    want = [reference(case, {n: x[i] for n, x in arrays.items()}) for i in range(len(arrays["q"]))]
    unseen = ~case.dense().any((1, 2))[:, None, :, None]  # [batch, 1, key, 1]
    arrays |= {n: np.where(unseen, np.nan, arrays[n]) for n in "kv" if n in arrays}
    if framework == "torch":
        x = {n: torch.tensor(a, dtype=getattr(torch, dtype)) for n, a in arrays.items()}
    else:
        x = {n: jnp.asarray(a, dtype) for n, a in arrays.items()}
    for name, found in run(case, x, framework, way, backend).items():
        exact = np.stack([w[name] for w in want])
        found = np.asarray(found.float() if framework == "torch" else found, np.float64)
        error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        assert error <= LIMITS[dtype], (name, error)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize(("dtype", "way"), [("float32", "call"), ("bfloat16", "call"), ("float32", "vmap")])
@pytest.mark.parametrize("name", CASES)
def test_reported_masks_and_their_gradients(name, dtype, way, framework):
    """`vmap` is an ensemble of three: q, k, v and learned tensors have an axis for its members."""
    check(CASES[name], dtype, way, framework, "library")


@pytest.mark.exhaustive
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name", CASES)
def test_reported_masks_under_native_kernels(name, framework):
    check(CASES[name], "bfloat16", "call", framework, "cpp")


class Capped(torch.nn.Module):
    """Causal attention with one head and a learned cap, which a score mod reads twice from its closure."""

    def __init__(self):
        super().__init__()
        self.cap = torch.nn.Parameter(torch.rand(()) + 1)
        self.weight = torch.nn.Parameter(torch.randn(16, 16) / 4)
        self.attend = fk.compile("causal", lambda score, b, h, q, k: self.cap * torch.tanh(score / self.cap))

    def forward(self, x):
        x = x @ self.weight
        return self.attend(x, x, x)


def test_ensembles_of_modules_read_the_cap_of_each_member():
    torch.manual_seed(0)
    models, x = [Capped() for _ in range(3)], torch.randn(2, 1, 19, 16)

    def loss(weights, x):
        return torch.func.functional_call(models[0], weights, (x,)).square().sum()

    stacked, _ = torch.func.stack_module_state(models)
    found = torch.func.vmap(torch.func.grad(loss), (0, None))(stacked, x)
    for i, model in enumerate(models):
        cap, weight = wrt = [y.detach().double().requires_grad_() for y in (model.cap, model.weight)]
        y = x.double() @ weight
        weights = (cap * torch.tanh(y @ y.mT / 4 / cap)).exp().tril()
        out = weights / weights.sum(-1, keepdim=True) @ y
        for name, want in zip(("cap", "weight"), torch.autograd.grad(out.square().sum(), wrt), strict=True):
            torch.testing.assert_close(found[name][i].double(), want, rtol=1e-5, atol=1e-5)
