"""The parameters of an Expr, values as they take them, and an Expr with some or all of its values.

>>> as_value("w", np.int64(4)), as_value("doc", [0, 0, 1]).flags.writeable
(4, False)

>>> from frisket.dsl.sugar import k, q
>>> BoundExpr(q - k < ir.param("w"), {"w": 4})
BoundExpr('q - k < w', w=4)
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from frisket.dsl import ir
from frisket.dsl.errors import EvaluationError, ParameterError, Span, caret, looks_like_lengths, misnamed, nearest
from frisket.dsl.evaluate import evaluate, leaves_64_bits
from frisket.dsl.from_python.closure import Path, read_again
from frisket.dsl.ir import Expr
from frisket.dsl.library import definitions
from frisket.dsl.notebook import table
from frisket.dsl.program import Declared, Parsed, check_names, entries_of, read, type_of
from frisket.dsl.show import show
from frisket.dsl.types import FLOAT, INT, Type, ranked
from frisket.grammar.memo import memo
from frisket.lowering.analysis.count import literal

from .caller import outside

Array = NDArray[Any]
Number = bool | int | float
OF_DIVISORS = ("total", "count")  # what `divide` reads of a row


def traced(value: Any) -> bool:
    """Whether JAX traces this: it has a shape and no values to look at."""
    return any(c.__name__ == "Tracer" for c in type(value).__mro__)  # by name: jax need not be imported


def is_tensor(value: Any) -> bool:
    """Whether this is a tensor of torch. Only tensors are asked for torch's attributes: arrays of other frameworks
    have attributes with the same names and other meanings, such as the `layout` of a tracer of JAX 0.11."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def stand_in(x: Any) -> Any:
    """A value of the same type. Checks of library entries alone read its numbers, and all of them take 0."""
    if not hasattr(x, "ndim"):
        return x
    dtype = str(x.dtype).removeprefix("torch.")
    kind = np.float32 if dtype.startswith(("float", "bfloat")) else None
    if kind is None and not dtype.startswith(("bool", "int", "uint")):
        return x  # refused where it is read
    return np.zeros((1,) * x.ndim, kind or (bool if dtype == "bool" else int))


def learns(value: Any) -> bool:
    """Whether a value may change between calls: a torch tensor that requires a gradient or has a tangent, a module's
    parameter."""
    # a frozen one may be trained later
    return is_tensor(value) and (value.requires_grad or type(value).__name__ == "Parameter" or has_tangent(value))


def has_tangent(x: Any) -> bool:
    """Whether a torch tensor has a tangent, of `forward_ad` or of torch.func.jvp."""
    torch: Any = sys.modules["torch"]
    dual, wrapped = torch.autograd.forward_ad, torch._C._functorch.is_gradtrackingtensor
    # torch.func.jvp wraps tensors, and tells the tangents of its innermost level alone
    return dual._current_level >= 0 and (wrapped(x) or dual.unpack_dual(x).tangent is not None)


def with_learned(values: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, but learned ones as in `params`: they are read again at every call."""
    return {n: params[n] if n in params and learns(params[n]) else x for n, x in values.items()}


def kind_of(x: Number) -> Any:
    """The type of a number, and the sign of a Float: -0.0 and 0.0 are equal, and no mask takes one for the other."""
    return (float, math.copysign(1.0, x)) if type(x) is float else type(x)


def stacked(name: str, value: Any) -> Any:
    """A list or tuple that holds traced numbers or tensors of torch as one array of theirs: `jax.jit` takes lists
    apart, and the entries may learn. A variable of flax is its array. Other values stay as they are."""
    if not isinstance(value, list | tuple):
        # of a symbolic number, torch.compile knows no attribute
        array_of = None if isinstance(value, int | float) else getattr(value, "__jax_array__", None)
        return value if array_of is None else array_of()
    parts = [stacked(name, x) for x in value]
    try:
        if any(map(traced, parts)):
            return sys.modules["jax"].numpy.asarray(value)
        if any(map(is_tensor, parts)):
            return sys.modules["torch"].stack([sys.modules["torch"].as_tensor(x) for x in parts])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ParameterError(f"`{name}` is not an array: {error}") from None
    return value


def call_value(name: str, value: Any, foreign: Any = ()) -> Any:
    """A value of a call: lists, tuples and numpy's numbers as an array or a number, arrays as they are. But arrays of
    the class `foreign`, and those of numpy that torch refuses, are copied to numpy's."""
    value = stacked(name, value)
    copied = isinstance(value, list | tuple | np.generic) or (isinstance(value, foreign) and not traced(value))
    if isinstance(value, np.ndarray):
        copied = not value.dtype.isnative or min(value.strides, default=0) < 0
    return as_value(name, value) if copied else value


@outside
def as_value(name: str, value: Any) -> Any:
    """A Python number or a read-only numpy array of our own, from numbers, lists, numpy, torch or JAX arrays."""
    value = stacked(name, value)
    if traced(value):
        raise ParameterError(
            f"`{name}` is traced by jax.jit or another transform, and this takes values; compile the mask without it "
            f"and give it to the call: att(q, k, v, {name}={name})"
        )
    check_plain(name, value)
    value = entries_of(value)
    if not isinstance(value, np.ndarray) and (hasattr(value, "__array__") or isinstance(value, list | tuple)):
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise ParameterError(f"`{name}` is not an array: {error}") from None
    if isinstance(value, np.ndarray):
        # types that numpy or kernels lack
        narrow, wide = value.dtype.name.startswith(("bfloat16", "float8")), value.dtype.type is np.longdouble
        # native bytes: kernels read the memory
        value = value.astype("f4" if narrow else "f8" if wide else value.dtype.newbyteorder("="), copy=False)
        if value.ndim and value.flags.writeable:  # else another might write to it later
            value = value.copy()
            value.flags.writeable = False
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()  # numbers are hashed and printed as Python's
    rank, _ = type_of(name, value)
    if rank and value.size == 0:
        raise ParameterError(f"table `{name}` is empty")
    if rank and value.dtype == np.uint64 and value.max() >= 1 << 63:  # the language has int64 alone
        raise ParameterError(f"table `{name}` has {value.max()}, which does not fit 64 bits with a sign")
    return value


def check_plain(name: str, value: Any) -> None:
    """Raise where entries are not there as numbers: in meta, sparse, nested, quantized, masked and wrapper arrays."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ParameterError(f"`{name}` has masked entries; say what they are: {name}.filled(0)")
    if not is_tensor(value):
        return
    if value.is_meta:
        raise ParameterError(
            f"`{name}` is a meta tensor, which has no values; give values, or q, k, v and every table on meta"
        )
    if value.is_nested:
        raise ParameterError(f"`{name}` is a nested tensor; give a dense one, torch.nested.to_padded_tensor({name}, 0)")
    if str(value.layout) != "torch.strided":
        raise ParameterError(f"`{name}` is a tensor of layout {value.layout}; give a dense one, {name}.to_dense()")
    if value.is_quantized:
        raise ParameterError(f"`{name}` is of {value.dtype}; give its numbers, {name}.dequantize()")
    # under a mode, such as of fake tensors, the subclass is torch's
    dispatch, torch = getattr(type(value), "__torch_dispatch__", None), sys.modules["torch"]
    if dispatch not in (None, torch.Tensor.__torch_dispatch__) and not torch._C._len_torch_dispatch_stack():
        raise ParameterError(f"`{name}` is a {type(value).__name__}; give a plain tensor: to_local() of a DTensor")


def refuse_additive(mask: Any, bias: Any = None) -> None:
    """Raise for a bias of Bools, and for a mask array of negative numbers: those are added to scores, and 0 is
    where a key is visible."""
    if bias is not None and str(bias.dtype).endswith("bool"):
        raise ParameterError("the bias is an array of bool, and a bias is added to scores; give Bools as mask=")
    # a tracer has no numbers to look at
    if mask is not None and mask.dtype != bool and not traced(mask) and (np.asarray(mask) < 0).any():
        raise ParameterError(
            "the mask has negative numbers, as a bias that is added to scores; a mask is 0 where a key is hidden: "
            "mask=bias == 0"
        )


def fitted(name: str, value: Any, rank: int | None, type: Type) -> Any:
    """The value as the type its name has; an Int does for a Float, nothing else changes type."""
    have, kind = type_of(name, value)
    if rank is not None and have != rank:
        more = {
            (1, 2): f"; for [batch, length] write `same_by_batch({name})`, or `{name}[b, q]`"
            f"; for offsets `document_by_batch({name})`",
            (2, 1): f"; for [length] write `same({name})`, or `{name}[q]`; for offsets `document({name})`",
        }.get((rank, have), "")
        raise ParameterError(f"`{name}` is {ranked(rank)} in the text, the value is {ranked(have)}{more}")
    if kind is type or rank is None:
        return value
    if (kind, type) != (INT, FLOAT):
        raise ParameterError(
            f"`{name}` is {type} in the text, the value is {kind}; declare it: "
            f"`param {name}: {kind.value.lower()}{'[' + ', '.join('_' * have) + ']' if have else ''}`"
        )
    if not have:
        return float(value)
    value = value.astype(np.float32)
    value.flags.writeable = False
    return value


def digest(value: Any) -> Any:
    """Something hashable that is equal for equal values, Ints of any width; 1, 1.0 and True differ."""
    if isinstance(value, np.ndarray):
        value = value.astype(np.int64, copy=False) if value.dtype.kind in "iu" else value
        return value.dtype.str, value.shape, hashlib.blake2b(value.tobytes(), digest_size=16).digest()
    return type(value), repr(value)


def summary(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)


@memo(512)
def offsets_of(e: Expr) -> dict[str, str]:
    """The tables of an Expr that hold offsets, each with the table that counts its segments. Offsets are read by
    `segment(U, x)`, as `T[s]` and `T[s + 1]` with the segment s of U, or as `T[i] <= x < T[i + 1]`."""
    if all(op not in ("segment", "lookup") for op, *_ in ir.named(e)):
        return {}
    nodes = list(ir.walk(e))
    segments = [n for n in nodes if n.op == "segment"]
    read = {(n.name, n.args[0]) for n in nodes if n.op == "lookup" and len(n.args) == 1}
    pairs = {name: s.name for s in segments for name, index in read if index is s and (name, s + 1) in read}
    # a >= b as b <= a
    less = {n.args[::-1] if n.op[0] == "g" else n.args for n in nodes if n.op in ("le", "lt", "ge", "gt")}
    ends = [(x.name, x.args[0] + 1, 1 + x.args[0], y) for x, y in less if x.op == "lookup" and len(x.args) == 1]
    ranges = {name for name, *at, y in ends if any((y, ir.lookup(name, (i,), INT)) in less for i in at)}
    return {n: n for n in ranges} | pairs | {s.name: s.name for s in segments}


def check_needs(needs: Mapping[Expr, str], values: Mapping[str, Any]) -> None:
    """Refuse values for which a condition is false, of numbers and of tables read at q or at k, or at neither."""
    for condition, advice in needs.items():
        scalars, tables = ir.free_names(condition)
        at = sorted(ir.uses(condition) & {*ir.COORDINATES})
        # all pairs are too many; a value may be missing still
        if {*at} >= {"q", "k"} or not values.keys() >= scalars.keys() | tables.keys():
            continue
        # where no table is read at a coordinate alone
        longest = max((x for n in tables for x in values[n].shape), default=1)
        nodes = ir.find(condition, "lookup")
        reads = [(a, x) for n in nodes for a, x in zip(n.args, values[n.name].shape, strict=True)]
        lengths = [min((x for a, x in reads if a is ir.var(c)), default=longest) for c in at]  # all tables reach there
        env = {**{n: values[n] for n in scalars}, **dict(zip(at, np.ix_(*map(np.arange, lengths)), strict=True))}
        holds = np.broadcast_to(evaluate(condition, env, {n: values[n] for n in tables}), lengths)
        if not holds.all():
            place = ", ".join(f"{c} = {i}" for c, i in zip(at, np.argwhere(~holds)[0], strict=True))
            shown = ", ".join(f"{n}={summary(values[n])}" for n in [*scalars, *tables])
            raise ParameterError(f"`{show(condition)}` does not hold for {shown}{' at ' * bool(at)}{place}; {advice}")


def check_order(e: Expr, sorted_: Iterable[str], values: Mapping[str, Any]) -> None:
    """Refuse tables that decrease somewhere though they are declared sorted or hold offsets."""
    for name in sorted_:
        if name in values and (place := _decrease(values[name])):
            raise ParameterError(unsorted(name, place))
    check_offsets(offsets_of(e), values)


def check_offsets(offsets: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Refuse offsets that decrease, and offsets of keys for fewer segments than those of queries."""
    for name, of in offsets.items():
        x = values.get(name)
        if x is not None and (place := _decrease(x)):
            # lengths are often taken for offsets
            remedy = looks_like_lengths(name) if (x > 0).all() else "give where segments start, in order, and the end"
            raise ParameterError(f"{unsorted(name, place, offsets=True)}; {remedy}")
        if x is not None and len(x) < len(other := values.get(of, x)):
            raise ParameterError(
                f"`{name}` has {len(x)} offsets and `{of}` has {len(other)}; give where segments start, and the end"
            )


def _decrease(x: Array) -> str:
    """The first entry that is less than the one before it, in words; "" where entries never decrease."""
    falls = np.argwhere(np.asarray(x[..., 1:] < x[..., :-1]))  # a difference of unsigned Ints is never below 0
    if not len(falls):
        return ""
    *row, at = falls[0].tolist()
    return f"entry {[*row, at + 1]} is {x[(*row, at + 1)]} after {x[(*row, at)]}"


def unsorted(name: str, place: str = "its entries decrease somewhere", offsets: bool = False) -> str:
    if offsets:
        return f"`{name}` holds offsets, which never decrease, and {place}"
    return f"`{name}` is declared sorted and {place}; sort the entries, or drop `sorted`"


@memo(group="once")
def _follow_copies(kind: type[Any], framework: str) -> None:
    flatten, copied = (lambda x: ((), x)), (lambda x, *leaves: x.in_copy)
    with suppress(ValueError):  # it is registered already
        if framework == "jax":
            sys.modules["jax"].tree_util.register_pytree_node(kind, flatten, copied)
        else:  # nnx.jit puts nodes of flax's graph back into their module, where nodes of JAX would be copies
            set_key = pop_key = clear = init = lambda *_: None
            sys.modules[framework].graph.register_graph_node_type(kind, flatten, set_key, pop_key, copied, clear, init)


Self = TypeVar("Self", bound="BoundExpr")


@dataclass(frozen=True)
class Origin:
    """The source of an expression; no part of its value."""

    source: str | None = None
    sites: tuple[tuple[Span, Expr], ...] = ()  # sub-expressions of the text, outermost first
    declared: Mapping[str, Declared] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    captured: Mapping[str, Any] = field(default_factory=dict)  # a function's own arrays, by the names of their copies
    paths: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)  # to those arrays; none to one out of reach
    inside: tuple[tuple[Any, tuple[Path, ...]], ...] = ()  # arrays whose values are in the expression
    needs: Mapping[Expr, str] = field(default_factory=dict)  # conditions on parameters, each with an advice
    shown: Expr | None = None  # the expression with calls of the library, as it prints

    @property
    def names(self) -> Origin:
        """Facts known of the names, for an expression made of this one."""
        return replace(self, source=None, sites=(), notes=(), shown=None)

    def renamed(self, names: Mapping[str, str]) -> Origin:
        """Facts known of those names that are keys, under their new names."""
        facts: Any = self.declared, self.captured, self.paths
        declared, captured, paths = ({names[n]: x for n, x in values.items() if n in names} for values in facts)
        needs = {ir.renamed(e, dict(names)): x for e, x in self.needs.items() if ir.names_of(e).keys() <= names.keys()}
        return replace(self.names, declared=declared, captured=captured, paths=paths, needs=needs)

    def paths_in_copies(self, memo: Mapping[int, Any]) -> dict[str, tuple[Path, ...]]:
        """The paths from objects that are copied already, and those from modules of torch to learned tensors. A copy of
        a mask copies no other object of the user's; it has its own copies of arrays."""
        ways = {n: tuple(path.from_object() for path in paths) for n, paths in self.paths.items()}
        of_module, at_hand = {n for n, x in self.captured.items() if learns(x)}, {id(None), *memo}
        ways = {n: tuple(p if id(p.root) in memo else p.in_copy() for p in paths) for n, paths in ways.items()}

        def copied(name: str, root: Any) -> bool:
            return id(root) in at_hand or (name in of_module and hasattr(root, "_parameters"))

        return {n: paths for n, paths in ways.items() if all(copied(n, path.root) for path in paths)}

    @property
    def reads_module(self) -> bool:
        """Whether the function captured an array of a module that JAX or flax may copy."""
        return any(path.begins_in_module for paths in self.paths.values() for path in paths)

    def follow_copies(self, kind: type[Any]) -> None:
        """Let JAX and flax copy objects of a type with the module that their functions read."""
        for framework in {"jax", "flax.nnx"} & sys.modules.keys() if self.reads_module else ():
            _follow_copies(kind, framework)

    def __or__(self, other: Origin) -> Origin:
        """The facts of both, for an expression made of two."""
        paths: dict[str, dict[Any, Path]] = {}
        for name, ways in (*self.paths.items(), *other.paths.items()):  # equal paths once: each call reads them all
            paths.setdefault(name, {}).update({(id(path.root), path.steps): path for path in ways})
        return Origin(
            declared={**self.declared, **other.declared},
            captured={**self.captured, **other.captured},
            paths={n: tuple(ways.values()) for n, ways in paths.items()},
            inside=self.inside + other.inside,
            needs={**self.needs, **other.needs},
        )


class BoundExpr:
    """An Expr and the values of some or all of its parameters. Immutable."""

    what = "expression"
    expr: Expr
    params: Mapping[str, Any]
    origin: Origin
    shown: Expr  # with calls of the library, as it prints
    unbound: tuple[str, ...]  # the parameters that have no value yet

    def __init__(self, expr: Expr, params: Mapping[str, Any] | None = None, origin: Origin | None = None) -> None:
        self.expr = expr
        self.origin = origin or Origin()
        self.shown = expr if self.origin.shown is None else self.origin.shown
        if learned := {n: x for n, x in (params or {}).items() if learns(x)}:
            self.origin = replace(self.origin, captured={**self.origin.captured, **learned})
        names = ir.names_of(expr)
        check_names(names)
        values = {n: as_value(n, v) for n, v in (params or {}).items()}
        if unused := [n for n in values if n not in names]:
            near = nearest(unused[0], [n for n in names if n not in values])
            hint = f"; did you mean `{near}`?" if near else ""
            raise ParameterError(f"`{unused[0]}` is given but not used by `{self._brief()}`{hint}")
        self.params = MappingProxyType({n: fitted(n, v, *names[n]) for n, v in sorted(values.items())})
        self.unbound = tuple(n for n in names if n not in values)
        if self.params:
            check_order(expr, [n for n, x in self.origin.declared.items() if x.fact == "sorted"], self.params)
            check_needs(self.origin.needs, self.params)
        self.origin.follow_copies(type(self))

    @cached_property
    def in_copy(self: Self) -> Self:
        """The expression in a copy of the module that its function reads: reading those arrays is an error."""
        o = self.origin
        ways = {n: tuple(path.in_copy() for path in paths) for n, paths in o.paths.items()}
        return type(self)(self.expr, self.params, replace(o, paths=ways)) if o.reads_module else self

    @property
    def source(self) -> str:
        """The text as it was written; for expressions made in Python, as it prints."""
        return self.origin.source if self.origin.source is not None else str(self)

    @property
    def sites(self) -> tuple[tuple[Span, Expr], ...]:
        """Sub-expressions, each with its place in the source text."""
        return self.origin.sites

    @property
    def tables(self) -> dict[str, Array]:
        """The parameters that are arrays."""
        return {n: v for n, v in self.params.items() if isinstance(v, np.ndarray)}

    @property
    def scalars(self) -> dict[str, Number]:
        """The parameters that are numbers."""
        return {n: v for n, v in self.params.items() if not isinstance(v, np.ndarray)}

    def bind(self: Self, **params: Any) -> Self:
        """An expression with more parameters bound; a new value replaces an old one."""
        if not params:
            return self
        # a name with a new value is read no more
        rest = self.origin.renamed({n: n for n in self.origin.captured if n not in params})
        origin = replace(self.origin, captured=rest.captured, paths=rest.paths)
        return type(self)(self.expr, {**self.params, **params}, origin)

    def now(self: Self, but: Collection[str] = ()) -> Self:
        """An expression over the arrays that its function would read now: this one, unless an array was replaced.
        Arrays in `but` stay.

        >>> import torch, frisket as fk
        >>> def same(layer):
        ...     return lambda q, k: layer.doc[q] == layer.doc[k]
        >>> layer = torch.nn.Module()
        >>> layer.doc = torch.tensor([0, 0, 1])
        >>> mask = fk.mask(same(layer))
        >>> layer.doc = torch.tensor([0, 1, 1])
        >>> mask.dense(1, 3).astype(int), mask.now().dense(1, 3).astype(int)
        (array([[[[1, 1, 0]]]]), array([[[[1, 0, 0]]]]))
        """
        o = self.origin
        read = {n: read_again(n, paths) for n, paths in o.paths.items() if paths and n not in but}
        new = {n: x for n, x in read.items() if x is not o.captured[n]}
        inside = tuple((read_again("it", paths), paths) for _, paths in o.inside)
        for (old, paths), (x, _) in zip(o.inside, inside, strict=True):
            # another object of equal entries changes nothing
            if x is not old and digest(as_value("it", x)) != digest(as_value("it", old)):
                raise ParameterError(part_of_expression(paths[0]))
        if not new and all(x is old for (x, _), (old, _) in zip(inside, o.inside, strict=True)):
            return self
        values = {n: x for n, x in {**self.params, **new}.items() if not traced(x)}  # tracers have no value to bind
        return type(self)(self.expr, values, replace(o, captured={**o.captured, **new}, inside=inside))

    def require_bound(self) -> None:
        """Raise `ParameterError` unless every parameter has a value."""
        if not self.unbound:
            return
        name = self.unbound[0]
        if name in self.origin.captured:
            raise ParameterError(
                f"`{name}` is traced by jax.jit or another transform, and this takes values; attention takes the array "
                "as it is: frisket.compile(...), or frisket.attention, of the function that captures it"
            )
        near = nearest(name, ["score", *OF_DIVISORS, *definitions()])
        named = misnamed(name) or (f"did you mean `{near}`?" if near else "")
        if name in OF_DIVISORS:
            named = "it is the row's in `divide` alone"
        hint = f" ({named})" if named else ""
        example = "<array>" if ir.names_of(self.expr)[name][0] != 0 else "..."
        raise ParameterError(f"`{name}` has no value{hint}; give it: {name}={example}")

    def _brief(self) -> str:
        text = show(self.shown)
        return text if len(text) <= 60 else text[:57] + "..."

    @property
    def expanded(self) -> str:
        """The text in which calls of the library are written out as their formulas.

        >>> import frisket as fk
        >>> mask = fk.mask("causal & window(w)", w=8)
        >>> str(mask), mask.expanded
        ('causal & window(w)', 'q >= k & abs(q - k) < w')
        """
        return show(self.expr, self.params)

    def __str__(self) -> str:
        return show(self.shown, self.params)

    def __repr__(self) -> str:
        values = "".join(f", {n}={summary(v)}" for n, v in self.params.items())
        return f"{type(self).__name__}({str(self)!r}{values})"

    def _repr_html_(self) -> str:
        return table([(self.what, str(self)), *((n, summary(v)) for n, v in self.params.items())])

    @cached_property
    def _identity(self) -> tuple[Any, ...]:
        # of `shown` nothing: equal expressions may print otherwise
        return self.expr, tuple((n, digest(v)) for n, v in self.params.items())

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, BoundExpr)
        return self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles hold copies of arrays. Learned tensors stay the ones of their module, and are read from it again."""
        o = self.origin
        rows = _flattened((self.expr, *(e for _, e in o.sites), *o.needs, self.shown))
        learned = {n: x for n, x in o.captured.items() if learns(x)}
        spans, advice = tuple(s for s, _ in o.sites), tuple(o.needs.values())
        origin = (o.source, spans, dict(o.declared), o.notes, o.paths_in_copies({}), advice)
        return blank, (type(self),), (rows, {**self.params, **learned}, origin)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        rows, params, (source, spans, declared, notes, ways, advice) = state
        root, *more = _unflattened(rows)
        sites, needs = tuple(zip(spans, more, strict=False)), dict(zip(more[len(spans) :], advice, strict=False))
        shown = next(iter(more[len(spans) + len(advice) :]), None)  # pickles of earlier versions have none
        origin = Origin(source, sites, declared, notes, {n: params[n] for n in ways}, ways, needs=needs, shown=shown)
        BoundExpr.__init__(self, root, params, origin)

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        o = self.origin
        paths = o.paths_in_copies(memo)
        captured = {n: x for n, x in o.captured.items() if n in paths or learns(x)}
        inside = [(x, ways) for x, ways in o.inside if all(id(path.from_object().root) in memo for path in ways)]
        arrays, paths, inside = deepcopy((captured, paths, inside), memo)
        origin = replace(o, captured=arrays, paths=paths, inside=tuple(inside))
        return type(self)(self.expr, {**self.params, **{n: x for n, x in arrays.items() if learns(x)}}, origin)

    def _combined(self: Self, other: Self, join: Callable[[Expr, Expr], Expr]) -> Self:
        """One expression made of both, with different bindings of one name kept apart."""
        left, right = separated(self, other)
        params = {**right.params, **left.params}
        return left._as_shown(join(left.shown, right.shown), params, right.origin | left.origin)

    def _as_shown(self: Self, shown: Expr, params: Mapping[str, Any], origin: Origin) -> Self:
        """One of this class that prints as `shown`, an expression with calls of the library."""
        return type(self)(ir.expanded(shown), params, replace(origin, shown=shown))

    def at(self: Self, **coordinates: Any) -> Self:
        """An expression read at other positions: `m.at(q="q // 2", k="k // 2")`. Further keywords bind names of those
        texts."""
        params = {**self.params, **{n: v for n, v in coordinates.items() if n not in ir.COORDINATES}}
        names = [n for n in ir.COORDINATES if n in coordinates]
        positions = {ir.var(n): position(n, coordinates[n], params) for n in names}
        if coordinates and not positions:
            raise ParameterError("at() takes coordinates: b, h, q or k, each a text or an int")
        return self._as_shown(ir.substitute(self.shown, positions), params, self.origin.names)


def part_of_expression(path: Path) -> str:
    """The message for an array that was replaced and whose values a trace looked at."""
    return (
        f"`{path}` has been replaced since its function was traced, and its values are part of the traced expression\n"
        "  make the mask, score mod or attention again; lookups, `x[q]`, are read at every call"
    )


def separated(left: Self, right: Self) -> tuple[Self, Self]:
    """Two expressions whose names mean one thing: a name bound differently on the right gets a number."""
    mine, theirs = ir.names_of(left.expr), ir.names_of(right.expr)
    names = {*mine, *theirs}
    for name in sorted(mine.keys() & theirs.keys()):
        a, b = left.params.get(name), right.params.get(name)
        x, y = left.origin.captured.get(name), right.origin.captured.get(name)
        distinct = x is not y and any(learns(z) for z in (x, y))  # equal values now, others after a step of training
        distinct = distinct or (x is not y and name in left.origin.paths and name in right.origin.paths)
        if mine[name] == theirs[name] and (a is None) == (b is None) and digest(a) == digest(b) and not distinct:
            continue
        new = next(n for i in count(2) if (n := f"{name}_{i}") not in names)
        names.add(new)
        if b is not None:
            right = renamed(right, name, new)
        elif a is not None:  # the name without a value keeps it: it is still to be given
            left = renamed(left, name, new)
        else:
            raise ParameterError(f"`{name}` has two types here and no value yet; rename or bind one")
    return left, right


def renamed(one: Self, old: str, new: str) -> Self:
    names = {n: new if n == old else n for n in (*ir.names_of(one.expr), *one.origin.declared)}
    params = {names[n]: x for n, x in one.params.items()}
    return one._as_shown(ir.renamed(one.shown, {old: new}), params, one.origin.renamed(names))


def position(name: str, value: Any, params: Mapping[str, Any]) -> Expr:
    """A coordinate as `at` takes it: a text, whose names may have values among `params`, or an int."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return ir.lit(int(value))
    if not isinstance(value, str):
        raise ParameterError(f"{name}= takes a text or an int, not {type(value).__name__}")
    # first without values, to see which the text needs: a text refuses others
    used = ir.names_of(_lone(read(value, name=name)))
    known = {n: v for n, v in params.items() if n in used}
    e = _lone(read(value, name=name, params=known))
    if e.type is not INT:
        raise ParameterError(f"{name}= takes an Int, `{value}` is a {e.type}; use `//`, `floor` or `int`")
    return e


def _lone(parsed: Parsed) -> Expr:
    if parsed.expr is None:
        raise ParameterError("a coordinate is one expression, not a program")
    return parsed.expr


# -- pickle: nodes in a flat list, so that depth is no matter ----------------------------------------------


def _flattened(roots: tuple[Expr, ...]) -> tuple[list[tuple[Any, ...]], list[int]]:
    place: dict[Expr, int] = {}
    rows: list[tuple[Any, ...]] = []
    for node in ir.walk(*roots):
        place[node] = len(rows)
        rows.append((node.op, tuple(place[a] for a in node.args), node.name, node.type))
    return rows, [place[r] for r in roots]


def _unflattened(rows: tuple[list[tuple[Any, ...]], list[int]]) -> list[Expr]:
    nodes: list[Expr] = []
    for op, args, name, kind in rows[0]:  # arguments stand before what reads them
        nodes.append(ir.make(op, tuple(nodes[i] for i in args), name, kind))
    return [nodes[i] for i in rows[1]]


def blank(kind: type[Any]) -> Any:
    """An object whose state follows: a module that it reads may hold it, and is pickled between the two."""
    return object.__new__(kind)


@contextmanager
def locating(*parts: BoundExpr) -> Iterator[None]:
    """Show, in an error for an integer that leaves 64 bits, where its clause stands in the text of one of them."""
    try:
        yield
    except EvaluationError as error:
        locate(error, *parts)
        raise


def locate(error: EvaluationError, *parts: BoundExpr) -> None:
    """Raise, for an integer that leaves 64 bits, the error that shows its clause in the text of one of `parts`."""
    clause = error.clause
    for part in parts if clause is not None else ():
        for span, e in (*reversed(part.sites), *((None, n) for n in ir.walk(part.expr))):
            if e is clause or literal(e, part.scalars) is clause:
                where, picture = caret(part.source, span, part.what) if span else ("", "")
                lines = (where, *("  " + x for x in picture.split("\n"))) if span else ()
                raise leaves_64_bits(e, "".join(f"\n  {x}" for x in lines), part.expr) from None
