"""Writes the Triton forward kernel of a LoopPlan, as the text of a module.

One program works on one tile of queries of one head. It walks the records of its row: first the border tiles of
keys, with the mask as a predicate, then the full ones without. Of an expression, what depends on b, h and q is
worked out before the loops, what depends on k alone once per key, the rest per position.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import TRUE, Expr, renamed, uses
from frisket.dsl.show import show
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.plan import LoopPlan, Target

from . import expr, expr_triton
from .expr import COLUMN, POSITION, ROW, SCALAR, Text
from .text import Page
from .triton_parameters import Argument, Parameters, arguments, padded, taken

DTYPES = ("float32", "float16", "bfloat16")
EDGES = {"q0": "q_first", "q1": "q_last", "k0": "k_first", "k1": "k_last"}
LOAD_MASK = "\0"  # stands in a load where a border tile may restrict it


def emit(plan: LoopPlan, target: Target, head_dim: int, v_dim: int, dtype: str, group: int) -> str:
    """`emit(plan, target, 128, 128, "bfloat16", group=4)`: the module's text; the same input gives the same text.

    `dtype` is that of q, k and v; `group` query heads share a key head. The kernel is `attention_forward`; its
    parameters say by their names what they hold, and those the plan has no use for are absent.
    """
    if dtype not in DTYPES:
        raise LoweringError(
            f"the Triton kernel takes float32, float16 or bfloat16, not {dtype}; "
            "float64 runs on the CPU backends (aten, xla)"
        )
    for name, block in (("block_q", target.block_q), ("block_k", target.block_k)):
        if block < 16 or block & (block - 1):
            raise LoweringError(f"Triton tiles are powers of two from 16 on, {name} is {block}; take 64 or 128")
    return _Kernel(plan, target, head_dim, v_dim, dtype, group).module()


class _Kernel:
    def __init__(self, plan: LoopPlan, target: Target, head_dim: int, v_dim: int, dtype: str, group: int) -> None:
        self.plan, self.target, self.dtype, self.group = plan, target, dtype, group
        self.head_dim, self.v_dim = head_dim, v_dim
        self.e, self.v = ("d", "HEAD_DIM") if v_dim == head_dim else ("e", "V_DIM")  # along the values' axis
        self.wide = ".to(tl.int64)" if plan.int64 else ""
        self.precision = ', input_precision="ieee"' if dtype == "float32" else ""
        self.tabled = plan.mask is not None and plan.bounds is None
        self.mask = _conjuncts(plan.mask)
        self.score = [] if plan.score is None else [expr.machine(plan.score)]
        self.bounds = _bounds(plan)
        self.arguments = arguments(plan)
        self.names = taken(plan)
        roots = [*self.bounds.values(), *self.mask, *self.score]
        self.used = frozenset[str]().union(*map(uses, roots))
        self.printed = expr.printed(
            roots, expr_triton.TRITON, self._leaf, self._name, "Triton", inner=[*self.mask, *self.score]
        )
        self.parameters = Parameters(plan, self.used, self.tabled, bool(self.bounds))
        self.page = Page()

    # -- expressions ------------------------------------------------------------------------------

    def _leaf(self, node: Expr, args: list[Text]) -> Text | None:
        if node.op == "var":
            return Text(EDGES.get(node.name, node.name))
        if node.op == "param":
            return Text(self._argument(node).name)
        if node.op == "lookup":
            return self._lookup(node, args)
        return expr_triton.operator(node, args, self.plan.int64)

    def _argument(self, node: Expr) -> Argument:
        if node.name not in self.arguments:
            raise LoweringError(f"`{node.name}` is neither a slot nor a table of the plan; make it one first")
        return self.arguments[node.name]

    def _lookup(self, node: Expr, args: list[Text]) -> Text:
        table = self._argument(node)
        *outer, (index, size, stride) = zip(args, table.sizes, table.strides, strict=True)
        # The last axis counts in 32 bits: the launcher sees to it that it fits.
        steps = [table.name, *(f"step({i.text}, {n}, {by})" for i, n, by in outer)]
        load = f"tl.load({' + '.join(steps)} + clamp({index.text}, {size}) * {stride}{LOAD_MASK})"
        if node.type is BOOL:
            return Text(f"{load} != 0", expr.COMPARISON)
        if node.type is FLOAT:
            return Text(f"{load}.to(tl.float32)")
        return Text(f"{load}.to(tl.int64)" if self.plan.int64 else load)

    def _name(self, node: Expr, level: int) -> str:
        """`doc_q` for `doc[q]`, otherwise a number behind a word that says how often it is worked out."""
        if node.op == "lookup":
            return self.names.new(self._called(node))
        return self.names.numbered({SCALAR: "fixed", ROW: "row", COLUMN: "column", POSITION: "x"}[level])

    def _called(self, node: Expr) -> str:
        if node.op == "var":
            return str(node.name)
        if node.op != "lookup":
            return "at"
        return "_".join([self.arguments[node.name].name, *map(self._called, node.args)])

    def _lines(self, roots: list[Expr], level: int, written: set[str], load_mask: str = "") -> None:
        """What the roots need of this level and is not written yet."""
        mask = f", mask={load_mask}" if load_mask else ""
        for line in self.printed.needed(roots, level):
            if line.name not in written:
                written.add(line.name)
                text = f"{line.name} = {line.text.replace(LOAD_MASK, mask)}"
                self.page.line(_wrapped(text) if line.node.op == "lookup" else text)

    def _value(self, root: Expr) -> str:
        return self.printed.values[root].replace(LOAD_MASK, "")

    # -- the module -------------------------------------------------------------------------------

    def module(self) -> str:
        with self.page.block(self.parameters.signature()):
            self._place()
            self._prologue()
            with self._records():
                self._border_tiles()
                self._full_tiles()
            self._epilogue()
        kernel = str(self.page)
        prelude = expr_triton.prelude(kernel, self.dtype, self.plan.int64)
        head = Page()
        self._header(head)
        needed = expr_triton.words(prelude + kernel)
        for name, value in self._constants().items():
            if name in needed:
                head.line(f"{name} = tl.constexpr({value})")
        return f"{head}{prelude}\n\n{kernel}"

    def _header(self, head: Page) -> None:
        t, dims = self.target, {self.head_dim, self.v_dim}
        size = str(self.head_dim) if len(dims) == 1 else f"{self.head_dim} (values {self.v_dim})"
        group = f", {self.group} query heads to a key head" if self.group > 1 else ""
        head.line(
            '"""Attention forward in Triton, written by frisket for',
            "",
            *(f"    {line}".rstrip() for line in self._shown().split("\n")),
            "",
            f"Head size {size}, {self.dtype}{group}; tiles of {t.block_q} queries by {t.block_k} keys.",
            f"Launch with grid (q tiles, batch * heads), num_warps={t.num_warps}, num_stages={t.num_stages}.",
            '"""',
            "",
            "import triton",
            "import triton.language as tl",
            "",
        )

    def _constants(self) -> dict[str, object]:
        return {
            "BLOCK_Q": self.target.block_q, "BLOCK_K": self.target.block_k, "GROUP": self.group,
            "HEAD_DIM": self.head_dim, "V_DIM": self.v_dim,
            "DIM": padded(self.head_dim), "DIM_V": padded(self.v_dim),
            "LOG2E": 1.4426950408889634, "LN2": 0.6931471805599453,
            "LOWEST": "-3.4028234663852886e38", "INFINITY": 'float("inf")',
        }  # fmt: skip

    # -- before the loops ---------------------------------------------------------------------------

    def _place(self) -> None:
        line = self.page.line
        line("batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads")
        ordered = self.target.order == "longest-first"
        if self.tabled:
            line("distinct = tl.load(SliceOf + tl.program_id(1)) * tl.num_programs(0)")
            row = "tl.load(Order + distinct + tl.program_id(0))" if ordered else "tl.program_id(0)"
        else:
            row = "tl.num_programs(0) - 1 - tl.program_id(0)" if ordered else "tl.program_id(0)"
        line(f"row = {row}" + ("  # longest first" if ordered else ""))
        line(
            "start = row * BLOCK_Q",
            "rows = tl.arange(0, BLOCK_Q)",
            "columns = tl.arange(0, BLOCK_K)",
            "d = tl.arange(0, DIM)",
        )
        if self.v_dim != self.head_dim:
            line("e = tl.arange(0, DIM_V)")
        kv = "head"
        if self.group > 1:
            line("kv_head = head // GROUP")
            kv = "kv_head"
        self.page.blank()
        self.page.comment("Offsets are 64 bits where they are scalars, 32 within a tile.")
        batch = "batch.to(tl.int64)"
        line(f"Q += {batch} * stride_qb + head.to(tl.int64) * stride_qh + start.to(tl.int64) * stride_qs")
        line(f"K += {batch} * stride_kb + {kv}.to(tl.int64) * stride_kh")
        line(f"V += {batch} * stride_vb + {kv}.to(tl.int64) * stride_vh")
        line("key_at = columns[None, :] * stride_ks + d[:, None] * stride_kd")
        line(f"value_at = columns[:, None] * stride_vs + {self.e}[None, :] * stride_vd")
        line("present = start + rows < q_len")
        mask = _masked("present[:, None]", self._head_pad("d[None, :]"))
        line(_wrapped(f"query = tl.load(Q + rows[:, None] * stride_qs + d[None, :] * stride_qd{mask})"))

    def _head_pad(self, index: str) -> str:
        return "" if padded(self.head_dim) == self.head_dim else f"{index} < HEAD_DIM"

    def _value_pad(self) -> str:
        return "" if padded(self.v_dim) == self.v_dim else f"{self.e}[None, :] < {self.v}"

    def _prologue(self) -> None:
        line = self.page.line
        self.page.blank()
        offset = [n for n in "qk" if n in self.parameters.origins()]
        if offset:
            with self.page.block("if ORIGIN_PER_BATCH:"):
                for n in offset:
                    line(f"{n}_origin = tl.load({n}_origin + batch)")
        if self.wide:
            for n in self.parameters.sizes():
                line(f"{n} = tl.cast({n}, tl.int64)")
        for slot in self.plan.slots:
            n = self.arguments[slot.name].name
            if slot.type is FLOAT or (self.wide and slot.type is INT):
                line(f"{n} = tl.cast({n}, {'tl.float32' if slot.type is FLOAT else 'tl.int64'})")
        if "b" in self.used:
            line(f"b = {self._widened('b_origin + batch')}")
        if "h" in self.used:
            line(f"h = {self._widened('h_origin + head')}")
        if "q" in self.used:
            line(f"q = (q_origin + start + rows)[:, None]{self.wide}")
        self.hoisted: set[str] = set()
        positions = [*self.mask, *self.score]
        if self.bounds:
            self._closed_form()
            self.page.blank()
        for level in (SCALAR, ROW):
            self._lines(positions, level, self.hoisted)
        if self.plan.score is None:
            line("unit = scale * LOG2E")
        line(
            "top = tl.full([BLOCK_Q], LOWEST, tl.float32)",
            "total = tl.zeros([BLOCK_Q], tl.float32)",
            f"acc = tl.zeros([BLOCK_Q, {'DIM' if self.e == 'd' else 'DIM_V'}], tl.float32)",
        )

    def _widened(self, text: str) -> str:
        return f"({text}){self.wide}" if self.wide else text

    def _closed_form(self) -> None:
        line = self.page.line
        self.page.blank()
        line(
            "q_first = q_origin + start",
            "q_last = q_origin + tl.minimum(start + BLOCK_Q, q_len) - 1",
            "k_first = k_origin",
            "k_last = k_origin + kv_len - 1",
        )
        roots = list(self.bounds.values())
        self._lines(roots, SCALAR, self.hoisted)
        self.page.comment("Some query of the tile sees keys first..last, every one sees full_first..full_last.")
        for name, root in self.bounds.items():
            clamp = "tl.maximum({}, k_first)" if "first" in name else "tl.minimum({}, k_last)"
            line(f"{name} = {clamp.format(self._value(root))} - k_first")
        line(
            "hi = (tl.maximum(last, -1) + BLOCK_K) // BLOCK_K",
            "lo = tl.minimum(first // BLOCK_K, hi)",
            "full_lo = tl.minimum((tl.minimum(full_first, kv_len) + BLOCK_K - 1) // BLOCK_K, hi)",
            "full_lo = tl.maximum(full_lo, lo)",
            "full_hi = tl.minimum(tl.maximum(full_last + 1, 0) // BLOCK_K, hi)",
            "full_hi = tl.maximum(full_hi, full_lo)",
        )

    def _shown(self) -> str:
        """The text of the plan and what its slots stand for, fit for a docstring."""
        lines = [self.plan.text or "every key visible, plain scores"]
        for s in self.plan.slots:
            name = self.arguments[s.name].name
            if s.source != name:
                lines.append(f"{name} = {s.source if s.value is None else s.value}")
        return "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")

    def _quote(self, e: Expr) -> None:
        """The expression in the language, with the names the kernel has for its slots and tables."""
        named = {n: a.name for n, a in self.arguments.items()}
        shown = show(renamed(e, named), known={a.name for a in self.arguments.values()})
        self.page.comment("\n".join(textwrap.wrap(shown, 100, break_long_words=False)))

    # -- the loops ----------------------------------------------------------------------------------

    @contextmanager
    def _records(self) -> Iterator[None]:
        line = self.page.line
        self.page.blank()
        if not self.tabled:
            if not self.bounds:  # no mask: all that is not full is the ragged edge
                line("lo, full_lo = 0, 0")
                line("full_hi, hi = kv_len // BLOCK_K, tl.cdiv(kv_len, BLOCK_K)")
            yield
            return
        line("entry = distinct + row")
        with self.page.block("for i in range(tl.load(Count + entry)):"):
            line("record = Spans + (entry.to(tl.int64) * records + i) * 4")
            line("lo, full_lo = tl.load(record), tl.load(record + 1)")
            line("full_hi, hi = tl.load(record + 2), tl.load(record + 3)")
            yield

    def _border_tiles(self) -> None:
        line = self.page.line
        self.page.comment("Border tiles, before and behind the full ones: the mask is a predicate.")
        with self.page.block("for j in range(lo, hi - full_hi + full_lo):"):
            line("tile = tl.where(j < full_lo, j, j - full_lo + full_hi)")
            line("inside = tile * BLOCK_K + columns < kv_len")
            self._scores("inside")
            written = set(self.hoisted)
            self._column(written, [*self.mask, *self.score])
            self._lines(self.mask, POSITION, written)
            if self.plan.mask is not None:
                self._quote(self.plan.mask)
            line("visible = inside[None, :]")
            for term in self.mask:
                line(f"visible &= {self._value(term)}")
            self._modify(written, "visible")
            line("score = tl.where(visible, score, -INFINITY)")
            self._accumulate("inside")

    def _full_tiles(self) -> None:
        self.page.comment("Full tiles: every position is visible.")
        with self.page.block("for tile in range(full_lo, full_hi):"):
            self._scores()
            written = set(self.hoisted)
            self._column(written, self.score)
            self._modify(written)
            self._accumulate()

    def _scores(self, inside: str = "") -> None:
        line = self.page.line
        line("at = tl.cast(tile * BLOCK_K, tl.int64)")
        mask = _masked(inside and f"{inside}[None, :]", self._head_pad("d[:, None]"))
        line(f"keys = tl.load(K + at * stride_ks + key_at{mask})")
        line(f"score = tl.dot(query, keys{self.precision})" + ("" if not self.score else " * scale"))

    def _column(self, written: set[str], roots: list[Expr]) -> None:
        if any("k" in uses(r) for r in roots):
            self.page.line(f"k = (k_origin + tile * BLOCK_K + columns)[None, :]{self.wide}")
        self._lines(roots, COLUMN, written)

    def _modify(self, written: set[str], load_mask: str = "") -> None:
        if self.plan.score is None:
            return
        self._quote(self.plan.score)
        self._lines(self.score, POSITION, written, load_mask)
        self.page.line(f"score = {self._value(self.score[0])}")

    def _accumulate(self, inside: str = "") -> None:
        line = self.page.line
        if self.score:
            line("peak = tl.maximum(top, tl.max(score, 1))")
            line("p = tl.exp2((score - peak[:, None]) * LOG2E)")
            line("rescale = tl.exp2((top - peak) * LOG2E)")
        else:
            line("peak = tl.maximum(top, tl.max(score, 1) * unit)")
            line("p = tl.exp2(score * unit - peak[:, None])")
            line("rescale = tl.exp2(top - peak)")
        mask = _masked(inside and f"{inside}[:, None]", self._value_pad())
        line(f"values = tl.load(V + at * stride_vs + value_at{mask})")
        line("total = total * rescale + tl.sum(p, 1)")
        line("acc = acc * rescale[:, None]")
        line(f"acc = tl.dot(p.to(values.dtype), values, acc{self.precision})")
        line("top = peak")

    def _epilogue(self) -> None:
        line = self.page.line
        self.page.blank()
        log = "top + tl.log(total)" if self.score else "(top + tl.log2(total)) * LN2"
        if self.plan.guard:
            self.page.comment("A row without a visible key gives 0, and lse -inf.")
            line("empty = total == 0.0")
            line("total = tl.where(empty, 1.0, total)")
            line(f"lse = tl.where(empty, -INFINITY, {log})")
        else:
            line(f"lse = {log}")
        line("out = acc * (1.0 / total)[:, None]")
        line(
            "Out += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + start.to(tl.int64) * stride_os",
            f"out_at = rows[:, None] * stride_os + {self.e}[None, :] * stride_od",
            f"tl.store(Out + out_at, out.to(query.dtype){_masked('present[:, None]', self._value_pad(), other='')})",
            "Lse += tl.program_id(1).to(tl.int64) * q_len + start",
            "tl.store(Lse + rows, lse, mask=present)",
        )


def _conjuncts(mask: Expr | None) -> list[Expr]:
    if mask is None:
        return []
    mask = expr.machine(mask)
    return list(mask.args) if mask.op == "and" else [] if mask is TRUE else [mask]


def _bounds(plan: LoopPlan) -> dict[str, Expr]:
    if plan.bounds is None or plan.mask is None:
        return {}
    names = ("first", "full_first", "full_last", "last")
    return {n: expr.machine(getattr(plan.bounds, n)) for n in names}


def _masked(*terms: str, other: str = ", other=0.0") -> str:
    """The mask of a load, or with no `other` of a store; an empty term asks for nothing."""
    terms = tuple(t for t in terms if t)
    joined = " & ".join(f"({t})" if "<" in t and len(terms) > 1 else t for t in terms)
    return f", mask={joined}{other}" if joined else ""


def _wrapped(load: str) -> str:
    """A long load over several lines: its address, then its mask."""
    found = re.fullmatch(r"(.*?tl\.load\()(.*?)(\)(?:\.to\(tl\.\w+\)| != 0)?)", load)
    if len(load) < 106 or found is None:
        return load
    head, inside, tail = found.groups()
    return "\n".join([head, f"    {inside.replace(', mask=', f',{chr(10)}    mask=')},", tail])
