"""Writes the Triton decode kernels: attention of few queries to parts of the keys, and the parts combined.

A program works on one tile of queries and one part of the key tiles that these queries see. The query heads that share
a key head are packed into one tile, so that keys and values are read once for all of them. They are not where the mask
depends on the head. A second kernel combines the parts of a row in the order of the keys: equal calls give equal bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from frisket.dsl.ir import Expr, build, transform, var
from frisket.lowering.kernels.expr import LEVELS, ROW
from frisket.lowering.kernels.text import skeleton
from frisket.lowering.plan import LoopPlan, Target

from .forward import ForwardKernel, combine
from .writer import Dims, TritonKernel, check_tile, module, padded

DECODE = skeleton(__package__, "decode")

H, FIRST = var("h"), var("h_first")  # the head, and the first of those in a tile


def emit(
    plan: LoopPlan, target: Target, dims: Dims, *, packs: bool = True, sinks: bool = False, top: bool = False,
    low: bool = False, balanced: bool = False,
) -> str:  # fmt: skip
    """The text of a module with `attention_decode` and `attention_combine`; arguments as in `forward.emit`. Without
    `packs`, a tile holds the queries of one head. Where `target.splits` is 1 there are no parts: `attention_decode`
    writes the results. With `balanced`, each row has parts in proportion to the tiles that it sees. The kernel reads
    their number from the table of spans, so the host need not know it."""
    emitted = kernels(plan, target, dims, packs=packs, sinks=sinks, top=top, low=low, balanced=balanced)
    return module("Attention of few queries", plan, dims, emitted)


def kernels(
    plan: LoopPlan, target: Target, dims: Dims, *, packs: bool = True, sinks: bool = False, top: bool = False,
    low: bool = False, balanced: bool = False,
) -> list[TritonKernel]:  # fmt: skip
    check_tile(target)
    if target.splits == 1:
        return [DecodeKernel(plan, target, dims, packs, sinks, top, low).kernel()]
    first = DecodeKernel(plan, target, dims, packs, balanced=balanced).kernel()
    return [first, combine(plan, dims, sinks=sinks, top=top, low=low, balanced=balanced)]


def packed(plan: LoopPlan, dims: Dims) -> int:
    """The number of query heads packed into a tile, 1 where the mask depends on the head: all heads that share a key
    head, or the largest divisor of their number whose tile fits into registers."""
    if plan.uses_head:
        return 1
    dim, most = padded(max(dims.head_dim, dims.v_dim)), rows_of_a_tile(dims)
    if dims.group <= (128 if dim <= 128 else most):
        return dims.group
    return max(n for n in range(1, most + 1) if dims.group % n == 0)


def rows_of_a_tile(dims: Dims) -> int:
    """The most rows of a packed tile, a row being one query of one head: 128 rows hold 16 queries of each of 8 heads,
    which read keys and values once. Where keys have 8 bits, two programs of 64 rows would take a tenth less time by the
    model of an H100, and read them twice. A key head with more heads than this may have a larger tile."""
    dim = padded(max(dims.head_dim, dims.v_dim))
    return 128 if dim <= 128 and dims.dtype != "float32" else 64 if dim <= 256 else 16


class DecodeKernel(ForwardKernel):
    skeleton, name = DECODE, "attention_decode"
    bounded = False  # loads of keys take the time here, not the mask, and stored keys need the registers

    def __init__(
        self, plan: LoopPlan, target: Target, dims: Dims, packs: bool, sinks: bool = False, top: bool = False,
        low: bool = False, balanced: bool = False,
    ) -> None:  # fmt: skip
        self.group, self.pack = dims.group, packed(plan, dims) if packs else 1
        self.packs, self.parted, self.balanced = self.pack > 1, target.splits != 1, balanced
        levels = {**LEVELS, "h": ROW} if self.packs else LEVELS  # heads of a packed tile are rows of it
        target = replace(target, order="forward", descriptors=False)
        super().__init__(plan, target, dims, sinks, top, low, levels=levels)
        self.numbers = ("heads", "q_len", "kv_len", *["splits"] * self.parted, *["batches"] * balanced)
        self.numbers += ("pool",) * self.paged

    def kernel(self) -> TritonKernel:
        t = self.target
        heads, queries = (f"heads / {self.pack}", "packed queries") if self.packs else ("heads", "queries")
        rows = "q tiles * splits, {}, batch" if self.parted else "q tiles, {}, batch"
        rows = "{}, batch * q tiles * (splits + 1)" if self.balanced else rows
        launch = (
            f"attention_decode: grid ({rows.format(heads)}), tiles of {t.block_q} {queries} by {t.block_k} "
            f"keys,\n    num_warps={t.num_warps}, num_stages={t.num_stages}."
        )
        return TritonKernel(self.name, self.filled(self.skeleton), launch)

    def holes(self) -> dict[str, Any]:
        common = super().holes()
        whole = self.pack == self.dims.group  # all query heads of a key head in one tile
        first_head = "head" if not self.packs else "kv_head * GROUP" if whole else "first_head"
        return common | {
            "balanced": self.balanced,
            "tiles_seen": [
                "of_sequences = tiles_seen(",
                f"    first + lanes, rows_of_tiles, batches, heads, {first_head}, Spans, Count, SliceOf, records",
                ")",
            ],
            "rows_of_tiles": "rows_of_tiles" if self.parted else "tl.num_programs(0)",
            "parts": "parts" if self.balanced else "splits",
            "queries": "QUERIES" if self.packs else "BLOCK_Q",
            "packs": self.packs,
            "partly": self.packs and not whole,
            "pack": self.pack,
            "packed_heads": "GROUP" if whole else "PACK",
            "of_heads": "the GROUP" if whole else "PACK",
            "own_head": "head" if not self.packs else "kv_head" if whole else "first_head",
            "first_head": first_head,
            "by_group": FIRST.name in self.used,
        }

    def rewritten(self, e: Expr) -> Expr:
        """An Expr in which `h // n` is that of the tile's first head, where all heads of the tile have the same: values
        that depend on the key head alone are then read once, not for every row."""
        return super().rewritten(transform(e, self._of_group) if self.packs else e)

    def _of_group(self, e: Expr) -> Expr:
        shared = e.op == "floordiv" and e.args[0] is H and e.args[1].op == "lit" and e.args[1].name > 0
        return build("floordiv", FIRST, e.args[1]) if shared and e.args[1].name % self.group == 0 else e
