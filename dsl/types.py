"""The three types of the language."""

from __future__ import annotations

from enum import Enum


class Type(Enum):
    """A type of the language: Int is a mathematical integer, Bool a truth value, Float a float32.

    The reference computes Floats in float64."""

    BOOL = "Bool"
    INT = "Int"
    FLOAT = "Float"

    # members are singletons; Enum's own hash is a Python call in every look-up of a node
    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self.value

    @property
    def with_article(self) -> str:
        return f"an {self}" if self is INT else f"a {self}"


BOOL, INT, FLOAT = Type.BOOL, Type.INT, Type.FLOAT


def axes(rank: int | None) -> str:
    """The axes of a table in a declaration: `[_, _]`, and nothing for a number."""
    return f"[{', '.join('_' * rank)}]" if rank else ""


def ranked(rank: int | None) -> str:
    """The description in words of a scalar (rank None or 0) or a table."""
    return "a number" if not rank else f"a table with {rank} {'axis' if rank == 1 else 'axes'}"
