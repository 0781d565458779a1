"""The operators there are: frisket on every backend, the dense interpreter, ring attention."""

from __future__ import annotations

from inspect import signature
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from frisket.dsl import ir
from frisket.dsl.errors import BackendError, ParameterError, ShapeError
from frisket.runtime.attention.attention import Attention
from frisket.runtime.attention.entry import attention_for
from frisket.runtime.backends.base import Backend, backends_of
from frisket.runtime.calls.arrays import scale_of
from frisket.runtime.calls.options import Options, rate_and_seed
from frisket.runtime.machine.parameters import names_of, traced
from frisket.runtime.masks.mask import Mask, only
from frisket.runtime.parallel.deal import Deal
from frisket.runtime.parallel.deal import deal as make_deal
from frisket.runtime.parallel.jax_ring import attend
from frisket.runtime.sharding.partition import fitting
from frisket.runtime.sharding.partition import names_of as axes_of

from .base import AttentionImpl, AttentionRegistry
from .metadata import AttentionMetadata
from .problem import OpCall, problem
from .records import AttentionOutput


@AttentionRegistry.register
class FrisketAttention(AttentionImpl):
    """Attention compiled by frisket, on the backend of the platform it runs on.

    >>> import jax.numpy as jnp
    >>> q = jnp.ones((1, 64, 4, 16))
    >>> FrisketAttention()(q, q[:, :, :2], q[:, :, :2], causal=True).attention_outputs.shape
    (1, 64, 4, 16)
    """

    backend: ClassVar[str | None] = None

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        return "frisket", "blocksparse", "sdpa", "flash_attn2"

    def forward_native(
        self, query: Any, key: Any, value: Any, mask: Any = None, *, bias: Any = None, init_bias: Any = None,
        score: Any = None, causal: bool = False, sliding_window: int | tuple[int, int] | None = None,
        segment_ids: Any = None, positions: Any = None, softmax_aux: Any = None, softmax_scale: Any = None,
        logits_soft_cap: Any = None, dropout_prob: float | None = None, deterministic: bool = True,
        dropout_rng: Any = None, origin: Any = None, sizes: Any = None, **params: Any,
    ) -> AttentionOutput:  # fmt: skip
        """Attention of query [batch, q_len, heads, dim] over key and value [batch, kv_len, kv_heads, dim].

        `mask` is a text, a function, an `fk.Mask`, or a Bool array [batch, heads, q_len, kv_len] (an axis may have
        length 1), [batch, q_len, kv_len] or [batch, kv_len]; True is what is seen. `score` and `params` are a score
        mod and values of names, as in `fk.attention`. What more is given is joined to that:

        - `causal`, and `sliding_window=w` or `(left, right)`: keys at most so far before and after a query. Where q
          and k differ in length the last query is at the last key, unless `positions` or `origin` say otherwise.
        - `segment_ids`, integers [batch, length], or a pair, of queries and of keys: equal ones see one another,
          negative ones are padding.
        - `positions`, likewise: where places of the arrays are in the sequence, for mask, score, causal and window.
        - `logits_soft_cap` after `score`, then `bias`, like an array mask; `init_bias()` makes it, where there is
          neither mask nor bias.
        - `softmax_scale` and `logits_soft_cap` are numbers or arrays of one, traced too, with gradients.
        - `softmax_aux` [heads] or [heads, n]: sinks, logits of every query that have no value.
        - with `deterministic=False` dropout, of `dropout_prob` or the metadata's, drawn from the key `dropout_rng`.
        - `origin` and `sizes` as in `fk.attention`.

        A keyword that nothing reads is a `ParameterError`.
        """
        scale = self.metadata.softmax_scale if softmax_scale is None else scale_of(softmax_scale, "softmax_scale")
        rate = self.metadata.dropout_prob if dropout_prob is None else dropout_prob
        rate, seed = rate_and_seed(0.0 if deterministic else rate, dropout_rng)
        if init_bias is not None and mask is None and bias is None:
            bias = init_bias()
        query, key, value = self.arranged(query, key, value)
        found = problem(
            self.lengths(query, key), mask, score, bias, segment_ids, positions, causal, sliding_window, scale,
            logits_soft_cap, softmax_aux, origin is not None, params, KEYWORDS,
        )  # fmt: skip
        scale = scale if isinstance(scale, float | None) else 1.0  # another one is part of the score mod
        options = Options(scale, True, self.chosen(), self.metadata.tile, rate)
        out = self.attend(found, options, query, key, value, {"seed": seed, "origin": origin, "sizes": sizes})
        return AttentionOutput(attention_outputs=self.placed(out, self.specs(query)[-1]))

    def compiled(self, mask: Any = None, score: Any = None) -> Attention:
        """The attention of a mask and a score mod as this operator runs it, to be called with a cache."""
        options = Options(self.metadata.softmax_scale, True, self.chosen(), self.metadata.tile)
        return attention_for(mask, score, options, {})

    def lengths(self, query: Any, key: Any) -> tuple[int, int, int, int]:
        """(batch, heads, q_len, kv_len)."""
        return query.shape[0], query.shape[2], query.shape[1], key.shape[1]

    def attend(self, call: OpCall, options: Options, query: Any, key: Any, value: Any, how: dict[str, Any]) -> Any:
        return call.attention(options)(query, key, value, sinks=call.sinks, layout="bshd", **how, **call.params)

    def specs(self, query: Any) -> Any:
        return self.metadata.get_shardings(self.get_mode(query))

    def arranged(self, *arrays: Any) -> list[Any]:
        """query, key and value in the dtype to compute in, split over the mesh."""
        dtype, softmax = self.metadata.runtime_dtype, self.metadata.runtime_softmax_dtype
        made = [jnp.asarray(x, dtype) for x in arrays]
        if any(x.ndim != 4 for x in made):
            shapes = ", ".join(str(list(x.shape)) for x in made)
            raise ShapeError(f"query, key and value are {shapes}; they are [batch, length, heads, head_dim]")
        if softmax == jnp.float64 and made[0].dtype != jnp.float64:
            raise ParameterError("a softmax in float64 takes queries, keys and values in float64: runtime_dtype=")
        return [self.placed(x, spec) for x, spec in zip(made, self.specs(made[0]), strict=False)]

    def chosen(self) -> str | None:
        """The backend that is named, by the operator or by the metadata's platform."""
        if self.backend is not None or self.metadata.platform is None:
            return self.backend
        found = [b for b in backends_of("jax") if b.language == self.metadata.platform]
        if len(found) == 1:
            return found[0].name
        where = self.current_backend().replace("gpu", "cuda")
        there = [b.name for b in found if where in b.platforms]
        if not there:
            interpreted = found[0].operators[0]
            raise BackendError(f"platform 'pallas' is for TPUs and GPUs; {interpreted!r} interprets its kernels")
        return there[0]


KEYWORDS = tuple(
    n for n, p in signature(FrisketAttention.forward_native).parameters.items() if p.kind is p.KEYWORD_ONLY
)


def _on(backend: Backend) -> type[FrisketAttention]:
    """frisket's attention on one backend."""

    class OneBackend(FrisketAttention):
        @classmethod
        def get_impl_name(cls) -> tuple[str, ...]:
            return backend.operators

    OneBackend.backend = backend.name
    OneBackend.__name__ = OneBackend.__qualname__ = "Frisket" + "".join(p.title() for p in backend.name.split("-"))
    OneBackend.__doc__ = f"Attention compiled by frisket for backend {backend.name!r}: see `FrisketAttention`."
    if backend.oracle:
        OneBackend.__doc__ = (
            "The float64 reference, on the host: no gradients, not under `jax.jit`; to check others against."
        )
    return AttentionRegistry.register(OneBackend)


globals().update((made.__name__, made) for made in (_on(b) for b in backends_of("jax") if b.operators))  # for pickle


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
