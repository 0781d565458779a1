"""The parameters of an Expr, and values as they take them.

>>> as_value("w", np.int64(4)), as_value("doc", [0, 0, 1]).flags.writeable
(4, False)
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl import ir
from frisket.dsl.errors import ParameterError
from frisket.dsl.evaluate import evaluate
from frisket.dsl.ir import Expr
from frisket.dsl.program import type_of
from frisket.dsl.show import show
from frisket.dsl.types import FLOAT, INT, Type, ranked

from .leave import outside

Array = NDArray[Any]
Number = bool | int | float


def names_of(e: Expr) -> dict[str, tuple[int | None, Type]]:
    """(rank, type) of what an Expr reads; rank 0 is a scalar, None a table of which only the size is used."""
    scalars, tables = ir.free_names(e)
    found: dict[str, tuple[int | None, Type]] = {n: (0, t) for n, t in scalars.items()}
    found |= {name[0]: (None, INT) for op, name, _, _ in ir.named(e) if op == "extent"}
    return {**found, **tables}


def traced(value: Any) -> bool:
    """Whether JAX traces this: it has a shape and no values to look at."""
    return any(c.__name__ == "Tracer" for c in type(value).__mro__)


def is_tensor(value: Any) -> bool:
    """Whether this is a tensor of torch. Only tensors are asked for torch's attributes: arrays of other frameworks
    have attributes of the same names and other meanings, such as the `layout` of a tracer of JAX 0.11."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def learns(value: Any) -> bool:
    """Whether a value may change between calls: a torch tensor that requires a gradient, a module's parameter."""
    return is_tensor(value) and (value.requires_grad or type(value).__name__ == "Parameter")


def with_learned(values: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, but learned ones as in `params`: they are read again at every call."""
    return {n: params[n] if n in params and learns(params[n]) else x for n, x in values.items()}


def own_state(x: Any) -> dict[str, Any]:
    """The attributes of an object without what its cached properties remember: what copies and pickles have."""
    return {n: y for n, y in vars(x).items() if not isinstance(getattr(type(x), n, None), cached_property)}


def kind_of(x: Number) -> Any:
    """The type of a number, and the sign of a Float: -0.0 and 0.0 are equal, and no mask takes one for the other."""
    return (float, math.copysign(1.0, x)) if type(x) is float else type(x)


@outside
def as_value(name: str, value: Any) -> Any:
    """A Python number or a read-only numpy array of our own, from numbers, lists, numpy, torch or JAX arrays."""
    if traced(value):
        raise ParameterError(
            f"`{name}` is traced by jax.jit or another transform, and this takes values; compile the mask without it "
            f"and give it to the call: att(q, k, v, {name}={name})"
        )
    check_plain(name, value)
    if is_tensor(value):
        value = value.detach().cpu()
        narrow = str(value.dtype).startswith(("torch.bfloat16", "torch.float8"))  # numpy has none
        value = (value.float() if narrow else value).resolve_neg().numpy()
    elif not isinstance(value, np.ndarray) and (hasattr(value, "__array__") or isinstance(value, list | tuple)):
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise ParameterError(f"`{name}` is not an array: {error}") from None
    if isinstance(value, np.ndarray):
        narrow, wide = value.dtype.name.startswith(("bfloat16", "float8")), value.dtype.type is np.longdouble
        value = value.astype("f4" if narrow else "f8" if wide else value.dtype.newbyteorder("="), copy=False)
        if value.ndim and value.flags.writeable:
            value = value.copy()
            value.flags.writeable = False
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    rank, _ = type_of(name, value)
    if rank and value.size == 0:
        raise ParameterError(f"table `{name}` is empty")
    if rank and value.dtype == np.uint64 and value.max() >= 1 << 63:
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
    dispatch, torch = getattr(type(value), "__torch_dispatch__", None), sys.modules["torch"]
    if dispatch not in (None, torch.Tensor.__torch_dispatch__) and not torch._C._len_torch_dispatch_stack():
        raise ParameterError(f"`{name}` is a {type(value).__name__}; give a plain tensor: to_local() of a DTensor")


def fitted(name: str, value: Any, rank: int | None, type: Type) -> Any:
    """The value as the type its name has; an Int does for a Float, nothing else changes type."""
    have, kind = type_of(name, value)
    if rank is not None and have != rank:
        more = (
            f"; for [batch, length] write `same_by_batch({name})`, or `{name}[b, q]`" if (rank, have) == (1, 2) else ""
        )
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


def short_tables(e: Expr, tables: Mapping[str, Array], sizes: Mapping[str, int]) -> list[tuple[str, str, int, int]]:
    """(coordinate, table, axis, its length) wherever a bare coordinate runs past the end of a table."""
    found = []
    for node in ir.walk(e):
        if node.op == "lookup":
            for axis, index in enumerate(node.args):
                have = tables[node.name].shape[axis]
                if index.op == "var" and sizes.get(index.name, 0) > have:
                    found.append((index.name, node.name, axis, have))
    return found


def digest(value: Any) -> Any:
    """Something hashable that is equal for equal values, Ints of any width; 1, 1.0 and True differ."""
    if isinstance(value, np.ndarray):
        value = value.astype(np.int64, copy=False) if value.dtype.kind in "iu" else value
        return value.dtype.str, value.shape, hashlib.blake2b(value.tobytes(), digest_size=16).digest()
    return type(value), repr(value)


def summary(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)


def segments_of_coordinates(e: Expr, tables: Mapping[str, Array]) -> list[tuple[str, str, int, int]]:
    """(coordinate, offsets, the first one, the last one) wherever an Expr asks for the segment of a coordinate."""
    read = [(n.args[0].name, n.name) for n in ir.walk(e) if n.op == "segment" and n.args[0].op == "var"]
    read = [(c, name) for c, name in read if c in ir.COORDINATES and name in tables]
    return [(c, name, int(tables[name][0]), int(tables[name][-1])) for c, name in read]


def offsets_of(e: Expr) -> dict[str, str]:
    """The tables of an Expr that hold offsets, each with the table that counts its segments. Offsets are read by
    `segment(U, x)`, or as `T[s]` and `T[s + 1]` with the segment s of U."""
    if all(op != "segment" for op, *_ in ir.named(e)):
        return {}
    nodes = list(ir.walk(e))
    segments = [n for n in nodes if n.op == "segment"]
    read = {(n.name, n.args[0]) for n in nodes if n.op == "lookup" and len(n.args) == 1}
    pairs = {name: s.name for s in segments for name, index in read if index is s and (name, s + 1) in read}
    return {**pairs, **{s.name: s.name for s in segments}}


def check_needs(needs: Mapping[Expr, str], values: Mapping[str, Any]) -> None:
    """Refuse values for which a condition is false, of numbers and of tables read at one coordinate."""
    for condition, advice in needs.items():
        scalars, tables = ir.free_names(condition)
        at = ir.uses(condition) & {*ir.COORDINATES}
        if len(at) > 1 or not values.keys() >= scalars.keys() | tables.keys():
            continue
        length = max((x for n in tables for x in values[n].shape), default=1)
        env = {**{n: values[n] for n in scalars}, **dict.fromkeys(at, np.arange(length))}
        if not np.all(evaluate(condition, env, {n: values[n] for n in tables})):
            shown = ", ".join(f"{n}={summary(values[n])}" for n in [*scalars, *tables])
            raise ParameterError(f"`{show(condition)}` does not hold for {shown}; {advice}")


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
            remedy = looks_like_lengths(name) if (x > 0).all() else "give where segments start, in order, and the end"
            raise ParameterError(f"{unsorted(name, place, offsets=True)}; {remedy}")
        if x is not None and len(x) < len(other := values.get(of, x)):
            raise ParameterError(
                f"`{name}` has {len(x)} offsets and `{of}` has {len(other)}; give where segments start, and the end"
            )


def looks_like_lengths(name: str) -> str:
    return f"these look like lengths: give numpy.cumsum([0, *{name}])"


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
