"""Prints a device planner in Triton: the pieces, questions and records of `planner.arrays`, a few rows a program.

The text defines `plan_spans`, and the kernels that prepare what it reads. These are `lines`, `windows` and `halves` for
the least and greatest entries of tables over ranges, `longest_first` for the order of its rows. `PlannerText` says what
`plan_spans` is called with.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace

from frisket.dsl.ir import SIZES, Expr
from frisket.dsl.show import show
from frisket.dsl.types import BOOL, FLOAT, INT, Type
from frisket.grammar.memo import memo
from frisket.lowering.kernels.expr import COLUMN, POSITION, ROW, SCALAR
from frisket.lowering.kernels.language import COMPARISON, Text
from frisket.lowering.kernels.text import Names, Page, filled, parts, words
from frisket.lowering.kernels.triton import expr as expr_triton

from .arrays import PLAN_SPANS, WISHES, Leaf, PlannerBody, sides
from .cpp import table_types
from .planner import Planner

FINE, GRAIN = 4096, 32
KERNELS, FUNCTIONS = parts(__package__, "tables"), parts(__package__, "functions")
HEADER = filled(KERNELS.pop("header"), fine=FINE, grain=GRAIN)
CHANGED = {"float": "{}.to(tl.float64)", "tanh": "real_tanh({})", "sqrt": "tl.sqrt({})"}
CHANGED |= {"rsqrt": "(1.0 / tl.sqrt({}))"}


def _number(value: bool | int | float) -> str:
    if not isinstance(value, float):
        return repr(value)
    text = repr(value) if math.isfinite(value) else f'float("{value}")'
    return f"tl.full((), {text}, tl.float64)"  # a bare literal would be float32


WIDE = expr_triton.language(int64=True)
LANGUAGE = replace(WIDE, operators={**WIDE.operators, **CHANGED}, number=_number, infinity="")
TYPES = {INT: "tl.int64", FLOAT: "tl.float64", BOOL: "tl.int1"}
_EXTREMES = {"min": "least", "max": "most"}  # of Floats: functions of the prelude
HEAD = tuple("Bounds Count Left Work Place line_count rows q_len kv_len bq bk room records".split())


@dataclass(frozen=True)
class TablePointer:
    """A table whose entries and sizes are read: the name of its pointer, sizes and strides; some may be unused."""

    source: str
    type: Type
    name: str
    sizes: tuple[str, ...]
    strides: tuple[str, ...]


@dataclass(frozen=True)
class Ranged:
    """The range tables of one table: least and greatest entries over ranges of `axes`, by the names of pointers.
    `sizes` are the sizes of the axes, and the other axes, in order, number its `rows`."""

    source: str
    type: Type
    axes: tuple[int, ...]
    least: str
    most: str
    rows: str
    sizes: tuple[str, ...]


@dataclass(frozen=True)
class PlannerText:
    """The text of a planner's kernels, and the parameters of `plan_spans` besides `HEAD`, in their order: sizes of
    SIZES, scalars as (user's name, type), tables, ranges. Then ROWS and PIECES, how many it holds at once."""

    text: str
    sizes: tuple[str, ...]
    scalars: tuple[tuple[str, Type], ...]
    entries: tuple[TablePointer, ...]
    ranges: tuple[Ranged, ...]
    pieces: int  # the least there have to be, where the mask says; 0: as many as there is room for


@memo(group="sources")
def emit(plan: Planner) -> PlannerText:
    """The Triton kernels of a planner."""
    return _TritonBody(plan).printed()


class _TritonBody(PlannerBody):
    def __init__(self, plan: Planner) -> None:
        self.types = table_types(plan)
        self.entries: dict[str, TablePointer] = {}
        self.ranges: dict[tuple[str, tuple[int, ...]], Ranged] = {}
        super().__init__(plan, plan.roots, Names(_reserved_names()), LANGUAGE)

    # -- expressions --------------------------------------------------------------------------------------

    def leaves(self) -> dict[str, Leaf]:
        rows = dict.fromkeys(WISHES, self._range) | {"lookup": self._look}
        return super().leaves() | rows | dict.fromkeys(_EXTREMES, self._extreme)

    def leaf(self, e: Expr, args: list[Text]) -> Text | None:
        return super().leaf(e, args) or expr_triton.operator(e, args)

    def size(self, source: str, axis: int) -> str:
        return self.entry(source).sizes[axis]

    def _extreme(self, e: Expr, args: list[Text]) -> Text | None:
        return Text(f"{_EXTREMES[e.op]}({args[0].text}, {args[1].text})") if e.type is FLOAT else None

    def call(self, e: Expr, args: Iterable[Text]) -> Text:
        t = self.entry(e.name)
        return Text(f"{e.op}({', '.join([t.name, t.sizes[0], t.strides[0], *(a.text for a in args)])})")

    def entry(self, source: str) -> TablePointer:
        if source not in self.entries:
            # made at the first read: an argument that no line reads would only fill the call
            name, n = self.known[source], self.ranks[source]
            sizes, strides = (
                tuple(self.names.new(f"{name}_{w}{i}" if n > 1 else f"{name}_{w}") for i in range(n))
                for w in ("size", "stride")
            )
            self.entries[source] = TablePointer(source, self.types[source], name, sizes, strides)
        return self.entries[source]

    def _look(self, e: Expr, args: list[Text]) -> Text:
        t = self.entry(e.name)
        steps = [f"step({i.text}, {n}, {by})" for i, n, by in zip(args, t.sizes, t.strides, strict=True)]
        return _typed(f"tl.load({' + '.join([t.name, *steps])})", e)

    def _range(self, e: Expr, args: list[Text]) -> Text:
        half, axes, fixed = sides(e)  # axes with equal ends need no range: they choose a row of the range table
        if not axes:
            return self._look(e, args[:half])
        ranged, wish, row = self._ranged(e, tuple(axes)), WISHES[e.op], "0"
        pointer, most = getattr(ranged, wish), wish == "most"
        for i in fixed:  # as the rows of the table are numbered
            size = self.entry(e.name).sizes[i]
            # a bound may lie outside the table, where the mask reads nothing
            index = f"clip({args[i].text}, {size} - 1)"
            row = index if row == "0" else f"({row}) * {size} + {index}"
        lows, highs = ([side[i].text for i in axes] for side in (args[:half], args[half:]))
        if len(axes) == 1:
            ends = f"{row}, {lows[0]}, {highs[0]}"
            return _typed(f"over({pointer}, {ranged.rows}, {ranged.sizes[0]}, {ends}, {most})", e)
        box = ", ".join([*ranged.sizes, *lows, *highs])
        return _typed(f"within{len(axes)}({pointer}, {row}, {box}, {most})", e)

    def _ranged(self, e: Expr, axes: tuple[int, ...]) -> Ranged:
        key = e.name, axes  # the least and the greatest entries of one table are built together
        if key not in self.ranges:
            name = self.known[e.name]
            sizes = tuple(self.names.new(f"{name}_length{i if len(axes) > 1 else ''}") for i in axes)
            least, most, rows = (self.names.new(f"{name}_{w}") for w in ("least", "most", "rows"))
            self.ranges[key] = Ranged(e.name, e.type, axes, least, most, rows, sizes)
        return self.ranges[key]

    # -- the kernel ---------------------------------------------------------------------------------------

    def printed(self) -> PlannerText:
        sizes = tuple(n for n in SIZES if n in self.free)
        ranges = tuple(self.ranges.values())
        ends = 2 * (len(self.plan.seen) + len(self.plan.hidden) + 2) + 1
        # tl.sort takes powers of two
        pieces = 1 << (ends - 1).bit_length() if self.plan.seen else 0
        names = [*HEAD, *sizes, *(self.known[n] for n in self.plan.scalars)]
        for t in self.entries.values():
            names += [t.name, *t.sizes, *t.strides]
        for r in ranges:
            names += [r.least, r.most, r.rows, *r.sizes]
        intervals, hidden = self._intervals(), len(self.plan.hidden)
        cut = [f"hidden{hidden + i}" for i in range(2)]
        body = filled(
            PLAN_SPANS["triton_kernel"],
            names=_listed([f'"{n}"' for n in names]),
            parameters=_listed([*names, "ROWS: tl.constexpr", "PIECES: tl.constexpr"]),
            arguments=[*(f"{n} = {n}.to(tl.int64)" for n in sizes), *self._scalars()],
            of_rows=self.written(SCALAR, ROW),
            intervals=intervals,
            cut_by_keys=cut[0],
            cut_by_queries=cut[1],
            ends=[
                {"at": 2 * i + 1, "after": 2 * i + 2, "name": name, "kind": name.rstrip("0123456789")}
                for i, name in enumerate([*(x["name"] for x in intervals), *cut])
            ],
            tk="tk" in self.free,
            of_pieces=self.written(COLUMN, POSITION),
            **self.kinds(),
        )
        scalars, entries = tuple(self.plan.scalars.items()), tuple(self.entries.values())
        return PlannerText(self._module(body), sizes, scalars, entries, ranges, pieces)

    def _scalars(self) -> list[str]:
        """The lines that read the scalars."""
        lines = []
        for name, type in self.plan.scalars.items():
            known = self.known[name]
            # a tensor on the device or a number of Python: the text is the same for both
            value = f"number({known}, {TYPES[INT if type is BOOL else type]})"
            lines.append(f"{known} = {value}{' != 0' if type is BOOL else ''}")
        return lines

    def _intervals(self) -> list[dict[str, str]]:
        """The intervals of keys, none where the planner splits pieces: a name, and the text of the ends."""
        kinds = {"seen": self.plan.seen, "hidden": self.plan.hidden} if self.plan.seen else {}
        return [
            {"name": f"{kind}{i}", **dict(zip(("first", "last"), self.ends(pair), strict=True))}
            for kind, pairs in kinds.items()
            for i, pair in enumerate(pairs)
        ]

    def _module(self, body: str) -> str:
        head = Page()
        head.line('"""Which tiles of keys each tile of queries reads: spans of', "")
        # a backslash in a docstring would escape what follows
        head.line(*(f"    {line}" for line in show(self.plan.mask).replace("\\", "\\\\").split("\n")), "")
        head.line("for tables on the device. Shapes are fixed, nothing is copied to the host.", '"""')
        ranges = self.ranges.values()
        lines, halves = any(len(r.axes) == 1 for r in ranges), any(len(r.axes) > 1 for r in ranges)
        shared = "\n\n".join([KERNELS["lines"]] * lines + [KERNELS["halves"]] * halves + [KERNELS["order"]])
        functions = _functions(shared + body)
        constants = 'INFINITY = tl.constexpr(float("inf"))\n' if "INFINITY" in words(functions) else ""
        text = "\n\n\n".join(x.strip("\n") for x in (functions, shared, body) if x.strip())
        return re.sub(r"\n{4,}", "\n\n\n", f"{head}\n{HEADER.strip()}\n{constants}\n\n{text}\n")


def _typed(text: str, e: Expr) -> Text:
    """An entry of a table of any dtype; entries of Bool tables are bytes."""
    return Text(f"{text} != 0", COMPARISON) if e.type is BOOL else Text(f"{text}.to({TYPES[e.type]})")


def _listed(names: list[str]) -> list[str]:
    """Names separated by commas, a few to a line."""
    return [f"    {line}" for line in textwrap.wrap(", ".join(names) + ",", 108, break_long_words=False)]


def _functions(text: str) -> str:
    """The functions that a text needs, with the functions they need."""
    # written out for each number of axes: a function of Triton takes a fixed number of arguments
    within = [_within(int(n)) for n in sorted(set(re.findall(r"\bwithin(\d+)\(", text)))]
    text += "".join(within)
    used: dict[str, str] = {}
    while more := {n: x for n, x in FUNCTIONS.items() if n not in used and f"{n}(" in text}:
        used |= more
        text += "".join(more.values())
    mine = [x for n, x in FUNCTIONS.items() if n in used]
    theirs = expr_triton.prelude(text, WIDE)
    return "\n\n\n".join(x.strip("\n") for x in (theirs, *mine, *within) if x.strip())


def _within(axes: int) -> str:
    """The join over a box of this many axes: of the blocks at its corners."""
    each = range(axes)
    names = ", ".join(f"{n}{i}" for n in ("size", "lo", "hi") for i in each)
    lines = ["", "@triton.jit", f"def within{axes}(Halves, row, {names}, MOST: tl.constexpr):"]
    lines += ['    """The join of the entries of a box, ends included, or of a box that covers it."""']
    for i in each:
        lines.append(f"    a{i}, z{i}, room = along(size{i}, lo{i}, hi{i})")
        places = [f"row{c}" for c in range(1 << i)] if i else ["row"]
        # from the last on: row{c} is overwritten by what is made of it
        for c, place in reversed(list(enumerate(places))):
            lines.append(f"    row{2 * c + 1} = {place} * room + z{i}")
            lines.append(f"    row{2 * c} = {place} * room + a{i}")
    lines.append("    found = tl.load(Halves + row0)")
    lines += [f"    found = join(found, tl.load(Halves + row{c}), MOST)" for c in range(1, 1 << axes)]
    return "\n".join([*lines, "    return found", ""])


def _reserved_names() -> set[str]:
    shared = "".join([HEADER, *FUNCTIONS.values(), *KERNELS.values(), _IDS])
    within = {f"within{n}" for n in range(2, 65)}
    return {*WIDE.reserved, *words(shared), *HEAD, *SIZES, *within, "ROWS", "PIECES"}


# the names of `plan_spans`
_IDS = """plan_spans line inside at_slice row b h q k columns end slot q0 q1 k0 k1 tk starts seen hidden cut kind pieces
left first last room half width coarse start stop single whole open lacking number INFINITY"""
