"""The operators there are: frisket on every backend, the dense reference, ring attention.

Keywords of a call become one mask, one score mod, and values for what they read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from inspect import signature
from operator import and_
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from frisket.dsl import ir
from frisket.dsl.errors import BackendError, ParameterError, ShapeError
from frisket.dsl.ir import names_of
from frisket.runtime.attention.attention import Attention
from frisket.runtime.attention.entry import attention_for
from frisket.runtime.backends.base import Backend, backends_of
from frisket.runtime.calls.arrays import framework_of, scale_of
from frisket.runtime.calls.options import Options, rate_and_seed
from frisket.runtime.calls.program import program_of
from frisket.runtime.machine.parameters import call_value, refuse_additive, stand_in, traced
from frisket.runtime.masks.mask import Divide, Mask, ScoreMod, Weight, only
from frisket.runtime.masks.mask import mask as as_mask
from frisket.runtime.masks.mask import score as as_score
from frisket.runtime.parallel.deal import Deal
from frisket.runtime.parallel.deal import deal as make_deal
from frisket.runtime.parallel.jax_ring import attend
from frisket.runtime.sharding import partition

from .base import AttentionImpl, AttentionMetadata, AttentionOutput, AttentionRegistry

# names of what comes as arrays
TABLES = """attention_mask attention_bias query_segment_ids key_segment_ids query_positions key_positions""".split()


class CallSizes(NamedTuple):
    """The sizes of the arrays of a call: batch, heads and lengths in tokens."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    kv_heads: int


@dataclass(frozen=True)
class OpCall:
    """Attention of one call, besides its q, k and v. `params` are the values of the names without one."""

    mask: Mask | None
    score: ScoreMod | None
    weight: Weight | None
    divide: Divide | None
    params: dict[str, Any]
    sinks: Any

    def attention(self, options: Options) -> Any:
        """Compiled; equal problems are compiled once."""
        return attention_for(self.mask, self.score, options, self.params, self.weight, self.divide)


class OperatorArgs(NamedTuple):
    """The keywords of a call of an operator that say what is seen and what scores are; `has_origin`: `origin` places
    the queries."""

    mask: Any
    score: Any
    weight: Any
    divide: Any
    bias: Any
    segment_ids: Any
    positions: Any
    causal: bool
    window: Any
    align: str | None
    scale: Any
    soft_cap: Any
    softmax_aux: Any
    has_origin: bool
    params: Mapping[str, Any]


def problem(lengths: CallSizes, args: OperatorArgs, called: Sequence[str]) -> OpCall:
    """The problem of a call. `called` are the operator's keywords."""
    mask, bias, positions, align, has_origin = args.mask, args.bias, args.positions, args.align, args.has_origin
    values = {n: call_value(n, x) for n, x in args.params.items()}
    if name := next((n for n in values if n in TABLES), None):
        raise ParameterError(f"`{name}` is the name of what an operator is given as an array; call the table otherwise")
    tables: dict[str, Any] = {}
    # a lookup is written by the shape, which a list has not
    bias = jnp.asarray(bias) if isinstance(bias, list | tuple) else bias
    array = mask if isinstance(mask, np.ndarray) or traced(mask) or framework_of(mask) == "jax" else None
    refuse_additive(array, bias)
    # texts are checked with stand-ins: traced arrays have no values
    stand_ins = {n: stand_in(x) for n, x in values.items()}
    text = None if array is not None else mask
    parts = program_of(text, args.score, stand_ins, called, weight=args.weight, divide=args.divide)
    parts = parts.without(values)  # values come with a call, and are no part of what is compiled
    weights: list[Any] = [parts.weight, parts.divide]
    masks, flags = [m for m in (parts.mask,) if m is not None], _flags(args.causal, args.window)
    scores = [s for s in (parts.score,) if s is not None]
    if align not in (None, "end", "start") or (align and (positions is not None or has_origin)):
        text = f"align is {align!r}; it is 'end', the last query at the last key, or 'start', query 0 at key 0, "
        raise ParameterError(f"{text}without positions and origin")
    if positions is not None:
        at = _by_place(tables, "positions", positions, lengths, has_origin)
        masks = [m.at(**at) for m in masks]
        scores = [s.at(**at) for s in scores]
        weights = [w if w is None else w.at(**at) for w in weights]
        flags = [m.at(**at) for m in flags]
    elif not has_origin and align != "start" and (ahead := lengths.kv_len - lengths.q_len):
        reach = [n for n in (*([0] if args.causal else []), *_sides(args.window)[1:]) if n >= 0]  # keys after a query
        if align is None and reach and ahead + min(reach) < 0:
            text = f"{lengths.q_len} queries and {lengths.kv_len} keys: causal and sliding_window place the last query "
            text += f"at the last key, so {min(-ahead - min(reach), lengths.q_len)} queries see no key\n"
            raise ParameterError(f"{text}  align='start' places query 0 at key 0; align='end' says that it is meant")
        flags = [m.at(q=f"q + {ahead}") for m in flags]
    masks += flags
    if args.segment_ids is not None:
        at = _by_place(tables, "segment_ids", args.segment_ids, lengths, has_origin)
        masks.append(as_mask(f"{at['q']} == {at['k']} & {at['q']} >= 0"))
    if array is not None:
        if jnp.issubdtype(array.dtype, jnp.integer):
            array = array != 0
        if array.dtype != bool:
            text = f"the mask is an array of {array.dtype}; True is what is seen: mask != 0; or bias=mask\n"
            raise ParameterError(f"{text}  integers are taken: those other than 0 are what is seen")
        masks.append(as_mask(_table(tables, "attention_mask", array, lengths, has_origin)))
    if not isinstance(args.scale, float | None):
        # before the score mods, as a kernel scales
        scores, values["softmax_scale"] = [as_score("score * softmax_scale"), *scores], args.scale
    if args.soft_cap is not None:
        scores.append(as_score("softcap(logits_soft_cap)"))
        values["logits_soft_cap"] = scale_of(args.soft_cap, "logits_soft_cap")
    if bias is not None:
        scores.append(as_score(f"score + {_table(tables, 'attention_bias', bias, lengths, has_origin)}"))
    whole, chain = reduce(and_, masks) if masks else None, reduce(ScoreMod.then, scores) if scores else None
    read = {n for x in (whole, chain, *weights) if x is not None for n in names_of(x.expr)}
    tables = {n: x for n, x in tables.items() if n in read}  # a mask of keys reads no positions of queries
    return OpCall(whole, chain, weights[0], weights[1], {**values, **tables}, sinks_of_heads(args.softmax_aux, lengths))


def _flags(causal: bool, window: Any) -> list[Mask]:
    if not isinstance(causal, bool):
        raise ParameterError(f"causal is {causal!r}; it is True or False")
    ends = [f"{d} <= {n}" for d, n in zip(("q - k", "k - q"), _sides(window), strict=True) if n >= 0]
    return [as_mask(text) for text in (*(["causal"] if causal else []), " & ".join(ends)) if text]


def _sides(window: Any) -> tuple[int, int]:
    """Tokens before and after a query; -1 is no limit."""
    sides = (-1, -1) if window is None else window if isinstance(window, tuple | list) else (window, window)
    if len(sides) != 2 or not all(isinstance(n, int | np.integer) for n in sides):
        raise ParameterError(f"sliding_window is {window!r}; it is an int, or (before, after) in tokens")
    if any(n < -1 for n in sides):
        raise ParameterError(f"sliding_window is {window!r}; a side is a number of tokens, or -1 for no limit")
    return sides[0], sides[1]


def _by_place(tables: dict[str, Any], what: str, arrays: Any, lengths: CallSizes, has_origin: bool) -> dict[str, str]:
    """Two arrays of integers, of queries and of keys, or one for both: what reads them at q and at k."""
    rows = isinstance(arrays, list) and any(isinstance(x, list) for x in arrays)  # one array, [batch, length]
    pair = arrays if isinstance(arrays, tuple | list) and len(arrays) == 2 and not rows else (arrays, arrays)
    texts = {}
    for c, side, x, length in zip("qk", ("query", "key"), pair, lengths[2:4], strict=True):
        _check_place(f"{side} {what}", has_origin)
        # arrays of numpy stay on the host, where a plan reads their values
        x, name = jnp.asarray(x) if not isinstance(x, np.ndarray) else x, f"{side}_{what}"
        if x.shape not in ((length,), (1, length), (lengths[0], length)) or not jnp.issubdtype(x.dtype, jnp.integer):
            text = f"{what} of {'queries' if c == 'q' else 'keys'} are {x.dtype}{list(x.shape)}; they are integers "
            text += f"[{lengths[0]}, {length}] or [{length}], of queries and keys in a pair: {what}=(of_q, of_k)"
            raise ShapeError(text)
        tables[name] = x
        texts[c] = f"{name}[{c}]" if x.ndim == 1 else f"{name}[{'b' if x.shape[0] > 1 else '0'}, {c}]"
    return texts


def _table(tables: dict[str, Any], name: str, x: Any, lengths: CallSizes, has_origin: bool) -> str:
    """A lookup that reads an array [batch, heads, q_len, kv_len], [batch, q_len, kv_len], or [batch, kv_len], of keys.

    Axes of length 1 are for all, and heads may be the key heads, each for its group.
    """
    _check_place(name.replace("_", " "), has_origin)
    axes, group = {4: "bhqk", 3: "bqk", 2: "bk"}.get(x.ndim, ""), lengths.heads // lengths.kv_heads
    places = {**{(a, n): a for a, n in zip("bhqk", lengths, strict=False)}, **{(a, 1): "0" for a in "bhqk"}}
    places.setdefault(("h", lengths.kv_heads), f"h // {group}")  # with as many key heads as heads it is h itself
    index = [places.get(axis) for axis in zip(axes, x.shape, strict=False)]
    if not axes or None in index:
        text = f"the {name.replace('_', ' ')} is {list(x.shape)} for (batch, heads, q_len, kv_len) = "
        text += f"{(*lengths[:4],)}; it has these axes, or batch, q_len and kv_len, or batch and kv_len, each of its "
        raise ShapeError(f"{text}length or 1\n  heads may be the {lengths.kv_heads} key heads")
    tables[name] = x
    return f"{name}[{', '.join(map(str, index))}]"


def _check_place(what: str, has_origin: bool) -> None:
    if has_origin:
        text = f"{what} go by places of the arrays, and `origin` moves those; give positions instead of origin"
        raise ParameterError(text)


def sinks_of_heads(x: Any, lengths: CallSizes) -> Any:
    """Sinks [heads]: several of a head are one, whose weight is theirs together."""
    x, heads, kv_heads = jnp.asarray(x) if isinstance(x, list | tuple) else x, lengths.heads, lengths.kv_heads
    if getattr(x, "ndim", 0) == 0 or x.shape == (heads,):
        return x
    if x.ndim == 1:
        x = x[:, None] if len(x) == kv_heads else x[None]  # one sink for each key head, or several for all heads
    if x.ndim != 2 or x.shape[0] not in (1, kv_heads, heads):
        text = f"softmax_aux is {list(x.shape)}; it is [{heads}] or [{kv_heads}], of heads or key heads, either with a "
        raise ShapeError(f"{text}second axis of sinks, or [sinks], of all heads")
    return jnp.repeat(jax.nn.logsumexp(jnp.asarray(x, jnp.float32), axis=1), heads // x.shape[0])


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
        self,
        query: Any,
        key: Any,
        value: Any,
        mask: Any = None,
        *,
        bias: Any = None,
        init_bias: Any = None,
        score: Any = None,
        weight: Any = None,
        divide: Any = None,
        causal: bool = False,
        sliding_window: int | tuple[int, int] | None = None,
        align: str | None = None,
        segment_ids: Any = None,
        positions: Any = None,
        softmax_aux: Any = None,
        softmax_scale: Any = None,
        logits_soft_cap: Any = None,
        dropout_prob: float | None = None,
        deterministic: bool = True,
        dropout_rng: Any = None,
        origin: Any = None,
        sizes: Any = None,
        **params: Any,
    ) -> AttentionOutput:
        """Attention of query [batch, q_len, heads, dim] over key and value [batch, kv_len, kv_heads, dim].

        `mask` is a text, a function, an `fk.Mask`, or an array. An array is [batch, heads, q_len, kv_len] (an axis may
        have length 1, heads be the key heads), [batch, q_len, kv_len] or [batch, kv_len]. Bools: True is what is seen.
        Integers: 0 is what is not. `score`, `weight`, `divide` and `params` are a score mod, a weight in place of the
        softmax, its divisor and values of names, as in `fk.attention`. What more is given is joined to that:

        - `causal`, and `sliding_window=w` or `(left, right)`: keys at most so far before and after a query.
        - `align`: the place of queries for `causal` and the window, if q and k differ in length. "end", the default,
          is the last query at the last key; "start" is query 0 at key 0, as in EasyDeL. Without it, more queries than
          keys are an error where queries would see no key. Or `positions` or `origin` say where the queries are.
        - `segment_ids`, integers [batch, length], or a pair, of queries and of keys: equal ones see one another,
          negative ones are padding.
        - `positions`, likewise: where places of the arrays are in the sequence, for mask, score, causal and window.
        - `logits_soft_cap` after `score`, then `bias`, like an array mask; `init_bias()` makes it, where there is
          neither mask nor bias.
        - `softmax_scale` and `logits_soft_cap` are numbers or arrays of one, traced too, with gradients.
        - `softmax_aux` [heads], [kv_heads], either with a second axis, or [n], for all heads: sinks, logits of every
          query that have no value.
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
        seen = mask, score, weight, divide, bias, segment_ids, positions, causal, sliding_window, align
        args = OperatorArgs(*seen, scale, logits_soft_cap, softmax_aux, origin is not None, params)
        op_call = problem(self.lengths(query, key), args, KEYWORDS)
        scale = scale if isinstance(scale, float | None) else 1.0  # another one is part of the score mod
        options = Options(scale, True, self.chosen(), self.metadata.tile, rate)
        out = self.attend(op_call, options, query, key, value, {"seed": seed, "origin": origin, "sizes": sizes})
        return AttentionOutput(attention_outputs=self.placed(out, self.specs(query)[-1]))

    def compiled(self, mask: Any = None, score: Any = None, weight: Any = None, divide: Any = None) -> Attention:
        """The attention of a mask, a score mod and a weight as this operator runs it, to be called with a cache."""
        options = Options(self.metadata.softmax_scale, True, self.chosen(), self.metadata.tile)
        return attention_for(mask, score, options, {}, weight, divide)

    def lengths(self, query: Any, key: Any) -> CallSizes:
        return CallSizes(query.shape[0], query.shape[2], query.shape[1], key.shape[1], key.shape[2])

    def attend(self, call: OpCall, options: Options, query: Any, key: Any, value: Any, how: dict[str, Any]) -> Any:
        return call.attention(options)(query, key, value, sinks=call.sinks, layout="bshd", **how, **call.params)

    def specs(self, query: Any) -> Any:
        return self.metadata.get_shardings(self.get_mode(query))

    def arranged(self, *arrays: Any) -> list[Any]:
        """query, key and value in the dtype to compute in, split over the mesh."""
        dtype, softmax = self.metadata.runtime_dtype, self.metadata.runtime_softmax_dtype
        converted = [jnp.asarray(x, dtype) for x in arrays]
        if any(x.ndim != 4 for x in converted):
            shapes = ", ".join(str(list(x.shape)) for x in converted)
            raise ShapeError(f"query, key and value are {shapes}; they are [batch, length, heads, head_dim]")
        if softmax == jnp.float64 and converted[0].dtype != jnp.float64:
            raise ParameterError("a softmax in float64 takes queries, keys and values in float64: runtime_dtype=")
        # the other specs are for bias, mask and result
        return [self.placed(x, spec) for x, spec in zip(converted, self.specs(converted[0]), strict=False)]

    def chosen(self) -> str | None:
        """The backend that is named, by the operator or by the metadata's platform."""
        if self.backend is not None or self.metadata.platform is None:
            return self.backend
        backends = [b for b in backends_of("jax") if b.language == self.metadata.platform]
        if len(backends) == 1:
            return backends[0].name
        where = self.current_backend().replace("gpu", "cuda")  # backends have torch's names of platforms
        there = [b.name for b in backends if where in b.platforms]
        if not there:
            interpreted = backends[0].operators[0]
            raise BackendError(f"platform 'pallas' is for TPUs and GPUs; {interpreted!r} interprets its kernels")
        return there[0]


_PARAMETERS = signature(FrisketAttention.forward_native).parameters
KEYWORDS = tuple(n for n, p in _PARAMETERS.items() if p.kind is p.KEYWORD_ONLY)


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
        text = "The float64 reference, on the host: no gradients, not under `jax.jit`; to check others against."
        OneBackend.__doc__ = text
    return AttentionRegistry.register(OneBackend)


globals().update((op.__name__, op) for op in (_on(b) for b in backends_of("jax") if b.operators))  # for pickle


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
        self, query: Any, key: Any, value: Any, mask: Any = None, *, deal: Deal | None = None, **keywords: Any
    ) -> AttentionOutput:
        """Ring attention of as many queries as keys, without `origin` and `sizes`.

        Arrays and the result are in the order of the sequence, and are distributed in between. With `deal`, made by
        `fk.parallel.deal` for the same mask or one that shows more, they are in its order (`deal.permute(x, axis=1)`),
        once for all layers. Tables, segments and positions stay in the order of the sequence. Without it, clauses of
        the mask that read traced values do not decide how tokens are distributed, nor which keys are sent.
        """
        if keywords.get("origin") is not None or keywords.get("sizes") is not None:
            raise ParameterError("ring attention takes whole sequences, without origin and sizes")
        if query.shape[1] != key.shape[1]:
            text = f"ring attention takes as many queries as keys, not {query.shape[1]} and {key.shape[1]}\n"
            raise ShapeError(f"{text}  a step of decoding is for a cache over the devices: frisket.caches.jax")
        # a new object, as the deal of a call is no setting of the operator
        one = _Dealt(self.metadata, deal, query.shape[1])
        return FrisketAttention.forward_native(one, query, key, value, mask, **keywords)


class _Dealt(FrisketAttention):
    """One call of ring attention, of arrays in the order of the sequence or of a deal."""

    def __init__(self, metadata: AttentionMetadata, deal: Deal | None, places: int) -> None:
        super().__init__(metadata)
        self.deal, self.axis = deal, metadata.sequence_axis_name
        self.ranks = 1 if metadata.mesh is None else metadata.mesh.shape.get(self.axis, 1)
        if deal is None:
            return
        if not isinstance(deal, Deal) or deal.ranks != self.ranks:
            text = f"deal is {deal!r}; it is an fk.parallel.Deal over {self.ranks} ranks of {self.axis!r}"
            raise ParameterError(text)
        if places != len(deal.order):
            raise ShapeError(f"arrays have {places} places, the deal {len(deal.order)}: deal.permute(x, axis=1)")

    def lengths(self, query: Any, key: Any) -> CallSizes:
        # without padding: masks and tables have the length of the sequence
        length = query.shape[1] if self.deal is None else self.deal.length
        return CallSizes(query.shape[0], query.shape[2], length, length, key.shape[2])

    def attend(self, call: OpCall, options: Options, query: Any, key: Any, value: Any, how: dict[str, Any]) -> Any:
        arrays, deal = (query, key, value), self.deal
        if self.ranks == 1:
            q, k, v = arrays if deal is None else (deal.unpermute(x, 1) for x in arrays)
            out = super().attend(call, options, q, k, v, how)
            return out if deal is None else deal.permute(out, 1)
        if deal is None:
            batch, heads, length, *_ = self.lengths(query, key)
            known, values = _known(call)
            tile = options.tile[0] if options.tile else _tile(length, self.ranks)
            deal = make_deal(known, length, self.ranks, tile=tile, batch=batch, heads=heads, **values)
            out = self._over(deal, call, options, [deal.permute(x, 1) for x in arrays], how["seed"])
            return deal.unpermute(out, 1)
        return self._over(deal, call, options, list(arrays), how["seed"])

    def _over(self, deal: Deal, op_call: OpCall, options: Options, arrays: list[Any], seed: Any) -> Any:
        """The call on every device."""
        mesh, att = self.metadata.mesh, op_call.attention(options)
        assert mesh is not None  # there are several ranks
        split = self.specs(arrays[0])[0]
        # the axis of the ring splits tokens, and nothing else
        batch = partition.fitting(mesh.shape, split[0], arrays[0].shape[0], {self.axis})
        # nor does the axis of batches split heads
        heads = partition.fitting(mesh.shape, split[2], arrays[1].shape[2], {self.axis, *partition.names_of(batch)})
        variant: Any = "ring" if self.metadata.scan_ring_attention else "all-gather"
        how: dict[str, Any] = {"axis": self.axis, "batch_axis": batch, "head_axis": heads, "mesh": mesh, "seed": seed}
        q, k, v = arrays
        return attend(att, q, k, v, deal=deal, variant=variant, sinks=op_call.sinks, **how, **op_call.params)


def _known(op_call: OpCall) -> tuple[Mask, dict[str, Any]]:
    """(the clauses of a mask whose values are known, which show all that the mask shows; those values)."""
    if op_call.mask is None:
        return Mask(ir.TRUE), {}
    # a deal is computed on the host
    values = {n: np.asarray(x) if hasattr(x, "ndim") else x for n, x in op_call.params.items() if not traced(x)}
    unknown = {n for n, x in op_call.params.items() if traced(x)}
    expr = ir.conj(*(e for e in ir.clauses(op_call.mask.expr) if not names_of(e).keys() & unknown))
    return Mask(expr, only(op_call.mask.params, expr)), only(values, expr)


def _tile(length: int, ranks: int) -> int:
    """128 tokens, or fewer where a device would not have four tiles."""
    tile = 128
    while tile > 16 and length < 4 * tile * ranks:
        tile //= 2
    return tile
