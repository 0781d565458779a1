"""Orders of positions that a mask suggests: by its remainders and quotients, and by its tables.

>>> from frisket.dsl.sugar import eq, k, q
>>> dilated = (q >= k) & eq((q - k) % 4, 0)
>>> [str(c) for c in candidates(dilated, {}, 16)]
['remainders by 4']
>>> grid = (abs(q // 32 - k // 32) <= 3) & (abs(q % 32 - k % 32) <= 3)
>>> [str(c) for c in candidates(grid, {}, 1024)]
['tiles of 4 x 8, 8 x 8, 8 x 16 in a grid of 32 x 32', 'remainders by 32']

Some are permutations of the digits of a position. A position of an image of 256 columns has the digits (column, row):
`p % 256` and `p // 256`. Cut each in two, and it has four: the place in a tile of 8 x 8 and the tile's own. An order
that lists the same digits in another sequence visits tile after tile; one that lists the remainder by 4 last visits the
positions of each remainder together. So strides, dilations and tiles of any number of axes are one thing, and each has
a closed form in `//`, `%`, `*` and `+`.

>>> from frisket.dsl.sugar import q
>>> by_remainder = (OrderDigit(4, 4), OrderDigit(1, 4))  # of 16 positions: p // 4 runs fastest, p % 4 slowest
>>> places(by_remainder, 16).tolist()
[0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15]
>>> position(by_remainder, q)
q % 4 * 4 + q // 4

Others come from the graph of a mask that is data: reverse Cuthill-McKee puts queries near the keys that they see. Its
nodes are the rows and columns of a table, `q // 16` of `t[q // 16, k // 16]`: positions that read the same row stay
together. scipy orders them; where it is not installed there is no such order.

>>> from frisket.dsl.ir import lookup
>>> from frisket.dsl.sugar import k, q
>>> import numpy as np
>>> from frisket.dsl.types import BOOL
>>> near = np.array([[1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]], bool)  # 0 - 3 - 2 - 1
>>> ways = by_graph(lookup("t", (q // 2, k // 2), BOOL), {}, {"t": near}, 8, 8)
>>> next(ways)[0].places(8).tolist()
[2, 3, 4, 5, 6, 7, 0, 1]

A mask in such an order is read at positions that stand in an array. Parts that depend on one position become tables.
Tables that are read by a query and a key are put in the order of the positions.

>>> from frisket.dsl.sugar import eq, k, q
>>> import numpy as np
>>> places = np.array([0, 2, 1, 3])
>>> e, tables = folded((q >= k) & eq(q % 2, k % 2), {"q": places, "k": places}, {}, {})
>>> e, {n: t.tolist() for n, t in tables.items()}
(at_0[q] >= at_0[k] & at_1[q] == at_1[k], {'at_0': [0, 2, 1, 3], 'at_1': [0, 0, 1, 1]})
>>> both = {"q": np.array([2, 3, 0, 1]), "k": np.array([2, 3, 0, 1])}
>>> e, tables = folded(lookup("t", (q // 2, k // 2)), both, {}, {"t": np.array([[1, 2], [3, 4]])})
>>> e, {n: t.tolist() for n, t in tables.items()}
(at_0[q // 2, k // 2], {'at_0': [[4, 3], [2, 1]]})
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.evaluate import evaluate, table_array
from frisket.dsl.ir import Expr, Named, find, fold, lit, literal_value, lookup, rebuild, transform, uses, var, walk
from frisket.dsl.types import FLOAT, INT
from frisket.dsl.work import steps
from frisket.lowering.kernels.expr import same_remainder
from frisket.lowering.simplify.affine import linear


@dataclass(frozen=True)
class OrderDigit:
    """A digit of a coordinate of positions: `radix` values, each worth `step` of an axis of `size`, whose own steps are
    worth `place` positions. It is `p // place % size // step % radix`; without a size the axis ends with the digit."""

    place: int
    radix: int
    step: int = 1
    size: int = 0

    @property
    def end(self) -> int:
        """The size of the axis."""
        return self.size or self.step * self.radix

    def of(self, p: NDArray[np.int64]) -> NDArray[np.int64]:
        return p // self.place % self.end // self.step % self.radix


def merged(digits: Iterable[OrderDigit]) -> tuple[OrderDigit, ...]:
    """The fewest digits of an equal order: where one goes on where the one before ends, both are one."""
    joined: list[OrderDigit] = []
    for d in digits:
        if d.radix == 1:  # a digit of one value moves nothing
            continue
        joined.append(d)
        while len(joined) > 1 and (both := _joined(*joined[-2:])):
            joined[-2:] = [both]
    return tuple(joined)


def _joined(low: OrderDigit, high: OrderDigit) -> OrderDigit | None:
    """Two digits as one; None where they do not follow one another."""
    if (low.place, low.end) == (high.place, high.end) and low.step * low.radix == high.step:
        return OrderDigit(low.place, min(low.radix * high.radix, -(-low.end // low.step)), low.step, low.end)
    if _whole(low) and _whole(high) and low.place * low.end == high.place:
        return OrderDigit(low.place, low.radix * high.radix)
    return None


def _whole(d: OrderDigit) -> bool:
    """Whether a digit is all of its axis."""
    return d.step == 1 and d.radix == d.end


def in_order(digits: Sequence[OrderDigit]) -> bool:
    """Whether an order leaves every position where it is."""
    return len(digits) <= 1


def places(digits: Sequence[OrderDigit], length: int) -> NDArray[np.int64]:
    """The position at every place of the order, the fastest digit first, int64 [length]. Digits may count further than
    the length: an image's last row of tiles may be cut."""
    return np.argsort(rank(digits, np.arange(length)), kind="stable")


def rank(digits: Sequence[OrderDigit], p: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers that rise as the order goes on, of positions: their places, where the order is `closed`."""
    numbers, stride = np.zeros(p.shape, np.int64), 1
    for d in digits:
        numbers += d.of(p) * stride
        stride *= d.radix
    return numbers


def of_rank(digits: Sequence[OrderDigit], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """The positions that have such a `rank`; numbers that no position has are left out."""
    positions: NDArray[np.int64] = np.zeros(numbers.shape, np.int64)
    left = numbers
    for d in digits:
        positions, left = positions + left % d.radix * (d.place * d.step), left // d.radix
    # digits that count past the length have numbers without a position
    known: NDArray[np.int64] = positions[rank(digits, positions) == numbers]
    return known


def closed(digits: Sequence[OrderDigit], length: int) -> bool:
    """Whether `position` holds for every place: tiles divide their axes, and digits count up to the length."""
    return prod(d.radix for d in digits) == length and all(d.end % (d.step * d.radix) == 0 for d in digits)


def position(digits: Sequence[OrderDigit], place: Any) -> Expr:
    """The position at a place of the order, where it is `closed`."""
    total: Any = None
    stride, count = 1, prod(d.radix for d in digits)
    for d in digits:
        x = place // stride if stride > 1 else place
        x = x % d.radix if stride * d.radix < count else x
        x = x * (d.place * d.step) if d.place * d.step > 1 else x
        total = x if total is None else total + x
        stride *= d.radix
    return lit(0) if total is None else total


Array = NDArray[Any]
Range = tuple[int, int | None]  # of a position's digits: the first one's place, and the place after the last one's
LEVELS = (32, 64, 128)  # positions of a tile, of a tile of tiles, ...: what executors take for keys and for queries
AXES = 5  # of a grid, at most: each doubles the candidates
MOST_ALONE = 2  # axes whose coordinates come one after another
SHORT = 32  # coordinates of an axis that may be whole in every tile


@dataclass(frozen=True, eq=False)
class Candidate:
    """An order of positions, by digits or by the rising values of a table, and what it is called."""

    name: str
    digits: tuple[OrderDigit, ...] = ()
    table: Array | None = None
    untiled: bool = False  # remainders, one after another, and no tiles: keys may move where queries stay
    start: int = 0  # positions in front of the digits' own, such as text before an image: they come last

    def places(self, length: int) -> NDArray[np.int64]:
        """The position at every place, int64 [length]."""
        if self.table is None:
            order = self.start + places(self.digits, length - self.start)
            # text before an image comes behind it, so that tiles of the image begin at a multiple
            return np.concatenate([order, np.arange(self.start)]) if self.start else order
        return np.argsort(self.table[:length], kind="stable")

    def rank(self, p: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Numbers that rise as the order goes on, of positions."""
        if self.table is not None:
            return np.argsort(self.places(length))[p]
        return np.where(p < self.start, prod(d.radix for d in self.digits) + p, rank(self.digits, p - self.start))

    def tile_at(self, p: int, size: int, length: int) -> NDArray[np.int64]:
        """The positions in the tile of `size` places that holds a position."""
        start = int(self.rank(np.array([p]), length)[0]) // size * size
        if self.table is not None:
            return self.places(length)[start : start + size]
        numbers = start + np.arange(size)
        positions, last = self.start + of_rank(self.digits, numbers), numbers - prod(d.radix for d in self.digits)
        return np.concatenate([positions[positions < length], last[(last >= 0) & (last < self.start)]])

    def __str__(self) -> str:
        return self.name


def candidates(mask: Expr, tables: Mapping[str, Array], length: int) -> Iterator[Candidate]:
    """Every order that a mask without scalars suggests for this many positions, each once."""
    seen: set[tuple[int, tuple[OrderDigit, ...]]] = set()
    for start in sorted({0, *(n for n in starts(mask) if n < length)}):
        for chain in _chains(sorted(cuts(mask)), length - start):
            for candidate in _of_chain(chain, length - start):
                if not in_order(candidate.digits) and (start, candidate.digits) not in seen:
                    seen.add((start, candidate.digits))
                    last = f", positions below {start:,} last" if start else ""
                    yield replace(candidate, name=candidate.name + last, start=start)
    for name in dict.fromkeys(n.name for n in find(mask, "lookup") if len(n.args) == 1):
        table = tables.get(name)
        # a table that rises already suggests no move
        if table is not None and len(table) >= length and (np.diff(table[:length].astype(float)) < 0).any():
            yield Candidate(f"rising {name}", table=table, untiled=True)
    yield from _of_coordinates(mask, tables, length)


def _of_coordinates(mask: Expr, tables: Mapping[str, Array], length: int) -> Iterator[Candidate]:
    """Tiles of coordinates that are tables of the tokens, such as `row[q]` and `col[k]`. They go in one group of tokens
    after another, by the tables that have to be equal, such as `img[q] == img[k]`."""
    read: dict[str, set[Expr]] = {}
    equal = set()
    for n in walk(mask):
        if n.op == "lookup" and n.type is INT and len(n.args) == 1 and n.args[0].op == "var":
            read.setdefault(n.name, set()).add(n.args[0])
        elif n.op == "eq" and {a.op for a in n.args} == {"lookup"} and n.args[0].name == n.args[1].name:
            equal.add(n.args[0].name)
    both = [n for n, of in read.items() if len(of) == 2 and len(tables.get(n, ())) >= length]
    values = {n: (x := tables[n][:length].astype(np.int64)) - x.min() for n in both}  # from 0 on, as digits count
    # the fastest first
    names = sorted((n for n in both if n not in equal), key=lambda n: -np.count_nonzero(np.diff(values[n])))
    if not 2 <= len(names) <= AXES:
        return
    inner, outer, sizes = _tiles([OrderDigit(i, int(values[n].max()) + 1) for i, n in enumerate(names)], None)
    keys = [values[names[d.place]] // d.step % d.radix for d in (*inner, *outer)]
    groups = [n for n in both if n in equal]
    shapes = ", ".join(" x ".join(map(str, reversed(s))) for s in sizes)
    label = f"tiles of {shapes} in {' x '.join(reversed(names))}" + "".join(f", rising {n}" for n in groups)
    yield Candidate(label, table=np.argsort(np.lexsort([*keys, *(values[n] for n in groups)])))


def starts(mask: Expr) -> set[int]:
    """The positions at which quotients and remainders begin to count: 77 of `(q - 77) // 32`."""
    counted = [linear(n.args[0]) for n in find(mask, "floordiv", "mod")]
    single = [e for e in counted if len(e.terms) == 1 and e.terms[0][1] == 1 and e.terms[0][0].name in ("q", "k")]
    return {-e.const for e in single if e.const < 0}


def cuts(mask: Expr) -> set[int]:
    """The places at which quotients and remainders cut positions in two."""
    cut_places: set[int] = set()
    known: dict[Expr, Range | None] = {}
    for node in walk(mask):  # operands first
        known[node] = _range(node, known, cut_places)
    return cut_places - {1}


def _range(node: Expr, known: Mapping[Expr, Range | None], cut_places: set[int]) -> Range | None:
    """The digits of a position that an Int is made of; None where it is made of something else."""
    if node.op in ("floordiv", "mod") and (divisor := literal_value(node.args[1], 0)) > 0:
        whole = known[node.args[0]]
        if whole is None:
            return None
        cut = whole[0] * int(divisor)
        cut_places.add(cut)
        return (cut, whole[1]) if node.op == "floordiv" else (whole[0], cut)
    if node.op == "var":
        return (1, None) if node.name in ("q", "k") else None
    if node.op not in ("add", "sub", "neg"):
        return None
    terms = linear(node).terms
    ranges = {known.get(atom, (1, None) if atom.op == "var" else None) for atom, _ in terms}
    return ranges.pop() if len(ranges) == 1 and all(abs(f) == 1 for _, f in terms) else None


def _chains(places: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    """Cuts of which each divides the next: the longest such row from the smallest on, and every cut alone."""
    chain = [1]
    for cut in places:
        if cut % chain[-1] == 0 and cut < length:
            chain.append(cut)
    yield tuple(chain[: AXES + 1])
    for cut in places:
        if cut < length:
            yield 1, cut


def _of_chain(chain: tuple[int, ...], length: int) -> Iterator[Candidate]:
    """Orders by the axes between cuts: each axis is tiled with the others, or its coordinates come one after another,
    the slowest of all. A short axis may be whole in every tile."""
    ends = (*chain[1:], -(-length // chain[-1]) * chain[-1])
    axes = [OrderDigit(place, end // place) for place, end in zip(chain, ends, strict=True)]
    for choices in product((False, True), repeat=len(axes)):
        tiled = [a for a, alone in zip(axes, choices, strict=True) if not alone]
        alone = [a for a, alone in zip(axes, choices, strict=True) if alone]
        if not tiled or len(alone) > MOST_ALONE:
            continue
        for whole in (None, *[a for a in tiled if 1 < a.radix <= SHORT and len(tiled) > 2]):
            inner, outer, sizes = _tiles(tiled, whole) if len(tiled) > 1 else ([], tiled, [])
            labels = []
            if len(tiled) > 1:
                shapes = ", ".join(" x ".join(map(str, reversed(s))) for s in sizes)
                labels.append(f"tiles of {shapes} in a grid of {' x '.join(str(a.radix) for a in reversed(tiled))}")
            labels += [f"remainders by {a.radix}" if a.place == 1 else f"axis of {a.radix}" for a in alone]
            yield Candidate(", ".join(labels), merged((*inner, *outer, *alone)), untiled=len(tiled) == 1)


def _tiles(
    axes: Sequence[OrderDigit], whole: OrderDigit | None
) -> tuple[list[OrderDigit], list[OrderDigit], list[tuple[int, ...]]]:
    """The digits inside of tiles and those of tiles, and the shapes of tiles. Sides are powers of two, as square as the
    axes allow, each level a multiple of the one before; `whole` is in every tile from the first on."""
    size = [a.radix if a is whole else 1 for a in axes]
    inner = [whole] if whole else []
    shapes = []
    for level in LEVELS:
        before = list(size)
        # the shortest side doubles first: tiles are as square as axes allow
        while prod(size) < level and (grown := [(s, i) for i, s in enumerate(size) if s < axes[i].radix]):
            i = min(grown)[1]
            size[i] = min(2 * size[i], axes[i].radix)
        inner += [OrderDigit(a.place, s // b, b, a.radix) for a, b, s in zip(axes, before, size, strict=True)]
        if size != before:
            shapes.append(tuple(size))
    return inner, [OrderDigit(a.place, -(-a.radix // s), s, a.radix) for a, s in zip(axes, size, strict=True)], shapes


def folded(
    e: Expr, places: Mapping[str, Array], scalars: Named, tables: Mapping[str, Array], reserved: Collection[str] = ()
) -> tuple[Expr, dict[str, Array]]:
    """`e` at `places` of q and of k, either or both, and the tables it reads then. Each largest part that depends on
    one of them becomes a table: `doc[q]` is read in one step, not through the position, and its order can be seen.
    A table of several axes, such as `t[q // 16, k // 16]`, has the values of each axis in the order they are read. The
    rest of `e` is as it was, with its own scalars and tables. `scalars` may have Q_LEN, KV_LEN, B and H; `reserved`
    are names that a table may not have, besides those of `scalars` and `tables`."""
    e = transform(e, same_remainder)
    new_tables: dict[str, Array] = {}
    others = {*reserved, *scalars, *tables}
    prefix = "at_"
    while any(n.startswith(prefix) for n in others):  # a table of the user's may have any name
        prefix += "_"

    def table_name(value: Array) -> str:
        # equal tables are stored once, and of one dtype: 0 and False differ
        values = value if value.dtype.kind in "bf" else _narrow(value)
        same = (n for n, t in new_tables.items() if t.dtype == values.dtype and np.array_equal(t, values))
        label = next(same, None) or f"{prefix}{len(new_tables)}"
        new_tables[label] = values
        return label

    def read(node: Expr, name: str) -> Array:
        return np.broadcast_to(evaluate(node, {**scalars, name: places[name]}, tables), places[name].shape)

    def table(node: Expr, name: str) -> Expr:
        return lookup(table_name(read(node, name)), (var(name),), node.type)

    def in_turn(node: Expr) -> Expr:
        """A lookup of a table whose axes have their values in the order in which a coordinate reads them."""
        values, args = table_array(tables, node.name), [known[a] for a in node.args]
        for axis, (a, name) in enumerate(zip(node.args, map(whole.get, node.args), strict=True)):
            if name:
                at, numbers = numbered(read(a, name).clip(0, values.shape[axis] - 1))
                values = values.take(at, axis)
                n = int((numbers == 0).sum())
                # each value as often and in order: then the number is a quotient of the position
                regular = np.array_equal(numbers, np.arange(len(numbers)) // n)
                place = var(name) // n if n > 1 else var(name)
                args[axis] = place if regular else lookup(table_name(numbers), (var(name),))
        return lookup(table_name(values), tuple(args), node.type)

    known: dict[Expr, Expr] = {}
    # the only coordinate that a node depends on; what reads the variable of an outer reduction has several values there
    whole = {n: None if free else _coordinate(n, places, scalars) for n, free in fold(e, _free).items()}
    for node in whole:
        known[node] = node
        if whole[node] is None and node.op == "lookup" and any(whole[a] for a in node.args):
            known[node] = in_turn(node)
        elif whole[node] is None:
            args = [table(a, name) if (name := whole[a]) else known[a] for a in node.args]
            known[node] = rebuild(node, tuple(args))
    root = whole[e]
    return (table(e, root) if root else known[e]), new_tables


def _free(node: Expr, args: list[frozenset[int]]) -> frozenset[int]:
    """The variables of reductions that a node reads and does not bind."""
    below = frozenset[int]().union(*args)
    return below | {node.name} if node.op == "bound" else below - {node.name[1]} if node.op == "reduce" else below


def _coordinate(node: Expr, places: Mapping[str, Array], scalars: Mapping[str, Any]) -> str | None:
    """The coordinate, q or k, that an Int or Bool depends on, if nothing else in it lacks a value."""
    names = uses(node) - scalars.keys()
    return next(iter(names)) if node.type is not FLOAT and len(names) == 1 and names <= places.keys() else None


def numbered(x: Array) -> tuple[Array, Array]:
    """The values of an array, each once, in order of appearance, and the number of each element among them."""
    values, first, which = np.unique(x, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return values[order], np.argsort(order)[which]


def _narrow(x: Array) -> Array:
    """Ints in 32 bits, where they fit."""
    # kernels count in 32 bits where entries let them
    fits = not len(x) or (x.min() >= -(1 << 31) and x.max() < 1 << 31)
    return x.astype(np.int32) if fits else x


STEPS, EDGES = 1 << 30, 1 << 22  # of evaluating all pairs of nodes, and visible pairs among them, at most
CHUNK = 1 << 22  # pairs evaluated at a time


def by_graph(
    mask: Expr, scalars: Mapping[str, Any], tables: Mapping[str, Array], q_len: int, kv_len: int
) -> Iterator[tuple[Candidate, Candidate]]:
    """Orders of queries and of keys for each table that both read. There is one order for both where they read it
    alike, and two of the bipartite graph of its rows and columns. The graph is the mask's, of batch entry 0 and head 0,
    at the first position of each node."""
    env = {**scalars, "b": 0, "h": 0, "B": 1, "H": 1, "Q_LEN": q_len, "KV_LEN": kv_len}
    lengths, seen = {"q": q_len, "k": kv_len}, set()
    for node in find(mask, "lookup"):
        sides = (_indices(node, name, env, tables, lengths[name]) for name in lengths)
        nodes = [numbered(x)[1] for x in sides if x is not None]
        if len(nodes) < 2:
            continue
        try:  # slow to import, so no sooner
            from scipy.sparse import block_array, csr_array  # type: ignore[import-untyped]
            from scipy.sparse.csgraph import reverse_cuthill_mckee  # type: ignore[import-untyped]
        except ImportError:
            return
        of_q, of_k = nodes
        # two lookups of one pair of indices have one graph
        key = of_q.tobytes(), of_k.tobytes()
        edges = None if key in seen else _edges(mask, env, tables, of_q, of_k)
        seen.add(key)
        if edges is None:
            continue
        shape = int(of_q.max()) + 1, int(of_k.max()) + 1
        graph = csr_array((np.ones(len(edges[0]), np.int8), edges), shape)
        name = f"reverse Cuthill-McKee of {node.name}"
        if np.array_equal(of_q, of_k):
            both = Candidate(name, table=np.argsort(reverse_cuthill_mckee(graph))[of_q])
            yield both, both
        bipartite = block_array([[None, graph], [graph.T, None]], format="csr")
        order = np.argsort(reverse_cuthill_mckee(bipartite))  # its inverse: places by node
        yield Candidate(name, table=order[of_q]), Candidate(name, table=order[shape[0] :][of_k])


def _indices(node: Expr, name: str, env: Mapping[str, Any], tables: Mapping[str, Array], length: int) -> Array | None:
    """One number for a lookup's indices that depend on a coordinate, at each of its positions; None without any."""
    numbers = None
    for a, size in zip(node.args, table_array(tables, node.name).shape, strict=False):
        if uses(a) - env.keys() == {name} and not find(a, "bound"):
            index = evaluate(a, {**env, name: np.arange(length)}, tables).clip(0, size - 1)
            numbers = index if numbers is None else numbers * size + index
    return numbers


def _edges(mask: Expr, env: Named, tables: Named, of_q: Array, of_k: Array) -> tuple[Array, Array] | None:
    """The visible pairs among the first positions of all nodes; None where there are none or too many."""
    q, k = (np.unique(x, return_index=True)[1] for x in (of_q, of_k))
    if len(q) * len(k) * steps(mask) > STEPS:
        return None
    rows, columns, count = [], [], 0
    height = max(CHUNK // len(k), 1)
    for start in range(0, len(q), height):
        part = q[start : start + height, None]
        pairs = np.nonzero(np.broadcast_to(evaluate(mask, {**env, "q": part, "k": k}, tables), (len(part), len(k))))
        rows.append(pairs[0] + start)
        columns.append(pairs[1])
        count += len(pairs[0])
        if count > EDGES:
            return None
    return (np.concatenate(rows), np.concatenate(columns)) if count else None
