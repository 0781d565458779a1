"""Expr: the one node class of the compiler. Immutable, interned, typed.

Equal structure is the same object, so `is` is equality and hashing is free:

>>> from frisket.dsl.sugar import q, k
>>> (q - k >= 0) is (q - k >= 0)
True

Operators, with the types they take:

=====================================  ==========================================================
`lit var param bound extent`           leaves; `name` (or `value`) says which.
`lookup segment random reduce`         `T[i, j]`, `segment(T, x)`, `random(seed, ...)`, `any(j in 0..n: ...)`.
`neg abs sign add sub mul min max`     Int, Int -> Int or Float, Float -> Float.
`pow`                                  Int ** non-negative literal -> Int, or Float ** Float.
`div`                                  Float / Float;  `floordiv mod` Int, rounding to minus infinity.
`bitand bitor bitxor bitnot shl shr`   Int;  `wrap` Int and a number of bits, see `work.modular`.
`lt le gt ge`                          two Int or two Float -> Bool; `eq ne` two of any type.
`and or`                               two or more Bool, flattened;  `xor not` Bool.
`where`                                Bool, T, T -> T.
`int`                                  Bool or Float (towards zero) -> Int;  `float` Int -> Float;  `floor` Float ->
Int. `exp exp2 log log2 log1p tanh sigmoid  Float -> Float
sin cos tan sqrt rsqrt erf`
`isfinite`                             Float -> Bool
`call`                                 a call of the library, for printing alone: its formula, then its arguments
=====================================  ==========================================================
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from .errors import BudgetError
from .types import BOOL, FLOAT, INT, Type

COORDINATES = ("b", "h", "q", "k")
SIZES = ("B", "H", "Q_LEN", "KV_LEN")
LEAVES = frozenset({"lit", "var", "param", "bound", "extent"})


class Operator(NamedTuple):
    """An entry of the table of operators: the types it takes, of `_RESULTS`, how many at least, and its sign."""

    takes: str
    arity: int
    sign: str = ""


# the one table of operators: tables of signs, of types and of names are made of it
_OPERATORS = """
number 1: neg:- abs sign
number 2: add:+ sub:- mul:* min max pow:**
order 2: lt:< le:<= gt:> ge:>=
alike 2: eq:== ne:!=
bool 1: not:~
bool 2: and:& or:| xor:^
int 1: bitnot:~
int 2: floordiv:// mod:% bitand:& bitor:| bitxor:^ shl:<< shr:>> wrap
float 1: exp exp2 log log2 log1p tanh sigmoid sin cos tan sqrt rsqrt erf
float 2: div:/
choice 3: where
cast 1: int float floor isfinite
counters 1: random
"""


def _rows(text: str) -> Iterator[tuple[str, Operator]]:
    for line in text.strip().splitlines():
        head, _, ops = line.partition(": ")
        takes, arity = head.split()
        yield from ((op, Operator(takes, int(arity), sign)) for op, _, sign in (x.partition(":") for x in ops.split()))


OPERATORS: dict[str, Operator] = dict(_rows(_OPERATORS))
INFIX = {op: o.sign for op, o in OPERATORS.items() if o.sign and o.arity == 2}
COMPARISONS = frozenset(op for op, o in OPERATORS.items() if o.takes in ("order", "alike"))
FLOAT_FUNCTIONS = frozenset(op for op, o in OPERATORS.items() if (o.takes, o.arity) == ("float", 1))
REDUCTIONS = frozenset({"any", "all", "sum", "min", "max"})

Key = tuple[Any, ...]
Named = Mapping[str, Any]  # values or arrays, by name
Operand: TypeAlias = "Expr | bool | int | float"
Method: TypeAlias = "Callable[[Expr, Operand], Expr]"
T = TypeVar("T")


def _operator(op: str) -> tuple[Method, Method]:
    """Python's two methods of an operator: a node stands on its left, or to the right of a number."""

    def left(self: Expr, other: Operand) -> Expr:
        return binary(op, self, other)

    def right(self: Expr, other: Operand) -> Expr:
        return binary(op, other, self)

    return left, right


class Expr:
    """One node of an expression. Python's operators build nodes: `(q >= k) & (q - k < w)`.

    Int meets Float as in the language (the Int is converted); Bool in arithmetic is a TypeError.
    `==` and `!=` stay Python's identity, because nodes are dictionary keys: use `sugar.eq`, `sugar.ne`.
    """

    # `__weakref__`: the table of interned nodes must not hold them alive
    __slots__ = tuple("__weakref__ args depth formula interval leaves name op plain rank settled type".split())
    op: str
    args: tuple[Expr, ...]
    name: Any  # the name of a leaf or table, the value of a literal, the kind of a reduction
    type: Type
    depth: int
    plain: bool  # no `call` in it
    # None before it is asked:
    formula: Expr | None  # without calls; of a plain node None
    leaves: tuple[tuple[str, Any, int, Type], ...] | None  # what `named` gives
    interval: Any  # of `transfer`
    rank: Any  # of `simplify.affine`
    settled: object  # the rules of which none changes this node or one below it

    def __reduce__(self) -> tuple[Any, ...]:
        # Interning must survive pickling: rebuild through `make`.
        return (make, (self.op, self.args, self.name, self.type))

    def __copy__(self) -> Expr:  # a second object of equal structure would break `is`
        return self

    def __deepcopy__(self, memo: Any) -> Expr:
        return self

    def __bool__(self) -> bool:
        raise TypeError("an Expr has no truth value; compare identity with `is`")

    def __repr__(self) -> str:
        # show.py imports this module
        from .show import show

        try:
            return show(self)
        except BudgetError as error:  # a repr must not raise
            return f"<{error}>"

    __add__, __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("sub")
    __mul__, __rmul__ = _operator("mul")
    __truediv__, __rtruediv__ = _operator("div")
    __floordiv__, __rfloordiv__ = _operator("floordiv")
    __mod__, __rmod__ = _operator("mod")
    __pow__, __rpow__ = _operator("pow")
    __lshift__, __rlshift__ = _operator("shl")
    __rshift__, __rrshift__ = _operator("shr")
    __and__, __rand__ = _operator("and")
    __or__, __ror__ = _operator("or")
    __xor__, __rxor__ = _operator("xor")

    # fmt: off
    def __lt__(self, other: Operand) -> Expr: return binary("lt", self, other)
    def __le__(self, other: Operand) -> Expr: return binary("le", self, other)
    def __gt__(self, other: Operand) -> Expr: return binary("gt", self, other)
    def __ge__(self, other: Operand) -> Expr: return binary("ge", self, other)
    def __neg__(self) -> Expr: return build("neg", self)
    def __abs__(self) -> Expr: return build("abs", self)
    def __invert__(self) -> Expr: return build("not" if self.type is BOOL else "bitnot", self)
    # fmt: on


_interned: WeakValueDictionary[Key, Expr] = WeakValueDictionary()


def make(op: str, args: tuple[Expr, ...] = (), name: Any = None, type: Type = INT) -> Expr:
    """The interned node of an operator and arguments. Checks nothing: `build` checks."""
    # 1, 1.0, True and 0.0, -0.0 are equal in Python and different here.
    tag = struct.pack("<d", name) if isinstance(name, float) else name
    # arguments are interned and live as long as the node: their ids are enough, and cheap to hash
    key = (op, tuple(map(id, args)), tag, type)
    node = _interned.get(key)
    if node is None:
        node = object.__new__(Expr)
        node.op, node.args, node.name, node.type = op, args, name, type
        node.depth = 1 + max([a.depth for a in args], default=0)
        node.plain = op != "call" and False not in [a.plain for a in args]
        node.formula = node.leaves = node.interval = node.rank = node.settled = None
        _interned[key] = node
    return node


# -- leaves ---------------------------------------------------------------------------------------


def lit(value: bool | int | float) -> Expr:
    """A literal; the type of the Python value is the type of the node."""
    if isinstance(value, bool):
        return make("lit", (), value, BOOL)
    if isinstance(value, int):
        return make("lit", (), value, INT)
    if math.isnan(value):
        value = math.nan  # one NaN: payloads mean nothing
    return make("lit", (), float(value), FLOAT)


def var(name: str, type: Type = INT) -> Expr:
    """A coordinate, a size, `score`, or a variable of the analysis."""
    return make("var", (), name, type)


def param(name: str, type: Type = INT) -> Expr:
    """A named scalar whose value arrives at run time."""
    return make("param", (), name, type)


def extent(table: str, axis: int) -> Expr:
    """The size of one axis of a table: known when the table is bound."""
    return make("extent", (), (table, axis), INT)


def literal_value(e: Expr, otherwise: Any = None) -> Any:
    """The value of a literal; `otherwise` of any other node.

    >>> literal_value(lit(4)), literal_value(var("q")), literal_value(var("q"), 0)
    (4, None, 0)
    """
    return e.name if e.op == "lit" else otherwise


TRUE, FALSE = lit(True), lit(False)
ZERO, ONE = lit(0), lit(1)
INF, NEG_INF = lit(math.inf), lit(-math.inf)
B, H, Q_LEN, KV_LEN = (var(n) for n in SIZES)
SCORE = var("score", FLOAT)
TOTAL, COUNT = var("total", FLOAT), var("count")  # of a row: the sum of its weights, and the keys that it sees


# -- inner nodes ----------------------------------------------------------------------------------


def result_type(op: str, types: tuple[Type, ...]) -> Type | None:
    """The type an operator gives for these argument types, or None where the operator does not take them."""
    o = OPERATORS.get(op)
    if o is None or not types:
        raise ValueError(f"unknown operator {op!r}")
    return _RESULTS[o.takes](op, types) if len(types) >= o.arity else None


def _alike(takes: frozenset[Type], gives: Type | None = None) -> Callable[[str, tuple[Type, ...]], Type | None]:
    """The result of operators whose operands have one type of several: that type, unless they give another."""
    return lambda op, types: (gives or types[0]) if types[0] in takes and len(set(types)) == 1 else None


_CASTS = {("int", BOOL): INT, ("int", FLOAT): INT, ("float", INT): FLOAT, ("floor", FLOAT): INT}
_CASTS |= {("isfinite", FLOAT): BOOL}
# what an operator gives, by the types it takes
_RESULTS: dict[str, Callable[[str, tuple[Type, ...]], Type | None]] = {
    "number": _alike(frozenset({INT, FLOAT})),
    "order": _alike(frozenset({INT, FLOAT}), BOOL),  # Bools have no order
    "alike": _alike(frozenset(Type), BOOL),
    "bool": _alike(frozenset({BOOL})),
    "int": _alike(frozenset({INT})),
    "float": _alike(frozenset({FLOAT})),
    "counters": _alike(frozenset({INT}), FLOAT),
    "choice": lambda op, types: types[1] if types[0] is BOOL and types[1] is types[2] else None,
    "cast": lambda op, types: _CASTS.get((op, types[0])),
}


def build(op: str, *args: Expr) -> Expr:
    """`build("ge", q, k)`: a checked operator node. Conjunctions and disjunctions are flattened."""
    type = result_type(op, tuple(a.type for a in args))
    if type is None:
        raise TypeError(f"{op} does not take ({', '.join(str(a.type) for a in args)})")
    if op in ("and", "or"):
        flat: list[Expr] = []
        for a in args:
            flat.extend(operands(op, a))
        return make(op, tuple(flat), None, BOOL)
    return make(op, args, None, type)


def nest(op: str, args: Iterable[Expr]) -> Expr:
    """An operator over any number of operands: `and` and `or` hold all of them, the others are nested to the left.

    >>> from frisket.dsl.sugar import h, k, q
    >>> nest("max", [q, k, h]), nest("min", [q])
    (max(max(q, k), h), q)
    """
    first, *rest = args
    if rest and op in ("and", "or"):
        return build(op, first, *rest)
    return functools.reduce(lambda x, y: build(op, x, y), rest, first)


ON_INT = {"and": "bitand", "or": "bitor", "xor": "bitxor"}


def lift(value: Operand) -> Expr:
    """The Expr of a Python number (a literal) or of an Expr (unchanged)."""
    return value if isinstance(value, Expr) else lit(value)


def to_float(e: Expr) -> Expr:
    return build("float", e) if e.type is INT else e


def binary(op: str, left: Operand, right: Operand) -> Expr:
    """Two operands brought to one type as the language does: an Int with a Float is converted,
    `/` converts both, and `and or xor` on Int are bitwise."""
    x, y = lift(left), lift(right)
    if op == "div" or {x.type, y.type} == {INT, FLOAT}:
        x, y = to_float(x), to_float(y)
    if op in ON_INT and x.type is INT:
        op = ON_INT[op]
    return build(op, x, y)


def conj(*args: Expr) -> Expr:
    """`and` over any number of terms; constants drop out."""
    return connect("and", args)


def clauses(e: Expr) -> tuple[Expr, ...]:
    """The terms that `conj` joins to `e`: none for True, `e` itself where `e` is no `and`."""
    if e.op == "and":
        return tuple(c for x in e.args for c in clauses(x))
    return () if e is TRUE else (e,)


def disj(*args: Expr) -> Expr:
    """`or` over any number of terms; constants drop out."""
    return connect("or", args)


def operands(op: str, e: Expr) -> tuple[Expr, ...]:
    """The parts that an operator joins to `e`: its arguments, or `e` alone where it is another operator.

    >>> from frisket.dsl.sugar import k, q
    >>> operands("and", (q >= k) & (k < 4)), operands("or", k < 4)
    ((q >= k, k < 4), (k < 4,))
    """
    return e.args if e.op == op else (e,)


UNIT = {"and": TRUE, "or": FALSE}  # changes nothing
ZERO_OF = {"and": FALSE, "or": TRUE}  # decides the whole


def connect(op: str, terms: Iterable[Expr]) -> Expr:
    """`and` or `or` over any number of terms; constants and repeats drop out."""
    unit, zero = UNIT[op], ZERO_OF[op]
    # a dict: a set of objects has another order in every process, and so another node for an equal mask
    unique: dict[Expr, None] = {}
    for a in terms:
        for part in operands(op, a):
            if part is zero:
                return zero
            if part is not unit:
                unique[part] = None
    parts = tuple(unique)
    # terms are flat Bools already: `build` has nothing to check
    return unit if not parts else parts[0] if len(parts) == 1 else make(op, parts, None, BOOL)


def lookup(table: str, indices: tuple[Expr, ...], type: Type = INT) -> Expr:
    """`T[i, j, ...]`; the element type is the node's type."""
    return make("lookup", indices, table, type)


def segment(table: str, index: Expr) -> Expr:
    """The segment of the offsets table that holds `index`: offsets[s] <= index < offsets[s + 1]."""
    return make("segment", (index,), table, INT)


def random(*counters: Expr) -> Expr:
    """A uniform in [0, 1) from Int counters; the first one is the seed."""
    return make("random", counters, None, FLOAT)


def reduce(kind: str, lo: Expr, hi: Expr, body: Callable[[Expr], Expr]) -> Expr:
    """`any(j in lo..hi: body(j))`, and `all sum min max`; `hi` is exclusive.

    The bound variable is named by the height of its binder, so that equal reductions are one node
    whatever their variables were called.
    """
    probe = make("bound", (), ("probe", next(_fresh)))  # a new one, as `body` may build reductions too
    inner = body(probe)
    height = 1 + max((n.name[1] for n in find(inner, "reduce")), default=-1)
    inner = substitute(inner, {probe: make("bound", (), height)})
    return make("reduce", (lo, hi, inner), (kind, height), inner.type)


# -- walking --------------------------------------------------------------------------------------


def walk(*roots: Expr, below: Callable[[Expr], Sequence[Expr]] | None = None) -> Iterator[Expr]:
    """Every distinct node below the roots, arguments before their users; `below` gives the nodes to visit next."""
    seen: set[Expr] = set()
    stack: list[Expr | None] = [*reversed(roots)]  # a list, as expressions may be deeper than the stack of Python
    while stack:
        node = stack.pop()
        if node is None:  # below it stands a node whose arguments are done
            node = stack.pop()
            assert node is not None
            yield node
        elif node not in seen:
            seen.add(node)
            if args := node.args if below is None else below(node):
                stack += (node, None, *args[::-1])
            else:
                yield node


def find(root: Expr | Iterable[Expr], *ops: str) -> list[Expr]:
    """The nodes below the root, or the roots, whose operator is one of these, in the order of `walk`.

    >>> from frisket.dsl.sugar import k, q
    >>> find((q >= k) & (q - k < 4), "sub", "ge")
    [q >= k, q - k]
    """
    return [node for node in (walk(root) if isinstance(root, Expr) else walk(*root)) if node.op in ops]


def fold(root: Expr | Iterable[Expr], step: Callable[[Expr, list[T]], T]) -> dict[Expr, T]:
    """The value of every node below the root, or the roots: `step` computes it from the node and the values of its
    arguments.

    >>> from frisket.dsl.sugar import k, q
    >>> depth = fold(q - k >= 3, lambda node, args: 1 + max(args, default=0))
    >>> depth[q - k >= 3]
    3
    """
    values: dict[Expr, T] = {}
    for node in walk(root) if isinstance(root, Expr) else walk(*root):
        values[node] = step(node, [values[a] for a in node.args])
    return values


def fill(root: Expr, field: str, step: Callable[[Expr, list[Any]], Any]) -> Any:
    """The value of a node as of `fold`, which every node keeps in its `field`: what grows by one node is not walked
    again."""
    stack = [] if getattr(root, field) is not None else [root]
    while stack:  # a list, as expressions may be deeper than the stack of Python
        node = stack[-1]
        values = [getattr(a, field) for a in node.args]
        if None in values:
            stack.extend(a for a, value in zip(node.args, values) if value is None)
        else:  # a node that two others read may stand here twice, and then has its value again
            stack.pop()
            setattr(node, field, step(node, values))
    return getattr(root, field)


def rebuild(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """An operator over other arguments, or the same object when the arguments are the same."""
    if args == node.args:  # equality of nodes is identity
        return node
    if node.op in ("and", "or"):  # an argument may have become an `and` itself: `build` flattens it
        return build(node.op, *args)
    if node.op == "reduce":  # a body may have grown binders: name ours again
        kind, height = node.name
        mine = make("bound", (), height)
        return reduce(kind, args[0], args[1], lambda j: substitute(args[2], {mine: j}))
    return make(node.op, args, node.name, node.type)


def transform(root: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """Apply `change` to every node, bottom up, each distinct node once."""
    return fold(root, lambda node, args: change(rebuild(node, tuple(args))))[root]


def substitute(root: Expr, mapping: Mapping[Expr, Expr]) -> Expr:
    """Replace leaves (or whole sub-expressions) by others, all at once, capturing nothing."""
    done: dict[Expr, Expr] = {}
    for node in walk(root, below=lambda e: () if e in mapping or e.op == "reduce" else e.args):
        if node in mapping:
            done[node] = mapping[node]
        elif node.op == "reduce":
            done[node] = _substitute_below(node, mapping)
        else:
            args = tuple(done[a] for a in node.args)
            done[node] = rebuild(node, args) if node.op != "call" else _call_at(node, args, mapping)
    return done[root]


_fresh = count()


def _substitute_below(node: Expr, mapping: Mapping[Expr, Expr]) -> Expr:
    # Open the binder under a name nothing else has, so that reductions brought in by the mapping
    # (whose heights may equal ours) cannot catch our variable.
    kind, height = node.name
    lo, hi, body = node.args
    bound_var = make("bound", (), ("fresh", next(_fresh)))
    opened = substitute(body, {make("bound", (), height): bound_var})
    changed = substitute(opened, mapping)
    ends = substitute(lo, mapping), substitute(hi, mapping)
    return reduce(kind, *ends, lambda j: substitute(changed, {bound_var: j}))


def _call_at(node: Expr, now: tuple[Expr, ...], mapping: Mapping[Expr, Expr]) -> Expr:
    """A call with other arguments, which takes coordinates as keywords: `causal` becomes `causal(q = q + 8)`."""
    (name, read), (formula, *old) = node.name, node.args
    if now[0] is formula:  # the mapping touches nothing in it: the text stays as written
        return node
    places = {x.name: y for x, y in mapping.items() if x.op == "var" and x.name in COORDINATES}
    masks = [a for a in old if places and a.type is BOOL and a.op != "lit"]  # which the keywords move, too
    # keywords move coordinates alone: what else the mapping changes, only the formula shows
    if masks and len(places) < len(mapping):
        return now[0]
    rest = [a if a in masks else b for a, b in zip(old, now[1:])]
    args = rest[: len(rest) - len(read)]
    places = {c: y for c, y in places.items() if c in uses(formula)} | dict(zip(read, rest[len(args) :]))
    return call(name, now[0], args, {} if name == "then" else places)  # `then` has no keywords


def call(name: str, formula: Expr, args: Iterable[Expr], places: Mapping[str, Expr] = {}) -> Expr:
    """`name(args, q = place)`, which stands for `formula`. Calls are for printing: `expanded` takes them out."""
    return make("call", (formula, *args, *places.values()), (name, tuple(places)), formula.type)


def then(first: Expr, second: Expr) -> Expr:
    """`first then second`: the result of the first score mod is the score of the second one."""
    return call("then", substitute(expanded(second), {SCORE: expanded(first)}), (first, second))


def expanded(root: Expr) -> Expr:
    """The Expr that `root` stands for: every call is its formula."""
    if root.plain:
        return root
    for node in walk(root, below=lambda e: () if e.plain or e.formula is not None else e.args):
        if not node.plain and node.formula is None:
            args = tuple(a if a.formula is None else a.formula for a in node.args)
            node.formula = args[0] if node.op == "call" else rebuild(node, args)
    assert root.formula is not None
    return root.formula


def renamed(root: Expr, names: Mapping[str, str]) -> Expr:
    """A copy of `root` with other names for its parameters and tables."""

    def change(e: Expr) -> Expr:
        if e.op == "extent":
            return extent(names.get(e.name[0], e.name[0]), e.name[1])
        named = e.op in ("param", "lookup", "segment") and e.name in names
        return make(e.op, e.args, names[e.name], e.type) if named else e

    return transform(root, change)


Leaf: TypeAlias = tuple[str, Any, int, Type]  # operator, name, how many indices, type


def named(root: Expr) -> tuple[Leaf, ...]:
    """The named leaves of an expression, in the order of `walk`: variables, parameters, extents and tables.

    Every node keeps the list of its leaves, so an expression that grows by one node is not walked again."""
    if root.leaves is None:
        fill(root, "leaves", _named)
    return root.leaves or ()


def _named(node: Expr, args: list[tuple[Leaf, ...]]) -> tuple[Leaf, ...]:
    below = list(filter(None, args))
    mine = node.op in ("var", "param", "extent", "lookup", "segment")
    if len(below) == 1 and not mine:  # nearly every node has the leaves of one argument: it shares their tuple
        return below[0]
    by_name = {leaf[:2]: leaf for leaves in below for leaf in leaves}
    if mine:
        by_name[node.op, node.name] = node.op, node.name, len(node.args), node.type
    return tuple(by_name.values())


def free_names(root: Expr) -> tuple[dict[str, Type], dict[str, tuple[int, Type]]]:
    """(scalar parameters with their types, tables with (rank, element type)) used by `root`."""
    names = names_of(root)
    scalars = {n: type for n, (rank, type) in names.items() if rank == 0}
    return scalars, {n: (rank, type) for n, (rank, type) in names.items() if rank}


def names_of(e: Expr) -> dict[str, tuple[int | None, Type]]:
    """(rank, type) of what an Expr reads; rank 0 is a scalar, None a table of which only the size is used."""
    scalars: dict[str, tuple[int | None, Type]] = {}
    sizes: dict[str, tuple[int | None, Type]] = {}
    tables: dict[str, tuple[int | None, Type]] = {}
    for op, name, rank, type in named(e):
        if op == "param":
            scalars[name] = 0, type
        elif op == "extent":
            sizes[name[0]] = None, INT
        elif op != "var":
            tables[name] = (1, INT) if op == "segment" else (rank, type)
    return {**scalars, **sizes, **tables}


def uses(root: Expr) -> frozenset[str]:
    """The names of the variables that occur in an expression: a subset of b h q k score B H Q_LEN KV_LEN."""
    return frozenset(name for op, name, _, _ in named(root) if op == "var")
