"""Context parallelism: attention of JAX dealt to the devices of one process, beside float64.

The process has XLA_FLAGS=--xla_force_host_platform_device_count=4.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
from outside.programs import Case

import frisket as fk

from .kernels import Setting, as_jax, compared, setting
from .problem import Problem, problem_of

RANKS = 4


def square_of(case: Case) -> Problem:
    """The program over as many queries as keys."""
    n = max(case.q_len, case.kv_len)  # as long as tables are
    return problem_of(replace(case, q_len=n, kv_len=n))


def parallel(p: Problem) -> str:
    """Ring and all-gather; tiles are dealt by the program, or as if everything were visible."""
    s = setting(p, "float32")
    draw = random.Random(s.number)
    text, n = p.text, p.seen.shape[2]
    by, given = (text, p.bound) if draw.random() < 0.7 else ("full", {})
    tile = draw.choice([1, 2, 5, 8, 16])
    deal = fk.parallel.deal(by, n, RANKS, tile=tile, batch=p.seen.shape[0], heads=p.seen.shape[1], **given)
    for variant in ("ring", "all-gather"):
        compared(variant, s.input(0), dealt(s, deal, variant))
    return str(fk.mask(text, **p.bound))


def dealt(s: Setting, deal: Any, variant: str) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    assert len(jax.devices()) >= RANKS, "XLA_FLAGS: too few devices"
    mesh = jax.make_mesh((RANKS,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    att, x = s.compiled("xla"), s.input(0)
    tables = {n: jnp.asarray(t) for n, t in x.given.items()}

    def attended(q: Any, k: Any, v: Any, learned: Any) -> Any:
        out, lse = fk.parallel.attend(
            att, *(deal.permute(a, 1) for a in (q, k, v)), deal=deal, variant=variant, mesh=mesh, return_lse=True,
            **tables, **learned,
        )  # fmt: skip
        return deal.unpermute(out, 1), deal.unpermute(lse, 2)

    @jax.jit
    def both(arrays: Any, learned: Any, cotangent: Any, dlse: Any) -> Any:
        (out, lse), back = jax.vjp(attended, *arrays, learned)
        return out, lse, back((cotangent, jnp.where(lse == -jnp.inf, 0, dlse)))

    *arrays, cotangent, dlse = map(as_jax, x.arrays)
    out, lse, (dq, dk, dv, learned) = both(
        arrays, {n: jnp.asarray(t.numpy()) for n, t in x.learned.items()}, cotangent, dlse
    )
    found = {n: np.asarray(a).swapaxes(1, 2) for n, a in {"out": out, "dq": dq, "dk": dk, "dv": dv}.items()}
    return {**found, "lse": np.asarray(lse), **{f"d {n}": np.asarray(g) for n, g in learned.items()}}
