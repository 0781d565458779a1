"""Runs the text of a flat planner on arrays of JAX or torch, and makes tables ready for kernels there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np

from frisket.dsl.errors import ParameterError
from frisket.grammar.memo import memo
from frisket.lowering.plan import FAR, LIVE, LoopPlan, derived_table
from frisket.lowering.planner import arrays as text
from frisket.lowering.planner import triton as planner_triton
from frisket.lowering.planner.planner import Planner
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.backends.base import named
from frisket.runtime.jax.arrays import automatic
from frisket.runtime.machine import cpp_build
from frisket.runtime.machine.cpp_build import BuildError, deferring, fall_back
from frisket.runtime.machine.generated import load
from frisket.runtime.machine.parameters import is_tensor, traced, unsorted
from frisket.runtime.machine.settings import Settings

from . import run_cpp, run_triton
from .run_triton import SpanRequest, on_device

Array = Any


def spans(
    plan: Planner, framework: str, place: SpanRequest, values: Mapping[str, Any]
) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
    """(bounds int32 [slices, rows, R, 4], count int32 [slices, rows], overflow, order) of a planner, on the tables'
    device, as `DeviceSpans` has them; `values` by the planner's names."""
    given = [values[n] for n in (*plan.tables, *plan.scalars)]
    if framework == "torch" and _kernels(given, place.device):
        return run_triton.spans(plan, place, values)
    if _reachable(framework, given, place.device):
        try:
            with deferring(not Settings.read().backend):
                return _native(plan, framework, place, values)
        except BuildError as error:
            if Settings.read().backend:
                raise
            fall_back(error)
    tables = {n: on_device(framework, values[n], place.device, n, place.held) for n in plan.tables}
    scalars = {n: values[n] for n in plan.scalars}
    ints = np.int64 if framework == "torch" or plan.int64 else np.int32
    at = [on_device(framework, x.astype(ints).reshape(-1, 1, 1), place.device, id(x), place.held) for x in place.at]
    bounds, count, overflow = _function(plan, framework)(
        *at, place.sizes, scalars, tables, q_len=place.q_len, kv_len=place.kv_len, block=place.block, room=place.room,
        records=place.most(plan),
    )  # fmt: skip
    if framework == "jax":
        return bounds.astype(np.int32), count.astype(np.int32), overflow, None
    import torch

    return bounds.to(torch.int32), count.to(torch.int32), overflow, None


def _kernels(values: list[Any], device: Any) -> bool:
    """Whether Triton plans: tables of a GPU, or of the host where its kernels are interpreted and asked for."""
    import torch

    plain = all(_plain(x, device.type) for x in values if isinstance(x, torch.Tensor))
    return plain and (device.type != "cpu" or _asked("torch", "device", False)) and run_triton.runs(device)


def _reachable(framework: str, values: list[Any], device: Any) -> bool:
    """Whether C++ may read these values: arrays of the host with numbers in them, and a compiler is there."""
    if framework == "torch":
        import torch

        if torch.compiler.is_compiling() or not (device is None or device.type == "cpu"):
            return False
    here = all(on_host(x) for x in values if hasattr(x, "dtype"))
    return here and _asked(framework, "host", True) and not cpp_build.reason()


def _asked(framework: str, where: str, otherwise: bool) -> bool:
    """Whether the backend of FRISKET_BACKEND plans `where`, on the "host" or "device"; `otherwise` without a name."""
    name = Settings.read().backend
    return otherwise if name is None else named(name, framework).plans == where


def on_host(x: Any) -> bool:
    """Whether an array of numpy, torch or JAX has numbers in memory of the host."""
    if is_tensor(x):
        return _plain(x, "cpu")
    return not traced(x) and all(d.platform == "cpu" for d in getattr(x, "devices", set)())


def _plain(x: Any, device: str) -> bool:
    """Whether a tensor is memory of such a device: no subclass, such as fake ones, and nothing that wraps another."""
    import torch

    wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == device and not wrapped(x)


def _native(
    plan: Planner, framework: str, place: SpanRequest, values: Mapping[str, Any]
) -> tuple[Array, Array, Array, Array | None]:  # fmt: skip
    bounds, count, overflow = run_cpp.spans(
        plan, place.at, place.sizes, values, place.q_len, place.kv_len, place.block, place.room
    )
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(bounds), jnp.asarray(count), jnp.asarray(overflow), None
    import torch

    return torch.from_numpy(bounds), torch.from_numpy(count), torch.tensor(overflow, device="cpu"), None


def source(plan: Planner, framework: str, device: Any = None) -> str:
    """The text that plans there."""
    if framework == "torch" and device is not None and device.type == "cuda" and run_triton.runs(device):
        return planner_triton.emit(plan).text
    return text.emit(plan, text.JNP if framework == "jax" else text.TORCH, plan.int64)


@memo(group="kernels")
def _function(plan: Planner, framework: str) -> Callable[..., Any]:
    run: Callable[..., Any] = load(source(plan, framework))["plan_spans"]
    if framework == "torch":
        return run
    import jax

    def plan_spans(*given: Any, **options: Any) -> Any:
        with usual_promotion():
            return automatic(partial(run, **options), *given)

    return jax.jit(plan_spans, static_argnames=("q_len", "kv_len", "block", "room", "records"))


def kernel_tables(
    plan: LoopPlan, framework: str, values: Mapping[str, Any], length: int, device: Any,
    copies: dict[Any, Any] | None = None,
) -> dict[str, Array]:  # fmt: skip
    """An array for every table of the kernel. `length` is how many positions there are."""
    found, copies = {}, {} if copies is None else copies
    for use in plan.every_table:
        if use.source in LIVE:
            continue
        table, derived = values[use.source], use.derived
        if isinstance(table, np.ndarray) and use in plan.run_tables:
            ends = derived_table(table, derived)
            found[use.name] = on_device(framework, ends, device, (use.source, derived), copies)
            continue
        if derived or framework == "torch":
            table = on_device(framework, table, device, use.source, copies)
        if use in plan.run_tables:
            table = _ends(framework, table, derived, length)
        elif derived:
            table = _segments(framework, table, length)
        found[use.name] = table
    return found


def _ends(framework: str, table: Array, derived: str, length: int) -> Array:
    """The ends of the runs of a sorted table, or of the segment of every position."""
    if framework == "jax":
        import jax.numpy as jnp

        with usual_promotion():
            if table.dtype.itemsize < 4:
                table = table.astype(jnp.int32)  # ends may go on where the table's dtype does not
            return automatic(lambda t: _searched(jnp, t, derived, jnp.arange(length)).astype(jnp.int32), table)
    import torch

    return _searched(torch, table.long(), derived, torch.arange(length, device=table.device)).to(torch.int32)


def _searched(xp: Any, table: Array, derived: str, positions: Array) -> Array:
    """The ends by binary search, equal to those of `derived_table`."""
    how, end = derived.split("_")
    if how == "segment":
        inner, count = table[1:-1], max(table.shape[0] - 2, 0)
        place = xp.searchsorted(inner, positions, side="right")
        if end == "first":
            return xp.where(place == 0, -FAR, table[xp.clip(place, 0, count)])
        return xp.where(place == count, FAR, table[xp.clip(place + 1, 0, count)] - 1)
    if end == "first":
        found = xp.searchsorted(table, table, side="left")
        return xp.where(found == 0, -FAR, found)
    found = xp.searchsorted(table, table, side="right") - 1
    return xp.where(found == table.shape[0] - 1, FAR, found)


def _segments(framework: str, offsets: Array, length: int) -> Array:
    """The segment of every position."""
    most = max(offsets.shape[0] - 2, 0)
    if framework == "jax":  # positions may go on where the offsets' dtype does not
        import jax.numpy as jnp

        def segments(offsets: Any) -> Any:
            return jnp.clip(jnp.searchsorted(offsets, jnp.arange(length), "right") - 1, 0, most).astype(jnp.int32)

        with usual_promotion():
            return automatic(segments, offsets)
    import torch

    at = torch.arange(length, device=offsets.device)
    return torch.clip(torch.searchsorted(offsets.long(), at, right=True) - 1, 0, most).to(torch.int32)


def check_sorted(framework: str, tables: Mapping[str, Array], offsets: Collection[str]) -> None:
    """Tables declared sorted, and `offsets`, ascend, tested where they live; the error comes when the device gets
    there."""
    for name, table in tables.items():
        good, text = (table[1:] >= table[:-1]).all(), unsorted(name, offsets=name in offsets)
        if framework == "jax":
            import jax

            jax.debug.callback(_refuse, good, text=text)
        else:
            import torch

            torch._assert_async(good, text)


def _refuse(good: Any, text: str) -> None:
    if not good:
        raise ParameterError(text)
