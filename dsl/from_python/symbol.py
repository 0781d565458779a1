"""Symbol, the value a traced function computes with: a position, or an array that depends on one.

>>> q, k = Symbol(ir.var("q")), Symbol(ir.var("k"))
>>> (q - k < 4) & (q != 2)
q - k < 4 & q != 2

An array is one Expr in index variables, one for each axis: indexing is substitution, `.sum(-1)` a bounded reduction:

>>> from frisket.dsl.show import show
>>> x = table("x", (8, 3), FLOAT)
>>> y = x[q] * x[k]
>>> y.shape, show(reduced("sum", y).expr, ["x"])
((3,), 'sum(j in 0..extent(x, 1): x[q, j] * x[k, j])')

What has no counterpart in the language is a `TraceError` at the user's line.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from frisket.dsl import ir
from frisket.dsl.forms import MAX_RANGE
from frisket.dsl.ir import Expr, build, lit
from frisket.dsl.show import show
from frisket.dsl.types import BOOL, FLOAT, INT, Type

from .elements import alike, joined, number, truth
from .elements import floor as floored
from .user_line import fail, no_truth


class Axis(NamedTuple):
    """An axis of an array of Exprs: `0 <= bound < size` in its Expr; `end` is the size as a reduction writes it."""

    bound: Expr
    size: int
    end: Expr


_fresh = count()


def axis(size: int, end: Expr | None = None) -> Axis:
    return Axis(ir.make("bound", (), ("axis", next(_fresh))), size, lit(size) if end is None else end)


class Context(threading.local):
    """The framework of the trace in this thread, for arrays that are not numpy's. `lift` makes a Symbol of one,
    `concrete` computes the value of a Symbol that no position enters, `call` answers a library's function."""

    front: Any = None


context = Context()
Handler = TypeVar("Handler", bound=Callable[..., Any])
_handlers: dict[str, Callable[..., Any]] = {}  # by the methods of Symbol below


def handles(method: str) -> Callable[[Handler], Handler]:
    """Register what a method of Symbol calls: numpy's and torch's functions are written in terms of symbols."""

    def register(handler: Handler) -> Handler:
        _handlers[method] = handler
        return handler

    return register


def what_is(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def symbol_of(value: Any) -> Symbol | None:
    """The symbol of a value that can stand in an expression: a symbol, a number, a captured array."""
    if isinstance(value, Symbol):
        return value
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        # a longdouble's `item()` is a longdouble again
        value = float(value) if value.dtype.type is np.longdouble else value.item()
    if isinstance(value, bool | int | float):
        return Symbol(lit(value))
    return None if context.front is None else context.front.lift(value)


def operand(value: Any, label: str) -> Symbol:
    symbol = symbol_of(value)
    if symbol is not None:
        return symbol
    shape = getattr(value, "shape", None)
    if shape is not None:
        fail(f"an array ({shown(shape)}) and a position meet in {label}: index the array first, as in `table[q]`")
    return fail(f"{what_is(value)} and a position meet in {label}: only numbers do")


def shown(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


# -- arrays of Exprs --------------------------------------------------------------------------------


def table(name: str, shape: tuple[int, ...], type: Type) -> Symbol:
    """A symbol of a whole captured array."""
    axes = tuple(axis(n, ir.extent(name, i)) for i, n in enumerate(shape))
    return Symbol(ir.lookup(name, tuple(a.bound for a in axes), type), axes)


def aligned(symbols: Sequence[Symbol], label: str = "an operation") -> tuple[list[Expr], tuple[Axis, ...]]:
    """The elements of arrays broadcast against each other, as numpy and torch do: the last axes meet."""
    if not any(s.axes for s in symbols):
        return [s.expr for s in symbols], ()
    axes: list[Axis] = []
    moves: list[dict[Expr, Expr]] = [{} for _ in symbols]
    for place in range(1, max(len(s.axes) for s in symbols) + 1):
        mine = [(s.axes[-place], m) for s, m in zip(symbols, moves) if len(s.axes) >= place]
        wide = next((a for a, _ in mine if a.size != 1), mine[0][0])
        if any(a.size not in (1, wide.size) for a, _ in mine):
            fail(f"arrays of shapes {' and '.join(shown(s.shape) or 'one number' for s in symbols)} meet in {label}")
        new = axis(wide.size, wide.end)
        axes.append(new)
        for a, mapping in mine:
            mapping[a.bound] = new.bound if a.size == wide.size else ir.ZERO
    return [ir.substitute(s.expr, m) if m else s.expr for s, m in zip(symbols, moves)], tuple(reversed(axes))


def elementwise(make: Callable[..., Expr], *values: Any, label: str) -> Symbol:
    """Apply `make` to the elements of the values, broadcast."""
    parts, axes = aligned([operand(v, label) for v in values], label)
    try:
        return Symbol(make(*parts), axes)
    except TypeError as error:
        fail(f"{label}: {error}")


def indexed(x: Symbol, key: Any) -> Symbol:
    """The result of `x[key]` for positions, Ints, slices, None and ..., on the leading axes."""
    name = f"`{x.expr.name}`" if x.expr.op == "lookup" else "an array" if x.axes else "a position"
    keys = list(key) if isinstance(key, tuple) else [key]
    used = sum(y is not None and y is not Ellipsis for y in keys)
    if used > len(x.axes):
        fail(f"{name} has {len(x.axes)} axes, indexed with {used}")
    spot = next((i for i, y in enumerate(keys) if y is Ellipsis), len(keys))
    keys[spot : spot + 1] = [slice(None)] * (len(x.axes) - used)
    arrays = {i: _index(y, name) for i, y in enumerate(keys) if not (y is None or isinstance(y, slice | int))}
    for i in [i for i, s in arrays.items() if s.expr.op == "lit" and not s.axes]:  # np.int64(-1), torch.tensor(-1)
        keys[i] = arrays.pop(i).expr.name
    parts, wide = aligned(list(arrays.values()), "an index")
    indices, at, left, moves = dict(zip(arrays, parts)), None, iter(x.axes), {}
    axes: list[Axis] = []
    for i, y in enumerate(keys):
        if y is None:
            axes.append(axis(1))
            continue
        old = next(left)
        if i in indices:
            at = len(axes) if at is None else at
            moves[old.bound] = indices[i]
        elif isinstance(y, slice):
            start, stop, step = y.indices(old.size)
            n = len(range(start, stop, step))
            # the whole axis stays the same: a reduction over it is printed with the table's extent
            new = old if n == old.size and step == 1 else axis(n)
            axes.append(new)
            moves[old.bound] = new.bound if new is old else build("add", build("mul", new.bound, lit(step)), lit(start))
        else:
            moves[old.bound] = _literal(y, old.size, name)
    if wide:  # torch and numpy put the axes of index arrays first where they are not side by side
        places = sorted(indices)
        at = at if places == list(range(places[0], places[-1] + 1)) else 0
        axes[at:at] = wide
    return Symbol(ir.substitute(x.expr, moves), tuple(axes))


def _index(y: Any, name: str) -> Symbol:
    s = symbol_of(y)
    if s is None or s.expr.type is not INT:
        what = f"`{y!r}`" if s is None else s.expr.type.with_article
        fail(f"{name} is indexed with {what}; an index is one Int per axis")
    return s


def _literal(i: int, size: int, name: str) -> Expr:
    if isinstance(i, bool):
        fail(f"{name} is indexed with a Bool; an index is one Int per axis")
    if not -size <= i < size:
        fail(f"{name} is indexed with {i}, and its axis has {size} entries")
    return lit(i % size)


def reduced(kind: str, x: Symbol, dim: Any = None, keepdim: bool = False) -> Symbol:
    """The reduction `any all sum min max` over one axis, several, or (None) all of them."""
    dims = range(len(x.axes)) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    chosen = {_dimension(d, len(x.axes)) for d in dims} if x.axes else set()
    e = x.expr
    if e.type is BOOL:
        kind = {"max": "any", "min": "all"}.get(kind, kind)
    e = truth(e) if kind in ("any", "all") else number(e)
    for i in sorted(chosen, reverse=True):  # the last axis becomes the innermost range, as arrays lie in memory
        e = _over(kind, x.axes[i], e)
    axes = (axis(1) if i in chosen else a for i, a in enumerate(x.axes) if keepdim or i not in chosen)
    return Symbol(e, tuple(axes))


def _over(kind: str, a: Axis, e: Expr) -> Expr:
    if a.size > MAX_RANGE:
        fail(
            f"`{kind}` runs over {a.size:,} entries, more than {MAX_RANGE:,}: compute it outside and capture the result"
        )
    if a.size == 0 and kind in ("min", "max"):
        fail(f"`{kind}` over an empty axis has no value")
    return ir.reduce(kind, ir.ZERO, a.end, lambda j: ir.substitute(e, {a.bound: j}))


def _dimension(d: int, rank: int) -> int:
    if not -rank <= d < rank:
        fail(f"there is no axis {d}: the array has {rank}")
    return d % rank


# -- symbols ----------------------------------------------------------------------------------------


class Scalar(tuple[int, ...]):
    """The shape of a position."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return super().__getitem__(key)
        return fail("a position is one number, its shape is (): capture the length in a variable of the function")


class Symbol:
    """An Expr, or an array of Exprs, that computes like a number; `==` and `!=` build expressions too."""

    __slots__ = ("axes", "expr")
    # `==` makes an expression, so a symbol cannot be a key
    __hash__ = None  # type: ignore[assignment]
    __array_priority__ = 1000  # numpy's scalars leave operators to the symbol

    def __init__(self, expr: Expr, axes: tuple[Axis, ...] = ()) -> None:
        self.expr, self.axes = expr, axes

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes) if self.axes else Scalar()

    @property
    def ndim(self) -> int:
        return len(self.axes)

    def __getitem__(self, key: Any) -> Symbol:
        return indexed(self, key)

    def __iter__(self) -> Iterator[Symbol]:
        if not self.axes:
            fail("a position is one number: nothing to loop over")
        return (self[i] for i in range(self.axes[0].size))

    def __len__(self) -> int:
        if not self.axes:
            fail("a position is one number: it has no length")
        return self.axes[0].size

    # -- other libraries meet a symbol

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options:
            fail(f"np.{ufunc.__name__}.{method} does not take positions")
        return _handlers["__array_ufunc__"](ufunc.__name__, inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _handlers["__array_function__"](func, args, kwargs)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        fail(
            "an array is indexed or combined with a position where the trace cannot see it; "
            "capture the array itself in a variable of the function, outside of objects"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if context.front is None else context.front.call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        return _handlers["__getattr__"](self, name)

    # -- Python asks for a number: there is one where no position enters

    def _number(self, why: str) -> Any:
        value = None if context.front is None else context.front.concrete(self)
        if value is None:
            fail(why)
        return value.item()

    def __bool__(self) -> bool:
        value = None if context.front is None else context.front.concrete(self)
        return no_truth() if value is None else bool(value)

    def __index__(self) -> int:
        value = self._number("a position is not a number while the function is traced: no range(), no Python indexing")
        return value.__index__()  # type: ignore[no-any-return]

    def __float__(self) -> float:
        why = (
            "float() of a position: leave it out, Int and Float mix freely; math.tanh(x) calls it, np.tanh(x) does not"
        )
        return float(self._number(why))

    def __int__(self) -> int:
        return int(self._number("int() of a position: leave it out, or write np.floor(x) to round"))

    def __repr__(self) -> str:
        e = ir.substitute(self.expr, {a.bound: ir.param(f"i{n}") for n, a in enumerate(self.axes)})
        scalars, tables = ir.free_names(e)
        return show(e, [*scalars, *tables]) + (f" [{shown(self.shape)}]" if self.axes else "")

    # -- operators

    def __neg__(self) -> Symbol:
        if self.expr.type is BOOL:
            fail("a Bool has no negative: write `~x` for not")
        return Symbol(build("neg", self.expr), self.axes)

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Symbol:
        return Symbol(build("abs", number(self.expr)), self.axes)

    def __invert__(self) -> Symbol:
        if self.expr.type is FLOAT:
            fail("`~` of a Float: compare it first")
        return Symbol(~self.expr, self.axes)

    def __floor__(self) -> Symbol:
        return Symbol(floored(self.expr), self.axes)

    def __matmul__(self, other: Any) -> Symbol:
        return product(self, operand(other, "`@`"))

    def __rmatmul__(self, other: Any) -> Symbol:
        return product(operand(other, "`@`"), self)


def product(x: Symbol, y: Symbol) -> Symbol:
    """The product `x @ y` where one operand is a vector."""
    if x.ndim == 0 or y.ndim == 0 or (x.ndim > 1 and y.ndim > 1):
        fail(f"`@` of arrays with {x.ndim} and {y.ndim} axes: one of them is a vector, the other has axes too")
    if y.ndim == 1:
        return reduced("sum", apply_binary("mul", x, y), -1)
    return reduced("sum", apply_binary("mul", x[:, None], y), -2)


def apply_binary(op: str, left: Any, right: Any) -> Symbol:
    return elementwise(lambda x, y: joined(op, x, y), left, right, label=f"`{op}`")


def choice(condition: Any, yes: Any, no: Any, label: str) -> Symbol:
    return elementwise(lambda c, x, y: build("where", truth(c), *alike(x, y)), condition, yes, no, label=label)


# Python's names of the operators that take two, and the language's.
ARITHMETIC = {n: n for n in "add sub mul floordiv mod pow and or xor".split()}
ARITHMETIC |= {"truediv": "div", "lshift": "shl", "rshift": "shr"}
COMPARISONS = "lt le gt ge eq ne".split()


def _method(op: str, swapped: bool = False) -> Callable[[Symbol, Any], Symbol]:
    return lambda self, other: apply_binary(op, other, self) if swapped else apply_binary(op, self, other)


for _name, _op in ARITHMETIC.items():
    setattr(Symbol, f"__{_name}__", _method(_op))
    setattr(Symbol, f"__r{_name}__", _method(_op, swapped=True))
for _name in COMPARISONS:
    setattr(Symbol, f"__{_name}__", _method(_name))  # as attributes of the class, where Python looks operators up
