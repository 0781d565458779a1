"""Languages that kernels are printed in, a record each: the text of operators and numbers, and functions that it calls.

An emitter reads the record of its target; `legalise` brings an Expr to the operators that the record has a row for.
A row is a template: `"add": "{} + {}"`, `"neg": "-{}"`, `"tanh": "tanh({})"`, `"random": "random(*)"` for any number
of operands. The operator in it gives the precedence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from frisket.dsl.ir import INFIX

from .text import words

ATOM = 10
_BINDING = ("< <= > >= == !=", "|", "^", "&", "<< >>", "+ -", "* / // %")  # signs, the weakest first
PRECEDENCE = {sign: binds for binds, signs in enumerate(_BINDING, 1) for sign in signs.split()}
PREFIX = 8
ASSOCIATIVE = {"|", "&", "^"}
COMPARISON = 1
# operators that every language writes between their operands, as ours does; of the others it has other meanings
_VARYING = frozenset("floordiv mod shl shr pow".split())
SHARED = {op: f"{{}} {sign} {{}}" for op, sign in INFIX.items() if op not in _VARYING}
SHARED |= {"neg": "-{}", "bitnot": "~{}"}
# operators that no text of ours has: `legalise` writes them where their guards are known to hold
SHIFTS = {"lshift": "{} << {}", "rshift": "{} >> {}"}  # by 0 or more, and less than an Int has bits
FLOORED = {"floor_quotient": "{} // {}", "floor_remainder": "{} % {}"}  # rounded down, by another number than 0
TRUNCATED = {"quotient": "{} // {}", "remainder": "{} % {}"}  # rounded to 0, by another number than 0


def calls(operands: str, functions: str) -> dict[str, str]:
    """The rows of operators that are calls of functions.

    >>> calls("{}, {}", "min:minimum max:maximum")
    {'min': 'minimum({}, {})', 'max': 'maximum({}, {})'}
    """
    return {op: f"{function}({operands})" for op, function in (pair.split(":") for pair in functions.split())}


@dataclass(frozen=True)
class Text:
    """A piece of source text, with the precedence of its outermost operator."""

    text: str
    binds: int = ATOM

    def inside(self, least: int) -> str:
        return self.text if self.binds >= least else f"({self.text})"


@dataclass(frozen=True, eq=False)
class Language:
    """A language that kernels are printed in: its name for error texts, and the text of each operator that it has."""

    name: str
    operators: Mapping[str, str]
    number: Callable[[bool | int | float], str] = repr  # the text of a number
    infinity: str = ""  # where `number` does not write it, nor NaN
    nan: str = ""
    single: bool = False  # Floats are float32, which decides what is infinite
    bits: int = 32  # of an Int
    functions: Mapping[str, str] = field(default_factory=dict)  # the definitions that rows call, by name
    constants: Mapping[str, str] = field(default_factory=dict)  # the lines of names that the functions use
    further: frozenset[str] = frozenset()  # words that a user's name may not shadow
    nameless: frozenset[str] = frozenset()  # operators whose values have no type that a variable could hold

    @property
    def reserved(self) -> set[str]:
        """The names that a user's name may not shadow."""
        defined = re.findall(r"(?m)^def (\w+)", "\n".join(self.functions.values()))
        return {*self.functions, *defined, *self.constants, *self.further}

    def literal(self, value: bool | int | float) -> Text:
        """The text of a literal: `5`, `-0.5`, or an infinity."""
        if isinstance(value, float) and self.infinity:
            with np.errstate(over="ignore", under="ignore"):
                seen = float(np.float32(value)) if self.single else value
            if math.isnan(seen):
                return Text(self.nan)
            if math.isinf(seen):
                return Text(self.infinity) if seen > 0 else Text(f"-{self.infinity}", PREFIX)
        text = self.number(value)
        return Text(text, PREFIX if text[0] == "-" else ATOM)

    def prelude(self, source: str) -> tuple[list[str], list[str]]:
        """The (lines of constants, functions) that a text calls, and those that these call, in the order of
        `functions`."""
        needed, new = set[str](), words(_without_attributes(source)) & self.functions.keys()
        while new:
            needed |= new
            # calls alone, since the words of a docstring may be names too
            calls = re.findall(r"(\w+)\(", "".join(_without_attributes(self.functions[n]) for n in new))
            new = set(calls) & self.functions.keys() - needed
        functions = [text for name, text in self.functions.items() if name in needed]
        used = words("".join([*functions, source]))
        return [line for name, line in self.constants.items() if name in used], functions


def _without_attributes(source: str) -> str:
    # `jnp.tanh` is not a `tanh` of ours
    return re.sub(r"\.\w+", "", source)
