"""The three types of the language."""

from __future__ import annotations

from enum import Enum


class Type(Enum):
    """`Int` is a mathematical integer, `Bool` a truth value, `Float` a float32 (float64 in the oracle)."""

    BOOL = "Bool"
    INT = "Int"
    FLOAT = "Float"

    def __str__(self) -> str:
        return self.value


BOOL, INT, FLOAT = Type.BOOL, Type.INT, Type.FLOAT
