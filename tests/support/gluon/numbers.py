"""Tensors, scalars and pointers of Gluon on numpy, with the arithmetic of a GPU: 32-bit integers that wrap, divisions
towards zero, float32, and bfloat16 rounded to nearest."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch


@dataclass(frozen=True)
class Kind:
    """A dtype: its name, and the type of numpy that holds it (float32 holds bfloat16)."""

    name: str
    held: type
    bits: int

    @property
    def floats(self) -> bool:
        return issubclass(self.held, np.floating)


KINDS = {
    n: Kind(n, t, b)
    for n, t, b in (
        ("int1", np.bool_, 1), ("int8", np.int8, 8), ("int16", np.int16, 16), ("int32", np.int32, 32),
        ("int64", np.int64, 64), ("uint32", np.uint32, 32), ("float16", np.float16, 16),
        ("bfloat16", np.float32, 16), ("float32", np.float32, 32), ("float8e4nv", np.float32, 8),
    )
}  # fmt: skip
E4M3 = KINDS["float8e4nv"]
BOOL, I32, I64, U32, F32, BF16 = (KINDS[n] for n in ("int1", "int32", "int64", "uint32", "float32", "bfloat16"))


def rounded(x: np.ndarray, kind: Kind) -> np.ndarray:
    """Numbers of a kind, to nearest."""
    if kind is E4M3:  # to the largest number where torch would have none
        saturated = torch.as_tensor(np.array(x, np.float32)).clamp(-448, 448)
        return saturated.to(torch.float8_e4m3fn).float().numpy()
    if kind is BF16:
        return torch.as_tensor(np.array(x, np.float32)).to(torch.bfloat16).float().numpy()
    return np.asarray(x).astype(kind.held)


def kind_in_torch(dtype: torch.dtype) -> Kind:
    name = str(dtype).removeprefix("torch.")
    return KINDS[{"float8_e4m3fn": "float8e4nv"}.get(name, name)]


def kind_of(x) -> Kind:
    """The kind that a number of Python has beside nothing else."""
    if isinstance(x, bool | np.bool_):
        return BOOL
    if isinstance(x, int):
        return I32 if -(1 << 31) <= x < 1 << 31 else I64 if x < 1 << 63 else KINDS["int64"]
    return F32


def common(a: Tensor, b: Tensor) -> Kind:
    """The kind of a sum of both, as Triton promotes."""
    if a.kind is b.kind:
        return a.kind
    if a.kind.floats != b.kind.floats:
        return a.kind if a.kind.floats else b.kind
    if a.kind.floats:
        return F32 if F32 in (a.kind, b.kind) or a.kind is not b.kind else a.kind
    wide, other = (a.kind, b.kind) if a.kind.bits >= b.kind.bits else (b.kind, a.kind)
    return U32 if wide.bits == other.bits and U32 in (wide, other) else wide


class Tensor:
    """A tensor, or a scalar as one of no axes."""

    def __init__(self, data, kind: Kind) -> None:
        self.data, self.kind = np.asarray(data, kind.held), kind

    @property
    def shape(self):
        return self.data.shape

    @property
    def dtype(self) -> Kind:
        return self.kind

    def to(self, kind: Kind, bitcast: bool = False) -> Tensor:
        if bitcast:
            return Tensor(self.data.view(kind.held), kind)
        with np.errstate(all="ignore"):
            return Tensor(rounded(self.data, kind), kind)

    def __getitem__(self, at) -> Tensor:
        return Tensor(self.data[at], self.kind)

    def reshape(self, shape) -> Tensor:
        return Tensor(self.data.reshape(shape), self.kind)

    def permute(self, order) -> Tensor:
        return Tensor(self.data.transpose(order), self.kind)

    def split(self) -> tuple[Tensor, Tensor]:
        """The two tensors along the last axis."""
        first, second = np.moveaxis(self.data, -1, 0)
        return Tensor(first, self.kind), Tensor(second, self.kind)

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __invert__(self) -> Tensor:
        return Tensor(~self.data, self.kind)

    def __neg__(self) -> Tensor:
        with np.errstate(all="ignore"):
            return Tensor(-self.data, self.kind)


def tensor(x, like: Tensor | None = None) -> Tensor:
    """A number of Python as a tensor; beside a tensor it takes its kind, where that can hold it."""
    if isinstance(x, Tensor):
        return x
    if not isinstance(x, bool | int | float | np.generic):
        raise TypeError(f"no number: {x!r}")
    kind = kind_of(x)
    if like is not None and kind is not BOOL:
        if like.kind.floats or (kind is not F32 and like.kind is not BOOL):
            kind = like.kind
        elif kind is F32:
            kind = F32
    return Tensor(np.asarray(x).astype(kind.held), kind)


def pair(a, b) -> tuple[np.ndarray, np.ndarray, Kind]:
    x = tensor(a, b if isinstance(b, Tensor) else None)
    y = tensor(b, a if isinstance(a, Tensor) else None)
    kind = common(x, y)
    return x.data.astype(kind.held), y.data.astype(kind.held), kind


def arithmetic(work, truth: bool = False):
    """An operator, and the same with its operands exchanged."""

    def forth(a, b):
        if isinstance(b, Pointer):
            return NotImplemented
        x, y, kind = pair(a, b)
        with np.errstate(all="ignore"):
            found = work(x, y)
        return Tensor(found, BOOL if truth else kind) if truth or kind is not BF16 else Tensor(found, kind).to(BF16)

    return forth, lambda b, a: forth(a, b)


def quotient(x, y):
    """Towards zero; a division by zero is left to the caller's mask."""
    safe = np.where(y == 0, 1, y)
    return (x - np.fmod(x, safe)) // safe


def divided(a, b):
    x, y, kind = pair(a, b)
    kind = kind if kind.floats else F32
    with np.errstate(all="ignore"):
        return Tensor(x.astype(kind.held) / y.astype(kind.held), kind)


WORK = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": quotient,
    "mod": lambda x, y: np.fmod(x, np.where(y == 0, 1, y)), "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "lshift": np.left_shift, "rshift": np.right_shift,
}  # fmt: skip
for name, work in WORK.items():
    forth, back = arithmetic(work)
    setattr(Tensor, f"__{name}__", forth)
    setattr(Tensor, f"__r{name}__", back)
for name, work in {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}.items():  # fmt: skip
    setattr(Tensor, f"__{name}__", arithmetic(work, truth=True)[0])
Tensor.__truediv__ = divided
Tensor.__rtruediv__ = lambda b, a: divided(a, b)
Tensor.__hash__ = None


class Pointer:
    """Addresses within the storage of a torch tensor."""

    def __init__(self, memory: np.ndarray, kind: Kind, at=0) -> None:
        self.memory, self.kind, self.at = memory, kind, np.asarray(at, np.int64)
        self.rounded: torch.Tensor | None = None  # of bfloat16, which numpy has not

    @classmethod
    def to_tensor(cls, x: torch.Tensor) -> Pointer:
        kind = {torch.int8: "int8", torch.bool: "int1"}.get(x.dtype) or str(x.dtype).removeprefix("torch.")
        room = x.untyped_storage().nbytes() // x.element_size()
        flat = torch.as_strided(x.detach(), (room,), (1,), 0)
        memory = flat.float().numpy() if x.dtype is torch.bfloat16 else flat.numpy()
        made = cls(memory, KINDS[kind], x.storage_offset())
        made.rounded = flat if x.dtype is torch.bfloat16 else None
        return made

    def __add__(self, by) -> Pointer:
        moved = Pointer(self.memory, self.kind, self.at + tensor(by).data.astype(np.int64))
        moved.rounded = self.rounded
        return moved

    __radd__ = __add__

    @property
    def dtype(self):
        """A type of pointers, as kernels name the type behind one."""
        return SimpleNamespace(element_ty=self.kind)

    def _checked(self, where) -> np.ndarray:
        at = np.broadcast_to(self.at, np.broadcast_shapes(self.at.shape, np.shape(where)))
        wrong = where & ((at < 0) | (at >= self.memory.size))
        if wrong.any():
            raise IndexError(f"address {at[wrong][0]} of {self.memory.size}")
        return np.where(where, at, 0)

    def load(self, mask=None, other=None) -> Tensor:
        where = np.asarray(True) if mask is None else tensor(mask).data
        at = self._checked(where)
        # what a masked load gives is undefined: here something that shows
        none = (np.nan if self.kind.floats else 1 << 20 if self.kind.bits > 16 else 1) if other is None else other
        return Tensor(np.where(where, self.memory[at], none), self.kind)

    def store(self, value, mask=None) -> None:
        where = np.asarray(True) if mask is None else tensor(mask).data
        at = self._checked(where)
        value, where = np.broadcast_to(tensor(value).data, at.shape), np.broadcast_to(where, at.shape)
        self.memory[at[where]] = value[where]
        if self.rounded is not None:
            self.rounded[torch.as_tensor(at[where])] = torch.as_tensor(value[where]).to(torch.bfloat16)
