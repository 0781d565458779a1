"""Writes the fused Gluon backward of a LoopPlan for Hopper: dq, dk and dv in five products a tile.

One program keeps a tile of 128 keys and values of one key head. It walks the tiles of queries that see it, of all
query heads of the group, and dk and dv stay in registers. A tile of dq is the sum of what several programs compute, so
it is added to float32 in global memory by TMA, and `attention_convert` rounds it.

One warp, `feed`, loads tiles of queries, of cotangents and of the numbers of `attention_delta` into rings. Two warp
groups, `differentiate`, take half of the keys each. A product for dq takes weights of all keys, so each group leaves
its weights in shared memory. It then computes one part of the tile of dq: half of its queries or half of its dims.
Another warp, `add_dq`, adds these parts.

With `ordered` sums every tile of dq is added to in a fixed order, and equal calls give equal bits. A counter for each
tile says how many programs have added to it, and a program waits until those of smaller rows of tiles have. No two
programs wait for each other. A program takes its row from a counter when it begins, so the programs that it waits for
have begun. The one with the smallest row waits for no other.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any

from frisket.dsl.errors import LoweringError
from frisket.lowering.kernels.features import GLUON_BACKWARD, missing
from frisket.lowering.kernels.text import filled, parts
from frisket.lowering.kernels.triton.backward import GradientKernel, delta_kernel
from frisket.lowering.kernels.triton.module import Dims, TritonKernel, module, padded
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.kernels.triton.writer import KernelTraits
from frisket.lowering.plan import LoopPlan

from .forward import INSTEAD, translated

HOPPER = parts(__package__, "hopper_backward")
KEYS = 128  # of a tile, half of them a warp group's
PART = 64  # queries of a part of dq, the fewest that a product has
CONVERT = Target("triton", 32, 32, 4, 1)  # of attention_convert, which waits for memory
# waits for copies until what they wrote is seen by others, also by their copies
WRITTEN = "cp.async.bulk.wait_group 0; fence.proxy.async; bar.warp.sync 0xffffffff; mov.b32 $0, $1;"
GLUON = "from triton.experimental import gluon\n"
TRITON = "import triton\nfrom triton import language as tl\n"  # for the kernels that Triton compiles
BARRIERS = {"kv_full": 2, "ds_full": 2, "dq_full": 2, "dq_free": 2}
OF_SLOT = ("q_full", "q_free", "g_full", "g_free")  # barriers of a slot of the rings
ONCE = ("q_full", "g_full")


def queries_of(head_dim: int) -> int:
    """The queries of a tile: as many as registers hold next to the sums of dk and dv."""
    return 128 if padded(head_dim) <= 64 else 64


def part_of(tile: Target, head_dim: int) -> tuple[int, int]:
    """The rows and columns of a warp group's part of dq: half of the queries, or half of the dims."""
    dim = padded(head_dim)
    return (PART, dim) if tile.block_q == 2 * PART else (PART, dim // 2)


def refused_sizes(head_dim: int, v_dim: int, arch: str) -> str:
    """A reason why the kernel is not written for such heads, or ""."""
    if arch != "sm_90":
        return f"the fused Gluon backward is written for sm_90, not {arch}"
    if head_dim != v_dim:
        return GLUON_BACKWARD["unequal head sizes"]
    if padded(head_dim) not in (64, 128):
        return f"the fused Gluon backward takes head dims of 33 to 128, not {head_dim}"
    return ""


def refused(plan: LoopPlan, dims: Dims, arch: str) -> str:
    """A reason why the kernel is not written for calls of this plan, or ""."""
    return refused_sizes(dims.head_dim, dims.v_dim, arch) or missing(GLUON_BACKWARD, plan, dims, dims.dtype)


def emit(plan: LoopPlan, target: Target, dims: Dims, *, dlse: bool = True, ordered: bool = True) -> str:
    """The text of the fused backward's module: `emit(plan, target, Dims(128, 128, "bfloat16"))`, with or without a
    cotangent of lse, in an `ordered` way or not; the same input gives the same text. A LoweringError has a reason of
    `features.GLUON_BACKWARD`."""
    tile = target.fused or target
    if why := refused(plan, dims, tile.arch):
        raise LoweringError(f"{why}\n  {INSTEAD}")
    if (tile.block_q, tile.block_k) != (queries_of(dims.head_dim), KEYS):
        shape = f"{queries_of(dims.head_dim)} queries and {KEYS} keys"
        raise LoweringError(f"the fused Gluon backward tiles {shape}, not {tile.block_q} x {tile.block_k}")
    delta = delta_kernel(plan, dims, dlse, apart=True)
    kernels = [GluonBackward(plan, tile, dims, ordered).backward(), delta, convert_kernel(dims)]
    text = module("Attention backward", plan, dims, kernels, HOPPER["module"])
    ours, delta_on, theirs = text.partition('\n\n\n@triton.jit(do_not_specialize=["heads", "q_len", "length"])')
    return translated(ours).replace(GLUON, TRITON + GLUON, 1) + delta_on + theirs


def convert_kernel(dims: Dims) -> TritonKernel:
    """The kernel that rounds dq."""
    launch = (
        f"attention_convert: grid (query tiles, heads, batch), tiles of {CONVERT.block_q} queries, "
        f"num_warps={CONVERT.num_warps}."
    )
    return TritonKernel("attention_convert", filled(HOPPER["convert"], and_d=and_d(dims)), launch)


def and_d(dims: Dims) -> str:
    """The condition that columns of a tile exist."""
    return "" if padded(dims.head_dim) == dims.head_dim else " & (d < HEAD_DIM)[None, :]"


def listed(names: Iterable[str]) -> list[str]:
    """The lines of some arguments."""
    text = ", ".join(names)
    return textwrap.wrap(f"{text},", 100) if text else []


class GluonBackward(GradientKernel):
    """Writes the functions of the fused backward and the kernel that starts them."""

    features = GLUON_BACKWARD

    def __init__(self, plan: LoopPlan, target: Target, dims: Dims, ordered: bool) -> None:
        traits = KernelTraits("attention_backward", swapped=True, gathers=False)
        super().__init__(plan, target, dims, traits, "qkv")
        self.ordered_sums = ordered
        self.ordered = self.ordered and not ordered  # rows of ordered sums begin by their numbers

    def backward(self) -> TritonKernel:
        tile = self.target
        launch = (
            f"attention_backward: grid {self.grid_of('key tiles', 'key heads')}, tiles of {tile.block_k} keys by "
            f"{tile.block_q} queries in {tile.num_stages} stages, num_warps=4 and 6 warps more."
        )
        text = self.filled(HOPPER["kernel"], {**self.holes(), **self.before_loops()})
        return TritonKernel(self.traits.name, text, launch)

    def holes(self) -> dict[str, Any]:
        common, (of_row, of_head) = super().holes(), self.axes
        tabled, ordered = self.tabled, self.ordered_sums
        place = ("number % gl.num_programs(0)", "number // gl.num_programs(0) % gl.num_programs(1)")
        # a program of one head reads its entry of the tables once, before its warps part
        grouped = self.dims.group > 1
        tables = ["Spans", "Count", "SliceOf", "records"] if grouped else ["first", "count"]
        turns = ["Turns", *["entry"] * (not grouped)]
        counts = {**BARRIERS, **dict.fromkeys(OF_SLOT, "STAGES")}
        columns, of_part = self._part()
        return {
            **common,
            **of_part,
            "ordered_sums": ordered,
            "written": repr(WRITTEN),
            "by_order": tabled and self.ordered,
            "ticket_row": place[of_row],
            "ticket_head": place[of_head],
            "walk": listed(tables * tabled),
            "turns": listed(["Added", *turns * tabled] * ordered),
            "turn": "gl.load(Turns + entry * tiles + tile)" if tabled else "start // BLOCK_K",
            "first_head": "kv_head * GROUP" if grouped else "head",
            "key_heads": "(heads // GROUP)" if grouped else "heads",
            "passed": self._passed(),
            "part_columns": columns,
            "barriers": [{"name": name, "count": count} for name, count in counts.items()],
            "halves": [{"half": 0}, {"half": 1}],
            "and_d": and_d(self.dims),
        }

    def _part(self) -> tuple[int, dict[str, str]]:
        """The columns of a group's part of dq, and the holes of its product."""
        dim = padded(self.dims.head_dim)
        by_queries = self.target.block_q == 2 * PART
        holes = {"row_of_part": f" + half * {PART}" * by_queries}
        holes["column_of_part"] = "0" if by_queries else f"half * {dim // 2}"
        for half in range(2):
            weights = f"weights_in.index(2 * pair + {half}).permute((1, 0))"
            keys = f"keys.index({half} + far).reshape([HALF, DIM])"
            holes[f"part_of_weights_{half}"] = weights + f".slice(half * {PART}, {PART}, dim=0)" * by_queries
            holes[f"part_of_keys_{half}"] = keys + f".slice(half * {dim // 2}, {dim // 2}, dim=1)" * (not by_queries)
        return part_of(self.target, self.dims.head_dim)[1], holes

    def _passed(self) -> list[str]:
        """The arguments of `differentiate` that its expressions read."""
        tables = [n for t in self.plan.every_table for n in self.arguments[t.name].all]
        names = [*(f"{n}_origin" for n in self.origins()), *self.sizes(), *self.slots(), *tables]
        return listed(names)

    def tiles(self) -> list[dict[str, Any]]:
        """The holes of both loops over a range of tiles."""
        edge = {"which": "Partial tiles, before and behind the full ones: the mask is a predicate.", "range": "borders"}
        full = {"which": "Full tiles: every position is visible.", "range": "borders, hi - lo"}
        return [{**edge, "border": True, **self.tile("inside")}, {**full, "border": False, **self.tile("")}]

    def tile(self, inside: str) -> dict[str, Any]:
        holes = super().tile(inside)
        # the ends of columns already stop at the last query
        return {**holes, "bounded": any("inside" in line for line in holes["visible"])}
