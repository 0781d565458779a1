"""Prints a device planner in C++: the pieces, questions and records of `planner.arrays`, row by row.

The text defines `frisket_plan(const int64_t *word)`, which gives 1 where some row overflowed and 2 where there was
no memory; `words` lays out what it reads. It asks only as much of a piece as its kind takes, and builds nothing that
a search can find.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from importlib.resources import files
from typing import Any

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import FALSE, SIZES, Expr, operands, walk
from frisket.dsl.show import show
from frisket.dsl.types import BOOL, FLOAT, INT, Type
from frisket.grammar.memo import memo
from frisket.lowering.kernels.cpp.expr import BINDS, CPP, number
from frisket.lowering.kernels.expr import ROW, SCALAR, Line, machine
from frisket.lowering.kernels.language import ASSOCIATIVE, PREFIX, SHIFTS, Language, Text
from frisket.lowering.kernels.text import Names, filled

from .arrays import PLAN_SPANS, WISHES, Leaf, PlannerBody, sides
from .planner import CLASSES, Planner

TYPED = {"lookup", "range_min", "range_max"}  # operators that give entries of a table
AXES = 64  # of a table, as in cpp.hpp
HEAD = tuple("slices q_len kv_len bq bk room most from_b from_h from_q from_k bounds count".split())
TYPES = {INT: "Int", FLOAT: "Real", BOOL: "bool"}
ROWS = {op: row for op, row in CPP.items() if op not in SHIFTS}  # its functions know the width of a word
ROWS |= {"and": "{} && {}", "or": "{} || {}", "xor": "{} != {}", "isfinite": "bounded({})", "random": "uniform(*)"}
LANGUAGE = Language("C++", ROWS, partial(number, long="L"), "INF", "NOT_A_NUMBER", bits=64)
LOOSE = {**BINDS, "&&": 0, "||": -1}
# what is known of a range of a table's entries
KNOWN = {"range_min": "Least<{}>", "range_max": "Greatest<{}>", **{op: f"Classes<{i}>" for i, op in enumerate(CLASSES)}}


def prelude() -> str:
    """The text that all C++ planners share."""
    return "\n".join((files(__package__) / name).read_text(encoding="utf-8") for name in ("cpp.hpp", "cpp_pieces.hpp"))


@memo(group="sources")
def emit(plan: Planner) -> str:
    """The whole source of a C++ planner."""
    return prelude() + "\n" + function(plan)


def table_types(plan: Planner) -> dict[str, Type]:
    """The required type of the entries of each table: a table of which only sizes are read counts as Ints."""
    read = (n for n in walk(*plan.roots) if n.op in TYPED)
    return dict.fromkeys(plan.tables, INT) | {n.name: n.type for n in read}


def words(plan: Planner) -> dict[str, int]:
    """The place of each part of the call, in 8-byte words. They are numbers and addresses of `HEAD` (from_b.., and
    bounds, count are addresses: 64-bit where a slice begins, 32-bit records). Then come the sizes B H Q_LEN KV_LEN,
    each scalar, and for each table its address and `AXES` sizes; the whole length under ""."""
    names = [*HEAD, *SIZES, *(f"scalar {n}" for n in plan.scalars)]
    places = {name: i for i, name in enumerate(names)}
    end = len(names)
    for name in plan.tables:
        places[f"table {name}"] = end
        end += 1 + AXES
    return {**places, "": end}


def function(plan: Planner, name: str = "frisket_plan") -> str:
    """The planner function without the prelude."""
    return _CppBody(plan).text(name)


def questions(plan: Planner) -> tuple[Expr, ...]:
    """The roots of a planner, and what else tells that a piece is empty, to be asked one after another."""
    # each is asked on its own line, so that the first true one ends the search
    disjoint = () if plan.disjoint is FALSE else operands("or", plan.disjoint)
    return plan.roots if plan.seen else (*plan.roots, *disjoint)


class _CppBody(PlannerBody):
    def __init__(self, plan: Planner) -> None:
        self.places, self.types = words(plan), table_types(plan)
        names = Names(re.findall(r"[A-Za-z_]\w*", prelude() + _IDS))
        super().__init__(plan, questions(plan), names, LANGUAGE)

    # -- expressions --------------------------------------------------------------------------------------

    def leaves(self) -> dict[str, Leaf]:
        return super().leaves() | dict.fromkeys(KNOWN, self._range)

    def leaf(self, e: Expr, args: list[Text]) -> Text | None:
        return super().leaf(e, args) or (None if e.op == "lit" else _operator(e, args))

    def size(self, source: str, axis: int) -> str:
        return f"{self.known[source]}.sizes[{axis}]"

    def _range(self, e: Expr, args: list[Text]) -> Text:
        half, ranging, fixed = sides(e)
        lows, highs = args[:half], args[half:]
        assert ranging or e.op not in CLASSES
        if not ranging:
            return self.call(e, lows)
        # the number of axes is a template argument, so that loops over them unroll
        form = KNOWN[e.op].format(TYPES[e.type]) + (f", {len(ranging)}" if len(ranging) > 1 else "")
        kind, call = ("Line", "over") if len(ranging) == 1 else ("Plane", "within")
        axes = ", ".join(map(str, ranging))
        text = f"{kind}<{form}> NAME({self.known[e.name]}, {half}, {{{axes}}})"
        name = self.named(text, f"{self.known[e.name]}_{WISHES.get(e.op, e.op)}")
        values = [*(side[i].text for side in (lows, highs) for i in ranging), *(lows[i].text for i in fixed)]
        return Text(f"{call}({', '.join([name, *values])})")

    # -- the function -------------------------------------------------------------------------------------

    def text(self, name: str) -> str:
        seen, hidden = self.plan.seen, self.plan.hidden
        lines = self.lines.lines
        return filled(
            PLAN_SPANS["cpp_function"],
            mask=[f"//     {line}" for line in show(self.plan.mask).split("\n")],
            name=name,
            arguments=self._arguments(),
            of_slices=_constants(x for x in lines if x.level == SCALAR),
            of_rows=_constants(x for x in lines if x.level == ROW),
            seen=len(seen),
            hidden=len(hidden) + 2,
            intervals=[
                {"first": self._end(first), "last": self._end(last), "kind": kind}
                for kind, pairs in (("seen", seen), ("hidden", hidden))
                for first, last in pairs
            ],
            tk="tk" in self.free,
            **({} if seen else self._questions()),
        )

    def _end(self, e: Expr) -> str:
        return self.lines.values[machine(e)]

    def _arguments(self) -> list[str]:
        """The lines that read the words of a call, and build what is made of tables first."""
        at = self.places
        lines = [
            f"const Int {', '.join(f'{n} = word[{at[n]}]' for n in HEAD[:3])};  // lengths in tokens",
            f"const Int {', '.join(f'{n} = word[{at[n]}]' for n in HEAD[3:7])};  // pieces and tile ranges in a row",
            f"const Int {', '.join(f'*{n} = (const Int *)word[{at[n]}]' for n in HEAD[7:11])};",
            f"int32_t {', '.join(f'*{n} = (int32_t *)word[{at[n]}]' for n in HEAD[11:])};",
            *(f"const Int {size} = word[{at[size]}];" for size in SIZES if size in self.free),
        ]
        for name, type in self.plan.scalars.items():
            value = f"word[{at[f'scalar {name}']}]"
            value = {INT: value, FLOAT: f"real({value})", BOOL: f"{value} != 0"}[type]
            lines.append(f"const {TYPES[type]} {self.known[name]} = {value};")
        for name in self.plan.tables:
            place, rank = at[f"table {name}"], self.ranks[name]
            lines.append(f"const Table<{TYPES[self.types[name]]}> {self.known[name]}(word + {place}, {rank});")
        for text, name in self.built.items():
            # 2 says that memory ran out: no exception crosses the C interface
            lines += [f"const {text.replace('NAME', name)};", f"if ({name}.failed()) return 2;"]
        return lines

    def _questions(self) -> dict[str, Any]:
        """The holes of the questions about a piece: each with the lines that no question before it has written."""
        done: set[str] = set()

        def lines(*roots: Expr) -> list[str]:
            of_piece = (x for x in self.lines.needed_ever(roots) if x.level not in (SCALAR, ROW))
            new = [x for x in of_piece if x.name not in done]
            done.update(x.name for x in new)
            return _constants(new)

        always, never, mixed, *disjoint = self.roots
        empty = [{"lines": lines(e), "condition": self.lines.values[e]} for e in (never, *disjoint)]
        outer = set(done)
        of_always = lines(always)
        done = outer  # names of the block are not seen below it
        return {**self.kinds(), "never": empty, "of_always": of_always, "of_mixed": lines(mixed)}


def _constants(lines: Iterable[Line]) -> list[str]:
    return [f"const {TYPES[line.node.type]} {line.name} = {line.text};" for line in lines]


# the names of `_CppBody.text`
_IDS = f"""{" ".join(HEAD)} {" ".join(SIZES)} word slice slices row rows columns b h q k q0 q1 k0 k1 tk single start
stop found overflow sweep frisket_plan int64_t auto bool char class const double float int long short signed struct
template this unsigned void while for if else return new delete switch case default do enum extern goto inline operator
private public register sizeof static typedef union using virtual volatile namespace throw try catch true false and or
not xor"""


def _operator(e: Expr, args: list[Text]) -> Text:
    row = ROWS.get(e.op)
    if row is None:
        raise LoweringError(f"`{e.op}` has no C++ form in a planner")
    infix = re.fullmatch(r"\{\} (\S+) \{\}", row)
    if infix is None and row[0] not in "-~!":
        listed = [a.text for a in args]
        return Text(row.replace("*", ", ".join(listed)).format(*listed))
    if infix is None:
        return Text(row[0] + args[0].inside(PREFIX + 1), PREFIX)
    symbol = infix[1]
    binds = LOOSE[symbol]
    # compilers warn of && inside ||, and of a comparison or a sum inside a bit operator
    within = LOOSE["=="] if symbol in ("&&", "||") else LOOSE["<<"] if symbol in "&|^" else binds
    joins = symbol in ASSOCIATIVE or symbol in ("&&", "||")
    parts = [args[0].inside(within), *(a.inside(within + (not joins)) for a in args[1:])]
    return Text(f" {symbol} ".join(parts), binds)
