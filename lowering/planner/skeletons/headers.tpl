$# Functions of a planner on arrays that frameworks call differently. $int and $float are dtypes.

$part jnp
import math

import jax.numpy as jnp
from jax import lax
from jax.numpy import clip, maximum, minimum, sort, where

Int, Float, Bool = $int, $float, bool


def arange(n, like):
    return jnp.arange(n, dtype=Int)


def scalar(x, kind, like):
    return jnp.asarray(x).astype(kind)


def concat(parts):
    return jnp.concatenate(parts, -1)


def cumsum(x):
    return jnp.cumsum(x, -1, dtype=Int)


def take(x, i):
    return jnp.take_along_axis(x, i, -1)


def below(x, values):
    """How many entries of each sorted row of x are below each of `values`."""
    if x.shape[-1] <= 64:
        return (x[..., None, :] < values[..., :, None]).sum(-1, dtype=Int)
    $# Of long rows by binary search: all with all would be most of the plan's time.
    half = 1 << (x.shape[-1].bit_length() - 1)

    def step(i, found):
        reach = found + (half >> i)
        further = (reach <= x.shape[-1]) & (take(x, minimum(reach, x.shape[-1]) - 1) < values)
        return where(further, reach, found)

    found = jnp.zeros((*x.shape[:-1], values.shape[-1]), Int)
    return lax.fori_loop(0, half.bit_length(), step, found)


def top(x):
    return x.max(-1, keepdims=True)


def repeated(step, widths, state):
    """The step for each width; compiled once, whatever their number."""
    if len(widths) == 1:
        return step(widths[0], *state)
    steps = jnp.asarray(widths, Int)
    body = lambda i, state: tuple(x.astype(Int) for x in step(steps[i], *state))
    return lax.fori_loop(0, len(widths), body, tuple(x.astype(Int) for x in state))


def typed(x):
    return x if x.dtype == bool else x.astype(Float if jnp.issubdtype(x.dtype, jnp.floating) else Int)


def front(table, axes):
    """The named axes last."""
    return jnp.moveaxis(table, axes, range(-len(axes), 0))


def known(rows, place):
    return jnp.asarray(rows, Int)[place]


def search(table, values, side):
    return jnp.searchsorted(typed(table), values, side).astype(Int)

$part torch
import math

import torch
from torch import where

Int, Float, Bool = torch.int64, torch.float64, torch.bool


def arange(n, like):
    return torch.arange(n, device=like.device)


def scalar(x, kind, like):
    return x.to(kind) if isinstance(x, torch.Tensor) else torch.full((), x, dtype=kind, device=like.device)


def clip(x, lo, hi):
    return torch.clip(x, lo, hi) if isinstance(x, torch.Tensor) else min(max(x, lo), hi)


def concat(parts):
    return torch.cat(parts, -1)


def sort(x):
    return torch.sort(x, -1).values


def cumsum(x):
    return torch.cumsum(x, -1, dtype=Int)


def take(x, i):
    return torch.take_along_dim(x, i, -1)


def below(x, values):
    """How many entries of each sorted row of x are below each of `values`."""
    return torch.searchsorted(x.contiguous(), values.expand(*x.shape[:-1], -1).contiguous())


def top(x):
    return x.amax(-1, keepdim=True)


def repeated(step, widths, state):
    for width in widths:
        state = step(width, *state)
    return state


def typed(x):
    return x if x.dtype == torch.bool else x.to(Float if x.is_floating_point() else Int)


def front(table, axes):
    """The named axes last."""
    return torch.moveaxis(table, axes, tuple(range(-len(axes), 0)))


def known(rows, place):
    return torch.tensor(rows, device=place.device)[place]


def search(table, values, side):
    values = scalar(values, Int, table).contiguous()
    return torch.searchsorted(typed(table).contiguous(), values, side=side)


def minimum(x, y):
    return where((x <= y) | (x != x), x, y)


def maximum(x, y):
    return where((x >= y) | (x != x), x, y)
