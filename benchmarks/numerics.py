"""How far results are from float64 where inputs strain floating point: `python benchmarks/numerics.py`, or a part of
it: a dtype, `not finite`, or a backend for an accelerator, whose kernels an interpreter runs.

An error is the largest difference from attention written out in float64 on the same inputs, over the largest number
that it could sum to: for outputs the largest value, for gradients their sums if nothing cancelled; of q, k and v the
worst counts. `dense` is attention written out in the dtype of the inputs, `sdpa` torch's scaled_dot_product_attention
with a dense mask, `flex` torch's flex_attention, compiled, which has no gradients on a CPU. `not finite` counts rows of
the output that are not those of float64 without the keys that a query does not see.

`bound` is what frisket's backends promise: the rounding of the dtype, once for outputs and twice for gradients, and
that of float32 in scores, which grows with them.

tests/support/triton repairs Triton's interpreter twice: bfloat16 is read as numbers, not as integers, and a product of
float32 does not depend on the shape of a tile. Gluon's kernels run in tests/support/gluon, forward only. Pallas on GPUs
needs JAX 0.11: the interpreter of earlier versions takes minutes a call.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import numpy as np
import torch
from store import Part, Row, run_parts
from torch.nn.functional import scaled_dot_product_attention

import frisket as fk
from frisket.runtime.backends.base import RECORDS, register

LENGTH, HEADS, DIM, MANY, FEWER = 256, 2, 64, 1 << 20, 1 << 14
PEERS = ("dense", "sdpa", "flex")
OURS = ("cpp", "aten", "xla")
INTERPRETED = {
    "triton": ("triton",), "gluon": ("gluon sm_90", "gluon sm_100"), "pallas-tpu": ("pallas-tpu",),
    "pallas-mosaic-gpu": ("pallas-mosaic-gpu",),
}  # fmt: skip
IN_JAX = ("xla", "pallas-tpu", "pallas-mosaic-gpu")
FORWARD = ("flex", "gluon sm_90", "gluon sm_100")  # those without gradients here
HALF = ("gluon", "pallas-mosaic-gpu")  # those that take 16 bits alone
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
Inputs = tuple[torch.Tensor, ...]
MASK = "causal & q - k < 200 & (q < 32 | q >= 40)"  # queries 32 to 39 see nothing


def visible() -> torch.Tensor:
    q, k = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    return (k <= q) & (q - k < 200) & ((q < 32) | (q >= 40))


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
    """Attention written out; hidden keys have no part in it, and a query that sees none has zeros."""
    if seen is None:
        seen = visible() if q.shape[-2] == LENGTH else torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    weights = torch.where(seen.any(-1, keepdim=True), scores, 0.0).softmax(-1) * seen
    return weights @ v


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = visible() if q.shape[-2] == LENGTH else None
    return scaled_dot_product_attention(q, k, v, mask)


@cache
def _flex(q_len: int, kv_len: int) -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (q - k < 200) & ((q < 32) | (q >= 40))

    tiles = create_block_mask(mask, None, None, q_len, kv_len, device="cpu") if q_len == LENGTH else None
    return torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=tiles), dynamic=False)


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _flex(q.shape[-2], k.shape[-2])(q, k, v)


@cache
def _ours(mask: str, name: str, score: str | None = None) -> fk.Attention:
    return fk.compile(mask, score, backend=name.partition(" ")[0])


def ours(name: str, score: str | None = None) -> Callable[..., torch.Tensor]:
    """By a backend of frisket; in JAX without gradients, which `_jax_gradients` takes."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        att = _ours(MASK if q.shape[-2] == LENGTH else "full", name, score)
        with running(name):
            return _to_torch(att(*map(_to_jax, (q, k, v)))) if name in IN_JAX else att(q, k, v)

    return run


@contextmanager
def running(name: str) -> Iterator[None]:
    """Kernels for an accelerator run on this CPU."""
    backend, _, arch = name.partition(" ")
    if backend == "gluon":
        from fuzz.kernels import stand_in

        with stand_in(backend, arch):
            yield
    elif backend == "triton":
        was = RECORDS[backend]
        _repair_triton()
        register(replace(was, interpreter=replace(was.interpreter, features={})))  # of bfloat16
        try:
            yield
        finally:
            register(was)
    else:
        yield


@cache
def _repair_triton() -> None:
    from support.triton import bf16 as triton_bf16

    triton_bf16.install()
    from support.triton import dot as triton_dot  # takes other products than those of float32 to the one it finds

    triton_dot.install()


def _to_jax(x: torch.Tensor) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(x.detach().float().numpy(), str(x.dtype).removeprefix("torch.")).swapaxes(1, 2)


def _to_torch(x: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(x.astype("float32"))).transpose(1, 2)


def _jax_gradients(name: str, given: Inputs, cotangent: torch.Tensor, score: str | None = None) -> Inputs:
    import jax

    att = _ours(MASK if given[0].shape[-2] == LENGTH else "full", name, score)
    _, back = jax.vjp(lambda q, k, v: att(q, k, v), *(_to_jax(x) for x in given))
    return tuple(_to_torch(x) for x in back(_to_jax(cotangent)))


RUNS: dict[str, Callable[..., torch.Tensor]] = {
    "dense": dense, "sdpa": sdpa, "flex": flex,
    **{name: ours(name) for name in (*OURS, *(n for names in INTERPRETED.values() for n in names))},
}  # fmt: skip


def gradients(
    name: str, given: Inputs, cotangent: torch.Tensor, score: str | None = None
) -> tuple[torch.Tensor, Inputs | None]:
    """The output, and gradients where there are any."""
    run = ours(name, score) if score else RUNS[name]
    leaves = tuple(x.clone().requires_grad_(name not in (*FORWARD, *IN_JAX)) for x in given)
    out = run(*leaves)
    if name in FORWARD:
        return out, None
    if name in IN_JAX:
        return out, _jax_gradients(name, given, cotangent, score)
    with running(name):
        return out.detach(), torch.autograd.grad(out, leaves, cotangent.to(out.dtype))


def drawn(length: int = LENGTH, queries: int = LENGTH) -> Inputs:
    g = torch.Generator().manual_seed(7)
    sizes = (queries, length, length)
    return tuple(torch.randn(1, HEADS, n, DIM, generator=g, dtype=torch.float64) for n in sizes)


def scores_of(size: float) -> Callable[[], Inputs]:
    def draw() -> Inputs:
        q, k, v = drawn()
        return q * size**0.5, k * size**0.5, v

    return draw


def tiny() -> Inputs:
    q, k, v = drawn()
    return q * 1e-20, k * 1e-21, v * 1e-39


def one_hot() -> Inputs:
    q, k, v = drawn()
    k[..., 0, :] = 0
    q[..., 0], k[..., 0, 0] = 8.0, 100.0  # the score of key 0 is 100
    return q, k, v


def equal() -> Inputs:
    q, k, v = drawn()
    return q * 0, k, v


def overflow() -> Inputs:
    q, k, v = drawn()
    return q * 300, k * 300, v


TINY = "numbers of 1e-39"  # below what float32 and bfloat16 hold in full: some processors and compilers take it as 0
LONG, SHORTER = f"{MANY:,} keys", f"{FEWER:,} keys"
DRAWS: dict[str, Callable[[], Inputs]] = {
    **{f"scores of {size:g}": scores_of(size) for size in (1e-3, 1.0, 1e2, 1e4, 1e30)},
    TINY: tiny, "one key has it all": one_hot, "equal scores": equal, "scores past 65504": overflow,
    SHORTER: lambda: drawn(FEWER, 1), LONG: lambda: drawn(MANY, 1),
}  # fmt: skip
TOO_LARGE = {("scores of 1e+30", "float16"), (TINY, "float16")}


def off(found: torch.Tensor, wanted: torch.Tensor, most: float) -> float:
    """The largest difference over `most`; inf for NaN."""
    error = (found.double() - wanted).abs().max().item()
    return math.inf if math.isnan(error) else error / most


class Measured:
    """A draw in a dtype, with its results in float64."""

    def __init__(self, title: str, dtype: str) -> None:
        self.given = tuple(x.to(getattr(torch, dtype)) for x in DRAWS[title]())
        exact = tuple(x.double().requires_grad_() for x in self.given)
        self.out = dense(*exact)
        g = torch.Generator().manual_seed(9)
        self.cotangent = torch.randn(self.out.shape, generator=g).to(self.given[0].dtype)
        self.grads = torch.autograd.grad(self.out, exact, self.cotangent.double())
        q, k, v = (x.detach() for x in exact)
        rows, keys = (DIM * x.abs().max().item() for x in (self.cotangent.double(), v))
        steep = rows * keys / DIM * DIM**-0.5  # the largest derivative by a score, times the scale of scores
        self.most = tuple(max(x, 2.0**-149) for x in (
            v.abs().max().item(), steep * k.abs().max().item(), steep * q.abs().max().item(),
            self.grads[2].abs().max().item(),
        ))  # fmt: skip
        self.bound = [n * EPSILON[dtype] + min(1.0, 8 * 2.0**-23 * (1 + self.largest(q, k))) for n in (1, 2)]

    def largest(self, q: torch.Tensor, k: torch.Tensor) -> float:
        """The largest score."""
        return (q @ k.mT).abs().max().item() / math.sqrt(DIM)

    def errors(self, name: str) -> tuple[float, float | None]:
        """Of the output, and of gradients where there are any."""
        out, found = gradients(name, self.given, self.cotangent)
        error = off(out, self.out.detach(), self.most[0])
        return error, None if found is None else max(map(off, found, self.grads, self.most[1:]))


def compared(title: str, dtype: str, names: Sequence[str]) -> Row:
    case = Measured(title, dtype)
    found = {name: case.errors(name) for name in names}
    figures, goals = {}, {}
    for i, what in enumerate(("output", "gradients")):
        figures[what] = {n: x for n, both in found.items() if (x := both[i]) is not None and x < math.inf}
        if not figures[what]:
            del figures[what]
        elif title != TINY:
            figures[what]["bound"] = case.bound[i]
            goals[what] = dict.fromkeys((n for n in names if n not in PEERS), case.bound[i])
    lost = [n for n in names if n not in figures["output"]]
    notes = {"notes": {"NaN or inf": ", ".join(lost)}} if lost else {}
    return {"figures": figures, "goals": {"at most": goals}, **notes}


def part(dtype: str) -> Part:
    def run(rounds: int) -> Iterator[tuple[str, Row]]:
        torch.set_num_threads(1)
        for title in DRAWS:
            if (title, dtype) not in TOO_LARGE:
                yield title, compared(title, dtype, (*PEERS, *OURS))

    return run


def interpreted(backend: str) -> Part:
    def run(rounds: int) -> Iterator[tuple[str, Row]]:
        torch.set_num_threads(1)
        for dtype in EPSILON:
            if dtype == "float32" and backend in HALF:
                continue
            for title in DRAWS:
                if (title, dtype) not in TOO_LARGE and title != LONG:  # minutes to hours
                    yield f"{dtype}, {title}", compared(title, dtype, INTERPRETED[backend])
        yield from not_finite(INTERPRETED[backend], "float16" if backend in HALF else "float32")

    return run


# -- NaN and inf ------------------------------------------------------------------------------------


def rows_off(found: torch.Tensor, given: Inputs) -> int:
    """Rows that are not those of float64 without the keys that a query does not see."""
    near = 1e-4 + 2 * EPSILON[str(given[0].dtype).removeprefix("torch.")]
    q, k, v = (x.double() for x in given)
    seen, wrong = visible(), 0
    for row in range(LENGTH):
        keys = seen[row]
        wanted = torch.zeros(1, HEADS, 1, DIM, dtype=torch.float64)
        if keys.any():
            scores = q[:, :, row : row + 1] @ k[:, :, keys].mT / math.sqrt(DIM)
            wanted = scores.softmax(-1) @ v[:, :, keys]
        same = torch.isclose(found[:, :, row : row + 1].double(), wanted, rtol=near, atol=near, equal_nan=True)
        wrong += not same.all()
    return wrong


def not_finite(names: Sequence[str], dtype: str) -> Iterator[tuple[str, Row]]:
    torch.set_num_threads(1)
    for what in ("k", "v"):
        for number in (math.nan, math.inf, -math.inf):
            q, k, v = (x.to(getattr(torch, dtype)) for x in drawn())
            (k if what == "k" else v)[..., 100, :] = number  # queries 100 to 299 see it
            figures = {name: rows_off(RUNS[name](q, k, v), (q, k, v)) for name in names}
            yield f"{what}[100] is {number}", {"figures": {f"wrong rows of {LENGTH}": figures}}


def settings(part: str) -> dict[str, Any]:
    shared = {"heads": HEADS, "length": LENGTH, "head_dim": DIM, "mask": MASK}
    if part in INTERPRETED:
        return shared
    return shared | ({"dtype": "float32"} if part == "not finite" else {"dtype": part, "epsilon": EPSILON[part]})


if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read by the import of triton
    os.environ.setdefault("NPROC", "16")  # threads of XLA: interpreters of Pallas kernels wait in them for one another
    parts: dict[str, Part] = {dtype: part(dtype) for dtype in EPSILON}
    parts["not finite"] = lambda rounds: not_finite((*PEERS, *OURS), "float32")
    parts |= {backend: interpreted(backend) for backend in INTERPRETED}
    if [int(n) for n in importlib.metadata.version("jax").split(".")[:2]] < [0, 11]:
        del parts["pallas-mosaic-gpu"]
    run_parts(__doc__, parts, "numerics", settings, rounds=1)
