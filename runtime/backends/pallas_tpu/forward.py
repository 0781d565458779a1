"""Runs the Pallas TPU forward kernel on JAX arrays, traced or not: on a TPU, elsewhere in Pallas' interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from frisket.dsl.errors import LoweringError
from frisket.grammar.memo import memo
from frisket.lowering.kernels.pallas_tpu import forward as pallas_tpu
from frisket.lowering.kernels.pallas_tpu import inputs as pallas_inputs
from frisket.lowering.kernels.pallas_tpu import walk as pallas_walk
from frisket.lowering.plan import Geometry, LoopPlan, SpanSource, Target
from frisket.lowering.planner.planner import DeviceSpans
from frisket.runtime.machine.generated import load

if TYPE_CHECKING:
    import jax

TILES = (512, 512)
LONG = 8192  # keys from where on a step takes twice as many: fewer steps, and what is computed beside a row is little
SCALAR_BYTES = 256 * 1024  # of scalar memory that a table of pages may take: a quarter of what a core has
HEADS_BYTES = 6 * 1024 * 1024  # of vector memory that the heads of a program may take beside their tiles
KEY_BYTES = 1024  # of vector memory that a key and its value may take in a step of twice as many
NARROW = (256, 256)  # of masks whose rows see one short run of keys: less is computed beside it


def target(
    plan: LoopPlan, geometry: Geometry, dtype: str, tile: tuple[int, int] | None = None, narrow: bool = False
) -> Target:
    """The tiles a TPU starts from, no larger than the problem needs; docs/pallas.md says why these."""
    if tile:
        return Target("pallas-tpu", *tile)
    block_q, block_k = NARROW if narrow else TILES
    if not narrow and geometry.kv_len >= LONG and _numbers(geometry) * _wide(dtype) <= KEY_BYTES:
        block_k *= 2
    q_len, kv_len = (-(-n // pallas_tpu.LANES) * pallas_tpu.LANES for n in (geometry.q_len, geometry.kv_len))
    block_k = min(block_k, kv_len)
    if plan.pages:
        fitting = pallas_tpu.keys_of_a_tile
        block_k = fitting(plan.page, block_k) or fitting(plan.page, pallas_tpu.LONGEST)
    return Target("pallas-tpu", min(block_q, q_len), block_k)


def reason(plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A reason why the forward kernel cannot run a call, or an empty text. `shapes` are those of the plan's tables."""
    if why := pallas_tpu.refused(plan, dtype):
        return why
    pages = prod(shapes.get(str(plan.pages), (0,)))
    if 4 * pages > SCALAR_BYTES:
        return (
            f"a table of {pages} pages takes {4 * pages // 1024} KiB of a TPU's scalar memory, at most "
            f'{SCALAR_BYTES // 1024}; use larger pages, fewer sequences in a call, or backend="xla"'
        )
    try:
        pallas_inputs.check_tables(plan, pallas_inputs.place(pallas_tpu.roots(plan)), shapes)
    except LoweringError as error:
        return str(error)
    return ""


def forward(
    plan: LoopPlan, spans: SpanSource, geometry: Geometry, q: jax.Array, k: jax.Array, v: jax.Array,
    slots: Mapping[str, Any], tables: Mapping[str, Any], target: Target, *, sinks: jax.Array | None = None,
    platform: str = "cpu", lse_residual: bool = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """(out [batch, q_len, heads, v_dim], lse, top [batch, heads, q_len]) of q [batch, q_len, heads, dim], k, v
    [batch, kv_len, kv_heads, dim] or, where the plan has pages, [pages, tokens of a page, kv_heads, dim], and sinks
    [heads], and with `lse_residual` the rounding error of lse. Raises LoweringError with the words of `reason`, and
    where the spans take more scalar memory than there is."""
    dtype = str(q.dtype)
    if why := reason(plan, geometry, dtype, {name: tuple(x.shape) for name, x in tables.items()}):
        raise LoweringError(why)
    rows, heads = spans.rows((target.block_q, target.block_k)), together(geometry, dtype, target.block_q)
    if pallas_walk.folded(rows.slice_of, heads) != heads:
        heads = 1
    walk = walked(rows, -(-geometry.kv_len // target.block_k), parts=heads)
    search = searches(walk)
    flags = sinks is not None, strided(platform), k.dtype != q.dtype, lse_residual, 1 if search else heads, search
    run = kernel(pallas_tpu.emit, plan, target, geometry, dtype, *flags)
    return run(  # type: ignore[no-any-return]
        q, k, v, walk, geometry.origin, geometry.full, [slots[s.name] for s in plan.slots],
        [tables[t.name] for t in plan.tables], sinks, interpret=platform != "tpu",
    )  # fmt: skip


def strided(platform: str) -> bool:
    """Whether kernels may roll each row by another number, as TPUs do from v5 on."""
    import jax

    kinds = {d.device_kind for d in jax.local_devices()} if platform == jax.default_backend() == "tpu" else set()
    return not any(kind.startswith(("TPU v2", "TPU v3", "TPU v4")) and "lite" not in kind for kind in kinds)


def together(geometry: Geometry, dtype: str, block_q: int) -> int:
    """The number of query heads of a group that share fetched keys and values: as many as fit in vector memory."""
    # in and out, twice, sums, and two numbers a lane wide
    row = (2 * _wide(dtype) + 4) * _numbers(geometry) + 8 * pallas_tpu.LANES
    group = geometry.heads // geometry.kv_heads
    return max(n for n in range(1, group + 1) if group % n == 0 and (n == 1 or n * block_q * row <= HEADS_BYTES))


def _numbers(geometry: Geometry) -> int:
    """The numbers of a key and its value, or of a query and its output, in whole vectors of lanes."""
    return sum(-(-dim // pallas_tpu.LANES) * pallas_tpu.LANES for dim in (geometry.head_dim, geometry.v_dim))


def _wide(dtype: str) -> int:
    """The bytes of a number as kernels read it."""
    return 2 if dtype == "bfloat16" else 4


def searches(walk: pallas_walk.TpuWalk | pallas_walk.TpuSearch) -> bool:
    """Whether each step of a walk is looked up: a kernel of its own."""
    return isinstance(walk, pallas_walk.TpuSearch)


def walked(spans: Any, columns: int, group: int = 1, parts: int = 1) -> pallas_walk.TpuWalk | pallas_walk.TpuSearch:
    """`walk.walk` of lowering/kernels/pallas_tpu, compiled where the spans are JAX's."""
    import numpy as np

    if isinstance(spans.bounds, np.ndarray):
        return pallas_walk.walk(spans, columns, group, parts)
    run = _walk(spans.slice_of.tobytes(), spans.slice_of.shape, columns, group, parts)
    return run(spans.bounds, spans.count)


@memo(group="kernels")
def _walk(
    slice_of: bytes, shape: tuple[int, ...], columns: int, group: int, parts: int
) -> Callable[..., pallas_walk.TpuWalk | pallas_walk.TpuSearch]:
    import jax
    import numpy as np

    places = np.frombuffer(slice_of, np.int32).reshape(shape)
    return jax.jit(
        lambda bounds, count: pallas_walk.walk(DeviceSpans(bounds, count, None, places), columns, group, parts)
    )


def kernel(
    emit: Callable[..., str], plan: LoopPlan, target: Target, geometry: Geometry, dtype: str, *flags: Any
) -> Callable[..., Any]:
    """The entry of the module that `emit` writes, `attention_forward` or whatever the last function is, jitted with
    `interpret` static. Lengths are no part of the text: one module serves all."""
    group = geometry.heads // geometry.kv_heads
    alike = Geometry(1, group, 1, 1, 1, geometry.head_dim, geometry.v_dim, geometry.scale)
    return _kernel(emit, plan, replace(target, dq=None, dkv=None, decode=None), alike, dtype, flags)


@memo(group="kernels")
def _kernel(
    emit: Callable[..., str], plan: LoopPlan, target: Target, geometry: Geometry, dtype: str, flags: tuple[Any, ...]
) -> Callable[..., Any]:
    import jax

    module = load(emit(plan, target, geometry, dtype, *flags))
    return jax.jit(module["attention_forward"], static_argnames=("interpret",))
