r"""A compiled attention as a text, for graphs of torch: an exported program holds all it needs.

>>> from frisket.runtime.attention.entry import compile
>>> options, *program = compile("causal & window(w)", "softcap(5)", w=4).spec.splitlines()
>>> print(options[:66], *program, sep="\n")
{'scale': 'None', 'gqa': True, 'backend': None, 'tile': None, 'dro
param w: int = 4
mask = q >= k & abs(q - k) < w
score = 5 * tanh(score / 5)

The first line has the options, a dict of Python literals. Its `texts` are the lengths of the texts of the mask, the
score mod, the weight and the divisor, as `frisket.attention` takes them; None: what follows is one program. `at` has
the lengths of texts behind it, those of the positions where dropout draws; without any it draws where the arrays are.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from frisket.dsl.ir import names_of
from frisket.dsl.program import ROOTS, read
from frisket.dsl.show import show
from frisket.grammar.memo import memo
from frisket.runtime.backends.stages import new_history
from frisket.runtime.calls.options import Options, Tuning, attention_by
from frisket.runtime.calls.program import CallProgram, joined
from frisket.runtime.machine.parameters import BoundExpr, Origin
from frisket.runtime.masks.mask import Program, program

WORDS = ("scale", "gqa", "backend", "tile", "dropout", "tuning", "deterministic", "engines", "unwritten", "texts", "at")
HEAD = "{{'scale': '{!r}', " + ", ".join(f"'{word}': {{!r}}" for word in WORDS[1:]) + "}}\n"  # infinity is no literal


def spec_of(program: CallProgram, o: Options, learned: Collection[str]) -> str:
    """The text of an attention."""
    tile = None if o.tile is None else tuple(map(int, o.tile))  # numpy's ints are no literals
    scale = float(o.scale) if isinstance(o.scale, np.generic) else o.scale
    options = scale, o.enable_gqa, o.backend, tile, o.dropout, o.tuning.choices, o.deterministic, o.engines
    _, names = declarations(program, learned)
    places = [show(e, names) for e in program.positions or ()]
    head = HEAD.format(*options, program.unwritten, None, tuple(map(len, places)))
    return head + text_of(program, learned) + "".join(places)


def text_of(program: CallProgram, learned: Collection[str]) -> str:
    """A program: tables and what is learned are declared, scalars have their values."""
    lines, names = declarations(program, learned)
    definitions = [f"{part} = {show(p.expr, names)}" for part, p in program.named.by_name.items()]
    return lines + "\n".join(definitions)


def declarations(program: CallProgram, learned: Collection[str]) -> tuple[str, Collection[str]]:
    """The lines of a program that declare what it reads, and the names."""
    lines = []
    facts = {n: d.fact for p in program.parts for n, d in p.origin.declared.items()}
    names = {n: x for p in program.parts for n, x in names_of(p.expr).items()}
    for name, (rank, kind) in names.items():
        have = program.tables[name].ndim if name in program.tables else 1
        axes = ", ".join("_" * (have if rank is None else rank))
        fact = "sorted " if facts.get(name) == "sorted" else ""
        value = program.scalars.get(name) if name not in learned else None
        literal = str(value).lower() if isinstance(value, bool) else repr(value)
        default = "" if value is None else f" = {literal}"
        lines.append(f"param {name}: {fact}{kind.value.lower()}{f'[{axes}]' if axes else ''}{default}\n")
    return "".join(lines), names


def _cut(text: str, lengths: tuple[int, ...]) -> list[str]:
    """The text before the last parts, and those parts."""
    ends = [len(text) - sum(lengths[i:]) for i in range(len(lengths) + 1)]
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def _place(lines: str, text: str) -> BoundExpr:
    """A position, of names that these lines declare."""
    definition = read(lines + text)
    assert definition.expr is not None
    names = names_of(definition.expr)
    known = {n: x for n, x in definition.defaults.items() if n in names}
    return BoundExpr(definition.expr, known, Origin(declared=definition.declared))


@memo(256)
def history_of(spec: str) -> deque[Any]:
    """The history of calls in graphs, which hold the text of an attention: one for equal attentions."""
    return new_history()


@memo(256)
def attention_of(spec: str, kinds: tuple[tuple[str, int, type], ...]) -> Any:
    """The attention of a text. `kinds` are the names given to the call: how many axes, and bool, int or float."""
    first, _, text = spec.partition("\n")
    header: dict[str, Any] = ast.literal_eval(first)
    scale = None if header["scale"] == "None" else float(header["scale"])
    fixed = {n: header[n] for n in ("backend", "tile", "dropout", "deterministic", "engines")}
    options = Options(scale, header["gqa"], tuning=Tuning.of(header["tuning"]), **fixed)
    if header["texts"] is None:
        text, *others = _cut(text, header["at"])
        lines = [x for x in text.splitlines(keepends=True) if x.startswith("param ")]
        # declarations alone are no program: everything is visible
        parts = program(text) if len("".join(lines)) < len(text) else Program()
        places = tuple(_place("".join(lines), x) for x in others) or None
        whole = replace(joined(*(parts.by_name.get(n) for n in ROOTS)), places=places, unwritten=header["unwritten"])
        att = attention_by("program")(whole, options)
        att.history = history_of(spec)  # each graph makes an attention, and its records would go with it
        return att
    # entries do not matter: the call brings values
    params: dict[str, Any] = {n: np.ones((1,) * r, t) for n, r, t in kinds}
    mask, score, weight, divide = (x or None for x in _cut(text, header["texts"])[1:])
    return attention_by("texts")(mask, score, options, params, weight, divide)
