"""Masks and score mods that users write (attention-gym, PyTorch's tests, FA4, splash), in text and in Python.

The Python is source, so that one function can be made over numpy's arrays and over JAX's: `xp` is the library, and the
arrays of `tables()` are globals. Shapes: 2 batch entries, 2 heads, 16 queries, 16 keys.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

B, H, S = 2, 2, 16


@dataclass(frozen=True)
class Case:
    name: str
    text: str
    python: str  # a lambda, or statements that define `fn`
    jax_only: bool = False  # numpy has no such function, or the trace over numpy has another meaning for it

    @property
    def kind(self) -> str:
        return "score" if "score" in self.python else "mask"

    def over(self, library: Any, arrays: dict[str, Any], **more: Any) -> Callable[..., Any]:
        """The function over arrays of one library; errors in it show its lines."""
        file = f"<{self.name}>"
        source = self.python if "fn" in self.python else f"fn = {self.python}"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        scope = {"xp": library, "functools": functools, **arrays, **more}
        exec(compile(source, file, "exec"), scope)
        return scope["fn"]


BLOCK_DIFFUSION = """
def fn(q, k):
    q_noised, k_noised = q < 8, k < 8
    u, v = (q % 8) // 2, (k % 8) // 2
    diagonal = (q_noised == k_noised) & q_noised & (u == v)
    return diagonal | q_noised & ~k_noised & (u > v) | ~q_noised & ~k_noised & (u >= v)
"""

NATTEN2D = """
def fn(q, k):
    row, column = xp.clip(q // 4, 1, 2), xp.clip(q % 4, 1, 2)
    return (abs(row - k // 4) <= 1) & (abs(column - k % 4) <= 1)
"""

MORTON = """
def apart(x):
    return ((x >> 1) & 1) | ((x >> 3) & 1) << 1, (x & 1) | ((x >> 2) & 1) << 1

def fn(q, k):
    (q_row, q_column), (k_row, k_column) = apart(q), apart(k)
    return (abs(q_row - k_row) <= 1) & (abs(q_column - k_column) <= 1)
"""

STA2D = """
def fn(q, k):
    q_row, k_row = xp.clip(q // 8, 0, 1), k // 8
    q_column, k_column = xp.clip(q % 4 // 2, 0, 1), k % 4 // 2
    return ((abs(q_row - k_row) <= 0) & (abs(q_column - k_column) <= 1)) | (q >= 14) | (k >= 14)
"""

NESTED = """
def causal(b, h, q, k):
    return q >= k

def shifted(inner):
    return lambda b, h, q, k: inner(b, h, q - off[doc[q]], k - off[doc[k]])

def both(x, y):
    return lambda b, h, q, k: x(b, h, q, k) & y(b, h, q, k)

fn = both(lambda b, h, q, k: doc[q] == doc[k], shifted(causal))
"""

SEARCHED = """
def segment(x):
    return xp.searchsorted(off, x, side="right") - 1

def fn(q, k):
    return (segment(q) == segment(k)) & (q >= k)
"""

EDGES = """
def fn(score, b, h, q, k):
    return score + (edge[path[q, k, 0]] + edge[path[q, k, 1]] + edge[path[q, k, 2]]) / 3
"""

FAR = """
def fn(score, b, h, q, k):
    apart = [(mol[q, i] - mol[k, i]) ** 2 for i in range(3)]
    return xp.exp(-xp.sqrt(apart[0] + apart[1] + apart[2]) / widths[h]) * score
"""


def tables() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    return {
        "doc": np.array([0] * 5 + [1] * 4 + [2] * 7),
        "off": np.array([0, 5, 9, 16]),
        "first": np.array([0, 0, 1]),
        "docs": np.sort(rng.integers(0, 4, (B, S))),
        "glob": rng.random(S) < 0.2,
        "iv": np.array([[0, 4], [4, 10], [10, 16]]),
        "img": rng.integers(0, 3, S),
        "anc": rng.random((S, S)) < 0.4,
        "topk": rng.integers(0, 4, (B, H, 4, 2)),
        "tiles": rng.random((B, H, 4, 4)) < 0.5,
        "near": np.sort(rng.integers(0, 4, (B, H, S))),
        "filled": np.array([4, 4, 2, 3]),
        "marked": rng.random(S) < 0.5,
        "lead": floats(1, B, H, S),
        "lens": np.array([9, 14]),
        "shift": np.array([1, 3]),
        "win": rng.integers(0, 9, S),
        "drop": rng.random((B, S)) < 0.3,
        "dense": rng.random((B, H, S, S)) < 0.4,
        "dist": rng.integers(0, 5, (B, S, S)),
        "path": rng.integers(0, 6, (S, S, 3)),
        "edge": floats(6),
        "perm": rng.permutation(S),
        "slopes": floats(H),
        "per_batch": floats(B),
        "tok": floats(S),
        "tok2": floats(S),
        "bias2": floats(S, S),
        "bias3": floats(B, S, S),
        "bias4": floats(B, H, S, S),
        "spatial": floats(H, 5),
        "rel": floats(2 * S),
        "rel_h": floats(B, H, S, 4),
        "kscale": floats(B, H),
        "qr": floats(B, H, S, 4),
        "kr": floats(B, 1, S, 4),
        "mol": floats(S, 3),
        "widths": np.abs(floats(H)) + 0.5,
        "gains": floats(1),
        "mass": np.abs(floats(1)) + 0.5,
        "gain": np.float32(0.75),
        "w": np.int32(6),
        "bt": floats(9, H),
        "idx": rng.integers(0, 9, (S, S)),
    }


NATTEN1D = """
def fn(q, k):
    size = (16 - q % 2 + 1) // 2
    u, v = q // 2, k // 2
    first = xp.clip(u // 2 * 2 + 1 - 1, 0, size - 3)
    return (q % 2 == k % 2) & (v - first >= 0) & (v - first < 3)
"""

NATTEN3D = """
def near(size, n, u, v):
    first = xp.clip(u - n // 2, 0, size - n)
    return (v - first >= 0) & (v - first < n)

def fn(q, k):
    return near(2, 2, q // 8, k // 8) & near(2, 1, q // 4 % 2, k // 4 % 2) & near(4, 3, q % 4, k % 4)
"""

TILED = """
def place(i):
    return i // 4 // 2 * 2 + i % 4 // 2, i // 4 % 2 * 2 + i % 2

def near(u, v):
    first = xp.clip(u - 1, 0, 1)
    return (v - first >= 0) & (v - first < 3)

def fn(q, k):
    (a, b), (c, d) = place(q), place(k)
    return near(a, c) & near(b, d)
"""

BI_CAUSAL = """
def fn(q, k):
    inside = (2 <= q) & (q < 10) & (4 <= k) & (k < 14)
    return inside & (k - 14 <= q - 10) & (k - 4 >= q - 2)
"""

CUSTOM = """
@jax.custom_jvp
def doubled(x):
    return 2 * x

doubled.defjvp(lambda x, t: (2 * x[0], t[0]))

def fn(score, b, h, q, k):
    return doubled(score)
"""

PADE = """
def fn(score, b, h, q, k):
    x = score / 20
    return 20 * (x * (27 + x * x) / (27 + 9 * (x * x)))
"""

T5 = """
def fn(score, b, h, q, k):
    n = xp.maximum(q - k, 0)
    far = 4 + (xp.log(n / 4) / xp.log(8.0) * 4).astype(int)
    return score + spatial[h, xp.where(n < 4, n, xp.minimum(far, 4))]
"""


MASKS = [
    Case("causal", "causal", "lambda q, k: q >= k"),
    Case("full", "true", "lambda q, k: (q >= 0) | (k >= 0)"),
    Case("inverse causal", "q <= k", "lambda q, k: q <= k"),
    Case("sliding window", "0 <= q - k <= 4", "lambda q, k: xp.logical_and(q - k >= 0, q - k <= 4)"),
    Case("window of a scalar", "causal & q - k < w", "lambda q, k: (q >= k) & (q - k < w)", True),
    Case("dilated", "dilated(6, 3)", "lambda q, k: (abs(q - k) <= 6) & ((q - k) % 3 == 0)"),
    Case("prefix", "prefix(5) | causal", "lambda q, k: xp.logical_or(k < 5, q >= k)"),
    Case("longformer", "abs(q - k) <= 2 | glob[q] | glob[k]", "lambda q, k: (abs(q - k) <= 2) | glob[q] | glob[k]"),
    Case("document", "same(doc) & causal", "lambda b, h, q, k: (doc[q] == doc[k]) & (q >= k)"),
    Case("document by batch", "docs[b, q] == docs[b, k]", "lambda b, h, q, k: docs[b][q] == docs[b, k]"),
    Case("document of clamped ids",
         "min(max(doc[q], 0), 1) == min(max(doc[k], 0), 1)",
         "lambda q, k: xp.clip(doc[q], 0, 1) == xp.clip(doc[k], 0, 1)"),
    Case("document and inner",
         "same(doc) & (q - off[doc[q]]) - (k - off[doc[k]]) < 3",
         "lambda q, k: (doc[q] == doc[k]) & ((q - off[doc[q]]) - (k - off[doc[k]]) < 3)"),
    Case("nested wrappers", "same(doc) & q - off[doc[q]] >= k - off[doc[k]]", NESTED),
    Case("packed causal", "k >= off[doc[q]] & causal", "lambda q, k: (k >= off[doc[q]]) & (q >= k)"),
    Case("packed by offsets", "document(off) & causal", SEARCHED, True),
    Case("shared prefix",
         "same(doc) & causal | off[first[doc[q]]] <= k < off[first[doc[q]] + 1]",
         "lambda q, k: ((doc[q] == doc[k]) & (q >= k)) | ((k >= off[first[doc[q]]]) & (k < off[first[doc[q]] + 1]))"),
    Case("batchify",
         "q // 4 == k // 4 & q % 4 >= k % 4",
         "lambda q, k: (xp.floor_divide(q, 4) == k // 4) & (xp.remainder(q, 4) >= k % 4)"),
    Case("block diffusion",
         "(q < 8) == (k < 8) & q < 8 & (q % 8) // 2 == (k % 8) // 2 | q < 8 & ~(k < 8) & (q % 8) // 2 > (k % 8) // 2"
         " | ~(q < 8) & ~(k < 8) & (q % 8) // 2 >= (k % 8) // 2",
         BLOCK_DIFFUSION),
    Case("flamingo", "iv[img[k], 0] <= q < iv[img[k], 1]", "lambda q, k: (iv[img[k], 0] <= q) & (q < iv[img[k]][1])"),
    Case("tree", "k < 4 | anc[q, max(k - 4, 0)]", "lambda q, k: (k < 4) | anc[q, xp.maximum(k - 4, 0)]"),
    Case("tree, training",
         "k < 4 | (q - 4) // 3 == (k - 4) // 3 & causal",
         "lambda q, k: (k < 4) | (((q - 4) // 3 == (k - 4) // 3) & (q >= k))"),
    Case("natten 2d", "abs(clamp(q // 4, 1, 2) - k // 4) <= 1 & abs(clamp(q % 4, 1, 2) - k % 4) <= 1", NATTEN2D),
    Case("morton natten",
         "abs((q >> 1 & 1 | (q >> 3 & 1) << 1) - (k >> 1 & 1 | (k >> 3 & 1) << 1)) <= 1"
         " & abs((q & 1 | (q >> 2 & 1) << 1) - (k & 1 | (k >> 2 & 1) << 1)) <= 1",
         MORTON),
    Case("sta 2d",
         "abs(clamp(q // 8, 0, 1) - k // 8) <= 0 & abs(clamp(q % 4 // 2, 0, 1) - k % 4 // 2) <= 1 | q >= 14 | k >= 14",
         STA2D),
    Case("svg spatial", "q < 3 | k < 3 | abs(q - k) < 4", "lambda q, k: (q < 3) | (k < 3) | (abs(q - k) < 4)"),
    Case("svg temporal",
         "q < 3 | k < 3 | abs((q - 3) % 5 - (k - 3) % 5) < 2",
         "lambda q, k: (q < 3) | (k < 3) | (abs((q - 3) % 5 - (k - 3) % 5) < 2)"),
    Case("vsa top-k",
         "any(j in 0..extent(topk, 3): topk[b, h, q // 4, j] == k // 4)",
         "lambda b, h, q, k: xp.any(topk[b, h, q // 4] == k // 4)", True),
    Case("vsa map", "tiles[b, h, q // 4, k // 4]", "lambda b, h, q, k: tiles[b, h, q // 4, k // 4]"),
    Case("offset causal", "q + shift[b] * 4 >= k", "lambda b, h, q, k: q + shift[b] * 4 >= k"),
    Case("partial offset", "q + w >= k",
         "functools.partial(lambda b, h, q, k, offset: q + offset >= k, offset=w)", True),
    Case("two ranges", "k < 4 | k >= 12", "lambda b, h, q, k: (k < 4) | (k >= 12)"),
    Case("random eviction", "~drop[b, q]", "lambda b, h, q, k: ~drop[b, q]"),
    Case("batch flip",
         "causal & b % 2 == 0 | q < k & b % 2 == 1",
         "lambda b, h, q, k: ((q >= k) & (b % 2 == 0)) | ((q < k) & (b % 2 == 1))"),
    Case("batch id", "b != -1", "lambda b, h, q, k: b != -1"),
    Case("padding", "padding(lens)", "lambda b, h, q, k: (q < lens[b]) & (k < lens[b])"),
    Case("by head", "causal | slopes[h] > 0", "lambda b, h, q, k: (q >= k) | (slopes[h] > 0)"),
    Case("by head and batch", "slopes[h] + per_batch[b] > 0", "lambda b, h: slopes[h] + per_batch[b] > 0"),
    Case("dense", "dense[b, h, q, k]", "lambda b, h, q, k: dense[b][h][q][k]"),
    Case("dense transposed", "dense[b, h, k, q]", "lambda b, h, q, k: dense[b, h].T[q, k]", True),
    Case("block diagonal", "chunked(4)", "lambda q, k: q // 4 == k // 4"),
    Case("mini causal", "q % 8 >= k % 8", "lambda q, k: q % 8 >= k % 8"),
    Case("chunked causal", "chunked(5) & causal", "lambda q, k: (q // 5 == k // 5) & (q >= k)"),
    Case("key bound", "k >= win[q] & causal", "lambda q, k: (k >= win[q]) & (q >= k)"),
    Case("varying window", "0 <= q - k <= win[q]", "lambda q, k: (q - k >= 0) & (q - k <= win[q])"),
    Case("xor", "(q ^ k) < 6", "lambda q, k: (q ^ k) < 6"),
    Case("natten by division",
         "abs(floor(q / 4) - floor(k / 4)) <= 1",
         "lambda q, k: abs(xp.floor(q / 4) - xp.floor(k / 4)) <= 1"),
    Case("jitted", "same(doc) & q // 3 >= k // 3",
         "jax.jit(lambda q, k: (doc[q] == doc[k]) & (q // 3 >= k // 3))", True),
    Case("branches", "causal if q < 8 else same(doc)",
         "lambda q, k: jax.lax.cond(q < 8, lambda: q >= k, lambda: doc[q] == doc[k])", True),
    Case("permuted", "perm[q] >= perm[k]", "lambda q, k: perm[q] >= perm[k]"),
    Case("natten 1d", "natten1d(16, 5)",
         "lambda q, k: (k - xp.clip(q - 2, 0, 11) >= 0) & (k - xp.clip(q - 2, 0, 11) < 5)"),
    Case("natten 1d, dilated, strided", "natten1d(16, 3, 2, 2, false)", NATTEN1D),
    Case("natten 3d", "natten3d(2, 2, 4, 2, 1, 3)", NATTEN3D),
    Case("natten, tiled", "tiled_natten(4, 4, 3, 3, 2, 2)", TILED),
    Case("svg spatial with sink", "q < 3 | k < 3 + 2 | abs(q - k) < 4",
         "lambda q, k: (q < 3) | (k < 3 + 2) | (abs(q - k) < 4)"),
    Case("vsa padding", "tiles[b, h, q // 4, k // 4] & k % 4 < filled[k // 4]",
         "lambda b, h, q, k: tiles[b, h, q // 4, k // 4] & (k % 4 < filled[k // 4])"),
    Case("both in prefix", "both_prefix(5)", "lambda q, k: ((q < 5) & (k < 5)) | (q >= k)"),
    Case("flash window", "-3 <= q + 2 - k <= 5", "lambda q, k: (q + 2 - k >= -3) & (q + 2 - k <= 5)"),
    Case("document by batch and head", "near[b, h, q] == near[b, h, k]",
         "lambda b, h, q, k: near[b, h][q] == near[b][h, k]"),
    Case("token types", "token_types(img)", "lambda q, k: (q >= k) | ((img[q] == img[k]) & (img[q] > 0))"),
    Case("share question", "share_question(img)", "lambda q, k: (q >= k) & ((img[k] == 0) | (img[q] == img[k]))"),
    Case("prefix document", "same(doc) & (causal | k < off[doc[k]] + first[doc[k]])",
         "lambda q, k: (doc[q] == doc[k]) & ((q >= k) | (k < off[doc[k]] + first[doc[k]]))"),
    Case("eviction", "eviction(win)", "lambda q, k: (k <= q) & (q < win[k])"),
    Case("qk sparse", "qk_sparse(glob, marked)", "lambda q, k: (q >= k) & glob[q] & marked[k]"),
    Case("bi-causal rectangle", "rectangle_bi_causal(2, 10, 4, 14)", BI_CAUSAL),
    Case("frames", "q < (3 + 2) * 2", "lambda q, k: q < (3 + 2) * 2"),
    Case("prefix by batch", "k < shift[b] | causal", "lambda b, h, q, k: (k < shift[b]) | (q >= k)"),
    Case("global causal", "q - k > 3", "lambda q, k: q - k > 3"),
    Case("segment ids", "docs[b, q] == docs[b, k] & causal",
         "lambda b, h, q, k: xp.equal(docs[b, q], docs[b, k]) & xp.greater_equal(q, k)"),
]  # fmt: skip

MODS = [
    Case("identity", "score", "lambda score, b, h, q, k: score"),
    Case("twice", "2 * score", "lambda score, b, h, q, k: score * 2"),
    Case("squared", "score ** 2", "lambda score, b, h, q, k: score**2"),
    Case("inverse", "1 / score", "lambda score, b, h, q, k: 1 / score"),
    Case("log where positive",
         "log(score) if score > 0 else score",
         "lambda score, b, h, q, k: xp.where(score > 0, xp.log(score), score)"),
    Case("trigonometric", "sin(cos(score)) + tan(b)", "lambda score, b, h, q, k: xp.sin(xp.cos(score)) + xp.tan(b)"),
    Case("inverse distance",
         "score / (1 + 1e-4 * (q - k) ** 2)",
         "lambda score, b, h, q, k: score / (1 + 1e-4 * (q - k) ** 2)"),
    Case("soft cap", "softcap(50)", "lambda score, b, h, q, k: 50 * xp.tanh(score / 50)"),
    Case("head plus", "score + 0.1 * h", "lambda score, b, h, q, k: score + 0.1 * h"),
    Case("quotient", "score - q // (1 + k)", "lambda score, b, h, q, k: score - q // (1 + k)"),
    Case("distance", "score + (q - k)", "lambda score, b, h, q, k: score + (q - k)"),
    Case("causal by -inf", "score if q >= k else -inf", "lambda score, b, h, q, k: xp.where(q >= k, score, -xp.inf)"),
    Case("distance or -inf",
         "score + (q - k) if q >= k else -inf",
         "lambda score, b, h, q, k: xp.where(q - k >= 0, score + (q - k), -xp.inf)"),
    Case("every other key",
         "score if k % 2 == 0 else -inf",
         "lambda score, b, h, q, k: xp.where(k % 2 == 0, score, -xp.inf)"),
    Case("alibi",
         "score + exp2(-8.0 * (h + 1) / 2) * (k - q)",
         "lambda score, b, h, q, k: score + xp.exp2(-8.0 * (h + 1) / 2) * (k - q)"),
    Case("alibi, learned", "alibi(slopes)", "lambda score, b, h, q, k: score + slopes[h] * (k - q)"),
    Case("head scale", "score * slopes[h]", "lambda score, b, h, q, k: score * slopes[h]"),
    Case("sandwich",
         "score + rel[q - k + 16] * slopes[h]",
         "lambda score, b, h, q, k: score + rel[q - k + 16] * slopes[h]"),
    Case("graphormer",
         "score + spatial[h, dist[b, q, k]]",
         "lambda score, b, h, q, k: score + spatial[h, dist[b, q, k]]"),
    Case("graphormer edges", "score + (edge[path[q, k, 0]] + edge[path[q, k, 1]] + edge[path[q, k, 2]]) / 3", EDGES),
    Case("activation",
         "log(max(score, 0.0) + 1e-6)",
         "lambda score, b, h, q, k: xp.log(xp.maximum(score, 0.0) + 1e-6)"),
    Case("silu", "silu(score)", "lambda score, b, h, q, k: jax.nn.silu(score)", True),
    Case("relu", "relu(score)", "lambda score, b, h, q, k: jax.nn.relu(score)", True),
    Case("softplus", "softplus(score)", "lambda score, b, h, q, k: jax.nn.softplus(score)", True),
    Case("gelu", "gelu(score)", "lambda score, b, h, q, k: jax.nn.gelu(score, approximate=False)", True),
    Case("gate",
         "score * sigmoid(slopes[h])",
         "lambda score, b, h, q, k: score * jax.nn.sigmoid(slopes[h])", True),
    Case("rope",
         "score + 0.5 * dot(qr[b, h, q, :], kr[b, h // 2, k, :])",
         "lambda score, b, h, q, k: score + 0.5 * xp.dot(qr[b, h, q], kr[b, h // 2, k])", True),
    Case("rope summed",
         "score + 0.5 * dot(qr[b, h, q, :], kr[b, h // 2, k, :])",
         "lambda score, b, h, q, k: score + 0.5 * (qr[b, h, q] * kr[b, h // 2, k]).sum()", True),
    Case("token, batch, head",
         "score + tok[q] + per_batch[b] + slopes[h]",
         "lambda score, b, h, q, k: score + tok[q] + per_batch[b] + slopes[h]"),
    Case("bias of 2", "score + bias2[q, k]", "lambda score, b, h, q, k: score + bias2[q, k]"),
    Case("bias of 3", "score + bias3[b, q, k]", "lambda score, b, h, q, k: score + bias3[b, q, k]"),
    Case("bias of 4, chained", "score + bias4[b, h, q, k]", "lambda score, b, h, q, k: score + bias4[b][h][q, k]"),
    Case("bias of 4, mixed",
         "score + bias4[b, h, q, k]",
         "lambda score, b, h, q, k: score + bias4[b, :, q][h, k]", True),
    Case("bias taken", "score + tok[q]", "lambda score, b, h, q, k: score + xp.take(tok, q)", True),
    Case("relative", "score + rel[q - k + 15]", "lambda score, b, h, q, k: score + rel[q - k + 15]"),
    Case("by distance", "score + tok[abs(q - k)]", "lambda score, b, h, q, k: score + tok[abs(q - k)]"),
    Case("by clamped distance",
         "score + tok[min(max(q - k, 0), 7)]",
         "lambda score, b, h, q, k: score + tok[xp.clip(q - k, 0, 7)]"),
    Case("same table twice", "score + tok[q] + tok[k]", "lambda score, b, h, q, k: score + tok[q] + tok[k]"),
    Case("transposed bias", "score + bias2[k, q]", "lambda score, b, h, q, k: score + bias2[k, q]"),
    Case("indirect", "score + tok[perm[q]]", "lambda score, b, h, q, k: score + tok[perm[q]]"),
    Case("sum of positions", "score + rel[q + k]", "lambda score, b, h, q, k: score + rel[q + k]"),
    Case("product", "score * tok[q]", "lambda score, b, h, q, k: score * tok[q]"),
    Case("two biases", "score + tok[q] + tok2[k]", "lambda score, b, h, q, k: score + tok[q] + tok2[k]"),
    Case("view", "score + rel_h[b, h, q, k // 4]", "lambda score, b, h, q, k: score + rel_h[b, h, q, k // 4]"),
    Case("learned scalar", "score * gain", "lambda score, b, h, q, k: score * gain", True),
    Case("learned first", "score * gains[0]", "lambda score, b, h, q, k: score * gains[0]", True),
    Case("log of mass", "score + log(mass[0])", "lambda score, b, h, q, k: score + xp.log(mass[0])", True),
    Case("bias gate",
         "score + bias2[q, k] if drop[b, q] else score",
         "lambda score, b, h, q, k: xp.where(drop[b, q], score + bias2[q, k], score)"),
    Case("continuous positions",
         "score + bt[idx[q, k], h] * gain * (tok[q] + tok2[k])",
         "lambda score, b, h, q, k: score + bt[idx[q, k], h] * gain * (tok[q] + tok2[k])", True),
    Case("molecule",
         "exp(-sqrt((mol[q, 0] - mol[k, 0]) ** 2 + (mol[q, 1] - mol[k, 1]) ** 2 + (mol[q, 2] - mol[k, 2]) ** 2)"
         " / widths[h]) * score",
         FAR, True),
    Case("molecule by norm",
         "exp(-sqrt(sum(j in 0..extent(mol, 1): (mol[q, j] - mol[k, j]) ** 2)) / widths[h]) * score",
         "lambda score, b, h, q, k: xp.exp(-xp.linalg.norm(mol[q] - mol[k]) / widths[h]) * score", True),
    Case("dequantised", "score * kscale[b, h]", "lambda score, b, h, q, k: score * kscale[b, h]"),
    Case("xor pattern",
         "score if (q ^ k) % 2 == 0 else -inf",
         "lambda score, b, h, q, k: xp.where((q ^ k) % 2 == 0, score, -xp.inf)"),
    Case("approximate tanh",
         "20 * (score / 20 * (27 + score / 20 * (score / 20)) / (27 + 9 * (score / 20 * (score / 20))))",
         PADE),
    Case("log sigmoid", "log(sigmoid(score) + 1e-6)",
         "lambda score, b, h, q, k: xp.log(jax.nn.sigmoid(score) + 1e-6)", True),
    Case("position table", "score + rel[k - q + 15]", "lambda score, b, h, q, k: score + rel[k - q + 15]"),
    Case("two buffers", "score + per_batch[b] + kscale[b, h]",
         "lambda score, b, h, q, k: score + per_batch[b] + kscale[b, h]"),
    Case("leading axis", "score + lead[0, b, h, q]", "lambda score, b, h, q, k: score + lead[0][b, h][q]", True),
    Case("fixed row", "score + bias4[b, h, 3, q]", "lambda score, b, h, q, k: score + bias4[b][h][3, q]"),
    Case("custom derivative", "score * 2", CUSTOM, True),
    Case("t5", "score + spatial[h, max(q - k, 0) if max(q - k, 0) < 4"
         " else min(4 + int(log(max(q - k, 0) / 4) / log(8.0) * 4), 4)]", T5, True),
]  # fmt: skip


def arrays(library: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The tables and scalars as arrays of numpy or of jax.numpy."""
    return {n: library.asarray(v) for n, v in values.items()}
