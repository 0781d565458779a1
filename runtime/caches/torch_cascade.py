"""Attention of torch's paged cache to prefixes that rows share: each prefix is read once for all rows of its group.

Arrays on the device and the plan of a prefix last as long as the same rows share the same pages. So a step of decoding
launches three kernels more than one call: two attend to the prefix, and one merges.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from frisket.dsl.errors import ParameterError
from frisket.dsl.ir import uses
from frisket.grammar.memo import remember
from frisket.runtime.attention.attention import Attention
from frisket.runtime.attention.merge import merge
from frisket.runtime.attention.weighted import Sums, keywords_of_part, merge_weighted, merged_results
from frisket.runtime.machine.cpp_build import lacking
from frisket.runtime.machine.modules import loaded
from frisket.runtime.plans.run import runs

from . import positions
from .cascade import SharedPrefixes
from .positions import behind_prefix, placed

# bytes that are read less often, from which a cascade pays: on a GPU three more launches, on a CPU its host code
GPU_BYTES, CPU_BYTES = 32 << 20, 16 << 20
# CPU kernels convert keys of 8 bits slower for more rows of a key head than these. Fewer members gain too little: the
# first number is for int8 on a matrix unit
ROWS_OF_8_BITS, FEWEST_MEMBERS = 16, (4, 8)
KEPT = 16  # plans


def most_members(q: Tensor, keys: Tensor, of_8_bits: bool) -> int | None:
    """The most rows whose queries are packed for one reading of a prefix; 1 where packing does not pay, None: any."""
    if not (q.is_cpu and of_8_bits):
        return None
    members = ROWS_OF_8_BITS // (q.shape[1] // keys.shape[1] * q.shape[2])
    by_bytes = keys.dtype == torch.int8 and not lacking("amx")
    return members if members >= FEWEST_MEMBERS[0 if by_bytes else 1] else 1


def pays(shared: SharedPrefixes, bytes_of_token: int, is_cpu: bool) -> bool:
    """Whether a cascade saves reading more than it costs."""
    return shared.saved * bytes_of_token >= (CPU_BYTES if is_cpu else GPU_BYTES)


class PrefixPart(NamedTuple):
    """The keys that packed queries read."""

    pages: Tensor  # int32 [groups, width]
    sizes: tuple[int, int, int, int]  # of the problem
    plans: dict[Any, Any] | None  # plans of the part, where the next step sees the same keys


class Cascade:
    """The calls of a cache for rows that share prefixes in one way."""

    def __init__(self, shared: SharedPrefixes, device: torch.device) -> None:
        self.shared, self.device, self.neighbours = shared, device, shared.neighbours
        arrays = dict(vars(shared))
        if shared.real.all():  # all groups have as many rows
            del arrays["real"]
        self.arrays = {n: torch.from_numpy(x).to(device, non_blocking=True) for n, x in arrays.items()}
        self.tokens = shared.tokens[:, 0].tolist()
        self.plans: dict[Any, Any] = {}

    def attend(self, cache: Any, att: Attention, q: Tensor, counts: Any, tree: Any, params: dict[str, Any]) -> Any:
        """`attend` of a cache, with shared prefixes read once."""
        arrays, known, new = self.arrays, cache.known(), q.shape[2]
        places, tables = cache._places_of(q, counts, tree)
        start = tables[positions.START][:, None]
        # padding sees nothing, and rows may have been cut within their prefix
        behind = counts is None and known is not None
        if behind and all(n - new >= tokens for n, tokens in zip(known, self.tokens, strict=True) if tokens):
            hides = positions.hides_earlier(att, params, cache.capacity)
            of_prefix = placed(att, positions.WHOLE_PREFIX if hides else positions.SEEN_PREFIX)
            skip = arrays["tokens"]
        else:
            of_prefix = placed(att, positions.PREFIX)
            skip = torch.minimum(start, arrays["tokens"])  # new tokens are no part of a prefix
        asked, params = params, keywords_of_part(att, params)
        by_sums = params["return_sums"]
        reads = of_prefix.program.names
        prefix_params = {n: x for n, x in params.items() if n in reads or n in positions.CALL_KEYWORDS}
        if att.options.sinks is not None or params.get("sinks") is not None:  # they count once
            prefix_params["sinks"] = torch.full((q.shape[1],), -torch.inf, device=q.device)
        packed, of_queries = self._packed(q), self._tables(of_prefix, tables, skip, new, counts is not None)
        plans = self.plans if skip is arrays["tokens"] and reads == {positions.STOP} and not by_sums else None
        part = PrefixPart(arrays["pages"], _sizes(att, packed, cache), plans)
        before = cache._read(of_prefix, packed, of_queries, prefix_params, part)
        of_rest, tables = placed(att, behind_prefix(places)), {**tables, positions.SKIP: skip[:, 0]}
        behind = cache._read(of_rest, q, tables, params)
        if not by_sums:
            return merged_results(*self._merged(before, behind, cache._merges), asked)
        missing = self.arrays["slots"] < 0  # rows without a prefix
        prefix = [self._of_rows(x) for x in before[1]]
        prefix = [x.masked_fill(missing.view(-1, *[1] * (x.ndim - 1)), 0) for x in prefix]
        values, parts = {**tables, **params}, ((behind[0], Sums(*prefix)), behind)
        return merged_results(*merge_weighted(of_rest, parts, values, "bhsd", cache._sizes(q)), asked)

    def _packed(self, q: Tensor) -> Tensor:
        """Queries [groups, heads, members * new, dim]: those of one group after each other, without a copy where rows
        have one query each and lie in this order."""
        rows = self.arrays["rows"]
        members = q[rows] if self.neighbours is None else q[self.neighbours].view(*rows.shape, *q.shape[1:])
        return members.transpose(1, 2).flatten(2, 3)

    def _tables(
        self, att: Attention, tables: dict[str, Tensor], skip: Tensor, new: int, padded: bool
    ) -> dict[str, Tensor]:
        """The tables that `att`, an attention to prefixes, reads of packed queries; each row sees `skip` [batch, 1]
        of its prefix."""
        arrays, reads, start = self.arrays, att.program.names, tables[positions.START][:, None]
        rows, of_queries = arrays["rows"], dict[str, Tensor]()
        # one query of every row needs no range, and has no padding
        node = None if new == 1 and not padded else torch.arange(new, device=rows.device).int()
        if positions.PLACE in reads:
            place = start if node is None else start + tables.get(positions.DEPTH, node)
            of_queries[positions.PLACE] = place[rows].flatten(1)
        if positions.ROW in reads:
            of_queries[positions.ROW] = rows.int().repeat_interleave(new, 1)
        if skip is arrays["tokens"]:
            return of_queries | {positions.STOP: arrays["stops"]}
        stop = skip if node is None else torch.where(start + node < tables[positions.END][:, None], skip, 0)
        stop = stop[rows]
        if "real" in arrays:
            stop = torch.where(arrays["real"][..., None], stop, 0)
        return of_queries | {positions.STOP: stop.flatten(1)}

    def _merged(self, before: Any, behind: Any, merges: dict[Any, Any]) -> tuple[Tensor, Tensor]:
        """(out, lse) of every row, from packed queries of groups, and from the tokens behind."""
        rows, slots = self.arrays["rows"], self.arrays["slots"]
        if _merges_by_kernel(behind[0]):
            kernel = loaded(f"{__package__}.triton_merge")  # one launch instead of some forty
            return kernel.merged(before, behind, slots, rows.shape[1], merges)  # type: ignore[no-any-return]
        out, lse = (self._of_rows(x) for x in before)
        lse = torch.where(slots[:, None, None] < 0, -torch.inf, lse)  # a row without a prefix
        return merge((out, lse), behind)

    def _of_rows(self, packed: Tensor) -> Tensor:
        """Numbers of every row, from those of packed queries; of a row without a prefix any."""
        members = self.arrays["rows"].shape[1]
        rows: Tensor = packed.unflatten(2, (members, -1)).transpose(1, 2).flatten(0, 1)  # type: ignore[no-untyped-call]
        return rows[self.arrays["slots"]]


def plan_of(part: PrefixPart, att: Attention, qkv: tuple[Tensor, Tensor, Tensor], tables: dict[str, Any]) -> Any:
    """The plan of a part whose `tables` stay as they are, made once."""
    assert part.plans is not None
    (q, k, _), pages = qkv, part.pages
    key = att, q.shape, part.sizes
    if key not in part.plans:
        batch, heads, q_len, _ = q.shape
        plan = att.plan(q_len, pages.shape[1] * k.shape[2], batch, heads, sizes=part.sizes, **tables)
        remember(part.plans, key, plan, KEPT)
    return part.plans[key]


def _sizes(att: Attention, packed: Tensor, cache: Any) -> tuple[int, int, int, int]:
    """The sizes of the problem of packed queries. A program that does not read a size gets that of the arrays."""
    reads, (groups, heads, q_len, _) = frozenset().union(*map(uses, att.program.exprs.parts)), packed.shape
    if "Q_LEN" in reads and q_len > cache.capacity:
        text = f"a cascade packs {q_len} queries into a row, and Q_LEN, which {att} reads, is {cache.capacity}"
        raise ParameterError(f"{text}\n  leave out cascade, or give fewer queries at a time")
    batch, queries = (cache.batch if "B" in reads else groups), (cache.capacity if "Q_LEN" in reads else q_len)
    return batch, heads, queries, cache.capacity


def _merges_by_kernel(out: Tensor) -> bool:
    return not out.is_cpu and out.dtype != torch.float64 and runs(out.device)
