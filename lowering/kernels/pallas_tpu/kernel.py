"""The program of every Pallas TPU kernel (Mosaic), forward and backward, and the text of its module.

A kernel walks tiles (`walk.py`) and computes expressions of the plan. A subclass says what the kernel keeps through a
row of tiles, what it returns, and what it does on a pair of tiles.

Values per query or key come in as blocks, tables by distance as windows of BLOCK_Q + BLOCK_K distances, which the
kernel skews into tiles. A lookup that no block holds picks from a table of at most `SMALL` entries in scalar memory,
entry by entry: TPUs have no gather inside a kernel. Larger ones are a LoweringError.

Values of the positions down a tile are made a column when a row of tiles starts, and kept. Values of the positions
along a tile are read as the row that they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any, ClassVar

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import COORDINATES, Expr, uses, walk
from frisket.dsl.types import FLOAT
from frisket.lowering.kernels.expr import prelude_of
from frisket.lowering.kernels.features import PALLAS_TPU, missing
from frisket.lowering.kernels.inputs import LANGUAGE, Down, TableInputs, floats, mosaic, numbers, roots, stored, written
from frisket.lowering.kernels.language import Text
from frisket.lowering.kernels.text import filled, parts
from frisket.lowering.kernels.units import factored
from frisket.lowering.plan import Geometry, LoopPlan, Target

from .walk import TpuOptions, locate, names, passed, program_holes, static_arguments

TEXT = parts(__package__, "kernel")
READERS = parts(__package__, "inputs")
LANES = 128
PARTS, LONGEST = 8, 1024  # pages and keys of a tile of pages, at most: each page is an operand
SMALL = 1024  # entries a kernel may try one by one


def refused(plan: LoopPlan, dtype: str) -> str:
    """The reason why no TPU kernel computes a call, or nothing."""
    odd = plan.pages and not keys_of_a_tile(plan.page, LONGEST)
    return missing(PALLAS_TPU, plan, None, dtype, ["other page sizes"] if odd else ())


def fits(page: int, block_k: int) -> bool:
    """Whether a page has a whole number of tiles of keys, or a tile few enough pages."""
    return page % block_k == 0 or (block_k % page == 0 and block_k <= PARTS * page)


def keys_of_a_tile(page: int, most: int) -> int:
    """The longest tile of keys up to `most` that fits pages of so many tokens, 0 where there is none.

    >>> keys_of_a_tile(16, 512), keys_of_a_tile(64, 512), keys_of_a_tile(1024, 512), keys_of_a_tile(144, 512)
    (128, 512, 512, 0)
    """
    return max((n for n in range(LANES, max(most, LANES) + 1, LANES) if fits(page, n)), default=0)


def check(plan: LoopPlan, target: Target, dtype: str) -> None:
    """Raise for tiles without a kernel."""
    if why := refused(plan, dtype):
        raise LoweringError(why)
    if target.block_q % LANES or target.block_k % LANES:
        raise LoweringError(
            f"TPU tiles are multiples of {LANES}, not {target.block_q} x {target.block_k}; "
            f"pass tile=({LANES}, {LANES}) or a multiple"
        )
    if plan.pages and not fits(plan.page, target.block_k):
        raise LoweringError(
            f"a tile of {target.block_k} keys is no whole number of pages of {plan.page} tokens up to {PARTS}, nor a "
            f"page of tiles; pass tile=({target.block_q}, {keys_of_a_tile(plan.page, target.block_k)}), or none"
        )


def check_tables(plan: LoopPlan, inputs: TableInputs, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise where a table is too large for the way this kernel reads it."""
    for node in inputs.left():
        if node.op != "lookup":
            continue
        ends = zip(node.args, shapes[node.name], strict=True)
        # without a gather each entry is compared with the index, so work grows with the entries tried
        tried = math.prod(n for index, n in ends if uses(index) & {"q", "k", "score"})
        if tried > SMALL:
            source = next(t.source for t in plan.tables if t.name == node.name)
            raise LoweringError(
                f"`{source}` is indexed by q and k together and a TPU kernel would have to try {tried} "
                f'entries, at most {SMALL}. Index it by q, by k or by q - k alone, shrink it, or use backend="xla"'
            )


@dataclass(eq=False)
class TpuKernel:
    """A kernel of a plan. A subclass names the expressions that it computes, declares in `__post_init__` what it reads,
    keeps and gives, and has the work on a pair of tiles in its `text`."""

    plan: LoopPlan
    target: Target
    geometry: Geometry
    dtype: str
    options: TpuOptions

    title = entry = ""
    down: ClassVar[Down] = "q"
    arrays: ClassVar[Sequence[str]] = ("query", "key", "value")  # whose heads come before their positions in the kernel
    template: ClassVar[Mapping[str, str]] = {}  # the parts of the module that a subclass brings

    def __post_init__(self) -> None:
        plan, keys = self.plan, self.down == "k"
        check(plan, self.target, self.dtype)
        self.group = self.geometry.heads // self.geometry.kv_heads
        self.heads = self.group if keys else self.options.program_heads  # query heads of a program
        self.holes = program_holes(self.heads, self.group, keys)
        used = [e for e in self.roots() if e is not None]
        # of 16-bit inputs a score mod may take the products themselves, and the scale is one of its factors
        self.factored, self.products = dict[Expr, Expr](), False
        if plan.score is not None and self.dtype != "float32":
            self.factored, self.products = factored(plan.score, used, forms=())
        self.inputs = TableInputs(tuple(self.factored.get(e, e) for e in used), self.down)
        self.numbers: list[str] = []  # in scalar memory, after those of every plan
        self.refs, self.operands, self.in_specs = (list[str]() for _ in range(3))  # arrays that come in blocks
        self.zeros: Sequence[str] = ()  # operands that the first result begins as
        self.cast = ""  # of float16, where not all arrays are
        self.at_key = TEXT["at_key"]  # the block of keys of a step
        self.lengths = ["q_len", "kv_len"]
        self.scratch, self.scratch_shapes = (list[str]() for _ in range(2))
        self.outputs, self.out_specs, self.out_shapes = (list[str]() for _ in range(3))
        self.clear, self.start, self.finish = (list[str]() for _ in range(3))  # lines of the first step, and of a row

    def roots(self) -> Sequence[Expr | None]:
        """The expressions that the kernel computes."""
        return roots(self.plan)

    def keeps(self, name: str, shape: str, value: str = "") -> None:
        """Declare a scratch array of a row of tiles, which starts as `value` or 0."""
        self.scratch.append(name)
        self.scratch_shapes.append(f"pltpu.VMEM(({self.holes['shared']}{shape[1:]}, Float),")
        zeros = f"jnp.zeros({name}.{self.holes['shape']}, Float)"
        self.start.append(f"{name}[{self.holes['own']}] = {value or zeros}")

    def keeps_inputs(self) -> None:
        """Declare the scratch of the values of positions down a tile."""
        size = f"{self.holes['shared']}BLOCK_{self.down.upper()}"
        for e, name in self.inputs.row_values.items():
            self.scratch.append(name)
            self.scratch_shapes.append(f"pltpu.VMEM(({size}, 1), {'Float' if e.type is FLOAT else 'Int'}),")

    def turned(self) -> list[str]:
        """The lines that fill that scratch, at the start of a row of tiles."""
        return [f"{n}[{self.holes['own']}] = turned({n}_ref[0, 0])" for n in self.inputs.row_values.values()]

    # -- expressions --

    def value(self, root: Expr, temporary: str) -> tuple[list[str], str]:
        """The (assignments, text of the value) of one of the expressions, which broadcasts to a tile. The kernel has
        `batch`, `head`, those of `coordinate_lines`, and the scores as `s`."""
        i, lying, upright = self.inputs, "{}_ref[0, 0]", f"{{}}[{self.holes['own']}]"
        forms = [
            (i.heads, "{}_ref[batch, head]"),
            (i.pairs, "{}_ref[0, 0]" if self.down == "q" else "{}_ref[0, 0].T"),
            (i.distances, "skewed({}_ref[0, 0, 0])"),
            (i.queries, upright if self.down == "q" else lying),
            (i.keys, lying if self.down == "q" else upright),
        ]
        names = {e: stored(form.format(name), e.type) for values, form in forms for e, name in values.items()}

        def pick(e: Expr, indices: str) -> Text:
            return stored(f"pick({e.name}_ref, {e.name}_shape, {indices})", e.type)

        return written(mosaic(self.factored.get(root, root)), names, pick, temporary)

    def assigned(self, root: Expr | None, temporary: str, form: str) -> list[str]:
        """The lines of an expression and of the statement `form` with its value; none where there is no expression."""
        if root is None:
            return []
        lines, value = self.value(root, temporary)
        return [*lines, form.format(value)]

    def coordinate_lines(self, root: Expr | None = None) -> list[str]:
        """The lines of the coordinates, sizes and slots that the kernel computes with, or that of one expression. It
        has `batch`, `head`, `q_tile`, `k_tile`."""
        used = {n.name for n in self.inputs.left() if n.op in ("var", "param")}
        used &= used if root is None else {n.name for n in walk(mosaic(root))}
        lines = numbers(self.plan)
        for n in "qk":
            block = f"BLOCK_{n.upper()}"
            shape = f"({block}, 1), 0" if n == self.down else f"(1, {block}), 1"
            lines[n] = f"{n} = {n}_origin[batch] + {n}_tile * {block} + lax.broadcasted_iota(Int, {shape})"
        return [lines[name] for name in dict.fromkeys((*COORDINATES, *lines)) if name in used]

    def definitions(self, turns: bool = False) -> list[str]:
        """The constants and functions that the kernel and the code before it need, above the kernel; with `turns` the
        kernel has use for `turned` itself."""
        i = self.inputs
        constants, functions = prelude_of(i.roots, LANGUAGE)
        functions += [LANGUAGE.functions["look"]] if i.outside() else []
        optional = {"turn": i.row_values or turns, "pick": i.picked, "share": i.blocks}
        optional |= {"per_query": i.queries, "per_key": i.keys, "per_pair": i.pairs}
        functions += [READERS[name] for name, needed in optional.items() if needed]
        if i.distances:
            rows, columns = ("q", "k") if self.down == "q" else ("k", "q")
            blocks = {"down": f"BLOCK_{rows.upper()}", "along": f"BLOCK_{columns.upper()}"}
            skewed = READERS["skewed" if self.options.strided else "skewed_by_bits"]
            functions.append(filled(READERS["distances"] + skewed, rows=rows, columns=columns, **blocks))
        return constants + [line for what in functions for line in f"\n\n{what.strip()}".splitlines()]

    def specs(self) -> list[str]:
        """The BlockSpecs of the inputs' blocks, by `place`: a step of the grid to (batch, query head, q tile, k
        tile)."""
        i, length = self.inputs, "q_len" if self.down == "q" else "kv_len"
        lines = [f"per_query({name}, place)," for name in i.queries.values()]
        lines += [f"per_key({name}, place)," for name in i.keys.values()]
        lines += [f"per_distance({name}, place, {length})," for name in i.distances.values()]
        return lines + [f"per_pair({name}, place)," for name in i.pairs.values()]

    # -- text --

    def part(self, name: str, /, **holes: Any) -> list[str]:
        """The lines of a part of the subclass's template, if it has this."""
        return block(self.template[name], **self.holes, **holes) if name in self.template else []

    def module(self, **holes: Any) -> str:
        """The text of the module; `holes` are what a kind says in its own words."""
        plan, target, inputs, search, down = self.plan, self.target, self.inputs, self.options.search, self.down == "q"
        walk, tiles = names(search), ("q_tiles", "k_tiles")[:: 1 if down else -1]
        scalars = [*walk, "ints", "q_origin", "k_origin", *floats(plan), *self.numbers]
        blocks = [*inputs.blocks, *self.zeros]
        refs = [*scalars, *(f"{n}_ref" for n in (*inputs.scalars, *self.refs, *blocks))]
        static = {n: n for n in ("at", *self.lengths)} | {f"{t}_shape": f"{t}.shape" for t in inputs.picked}
        flat = {"pages": "pages.reshape(-1)", **inputs.picked}
        arrays = ", ".join(self.arrays)
        cast = [TEXT["cast"].strip(), self.cast or f"{arrays} = (x.astype(Float) for x in ({arrays}))"]
        spaced = {n: ["", "", *lines] if (lines := self.part(n)) else [] for n in ("above", "below")}
        entry = {n: self.part(n, entry=self.entry, **holes) for n in ("signature", "doc", "of_rows", "at_row")}
        return filled(
            TEXT["module"], **self.holes, **holes, **spaced, **entry,
            title=self.title,
            text=[f"#     {line}".rstrip() for line in (plan.text or "every key").splitlines()],
            math=["import math"] if inputs.picked or inputs.distances else [],
            block_q=target.block_q, block_k=target.block_k, group=self.group,
            scale=repr(float(self.geometry.scale)),
            # products of bfloat16 are exact in one pass of the matrix unit, those of float32 take six
            exact="DEFAULT" if self.dtype == "bfloat16" else "HIGHEST",
            locate=locate(search, self.heads, grouped=not down).splitlines(),
            walk=", ".join(walk), tables=len(walk), refs=wrap(f"{', '.join(refs)},", 116),
            outputs=", ".join(f"{n}_ref" for n in self.outputs), scratch=", ".join(self.scratch),
            static=", ".join(static), given=", ".join(f"{n}={x}" for n, x in static.items()),
            sizes=static_arguments(search, not down, self.holes["programs"], *tiles),
            clear=["", "@pl.when(step == 0)", "def clear():", *indented(self.clear)] if self.clear else [],
            start=self.start,
            finish=["", "@pl.when(ends)", "def finish():", *indented(self.finish)] if self.finish else [],
            arrays=arrays, cast=cast if self.dtype == "float16" else [],
            at_key=block(self.at_key, pages=len(scalars), **self.holes),
            passed=", ".join([*passed(search), *(flat.get(n, n) for n in (*scalars[len(walk) :], *inputs.scalars))]),
            number=len(scalars) + len(inputs.scalars),
            in_specs=[*self.in_specs, *self.specs(), *["pl.BlockSpec(memory_space=pl.ANY),"] * len(self.zeros)],
            out_specs=self.out_specs, scratch_shapes=self.scratch_shapes, out_shapes=self.out_shapes,
            aliases=[f"input_output_aliases={{{len(refs) - 1}: 0}},"] * len(self.zeros),
            operands=", ".join(["*scalars", *self.operands, *blocks]),
        )  # fmt: skip


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def block(text: str, **holes: Any) -> list[str]:
    """The lines of a part of a template."""
    return filled(text, **holes).splitlines()
