"""Masks for layouts: the shapes people write, and random ones over every operator the analysis knows."""

from __future__ import annotations

import random as pyrandom
from dataclasses import dataclass, field

import numpy as np

from frisket.dsl import ir
from frisket.dsl.ir import FALSE, KV_LEN, Q_LEN, TRUE, Expr, build, lit, lookup, param, segment
from frisket.dsl.ir import random as uniform
from frisket.dsl.sugar import b, eq, function, h, k, maximum, minimum, ne, q, where
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.analysis.layout import Analysis, analyse
from frisket.lowering.analysis.table import Table
from frisket.lowering.analysis.tiles import WORK, Scope
from frisket.lowering.plan import Problem

w = param("w")


def doc(i):
    return lookup("doc", (i,))


def written() -> dict[str, Expr]:
    """Masks by name: together they reach every path of the analysis."""
    ln = lookup("len", (b,))
    bias = lookup("bias", (k,), FLOAT)
    return {
        "causal": q >= k,
        "causal-window": (q >= k) & (q - k < 50),
        "window": abs(q - k) < w,
        "prefix": (k < 40) | (q >= k),
        "bottom-right": q + KV_LEN - Q_LEN >= k,
        "sliding-varying": (q - k <= q // 2) & (k - q <= 4),
        "documents": (q >= k) & eq(doc(q), doc(k)),
        "documents-window": (q >= k) & eq(doc(q), doc(k)) & (q - k < w),
        "segments": (q >= k) & eq(segment("off", q), segment("off", k)),
        "chunked": eq(q // 30, k // 30),
        "chunked-causal": (q >= k) & eq(q // w, k // w),
        "block-causal": q // 16 >= k // 16,
        "dilated": (abs(q - k) <= 40) & eq((q - k) % 3, 0),
        "every-other": eq(k % 2, 0) & (q >= k),
        "strided": (q >= k) & ((q - k < 16) | eq((q - k) % 16, 0)),
        "padding": (q < ln) & (k < ln),
        "by-head": (q >= k) & (q - k < (h + 1) * 16),
        "by-batch-and-head": (q >= k) & (q - k < (h + 1) * 9 + 20 * b),
        "sinks-window": (k < 5) | ((q >= k) & (q - k < 24)),
        "global": (k < 5) | (q < 5) | (abs(q - k) < 9),
        "xor": (q >= k) ^ (k < 30),
        "hole": ne(q, k),
        "complement": ~((q >= k) & (q - k < 60)),
        "full": TRUE,
        "nothing": FALSE,
        "antidiagonal": q + k < 90,
        "steep": 2 * q >= k,
        "tile-map": (q >= k) & lookup("map", (q // 16, k // 16), BOOL),
        "global-tokens": lookup("glob", (q,), BOOL) | lookup("glob", (k,), BOOL) | (abs(q - k) < 10),
        "neighbourhood": (abs(clamped(q // 14, 2, 11) - k // 14) <= 2) & (abs(clamped(q % 14, 2, 11) - k % 14) <= 2),
        "per-query-window": (q >= k) & (k >= lookup("start", (q,))),
        "bias": (q >= k) & (bias + build("float", k) * 0.01 > 0.4),
        "nan-bias": lookup("wild", (k,), FLOAT) <= lookup("wild", (q,), FLOAT),
        "log": function("log", build("float", q - k)) < 3.0,
        "random": (q >= k) & (uniform(lit(3), b, h, q, k) < 0.5),
        "bits": build("bitxor", q, k) < 37,
        "shifts": build("shr", q, lit(3)) >= build("shl", build("shr", k, lit(4)), lit(1)),
        "where": where(q < 50, q >= k, abs(q - k) < 12),
        "zero-divisor": eq(q // (w - 20), k % (w - 20)),
        "negative": (q - k - 30) // 7 % 5 >= 2,
        "scattered-documents": (q >= k) & eq(lookup("ids", (q,)), lookup("ids", (k,))),
        "mixed-documents": (q >= k) & eq(lookup("pieces", (q,)), lookup("pieces", (k,))),
        "documents-and-sinks": (k < 4) | (q >= k) & eq(doc(q), doc(k)),
        "early-documents": (q - k >= 5) & eq(doc(q), doc(k)),
        "batch-documents": (q >= k) & eq(lookup("docs", (b, q)), lookup("docs", (b, k))),
        "document-starts": (q >= k) & (k >= lookup("off", (doc(q),))),
        "clamped-documents": eq(lookup("few", (q - 1,)), lookup("few", (k - 1,))) & (abs(q - k) < 30),
        "shifted-documents": (q + 9 >= k) & eq(doc(q + 9), doc(k)),
        "pooled-documents": eq(doc(q), doc(k // 2)) | (k < 3),
        "later-documents": (doc(q) >= doc(k)) & (q >= k - 40),
        "unlike-documents": ne(doc(q), doc(k)) & (q >= k),
        "other-table": eq(doc(q), lookup("few", (k - 9,))),
        "first-document": (doc(k) < 2) | (q - k < 9) & (q >= k),
        "quotients": ((q + 3) // w >= (k - 5) // w) & (q - k < 40),
        "line-neighbourhood": abs(clamped(q, 6, 150) - k) <= 6,
        "tree": (k < 10) | lookup("anc", (q, k - 10), BOOL),
    }  # fmt: skip


def clamped(x, lo, hi):
    return minimum(maximum(x, lit(lo)), lit(hi))


@dataclass
class Case:
    """One layout problem."""

    mask: Expr
    q_len: int
    kv_len: int
    batch: int = 2
    heads: int = 3
    block: tuple = (16, 16)
    origin: tuple = (0, 0, 0, 0)
    sizes: tuple = (5, 6, 300, 310)
    params: dict = field(default_factory=dict)
    tables: dict = field(default_factory=dict)

    @property
    def options(self) -> dict:
        names = ("batch", "heads", "block", "origin", "sizes", "params", "tables")
        return {n: getattr(self, n) for n in names}

    @property
    def problem(self) -> Problem:
        return Problem(self.q_len, self.kv_len, self.batch, self.heads, self.origin, self.sizes)

    def analysed(self, mask: Expr, work: int = WORK, *, transposed: bool = False) -> Analysis:
        """The analysis of `mask` where the case is."""
        return analyse(mask, self.problem, self.block, self.scope(work), transposed=transposed)

    def scope(self, work: int = WORK) -> Scope:
        """The values of the case, for an analysis."""
        env = {**self.problem.named_sizes, **self.params}
        return Scope(env, {n: Table(t) for n, t in self.tables.items()}, work)


def case(mask: Expr, rng: pyrandom.Random) -> Case:
    """Ragged lengths, unequal tiles, origins (one or per batch), crops that no tile divides."""
    seed = np.random.default_rng(rng.randrange(2**32))
    origin = (0, 0, 0, 0)
    if rng.random() < 0.6:
        origin = (rng.randrange(3), rng.randrange(3), rng.randrange(60), rng.randrange(60))
    if rng.random() < 0.25:
        origin = (*origin[:2], seed.integers(0, 60, 2), seed.integers(0, 60, 2))
    wild = seed.standard_normal(300)
    wild[seed.integers(0, 300, 9)] = np.nan
    wild[seed.integers(0, 300, 5)] = np.inf
    wild[100:140] = -np.inf
    return Case(
        mask, rng.randrange(1, 190), rng.randrange(1, 190), origin=origin,
        block=(rng.choice([4, 8, 16, 24, 32, 128]), rng.choice([4, 8, 16, 24, 32, 128])),
        params={"w": rng.randrange(0, 70), "p": rng.randrange(-9, 9)},
        tables={
            "doc": np.sort(seed.integers(0, 6, 300)).astype(np.int32),
            "ids": seed.permutation(6)[np.sort(seed.integers(0, 6, 300))], "few": np.sort(seed.integers(0, 5, 70)),
            "pieces": seed.integers(0, 9, 320), "docs": np.sort(seed.integers(0, 9, (6, 300)), axis=1) ^ 5,
            "off": np.unique(np.concatenate([[0, 300], seed.integers(1, 299, 7)])),
            "any": seed.integers(-30, 30, 70), "grid": seed.integers(-9, 9, (40, 50)),
            "len": seed.integers(0, 250, 6), "map": seed.random((20, 20)) < 0.3,
            "glob": seed.random(320) < 0.02, "start": np.maximum(np.arange(320) - seed.integers(0, 60, 320), 0),
            "bias": seed.standard_normal(320), "wild": wild, "anc": seed.random((300, 300)) < 0.7,
        },
    )  # fmt: skip


def short_tables() -> list[Case]:
    """Comparisons with entries of a sorted table that ends before the queries and the keys do."""
    table = np.sort(np.random.default_rng(6).integers(0, 9, 41)) * 2
    held = [build(op, doc(q + d), doc(k)) for op in ("eq", "ne", "lt", "le", "gt", "ge") for d in (0, 30)]
    held += [build(op, doc(k), lit(n)) for op in ("eq", "lt", "ge") for n in (-1, 0, 7, 16, 17)]
    return [Case(m, 60, 67, 1, 1, (4, 3), sizes=(1, 1, 60, 67), tables={"doc": table}) for m in held]


def rare_entries() -> list[Case]:
    """One entry of a table decides for a tile of nearly all queries: one planner, tables short and long."""
    draw, found = np.random.default_rng(9), []
    for n in (5, 64, 300, 1000, 5000):
        for place in draw.integers(0, n, 8):
            block = max(n - int(draw.integers(0, 1 + n // 3)), 1), 4
            table = np.where(np.arange(n) == place, 1, 0)
            found.append(Case(lookup("rare", (q,)) > 0, n, 8, 1, 1, block, sizes=(1, 1, n, 8), tables={"rare": table}))
    return found


def random_mask(rng: pyrandom.Random, depth: int = 3) -> Expr:
    """A Bool over b h q k, sizes, parameters and tables."""
    pick = rng.random()
    if pick < 0.12:
        return _curves(rng)
    if depth == 0 or pick < 0.45:
        return _comparison(rng, depth)
    if pick < 0.65:
        return build("and", random_mask(rng, depth - 1), random_mask(rng, depth - 1))
    if pick < 0.8:
        return build("or", random_mask(rng, depth - 1), random_mask(rng, depth - 1))
    if pick < 0.88:
        return build("not", random_mask(rng, depth - 1))
    if pick < 0.92:
        return build("xor", random_mask(rng, depth - 1), random_mask(rng, depth - 1))
    if pick < 0.95:
        return where(random_mask(rng, depth - 1), random_mask(rng, depth - 1), random_mask(rng, depth - 1))
    table, i = rng.choice([("map", 2), ("glob", 1)])
    return lookup(table, tuple(random_int(rng, 1) for _ in range(i)), BOOL)


def periodic_mask(rng: pyrandom.Random, depth: int = 2) -> Expr:
    """A Bool of residues and quotients of q, k and what lies between them, and of bounds beside them."""
    pick = rng.random()
    if depth and pick < 0.6:
        op = rng.choice(["and", "or", "xor", "and", "or", "not", "where"])
        parts = [periodic_mask(rng, depth - 1) for _ in range({"not": 1, "where": 3}.get(op, 2))]
        return build(op, *parts)
    n, m = rng.randrange(2, 14), rng.randrange(1, 9)
    op, other = rng.choice(["eq", "eq", "ne", "lt", "ge"]), rng.choice([n, n, m])
    if pick < 0.75:
        x = rng.choice([q, k, q - k, q - k, k - q, q + k, k // m, q // m, k + m, 2 * q - k, q - 3 * k])
        return build(op, x % n, lit(rng.randrange(n)))
    if pick < 0.85:
        return build(op, q // n, k // other)
    if pick < 0.9:
        return build(op, q % n, k % other)
    return build(op, rng.choice([q, k, q - k, abs(q - k), q + k]), lit(rng.randrange(50)))


def small_tiles(mask: Expr, rng: pyrandom.Random) -> Case:
    """Tiles of a few tokens, smaller than most periods."""
    block = rng.randrange(1, 9), rng.randrange(1, 9)
    origin = (0, 0, rng.choice([0, 0, rng.randrange(30)]), rng.choice([0, 0, rng.randrange(30)]))
    return Case(mask, rng.randrange(1, 40), rng.randrange(1, 60), 1, 1, block, origin)


def _curves(rng: pyrandom.Random) -> Expr:
    """Bounds on k that move with q, as documents and chunks are made of, and bounds beside them."""
    shift = rng.choice([0, 0, 0, 4, -7])

    def side(x: Expr) -> Expr:
        kind = rng.choice(["table", "table", "quotient", "segment"])
        name = rng.choice(["doc", "few", "ids", "start", "any"])
        n = rng.choice([lit(7), lit(16), w])
        return {"table": lookup(name, (x,)), "quotient": x // n, "segment": segment("off", x)}[kind]

    same = side(q + shift)
    other = ir.substitute(same, {q: k}) if rng.random() < 0.8 else side(k)
    out = build(rng.choice(["eq", "eq", "ge", "le", "gt", "ne"]), same, other)
    for _ in range(rng.randrange(3)):
        bound = rng.choice([q >= k, q - k < 20, q - k >= -9, q - k > 6, k < 30, q >= 12, abs(q - k) < w])
        out = build(rng.choice(["and", "and", "or"]), out, bound)
    return out


def _comparison(rng: pyrandom.Random, depth: int) -> Expr:
    op = rng.choice(["lt", "le", "gt", "ge", "eq", "ne"])
    if rng.random() < 0.12:
        return build(op, random_float(rng, 1), random_float(rng, 1))
    if rng.random() < 0.4:  # the affine comparisons masks are made of
        left = rng.choice([q - k, q, k, k - q, q + k, abs(q - k)])
        return build(op, left, rng.choice([lit(rng.randrange(-40, 160)), w, lit(0), w + 3 * h, KV_LEN - Q_LEN]))
    return build(op, random_int(rng, depth), random_int(rng, depth))


def random_int(rng: pyrandom.Random, depth: int) -> Expr:
    if depth == 0 or rng.random() < 0.25:
        return rng.choice([q, k, q, k, b, h, w, param("p"), lit(rng.randrange(-12, 130)), Q_LEN, KV_LEN])
    op = rng.choice(
        "add add sub sub mul floordiv floordiv mod mod min max abs neg sign where int lookup bitand bitor bitxor "
        "bitnot shl shr segment floor pow".split()
    )
    x, y = random_int(rng, depth - 1), random_int(rng, depth - 1)
    small = lit(rng.randrange(1, 20))
    if op in ("floordiv", "mod"):
        return build(op, x, rng.choice([small, small, small, y, -small]))
    if op == "mul":
        return build(op, x, rng.choice([small, y]))
    if op in ("abs", "neg", "sign", "bitnot"):
        return build(op, x)
    if op in ("shl", "shr"):
        return build(op, x, lit(rng.randrange(0, 6)))
    if op == "where":
        return where(_comparison(rng, 0), x, y)
    if op == "int":
        return build("int", _comparison(rng, 0))
    if op == "floor":
        return build("floor", random_float(rng, depth - 1))
    if op == "pow":
        return build("pow", x, lit(rng.randrange(0, 3)))
    if op == "segment":
        return segment("off", x)
    if op == "lookup":
        table = rng.choice(["doc", "any", "grid", "len", "start"])
        return lookup(table, (x, y) if table == "grid" else (x,), INT)
    return build(op, x, y)


def random_float(rng: pyrandom.Random, depth: int) -> Expr:
    pick = rng.random()
    if depth == 0 or pick < 0.3:
        return rng.choice(
            [build("float", random_int(rng, 1)), lit(rng.uniform(-3, 3)), lookup("bias", (rng.choice([q, k]),), FLOAT),
             lookup("wild", (rng.choice([q, k, k - q]),), FLOAT), lit(float("inf"))]
        )  # fmt: skip
    op = rng.choice("add sub mul div min max abs neg exp log sqrt tanh sigmoid sin where".split())
    x, y = random_float(rng, depth - 1), random_float(rng, depth - 1)
    if op in ("abs", "neg", "exp", "log", "sqrt", "tanh", "sigmoid", "sin"):
        return build(op, x)
    if op == "where":
        return where(_comparison(rng, 0), x, y)
    return build(op, x, lit(2.5) if op == "div" else y)
