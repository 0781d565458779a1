"""Contestants in JAX, on the CPU, a GPU or a TPU: frisket's backends, `dot_product_attention`, splash attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from frisket.runtime.attention.entry import compile
from frisket.runtime.backends.base import ranked
from frisket.runtime.backends.registry import library, reason

from .race import Array, Call, Contest, Contestant, NoWordsError, Stage, seconds
from .torch_stage import bias_of

REST = 0.1  # arrays of every pair go back to the system after an answer: 60 ms that are nobody else's


def stage(device: str) -> Stage:
    """`device` is "cpu", "gpu" or "tpu"."""
    import jax

    ours = [b.name for b in ranked("jax", "cuda" if device == "gpu" else device)]
    ours += [library("jax")] if device == "cpu" else []
    found = [Contestant(f"frisket {b}", partial(_ours, b, device), True, reason(b, "jax")) for b in ours]
    found.append(Contestant("jax.nn.dot_product_attention", partial(_attention, None, device), family="jax"))
    if device == "gpu":
        found.append(Contestant("the same by cuDNN", partial(_attention, "cudnn", device), family="jax"))
    if device == "tpu":
        found.append(Contestant("splash attention", partial(splash, device, False), family="splash"))
    kind = jax.devices(device)[0].device_kind
    return Stage(
        "jax", tuple(found), _numpy, seconds if device == "cpu" else in_a_row, rest=REST if device == "cpu" else 0.0,
        machine={} if device == "cpu" else {device: kind},
    )  # fmt: skip


def in_a_row(call: Call) -> float:
    """Seconds of a call on a device: some of them enqueued, the host ahead of all but the first."""
    many = 5
    _ready(call())

    def run() -> None:
        for _ in range(many):
            last = call.enqueue()  # type: ignore[attr-defined]
        _ready(last)

    return seconds(run) / many


def _numpy(given: Any) -> list[Array]:
    return [np.asarray(x, np.float32) for x in (given if isinstance(given, tuple) else (given,))]


def _ready(found: Any) -> Any:
    """When it is there."""
    import jax

    return jax.block_until_ready(found)  # type: ignore[no-untyped-call]


class Jitted:
    """A jitted function on a device's arrays, [batch, length, heads, dim] inside, [batch, heads, length, dim] out."""

    def __init__(self, attend: Callable[..., Any], contest: Contest, device: str) -> None:
        import jax
        import jax.numpy as jnp

        s = contest.sizes
        where = jax.devices(device)[0]
        *arrays, cotangent = (jax.device_put(jnp.asarray(x.swapaxes(1, 2), s.dtype), where) for x in s.drawn())

        def both(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
            return jax.vjp(attend, q, k, v)[1](cotangent)

        self.arguments = [*arrays, cotangent] if s.backward else arrays
        self.function = jax.jit(both if s.backward else attend)

    def enqueue(self) -> Any:
        return self.function(*self.arguments)

    def __call__(self) -> Any:
        found = _ready(self.enqueue())
        return tuple(x.swapaxes(1, 2) for x in found) if isinstance(found, tuple) else found.swapaxes(1, 2)


def _ours(backend: str, device: str, contest: Contest) -> Call:
    return Jitted(compile(contest.program, backend=backend), contest, device)


def _attention(implementation: str | None, device: str, contest: Contest) -> Call:
    import jax
    import jax.numpy as jnp

    more: dict[str, Any] = {}
    if contest.score is not None:
        more["bias"] = jnp.asarray(bias_of(contest, "dot_product_attention"), contest.sizes.dtype)
    window = contest.window()
    if window is not None:
        more |= {"is_causal": True} | ({"local_window_size": (window - 1, 0)} if window else {})
    elif not contest.everything:
        more["mask"] = jnp.asarray(contest.dense())
    return Jitted(partial(jax.nn.dot_product_attention, implementation=implementation, **more), contest, device)


def splash_mask(contest: Contest) -> Any:
    """Splash attention's own class of mask where it has one, else a bool for every pair."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    s, window = contest.sizes, contest.window()
    shape = (s.q_len, s.kv_len)
    if window is not None:
        one: Any = masks.LocalMask(shape, (window - 1, 0), 0) if window else masks.CausalMask(shape)
        return masks.MultiHeadMask([one] * s.heads)
    dense = contest.dense()
    if dense.shape[0] > 1:
        raise NoWordsError("splash attention has one mask for all batch entries")
    return masks.MultiHeadMask([masks.NumpyMask(dense[0, min(h, dense.shape[1] - 1)]) for h in range(s.heads)])


def splash(device: str, interpret: bool, contest: Contest) -> Call:
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    s = contest.sizes
    if contest.score is not None:
        raise NoWordsError("splash attention has no word for a score mod")
    make = kernels.make_splash_mha if s.heads == s.kv_heads else kernels.make_splash_mqa
    if s.heads != s.kv_heads and s.kv_heads != 1:
        raise NoWordsError("splash attention takes one key head, or as many as query heads")
    kernel = make(mask=splash_mask(contest), head_shards=1, q_seq_shards=1, interpret=interpret)
    scale = s.head_dim**-0.5

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.swapaxes(1, 2) for x in (q * scale, k, v))  # it scales nothing
        if s.kv_heads == 1 != s.heads:
            k, v = k[:, 0], v[:, 0]
        return jax.vmap(kernel)(q, k, v).swapaxes(1, 2)

    return Jitted(attend, contest, device)
