"""Runs the text of a flat planner on arrays of JAX or torch, and makes tables ready for kernels there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frisket.dsl.errors import ParameterError
from frisket.lowering.emit import planner as text
from frisket.lowering.flat import ROOM, Planner
from frisket.lowering.plan import LoopPlan, Sizes

from .modules import load
from .parameters import traced, unsorted
from .settings import Settings

Array = Any


def spans(
    plan: Planner, framework: str, at: tuple[NDArray[Any], ...], sizes: Sizes, values: Mapping[str, Any],
    q_len: int, kv_len: int, block: tuple[int, int], device: Any = None, room: int = ROOM,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(bounds int32 [slices, rows, R, 4], count int32 [slices, rows], overflow) of a planner, on the tables'
    device. `at` is where each slice begins, (b, h, q, k) of [slices]; `values` by the planner's names."""
    if _reachable(framework, [values[n] for n in (*plan.tables, *plan.scalars)], device):
        return _native(plan, framework, at, sizes, values, q_len, kv_len, block, room)
    tables = {n: _table(framework, values[n], device) for n in plan.tables}
    scalars = {n: values[n] for n in plan.scalars}
    place = [_table(framework, x.astype(_ints(plan, framework)).reshape(-1, 1, 1), device) for x in at]
    records = plan.records(-(-kv_len // block[1]))
    bounds, count, overflow = _function(plan, framework)(
        *place, sizes, scalars, tables, q_len=q_len, kv_len=kv_len, block=block, room=room, records=records
    )
    if framework == "jax":
        return bounds.astype(np.int32), count.astype(np.int32), overflow
    import torch

    return bounds.to(torch.int32), count.to(torch.int32), overflow


def _reachable(framework: str, values: list[Any], device: Any) -> bool:
    """Whether C++ may read these values: arrays of the host with numbers in them, and a compiler is there."""
    from . import native_build

    if Settings.read().backend not in (None, "native", "cpp") or any(traced(x) for x in values):
        return False
    if framework == "jax":
        import jax

        here = all(d.platform == "cpu" for x in values if isinstance(x, jax.Array) for d in x.devices())
    else:
        import torch

        here = (device is None or device.type == "cpu") and not torch.compiler.is_compiling()
        here = here and all(_plain(x) for x in values if isinstance(x, torch.Tensor))
    return here and not native_build.reason()


def _plain(x: Any) -> bool:
    """Whether a tensor is memory of the host: no subclass, such as fake ones, and nothing that wraps another."""
    import torch

    wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu" and not wrapped(x)


def _native(
    plan: Planner, framework: str, at: tuple[NDArray[Any], ...], sizes: Sizes, values: Mapping[str, Any],
    q_len: int, kv_len: int, block: tuple[int, int], room: int,
) -> tuple[Array, Array, Array]:  # fmt: skip
    from .flat_native import spans as planned

    bounds, count, overflow = planned(plan, at, sizes, values, q_len, kv_len, block, room)
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(bounds), jnp.asarray(count), jnp.asarray(overflow)
    import torch

    return torch.from_numpy(bounds), torch.from_numpy(count), torch.tensor(overflow)


def source(plan: Planner, framework: str) -> str:
    """The text that plans."""
    return text.emit(plan, text.JNP if framework == "jax" else text.TORCH, plan.int64)


@lru_cache(maxsize=256)
def _function(plan: Planner, framework: str) -> Callable[..., Any]:
    run: Callable[..., Any] = load(source(plan, framework))["plan_spans"]
    if framework == "torch":
        return run
    import jax

    return jax.jit(run, static_argnames=("q_len", "kv_len", "block", "room", "records"))


def _ints(plan: Planner, framework: str) -> type[np.generic]:
    return np.int64 if framework == "torch" or plan.int64 else np.int32


def _table(framework: str, x: Any, device: Any) -> Array:
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x)
    import torch

    return torch.from_numpy(np.array(x)).to(device) if isinstance(x, np.ndarray) else x


def kernel_tables(
    plan: LoopPlan, framework: str, values: Mapping[str, Any], length: int, device: Any
) -> dict[str, Array]:
    """An array for every table of the kernel. `length` is how many positions there are."""
    found = {}
    for use in plan.tables:
        table = values[use.source]
        found[use.name] = _segments(framework, _table(framework, table, device), length) if use.derived else table
    if framework == "torch":
        return {n: _table(framework, t, device) for n, t in found.items()}
    return found


def _segments(framework: str, offsets: Array, length: int) -> Array:
    """The segment of every position."""
    most = max(offsets.shape[0] - 2, 0)
    if framework == "jax":  # positions may go on where the offsets' dtype does not
        import jax.numpy as jnp

        return jnp.clip(jnp.searchsorted(offsets, jnp.arange(length), "right") - 1, 0, most).astype(jnp.int32)
    import torch

    at = torch.arange(length, device=offsets.device)
    return torch.clip(torch.searchsorted(offsets.long(), at, right=True) - 1, 0, most).to(torch.int32)


def check_sorted(framework: str, tables: Mapping[str, Array]) -> None:
    """Tables declared sorted are, tested where they live; the error comes when the device gets there."""
    for name, table in tables.items():
        good = (table[1:] >= table[:-1]).all()
        if framework == "jax":
            import jax

            jax.debug.callback(_refuse, good, name=name)
        else:
            import torch

            torch._assert_async(good, unsorted(name))


def _refuse(good: Any, name: str) -> None:
    if not good:
        raise ParameterError(unsorted(name))
