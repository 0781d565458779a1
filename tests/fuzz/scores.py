"""Random score mods: texts that Python reads too, with torch's float64 functions for names. That is their evaluator,
and autograd is their derivative. Nothing here is of frisket; the meanings are those of docs/language.md.
"""

from __future__ import annotations

import math
import random
import re
from typing import Any

import numpy as np
import torch

Tensor = Any
MOST = 7  # entries of `t`
SLOPES = 3


class Table:
    """A table that is read like one of the language: beyond its ends the nearest entry."""

    def __init__(self, entries: Tensor) -> None:
        self.entries = entries

    def __getitem__(self, index: Tensor) -> Tensor:
        return self.entries[index.clamp(0, len(self.entries) - 1).long()]


def of_tensors(fn: Any) -> Any:
    def call(*xs: Any) -> Tensor:
        return fn(*(x if torch.is_tensor(x) else torch.tensor(float(x), dtype=torch.float64) for x in xs))

    return call


FUNCTIONS = {
    **{n: getattr(torch, n) for n in "cos erf exp exp2 log log1p log2 relu rsqrt sigmoid sin sqrt tanh abs".split()},
    "min": torch.minimum, "max": torch.maximum, "sign": torch.sign, "floor": torch.floor, "ceil": torch.ceil,
    "where": lambda c, a, b: torch.where(c.bool(), a, b), "pow": torch.pow,
    "clamp": lambda x, low, high: torch.minimum(torch.maximum(x, low), high),
    "gelu": lambda x: x * (1 + torch.erf(x * 0.5**0.5)) / 2, "silu": lambda x: x * torch.sigmoid(x),
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
}  # fmt: skip
NAMES = {n: of_tensors(fn) for n, fn in FUNCTIONS.items()}


def value(text: str, score: Tensor, learned: dict[str, Tensor], origin: tuple[int, ...] = (0, 0, 0, 0)) -> Tensor:
    """The score mod of float64 scores [batch, heads, q_len, kv_len] from `origin` on, differentiable."""
    shape = score.shape
    at = {
        name: origin[i] + torch.arange(shape[i], dtype=torch.float64).reshape([-1 if i == j else 1 for j in range(4)])
        for i, name in enumerate("bhqk")
    }
    tables = {n: Table(x) if x.ndim else x for n, x in learned.items()}
    names = {**NAMES, **at, **tables, "score": score, "inf": torch.inf}
    found = eval(text, {"__builtins__": {"__import__": __import__}}, names)  # torch imports what it first uses
    return torch.as_tensor(found, dtype=torch.float64).expand(shape)


def parameters(text: str, seed: int) -> dict[str, Tensor]:
    """Values of the tables and numbers that a text reads, float64."""
    draw = torch.Generator().manual_seed(seed)
    all_of_them = {
        "slope": torch.randn(SLOPES, generator=draw, dtype=torch.float64),
        "t": torch.randn(MOST, generator=draw, dtype=torch.float64),
        "c": torch.rand((), generator=draw, dtype=torch.float64) + 0.5,
    }
    return {n: x for n, x in all_of_them.items() if re.search(rf"\b{n}\b", text)}


def of_arguments(fn: Any) -> Any:
    """A function of torch that takes tensors alone, also of numbers."""

    def call(*xs: Any) -> Any:
        return fn(*(torch.tensor(x) if isinstance(x, int | float) else x for x in xs))

    return call


TORCH = {
    n: of_arguments(fn)
    for n, fn in {
        **FUNCTIONS, "where": torch.where, "clamp": torch.clamp,
        **{n: getattr(torch.nn.functional, n) for n in ("gelu", "silu", "softplus")},
    }.items()
}  # fmt: skip
WRITTEN_OUT = {  # what numpy does not have
    "relu": lambda x: np.maximum(x, 0), "rsqrt": lambda x: 1 / np.sqrt(x), "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)), "softplus": lambda x: np.log1p(np.exp(x)),
}  # fmt: skip


def functions(text: str, learned: dict[str, Tensor]) -> dict[str, Any]:
    """The score mod as Python functions of the front ends, by name. numpy has no erf."""
    import jax
    import jax.numpy as jnp

    arrays = {n: x.numpy() for n, x in learned.items()}
    special = {n: getattr(jax.nn, n) for n in ("relu", "sigmoid", "silu", "softplus")}
    special |= {"erf": jax.scipy.special.erf, "rsqrt": jax.lax.rsqrt}
    special["gelu"] = lambda x: jax.nn.gelu(x, approximate=False)
    found = {
        "torch": {**TORCH, **learned},
        "jax": {**special, **of_module(jnp), **{n: jnp.asarray(x, jnp.float32) for n, x in arrays.items()}},
        "numpy": {**WRITTEN_OUT, **of_module(np), **arrays},
    }
    if re.search(r"\b(erf|gelu)\b", text):
        del found["numpy"]
    return {
        front: eval(f"lambda score, b, h, q, k: {text}", {**names, "inf": math.inf}) for front, names in found.items()
    }


def of_module(module: Any) -> dict[str, Any]:
    """Functions of numpy or jax.numpy by the names of the language."""
    same = "cos exp exp2 log log1p log2 sin sqrt tanh abs sign floor ceil where".split()
    other = {"min": "minimum", "max": "maximum", "pow": "power", "clamp": "clip"}
    return {n: getattr(module, n) for n in same} | {n: getattr(module, name) for n, name in other.items()}


class Maker:
    """`smooth` score mods do not jump where the score moves, so that float32 is near float64."""

    def __init__(self, seed: int, smooth: bool) -> None:
        self.draw, self.smooth = random.Random(seed), smooth

    def text(self) -> str:
        text = self.float(self.draw.choice([1, 2, 3, 4]))
        return f"where({self.bool()}, {text}, -inf)" if self.draw.random() < 0.15 else text

    def float(self, depth: int) -> str:
        draw = self.draw
        if depth <= 0:
            leaves = ["score"] * 6 + ["slope[h]", f"t[k % {MOST}]", f"t[clamp(q - k, 0, {MOST - 1})]", "c"]
            return draw.choice([*leaves, f"{draw.choice([0.25, 0.5, 1.5, 3.0])}", f"0.125 * {self.int(1)}"])
        x, y = self.float(depth - 1), self.float(depth - 1 if draw.random() < 0.5 else 0)
        some = draw.choice([0.25, 0.5, 2.0])
        forms = [f"({x} {draw.choice('+-')} {y})"] * 5
        forms += [f"tanh({x}) * {y}", f"{x} / (abs({y}) + 0.5)", f"({x} * {some})", f"(-{x})", f"tanh({x}) ** 2"]
        forms += [f"{name}({x})" for name in "sin cos erf gelu silu softplus relu abs sigmoid tanh".split()]
        forms += [f"{name}(tanh({x}))" for name in ("exp", "exp2")] + [f"log1p(abs({x}))"]
        forms += [f"{name}(abs({x}) + {some})" for name in "sqrt rsqrt log log2".split()]
        forms += [f"{name}({x}, {y})" for name in ("min", "max")] * 2 + [f"clamp({x}, -{some}, {some})"]
        forms += [f"where({self.bool()}, {x}, {y})"] * 3 + [f"pow(abs({x}) + 0.5, {some})"]
        if not self.smooth:
            forms += [f"where({x} > {some}, {y}, {x})", f"({y} + floor({x}))", f"({y} - ceil({x}))", f"sign({x}) * {y}"]
        return draw.choice(forms)

    def bool(self) -> str:
        one = f"({self.int(1)} {self.draw.choice(['<', '<=', '>', '>=', '==', '!='])} {self.int(1)})"
        return f"({one} {self.draw.choice('&|^')} {self.bool()})" if self.draw.random() < 0.3 else one

    def int(self, depth: int) -> str:
        draw = self.draw
        if depth <= 0 or draw.random() < 0.3:
            return draw.choice(["q", "k", "q", "k", "h", "b", str(draw.randint(0, 9))])
        x, y = self.int(depth - 1), self.int(depth - 1)
        by = draw.choice([2, 3, 5, 8])
        return draw.choice([f"({x} - {y})", f"abs({x} - {y})", f"({x} // {by})", f"({x} % {by})", f"min({x}, {y})"])


def make_score(seed: int, smooth: bool = False) -> str:
    return Maker(seed, smooth).text()
