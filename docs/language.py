"""The tables of docs/language.md: `python docs/language.py` writes them between its marks.

Operators and their order come from grammar/mask.lark, functions and names from dsl/operators.py, the library from
dsl/library.frisket. What an operator or function takes is found by trying it on every type, what an example gives by
the interpreter.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import gallery  # noqa: E402

import frisket as fk  # noqa: E402
from frisket.dsl import ir  # noqa: E402
from frisket.dsl.errors import CALL_KEYWORDS, FrisketError  # noqa: E402
from frisket.dsl.evaluate import evaluate  # noqa: E402
from frisket.dsl.operators import CONSTANTS, FORMS, FUNCTIONS, SUMS  # noqa: E402
from frisket.dsl.program import parse_expression  # noqa: E402

PAGE = HERE / "language.md"
MARK = re.compile(r"(<!-- (\w+), written by docs/language\.py -->\n).*?(<!-- end -->)", re.S)
TYPES = ("Bool", "Int", "Float")

# One for every group of signs that stand in one row: an example, and a word where one is needed.
OPERATORS = {
    "x then y": ("score * 2 then score + 1", "score mods in a row: the result of `x` is the `score` of `y`"),
    "x if c else y": ("1 if q >= k else 2", "choice"),
    "x or y": ("q < 4 or k < 5", ""),
    "x | y": ("6 | 1", "or; of Ints bit by bit"),
    "x xor y": ("q < 4 xor k < 5", "one and not the other"),
    "x ^ y": ("6 ^ 3", "like `xor`; of Ints bit by bit"),
    "x and y": ("q < 4 and k < 5", ""),
    "x & y": ("6 & 3", "and; of Ints bit by bit"),
    "not x": ("not q < 4", ""),
    "~x": ("~5", "not; of Ints bit by bit"),
    "!x": ("!(q < 4)", "not"),
    "x < y": ("0 <= q - k < 4", "comparisons chain"),
    "x == y": ("k == 2", ""),
    "x << y": ("1 << 4", "shifts; outside 0..63 they give 0"),
    "x + y": ("q + 1.5", ""),
    "x * y": ("2 * q", ""),
    "x / y": ("1 / 2", ""),
    "x // y": ("-7 // 2", "division and remainder, rounded to minus infinity as in Python; 0 where `y` is 0"),
    "-x": ("-q", ""),
    "x ** y": ("q ** 2", "an Int where both are Ints and `y` is a literal of 0 or more"),
    "T[i]": ("doc[q]", "an entry of a table; past its ends, the nearest entry"),
    "f(x)": ("window(4)", "parameters by place, coordinates by name: `window(4, q = q // 2)`"),
}
MEANINGS = {
    "abs": ("abs(2 - 5)", "magnitude"),
    "sign": ("sign(2 - 5)", "-1, 0 or 1"),
    "min": ("min(3, 1, 2)", "the smallest; also over a range, as below"),
    "max": ("max(3, 1, 2)", "the largest; also over a range"),
    "clamp": ("clamp(9, 0, 5)", "the nearest number of low..high"),
    "floor": ("floor(-1.5)", "rounded down"),
    "ceil": ("ceil(-1.5)", "rounded up"),
    "int": ("int(-1.5)", "rounded towards 0; a Bool becomes 0 or 1"),
    "float": ("float(3)", "the same number"),
    "where": ("where(q >= k, 1, 2)", "`a if condition else b`"),
    "pow": ("pow(2.0, 0.5)", "`x ** y`"),
    "random": ("random(7, q, k)", "a uniform number in [0, 1), decided by its arguments alone"),
    "wrap": ("wrap(q * 100, 8)", "the low bits of x, as a number with a sign; sums and products in x wrap as well"),
    "exp": ("exp(1.0)", ""),
    "exp2": ("exp2(3.0)", "2 ** x"),
    "log": ("log(2.0)", "natural"),
    "log2": ("log2(8.0)", ""),
    "log1p": ("log1p(0.5)", "log(1 + x), exact near 0"),
    "sqrt": ("sqrt(2.0)", ""),
    "rsqrt": ("rsqrt(4.0)", "1 / sqrt(x)"),
    "sin": ("sin(1.0)", ""),
    "cos": ("cos(1.0)", ""),
    "tan": ("tan(1.0)", ""),
    "tanh": ("tanh(1.0)", ""),
    "sigmoid": ("sigmoid(1.0)", "1 / (1 + exp(-x))"),
    "erf": ("erf(1.0)", "the error function"),
    "relu": ("relu(-2.0)", "max(x, 0)"),
    "silu": ("silu(1.0)", "x sigmoid(x)"),
    "gelu": ("gelu(1.0)", "x (1 + erf(x / sqrt(2))) / 2"),
    "softplus": ("softplus(1.0)", "log(1 + exp(x))"),
    "isfinite": ("isfinite(inf)", "neither infinite nor NaN"),
    "at": ("at(causal, q = q // 4, k = k // 2)", "a mask, or any expression, read at other coordinates"),
    "dot": ("dot(x[0, :], x[1, :])", "the sum of products over the last axis of two tables"),
    "segment": ("segment(off, q)", "the segment that holds x: offsets[s] <= x < offsets[s + 1]"),
    "extent": ("extent(off, 0)", "the size of a table"),
    "any": ("any(j in 0..4: j * j == k)", "over a range of at most 4,096 values, with known ends"),
    "all": ("all(j in 0..4: j < q)", ""),
    "sum": ("sum(j in 0..4: j * j)", ""),
}
OTHERWISE = {"x if y": "x if c else y", "x [ y": "T[i]", "x ( y": "f(x)"}  # not one sign between or before operands
# What examples read.
ENV: dict[str, Any] = {**dict(zip(ir.COORDINATES, (0, 1, 7, 4))), **dict(zip(ir.SIZES, (1, 8, 16, 16))), "score": 0.5}
TABLES = {"doc": np.arange(16) // 3, "off": np.array([0, 3, 9, 16]), "x": np.array([[1.0, 2.0], [3.0, 4.0]])}


def page() -> str:
    """The page with its tables as they should be."""
    made = {"operators": operators, "functions": functions, "forms": forms, "names": names, "library": library}
    return MARK.sub(lambda m: f"{m[1]}\n{made[m[2]]()}\n{m[3]}", PAGE.read_text(encoding="utf-8"))


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    rows = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join([f"| {head} |", re.sub(r"[^|]+", "---", f"|{head}|"), *(f"| {row} |" for row in rows)]) + "\n"


def levels() -> list[list[str]]:
    """The operators of every level of the grammar, loosest first, each as an expression of x and y."""
    text = (HERE.parent / "grammar" / "mask.lark").read_text(encoding="utf-8")
    rules = dict(re.findall(r"^(\w+): (.*(?:\n +\|.*)*)", text, re.M))
    found, rule = [], "expr"
    while rule != "atom":
        first, *others = rules[rule].split("\n")
        level = []
        for alternative in others:
            sign = re.findall(r'"([^"]+)"', alternative)[0]
            one = re.match(r'\s*\| "', alternative)  # it stands before its only operand
            level.append(f"{sign} x".replace("~ ", "~").replace("! ", "!").replace("- ", "-") if one else f"x {sign} y")
        found.append(list(dict.fromkeys(OTHERWISE.get(x, x) for x in level)))
        rule = re.sub(r"->.*", "", first).split()[-1]
    return [level for level in found if level]


def operators() -> str:
    rows: list[list[str]] = []
    for form in (form for level in levels() for form in level):
        if form in OPERATORS:
            example, word = OPERATORS[form]
            rows.append([f"`{form}`", *taken(form), f"`{example}`", value(example), word])
        else:  # as the one before
            assert [*taken(form)] == rows[-1][1:5], form
            rows[-1][0] += f" `{form.removeprefix('x ').removesuffix(' y')}`"
    return table("operator | Bools | Ints | Floats | Int, Float | for example | gives | ", rows)


def taken(form: str) -> tuple[str, ...]:
    """What an operator gives for two Bools, two Ints, two Floats, an Int and a Float; of one operand, for one."""
    if form in ("x then y", "T[i]", "f(x)"):
        return ("",) * 4
    mixed = result(form, x="Int", y="Float") if "y" in form else ""
    return (*(result(form, **dict.fromkeys("xy" if "y" in form else "x", t)) for t in TYPES), mixed)


def result(text: str, **types: str) -> str:
    """The type of an expression of parameters of these types; – where that is an error."""
    declared = "".join(f"param {name}: {t.lower()}\n" for name, t in types.items())
    try:
        return str(parse_expression(declared + re.sub(r"\bc\b", "q > k", text)).type)
    except FrisketError:
        return "–"


def value(text: str) -> str:
    """What an expression gives at the position of the examples."""
    tables = {n: t for n, t in TABLES.items() if re.search(rf"\b{n}\b", text)}
    found = evaluate(parse_expression(text, tables), ENV, tables).item()
    return f"{found:.6g}" if isinstance(found, float) else str(found).lower()


def functions() -> str:
    rows = []
    for name, function in FUNCTIONS.items():
        example, word = MEANINGS[name]
        rows.append([f"`{function.signature}`", *(given(name, t) for t in TYPES), f"`{example}`", value(example), word])
    return table("function | of Bools | Ints | Floats | for example | gives | ", rows)


def given(name: str, kind: str) -> str:
    """What a function gives for arguments of one type, the condition of `where` aside."""
    rest = ["x"] * FUNCTIONS[name].least
    if name == "where":
        rest[0] = "q > k"
    return result(f"{name}({', '.join(rest)})", x=kind)


def forms() -> str:
    rows = [
        [f"`{signature}`", f"`{MEANINGS[n][0]}`", value(MEANINGS[n][0]), MEANINGS[n][1]]
        for n, signature in FORMS.items()
    ]
    return table("form | for example | gives | ", rows)


def names() -> str:
    rows = [
        (ticked(ir.COORDINATES), "batch entry, query head, query position, key position (Int)"),
        ("`score`", "the scaled dot product (Float; in score mods), or what the score mod makes of it (in weights)"),
        (ticked(SUMS), "of a row: the sum of its weights (Float), the number of keys it sees (Int); in `divide` only"),
        (ticked(ir.SIZES), "the sizes of the whole problem (Int)"),
        (ticked(CONSTANTS), "constants"),
        ("any other", "a definition, a library entry, or a parameter: a scalar (`w`) or a table (`off[doc[q]]`)"),
        (ticked(sorted(CALL_KEYWORDS)), "keywords of a call: no parameter has these names"),
    ]  # fmt: skip
    return table("name | meaning", rows)


def ticked(words: Iterable[str]) -> str:
    return " ".join(f"`{w}`" for w in words)


def library() -> str:
    rows = []
    for section, entries in groupby(fk.library().values(), key=lambda e: e.section):
        rows.append(
            (f"[{section}](gallery/{gallery.slug(section)}.md)", ticked(dict.fromkeys(e.name for e in entries)))
        )
    return table("part | entries", rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
