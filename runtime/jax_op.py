"""Runs a plan on JAX arrays: the one door from `attention.py` to the JAX backends, with a gradient of its own.

The executors are called from `jax.custom_vjp`; what they make is neither differentiated nor mapped by JAX, which would
go through their loops: `runtime/jax_transforms.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from frisket.dsl.errors import BackendError, BackwardError, LoweringError, ParameterError
from frisket.dsl.types import FLOAT
from frisket.lowering.derive import backward_of
from frisket.lowering.emit import pallas_tpu
from frisket.lowering.flat import DeviceSpans
from frisket.lowering.plan import Geometry, LoopPlan, Spans, Target
from frisket.lowering.xla_tiles import varying_axes

from .jax_transforms import refuse, sealed
from .modules import load

if TYPE_CHECKING:
    import jax

BACKENDS = ("xla", "cpp", "pallas-tpu")
TILES = {"xla": (256, 128), "pallas-tpu": (512, 512)}  # those of "cpp": lowering/cpu_tiles.py


def default_target(backend: str, geometry: Geometry) -> Target:
    """The tiles a backend starts from, no larger than the problem needs."""
    block_q, block_k = TILES[backend]
    if backend == "pallas-tpu":
        lanes = pallas_tpu.LANES
        block_q, block_k = (
            min(block, -(-length // lanes) * lanes)
            for block, length in ((block_q, geometry.q_len), (block_k, geometry.kv_len))
        )
    return Target(backend, block_q, block_k)


def forward(
    plan: LoopPlan,
    spans: Spans | DeviceSpans,
    geometry: Geometry,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: Mapping[str, Any],
    tables: Mapping[str, Any],
    target: Target,
    backend: str,
    *,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """(out [batch, q_len, heads, v_dim], lse, top [batch, heads, q_len]) of q [batch, q_len, heads, dim], k, v
    [batch, kv_len, kv_heads, dim] and sinks [heads]. `top` is None of a backend that has no max scores. `target` is
    the one the spans were made for. Without a TPU `pallas-tpu` runs in Pallas' interpreter: slow, and for checking
    only. Gradients flow to q, k, v, sinks, and to the Float slots and tables of the score mod."""
    import jax

    if backend not in BACKENDS:
        raise BackendError(f"no JAX backend {backend!r}; there are {', '.join(BACKENDS)}")
    tables = {t.name: _narrow(t.source, t.type is FLOAT, tables[t.name], plan.int64) for t in plan.tables}
    if backend == "pallas-tpu":
        run = refuse(partial(_run_pallas, plan, spans, geometry, slots=slots, tables=tables, target=target), _NO_VJP)
        return *run(q, k, v), None
    call, learned, fixed = _divided(plan, spans, geometry, slots, tables, replace(target, backend=backend))
    learned |= {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": sinks})
    if not any(isinstance(x, jax.core.Tracer) for x in (*learned.values(), *fixed.values())):
        return call.forward(learned, fixed)
    learned, fixed = _alike(learned, fixed)
    result: tuple[jax.Array, jax.Array, jax.Array] = _differentiable(call)(learned, fixed)
    return result


_NO_VJP = BackwardError(
    "backend 'pallas-tpu' has no gradients; take backend='xla', or 'cpp' on a CPU\n"
    "  for the forward alone wrap q, k and v in jax.lax.stop_gradient"
)
_NO_HESSIAN = BackwardError(
    "a gradient of a gradient of attention is asked for; there are first derivatives, by jax.grad and jax.vjp\n"
    "  where no second ones are needed wrap the gradient in jax.lax.stop_gradient"
)

Arrays = dict[str, Any]  # by name; "q", "k", "v", "sinks", names of the plan, and numbers of leaves


@dataclass(frozen=True, eq=False)
class _Call:
    """A call without its JAX arrays: `leaves` are the numbers it takes beside q, k and v, None where an array of JAX
    stands, which comes by its place."""

    plan: LoopPlan
    spans: Spans | None  # of the host
    slice_of: Any
    geometry: Geometry
    target: Target
    leaves: tuple[Any, ...]
    tree: Any
    places: Mapping[str, int]  # of what gradients flow to, by its name in the plan

    def _given(self, learned: Arrays, fixed: Arrays) -> tuple[Any, ...]:
        leaves = list(self.leaves)
        for name, x in (*learned.items(), *fixed.items()):
            if (place := self.places.get(name, -1)) >= 0 or name.isdecimal():
                leaves[place if place >= 0 else int(name)] = x
        numbers = self.tree.unflatten(leaves)
        spans = self.spans or DeviceSpans(numbers["spans"][0], numbers["spans"][1], None, self.slice_of)
        geometry = replace(self.geometry, origin=numbers["origin"], sizes=numbers["sizes"])
        return spans, geometry, numbers["slots"], numbers["tables"]

    def forward(self, learned: Arrays, fixed: Arrays) -> tuple[Any, Any, Any]:
        spans, geometry, *numbers = self._given(learned, fixed)
        qkv, sinks = (learned[n] for n in "qkv"), learned.get("sinks")
        run = _executors(self.target.backend)[0]
        return run(self.plan, spans, geometry, *qkv, *numbers, self.target, sinks=sinks)  # type: ignore[no-any-return]

    def backward(self, wanted: frozenset[str], learned: Arrays, fixed: Arrays, rows: Arrays) -> Arrays:
        spans, geometry, *numbers = self._given(learned, fixed)
        qkv, sinks = (learned[n] for n in "qkv"), learned.get("sinks")
        run = _executors(self.target.backend)[1]
        given = (rows[n] for n in ("out", "lse", "dout", "dlse"))
        found: Arrays = {}
        if inner := wanted - {"sinks"}:
            found = run(
                self.plan, spans, geometry, *qkv, *given, *numbers, self.target, wanted=inner, sinks=sinks
            )  # fmt: skip
        if "sinks" in wanted:
            found["sinks"] = _of_sinks(sinks, **rows)
        return {n: x.astype(learned[n].dtype) for n, x in found.items()}

    def of_batch(self, n: int) -> _Call:
        """The same for `n` batches beside one another, of a mask and score mod that do not know their batch entry."""
        wider = np.tile(self.slice_of, (n, 1))
        spans = None if self.spans is None else replace(self.spans, slice_of=wider)
        geometry = replace(self.geometry, batch=n * self.geometry.batch)
        return replace(self, spans=spans, slice_of=wider, geometry=geometry)


def _executors(backend: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if backend == "cpp":
        from . import native_jax

        return native_jax.forward, native_jax.backward
    from frisket.lowering import xla, xla_backward

    return xla.forward, xla_backward.backward


def _divided(
    plan: LoopPlan, spans: Spans | DeviceSpans, geometry: Geometry, slots: Mapping[str, Any],
    tables: Mapping[str, Any], target: Target,
) -> tuple[_Call, Arrays, Arrays]:  # fmt: skip
    """A call of the host, the arrays that gradients flow to, and those they do not."""
    import jax

    device = isinstance(spans, DeviceSpans)
    numbers = {
        "slots": dict(slots), "tables": dict(tables), "origin": geometry.origin, "sizes": geometry.full,
        "spans": (spans.bounds, spans.count) if device else (),
    }  # fmt: skip
    tree: Any
    leaves, tree = jax.tree.flatten(numbers)
    numbered = tree.unflatten(range(len(leaves)))
    flow = {g.source for g in backward_of(plan).gradients}
    places = {n: i for kind in ("slots", "tables") for n, i in numbered[kind].items() if n in flow}
    inside = [isinstance(x, jax.Array) for x in leaves]
    learned = {n: leaves[i] for n, i in places.items() if inside[i]}
    taken = {places[n] for n in learned}
    fixed = {str(i): x for i, x in enumerate(leaves) if inside[i] and i not in taken}
    kept = tuple(None if inside[i] else x for i, x in enumerate(leaves))
    own = None if isinstance(spans, DeviceSpans) else spans
    call = _Call(plan, own, spans.slice_of, replace(geometry, origin=(0, 0, 0, 0)), target, kept, tree, places)
    return call, learned, fixed


def _alike(*groups: Arrays) -> tuple[Arrays, ...]:
    """Under `jax.shard_map`: all arrays as different between devices as the most different one is, since what is
    carried through a loop is."""
    from jax import lax

    axes = {a for arrays in groups for x in arrays.values() for a in varying_axes(x)}

    def alike(x: Any) -> Any:
        missing = tuple(sorted(axes - {*varying_axes(x)}))
        return lax.pcast(x, missing, to="varying") if missing else x

    return tuple({n: alike(x) for n, x in arrays.items()} for arrays in groups)


def _differentiable(call: _Call) -> Callable[[Arrays, Arrays], Any]:
    import jax
    from jax.custom_derivatives import SymbolicZero

    attend = sealed(call, "forward", _NO_HESSIAN)
    # JAX does not say inside a shard_map whose gradient is wanted: all are made
    told = not jax.sharding.get_abstract_mesh().manual_axes

    @jax.custom_vjp
    def run(learned: Arrays, fixed: Arrays) -> Any:
        return attend(learned, fixed)

    def forwards(learned: Arrays, fixed: Arrays) -> Any:
        wanted = {n: () for n, x in learned.items() if not told or x.perturbed}  # in the tree, without a leaf
        if told:
            learned, fixed = ({n: x.value for n, x in arrays.items()} for arrays in (learned, fixed))
        out, lse, top = attend(learned, fixed)
        return (out, lse, top), (learned, fixed, out, lse, wanted)

    def backwards(kept: Any, given: Any) -> Any:
        learned, fixed, out, lse, wanted = kept
        dout, dlse, _ = given  # the largest score is not differentiable
        rows = {
            "out": out, "lse": lse,
            "dout": jax.numpy.zeros_like(out) if isinstance(dout, SymbolicZero) else dout,
            "dlse": None if isinstance(dlse, SymbolicZero) else dlse,
        }  # fmt: skip
        found = sealed(call, "backward", _NO_HESSIAN, frozenset(wanted))(learned, fixed, rows) if wanted else {}
        return {n: found.get(n) for n in learned}, None

    run.defvjp(forwards, backwards, symbolic_zeros=told)
    return run


def _of_sinks(sinks: Any, out: Any, lse: Any, dout: Any, dlse: Any) -> Any:
    """-sum of exp(sink - lse) * delta over batch entries and queries."""
    import jax.numpy as jnp

    real = lse.dtype
    delta = (dout.astype(real) * out.astype(real)).sum(-1).transpose(0, 2, 1) - (0 if dlse is None else dlse)
    share = jnp.exp(sinks.astype(real)[:, None] - jnp.where(lse == -jnp.inf, 0, lse))
    return -jnp.where(share == 0, 0, share * delta).sum((0, 2))


# -- Pallas -----------------------------------------------------------------------------------------


def _run_pallas(
    plan: LoopPlan, spans: Spans | DeviceSpans, geometry: Geometry, q: jax.Array, k: jax.Array, v: jax.Array,
    slots: Mapping[str, Any], tables: Mapping[str, Any], target: Target,
) -> Any:  # fmt: skip
    import jax

    if isinstance(spans, DeviceSpans):
        raise LoweringError(
            "the pallas-tpu kernel walks a grid as long as its runs of tiles, which traced tables do not tell; take "
            "backend='xla', or make the plan outside jax.jit from values"
        )

    pallas_tpu.check_tables(plan, {name: tuple(table.shape) for name, table in tables.items()})
    steps, *walk = pallas_tpu.walk_of(spans)
    run = _pallas(plan, target, replace(geometry, origin=(0, 0, 0, 0), sizes=None), str(q.dtype))
    return run(
        q, k, v, steps, *walk, geometry.origin, geometry.full,
        [slots[s.name] for s in plan.slots], [tables[t.name] for t in plan.tables],
        interpret=jax.default_backend() != "tpu",
    )  # fmt: skip


def _narrow(source: str, floating: bool, table: Any, int64: bool) -> Any:
    """A table in the integers JAX has; numbers that do not fit are an error, not other numbers."""
    import jax.numpy as jnp

    whole = isinstance(table, np.ndarray) and table.dtype.kind in "iu" and table.size
    wide = np.iinfo(np.int32)
    if whole and not floating and not int64 and (table.max() > wide.max or table.min() < wide.min):
        raise ParameterError(
            f"table `{source}` holds numbers beyond 32 bits, the kernel has 32-bit integers; renumber it"
        )
    return table if isinstance(table, np.ndarray) else jnp.asarray(table)


@lru_cache(maxsize=64)
def _pallas(plan: LoopPlan, target: Target, geometry: Geometry, dtype: str) -> Callable[..., Any]:
    import jax

    source = pallas_tpu.emit(plan, target, geometry, dtype)
    module = load(source)
    return jax.jit(module["attention_forward"], static_argnames=("steps", "interpret"))
