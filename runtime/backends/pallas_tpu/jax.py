"""The Pallas kernels for TPUs on JAX arrays, traced or not: on a TPU, elsewhere in Pallas' interpreter.

Their tiles, texts and refusals are in this module too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from frisket.dsl.errors import LoweringError
from frisket.dsl.ir import SIZES, uses
from frisket.grammar.memo import memo
from frisket.lowering.architectures import tpu_of
from frisket.lowering.derive import Gradient, alone, backward_of, captured
from frisket.lowering.kernels.inputs import TableInputs, roots
from frisket.lowering.kernels.jnp_expr import evaluate
from frisket.lowering.kernels.pallas_tpu import backward as emitted
from frisket.lowering.kernels.pallas_tpu import forward as pallas_tpu
from frisket.lowering.kernels.pallas_tpu import kernel as tpu_kernel
from frisket.lowering.kernels.pallas_tpu import walk as pallas_walk
from frisket.lowering.kernels.pallas_tpu.walk import TpuOptions
from frisket.lowering.plan import Cotangents, ForwardResults, Geometry, KernelInputs, LoopPlan, Names, Target
from frisket.lowering.planner.planner import DeviceSpans
from frisket.lowering.xla.captured import folded
from frisket.runtime.backends.base import Block, Shapes
from frisket.runtime.machine.modules import load_source
from frisket.runtime.plans.device import Values

if TYPE_CHECKING:
    import jax

TILES = (512, 512)
LONG = 8192  # keys from where on a step takes twice as many: fewer steps, and little is computed besides a row
SCALAR_BYTES = 256 * 1024  # of scalar memory that a table of pages may take: a quarter of what a core has
HEADS_BYTES = 6 * 1024 * 1024  # of vector memory that the heads of a program may take besides their tiles
KEY_BYTES = 1024  # of vector memory that a key and its value may take in a step of twice as many
NARROW = (256, 256)  # of masks whose rows see one short run of keys: less is computed outside of it
DISTANCES = 1 << 20  # sums of one head that stay in a kernel's memory, 4 MiB
Array = Any  # a jax.Array, traced or not
Function: TypeAlias = Callable[..., Any]
Walk: TypeAlias = pallas_walk.TpuWalk | pallas_walk.TpuSearch


def target(plan: LoopPlan, geometry: Geometry, dtype: str, tile: Block | None = None, narrow: bool = False) -> Target:
    """The tiles a TPU starts from, no larger than the problem needs; docs/pallas.md says why these."""
    if tile:
        return Target("pallas-tpu", *tile)
    block_q, block_k = NARROW if narrow else TILES
    if not narrow and geometry.kv_len >= LONG and _numbers(geometry) * _wide(dtype) <= KEY_BYTES:
        block_k *= 2
    # a call without tokens has the smallest tile
    q_len, kv_len = (max(-(-n // tpu_kernel.LANES), 1) * tpu_kernel.LANES for n in (geometry.q_len, geometry.kv_len))
    block_k = min(block_k, kv_len)
    if plan.pages:
        fitting = tpu_kernel.keys_of_a_tile
        # other page sizes are refused later, by `refuses`, which says why
        block_k = fitting(plan.page, block_k) or fitting(plan.page, tpu_kernel.LONGEST) or block_k
    return Target("pallas-tpu", min(block_q, q_len), block_k)


def text(
    plan: LoopPlan, target: Target, g: Geometry, dtype: str, sinks: bool = False, learned: Collection[str] = (), *_: Any
) -> tuple[str, Target]:
    """The forward's text and, where there are gradients, the backward's, and their target."""
    known: list[Any] = [*plan.tables, *plan.slots]
    names = {*"qkv", *(x.name for x in known if x.source in learned)}
    heads = together(g, dtype, target.block_q) if plan.mask is None or "h" not in uses(plan.mask) else 1
    options = pallas_tpu.ForwardOptions(sinks=sinks, program_heads=heads)
    source = pallas_tpu.emit(plan, target, g, dtype, options)
    if g.kv_dtype or plan.value_scale is not None or plan.pages is not None:  # without gradients
        return source, target
    return f"{source}\n\n{emitted.emit(plan, target, g, dtype, names)}", target


def refuses(plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Shapes) -> str:
    """A reason why the forward kernel cannot run a call, or an empty text. `shapes` are those of the plan's tables."""
    if why := tpu_kernel.refused(plan, dtype):
        return why
    pages = prod(shapes.get(str(plan.pages), (0,)))
    if 4 * pages > SCALAR_BYTES:
        return (
            f"a table of {pages} pages takes {4 * pages // 1024} KiB of a TPU's scalar memory, at most "
            f'{SCALAR_BYTES // 1024}; use larger pages, fewer sequences in a call, or backend="xla"'
        )
    try:
        tpu_kernel.check_tables(plan, TableInputs(roots(plan)), shapes)
    except LoweringError as error:
        return str(error)
    return ""


def forward(
    inputs: KernelInputs, q: jax.Array, k: jax.Array, v: jax.Array, *, lse_residual: bool = False
) -> tuple[jax.Array, ...]:
    """(out [batch, q_len, heads, v_dim], lse, top [batch, heads, q_len]) of q [batch, q_len, heads, dim], k, v
    [batch, kv_len, kv_heads, dim] and sinks [heads]. k and v are, where the plan has pages, [pages, tokens of a page,
    kv_heads, dim]. With `lse_residual` it returns the rounding error of lse too. Raises LoweringError with the words of
    `refuses`, and where the spans take more scalar memory than there is."""
    plan, geometry, target, dtype = inputs.plan, inputs.geometry, inputs.target, str(q.dtype)
    sinks, platform = inputs.sinks, inputs.platform
    if why := refuses(plan, geometry, dtype, inputs.table_shapes):
        raise LoweringError(why)
    rows, heads = inputs.spans.rows((target.block_q, target.block_k)), together(geometry, dtype, target.block_q)
    # heads of one program share a walk: they must see the same tiles
    if pallas_walk.folded(rows.slice_of, heads) != heads:
        heads = 1
    walk = walked(rows, -(-geometry.kv_len // target.block_k), parts=heads)
    search = searches(walk)
    arrays = {"sinks": sinks is not None, "kv_8bit": k.dtype != q.dtype, "lse_residual": lse_residual}
    options = pallas_tpu.ForwardOptions(strided(platform), 1 if search else heads, search, **arrays)
    run = kernel(pallas_tpu.emit, plan, target, geometry, dtype, options)
    return run(q, k, v, walk, *inputs.operands, sinks, interpret=platform != "tpu")  # type: ignore[no-any-return]


def strided(platform: str) -> bool:
    """Whether kernels may roll each row by another number, as TPUs do from v5 on."""
    import jax

    kinds = {d.device_kind for d in jax.local_devices()} if platform == jax.default_backend() == "tpu" else set()
    return all(tpu_of(kind).rolls for kind in kinds)


def together(geometry: Geometry, dtype: str, block_q: int) -> int:
    """The number of query heads of a group that share fetched keys and values: as many as fit in vector memory."""
    # in and out, twice, sums, and two numbers a lane wide
    row = (2 * _wide(dtype) + 4) * _numbers(geometry) + 8 * tpu_kernel.LANES
    group = geometry.heads // geometry.kv_heads
    return max(n for n in range(1, group + 1) if group % n == 0 and (n == 1 or n * block_q * row <= HEADS_BYTES))


def _numbers(geometry: Geometry) -> int:
    """The numbers of a key and its value, or of a query and its output, in whole vectors of lanes."""
    return sum(-(-dim // tpu_kernel.LANES) * tpu_kernel.LANES for dim in (geometry.head_dim, geometry.v_dim))


def _wide(dtype: str) -> int:
    """The bytes of a number as kernels read it."""
    return 2 if dtype == "bfloat16" else 4


def searches(walk: Walk) -> bool:
    """Whether each step of a walk is looked up: a separate kernel."""
    return isinstance(walk, pallas_walk.TpuSearch)


def walked(spans: Any, columns: int, group: int = 1, parts: int = 1) -> Walk:
    """`walk.walk` of lowering/kernels/pallas_tpu, compiled where the spans are JAX's."""
    if isinstance(spans.bounds, np.ndarray):
        return pallas_walk.walk(spans, columns, group, parts)
    run = _walk(spans.slice_of.tobytes(), spans.slice_of.shape, columns, group, parts)
    return run(spans.bounds, spans.count)


@memo(group="kernels")
def _walk(slice_of: bytes, shape: tuple[int, ...], columns: int, group: int, parts: int) -> Callable[..., Walk]:
    import jax

    at, walk = np.frombuffer(slice_of, np.int32).reshape(shape), pallas_walk.walk
    return jax.jit(lambda bounds, count: walk(DeviceSpans(bounds, count, None, at), columns, group, parts))


def of_text(g: Geometry) -> Geometry:
    """The part of a geometry that texts depend on: lengths are none, so one module serves all."""
    return Geometry(1, g.heads // g.kv_heads, 1, 1, 1, g.head_dim, g.v_dim, g.scale)


def kernel(emit: Function, plan: LoopPlan, target: Target, geometry: Geometry, dtype: str, *flags: Any) -> Function:
    """The entry of the module that `emit` writes, `attention_forward` or whatever the last function is, jitted with
    `interpret` static. Lengths are no part of the text: one module serves all."""
    # tiles of other kernels are no part of this text: without them one entry of the memo serves more calls
    return _kernel(emit, plan, replace(target, dq=None, dkv=None, decode=None), of_text(geometry), dtype, *flags)


@memo(group="kernels")
def _kernel(emit: Function, plan: LoopPlan, target: Target, g: Geometry, dtype: str, *flags: Any) -> Function:
    import jax

    module = load_source(emit(plan, target, g, dtype, *flags))
    return jax.jit(module["attention_forward"], static_argnames=("interpret",))


# -- gradients ---------------------------------------------------------------------------------------


def backward(
    inputs: KernelInputs, q: Any, k: Any, v: Any, results: ForwardResults, cotangents: Cotangents, *, grad_names: Names
) -> dict[str, Any]:
    """The gradients of `grad_names`, as `lowering/xla/backward.py` has them: "q", "k" and "v" in the shapes and
    dtypes of the arrays, those of tables and slots in float32. `lse` knows of the sinks: they are not read again.

    A gradient by position (`derive.Gradient` "scatter") takes float32 [q_len, kv_len] of memory in addition to its
    table. Raises LoweringError with the words of `refuses_gradients`, and where the spans take more scalar memory than
    there is."""
    plan, geometry, spans, dtype = inputs.plan, inputs.geometry, inputs.spans, str(q.dtype)
    if why := refuses_gradients(plan, geometry, dtype, inputs.table_shapes, grad_names):
        raise LoweringError(why)
    of_rows, dlse = (results.out, results.lse, results.lse_residual), cotangents.dlse
    arrays = _prepared(plan.guard, plan.weighted)((q, k, v), of_rows, (cotangents.dout, dlse))
    interpret, rolls, numbers = interpreter(inputs.platform), strided(inputs.platform), inputs.operands
    target = emitted.with_tiles(inputs.target)
    dq_target, dkv_target = target.dq or target, target.dkv or target
    read = captured(plan, grad_names)
    rows, columns = spans.rows((dq_target.block_q, dq_target.block_k)), -(-geometry.kv_len // dq_target.block_k)
    walk = walked(rows, columns)
    grads: dict[Any, Array] = {}
    heads = 1 if read else together(geometry, dtype, dq_target.block_q)
    heads = heads if pallas_walk.folded(rows.slice_of, heads) == heads else 1
    shared = walk if heads == 1 else walked(rows, columns, parts=heads)
    heads = 1 if searches(shared) else heads
    options = TpuOptions(rolls, heads, searches(shared))
    if loaded := _gradient_kernel("dq", plan, dq_target, of_text(geometry), dtype, grad_names, options):
        kernel, names = loaded
        grads |= zip(names, kernel(*arrays, shared, *numbers, interpret=interpret), strict=True)
    group, of_keys = geometry.heads // geometry.kv_heads, spans.columns((dkv_target.block_q, dkv_target.block_k))
    turned = walked(of_keys, -(-geometry.q_len // dkv_target.block_q), group)
    options = TpuOptions(rolls, search=searches(turned))
    if loaded := _gradient_kernel("dkv", plan, dkv_target, of_text(geometry), dtype, grad_names, options):
        kernel, names = loaded
        fold = pallas_walk.folded(of_keys.slice_of, group)
        grads |= zip(names, kernel(*arrays, turned, *numbers, fold=fold, interpret=interpret), strict=True)
    for i, gradient in read:
        if gradient.over == "scatter":
            # operands of the run, and no part of its key
            placeless = replace(geometry, origin=(0, 0, 0, 0), sizes=None)
            options = TpuOptions(rolls, search=searches(walk))
            run = _by_position(plan, dq_target, placeless, dtype, i, options)
            grads[i] = run(*arrays, walk, *numbers, interpret=interpret)
    sums = [grads.pop(i) for i, _ in read]
    return grads | folded(inputs, [g for _, g in read], sums, int64=False)


def interpreter(platform: str) -> Any:
    """The argument `interpret` of `pallas_call`."""
    return platform != "tpu"


def refuses_gradients(plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Shapes, names: frozenset[str]) -> str:
    """A reason why the backward kernels cannot run a call, or "". `shapes` are those of the plan's tables."""
    if why := tpu_kernel.refused(plan, dtype):
        return why
    derived, read = backward_of(plan), captured(plan, names)
    slopes = [] if derived.slope is None else [derived.slope]
    read_by = (*roots(plan), *slopes, *(g.weight for _, g in read))
    try:
        tpu_kernel.check_tables(plan, TableInputs(read_by), shapes)
    except LoweringError as error:
        return str(error)
    distances = geometry.q_len + geometry.kv_len
    for _, g in read:
        if g.over == "diagonal" and distances > DISTANCES:
            source = next(t.source for t in plan.tables if t.name == g.source)
            return (
                f"the gradient of `{source}` by q - k takes {distances} sums of a TPU kernel's memory, at most "
                f'{DISTANCES}; take shorter parts of the sequence, or backend="xla"'
            )
    return ""


@memo(group="kernels")
def _prepared(guard: bool, weighted: bool) -> Callable[..., Any]:
    """(q, k, v, dout, lse, delta) as the kernels want them. Weights are exp(score - lse - lse_residual); the factor
    exp(-lse_residual) of a row, 1 but for large scores, is one of its cotangents. Where a row sees nothing lse is so
    large that exp(score - lse) is 0, and its cotangents are 0, whatever comes. Of weighted rows neither out nor lse is
    read, and delta takes the cotangent of the sum of weights off."""
    import jax
    import jax.numpy as jnp

    def prepared(qkv: tuple[Array, ...], of_rows: tuple[Any, ...], cotangents: tuple[Any, ...]) -> Any:
        (q, k, v), (out, lse, residual), (dout, dlse), Float = qkv, of_rows, cotangents, jnp.float32
        if weighted:
            rows = jnp.zeros(lse.shape, Float)
            return q, k, v, dout.astype(q.dtype), rows, rows if dlse is None else -dlse.astype(Float)
        delta = (dout.astype(Float) * out.astype(Float)).sum(-1).transpose(0, 2, 1)
        delta, lse = (delta if dlse is None else delta - dlse).astype(Float), lse.astype(Float)
        if guard:
            empty = lse == -jnp.inf
            delta, lse = jnp.where(empty, 0, delta), jnp.where(empty, float(np.finfo(np.float32).max), lse)
            dout = jnp.where(empty.transpose(0, 2, 1)[..., None], 0, dout)
        if residual is not None:
            factor = jnp.exp(-residual.astype(Float))
            delta, dout = delta * factor, dout.astype(Float) * factor.transpose(0, 2, 1)[..., None]
        return q, k, v, dout.astype(q.dtype), lse, delta

    return jax.jit(prepared)


GradientKernel: TypeAlias = tuple[Callable[..., Any], tuple[str | int, ...]]  # the entry of a module, and what it gives


@memo(group="kernels")
def _gradient_kernel(
    which: str, plan: LoopPlan, target: Target, g: Geometry, dtype: str, grad_names: Names, options: TpuOptions
) -> GradientKernel | None:
    """One kernel of the backward, or None where no gradient of it is wanted."""
    import jax

    kind = emitted.TpuQueryGradients if which == "dq" else emitted.TpuKeyGradients
    source = emitted.gradients_kernel(kind, plan, target, g, dtype, grad_names, options)
    if source is None:
        return None
    static = ("interpret",) if which == "dq" else ("fold", "interpret")
    return jax.jit(load_source(source.text)[source.entry], static_argnames=static), source.results


# -- gradients by position --------------------------------------------------------------------------


@memo(group="kernels")
def _by_position(
    plan: LoopPlan, target: Target, geometry: Geometry, dtype: str, number: int, options: TpuOptions
) -> Callable[..., Array]:
    """The gradient of a table, head after head: what its positions add, [q_len, kv_len], then added to where they read,
    in that order, so that results repeat bit for bit."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    alone = replace(geometry, batch=1, heads=1, kv_heads=1)
    source = emitted.terms(plan, target, alone, dtype, number, options)
    entry, gradient = load_source(source.text)[source.entry], backward_of(plan).gradients[number]
    group = geometry.heads // geometry.kv_heads
    sides = (geometry.q_len, target.block_q), (geometry.kv_len, target.block_k)
    padded = tuple(-(-n // block) * block for n, block in sides)

    def run(*operands: Any, interpret: Any) -> Array:
        (q, k, v, dout, lse, delta), (walk, origin, sizes, slots, tables) = operands[:6], operands[6:]
        vectors = [jnp.broadcast_to(jnp.asarray(x, jnp.int32), (geometry.batch,)) for x in origin[2:]]
        known = {t.name: jnp.asarray(x) for t, x in zip(plan.tables, tables, strict=True)}
        scalars = {s.name: x for s, x in zip(plan.slots, slots, strict=True)}
        scalars |= dict(zip(SIZES, sizes, strict=True))

        def head(n: Array, into: Array) -> Array:
            b, h = n // geometry.heads, n % geometry.heads

            def of(x: Array, head: Array, axis: int = 2) -> Array:
                return lax.dynamic_slice_in_dim(lax.dynamic_slice_in_dim(x, b, 1, 0), head, 1, axis)

            at = (origin[0] + b, origin[1] + h, *(x[b] for x in vectors))
            arrays = [of(q, h), of(k, h // group), of(v, h // group), of(dout, h), *(of(x, h, 1) for x in (lse, delta))]
            place = walk._replace(slice_of=walk.slice_of[n % walk.slice_of.shape[0]][None])
            zeros = jnp.zeros((1, 1, *padded), jnp.float32)
            (terms,) = entry(*arrays, place, at, sizes, slots, tables, zeros=zeros, interpret=interpret)
            env = scalars | dict(zip("bhqk", at, strict=True))
            return _added(into, terms[0, 0], gradient, env, known, geometry, target.block_q)

        shape = known[gradient.source].shape
        return lax.fori_loop(0, geometry.batch * geometry.heads, head, jnp.zeros(shape, jnp.float32))

    return jax.jit(run, static_argnames=("interpret",))


def _added(
    into: Array, terms: Array, gradient: Gradient, env: Values, tables: Values, geometry: Geometry, rows: int
) -> Array:
    """`into` with the terms of one head, whose first query and key are at `env`. Where they lie in the table as they
    are (`bias[h, q, k]`) and none is clamped they are added as a block, elsewhere one by one."""
    import jax.numpy as jnp
    from jax import lax

    def places(q: Array, k: Array) -> list[Array]:
        at = {**env, "q": q, "k": k}
        return [evaluate(i, at, tables, int64=False, float64=False) for i in gradient.index]

    def one_by_one(into: Array) -> Array:
        def chunk(i: Array, into: Array) -> Array:
            part = lax.dynamic_slice_in_dim(terms, i * rows, rows)
            q = env["q"] + i * rows + jnp.arange(rows)[:, None]
            indices = places(q, env["k"] + jnp.arange(terms.shape[1])[None])
            indices = [jnp.clip(x, 0, n - 1) for x, n in zip(indices, into.shape, strict=True)]
            return into.at[tuple(jnp.broadcast_to(x, part.shape) for x in indices)].add(part)

        return lax.fori_loop(0, terms.shape[0] // rows, chunk, into)

    moving = [(alone(i) or "?") if uses(i) & {"q", "k"} else "" for i in gradient.index]
    block = {"q": geometry.q_len, "k": geometry.kv_len}
    shape = tuple(block.get(n, 1) for n in moving)
    fits = all(size >= n for size, n in zip(into.shape, shape, strict=True))
    if sorted(filter(None, moving)) != ["k", "q"] or not fits:
        return one_by_one(into)
    starts = places(env["q"], env["k"])
    inside = [(x >= 0) & (x <= size - n) for x, size, n in zip(starts, into.shape, shape, strict=True) if n > 1]

    def whole(into: Array) -> Array:
        part = terms[: geometry.q_len, : geometry.kv_len]
        part = (part if moving.index("q") < moving.index("k") else part.T).reshape(shape)
        return lax.dynamic_update_slice(into, lax.dynamic_slice(into, starts, shape) + part, starts)

    return lax.cond(jnp.stack([jnp.ravel(x)[0] for x in inside]).all(), whole, one_by_one, into)
