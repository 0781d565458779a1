"""Evaluates Exprs on torch tensors: the operator table of the aten backend, and expressions as short tile programs.

The table is checked row by row against `dsl.evaluate`. Tiles are small, so Int is int64 here, as in the reference;
Float is the dtype of the scores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

from frisket.dsl.errors import LoweringError
from frisket.dsl.evaluate import unroll
from frisket.dsl.ir import FLOAT_FUNCTIONS, OPERATORS, Expr, Named, walk
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.grammar.memo import memo
from frisket.lowering.kernels.language import Language
from frisket.lowering.kernels.legalise import legalise

Tensor = Any  # torch is imported by the caller, inside the functions that need it
Value = Any  # a tensor, or a Python number


def _torch() -> Any:
    import torch

    return torch


# -- operators ------------------------------------------------------------------------------------


def _sign(x: Tensor) -> Tensor:
    # torch gives NaN the sign 0
    return x.sign() if x.dtype == _torch().int64 else _torch().where(x.isnan(), x, x.sign())


def _to_int(x: Tensor) -> Tensor:
    torch = _torch()
    if x.dtype == torch.bool:
        return x.long()
    # trunc of +-2^62 at most, NaN to 0: what the reference does, without a trap
    return x.nan_to_num(0.0, math.inf, -math.inf).clamp(-(2.0**62), 2.0**62).long()


def _mix(x: Tensor) -> Tensor:
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x85EBCA6B - 2**32
    x ^= (x >> 13).bitwise_and_(0x7FFFF)
    x *= 0xC2B2AE35 - 2**32
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _random(*counters: Tensor) -> Tensor:
    # 32 bits as int32: half the memory of int64, products wrap, and a shift to the right needs the sign cut off
    words = [c.to(_torch().int32) for c in counters]
    x = _mix(words[0] + (0x9E3779B9 - 2**32))
    for w in words[1:]:
        x = _mix(x ^ w * (0x9E3779B1 - 2**32))
    return x.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)  # 24 bits: exact in float32; the caller scales


def _fold(name: str) -> Callable[..., Tensor]:
    return lambda *args: reduce(getattr(_torch(), name), args)


# torch's names where they are not the language's; `minimum` and `maximum` propagate NaN, as numpy's do
NAMES = {"min": "minimum", "max": "maximum", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift"}
NAMES |= {n: f"bitwise_{n.removeprefix('bit')}" for n in ("bitand", "bitor", "bitxor", "bitnot")}
NAMES |= {n: f"logical_{n}" for n in ("xor", "not")}
# operators that are more than one call
CALLS: dict[str, Callable[..., Tensor]] = {
    **{n: _fold(f"logical_{n}") for n in ("and", "or")},
    "sign": _sign,
    "floor_quotient": lambda x, y: _torch().div(x, y, rounding_mode="floor"),
    "floor_remainder": lambda x, y: _torch().remainder(x, y),
    "int": _to_int,
    "floor": lambda x: _to_int(x.floor()),
    "float": lambda x: x,
    "random": _random,
}


@memo(group="once")
def operators() -> dict[str, Callable[..., Tensor]]:
    """The operators that torch has: under their own name, under another, or as more than one call."""
    torch = _torch()
    named = {op: NAMES.get(op, op) for op in [*OPERATORS, *NAMES] if op not in CALLS}
    return {op: getattr(torch, name) for op, name in named.items() if hasattr(torch, name)} | CALLS


@memo(group="once")
def language() -> Language:
    """The language of these operators, for `legalise`."""
    return Language("torch", dict.fromkeys(operators(), ""), bits=64)


def _method(name: str) -> Callable[..., Tensor]:
    return lambda x, *args: getattr(x, name)(*args)


# Float operators that may overwrite their first argument when no other operator needs it
IN_PLACE: dict[str, Callable[..., Tensor]] = {
    **{n: _method(f"{n}_") for n in "neg abs add sub mul div".split()},
    **{n: _method(f"{n}_") for n in FLOAT_FUNCTIONS},
}
LITERAL_BESIDE = frozenset({"add", "sub", "mul", "div", "pow", "lt", "le", "gt", "ge", "eq", "ne"})


# -- programs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    node: Expr
    nodes: tuple[Expr, ...]
    args: tuple[int, ...]
    overwrites: bool  # the first argument is a Float that is not read later


class TileProgram:
    """An expression ready to run on tiles: `TileProgram(e, dtype)(env, tables)`.

    `env` gives `b h q k`, sizes and slots as integers, floats or int64 tensors that broadcast; `score` as a
    tensor, which is overwritten where that saves a pass. Without `in_place` nothing is.
    """

    def __init__(
        self, root: Expr, dtype: Any, known: Mapping[Expr, str] | None = None, *, in_place: bool = True
    ) -> None:
        torch = _torch()
        self.dtype, self.dtypes = dtype, {BOOL: torch.bool, INT: torch.int64, FLOAT: dtype}
        self.known = dict(known or {})
        root = legalise(unroll(root), language(), self.known)
        order = [*walk(root, below=lambda e: () if e in self.known else e.args)]
        at = {n: i for i, n in enumerate(order)}
        last = {a: i for i, n in enumerate(order) for a in self._inputs(n)}
        self.code = []
        for i, n in enumerate(order):
            args = self._inputs(n)
            if n.op in ("add", "mul") and args and not self._fresh(args[0]):
                args = args[::-1]  # the value that may be overwritten goes first
            free = in_place and n.op in IN_PLACE and n.type is FLOAT and bool(args) and self._fresh(args[0])
            ends = free and last[args[0]] == i and args.count(args[0]) == 1
            self.code.append(Instruction(n, args, tuple(at[a] for a in args), ends))
        readers = Counter(a for n in order for a in self._inputs(n))
        # a product that is only added to an overwritten value goes there in one pass, without another tile
        added = {i.nodes[1] for i in self.code if i.node.op == "add" and i.overwrites}
        self.products = {n for n in added if n.op == "mul" and readers[n] == 1 and n not in self.known}

    def _fresh(self, node: Expr) -> bool:
        """Whether the value of `node` is a separate tensor (the score counts: it may be overwritten)."""
        computed = bool(node.args) and node.op not in ("lookup", "float")
        return node.type is FLOAT and (computed or node.name == "score") and node not in self.known

    def _inputs(self, node: Expr) -> tuple[Expr, ...]:
        return () if node in self.known else node.args

    def __call__(self, env: Mapping[str, Value], tables: Mapping[str, Tensor]) -> Tensor:
        torch = _torch()
        values: list[Value] = []
        for step in self.code:
            node = step.node
            if node in self.known:
                values.append(env[self.known[node]])
            else:
                values.append(self._run(torch, step, [values[i] for i in step.args], env, tables))
        return self._tensor(torch, values[-1], self.code[-1].node)

    def _tensor(self, torch: Any, value: Value, node: Expr) -> Tensor:
        if isinstance(value, torch.Tensor):
            return value
        return torch.tensor(value, dtype=self.dtypes[node.type])

    def _run(self, torch: Any, step: Instruction, args: list[Value], env: Mapping[str, Value], tables: Named) -> Value:
        node = step.node
        if node.op == "lit":
            return node.name
        if node.op in ("var", "param"):
            return env[node.name]
        if node.op == "lookup":
            return self._lookup(torch, node, args, tables[node.name])
        if node.op not in operators():
            raise LoweringError(f"the aten backend has no `{node.op}`; the planner rewrites it before lowering")
        # A tensor with a number stays as it is: no broadcasting, no promotion of float32 by a 0-d float64.
        if isinstance(args[-1], _Product):
            x, (left, right) = args[0], args[1]
            fits = _fits(left.shape, x.shape) and _fits(right.shape, x.shape)
            return x.addcmul_(left, right) if fits else torch.addcmul(x, left, right)
        keep = node.op in LITERAL_BESIDE and isinstance(args[0], torch.Tensor)
        args = [
            a if keep and i else self._tensor(torch, a, n)
            for i, (a, n) in enumerate(zip(args, step.nodes, strict=True))
        ]
        if node in self.products:
            return _Product(*(self._tensor(torch, a, n) for a, n in zip(args, step.nodes, strict=True)))
        if node.op == "float":
            return args[0].to(self.dtype)
        if node.op == "random":
            return operators()["random"](*args).to(self.dtype).mul_(2.0**-24)
        # a result in place has the shape of its first operand
        if step.overwrites and all(not isinstance(a, torch.Tensor) or _fits(a.shape, args[0].shape) for a in args[1:]):
            return IN_PLACE[node.op](*args)
        return operators()[node.op](*args)

    def _lookup(self, torch: Any, node: Expr, indices: list[Value], table: Tensor) -> Tensor:
        at = [self._place(torch, i, table).clamp(0, n - 1) for i, n in zip(indices, table.shape, strict=True)]
        return table[tuple(at)].to(self.dtypes[node.type])

    def _place(self, torch: Any, index: Value, table: Tensor) -> Tensor:
        """An index on the device of the table; a number becomes a tensor there, so that nothing waits for a copy."""
        if isinstance(index, torch.Tensor):
            return index.to(table.device)
        return torch.full((), index, dtype=torch.int64, device=table.device)


class _Product(NamedTuple):
    """Two factors not multiplied yet."""

    left: Tensor
    right: Tensor


def _fits(inner: tuple[int, ...], outer: tuple[int, ...]) -> bool:
    """Whether a tensor of shape `inner` broadcasts into one of shape `outer`."""
    if len(inner) > len(outer):
        return False
    return all(a in (1, b) for a, b in zip(reversed(inner), reversed(outer), strict=False))
