"""Prints a device planner on arrays as source text: one skeleton, one printer, an operator table per backend.

The text defines `plan_spans(b, h, q, k, sizes, scalars, tables, *, q_len, kv_len, block, room, records)`: bounds
[slices, rows, records, 4], count [slices, rows] and whether some row overflowed. `b h q k` are [slices, 1, 1], where
the slices begin; shapes depend on the lengths alone, and no value is looked at from Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from frisket.dsl.ir import SIZES, Expr, walk
from frisket.dsl.show import show
from frisket.grammar.memo import memo
from frisket.lowering.kernels import jnp_expr as expr_jnp
from frisket.lowering.kernels import torch_mask_mod as expr_torch
from frisket.lowering.kernels.expr import COLUMN, ROW, SCALAR, machine, prelude_of, printed
from frisket.lowering.kernels.language import FLOORED, Language, Text
from frisket.lowering.kernels.text import Names, Page, filled, parts

from .planner import RANGES, SEARCHES, Planner

HEADERS, READING = parts(__package__, "headers"), parts(__package__, "reading")
SHARED, INTERVALS, PIECES = parts(__package__, "arrays").values()
PLAN_SPANS = parts(__package__, "plan_spans")
WHEN = {"q0": ROW, "q1": ROW, "k0": COLUMN, "k1": COLUMN, "tk": COLUMN, "single": COLUMN}
WISHES = {"range_min": "least", "range_max": "most"}
ENDS_OF_AXES = {"lookup": 1, **dict.fromkeys(RANGES, 2)}  # arguments for each axis: a range has two ends
_JOINS = {"range_min": ("minimum", "maximum"), "range_max": ("maximum", "minimum")}


@dataclass(frozen=True, eq=False)
class Words:
    """The vocabulary of one backend: its languages, and a header with the functions of `skeletons/headers.tpl`, in
    which `$int` and `$float` are dtypes."""

    languages: tuple[Language, Language]  # without and with 64-bit integers
    header: str
    dtypes: tuple[tuple[str, str], tuple[str, str]]  # (Int, Float) of these


JNP_WIDTHS = ("jnp.int32", "jnp.float32"), ("jnp.int64", "jnp.float64")
_JNP = [replace(x, operators=expr_jnp.JNP | FLOORED, nan="float('nan')") for x in (expr_jnp.LANGUAGE, expr_jnp.WIDE)]
JNP = Words((_JNP[0], _JNP[1]), HEADERS["jnp"], JNP_WIDTHS)
_IN_HEADER = ("minimum", "maximum")
_FUNCTIONS = {name: text for name, text in expr_torch.LANGUAGE.functions.items() if name not in _IN_HEADER}
_TORCH = replace(expr_torch.LANGUAGE, functions=_FUNCTIONS, nan="float('nan')")
TORCH = Words((_TORCH, _TORCH), HEADERS["torch"], (("", ""), ("", "")))


@memo(group="sources")
def emit(plan: Planner, words: Words, wide: bool = False) -> str:
    """The source text of a planner. `wide`: positions and Floats have 64 bits."""
    # the header's names are taken: a table of the user's may have one
    skeleton = "".join([*READING.values(), SHARED, INTERVALS, PIECES, words.header, _IDS])
    body = _ArrayBody(plan, language := words.languages[wide], Names(re.findall(r"[A-Za-z_]\w*", skeleton)))
    inside = body.text()
    page = Page()
    page.line('"""Which tiles of keys each tile of queries reads: spans of', "", f"    {show(plan.mask)}", "")
    page.line("for tables that live on a device or are traced. Shapes are fixed, nothing is copied to the host.", '"""')
    whole, real = words.dtypes[wide]
    header = "\n" + filled(words.header, int=whole, float=real)
    used = SHARED + (INTERVALS if plan.seen else PIECES)
    reading = "\n".join(text for name, text in READING.items() if re.search(rf"\b{name}\(", inside))
    constants, functions = prelude_of(body.roots, language)
    blocks = [header, "\n".join([*constants, *functions]), used, reading, inside]
    return str(page) + re.sub(r"\n{4,}", "\n\n\n", "\n\n".join(p.rstrip("\n") for p in blocks if p.strip()) + "\n")


# the names of `_ArrayBody.text`
_IDS = """plan_spans b h q k sizes scalars tables q_len kv_len block room records B H Q_LEN KV_LEN row bq bk rows
columns q0 q1 k0 k1 tk first last tiles seen hidden start stop kind width ask single whole always never
mixed finer overflow more"""


def of_sizes(e: Expr) -> bool:
    """Whether an Expr holds literals and extents of tables alone, which are numbers of Python."""
    tables = {"lookup", "segment", *SEARCHES, *_JOINS}
    return all(n.op in ("lit", "extent") or (n.args and n.op not in tables) for n in walk(e))


Leaf = Callable[[Expr, list[Text]], Text | None]


class PlannerBody:
    """The Exprs of a planner as lines of one language, and the names of what they read."""

    def __init__(self, plan: Planner, roots: Iterable[Expr], names: Names, language: Language) -> None:
        self.plan, self.names, self.roots = plan, names, tuple(machine(e) for e in roots)
        self.known = {n: names.new(n) for n in (*plan.scalars, *plan.tables)}
        self.free = {n.name for n in walk(*self.roots) if n.op == "var"}
        self.ranks = dict.fromkeys(plan.tables, 1)
        for n in walk(*self.roots):
            if n.op in ENDS_OF_AXES:
                self.ranks[n.name] = len(n.args) // ENDS_OF_AXES[n.op]
            elif n.op == "extent":
                self.ranks[n.name[0]] = max(self.ranks[n.name[0]], n.name[1] + 1)
        self.by_operator = self.leaves()
        self.built: dict[str, str] = {}  # what is made of a table first: text -> name
        # an interval's k0 and k1 are the first and last key of the call, a piece's are those of the piece
        when = {"q0": ROW, "q1": ROW} if plan.seen else WHEN
        self.lines = printed(self.roots, language, self.leaf, lambda e, at: names.numbered("x"), when=when)

    def leaves(self) -> dict[str, Leaf]:
        """The functions that write what no operator table can, by operator."""
        return {
            "var": lambda e, args: Text(e.name),
            "param": lambda e, args: Text(self.known[e.name]),
            "extent": lambda e, args: Text(self.size(*e.name)),
            **dict.fromkeys(("lookup", "segment", *SEARCHES), self.call),
        }

    def leaf(self, e: Expr, args: list[Text]) -> Text | None:
        """The text of what no operator table can write; None where a table writes it."""
        row = self.by_operator.get(e.op)
        return None if row is None else row(e, args)

    def size(self, source: str, axis: int) -> str:
        """The text of a size of a table."""
        raise NotImplementedError

    def call(self, e: Expr, args: Iterable[Text]) -> Text:
        """A call of the function that reads entries of a table."""
        name = "look" if e.op in ("lookup", *RANGES) else e.op
        return Text(f"{name}({', '.join([self.known[e.name], *(a.text for a in args)])})")

    def written(self, *levels: int) -> list[str]:
        """The lines of some levels."""
        return [f"{line.name} = {line.text}" for line in self.lines.lines if line.level in levels]

    def ends(self, pair: tuple[Expr, Expr]) -> list[str]:
        """The text of an interval's first and last key."""
        return [self.lines.values[machine(e)] for e in pair]

    def kinds(self) -> dict[str, str]:
        """The conditions that all of a piece is visible, that nothing is, and that some of it is hidden, as holes."""
        if self.plan.seen:  # intervals say it
            return {}
        return dict(zip(("always", "never", "mixed"), (self.lines.values[e] for e in self.roots)))

    def named(self, text: str, wish: str) -> str:
        """The name of what is made of a table first."""
        if text not in self.built:
            self.built[text] = self.names.new(wish)
        return self.built[text]


def sides(e: Expr) -> tuple[int, list[int], list[int]]:
    """(number of a table's axes, those that a range runs along, the others)."""
    half = len(e.args) // 2
    ranging = [i for i in range(half) if e.args[i] is not e.args[half + i]]
    return half, ranging, [i for i in range(half) if i not in ranging]


class _ArrayBody(PlannerBody):
    """The text of the function `plan_spans`."""

    def __init__(self, plan: Planner, language: Language, names: Names) -> None:
        super().__init__(plan, plan.roots, names, language)

    # -- leaves ---------------------------------------------------------------------------------------

    def leaves(self) -> dict[str, Leaf]:
        return super().leaves() | {"where": self._choice, **dict.fromkeys(_JOINS, self._range)}

    def size(self, source: str, axis: int) -> str:
        return f"{self.known[source]}.shape[{axis}]"

    def _choice(self, e: Expr, args: list[Text]) -> Text | None:
        condition, yes, no = (a.text for a in args)
        # of sizes alone: torch.where takes no Bool of Python
        return Text(f"({yes} if {condition} else {no})") if of_sizes(e.args[0]) else None

    def _range(self, e: Expr, args: list[Text]) -> Text:
        half, ranging, fixed = sides(e)
        lows, highs, table = args[:half], args[half:], self.known[e.name]
        if not ranging:
            return self.call(e, lows)
        join, other = _JOINS[e.op]
        # ranged axes come last, so that the others number the rows
        view = f"front({table}, ({', '.join(map(str, ranging))},))" if half > 1 else table
        row = "0"
        if fixed:
            shape = self.named(view, "turned")
            row = f"leading({', '.join([shape, *(lows[i].text for i in fixed)])})"
        # two ranges of one table share what is built for it, by its text
        wish = f"{table}_{WISHES[e.op]}"
        if len(ranging) == 1:
            i = ranging[0]
            line = self.named(f"line({view}, {join}, {other})", wish)
            return Text(f"over({line}, {row}, {lows[i].text}, {highs[i].text})")
        plane = self.named(f"plane({view}, {join}, {len(ranging)})", wish)
        boxes = [", ".join(side[i].text for i in ranging) for side in (lows, highs)]
        return Text(f"within({plane}, {row}, ({boxes[0]}), ({boxes[1]}))")

    # -- the function -----------------------------------------------------------------------------------

    def text(self) -> str:
        both = self.plan.seen, self.plan.hidden
        seen, hidden = ([f"tiles({', '.join(self.ends(pair))})," for pair in pairs] for pairs in both)
        return filled(
            PLAN_SPANS["array_function"],
            arguments=self._arguments(),
            intervals=bool(self.plan.seen),
            of_rows=self.written(SCALAR, ROW),
            seen=seen,
            hidden=hidden,
            tk="tk" in self.free,
            of_pieces=self.written(COLUMN, ROW | COLUMN),
            **self.kinds(),
        )

    def _arguments(self) -> list[str]:
        lines = [f"{name} = scalar(sizes[{i}], Int, q)" for i, name in enumerate(SIZES) if name in self.free]
        scalars, tables = self.plan.scalars.items(), self.plan.tables
        lines += [f'{self.known[name]} = scalar(scalars["{name}"], {type}, q)' for name, type in scalars]
        lines += [f'{self.known[name]} = tables["{name}"]' for name in tables]
        # before the rows: what is built of a table is the same for all of them
        return lines + [f"{name} = {text}" for text, name in self.built.items()]
