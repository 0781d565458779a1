"""Derivatives beyond first ones in reverse: tangents, second derivatives in reverse, Hessian-vector products and second
tangents. Those of torch and JAX stand beside those of dense attention in float64, which torch differentiates.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from support.torch.dense import dense

import frisket as fk

from . import scores
from .attention import arrays, close, number_of
from .problem import Problem

Tensor = Any
CLOSE = 1e-8  # a part of the largest entry of what is compared
IN_JAX = 64  # one case of so many is compiled by XLA too
F = torch.func


def derivatives(p: Problem) -> str:
    """A program with a score mod, and in one case of four attention sinks, in float64."""
    m, number = fk.mask(p.text, **p.bound), number_of(p.text)
    text = "score" if number % 5 == 0 else scores.make_score(number)
    *inputs, weight = arrays(tuple(p.seen.shape), number)
    draw = torch.Generator().manual_seed(number)

    def normal(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=draw, dtype=torch.float64)

    leaves = {**dict(zip("qkv", inputs, strict=True)), **scores.parameters(text, number)}
    if number % 4 == 1:
        leaves["sinks"] = normal(torch.empty(p.seen.shape[1]))
    along = {n: normal(x) for n, x in leaves.items()}
    seen, weights = torch.from_numpy(p.seen.copy()), (weight, normal(weight[..., 0]))

    def exact(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        learned = {n: t for n, t in x.items() if n not in ("q", "k", "v", "sinks")}
        out, lse, _ = dense(x["q"], x["k"], x["v"], seen, lambda s: scores.value(text, s, learned), x.get("sinks"))
        return out, lse

    wanted = of_dense(exact, leaves, along, weights)
    if all(x.isfinite().all() for x in wanted.values()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of their cost
            tile = (16, 32)[number % 2], (32, 16)[number % 3 % 2]
            order = fk.reorder(m, *p.lengths, block=tile, moving=0.0) if number % 7 == 0 else None
            options = {"score": None if text == "score" else text, "tile": tile, "reorder": order}
            compared("torch", in_torch(fk.compile(m, backend="library", **options), leaves, along, weights), wanted)
            if number % IN_JAX == 0:
                compared("jax", in_jax(fk.compile(m, backend="xla", **options), leaves, along, weights), wanted)
    return str(m)


def compared(framework: str, found: dict[str, Any], wanted: dict[str, Tensor]) -> None:
    for name, x in found.items():
        close(f"{framework} {name}", x, wanted[name.partition(" by ")[0]].detach(), CLOSE)


def loss(out: Tensor, lse: Tensor, weights: tuple[Any, Any]) -> Tensor:
    """A number whose gradients by out and lse depend on them."""
    return (out * out * weights[0]).sum() + (lse * lse * weights[1]).sum()


def finite(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """lse is 0 for a query that sees nothing."""
    return out, torch.where(lse.isinf(), 0.0, lse)


def of_dense(
    call: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]],
    leaves: dict[str, Tensor],
    along: dict[str, Tensor],
    weights: tuple[Tensor, Tensor],
) -> dict[str, Tensor]:
    """Tangents, the product of the Hessian of `loss` with the tangents of leaves, and both products."""
    out, lse = F.jvp(lambda x: finite(*call(x)), (leaves,), (along,))[1]
    x = {n: t.clone().requires_grad_() for n, t in leaves.items()}
    product = twice(lambda: loss(*finite(*call(x)), weights), x, along)
    curve = sum((product[n] * along[n]).sum() for n in along)
    return {"tangent of out": out, "tangent of lse": lse, **{f"d {n}": g for n, g in product.items()}, "curve": curve}


def twice(value: Callable[[], Tensor], x: dict[str, Tensor], along: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of the product of the gradient and `along`, in reverse both times."""
    options = {"allow_unused": True, "materialize_grads": True}
    firsts = torch.autograd.grad(value(), [*x.values()], create_graph=True, **options)
    total = sum((g * t).sum() for g, t in zip(firsts, along.values(), strict=True))
    if not total.requires_grad:
        return {n: torch.zeros_like(t) for n, t in x.items()}
    return dict(zip(x, torch.autograd.grad(total, [*x.values()], **options), strict=True))


def in_torch(
    att: Any, leaves: dict[str, Tensor], along: dict[str, Tensor], weights: tuple[Tensor, Tensor]
) -> dict[str, Any]:
    def call(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return finite(*att(**x, return_lse=True))

    def number(x: dict[str, Tensor]) -> Tensor:
        return loss(*call(x), weights)

    out, lse = F.jvp(call, (leaves,), (along,))[1]
    found = {"tangent of out": out, "tangent of lse": lse}
    x = {n: t.clone().requires_grad_() for n, t in leaves.items()}
    found |= {f"d {n} by double backward": g for n, g in twice(lambda: number(x), x, along).items()}
    found |= {f"d {n} by jvp of grad": g for n, g in F.jvp(F.grad(number), (leaves,), (along,))[1].items()}

    def slope(x: dict[str, Tensor]) -> Tensor:
        return F.jvp(number, (x,), (along,))[1]

    return found | {"curve by jvp of jvp": F.jvp(slope, (leaves,), (along,))[1]}


def in_jax(
    att: Any, leaves: dict[str, Tensor], along: dict[str, Tensor], weights: tuple[Tensor, Tensor]
) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    def turned(x: Any) -> Any:
        return x.swapaxes(1, 2) if x.ndim == 4 else x

    def call(x: Any) -> Any:
        out, lse = att(**{n: turned(t) for n, t in x.items()}, return_lse=True)
        return turned(out), jnp.where(jnp.isinf(lse), 0, lse)

    @jax.jit
    def all_of_them(x: Any, t: Any, weights: Any) -> Any:
        def number(x: Any) -> Any:
            return loss(*call(x), weights)

        def along(x: Any) -> Any:
            return sum((g * t[n]).sum() for n, g in jax.grad(number)(x).items())

        return jax.jvp(call, (x,), (t,))[1], jax.grad(along)(x), jax.jvp(jax.grad(number), (x,), (t,))[1]

    with jax.enable_x64(True):
        x, t = ({n: jnp.asarray(a.numpy()) for n, a in some.items()} for some in (leaves, along))
        (out, lse), reverse, forward = all_of_them(x, t, tuple(jnp.asarray(w.numpy()) for w in weights))
        found = {"tangent of out": out, "tangent of lse": lse}
        found |= {f"d {n} by grad of grad": g for n, g in reverse.items()}
        return found | {f"d {n} by jvp of grad": g for n, g in forward.items()}
