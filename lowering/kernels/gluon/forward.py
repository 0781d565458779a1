"""Writes the Gluon forward kernel of a LoopPlan, warp-specialised for Hopper and for Blackwell.

One program works on one tile of queries of one head. One warp, `produce`, walks the records of the row and loads tiles
of keys and of values by TMA into two rings in shared memory. Two warp groups, `consume`, compute half of the queries
each: the softmax of one group runs during the products of the other.

On Hopper a tile has 128 queries. Each group issues its own products, in turns with the other group. The product with
values runs during the softmax of the next tile. On Blackwell a tile has 256 queries, and another warp, `multiply`,
issues the products of both groups, whose results are in tensor memory. Heads past 128 fill tensor memory with 128
queries, so their tile has 128 and one group.

Expressions are printed by Triton's table of operators: in the text of both languages only the module's name differs.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import Expr, uses
from frisket.dsl.work import HEAVY
from frisket.lowering.architectures import architecture_of
from frisket.lowering.kernels import expr
from frisket.lowering.kernels.expr import COLUMN, levels
from frisket.lowering.kernels.features import GLUON, missing
from frisket.lowering.kernels.text import parts
from frisket.lowering.kernels.triton.forward import NO_ARRAYS, OptionalArrays
from frisket.lowering.kernels.triton.module import Dims, TritonKernel, module, padded
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.kernels.triton.writer import KernelTraits, Writer
from frisket.lowering.plan import LoopPlan

HOPPER, BLACKWELL, SHARED = (parts(__package__, name) for name in ("hopper", "blackwell", "shared"))
INSTEAD = "take backend='triton'"
OF_SLOT = ("k_full", "k_free", "v_full", "v_free")  # barriers of a slot of the rings
PART = 64  # columns of the sums that a warp group reads from tensor memory at once
SLACK = 8  # a weight may be 2**8: sums are rescaled where a score exceeds the maximum so far by more
# Cycles of a scheduler for an element of each thread of a warp, by the compiled kernels of Triton 3.6 and 3.9: those of
# a full tile without a score mod, those that the polynomial adds, and those of one exp2 or tanh.
ISSUE, ALU, MORE_ISSUE, MORE_ALU, MUFU = 4, 2, 5, 4, 8
OF_USE = {  # lines of the module's head that not every kernel needs, and the text of a kernel that does
    "import triton": "triton.knobs",
    "from triton import language as tl": "tl.",
    "from triton.experimental.gluon.language.nvidia import blackwell": "seen_as(",
    "columns_of = blackwell.tensor_memory_descriptor": "seen_as(",
    'seen_as = columns_of.reinterpret if hasattr(columns_of, "reinterpret") else columns_of._reinterpret': "seen_as(",
    'group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier': "group_barrier()",
}
# 2**x for -0.5 <= x <= 0.5: the polynomial of this degree with the least relative error, 1.5e-7, given that 2**0 is 1.
EXP2 = (1.0, 0.6931469, 0.24022119, 0.05550713, 0.009675541, 0.0013276471)
*REST, LAST = EXP2
FUNCTIONS = {  # that not every kernel needs
    "sigmoid": """def sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))""",
    "exp2_polynomial": f"""def exp2_polynomial(x):
    \"\"\"2**x on the FMA units instead of MUFU: relative error at most 2.5e-7, and 0 below -126.5.\"\"\"
    x = gl.maximum(x, -127.0, propagate_nan=tl.PropagateNan.ALL)
    # Floats of this size are whole numbers: the sum rounds x. Its low bits are the exponent of `whole`.
    biased = x + 12583039.0  # 1.5 * 2**23 + 127
    rest = x - (biased - 12583039.0)
    whole = (biased.to(gl.int32, bitcast=True) << 23).to(gl.float32, bitcast=True)
    return whole * ({" + rest * (".join(map(str, REST))} + rest * {LAST}{")" * len(REST)}""",
}


def emit(plan: LoopPlan, target: Target, dims: Dims, optional: OptionalArrays = NO_ARRAYS) -> str:
    """The text of the forward's module: `emit(plan, target, Dims(128, 128, "bfloat16", group=4))`; the same input gives
    the same text. A LoweringError has a reason of `features.GLUON`."""
    if why := missing(GLUON, plan, dims, dims.dtype):
        raise LoweringError(f"{why}\n  {INSTEAD}")
    groups, rows = groups_of(target.arch, dims.head_dim, dims.v_dim)
    if target.block_q != groups * rows or target.block_k not in (32, 64, 128):
        tile = f"{target.block_q} x {target.block_k}"
        raise LoweringError(f"the Gluon kernel tiles {groups * rows} queries and 32, 64 or 128 keys, not {tile}")
    kernel = GluonForward(plan, target, dims, optional).forward()
    return translated(module("Attention forward", plan, dims, [kernel], SHARED["module"]))


def groups_of(arch: str, head_dim: int, v_dim: int) -> tuple[int, int]:
    """(warp groups that compute, queries of each). Tensor memory has 512 columns: for 128 queries, sums take a column
    for each dim of the head, and scores a column for each key of a tile."""
    known = architecture_of(arch)
    return 2 if known.products == "wgmma" or max(head_dim, v_dim) <= 128 else 1, known.rows


def translated(text: str) -> str:
    """A kernel's text with Triton's names turned into Gluon's."""
    # Gluon has no PropagateNan
    source = re.sub(r"\btl\.(?!PropagateNan)", "gl.", text).replace("@triton.jit", "@gluon.jit")
    source = source.replace("gl.sigmoid(", "sigmoid(")  # Gluon has no sigmoid
    head, gap, rest = source.partition("\n\n\n@gluon.jit")
    used = [text for name, text in FUNCTIONS.items() if re.search(rf"\b{name}\(", rest)]
    source = gap.join([head, *(f"\n{text}" for text in used)]) + gap + rest
    for line, use in OF_USE.items():
        source = source if use in source else source.replace(f"{line}\n", "")
    return source


class GluonForward(Writer):
    """Writes the functions of the forward: `produce`, `consume`, on Blackwell `multiply`, which issues the products,
    and the kernel that starts them."""

    def __init__(self, plan: LoopPlan, target: Target, dims: Dims, optional: OptionalArrays) -> None:
        self.optional, self.blackwell = optional, architecture_of(target.arch).products == "tcgen05"
        self.keep_mask = [] if plan.keep_mask is None else [expr.machine(plan.keep_mask)]
        self.groups, self.queries = groups_of(target.arch, dims.head_dim, dims.v_dim)
        # a vector of a tile's diagonals would take shared memory of both warp groups
        super().__init__(plan, dims, target, KernelTraits(gathers=False), self.keep_mask)
        self.spread = False  # only Triton's interpreter spreads a scalar Bool over a tile

    def forward(self) -> TritonKernel:
        # beside the four of the first group: four of the second, if there is one, one that loads, one that multiplies
        extra = 4 * self.groups - 2 if self.blackwell else 5
        launch = (
            f"attention_forward: grid (q tiles, heads, batch), tiles of {self.target.block_q} queries by "
            f"{self.target.block_k} keys in {self.target.num_stages} stages, "
            f"num_warps=4 beside {extra} of its own."
        )
        part = (BLACKWELL if self.blackwell else HOPPER)["kernel"]
        return TritonKernel(self.traits.name, self.filled(part, self.holes()), launch)

    def holes(self) -> dict[str, Any]:
        common, closed = super().holes(), self.closed_form()
        self.hoisted = set()  # lines so far are in the kernel, the next ones in `consume`, which computes them again
        optional, padded_v = self.optional, padded(self.dims.v_dim)
        results = [("Top", optional.row_max), ("Low", optional.lse_residual), ("Sinks", optional.sinks)]
        of_group = ("q_full", "s_full", "p_full", "o_full") if self.blackwell else ("q_full", "turns")  # barriers
        width = min(PART, padded_v)
        return {
            **common,
            **closed,
            "same": padded(self.dims.head_dim) == padded_v,
            "barriers": [
                *({"name": name, "count": self.groups} for name in of_group),
                *({"name": name, "count": "STAGES"} for name in OF_SLOT),
            ],
            "groups": self.groups,
            "rows": self.queries,
            "halves": [{"half": half} for half in range(self.groups)],
            "results": "".join(f" {n}," for n, use in results if use),
            **optional.holes,
            "walk": "Spans, Count, entry, records" if self.tabled else "lo, full_lo, full_hi, hi",
            "passed": self._passed(),
            "rows_of_q": self.coordinate("q", "start + rows") if "q" in self.used else [],
            "hoisted": self.before_tiles(),
            "tiles": self._tiles_of_blackwell() if self.blackwell else self.tiles(),
            # of the last group, and of the sums that a group reads at once
            "last": self.groups - 1,
            "width": width,
            "parts": padded_v // width,
            "slack": "" if optional.row_max else f" + {SLACK}",
            "warps": str([4] * (self.groups - 1) + [1, 1]),
            "registers": str([240] * (self.groups - 1) + [24, 24]),
        }

    def _passed(self) -> list[str]:
        """The arguments of `consume` that its expressions read."""
        origins = [f"{n}_origin" for n in self.origins() if n in "qk"]
        tables = [n for t in self.plan.every_table for n in self.arguments[t.name].all]
        names = [*(n for n in "bh" if n in self.used), *origins, *self.sizes(), *self.slots(), *tables]
        return textwrap.wrap(f"{', '.join(names)},", 100) if names else []

    def tiles(self) -> list[dict[str, Any]]:
        """The holes of a record's first tile and of its two loops."""
        ahead = "gl.where(j < left, lo + j, j - left + full_hi)"
        first = {
            "which": "The first tile, with the mask even where it shows all.",
            "tile": "gl.where(left > 0, lo, gl.where(borders > 0, full_hi, full_lo))",
            "range": "",
        }
        which = "Border tiles, before and behind the full ones: the mask is a predicate."
        edge = {"which": which, "tile": ahead, "range": "1, borders"}
        which = "Full tiles: every position is visible."
        full = {"which": which, "tile": "j - borders + full_lo", "range": "gl.maximum(borders, 1), hi - lo"}
        return [
            {**first, "loop": False, "running": 0, "border": True, **self.tile("inside"), "positioned": True},
            {**edge, "loop": True, "running": 1, "border": True, **self.tile("inside"), "positioned": True},
            {**full, "loop": True, "running": 1, "border": False, **self.tile("")},
        ]

    def tile(self, inside: str) -> dict[str, Any]:
        written = set(self.hoisted)
        holes = self.tile_of_keys(inside, self.keep_mask, written)
        return {
            **holes,
            "positioned": any("k" in uses(r) for r in (self.positions if inside else self.full)),
            # the ends of rows already stop at the last key
            "bounded": any("inside" in line for line in holes["visible"]),
        }

    def _tiles_of_blackwell(self) -> list[dict[str, Any]]:
        """The holes of a record's two loops."""
        _, edge, full = self.tiles()
        ends = 3 if "least" in self.rows else 2  # instructions of a comparison with the ends of a row, and of a select
        edge |= {"range": "borders", "by_polynomial": by_polynomial(self.full, ends + work(self.mask))}
        full |= {"range": "borders, hi - lo", "by_polynomial": by_polynomial(self.full)}
        return [edge, full]


def by_polynomial(roots: Sequence[Expr], masking: int = 0) -> int:
    """The columns of 32 in a tile whose exp2 is a polynomial: as many as keep MUFU as busy as issue, or as ALU, which
    has the `masking` of border tiles. The number is even, because two columns share their instructions. It is at most
    half: a tanh of the score mod comes before the maximum, so a warp does not overlap it with the polynomial."""
    mufu = MUFU * (1 + sum(e.op in ("exp", "tanh") for e in of_elements(roots)))
    of_issue = (mufu - ISSUE - work(roots) - masking) / (MUFU + MORE_ISSUE)
    of_alu = (mufu - ALU - 2 * masking) / (MUFU + MORE_ALU)
    return 2 * min(8, max(0, round(16 * min(of_issue, of_alu))))


def work(roots: Sequence[Expr]) -> int:
    """Instructions for an element of a tile."""
    return sum(HEAVY.get(e.op, 1) for e in of_elements(roots))


def of_elements(roots: Sequence[Expr]) -> list[Expr]:
    """Nodes that a thread computes for every element of a tile. It has one row, so nodes of a column count as well."""
    return [e for e, level in levels(*roots).items() if level & COLUMN and e.op != "var"]
