"""Calls of Triton kernels on JAX arrays: through jax-triton on a GPU, in Triton's interpreter on a CPU.

The compiled kernel depends on shapes and dtypes alone. Origins, sizes, slots and spans are operands, and may be traced.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from threading import Lock
from typing import Any

import numpy as np

from frisket.dsl.errors import BackendError, ParameterError
from frisket.dsl.ir import SIZES
from frisket.dsl.types import BOOL, FLOAT, INT
from frisket.grammar.memo import memo
from frisket.lowering.kernels.expr import POSITION, levels
from frisket.lowering.kernels.triton import writer as triton_writer
from frisket.lowering.kernels.triton.writer import Dims, Form, JaxEntry, arguments, near, rows_of_tables
from frisket.lowering.plan import Geometry, LoopPlan, TableUse, Target
from frisket.lowering.planner.planner import DeviceSpans
from frisket.runtime.backends.cpp.jax import _halves as halves
from frisket.runtime.machine.extras import pip_install

from .grids import Grid, of_host, span_arrays
from .source import load
from .tiles import GPUS

Array = Any  # a jax.Array, traced or not
INT32 = np.iinfo(np.int32)
_interpreter = Lock()  # it replaces functions of Triton's while it runs
_loaded = memo(group="kernels")(load)


class JaxTritonCall:
    """A plan with the values of a call, and how they reach kernels."""

    def __init__(
        self, plan: LoopPlan, geometry: Geometry, slots: Mapping[str, Any], tables: Mapping[str, Any], dims: Dims,
        platform: str,
    ) -> None:  # fmt: skip
        check(platform, dims.dtype)
        self.plan, self.geometry, self.slots, self.dims, self.platform = plan, geometry, slots, dims, platform
        self.tables = {t.name: _readable(t, tables[t.name], plan.int64) for t in plan.every_table}

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
        roots = [e for e in (self.plan.mask, self.plan.score, self.plan.weight) if e is not None]
        wide = {n.name for n, at in levels(*roots).items() if n.op == "lookup" and at == POSITION}
        aligned = set()
        for name in wide & self.tables.keys():
            shape = self._shape(name, self.tables[name])
            steps = known[name].strides[:-1]
            aligned |= {n for i, n in enumerate(steps) if np.prod(shape[i + 1 :], dtype=object) % 16 == 0}
        pairs = frozenset({"Counted", *(known[n].name for n in self.pairs)})
        return Form(self.dims, self.per_batch, pairs, frozenset(aligned))

    # -- launching ------------------------------------------------------------------------------------

    def run(
        self, source: str, kernel: str, grid: Grid, tile: Target, inputs: Mapping[str, Array],
        results: Mapping[str, tuple[Sequence[int], Any]], spans: Callable[[], Any] | None = None, *,
        zeroed: bool = False, plan: LoopPlan | None = None, **lengths: int,
    ) -> dict[str, Array]:  # fmt: skip
        """The results by name, of (shape, dtype). `spans`, `rows` or `columns` of a SpanSource, is asked where the
        kernel reads a table of them; `plan` is the kernel's where it is another one; `zeroed` says that results begin
        as 0."""
        import jax

        fn, entry = _entry(source, kernel, plan or self.plan, self.form, tuple(results))
        arrays = {**self.arrays, **inputs}
        if "Spans" in entry.arrays:
            if spans is None:
                raise BackendError("this plan has no closed-form bounds: pass the spans of its layout")
            arrays |= span_operands(spans(), entry.arrays)
            lengths["records"] = arrays["Spans"].shape[2]
        operands = [jax.numpy.asarray(arrays[n]) for n in entry.arrays]
        operands += [_vector([self.values[n] for n in names], kind, self.plan.int64)
                     for names, kind in ((entry.whole, INT), (entry.real, FLOAT)) if names]  # fmt: skip
        known = {**self.lengths, **lengths}
        constants = {"BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k, "ORIGIN_PER_BATCH": self.per_batch}
        constants["NEAR"] = self.near(tile.block_q)
        shaped: Any = jax.ShapeDtypeStruct  # JAX leaves some of its functions untyped
        shapes = [shaped(tuple(shape), dtype) for shape, dtype in (results[n] for n in entry.results)]
        launch = _interpreted if self.platform == "cpu" else _compiled
        outputs = launch(
            fn, entry, grid, tile, operands, [known[n] for n in entry.lengths], shapes,
            {n: constants[n] for n in entry.constants}, zeroed, self.platform,
        )  # fmt: skip
        return dict(zip(entry.results, outputs, strict=True))


kernels_of = memo(group="kernels")(triton_writer.parameters)


@memo(1024)
def _entry(source: str, kernel: str, plan: LoopPlan, form: Form, results: tuple[str, ...]) -> tuple[Any, JaxEntry]:
    """A kernel of a module through its entry, which stands behind it in a module of its own."""
    entry = triton_writer.entry(kernel, kernels_of(source)[kernel], plan, form, results)
    return getattr(_loaded(f"{source}\n\n{entry.text}"), entry.name), entry


def _compiled(
    fn: Any, entry: JaxEntry, grid: Grid, tile: Target, operands: Sequence[Array], lengths: Sequence[Any],
    shapes: Sequence[Any], constants: Mapping[str, Any], zeroed: bool, platform: str,
) -> Sequence[Array]:  # fmt: skip
    outputs: Sequence[Array] = triton_call()(
        *operands, *lengths, kernel=fn, out_shape=list(shapes), grid=grid, name=entry.name, num_warps=tile.num_warps,
        num_stages=tile.num_stages, compute_capability=capability(platform), enable_fp_fusion=True,
        zeroed_outputs=tuple(range(len(shapes))) if zeroed else (), **constants,
    )  # fmt: skip
    return outputs


def _interpreted(
    fn: Any, entry: JaxEntry, grid: Grid, tile: Target, operands: Sequence[Array], lengths: Sequence[Any],
    shapes: Sequence[Any], constants: Mapping[str, Any], zeroed: bool, platform: str,
) -> Sequence[Array]:  # fmt: skip
    import jax

    def run(*inputs: Any) -> list[Any]:
        arrays = [np.ascontiguousarray(x) for x in inputs]
        outputs = [(np.zeros if zeroed else np.empty)(s.shape, s.dtype) for s in shapes]
        memory = [Memory(x) for x in (*arrays, *outputs)]
        numbers = [float(x) if isinstance(x, np.floating) else x for x in lengths]
        with _interpreter:
            fn[grid](*memory[: len(arrays)], *numbers, *memory[len(arrays) :], **constants)
        return outputs

    result: Sequence[Array] = jax.pure_callback(run, list(shapes), *operands)
    return result


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

    if np.ndim(table) != use.rank or np.size(table) == 0:
        shape = list(np.shape(table))
        raise ParameterError(f"table `{use.source}` has {use.rank} axes of at least one entry, not shape {shape}")
    if use.type is BOOL:
        return table.astype(bool).astype(np.int8)
    if use.type is FLOAT:
        return jnp.asarray(table, None if table.dtype in (jnp.bfloat16, np.float16) else np.float32)
    if table.dtype in (np.int64, np.uint64, np.uint32):
        if isinstance(table, np.ndarray):
            fits = table.max() <= INT32.max and table.min() >= INT32.min
            if not fits and not wide:
                raise ParameterError(
                    f"table `{use.source}` holds numbers beyond 32 bits, the kernel has 32-bit integers; renumber it"
                )
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


NOWHERE = "sm_90", 132, 0  # where there is no GPU: an H100
# parts of GPUs' names -> architecture, for JAX's abstract devices, which have nothing but a name
KINDS = {kind: arch for arch, gpu in GPUS.items() for kind in gpu["kinds"]}


def architecture() -> str:
    """The architecture as in `tiles.GPUS`: that of the current mesh where JAX lowers for an abstract
    device, else of the first GPU, else sm_90."""
    return gpu_here()[0]


def processors() -> int:
    """Streaming multiprocessors, or compute units."""
    return gpu_here()[1]


def capability(platform: str) -> int | None:
    """The capability that jax-triton compiles for: 90 for sm_90. On AMD's GPUs it asks the device."""
    return int(architecture()[3:]) if platform != "rocm" else None


def gpu_here() -> tuple[str, int, int]:
    """(architecture, processors, bytes of shared memory that a block may have, or 0 where that is not known)."""
    import jax

    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None and abstract.platform in ("gpu", "cuda", "rocm", None):
        kind = next((n for n in sorted(KINDS, key=len, reverse=True) if n in abstract.device_kind), "")
        if kind:
            return KINDS[kind], abstract.num_cores or NOWHERE[1], 0
    return _first()


@memo(group="once")
def _first() -> tuple[str, int, int]:
    import jax

    try:
        device: Any = jax.devices("gpu")[0]
    except RuntimeError:
        return NOWHERE
    of_amd = str(device.compute_capability).split(":")[0]
    name = of_amd if of_amd.startswith("gfx") else f"sm_{str(device.compute_capability).replace('.', '')}"
    return (
        name,
        int(getattr(device, "core_count", NOWHERE[1])),
        int(getattr(device, "shared_memory_per_block_optin", 0)),
    )


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


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
