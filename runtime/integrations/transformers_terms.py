"""The mask functions of transformers as text of the language, and the tables they read.

>>> from transformers.masking_utils import sliding_window_causal_mask_function
>>> read(sliding_window_causal_mask_function(256))
('((true & (k > (q - 256))) & (k <= q))', {})

transformers builds a mask out of Python closures over positions. Here they are called once, on `TextTerm`s, which write
down what is computed with them; so they are inside `torch.compile`, which sees nothing of it but texts, and the tensors
that become tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from frisket.runtime.masks.mask import mask

POSITIONS = ("b", "h", "q", "k")


class TextTerm:
    """A text in place of a number that a mask function computes with; tensors beside it become tables."""

    device = None  # mask functions move results there

    def __init__(self, text: str, tables: list[Tensor]) -> None:
        self.text, self.tables = text, tables

    def joined(self, left: Any, sign: str, right: Any) -> TextTerm:
        return TextTerm(f"({said(left, self.tables)} {sign} {said(right, self.tables)})", self.tables)

    # fmt: off
    def __add__(self, x: Any) -> TextTerm: return self.joined(self, "+", x)
    def __radd__(self, x: Any) -> TextTerm: return self.joined(x, "+", self)
    def __sub__(self, x: Any) -> TextTerm: return self.joined(self, "-", x)
    def __rsub__(self, x: Any) -> TextTerm: return self.joined(x, "-", self)
    def __mul__(self, x: Any) -> TextTerm: return self.joined(self, "*", x)
    def __rmul__(self, x: Any) -> TextTerm: return self.joined(x, "*", self)
    def __floordiv__(self, x: Any) -> TextTerm: return self.joined(self, "//", x)
    def __mod__(self, x: Any) -> TextTerm: return self.joined(self, "%", x)
    def __lt__(self, x: Any) -> TextTerm: return self.joined(self, "<", x)
    def __le__(self, x: Any) -> TextTerm: return self.joined(self, "<=", x)
    def __gt__(self, x: Any) -> TextTerm: return self.joined(self, ">", x)
    def __ge__(self, x: Any) -> TextTerm: return self.joined(self, ">=", x)
    def __eq__(self, x: object) -> TextTerm: return self.joined(self, "==", x)  # type: ignore[override]
    def __ne__(self, x: object) -> TextTerm: return self.joined(self, "!=", x)  # type: ignore[override]
    def __and__(self, x: Any) -> TextTerm: return self.joined(self, "&", x)
    def __rand__(self, x: Any) -> TextTerm: return self.joined(x, "&", self)
    def __or__(self, x: Any) -> TextTerm: return self.joined(self, "|", x)
    def __ror__(self, x: Any) -> TextTerm: return self.joined(x, "|", self)
    def __xor__(self, x: Any) -> TextTerm: return self.joined(self, "^", x)
    def __invert__(self) -> TextTerm: return TextTerm(f"(~{self.text})", self.tables)
    def __neg__(self) -> TextTerm: return TextTerm(f"(-{self.text})", self.tables)
    def __abs__(self) -> TextTerm: return TextTerm(f"abs({self.text})", self.tables)
    def to(self, *_: Any, **__: Any) -> TextTerm: return self
    def new_ones(self, *_: Any, **__: Any) -> TextTerm: return TextTerm("true", self.tables)
    def new_zeros(self, *_: Any, **__: Any) -> TextTerm: return TextTerm("false", self.tables)
    # fmt: on

    def __bool__(self) -> bool:
        raise TypeError("a mask function asks whether a position is true, and positions have no values here")

    __hash__ = None  # type: ignore[assignment]  # nothing is equal to another


def said(x: Any, tables: list[Tensor]) -> str:
    if isinstance(x, TextTerm):
        return x.text
    if isinstance(x, Tensor):
        return named(x, tables)
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, (int, float)):
        return f"({x!r})" if x < 0 else repr(x)
    raise TypeError(f"a mask function computes with {x!r}")


def named(table: Tensor, tables: list[Tensor]) -> str:
    """The name of a table: t0, t1, ..."""
    for i, known in enumerate(tables):
        if known is table:
            return f"t{i}"
    tables.append(table)
    return f"t{len(tables) - 1}"


class Lookups(TorchFunctionMode):
    """Reads `table[b, q]`, with terms for positions, as text."""

    def __init__(self, tables: list[Tensor]) -> None:
        super().__init__()
        self.tables = tables

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            table, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, TextTerm) for i in index):
                if len(index) != table.ndim:
                    raise TypeError(f"a tensor of {table.ndim} axes is read with {len(index)} indices")
                inside = ", ".join([said(i, self.tables) for i in index])
                return TextTerm(f"{named(table, self.tables)}[{inside}]", self.tables)
        return func(*args, **(kwargs or {}))


def read(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """The text of a mask function of transformers, and its tables by name."""
    tables: list[Tensor] = []
    positions = [TextTerm(name, tables) for name in POSITIONS]
    if torch.compiler.is_compiling():
        with Lookups(tables):
            found = function(*positions)
        return said(found, tables), {f"t{i}": x for i, x in enumerate(tables)}
    try:
        with Lookups(tables):
            found = function(*positions)
        return said(found, tables), {f"t{i}": x for i, x in enumerate(tables)}
    except TypeError:  # a function of torch, or more: frisket's reader of torch callables knows those, or says why not
        made = mask(function)
        return str(made), dict(made.params)
