"""Arrays of a traced jaxpr: a shape, and the Expr of the element at given indices.

Indexing, broadcasting, transposing and arithmetic all come down to which elements are read. So a captured
array that is sliced, indexed by `b`, then by `q, k` becomes one lookup with all its indices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from frisket.dsl import ir
from frisket.dsl.evaluate import JOIN, evaluate
from frisket.dsl.forms import MAX_RANGE
from frisket.dsl.ir import REDUCTIONS, TRUE, ZERO, Expr, build, lit
from frisket.dsl.types import BOOL

from .scalars import Refused

MAX_WRITTEN = 64  # terms or turns of a loop that are written out

Indices = tuple[Expr, ...]
Element = Callable[[Indices], Expr]
Shape = tuple[int, ...]


class Array:
    """An array of a traced jaxpr. `source` is the name of the captured array it was made from; `pieces` says that its
    elements are unrelated (`jnp.stack`), so that a reduction over them is written out."""

    __slots__ = ("_element", "_known", "_seen", "_values", "pieces", "shape", "source")

    def __init__(
        self,
        shape: Shape,
        element: Element,
        known: Callable[[], Any] | None = None,
        source: str = "",
        pieces: bool = False,
    ) -> None:
        self.shape, self._element, self._known = shape, element, known
        self.source, self.pieces = source, pieces
        # elements are read again by each user: a chain of squares would double at every link
        self._seen: dict[Indices, Expr] = {}
        self._values: Any = None

    def at(self, indices: Indices = ()) -> Expr:
        if indices not in self._seen:
            self._seen[indices] = self._element(indices)
        return self._seen[indices]

    @property
    def is_known(self) -> bool:
        return self._known is not None

    def values(self) -> Any:
        """The numbers of the array while the function is traced: captured arrays and their results."""
        assert self._known is not None
        if self._values is None:
            self._values = self._known()
        return self._values


def scalar(e: Expr) -> Array:
    return Array((), lambda _: e)


def broadcast(fn: Callable[..., Expr], inputs: Sequence[Array]) -> Element:
    """Apply `fn` element by element; scalars are broadcast to arrays."""
    return lambda i: fn(*(x.at(i if x.shape else ()) for x in inputs))


# -- indices ----------------------------------------------------------------------------------------


NO_NUMBER = frozenset({"var", "param", "bound", "extent", "lookup", "segment", "random"})


def unwrapped(e: Expr, n: int) -> Expr:
    """The index i of JAX's `where(i < 0, i + n, i)`, which counts negative indices from the end of an axis of n. A
    position is never negative and a lookup clamps, so i alone is enough; a number is checked."""
    if e.op == "where":
        test, yes, no = e.args
        if test is build("lt", no, ZERO) and yes is build("add", no, lit(n)):
            if ir.find(no, *NO_NUMBER):
                return no
            return lit(int(evaluate(e, {})))
    return e


def _inside(e: Expr, n: int) -> Expr:
    """The index clamped to 0..n-1, or the index itself where it is inside already."""
    if e.op == "bound" or (e.op == "lit" and 0 <= e.name < n):  # the variable of a reduction stays on its axis
        return e
    return build("min", build("max", e, ZERO), lit(n - 1))


def _start(start: Expr, size: int, n: int) -> Expr:
    """The start of a window of `size` on an axis of n."""
    if size == 1:  # an index, and lookups clamp
        return unwrapped(start, n)
    return ZERO if size == n else _inside(unwrapped(start, n), n - size + 1)


def _plus(start: Expr, offset: Expr) -> Expr:
    if start is ZERO or offset is ZERO:
        return offset if start is ZERO else start
    return lit(start.name + offset.name) if start.op == offset.op == "lit" else start + offset


# -- shapes -----------------------------------------------------------------------------------------


def _broadcast_in_dim(p: Mapping[str, Any], x: Array, *_: Array) -> Element:
    dims = p["broadcast_dimensions"]
    return lambda i: x.at(tuple(ZERO if n == 1 else i[d] for d, n in zip(dims, x.shape, strict=True)))


def _squeeze(p: Mapping[str, Any], x: Array) -> Element:
    rank, gone = len(x.shape), {d % len(x.shape) for d in p["dimensions"]}

    def element(i: Indices) -> Expr:
        rest = iter(i)
        return x.at(tuple(ZERO if d in gone else next(rest) for d in range(rank)))

    return element


def only_units(old: Shape, new: Shape) -> bool:
    """Whether two shapes differ in axes of length 1 alone."""
    return [n for n in old if n != 1] == [n for n in new if n != 1]


def _reshape(p: Mapping[str, Any], x: Array, *_: Array) -> Element:
    new = p["new_sizes"]

    def element(i: Indices) -> Expr:
        if only_units(x.shape, new):  # the common case: indices pass without quotients and remainders
            rest = iter([e for e, n in zip(i, new, strict=True) if n != 1])
            return x.at(tuple(ZERO if n == 1 else next(rest) for n in x.shape))
        flat = ZERO
        for e, n in zip(i, new, strict=True):
            flat = flat * n + e
        out: list[Expr] = []
        for n in reversed(x.shape):
            out.append(flat % n)
            flat = flat // n
        return x.at(tuple(reversed(out)))

    return element


def _transpose(p: Mapping[str, Any], x: Array) -> Element:
    places = [p["permutation"].index(d) for d in range(len(x.shape))]
    return lambda i: x.at(tuple(i[d] for d in places))


def _slice(p: Mapping[str, Any], x: Array) -> Element:
    steps = p["strides"] or (1,) * len(x.shape)
    parts = list(zip(p["start_indices"], p["limit_indices"], steps, x.shape, strict=True))

    def index(e: Expr, start: int, stop: int, step: int, n: int) -> Expr:
        if (start, stop, step) == (0, n, 1):
            return e
        count = -(-(stop - start) // step)
        return lit(start) if count == 1 else _plus(lit(start), _inside(e, count) * step)

    return lambda i: x.at(tuple(index(e, *part) for e, part in zip(i, parts, strict=True)))


def axis_slice(x: Array, axis: int, start: int, stop: int) -> Array:
    """`x[start:stop]` along one axis."""
    low, high = [0] * len(x.shape), list(x.shape)
    low[axis], high[axis] = start, stop
    shape = tuple(b - a for a, b in zip(low, high))
    return Array(shape, _slice({"start_indices": low, "limit_indices": high, "strides": None}, x), pieces=x.pieces)


def row(x: Array, i: int) -> Array:
    """`x[i]`."""
    return Array(x.shape[1:], lambda rest: x.at((lit(i), *rest)), pieces=x.pieces)


def stacked(rows: Sequence[Array]) -> Array:
    return Array((len(rows), *rows[0].shape), _stack({"axis": 0}, *rows), pieces=True)


def _rev(p: Mapping[str, Any], x: Array) -> Element:
    return lambda i: x.at(tuple(n - 1 - e if d in p["dimensions"] else e for d, (e, n) in enumerate(zip(i, x.shape))))


def _iota(p: Mapping[str, Any]) -> Element:
    float_ = "float" in str(p["dtype"])
    return lambda i: ir.to_float(i[p["dimension"]]) if float_ else i[p["dimension"]]


def _pieces(i: Expr, ends: Sequence[int], piece: Callable[[int, int], Expr]) -> Expr:
    """The element at index i of an array in pieces; `piece(p, start)` reads piece p, which begins at start."""
    starts = [0, *ends[:-1]]
    if i.op == "lit":
        # JAX clamps an index past the end
        p = next((p for p, end in enumerate(ends) if i.name < end), len(ends) - 1)
        return piece(p, starts[p])
    out = piece(len(ends) - 1, starts[-1])
    for p in reversed(range(len(ends) - 1)):
        out = build("where", build("lt", i, lit(ends[p])), piece(p, starts[p]), out)
    return out


def _concatenate(p: Mapping[str, Any], *xs: Array) -> Element:
    axis = p["dimension"]
    ends = [sum(x.shape[axis] for x in xs[: j + 1]) for j in range(len(xs))]

    def element(i: Indices) -> Expr:
        return _pieces(
            i[axis], ends, lambda j, start: xs[j].at((*i[:axis], _plus(i[axis], lit(-start)), *i[axis + 1 :]))
        )

    return element


def _stack(p: Mapping[str, Any], *xs: Array) -> Element:
    axis = p["axis"]
    ends = list(range(1, len(xs) + 1))
    return lambda i: _pieces(i[axis], ends, lambda j, _: xs[j].at((*i[:axis], *i[axis + 1 :])))


# -- indexing ---------------------------------------------------------------------------------------


def _dynamic_slice(p: Mapping[str, Any], x: Array, *starts: Array) -> Element:
    at = [_start(s.at(), size, n) for s, size, n in zip(starts, p["slice_sizes"], x.shape, strict=False)]
    return lambda i: x.at(tuple(_plus(s, e) for s, e in zip(at, i, strict=True)))


def _gather(p: Mapping[str, Any], x: Array, where: Array) -> Element:
    """XLA's gather: the axes of the result that are not offsets choose a row of `where`, which says where in `x` a
    window of `slice_sizes` starts. The offsets say where in the window."""
    d, sizes = p["dimension_numbers"], p["slice_sizes"]
    batching = getattr(d, "operand_batching_dims", ())
    rows = getattr(d, "start_indices_batching_dims", ())
    window = [a for a in range(len(x.shape)) if a not in d.collapsed_slice_dims and a not in batching]

    def element(i: Indices) -> Expr:
        row = tuple(e for a, e in enumerate(i) if a not in d.offset_dims)
        index = dict.fromkeys(range(len(x.shape)), ZERO)
        for j, a in enumerate(d.start_index_map):
            index[a] = _start(where.at((*row, lit(j))), sizes[a], x.shape[a])
        for a, r in zip(batching, rows, strict=True):
            index[a] = row[r]
        for a, o in zip(window, d.offset_dims, strict=True):
            index[a] = _plus(index[a], i[o])
        return x.at(tuple(index.values()))

    return element


# -- reductions -------------------------------------------------------------------------------------


class Reductions:
    """Reductions over static axes as bounded reductions of the language. `shapes` are those of the tables so far: a
    range over a whole axis of one is written `0..extent(table, axis)`, as `dot` writes it."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes = shapes

    def bounded(self, kind: str, n: int, body: Callable[[Expr], Expr], written_out: bool) -> Expr:
        if n == 0:
            raise Refused("a reduction over an axis of length 0")
        if n == 1 or written_out or kind not in REDUCTIONS:
            if n > MAX_WRITTEN:
                raise Refused(f"{n} unlike elements joined for every position, more than {MAX_WRITTEN}; use a table")
            return ir.nest(JOIN.get(kind, kind), (body(lit(j)) for j in range(n)))
        if n > MAX_RANGE:
            raise Refused(f"a reduction over {n:,} elements for every position, more than {MAX_RANGE:,}; use a table")
        return ir.reduce(kind, ZERO, self._end(body, n), body)

    def _end(self, body: Callable[[Expr], Expr], n: int) -> Expr:
        probe = ir.make("bound", (), ("axis", next(_fresh)))  # a new one, as reductions nest
        for node in ir.walk(body(probe)):
            if node.op == "lookup":
                for axis, e in enumerate(node.args):
                    if e is probe and self.shapes[node.name][axis] == n:
                        return ir.extent(node.name, axis)
        return lit(n)

    def over(self, kind: str, axes: Sequence[int], x: Array) -> Element:
        rank = len(x.shape)

        def element(i: Indices) -> Expr:
            rest = iter(i)

            def nested(index: Indices, left: Sequence[int]) -> Expr:
                if not left:
                    return x.at(index)
                a, *inner = left
                n = x.shape[a]
                return self.bounded(kind, n, lambda j: nested((*index[:a], j, *index[a + 1 :]), inner), x.pieces)

            return nested(tuple(ZERO if a in axes else next(rest) for a in range(rank)), axes)

        return element

    def reduce(self, kind: str, p: Mapping[str, Any], x: Array) -> Element:
        if (kind in ("any", "all")) != (x.at((ZERO,) * len(x.shape)).type is BOOL):
            raise Refused("a bitwise reduction of integers, or a largest Bool; use jnp.any or jnp.all")
        return self.over(kind, p["axes"], x)

    def dot_general(self, p: Mapping[str, Any], x: Array, y: Array) -> Element:
        (xc, yc), (xb, yb) = p["dimension_numbers"]
        xf = [a for a in range(len(x.shape)) if a not in (*xc, *xb)]
        yf = [a for a in range(len(y.shape)) if a not in (*yc, *yb)]

        def product(i: Indices) -> Expr:
            """The product of two elements, by the axes of the result and then those that are summed over."""
            batch, left, rest = i[: len(xb)], i[len(xb) : len(xb) + len(xf)], i[len(xb) + len(xf) :]
            row = dict(zip((*xb, *xf, *xc), (*batch, *left, *rest[len(yf) :])))
            column = dict(zip((*yb, *yf, *yc), (*batch, *rest)))
            return x.at(tuple(row[d] for d in sorted(row))) * y.at(tuple(column[d] for d in sorted(column)))

        outer = (*(x.shape[a] for a in (*xb, *xf)), *(y.shape[a] for a in yf))
        whole = Array((*outer, *(x.shape[a] for a in xc)), product, pieces=x.pieces or y.pieces)
        return self.over("sum", range(len(outer), len(whole.shape)), whole)

    def table(self) -> dict[str, Callable[..., Element]]:
        kinds = {"sum": "sum", "max": "max", "min": "min", "or": "any", "and": "all", "prod": "mul"}
        reductions = {f"reduce_{n}": partial(self.reduce, kind) for n, kind in kinds.items()}
        return {**reductions, "dot_general": self.dot_general}


def _first(op: str, p: Mapping[str, Any], x: Array) -> Element:
    """argmax and argmin over few elements: the first of the extreme ones; of Bools (jnp.select), the first True."""
    (axis,) = p["axes"]
    if x.shape[axis] > MAX_WRITTEN:
        raise Refused(f"the place of an extreme of {x.shape[axis]} elements, more than {MAX_WRITTEN}; use a table")

    def element(i: Indices) -> Expr:
        elements = [x.at((*i[:axis], lit(j), *i[axis:])) for j in range(x.shape[axis])]
        if elements[0].type is BOOL:
            conditions = elements if op == "gt" else [~e for e in elements]
            out = ZERO
            for j, e in reversed(list(enumerate(conditions))):
                # the default of jnp.select is a condition that always holds
                out = lit(j) if e is TRUE else build("where", e, lit(j), out)
            return out
        place, best = ZERO, elements[0]
        for j, e in enumerate(elements[1:], 1):
            better = build(op, e, best)
            place, best = build("where", better, lit(j), place), build("where", better, e, best)
        return place

    return element


_fresh = count()

SHAPED: dict[str, Callable[..., Element]] = {
    **{f.__name__[1:]: f for f in (_broadcast_in_dim, _squeeze, _reshape, _transpose, _slice, _rev, _iota)},
    **{f.__name__[1:]: f for f in (_concatenate, _stack, _dynamic_slice, _gather)},
    "argmax": partial(_first, "gt"),
    "argmin": partial(_first, "lt"),
}
