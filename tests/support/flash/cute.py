"""CuTe DSL on numpy: the few operations that printed mask and score mods use, for every position at once.

A `TensorSSA` of one lane, as FlashAttention 4 passes it, holds an array with a value for each position of a test.
Operators that CuTe lacks are lacking here: `~`, `<<` and `>>` give a `Vector` that nothing else takes, `%` rounds to
zero, choices want one dtype, and a load past a table's end raises.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from scipy.special import erf

KINDS = {"b": 0, "i": 1, "u": 2, "f": 3}  # a binary operator takes the greater of two


class Number:
    """A type of CuTe's numbers, which converts Python's."""

    def __init__(self, name: str, dtype: Any) -> None:
        self.name, self.dtype, self.inf = name, np.dtype(dtype), float("inf")

    def __call__(self, value: Any) -> Scalar:
        return Scalar(np.asarray(value).astype(self.dtype))


Boolean, Int32, Uint32, Float32 = (
    Number(n, t) for n, t in {"Boolean": bool, "Int32": np.int32, "Uint32": np.uint32, "Float32": np.float32}.items()
)


class Scalar:
    """A number for each position: what an element of a vector or of a table is."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)
        assert self.array.dtype in (bool, np.int32, np.uint32, np.float32), self.array.dtype

    def __index__(self) -> int:
        return int(self.array)

    def __float__(self) -> float:
        return float(self.array)


class Vector(Scalar):
    """What CuTe's shifts and `~` give: no vector that other operators take."""


def lanes(x: Any) -> Any:
    """The values of an operand; Python's numbers are of 32 bits."""
    if isinstance(x, Scalar):
        assert type(x) is not Vector, "CuTe's shifts and ~ give no TensorSSA"
        return x.array
    assert isinstance(x, bool | int | float), x
    assert not isinstance(x, int) or -(2**31) <= x < 2**32, x
    return np.asarray(x, bool if isinstance(x, bool) else np.int32 if isinstance(x, int) else np.float32)


def same(x: Any, y: Any) -> tuple[Any, Any]:
    """Two operands in the wider type."""
    x, y = lanes(x), lanes(y)
    kind = max(x.dtype, y.dtype, key=lambda t: KINDS[t.kind])
    return x.astype(kind), y.astype(kind)


def binary(function: Callable[[Any, Any], Any], flip: bool = False) -> Callable[[TensorSSA, Any], TensorSSA]:
    def method(x: TensorSSA, y: Any) -> TensorSSA:
        with np.errstate(all="ignore"):
            return TensorSSA(function(*same(*((y, x) if flip else (x, y)))))

    return method


def divided(x: Any, y: Any) -> Any:
    assert x.dtype.kind == "f", "CuTe's / of Ints rounds"
    return x / y


def floored(x: Any, y: Any) -> Any:
    assert np.all(y != 0), "a division by zero"
    return x // y


class TensorSSA(Scalar):
    """A vector of one lane."""

    shape = (1,)

    def __init__(self, value: Any, shape: Any = (1,), dtype: Number | None = None) -> None:
        super().__init__(value.array if isinstance(value, Vector) else value)
        assert shape == (1,)
        assert dtype is None or dtype.dtype == self.array.dtype

    def __getitem__(self, lane: int) -> Scalar:
        assert lane == 0
        return Scalar(self.array)

    def to(self, kind: Number) -> TensorSSA:
        found = self.array
        if found.dtype.kind == "f" and kind is Int32:
            assert np.all(np.abs(found) < 2.0**31), "a Float that is no Int32"
        return TensorSSA(found.astype(kind.dtype))

    def __lshift__(self, y: TensorSSA) -> Vector:
        return Vector(np.left_shift(*same(self, y)))

    def __rshift__(self, y: TensorSSA) -> Vector:
        return Vector(np.right_shift(*same(self, y)))

    def __invert__(self) -> Vector:
        return Vector(~self.array)

    def __neg__(self) -> TensorSSA:
        return TensorSSA(-self.array)

    def __abs__(self) -> TensorSSA:
        return TensorSSA(np.abs(self.array))

    def __bool__(self) -> bool:
        raise TypeError("a value of the kernel decides nothing in Python")

    __hash__ = None  # type: ignore[assignment]


for name, function in {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": divided, "floordiv": floored,
    "mod": np.fmod, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}.items():  # fmt: skip
    setattr(TensorSSA, f"__{name}__", binary(function))
    setattr(TensorSSA, f"__r{name}__", binary(function, flip=True))
for name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(TensorSSA, f"__{name}__", binary(getattr(operator, name)))


class Table:
    """A table in the GPU's memory, of 32-bit entries."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)
        assert self.array.dtype in (np.int32, np.float32), self.array.dtype
        self.shape, self.element_type = self.array.shape, Float32 if self.array.dtype.kind == "f" else Int32

    def __getitem__(self, at: tuple[Any, ...]) -> Scalar:
        index = tuple(lanes(i) for i in at)
        assert len(index) == len(self.shape)
        assert all(((i >= 0) & (i < n)).all() for i, n in zip(index, self.shape))
        return Scalar(self.array[index])


class Registers:
    """A vector of registers, of one lane."""

    def __init__(self, count: int, kind: Number) -> None:
        assert count == 1
        self.kind = kind

    def __setitem__(self, lane: int, value: Scalar) -> None:
        assert lane == 0
        assert value.array.dtype == self.kind.dtype
        self.value = value.array

    def load(self) -> TensorSSA:
        return TensorSSA(self.value)


def full(shape: Any, value: Any, kind: Number) -> TensorSSA:
    return TensorSSA(lanes(value).astype(kind.dtype))


def where(condition: TensorSSA, x: Any, y: Any) -> TensorSSA:
    assert isinstance(x, TensorSSA) or isinstance(y, TensorSSA), "CuTe chooses between vectors"
    assert isinstance(condition, TensorSSA)
    assert condition.array.dtype == bool
    x, y = lanes(x), lanes(y)
    assert x.dtype == y.dtype, (x.dtype, y.dtype)
    return TensorSSA(np.where(condition.array, x, y))


def of_floats(function: Callable[..., Any]) -> Callable[..., TensorSSA]:
    def called(*args: TensorSSA, fastmath: bool = False) -> TensorSSA:
        assert all(isinstance(x, TensorSSA) and x.array.dtype == np.float32 for x in args)
        with np.errstate(all="ignore"):
            return TensorSSA(function(*(x.array for x in args)).astype(np.float32))

    return called


FUNCTIONS = {n: getattr(np, n) for n in "exp exp2 log log2 log1p tanh sin cos tan sqrt floor".split()}
FUNCTIONS |= {"rsqrt": lambda x: 1 / np.sqrt(x), "erf": erf, "pow": np.power}
MATH = SimpleNamespace(**{n: of_floats(f) for n, f in FUNCTIONS.items()})


def least(x: Any, y: Any) -> Scalar:
    return Scalar(np.minimum(*same(x, y)))


def greatest(x: Any, y: Any) -> Scalar:
    return Scalar(np.maximum(*same(x, y)))


def modules() -> dict[str, ModuleType]:
    """`cutlass` and `cutlass.cute`, as printed text imports them."""
    cutlass, cute = ModuleType("cutlass"), ModuleType("cutlass.cute")
    kinds = {k.name: k for k in (Boolean, Int32, Uint32, Float32)}
    vars(cutlass).update(kinds, cute=cute, min=least, max=greatest)
    vars(cute).update(
        where=where, full=full, math=MATH, make_rmem_tensor=Registers, TensorSSA=TensorSSA,
        full_like=lambda x, value: full(x.shape, value, next(k for k in kinds.values() if k.dtype == x.array.dtype)),
    )  # fmt: skip
    return {"cutlass": cutlass, "cutlass.cute": cute}


@contextmanager
def installed():
    """The stand-in under the names of CuTe DSL."""
    was = {n: sys.modules.get(n) for n in modules()}
    sys.modules.update(modules())
    try:
        yield
    finally:
        for name, module in was.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def functions(text: str) -> dict[str, Callable[..., Any]]:
    """The functions of a printed module."""
    made: dict[str, Any] = {}
    with installed():
        exec(compile(text, "<cute>", "exec"), made)
    return made


def vector(array: Any, dtype: Any = np.int32) -> TensorSSA:
    return TensorSSA(np.asarray(array).astype(dtype))
