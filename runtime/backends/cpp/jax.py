"""The native kernels on JAX arrays: custom calls of XLA, on XLA's own threads.

A kernel is registered under a name that holds the hash of its source. What a call is made of goes as operands, so
that tables, slots, spans and origins may be traced and mapped; only which operands there are is static. Nothing in
a compiled or exported module points into this process: where the kernel is not registered XLA says so.

JAX has 64-bit integers only when asked, the kernels always: they travel as pairs of int32, low half first.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from frisket.dsl.errors import FrisketError, LoweringError, ParameterError
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.grammar.memo import cached_on, memo
from frisket.lowering.derive import Gradient, backward_of, norm_width
from frisket.lowering.kernels.cpp import call as cpp_call
from frisket.lowering.kernels.cpp.backward import KERNELS
from frisket.lowering.kernels.cpp.forward import CppArrays, natural
from frisket.lowering.plan import (
    Cotangents,
    ForwardResults,
    KernelInputs,
    LoopPlan,
    Names,
    Spans,
    TableUse,
    Target,
    needs_int64,
)
from frisket.lowering.xla.captured import folded
from frisket.lowering.xla.tiles import int64_enabled
from frisket.runtime.machine import cpp_build as native_build
from frisket.runtime.machine.parameters import traced

if TYPE_CHECKING:
    import jax

INT32 = np.iinfo(np.int32)
LN2 = 2839 / 2**12, 535 / 2**24, 5.7699990475432854e-08  # of 12 bits, of 12 more, and the rest


def forward(
    inputs: KernelInputs, q: jax.Array, k: jax.Array, v: jax.Array, *, lse_residual: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(out [batch, q_len, heads, v_dim], lse and top [batch, heads, q_len], and [batch, heads, q_len, 2] what the
    backward has to know of each row). It takes q [batch, q_len, heads, dim] and
    k, v [batch, kv_len, kv_heads, dim], or pools [pages, page, kv_heads, dim], as `lowering.xla.forward` has them. With
    `lse_residual` the 2 is `norm_width`. Anything that holds values may be traced or mapped; shapes are the host's."""
    dtypes = (str(q.dtype),) if k.dtype == q.dtype else (str(q.dtype), str(k.dtype))
    name, literals = _target_name("forward", inputs, *dtypes)
    width = norm_width(q.dtype, inputs.geometry.v_dim) if lse_residual else 2
    static = CppStatic(name, _form(inputs, len(literals)), inputs.geometry.scale, width=width)
    values = _values(inputs, literals, _real(q), traced(q))
    return _compiled(static)((q, k, v), *values)  # type: ignore[no-any-return]


def backward(
    inputs: KernelInputs, q: Any, k: Any, v: Any, results: ForwardResults, cotangents: Cotangents, *, grad_names: Names
) -> dict[str, Any]:
    """The gradients of `grad_names`, as `lowering/xla/backward.py` has them. `softmax_stats` is the forward's, or
    `softmax_stats_of` an lse of other keys too; without it weights are as exact as a float is at the size of lse."""
    plan, real = inputs.plan, _real(q)
    gradients, order = backward_of(plan).gradients, [t.name for t in plan.tables]
    grad_mask = [n in grad_names for n in ("q", "k", "v", *(g.source for g in gradients))]
    name, literals = _target_name("backward", inputs, str(q.dtype))
    sums = [("q", 0), ("k", 1), ("v", 2), *((g.over, order.index(g.source) if g.index else -1) for g in gradients)]
    outputs = tuple(x for x, mine in zip(sums, grad_mask, strict=True) if mine)
    # the count of a weighted row's keys, which its cotangents know
    optional = cotangents.dlse, None if plan.weighted else results.softmax_stats
    dlse, stats = (x is not None for x in optional)
    form = _form(inputs, len(literals), dlse, stats, grad_mask)
    static = CppStatic(name, form, inputs.geometry.scale, outputs)
    arrays = q, k, v, results.out, results.lse.astype(real), cotangents.dout.astype(q.dtype)
    more = (x.astype(real) for x in optional if x is not None)
    values = _values(inputs, literals, real, traced(q))
    gradient_arrays = list(_compiled(static)((*arrays, *more), *values))
    grads: dict[str, Any] = {n: gradient_arrays.pop(0) for n in ("q", "k", "v") if n in grad_names}
    if gradient_arrays:
        grads |= _folded(inputs, [g for g in gradients if g.source in grad_names], gradient_arrays)
    return grads


def tangent(
    inputs: KernelInputs, q: Any, k: Any, v: Any, out: Any, tangents: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """The tangents of out and lse, given the forward's out and some of the tangents of "q", "k" and "v"."""
    name, literals = _target_name("tangent", inputs, str(q.dtype))
    form = _form(inputs, len(literals), grad_mask=[n in tangents for n in "qkv"], tangents=True)
    static = CppStatic(name, form, inputs.geometry.scale, (("out", -1), ("row", -1)))
    arrays = q, k, v, out, *(tangents[n] for n in "qkv" if n in tangents)
    return _compiled(static)(arrays, *_values(inputs, literals, _real(q), traced(q)))  # type: ignore[no-any-return]


def _real(q: jax.Array) -> np.dtype[Any]:
    return np.dtype(np.float64 if q.dtype == np.float64 else np.float32)


def _target_name(kind: str, inputs: KernelInputs, *dtypes: str) -> tuple[str, tuple[float, ...]]:
    g = inputs.geometry
    parts = kind, inputs.plan, inputs.target, g.head_dim, g.v_dim
    return target_name(*parts, *dtypes, permuted=inputs.rows is not None)


def _folded(inputs: KernelInputs, captured: Sequence[Gradient], sums: Sequence[Any]) -> dict[str, Any]:
    plan, slots, tables = inputs.plan, inputs.slots, inputs.tables
    limits: dict[str, float] = {n: abs(x) for n, x in slots.items() if isinstance(x, int)}
    kinds = {n: x.dtype for n, x in {**slots, **tables}.items() if hasattr(x, "dtype")}
    # the values may be traced, so only the dtype bounds them
    limits |= {n: float(np.iinfo(x).max) for n, x in kinds.items() if x.kind in "iu"}
    indices = (i for g in captured if g.over != "scatter" for i in g.index)
    if (wide := plan.int64 and needs_int64(indices, limits, np.inf)) and not int64_enabled():
        raise LoweringError(
            "where a table's gradient goes may need more than 32 bits and JAX has 64-bit integers switched off; "
            'set jax.config.update("jax_enable_x64", True) or shrink the numbers in the mask'
        )
    return folded(inputs, captured, sums, wide)


# -- what is known of rows -------------------------------------------------------------------------


def lse_residual_of(inputs: KernelInputs, softmax_stats: jax.Array, lse: jax.Array) -> jax.Array:
    """The rounding error of lse, from what the forward knows of each row."""
    return _rounding(natural(inputs))[0](softmax_stats, lse)  # type: ignore[no-any-return]


def softmax_stats_of(inputs: KernelInputs, lse: jax.Array, lse_residual: jax.Array) -> jax.Array:
    """The normaliser lse + lse_residual, which a backward takes for rows whose softmax runs over other keys too."""
    return _rounding(natural(inputs))[1](lse, lse_residual)  # type: ignore[no-any-return]


@memo(group="once")
def _rounding(scored: bool) -> tuple[Any, Any]:
    import jax
    import jax.numpy as jnp
    from jax import lax

    def difference(top: jax.Array, lse: jax.Array) -> jax.Array:
        """`top`, in the unit of scores, less lse: products of 12 bits by 12 are exact, and so are their sums."""
        if scored or top.dtype == np.float64:
            return top * (1 if scored else np.log(2.0)) - lse
        bits = lax.bitcast_convert_type(top, np.uint32) & np.uint32(0xFFFFF000)
        most = lax.bitcast_convert_type(bits, np.float32)
        rest = top - most
        first, second, third = (np.float32(x) for x in LN2)
        return ((most * first - lse) + rest * first + most * second) + (rest * second + top * third)

    @jax.jit
    def lse_residual(softmax_stats: jax.Array, lse: jax.Array) -> jax.Array:
        top, share = softmax_stats[..., 0], jnp.abs(softmax_stats[..., 1])
        known = share > 1e-30  # below, lse is the sink
        error = difference(top, lse) - jnp.log(jnp.where(known, share, 1))
        return jnp.where(known & jnp.isfinite(error), error, 0)

    @jax.jit
    def softmax_stats(lse: jax.Array, lse_residual: jax.Array) -> jax.Array:
        seen = jnp.isfinite(lse)
        finite_lse = jnp.where(seen, lse, 0)
        shift = finite_lse * lse.dtype.type(1 if scored else 1 / np.log(2.0))
        share = jnp.exp(jnp.clip(difference(shift, finite_lse) - lse_residual, -80, 80))  # float32 overflows at exp(89)
        return jnp.stack([shift, jnp.where(seen, share, 0)], -1)  # 0: what lse says

    return lse_residual, softmax_stats


# -- what a call is made of -------------------------------------------------------------------------


def _form(
    inputs: KernelInputs,
    literals: int,
    dlse: bool = False,
    stats: bool = False,
    grad_mask: Sequence[bool] = (),
    tangents: bool = False,
) -> tuple[int, ...]:
    """The operands and results that a call has: `Form` of bridge.cpp and what stands behind it. `dlse` and `stats`
    say whether there are a cotangent of lse, and `softmax_stats`; `literals` is their number. With `tangents` the mask
    says which arrays have one."""
    plan, target = inputs.plan, inputs.target
    origins = (int(np.prod(np.shape(x))) for x in inputs.geometry.origin[2:])
    floating = *(int(s.type is FLOAT) for s in plan.slots), *[1] * literals
    flags = len(grad_mask), *map(int, (tangents, dlse, stats, inputs.sinks is not None, inputs.rows is not None))
    ranks = (t.rank for t in plan.tables)
    pages = plan.page, next((i for i, t in enumerate(plan.tables) if t.name == plan.pages), 0)
    sizes = len(floating), len(plan.tables), *pages, target.block_q
    return (*flags, *origins, *sizes, *floating, *ranks, *map(int, grad_mask))


def _values(inputs: KernelInputs, literals: Sequence[float], real: np.dtype[Any], traced: bool) -> tuple[Any, ...]:
    """(words, floats, (bounds, count, slice_of, perhaps the rows of queries and keys), sinks or None, tables). What is
    the host's goes into a trace as constants; otherwise JAX keeps a copy of it for the next call."""
    plan, spans, geometry, slots, tables = inputs.plan, inputs.spans, inputs.geometry, inputs.slots, inputs.tables
    sinks, rows = inputs.sinks, inputs.rows
    whole = [*(0 if s.type is FLOAT else slots[s.name] for s in plan.slots), *(0 for _ in literals)]
    floats = [*(slots[s.name] if s.type is FLOAT else 0.0 for s in plan.slots), *literals] or [0.0]
    words = _joined([*geometry.full, *geometry.origin, *whole], np.dtype(np.int64))
    numbers = words, _joined(floats, real)

    def runs() -> tuple[Any, ...]:
        return spans.bounds, spans.count, spans.slice_of

    def stored(use: TableUse) -> Any:
        table = tables[use.name]
        # a copy of what may be written to goes stale
        if traced or not isinstance(table, np.ndarray) or table.flags.writeable:
            return _stored(use, table, plan.int64, real)
        return _kept(table, f"{plan.int64} {real}", lambda: _stored(use, table, plan.int64, real))

    if not traced:
        numbers = tuple(_copied(x.tobytes(), x.shape, x.dtype.str) if isinstance(x, np.ndarray) else x for x in numbers)
    walked = _kept(spans, "runs", runs) if not traced and isinstance(spans, Spans) else runs()
    if rows is not None:
        more = inputs.target.block_k + cpp_call.BEHIND
        walked += rows.padded(more) if traced else _kept(rows, f"{more} more", partial(rows.padded, more))
    arrays = tuple(map(stored, plan.tables))
    return *numbers, walked, None if sinks is None else sinks.astype(real).reshape(-1), arrays


def _joined(parts: Sequence[Any], dtype: np.dtype[Any]) -> Any:
    """Numbers and vectors in one vector; Ints as [n, 2]."""
    if all(isinstance(x, int | float | np.ndarray | np.generic) for x in parts):
        vector = np.concatenate([np.asarray(x, dtype).reshape(-1) for x in parts])
        return _halves(vector) if dtype == np.int64 else vector
    import jax.numpy as jnp

    vectors = [jnp.asarray(x).reshape(-1) if hasattr(x, "aval") else np.asarray(x, dtype).reshape(-1) for x in parts]
    return jnp.concatenate([_halves(x) if dtype == np.int64 else x.astype(dtype) for x in vectors])


def _halves(x: Any) -> Any:
    """Int or Bool in 64 bits, as two int32 in an axis behind the others."""
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x, np.int64)[..., None].view(np.int32)
    import jax.numpy as jnp
    from jax import lax

    if x.dtype in (np.int64, np.uint64):
        return lax.bitcast_convert_type(x, np.int32)
    low = x.astype(np.int32)
    return jnp.stack([low, low >> 31 if np.issubdtype(x.dtype, np.signedinteger) else jnp.zeros_like(low)], -1)


def _stored(use: TableUse, table: Any, wide: bool, real: np.dtype[Any]) -> Any:
    """A table in the kernel's numbers; Ints that do not fit are an error, not other numbers."""
    if use.type is INT and wide:
        return _halves(table)
    dtype = real if use.type is FLOAT else np.dtype(np.bool_ if use.type is BOOL else np.int32)
    if table.dtype == dtype:
        return table
    if isinstance(table, np.ndarray) and use.type is INT and (table.max() > INT32.max or table.min() < INT32.min):
        raise too_wide(use.source)
    return table.astype(dtype)


def too_wide(name: str) -> ParameterError:
    """The error of a table whose numbers a kernel's integers do not hold."""
    return ParameterError(f"table `{name}` holds numbers beyond 32 bits, the kernel has 32-bit integers; renumber it")


# -- copies of the host's arrays, for calls outside of jax.jit ---------------------------------------


def _kept(owner: Any, kind: str, make: Callable[[], Any]) -> Any:
    """The result of `make` for an object that does not change, such as a JAX array, kept as long as the object
    lives."""
    import jax

    def copied() -> Any:
        with jax.ensure_compile_time_eval():  # part of no trace, also inside of one
            return jax.tree.map(jax.numpy.array, make())

    return cached_on(owner, kind, copied)


@memo(1024)
def _copied(content: bytes, shape: tuple[int, ...], dtype: str) -> Any:
    import jax

    with jax.ensure_compile_time_eval():
        return jax.numpy.array(np.frombuffer(content, dtype).reshape(shape))


# -- the call ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CppStatic:
    """The part of a compiled call that shapes of operands do not say."""

    target: str  # of the custom call
    form: tuple[int, ...]
    scale: float
    # of a backward, for each result: q, k, v, or how it is summed, and the table's number; of tangents: out and row
    gradients: tuple[tuple[str, int], ...] | None = None
    width: int = 2  # of the `softmax_stats` of a forward


@memo(1024)
def _compiled(static: CppStatic) -> Any:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh

    shaped: Any = jax.ShapeDtypeStruct  # JAX leaves some of its functions untyped
    unsplit: Any = PartitionSpec

    def attention(arrays: tuple[Any, ...], words: Any, floats: Any, runs: Any, sinks: Any, tables: Any) -> Any:
        operands = [*arrays, words, floats, *runs, *([] if sinks is None else [sinks]), *tables]
        types = [jax.typeof(x) for x in operands]
        # under shard_map operands vary along the same axes of the mesh, and so do results
        along = frozenset[str]().union(*(t.manual_axis_type.varying for t in types))
        missing = [tuple(sorted(along - t.manual_axis_type.varying)) for t in types]
        operands = [jax.lax.pcast(x, axes, to="varying") for x, axes in zip(operands, missing, strict=True)]
        where: dict[str, Any] = {}
        if along:
            where["manual_axis_type"] = types[0].manual_axis_type.update(varying=along)
            where["sharding"] = NamedSharding(get_abstract_mesh(), unsplit())
        results = [shaped(shape, dtype, **where) for shape, dtype in _results(static, arrays, tables)]
        # instances in turn would be one launch each: bridge.cpp walks the axes that vmap puts in front
        call = jax.ffi.ffi_call(static.target, results, vmap_method="expand_dims")
        return tuple(call(*operands, form=np.array(static.form, np.int64), scale=np.float64(static.scale)))

    return jax.jit(attention)


def _results(static: CppStatic, arrays: tuple[Any, ...], tables: tuple[Any, ...]) -> list[tuple[tuple[int, ...], Any]]:
    """(shape, dtype) of every result."""
    q, k, v = arrays[:3]
    real = np.float64 if q.dtype == np.float64 else np.float32
    batch, q_len, heads, _ = q.shape
    row = (batch, heads, q_len)
    if static.gradients is None:
        return [((batch, q_len, heads, v.shape[3]), q.dtype), (row, real), (row, real), ((*row, static.width), real)]
    known: dict[str, tuple[tuple[int, ...], Any]] = {n: (x.shape, x.dtype) for n, x in zip("qkv", (q, k, v))}
    known |= {"head": (row[:2], real), "row": (row, real), "column": ((*row[:2], k.shape[1]), real)}
    known["out"] = (*q.shape[:3], v.shape[3]), q.dtype
    known["diagonal"] = (*row[:2], q_len + k.shape[1] - 1), real
    return [known[over] if over in known else (tables[table].shape, real) for over, table in static.gradients]


# -- kernels by name --------------------------------------------------------------------------------

_lock = Lock()
_registered: dict[str, Any] = {}  # libraries by the hash of their source, held for good: XLA may call them any time


@memo(1024)
def target_name(
    kind: str, plan: LoopPlan, target: Target, head_dim: int, v_dim: int, *dtypes: str, permuted: bool = False
) -> tuple[str, tuple[float, ...]]:
    """(name of a kernel's custom call, literals that follow the plan's slots), built and registered at the first use.
    `kind` is one of `KERNELS`, `dtypes` are those of q and of k and v, `permuted`: rows are read by tables."""
    import jax

    capsule: Any = jax.ffi.pycapsule
    dtype, kv_dtype = (*dtypes, "")[:2]
    kernel = KERNELS[kind](plan, target, CppArrays(head_dim, v_dim, dtype, kv_dtype, permuted), named=False)
    source = kernel.source()
    key = hashlib.sha256(source.encode()).hexdigest()[:24]
    with _lock:
        if key not in _registered:
            with suppress(RuntimeError):  # two compilers at once, unless no thread can be had or the interpreter ends
                # the context says whether builds are deferred
                Thread(target=copy_context().run, args=(_ahead,)).start()
            library = native_build.library(source)
            ctypes.c_void_p.in_dll(library, "frisket_bridge").value = _bridge()
            handler = capsule(getattr(library, f"frisket_{kind}_xla"))
            jax.ffi.register_ffi_target(f"frisket_{kind}_{key}", handler, platform="cpu")
            _registered[key] = library
    return f"frisket_{kind}_{key}", kernel.literals


def _ahead() -> None:
    with suppress(FrisketError):  # who asks for it has the error
        _bridge()


@memo(group="once")
def _bridge() -> int | None:
    """The address of what turns XLA's calls into records, compiled for this jaxlib."""
    return ctypes.cast(native_build.library(bridge_source()).frisket_bridge, ctypes.c_void_p).value


def bridge_source() -> str:
    """bridge.cpp behind what it needs."""
    import jax

    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    # the version makes another text, so that no other jaxlib loads this one from the disk
    preface = f'// jaxlib {version("jaxlib")}\n#include "{header}"\ntypedef void Real;\n'
    return preface + cpp_call.text() + resources.files(__package__).joinpath("bridge.cpp").read_text()
