"""Blocks of keys chosen by scores: pooled vectors, their products, and the choice, on arrays of torch or JAX.

The blocks that a mask shows are ranges, of a plan of the mask in tiles of one block.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from fractions import Fraction
from functools import reduce, wraps
from operator import or_
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

from frisket.dsl.errors import ParameterError, ShapeError
from frisket.dsl.ir import uses
from frisket.grammar.memo import memo
from frisket.lowering.dtypes import FLOATS, accumulate
from frisket.lowering.plan import NOWHERE, Origin, Sizes
from frisket.lowering.xla.promotion import usual_promotion
from frisket.runtime.attention.entry import compile as compiled
from frisket.runtime.attention.entry import torch_graphs
from frisket.runtime.calls.arrays import LAYOUTS, NATURAL, check_layout, framework_of, scale_of, uploaded
from frisket.runtime.machine.caller import as_int, outside
from frisket.runtime.masks.mask import Mask
from frisket.runtime.masks.mask import mask as mask_of

Array = Any
Block: TypeAlias = "int | tuple[int, int]"
Pool: TypeAlias = "Literal['mean', 'max', 'min'] | Callable[[Array], Array]"
Keep: TypeAlias = "int | float | Callable[[Array], Array] | None"
P = ParamSpec("P")
R = TypeVar("R")


def promoted(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of arrays: those of JAX are promoted as by default, whatever the program has set."""

    @wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # Dynamo would have to trace the context manager
        with nullcontext() if framework_of(args[0] if args else None) == "torch" else usual_promotion():
            return fn(*args, **kwargs)

    return run


@promoted
def pooled(x: Array, block: int, how: Pool = "mean", *, axes: str | None = None) -> Array:
    """One vector for each block of tokens: [batch, heads, blocks, head_dim], in the axis order of `x`.

    >>> import torch
    >>> pooled(torch.arange(10.0).reshape(1, 1, 10, 1), block=4).flatten()  # the last block has two tokens
    tensor([1.5000, 5.5000, 8.5000])

    Args:
        x: Queries or keys.
        block: Tokens of a block. The last block may have fewer.
        how: "mean", "max", "min", or a function from [batch, heads, blocks, tokens, head_dim] to
            [batch, heads, blocks, dim]. It is called again for a last block with fewer tokens.
        axes: "bhsd" or "bshd"; without it, the axis order of the framework.

    Returns:
        An array like `x` with blocks in place of tokens. It has gradients.

    Raises:
        ParameterError: `how` or `block` is something else.
        ShapeError: `x` has not four axes, or the function gives another number of blocks.
    """
    _, (x,), axes = as_heads_first(axes, x=x)
    # the caller's axis order comes back: only the inside works on heads first
    out = _pooled(x, _block(block)[0], how)
    return out if axes == "bhsd" else out.swapaxes(1, 2)


@promoted
def scores(
    q: Array, k: Array, block: Block = 64, *, pool: Pool = "mean", scale: float | None = None, axes: str | None = None
) -> Array:
    """The scaled dot products of pooled queries and pooled keys: [batch, heads, query blocks, key blocks].

    >>> import torch
    >>> q, k = torch.randn(1, 4, 256, 32), torch.randn(1, 2, 256, 32)
    >>> scores(q, k, block=(1, 64)).shape  # a row for every query
    torch.Size([1, 4, 256, 4])

    Args:
        q, k: Queries and keys. `k` may have fewer heads, each for a group of query heads.
        block: Tokens of a block, or a pair: those of queries, those of keys. Blocks of one token are not pooled.
        pool: As `how` of `pooled`, for queries and keys.
        scale: The factor of the products; without it, 1 / sqrt(head_dim).
        axes: "bhsd" or "bshd"; without it, the axis order of the framework.

    Returns:
        Scores in float32, or in float64 for float64 inputs. They have gradients.

    Raises:
        ParameterError, ShapeError: An argument is something else, or the shapes do not fit.
    """
    xp, (q, k), _ = as_heads_first(axes, q=q, k=k)
    bq, bk = _block(block)
    return products_of(xp, _pooled(q, bq, pool), _pooled(k, bk, pool), scale)


@promoted
def choose(
    scores: Array,
    block: Block = 64,
    *,
    keep: Keep = None,
    mass: float | None = None,
    threshold: float | None = None,
    mask: str | Mask = "causal",
    always: str | Mask | None = None,
    share: Literal["group", "head"] = "group",
    kv_heads: int | None = None,
    q_len: int | None = None,
    kv_len: int | None = None,
    origin: Origin = NOWHERE,
    sizes: Sizes | None = None,
    **params: Any,
) -> Array:
    """The blocks of keys that each block of queries reads, by scores: Bool [batch, heads, query blocks, key blocks].

    >>> import torch
    >>> scores = torch.tensor([[[[9.0, 0, 0, 0], [0, 1, 9, 9], [0, 3, 1, 9], [4, 1, 3, 2]]]])
    >>> choose(scores, 16, keep=2)[0, 0].int()  # only blocks that the causal mask shows
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 1, 1, 0],
            [1, 0, 1, 0]], dtype=torch.int32)
    >>> choose(scores, 16, keep=2, always="window(1)")[0, 0, 3].int()  # the block of the query is one of the two
    tensor([1, 0, 0, 1], dtype=torch.int32)
    >>> choose(scores, 16, mass=0.9)[0, 0, 3].int()  # the fewest blocks with 90 % of the weight
    tensor([1, 0, 1, 1], dtype=torch.int32)

    The weights of a row are the softmax of its scores over the blocks that `mask` shows.

    Args:
        scores: [batch, heads, query blocks, key blocks], logarithms of weights, from any source such as a learned gate.
        block: Tokens of a block, or a pair: those of queries, those of keys.
        keep: How many blocks a row takes: an int; a share of the blocks that the row sees, such as 0.1, rounded up; or
            a function from the number of blocks that each row sees to a number, such as `lambda n: 8 + n // 10`.
        mass: The fewest blocks whose weights add up to so much, such as 0.95.
        threshold: All blocks whose weight is at least so much. Give one of `keep`, `mass` and `threshold`.
        mask: The mask of the attention, as text or `Mask`. A block without a visible pair is not taken.
        always: A mask whose blocks are taken first, such as "sinks(4) | window(256)". They count towards `keep` and
            `mass`, and are taken even where they are more.
        share: "group" averages the weights of the query heads that share a key head, which then take the same blocks.
            With "head", every query head takes blocks of its own.
        kv_heads: Heads of keys; without it, as many as `scores` has.
        q_len, kv_len: Tokens; without them, whole blocks.
        origin, sizes: The place in the whole problem, as of a call (prefill in chunks). Row 0 of the result is the
            first block of the call.
        **params: Values of the parameters of `mask` and `always`.

    Returns:
        A table for `topk_tiles(map, block)`. A score of -inf or NaN is not taken. Of equal
        scores any is, in JAX the first.

    Raises:
        ParameterError: `keep`, `mass` and `threshold` are not one, or an argument is something else.
        ShapeError: Lengths, heads and blocks do not fit the scores.
    """
    xp = functions_of("scores", scores)
    if len(scores.shape) != 4:
        raise ShapeError(f"scores is {list(scores.shape)}; it is [batch, heads, query blocks, key blocks]")
    bq, bk = _block(block)
    batch, heads, rows, columns = scores.shape
    # a last block with fewer tokens shows in no shape: without lengths every block is whole
    q_len, kv_len = rows * bq if q_len is None else as_int(q_len), columns * bk if kv_len is None else as_int(kv_len)
    if (rows, columns) != (-(-q_len // bq), -(-kv_len // bk)):
        text = f"scores has {rows} x {columns} blocks; {q_len} queries and {kv_len} keys have "
        raise ShapeError(f"{text}{-(-q_len // bq)} x {-(-kv_len // bk)} blocks of {bq} x {bk}")
    # without key heads given, each query head chooses alone
    groups = heads if kv_heads is None else as_int(kv_heads)
    if type(groups) is not int or groups < 1 or heads % groups:
        raise ShapeError(f"kv_heads is {kv_heads!r}; scores has {heads} heads, a multiple of those of keys")
    if share not in ("group", "head"):
        raise ParameterError(f"share is {share!r}; it is 'group' or 'head'")
    rule = _rule(keep, mass, threshold)
    place = q_len, kv_len, batch, heads, origin, sizes, (bq, bk)
    visible = _tiles(xp, scores, (mask, always), False, place, groups, params)
    forced = None if always is None else _tiles(xp, scores, (mask, always), True, place, groups, params)
    # [batch, key heads, query heads of each, query blocks, key blocks]
    logs = detached(scores).reshape(batch, groups, heads // groups, rows, columns)
    # a NaN would win or lose a top-k by chance; as -inf it is never chosen
    logs = xp.nan_to_num(logs, nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    logs = xp.where(visible, logs, -math.inf)
    together = share == "group" and heads > groups
    # a top-k of one head needs the order alone, and logarithms of weights keep it
    if together or rule[0] != "keep":
        logs = log_weights(xp, logs)
    if together:
        logs = _log_mean(xp, logs)
        # one choice for the group: what any of its heads sees or must see
        visible, forced = (x.any(2)[:, :, None] if x is not None and x.shape[2] > 1 else x for x in (visible, forced))
    chosen = chosen_of(xp, logs, visible, forced, rule)
    return xp.broadcast_to(chosen, (batch, groups, heads // groups, rows, columns)).reshape(batch, heads, rows, columns)


@promoted
def blocks(
    q: Array,
    k: Array,
    block: Block = 64,
    *,
    pool: Pool = "mean",
    scale: float | None = None,
    axes: str | None = None,
    **choice: Any,
) -> Array:
    """Choose the blocks of keys for each block of queries, by the scores of pooled queries and keys.

    >>> import frisket as fk, torch
    >>> q, k, v = torch.randn(1, 8, 1024, 64), *torch.randn(2, 1, 2, 1024, 64)
    >>> att = fk.compile("causal & topk_tiles(map, 64)")
    >>> map = blocks(q, k, block=64, mass=0.9, always="sinks(4) | window(128)")
    >>> att(q, k, v, map=map).shape
    torch.Size([1, 8, 1024, 64])
    >>> bool((map[:, :4] == map[:, :1]).all())  # the query heads of a key head take the same blocks
    True

    It is `choose(scores(q, k, block, pool=pool), block, ...)`. A query's choice depends on later queries of its block
    and on later keys of its last block. That is right for prefill and for attention in both directions. To train a
    causal model, choose for each query among blocks that it has passed, as `moba` does.

    Args:
        q, k, block, pool, scale, axes: As of `scores`.
        **choice: As of `choose`: one of `keep`, `mass` and `threshold`; `mask`, `always`, `share`, `origin`, `sizes`,
            and values of parameters.

    Returns:
        Bool [batch, heads, query blocks, key blocks], for `topk_tiles(map, block)` in the mask of the attention.

    Raises:
        ParameterError, ShapeError: As of `scores` and `choose`.
    """
    xp, (q, k), _ = as_heads_first(axes, q=q, k=k)
    bq, bk = _block(block)
    # a choice has no gradient: nothing of the products is kept for a backward
    products = products_of(xp, _pooled(detached(q), bq, pool), _pooled(detached(k), bk, pool), scale)
    return choose(products, block, kv_heads=k.shape[1], q_len=q.shape[2], kv_len=k.shape[2], **choice)


# -- checks ----------------------------------------------------------------------------------------------------------


def functions_of(name: str, x: Any) -> Any:
    """The module with the functions on arrays like `x`: torch, or jax.numpy."""
    framework = framework_of(x)
    if framework not in ("torch", "jax"):
        raise ShapeError(f"{name} is a {type(x).__name__}; give arrays of torch or JAX")
    return sys.modules["torch"] if framework == "torch" else sys.modules["jax"].numpy


def as_heads_first(axes: str | None, **named: Any) -> tuple[Any, tuple[Any, ...], str]:
    """(the module of their functions, arrays that fit together as [batch, heads, length, dim], the axes)."""
    first, *others = named.items()
    xp = functions_of(*first)
    # an order that is named is checked; the framework's needs no check
    if axes is not None:
        check_layout(axes)
    axes = axes or NATURAL[str(framework_of(first[1]))]
    for name, x in named.items():
        if functions_of(name, x) is not xp:
            raise ShapeError(f"{first[0]} and {name} are arrays of different frameworks; convert them to one")
        if len(x.shape) != 4 or 0 in x.shape:
            raise ShapeError(f"{name} is {list(x.shape)}; it is {LAYOUTS[axes]}, none of them 0")
        if (dtype := str(x.dtype).removeprefix("torch.")) not in FLOATS:
            raise ShapeError(f"{name} is an array of {dtype}; give one of {', '.join(FLOATS)}")
    # views: neither framework copies for a swap of axes
    arrays = tuple(x if axes == "bhsd" else x.swapaxes(1, 2) for x in named.values())
    batch, heads, _, dim = arrays[0].shape
    for (name, _), x in zip(others, arrays[1:]):
        if (x.shape[0], x.shape[3]) != (batch, dim) or not x.shape[1] or heads % x.shape[1]:
            shapes = ", ".join(f"{n} {list(a.shape)}" for n, a in named.items())
            text = f"{shapes} do not fit\n  each is {LAYOUTS[axes]}, with one batch and head_dim; "
            raise ShapeError(f"{text}the heads of {first[0]} are a multiple of those of {name}")
    return xp, arrays, axes


def check_tokens(name: str, n: Any) -> None:
    if type(n) is not int or n < 1:
        raise ParameterError(f"{name} is {n!r}; it is a number of tokens, 1 or more")


def _block(block: Any) -> tuple[int, int]:
    """The tokens of a block: (queries, keys)."""
    pair = tuple(map(as_int, block)) if isinstance(block, tuple | list) else (as_int(block),) * 2
    if len(pair) != 2 or any(type(n) is not int or n < 1 for n in pair):
        raise ParameterError(f"block is {block!r}; it is a number of tokens, or a pair: (queries, keys)")
    return pair[0], pair[1]


def _rule(keep: Any, mass: Any, threshold: Any) -> tuple[str, Any]:
    rules = [(n, x) for n, x in (("keep", keep), ("mass", mass), ("threshold", threshold)) if x is not None]
    if len(rules) != 1:
        have = " and ".join(n for n, _ in rules) or "none of them"
        raise ParameterError(f"give one of keep, mass and threshold; this call has {have}")
    name, x = rules[0]
    if name == "keep":
        x = as_int(x)
        # True is an int to Python, and so is excluded by its type
        if not callable(x) and not (type(x) is int and x >= 1) and not (type(x) is float and 0 < x <= 1):
            text = f"keep is {x!r}; it is a number of blocks, 1 or more, a share of them such as 0.1, "
            raise ParameterError(f"{text}or a function of how many a row sees")
    elif type(x) not in (int, float) or not 0 < x <= 1:
        raise ParameterError(f"{name} is {x!r}; it is above 0 and at most 1")
    return name, x


# -- arrays ----------------------------------------------------------------------------------------------------------


def detached(x: Any) -> Any:
    """`x` without gradients: a choice has none."""
    return x.detach() if framework_of(x) == "torch" else sys.modules["jax"].lax.stop_gradient(x)


def as_dtype(x: Any, dtype: Any) -> Any:
    return x.to(dtype) if framework_of(x) == "torch" else x.astype(dtype)


def arange(xp: Any, n: int, like: Any) -> Any:
    return xp.arange(n, device=like.device) if framework_of(like) == "torch" else xp.arange(n)


def _pooled(x: Any, block: int, how: Any) -> Any:
    """[batch, heads, blocks, dim] of [batch, heads, length, dim]."""
    if not callable(how) and how not in ("mean", "max", "min"):
        raise ParameterError(f"the pool is {how!r}; it is 'mean', 'max', 'min' or a function")
    # the mean, max and min of one token are the token; a function may change it
    if block == 1 and not callable(how):
        return x
    length = x.shape[2]
    whole = length // block * block
    # the last block is pooled alone: padding it would change a mean
    parts = [(x[:, :, :whole], block)] * (whole > 0) + [(x[:, :, whole:], length - whole)] * (whole < length)
    vectors = []
    for part, n in parts:
        tokens = part.reshape(*part.shape[:2], part.shape[2] // n, n, part.shape[3])
        one = how(tokens) if callable(how) else _reduced(tokens, how)
        if len(one.shape) != 4 or one.shape[:3] != tokens.shape[:3]:
            text = f"the pool gives {list(one.shape)} for {list(tokens.shape)}; from [batch, heads, blocks, tokens, "
            raise ShapeError(f"{text}head_dim] it gives [batch, heads, blocks, dim]")
        vectors.append(one)
    return functions_of("x", x).concatenate(vectors, 2)


def _reduced(x: Any, how: str) -> Any:
    if how == "mean":
        # 16 bits would round the sum of a block's tokens
        wide = getattr(functions_of("x", x), accumulate(str(x.dtype).removeprefix("torch.")))
        return x.mean(3, dtype=wide)
    return (x.amax if how == "max" else x.amin)(3) if framework_of(x) == "torch" else getattr(x, how)(3)


def products_of(xp: Any, q: Any, k: Any, scale: float | None) -> Any:
    """q . k * scale as [batch, heads, queries, keys], added up in float32 or float64."""
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale_of(scale, known=True)
    wide = getattr(xp, accumulate(str(q.dtype).removeprefix("torch.")))
    q, k = as_dtype(q, wide), as_dtype(k, wide)
    batch, heads, rows, dim = q.shape
    # query heads of a key head are rows of one product, so keys are not repeated
    grouped = (q * factor).reshape(batch, k.shape[1], heads // k.shape[1] * rows, dim)
    return xp.matmul(grouped, k.swapaxes(2, 3)).reshape(batch, heads, rows, k.shape[2])


def _log_mean(xp: Any, x: Any) -> Any:
    """The logarithm of the mean of exp(x) along axis 2, which stays."""
    top = xp.amax(x, 2)[:, :, None]
    # without the maximum exp would be 0 for small weights; a row of -inf gives NaN, left out below
    mean = xp.log(xp.exp(x - top).mean(2)[:, :, None]) + top
    return xp.where(top > -math.inf, mean, -math.inf)


def log_weights(xp: Any, x: Any) -> Any:
    """The logarithm of the softmax along the last axis; -inf in rows of -inf alone."""
    logs = xp.log_softmax(x, -1) if framework_of(x) == "torch" else sys.modules["jax"].nn.log_softmax(x, -1)
    return xp.where(x > -math.inf, logs, -math.inf)


def chosen_of(xp: Any, logs: Any, visible: Any, forced: Any, rule: tuple[str, Any]) -> Any:
    """The chosen entries of each row, as Bools: `forced` ones first, and no others of -inf."""
    name, number = rule
    if name == "threshold":
        chosen = logs >= math.log(number)
        return chosen if forced is None else chosen | forced
    # forced blocks come first, so they count among those to keep
    ranked = logs if forced is None else xp.where(forced, math.inf, logs)
    # a number that depends on the row has no static shape: all are sorted, and the first few taken
    n = min(number, logs.shape[-1]) if name == "keep" and type(number) is int else logs.shape[-1]
    torch = framework_of(logs) == "torch"
    top, index = xp.topk(ranked, n, -1) if torch else sys.modules["jax"].lax.top_k(ranked, n)
    # hidden blocks fill up a row that sees fewer than n
    take = top > -math.inf
    if n != number:
        take = take & (arange(xp, n, logs) < _count(xp, top, logs, visible, forced, rule))
    nothing = xp.zeros_like(ranked, dtype=bool)
    chosen = nothing.scatter(-1, index, take) if torch else xp.put_along_axis(nothing, index, take, -1, inplace=False)
    return chosen if forced is None else chosen | forced


def _count(xp: Any, order: Any, logs: Any, visible: Any, forced: Any, rule: tuple[str, Any]) -> Any:
    """How many entries of each row, in descending order, a share, a function or a mass takes: [..., 1]."""
    name, rule_value = rule
    seen = visible.sum(-1)[..., None]
    if name == "keep" and callable(rule_value):
        return xp.broadcast_to(rule_value(seen), seen.shape)
    if name == "keep":
        # in integers: 0.07 * 100 is more than 7 in Floats, and its ceiling would be 8
        share = Fraction(rule_value).limit_denominator(1000)
        return (seen * share.numerator + (share.denominator - 1)) // share.denominator
    before = 0.0
    if forced is not None:  # their weights, which the order does not have
        before = xp.where(forced & (logs > -math.inf), xp.exp(logs), 0.0).sum(-1)[..., None]
    first = order == math.inf
    # inf marks forced blocks, and exp of it is no weight
    weights = xp.where(first, 0.0, xp.exp(xp.where(first, 0.0, order)))
    reached = before + xp.cumsum(weights, -1) - weights  # by the entries before
    return ((first | (reached < rule_value)) & (order > -math.inf)).sum(-1)[..., None]


def _tiles(
    xp: Any, like: Any, masks: tuple[Any, ...], both: bool, place: tuple[Any, ...], groups: int, params: dict[str, Any]
) -> Any:
    """Whether blocks have a pair that the first of `masks` shows, or that both show: Bool [batch, key heads, query
    heads of each, query blocks, key blocks].

    The first three axes are 1 where all entries along them are alike. `place` are the lengths, batch, heads, origin,
    sizes and block of the call."""
    # JAX's values may be traced, and nothing of a trace is remembered
    if framework_of(like) != "torch":
        bounds = xp.asarray(_bounds(masks, both, place, params))
        return _within(bounds, xp.arange(-(-place[1] // place[-1][1])), groups)
    # bounds without values of a call are the same at every step
    if not params:
        # torch 2.11 takes texts alone as constants
        if xp.compiler.is_compiling() and all(x is None or isinstance(x, str) for x in masks):
            return _written_tiles(*_written(both, *masks), like, place, groups)
        return _remembered_tiles(masks, both, place, groups, str(like.device))
    bounds = _bounds(masks, both, place, params)
    if framework_of(bounds) == "numpy":
        bounds = uploaded(bounds, like.device)
    return _within(bounds, arange(xp, -(-place[1] // place[-1][1]), like), groups)


def _within(bounds: Any, at: Any, groups: int) -> Any:
    """Whether the blocks `at` are in one of the ranges [batch or 1, heads or 1, query blocks, R, 2]."""
    batch, heads, rows, ranges, _ = bounds.shape
    size = heads // groups if heads > 1 else 1
    bounds = bounds.reshape(batch, heads // size, size, rows, ranges, 2, 1)
    at = at.reshape(1, 1, 1, 1, -1)
    parts = [(bounds[..., i, 0, :] <= at) & (at < bounds[..., i, 1, :]) for i in range(ranges)]
    return reduce(or_, parts)


def _written_tiles(spec: str, names: frozenset[str], like: Any, place: tuple[Any, ...], groups: int) -> Any:
    """Tiles by an operator of a graph, which lays out the mask with this text."""
    *lengths, batch, heads, origin, sizes, block = place
    whole = batch if names & {"b", "B"} else 1, heads if names & {"h", "H"} else 1
    numbers = {f" {what}{i}": n for what, x in (("origin", origin), ("size", sizes)) for i, n in enumerate(x or ())}
    seen = torch_graphs().written_tiles(spec, like, (*lengths, *whole), block, numbers) > 0
    return seen.unflatten(1, (groups if whole[1] > 1 else 1, -1))


def _written(both: bool, *masks: Any) -> tuple[str, frozenset[str]]:
    """The text of a mask for the operator, and the names that it reads."""
    att = compiled(_whole(masks, both))
    return att.spec, frozenset(uses(att.mask.expr))


_written._dynamo_marked_constant = True  # type: ignore[attr-defined]


@outside
@memo(32)
def _remembered_tiles(masks: tuple[Any, ...], both: bool, place: tuple[Any, ...], groups: int, device: str) -> Any:
    """Tiles on a device are remembered, because a CUDA graph can capture no copy from the host."""
    torch = sys.modules["torch"]
    bounds = uploaded(_bounds(masks, both, place, {}), torch.device(device))
    return _within(bounds, torch.arange(-(-place[1] // place[-1][1]), device=device), groups)


def _whole(masks: tuple[Any, ...], both: bool, params: Iterable[str] = ()) -> Mask:
    parts = [mask_of(x) for x in masks if x is not None]
    if unknown := {*params} - {n for m in parts for n in m.unbound}:
        raise ParameterError(f"`{min(unknown)}` is no parameter of {' or '.join(repr(str(m)) for m in parts)}")
    return parts[0] & parts[1] if both else parts[0]


@outside
def _bounds(masks: tuple[Any, ...], both: bool, place: tuple[Any, ...], params: dict[str, Any]) -> Any:
    """[batch or 1, heads or 1, query blocks, R, 2]: at most R ranges of key blocks with a visible pair, half-open."""
    q_len, kv_len, batch, heads, origin, sizes, block = place
    whole = _whole(masks, both, params)
    params = {n: x for n, x in params.items() if n in whole.unbound}
    spans = compiled(whole).plan(q_len, kv_len, batch, heads, origin=origin, sizes=sizes, **params).rows(block)
    bounds, slices = spans.bounds[..., ::3], spans.slice_of
    # along an axis where all slices are alike one entry stands for all
    slices = slices[:, :1] if (slices == slices[:, :1]).all() else slices
    slices = slices[:1] if (slices == slices[:1]).all() else slices
    if slices.reshape(-1).tolist() == list(range(len(bounds))):  # without an index, which would be copied to the device
        return bounds.reshape(*slices.shape, *bounds.shape[1:])
    return bounds[slices]
