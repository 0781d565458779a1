"""Writes the Triton decode kernels: attention of few queries to parts of the keys, and the parts combined.

A program works on one tile of queries and one part of the key tiles that these queries see. The query heads that share
a key head are packed into one tile, so that keys and values are read once for all of them. They are not where the mask
depends on the head. A second kernel combines the parts of a row in the order of the keys: equal calls give equal bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from frisket.dsl.ir import Expr, build, transform, var
from frisket.lowering.kernels.text import fields, skeleton
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import LoopPlan

from .forward import NO_ARRAYS, ForwardKernel, OptionalArrays, combine
from .writer import Dims, KernelTraits, TritonKernel, check_tile, module, padded

DECODE = skeleton(__package__, "decode")

H, FIRST = var("h"), var("h_first")  # the head, and the first of those in a tile


def emit(
    plan: LoopPlan,
    target: Target,
    dims: Dims,
    optional: OptionalArrays = NO_ARRAYS,
    *,
    packs: bool = True,
    balanced: bool = False,
) -> str:
    """The text of a module with `attention_decode` and `attention_combine`; arguments as in `forward.emit`. Without
    `packs`, a tile holds the queries of one head. Where `target.splits` is 1 there are no parts: `attention_decode`
    writes the results. With `balanced`, each row has parts in proportion to the tiles that it sees. The kernel reads
    their number from the table of spans, so the host need not know it."""
    check_tile(target)
    if target.splits == 1:
        emitted = [DecodeKernel(plan, target, dims, optional, packs).kernel()]
    else:
        first = DecodeKernel(plan, target, dims, NO_ARRAYS, packs, balanced).kernel()
        emitted = [first, combine(plan, dims, optional, balanced=balanced)]
    return module("Attention of few queries", plan, dims, emitted)


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
    return 128 if dim <= 128 and dims.half else 64 if dim <= 256 else 16


class DecodeKernel(ForwardKernel):
    """The kernel of few queries. With `packs` a tile has as many heads as `packed` says; `balanced` is as of `emit`."""

    skeleton, name = DECODE, "attention_decode"

    def __init__(
        self, plan: LoopPlan, target: Target, dims: Dims, optional: OptionalArrays, packs: bool, balanced: bool = False
    ) -> None:
        self.group, self.pack = dims.group, packed(plan, dims) if packs else 1
        self.balanced = balanced
        # loads of keys take the time here, not the mask, and stored keys need the registers
        traits = KernelTraits(packs=self.pack > 1, parted=target.splits != 1, bounded=False)
        super().__init__(plan, replace(target, order="forward", descriptors=False), dims, optional, traits)
        self.numbers = ("heads", "q_len", "kv_len", *["splits"] * traits.parted, *["batches"] * balanced)
        self.numbers += ("pool",) * self.paged

    def kernel(self) -> TritonKernel:
        t = self.target
        heads, queries = (f"heads / {self.pack}", "packed queries") if self.traits.packs else ("heads", "queries")
        rows = "q tiles * splits, {}, batch" if self.traits.parted else "q tiles, {}, batch"
        rows = "{}, batch * q tiles * (splits + 1)" if self.balanced else rows
        launch = (
            f"attention_decode: grid ({rows.format(heads)}), tiles of {t.block_q} {queries} by {t.block_k} "
            f"keys,\n    num_warps={t.num_warps}, num_stages={t.num_stages}."
        )
        return TritonKernel(self.name, self.filled(self.skeleton), launch)

    def holes(self) -> dict[str, Any]:
        common = super().holes()
        whole = self.pack == self.dims.group  # all query heads of a key head in one tile
        first_head = "head" if not self.traits.packs else "kv_head * GROUP" if whole else "first_head"
        return common | {
            **fields(self, "balanced pack"),
            "first_head": first_head,
            "tiles_seen": [
                "of_sequences = tiles_seen(",
                f"    first + lanes, rows_of_tiles, batches, heads, {first_head}, Spans, Count, SliceOf, records",
                ")",
            ],
            "rows_of_tiles": "rows_of_tiles" if self.traits.parted else "tl.num_programs(0)",
            "parts": "parts" if self.balanced else "splits",
            "queries": "QUERIES" if self.traits.packs else "BLOCK_Q",
            "partly": self.traits.packs and not whole,
            "packed_heads": "GROUP" if whole else "PACK",
            "of_heads": "the GROUP" if whole else "PACK",
            "own_head": "head" if not self.traits.packs else "kv_head" if whole else "first_head",
            "by_group": FIRST.name in self.used,
        }

    def rewritten(self, e: Expr) -> Expr:
        """An Expr in which `h // n` is that of the tile's first head, where all heads of the tile have the same: values
        that depend on the key head alone are then read once, not for every row."""
        return super().rewritten(transform(e, self._of_group) if self.traits.packs else e)

    def _of_group(self, e: Expr) -> Expr:
        shared = e.op == "floordiv" and e.args[0] is H and e.args[1].op == "lit" and e.args[1].name > 0
        return build("floordiv", FIRST, e.args[1]) if shared and e.args[1].name % self.group == 0 else e
