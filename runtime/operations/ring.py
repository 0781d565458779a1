"""Ring attention as an operator: queries and keys over one axis of a mesh, under any mask."""

from __future__ import annotations

from typing import Any

import numpy as np

from frisket.dsl import ir
from frisket.dsl.errors import ParameterError, ShapeError
from frisket.runtime.calls.options import Options
from frisket.runtime.machine.parameters import names_of, traced
from frisket.runtime.masks.mask import Mask, only
from frisket.runtime.parallel.deal import Deal
from frisket.runtime.parallel.deal import deal as make_deal
from frisket.runtime.parallel.jax_ring import attend
from frisket.runtime.sharding.fit import fitting
from frisket.runtime.sharding.fit import names_of as axes_of

from .base import AttentionRegistry
from .metadata import AttentionMetadata
from .operators import FrisketAttention
from .output import AttentionOutput
from .problem import OpCall


@AttentionRegistry.register
class RingAttention(FrisketAttention):
    """Attention of sequences split over the devices of a mesh axis, `metadata.sequence_axis_name`.

    `fk.parallel.deal` distributes tokens over devices by the mask, and keys and values travel as far as some
    query sees them: round the ring, or, with `scan_ring_attention=False`, to all at once. Batch entries and heads are
    split as the metadata's shardings say. Without a mesh, or where it has not that axis, the ring is of one device.
    """

    @classmethod
    def get_impl_name(cls) -> str:
        return "ring"

    def forward_native(
        self, query: Any, key: Any, value: Any, mask: Any = None, *, deal: Deal | None = None, **given: Any
    ) -> AttentionOutput:
        """Ring attention of as many queries as keys, without `origin` and `sizes`.

        Arrays and the result are in the order of the sequence, and are distributed in between. With `deal`, made by
        `fk.parallel.deal` for the same mask or one that shows more, they are in its order (`deal.permute(x, axis=1)`),
        once for all layers; tables, segments and positions stay in the order of the sequence. Without it, clauses of
        the mask that read traced values do not decide how tokens are distributed, nor which keys are sent.
        """
        if given.get("origin") is not None or given.get("sizes") is not None:
            raise ParameterError("ring attention takes whole sequences, without origin and sizes")
        if query.shape[1] != key.shape[1]:
            raise ShapeError(
                f"ring attention takes as many queries as keys, not {query.shape[1]} and {key.shape[1]}\n"
                "  a step of decoding is for a cache over the devices: frisket.caches.jax"
            )
        one = _Dealt(self.metadata, deal, query.shape[1])
        return FrisketAttention.forward_native(one, query, key, value, mask, **given)


class _Dealt(FrisketAttention):
    """One call of ring attention, of arrays in the order of the sequence or of a deal."""

    def __init__(self, metadata: AttentionMetadata, deal: Deal | None, places: int) -> None:
        super().__init__(metadata)
        self.deal, self.axis = deal, metadata.sequence_axis_name
        self.ranks = 1 if metadata.mesh is None else metadata.mesh.shape.get(self.axis, 1)
        if deal is None:
            return
        if not isinstance(deal, Deal) or deal.ranks != self.ranks:
            raise ParameterError(
                f"deal is {deal!r}; it is an fk.parallel.Deal over {self.ranks} ranks of {self.axis!r}"
            )
        if places != len(deal.order):
            raise ShapeError(f"arrays have {places} places, the deal {len(deal.order)}: deal.permute(x, axis=1)")

    def lengths(self, query: Any, key: Any) -> tuple[int, int, int, int]:
        length = query.shape[1] if self.deal is None else self.deal.length
        return query.shape[0], query.shape[2], length, length

    def attend(self, call: OpCall, options: Options, query: Any, key: Any, value: Any, how: dict[str, Any]) -> Any:
        arrays, deal = (query, key, value), self.deal
        if self.ranks == 1:
            q, k, v = arrays if deal is None else (deal.unpermute(x, 1) for x in arrays)
            out = super().attend(call, options, q, k, v, how)
            return out if deal is None else deal.permute(out, 1)
        if deal is None:
            batch, heads, length, _ = self.lengths(query, key)
            known, values = _known(call)
            tile = options.tile[0] if options.tile else _tile(length, self.ranks)
            deal = make_deal(known, length, self.ranks, tile=tile, batch=batch, heads=heads, **values)
            out = self._over(deal, call, options, [deal.permute(x, 1) for x in arrays], how["seed"])
            return deal.unpermute(out, 1)
        return self._over(deal, call, options, list(arrays), how["seed"])

    def _over(self, deal: Deal, found: OpCall, options: Options, arrays: list[Any], seed: Any) -> Any:
        """The call on every device."""
        mesh, att = self.metadata.mesh, found.attention(options)
        assert mesh is not None  # there are several ranks
        split = self.specs(arrays[0])[0]
        batch = fitting(mesh.shape, split[0], arrays[0].shape[0], {self.axis})
        heads = fitting(mesh.shape, split[2], arrays[1].shape[2], {self.axis, *axes_of(batch)})
        variant: Any = "ring" if self.metadata.scan_ring_attention else "all-gather"
        return attend(
            att, *arrays, deal=deal, axis=self.axis, variant=variant, batch_axis=batch, head_axis=heads, mesh=mesh,
            seed=seed, sinks=found.sinks, **found.params,
        )  # fmt: skip


def _known(found: OpCall) -> tuple[Mask, dict[str, Any]]:
    """(the clauses of a mask whose values are known, which show all that the mask shows; those values)."""
    if found.mask is None:
        return Mask(ir.TRUE), {}
    values = {n: np.asarray(x) if hasattr(x, "ndim") else x for n, x in found.params.items() if not traced(x)}
    unknown = {n for n, x in found.params.items() if traced(x)}
    kept = ir.conj(*(e for e in ir.clauses(found.mask.expr) if not names_of(e).keys() & unknown))
    return Mask(kept, only(found.mask.params, kept)), only(values, kept)


def _tile(length: int, ranks: int) -> int:
    """128 tokens, or fewer where a device would not have four tiles."""
    tile = 128
    while tile > 16 and length < 4 * tile * ranks:
        tile //= 2
    return tile
