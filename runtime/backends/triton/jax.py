"""Runs the Triton kernels on JAX arrays: those of torch, from the same plans and spans.

A call is a few custom calls of XLA, which jax-triton compiles for this machine's GPU, or for an H100 without one. On a
CPU they run in Triton's interpreter. The compiled kernel depends on shapes and dtypes alone: origins, sizes, slots and
spans are operands, and may be traced.

Gradients of captured tables and scalars come from the kernels' sums: by distance, by position, and from rows, columns
and heads to where a table was read.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from frisket.dsl.errors import BackendError, LoweringError, ParameterError
from frisket.dsl.ir import SIZES
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.grammar.memo import memo
from frisket.lowering.derive import Gradient
from frisket.lowering.kernels.expr import POSITION, levels
from frisket.lowering.kernels.triton import backward as triton_backward
from frisket.lowering.kernels.triton import captured as triton_captured
from frisket.lowering.kernels.triton import module as triton_module
from frisket.lowering.kernels.triton.module import Dims, Form, JaxEntry, arguments, near, rows_of_tables
from frisket.lowering.plan import Cotangents, ForwardResults, Geometry, KernelInputs, LoopPlan, Names, TableUse
from frisket.lowering.planner.planner import DeviceSpans
from frisket.lowering.xla.captured import amounts, folded_in_fixed_point, units
from frisket.runtime.backends.base import Shapes
from frisket.runtime.backends.cpp.jax import _halves as halves
from frisket.runtime.backends.cpp.jax import too_wide
from frisket.runtime.machine.modules import pip_install
from frisket.runtime.plans.device import Values

from . import grids as triton_grids
from .grids import EMPTY, CapturedLaunch, of_host
from .launch import GRID, Grid, LaunchStep, Shaped, loaded_kernels, refused_shape, span_arrays
from .tiles import interpreted, jax_gpu

if TYPE_CHECKING:
    import jax

Array = Any  # a jax.Array, traced or not
INT32 = np.iinfo(np.int32)
_interpreter = Lock()  # it replaces functions of Triton's while it runs


def forward(
    inputs: KernelInputs, q: jax.Array, k: jax.Array, v: jax.Array, *, lse_residual: bool = False
) -> tuple[jax.Array, ...]:
    """(out [batch, q_len, heads, v_dim], lse and top float32 [batch, heads, q_len]) from q [batch, q_len, heads, dim]
    and k, v [batch, kv_len, kv_heads, dim], as in `lowering.xla.forward`. Where the plan has pages, k and v are [pages,
    tokens of a page, kv_heads, dim]. With `lse_residual` a fourth array is the rounding error of lse.

    Anything that holds values may be traced; shapes are the host's. `spans` may be None where the plan has closed-form
    bounds. On the CPU the kernels run in Triton's interpreter; BackendError where that was not asked for.
    """
    import jax.numpy as jnp

    g, target, sinks = inputs.geometry, inputs.target, inputs.sinks
    dims, plan = (
        _fit(inputs, str(q.dtype), str(k.dtype)),
        triton_grids.forward_plan(inputs.plan, g, inputs.target.invariant),
    )
    row = (g.batch, g.heads, g.q_len), np.float32
    results: dict[str, Any] = {"Out": ((g.batch, g.q_len, g.heads, g.v_dim), q.dtype), "Lse": row, "Top": row}
    results |= {"Low": row} if lse_residual else {}
    if 0 in (g.batch, g.q_len):
        return tuple(jnp.zeros(shape, dtype) for shape, dtype in results.values())
    kind = triton_grids.ForwardKind((), sinks is not None, True, lse_residual)
    arrays = {"Q": q, "K": k, "V": v} | ({} if sinks is None else {"Sinks": jnp.asarray(sinks, np.float32)})
    processors = triton_grids.INTERPRETED if interpreted() else jax_gpu().processors
    program = kind.program(plan, None, g, target, dims, processors)
    source = _source(program.emit, plan, *program.parts, **program.flags)
    outputs = JaxTritonCall(replace(inputs, plan=plan), dims).launches(source, program.steps, arrays, results)
    return tuple(outputs[n] for n in results)


def backward(
    inputs: KernelInputs, q: Any, k: Any, v: Any, results: ForwardResults, cotangents: Cotangents, *, grad_names: Names
) -> dict[str, jax.Array]:
    """The gradients of `grad_names`, as `lowering/xla/backward.py` has them. `lse` knows of the sinks. Equal calls give
    equal bits."""
    import jax.numpy as jnp

    g, target, qkv = inputs.geometry, inputs.target, {"q": q, "k": k, "v": v}
    dims = _fit(inputs, str(q.dtype), str(k.dtype))
    values = grad_names - qkv.keys()
    if 0 in (g.batch, g.q_len, g.kv_len):
        return {n: jnp.zeros_like(x) for n, x in qkv.items() if n in grad_names} | _zeros(values, inputs.tables)
    plan, residual, dlse = triton_grids.backward_plan(inputs.plan, g), results.lse_residual, cotangents.dlse
    arrays = {"Q": q, "K": k, "V": v, "Out": results.out, "DOut": cotangents.dout.astype(q.dtype)}
    arrays["Lse"] = results.lse.astype(np.float32)
    arrays["Low"] = jnp.zeros_like(arrays["Lse"]) if residual is None else residual.astype(np.float32)
    if plan.weighted:  # out and lse are not read: dout is that of rows before their division
        arrays["Stats"] = jnp.zeros_like(arrays["Lse"]) if dlse is None else dlse.astype(np.float32)
    elif dlse is not None:
        arrays["DLse"] = dlse.astype(np.float32)
    source = _source(triton_backward.emit, plan, target, dims, grad_names, dlse=dlse is not None)
    totals = triton_backward.sums(plan, grad_names)
    shapes: dict[str, Any] = {"Stats": ((*arrays["Lse"].shape, 4), np.float32)}
    shapes |= {f"D{n.upper()}": (x.shape, x.dtype) for n, x in qkv.items() if n in grad_names}
    shapes |= {n: (shape, np.float32) for n, shape in triton_grids.shapes_of(totals, g).items()}
    call = JaxTritonCall(replace(inputs, plan=plan), dims)
    arrays = call.launches(source, triton_grids.of_backward(g, target, kernels_of(source)), arrays, shapes)
    grads = {n: arrays[f"D{n.upper()}"] for n in qkv if n in grad_names}
    if not values:
        return grads
    sums_of = {s.gradient: arrays[s.buffer] for s in totals}
    buffers: dict[Gradient, Array] = {s: x.sum(-1) if s.over == "head" else x for s, x in sums_of.items()}
    buffers |= _CapturedJaxRun(call, arrays).buffers(triton_grids.by_position(inputs.plan, grad_names))
    folds = folded_in_fixed_point(inputs, buffers)
    return grads | folds | _zeros(values - folds.keys(), inputs.tables)


def refuses(plan: LoopPlan, geometry: Geometry, dtype: str, shapes: Shapes) -> str:
    """A reason why the kernels cannot run a call, or ""."""
    g = geometry
    try:
        Dims(g.head_dim, g.v_dim, dtype, g.heads // g.kv_heads, g.kv_dtype)
    except LoweringError as error:
        return str(error)
    for what, count, axis in (("heads", g.heads, 2), ("batch entries", g.batch, 0)):
        if count > GRID:
            return (
                f"a call of Triton's kernels has at most {GRID} {what}, this one {count}\n"
                f"  give it in parts of q, k and v along axis {axis}, with origin= and sizes= where the mask or score "
                "mod reads b or h"
            )
    return next(filter(None, (refused_shape(t, shapes.get(t.name, (1,) * t.rank)) for t in plan.every_table)), "")


# -- what kernels take and give -----------------------------------------------------------------------


def _fit(inputs: KernelInputs, dtype: str, keys: str) -> Dims:
    """The dimensions that the kernels' text takes from arrays; LoweringError where there are no such kernels."""
    g = inputs.geometry
    if why := refuses(inputs.plan, g, dtype, inputs.table_shapes):
        raise LoweringError(why)
    return Dims(g.head_dim, g.v_dim, dtype, g.heads // g.kv_heads, "" if keys == dtype else keys, by_length=True)


@memo(group="sources")
def _source(emit: Callable[..., str], plan: LoopPlan, *parts: Any, **flags: Any) -> str:
    """The text that `emit` writes of a plan."""
    return emit(plan, *parts, **flags)


def _zeros(names: frozenset[str], tables: Values) -> dict[str, Array]:
    """Gradients of values without influence."""
    import jax.numpy as jnp

    return {n: jnp.zeros(np.shape(tables[n]) if n in tables else (), np.float32) for n in names}


class _CapturedJaxRun(triton_grids.CapturedKernels):
    """The kernels of one call on JAX arrays; `arrays` go by the kernels' names, `Stats` as `attention_delta`
    writes it."""

    def __init__(self, call: JaxTritonCall, arrays: Values) -> None:
        self.call, self.arrays, self.tile = call, arrays, triton_captured.square(call.target)
        self.plan, self.geometry, self.slots, self.tables = call.plan, call.geometry, call.slots, call.tables

    def run(self, launch: CapturedLaunch, operands: Values = EMPTY) -> Array:
        source = _source(launch.emit, self.plan, self.tile, self.call.dims, *launch.parts)
        results = {launch.result: (launch.shape, np.int32 if launch.result == "Counted" else np.float32)}
        arrays = {**self.arrays, **operands}
        return self.call.run(source, launch.step, arrays, results, zeroed=launch.zeroed)[launch.result]

    def padded(self, x: Array, before: int, behind: int) -> Array:
        import jax.numpy as jnp

        return jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (before, behind), (0, 0)])

    def in_fixed_point(self, total: Array, count: CapturedLaunch) -> Array:
        import jax
        from jax import lax

        with jax.enable_x64(True):
            per = units(total.astype(np.float64).sum())
        counted = self.run(count._replace(shape=(*count.shape, 2)), {"PerUnit": per.reshape(1)})
        with jax.enable_x64(True):
            return amounts(lax.bitcast_convert_type(counted, np.int64), per)


# -- calls of one kernel -----------------------------------------------------------------------------


class JaxTritonCall:
    """A plan with the values of a call, and how they reach kernels."""

    def __init__(self, inputs: KernelInputs, dims: Dims) -> None:
        check(inputs.platform, dims.dtype)
        self.plan, self.spans, self.geometry, self.target = inputs.plan, inputs.spans, inputs.geometry, inputs.target
        self.slots, self.dims, self.platform = inputs.slots, dims, inputs.platform
        tables, int64 = inputs.tables, inputs.plan.int64
        self.tables = {t.name: _readable(t, tables[t.name], int64) for t in inputs.plan.every_table}

    @cached_property
    def per_batch(self) -> bool:
        return any(np.ndim(x) for x in self.geometry.origin[2:])

    @cached_property
    def values(self) -> dict[str, Any]:
        """The values in the vectors of values, by the kernels' names."""
        g, known = self.geometry, arguments(self.plan)
        origin = {f"{n}_origin": x for n, x in zip("bhqk", g.origin)}
        slots = {known[s.name].name: self.slots[s.name] for s in self.plan.slots}
        return {**origin, **dict(zip(SIZES, g.full, strict=True)), **slots}

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """The arrays of the plan: tables, and origins of every batch entry."""
        import jax.numpy as jnp

        known, g = arguments(self.plan), self.geometry
        arrays = {known[n].name: x for n, x in self.tables.items()}
        if self.per_batch:
            for n, x in zip(("q_origin", "k_origin"), g.origin[2:]):
                arrays[n] = jnp.broadcast_to(jnp.asarray(x, np.int32).reshape(-1), (g.batch,))
        return arrays

    @cached_property
    def lengths(self) -> dict[str, Any]:
        g, known = self.geometry, arguments(self.plan)
        lengths = {"heads": g.heads, "q_len": g.q_len, "kv_len": g.kv_len, "scale": np.float32(g.scale)}
        for name, table in self.tables.items():
            lengths |= dict(zip(known[name].sizes, self._shape(name, table)))
        return lengths

    def _shape(self, name: str, table: Array) -> tuple[int, ...]:
        return table.shape[:-1] if name in self.pairs else table.shape  # type: ignore[no-any-return]

    def near(self, rows: int) -> bool:
        """Whether so many rows of every table that counts queries are within 2**31 entries of one another."""
        shapes = [(self._shape(n, self.tables[n]), axis) for n, axis in rows_of_tables(self.plan).items()]
        steps = [[math.prod(shape[i + 1 :]) for i in range(len(shape))] for shape, _ in shapes]
        return all(near(shape, by, axis, rows) for (shape, axis), by in zip(shapes, steps))

    @cached_property
    def pairs(self) -> frozenset[str]:
        """Tables of 64 bits, by plan names."""
        ranks = {t.name: t.rank for t in self.plan.every_table}
        return frozenset(n for n, x in self.tables.items() if x.ndim > ranks[n])

    @cached_property
    def form(self) -> Form:
        known = arguments(self.plan)
        roots = [e for e in (self.plan.mask, self.plan.score, self.plan.value_scale) if e is not None]
        wide = {n.name for n, at in levels(*roots).items() if n.op == "lookup" and at == POSITION}
        aligned = set()
        for name in wide & self.tables.keys():
            shape = self._shape(name, self.tables[name])
            steps = known[name].strides[:-1]
            # Python's integers: a product of lengths may leave 64 bits
            aligned |= {n for i, n in enumerate(steps) if np.prod(shape[i + 1 :], dtype=object) % 16 == 0}
        pairs = frozenset({"Counted", *(known[n].name for n in self.pairs)})
        return Form(self.dims, self.per_batch, pairs, frozenset(aligned))

    # -- launching ------------------------------------------------------------------------------------

    def launches(self, source: str, steps: Sequence[LaunchStep], arrays: Values, shapes: Shaped) -> dict[str, Array]:
        """The arrays, and those of `shapes` that the launches of the steps write."""
        arrays = dict(arrays)
        for step in steps:
            names = kernels_of(source)[step.name].keys() - arrays.keys()
            arrays |= self.run(source, step, arrays, {n: x for n, x in {**shapes, **step.leaves}.items() if n in names})
        return arrays

    def run(
        self, source: str, step: LaunchStep, arrays: Values, results: Shaped, *, zeroed: bool = False
    ) -> dict[str, Array]:
        """The results by name, of (shape, dtype); `zeroed` says that they begin as 0."""
        import jax

        plan = self.plan if step.side else triton_backward.bare(self.plan)
        fn, entry = _entry(source, step.name, plan, self.form, tuple(results))
        arrays, tile = {**self.arrays, **arrays}, step.tile
        lengths = {**self.lengths, **step.numbers, "pool": arrays["K"].shape[0]}
        if "Spans" in entry.arrays:
            if self.spans is None:
                raise BackendError("this plan has no closed-form bounds: pass the spans of its layout")
            arrays |= span_operands(getattr(self.spans, step.side)(step.records), entry.arrays)
            lengths["records"] = arrays["Spans"].shape[2]
        operands = [jax.numpy.asarray(arrays[n]) for n in entry.arrays]
        kinds = ((entry.whole, INT), (entry.real, FLOAT))
        operands += [_vector([self.values[n] for n in names], kind, self.plan.int64) for names, kind in kinds if names]
        numbers = [lengths[n] for n in entry.lengths]
        constants: dict[str, Any] = {"BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k, "NEAR": self.near(tile.block_q)}
        constants["ORIGIN_PER_BATCH"] = self.per_batch
        constants = {n: constants[n] for n in entry.constants}
        shaped: Any = jax.ShapeDtypeStruct  # JAX leaves some of its functions untyped
        shapes = [shaped(tuple(shape), dtype) for shape, dtype in (results[n] for n in entry.results)]
        if self.platform == "cpu":
            outputs = _interpreted(fn, step.grid, operands, numbers, shapes, constants, zeroed)
            return dict(zip(entry.results, outputs, strict=True))
        constants |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
        options = {"name": entry.name, "grid": step.grid, "compute_capability": capability(self.platform), **constants}
        options["zeroed_outputs"] = tuple(range(len(shapes))) if zeroed else ()
        outputs = triton_call()(*operands, *numbers, kernel=fn, out_shape=shapes, **options)
        return dict(zip(entry.results, outputs, strict=True))


kernels_of = memo(group="kernels")(triton_module.parameters)


@memo(1024)
def _entry(source: str, kernel: str, plan: LoopPlan, form: Form, results: tuple[str, ...]) -> tuple[Any, JaxEntry]:
    """A kernel of a module through its entry, which stands behind it in a separate module."""
    entry = triton_module.entry(kernel, kernels_of(source)[kernel], plan, form, results)
    return getattr(loaded_kernels(f"{source}\n\n{entry.text}"), entry.name), entry


def _interpreted(
    fn: Any, grid: Grid, operands: list[Array], lengths: list[Any], shapes: list[Any], constants: Values, zeroed: bool
) -> Sequence[Array]:
    import jax

    def run(*inputs: Any) -> list[Any]:
        arrays = [np.ascontiguousarray(x) for x in inputs]
        outputs = [(np.zeros if zeroed else np.empty)(s.shape, s.dtype) for s in shapes]
        memory = [Memory(x) for x in (*arrays, *outputs)]
        # the interpreter knows no scalars of numpy
        numbers = [float(x) if isinstance(x, np.floating) else x for x in lengths]
        with _interpreter:
            fn[grid](*memory[: len(arrays)], *numbers, *memory[len(arrays) :], **constants)
        return outputs

    return jax.pure_callback(run, shapes, *operands)  # type: ignore[no-any-return]


class Memory:
    """A numpy array as much like a torch tensor as Triton's interpreter asks, which then works on the array itself."""

    def __init__(self, array: Any) -> None:
        self.array, self.dtype = array, str(array.dtype)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def itself(self, *_: Any, **__: Any) -> Memory:
        return self

    untyped_storage = cpu = new_empty = set_ = copy_ = storage_offset = size = stride = itself


# -- operands -----------------------------------------------------------------------------------------


def _vector(parts: Sequence[Any], kind: Any, wide: bool) -> Array:
    """Numbers, some of them perhaps traced, in float32, or in int32, in pairs of them where they are `wide`."""
    import jax.numpy as jnp

    if all(map(of_host, parts)):
        if kind is FLOAT:
            return np.array(parts, np.float32)
        whole = np.array([int(x) for x in parts], np.int64)
        if not wide and len(whole) and (whole.max() > INT32.max or whole.min() < INT32.min):
            raise ParameterError(
                f"{max(whole, key=abs)} needs more than 32 bits, and the kernel was made for numbers of 32\n"
                "  make the plan with this value: att.plan(...), so that its kernel has 64-bit integers"
            )
        return halves(whole) if wide else whole.astype(np.int32)
    if kind is FLOAT:
        return jnp.stack([jnp.asarray(x, np.float32).reshape(()) for x in parts])
    if wide:
        return jnp.stack([halves(np.asarray(x, np.int64) if of_host(x) else x).reshape(2) for x in parts])
    return jnp.stack([jnp.asarray(x, np.int32).reshape(()) for x in parts])


def _readable(use: TableUse, table: Any, wide: bool) -> Array:
    """The table as kernels read it: Bool as bytes, Int as int32, in pairs of them where it needs 64 bits."""
    import jax.numpy as jnp

    if why := refused_shape(use, np.shape(table)):
        raise ParameterError(why)
    if use.type is BOOL:
        # by way of bool: any number but 0 is True, whatever its low byte
        return table.astype(bool).astype(np.int8)
    if use.type is FLOAT:
        return jnp.asarray(table, None if table.dtype in (jnp.bfloat16, np.float16) else np.float32)
    if table.dtype in (np.int64, np.uint64, np.uint32):
        if isinstance(table, np.ndarray):
            fits = table.max() <= INT32.max and table.min() >= INT32.min
            if not fits and not wide:
                raise too_wide(use.source)
            return table.astype(np.int32) if fits else halves(table)
        if wide:
            return halves(table)
    return table.astype(np.int32)


def span_operands(spans: Any, names: Sequence[str]) -> dict[str, Array]:
    """The span arrays that kernels read, by the names of their parameters."""
    import jax.numpy as jnp

    if not isinstance(spans, DeviceSpans):
        return dict(span_arrays(spans))
    arrays = {"Spans": spans.bounds, "Count": spans.count, "SliceOf": jnp.asarray(spans.slice_of, np.int32)}
    if "Order" in names:
        width = (spans.bounds[..., 3] - spans.bounds[..., 0]).sum(-1)
        arrays["Order"] = jnp.argsort(-width, axis=-1, stable=True) if spans.order is None else spans.order
    return {n: x.astype(np.int32) for n, x in arrays.items()}


def capability(platform: str) -> int | None:
    """The capability that jax-triton compiles for: 90 for sm_90. On AMD's GPUs it asks the device."""
    return jax_gpu().arch.capability if platform != "rocm" else None


def check(platform: str, dtype: str) -> None:
    """Raise where the kernels cannot be called on arrays of a platform."""
    if platform == "cpu" and not interpreted():
        raise BackendError(
            "Triton kernels need a GPU: on the CPU take backend='xla' or 'cpp', or set TRITON_INTERPRET=1 before "
            "Python starts to run them in Triton's interpreter"
        )
    if platform not in ("cpu", "cuda", "rocm"):
        raise BackendError(f"no Triton kernel runs on {platform}; they run on cuda and rocm")
    if platform == "rocm" and _release("jax-triton") <= (0, 3, 1) and _release("triton") >= (3, 9):
        raise BackendError(
            "jax-triton 0.3.1 does not compile for AMD's GPUs with Triton 3.9\n"
            "  install triton==3.6.0, or take backend='xla'"
        )
    if platform != "cpu" and interpreted():
        raise BackendError("TRITON_INTERPRET=1 is set, so that no Triton kernel is compiled; unset it on a GPU")


def _release(package: str) -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in re.findall(r"\d+", version(package))[:3])
    except PackageNotFoundError:
        return (0,)


@memo(group="once")
def triton_call() -> Any:
    """`jax_triton.triton_call`."""
    cache_dir = os.environ.get("TRITON_CACHE_DIR")
    try:
        from jax_triton import triton_call as call  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except (ImportError, AttributeError) as error:
        raise BackendError(
            f"the Triton kernels are called through jax-triton, which cannot be imported here: {error}\n"
            f"  {pip_install('jax-gpu')}, and a JAX with GPU support"
        ) from error
    finally:  # jax-triton points it at no folder, for everybody in this process
        if cache_dir is None:
            os.environ.pop("TRITON_CACHE_DIR", None)
        else:
            os.environ["TRITON_CACHE_DIR"] = cache_dir
    return call
