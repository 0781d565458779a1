"""Prints a device planner on arrays as source text: one skeleton, one printer, an operator table per backend.

The text defines `plan_spans(b, h, q, k, sizes, scalars, tables, *, q_len, kv_len, block, room, records)`: bounds
[slices, rows, records, 4], count [slices, rows] and whether some row overflowed. `b h q k` are [slices, 1, 1], where
the slices begin; shapes depend on the lengths alone, and no value is looked at from Python.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from frisket.dsl.ir import SIZES, Expr, walk
from frisket.dsl.show import show
from frisket.dsl.types import FLOAT
from frisket.grammar.memo import memo
from frisket.lowering.kernels import jnp_expr as expr_jnp
from frisket.lowering.kernels import torch_mask_mod as expr_torch
from frisket.lowering.kernels.expr import COLUMN, PRECEDENCE, PREFIX, ROW, SCALAR, Printed, Text, machine, printed
from frisket.lowering.kernels.text import Names, Page, filled, parts

from .planner import SEARCHES, Planner

HEADERS, READING = parts(__package__, "headers"), parts(__package__, "reading")
SHARED, INTERVALS, PIECES = parts(__package__, "arrays").values()
WHEN = {"q0": ROW, "q1": ROW, "k0": COLUMN, "k1": COLUMN, "tk": COLUMN, "single": COLUMN}
_BY_LITERAL = {"floordiv": "//", "mod": "%", "shl": "<<", "shr": ">>"}
_JOINS = {"range_min": ("minimum", "maximum"), "range_max": ("maximum", "minimum")}


@dataclass(frozen=True, eq=False)
class Words:
    """The vocabulary of one backend: operators (rows of `kernels.expr`), the functions their text calls, and a header
    with the functions of `skeletons/headers.tpl`, in which `$int` and `$float` are dtypes."""

    name: str
    table: Mapping[str, str]
    prelude: Callable[[tuple[Expr, ...]], str]
    header: str
    dtypes: tuple[tuple[str, str], tuple[str, str]]  # (Int, Float), without and with 64-bit integers
    infinity: str


def _jnp_prelude(roots: tuple[Expr, ...]) -> str:
    constants, definitions = expr_jnp.prelude(*roots)
    return "\n".join([*constants, *definitions])


def _torch_prelude(roots: tuple[Expr, ...]) -> str:
    used = {n.op for n in walk(*roots)}
    rows = " ".join(expr_torch.TORCH.get(op, "") for op in used)
    own = ("minimum", "maximum")  # the header has them
    return "\n".join(text for name, text in expr_torch.PRELUDE.items() if f"{name}(" in rows and name not in own)


JNP = Words(
    "JAX", expr_jnp.JNP, _jnp_prelude, HEADERS["jnp"], (("jnp.int32", "jnp.float32"), ("jnp.int64", "jnp.float64")),
    "jnp.inf",
)  # fmt: skip
TORCH = Words("torch", expr_torch.TORCH, _torch_prelude, HEADERS["torch"], (("", ""), ("", "")), "math.inf")


def _plain(op: str, by: Expr) -> bool:
    """Whether a literal needs no guard: no division by zero, no shift out of range."""
    return by.op == "lit" and (0 <= by.name < 31 if op in ("shl", "shr") else by.name != 0)


@memo(group="sources")
def emit(plan: Planner, words: Words, wide: bool = False) -> str:
    """The source text of a planner. `wide`: positions and Floats have 64 bits."""
    roots = tuple(machine(e) for e in plan.roots)
    skeleton = "".join([*READING.values(), SHARED, INTERVALS, PIECES, words.header, _OWN])
    names = Names(re.findall(r"[A-Za-z_]\w*", skeleton))
    known = {n: names.new(n) for n in (*plan.scalars, *plan.tables)}
    body = _ArrayBody(plan, roots, words, names, known)
    inside = body.text()
    page = Page()
    page.line('"""Which tiles of keys each tile of queries reads: spans of', "", f"    {show(plan.mask)}", "")
    page.line("for tables that live on a device or are traced. Shapes are fixed, nothing is copied to the host.", '"""')
    whole, real = words.dtypes[wide]
    header = "\n" + filled(words.header, int=whole, float=real)
    used = SHARED + (INTERVALS if plan.seen else PIECES)
    reading = "\n".join(text for name, text in READING.items() if re.search(rf"\b{name}\(", inside))
    blocks = [header, words.prelude(roots), used, reading, inside]
    return str(page) + re.sub(r"\n{4,}", "\n\n\n", "\n\n".join(p.rstrip("\n") for p in blocks if p.strip()) + "\n")


# the names of `_ArrayBody.text`
_OWN = """plan_spans b h q k sizes scalars tables q_len kv_len block room records B H Q_LEN KV_LEN row bq bk rows
columns q0 q1 k0 k1 tk first last tiles seen hidden start stop kind width ask single whole always never
mixed finer overflow more"""


def of_sizes(e: Expr) -> bool:
    """Whether an Expr holds literals and extents of tables alone, which are numbers of Python."""
    tables = ("lookup", "segment", *SEARCHES, *_JOINS)
    return all(n.op in ("lit", "extent") or (n.args and n.op not in tables) for n in walk(e))


class _ArrayBody:
    """The text of the function `plan_spans`."""

    def __init__(
        self, plan: Planner, roots: tuple[Expr, ...], words: Words, names: Names, known: Mapping[str, str]
    ) -> None:
        self.plan, self.roots, self.words, self.names, self.known = plan, roots, words, names, known
        self.built: dict[str, str] = {}  # what is made of a table first: text -> name
        # an interval's k0 and k1 are the first and last key of the call, a piece's are its own
        when = {"q0": ROW, "q1": ROW} if plan.seen else WHEN
        self.lines = printed(roots, words.table, self.leaf, lambda e, at: names.numbered("x"), words.name, when=when)

    # -- leaves ---------------------------------------------------------------------------------------

    def leaf(self, e: Expr, args: list[Text]) -> Text | None:
        if e.op == "lit":
            return self._literal(e)
        if e.op == "var":
            return Text(e.name)
        if e.op == "param":
            return Text(self.known[e.name])
        if e.op == "extent":
            return Text(f"{self.known[e.name[0]]}.shape[{e.name[1]}]")
        if e.op in ("lookup", "segment") or e.op in SEARCHES:
            function = "look" if e.op == "lookup" else e.op
            return Text(f"{function}({', '.join([self.known[e.name], *(a.text for a in args)])})")
        if e.op in _BY_LITERAL and _plain(e.op, e.args[1]):
            symbol = _BY_LITERAL[e.op]
            binds = PRECEDENCE[symbol]
            return Text(f"{args[0].inside(binds)} {symbol} {args[1].text}", binds)
        if e.op == "where" and of_sizes(e.args[0]):
            asked, yes, no = (a.text for a in args)
            return Text(f"({yes} if {asked} else {no})")  # of sizes alone: torch.where takes no Bool of Python
        return self._range(e, args) if e.op in _JOINS else None

    def _literal(self, e: Expr) -> Text:
        if e.type is FLOAT and not math.isfinite(e.name):
            return Text("float('nan')" if math.isnan(e.name) else f"{'-' * (e.name < 0)}{self.words.infinity}", PREFIX)
        text = repr(e.name)
        return Text(text, PREFIX if text[0] == "-" else 10)

    def _range(self, e: Expr, args: list[Text]) -> Text:
        half = len(args) // 2
        lows, highs = args[:half], args[half:]
        table = self.known[e.name]
        ranging = [i for i in range(half) if e.args[i] is not e.args[half + i]]
        if not ranging:
            return Text(f"look({', '.join([table, *(a.text for a in lows)])})")
        fixed = [i for i in range(half) if i not in ranging]
        join, other = _JOINS[e.op]
        moved = f"front({table}, ({', '.join(map(str, ranging))},))" if half > 1 else table
        row = "0"
        if fixed:
            shape = self._made(moved, "turned")
            row = f"leading({', '.join([shape, *(lows[i].text for i in fixed)])})"
        wish = f"{table}_{'least' if e.op == 'range_min' else 'most'}"
        if len(ranging) == 1:
            i = ranging[0]
            held = self._made(f"line({moved}, {join}, {other})", wish)
            return Text(f"over({held}, {row}, {lows[i].text}, {highs[i].text})")
        held = self._made(f"plane({moved}, {join}, {len(ranging)})", wish)
        boxes = [", ".join(side[i].text for i in ranging) for side in (lows, highs)]
        return Text(f"within({held}, {row}, ({boxes[0]}), ({boxes[1]}))")

    def _made(self, text: str, wish: str) -> str:
        if text not in self.built:
            self.built[text] = self.names.new(wish)
        return self.built[text]

    # -- the function -----------------------------------------------------------------------------------

    def text(self) -> str:
        page = Page()
        head = "def plan_spans(b, h, q, k, sizes, scalars, tables, *, q_len, kv_len, block, room, records):"
        with page.block(head):
            self._begin(page)
            if self.plan.seen:
                page.line("k0, k1 = k, k + kv_len - 1")
            self._lines(page, self.lines, (SCALAR, ROW))
            (self._intervals if self.plan.seen else self._pieces)(page)
            page.line("bounds, count, more = records_of(start, kind, columns, records)")
            page.line(f"return bounds, count, {'more' if self.plan.seen else 'overflow | more'}")
        return str(page)

    def _begin(self, page: Page) -> None:
        used = {n.name for n in walk(*self.roots) if n.op == "var"}
        for i, name in enumerate(SIZES):
            if name in used:
                page.line(f"{name} = scalar(sizes[{i}], Int, q)")
        for name, type in self.plan.scalars.items():
            page.line(f'{self.known[name]} = scalar(scalars["{name}"], {type}, q)')
        page.line(*(f'{self.known[name]} = tables["{name}"]' for name in self.plan.tables))
        page.line(*(f"{name} = {text}" for text, name in self.built.items()))
        page.line(
            "bq, bk = block", "rows, columns = -(-q_len // bq), -(-kv_len // bk)", "row = arange(rows, q)[:, None]"
        )
        page.line("q0, q1 = q + row * bq, q + minimum(row * bq + bq, q_len) - 1")

    def _lines(self, page: Page, lines: Printed, levels: tuple[int, ...]) -> None:
        for line in lines.lines:
            if line.level in levels:
                page.line(f"{line.name} = {line.text}")

    def _intervals(self, page: Page) -> None:
        page.blank()
        with page.block("def tiles(first, last):"):
            page.line("first, last = q0 * 0 + first, q0 * 0 + last")
            page.line("start = clip((first - k0) // bk, 0, columns)")
            page.line("return start, where(last >= first, clip((last - k0) // bk + 1, 0, columns), start)")
        page.blank()
        for name, pairs in (("seen", self.plan.seen), ("hidden", self.plan.hidden)):
            with page.block(f"{name} = [", "]"):
                for pair in pairs:
                    first, last = (self.lines.values[machine(e)] for e in pair)
                    page.line(f"tiles({first}, {last}),")
        with page.block("if kv_len % bk:"):
            page.line("hidden.append((q0 * 0 + columns - 1, q0 * 0 + columns))  # cut tiles hold positions outside")
        with page.block("if q_len % bq:"):
            page.line("hidden.append((where(row == rows - 1, q0 * 0, columns), q0 * 0 + columns))")
        page.line("start, kind = swept(seen, hidden, columns)")

    def _pieces(self, page: Page) -> None:
        page.blank()
        with page.block("def ask(start):"):
            page.line('"""Kinds of the pieces of every row that begin at these tiles."""')
            page.line("stop = stops(start, columns)")
            page.line("k0, k1 = k + start * bk, k + minimum(stop * bk, kv_len) - 1")
            page.line("single, whole = stop - start == 1, (stop * bk <= kv_len) & (row * bq + bq <= q_len)")
            if any(n.op == "var" and n.name == "tk" for n in walk(*self.roots)):
                page.line("tk = where(stop == columns, kv_len - (columns - 1) * bk, bk)  # its narrowest tile")
            self._lines(page, self.lines, (COLUMN, ROW | COLUMN))
            always, never, mixed = (self.lines.values[e] for e in self.roots)
            page.line(f"always = {always}", f"never = {never}", f"mixed = {mixed}")
            page.line("kind = where(single | mixed, PARTIAL, OPEN)")
            page.line("kind = where(whole & always, FULL, kind)")
            page.line("return where((start >= columns) | never, EMPTY, kind)")
        page.blank()
        with page.block("def finer(width, start, kind):"):
            page.line("start, kind = split(*joined(start, kind, columns), width, columns)")
            page.line("return start, where(kind == OPEN, ask(start), kind)")
        page.blank()
        page.line("room = min(room, columns)")
        page.line("start = where(arange(room, q) == 0, q0 * 0, columns)  # one open piece a row")
        page.line("kind = where(start == 0, OPEN, EMPTY)")
        page.line("start, kind = repeated(finer, widths(columns, room), (start, kind))")
        page.line("overflow = (kind == OPEN).any()")
        page.line("start, kind = joined(start, where(kind == OPEN, PARTIAL, kind), columns)")
