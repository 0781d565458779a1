"""Context parallel attention on JAX: the work of every device of a mesh axis inside `jax.shard_map`.

All devices run one program. It reads the positions of a device's tokens from tables, at the device's place on the axis.
The flat planner in it makes the spans of every pair of shards. Shapes are equal on all devices, so each sends as
many tokens at a step of the ring as the device that needs most: `deal.bytes(..., padded=True)`.

Processes of `jax.distributed` first check that they make the same call: programs that differ wait without end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import add
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import distributed  # the store that jax.distributed keeps its own state in
from jax.ad_checkpoint import checkpoint_name as _checkpoint_name
from jax.sharding import AxisType

from frisket.dsl.errors import ParameterError, PeerError, ShapeError
from frisket.dsl.ir import SCORE, param, substitute, walk
from frisket.dsl.types import INT
from frisket.lowering.kernels.jnp_expr import evaluate
from frisket.lowering.plan import Cotangents, ForwardResults
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.attention.attention import Attention
from frisket.runtime.attention.merge import merged
from frisket.runtime.attention.weighted import Sums, check_weighted, divided, problem_of, sums_of, weighted_results
from frisket.runtime.calls.arrays import framework_of
from frisket.runtime.calls.options import CallArgs, from_key, refuse_parts
from frisket.runtime.jax.call import narrowed, reverse_only
from frisket.runtime.jax.derivatives import LSE, OUT, Task, bound, of_sinks
from frisket.runtime.jax.op import prepared, varying_alike
from frisket.runtime.machine.parameters import digest
from frisket.runtime.masks.mask import Weight
from frisket.runtime.plans.device import split_host_device
from frisket.runtime.sharding.partition import spec_of, split_as

from .deal import Deal, Step, Variant, check_variant, steps
from .shards import AT, ShardAttention, ShardPlace, ShardTable, check_covered, check_names, check_sides, on_shard

Split: TypeAlias = Mapping[str, int | tuple[int, ...]] | None
_checkpoint: Any = _checkpoint_name  # JAX leaves some of its functions untyped
_barrier: Any = lax.optimization_barrier
_ppermute: Any = lax.ppermute
_psum_scatter: Any = lax.psum_scatter


@usual_promotion()
def attend(
    att: Attention,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    deal: Deal,
    axis: str = "sp",
    variant: Variant = "ring",
    batch_axis: Axes = None,
    head_axis: Axes = None,
    split: Split = None,
    seed: Any = None,
    sinks: Any = None,
    return_lse: bool = False,
    mesh: Any = None,
    **params: Any,
) -> Any:
    """Attention of a sequence whose tokens are distributed over the devices of a mesh axis:

        att, d = fk.compile("causal & same(doc)"), fk.parallel.deal("causal & same(doc)", 65536, ranks=8, doc=doc)
        q, k, v = (d.permute(x, axis=1) for x in (q, k, v))  # [batch, tokens, heads, dim], split over "sp"
        spec = PartitionSpec(None, "sp")
        out = jax.shard_map(
            lambda q, k, v, doc: fk.parallel.attend(att, q, k, v, deal=d, doc=doc),
            mesh=mesh, in_specs=(spec, spec, spec, PartitionSpec()), out_specs=spec,
        )(q, k, v, doc)

    Inside `jax.shard_map` the arrays are those of one device: q [batch, shard, heads, dim], k and v [batch, shard,
    kv_heads, dim]. So is the result, with `return_lse` also lse [batch, heads, shard], natural log. With `mesh` they
    are those of all devices, in the deal's order; `attend` then calls shard_map: `attend(att, q, k, v, deal=d,
    mesh=mesh)`.

    "ring" sends between each two devices what `deal.needs` says, one step ahead of the kernels; devices whose pair
    sees nothing send nothing and run nothing. "all-gather" brings all keys to every device and runs one kernel. The
    backward sends keys and values again and their gradients back (H. Liu et al., Ring Attention with Blockwise
    Transformers, arXiv 2310.01889; partial results are merged as by `fk.merge`).

    `batch_axis` and `head_axis` are the mesh axes over which batch entries and heads are split as well, if they are.
    Tables among `params` are whole, in the order of the sequence, on every device, and so are `sinks`; their gradients
    are sums over all devices. `split={"doc": 0, "bias": (1, 2)}` says along which axes a table is split as the arrays
    are, distributed where it is read at q or k. A table that is split along keys is sent with them. Positions in masks,
    score mods and dropout are those of the sequence.

    Raises `ShapeError` for shards that are not the deal's, `ParameterError` where the mask may show more than the deal.
    """
    refuse_parts(att.options, "context parallelism")
    axes = batch_axis, head_axis
    parts = {n: (a,) if isinstance(a, int) else tuple(a) for n, a in (split or {}).items()}
    if mesh is not None:
        how: dict[str, Any] = {"deal": deal, "axis": axis, "variant": variant, "batch_axis": batch_axis}
        how["head_axis"] = head_axis
        local = partial(attend, att, split=split, return_lse=return_lse, **how)
        spec, rows = spec_of(batch_axis, axis, head_axis), spec_of(batch_axis, head_axis, axis)
        tables = _specs({"b": batch_axis, "h": head_axis, "q": axis, "k": axis}, att, parts)
        _check_mesh(q, k, deal, mesh, axis, axes)
        values = {"seed": seed, "sinks": sinks, **params}
        return _over(mesh, local, (spec, tables), (q, k, v), values, (spec, rows) if return_lse else spec)
    _check(q, k, deal, axis, variant)
    bound_att, known = bind_host_values(att, parts, params)
    shard = Shard(bound_att, deal, axis, variant == "all-gather", axes, parts, known, (q.shape[0], q.shape[2]))
    weighted = att.program.weight is not None
    if weighted:
        check_weighted(att.program.exprs, att.options.sinks if sinks is None else sinks, return_lse, False)
    check_covered(shard.att.program, deal, shard.values, *shard.whole_sizes)
    agree(_agreed_values(shard, q, k, v, variant))
    arrays = {"q": q, "k": k, "v": v, **shard.values}
    sinks = att.options.sinks if sinks is None else sinks
    if sinks is not None:
        # sinks are whole on every device, and a device takes those of its heads
        sinks = jnp.broadcast_to(jnp.asarray(sinks), (q.shape[2] * size(head_axis),))
        arrays["sinks"] = lax.dynamic_slice_in_dim(sinks, shard.first(1), q.shape[2])
    if seed is not None:
        arrays["seed"] = jnp.asarray(from_key(seed))
    flow = {"q", "k", "v", "sinks", *shard.learnable}
    groups = ({n: x for n, x in arrays.items() if (n in flow) is kind} for kind in (True, False))
    learned, fixed = varying_alike(*groups)
    learned = reverse_only(learned)
    if not weighted:
        out, lse = _differentiable(shard)(learned, fixed)
        return (out, lse) if return_lse else out
    # devices add up sums, and each divides its rows once
    summing = replace(shard, att=bound_att.undivided)
    flow = {"q", "k", "v", *summing.learnable}
    read = {n: x for n, x in learned.items() if n in flow}
    sums = Sums(*_differentiable_sums(summing)(read, fixed))
    out = _divided(shard, sums, _values_of(learned | fixed), q.dtype)
    return weighted_results((out, sums.total), return_lse, False)


def _divided(shard: Shard, sums: Sums, values: Arrays, dtype: Any) -> Any:
    """The rows of this device, by their sums over all keys."""
    program, options = shard.att.program, replace(shard.att.options, dropout=0.0)
    program = replace(program, mask=None, score=None, weight=Weight(SCORE), places=None)  # the divisor alone
    rows = replace(shard, att=Attention(program, options))
    local = rows.local.attention.program
    values = {**local.scalars, **local.tables, **rows.read(values, {}, jnp.zeros(0, jnp.int32))}
    values |= {AT["q"]: rows.positions(), AT["b"]: rows.first(0), AT["h"]: rows.first(1)}
    return divided(sums, local.divide, values, "bshd", problem_of(sums.total, None, None), dtype)


def _specs(axes: Mapping[str, Axes], att: Attention, split: Mapping[str, tuple[int, ...]]) -> Arrays:
    """The PartitionSpec of every split table, from the mesh axes of coordinates."""
    tables: Arrays = {}
    for e in walk(*att.program.exprs.parts):
        if e.op == "lookup" and e.name in split:
            split_axes = split[e.name]
            check_sides(e, split_axes)
            tables[e.name] = spec_of(*(axes.get(a.name) if i in split_axes else None for i, a in enumerate(e.args)))
    return tables


def _over(mesh: Any, local: Callable[..., Any], specs: Any, qkv: Any, values: Arrays, out: Any) -> Any:
    """`local` of every device's parts. What is the host's and whole is part of the program."""
    spec, tables = specs
    arrays = {n: x for n, x in values.items() if framework_of(x) == "jax" or tables.get(n)}
    rest = {n: x for n, x in values.items() if n not in arrays}

    def mine(q: Any, k: Any, v: Any, arrays: Arrays) -> Any:
        return local(q, k, v, **arrays, **rest)

    ins = spec, spec, spec, {n: tables.get(n, spec_of()) for n in arrays}
    operands = *qkv, arrays
    if any(t == AxisType.Explicit for t in mesh.axis_types):  # there shard_map takes nothing that is split otherwise
        operands = jax.tree.map(lambda x, part: split_as(x, mesh, part, explicit=True), operands, ins)
    run: Any = jax.shard_map(mine, mesh=mesh, in_specs=ins, out_specs=out)
    return run(*operands)


def _check_ranks(deal: Deal, axis: str, ranks: int) -> None:
    if ranks != deal.ranks:
        raise ShapeError(f"the deal is of {deal.ranks} ranks, mesh axis {axis!r} has {ranks} devices")


def _check_mesh(q: Any, k: Any, deal: Deal, mesh: Any, axis: str, others: Sequence[Axes]) -> None:
    """Raises errors of ours for what shard_map would refuse: axes that the mesh lacks, arrays that are not permuted."""
    for keyword, axes in zip(("axis", "batch_axis", "head_axis"), (axis, *others), strict=True):
        for name in (axes,) if isinstance(axes, str) else axes or ():
            if name not in mesh.axis_names:
                there = ", ".join(map(repr, mesh.axis_names))
                raise ParameterError(f"{keyword}={axes!r}, and the mesh has no axis {name!r}\n  its axes are {there}")
    _check_ranks(deal, axis, mesh.shape[axis])
    places = deal.ranks * deal.shard
    if any(x.ndim != 4 or x.shape[1] != places for x in (q, k)):
        text = f"q is {tuple(q.shape)} and k {tuple(k.shape)}; with mesh= they are [batch, {places}, heads, dim]"
        raise ShapeError(f"{text}\n  what deal.permute(x, axis=1) gives: the tokens of all devices, with padding")


def _check(q: Any, k: Any, deal: Deal, axis: str, variant: str) -> None:
    check_variant(variant)
    try:
        ranks = size(axis)
    except NameError:
        text = f"there is no mesh axis {axis!r} here\n  call attend inside jax.shard_map over a mesh that has it: axis="
        raise ParameterError(text) from None
    mesh = jax.sharding.get_abstract_mesh()
    if left := [n for n in mesh.axis_names if n not in mesh.manual_axes]:
        text = f"jax.shard_map leaves mesh axis {left[0]!r} to automatic sharding\n"
        raise ParameterError(f"{text}  without axis_names= it takes all axes, and arrays are split by its in_specs")
    _check_ranks(deal, axis, ranks)
    if q.ndim != 4 or k.ndim != 4 or q.shape[1] != deal.shard or k.shape[1] != deal.shard:
        text = f"q is {tuple(q.shape)} and k {tuple(k.shape)}; they are [batch, {deal.shard}, heads, dim] on each of "
        raise ShapeError(f"{text}{deal.ranks} devices\n  what deal.permute(x, axis=1) gives, split over {axis!r}")


def _agreed_values(shard: Shard, q: Any, k: Any, v: Any, variant: str) -> dict[str, str]:
    """The values that all processes must share."""
    program, deal = shard.att.program, shard.deal
    values = sorted((n, digest(x)) for n, x in {**program.scalars, **program.tables}.items())
    values_hash = hashlib.sha256(repr(values).encode()).hexdigest()[:16]
    shapes = ", ".join(f"{n} {x.dtype}{list(x.shape)}" for n, x in {"q": q, "k": k, "v": v, **shard.values}.items())
    texts = {"attention": program.expanded, "values of parameters": values_hash, "arrays": shapes, "variant": variant}
    texts["deal"] = f"of {deal.length} tokens over {deal.ranks} ranks, {deal.digest[:16]}"
    options = shard.att.options
    return texts | {"option": f"dropout {options.dropout}, scale {options.scale}, split {dict(shard.split)}"}


def _differentiable(shard: Shard) -> Callable[[Arrays, Arrays], Any]:
    """(out, lse) of a shard, with a backward. `learned` are the arrays that gradients flow to, by name: q, k, v, sinks
    and tables; `fixed` are the others. `lse_residual` is the rounding error of lse."""
    run = _AllGather(shard) if shard.all_keys else _Ring(shard)

    @jax.custom_vjp
    def attended(learned: Arrays, fixed: Arrays) -> Any:
        return run.forward(learned, fixed)[:2]

    @usual_promotion()
    def forwards(learned: Arrays, fixed: Arrays) -> Any:
        out, lse, lse_residual = run.forward(learned, fixed)
        # names by which a policy of jax.checkpoint saves the results
        out, lse, lse_residual = _checkpoint(out, OUT), _checkpoint(lse, LSE), _checkpoint(lse_residual, LSE)
        return (out, lse), (learned, fixed, out, lse, lse_residual)

    @usual_promotion()
    def backwards(residuals: Any, cotangents: Any) -> Any:
        learned, fixed, out, lse, lse_residual = residuals
        rows = {"q": learned["q"], "out": out, "lse": lse, "lse_residual": lse_residual}
        rows |= {"dout": cotangents[0], "dlse": cotangents[1].astype(lse.dtype)}
        grads = run.backward(learned, fixed, rows)
        if "sinks" in learned:
            of_rows = ForwardResults(out, lse, lse_residual), Cotangents(rows["dout"], rows["dlse"])
            grads["sinks"] = of_sinks(learned["sinks"], *of_rows)
        # sums are in float32, and a cotangent has the dtype of its array
        return {n: grads[n].astype(x.dtype) for n, x in learned.items()}, None

    attended.defvjp(forwards, backwards)
    return attended


def _differentiable_sums(shard: Shard) -> Callable[[Arrays, Arrays], Any]:
    """The fields of `Sums` of a shard's weighted rows, with a backward; operands as of `_differentiable`. The attention
    of `shard` divides by `average`."""
    program = replace(shard.att.program, divide=None)  # its backward takes cotangents of the sums
    backward_shard = replace(shard, att=Attention(program, shard.att.options))
    kind = _AllGather if shard.all_keys else _Ring
    run, back = kind(shard), kind(backward_shard)

    @jax.custom_vjp
    def attended(learned: Arrays, fixed: Arrays) -> Any:
        return tuple(run.forward(learned, fixed))  # the containers of both rules are compared

    @usual_promotion()
    def forwards(learned: Arrays, fixed: Arrays) -> Any:
        numerator, total, count = run.forward(learned, fixed)
        numerator, total = _checkpoint(numerator, OUT), _checkpoint(total, LSE)
        return (numerator, total, count), (learned, fixed, total)

    @usual_promotion()
    def backwards(residuals: Any, cotangents: Any) -> Any:
        learned, fixed, total = residuals
        dnumerator = cotangents[0].astype(summable(learned["q"]).dtype)
        # kernels read neither out nor lse
        rows = {"q": learned["q"], "out": dnumerator, "lse": total, "dout": dnumerator, "dlse": cotangents[1]}
        grads = back.backward(learned, fixed, rows)
        return {n: grads[n].astype(x.dtype) for n, x in learned.items()}, None

    attended.defvjp(forwards, backwards)
    return attended


def summable(x: Any) -> Any:
    """Arrays whose sums of rows have the range of float32."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def _began(learned: Arrays, v_dim: int) -> tuple[Any, Any, Any]:
    """(out, lse, lse_residual) before any key: of the sinks alone."""
    q = learned["q"]
    batch, length, heads, _ = q.shape
    # partial results of 16 bits would be rounded at every merge
    real = jnp.float64 if q.dtype == np.float64 else jnp.float32
    sinks = learned["sinks"].astype(real)[:, None] if "sinks" in learned else -jnp.inf
    lse = jnp.full((batch, heads, length), -jnp.inf, real)
    # sinks count once, so they are in the state before the first step
    state = {"out": jnp.zeros((batch, length, heads, v_dim), real), "lse": jnp.maximum(lse, sinks), "q": q}
    state = varying_alike(state | {"lse_residual": jnp.zeros_like(lse)})[0]
    return state["out"], state["lse"], state["lse_residual"]


def _no_sums(learned: Arrays) -> tuple[Any, ...]:
    """Sums of weighted rows before any key."""
    out, lse, _ = _began({n: x for n, x in learned.items() if n != "sinks"}, learned["v"].shape[3])
    zeros = jnp.where(lse == 0, lse, 0)  # differs between devices as lse does
    return out, zeros, zeros


class _Ring:
    """A ring in which every rank sends straight to the ranks that read its keys."""

    def __init__(self, shard: Shard) -> None:
        self.shard, self.axis, self.steps = shard, shard.axis_of_keys, steps(shard.deal)

    def forward(self, learned: Arrays, fixed: Arrays) -> tuple[Any, Any, Any]:
        q, values = learned["q"], _values_of(learned | fixed)

        def step(keys: Arrays, k_at: Any, state: Any) -> Any:
            part = self.shard.forward(q, values, keys, k_at)
            return tuple(map(add, state, part)) if weighted else merged((state, part), jnp, "bshd"), {}

        local_keys, weighted = {n: (learned | fixed)[n] for n in self.axis}, self.shard.weighted
        # sums begin at 0, and have no sinks
        if weighted:
            return self._walk(local_keys, _no_sums(learned), step, ())  # type: ignore[no-any-return]
        out, lse, lse_residual = self._walk(local_keys, _began(learned, learned["v"].shape[3]), step, ())
        return out.astype(q.dtype), lse, lse_residual

    def backward(self, learned: Arrays, fixed: Arrays, rows: Arrays) -> Arrays:
        values, real = _values_of(learned | fixed), rows["lse"].dtype
        sums = _zeros({n: x for n, x in learned.items() if n != "sinks"}, rows["q"], real)
        local_keys, rows = _barrier(({n: (learned | fixed)[n] for n in self.axis}, rows))  # sent again, not kept

        def step(keys: Arrays, k_at: Any, sums: Arrays) -> Any:
            dq, dvalues, dkeys = self.shard.backward(rows, values, keys, k_at)
            terms = {"q": dq, **dvalues}
            return sums | {n: sums[n] + x.astype(real) for n, x in terms.items()}, dkeys

        return self._walk(local_keys, sums, step, tuple(n for n in self.axis if n in learned))  # type: ignore[no-any-return]

    def _walk(self, local_keys: Arrays, state: Any, step: Callable[..., Any], returned: tuple[str, ...]) -> Any:
        """The state after all steps: (out, lse, lse_residual) forward, sums of gradients backward. `step(keys, k_at,
        state)` gives the next state and the gradients named in `returned`, which are added to the state of the keys'
        rank."""
        if not self.steps:  # the mask shows nothing
            return state
        shard, ahead = self.shard, self._received(local_keys, self.steps[0])
        for i, now in enumerate(self.steps):
            keys, k_at = ahead, self._positions(now)
            if i + 1 < len(self.steps):  # sent while this step computes, and not before the last step is done
                local_keys, state = _barrier((local_keys, state)) if i else (local_keys, state)
                ahead = self._received(local_keys, self.steps[i + 1])

            # defaults bind the arrays of this step: the loop assigns the names again
            def run(state: Any, keys: Arrays = keys, k_at: Any = k_at) -> Any:
                return step(keys, k_at, state)

            def skip(state: Any, keys: Arrays = keys) -> Any:
                # `cond` wants branches of one type, which says over which axes a value differs
                return state, _zeros({n: keys[n] for n in returned}, next(iter(keys.values())))

            if all(now.reads):
                state, back = run(state)
            else:
                state, back = lax.cond(shard.of_rank(np.array(now.reads)), run, skip, state)
            if returned:
                state = self._with_returned(now, back, state)
        return state

    def _positions(self, step: Step) -> Any:
        """The positions of the keys of a step."""
        start = self.shard.of_rank(np.array(step.start, np.int32), step.shift)
        return lax.dynamic_slice_in_dim(self.shard.positions(step.shift), start, step.length)

    def _received(self, local_keys: Arrays, step: Step) -> Arrays:
        """The keys that a rank receives in a step."""
        if not step.shift:
            return local_keys
        start = self.shard.of_rank(np.array(step.start, np.int32))
        part = {n: lax.dynamic_slice_in_dim(x, start, step.length, self.axis[n]) for n, x in local_keys.items()}
        return _ppermute(part, self.shard.axis, step.pairs)  # type: ignore[no-any-return]

    def _with_returned(self, step: Step, back: Arrays, sums: Arrays) -> Arrays:
        """The sums of a rank with the gradients of its keys that other ranks send back."""
        if step.shift:
            back = _ppermute(back, self.shard.axis, [(to, source) for source, to in step.pairs])
        start = self.shard.of_rank(np.array(step.start, np.int32))
        for n, x in back.items():
            part = lax.dynamic_slice_in_dim(sums[n], start, step.length, self.axis[n])
            part = part + x.astype(part.dtype)
            sums = sums | {n: lax.dynamic_update_slice_in_dim(sums[n], part, start, self.axis[n])}
        return sums


class _AllGather:
    """The all-gather: all keys on every device, in the order of the sequence."""

    def __init__(self, shard: Shard) -> None:
        self.shard, self.axis = shard, shard.axis_of_keys

    def forward(self, learned: Arrays, fixed: Arrays) -> tuple[Any, Any, Any]:
        arrays = learned | fixed
        keys, k_at = self._gathered({n: arrays[n] for n in self.axis})
        results = self.shard.forward(arrays["q"], _values_of(arrays), keys, k_at)
        if "sinks" in learned:
            # kernels count no sinks: `_began` counts them, and nothing else
            results = merged((_began(learned, learned["v"].shape[3]), results), jnp, "bshd")
        if self.shard.weighted:
            return results
        return results[0].astype(arrays["q"].dtype), *results[1:]

    def backward(self, learned: Arrays, fixed: Arrays, rows: Arrays) -> Arrays:
        arrays = learned | fixed
        local_keys, rows = _barrier(({n: arrays[n] for n in self.axis}, rows))  # gathered again, not kept
        keys, k_at = self._gathered(local_keys)
        dq, dvalues, dkeys = self.shard.backward(rows, _values_of(arrays), keys, k_at)
        home = {n: self._scattered(x, self.axis[n]) for n, x in dkeys.items()}
        return {"q": dq, **dvalues, **{n: x + dvalues[n] if n in dvalues else x for n, x in home.items()}}

    def _gathered(self, local_keys: Arrays) -> tuple[Arrays, Any]:
        deal = self.shard.deal
        whole = {n: lax.all_gather(x, self.shard.axis, axis=self.axis[n], tiled=True) for n, x in local_keys.items()}
        at = np.argsort(deal.tiles.reshape(-1))
        keys = {n: _tiles(x, at, deal.tile, self.axis[n]) for n, x in whole.items()}
        keys = {n: lax.slice_in_dim(x, 0, deal.length, axis=self.axis[n]) for n, x in keys.items()}
        return keys, jnp.arange(deal.length, dtype=jnp.int32)

    def _scattered(self, x: Any, axis: int) -> Any:
        """The sum over all devices, of which each has its own tokens."""
        deal = self.shard.deal
        width = [(0, len(deal.order) - deal.length if i == axis else 0) for i in range(x.ndim)]
        dealt = _tiles(jnp.pad(x, width), deal.tiles.reshape(-1), deal.tile, axis)
        return _psum_scatter(dealt, self.shard.axis, scatter_dimension=axis, tiled=True)


def _values_of(arrays: Arrays) -> Arrays:
    return {n: x for n, x in arrays.items() if n not in ("q", "k", "v", "sinks")}


def _zeros(arrays: Arrays, like: Any, dtype: Any = None) -> Arrays:
    """Zeros as different between devices as `like` is."""
    zeros = {n: jnp.zeros(x.shape, dtype or x.dtype) for n, x in arrays.items()}
    return {n: x for n, x in varying_alike({**zeros, "like of zeros": like})[0].items() if n in zeros}


def _tiles(x: Any, order: Any, tile: int, axis: int) -> Any:
    """Tiles of `tile` tokens in another order."""
    if (order == np.arange(len(order))).all():
        return x  # tiles in order need no copy
    shape = x.shape
    cut = x.reshape(*shape[:axis], len(order), tile, *shape[axis + 1 :])
    return jnp.take(cut, jnp.asarray(order), axis=axis).reshape(shape)


Arrays = dict[str, Any]
Axes = str | tuple[str, ...] | None


def size(axes: Axes) -> int:
    return 1 if axes is None else int(lax.axis_size(axes))


@dataclass(frozen=True, eq=False)
class Shard:
    """A call as one device of a mesh axis computes it. `attend` makes it; the rings of `jax_ring` call its `forward`
    and `backward` with the keys that have come."""

    att: Attention  # the caller's attention, with the values that the host knows
    deal: Deal
    axis: str  # the mesh axis of the tokens
    all_keys: bool  # keys are those of the sequence, in its order; else they are distributed as queries are
    axes: tuple[Axes, Axes]  # mesh axes over which batch entries and heads are split
    split: Mapping[str, tuple[int, ...]]  # table -> axes of which a device has a part
    values: Arrays  # the caller's tables and numbers that gradients or traces may depend on
    lengths: tuple[int, int]  # batch entries and heads of this device

    @property
    def weighted(self) -> bool:
        """Whether rows are no softmaxes: parts are sums then."""
        return self.att.program.weight is not None

    @cached_property
    def whole_sizes(self) -> tuple[int, int]:
        """Batch entries and heads of all devices."""
        batch, heads = (n * size(a) for n, a in zip(self.lengths, self.axes, strict=True))
        return batch, heads

    @cached_property
    def local(self) -> ShardAttention:
        """The attention rewritten for this device."""
        batch, heads = self.whole_sizes
        coordinates = "".join(c for c, a in zip("bh", self.axes, strict=True) if size(a) > 1)
        coordinates += "q" if self.all_keys else "qk"
        where = ShardPlace(self.deal.length, len(self.deal.order), batch, heads, coordinates, self.split)
        return on_shard(self.att, where, {n: x.shape for n, x in self.values.items() if n not in self.split})

    @property
    def axis_of_keys(self) -> dict[str, int]:
        """The arrays that are sent or gathered -> their axes of keys."""
        return {"k": 1, "v": 1, **self.local.sent_with_keys}

    @property
    def learnable(self) -> frozenset[str]:
        return self.att.program.learnable & self.values.keys()

    # -- where it is ------------------------------------------------------------------------------

    def of_rank(self, table: Any, shift: int = 0) -> Any:
        """A row of [ranks, ...]: this rank's, or that of the rank `shift` before it."""
        at = (lax.axis_index(self.axis) - shift) % self.deal.ranks
        return lax.dynamic_index_in_dim(jnp.asarray(table), at, keepdims=False)

    def positions(self, shift: int = 0) -> Any:
        return self.of_rank(self.deal.positions(), shift)

    def first(self, which: int) -> Any:
        """The first batch entry (0), or head (1), of this device."""
        axes = self.axes[which]
        return jnp.int32(0) if axes is None else lax.axis_index(axes).astype(jnp.int32) * self.lengths[which]

    # -- attention to some keys -------------------------------------------------------------------

    def read(self, values: Arrays, keys: Arrays, k_at: Any) -> Arrays:
        """The values that the local attention reads besides positions: of the caller's `values`, and of `keys`, the
        tables that have come with the keys at `k_at`."""
        at = {"q": self.positions(), "k": k_at}
        at |= {c: self.first(i) + jnp.arange(n, dtype=jnp.int32) for i, (c, n) in enumerate(zip("bh", self.lengths))}
        both = {**values, **keys}
        tables = {t.name: self._table(t, at, both if "k" in t.axes else values) for t in self.local.tables}
        names = self.local.attention.program.names
        return {n: x for n, x in {**values, **tables}.items() if n in names}

    def _table(self, table: ShardTable, at: Arrays, values: Arrays) -> Any:
        program = self.att.program
        arrays = {**program.tables, **values}
        env: Arrays = {n: x for n, x in {**program.scalars, **values}.items() if not getattr(x, "ndim", 0)}
        for i, c in enumerate(table.axes):
            shape = [-1 if i == j else 1 for j in range(len(table.axes))]
            env[c], env[f"place of {c}"] = at[c].reshape(shape), jnp.arange(len(at[c])).reshape(shape)
        wide = any(arrays[n.name].dtype == np.float64 for n in walk(table.expr) if n.op == "lookup")

        def value(e: Any) -> Any:
            names = {n.name for n in walk(e) if n.op == "lookup"}
            read = {n: jnp.asarray(narrowed(n, arrays[n].dtype.kind == "f", arrays[n], False)) for n in names}
            return evaluate(e, env, read, int64=False, float64=wide)

        change: dict[Any, Any] = {}
        for n in walk(table.expr):
            if n.op == "segment":
                offsets, name = jnp.asarray(arrays[n.name]), f"segment {len(change)}"
                # right: behind segments without tokens
                index = jnp.searchsorted(offsets, value(substitute(n.args[0], change)), "right") - 1
                env[name] = jnp.clip(index, 0, max(offsets.shape[0] - 2, 0))
                change[n] = param(name, INT)
        return jnp.broadcast_to(value(substitute(table.expr, change)), tuple(len(at[c]) for c in table.axes))

    def _call(self, q: Any, keys: Arrays, tables: Arrays, k_at: Any, seed: Any) -> Any:
        """(JaxCall, its arrays that gradients flow to, other arrays) of this device's queries and some keys."""
        att = self.local.attention
        # the sum of a float16 row may be above 65504
        if self.weighted:
            q, keys = summable(q), {**keys, "k": summable(keys["k"]), "v": summable(keys["v"])}
        at = {AT["q"]: self.positions(), AT["k"]: k_at, AT["b"]: self.first(0), AT["h"]: self.first(1)}
        params = tables | {n: x for n, x in at.items() if n in att.program.names}
        call = att.call(CallArgs(q, keys["k"], keys["v"], seed=seed, layout="bshd", params=params))
        # without sinks, which are counted once, where parts are merged
        inner, learned, fixed = prepared(replace(call, sinks=None), att.options)
        return inner, *varying_alike({**learned, "q": q, "k": keys["k"], "v": keys["v"]}, fixed)

    def forward(self, q: Any, values: Arrays, keys: Arrays, k_at: Any) -> tuple[Any, Any, Any]:
        """(out in the dtype of lse, lse, its rounding error) of attention to these keys, without sinks; of weighted
        rows their sums."""
        inner, learned, fixed = self._call(q, keys, self.read(values, keys, k_at), k_at, values.get("seed"))
        arrays = {n: learned[n] for n in "qkv"} | learned | fixed
        out, lse, _, lse_residual, _ = bound(Task(inner, tuple(arrays), lse_residual=True), *arrays.values())
        if self.weighted:  # the count of keys is in the place of the rounding error
            return sums_of((out, lse, lse_residual), "bshd")
        return out.astype(lse.dtype), lse, lse_residual

    def backward(self, rows: Arrays, values: Arrays, keys: Arrays, k_at: Any) -> tuple[Any, Arrays, Arrays]:
        """(dq, gradients of `values` that are learned, of `keys`) by attention to these keys. `rows` holds q, the
        whole attention's out, lse and lse_residual, and their cotangents."""
        floats = {n: x for n, x in values.items() if n in self.learnable}
        moving = {n: x for n, x in keys.items() if n in self.learnable}

        def read(floats: Arrays, moving: Arrays) -> Arrays:
            local_tables = self.read({**values, **floats}, {**keys, **moving}, k_at)
            return {n: x for n, x in local_tables.items() if jnp.issubdtype(x.dtype, jnp.floating)}

        tables, back = jax.vjp(read, floats, moving)
        tables = self.read(values, keys, k_at) | tables
        dtypes = {n: keys[n].dtype for n in "kv"}
        inner, learned, fixed = self._call(rows["q"], keys, tables, k_at, values.get("seed"))
        source = {t.name: t.source for t in inner.plan.tables} | {s.name: s.source for s in inner.plan.slots}
        grad_names = tuple(sorted(learned))
        arrays = {n: learned[n] for n in "qkv"} | learned | fixed | {n: x for n, x in rows.items() if n != "q"}
        grads = dict(
            zip(grad_names, bound(Task(inner, tuple(arrays), grad_names, parted=True), *arrays.values()), strict=True)
        )
        sums: Arrays = {}
        for n, x in grads.items():
            if n not in ("q", "k", "v"):
                sums[source[n]] = sums[source[n]] + x if source[n] in sums else x  # a table may have several slots
        floating = {n: x for n, x in tables.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        # vjp wants a cotangent of every result
        cotangents = {n: sums[n].astype(x.dtype) if n in sums else jnp.zeros_like(x) for n, x in floating.items()}
        dfloats, dmoving = back(cotangents)
        return grads["q"], dfloats, dmoving | {n: grads[n].astype(dtype) for n, dtype in dtypes.items()}


def bind_host_values(att: Attention, split: Collection[str], params: dict[str, Any]) -> tuple[Attention, Arrays]:
    """`att` with the values that the host knows, and the tables and numbers that gradients or traces may depend on."""
    host, device_values = split_host_device({**att.traced, **params}, None, att.program.learnable, "jax")
    device_values |= {n: host.pop(n) for n in split if n in host}
    check_names(att.program, {**host, **device_values}, split)
    program = att.program.without(device_values).bind(host).fixed()
    return Attention(program, att.options), {n: jnp.asarray(x) for n, x in device_values.items()}


PATIENCE = 300  # seconds, as jax.distributed waits for processes to come
_met: set[str] = set()


def agree(call: Mapping[str, str]) -> None:
    """Compare what a call is made of with the other processes, the first time that this one is at such a call. Raises
    `PeerError` that names processes and what differs, or one that does not come."""
    if jax.process_count() == 1:
        return
    text = json.dumps(call, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()
    if key in _met:
        return
    # numbered by calls, not by their hash: processes at different calls meet, and say so
    mine, room = jax.process_index(), f"frisket/attend/{len(_met)}"
    _met.add(key)
    store: Any = distributed.global_state.client
    store.key_value_set(f"{room}/{mine}", text)
    others = range(1, jax.process_count()) if mine == 0 else [0]  # all with process 0: as many messages as processes
    wrong = []
    for process in others:
        theirs = json.loads(_of(store, f"{room}/{process}", process))
        for n in (n for n in call if theirs.get(n) != call[n]):
            wrong.append(f"process {process} has another {n} than process {mine}:\n    {theirs.get(n)}\n    {call[n]}")
    if wrong:
        raise PeerError("processes call attend with different things\n  " + "\n  ".join(wrong))


def _of(store: Any, key: str, process: int) -> str:
    try:
        return str(store.blocking_key_value_get(key, PATIENCE * 1000))
    except jax.errors.JaxRuntimeError as error:
        message = f"process {process} has not come to this call of attend within {PATIENCE} s\n"
        raise PeerError(f"{message}  it has died, is at other work, or has another program") from error
