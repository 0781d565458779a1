"""The writer of all Triton kernels of a LoopPlan: expressions, lookups, and the loop over the tiles of a row.

A program owns one row of tiles: a tile of queries and records of key tiles, or, swapped, a tile of keys and records of
query tiles. Parts of an expression that depend on b, h and the coordinate of this tile are computed before the loop.
Parts that depend on the other coordinate alone are computed once per tile of the loop, the rest per position.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import COUNT, SIZES, TOTAL, TRUE, Expr, renamed, transform, uses, var
from frisket.dsl.show import show
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.lowering.analysis.intervals import K0, K1
from frisket.lowering.analysis.solve import Ends
from frisket.lowering.architectures import H100, architecture_of
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import COLUMN, LEVELS, POSITION, ROW, SCALAR, levels
from frisket.lowering.kernels.features import TRITON, Features, missing
from frisket.lowering.kernels.language import COMPARISON, PRECEDENCE, Text
from frisket.lowering.kernels.legalise import legalise
from frisket.lowering.kernels.text import fields, filled
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.kernels.units import ALONG, GATHERED, Q_LINE, START, by_distance, largest, last_factor, machine
from frisket.lowering.plan import LoopPlan

from . import expr as expr_triton
from .module import Argument, Dims, TritonKernel, arguments, reserved_names, rows_of_tables

QUERIES = frozenset(("q", "q0", "q1"))
EDGES = {"q0": "q_first", "q1": "q_last", "k0": "k_first", "k1": "k_last"}
LINE = 105  # of a load, before its indentation
PAGE, TOKEN = var("page"), var("token")  # of a tile's keys: their page, and their places in it, which a kernel knows
Q_ROW, K_TILE = var("q_row"), var("k_tile")  # the query of each row, along one axis, and the first key of a tile
LOAD_MASK = "\0"  # stands in a load where a partial tile may restrict it


def axes_of(target: Target) -> tuple[int, int]:
    """The axes of the grid that count rows of tiles and heads. Programs start in the order of the first axis: there
    heads follow one another where the longest row of each comes before the second longest of any."""
    return (1, 0) if target.order == "longest-of-all-first" else (0, 1)


@dataclass(frozen=True)
class KernelTraits:
    """The choices by which the text of one kernel of a plan differs from that of another kernel."""

    name: str = "attention_forward"
    numbers: tuple[str, ...] = ("heads", "q_len", "kv_len")  # integers of the kernel's own
    swapped: bool = False  # the program's own tile is one of keys: tensors are [keys, queries]
    listed: bool = False  # a table lists the programs: their rows, and their parts of them
    parted: bool = False  # a program may have a part of the tiles of its row alone
    balanced: bool = False  # each row has parts in proportion to the tiles that it sees
    pack: int = 1  # heads that a tile holds, as rows of it
    bounded: bool = True  # the ends of what a row sees are computed once, before its tiles
    words: bool = False  # partial tiles test bits of 32 keys, where a row sees an interval
    weighs: bool = True  # the modified scores of a tile are computed, or its weights
    gathers: bool = True  # tables by distance are one vector a tile, out of which positions take their entries
    selects: bool = False  # values by distance are 0 where the mask hides the position
    shown: str = "inside[None, :]"  # the positions of a partial tile that exist
    longest: int = LINE  # of a load that stays on one line

    @property
    def packs(self) -> bool:
        """Whether a tile holds several heads."""
        return self.pack > 1

    @property
    def levels(self) -> Mapping[str, int]:
        """When the coordinates are known, for a tile of queries."""
        of_kernel = {PAGE.name: COLUMN, TOKEN.name: COLUMN, Q_ROW.name: ROW, K_TILE.name: COLUMN}
        of_kernel |= {TOTAL.name: POSITION, COUNT.name: POSITION}  # known behind the tiles
        return {**LEVELS, **of_kernel, **({"h": ROW} if self.packs else {})}


class Writer:
    """The writer of a kernel whose program owns one row of tiles. `more` are the expressions that a position needs
    besides mask and score mod, such as that of dropout, and `last` those that a row needs behind its tiles. A swapped
    kernel of a mask reads its records from a table; others may have them from a closed form."""

    features: Features = TRITON  # that the kernels lack
    of_sums = "[:, None]"  # the axes of a row's sums behind the tiles

    def __init__(
        self,
        plan: LoopPlan,
        dims: Dims,
        target: Target,
        traits: KernelTraits,
        more: Iterable[Expr],
        last: Iterable[Expr | None] = (),
    ) -> None:
        if why := missing(self.features, dtype=dims.dtype):
            raise LoweringError(why)
        when = traits.levels
        self.plan, self.dims, self.target, self.traits = plan, dims, target, traits
        self.axes = axes_of(target)
        self.wide = ".to(tl.int64)" if plan.int64 else ""
        self.precision = f', input_precision="{target.precision}"' if not dims.half else ""
        self.e, self.v = ("d", "HEAD_DIM") if dims.v_dim == dims.head_dim else ("e", "V_DIM")  # along the values' axis
        self.arguments, self.names = arguments(plan), reserved_names(plan)
        self.ends = self._ends()
        # what the ends of a row say already is not asked again of its positions
        mask = conjuncts(plan.mask if self.ends is None else self.ends.rest)
        self.mask = [by_distance(e, when) for e in mask] if traits.gathers else mask
        self.score, self.factor = [], 1.0
        if plan.score is not None and traits.weighs:
            score = machine(self.rewritten(plan.score), dims, when, gathers=traits.gathers)
            score, self.factor = last_factor(score) if dims.half and not plan.weighted else (score, 1.0)
            self.score = [score]
        # the closed form gives keys of queries; a swapped kernel reads its spans from tables
        self.bounds = {} if traits.swapped else bounds_of(plan)
        self.tabled = plan.mask is not None and not self.bounds
        self.rows = self._rows()
        self.full = [*self.score, *more]  # what a position of a full tile asks for
        self.positions = [*self.mask, *self.full]
        inner = [*self.positions, *self.rows.values()]
        self.last = [expr.machine(e) for e in last if e is not None]
        roots = (*self.bounds.values(), *inner, *self.last)
        self.used = frozenset[str]().union(*map(uses, roots))
        # a table that lists the programs has their order
        self.ordered = target.order != "forward" and not shrinking(self.bounds) and not traits.listed
        language = expr_triton.language(dims.half, plan.int64)
        self.decisive = expr.decisive(legalise(e, language) for e in roots)
        self.approximate = dims.half and target.tanh == "approximate" and not plan.weighted
        self.near = False  # whether a table's rows are counted from the first that a tile reads
        by_rows = rows_of_tables(plan).items() if traits.swapped else ()
        self.rows_of_tables = {self.arguments[n].name: axis for n, axis in by_rows}
        if traits.swapped:  # values that depend on k are computed before the loop
            when = {**when, "q": when["k"], "k": when["q"]}
        when = {**when, **ALONG}
        self.printed = expr.printed(roots, language, self._leaf, self._name, inner, when)
        self.hoisted: set[str] = set()  # lines that stand before the loops

    # -- parameters --------------------------------------------------------------------------------

    def origins(self) -> list[str]:
        """The origins that the expressions and bounds ask for."""
        of = {"b": ["b"], "h": ["h", "h_first"]}
        of |= {"q": ["q", "q0", "q1", "q_line", "q_row"], "k": ["k", "k0", "k1", "k_line", "k_tile"]}
        # the ends of a row count from the origin of the walked axis, formulas from the call's first query and first key
        counted = "qk" if self.bounds else ("q" if self.traits.swapped else "k") if self.rows else ""
        return [n for n, names in of.items() if n in counted or self.used.intersection(names)]

    def run_time(self) -> list[str]:
        """The scalars whose value must not make a new kernel: the number of records changes with the mask."""
        origins = [f"{n}_origin" for n in self.origins()]
        sizes = [n for t in self.plan.every_table for n in self.arguments[t.name].sizes]
        first = [*self.traits.numbers, *["records"] * self.tabled, *origins, *self.sizes()]
        return [*first, *self.slots(), *sizes, *self._steps()]

    def slots(self) -> list[str]:
        return [self.arguments[s.name].name for s in self.plan.slots]

    def _steps(self) -> list[str]:
        """The strides of tables where loads are no wider for being divisible: they depend on lengths."""
        roots = [e for e in (self.plan.mask, self.plan.score, self.plan.value_scale) if e is not None]
        # a load for each position is wider where its strides are known to be divisible: those stay specialised
        wide = {n.name for n, at in levels(*roots).items() if n.op == "lookup" and at == POSITION}
        tables = [self.arguments[t.name] for t in self.plan.every_table if t.name not in wide]
        return [n for t in tables for n in t.strides[:-1]]

    def sizes(self) -> list[str]:
        """The global sizes that the expressions read."""
        return [n for n in SIZES if n in self.used]

    def parameters(self) -> dict[str, Any]:
        """The holes of a kernel's decorator and of shared.parameters."""
        origins = self.origins()
        # Triton makes a kernel for each divisibility by 16 of an argument, unless told not to
        varying = ", ".join(f'"{n}"' for n in self.run_time())
        jit = [f"@triton.jit(do_not_specialize=[{varying}])"]
        if len(varying) >= 80:
            lines = [f"        {line}" for line in textwrap.wrap(f"{varying},", 100)]
            jit = ["@triton.jit(", "    do_not_specialize=[", *lines, "    ]", ")"]
        places = [f"{', '.join(f'{n}_origin' for n in origins)},  # of this call in the whole problem"] * bool(origins)
        groups = [self.sizes(), self.slots(), *(self.arguments[t.name].all for t in self.plan.every_table)]
        return {
            "jit": jit,
            "numbers": ", ".join(self.traits.numbers),
            "tabled": self.tabled,
            "closed": bool(self.bounds),
            "everything": not self.tabled and not self.bounds,
            "ordered": self.ordered,
            "moved": [n for n in origins if n in "qk"],
            "scalars": ["records,"] * self.tabled + places + [f"{', '.join(names)}," for names in groups if names],
        }

    # -- expressions ------------------------------------------------------------------------------

    def _leaf(self, node: Expr, args: list[Text]) -> Text | None:
        if node is START:
            return Text(f"{'k' if self.traits.swapped else 'q'}_origin + start", PRECEDENCE["+"])
        if node in (TOTAL, COUNT):
            return Text(f"{node.name}{self.of_sums}{self.wide * (node is COUNT)}")
        if node.op == "var":
            return Text(EDGES.get(node.name, node.name))
        if node.op == "param":
            return Text(self._argument(node).name)
        if node.op == "lookup":
            return self._lookup(node, args)
        if node.op == GATHERED:
            return Text(f"along({args[0].text}, away{LOAD_MASK})")
        if node.op == "div" and node in self.decisive:  # an Int or a Bool depends on it: the last bit may decide a tile
            return Text(f"tl.div_rn({args[0].text}, {args[1].text})")
        if node.op == "tanh" and self.approximate and node not in self.decisive:
            return Text(f"tanh_approximate({args[0].text})")
        return expr_triton.operator(node, args)

    def _argument(self, node: Expr) -> Argument:
        if node.name not in self.arguments:
            raise LoweringError(f"`{node.name}` is neither a slot nor a table of the plan; make it one first")
        return self.arguments[node.name]

    def address(self, table: Argument, args: Sequence[Text]) -> str:
        """The address of an entry of a table, indices clamped."""
        row_axis, last, near_row = self.rows_of_tables.get(table.name), len(args) - 1, ""
        args = list(args)
        if row_axis is not None:
            # rows are counted from the first of a tile: with 64 bits for each a thread has no registers left
            first = self.plus_origin("q", "tile * BLOCK_Q")
            self.near, args[row_axis] = True, Text(first)
            near_row = f"step_from(q, {first}, {table.sizes[row_axis]}, {table.strides[row_axis]}, NEAR)"
        steps = [self.step(*of_axis) for of_axis in zip(args[:last], table.sizes, table.strides)]
        # the last axis counts in 32 bits: the launcher sees to it that it fits
        inner = f"{self.clamped(args[last], table.sizes[last])} * {table.strides[last]}"
        return " + ".join([table.name, *steps, f"({near_row} + {inner})" if near_row else inner])

    def step(self, index: Text, size: str, stride: str) -> str:
        """The step of an address along an axis that is not the last."""
        return f"step({index.text}, {size}, {stride})"

    def clamped(self, index: Text, size: str) -> str:
        """An index along the last axis, which counts in 32 bits."""
        return f"clamp({index.text}, {size})"

    def _lookup(self, node: Expr, args: list[Text]) -> Text:
        load = f"tl.load({self.address(self._argument(node), args)}{LOAD_MASK})"
        if node.type is BOOL:
            return Text(f"{load} != 0", COMPARISON)
        if node.type is FLOAT:
            return Text(f"{load}.to(tl.float32)")
        return Text(f"{load}.to(tl.int64)" if self.plan.int64 else load)

    def _name(self, node: Expr, level: int) -> str:
        """A name `doc_q` for `doc[q]`, otherwise a number behind a word for the level of the value."""
        if node.op == "lookup":
            return self.names.new(self._called(node))
        words = {SCALAR: "fixed", ROW: "row", COLUMN: "column", POSITION: "x"}
        if self.traits.swapped:
            words |= {ROW: "column", COLUMN: "row"}
        return self.names.numbered(words[level])

    def _called(self, node: Expr) -> str:
        if node.op == "var":
            return str(node.name)
        if node.op != "lookup":
            return "at"
        return "_".join([self.arguments[node.name].name, *map(self._called, node.args)])

    def lines(self, roots: Sequence[Expr], level: int, written: set[str] | None = None, mask: str = "") -> list[str]:
        """The lines of this level that the roots need and that are not written yet; `mask` is the mask of loads."""
        written, texts = self.hoisted if written is None else written, []
        for line in self.printed.needed(roots, level):
            if line.name not in written:
                written.add(line.name)
                loads = line.node.op == "lookup"
                only = f", mask={mask}" if mask and loads else f", {mask}" if mask and self.traits.selects else ""
                value = line.text.replace(LOAD_MASK, only)
                if self.features is TRITON and level == SCALAR and line.node.type is BOOL:
                    # Triton's interpreter would spread a comparison over a tile as the numbers that it compares
                    value = f"tl.where({value}, True, False)"
                text = f"{line.name} = {value}"
                texts.append(wrapped(text) if loads else text)
        return texts

    def value(self, root: Expr) -> str:
        return self.printed.values[root].replace(LOAD_MASK, "")

    def quote(self, e: Expr) -> list[str]:
        """A comment: the expression in the language, with the kernel's names of slots and tables."""
        named = {n: a.name for n, a in self.arguments.items()}
        shown = show(renamed(e, named), known={a.name for a in self.arguments.values()})
        return [f"# {line}" for line in textwrap.wrap(shown, 100, break_long_words=False)]

    def conversions(self) -> list[str]:
        """The lines that convert sizes and slots for the expressions."""
        lines = [f"{n} = tl.cast({n}, tl.int64)" for n in SIZES if self.wide and n in self.used]
        for slot in self.plan.slots:
            n = self.arguments[slot.name].name
            if slot.name in self.dims.device_slots:
                lines.append(f"{n} = tl.load({n}).to(tl.float32)")
            elif slot.type is FLOAT or (self.wide and slot.type is INT):
                lines.append(f"{n} = tl.cast({n}, {'tl.float32' if slot.type is FLOAT else 'tl.int64'})")
        return lines

    def coordinate(self, name: str, local: str) -> list[str]:
        """The line `q = ...` or `k = ...` of a tile, along its axis; `local` counts from the call's first."""
        along = "[:, None]" if (name == "q") != self.traits.swapped else "[None, :]"
        return [f"{name} = ({name}_origin + {local}){along}{self.wide}"]

    def line(self, roots: Iterable[Expr]) -> list[str]:
        """The coordinates along the diagonals of a tile, where `roots` take values by distance."""
        if not any(Q_LINE.name in uses(r) for r in roots):
            return []
        q, k = ("tile * BLOCK_Q", "start") if self.traits.swapped else ("start", "tile * BLOCK_K")
        rows, columns = ("[None, :]", "[:, None]") if self.traits.swapped else ("[:, None]", "[None, :]")
        return [
            "# One vector of the tile's distances, of which every position takes one.",
            f"q_line = span(q_origin + {q} - (BLOCK_K - 1), BLOCK_Q, BLOCK_K){self.wide}",
            f"k_line = {self.plus_origin('k', k)}",
            f"away = rows{rows} - columns{columns} + (BLOCK_K - 1)",
        ]

    # -- rows of tiles -----------------------------------------------------------------------------

    def rewritten(self, e: Expr) -> Expr:
        """A score mod or weight as this kernel reads it."""
        return e

    def units(self) -> dict[str, Any]:
        """The holes of two factors: `unit` turns scores into exponents of 2, `scale` products into scores."""
        plain = self.plan.score is None
        unit = "scale" if plain else "" if self.factor == 1.0 else f"{self.factor!r}"
        return {
            "in_unit": unit,
            "unit": "unit" if unit else "LOG2E",
            "scale": "" if plain or self.dims.half else " * scale",
        }

    def grid_of(self, rows: str, heads: str) -> str:
        """The grid, in words."""
        return f"({heads}, {rows}, batch)" if self.axes[0] else f"({rows}, {heads}, batch)"

    def kernel(self, text: str, grid: str) -> TritonKernel:
        """The kernel of a text, and its launch. The tile that a program owns is named first."""
        target, swapped = self.target, self.traits.swapped
        tiles = f"{target.block_q} queries", f"{target.block_k} keys"
        shape = " by ".join(tiles[::-1] if swapped else tiles)
        launch = f"grid {grid}, tiles of {shape}, num_warps={target.num_warps}, num_stages={target.num_stages}."
        return TritonKernel(self.traits.name, text, f"{self.traits.name}: {launch}")

    def filled(self, part: str, holes: Mapping[str, Any]) -> str:
        return filled(part, partial(wrapped, longest=self.traits.longest), **holes)

    def holes(self) -> dict[str, Any]:
        """The holes of every skeleton with rows of tiles: flags, and the lines that read scalars."""
        traits, common = self.traits, self.parameters()
        of_rows, walked = ("key", "query") if traits.swapped else ("query", "key")
        lengths = {"query": ("q_len", "BLOCK_Q"), "key": ("kv_len", "BLOCK_K")}
        walked_len, walked_block = lengths[walked]
        return {
            **vars(traits),
            **common,
            "blank": [""],
            "of_row": str(self.axes[0]),
            "of_head": str(self.axes[1]),
            "walked": walked,
            "walked_len": walked_len,
            "walked_block": walked_block,
            "queries": "BLOCK_Q",
            "grouped": self.dims.group > 1,
            "kv_head": "head" if self.dims.group == 1 else "kv_head",
            "masked": self.plan.mask is not None,
            "weighted": self.plan.weighted,
            "counting": self.plan.counts,
            "packs": traits.packs,
            "place": "place",
            **fields(self, "near precision wide"),
            "several": traits.swapped and self.dims.group > 1,  # heads that a program walks, one after another
            "rows_of_slice": f"tl.cdiv({', '.join(lengths[of_rows])})",
            **self.units(),
            "open": "(" if self.wide else "",
            "close": f"){self.wide}" if self.wide else "",
            "vectors": [f"{n}_origin = tl.load({n}_origin + batch)" for n in common["moved"]],
            "conversions": self.conversions(),
            "line_of_b": self.own_coordinate("b"),
            "line_of_h": self.own_coordinate("h"),
            "guard": self.plan.guard,
            "of_rows": ", mask=present",
            "survival": self.survival,
            "whole": f"(total * {self.survival})" if self.survival else "total",
            "ranges": "tl.load(Count + entry)",
            "over": "range",
            "hints": "",
            "loaded": False,
            "edges": False,
            "counts": ["border, full = full_lo - lo + hi - full_hi, full_hi - full_lo"] * traits.parted,
        }

    @property
    def survival(self) -> str:
        """The divisor of a weight that survived dropout."""
        rate = self.plan.rate
        return "" if rate is None else f"(1.0 - {self.arguments[rate].name})"

    def leaves_16_bits(self, roots: Sequence[Expr], most: float) -> bool:
        """Whether Floats of a weighted plan may be more than `most` where 16 bits have no larger exponent."""
        half = self.plan.weighted and self.dims.dtype == "float16"
        return half and any(largest(e) > most for e in roots)

    def product(self, weights: str, others: str, into: str, wide: bool) -> str:
        """The arguments of a product of float32 weights with numbers of float16: in 16 bits or, `wide`, with as
        many digits and the exponents of float32."""
        if wide and architecture_of(self.target.arch).vendor == "amd":
            return f'{weights}, {others}.to(tl.float32), {into}, input_precision="ieee"'
        if wide:
            return f'in_tf32({weights}), {others}.to(tl.float32), {into}, input_precision="tf32"'
        return f"{weights}.to({others}.dtype), {others}, {into}{self.precision}"

    def own_coordinate(self, name: str, local: str = "") -> list[str]:
        """The line of `b` or `h` from the program's batch entry or head, or of `local`, where expressions read it."""
        local = local or {"b": "batch", "h": "head"}[name]
        return [f"{name} = {self.plus_origin(name, local)}"] * (name in self.used)

    def plus_origin(self, name: str, local: str) -> str:
        """A coordinate by its place in the call."""
        return f"({name}_origin + {local}){self.wide}" if self.wide else f"{name}_origin + {local}"

    def closed_form(self) -> dict[str, Any]:
        """The holes of shared.closed_form."""
        bounds = [f"{name} = {self.bound(name)}" for name in self.bounds]
        return {"formulas": self.lines(list(self.bounds.values()), SCALAR), "bounds": bounds}

    def bound(self, name: str) -> str:
        """A bound of the closed form, counted from the call's first key and clamped to its keys, unless the bound says
        otherwise."""
        root = self.bounds[name]
        # a bound that holds its clamp already is not clamped again
        op, end, clamp = ("max", K0, "tl.maximum({}, k_first)")
        if "last" in name:
            op, end, clamp = ("min", K1, "tl.minimum({}, k_last)")
        value = self.value(root) if end in operands(root, op) else clamp.format(self.value(root))
        return "0" if value == "k_first" else f"{value} - k_first"

    def tiles(self) -> list[dict[str, Any]]:
        """The holes of both loops of a skeleton over tiles: partial tiles first, then full ones."""
        # A loop from full_hi to hi has one tile at most: ptxas would see that, and make products of gradients wait.
        edge: dict[str, Any] = {"which": "The ragged edge: a last tile that is not full.", "range": "hi - full_hi"}
        edge["tile_of_step"] = ["tile = full_hi + j"]
        if self.plan.mask is not None:
            which = "Partial tiles, before and behind the full ones: the mask is a predicate."
            step = "tile = tl.where(j < full_lo, j, j - full_lo + full_hi)"
            edge = {"which": which, "range": "lo, hi - full_hi + full_lo", "tile_of_step": [step]}
        full = {"which": "Full tiles: every position is visible.", "range": "full_lo, full_hi", "tile_of_step": []}
        parted = self.traits.parted
        if parted:
            edge["range"] = "lo + bounded(begin, border), lo + bounded(end, border)"
            full["range"] = "full_lo + bounded(begin, full), full_lo + bounded(end, full)"
        # the one record of a closed form is the last
        more = parted and (self.tabled or self.traits.listed)
        edge["past"] = ["begin, end = begin - border, end - border"] * parted
        full["past"] = ["begin, end = begin - full, end - full"] * more
        edge["tile_of_step"] += self.inside_of_tile()
        return [
            {**edge, "tile": "j", "border": True, **self.tile("inside")},
            {**full, "tile": "tile", "border": False, **self.tile("")},
        ]

    def inside_of_tile(self) -> list[str]:
        """The lines of `inside`, the positions along a partial tile that exist."""
        raise NotImplementedError

    def tile(self, inside: str) -> dict[str, Any]:
        """The holes of one loop; `inside` names the positions of a tile that exist, "" where all exist."""
        raise NotImplementedError

    def _ends(self) -> Ends | None:
        """The ends of what a row sees, or None where the kernel evaluates the whole mask instead. A swapped kernel with
        heads past 64 has no registers left for a row's last position besides its accumulators: the compiler spills. The
        ends of runs are worth it there: the entries of the table would take more registers."""
        swapped = self.traits.swapped
        ends = self.plan.by_key if swapped else self.plan.by_query
        if ends is None or not self.traits.bounded:
            return None
        if swapped and ends.last is not None and self.dims.head_dim > 64 and not self.plan.run_tables:
            return None
        return ends

    def _rows(self) -> dict[str, Expr]:
        """The Exprs of a row's ends, which are computed before the loops, by name."""
        if self.ends is None:
            return {}
        asks = None if self.ends.asks is TRUE else self.ends.asks
        ends = {"least": self.ends.first, "most": self.ends.last, "asks": asks}
        return {name: expr.machine(e) for name, e in ends.items() if e is not None}

    def before_tiles(self) -> list[str]:
        """The lines before the loops: values that are known once a program or once a row, and the ends of each row."""
        # all in one go: values that the mask and the score mod share are computed once
        roots = [*self.positions, *self.rows.values()]
        lines = [*self.lines(roots, SCALAR), *self.lines(roots, ROW)]
        if not self.rows:
            return lines
        axis, length = ("q", "q_len") if self.traits.swapped else ("k", "kv_len")
        row, others = ("key", "queries") if self.traits.swapped else ("query", "keys")
        # a condition on the row alone makes its interval empty, so that no position asks it again
        least, most, asks = (self.value(self.rows[n]) if n in self.rows else "" for n in ("least", "most", "asks"))
        most = f"placed({most}, {axis}_origin, -1, {length} - 1)" if most else f"{length} - 1"
        most = f"tl.where({asks}, {most}, -1)" if asks else most
        if not least:
            return [*lines, f"# The last of the call's {others} that a {row} may see.", f"most = {most}"]
        return [
            *lines,
            f"# The first of the call's {others} that a {row} may see, and the number of those up to the last.",
            f"least = placed({least}, {axis}_origin, 0, {length})",
            f"many = tl.maximum({most} + 1 - least, 0)",
        ]

    def visible(self, written: set[str]) -> list[str]:
        """The condition that positions of a partial tile are visible."""
        lines = self.lines(self.mask, POSITION, written)
        if self.plan.mask is not None:
            lines += self.quote(self.plan.mask)
        along, start = ("rows", "tile * BLOCK_Q") if self.traits.swapped else ("columns", "tile * BLOCK_K")
        shown = self.traits.shown
        # AMD's products leave their results in other threads than NVIDIA's
        form, bits = (
            ("_apart", f", {self.target.thread_bits}") if self.target.thread_bits != H100.thread_bits else ("", "")
        )
        if self.rows:
            shown = f"up_to{form}({along}[None, :], most - {start}{bits})"
        if "least" in self.rows:
            function = "among" if self.traits.words else f"one_of{form}"
            shown = f"{function}({along}[None, :], least - {start}, many{bits})"
        lines += [f"visible = {shown}", *(f"visible &= {self.value(term)}" for term in self.mask)]
        return lines

    def quoted(self, e: Expr | None, root: Expr | None, line: str, written: set[str], mask: str = "") -> list[str]:
        """An Expr of the plan as a comment, and the lines that compute and apply it."""
        if e is None or root is None:
            return []
        lines = [*self.quote(e), *self.lines([root], POSITION, written, mask)]
        return [*lines, *[line.format(self.value(root))] * bool(line)]

    def score_mod(self, name: str, written: set[str], mask: str = "") -> list[str]:
        """The lines of the modified score, which has the shape of a tile also where it is one number for all keys."""
        root = next(iter(self.score), None)
        # without the score it has no axis of queries, and products need a whole tile
        whole = root is None or "score" in uses(root)
        line = f"{name} = {{}}" if whole else f"_, {name} = tl.broadcast(score, tl.cast({{}}, tl.float32))"
        return self.quoted(self.plan.score, root, line, written, mask)

    def divided(self) -> dict[str, Any]:
        """The holes of shared.divided: what a weighted row is divided by, and the lines before it."""
        lines = [line for level in (SCALAR, ROW, POSITION) for line in self.lines(self.last, level)]
        quote = self.quote(self.plan.divide) if self.plan.divide is not None and self.last else []
        return {
            "of_sums": self.of_sums,
            "divide": self.value(self.last[0]) if self.last else "",
            "divide_lines": [*lines, *quote],
        }

    def tile_of_keys(self, inside: str, keep_mask: Sequence[Expr], written: set[str]) -> dict[str, Any]:
        """The holes of a forward's tile between its two products."""
        roots, root = self.positions if inside else self.full, next(iter(keep_mask), None)
        return {
            "column": self.along_tile("k", "tile * BLOCK_K + columns", roots, written),
            "visible": self.visible(written) if inside else [],
            "score_mod": self.score_mod("p" if self.plan.weighted else "score", written, inside and "visible"),
            "dropout": self.quoted(self.plan.keep_mask, root, "p = tl.where({}, p, 0.0)", written),
        }

    def along_tile(self, name: str, local: str, roots: Sequence[Expr], written: set[str]) -> list[str]:
        """The coordinate along the walked axis, where `roots` read it, and the lines of values that depend on it."""
        known = self.coordinate(name, local) if any(name in uses(r) for r in roots) else []
        return [*known, *self.line(roots), *self.lines(roots, COLUMN, written)]


def conjuncts(mask: Expr | None) -> list[Expr]:
    """The terms of a mask, written with the operators that machines have."""
    if mask is None:
        return []
    mask = expr.machine(transform(mask, expr.same_remainder))
    return list(mask.args) if mask.op == "and" else [] if mask is TRUE else [mask]


def bounds_of(plan: LoopPlan) -> dict[str, Expr]:
    """The bounds of the closed form by name; empty where there is none."""
    if plan.bounds is None or plan.mask is None:
        return {}
    return {n: expr.machine(getattr(plan.bounds, n)) for n in ("first", "full_first", "full_last", "last")}


def masked(*terms: str, other: str = ", other=0.0") -> str:
    """The mask of a load, or with no `other` of a store; an empty term asks for nothing."""
    terms = tuple(t for t in terms if t)
    # `&` binds tighter than `<` in Python
    joined = " & ".join(f"({t})" if "<" in t and len(terms) > 1 else t for t in terms)
    return f", mask={joined}{other}" if joined else ""


def wrapped(load: str, longest: int = LINE) -> str:
    """A long load over several lines: the axes of its address, then its mask."""
    match = re.fullmatch(r"(.*?tl\.load\()(.*?)(\)(?:(?:\.to\([\w.]+\))*| != 0))", load)
    if len(load) <= longest or match is None:
        return load
    head, inside, tail = match.groups()
    address, mask = inside.split(", mask=") if ", mask=" in inside else (inside, "")
    if len(address) > 100:
        address = re.sub(r" \+ (?=step\(|\(?step_from\(|clamp\(|page\b|at\[|\(tile )", "\n    + ", address)
    return "\n".join([head, f"    {address},", *[f"    mask={mask},"] * bool(mask), tail])


def shrinking(bounds: Mapping[str, Expr]) -> bool:
    """Whether later rows of a closed form see fewer keys, as under `k >= q`: their first key moves with the queries and
    their last key does not. The longest row is then the first."""
    return bool(bounds) and bool(uses(bounds["first"]) & QUERIES) and not uses(bounds["last"]) & QUERIES


def operands(e: Expr, op: str) -> list[Expr]:
    """The operands of nested nodes of one operator: a, b and c of `min(min(a, b), c)`."""
    return [x for a in e.args for x in operands(a, op)] if e.op == op else [e]
