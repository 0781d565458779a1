"""Targets that compile a kernel for a program and a score mod, and call it with many inputs: lengths, batches, heads,
grouped key heads, strides, values and tables differ. Outputs, lse and gradients stand beside float64.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from support.torch.dense import dense

import frisket as fk
from frisket.runtime.attention.attention import Attention
from frisket.runtime.calls.arrays import TokenPermutation

from . import scores
from .attention import number_of
from .problem import Problem

Tensor = Any
OTHERS = {
    "invariant": 2,
    "kernels": 7,
    "rows": 2,
    "triton": 2,
    "gluon": 3,
    "flash": 3,
    "pallas": 1,
}  # problems of a program beside its own
SHAPES = [(8, 8), (16, 16), (64, 64), (32, 16), (5, 3)]  # of a key and of a value
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # docs/reliability.md: bounds


@dataclass(frozen=True)
class Input:
    """What a kernel is called with, what float64 gives, and by how much an answer may differ."""

    arrays: tuple[Tensor, ...]  # q, k, v and cotangents of the output and of lse
    learned: dict[str, Tensor]
    given: dict[str, Any]
    wanted: dict[str, Tensor]
    allowed: dict[str, float]


def drawn(
    p: Problem, text: str, dtype: Any, dims: tuple[int, int], number: int, crop: bool, sinks: bool = False
) -> Input:
    """An input of a problem, or of a part of it."""
    draw, numbers = random.Random(number), torch.Generator().manual_seed(number)
    batch, heads, *lengths = p.seen.shape
    q0, k0 = (draw.randrange(n) if crop else 0 for n in lengths)
    q_len, kv_len = (draw.randint(1, n - at) if crop else n for n, at in zip(lengths, (q0, k0), strict=True))
    kv_heads = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    sizes = [(heads, q_len, dims[0]), (kv_heads, kv_len, dims[0]), (kv_heads, kv_len, dims[1]), (heads, q_len, dims[1])]
    arrays = [torch.randn(batch, *size, generator=numbers).to(dtype) for size in sizes]
    arrays[0] *= draw.choice([0.1, 1.0, 1.0, 4.0])
    arrays.append(torch.randn(batch, heads, q_len, generator=numbers))
    learned = {n: x.float() for n, x in scores.parameters(text, number).items()}
    if sinks:
        learned["sinks"] = torch.randn(heads, generator=numbers)
    origin = 0, 0, q0, k0
    seen = torch.from_numpy(p.seen[:, :, q0 : q0 + q_len, k0 : k0 + kv_len].copy())
    exact = true(seen, arrays, text, learned, origin, lambda x: x)
    rough = [true(seen, arrays, text, learned, origin, x) for x in (lambda x: x.float().double(), lambda x: x.float())]
    small = ROUNDING[dtype]
    reach = reaches(seen, arrays, text, learned, origin) if small or learned else {}
    allowed = {
        n: 1e-5 * max(1.0, largest(x))
        + 8 * max(largest(r[n] - x) if n in r else 0.0 for r in rough)
        + unit(n, small) * reach.get(n, 0.0)
        for n, x in exact.items()
    }
    if small:  # a learned value is float32, and gathers the errors of all scores
        exact = {n: x for n, x in exact.items() if not n.startswith("d ")}
    where = {"origin": origin, "sizes": tuple(p.seen.shape)} if crop else {}
    return Input(tuple(arrays), learned, {**p.bound, **where}, exact, allowed)


def unit(name: str, small: float) -> float:
    """The rounding of a result's terms: a learned value is the float32 sum of those of its pairs, and they cancel."""
    return 2.0**-24 if name.startswith("d ") else small


def largest(x: Tensor) -> float:
    """The largest absolute value of those that are finite."""
    return float(torch.where(x.isfinite(), x, 0).abs().max()) if x.numel() else 0.0


def true(
    seen: Tensor, arrays: list[Tensor], text: str, learned: dict[str, Tensor], origin: tuple[int, ...], rounded: Any
) -> dict[str, Tensor]:
    """Dense attention and its gradients in float64, with scores `rounded` before and after the score mod, which is
    computed in their dtype: in float32, a minimum may take the other operand. Gradients are left out where one is not
    finite."""
    q, k, v, *cotangents = (x.double() for x in arrays)
    leaves = {n: x.double().requires_grad_() for n, x in [("q", q), ("k", k), ("v", v), *learned.items()]}
    exact = {n: leaves[n] for n in learned}

    def mod(x: Tensor) -> Tensor:
        x = rounded(x)
        return rounded(scores.value(text, x, {n: t.to(x.dtype) for n, t in exact.items()}, origin)).double()

    out, lse, _ = dense(*(leaves[n] for n in "qkv"), seen, mod, exact.get("sinks"))
    lse = lse + 0.0 * leaves["q"].sum()  # differentiable, also where the score mod is a number
    cotangents[1] = torch.where(lse == -torch.inf, 0.0, cotangents[1])
    found = torch.autograd.grad([out, lse], [*leaves.values()], cotangents, allow_unused=True, materialize_grads=True)
    names = ["dq", "dk", "dv", *(f"d {n}" for n in learned)]
    gradients = dict(zip(names, found, strict=True)) if all(x.isfinite().all() for x in found) else {}
    return {"out": out.detach(), "lse": lse.detach(), **gradients}


def reaches(
    seen: Tensor, arrays: list[Tensor], text: str, learned: dict[str, Tensor], origin: tuple[int, ...]
) -> dict[str, float]:
    """The largest numbers that the sums of results can reach, those of learned values included: a pair of a score mod
    reads one entry of a table, so the sum of its absolute terms is a gradient too."""
    q, k, v, do, dlse = (x.double() for x in arrays)
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    x = (q @ k.mT * scale).requires_grad_()
    y = scores.value(text, x, {n: t.double() for n, t in learned.items()}, origin)
    slope = torch.autograd.grad(y.sum(), x)[0] if y.requires_grad else torch.zeros_like(x)
    seen = seen & (y > -torch.inf)
    p = torch.where(seen, torch.softmax(torch.where(seen, y, -1e30), -1), 0.0).detach()
    delta = (do.abs() * (p @ v.abs())).sum(-1) + dlse.abs()
    dy = p * (do.abs() @ v.abs().mT + delta[..., None])
    ds = dy * slope.abs() * scale
    by_key = [g.unflatten(1, (-1, groups)).sum(2) for g in (ds.mT @ q.abs(), p.mT @ do.abs())]
    found = {"out": p @ v.abs(), "dq": ds @ k.abs(), "dk": by_key[0], "dv": by_key[1]}
    exact = {n: t.double() for n, t in learned.items()}
    for n in exact.keys() - {"sinks"}:

        def of_learned(c: Tensor, n: str = n) -> Tensor:
            return scores.value(text, x.detach(), {**exact, n: c}, origin)

        signs = torch.func.jvp(of_learned, (exact[n],), (torch.ones_like(exact[n]),))[1].sign()
        found[f"d {n}"] = torch.func.vjp(of_learned, exact[n])[1](dy * signs)[0]
    return {n: largest(x) for n, x in found.items()}


def compared(name: str, x: Input, found: dict[str, Any]) -> None:
    for n, wanted in x.wanted.items():
        if n not in found:
            continue
        ours, theirs = np.asarray(found[n], np.float64), wanted.numpy()
        assert ours.shape == theirs.shape, f"{name} {n}: shape {ours.shape}"
        finite = np.isfinite(theirs)
        assert (ours[~finite] == theirs[~finite]).all(), f"{name} {n}: an infinite entry"
        off = np.abs(ours[finite] - theirs[finite]).max(initial=0.0)
        assert off <= x.allowed[n], f"{name} {n}: off by {off:.3g}, more than {x.allowed[n]:.3g}"


# -- calls -----------------------------------------------------------------------------------------------------


def strided(x: Tensor, number: int) -> Tensor:
    """The same values under other strides, with NaN between and behind them."""
    order = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 2, 3)][number % 4]
    if not number % 4 or x.ndim < 4:
        return x.contiguous()
    axes = [x.shape[i] for i in order]
    whole = torch.full([axes[0] + 1, axes[1] + 1, axes[2] + 2, axes[3] + 8], torch.nan, dtype=x.dtype)
    return whole[: axes[0], : axes[1], 2:, : axes[3]].permute([order.index(i) for i in range(4)]).copy_(x)


def in_torch(att: Any, x: Input, number: int, gradients: str = "all") -> dict[str, Any]:
    """`gradients` are "all", those of "arrays", or ""."""
    learned = {n: t.clone().requires_grad_(gradients == "all") for n, t in x.learned.items()}
    q, k, v, cotangent, dlse = (strided(t, number + i) for i, t in enumerate(x.arrays))
    leaves = {f"d{n}": t.requires_grad_(bool(gradients)) for n, t in zip("qkv", (q, k, v), strict=True)}
    leaves |= {f"d {n}": t for n, t in learned.items() if t.requires_grad}
    out, lse = att(q, k, v, return_lse=True, **x.given, **learned)
    found = {"out": out.detach().float(), "lse": lse.detach()}
    if gradients and "dq" in x.wanted:
        ends = [cotangent, torch.where(lse == -torch.inf, 0.0, dlse)]
        slopes = torch.autograd.grad([out, lse], [*leaves.values()], ends, allow_unused=True, materialize_grads=True)
        found |= {n: g.float() for n, g in zip(leaves, slopes, strict=True)}
    return found


def in_jax(att: Any, static: dict[str, Any]) -> Callable[[Input], dict[str, Any]]:
    """A function of inputs of one shape, traced once: tables, numbers and learned values are traced too."""
    import jax
    import jax.numpy as jnp

    def attended(q: Any, k: Any, v: Any, learned: Any, given: Any) -> Any:
        return att(q, k, v, return_lse=True, **static, **given, **learned)

    @jax.jit
    def both(arrays: Any, learned: Any, given: Any, cotangent: Any, dlse: Any) -> Any:
        (out, lse), back = jax.vjp(lambda *a: attended(*a, given), *arrays, learned)
        return out, lse, back((cotangent, jnp.where(lse == -jnp.inf, 0, dlse)))

    def call(x: Input) -> dict[str, Any]:
        *arrays, cotangent, dlse = (as_jax(t) for t in x.arrays)
        given = {n: jnp.asarray(g) for n, g in x.given.items() if n not in static}
        out, lse, (dq, dk, dv, learned) = both(
            arrays, {n: jnp.asarray(t.numpy()) for n, t in x.learned.items()}, given, cotangent, dlse
        )
        found = {
            n: np.asarray(a, np.float32).swapaxes(1, 2) for n, a in zip(["out", "dq", "dk", "dv"], [out, dq, dk, dv])
        }
        return {**found, "lse": np.asarray(lse), **{f"d {n}": np.asarray(g) for n, g in learned.items()}}

    return call


def as_jax(x: Tensor) -> Any:
    import jax.numpy as jnp

    x = x.transpose(1, 2) if x.ndim == 4 else x  # of lse as it is
    return jnp.asarray(x.float().numpy(), str(x.dtype).removeprefix("torch."))


# -- targets ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What a kernel is compiled for."""

    problems: tuple[Problem, ...]
    text: str  # of the score mod
    dtype: Any
    dims: tuple[int, int]
    number: int
    sinks: bool
    arch: str

    def compiled(self, backend: str, **options: Any) -> Any:
        score = None if self.text == "score" else self.text
        return fk.compile(self.problems[0].text, score=score, backend=backend, **options)

    def input(self, i: int, problem: int | None = None, crop: bool | None = None) -> Input:
        """Problems as they are, and then parts of them."""
        n = len(self.problems)
        crop = i >= n if crop is None else crop
        p = self.problems[i % n if problem is None else problem]
        return drawn(p, self.text, self.dtype, self.dims, self.number + i, crop, self.sinks)


def setting(p: Problem, dtypes: str = "float32 float32 float32 bfloat16 float16", dims: Any = None) -> Setting:
    draw = random.Random(number := number_of(p.text))
    text = "score" if draw.random() < 0.3 else scores.make_score(number, smooth=True)
    dtype = getattr(torch, draw.choice(dtypes.split()))
    dims_of, sinks, arch = draw.choice(dims or SHAPES), draw.random() < 0.25, draw.choice(["sm_90", "sm_100"])
    return Setting((p, *p.others), text, dtype, dims_of, number, sinks, arch)


def kernels(p: Problem) -> str:
    """The kernels of a CPU: 64 inputs for torch's native one, fewer where a shape is traced or the text runs slowly."""
    s = setting(p)
    native, library = s.compiled("native"), s.compiled("library")
    for i in range(64):
        x = s.input(i)
        compared("native", x, in_torch(native, x, s.number + i))
        if i % 4 == 0:
            compared("library", x, in_torch(library, x, s.number + i))
    shapes("cpp", s, 8)
    try:
        shapes("xla", s, 2)
    except fk.LoweringError as refused:
        if "JAX has 64-bit integers switched off" not in str(refused):
            raise
    return str(fk.mask(p.text, **p.bound))


def shapes(name: str, s: Setting, times: int) -> None:
    """JAX with `times` inputs of two shapes, and a part of a problem."""
    att = s.compiled(name)
    for problem, crop in ((0, False), (1, False), (0, True)):
        if problem >= len(s.problems):
            continue
        call = None
        for i in range(1 if crop else times):
            x = s.input(97 * problem + i, problem, crop)
            static = {n: g for n, g in x.given.items() if n in ("origin", "sizes")}
            call = call or in_jax(att, static)
            compared(name, x, call(x))


def rows(p: Problem) -> str:
    """Native kernels of torch and JAX that read queries and keys in another order: `fk.reorder`'s where it has one, and
    a permutation without structure."""
    s = setting(p, "float32")
    for i, problem in enumerate(s.problems):
        inputs = [s.input(97 * i + j, i, False) for j in range(4)]
        for name, count in (("native", 4), ("cpp", 1 if i < 2 else 0)):
            for kind, att in orders(s, problem, name):
                given = {} if kind == "order" else problem.bound
                for x in [replace(x, given=given, arrays=tuple(t.detach() for t in x.arrays)) for x in inputs[:count]]:
                    found = in_jax(att, {})(x) if name == "cpp" else in_torch(att, x, s.number + i)
                    compared(f"{name} {kind}", x, found)
    return str(fk.mask(p.text, **p.bound))


def orders(s: Setting, p: Problem, backend: str) -> Iterator[tuple[str, Any]]:
    """Attentions of a program's problem whose plans have rows in another order."""
    plain, places = s.compiled(backend), np.random.default_rng(s.number)
    queries, keys = (places.permutation(n).astype(np.int32) for n in p.lengths)
    made = plain.at(q="pq[q]", k="pk[k]", pq=queries, pk=keys)
    yield "permutation", Attention(made.program, replace(made.options, rows=TokenPermutation(queries, keys)))
    m = fk.mask(p.text, **p.bound)
    order = fk.reorder(m, *p.lengths, block=p.block, moving=0.0)
    if order.rows is not None:
        score = None if s.text == "score" else s.text
        yield "order", fk.compile(m, score=score, backend=backend, reorder=order)


def triton(p: Problem) -> str:
    """Triton's interpreter, forward and backward: the process has TRITON_INTERPRET=1."""
    s = setting(p, "float32 float32 float16")  # the interpreter computes nonsense of bfloat16
    att = s.compiled("triton")
    for i in range(6):
        x = s.input(i)
        compared("triton", x, in_torch(att, x, s.number + i))
    return str(fk.mask(p.text, **p.bound))


def pallas(p: Problem) -> str:
    """Pallas's interpreter of kernels for TPUs, forward and backward."""
    s = setting(p)
    shapes("pallas-tpu", s, 2)
    return str(fk.mask(p.text, **p.bound))


@contextmanager
def stand_in(name: str, arch: str) -> Iterator[None]:
    """The backend runs here, on a stand-in of tests/support, with the kernels of an architecture."""
    from support.flash import engine
    from support.gluon import call as gluon_call

    from frisket.runtime.backends.base import RECORDS, register
    from frisket.runtime.backends.triton import tiles

    was = RECORDS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "architecture", lambda device=None: arch)
        if name == "gluon":
            gluon_call.install(patch)
            register(replace(was, reason=lambda framework=None: ""))
        else:
            engine.install(patch)
        try:
            yield
        finally:
            register(was)


def gluon(p: Problem) -> str:
    """The Gluon forward for Hopper or Blackwell, in the interpreter of tests/support/gluon."""
    s = setting(p, "bfloat16 float16", [(64, 64), (128, 128), (16, 16), (32, 16), (24, 40)])
    with stand_in("gluon", s.arch):
        att = s.compiled("gluon")
        for i in range(12):
            x = s.input(i)
            compared("gluon", x, in_torch(att, x, s.number + i, ""))
    return str(fk.mask(p.text, **p.bound))


def flash(p: Problem) -> str:
    """Printed CuTe functions, in the stand-in of FlashAttention 4 of tests/support/flash, forward and backward."""
    s = setting(p, "bfloat16 float16", [(64, 64)])
    with stand_in("flash", s.arch):
        att = s.compiled("flash", deterministic=False)
        for i in range(12):
            x = s.input(i)
            compared("flash", x, in_torch(att, x, s.number + i, "arrays"))
    return str(fk.mask(p.text, **p.bound))
