"""CallArgs: the arguments of a call, as users write them. Options: what `compile` fixes. Dropout and its seed,
attention sinks, launch options of kernels. Makers of attentions, by name.

`runtime/attention` registers two makers for modules below it. "program" takes a program and options. "texts" takes the
texts of a mask and a score mod, options and parameters, as `frisket.attention` does.

>>> Tuning(forward=LaunchOptions(block_q=64), precision="tf32").text
'forward.block_q=64,precision=tf32'
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.dsl.program import entries_of
from frisket.lowering.dtypes import accumulate
from frisket.lowering.kernels.triton.target import TritonTarget as Target
from frisket.lowering.plan import KV_INPUTS, Origin, Sizes
from frisket.runtime import calls
from frisket.runtime.machine.caller import as_int
from frisket.runtime.machine.parameters import call_value, check_plain, digest, is_tensor, stacked, traced
from frisket.runtime.machine.settings import choices

from .arrays import TokenPermutation, by_dynamo, framework_of, uploaded

# the arrays of which calls of a framework make numpy's
FOREIGN: dict[Any, tuple[str, str]] = {"torch": ("jax", "Array"), "jax": ("torch", "Tensor")}
CALLS = 256  # prepared calls and plans that an attention keeps, and prepared calls that a plan keeps


class CallArgs(NamedTuple):
    """The arguments of `Attention.__call__`, before anything is checked: every module that runs calls takes one.
    `params` hold the scales and pages of stored keys and values too."""

    q: Any
    k: Any
    v: Any
    plan: Any = None
    seed: Any = None
    sinks: Any = None
    top: bool = False  # whether the largest score of every row is asked for
    origin: Origin | None = None
    sizes: Sizes | None = None
    layout: str | None = None
    params: Mapping[str, Any] = MappingProxyType({})


def call_values(q: Any, sinks: Any, params: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The sinks and parameters of a call, lists as arrays, arrays of torch in a call of JAX as numpy's, and the other
    way round."""
    module, kind = FOREIGN.get(framework_of(q), ("", ""))
    # Dynamo takes lists as they are
    read = stacked if by_dynamo() else partial(call_value, foreign=getattr(sys.modules.get(module), kind, ()))
    # other checks refuse lists of pages and of scales
    return stacked("sinks", sinks), {n: (stacked if n in KV_INPUTS else read)(n, x) for n, x in params.items()}


Maker = TypeVar("Maker", bound=Callable[..., Any])
_makers: dict[str, Callable[..., Any]] = {}


def register(name: str, make: Maker) -> Maker:
    """Add a maker of attentions."""
    _makers[name] = make
    return make


def attention_by(name: str) -> Callable[..., Any]:
    """The registered maker of attentions. A program of torch.export, or a graph of torch.fx, may run before any other
    call of frisket."""
    if name not in _makers:
        for load in calls.makers:
            load()
    return _makers[name]


@dataclass(frozen=True)
class LaunchOptions:
    """One kernel's tile, in tokens, its warps and its pipeline's stages, and of the forward whether it reads its arrays
    through tensor descriptors, where they allow it. None: chosen by frisket."""

    block_q: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    descriptors: bool | None = None

    @property
    def choices(self) -> dict[str, Any]:
        """The fields that are not None, by name: False is a choice of `descriptors`."""
        # torch 2.11 cannot trace `vars` of a dataclass, and numpy's ints are no literals of a spec
        options = {n: getattr(self, n) for n in LAUNCH_FIELDS}
        return {n: x if isinstance(x, bool) else int(x) for n, x in options.items() if x is not None}

    def applied(self, target: Target) -> Target:
        """The target with what is given here."""
        return replace(target, fixed=target.fixed or bool(self.choices), **self.choices)


@dataclass(frozen=True)
class Tuning:
    """The caller's choices for the Triton kernels. Nothing of it changes what is computed, but `precision` and `tanh`.
    `precision` is that of products of float32, "ieee", "tf32" or "tf32x3". `tanh` of 16-bit inputs is "exact" or
    "approximate", which is the instruction of NVIDIA's GPUs. `splits` are those of a short query's keys. Where calls
    are `invariant` a row has one order of sums, whatever the call is."""

    forward: LaunchOptions = LaunchOptions()
    dq: LaunchOptions = LaunchOptions()
    dkv: LaunchOptions = LaunchOptions()
    precision: str | None = None
    splits: int | None = None
    tanh: str | None = None
    invariant: bool = False

    def applied(self, target: Target) -> Target:
        """The target of a call, with what is given here; the backward's kernels keep what frisket chose for them."""
        if self == AS_CHOSEN:
            return target
        target = target.everywhere(precision=self.precision or target.precision, tanh=self.tanh or target.tanh)
        # the backward's own targets are changed one by one below; `dv` goes with dkv
        alone = replace(target, dq=None, dkv=None, decode=None, dv=target.dv if self.dkv == LaunchOptions() else None)
        theirs = (x or alone for x in (target.dq, target.dkv))  # a backward without a separate tile has the forward's
        few = target.decode and self.forward.applied(target.decode)
        splits = target.splits if self.splits is None else self.splits
        dq, dkv = (one.applied(t) for one, t in zip((self.dq, self.dkv), theirs, strict=True))
        return replace(self.forward.applied(alone), splits=splits, dq=dq, dkv=dkv, decode=few)

    @property
    def text(self) -> str:
        """The choices as one word; "None" where nothing is chosen."""
        choices = [f"{k}.{n}={x}" for k in KERNELS for n, x in getattr(self, k).choices.items()]
        choices += [f"{n}={getattr(self, n)}" for n in ("precision", "splits", "tanh") if getattr(self, n) is not None]
        choices += ["invariant"] * self.invariant
        return ",".join(choices) or "None"

    @property
    def choices(self) -> dict[str, Any] | None:
        """The choices as dicts, numbers and words; None where nothing is chosen."""
        launches = {k: getattr(self, k).choices for k in KERNELS}
        splits = None if self.splits is None else int(self.splits)
        rest = {"precision": self.precision, "splits": splits, "tanh": self.tanh, "invariant": self.invariant or None}
        return {n: x for n, x in {**launches, **rest}.items() if x not in (None, {})} or None

    @classmethod
    def of(cls, fields: Mapping[str, Any] | None) -> Tuning:
        """The choices that the fields of a Tuning hold."""
        choices: dict[str, Any] = {n: LaunchOptions(**x) if n in KERNELS else x for n, x in (fields or {}).items()}
        return cls(**choices)


KERNELS = ("forward", "dq", "dkv")
LAUNCH_FIELDS = tuple(x.name for x in fields(LaunchOptions))
AS_CHOSEN, INVARIANT = Tuning(), Tuning(invariant=True)
ALIGNED = 512  # positions of a part in which kernels with `invariant` sum up keys, or a multiple of it


def tuning_of(invariant: Any, weighted: bool, reordered: bool = False) -> Tuning:
    """The choices of calls with `invariant`, or `ParameterError`: a row of weights is no softmax, and an order of
    tokens is one of sums."""
    if not flag(invariant, "invariant"):
        return AS_CHOSEN
    if weighted or reordered:
        raise ParameterError(
            "invariant=True is for the softmax: leave out `weight`, or invariant"
            if weighted
            else "invariant=True sums keys up by their positions, and reorder moves them: leave out one of the two"
        )
    return INVARIANT


def refuse_parts(options: Options, subject: str) -> None:
    """Raise `ParameterError` where a row is to have one order of sums: `subject` sums up parts of the keys apart."""
    if options.tuning.invariant:
        text = f"{subject} sums up parts of the keys by itself, and invariant=True gives a row one order of sums"
        raise ParameterError(f"{text}\n  leave out one of the two")


def check_aligned(origin: Origin) -> None:
    """Raise `ShapeError` where keys do not begin with a part of those that `invariant` calls sum up."""
    if np.any(np.asarray(origin[3]) % ALIGNED):
        raise ShapeError(
            f"keys begin at position {origin[3]}, and where invariant=True they are summed up in parts\n"
            f"  begin at a multiple of {ALIGNED}, or take keys on the CPU that are not in pages"
        )


SEEDS = 1 << 31


@dataclass(frozen=True)
class Options:
    """The options that `compile` fixes besides the mask and the score mod."""

    scale: float | None = None
    enable_gqa: bool = True
    backend: str | None = None
    tile: tuple[int, int] | None = None
    dropout: float = 0.0  # rounded to float32
    sinks: Any = field(default=None, compare=False)
    sinks_key: Any = field(init=False, default=None, repr=False)  # entries, or the identity of a tensor or tracer
    tuning: Tuning = AS_CHOSEN
    deterministic: bool = True  # equal calls have equal gradients, bit for bit
    # vendors' kernels that may run where they provably compute the call; True: those compared in full
    engines: bool | tuple[str, ...] = True
    # internal: the places of rows in arrays of another order
    rows: TokenPermutation | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (x := self.sinks) is not None:
            # a key to compare by: entries of tensors may change, and arrays of numpy have no truth value
            object.__setattr__(self, "sinks_key", id(x) if is_tensor(x) or traced(x) else digest(np.asarray(x)))

    def chosen(self) -> list[tuple[str, str]]:
        """Names and values of the options that are not the defaults, to read."""

        def shown(x: Any) -> str:
            if isinstance(x, Tuning):
                return x.text
            return f"{x:g}" if isinstance(x, float) else f"{len(x)} logits" if getattr(x, "ndim", 0) else str(x)

        both = ((f.name, shown(getattr(self, f.name)), shown(f.default)) for f in fields(self) if f.repr)
        return [(name, text) for name, text, usual in both if text != usual]


def flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ParameterError(f"{name} is {value!r}; it is True or False")
    return value


def engines_named(value: Any) -> bool | tuple[str, ...]:
    """The engines that calls are offered: True, False, or names, in a text or one by one."""
    if isinstance(value, bool):
        return value
    # as FRISKET_ENGINES has them
    parts = value.split(",") if isinstance(value, str) else value
    names = tuple(x.strip() if isinstance(x, str) else x for x in parts) if isinstance(parts, list | tuple) else ()
    offered = choices["engines"]()
    if not names or any(x not in offered for x in names):
        raise ParameterError(f"engines is {value!r}; write True, False, or names among {', '.join(offered)}")
    return names


def rate_of(dropout: Any) -> float:
    """The rate of dropout as kernels have it, rounded to float32."""
    number = isinstance(dropout, int | float | np.number) and not isinstance(dropout, bool)  # True is an int
    rate = float(np.float32(dropout)) if number else -1.0  # kernels compare draws with a float32
    if not 0 <= rate < 1:
        raise ParameterError(f"dropout is {dropout!r}; it is the share of weights to drop, at least 0 and below 1")
    return rate


def rate_and_seed(rate: Any, key: Any) -> tuple[float, Any]:
    """The rate of dropout of a layer of JAX, and a seed drawn from its key; None without dropout."""
    if not (rate := rate_of(rate)):
        return rate, None
    if key is None:
        raise ParameterError("dropout draws from a key: dropout_rng=jax.random.key(0), another one at every step")
    from jax.numpy import asarray

    return rate, from_key(asarray(key))


def seed_of(seed: Any, rate: float, framework: str) -> Any:
    """The seed of a call, 0 <= seed < 2**31: an int, or an array of JAX, also one drawn from a key of `jax.random`.
    None without dropout."""
    if not rate:
        return None
    if framework != "torch":
        seed = from_key(seed)
    if seed is None and framework == "torch":  # JAX has no default generator
        return drawn()
    if seed is None:
        raise ParameterError(
            "dropout needs a seed: seed=<int>"
            if framework == "numpy"
            else "dropout needs a seed under JAX, another one at every step: seed=<int>, or a key: "
            "seed=jax.random.key(<int>)"
        )
    if framework == "jax" and (traced(seed) or framework_of(seed) == "jax"):
        if seed.ndim or not str(seed.dtype).startswith(("int", "uint")):  # keys have other dtypes
            raise ParameterError(
                f"seed is {seed.dtype}{list(seed.shape)}; it is one integer, 0 <= seed < 2**31, or one key: "
                "seed=jax.random.key(<int>)"
            )
        return seed
    try:
        number = operator.index(seed)
    except (TypeError, RuntimeError):
        number = -1
    if not 0 <= number < SEEDS:
        raise ParameterError(f"seed is {seed!r}; it is an integer, 0 <= seed < 2**31")
    return number


def from_key(seed: Any) -> Any:
    """A seed drawn from a key of `jax.random`, of the new or the old form; other seeds as they are."""
    if framework_of(seed) != "jax":
        return seed
    from jax import random

    # its shape depends on the generator that JAX is set to
    old = str(seed.dtype) == "uint32" and seed.shape == random.PRNGKey(0).shape
    new = str(seed.dtype).startswith("key<") and not seed.ndim
    return random.randint(seed, (), 0, SEEDS - 1) if old or new else seed  # the bound is an int32


def drawn() -> int:
    """A seed from torch's default generator, which `torch.manual_seed` sets."""
    # on the host, else the call would wait for the GPU
    return int(sys.modules["torch"].randint(0, SEEDS, (), device="cpu"))


def sinks_of(sinks: Any, heads: int, framework: str, dtype: str, device: Any) -> Any:
    """The sinks as an array [heads] of the call's framework, in float32, or float64 with float64."""
    if sinks is None:
        return None
    check_plain("sinks", sinks)
    host = framework_of(sinks) not in ("torch", "jax") and not traced(sinks)
    sinks = np.asarray(sinks) if host else sinks
    shape, kind = tuple(sinks.shape), sinks.dtype.name if host else str(sinks.dtype).removeprefix("torch.")
    if not kind.startswith(("float", "bfloat", "int", "uint")) or shape not in ((), (heads,)):
        raise ShapeError(
            f"sinks are {kind}{list(shape)}; they are one number, or one for each of the {heads} query heads"
        )
    real = accumulate(dtype)
    sinks = sinks.astype(real, copy=False) if host else sinks  # of any order of bytes, and what frameworks do not read
    if framework == "numpy":
        return np.broadcast_to(entries_of(sinks), (heads,)).astype(real)
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.broadcast_to(jnp.asarray(entries_of(sinks), real), (heads,))
    import torch

    if not isinstance(sinks, torch.Tensor) and not shape:  # written on the device: nothing waits for a copy
        return torch.full((heads,), float(sinks), device=device, dtype=getattr(torch, real))
    have = sinks if isinstance(sinks, torch.Tensor) else uploaded(sinks, device)
    return have.to(device=device, dtype=getattr(torch, real)).expand(heads)


LONGEST_TILE, LARGEST_TILE = 1 << 16, 1 << 24


def check_tile(tile: Any) -> tuple[int, int] | None:
    """(queries, keys) of a tile, or `ShapeError`."""
    if tile is None:
        return None
    sides = as_int(tile)
    pair = (sides, sides) if isinstance(sides, int) else tuple(map(as_int, sides)) if np.iterable(sides) else ()
    if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n <= 0 for n in pair):
        raise ShapeError(f"tile is {tile}; tile sizes are two positive integers (queries, keys), in tokens")
    if max(pair) > LONGEST_TILE or pair[0] * pair[1] > LARGEST_TILE:
        raise ShapeError(
            f"tile is {tile}; a tile has at most {LONGEST_TILE:,} queries or keys and {LARGEST_TILE:,} pairs of them\n"
            "  its scores are held at once: tiles of 32 to 256 are usual"
        )
    return pair
