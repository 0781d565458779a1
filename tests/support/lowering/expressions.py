"""Random expressions: every operator for printers and simplifiers, realistic masks for layouts.

@given(expressions.any_expression())          # hypothesis, any type, every operator
def test(e): ...

case = expressions.random_mask(random.Random(7), q_len=33, kv_len=40, batch=2, heads=3)
case.expr, case.params, case.tables           # values within 64 bits, tables of matching shapes
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from frisket.dsl import ir
from frisket.dsl.ir import Expr, build, lit, make, param, reduce, substitute, var
from frisket.dsl.types import BOOL, FLOAT, INT, Type

SCALARS = {"w": INT, "n": INT, "p": FLOAT, "x": FLOAT, "flag": BOOL, "deep": BOOL}
TABLES = {
    "doc": (1, INT), "pair": (2, INT), "slope": (1, FLOAT), "bias": (4, FLOAT), "seen": (1, BOOL), "near": (2, BOOL),
}  # fmt: skip
LITERALS = {
    BOOL: [True, False],
    INT: [0, 1, 2, 3, 7, 64, 255, -1, -2, -(2**63), 2**63 - 1],
    FLOAT: [0.0, -0.0, 1.0, -1.0, 0.5, 1e-5, -2.5e30, 1e16, 3.0, math.inf, -math.inf, math.nan],
}
COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")


class Everything:
    """Every operator, well typed; values are no matter."""

    def __init__(self, rng: random.Random, with_score: bool = True) -> None:
        self.rng, self.bound, self.serial, self.with_score = rng, [], 0, with_score

    def of(self, type: Type, depth: int) -> Expr:
        if depth <= 0 or self.rng.random() < 0.1:
            return self.leaf(type)
        if self.rng.random() < 0.06:
            return self.reduction(type, depth)
        return {BOOL: self.bool, INT: self.int, FLOAT: self.float}[type](depth - 1)

    def leaf(self, type: Type) -> Expr:
        rng = self.rng
        kind = rng.randrange(4)
        if kind == 0:
            return lit(rng.choice(LITERALS[type]))
        if kind == 1:
            return param(rng.choice([n for n, t in SCALARS.items() if t is type]), type)
        if type is BOOL:
            return lit(rng.choice(LITERALS[type]))
        if type is FLOAT:
            return ir.SCORE if self.with_score else lit(rng.choice(LITERALS[FLOAT]))
        if self.bound and rng.random() < 0.6:
            return rng.choice(self.bound)
        if rng.random() < 0.1:
            name = rng.choice(list(TABLES))
            return ir.extent(name, rng.randrange(TABLES[name][0]))
        return var(rng.choice(ir.COORDINATES + ir.SIZES))

    def lookup(self, type: Type, depth: int) -> Expr:
        name = self.rng.choice([n for n, (_, t) in TABLES.items() if t is type])
        return ir.lookup(name, tuple(self.of(INT, depth) for _ in range(TABLES[name][0])), type)

    def reduction(self, type: Type, depth: int) -> Expr:
        rng = self.rng
        kind = rng.choice(("any", "all") if type is BOOL else ("sum", "min", "max"))
        low = lit(rng.randrange(-2, 3))
        high = rng.choice([lit(low.name + rng.randrange(1, 5)), ir.extent("doc", 0)])
        self.serial += 1
        own = make("bound", (), ("test", self.serial))
        self.bound.append(own)
        body = self.of(type, depth - 1)
        self.bound.pop()
        return reduce(kind, low, high, lambda j: substitute(body, {own: j}))

    def bool(self, depth: int) -> Expr:
        rng, of = self.rng, self.of
        op = rng.choice(("and", "or", "xor", "not", "where", "isfinite", "lookup", "eq", *COMPARE, *COMPARE))
        if op in ("and", "or"):
            return build(op, *(of(BOOL, depth) for _ in range(rng.randrange(2, 4))))
        if op == "isfinite":
            return build(op, of(FLOAT, depth))
        if op == "lookup":
            return self.lookup(BOOL, depth)
        if op in COMPARE:
            types = (INT, INT, FLOAT, BOOL) if op in ("eq", "ne") else (INT, FLOAT)
            type = rng.choice(types)
            return build(op, of(type, depth), of(type, depth))
        return build(op, *(of(BOOL, depth) for _ in range({"xor": 2, "not": 1, "where": 3}[op])))

    def int(self, depth: int) -> Expr:
        rng, of = self.rng, self.of
        op = rng.choice(
            "add sub mul min max floordiv mod bitand bitor bitxor shl shr neg abs sign bitnot "
            "pow where int floor lookup segment".split()
        )
        if op == "lookup":
            return self.lookup(INT, depth)
        if op == "segment":
            return ir.segment("doc", of(INT, depth))
        if op == "pow":
            return build(op, of(INT, depth), lit(rng.randrange(4)))
        if op == "where":
            return build(op, of(BOOL, depth), of(INT, depth), of(INT, depth))
        if op == "int":
            return build(op, of(rng.choice((BOOL, FLOAT)), depth))
        if op == "floor":
            return build(op, of(FLOAT, depth))
        count = 1 if op in ("neg", "abs", "sign", "bitnot") else 2
        return build(op, *(of(INT, depth) for _ in range(count)))

    def float(self, depth: int) -> Expr:
        rng, of = self.rng, self.of
        functions = sorted(ir.FLOAT_FUNCTIONS)
        op = rng.choice(
            ["add sub mul min max div pow neg abs sign where float lookup random".split(), functions][
                rng.random() < 0.25
            ]
        )
        if op == "lookup":
            return self.lookup(FLOAT, depth)
        if op == "float":
            return build(op, of(INT, depth))
        if op == "random":
            return ir.random(*(of(INT, depth) for _ in range(rng.randrange(1, 4))))
        if op == "where":
            return build(op, of(BOOL, depth), of(FLOAT, depth), of(FLOAT, depth))
        count = 1 if op in ("neg", "abs", "sign") or op in functions else 2
        args = [of(FLOAT, depth) for _ in range(count)]
        for i in range(count):  # conversions are where printing is hard
            if rng.random() < 0.25:
                args[i] = build("float", of(INT, depth))
        return build(op, *args)


@st.composite
def expression(draw, type: Type = BOOL, depth: int = 5, with_score: bool = True) -> Expr:
    """Any well-typed Expr of a type."""
    rng = draw(st.randoms(use_true_random=False))
    return Everything(rng, with_score).of(type, draw(st.integers(0, depth)))


def any_expression(depth: int = 5) -> st.SearchStrategy[Expr]:
    return st.sampled_from((BOOL, INT, FLOAT)).flatmap(lambda t: expression(t, depth))


# -- masks as people write them ---------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A mask with everything it needs to be evaluated at these sizes."""

    expr: Expr
    params: dict
    tables: dict
    q_len: int
    kv_len: int
    batch: int
    heads: int


class Masks:
    """Comparisons of small Int expressions, joined; b and h take part, tables have matching shapes."""

    def __init__(self, rng: random.Random, q_len: int, kv_len: int, batch: int = 1, heads: int = 1) -> None:
        self.rng, self.q_len, self.kv_len, self.batch, self.heads = rng, q_len, kv_len, batch, heads
        self.params: dict = {}
        self.tables: dict = {}
        self.longest = max(q_len, kv_len)

    def literal(self) -> Expr:
        limit = self.rng.choice((3, 8, self.longest))
        return lit(self.rng.randint(-limit, limit))

    def positive(self) -> Expr:
        return lit(self.rng.choice((1, 2, 3, 4, 5, 7, 8, 16, self.rng.randint(1, self.longest))))

    def scalar(self) -> Expr:
        name = self.rng.choice("wnm")
        self.params.setdefault(name, self.rng.randint(-2, self.longest))
        return param(name)

    def coordinate(self) -> Expr:
        names = [*"qqqkkk", "Q_LEN", "KV_LEN"] + (["b"] if self.batch > 1 else []) + (["h"] if self.heads > 1 else [])
        return var(self.rng.choice(names))

    def table(self, name: str) -> np.ndarray:
        if name not in self.tables:
            seed = np.random.default_rng(self.rng.getrandbits(32))
            n, documents = self.longest, self.rng.randint(1, 6)
            make_ = {
                "doc": lambda: np.sort(seed.integers(0, documents, n)),
                "ids": lambda: seed.integers(0, documents, n),
                "marks": lambda: seed.random(n) < 0.2,
                "lens": lambda: seed.integers(0, n + 1, self.batch),
                "width": lambda: seed.integers(0, n + 1, self.heads),
                "grid": lambda: seed.random((self.q_len // 4 + 1, self.kv_len // 4 + 1)) < 0.5,
                "off": lambda: np.r_[0, np.sort(seed.choice(np.arange(1, n), min(3, n - 1), replace=False)), n]
                if n > 1 else np.array([0, n]),
            }  # fmt: skip
            self.tables[name] = make_[name]()
        return self.tables[name]

    def look(self, name: str, *indices: Expr) -> Expr:
        type = BOOL if self.table(name).dtype == bool else INT
        return ir.lookup(name, indices, type)

    def int(self, depth: int) -> Expr:
        rng = self.rng
        if depth <= 0:
            return rng.choice((self.coordinate, self.coordinate, self.literal, self.scalar))()
        op = rng.choice("sub sub add mul floordiv mod min max abs neg where table leaf leaf shr bitand int".split())
        if op == "leaf":
            return self.int(0)
        if op == "sub" and rng.random() < 0.5:
            return var("q") - var("k")
        if op in ("floordiv", "mod"):
            return build(op, self.int(depth - 1), self.positive() if rng.random() < 0.9 else self.int(0))
        if op == "mul":
            return build(op, self.int(depth - 1), lit(rng.choice((-3, -1, 2, 3, 4))))
        if op == "shr":
            return build(op, self.int(depth - 1), lit(rng.randrange(4)))
        if op == "bitand":
            return build(op, self.int(depth - 1), lit(rng.choice((1, 3, 6, 15))))
        if op in ("abs", "neg"):
            return build(op, self.int(depth - 1))
        if op == "where":
            return build(op, self.bool(depth - 1), self.int(depth - 1), self.int(depth - 1))
        if op == "int":
            return build(op, self.bool(0))
        if op == "table":
            return self.int_table(depth)
        return build(op, self.int(depth - 1), self.int(depth - 1))

    def int_table(self, depth: int) -> Expr:
        name = self.rng.choice(("doc", "doc", "ids", "lens", "width", "off"))
        if name == "lens":
            return self.look(name, var("b"))
        if name == "width":
            return self.look(name, var("h"))
        if name == "off":
            self.table("off")
            return ir.segment("off", var(self.rng.choice("qk")))
        index = var(self.rng.choice("qk")) if self.rng.random() < 0.8 else self.int(depth - 1)
        return self.look(name, index)

    def atom(self, depth: int) -> Expr:
        rng = self.rng
        kind = rng.randrange(8)
        q, k = var("q"), var("k")
        if kind == 0:
            name = rng.choice(("doc", "ids"))
            return build("eq", self.look(name, q), self.look(name, k))
        if kind == 1:
            return self.look("marks", rng.choice((q, k)))
        if kind == 2:
            return self.look("grid", q // 4, k // 4)
        if kind == 3:
            n = self.positive()
            return build(rng.choice(("eq", "ge")), q // n, k // n)
        if kind == 4:
            return q + self.literal() >= k
        if kind == 5 and depth > 0:
            kind_, stop = rng.choice(("any", "all")), lit(rng.randint(1, 3))
            return reduce(kind_, ir.ZERO, stop, lambda j: (q - k) % self.positive() >= j)
        return build(rng.choice(COMPARE), self.int(depth), self.int(depth))

    def bool(self, depth: int) -> Expr:
        rng = self.rng
        if depth <= 0 or rng.random() < 0.25:
            return self.atom(max(depth, 0))
        op = rng.choice("and and and or or not xor where".split())
        if op in ("and", "or"):
            return build(op, *(self.bool(depth - 1) for _ in range(rng.randint(2, 3))))
        count = {"not": 1, "xor": 2, "where": 3}[op]
        return build(op, *(self.bool(depth - 1) for _ in range(count)))


def random_mask(rng: random.Random, q_len: int, kv_len: int, batch: int = 1, heads: int = 1, depth: int = 3) -> Case:
    """A mask for fuzzing layouts: Int arithmetic within 64 bits, so that it can be evaluated everywhere."""
    made = Masks(rng, q_len, kv_len, batch, heads)
    expr = made.bool(depth)
    scalars, tables = ir.free_names(expr)
    return Case(
        expr,
        {n: v for n, v in made.params.items() if n in scalars},
        {n: v for n, v in made.tables.items() if n in tables},
        q_len, kv_len, batch, heads,
    )  # fmt: skip


@st.composite
def mask_case(draw, depth: int = 3, longest: int = 70) -> Case:
    """`random_mask` at drawn sizes."""
    rng = draw(st.randoms(use_true_random=False))
    sizes = draw(st.tuples(st.integers(1, longest), st.integers(1, longest), st.integers(1, 3), st.integers(1, 3)))
    return random_mask(rng, *sizes, depth=draw(st.integers(0, depth)))
