"""Random programs of the language, with an evaluator of their own.

Nothing here is imported from `frisket.dsl` or `frisket.lowering`: a program is made as a tree, written as text for
frisket, and evaluated here in numpy by the meanings that docs/language.md states. `python tests/outside/programs.py
--first 0 --count 1000` runs a campaign and prints every seed that fails.
"""

from __future__ import annotations

import argparse
import pickle
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import frisket as fk

Array = Any
EMPTY, PARTIAL, FULL = 0, 1, 2
BIG = 1 << 40  # Ints stay below, so that int64 is the mathematical integer


@dataclass(frozen=True)
class Node:
    """A part of a program: its operator, its parts, and what else it holds (a number, a name)."""

    op: str
    args: tuple[Node, ...] = ()
    held: Any = None


@dataclass
class Case:
    """A program and the problem it is asked about."""

    seed: int
    mask: Node
    definitions: dict[str, tuple[tuple[str, ...], Node]]
    scalars: dict[str, int]
    tables: dict[str, Array]
    defaults: dict[str, int]
    q_len: int
    kv_len: int
    batch: int
    heads: int
    block: tuple[int, int]
    text: str = field(default="")

    @property
    def bound(self) -> dict[str, Any]:
        return {**self.scalars, **self.tables}


# -- as text ---------------------------------------------------------------------------------------------------

INFIX = {
    "and": "&", "or": "|", "xor": "^", "<": "<", "<=": "<=", ">": ">", ">=": ">=", "==": "==", "!=": "!=", "+": "+",
    "-": "-", "*": "*", "//": "//", "%": "%", "<<": "<<", ">>": ">>", "bitand": "&", "bitor": "|", "bitxor": "^",
}  # fmt: skip


def written(n: Node, words: random.Random) -> str:
    """The text of a tree, with parentheses around every operator, and synonyms drawn by `words`."""

    def part(x: Node) -> str:
        return written(x, words)

    if n.op in ("name", "number"):
        return f"({n.held})" if n.op == "number" and n.held < 0 else str(n.held)
    if n.op in INFIX:
        sign = INFIX[n.op]
        if n.op in ("and", "or", "xor") and words.random() < 0.2:
            sign = n.op
        return f"({part(n.args[0])} {sign} {part(n.args[1])})"
    if n.op == "chain":
        a, b, c = map(part, n.args)
        return f"({a} {n.held[0]} {b} {n.held[1]} {c})"
    if n.op == "not":
        return f"(~{part(n.args[0])})" if words.random() < 0.5 else f"(not {part(n.args[0])})"
    if n.op == "if":
        c, a, b = map(part, n.args)
        return f"({a} if {c} else {b})" if words.random() < 0.5 else f"where({c}, {a}, {b})"
    if n.op == "negative":
        return f"(-{part(n.args[0])})"
    if n.op == "lookup":
        return f"{n.held}[{', '.join(map(part, n.args))}]"
    if n.op == "reduce":
        kind, low, high = n.held
        return f"{kind}(j in {low}..{high}: {part(n.args[0])})"
    if n.op == "at":
        return f"at({part(n.args[0])}, q = {part(n.args[1])}, k = {part(n.args[2])})"
    return f"{n.held if n.op == 'call' else n.op}({', '.join(map(part, n.args))})"


def names(n: Node, definitions: dict[str, tuple[tuple[str, ...], Node]]) -> set[str]:
    """The names that a tree reads, those of definitions it calls among them; an argument that its definition does not
    use reads nothing."""
    if n.op == "call" and n.held in definitions:
        params, body = definitions[n.held]
        inner = names(body, definitions)
        passed = (names(x, definitions) for p, x in zip(params, n.args, strict=True) if p in inner)
        return (inner - {*params}).union(*passed)
    own = {n.held} if n.op in ("name", "lookup") else set()
    return own.union(*(names(x, definitions) for x in n.args))


def program(case: Case) -> str:
    words = random.Random(case.seed)
    lines = [f"param {n}: int = {x}" for n, x in case.defaults.items()]
    for name, (params, body) in case.definitions.items():
        lines.append(f"def {name}({', '.join(params)}) = {written(body, words)}")
    body = written(case.mask, words)
    return "\n".join([*lines, f"mask = {body}"]) if lines else body


# -- what it means: docs/language.md, operator by operator ----------------------------------------------------

ON_INTS: dict[str, Callable[[Array, Array], Array]] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "bitand": np.bitwise_and, "bitor": np.bitwise_or,
    "bitxor": np.bitwise_xor, "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
    "==": np.equal, "!=": np.not_equal, "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor,
    "min": np.minimum, "max": np.maximum,
}  # fmt: skip
LIBRARY: dict[str, Callable[..., Array]] = {  # the gallery's formulas
    "causal": lambda q, k: q >= k,
    "window": lambda q, k, w: np.abs(q - k) < w,
    "sinks": lambda q, k, n: k < n,
    "prefix": lambda q, k, p: k < p,
    "sliding": lambda q, k, left, right: (-right <= q - k) & (q - k <= left),
    "chunked": lambda q, k, n: quotient(q, n) == quotient(k, n),
    "dilated": lambda q, k, w, g: (np.abs(q - k) <= w) & (remainder(q - k, g) == 0),
    "strided": lambda q, k, n: (q >= k) & ((q - k < n) | (remainder(q - k, n) == 0)),
    "block_causal": lambda q, k, n: quotient(q, n) >= quotient(k, n),
}


def quotient(a: Array, b: Array) -> Array:
    """Rounded to minus infinity; by 0 it is 0."""
    a, b = np.broadcast_arrays(np.asarray(a, np.int64), np.asarray(b, np.int64))
    return np.where(b == 0, 0, a // np.where(b == 0, 1, b))


def remainder(a: Array, b: Array) -> Array:
    a, b = np.broadcast_arrays(np.asarray(a, np.int64), np.asarray(b, np.int64))
    return np.where(b == 0, 0, a % np.where(b == 0, 1, b))


def shifted(op: str, a: Array, b: Array) -> Array:
    """Outside 0..63 it is 0."""
    a, b = np.broadcast_arrays(np.asarray(a, np.int64), np.asarray(b, np.int64))
    inside = (b >= 0) & (b <= 63)
    by = np.where(inside, b, 0)
    return np.where(inside, a << by if op == "<<" else a >> by, 0)


def value(n: Node, env: dict[str, Any], case: Case) -> Array:
    """Numpy arrays that broadcast over [batch, heads, q_len, kv_len]."""

    def part(x: Node, /, **more: Any) -> Array:
        return value(x, {**env, **more}, case)

    if n.op == "number":
        return np.int64(n.held)
    if n.op == "name":
        found = env[n.held]
        return found(env["q"], env["k"]) if callable(found) else found
    if n.op == "lookup":  # beyond its ends the nearest entry
        table = case.tables[n.held]
        index = [np.clip(part(x), 0, size - 1) for x, size in zip(n.args, table.shape, strict=True)]
        return table[tuple(np.broadcast_arrays(*index))]
    if n.op == "reduce":
        kind, low, high = n.held
        parts = [part(n.args[0], j=np.int64(j)) for j in range(low, high)]
        start = {"any": np.bool_(False), "all": np.bool_(True), "sum": np.int64(0)}[kind]
        join = {"any": np.logical_or, "all": np.logical_and, "sum": np.add}[kind]
        for x in parts:
            start = join(start, x)
        return start
    if n.op == "at":
        return part(n.args[0], q=part(n.args[1]), k=part(n.args[2]))
    if n.op == "call" and n.held in case.definitions:
        params, body = case.definitions[n.held]

        def given(x: Node) -> Callable[[Array, Array], Array]:  # read where the body reads it, by the caller's names
            return lambda q, k: part(x, q=q, k=k)

        return part(body, **{p: given(x) for p, x in zip(params, n.args, strict=True)})
    if n.op == "call":
        return LIBRARY[n.held](env["q"], env["k"], *map(part, n.args))
    found = [part(x) for x in n.args]
    if n.op == "chain":
        a, b, c = found
        return ON_INTS[n.held[0]](a, b) & ON_INTS[n.held[1]](b, c)
    if n.op == "//":
        return quotient(*found)
    if n.op == "%":
        return remainder(*found)
    if n.op in ("<<", ">>"):
        return shifted(n.op, *found)
    if n.op == "not":
        return ~np.asarray(found[0], bool)
    if n.op == "if":
        return np.where(*found)
    if n.op == "negative":
        return -found[0]
    if n.op == "abs":
        return np.abs(found[0])
    if n.op == "clamp":
        x, low, high = found
        return np.minimum(np.maximum(x, low), high)
    return ON_INTS[n.op](*found)


def dense(case: Case) -> Array:
    """bool [batch, heads, q_len, kv_len]"""
    shape = (case.batch, case.heads, case.q_len, case.kv_len)
    b, h, q, k = (np.arange(n).reshape([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(shape))
    sizes = dict(zip(("B", "H", "Q_LEN", "KV_LEN"), map(np.int64, shape), strict=True))
    scalars = {n: np.int64(x) for n, x in {**case.defaults, **case.scalars}.items()}
    env = {"b": b, "h": h, "q": q, "k": k, **sizes, **scalars}
    return np.broadcast_to(np.asarray(value(case.mask, env, case), bool), shape)


# -- programs --------------------------------------------------------------------------------------------------


class Maker:
    """A program drawn from a seed: deeper trees are rarer, names are those that exist."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.seed = seed
        self.definitions: dict[str, tuple[tuple[str, ...], Node]] = {}
        self.scalars: dict[str, int] = {}
        self.defaults: dict[str, int] = {}
        self.tables: dict[str, Array] = {}
        self.numbers = np.random.default_rng(seed)

    def case(self) -> Case:
        draw = self.draw
        q_len, kv_len = (draw.choice([1, 2, 7, 16, 33, 64, 65, 100]) for _ in "qk")
        batch, heads = draw.choice([(1, 1), (1, 1), (2, 1), (1, 3), (2, 2)])
        block = draw.choice([1, 2, 3, 5, 8, 16, 32]), draw.choice([1, 2, 3, 5, 8, 16, 32])
        self.lengths = q_len, kv_len, batch, heads
        for i in range(draw.choice([0, 0, 1, 2])):
            params = tuple("xyz"[: draw.randint(0, 2)])
            body = self.bool(2, names=params) if draw.random() < 0.7 else self.int(2, names=params)
            if params:
                self.definitions[f"f{i}"] = params, body
        mask = self.bool(draw.choice([1, 2, 3, 4]))
        read = names(mask, self.definitions)  # a value that nothing reads is refused
        scalars, tables = ({n: x for n, x in d.items() if n in read} for d in (self.scalars, self.tables))
        case = Case(
            self.seed, mask, self.definitions, scalars, tables, self.defaults, q_len, kv_len, batch, heads, block
        )
        case.text = program(case)
        return case

    def bool(self, depth: int, names: tuple[str, ...] = (), ranges: bool = True) -> Node:
        draw = self.draw
        if depth <= 0:
            return self.compare(0, names)
        kinds = ["compare"] * 4 + ["and"] * 3 + ["or"] * 3 + ["not", "xor", "if", "library", "library", "chain"]
        kinds += ["flag", "at"] + (["reduce"] if ranges else []) + (["call"] if self.definitions else [])
        kind = draw.choice(kinds)
        if kind in ("and", "or", "xor"):
            return Node(kind, (self.bool(depth - 1, names, ranges), self.bool(depth - 1, names, ranges)))
        if kind == "not":
            return Node("not", (self.bool(depth - 1, names, ranges),))
        if kind == "if":
            return Node("if", tuple(self.bool(depth - 1, names, ranges) for _ in range(3)))
        if kind == "chain":
            signs = draw.choice([("<=", "<"), ("<", "<="), (">=", ">"), ("==", "!=")])
            return Node("chain", tuple(self.int(depth - 1, names) for _ in range(3)), signs)
        if kind == "library":
            return self.library()
        if kind == "flag":
            return self.lookup("flag", depth - 1, names)
        if kind == "reduce":
            low = draw.randint(0, 3)
            body = self.bool(depth - 1, (*names, "j"), ranges=False)
            return Node("reduce", (body,), (draw.choice(["any", "all"]), low, low + draw.randint(1, 6)))
        if kind == "at":
            return Node("at", (self.bool(depth - 1, names, ranges), self.place("q"), self.place("k")))
        if kind == "call":
            name = draw.choice(list(self.definitions))
            params, body = self.definitions[name]
            if self.is_bool(body):
                return Node("call", tuple(self.int(depth - 1, names) for _ in params), name)
        return self.compare(depth - 1, names)

    def compare(self, depth: int, names: tuple[str, ...]) -> Node:
        sign = self.draw.choice(["<", "<=", ">", ">=", ">=", "==", "!="])
        if self.draw.random() < 0.3:  # what masks are made of
            return Node(sign, (Node("name", held="q"), Node("name", held="k")))
        return Node(sign, (self.int(depth, names), self.int(depth, names)))

    def library(self) -> Node:
        name = self.draw.choice(list(LIBRARY))
        count = LIBRARY[name].__code__.co_argcount - 2
        return Node(
            "call", tuple(Node("number", held=self.draw.choice([1, 2, 3, 4, 5, 8, 13])) for _ in range(count)), name
        )

    def place(self, name: str) -> Node:
        """A coordinate read elsewhere."""
        n, by = Node("name", held=name), Node("number", held=self.draw.choice([1, 2, 3, 4, 7]))
        return Node(self.draw.choice(["//", "+", "-", "%", "*"]), (n, by))

    def int(self, depth: int, names: tuple[str, ...] = ()) -> Node:
        draw = self.draw
        if depth <= 0 or draw.random() < 0.25:
            kind = draw.choice(["q", "q", "k", "k", "number", "number", "b", "h", "scalar", "size", *names])
            if kind == "number":
                return Node("number", held=draw.choice([-7, -3, -2, -1, 0, 1, 2, 3, 4, 5, 8, 16, 27, 28, 64]))
            if kind == "scalar":
                return Node("name", held=self.scalar())
            return Node("name", held=draw.choice(["B", "H", "Q_LEN", "KV_LEN"]) if kind == "size" else kind)
        kind = draw.choice(
            "+ - - * // // % % min max abs clamp if lookup negative >> << bitand bitor bitxor call sum".split()
        )
        if kind in ("abs", "negative"):
            return Node(kind, (self.int(depth - 1, names),))
        if kind in ("//", "%"):
            by = Node("number", held=draw.choice([-3, 0, 1, 2, 3, 4, 5, 7, 8, 13]))
            return Node(kind, (self.int(depth - 1, names), by if draw.random() < 0.8 else self.int(depth - 1, names)))
        if kind in ("<<", ">>"):
            return Node(kind, (self.int(depth - 1, names), Node("number", held=draw.choice([0, 1, 2, 3, 64, -1]))))
        if kind == "*":  # by a small number, or of two positions
            other = self.int(0, names) if draw.random() < 0.3 else Node("number", held=draw.choice([-2, 2, 3, 5]))
            return Node("*", (self.int(min(depth - 1, 1), names), other))
        if kind == "clamp":
            low = draw.randint(-2, 9)
            ends = Node("number", held=low), Node("number", held=low + draw.randint(0, 20))
            return Node("clamp", (self.int(depth - 1, names), *ends))
        if kind == "if":
            return Node(
                "if", (self.bool(depth - 1, names, False), self.int(depth - 1, names), self.int(depth - 1, names))
            )
        if kind == "lookup":
            return self.lookup(draw.choice(["doc", "rank"]), depth - 1, names)
        if kind == "sum":
            low = draw.randint(0, 2)
            return Node("reduce", (self.int(min(depth - 1, 1), (*names, "j")),), ("sum", low, low + draw.randint(1, 4)))
        if kind == "call":
            ints = [n for n, (_, body) in self.definitions.items() if not self.is_bool(body)]
            if ints:
                name = draw.choice(ints)
                return Node("call", tuple(self.int(depth - 1, names) for _ in self.definitions[name][0]), name)
            kind = "+"
        return Node(kind, (self.int(depth - 1, names), self.int(depth - 1, names)))

    def is_bool(self, n: Node) -> bool:
        if n.op == "if":
            return self.is_bool(n.args[1])
        if n.op == "reduce":
            return n.held[0] != "sum"
        if n.op == "lookup":
            return self.tables[n.held].dtype == bool
        if n.op == "call":
            return n.held in LIBRARY or self.is_bool(self.definitions[n.held][1])
        return n.op in ("and", "or", "xor", "not", "chain", "at", "<", "<=", ">", ">=", "==", "!=")

    def scalar(self) -> str:
        name = self.draw.choice(["w", "n", "p"])
        if name == "p":
            self.defaults.setdefault(name, self.draw.choice([1, 3, 10]))
        else:
            self.scalars.setdefault(name, self.draw.choice([0, 1, 2, 5, 9, 40]))
        return name

    def lookup(self, name: str, depth: int, names: tuple[str, ...]) -> Node:
        """Tables reach every position; what indexes them may not."""
        most = max(self.lengths[:2])
        if name not in self.tables:
            if name == "doc":
                self.tables[name] = np.sort(self.numbers.integers(0, 6, most)).astype(np.int32)
            elif name == "rank":
                self.tables[name] = self.numbers.integers(-4, most, most)
            else:
                self.tables[name] = self.numbers.random(most) < 0.3
        index = Node("name", held=self.draw.choice("qk"))
        if depth > 0 and self.draw.random() < 0.3:  # clamped here, since a provable miss is an error at bind time
            inner = self.int(depth, names)
            index = Node("clamp", (inner, Node("number", held=0), Node("number", held=most - 1)))
        return Node("lookup", (index,), name)


def make(seed: int) -> Case:
    return Maker(seed).case()


# -- what is compared -------------------------------------------------------------------------------------------


def kinds_of(seen: Array, block: tuple[int, int]) -> Array:
    """Tiles of a dense mask [batch, heads, q_len, kv_len]; positions past the lengths count as hidden."""
    (bq, bk), (q, k) = block, seen.shape[2:]
    rows, columns = -(-q // bq), -(-k // bk)
    padded = np.zeros((*seen.shape[:2], rows * bq, columns * bk), bool)
    padded[:, :, :q, :k] = seen
    tiles = padded.reshape(*seen.shape[:2], rows, bq, columns, bk)
    return np.where(tiles.all((3, 5)), FULL, np.where(tiles.any((3, 5)), PARTIAL, EMPTY))


def check(case: Case) -> None:
    """Everything frisket says of the program, beside the evaluator above."""
    wanted = dense(case)
    m = fk.mask(case.text, **case.bound)
    sizes = {"batch": case.batch, "heads": case.heads}
    found = m.dense(case.q_len, case.kv_len, **sizes)
    assert (found == wanted).all(), f"dense: {np.argwhere(found != wanted)[0]}"
    again = fk.mask(str(m), **m.params)
    assert again == m, "the text of a mask is not that mask"
    assert pickle.loads(pickle.dumps(m)) == m, "pickle"
    layout = m.layout(case.q_len, case.kv_len, block=case.block, **sizes)
    check_layout(layout, wanted, case.block)
    check_crop(m, case, wanted)
    check_answers(m, case, wanted)


def check_layout(layout: Any, wanted: Array, block: tuple[int, int]) -> None:
    kinds, true = layout.kinds(), kinds_of(wanted, block)
    wrong = (kinds != PARTIAL) & (kinds != true)
    assert not wrong.any(), f"tile {np.argwhere(wrong)[0]} is {true[wrong][0]}, and said to be {kinds[wrong][0]}"
    if layout.exact:
        loose = kinds != true
        assert not loose.any(), f"tile {np.argwhere(loose)[0]} is {true[loose][0]} in an exact layout"
    c = layout.counts
    assert (c.empty, c.partial, c.full) == tuple(int((kinds == x).sum()) for x in (EMPTY, PARTIAL, FULL)), "counts"
    if layout.facts.visible_pairs is not None:
        assert layout.facts.visible_pairs == wanted.sum(), "visible_pairs"
    runs, slices, width = layout.runs, layout.spans.slice_of, kinds.shape[3]
    rebuilt = np.zeros((len(runs.row_ptr) - 1, width), kinds.dtype)
    for row, start, stop, kind in zip(
        np.repeat(np.arange(len(rebuilt)), np.diff(runs.row_ptr)), runs.start, runs.stop, runs.kind, strict=True
    ):
        rebuilt[row, start:stop] = kind
    rebuilt = rebuilt.reshape(-1, kinds.shape[2], width)[slices]
    assert (rebuilt == kinds).all(), "runs are not the tiles"


def check_crop(m: Any, case: Case, wanted: Array) -> None:
    draw = random.Random(case.seed)
    q0, k0 = draw.randrange(case.q_len), draw.randrange(case.kv_len)
    layout = m.layout(
        case.q_len - q0, case.kv_len - k0, batch=case.batch, heads=case.heads, block=case.block,
        origin=(0, 0, q0, k0), sizes=(case.batch, case.heads, case.q_len, case.kv_len),
    )  # fmt: skip
    check_layout(layout, wanted[:, :, q0:, k0:], case.block)


def check_answers(m: Any, case: Case, wanted: Array) -> None:
    sizes = {"batch": case.batch, "heads": case.heads}
    answers = {
        "is_empty": (lambda: m.is_empty(case.q_len, case.kv_len, **sizes), not wanted.any()),
        "empty_rows": (lambda: m.empty_rows(case.q_len, case.kv_len, **sizes), not wanted.any(-1).all()),
        "implies causal": (
            lambda: m.implies("causal", case.q_len, case.kv_len, **sizes),
            not (wanted & ~np.tri(case.q_len, case.kv_len, dtype=bool)).any(),
        ),
    }
    for name, (ask, holds) in answers.items():
        try:
            answer = ask()
        except fk.Undecided:
            continue
        assert bool(answer) == holds, name
        if answer.witness is not None:
            b, h, q, k = answer.witness
            shown = {"is_empty": True, "implies causal": True}.get(name)
            assert name == "empty_rows" or wanted[b, h, q, k] == shown, f"{name}: the witness shows nothing"
            assert name != "empty_rows" or not wanted[b, h, q].any(), "empty_rows: the witness sees a key"


def check_attention(case: Case) -> None:
    """Attention of a program that has something to show, beside a softmax written out here."""
    import torch

    wanted = dense(case)
    draw = torch.Generator().manual_seed(case.seed)
    q, k, v = (
        torch.randn(case.batch, case.heads, n, 8, generator=draw, dtype=torch.float64, requires_grad=True)
        for n in (case.q_len, case.kv_len, case.kv_len)
    )
    seen = torch.from_numpy(wanted.copy())
    x = (q @ k.mT * 8**-0.5).masked_fill(~seen, -torch.inf)
    p = torch.where(seen.any(-1, keepdim=True), torch.softmax(x, -1), 0.0)
    p = torch.where(seen, p, 0.0)
    out = p @ v
    dout = torch.randn(out.shape, generator=draw, dtype=torch.float64)
    found = fk.compile(case.text, backend="library", **case.bound)(q, k, v)
    torch.testing.assert_close(found, out, atol=1e-9, rtol=1e-9)
    ours = torch.autograd.grad(found, (q, k, v), dout)
    visible = torch.where(seen, x, -1e300)  # a softmax without NaN in its backward
    plain = torch.where(seen, torch.softmax(visible, -1), 0.0) @ v
    for a, b in zip(ours, torch.autograd.grad(plain, (q, k, v), dout), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def campaign(first: int, count: int, attention: int = 10, seconds: float = 60.0) -> Iterator[tuple[int, str]]:
    """(seed, what is wrong) of programs that fail, or that take more processor time than `seconds`."""
    for seed in range(first, first + count):
        start = time.process_time()
        try:
            case = make(seed)
            check(case)
            if attention and seed % attention == 0:
                check_attention(case)
        except Exception as error:
            yield seed, f"{type(error).__name__}: {error}"
        if (spent := time.process_time() - start) > seconds:
            yield seed, f"{spent:.0f} s of processor time"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    args = parser.parse_args()
    failed = 0
    for seed, why in campaign(args.first, args.count):
        failed += 1
        case = make(seed)
        print(f"-- {seed}: {why}\n{case.text}\n{case.bound} {case.q_len} x {case.kv_len}, {case.batch} x {case.heads}, "
              f"block {case.block}", flush=True)  # fmt: skip
    print(f"{args.count} programs, {failed} failed")


if __name__ == "__main__":
    main()
