"""The program of every Pallas TPU kernel (Mosaic), forward and backward, and the text of its module.

A kernel walks tiles (`walk.py`) and computes expressions of the plan, which read what `inputs.py` brings. What it keeps
through a row of tiles, what it gives and what it does on a pair of tiles is the subclass's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import Expr
from frisket.lowering.kernels.features import PALLAS_TPU, missing
from frisket.lowering.kernels.inputs import Down, floats
from frisket.lowering.kernels.text import filled, parts
from frisket.lowering.kernels.units import factored
from frisket.lowering.plan import Geometry, LoopPlan, Target

from .inputs import TpuInputs
from .walk import TpuOptions, TpuProgram, locate, names, passed, static_arguments

TEXT = parts(__package__, "kernel")
LANES = 128
PARTS, LONGEST = 8, 1024  # pages and keys of a tile of pages, at most: each page is an operand


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


class TpuKernel:
    """A kernel of a plan. A subclass declares in `__init__` what it reads, keeps and gives, and has the work on a pair
    of tiles in its `text`."""

    title = entry = ""
    down: Down = "q"
    arrays: Sequence[str] = ("query", "key", "value")  # whose heads come before their positions in the kernel

    def __init__(
        self,
        plan: LoopPlan,
        target: Target,
        geometry: Geometry,
        dtype: str,
        options: TpuOptions,
        roots: Iterable[Expr | None],
    ) -> None:
        check(plan, target, dtype)
        self.plan, self.target, self.geometry, self.dtype, self.options = plan, target, geometry, dtype, options
        keys, self.group = self.down == "k", geometry.heads // geometry.kv_heads
        self.program = TpuProgram(self.group if keys else options.program_heads, self.group, keys)
        self.holes = self.program.holes
        used = [e for e in roots if e is not None]
        # of 16-bit inputs a score mod may take the products themselves, and the scale is one of its factors
        self.factored, self.products = dict[Expr, Expr](), False
        if plan.score is not None and dtype != "float32":
            self.factored, self.products = factored(plan.score, used, forms=())
        used = [self.factored.get(e, e) for e in used]
        self.inputs = TpuInputs(tuple(used), self.down, strided=options.strided, program_heads=options.program_heads)
        self.numbers: list[str] = []  # in scalar memory, beside those of every plan
        self.refs, self.operands, self.in_specs = (list[str]() for _ in range(3))  # arrays that come in blocks
        self.zeros: Sequence[str] = ()  # operands that the first result begins as
        self.cast = ""  # of float16, where not all arrays are
        self.at_key = TEXT["at_key"]  # the block of keys of a step
        self.lengths = ["q_len", "kv_len"]
        self.scratch, self.scratch_shapes = (list[str]() for _ in range(2))
        self.outputs, self.out_specs, self.out_shapes = (list[str]() for _ in range(3))
        self.clear, self.start, self.finish = (list[str]() for _ in range(3))  # lines of the first step, and of a row

    def keeps(self, name: str, shape: str, value: str = "") -> None:
        """Declare a scratch array of a row of tiles, which starts as `value` or 0."""
        self.scratch.append(name)
        self.scratch_shapes.append(f"pltpu.VMEM(({self.holes['shared']}{shape[1:]}, Float),")
        zeros = f"jnp.zeros({name}.{self.holes['shape']}, Float)"
        self.start.append(f"{name}[{self.holes['own']}] = {value or zeros}")

    def keeps_inputs(self) -> None:
        """Declare the scratch of the values of positions down a tile."""
        self.scratch += self.inputs.row_values.values()
        self.scratch_shapes += self.inputs.scratch()

    def value(self, root: Expr, temporary: str) -> tuple[list[str], str]:
        """The (assignments, text) of an expression in the kernel."""
        return self.inputs.in_kernel(self.factored.get(root, root), temporary)

    def assigned(self, root: Expr | None, temporary: str, form: str) -> list[str]:
        """The lines of an expression and of the statement `form` with its value; none where there is no expression."""
        if root is None:
            return []
        lines, value = self.value(root, temporary)
        return [*lines, form.format(value)]

    def module(self, **holes: Any) -> str:
        """The text of the module; `holes` are what a kind says in its own words."""
        plan, target, inputs, search, down = self.plan, self.target, self.inputs, self.options.search, self.down == "q"
        walk, tiles = names(search), ("q_tiles", "k_tiles")[:: 1 if down else -1]
        numbers = [*walk, "ints", "q_origin", "k_origin", *floats(plan), *self.numbers]
        blocks = [*inputs.blocks, *self.zeros]
        refs = [*numbers, *(f"{n}_ref" for n in (*inputs.scalars, *self.refs, *blocks))]
        static = {n: n for n in ("at", *self.lengths)} | {f"{t}_shape": f"{t}.shape" for t in inputs.picked}
        flat = {"pages": "pages.reshape(-1)", **inputs.picked}
        arrays = ", ".join(self.arrays)
        cast = [TEXT["cast"].strip(), self.cast or f"{arrays} = (x.astype(Float) for x in ({arrays}))"]
        return filled(
            TEXT["module"], **self.holes, **holes,
            title=self.title,
            text=[f"#     {line}".rstrip() for line in (plan.text or "every key").splitlines()],
            math=["import math"] if inputs.needs_math else [],
            block_q=target.block_q, block_k=target.block_k, group=self.group, sharing=self.program.constants,
            scale=repr(float(self.geometry.scale)),
            # products of bfloat16 are exact in one pass of the matrix unit, those of float32 take six
            exact="DEFAULT" if self.dtype == "bfloat16" else "HIGHEST",
            locate=locate(search, self.program.heads, grouped=not down).splitlines(),
            walk=", ".join(walk), tables=len(walk), refs=wrap(f"{', '.join(refs)},", 116),
            outputs=", ".join(f"{n}_ref" for n in self.outputs), scratch=", ".join(self.scratch),
            static=", ".join(static), given=", ".join(f"{n}={x}" for n, x in static.items()),
            sizes=static_arguments(search, not down, self.holes["programs"], *tiles),
            head=self.program.head,
            clear=["", "@pl.when(step == 0)", "def clear():", *indented(self.clear)] if self.clear else [],
            start=self.start,
            finish=["", "@pl.when(ends)", "def finish():", *indented(self.finish)] if self.finish else [],
            entry=self.entry, arrays=arrays, cast=cast if self.dtype == "float16" else [],
            at_key=block(self.at_key, pages=len(numbers), **self.holes),
            passed=", ".join([*passed(search), *(flat.get(n, n) for n in (*numbers[len(walk) :], *inputs.scalars))]),
            number=len(numbers) + len(inputs.scalars),
            in_specs=[*self.in_specs, *inputs.specs(), *["pl.BlockSpec(memory_space=pl.ANY),"] * len(self.zeros)],
            out_specs=self.out_specs, scratch_shapes=self.scratch_shapes, out_shapes=self.out_shapes,
            aliases=[f"input_output_aliases={{{len(refs) - 1}: 0}},"] * len(self.zeros),
            operands=", ".join(["*scalars", *self.operands, *blocks]),
        )  # fmt: skip


def indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def block(text: str, **holes: Any) -> list[str]:
    """The lines of a part of a template."""
    return filled(text, **holes).splitlines()
