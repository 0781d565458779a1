"""Meshes of devices, and the names in them.

Small things that layers need stand here too: a dtype for several arrays, what a checkpoint keeps, docstrings in parts.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding

from frisket.dsl.errors import ParameterError, UnknownNameError
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.sharding.partition import current_mesh


def create_mesh(
    axis_dims: Sequence[int] = (1, -1, 1, 1), axis_names: Sequence[str] = ("dp", "fsdp", "tp", "sp"), backend: str = ""
) -> Mesh:
    """`create_mesh((1, -1, 2, 1))`: all devices of a backend as a mesh, in the order that suits their network.

    >>> create_mesh((1, -1, 1, 1)).axis_names
    ('dp', 'fsdp', 'tp', 'sp')

    One of `axis_dims` may be -1: as many as the others leave. `backend` is "cpu", "gpu" or "tpu", JAX's default
    where it is empty. Raises `ParameterError` where the devices do not make such a mesh.
    """
    dims, names = list(axis_dims), tuple(axis_names)
    devices = jax.devices(backend or None)
    if len(dims) != len(names) or len({*names}) != len(names):
        raise ParameterError(f"axis_dims {dims} and axis_names {list(names)}: a name for each, and each once")
    if any(d == 0 or d < -1 for d in dims) or dims.count(-1) > 1:
        raise ParameterError(f"axis_dims are {dims}; they are 1 or more, and at most one is -1, for what is left")
    known = math.prod(d for d in dims if d != -1)
    shape = [len(devices) // known if d == -1 else d for d in dims]  # a remainder is an error below
    if math.prod(shape) != len(devices):
        text = f"axis_dims {dims} make {known}{' × n' if -1 in dims else ''} devices, and there are {len(devices)}"
        raise ParameterError(text)
    # JAX's default for the types of axes differs by version
    return jax.make_mesh(tuple(shape), names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def names_in_mesh(*names: str) -> bool:
    """Whether the current mesh (`jax.set_mesh(mesh)`, `with mesh:`) has all these axes; without a mesh there are none.

    >>> with jax.set_mesh(create_mesh((1, -1), ("dp", "tp"))):
    ...     names_in_mesh("dp", "tp"), names_in_mesh("sp")
    (True, False)
    """
    mesh = current_mesh()
    return {*names} <= {*(() if mesh is None else mesh.axis_names)}


def get_names_from_partition_spec(partition_specs: Any) -> list[str]:
    """The mesh axes in a spec, or in dicts and sequences of specs, each once, in the order they are met in.

    >>> from jax.sharding import PartitionSpec as P
    >>> get_names_from_partition_spec({"w": P(("fsdp", "sp"), "tp"), "b": [P("tp"), P(None)]})
    ['fsdp', 'sp', 'tp']
    """
    return list(dict.fromkeys(_names(partition_specs)))  # in order, which a set has not


def _names(specs: Any) -> Iterable[str]:
    if isinstance(specs, str):  # first, as a text is iterable
        yield specs
    elif isinstance(specs, NamedSharding):
        yield from _names(specs.spec)
    elif isinstance(specs, Iterable):
        for one in specs.values() if isinstance(specs, Mapping) else specs:
            yield from _names(one)
    elif specs is not None:
        raise ParameterError(f"{specs!r} is no partition spec: those hold names of mesh axes, tuples of them, and None")


def get_ranks_and_size(mesh: Any) -> dict[str, Any]:
    """How processes share a mesh: `mesh`, `mp_node_size` and `dp_node_size`, `mp_node_rank` and `dp_node_rank`.

    >>> found = get_ranks_and_size(create_mesh((1, -1, 1, 1)))  # one process
    >>> found["mp_node_size"], found["dp_node_size"], found["dp_node_rank"]
    (1, 1, 0)

    A model split over "tp" and "sp" spans `mp_node_size` processes, 1 where one process has all devices;
    there are `dp_node_size` such groups. The ranks are this process's place inside its group, and its group's.
    """
    parts = mesh.shape.get("tp", 1) * mesh.shape.get("sp", 1)
    size = max(1, parts // jax.local_device_count())
    group, rank = divmod(jax.process_index(), size)
    data: dict[str, Any] = {"mesh": mesh, "mp_node_size": size, "dp_node_size": jax.process_count() // size}
    return data | {"dp_node_rank": group, "mp_node_rank": rank}


T = TypeVar("T")


@usual_promotion()
def canonicalize_dtype(*args: Any, dtype: Any = None, inexact: bool = True) -> Any:
    """The dtype that arrays are brought to before they meet: `dtype`, or what JAX promotes them to.

    >>> canonicalize_dtype(jnp.ones(2, "bfloat16"), None, jnp.ones(2, "int8"))
    dtype(bfloat16)

    None among `args` is passed over. With `inexact` it is a floating or complex one: integers alone make float32, and
    another `dtype` is an error.
    """
    if dtype is None:
        arrays = [jnp.asarray(x) for x in args if x is not None]
        if not arrays:
            raise ParameterError("there is no array to tell the dtype by; give dtype=")
        dtype = jnp.result_type(*arrays)
        if inexact and not jnp.issubdtype(dtype, jnp.inexact):
            dtype = jnp.promote_types(jnp.float32, dtype)
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
        raise ParameterError(f"dtype is {jnp.dtype(dtype)}; it is a floating one here (inexact=False allows others)")
    return dtype


def get_gradient_checkpoint_policy(name: str) -> Callable[..., Any]:
    """`jax.checkpoint(f, policy=get_gradient_checkpoint_policy("dots_saveable"))`: that of `jax.checkpoint_policies`.

    Some are policies, some make one of names: `get_gradient_checkpoint_policy("save_only_these_names")("frisket out",
    "frisket lse")` keeps attention's results, so that the backward does not run it again. Another name is a `KeyError`.

    >>> policy = get_gradient_checkpoint_policy("dots_saveable")
    >>> float(jax.grad(jax.checkpoint(jnp.sin, policy=policy))(0.0))
    1.0
    """
    policies = {n: p for n in dir(jax.checkpoint_policies) if callable(p := getattr(jax.checkpoint_policies, n))}
    policies = {n: p for n, p in policies.items() if not n.startswith("_")}
    if name not in policies:
        near = difflib.get_close_matches(str(name), policies, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(f"there is no checkpoint policy {name!r}{hint}\n  there are {', '.join(policies)}")
    policy: Callable[..., Any] = policies[name]
    return policy


def add_start_docstrings(*docstr: str) -> Callable[[T], T]:
    """A decorator that puts texts before a docstring: `@add_start_docstrings(COMMON, "This one ...")`.

    >>> @add_start_docstrings("A layer of Llama. ")
    ... def block():
    ...     "Attention, then the MLP."
    >>> block.__doc__
    'A layer of Llama. Attention, then the MLP.'
    """

    def documented(fn: T) -> T:
        fn.__doc__ = "".join(docstr) + (fn.__doc__ or "")
        return fn

    return documented
