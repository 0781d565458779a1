"""Inputs of the expressions of a Pallas TPU kernel: blocks, scalars and scratch, and the functions that read them.

Values per query or key come in as blocks, tables by distance as windows of BLOCK_Q + BLOCK_K distances, which the
kernel skews into tiles. A lookup that no block holds picks from a table of at most `SMALL` entries in scalar memory,
entry by entry: TPUs have no gather inside a kernel. Larger ones are a LoweringError.

What belongs to the positions down a tile is turned upright where a row of tiles starts and kept; what belongs to those
along is read as it lies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import COORDINATES, Expr, uses
from frisket.dsl.types import FLOAT
from frisket.lowering.kernels.expr import prelude_of
from frisket.lowering.kernels.inputs import LANGUAGE, TableInputs, mosaic, numbers, stored, written
from frisket.lowering.kernels.language import Text
from frisket.lowering.kernels.text import filled, parts
from frisket.lowering.plan import LoopPlan

TEXT = parts(__package__, "inputs")
SMALL = 1024  # entries a kernel may try one by one


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
                f'entries, at most {SMALL}; index it by q, by k or by q - k alone, shrink it, or use backend="xla"'
            )


@dataclass
class TpuInputs(TableInputs):
    """The inputs of the expressions of a TPU kernel, and their lines in its module."""

    strided: bool = True  # TPUs from v5 on roll each row by another number
    program_heads: int = 1  # query heads of a program, each with values of the positions down

    @property
    def scratch_index(self) -> str:
        """The index of a head's share of scratch."""
        return "..." if self.program_heads == 1 else "part"

    @property
    def needs_math(self) -> bool:
        """Whether the definitions use Python's `math`."""
        return bool(self.picked or self.distances)

    def in_kernel(self, root: Expr, temporary: str) -> tuple[list[str], str]:
        """The text of `root`, one of the Exprs the inputs were made for, in the kernel: (assignments, text of the
        value), which broadcasts to a tile. The kernel has `batch`, `head`, those of `coordinate_lines`, and the scores
        as `s`."""
        along, kept = "{}_ref[0, 0]", f"{{}}[{self.scratch_index}]"
        forms = [
            (self.heads, "{}_ref[batch, head]"),
            (self.pairs, "{}_ref[0, 0]" if self.down == "q" else "{}_ref[0, 0].T"),
            (self.distances, "skewed({}_ref[0, 0, 0])"),
            (self.queries, kept if self.down == "q" else along),
            (self.keys, along if self.down == "q" else kept),
        ]
        names = {e: stored(form.format(name), e.type) for values, form in forms for e, name in values.items()}

        def pick(e: Expr, indices: str) -> Text:
            return stored(f"pick({e.name}_ref, {e.name}_shape, {indices})", e.type)

        return written(mosaic(root), names, pick, temporary)

    def definitions(self, turns: bool = False) -> list[str]:
        """The constants and functions that the kernel and the code before it need, above the kernel; with `turns` the
        kernel has use for `turned` itself."""
        constants, functions = prelude_of(self.roots, LANGUAGE)
        functions += [LANGUAGE.functions["look"]] if self.outside() else []
        optional: dict[str, object] = {
            "turn": self.row_values or turns,
            "pick": self.picked,
            "share": self.blocks,
            "per_query": self.queries,
            "per_key": self.keys,
            "per_pair": self.pairs,
        }
        functions += [TEXT[name] for name, needed in optional.items() if needed]
        if self.distances:
            rows, columns = ("q", "k") if self.down == "q" else ("k", "q")
            blocks = {"down": f"BLOCK_{rows.upper()}", "along": f"BLOCK_{columns.upper()}"}
            skewed = TEXT["skewed" if self.strided else "skewed_by_bits"]
            functions.append(filled(TEXT["distances"] + skewed, rows=rows, columns=columns, **blocks))
        return constants + [line for what in functions for line in f"\n\n{what.strip()}".splitlines()]

    def coordinate_lines(self, plan: LoopPlan) -> list[str]:
        """The lines of the coordinates, sizes and slots that the kernel computes with. It has `batch`, `head`,
        `q_tile`, `k_tile`."""
        used = {n.name for n in self.left() if n.op in ("var", "param")}
        lines = numbers(plan)
        for n in "qk":
            block = f"BLOCK_{n.upper()}"
            shape = f"({block}, 1), 0" if n == self.down else f"(1, {block}), 1"
            lines[n] = f"{n} = {n}_origin[batch] + {n}_tile * {block} + lax.broadcasted_iota(Int, {shape})"
        return [lines[name] for name in dict.fromkeys((*COORDINATES, *lines)) if name in used]

    def turned(self) -> list[str]:
        """The lines that fill the scratch of a row of tiles, at its start."""
        return [f"{n}[{self.scratch_index}] = turned({n}_ref[0, 0])" for n in self.row_values.values()]

    def scratch(self) -> list[str]:
        """The scratch arrays of a row of tiles."""
        size = ("" if self.program_heads == 1 else "HEADS, ") + f"BLOCK_{self.down.upper()}"
        return [f"pltpu.VMEM(({size}, 1), {'Float' if e.type is FLOAT else 'Int'})," for e in self.row_values]

    def specs(self) -> list[str]:
        """The BlockSpecs of `blocks`, by `place`: a step of the grid to (batch, query head, q tile, k tile)."""
        length = "q_len" if self.down == "q" else "kv_len"
        lines = [f"per_query({name}, place)," for name in self.queries.values()]
        lines += [f"per_key({name}, place)," for name in self.keys.values()]
        lines += [f"per_distance({name}, place, {length})," for name in self.distances.values()]
        return lines + [f"per_pair({name}, place)," for name in self.pairs.values()]
