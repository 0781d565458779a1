"""JaxCall: a call of JAX without its arrays. A primitive carries it until a platform is known, where it runs.

Arrays go by name: "q", "k", "v", "sinks"; slots and tables that gradients flow to by their names in the plan. All
others go by the numbers of their leaves; in a shard, SHARD. `kernel_inputs` puts them into the record that an executor
takes.

Below it are the arrays: tokens in another order, wherever an array is, marks on the arrays of `fk.parallel`, integers
of 32 bits, meshes of explicit axes. (Of a mark, reverse mode works and forward raises. The primal of the mark is the
array, and its tangent goes through a primitive that can be transposed and never runs.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding
from numpy.typing import NDArray

import frisket
from frisket.dsl.errors import BackendError, BackwardError
from frisket.dsl.ir import Expr, lit, param, substitute, uses, var, walk
from frisket.dsl.types import FLOAT, INT
from frisket.grammar.memo import memo
from frisket.lowering.derive import backward_of, norm_width
from frisket.lowering.plan import KV_INPUTS, Cotangents, ForwardResults, Geometry, KernelInputs, LoopPlan, Slot
from frisket.lowering.planner.planner import DeviceSpans
from frisket.lowering.xla.promotion import usual_promotion
from frisket.lowering.xla.tiles import int64_enabled
from frisket.lowering.xla.weighted import divisor, row_cotangents
from frisket.runtime.attention.weighted import DIVISORS
from frisket.runtime.backends.base import RECORDS
from frisket.runtime.backends.cpp.jax import lse_residual_of, softmax_stats_of, too_wide
from frisket.runtime.backends.engines.proof import EngineCall, prove
from frisket.runtime.backends.registry import ORDER, library, target_on
from frisket.runtime.calls.arrays import TokenPermutation
from frisket.runtime.machine.cpp_build import BuildError, deferring, fall_back
from frisket.runtime.machine.parameters import digest, traced
from frisket.runtime.plans.device import DevicePlanSpec, FlatPlan
from frisket.runtime.plans.host import Plan
from frisket.runtime.sharding.partition import fitting, spec_of

from .attend import backend_on, check_platform, executor, quickest

Arrays = dict[str, Any]
Index = NDArray[np.int64]
RESULTS = ("out", "lse", "top", "lse_residual", "softmax_stats")  # of a forward
# of arrays that have queries or keys
LENGTH_AXES = dict.fromkeys(("q", "k", "v", "out", "dout"), 1) | dict.fromkeys((*RESULTS[1:], "dlse"), 2)
SHARD = ("batch shard", "head shard")  # operands: which of the shards this is


@dataclass(frozen=True, eq=False)
class JaxCall:
    """A call without its arrays: `op` makes it, `Task` runs `forward` or `backward`. Equal calls are lowered once."""

    plan: LoopPlan
    source: Plan | DevicePlanSpec  # the plan of the host, or the key of a flat one
    geometry: Geometry  # without its origin
    backend: str  # empty where the platform chooses
    tile: tuple[int, int] | None
    leaves: tuple[Any, ...]  # the numbers besides the arrays, by `tree`; None where an operand stands
    tree: Any  # of "slots", "tables", "drawn", "origin", "sizes", "spans" and "given"
    places: Mapping[str, int]  # the leaf of each slot and table that gradients flow to
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # of the plan's tables
    times: tuple[int, int] = (1, 1)  # so many of the source's batches and heads in a row, under jax.vmap
    shards: tuple[int, int] = (1, 1)  # the call is one of so many parts of the batches and heads, on several devices
    rows: TokenPermutation | None = None  # where the arrays have queries and keys
    invariant: bool = False  # rows of the forward have one order of sums

    @property
    def stored(self) -> bool:
        """Whether keys and values are stored, in pages, in 8 bits or with scales: there are no gradients then."""
        return bool(self.geometry.kv_dtype or any(t.source in KV_INPUTS for t in self.plan.tables))

    # -- running --

    def backend_on(self, platform: str, dtype: str, exported: bool = False, names: frozenset[str] = frozenset()) -> str:
        """The backend that runs the call on a platform, or makes the gradients of `names`; raises if none does."""
        if self.backend:
            check_platform(self.backend, platform, self.geometry)
            return self.backend
        plan, shapes = self.shard_plan(self.plan), dict(self.shapes)
        one_order = self.invariant and not names  # gradients have none
        name = backend_on(platform, plan, self.geometry, dtype, shapes, exported, names, one_order)
        if self.tile or names or one_order:
            return name
        return quickest(name, plan, self.geometry, dtype, shapes, getattr(self.source, "narrow", False))

    def rows_around(self, backend: str) -> TokenPermutation | None:
        """The rows by which arrays are put in order, around kernels that do not read them by tables."""
        return None if RECORDS[backend].executors["jax"].rows else self.rows

    @usual_promotion()
    def forward(
        self, backend: str, platform: str, arrays: Arrays, plan: Any = None, lse_residual: bool = False
    ) -> tuple[Any, ...]:
        """(out, lse, top); with `lse_residual` also the rounding error of lse, and softmax_stats [batch, heads, q_len,
        `norm_width`], which native kernels write in its place, zeros of other kernels. `plan` is the source where it is
        available, and keeps what is made of it."""
        if (rows := self.rows_around(backend)) is not None:
            bare = replace(self, rows=None)
            results = bare.forward(backend, platform, in_order(rows, arrays), plan, lse_residual)
            return tuple(permuted(x, rows.back, n) for n, x in zip(RESULTS, results))
        if RECORDS[backend].engine is not None:
            return self._by_engine(backend, platform, arrays, lse_residual)
        inputs, run = kernel_inputs(self, backend, platform, arrays, plan), executor(backend, "forward")
        try:
            fixed = self.backend or self.invariant or any(map(traced, arrays.values()))  # what is traced stays as it is
            with deferring(not fixed):
                result: tuple[Any, ...] = run(inputs, *(arrays[n] for n in "qkv"), lse_residual=lse_residual)
        except BuildError as error:
            return self.forward(self.library_instead(error), platform, arrays, plan, lse_residual)
        if not lse_residual:
            return result[:3]
        if inputs.plan.weighted:  # a backward takes the count of each row's keys
            return *result[:3], result[2], _no_stats(*result[:2])
        if RECORDS[backend].stats_kind != "offset":
            return result if RECORDS[backend].exact_delta else (*result, _no_stats(*result[:2]))
        return *result[:3], lse_residual_of(inputs, result[3], result[1]), result[3]

    def _by_engine(self, backend: str, platform: str, arrays: Arrays, lse_residual: bool) -> tuple[Any, ...]:
        """The results of `forward` by an engine that is proved to compute the call. No largest scores are wanted,
        and an engine knows nothing of rows except lse."""
        numbers = self.tree.unflatten(self.leaves)
        on_host = isinstance(self.source, Plan) and all(type(x) is int for x in numbers["origin"])
        program: Any = self.source.program if isinstance(self.source, Plan) else None
        geometry = replace(self.geometry, origin=numbers["origin"], sizes=numbers["sizes"])
        of_arrays, dropout = (geometry, str(arrays["q"].dtype), "jax", platform), self.plan.keep_mask is not None
        stored = self.stored or self.plan.unwritten  # a hidden NaN times a weight of 0 is NaN
        facts = EngineCall(program, *of_arrays, not on_host, stored, dropout, "sinks" in arrays)
        proof = "this is a shard of a call" if self.shards != (1, 1) else prove(RECORDS[backend], facts)
        if isinstance(proof, str):
            raise BackendError(f"backend {backend!r} does not run this call: {proof}\n  leave out the backend")
        out, lse = executor(backend, "forward")(proof.arguments, *(arrays[n] for n in "qkv"), platform)
        # NaN: an engine has no largest scores, and 0 would pass for one
        results = out, lse, jnp.full_like(lse, jnp.nan)
        return (*results, jnp.zeros_like(lse), _no_stats(out, lse)) if lse_residual else results

    def library_instead(self, error: BuildError) -> str:
        """The backend where a native kernel cannot be built; a call that named it gets the error."""
        if self.backend or self.invariant:
            raise error
        fall_back(error)
        return library("jax")

    @usual_promotion()
    def backward(self, backend: str, platform: str, arrays: Arrays, grad_names: frozenset[str]) -> Arrays:
        """The gradients of `grad_names`, in the dtypes of what they are of; an engine's are generated kernels'."""
        if (rows := self.rows_around(backend)) is not None:
            bare = replace(self, rows=None)
            reordered = bare.backward(backend, platform, in_order(rows, arrays), grad_names)
            return {n: permuted(x, rows.back if n == "q" else rows.keys_back, n) for n, x in reordered.items()}
        if RECORDS[backend].engine is not None:
            other = replace(self, backend="")
            # of an engine these are zeros: generated kernels take lse
            arrays = {n: x for n, x in arrays.items() if n != "softmax_stats"}
            name = other.backend_on(platform, str(arrays["q"].dtype), False, grad_names)
            return other.backward(name, platform, arrays, grad_names)
        inputs, run = kernel_inputs(self, backend, platform, arrays), executor(backend, "backward")
        results = ForwardResults(*(arrays.get(n) for n in RESULTS if n != "top"))
        lse, residual, without_stats = results.lse, results.lse_residual, results.softmax_stats is None
        if without_stats and residual is not None and RECORDS[backend].stats_kind == "offset":
            results = replace(results, softmax_stats=softmax_stats_of(inputs, lse, residual))
        cotangents, names = Cotangents(arrays["dout"], arrays.get("dlse")), grad_names
        of_divide: Arrays = {}
        if inputs.plan.weighted:
            cotangents, of_divide = row_cotangents(inputs, results, cotangents, grad_names)
            results = ForwardResults(results.out, results.lse)
            names &= {"q", "k", "v"} | {g.source for g in backward_of(inputs.plan).gradients}
        try:
            gradients: Arrays = dict(run(inputs, *(arrays[n] for n in "qkv"), results, cotangents, grad_names=names))
        except BuildError as error:
            return self.backward(self.library_instead(error), platform, arrays, grad_names)
        for n, x in of_divide.items():
            gradients[n] = gradients[n] + x if n in gradients else x
        return {n: gradients[n].astype(arrays[n].dtype) for n in grad_names}

    # -- others like it --

    def alike(self, axis: int) -> bool:
        """Whether one batch entry (0), or head (1), is like another: no mask, score mod or origin knows which it is."""
        exprs = self.plan.mask, self.plan.score, self.plan.keep_mask, self.plan.divide
        parts = [_unscaled(self.plan, e) for e in exprs if e is not None]
        origin = self.tree.unflatten(self.leaves)["origin"]
        own_origin = axis == 0 and not all(isinstance(x, int) for x in origin[2:])
        return not (own_origin or any("bh"[axis] in uses(e) for e in parts))

    def repeated(self, n: int, axis: int, shared: bool = False) -> JaxCall:
        """One call of `n` instances side by side, in the batch or as more heads, which must be alike. With
        `shared` the heads of keys stay what they are."""
        g, (b, h) = self.geometry, self.times
        if axis == 0:
            return replace(self, geometry=replace(g, batch=n * g.batch), times=(n * b, h))
        wider = replace(g, heads=n * g.heads, kv_heads=g.kv_heads * (1 if shared else n))
        return replace(self, geometry=wider, times=(b, n * h))

    def shard(self, batches: int, heads: int) -> JaxCall:
        """One of batches * heads equal parts; operands say which."""
        g = self.geometry
        part = replace(g, batch=g.batch // batches, heads=g.heads // heads, kv_heads=g.kv_heads // heads)
        return replace(self, geometry=part, shards=(batches, heads))

    def shard_plan(self, plan: LoopPlan) -> LoopPlan:
        """The plan as a shard reads it: scales and pages from 0 on, positions of the whole."""
        split_axes = tuple(n for i, n in enumerate(SHARD) if self.shards[i] > 1 and not self.alike(i))
        return _from_zero(plan, split_axes) if split_axes and self.stored else plan

    # -- as a key, and in words --

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        """The parts by which calls are equal. Arrays of the host are equal where they are the same."""
        leaves = tuple((type(x), id(x) if isinstance(x, np.ndarray) else x) for x in self.leaves)
        source = self.source if isinstance(self.source, DevicePlanSpec) else id(self.source)
        kind = self.plan, source, self.geometry, self.backend, self.tile, self.invariant
        return *kind, leaves, self.tree, self.times, self.shards, self.rows

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        # hashes first: they are cached, and keys hold trees and whole plans
        return self is other or (isinstance(other, JaxCall) and self._hash == other._hash and self._key == other._key)

    def __str__(self) -> str:
        return "; ".join((self.plan.text or "everything visible").splitlines())

    __repr__ = __str__

    @cached_property
    def digest(self) -> str:
        """A digest of the call, equal in every process and different for another kernel or other values in it."""
        chosen = self.backend, self.tile, self.times, self.shards, *["invariant"] * self.invariant
        rows = () if self.rows is None else (digest(self.rows.queries), digest(self.rows.keys))
        digests = _content(self.source), tuple(map(digest, self.leaves)), str(self.tree), *rows
        content = frisket.__version__, str(self.plan), self.geometry, chosen, digests
        return hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()


def _no_stats(out: Any, lse: Any) -> Any:
    return jnp.zeros((*lse.shape, norm_width(out.dtype, out.shape[3])), lse.dtype)


def in_order(rows: TokenPermutation, arrays: Arrays) -> Arrays:
    return {n: permuted(x, rows.keys if n in ("k", "v") else rows.queries, n) for n, x in arrays.items()}


def permuted(x: Any, index: Any, name: str) -> Any:
    """An array of this name with its positions at an index; one without positions as it is."""
    return take(x, index, LENGTH_AXES[name]) if name in LENGTH_AXES else x


def _kv_reads(plan: LoopPlan, e: Expr) -> list[Expr]:
    names = {t.name for t in plan.tables if t.source in KV_INPUTS}
    return [n for n in walk(e) if n.op == "lookup" and n.name in names]


def _unscaled(plan: LoopPlan, e: Expr) -> Expr:
    """`e` without the scales and pages in it, which are split as the keys are."""
    return substitute(e, {n: lit(0.0 if n.type is FLOAT else 0) for n in _kv_reads(plan, e)})


@memo(group="plans")
def _from_zero(plan: LoopPlan, split_axes: tuple[str, ...]) -> LoopPlan:
    """A plan that reads scales and pages as far from a shard's first batch entry, or head, as positions are."""
    slots = [Slot(f"s{len(plan.slots) + i}", INT, source=n) for i, n in enumerate(split_axes)]
    shift = {var(s.source[0]): var(s.source[0]) - param(s.name, INT) for s in slots if s.source}

    def shifted(e: Expr | None) -> Expr | None:
        return None if e is None else substitute(e, {n: substitute(n, shift) for n in _kv_reads(plan, e)})

    return replace(plan, score=shifted(plan.score), value_scale=shifted(plan.value_scale), slots=(*plan.slots, *slots))


def _content(source: Plan | DevicePlanSpec) -> tuple[Any, ...]:
    program, planned = source.program, () if isinstance(source, Plan) else source.device_specs
    problem = source.problem
    values = sorted((n, digest(x)) for n, x in {**program.scalars, **program.tables}.items())
    return program.expanded, values, planned, problem.lengths, problem.sizes, tuple(map(digest, problem.origin))


def kernel_inputs(call: JaxCall, backend: str, platform: str, arrays: Arrays, source: Any = None) -> KernelInputs:
    """The record that executors take of a call with these arrays; `source` is the call's where it is known."""
    leaves = list(call.leaves)
    for name, x in arrays.items():
        if (place := call.places.get(name, -1)) >= 0 or name.isdecimal():
            leaves[place if place >= 0 else int(name)] = x
    numbers = call.tree.unflatten(leaves)
    at = tuple(arrays.get(name, 0) for name in SHARD)
    geometry = replace(call.geometry, origin=_origin(call, numbers["origin"], at), sizes=numbers["sizes"])
    plan, slots, tables, source = call.plan, numbers["slots"], numbers["tables"], source or call.source
    if isinstance(source, DevicePlanSpec):
        source = FlatPlan(source, numbers["given"], numbers["spans"])
    narrow = bool(getattr(source, "narrow", False))
    one_order = call.invariant and ORDER not in RECORDS[backend].features
    target = target_on(backend, call.plan, geometry, str(arrays["q"].dtype), call.tile, narrow, one_order)
    tile = target.block_q, target.block_k
    if isinstance(source, Plan):
        tiled = source.work(tile, proofs=RECORDS[backend].guarded)
        plan, slots, tables = tiled.plan, tiled.slots, tiled.tables
    tables = {**tables, **{t.name: arrays[t.source] for t in plan.tables if t.source in arrays}}
    plan = call.shard_plan(plan)
    sizes = zip(SHARD, at, (call.geometry.batch, call.geometry.heads))
    drawn = numbers["drawn"] | {n: i * size for n, i, size in sizes}
    if RECORDS[backend].int64 and isinstance(call.source, DevicePlanSpec):  # without x64
        plan = _holding(plan, call.source, slots, tables)
    slots = {**slots, **{s.name: drawn[s.source] for s in plan.slots if s.source in drawn}}
    tables = {t.name: narrowed(t.source, t.type is FLOAT, tables[t.name], plan.int64) for t in plan.every_table}
    spans: Any = RepeatedSpans(source, call, at)
    spans = spans if RECORDS[backend].accelerated else spans.rows(tile)
    return KernelInputs(plan, spans, geometry, target, slots, tables, arrays.get("sinks"), call.rows, platform=platform)


def _holding(plan: LoopPlan, spec: DevicePlanSpec, slots: Arrays, tables: Arrays) -> LoopPlan:
    """The plan for whatever traced Ints may hold, by their dtypes: in 64 bits where 32 may be too few."""
    ints = {x.name: x.source for xs in (plan.every_table, plan.slots) for x in xs if x.type is INT}
    kinds = {n: x.dtype for n, x in {**slots, **tables}.items() if n in ints and hasattr(x, "aval")}
    # -w of the least int32 is not checked: windows that are traced numbers stay in 32 bits
    most = {n: float(np.iinfo(x).max) - (n in slots) for n, x in kinds.items() if x.itemsize > 2}
    return plan.holding({n: min(x, dict(spec.most).get(ints[n] or "", x)) for n, x in most.items()})  # a cache's, say


def _origin(call: JaxCall, origin: Any, at: tuple[Any, ...]) -> Any:
    """The origin of a shard: coordinates are those of the whole."""
    if call.shards == (1, 1):
        return origin
    (b, h, *positions), g = origin, call.geometry
    b = b if call.shards[0] == 1 or call.alike(0) else b + at[0] * g.batch
    h = h if call.shards[1] == 1 or call.alike(1) else h + at[1] * g.heads

    def mine(x: Any) -> Any:
        if isinstance(x, int) or call.shards[0] == 1:
            return x
        return lax.dynamic_slice_in_dim(x, at[0] * g.batch, g.batch)

    return b, h, *map(mine, positions)


class RepeatedSpans:
    """The spans of a call whose source is repeated, or of which it is a shard."""

    def __init__(self, source: Any, call: JaxCall, at: tuple[Any, ...]) -> None:
        self.source, self.call, self.at = source, call, at

    def rows(self, block: tuple[int, int]) -> Any:
        return self._placed(self.source.rows(block))

    def columns(self, block: tuple[int, int]) -> Any:
        return self._placed(self.source.columns(block))

    def _placed(self, spans: Any) -> Any:
        times, shards = self.call.times, self.call.shards
        if times == shards == (1, 1):
            return spans
        slice_of = np.tile(spans.slice_of, times)
        batch, heads = (n // parts for n, parts in zip(slice_of.shape, shards, strict=True))
        first = slice_of[:batch, :heads]
        if (np.tile(first, shards) == slice_of).all():  # equal shards need not know which one they are
            return replace(spans, slice_of=first)
        where = self.at[0] * batch, self.at[1] * heads
        mine = lax.dynamic_slice(jnp.asarray(slice_of), where, (batch, heads)).reshape(-1)
        local_slices = np.arange(batch * heads, dtype=np.int32).reshape(batch, heads)
        return DeviceSpans(jnp.asarray(spans.bounds)[mine], jnp.asarray(spans.count)[mine], None, local_slices)


# -- arrays -------------------------------------------------------------------------------------------

_auto_axes: Any = jax.sharding.auto_axes  # JAX leaves some of its functions untyped
_reshard: Any = jax.sharding.reshard


def take(x: jax.Array, index: Index, axis: int, inverse: Index | None = None, scratch: bool = False) -> jax.Array:
    """`x` at `index` along an axis. With the index that puts rows back, gradients are gathered by it: JAX's own adds
    rows to zeros, and takes seven times as long on a CPU. On a mesh of explicit axes it stays split as it is, as far as
    the new length goes: there no gather says by itself how its result is split."""

    def gather(x: Any) -> Any:
        return jnp.take(x, jnp.asarray(index), axis=axis)

    have: Any = jax.typeof(x).sharding
    if AxisType.Explicit not in have.mesh.axis_types:
        if inverse is None:
            return gather(x)  # type: ignore[no-any-return]
        return _permute.bind(x, to=Permutation(index, inverse), axis=axis)  # type: ignore[no-any-return]
    spec = [*have.spec, *[None] * (x.ndim - len(have.spec))]
    spec[axis] = fitting(have.mesh.shape, spec[axis], len(index))
    return _auto_axes(gather, out_sharding=NamedSharding(have.mesh, spec_of(*spec)))(x)  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Permutation:
    """An order of the places of an axis, and the one that puts them back."""

    index: Index
    inverse: Index

    def of(self, x: Any, axis: int) -> Any:
        return jnp.take(x, jnp.asarray(self.index), axis=axis)


def _permute_mapped(xs: Any, axes: Any, *, to: Permutation, axis: int) -> Any:
    return _permute.bind(jnp.moveaxis(xs[0], axes[0], 0), to=to, axis=axis + 1), 0


_permute: Any = Primitive("frisket_permute")  # jnp.take, whose transpose gathers by the inverse
_permute.def_abstract_eval(lambda x, **_: x)
_permute.def_impl(lambda x, to, axis: to.of(jnp.asarray(x), axis))
mlir.register_lowering(_permute, mlir.lower_fun(lambda x, to, axis: to.of(x, axis), multiple_results=False))
batching.primitive_batchers[_permute] = _permute_mapped
_deflinear: Any = ad.deflinear2
_deflinear(_permute, lambda c, _, to, axis: [_permute.bind(c, to=Permutation(to.inverse, to.index), axis=axis)])


def reverse_only(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, marked."""
    return {n: _mark.bind(x) for n, x in arrays.items()}


def _refused(*_: Any, **__: Any) -> Any:
    text = "forward mode of attention over several devices is asked for (fk.parallel under jax.jvp, jax.jacfwd, "
    text += "jax.linearize or jax.hessian); there are first derivatives in reverse, by jax.grad and jax.vjp\n"
    raise BackwardError(f"{text}  where none are needed wrap its arguments in jax.lax.stop_gradient")


def _tangent_of(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    return _mark.bind(x), t if isinstance(t, ad.Zero) else _tangent.bind(t)


def _primitive(name: str) -> Any:
    primitive: Any = Primitive(name)
    primitive.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[primitive] = lambda xs, axes: (primitive.bind(*xs), axes[0])
    return primitive


_mark, _tangent = _primitive("frisket_reverse_only"), _primitive("frisket_tangent")
_mark.def_impl(lambda x: x)
mlir.register_lowering(_mark, lambda ctx, x: [x])
ad.primitive_jvps[_mark] = _tangent_of
_tangent.def_impl(_refused)
mlir.register_lowering(_tangent, _refused)
ad.primitive_transposes[_tangent] = lambda cotangent, x: [cotangent]
ad.primitive_jvps[_tangent] = _refused


def narrowed(source: str, floating: bool, table: Any, int64: bool) -> Any:
    """A table in the integers JAX has; numbers that do not fit are an error, not other numbers."""
    whole = isinstance(table, np.ndarray) and table.dtype.kind in "iu" and table.size  # an empty table has no maximum
    wide = np.iinfo(np.int32)
    if whole and not floating and not int64 and (table.max() > wide.max or table.min() < wide.min):
        raise too_wide(source)
    return table if isinstance(table, np.ndarray) else jnp.asarray(table)


def _divisor(inputs: KernelInputs, total: Any, count: Any) -> Any:
    """The divisors of rows, by their sums; tables of numpy are checked."""
    kinds = {t.name: t.type is FLOAT for t in inputs.plan.every_table}
    wide = inputs.plan.int64 and int64_enabled()
    tables = {n: jnp.asarray(narrowed(n, kinds[n], x, wide)) for n, x in inputs.tables.items()}
    return divisor(replace(inputs, tables=tables), total, count)


DIVISORS["jax"] = _divisor


def placed(x: Any, like: Any = None) -> Any:
    """An array on a mesh of explicit axes split as an array of the type `like` is, or whole on every device."""
    have: Any = jax.typeof(x).sharding
    if AxisType.Explicit not in have.mesh.axis_types:
        return x
    spec: Any = spec_of() if like is None else like.sharding.spec
    return _reshard(x, NamedSharding(have.mesh, spec))
